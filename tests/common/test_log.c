/* The log: what a line looks like, that it never blocks, that nobody can forge one. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "kv/log.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>

static int ends[2];

static void open_pipe(void)
{
	assert_int_equal(pipe(ends), 0);
	fcntl(ends[0], F_SETFL, O_NONBLOCK);
	kv_log_set_fd(ends[1]);
	kv_log_set_level(KV_LOG_INFO);
}

static void close_pipe(void)
{
	kv_log_set_fd(-1);
	close(ends[0]);
	close(ends[1]);
}

#define PIPE_TEST(name) KV_TEST_BETWEEN(name, open_pipe(), close_pipe())

static size_t read_pipe(char *out, size_t cap)
{
	ssize_t n = read(ends[0], out, cap - 1);

	out[n > 0 ? n : 0] = '\0';

	return n > 0 ? (size_t)n : 0;
}

PIPE_TEST(a_line_has_time_level_component_and_sentence)
{
	struct timespec before, after;
	struct tm utc = {0};
	time_t said;
	char out[4096];

	clock_gettime(CLOCK_REALTIME, &before);
	kv_log(KV_LOG_WARN, "nvme", "read failed slot %d", 7);
	clock_gettime(CLOCK_REALTIME, &after);
	read_pipe(out, sizeof out);
	assert_non_null(strptime(out, "%Y-%m-%dT%H:%M:%S.", &utc));
	said = timegm(&utc);
	assert_true(said >= before.tv_sec && said <= after.tv_sec);
	assert_string_equal(out + 23, "Z warn  nvme: read failed slot 7\n");
}

PIPE_TEST(lines_above_the_level_are_dropped)
{
	char out[4096];

	kv_log(KV_LOG_DEBUG, "core", "no");
	kv_log_line(KV_LOG_DEBUG, "core", "no");
	assert_int_equal(read_pipe(out, sizeof out), 0);
	kv_log_set_level(KV_LOG_DEBUG);
	assert_int_equal(kv_log_level(), KV_LOG_DEBUG);
	kv_env_posix.log(NULL, KV_LOG_DEBUG, "core", "yes");
	assert_true(read_pipe(out, sizeof out) > 0);
}

PIPE_TEST(p10_a_line_cannot_be_forged_or_overrun)
{
	char out[8192], longer[5000];

	kv_log(KV_LOG_INFO, "io", "%s", "client a\nerror b\x1b[31m");
	read_pipe(out, sizeof out);
	assert_non_null(strstr(out, "client a?error b?[31m\n"));
	memset(longer, 'x', sizeof longer - 1);
	longer[sizeof longer - 1] = '\0';
	kv_log_line(KV_LOG_INFO, "io", longer);
	assert_int_equal(read_pipe(out, sizeof out), 2047);
	assert_int_equal(out[2046], '\n');
}

static double seconds(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);

	return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

PIPE_TEST(p5_a_full_pipe_costs_lines_never_time)
{
	uint64_t before = kv_log_dropped();
	double start = seconds();
	char out[70000];
	int flags;

	flags = fcntl(ends[1], F_GETFL);
	for (int i = 0; i < 3000; i++) {
		kv_log(KV_LOG_INFO, "io", "line %d of a log that nobody reads, long enough to fill a pipe", i);
	}
	assert_true(seconds() - start < 5.0);
	assert_true(kv_log_dropped() - before > 1000);
	assert_int_equal(fcntl(ends[1], F_GETFL), flags);

	/* Every line that got in is whole. */
	read_pipe(out, sizeof out);
	for (char *line = strtok(out, "\n"); line; line = strtok(NULL, "\n")) {
		assert_non_null(strstr(line, "fill a pipe"));
	}
}

/* A new terminal, or -1: there are none here. */
static int open_terminal(int *p_master)
{
	int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
	const char *name = master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0 ? ptsname(master) : NULL;

	*p_master = master;

	return name ? open(name, O_RDWR | O_NOCTTY | O_CLOEXEC) : -1;
}

/* ends[0] reads what is written to the terminal ends[1]. */
static void begin_terminal(void)
{
	ends[1] = open_terminal(&ends[0]);
	if (ends[1] < 0) {
		print_message("# SKIP: no terminals here\n");
		skip();
	}
	kv_log_set_fd(ends[1]);
}

#define TERMINAL_TEST(name) KV_TEST_BETWEEN(name, begin_terminal(), close_pipe())

