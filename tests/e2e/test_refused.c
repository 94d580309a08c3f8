/* What a container may refuse: system calls, by a seccomp filter of this process and of all that it starts, and threads,
 * by a limit of the user or of a control group. The daemon says which call and what to change, and never that memory is
 * out. */
#include "e2e/rig/peers.h"
#include "kv_refuse.h"

#include <ctype.h>
#include <errno.h>
#include <grp.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NOBODY 65534
#define FILL   140u /* puts of four blocks: more than the pool holds */

static struct {
	uint32_t call;
	uint32_t error;
} refuse_;

static void refuse_call(void)
{
	kv_refuse_call(refuse_.call, refuse_.error);
}

static void says(rig_t *rig, const char *what, const char *advice)
{
	assert_true(rig_log_has(rig, what));
	assert_true(rig_log_has(rig, advice));
	assert_false(rig_log_has(rig, "out of memory"));
	assert_false(rig_log_has(rig, "no memory"));
	assert_false(rig_log_has(rig, "the device reports an error"));
	assert_false(rig_log_has(rig, "lost or damaged"));
}

/* Started under the filter, it ends with this exit code, or serves (-1). */
static void start_without(rig_t *rig, uint32_t call, uint32_t error, int expected)
{
	int result;

	refuse_.call = call;
	refuse_.error = error;
	rig->before = refuse_call;
	result = rig_try(rig);
	if (result == 77) {
		rig_fini(rig);
		kv_test_skip("the kernel takes no seccomp filter");
	}
	assert_int_equal(result, expected);
}

/* With a keeper and without one. */
KV_TEST(p10_a_refused_system_call_is_named)
{
	static const struct {
		uint32_t call;
		const char *name;
	} calls[] = {
		{SYS_socket, "socket: "},
		{SYS_bind, "bind: "},
		{SYS_listen, "listen: "},
		{SYS_fchmod, "fchmod: "},
		{SYS_fcntl, "fcntl: "},
		{SYS_flock, "flock: "},
		{SYS_memfd_create, "memfd_create"},
		{SYS_eventfd2, "eventfd2"},
		{SYS_epoll_create1, "epoll_create1"},
		{SYS_signalfd4, "signalfd4"},
		{SYS_socketpair, "socketpair"}, /* without a keeper the disk tier is off */
		{SYS_madvise, "madvise"},
#ifndef KVD_SANITIZE
		{SYS_clone3, "clone3"}, /* the sanitizers' own threads need it */
#endif
	};

	for (size_t i = 0; i < 2 * KV_COUNT_OF(calls); i++) {
		rig_t rig;

		if (i % 2 == 0 && calls[i / 2].call == SYS_socketpair) {
			continue;
		}

		rig_init(&rig, 1);
		rig_option(&rig, i % 2 ? "--keeper=on" : "--keeper=off");
		start_without(&rig, calls[i / 2].call, EPERM, kv_status_exit_code(KV_ERR_REFUSED));
		says(&rig, calls[i / 2].name, "seccomp filter");
		rig_fini(&rig);
	}
}

/* The metadata process is watched by it: the disk tier comes when it can. */
RIG_TEST(p6_without_pidfd_open_the_disk_tier_is_off_and_says_so, rig_init(&rig_, 1))
{
	start_without(&rig_, SYS_pidfd_open, EPERM, -1);
	says(&rig_, "the system refuses pidfd_open", "seccomp filter");
}

/* Slot files are made without it, and what they hold survives. */
RIG_TEST(p2_without_fallocate_the_disk_tier_serves_and_says_so, rig_init(&rig_, 1))
{
	kvc_key_t keys[8];
	user_t user;

	for (int start = 0; start < 2; start++) {
		start_without(&rig_, SYS_fallocate, EPERM, -1);
		user_attach(&user, &rig_, "sparse");
		user_keys(&user, 1, 8, keys);
		if (start == 0) {
			assert_int_equal(user_put(&user, keys, 0, 8, 1, NULL), KVC_OK);
		}
		assert_true(user_match_is(&user, keys, 8, 8));
		user_expect(&user, keys, 8);
		user_leave(&user);
		rig_stop(&rig_);
	}
	assert_true(rig_log_has(&rig_, "fallocate is refused"));
}

