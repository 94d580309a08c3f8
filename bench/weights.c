/* weights/memory -- the digest of memory, as an engine's weights lie there, against threads that only read the same
 * memory; and weights/cached, weights/cold -- the digest of one large file, which names a model's weights, against
 * threads that only read the same file. Cached: behind an engine that has just read it. Cold: its pages are dropped
 * before each round. GB/s; the goal is that digesting costs little beside reading. --with bytes=16GiB, dir=DIR (default
 * /var/tmp). */
#include "bench.h"

#include "kvx_digest.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PIECE   (UINT64_C(256) << 10)
#define THREADS KVX_DIGEST_THREADS

typedef struct work {
	int fd, cold;
	uint64_t bytes;
	uint32_t threads;
	_Atomic uint64_t next; /* chunk that nobody reads yet */
	_Atomic int failed;
} work_t;

/* Pages of a file are dropped only when they are on the disk. */
static void prepare(const work_t *work)
{
	if (work->cold) {
		(void)fsync(work->fd);
		(void)posix_fadvise(work->fd, 0, 0, POSIX_FADV_DONTNEED);
	}
}

static bench_outcome_t digest_file(void *arg, bench_sample_t *p_sample)
{
	const work_t *work = arg;
	const kvx_digest_config_t config = {.struct_size = sizeof config, .fd = work->fd, .threads = work->threads};
	uint8_t digest[KVX_DIGEST_BYTES];
	bench_clock_t start;

	prepare(work);
	start = bench_start();
	if (kvx_digest_file(&config, digest) != KVC_OK) {
		return bench_fail("the file cannot be digested");
	}
	bench_use(digest[0]);

	return bench_rate(start, (double)work->bytes, (double)work->bytes / 1e9, p_sample);
}

static void *read_chunks(void *arg)
{
	work_t *work = arg;
	uint8_t *buffer = malloc(PIECE);
	uint64_t at;

	while (buffer && (at = atomic_fetch_add(&work->next, 1) * KVX_DIGEST_CHUNK) < work->bytes) {
		for (uint64_t end = at + KVX_DIGEST_CHUNK; at < end && at < work->bytes; at += PIECE) {
			if (pread(work->fd, buffer, PIECE, (off_t)at) <= 0) {
				atomic_store(&work->failed, 1);
			}
		}
	}
	free(buffer);

	return NULL;
}

static bench_outcome_t read_file(void *arg, bench_sample_t *p_sample)
{
	work_t *work = arg;
	pthread_t threads[THREADS];
	uint32_t started = 0;
	bench_clock_t start;

	prepare(work);
	atomic_store(&work->next, 0);
	start = bench_start();
	while (started < work->threads && pthread_create(&threads[started], NULL, read_chunks, work) == 0) {
		started++;
	}
	for (uint32_t i = 0; i < started; i++) {
		(void)pthread_join(threads[i], NULL);
	}
	if (started == 0 || atomic_load(&work->next) * KVX_DIGEST_CHUNK < work->bytes || atomic_load(&work->failed)) {
		return bench_fail("the file cannot be read");
	}

	return bench_rate(start, (double)work->bytes, (double)work->bytes / 1e9, p_sample);
}

/* ---- memory ---------------------------------------------------------------------------------- */

typedef struct memory_work {
	uint8_t *memory;
	uint64_t bytes;
	uint32_t threads;
	_Atomic uint64_t next; /* piece that nobody reads yet */
} memory_work_t;

static bench_outcome_t digest_memory(void *arg, bench_sample_t *p_sample)
{
	const memory_work_t *work = arg;
	const kvk_range_t range = {(uint64_t)(uintptr_t)work->memory, work->bytes};
	const bench_clock_t start = bench_start();
	uint8_t digest[1][KVX_DIGEST_BYTES];

	if (kvx_digest_memory(&range, 1, work->threads, digest) != KVC_OK) {
		return bench_fail("the memory cannot be digested");
	}
	bench_use(digest[0][0]);

	return bench_rate(start, (double)work->bytes, (double)work->bytes / 1e9, p_sample);
}

/* A sum of all words, by vectors. */
static void *sum_pieces(void *arg)
{
	memory_work_t *work = arg;
	uint64_t sum = 0, at;

	while ((at = atomic_fetch_add(&work->next, PIECE)) < work->bytes) {
		const uint64_t *words = (const uint64_t *)(const void *)(work->memory + at);

		for (uint64_t i = 0; i < PIECE / sizeof *words; i++) {
			sum += words[i];
		}
	}
	bench_use(sum);

	return NULL;
}

static bench_outcome_t read_memory(void *arg, bench_sample_t *p_sample)
{
	memory_work_t *work = arg;
	pthread_t threads[THREADS];
	uint32_t started = 0;
	bench_clock_t start;

	atomic_store(&work->next, 0);
	start = bench_start();
	while (started + 1 < work->threads && pthread_create(&threads[started], NULL, sum_pieces, work) == 0) {
		started++;
	}
	(void)sum_pieces(work);
	for (uint32_t i = 0; i < started; i++) {
		(void)pthread_join(threads[i], NULL);
	}

	return bench_rate(start, (double)work->bytes, (double)work->bytes / 1e9, p_sample);
}

static uint32_t count_threads(void)
{
	cpu_set_t cpus;
	const uint32_t n = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? (uint32_t)CPU_COUNT(&cpus) : 1;

	return n < THREADS ? n : THREADS;
}

bench_outcome_t run_weights_memory(int unused)
{
	memory_work_t work = {.threads = count_threads()};
	bench_outcome_t outcome;

	(void)unused;
	work.bytes = bench_param_size("bytes", bench_quick() ? UINT64_C(256) << 20 : UINT64_C(2) << 30) / PIECE * PIECE;
	work.memory = bench_memory(work.bytes);
	if (!work.memory) {
		return bench_skip("no memory of %llu bytes", (unsigned long long)work.bytes);
	}
	bench_fill(work.memory, work.bytes, 1);
	outcome =
		bench_measure(&work, &(bench_measurement_t){"weights/memory", "GB/s", "threads that only read",
							    digest_memory, read_memory, 3, BENCH_RATIO_AT_LEAST, 0.8});
	free(work.memory);

	return outcome;
}

bench_outcome_t run_weights(int cold)
{
	const char *dir = bench_param("dir", "/var/tmp");
	work_t work = {.cold = cold};
	bench_outcome_t outcome;

	work.bytes = bench_param_size("bytes", bench_quick() ? UINT64_C(256) << 20 : UINT64_C(2) << 30) / PIECE * PIECE;
	work.threads = count_threads();
	work.fd = bench_file(dir, work.bytes, 0);
	if (work.fd < 0) {
		return bench_skip("no file of %llu bytes in %s: %s", (unsigned long long)work.bytes, dir,
				  strerror(errno));
	}
	outcome = bench_measure(&work, &(bench_measurement_t){cold ? "weights/cold" : "weights/cached", "GB/s",
							      "threads that only read", digest_file, read_file, 3,
							      BENCH_RATIO_AT_LEAST, cold ? 0.9 : 0.3});
	(void)close(work.fd);

	return outcome;
}
