/* What a machine may lack: io_uring, locked memory, huge pages. The daemon serves without, and says so. */
#include "e2e/rig/rig.h"

#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define LEN    40u
#define NOBODY 65534

/* Put, restart, read from disk. */
static void serves_from_disk(rig_t *rig, uint32_t talks)
{
	kvc_key_t keys[LEN];
	other_t other;
	user_t user;

	rig_start(rig);
	other_start(&other, rig->sock);
	user_attach(&user, rig, "machine");
	for (uint32_t t = 0; t < talks; t++) {
		user_keys(&user, t, LEN, keys);
		assert_int_equal(user_put(&user, keys, 0, LEN, 1, NULL), KVC_OK);
	}
	user_leave(&user);
	other_end(&other, 0);
	rig_check_quiet(rig);
	rig_stop(rig);
	rig_start(rig);
	user_attach(&user, rig, "machine");
	for (uint32_t t = 0; t < talks; t++) {
		user_keys(&user, t, LEN, keys);
		assert_true(user_match_is(&user, keys, LEN, LEN));
		user_expect(&user, keys, LEN);
	}
	user_leave(&user);
}

static int strace_works(void)
{
	return system("strace -D -f -o /dev/null -e trace=io_uring_setup -e inject=io_uring_setup:error=ENOSYS true "
		      "2>/dev/null") == 0;
}

/* A leak checker cannot look into a process that is traced already. */
static void without_leak_check(void)
{
	setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
}

RIG_TEST(p6_without_io_uring_the_daemon_serves_and_says_so, rig_init(&rig_, 1))
{
	static const char *const refuse[] = {"strace", "-Dqqfo/dev/null", "-etrace=io_uring_setup",
					     "-einject=io_uring_setup:error=ENOSYS"};

	if (strace_works()) {
		/* -D: what was started is the daemon, strace its grandchild. */
		for (size_t i = 0; i < KV_COUNT_OF(refuse); i++) {
			rig_.wrap[i] = refuse[i];
		}
		rig_.before = without_leak_check;
	} else {
		printf("# no strace: nvme.io_engine=threads instead\n");
		rig_option(&rig_, "--nvme.io_engine=threads");
	}
	serves_from_disk(&rig_, 6);
	assert_true(rig_metric_is(&rig_, "kvd_disk_fallback", 1));
	assert_true(rig_kvctl_has(&rig_, "status --json", "io_uring is not available"));
}

static void nobody_with_little_memlock(void)
{
	const struct rlimit limit = {8u << 20, 8u << 20};

	if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) {
		_exit(98);
	}
	if (geteuid() == 0) {
		if (setgroups(0, NULL) != 0 || setgid(NOBODY) != 0 || setuid(NOBODY) != 0) {
			_exit(98);
		}
		prctl(PR_SET_PDEATHSIG, SIGKILL); /* it does not survive setuid */
	}
}

RIG_TEST(p6_with_a_memlock_of_8_mib_the_daemon_serves_and_says_so, rig_init(&rig_, 1))
{
	rig_option(&rig_, "--cpu.size=64MiB");
	rig_option(&rig_, "--cpu.slab_size=16MiB");
	rig_option(&rig_, "--cpu.huge_pages=off"); /* memory on huge pages is not registered */
	assert_int_equal(chmod(rig_.dir, 0777), 0);
	rig_.before = nobody_with_little_memlock;
	if (rig_try(&rig_) == 127) {
		printf("# SKIP: nobody may not run %s\n", E2E_KVD);
		rig_fini(&rig_);
		skip();
	}
	rig_stop(&rig_);
	serves_from_disk(&rig_, 40); /* 25 MiB */
	assert_true(rig_log_has(&rig_, "RLIMIT_MEMLOCK") || rig_metric(&rig_, "kvd_disk_fallback") == 1);
}

/* SCHED_RR where it is permitted, else a warning and service; and a session, so a scheduling group, of its own in
 * either case. */