static void serve_without(uint32_t call, int disk)
{
	kvc_key_t keys[4];
	user_t user;
	rig_t rig;

	rig_init(&rig, disk);
	start_without(&rig, call, EPERM, -1);
	user_attach(&user, &rig, "without-call");
	user_keys(&user, 1, 4, keys);
	assert_int_equal(user_put(&user, keys, 0, 4, 0, NULL), KVC_OK);
	user_expect(&user, keys, 4);
	user_leave(&user);
	rig_fini(&rig);
}

/* A filter older than the call answers EPERM, not ENOSYS. */
KV_TEST(p6_without_epoll_pwait2_the_daemon_serves)
{
	serve_without(SYS_epoll_pwait2, 0);
}

KV_TEST(p6_without_getrandom_the_daemon_serves)
{
	serve_without(SYS_getrandom, 1);
}

/* The keys of TLS too: OpenSSL gets its randomness from getrandom alone. */
KV_TEST(p6_without_getrandom_peers_hand_over)
{
	peers_t net;

	refuse_.call = SYS_getrandom;
	refuse_.error = EPERM;
	peers_init(&net);
	net.rig[0].before = net.rig[1].before = refuse_call;
	peers_start(&net);
	peers_connected(&net);
	peers_fini(&net);
}

static const char *device_; /* in place of /dev/urandom */

static void without_any_randomness(void)
{
	kv_refuse_randomness(device_);
}

static const char *const no_random_[] = {"/dev/null", "/dev/zero"};

KV_TEST(p10_without_any_randomness_the_start_ends)
{
	for (size_t i = 0; i < KV_COUNT_OF(no_random_); i++) {
		int result;
		rig_t rig;

		rig_init(&rig, 0);
		device_ = no_random_[i];
		rig.before = without_any_randomness;
		result = rig_try(&rig);
		if (result == 77) {
			rig_fini(&rig);
			kv_test_skip("needs root, and a kernel that takes seccomp filters");
		}
		assert_int_equal(result, kv_status_exit_code(KV_ERR_REFUSED));
		says(&rig, "getrandom", "seccomp filter");
		rig_fini(&rig);
	}
}

/* kvctl peer-key under such rules: its exit code, and what it says. */
static int make_key(void (*before)(void), const char *path, char *out, size_t cap)
{
	char log[128];
	int wstatus = 0;
	pid_t pid;

	snprintf(log, sizeof log, "%s.log", path);
	pid = fork();
	if (pid == 0) {
		if (!freopen(log, "w", stderr)) {
			_exit(99);
		}
		alarm(60); /* it must not wait for randomness */
		before();
		execl(kv_test_program(E2E_KVCTL), "kvctl", "peer-key", path, (char *)NULL);
		_exit(99);
	}
	assert_int_equal(waitpid(pid, &wstatus, 0), pid);
	(void)kv_test_read(log, out, cap);

	return child_exit_of(wstatus);
}

KV_TEST(p10_without_any_randomness_kvctl_makes_no_key)
{
	char dir[64], path[96], text[1024];

	kv_test_dir_make(dir, sizeof dir);
	snprintf(path, sizeof path, "%s/key", dir);
	for (size_t i = 0; i < KV_COUNT_OF(no_random_); i++) {
		device_ = no_random_[i];
		int result = make_key(without_any_randomness, path, text, sizeof text);

		if (result == 77) {
			kv_test_dir_remove(dir);
			kv_test_skip("needs root, and a kernel that takes seccomp filters");
		}
		assert_int_equal(result, kv_status_exit_code(KV_ERR_REFUSED));
		assert_int_equal(access(path, F_OK), -1);
		assert_non_null(strstr(text, "allow getrandom in the seccomp filter"));
		assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1); /* one line */
	}
	refuse_.call = SYS_getrandom;
	refuse_.error = EPERM;
	assert_int_equal(make_key(refuse_call, path, text, sizeof text), 0);
	assert_int_equal(kv_test_read(path, text, sizeof text), 65);
	for (size_t i = 0; i < 64; i++) {
		assert_true(isxdigit((unsigned char)text[i]));
	}
	assert_true(strspn(text, "0") < 32); /* not of a device that answers zeros */
	kv_test_dir_remove(dir);
}

