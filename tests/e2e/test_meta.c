/* The metadata library fails, dies, hangs, or is gone: the daemon goes on, and what it acknowledged as durable is
 * there. */
#include "e2e/rig/fault_disk_rig.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define TALKS 160u
#define LEN   4u
#define FIRST 16u /* conversations that are there before the fault */

static uint8_t acknowledged[TALKS];
static uint32_t kept; /* conversations acknowledged */

/* A conversation is put as durable: acknowledged, or refused in words that say so. */
static int put_talk(uint32_t talk)
{
	kvc_key_t keys[LEN];
	kvc_status_t status;

	user_keys(&user_, talk, LEN, keys);
	status = user_put(&user_, keys, 0, LEN, 1, NULL);
	if (status == KVC_OK) {
		kept += !acknowledged[talk];
		acknowledged[talk] = 1;
		return 1;
	}
	if (status != (kvc_status_t)KV_ERR_NOSPC && status != (kvc_status_t)KV_ERR_NOT_ADMITTED &&
	    status != (kvc_status_t)KV_ERR_IO && status != (kvc_status_t)KV_ERR_TIER_OFF &&
	    status != (kvc_status_t)KV_ERR_TIMEOUT && status != (kvc_status_t)KV_ERR_PROTO &&
	    status != (kvc_status_t)KV_ERR_LOCKED) {
		fail_msg("%d: %s", (int)status, kvc_last_error());
	}

	return 0;
}

static void start(void)
{
	rig_start(&rig_);
	user_attach(&user_, &rig_, "meta");
}

/* Some conversations are on disk and nowhere else. */
static void begin(void)
{
	memset(acknowledged, 0, sizeof acknowledged);
	kept = 0;
	start();
	for (uint32_t t = 0; t < FIRST; t++) {
		assert_true(put_talk(t));
	}
	user_leave(&user_);
	rig_stop(&rig_);
	start();
}

/* Every acknowledged conversation is read whole. */
static void read_acknowledged(void)
{
	kvc_key_t keys[LEN];

	for (uint32_t t = 0; t < TALKS; t++) {
		if (!acknowledged[t]) {
			continue;
		}
		user_keys(&user_, t, LEN, keys);
		assert_true(user_match_is(&user_, keys, LEN, LEN));
		user_expect(&user_, keys, LEN);
	}
	assert_int_equal(user_.wrong, 0);
}

/* The fault has ended: durability comes back without a restart. */
static void durable_again(uint32_t talk)
{
	KV_AWAIT(put_talk(talk));
}

/* kill -9 of everything, a new start, and all that was acknowledged is there. */
static void kill_and_read(void)
{
	user_leave(&user_);
	rig_crash(&rig_);
	start();
	read_acknowledged();
}

static void end_rig(void)
{
	user_leave(&user_);
	rig_check_quiet(&rig_);
	rig_stop(&rig_);
}

/* ---- the metadata process -------------------------------------------------------------------- */

static pid_t await_meta(void)
{
	pid_t pid;

	KV_AWAIT((pid = rig_meta(&rig_)) != 0);

	return pid;
}

RIG_TEST(p2_p6_a_metadata_process_killed_at_any_time_loses_nothing, rig_init(&rig_, 1))
{
	kv_test_rng_t rng = {kv_test_seed()};
	uint32_t refused = 0, killed = 0;

	begin();
	for (uint32_t t = FIRST; t < TALKS - 2; t++) {
		const useconds_t pause_us = (useconds_t)kv_test_below(&rng, 20000);
		pid_t killer = fork();
		int code = 0;

		assert_true(killer >= 0);
		if (killer == 0) {
			pid_t meta;

			usleep(pause_us);
			meta = rig_meta(&rig_);
			_exit(meta > 0 && kill(meta, SIGKILL) == 0);
		}
		refused += !put_talk(t);
		assert_int_equal(waitpid(killer, &code, 0), killer);
		killed += WIFEXITED(code) && WEXITSTATUS(code) == 1;
		if (t % 40 == 0) {
			kill_and_read();
		}
	}
	printf("# processes killed %u, acknowledgements refused %u of %u\n", killed, refused, TALKS - 2 - FIRST);
	assert_true(killed > 5);
	durable_again(TALKS - 2);

	/* One that nobody asks anything is missed too, also by a daemon that has never asked it. */
	for (uint32_t round = 0; round < 2; round++) {
		const pid_t was = await_meta();

		kill(was, SIGKILL);
		KV_AWAIT(rig_meta(&rig_) != was && rig_meta(&rig_) != 0);
		if (round == 0) {
			kill_and_read();
		}
	}
	durable_again(TALKS - 1);
	kill_and_read();
}

