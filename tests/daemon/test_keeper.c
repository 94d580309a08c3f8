/* The keeper when a restart fails, and the configuration it restarts with. */
#include "daemon/raw.h"
#include "kv_child.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

typedef struct bed {
	raw_daemon_t daemon;
	char folder[64], conf[96];
} bed_t;

static void wait_for_log(const bed_t *bed, const char *text)
{
	KV_AWAIT(raw_log_has(&bed->daemon, text));
}

/* A daemon under a keeper with this configuration, and `more` options (ended by NULL). */
static void start(bed_t *bed, const char *text, const char *const *more)
{
	const char *args[8] = {"--keeper=on", "--config", bed->conf};

	memset(bed, 0, sizeof *bed);
	kv_test_dir_make(bed->folder, sizeof bed->folder);
	snprintf(bed->conf, sizeof bed->conf, "%s/kvd.conf", bed->folder);
	kv_test_write(bed->conf, text);
	for (size_t i = 3; *more; more++) {
		args[i++] = *more;
	}
	raw_daemon_start(&bed->daemon, args);
	close(raw_open_when_there(&bed->daemon));
}

/* The daemon after this number of restarts: the one that was killed may have answered. */
static int open_after(const bed_t *bed, uint64_t restarts)
{
	int fd = raw_open_when_there(&bed->daemon);

	while (raw_metric(fd, "kvd_restarts_total") != restarts) {
		close(fd);
		fd = raw_open_when_there(&bed->daemon);
	}

	return fd;
}

static void bed_end(bed_t *bed)
{
	raw_daemon_end(&bed->daemon);
	kv_test_dir_remove(bed->folder);
}

/* Dead with all its threads, so that its descriptors are closed; only its parent has not heard of it. */
static int is_zombie(pid_t pid)
{
	char path[64], text[512] = "", state = 0;
	long threads = 0;
	int fd;

	snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	assert_true(fd >= 0 && read(fd, text, sizeof text - 1) > 0);
	close(fd);
	assert_int_equal(sscanf(strrchr(text, ')'),
				") %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s "
				"%*s %ld",
				&state, &threads),
			 2);

	return state == 'Z' && threads <= 1;
}

/* Kill the daemon; what keeps the next one from starting happens while the keeper cannot look. */
static void crash(bed_t *bed, void (*cause)(bed_t *bed))
{
	const pid_t child = child_first(bed->daemon.pid);

	assert_true(child > 0);
	kill(bed->daemon.pid, SIGSTOP);
	kill(child, SIGKILL);
	if (cause) {
		while (!is_zombie(child)) {
			usleep(1000);
		}
		cause(bed);
	}
	kill(bed->daemon.pid, SIGCONT);
}

/* ---- passing causes -------------------------------------------------------------------------- */

static int held_ = -1;
static uint16_t port_;