/* A terminal with a little room says that it is ready, and then waits for the rest. */
TERMINAL_TEST(p5_a_terminal_that_nobody_reads_costs_lines_never_time)
{
	uint64_t before = kv_log_dropped();
	const int flags = fcntl(ends[1], F_GETFL);

	alarm(20);
	for (int i = 0; i < 3000; i++) {
		kv_log(KV_LOG_INFO, "io", "line %d of a log that nobody reads, long enough to fill a terminal", i);
	}
	alarm(0);
	assert_true(kv_log_dropped() - before > 1000);
	assert_int_equal(fcntl(ends[1], F_GETFL), flags);
}

/* While another process writes to a terminal it looks full, and a write that does not wait is refused: this number of
 * looks and writes from now on. -1: for ever. */
static _Atomic int busy_looks, busy_writes, looks;
int __real_poll(struct pollfd *fds, nfds_t n, int timeout);
int __wrap_poll(struct pollfd *fds, nfds_t n, int timeout);
int __wrap_poll(struct pollfd *fds, nfds_t n, int timeout)
{
	assert_int_equal(timeout, 0);
	looks++;
	if (busy_looks != 0) {
		busy_looks -= busy_looks > 0;
		return 0;
	}

	return __real_poll(fds, n, timeout);
}

ssize_t __real_write(int fd, const void *data, size_t n);
ssize_t __wrap_write(int fd, const void *data, size_t n);
ssize_t __wrap_write(int fd, const void *data, size_t n)
{
	if (busy_writes != 0) {
		busy_writes -= busy_writes > 0;
		errno = EAGAIN;
		return -1;
	}

	return __real_write(fd, data, n);
}

/* Bytes of one line. The terminal hands on its text and its newline one after the other, and a read may come between
 * them. */
static size_t read_line(void)
{
	char out[4096];
	size_t len = 0;

	while (len == 0 || out[len - 1] != '\n') {
		ssize_t n = read(ends[0], out + len, sizeof out - len);

		assert_true(n > 0);
		len += (size_t)n;
	}

	return len;
}

TERMINAL_TEST(p5_a_terminal_that_another_program_writes_to_takes_the_line)
{
	uint64_t before = kv_log_dropped();

	kv_log(KV_LOG_INFO, "io", "nil");
	assert_int_equal(read_line(), 40);
	busy_looks = 3;
	busy_writes = 3;
	kv_log(KV_LOG_INFO, "io", "one");
	assert_int_equal(kv_log_dropped(), before);
	assert_int_equal(read_line(), 40); /* a terminal's newline is two */
	assert_int_equal(busy_looks, 0);
	assert_int_equal(busy_writes, 0);

	/* One that stays so costs the line and a few looks; the lines after it cost one each, until it takes one
	 * again. */
	for (int round = 0; round < 2; round++) {
		looks = 0;
		*(round ? &busy_writes : &busy_looks) = -1;
		kv_log(KV_LOG_INFO, "io", "two");
		assert_in_range(looks, 2, 32);
		looks = 0;
		kv_log(KV_LOG_INFO, "io", "three");
		assert_int_equal(looks, 1);
		busy_looks = busy_writes = 0;
		kv_log(KV_LOG_INFO, "io", "four");
		assert_int_equal(looks, 2);
	}
	assert_int_equal(kv_log_dropped(), before + 4);
}

static _Atomic int quiet_;

static void *keep_talking(void *arg)
{
	(void)arg;
	while (!quiet_) {
		kv_log(KV_LOG_INFO, "io", "a line of a thread that a forked child does not have");
	}

	return NULL;
}

static void *read_away(void *arg)
{
	char out[4096];

	while (read(*(int *)arg, out, sizeof out) > 0) {
	}

	return NULL;
}

/* Children of a program whose threads log all the time log too; each has its own alarm. */
static void fork_amid_lines(int fd, int reader, int forks)
{
	pthread_t talkers[4], sink;
	int wstatus = 0;

	kv_log_set_fd(fd);
	quiet_ = 0;
	pthread_create(&sink, NULL, read_away, &reader);
	for (size_t i = 0; i < 4; i++) {
		pthread_create(&talkers[i], NULL, keep_talking, NULL);
	}
	for (int i = 0; i < forks && wstatus == 0; i++) {
		pid_t pid = fork();

		if (pid == 0) {
			alarm(10);
			kv_log(KV_LOG_INFO, "io", "child");
			_exit(0);
		}
		waitpid(pid, &wstatus, 0);
	}
	quiet_ = 1;
	for (size_t i = 0; i < 4; i++) {
		pthread_join(talkers[i], NULL);
	}
	kv_log_set_fd(-1);
	close(fd);
	pthread_join(sink, NULL);
	close(reader);
	assert_int_equal(wstatus, 0);
}

