/* Clocks, CPUs, memory and bytes for benches. */
#include "bench.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define HUGE_PAGE  ((size_t)2 << 20)
#define FILE_PIECE ((size_t)1 << 20)

static volatile sig_atomic_t stopped;
static uint64_t end_ns = UINT64_MAX;

static uint64_t clock_ns(clockid_t clock)
{
	struct timespec ts;

	clock_gettime(clock, &ts);

	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

uint64_t bench_now_ns(void)
{
	return clock_ns(CLOCK_MONOTONIC);
}

uint64_t bench_thread_cpu_ns(void)
{
	return clock_ns(CLOCK_THREAD_CPUTIME_ID);
}

uint64_t bench_process_cpu_ns(void)
{
	return clock_ns(CLOCK_PROCESS_CPUTIME_ID);
}

bench_clock_t bench_start(void)
{
	return (bench_clock_t){.cpu_ns = bench_process_cpu_ns(), .ns = bench_now_ns()};
}

bench_outcome_t bench_rate(bench_clock_t start, double bytes, double ops, bench_sample_t *p_sample)
{
	p_sample->value = bytes / (double)(bench_now_ns() - start.ns);
	p_sample->cpu_ns = (double)(bench_process_cpu_ns() - start.cpu_ns);
	p_sample->ops = ops;

	return BENCH_DONE;
}

static void stop(int number)
{
	(void)number;
	stopped = 1;
}

void bench_limit(uint64_t seconds)
{
	end_ns = seconds ? bench_now_ns() + seconds * 1000000000u : UINT64_MAX;
	(void)signal(SIGTERM, stop);
	(void)signal(SIGINT, stop);
}

int bench_late(void)
{
	return stopped || bench_now_ns() >= end_ns;
}

static int compare_doubles(const void *a, const void *b)
{
	const double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

double bench_quantile(double *values, size_t count, double quantile)
{
	const double position = quantile * (double)(count ? count - 1 : 0);
	const size_t below = (size_t)position;

	qsort(values, count, sizeof *values, compare_doubles);
	if (below + 1 >= count) {
		return count ? values[count - 1] : 0;
	}

	return values[below] + (position - (double)below) * (values[below + 1] - values[below]);
}

/* The processors this program was started on: pinning narrows the thread's own set, and later pins must still see
 * all. */
static cpu_set_t start_set;

__attribute__((constructor)) static void read_start_set(void)
{
	(void)sched_getaffinity(0, sizeof start_set, &start_set);
}

int bench_pin(unsigned n)
{
	const unsigned count = (unsigned)CPU_COUNT(&start_set);
	unsigned skip = count > 0 ? n % count : 0;
	cpu_set_t one;

	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
		if (CPU_ISSET((size_t)cpu, &start_set) && skip-- == 0) {
			CPU_ZERO(&one);
			CPU_SET((size_t)cpu, &one);
			return sched_setaffinity(0, sizeof one, &one) == 0 ? cpu : -1;
		}
	}

	return -1;
}

void bench_unpin(void)
{
	(void)sched_setaffinity(0, sizeof start_set, &start_set);
}

void *bench_memory(size_t bytes)
{
	const size_t size = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
	void *memory = aligned_alloc(HUGE_PAGE, size);

	if (memory) {
		(void)madvise(memory, size, MADV_HUGEPAGE);
		memset(memory, 1, size);
	}

	return memory;
}

uint64_t bench_random(uint64_t *state)
{
	uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);

	return z ^ (z >> 31);
}

void bench_fill(void *memory, size_t bytes, uint64_t seed)
{
	uint8_t *out = memory;
	uint64_t x = bench_random(&seed) | 1;

	for (size_t at = 0; at < bytes; at += sizeof x) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		memcpy(out + at, &x, bytes - at < sizeof x ? bytes - at : sizeof x);
	}
}

/* Every byte is written: a disk does not read space that was never written. */
static int write_random(int fd, uint64_t bytes)
{
	uint8_t *piece = bench_memory(FILE_PIECE);
	uint64_t at = 0;

	(void)posix_fallocate(fd, 0, (off_t)bytes);
	while (piece && at < bytes && !bench_late()) {
		const size_t n = bytes - at < FILE_PIECE ? (size_t)(bytes - at) : FILE_PIECE;

		bench_fill(piece, n, at + 1);
		if (pwrite(fd, piece, n, (off_t)at) != (ssize_t)n) {
			break;
		}
		at += n;
	}
	errno = bench_late() ? ETIME : errno;
	free(piece);

	return at == bytes;
}

int bench_file(const char *dir, uint64_t bytes, int flags)
{
	char path[512];
	int fd;

	snprintf(path, sizeof path, "%s/kvd-bench-XXXXXX", dir);
	fd = mkostemp(path, flags | O_CLOEXEC);
	if (fd < 0) {
		return -1;
	}
	(void)unlink(path);
	if (!write_random(fd, bytes)) {
		close(fd);
		return -1;
	}

	return fd;
}
