/* Digests of memory: pieces are dealt to threads in runs, and their digests are digested range by range. */
#include "common/cpus.h"
#include "kvx_digest.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/prctl.h>

#define RUN (UINT64_C(1048576) / KVK_PIECE) /* pieces a thread takes at a time */

typedef struct memory_job {
	const kvk_range_t *ranges;
	const uint64_t *first; /* [count + 1] number of each range's first piece */
	uint64_t *pieces;      /* [first[count]] digests */
	uint64_t count;
	kvx_cpus_t cpus;
	_Atomic uint64_t next; /* piece that nobody has taken */
} memory_job_t;

static uint64_t smaller(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

static void digest_runs(memory_job_t *job)
{
	const uint64_t all = job->first[job->count];
	uint64_t range = 0, begin; /* runs come in ascending order */

	while ((begin = atomic_fetch_add(&job->next, RUN)) < all) {
		const uint64_t end = smaller(begin + RUN, all);

		for (uint64_t piece = begin; piece < end; piece++) {
			while (piece >= job->first[range + 1]) {
				range++;
			}

			const kvk_range_t *of = &job->ranges[range];
			const uint64_t at = (piece - job->first[range]) * KVK_PIECE;

			job->pieces[piece] = kvk_digest_piece((const void *)(uintptr_t)(of->at + at),
							      (size_t)smaller(KVK_PIECE, of->bytes - at));
		}
	}
}

static void *run_thread(void *arg)
{
	memory_job_t *job = arg;

	(void)prctl(PR_SET_NAME, "kvx-digest", 0, 0, 0);
	kvx_cpus_bind_thread(&job->cpus);
	digest_runs(job);

	return NULL;
}

/* The caller does the work of threads that cannot be started. */
static void run_threads(memory_job_t *job, uint32_t wanted)
{
	const uint64_t runs = (job->first[job->count] + RUN - 1) / RUN;
	const uint64_t most = smaller(smaller(wanted ? wanted : kvx_cpus_count(&job->cpus), KVX_DIGEST_THREADS), runs);
	pthread_t threads[KVX_DIGEST_THREADS];
	uint32_t started = 0;
	sigset_t all, before;

	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_SETMASK, &all, &before);
	while (started + 1 < most && pthread_create(&threads[started], NULL, run_thread, job) == 0) {
		started++;
	}
	(void)pthread_sigmask(SIG_SETMASK, &before, NULL);
	digest_runs(job);
	for (uint32_t i = 0; i < started; i++) {
		(void)pthread_join(threads[i], NULL);
	}
}

/* Number the pieces; first[count] is how many there are. */
static kvc_status_t number_pieces(const kvk_range_t *ranges, uint32_t count, uint64_t *first)
{
	first[0] = 0;
	for (uint32_t i = 0; i < count; i++) {
		uint64_t end;

		if (__builtin_add_overflow(ranges[i].at, ranges[i].bytes, &end) ||
		    __builtin_add_overflow(first[i], kvk_count_pieces(ranges[i].bytes), &first[i + 1])) {
			return KVC_ERR_ARG;
		}
	}

	return KVC_OK;
}

kvc_status_t kvx_digest_memory(const kvk_range_t *ranges, uint32_t count, uint32_t threads,
			       uint8_t (*digests)[KVX_DIGEST_BYTES])
{
	uint64_t *first = calloc((size_t)count + 1, sizeof *first), *pieces = NULL;
	kvc_status_t status = first ? number_pieces(ranges, count, first) : KVC_ERR_NOMEM;

	if (status == KVC_OK) {
		pieces = calloc((size_t)first[count] + 1, sizeof *pieces);
		status = pieces ? KVC_OK : KVC_ERR_NOMEM;
	}
	if (status == KVC_OK) {
		memory_job_t job = {.ranges = ranges, .first = first, .pieces = pieces, .count = count};

		kvx_cpus_read_allowed(&job.cpus);
		run_threads(&job, threads);
		for (uint32_t i = 0; i < count; i++) {
			kvk_digest_range(pieces + first[i], ranges[i].bytes, digests[i]);
		}
	}
	free(pieces);
	free(first);

	return status;
}