RIG_TEST(p2_p6_a_metadata_process_that_hangs_is_replaced, rig_init(&rig_, 1))
{
	begin();
	kill(await_meta(), SIGSTOP);
	(void)put_talk(FIRST);
	read_acknowledged();
	assert_true(rig_metric_reaches(&rig_, "kvd_meta_starts_total", 2));
	durable_again(FIRST + 1);
	assert_true(rig_metric_is(&rig_, "kvd_disk_state", 0));

	/* A stopped one does not outlive its daemon, nor keep the next one from the database. */
	kill(await_meta(), SIGSTOP);
	kill_and_read();
	durable_again(FIRST + 2);
	assert_int_equal(rig_metric(&rig_, "kvd_disk_rebuilt_total"), 0);
}

/* ---- its files ------------------------------------------------------------------------------- */

static void in_each_file(void (*fn)(const char *path, kv_test_rng_t *rng), kv_test_rng_t *rng)
{
	char meta[96], path[384];
	const struct dirent *entry;
	DIR *dir;

	snprintf(meta, sizeof meta, "%s/meta", rig_.disk);
	dir = opendir(meta);
	assert_non_null(dir);
	while ((entry = readdir(dir)) != NULL) {
		if (entry->d_name[0] != '.') {
			snprintf(path, sizeof path, "%s/%s", meta, entry->d_name);
			fn(path, rng);
		}
	}
	closedir(dir);
}

static void scribble(const char *path, kv_test_rng_t *rng)
{
	uint8_t garbage[4096];
	int fd = open(path, O_WRONLY | O_CLOEXEC);

	kv_test_fill(rng, garbage, sizeof garbage);
	assert_true(fd >= 0);
	assert_true(write(fd, garbage, 1 + kv_test_below(rng, sizeof garbage)) > 0);
	close(fd);
}

static void drop(const char *path, kv_test_rng_t *rng)
{
	(void)rng;
	unlink(path);
}

static void be_a_file(const char *path, kv_test_rng_t *rng)
{
	int fd;

	(void)rng;
	(void)remove(path);
	fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	assert_true(fd >= 0);
	close(fd);
}

RIG_TEST(p2_p6_a_database_that_does_not_open_is_rebuilt_from_headers, rig_init(&rig_, 1))
{
	kv_test_rng_t rng = {kv_test_seed()};
	char meta[96];

	begin();
	snprintf(meta, sizeof meta, "%s/meta", rig_.disk);
	for (uint32_t round = 0; round < 6; round++) {
		user_leave(&user_);
		assert_int_equal(rig_kill(&rig_, round % 2 ? SIGKILL : SIGTERM), round % 2 ? 128 + SIGKILL : 0);
		in_each_file(round < 4 ? scribble : drop, &rng);
		if (round == 4) {
			be_a_file(meta, &rng);
		}
		start();
		read_acknowledged();
		durable_again(FIRST + round);
		assert_int_equal(rig_metric(&rig_, "kvd_disk_rebuilt_total"), kept * LEN - LEN);
	}
	kill_and_read(); /* and the rebuilt one is believed */
	assert_int_equal(rig_metric(&rig_, "kvd_disk_rebuilt_total"), 0);

	/* Gone under the daemon: durability goes on, and the next start asks the headers. */
	in_each_file(scribble, &rng);
	kill(await_meta(), SIGKILL);
	durable_again(FIRST + 10);
	kill_and_read();
	assert_int_equal(rig_metric(&rig_, "kvd_disk_rebuilt_total"), kept * LEN);
}

