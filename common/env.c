/* The real world behind kv_env_t. */
#include "kv/env.h"

#include "kv/log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

static uint64_t posix_now_ns(void *ctx)
{
	struct timespec ts;

	(void)ctx;
	clock_gettime(CLOCK_MONOTONIC, &ts);

	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Random bytes and nothing else: other files have been put there. */
static int is_random_device(int fd)
{
	struct stat st;

	return fd >= 0 && fstat(fd, &st) == 0 && S_ISCHR(st.st_mode) && major(st.st_rdev) == 1 &&
	       (minor(st.st_rdev) == 8 || minor(st.st_rdev) == 9);
}

/* It stays open: a later call may find no free descriptor, and cannot fail. -1: there is none. */
static int open_random_device(void)
{
	static _Atomic int kept = -1;
	int other = atomic_load(&kept);
	int fd;

	if (is_random_device(other)) {
		return other;
	}
	fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
	if (!is_random_device(fd)) {
		if (fd >= 0) {
			close(fd);
		}
		return -1;
	}
	if (!atomic_compare_exchange_strong(&kept, &other, fd)) {
		close(fd);
		return other;
	}

	return fd;
}

/* The device is as good where a filter refuses the call. Bytes, or an errno below 0. */
static ssize_t read_random(void *out, size_t n)
{
	ssize_t got = getrandom(out, n, 0);
	const int refused = got < 0 ? errno : 0;

	if (refused == 0 || refused == EINTR) {
		return refused ? -refused : got;
	}
	got = read(open_random_device(), out, n);

	return got > 0 ? got : -refused;
}

int kv_random_error(void)
{
	uint8_t byte;
	ssize_t got;

	do {
		got = read_random(&byte, sizeof byte);
	} while (got == -EINTR);

	return got > 0 ? 0 : (int)-got;
}

static void posix_random(void *ctx, void *out, size_t n)
{
	uint8_t *p = out;

	(void)ctx;
	while (n > 0) {
		ssize_t got = read_random(p, n);

		if (got > 0) {
			p += got;
			n -= (size_t)got;
		}
	}
}

static void *posix_alloc(void *ctx, size_t n)
{
	(void)ctx;

	return calloc(1, n);
}

static void *posix_resize(void *ctx, void *p, size_t old_n, size_t n)
{
	(void)ctx;
	(void)old_n;

	return realloc(p, n);
}

static void posix_free(void *ctx, void *p)
{
	(void)ctx;
	free(p);
}

static void posix_log(void *ctx, kv_log_level_t level, const char *component, const char *line)
{
	(void)ctx;
	kv_log_line(level, component, line);
}

const kv_env_t kv_env_posix = {
	.ctx = NULL,
	.now_ns = posix_now_ns,
	.random = posix_random,
	.alloc = posix_alloc,
	.resize = posix_resize,
	.free = posix_free,
	.log = posix_log,
};

void kv_logf(const kv_env_t *env, kv_log_level_t level, const char *component, const char *format, ...)
{
	char line[1024];
	va_list args;

	va_start(args, format);
	vsnprintf(line, sizeof line, format, args);
	va_end(args);
	env->log(env->ctx, level, component, line);
}

_Noreturn void kv_assert_failed(const char *condition, const char *file, int line)
{
	char text[512];
	int len = snprintf(text, sizeof text, "kvd: broken invariant: %s (%s:%d)\n", condition, file, line);

	if (len > 0) {
		ssize_t ignored = write(STDERR_FILENO, text, (size_t)len);
		(void)ignored;
	}
	abort();
}

static _Atomic uint64_t broken;

void kv_invariant_broken(const char *condition, const char *file, int line)
{
	if (atomic_fetch_add(&broken, 1u) == 0) {
		kv_logf(&kv_env_posix, KV_LOG_ERROR, "kvd",
			"broken invariant: %s (%s:%d); this process goes on without the cache. Please report this line",
			condition, file, line);
	}
}

uint64_t kv_broken_count(void)
{
	return atomic_load_explicit(&broken, memory_order_relaxed);
}
