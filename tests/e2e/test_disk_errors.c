/* The file system refuses something, and is not full: no block goes for that. */
#include "e2e/rig/fault_disk_rig.h"

#include <errno.h>
#include <signal.h>
#include <sys/resource.h>

#define TALKS 64u
#define LEN   20u /* three conversations are more than a slot file */

static uint8_t acknowledged[TALKS];
static uint32_t next_talk;

static kvc_status_t put(int durable)
{
	const uint32_t talk = next_talk++;
	kvc_key_t keys[LEN];
	kvc_status_t status;
	uint32_t n = 0;

	assert_true(talk < TALKS);
	user_keys(&user_, talk, LEN, keys);
	status = user_put(&user_, keys, 0, LEN, durable, &n);
	acknowledged[talk] = durable && status == KVC_OK && n == LEN;

	return status;
}

/* The fault has ended: durability comes back without help. */
static void durable_again(void)
{
	const uint64_t until = rig_now_ms() + RIG_WAIT_MS;

	assert_true(rig_metric_is(&rig_, "kvd_disk_state", 0));
	while (put(1) != KVC_OK) {
		assert_true(rig_now_ms() < until);
		next_talk--; /* the same again */
		usleep(20000);
	}
}

/* On disk, whole, in this daemon and in the next. */
static void check_acknowledged(void)
{
	kvc_key_t keys[LEN];
	uint32_t n;

	assert_int_equal(rig_metric(&rig_, "kvd_evicted_total{tier=disk}"), 0);
	user_leave(&user_);
	rig_crash(&rig_);
	rig_start(&rig_);
	user_attach(&user_, &rig_, "errors");
	for (uint32_t t = 0; t < next_talk; t++) {
		user_keys(&user_, t, LEN, keys);
		assert_true(!acknowledged[t] || (user_match_is(&user_, keys, LEN, LEN) &&
						 user_get(&user_, keys, LEN, &n) == KVC_OK && n == LEN));
	}
	assert_int_equal(user_.wrong, 0);
}

static void begin(fault_disk_t *disk)
{
	memset(acknowledged, 0, sizeof acknowledged);
	next_talk = 0;
	rig_init(&rig_, 1);
	rig_option(&rig_, "--nvme.file_size=1MiB");
	if (disk) {
		fault_disk_open(disk, &rig_);
	}
	rig_start(&rig_);
	user_attach(&user_, &rig_, "errors");
	assert_int_equal(put(1), KVC_OK);
}

static void end_rig(void)
{
	user_leave(&user_);
	rig_end(&rig_);
}

/* Put until a new slot file is needed and cannot be made; status, metrics and kvctl say so and why. */
static void put_until_refused(const char *why)
{
	char out[16384];
	uint32_t n = 0;

	while (put(1) == KVC_OK) {
		assert_true(++n < 5);
	}
	assert_int_equal(rig_metric(&rig_, "kvd_disk_state"), 2);
	assert_int_equal(rig_kvctl(&rig_, "status --json", out, sizeof out), 2);
	assert_non_null(strstr(out, "the disk tier is not_growing: "));
	assert_non_null(strstr(out, why));
	assert_non_null(strstr(out, "\"healthy\":false"));
}

KV_TEST(p2_a_slot_file_that_cannot_be_made_evicts_nothing, NULL, rig_tear_down)
{
	static const struct {
		enum fault_op op;
		int error;
	} faults[] = {{FAULT_CREATE, EIO},    {FAULT_CREATE, EMFILE}, {FAULT_CREATE, EACCES}, {FAULT_CREATE, EROFS},
		      {FAULT_CREATE, EDQUOT}, {FAULT_SIZE, EIO},      {FAULT_SIZE, EDQUOT}};
	fault_disk_t disk;

	begin(&disk);
	for (uint32_t i = 0; i < KV_COUNT_OF(faults); i++) {
		fault_disk_arm(&disk, faults[i].op, FAULT_SLOTS, faults[i].error, 0, UINT32_MAX);
		put_until_refused(strerror(faults[i].error));
		assert_int_equal(put(0), KVC_OK); /* memory goes on */
		fault_disk_arm(&disk, FAULT_OPS, 0, 0, 0, 0);
		durable_again();
	}
	check_acknowledged();
	end_rig();
	fault_disk_close(&disk);
}

/* As many descriptors as the daemon has, and not one more: a slot file is made with the one that is kept for it, and
 * the next has to wait. */
KV_TEST(p2_a_daemon_without_descriptors_evicts_nothing, NULL, rig_tear_down)
{
	struct rlimit before, none;
	uint64_t files;
	char path[96];
	int fd = 0;

	begin(NULL);
	assert_int_equal(prlimit(rig_.pid, RLIMIT_NOFILE, NULL, &before), 0);
	do {
		snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)rig_.pid, fd++);
	} while (access(path, F_OK) == 0 || errno != ENOENT);
	none = before;
	none.rlim_cur = (rlim_t)fd - 1; /* the first that is free */
	files = next_talk;
	assert_int_equal(prlimit(rig_.pid, RLIMIT_NOFILE, &none, NULL), 0);
	while (put(1) == KVC_OK) {
		assert_true(next_talk - files < 8);
	}
	assert_in_range(next_talk - 1 - files, 3, 5); /* more than the rest of one file, less than two */
	assert_true(rig_metric_is(&rig_, "kvd_disk_state", 2));
	assert_int_equal(prlimit(rig_.pid, RLIMIT_NOFILE, &before, NULL), 0);
	durable_again();
	check_acknowledged();
	end_rig();
}

static void put_in_the_background(void *arg, int ready)
{
	user_t other;
	kvc_key_t keys[LEN];

	(void)arg;
	user_attach(&other, &rig_, "errors");
	user_keys(&other, 1000, LEN, keys);
	child_say(ready);
	(void)user_put(&other, keys, 0, LEN, 1, NULL);
	pause();
}

/* The device does not come back from a write, or a sync: SIGTERM is not held up by it, and takes nothing that has been
 * acknowledged. */
KV_TEST(p2_p5_a_device_that_stalls_does_not_hold_up_the_end, NULL, rig_tear_down)
{
	static const enum fault_op stalls[] = {FAULT_WRITE, FAULT_SYNC};

	for (uint32_t i = 0; i < KV_COUNT_OF(stalls); i++) {
		fault_disk_t disk;
		uint64_t since;
		pid_t child;

		begin(&disk);
		atomic_store(&disk.control->stalls, 1);
		fault_disk_arm(&disk, stalls[i], FAULT_ANYWHERE, EIO, 0, UINT32_MAX);
		child = child_start(put_in_the_background, NULL);
		KV_AWAIT(atomic_load(&disk.control->injected) != 0);
		user_leave(&user_);
		since = rig_now_ms();
		rig_stop(&rig_);
		printf("# it ended after %u ms\n", (unsigned)(rig_now_ms() - since));
		assert_in_range(rig_now_ms() - since, 0, 8000);
		child_kill(child);
		fault_disk_arm(&disk, FAULT_OPS, 0, 0, 0, 0);
		atomic_store(&disk.control->stalls, 0);
		rig_start(&rig_);
		user_attach(&user_, &rig_, "errors");
		check_acknowledged();
		end_rig();
		fault_disk_close(&disk);
	}
}