/* The tier may come late, which moves the space to another epoch: its keys are others. */
static void attached_again(void)
{
	assert_true(rig_metric_is(&rig_, "kvd_disk_state", 0));
	user_leave(&user_);
	user_attach(&user_, &rig_, "meta");
}

/* Each read of a start in turn, and some in a row, fails for once: the database is opened again, and not thrown
 * away. */
RIG_TEST(p2_errors_of_the_device_at_a_start_cost_no_rebuild, rig_init(&rig_, 1))
{
	fault_disk_t disk;
	uint32_t starts = 0;

	fault_disk_open(&disk, &rig_);
	begin();
	for (uint32_t count = 1; count <= 3; count += 2) {
		for (uint32_t skip = 0;; skip += count, starts++) {
			const uint64_t injected = atomic_load(&disk.control->injected);

			user_leave(&user_);
			rig_crash(&rig_);
			fault_disk_arm(&disk, FAULT_READ, FAULT_ROWS, EIO, skip, count);
			start();
			fault_disk_arm(&disk, FAULT_OPS, 0, 0, 0, 0);
			if (atomic_load(&disk.control->injected) == injected) {
				break;
			}
			attached_again();
			assert_int_equal(rig_metric(&rig_, "kvd_disk_rebuilt_total"), 0);
			read_acknowledged();
		}
	}
	printf("# starts with failed reads %u\n", starts);
	assert_true(starts > 5);
	durable_again(FIRST);
	end_rig();
	fault_disk_close(&disk);
}

/* The database does not open for a second, in however many tries: while the daemon runs, and at its start, which then
 * goes on without the tier. It is sound, and is not thrown away. */
RIG_TEST(p2_errors_while_the_database_opens_cost_no_rebuild, rig_init(&rig_, 1))
{
	fault_disk_t disk;
	uint64_t starts;

	fault_disk_open(&disk, &rig_);
	begin();
	starts = rig_metric(&rig_, "kvd_meta_starts_total");
	fault_disk_arm(&disk, FAULT_OPEN, FAULT_ROWS, EIO, 0, UINT32_MAX);
	kill(await_meta(), SIGKILL);
	for (const uint64_t until = rig_now_ms() + 1000; rig_now_ms() < until; usleep(1000)) {
		(void)put_talk(FIRST);
	}
	starts = rig_metric(&rig_, "kvd_meta_starts_total") - starts;
	printf("# processes started in a second %u\n", (unsigned)starts);
	assert_in_range(starts, 2, 12);
	fault_disk_arm(&disk, FAULT_OPS, 0, 0, 0, 0);
	durable_again(FIRST + 1);
	kill_and_read();
	assert_int_equal(rig_metric(&rig_, "kvd_disk_rebuilt_total"), 0);

	for (uint32_t count = 6; count > 0; count = count == 6 ? UINT32_MAX : 0) {
		user_leave(&user_);
		rig_crash(&rig_);
		fault_disk_arm(&disk, FAULT_OPEN, FAULT_ROWS, EIO, 0, count);
		start();
		assert_true(rig_metric_is(&rig_, "kvd_disk_state", count == 6 ? 0 : 4));
		fault_disk_arm(&disk, FAULT_OPS, 0, 0, 0, 0);
		attached_again();
		read_acknowledged();
		assert_int_equal(rig_metric(&rig_, "kvd_disk_rebuilt_total"), 0);
	}
	end_rig();
	fault_disk_close(&disk);
}