static void take_port(bed_t *bed)
{
	struct sockaddr_in address = {
		.sin_family = AF_INET, .sin_port = htons(port_), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	const int on = 1;

	(void)bed;
	held_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	setsockopt(held_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
	for (int i = 0; bind(held_, (struct sockaddr *)&address, sizeof address) != 0; i++) {
		assert_true(i < RAW_TIMEOUT_MS); /* until the dead daemon's is closed */
		usleep(1000);
	}
	assert_int_equal(listen(held_, 1), 0);
}

static void take_lock(bed_t *bed)
{
	char path[128];

	snprintf(path, sizeof path, "%s/disk/LOCK", bed->folder);
	held_ = open(path, O_RDWR | O_CLOEXEC);
	assert_true(held_ >= 0);
	for (int i = 0; flock(held_, LOCK_EX | LOCK_NB) != 0; i++) {
		assert_true(i < RAW_TIMEOUT_MS);
		usleep(1000);
	}
	assert_int_equal(ftruncate(held_, 0), 0); /* ours, not the dead daemon's */
}

static void fill_run_dir(bed_t *bed)
{
	char path[128];

	assert_int_equal(unlink(bed->daemon.sock), 0);
	for (int i = 0;; i++) {
		int fd;

		snprintf(path, sizeof path, "%s/filler.%d", bed->daemon.dir, i);
		fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
		if (fd < 0) {
			assert_int_equal(errno, ENOSPC);
			return;
		}
		close(fd);
	}
}

/* Tried again with growing pauses, and served when the cause has gone. */
static void passes(bed_t *bed, void (*cause)(bed_t *bed))
{
	crash(bed, cause);
	wait_for_log(bed, "exit_code 75 times 1 in_ms 100");
	wait_for_log(bed, "exit_code 75 times 2 in_ms 200");
	wait_for_log(bed, "exit_code 75 times 3 in_ms 400");
}

static void serves_again(bed_t *bed)
{
	close(open_after(bed, 1));
	bed_end(bed);
}

KV_TEST(p6_a_taken_port_after_a_crash_is_tried_again)
{
	char listen[64];
	const char *const more[] = {listen, NULL};
	bed_t bed;

	close(raw_listen_anywhere(&port_));
	snprintf(listen, sizeof listen, "--http.listen=127.0.0.1:%u", port_);
	start(&bed, "", more);
	passes(&bed, take_port);
	close(held_);
	serves_again(&bed);
}

KV_TEST(p6_a_data_directory_locked_after_a_crash_is_tried_again)
{
	char folder[64], path[128];
	const char *const more[] = {path, "--nvme.size=64MiB", "--nvme.file_size=4MiB", NULL};
	bed_t bed;

	kv_test_dir_make(folder, sizeof folder);
	snprintf(path, sizeof path, "--nvme.path=%s/disk", folder);
	start(&bed, "", more);
	kv_test_dir_remove(bed.folder);
	snprintf(bed.folder, sizeof bed.folder, "%s", folder);
	passes(&bed, take_lock);
	close(held_);
	serves_again(&bed);
}

KV_TEST(p6_a_full_run_dir_after_a_crash_is_tried_again)
{
	const char *args[] = {"--keeper=on", "--events.enabled=off", NULL};
	char path[128];
	bed_t bed = {0};
	int code;

	kv_test_dir_make(bed.daemon.dir, sizeof bed.daemon.dir);
	kv_test_dir_make(bed.folder, sizeof bed.folder);
	if (mount("tmpfs", bed.daemon.dir, "tmpfs", 0, "nr_inodes=8") != 0) {
		int error = errno;

		bed_end(&bed);
		kv_test_skip("mounting a small tmpfs is not permitted: %s", strerror(error));
	}
	assert_int_equal(raw_daemon_spawn(&bed.daemon, args, &code), 1);
	close(raw_open_when_there(&bed.daemon));
	passes(&bed, fill_run_dir);
	for (int i = 0; i < 8; i++) {
		snprintf(path, sizeof path, "%s/filler.%d", bed.daemon.dir, i);
		(void)unlink(path);
	}
	close(raw_open_when_there(&bed.daemon));
	assert_int_equal(raw_daemon_kill(&bed.daemon, SIGTERM), 0);
	assert_int_equal(umount(bed.daemon.dir), 0);
	bed_end(&bed);
}

/* ---- a keeper that is stopped ---------------------------------------------------------------- */

#define JOINS 400u /* more descriptors than the socket to the keeper takes */

static int join(const bed_t *bed, uint32_t i)
{
	const int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0), fd = raw_open(bed->daemon.sock);
	kv_msg_join_reply_t joined;
	char name[32];

	assert_true(pidfd >= 0);
	snprintf(name, sizeof name, "i%u", i / 8);
	assert_int_equal(raw_join_with(fd, name, NULL, pidfd, &joined), KV_OK);
	for (uint32_t r = 0; r < raw_reply_fd_count; r++) {
		close(raw_reply_fds[r]);
	}
	close(pidfd);

	return fd;
}

/* What waits for the keeper is bounded by the members that are there: half of them come and go eight times. */
KV_TEST(p5_joins_and_leaves_go_on_while_the_keeper_is_stopped)
{
	static const kv_msg_drained_t leave = {.what = 4};
	const char *const more[] = {NULL};
	int fds[JOINS], fd;
	bed_t bed;

	start(&bed, "", more);
	kill(bed.daemon.pid, SIGSTOP);
	for (uint32_t i = 0; i < JOINS; i++) {
		fds[i] = join(&bed, i);
	}
	for (uint32_t round = 0; round < 8; round++) {
		for (uint32_t i = JOINS / 2; i < JOINS; i++) {
			raw_send(fds[i], KV_CODE_DRAINED, 1, &leave, NULL, 0);
			assert_true(raw_closed(fds[i], RAW_TIMEOUT_MS));
			close(fds[i]);
			fds[i] = join(&bed, i);
		}
	}
	fd = raw_open(bed.daemon.sock);
	assert_true(raw_metric(fd, "kvd_keeper_waiting_messages") > 0);
	assert_true(raw_metric(fd, "kvd_keeper_waiting_messages") <= 2 * JOINS);
	assert_true(kv_test_count_fds(bed.daemon.pid, "pidfd") < JOINS);
	kill(bed.daemon.pid, SIGCONT);
	KV_AWAIT(raw_metric(fd, "kvd_keeper_waiting_messages") == 0);
	KV_AWAIT(kv_test_count_fds(bed.daemon.pid, "pidfd") == JOINS);
	assert_int_equal(raw_metric(fd, "kvd_keeper_refused_total"), 0);
	close(fd);
	for (uint32_t i = 0; i < JOINS; i++) {
		raw_send(fds[i], KV_CODE_DRAINED, 1, &leave, NULL, 0);
		assert_true(raw_closed(fds[i], RAW_TIMEOUT_MS));
		close(fds[i]);
	}
	KV_AWAIT(kv_test_count_fds(bed.daemon.pid, "pidfd") == 0);
	bed_end(&bed);
}

/* ---- the configuration ----------------------------------------------------------------------- */

#define DIFFERS "the configuration file is not what runs"

static void status_says(int fd, const char *text, int want)
{
	const kv_msg_status_t ask = {0};
	kv_msg_status_reply_t reply;
	static char json[KV_MAX_JSON + 1];

	assert_int_equal(raw_call(fd, KV_CODE_STATUS, &ask, &reply), KV_OK);
	memcpy(json, reply.json.data, reply.json.len);
	json[reply.json.len] = '\0';
	if (!!strstr(json, text) != want) {
		fail_msg("\"%s\" should%s be in: %s", text, want ? "" : " not", json);
	}
}

static void config_is(int fd, const char *name, const char *value)
{
	const kv_msg_config_t ask = {0};
	kv_msg_config_reply_t reply;
	static char json[KV_MAX_JSON + 1];
	char *at;

	assert_int_equal(raw_call(fd, KV_CODE_CONFIG, &ask, &reply), KV_OK);
	memcpy(json, reply.json.data, reply.json.len);
	json[reply.json.len] = '\0';
	at = strstr(json, name);
	assert_non_null(at);
	at = strstr(at, "\"text\":\"");
	assert_non_null(at);
	if (strncmp(at + 8, value, strlen(value)) != 0) {
		fail_msg("%s is %.40s, not %s", name, at + 8, value);
	}
}

KV_TEST(p6_a_crash_restarts_with_the_configuration_validated_last)
{
	static const char *const texts[] = {"policy: fifo\nlimits.spaces: lots\n", "\t: {]", "policy: lru\n", NULL};
	const char *const more[] = {NULL};
	bed_t bed;
	int fd;

	start(&bed, "policy: fifo\nlimits.spaces: 77\n", more);
	for (uint32_t i = 0; i < 4; i++) { /* wrong, garbage, valid but never read, gone */
		if (texts[i]) {
			kv_test_write(bed.conf, texts[i]);
		} else {
			assert_int_equal(unlink(bed.conf), 0);
		}
		crash(&bed, NULL);
		fd = open_after(&bed, i + 1);
		config_is(fd, "\"policy\"", "fifo");
		config_is(fd, "\"limits.spaces\"", "77");
		assert_int_equal(raw_metric(fd, "kvd_config_differs"), 1);
		status_says(fd, DIFFERS, 1);
		close(fd);
	}

	/* The operator mends it; what cannot change while running waits. */
	kv_test_write(bed.conf, "policy: lru\nlimits.spaces: 78\n");
	kill(bed.daemon.pid, SIGHUP);
	wait_for_log(&bed, "policy, limits.spaces: changed, and waits for the next start");
	fd = raw_open_when_there(&bed.daemon);
	config_is(fd, "\"policy\"", "fifo");
	status_says(fd, "waits for the next start", 1);
	kv_test_write(bed.conf, "policy: fifo\nlimits.spaces: 77\n");
	kill(bed.daemon.pid, SIGHUP);
	while (raw_metric(fd, "kvd_config_differs") != 0) {
		usleep(1000);
	}
	status_says(fd, DIFFERS, 0);
	close(fd);
	bed_end(&bed);
}

KV_TEST(p6_a_sighup_with_an_invalid_file_changes_nothing)
{
	const char *const more[] = {NULL};
	bed_t bed;
	int fd;

	start(&bed, "log.level: warn\npolicy: fifo\n", more);
	fd = raw_open_when_there(&bed.daemon);
	kv_test_write(bed.conf, "log.level: debug\npolicy: flfo\n");
	kill(bed.daemon.pid, SIGHUP);
	wait_for_log(&bed, "nothing has changed");
	assert_true(raw_log_has(&bed.daemon, ":2:9: policy: `flfo` is not one of lru,fifo; did you mean `fifo`?"));
	config_is(fd, "\"log.level\"", "warn");
	assert_int_equal(raw_metric(fd, "kvd_config_refused_total"), 1);
	status_says(fd, DIFFERS, 1);
	close(fd);
	crash(&bed, NULL);
	fd = raw_open_when_there(&bed.daemon);
	config_is(fd, "\"policy\"", "fifo");
	config_is(fd, "\"log.level\"", "warn");
	close(fd);

	/* What SIGHUP has taken is what a crash restarts with. */
	kv_test_write(bed.conf, "log.level: debug\npolicy: lru\n");
	kill(bed.daemon.pid, SIGHUP);
	wait_for_log(&bed, "log.level is debug");
	kv_test_write(bed.conf, "garbage");
	crash(&bed, NULL);
	fd = open_after(&bed, 2);
	config_is(fd, "\"policy\"", "lru");
	config_is(fd, "\"log.level\"", "debug");
	close(fd);
	bed_end(&bed);
}

KV_TEST(p6_sighup_has_the_precedence_of_the_start)
{
	static const char *const more[][2] = {{NULL}, {"--log.level=info", NULL}};
	bed_t bed;

	for (int i = 0; i < 2; i++) {
		setenv("KVD_LOG_LEVEL", "debug", 1);
		start(&bed, "log.level: info\n", more[i]);
		unsetenv("KVD_LOG_LEVEL");
		kv_test_write(bed.conf, "log.level: error\n");
		kill(bed.daemon.pid, SIGHUP);
		wait_for_log(&bed, i ? "SIGHUP: log.level is info" : "SIGHUP: log.level is debug");
		bed_end(&bed);
	}
}

KV_TEST(p6_a_configuration_that_does_not_start_is_rolled_back)
{
	const char *const more[] = {NULL};
	char path[128];
	bed_t bed;
	int fd;

	start(&bed, "namespaces: [default]\n", more);
	snprintf(path, sizeof path, "%s/other.sock", bed.daemon.dir);
	assert_int_equal(mkdir(path, 0700), 0); /* no socket can be there */
	kv_test_write(bed.conf, "namespaces: [default, other]\n");
	kill(bed.daemon.pid, SIGHUP);
	wait_for_log(&bed, "namespaces: changed, and waits for the next start");
	crash(&bed, NULL);
	wait_for_log(&bed, "going back to the configuration that has served last");
	fd = open_after(&bed, 1);
	config_is(fd, "\"namespaces\"", "default\"");
	status_says(fd, DIFFERS, 1);
	close(fd);
	bed_end(&bed);
}