static void serves_in_class(int expected)
{
	rig_t rig;
	user_t user;
	pid_t daemon;

	rig_init(&rig, 0);
	rig_option(&rig, "--sched=realtime");
	rig_option(&rig, "--keeper=on");
	if (expected == SCHED_OTHER) {
		assert_int_equal(chmod(rig.dir, 0777), 0);
		rig.before = nobody_with_little_memlock;
	}
	if (rig_try(&rig) == 127) {
		printf("# SKIP: nobody may not run %s\n", E2E_KVD);
		rig_fini(&rig);
		skip();
	}
	user_attach(&user, &rig, "class"); /* served: the loop runs */
	user_leave(&user);
	daemon = rig_daemon(&rig);
	assert_int_equal(sched_getscheduler(daemon) & ~SCHED_RESET_ON_FORK, expected);
	assert_int_equal(rig_log_has(&rig, "no realtime class"), expected == SCHED_OTHER);
	assert_int_equal(getsid(daemon), daemon);
	rig_end(&rig);
}

KV_TEST(p7_where_it_is_permitted_the_core_thread_is_realtime)
{
	const struct sched_param param = {.sched_priority = 1};
	int status = -1;
	pid_t child;

	child = fork();
	assert_true(child >= 0);
	if (child == 0) {
		_exit(sched_setscheduler(0, SCHED_RR, &param) != 0);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	if (status != 0) {
		printf("# SKIP: not permitted here\n");
		skip();
	}
	serves_in_class(SCHED_RR);
}

KV_TEST(p6_the_daemon_serves_where_realtime_is_not_permitted)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_RTPRIO, &limit) != 0 || limit.rlim_cur > 0) {
		printf("# SKIP: it is permitted here\n");
		skip();
	}
	serves_in_class(SCHED_OTHER);
}

/* A memory group of our own below the process's; 0: the machine offers none. */
static int make_group(char *dir, size_t cap)
{
	static const char *const roots[] = {"/sys/fs/cgroup/memory", "/sys/fs/cgroup"};
	char usage[128];

	for (size_t i = 0; i < 2; i++) {
		snprintf(dir, cap, "%s/kvd-test-%d", roots[i], (int)getpid());
		snprintf(usage, sizeof usage, "%s/%s", dir, i ? "memory.current" : "memory.usage_in_bytes");
		if (mkdir(dir, 0755) == 0 && access(usage, R_OK) == 0) {
			return 1;
		}
		(void)rmdir(dir);
	}

	return 0;
}

static unsigned long group_usage(const char *dir)
{
	static const char *const names[] = {"memory.usage_in_bytes", "memory.current"};
	unsigned long bytes = 0;
	char path[160];

	for (size_t i = 0; i < 2 && bytes == 0; i++) {
		FILE *file;

		snprintf(path, sizeof path, "%s/%s", dir, names[i]);
		file = fopen(path, "re");
		if (file) {
			(void)!fscanf(file, "%lu", &bytes);
			fclose(file);
		}
	}

	return bytes;
}

/* Puts 5 MiB in the group; what the group pays for meanwhile is written to `out`. */
static void put_in_group(const rig_t *rig, const char *dir, int out)
{
	char path[160];
	unsigned long charged;
	kvc_key_t keys[64];
	user_t user;
	FILE *file;

	snprintf(path, sizeof path, "%s/cgroup.procs", dir);
	file = fopen(path, "we");
	if (!file || fprintf(file, "%d\n", (int)getpid()) < 0 || fclose(file) != 0) {
		_exit(77);
	}
	user_attach(&user, rig, "charged");
	for (uint64_t seed = 0; seed < 5; seed++) {
		kvc_status_t status = KVC_ERR_BUSY;

		user_keys(&user, seed, 64, keys);
		for (int i = 0; i < 1000 && (status == KVC_ERR_BUSY || status == KVC_ERR_FULL); i++) {
			status = user_put(&user, keys, 0, 64, 0, NULL); /* on a busy machine memory comes late */
			(void)usleep(status == KVC_OK ? 0 : 10000);
		}
		if (status != KVC_OK) {
			_exit(1);
		}
	}
	charged = group_usage(dir);
	_exit(write(out, &charged, sizeof charged) == sizeof charged ? 0 : 1);
}

