/* The program that gets memory of GPUs dies, hangs, lies, gives less or is not there: the GPU tier is smaller, says
 * why, and is whole again when the fault has ended. The devices are fake. */
#include "e2e/rig/rig.h"

#include "gpu/wire.h"

#include <errno.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#define SLABS 4u
#define LEN   16u

static char bin[96], fault[96];

static void copy_file(const char *from, const char *to)
{
	char command[512];

	snprintf(command, sizeof command, "cp '%s' '%s'", from, to);
	assert_int_equal(system(command), 0);
}

static void put_program(void)
{
	char path[128];

	snprintf(path, sizeof path, "%s/kvd-gpu", bin);
	assert_int_equal(symlink(GPU_PROGRAM, path), 0);
}

/* What the program does wrong from now on; "": nothing. */
static void set_fault(const char *how)
{
	FILE *file;

	if (!how[0]) {
		assert_true(unlink(fault) == 0 || errno == ENOENT);
		return;
	}
	file = fopen(fault, "we");
	assert_non_null(file);
	fprintf(file, "%s\n", how);
	assert_int_equal(fclose(file), 0);
}

/* A daemon in a folder of its own, beside another program. */
static void stage(const char *how, uint32_t slabs, const char *devices)
{
	static const char *const wrap[] = {"sh", "-c", "ulimit -n $GPU_FDS; exec \"$GPU_DAEMON\" \"$@\""};
	char path[128];

	rig_init(&rig_, 0);
	snprintf(bin, sizeof bin, "%s/bin", rig_.dir);
	snprintf(fault, sizeof fault, "%s/fault", rig_.dir);
	assert_int_equal(mkdir(bin, 0700), 0);
	snprintf(path, sizeof path, "%s/kvd", bin);
	copy_file(E2E_KVD, path);
	setenv("GPU_DAEMON", path, 1);
	setenv("GPU_FAULT", fault, 1);
	setenv("GPU_REAL", GPU_REAL_PROGRAM, 1);
	setenv("GPU_FDS", "1024", 1);
	for (size_t i = 0; i < KV_COUNT_OF(wrap); i++) {
		rig_.wrap[i] = wrap[i];
	}
	rig_option(&rig_, "--gpu.size=%uMiB", 2 * slabs);
	rig_option(&rig_, "--gpu.slab_size=2MiB");
	rig_option(&rig_, "--gpu.devices=%s", devices);
	set_fault(how);
}

static void start_rig(const char *how)
{
	stage(how, SLABS, "fake-0");
	put_program();
	rig_start(&rig_);
}

/* An engine without a GPU tier sees nothing of it. */
static void host_memory_works(void)
{
	kvc_key_t keys[LEN];
	user_t user;
	uint32_t n = 0;

	user_attach(&user, &rig_, "host");
	user_keys(&user, 1, LEN, keys);
	assert_int_equal(user_put(&user, keys, 0, LEN, 0, &n), KVC_OK);
	user_expect(&user, keys, LEN);
	user_leave(&user);
}

static kvc_status_t try_device(user_t *user, const char *device)
{
	kvc_identity_t identity = user_identity("gpu");

	identity.device = device;

	return user_try(user, rig_.sock, &identity);
}

static void gpu_memory_works(const char *device)
{
	kvc_key_t keys[LEN];
	user_t user;
	uint32_t n = 0;

	assert_int_equal(try_device(&user, device), KVC_OK);
	user_keys(&user, 2, LEN, keys);
	assert_int_equal(user_put(&user, keys, 0, LEN, 0, &n), KVC_OK);
	user_expect(&user, keys, LEN);
	assert_int_equal(user.wrong, 0);
	user_leave(&user);
}

static void becomes_whole(void)
{
	set_fault("");
	assert_true(rig_kvctl_has(&rig_, "status", "fake-0  ok  slabs"));
	gpu_memory_works("fake-0");
	host_memory_works();
	assert_true(rig_metric_is(&rig_, "kvd_gpu_devices", 1));
}

/* ---- it works -------------------------------------------------------------------------------- */

