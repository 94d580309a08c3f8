/* Digests of whole files: chunks are dealt to threads of idle priority, and their digests are digested in the order of
 * the file. */
#include "kvx_digest.h"
#include "common/cpus.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <xxhash.h>

#define PIECE_BYTES (UINT64_C(256) << 10)
#define SMALL_BYTES (UINT64_C(4) << 20) /* digested in a millisecond: at the usual priority */
#define AHEAD_BYTES (UINT64_C(4) << 20) /* the kernel's own read-ahead does not follow several threads in one file */

/* linux/ioprio.h, which not every libc installation has */
#define IOPRIO_WHO_PROCESS 1
#define IOPRIO_IDLE        (3 << 13)

typedef struct digest_job {
	const kvx_digest_config_t *config;
	kvx_cpus_t cpus;
	uint64_t bytes, chunks;
	XXH128_canonical_t *digests; /* [chunks] */
	_Atomic uint64_t next;       /* chunk */
	_Atomic int status;          /* kvc_status_t of the first failure */
	_Atomic int error;           /* its errno */
} digest_job_t;

static void fail_job(digest_job_t *job, kvc_status_t status, int error)
{
	int none = KVC_OK;

	if (atomic_compare_exchange_strong(&job->status, &none, status)) {
		atomic_store(&job->error, error);
	}
}

/* The lowest priorities for processor and disk. A refusal costs speed only. */
static void lower_priority(const digest_job_t *job)
{
	const struct sched_param param = {0};

	(void)prctl(PR_SET_NAME, "kvx-digest", 0, 0, 0);
	kvx_cpus_bind_thread(&job->cpus);
	(void)sched_setscheduler(0, SCHED_IDLE, &param);
	(void)syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, IOPRIO_IDLE);
}

static uint64_t smaller(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* The file's bytes [at, at + len) into the state; 0, or -1 with the job failed. */
static int hash_piece(digest_job_t *job, XXH3_state_t *state, uint8_t *buffer, uint64_t at, uint64_t len)
{
	const int fd = job->config->fd;
	uint64_t done = 0;

	while (done < len) {
		const ssize_t got = pread(fd, buffer + done, (size_t)(len - done), (off_t)(at + done));

		if (got < 0 && errno == EINTR) {
			continue;
		}
		if (got <= 0) {
			fail_job(job, KVC_ERR_FAULT, got < 0 ? errno : 0);
			return -1;
		}
		done += (uint64_t)got;
	}
	(void)XXH3_128bits_update(state, buffer, (size_t)len);

	return 0;
}

static int hash_chunk(digest_job_t *job, uint64_t chunk, XXH3_state_t *state, uint8_t *buffer)
{
	const kvx_digest_config_t *config = job->config;
	const uint64_t begin = chunk * KVX_DIGEST_CHUNK, end = smaller(begin + KVX_DIGEST_CHUNK, job->bytes);

	(void)XXH3_128bits_reset(state);
	(void)posix_fadvise(config->fd, (off_t)begin, (off_t)smaller(AHEAD_BYTES, end - begin), POSIX_FADV_WILLNEED);
	for (uint64_t at = begin; at < end; at += PIECE_BYTES) {
		const uint64_t ahead = at + AHEAD_BYTES;

		if (config->cancelled && config->cancelled(config->ctx)) {
			fail_job(job, KVC_ERR_CLOSED, 0);
		}
		if (atomic_load_explicit(&job->status, memory_order_relaxed) != KVC_OK) {
			return -1;
		}
		if ((at - begin) % AHEAD_BYTES == 0 && ahead < end) {
			(void)posix_fadvise(config->fd, (off_t)ahead, (off_t)smaller(AHEAD_BYTES, end - ahead),
					    POSIX_FADV_WILLNEED);
		}
		if (hash_piece(job, state, buffer, at, smaller(PIECE_BYTES, end - at))) {
			return -1;
		}
	}
	XXH128_canonicalFromHash(&job->digests[chunk], XXH3_128bits_digest(state));

	return 0;
}

static void *hash_chunks(void *arg)
{
	digest_job_t *job = arg;
	uint8_t *buffer = malloc(PIECE_BYTES);
	XXH3_state_t *state = XXH3_createState();
	uint64_t chunk;

	if (job->bytes > SMALL_BYTES) {
		lower_priority(job);
	}
	if (!buffer || !state) {
		fail_job(job, KVC_ERR_NOMEM, 0);
	}
	while (buffer && state && (chunk = atomic_fetch_add(&job->next, 1)) < job->chunks) {
		if (hash_chunk(job, chunk, state, buffer)) {
			break;
		}
	}
	(void)XXH3_freeState(state);
	free(buffer);

	return NULL;
}

static uint32_t count_threads(const digest_job_t *job)
{
	const uint32_t wanted = job->config->threads ? job->config->threads : kvx_cpus_count(&job->cpus);
	const uint64_t useful = smaller(wanted, KVX_DIGEST_THREADS);

	return (uint32_t)smaller(useful, job->chunks);
}

/* At most one thread a chunk; the caller does the work of threads that cannot be started. */
static void run_threads(digest_job_t *job)
{
	pthread_t threads[KVX_DIGEST_THREADS];
	const uint32_t wanted = count_threads(job);
	uint32_t started = 0;
	sigset_t all, before;

	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_SETMASK, &all, &before);
	while (started < wanted && pthread_create(&threads[started], NULL, hash_chunks, job) == 0) {
		started++;
	}
	(void)pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (started == 0 && wanted > 0) {
		fail_job(job, KVC_ERR_NOMEM, 0);
	}
	for (uint32_t i = 0; i < started; i++) {
		(void)pthread_join(threads[i], NULL);
	}
}

