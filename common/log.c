/* One log line, one write; a log without a reader costs lines, never time. */
#include "kv/log.h"

#include "kv/text.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* With its newline below PIPE_BUF, so that a pipe takes a line whole or not at all. */
#define LINE_MAX_BYTES 2048u
#define DAY_S          86400
/* While another process writes to a terminal, poll says that there is no room, and a write that does not wait is
 * refused. A line takes a microsecond or two, and 16 looks take 10. */
#define TERMINAL_LOOKS 16u

static _Atomic int log_level = KV_LOG_INFO;
static _Atomic int log_fd = -1;
static _Atomic uint64_t log_dropped;

/* Between "poll says there is room" and the write no other thread of ours may take that room. */
static pthread_mutex_t write_lock = PTHREAD_MUTEX_INITIALIZER;
/* Under it: the last line stayed out, so there is no reader. One look then, until a line is taken again. */
static int unread;
static pthread_once_t forks_seen_to = PTHREAD_ONCE_INIT;

static const char *const level_names[] = {"error", "warn", "info", "debug"};

void kv_log_set_level(kv_log_level_t level)
{
	atomic_store_explicit(&log_level, (int)level, memory_order_relaxed);
}

kv_log_level_t kv_log_level(void)
{
	return (kv_log_level_t)atomic_load_explicit(&log_level, memory_order_relaxed);
}

void kv_log_set_fd(int fd)
{
	atomic_store_explicit(&log_fd, fd, memory_order_relaxed);
}

uint64_t kv_log_dropped(void)
{
	return atomic_load_explicit(&log_dropped, memory_order_relaxed);
}

const char *kv_log_level_name(kv_log_level_t level)
{
	return (unsigned)level < sizeof level_names / sizeof level_names[0] ? level_names[level] : "unknown";
}

/* A terminal without a reader is ready as long as it has any room, and a write waits for room for all of the line:
 * unless the description is one that does not wait. Ours may be shared, so it is opened anew; one we may not open is
 * written as it is. */