/* For ten minutes, no longer: then the headers say what there is. */
RIG_TEST(p2_a_database_that_never_opens_is_given_up, rig_init(&rig_, 1))
{
	const uint64_t until = rig_now_ms() + RIG_WAIT_MS;
	fault_disk_t disk;

	fault_disk_open(&disk, &rig_);
	begin();
	user_leave(&user_);
	rig_crash(&rig_);
	assert_int_equal(truncate(rig_.log, 0), 0);
	fault_disk_arm(&disk, FAULT_OPEN, FAULT_ROWS, EIO, 0, UINT32_MAX);
	start();
	while (!rig_log_has(&rig_, "still off")) { /* the thread has met it: its time begins */
		assert_true(rig_now_ms() < until);
		usleep(10000);
	}
	assert_int_equal(rig_metric(&rig_, "kvd_disk_state"), 4);
	atomic_store(&disk.control->ahead_s, 700);
	assert_true(rig_metric_is(&rig_, "kvd_disk_state", 0));
	assert_int_equal(rig_metric(&rig_, "kvd_disk_rebuilt_total"), kept * LEN);
	fault_disk_arm(&disk, FAULT_OPS, 0, 0, 0, 0);
	atomic_store(&disk.control->ahead_s, 0);
	kill_and_read();
	durable_again(FIRST);
	end_rig();
	fault_disk_close(&disk);
}

/* Take the library's lock before the next process does; hold it until killed. */
static void hold_lock(void *arg, int ready)
{
	struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
	int fd = open(arg, O_RDWR | O_CLOEXEC);

	child_say(ready);
	if (fd < 0 || fcntl(fd, F_SETLKW, &lock) != 0) {
		_exit(1);
	}
	pause();
}

RIG_TEST(p2_p6_a_foreign_lock_costs_durability_while_it_lasts, rig_init(&rig_, 1))
{
	char path[96];
	pid_t holder;

	begin();
	snprintf(path, sizeof path, "%s/meta/LOCK", rig_.disk);
	holder = child_start(hold_lock, path);
	usleep(200000); /* it waits behind the process */
	kill(await_meta(), SIGKILL);
	(void)put_talk(FIRST);
	assert_true(rig_metric_is(&rig_, "kvd_disk_state", 3));
	assert_false(put_talk(FIRST + 1));
	read_acknowledged();
	child_kill(holder);
	durable_again(FIRST + 2);
	kill_and_read();
	assert_int_equal(rig_metric(&rig_, "kvd_disk_rebuilt_total"), 0);
}

/* ---- its device ------------------------------------------------------------------------------ */

/* Enough rows to go past what the library's log has preallocated. The blocks drive out those acknowledged before. */
static void write_many_rows(uint32_t talks)
{
	kvc_key_t keys[RIG_BLOCKS];

	for (uint32_t t = 0; t < talks; t++) {
		user_keys(&user_, 1000 + t, RIG_BLOCKS, keys);
		assert_int_equal(user_put(&user_, keys, 0, RIG_BLOCKS, 0, NULL), KVC_OK);
		(void)put_talk(t % FIRST);
	}
}

RIG_TEST(p2_p6_a_full_file_system_does_not_end_the_daemon, rig_init_mount(&rig_, "24m"))
{
	const uint64_t until = rig_now_ms() + RIG_WAIT_MS;

	begin();
	rig_disk_fill(&rig_);
	while (rig_metric(&rig_, "kvd_meta_starts_total") < 6) { /* written again and again after a failed write */
		write_many_rows(8);
		assert_true(rig_now_ms() < until);
	}
	assert_int_equal(rig_metric(&rig_, "kvd_disk_state"), 1);
	rig_disk_free(&rig_);
	memset(acknowledged, 0, sizeof acknowledged);
	durable_again(TALKS - 1);
	assert_true(rig_metric_is(&rig_, "kvd_disk_state", 0));
	kill_and_read();
	end_rig();
	assert_int_equal(umount2(rig_.disk, MNT_DETACH), 0);
}

static int is_traced(pid_t pid)
{
	char command[96];

	snprintf(command, sizeof command, "grep -q 'TracerPid:[[:space:]]*[1-9]' /proc/%d/status", (int)pid);

	return system(command) == 0;
}