KV_TEST(p7_a_child_forked_while_others_log_can_log)
{
	int fd;

	fd = open_terminal(&ends[0]);
	if (fd >= 0) {
		fork_amid_lines(fd, ends[0], 100);
	}
	assert_int_equal(pipe(ends), 0);
	fork_amid_lines(ends[1], ends[0], 500);
}

KV_TEST(p6_a_closed_reader_or_descriptor_only_counts)
{
	uint64_t before = kv_log_dropped();

	signal(SIGPIPE, SIG_IGN);
	open_pipe();
	close(ends[0]);
	kv_log(KV_LOG_INFO, "io", "nobody");
	assert_int_equal(kv_log_dropped(), before + 1);
	close(ends[1]);
	errno = 1234;
	kv_log(KV_LOG_INFO, "io", "nothing");
	assert_int_equal(errno, 1234);
	assert_int_equal(kv_log_dropped(), before + 2);
	kv_log_set_fd(-1);
}

/* Writes a line whose reader has gone, with the default action of SIGPIPE. 0: the process goes on. */
static int write_to_nobody(void)
{
	sigset_t none, mask, pending;

	sigemptyset(&none);
	signal(SIGPIPE, SIG_DFL);
	sigprocmask(SIG_SETMASK, &none, NULL);
	kv_log(KV_LOG_WARN, "kvx", "the daemon has gone");
	sigprocmask(SIG_SETMASK, NULL, &mask);
	sigpending(&pending);

	return sigismember(&mask, SIGPIPE) || sigismember(&pending, SIGPIPE);
}

KV_TEST(p7_an_engine_survives_a_line_that_nobody_reads_any_more)
{
	int pair[2], wstatus = 0;

	assert_int_equal(pipe(ends), 0);
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
	close(ends[0]);
	close(pair[0]);
	for (int i = 0; i < 2; i++) {
		pid_t pid = fork();

		if (pid == 0) {
			kv_log_set_fd(i ? pair[1] : ends[1]);
			_exit(write_to_nobody());
		}
		assert_int_equal(waitpid(pid, &wstatus, 0), pid);
		assert_int_equal(wstatus, 0);
	}
	close(ends[1]);
	close(pair[1]);
}

/* Some file systems refuse what would take a lock or a block: XFS often, btrfs every line. */
static int unready;
ssize_t __real_pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags);
ssize_t __wrap_pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags);
ssize_t __wrap_pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags)
{
	if (unready && (flags & RWF_NOWAIT)) {
		errno = EAGAIN;
		return -1;
	}

	return __real_pwritev2(fd, parts, count, offset, flags);
}

KV_TEST(a_file_takes_every_line_also_when_its_file_system_would_block)
{
	const uint64_t before = kv_log_dropped();
	char dir[128], path[256], out[4096];
	int fd;

	kv_test_dir_make(dir, sizeof dir);
	snprintf(path, sizeof path, "%s/log", dir);
	fd = open(path, O_RDWR | O_CREAT | O_APPEND, 0600);
	kv_log_set_fd(fd);
	for (unready = 0; unready < 2; unready++) {
		kv_log(KV_LOG_INFO, "io", "one");
		kv_log(KV_LOG_INFO, "io", "two");
	}
	unready = 0;
	assert_int_equal(kv_log_dropped(), before);
	assert_true(pread(fd, out, sizeof out, 0) == 4 * 39 && out[77] == '\n' && out[155] == '\n');
	kv_log_set_fd(-1);
	close(fd);
	kv_test_dir_remove(dir);
}

KV_TEST(a_socket_takes_lines_too)
{
	char out[4096];

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
	kv_log_set_fd(ends[1]);
	kv_log(KV_LOG_INFO, "io", "three");
	assert_int_equal(read(ends[0], out, sizeof out), 41);
	close_pipe();
}

static void *chatter(void *arg)
{
	for (int i = 0; i < 200; i++) {
		kv_log(KV_LOG_INFO, "io", "thread %d says line %d", *(int *)arg, i);
	}

	return NULL;
}

PIPE_TEST(lines_of_several_threads_do_not_mix)
{
	int ids[4] = {0, 1, 2, 3};
	pthread_t threads[4];
	char out[70000];
	unsigned lines = 0;

	fcntl(ends[1], F_SETPIPE_SZ, 1 << 20);
	for (int i = 0; i < 4; i++) {
		assert_int_equal(pthread_create(&threads[i], NULL, chatter, &ids[i]), 0);
	}
	for (int i = 0; i < 4; i++) {
		pthread_join(threads[i], NULL);
	}
	while (read_pipe(out, sizeof out) > 0) {
		for (char *line = out; (line = strchr(line, '\n')); line++) {
			lines++;
		}
	}
	assert_int_equal(lines, 800);
}