RIG_TEST(p5_each_device_has_a_pool_of_its_size, stage("", SLABS, "fake-0,fake-5"))
{
	put_program();
	rig_start(&rig_);
	assert_true(rig_metric_is(&rig_, "kvd_gpu_stock_slabs", 2 * SLABS));
	assert_int_equal(rig_metric(&rig_, "kvd_gpu_devices"), 2);
	assert_int_equal(rig_metric(&rig_, "kvd_gpu_starts_total"), 2);
	assert_int_equal(rig_metric(&rig_, "kvd_gpu_failures_total"), 0);
	gpu_memory_works("fake-0");
	gpu_memory_works("fake-5");
	assert_true(rig_metric_is(&rig_, "kvd_gpu_stock_slabs", 2 * SLABS - 2));
	assert_true(rig_kvctl_has(&rig_, "status", "fake-5  ok  slabs 4 of 4"));
	assert_true(rig_kvctl_has(&rig_, "status --json", "\"device\":\"fake-5\""));
	assert_int_equal(rig_child(&rig_, "kvd-gpu"), 0); /* it has ended */
}

RIG_TEST(p5_slabs_without_numbers_are_made_larger, stage("", 300, "fake-0"))
{
	put_program();
	rig_start(&rig_);
	assert_true(rig_metric_is(&rig_, "kvd_gpu_stock_slabs", 100)); /* of 6 MiB */
	assert_true(rig_log_has(&rig_, "larger slabs are used"));
	gpu_memory_works("fake-0");
}

RIG_TEST(p4_a_slab_that_went_back_is_asked_for_again, stage("", SLABS, "fake-0"))
{
	static kvc_key_t keys[2][RIG_BLOCKS];
	user_t user[2];
	uint32_t n = 0;

	rig_option(&rig_, "--namespaces=default,other");
	put_program();
	rig_start(&rig_);
	assert_true(rig_kvctl_has(&rig_, "status", "fake-0  ok  slabs"));
	assert_int_equal(try_device(&user[0], "fake-0"), KVC_OK);
	for (uint64_t c = 0; c < 4; c++) { /* one namespace borrows all */
		user_keys(&user[0], c, RIG_BLOCKS, keys[0]);
		assert_int_equal(user_put(&user[0], keys[0], 0, RIG_BLOCKS, 0, &n), KVC_OK);
	}
	assert_true(rig_metric_is(&rig_, "kvd_gpu_stock_slabs", 0));
	snprintf(rig_.sock, sizeof rig_.sock, "%s/other.sock", rig_.run_dir);
	assert_int_equal(try_device(&user[1], "fake-0"), KVC_OK);
	user_keys(&user[1], 9, LEN, keys[1]);
	n = 0;
	for (uint32_t tries = 0; n < LEN && tries < 1000; tries++) {
		(void)user_put(&user[1], keys[1], 0, LEN, 0, &n);
		(void)kvc_poll(user[0].kvc, 0); /* it unmaps what was retired */
		usleep(5000);
	}
	assert_true(user_match_is(&user[1], keys[1], LEN, LEN));
	assert_true(rig_metric_reaches(&rig_, "kvd_gpu_starts_total", 2));
	assert_true(rig_kvctl_has(&rig_, "status", "fake-0  ok  slabs"));
	assert_int_equal(user[0].wrong + user[1].wrong, 0);
	user_leave(&user[0]);
	user_leave(&user[1]);
}

/* ---- it does not ----------------------------------------------------------------------------- */

RIG_TEST(p6_a_gpu_program_killed_amid_its_work_is_no_loss, start_rig("hang"))
{
	const uint64_t until = rig_now_ms() + RIG_WAIT_MS;
	pid_t pid;

	assert_true(rig_metric_is(&rig_, "kvd_gpu_stock_slabs", 1));
	assert_true(rig_kvctl_has(&rig_, "status", "fake-0  filling  slabs 1 of 4"));
	gpu_memory_works("fake-0"); /* with what it gave */
	while ((pid = rig_child(&rig_, "kvd-gpu")) == 0) {
		assert_true(rig_now_ms() < until);
	}
	set_fault("");
	assert_int_equal(kill(pid, SIGKILL), 0);
	assert_true(rig_metric_is(&rig_, "kvd_gpu_failures_total", 1));
	becomes_whole();
}