KV_TEST(p6_a_client_pays_for_nothing_of_the_pool)
{
	unsigned long charged = 0;
	char dir[96];
	int ends[2], status;
	rig_t rig;
	pid_t pid;

#ifdef KVD_SANITIZE
	print_message("# SKIP: a sanitizer keeps memory of its own for what the client reads\n");
	skip();
#endif
	if (!make_group(dir, sizeof dir)) {
		print_message("# SKIP: no memory control group can be made here\n");
		skip();
	}
	rig_init(&rig, 0);
	rig_option(&rig, "--cpu.prefault=on");
	rig_option(&rig, "--index.max_blocks=131072"); /* a mirror of 8 MiB */
	rig_start(&rig);
	assert_int_equal(pipe(ends), 0);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		put_in_group(&rig, dir, ends[1]);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status));
	if (WEXITSTATUS(status) == 0) {
		assert_int_equal(read(ends[0], &charged, sizeof charged), sizeof charged);
	}
	close(ends[0]);
	close(ends[1]);
	rig_fini(&rig);
	for (int i = 0; i < 100 && rmdir(dir) != 0; i++) {
		usleep(20000);
	}
	if (WEXITSTATUS(status) == 77) {
		print_message("# SKIP: no process can be moved to a memory control group\n");
		skip();
	}
	assert_int_equal(WEXITSTATUS(status), 0);
	print_message("# %lu bytes are charged to the client\n", charged);
	assert_true(charged < 5u << 20);
}

/* 0: none can be made. */
static int enter_time_namespace(const char *offset)
{
	FILE *offsets;

	if (unshare(CLONE_NEWTIME) != 0) {
		return 0;
	}
	offsets = fopen("/proc/self/timens_offsets", "we");

	return offsets && fprintf(offsets, "monotonic %s 0\n", offset) > 0 && fclose(offsets) == 0;
}

/* In the namespace, which is the children's: 0: the daemon's clock was said to be another. */
static int attach_elsewhere(const rig_t *rig, const char *offset)
{
	const kvc_identity_t identity = user_identity("elsewhere");
	int wstatus;
	user_t user;
	pid_t pid;

	if (!enter_time_namespace(offset)) {
		return 77;
	}
	pid = fork();
	if (pid == 0) {
		_exit(user_try(&user, rig->sock, &identity) != KVC_ERR_UNSUPPORTED ||
		      !strstr(kvc_last_error(), "time namespace"));
	}

	return pid > 0 && waitpid(pid, &wstatus, 0) == pid ? child_exit_of(wstatus) : 77;
}

RIG_TEST(p10_an_engine_in_another_time_namespace_is_told_so, rig_begin(&rig_, 0))
{
	static const char *const offsets[] = {"1000", "-100"}; /* ahead of the daemon's, behind it */

	for (size_t i = 0; i < KV_COUNT_OF(offsets); i++) {
		int wstatus;
		pid_t pid = fork();

		if (pid == 0) {
			_exit(attach_elsewhere(&rig_, offsets[i]));
		}
		assert_int_equal(waitpid(pid, &wstatus, 0), pid);
		if (child_exit_of(wstatus) == 77) {
			rig_fini(&rig_);
			kv_test_skip("no time namespace can be made here");
		}
		assert_int_equal(child_exit_of(wstatus), 0);
	}
}

static unsigned long free_huge_pages(void)
{
	FILE *file = fopen("/proc/meminfo", "re");
	unsigned long count = 0;
	char line[128];

	while (file && fgets(line, sizeof line, file)) {
		if (strncmp(line, "HugePages_Free:", 15) == 0) {
			count = strtoul(line + 15, NULL, 10);
		}
	}
	if (file) {
		fclose(file);
	}

	return count;
}

KV_TEST(p6_without_huge_pages_the_daemon_serves_and_says_so)
{
	rig_t rig;

	if (free_huge_pages() > 0) {
		printf("# SKIP: this machine has reserved huge pages\n");
		skip();
	}
	rig_init(&rig, 1);
	rig_option(&rig, "--cpu.huge_pages=on");
	serves_from_disk(&rig, 6);
	if (rig_metric(&rig, "kvd_cpu_huge_pages") == 0) { /* else they are transparent */
		assert_true(rig_kvctl_has(&rig, "status --json", "the CPU pool is not on huge pages"));
		assert_true(rig_log_has(&rig, "huge pages"));
	}
	rig_end(&rig);
}