static void combine(const digest_job_t *job, XXH3_state_t *state, uint8_t digest[KVX_DIGEST_BYTES])
{
	XXH128_canonical_t whole;
	uint8_t length[8];

	for (uint32_t i = 0; i < sizeof length; i++) {
		length[i] = (uint8_t)(job->bytes >> (8 * i));
	}
	(void)XXH3_128bits_reset(state);
	(void)XXH3_128bits_update(state, job->digests, (size_t)job->chunks * sizeof *job->digests);
	(void)XXH3_128bits_update(state, length, sizeof length);
	XXH128_canonicalFromHash(&whole, XXH3_128bits_digest(state));
	memcpy(digest, whole.digest, KVX_DIGEST_BYTES);
}

kvc_status_t kvx_digest_file(const kvx_digest_config_t *config, uint8_t digest[KVX_DIGEST_BYTES])
{
	digest_job_t job = {.config = config};
	XXH3_state_t *state;
	struct stat stat;

	if (!config || config->struct_size < sizeof *config || fstat(config->fd, &stat) != 0 ||
	    !S_ISREG(stat.st_mode)) {
		return KVC_ERR_ARG;
	}
	kvx_cpus_read_allowed(&job.cpus);
	job.bytes = (uint64_t)stat.st_size;
	job.chunks = (job.bytes + KVX_DIGEST_CHUNK - 1) / KVX_DIGEST_CHUNK;
	state = XXH3_createState();
	job.digests = malloc((size_t)(job.chunks + 1) * sizeof *job.digests);
	if (!state || !job.digests) {
		atomic_store(&job.status, KVC_ERR_NOMEM);
	} else {
		(void)posix_fadvise(config->fd, 0, 0, POSIX_FADV_NOREUSE);
		run_threads(&job);
	}
	if (atomic_load(&job.status) == KVC_OK) {
		combine(&job, state, digest);
	}
	(void)XXH3_freeState(state);
	free(job.digests);
	errno = atomic_load(&job.error);

	return (kvc_status_t)atomic_load(&job.status);
}