RIG_TEST(p2_p6_a_passing_device_error_does_not_end_durability, rig_init(&rig_, 1))
{
	static const char *const faults[] = {"fdatasync:error=EIO", "write:error=EIO", "write:error=ENOSPC",
					     "pwrite64,fsync,rename:error=EIO"};

	begin();
	for (uint32_t i = 0; i < KV_COUNT_OF(faults); i++) {
		const uint64_t until = rig_now_ms() + RIG_WAIT_MS;
		pid_t meta = await_meta(), tracer = fork();
		int wstatus = 0;

		assert_true(tracer >= 0);
		if (tracer == 0) {
			char inject[96], pid[16];

			snprintf(inject, sizeof inject, "inject=%s", faults[i]);
			snprintf(pid, sizeof pid, "%d", (int)meta);
			execlp("strace", "strace", "-f", "-qq", "-o", "/dev/null", "-e", inject, "-p", pid,
			       (char *)NULL);
			_exit(127);
		}
		while (!is_traced(meta)) {
			if (waitpid(tracer, &wstatus, WNOHANG) == tracer) {
				end_rig();
				rig_fini(&rig_);
				kv_test_skip("strace cannot be run or may not trace: exit code %d",
					     WEXITSTATUS(wstatus));
			}
			assert_true(rig_now_ms() < until);
			usleep(5000);
		}
		(void)put_talk(FIRST + 2 * i);
		durable_again(FIRST + 2 * i + 1);
		kill(tracer, SIGTERM);
		waitpid(tracer, NULL, 0);
		read_acknowledged();
	}
	assert_true(rig_metric(&rig_, "kvd_meta_starts_total") > 3);
	kill_and_read();
	assert_int_equal(rig_metric(&rig_, "kvd_disk_rebuilt_total"), 0);
}

/* ---- another program in its place ------------------------------------------------------------ */

/* The same kvd beside another kvd-meta. */
static void copy_programs(char folder[96])
{
	char command[640];

	snprintf(folder, 96, "%s/bin", rig_.dir);
	snprintf(command, sizeof command, "mkdir %s && cp %s %s %s", folder, kv_test_program(E2E_KVD),
		 kv_test_program(E2E_KVCTL), folder);
	assert_int_equal(system(command), 0);
	assert_int_equal(setenv("KV_TEST_BIN", folder, 1), 0);
}

/* NULL: there is no such program. */
static void install_fake(const char *folder, const char *script)
{
	char path[112];
	FILE *file;

	snprintf(path, sizeof path, "%s/kvd-meta", folder);
	(void)unlink(path);
	if (!script) {
		return;
	}
	file = fopen(path, "we");
	assert_non_null(file);
	assert_true(fprintf(file, "#!/bin/sh\n%s\n", script) > 0);
	assert_int_equal(fchmod(fileno(file), 0755), 0);
	assert_int_equal(fclose(file), 0);
}

KV_TEST(p10_nonsense_from_the_metadata_process_faults_the_tier_only, NULL, rig_tear_down)
{
	static const char *const scripts[] = {"exit 0",
					      "kill -ABRT $$",
					      "printf x >&3; sleep 9",
					      "head -c 40 /dev/zero >&3; sleep 9",
					      "head -c 28840 /dev/urandom >&3; sleep 9",
					      "printf \"\\001\\000\\000\\000\\001\" >&3; sleep 9"};
	const char *bin = getenv("KV_TEST_BIN");
	char folder[96];

	bin = bin ? strdup(bin) : NULL;
	rig_init(&rig_, 1);
	begin();
	copy_programs(folder);
	for (uint32_t i = 0; i < KV_COUNT_OF(scripts); i++) {
		user_leave(&user_);
		rig_stop(&rig_);
		install_fake(folder, scripts[i]);
		start();
		assert_true(rig_metric_is(&rig_, "kvd_disk_state", 4));
		assert_false(put_talk(FIRST + i));
	}
	user_leave(&user_);
	rig_stop(&rig_);
	install_fake(folder, NULL);
	assert_int_equal(rig_try(&rig_), kv_status_exit_code(KV_ERR_PATH));
	assert_true(rig_log_has(&rig_, "kvd-meta is not beside"));
	if (bin) {
		setenv("KV_TEST_BIN", bin, 1);
		free((void *)(uintptr_t)bin);
	} else {
		unsetenv("KV_TEST_BIN");
	}
	start();
	read_acknowledged();
	assert_int_equal(rig_metric(&rig_, "kvd_disk_rebuilt_total"), 0);
	durable_again(FIRST);
	kill_and_read();
	end_rig();
	rig_fini(&rig_);
}