static ssize_t write_now(int fd, const char *line, size_t len)
{
	char path[32];
	int own = -1;
	ssize_t n;

	if (isatty(fd)) {
		(void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
		own = open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	}
	n = write(own >= 0 ? own : fd, line, len);
	if (own >= 0) {
		close(own);
	}

	return n;
}

static void take_lock(void)
{
	pthread_mutex_lock(&write_lock);
}

static void drop_lock(void)
{
	pthread_mutex_unlock(&write_lock);
}

/* A child shall not find it taken for ever by a thread that it does not have. */
static void keep_lock_over_forks(void)
{
	(void)pthread_atfork(take_lock, drop_lock, drop_lock);
}

/* Bytes written, or -1 when the line would have to wait (or the fd is gone). */
static ssize_t write_when_free(int fd, const char *line, size_t len)
{
	struct pollfd ready = {.fd = fd, .events = POLLOUT};
	ssize_t n = -1;
	unsigned looks;

	(void)pthread_once(&forks_seen_to, keep_lock_over_forks);
	take_lock();
	looks = !unread && isatty(fd) ? TERMINAL_LOOKS : 1;
	errno = EAGAIN;
	for (unsigned i = 0; i < looks && n < 0 && errno == EAGAIN; i++) {
		if (poll(&ready, 1, 0) == 1 && (ready.revents & POLLOUT)) {
			n = write_now(fd, line, len);
		}
	}
	unread = n < 0;
	drop_lock();

	return n;
}

static int is_file(int fd)
{
	struct stat st;

	return fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
}

/* RWF_NOWAIT leaves the flags of a descriptor we may share with others alone; where a file type does not know it, poll
 * first. A file has no reader to wait for, and with RWF_NOWAIT XFS and btrfs refuse what would take a lock or a block:
 * up to every line. */
static ssize_t write_some(int fd, char *line, size_t len)
{
	struct iovec part = {.iov_base = line, .iov_len = len};
	ssize_t n = is_file(fd) ? write(fd, line, len) : pwritev2(fd, &part, 1, -1, RWF_NOWAIT);

	return n < 0 && errno != EAGAIN && errno != EPIPE ? write_when_free(fd, line, len) : n;
}

/* The reader has gone: that must not end the program, which may be an engine that does not handle SIGPIPE. The signal
 * is blocked for this thread, and taken back if this line raised it. */
static void write_line(int fd, char *line, size_t len)
{
	const struct timespec now = {0};
	sigset_t broken, before, pending;
	ssize_t n;

	sigemptyset(&broken);
	sigaddset(&broken, SIGPIPE);
	pthread_sigmask(SIG_BLOCK, &broken, &before);
	sigpending(&pending);
	n = write_some(fd, line, len);
	if (n < 0 && errno == EPIPE && !sigismember(&pending, SIGPIPE)) {
		while (sigtimedwait(&broken, NULL, &now) < 0 && errno == EINTR) {
		}
	}
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (n != (ssize_t)len) {
		atomic_fetch_add_explicit(&log_dropped, 1, memory_order_relaxed);
	}
}

/* Control characters would let a client's name forge a line of ours. */
static void scrub(char *text, size_t len)
{
	for (size_t i = 0; i < len; i++) {
		if ((unsigned char)text[i] < 0x20 || text[i] == 0x7f) {
			text[i] = '?';
		}
	}
}

/* The date of a day, counted from 1970. Not gmtime_r(): it takes a lock of the C library's, which a child may find
 * taken for ever. */
static void date_of(int64_t day, int *p_year, int *p_month, int *p_day)
{
	const int64_t since = day + 719468; /* days from 0000-03-01: a leap day is a year's last one */
	const int64_t era = since / 146097, of_era = since % 146097;
	const int64_t year = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146096) / 365;
	const int64_t of_year = of_era - (365 * year + year / 4 - year / 100);
	const int64_t month = (5 * of_year + 2) / 153; /* 0: March */

	*p_day = (int)(of_year - (153 * month + 2) / 5) + 1;
	*p_month = (int)(month < 10 ? month + 3 : month - 9);
	*p_year = (int)(era * 400 + year + (month >= 10));
}

void kv_log_line(kv_log_level_t level, const char *component, const char *line)
{
	char buffer[LINE_MAX_BYTES];
	kv_text_t text = kv_text(buffer, sizeof buffer - 1);
	int fd = atomic_load_explicit(&log_fd, memory_order_relaxed);
	int saved_errno = errno;
	int year, month, day, second;
	struct timespec now;
	size_t len;

	if ((int)level > atomic_load_explicit(&log_level, memory_order_relaxed)) {
		return;
	}

	clock_gettime(CLOCK_REALTIME, &now);
	date_of(now.tv_sec / DAY_S, &year, &month, &day);
	second = (int)(now.tv_sec % DAY_S);
	kv_text_addf(&text, "%04d-%02d-%02dT%02d:%02d:%02d.%03ldZ %-5s %s: ", year, month, day, second / 3600,
		     second / 60 % 60, second % 60, now.tv_nsec / 1000000, kv_log_level_name(level), component);
	kv_text_add(&text, line, strlen(line));

	len = kv_text_fits(&text) ? text.len : sizeof buffer - 2;
	scrub(buffer, len);
	buffer[len] = '\n';
	write_line(fd < 0 ? STDERR_FILENO : fd, buffer, len + 1);
	errno = saved_errno;
}

void kv_log(kv_log_level_t level, const char *component, const char *format, ...)
{
	char line[1024];
	va_list args;

	if ((int)level > atomic_load_explicit(&log_level, memory_order_relaxed)) {
		return;
	}

	va_start(args, format);
	vsnprintf(line, sizeof line, format, args);
	va_end(args);
	kv_log_line(level, component, line);
}