RIG_TEST(p10_a_refused_socket_is_no_wrong_address, rig_init(&rig_, 0))
{
	rig_option(&rig_, "--events.enabled=off");
	rig_option(&rig_, "--http.listen=127.0.0.1:1");
	start_without(&rig_, SYS_socket, EPERM, kv_status_exit_code(KV_ERR_REFUSED));
	says(&rig_, "http.listen: cannot listen on 127.0.0.1:1: socket: ", "seccomp filter");
}

RIG_TEST(p10_a_lock_that_is_refused_is_no_other_daemon, rig_init(&rig_, 0))
{
	start_without(&rig_, SYS_flock, EPERM, kv_status_exit_code(KV_ERR_REFUSED));
	says(&rig_, "flock: Operation not permitted", "seccomp filter");
	assert_false(rig_log_has(&rig_, "another kvd"));
}

static void nobody_with_one_thread(void)
{
	const struct rlimit limit = {1, 1};

	if (setgroups(0, NULL) != 0 || setgid(NOBODY) != 0 || setuid(NOBODY) != 0 ||
	    setrlimit(RLIMIT_NPROC, &limit) != 0) {
		_exit(77);
	}
	prctl(PR_SET_PDEATHSIG, SIGKILL); /* it does not survive setuid */
}

KV_TEST(p10_a_users_limit_of_threads_is_named)
{
	int result;
	rig_t rig;

	if (geteuid() != 0) {
		kv_test_skip("needs root, to be another user");
	}
	rig_init(&rig, 0);
	assert_int_equal(chmod(rig.dir, 0777), 0);
	rig.before = nobody_with_one_thread;
	result = rig_try(&rig);
	if (result == 77 || result == 127) {
		rig_fini(&rig);
		kv_test_skip("nobody may not run kvd here");
	}
	assert_int_equal(result, kv_status_exit_code(KV_ERR_BUSY));
	says(&rig, "pthread_create", "RLIMIT_NPROC");
	rig_fini(&rig);
}

static char group_[96];

static void enter_group(void)
{
	char path[128];
	FILE *procs;

	snprintf(path, sizeof path, "%s/cgroup.procs", group_);
	procs = fopen(path, "we");
	if (!procs || fprintf(procs, "%d\n", (int)getpid()) < 0 || fclose(procs) != 0) {
		_exit(77);
	}
}

/* A group of our own with this many threads at most; 0: the machine offers none. */
static int make_group(uint32_t threads)
{
	static const char *const roots[] = {"/sys/fs/cgroup/pids", "/sys/fs/cgroup"};

	for (size_t i = 0; i < KV_COUNT_OF(roots); i++) {
		char path[128];
		FILE *most;

		snprintf(group_, sizeof group_, "%s/kvd-test-%d", roots[i], (int)getpid());
		if (mkdir(group_, 0755) != 0) {
			continue;
		}
		snprintf(path, sizeof path, "%s/pids.max", group_);
		most = fopen(path, "re+");
		if (most && fprintf(most, "%u\n", threads) > 0 && fclose(most) == 0) {
			return 1;
		}
		(void)rmdir(group_);
	}

	return 0;
}

static void remove_group(void)
{
	for (int i = 0; i < 500 && rmdir(group_) != 0; i++) {
		usleep(20000);
	}
}