RIG_TEST(p5_a_gpu_program_that_hangs_is_killed, start_rig("hang"))
{
	assert_true(rig_metric_is(&rig_, "kvd_gpu_stock_slabs", 1));
	host_memory_works(); /* nobody waits for it */
	assert_true(rig_metric_reaches(&rig_, "kvd_gpu_failures_total", 1));
	assert_true(rig_log_has(&rig_, "was silent and is killed"));
	becomes_whole();
}

RIG_TEST(p6_without_its_program_the_gpu_tier_is_off, stage("", SLABS, "fake-0"))
{
	user_t user;

	rig_start(&rig_);
	assert_true(rig_kvctl_has(&rig_, "status", "cannot open the program"));
	assert_true(rig_kvctl_has(&rig_, "status", "fake-0  off  slabs 0 of 4"));
	assert_int_equal(try_device(&user, "fake-0"), KVC_ERR_TIER_OFF);
	user_leave(&user);
	host_memory_works();
	put_program();
	becomes_whole();
}

/* A daemon for each fault, all at the same time, since most of it is the wait for the next try. */
static void survive_each(const char *const *hows, uint32_t n, void (*check)(uint32_t i))
{
	static rig_t rigs[16];

	assert_true(n <= KV_COUNT_OF(rigs));
	for (uint32_t i = 0; i < n; i++) {
		start_rig(hows[i]);
		rigs[i] = rig_;
	}
	for (uint32_t i = 0; i < 2 * n; i++) {
		rig_ = rigs[i % n];
		snprintf(fault, sizeof fault, "%s/fault", rig_.dir);
		if (i < n) {
			check(i);
			assert_true(rig_metric_reaches(&rig_, "kvd_gpu_failures_total", 1));
			set_fault("");
		} else {
			becomes_whole();
			rig_end(&rig_);
		}
	}
}

static void check_smaller(uint32_t i)
{
	static const char *const whys[] = {"the device has no more memory", "gave less than it was asked for",
					   "has not said why"};

	assert_true(rig_kvctl_has(&rig_, "status", whys[i]));
	gpu_memory_works("fake-0");
	assert_int_equal(rig_metric(&rig_, "kvd_gpu_refused_messages_total"), 0);
}

KV_TEST(p6_a_device_with_less_memory_has_a_smaller_pool, NULL, rig_tear_down)
{
	survive_each((const char *const[]){"less", "lie", "silent"}, 3, check_smaller);
}

RIG_TEST(p6_without_a_driver_all_devices_are_none, stage("", SLABS, "all"))
{
	setenv("CUDA_VISIBLE_DEVICES", "", 1); /* a machine with GPUs shows none then */
	put_program();
	rig_start(&rig_);
	unsetenv("CUDA_VISIBLE_DEVICES");
	assert_true(rig_metric_reaches(&rig_, "kvd_gpu_failures_total", 1));
	assert_true(rig_kvctl_has(&rig_, "status", "the GPU tier is off"));
	host_memory_works();
}

RIG_TEST(p6_slabs_leave_descriptors_to_sessions, stage("", 100, "fake-0"))
{
	setenv("GPU_FDS", "128", 1);
	put_program();
	rig_start(&rig_);
	assert_true(rig_kvctl_has(&rig_, "status", "no descriptors are left for more slabs"));
	host_memory_works();
	gpu_memory_works("fake-0");
}

static void check_refused(uint32_t i)
{
	(void)i;
	assert_true(rig_metric_reaches(&rig_, "kvd_gpu_refused_messages_total", 1));
}

KV_TEST(p10_what_the_gpu_program_may_not_say_is_counted, NULL, rig_tear_down)
{
	static const char *const wrong[] = {"short", "long",  "version",  "verb", "none",   "two",
					    "bytes", "small", "unsealed", "more", "device", "text"};

	survive_each(wrong, KV_COUNT_OF(wrong), check_refused);
}