/* Whatever it is that cannot be started: pool, disk tier, its metadata process, publisher. */
KV_TEST(p10_a_groups_limit_of_threads_is_named)
{
	for (uint32_t threads = 2; threads < 8; threads++) {
		int result;
		rig_t rig;

		if (!make_group(threads)) {
			kv_test_skip("no control group can be made here");
		}
		rig_init(&rig, 1);
		rig_option(&rig, "--keeper=on");
		rig.before = enter_group;
		result = rig_try(&rig);
		if (result != 77) {
			says(&rig, "the system refuses", "pids.max");
			assert_false(rig_log_has(&rig, "signal 6"));
		}
		rig_fini(&rig);
		remove_group();
		if (result == 77) {
			kv_test_skip("no process can be moved to a control group");
		}
	}
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static uint64_t descriptors_;

static void limit_descriptors(void)
{
	const struct rlimit few = {descriptors_, descriptors_};

	if (setrlimit(RLIMIT_NOFILE, &few) != 0) {
		_exit(77);
	}
}

/* Attach, and put as much as the pool has room for. */
static kvc_status_t fill_pool(const rig_t *rig, user_t *user)
{
	const kvc_identity_t identity = user_identity("model");
	kvc_status_t status = user_try(user, rig->sock, &identity);

	for (uint32_t seed = 0; status == KVC_OK && seed < FILL; seed++) {
		kvc_key_t keys[4];

		user_keys(user, seed, 4, keys);
		status = user_put(user, keys, 0, 4, 0, NULL);
	}

	return status;
}

/* However few there are: where no engine attaches for them, a put is refused or the pool stays small, the status says
 * so, with the limit. */
KV_TEST(p10_a_daemon_without_descriptors_is_not_healthy)
{
	uint32_t started = 0, served = 0;

	for (descriptors_ = 16; descriptors_ < 48; descriptors_ += 2) {
		static char out[1 << 16];
		user_t user;
		rig_t rig;
		int result;

		rig_init(&rig, 0);
		rig.before = limit_descriptors;
		result = rig_try(&rig);
		if (result == -1) {
			started++;
			served += fill_pool(&rig, &user) == KVC_OK;
			user_leave(&user);
			assert_int_equal(rig_kvctl(&rig, "status", out, sizeof out), 2);
			assert_non_null(strstr(out, "NOT HEALTHY"));
			assert_non_null(strstr(out, "LimitNOFILE"));
		} else {
			assert_int_equal(result, 75);
		}
		rig_fini(&rig);
	}
	assert_true(started > 8 && served > 4 && served < started);
}

static int status_has(kvc_t *kvc, const char *text)
{
	char *json = NULL;
	int has;

	assert_int_equal(kvc_document(kvc, KVC_DOC_STATUS, 0, &json, NULL), KVC_OK);
	has = strstr(json, text) != NULL;
	kvc_free(json);

	return has;
}

static void put_some(user_t *user, uint64_t *p_seed)
{
	kvc_key_t keys[4];

	user_keys(user, ++*p_seed, 4, keys);
	(void)user_put(user, keys, 0, 4, 0, NULL);
}

/* Healthy again when the next slab can be made. */
RIG_TEST(p10_a_pool_that_the_system_keeps_small_is_not_healthy, rig_begin_with(&rig_, 0, &user_, "model"))
{
	struct rlimit few = {3, 0}, before;
	uint64_t seed = 0;

	put_some(&user_, &seed);
	assert_true(status_has(user_.kvc, "\"healthy\":true"));
	assert_int_equal(prlimit(rig_.pid, RLIMIT_NOFILE, NULL, &before), 0);
	few.rlim_max = before.rlim_max;
	assert_int_equal(prlimit(rig_.pid, RLIMIT_NOFILE, &few, NULL), 0);
	KV_AWAIT((put_some(&user_, &seed), status_has(user_.kvc, "the pool has fewer slabs")));
	assert_true(status_has(user_.kvc, "RLIMIT_NOFILE") && status_has(user_.kvc, "\"healthy\":false"));
	assert_int_equal(prlimit(rig_.pid, RLIMIT_NOFILE, &before, NULL), 0);
	KV_AWAIT((put_some(&user_, &seed), status_has(user_.kvc, "\"healthy\":true")));
}
