/* kvk/gpu.h -- kvk/move.h for a paged cache in GPU memory: the same arguments, bytes and digests, in the order of a
 * stream.
 *
 * A kvk_gpu_t is one device as one process sees it, in the device's primary context (the one frameworks use). Copies
 * are submitted to a stream, run there in the stream's order, and are asked about afterwards: nothing here synchronises
 * a stream or the device, and nothing waits but kvk_gpu_wait() and kvk_gpu_digest(). The pool side of a copy is host
 * memory made known with kvk_gpu_register(), memory of a GPU mapped with kvk_gpu_map(), or other memory of this or of a
 * peer device.
 *
 *   ZERO_COPY   the kernel reads and writes pool pages over the link: any range of heads and layers, smallest units,
 *               some SMs
 *   STAGED      the copy engine moves what is contiguous to a ring in the device's memory, the kernel permutes
 *               there: whole blocks, few SMs
 *   COPY_PER_PIECE  one driver copy a piece: where no kernel runs (none in this build, or none that this driver and
 *               device take), and for digests of
 *               leaves of 240 bytes and less, which the kernels do not make. No digest is made on the way: the host
 *               makes it of the pool's block, once
 *               all copies have ended, in the poll that finds them over. Many small copies: correct, and slow
 *
 * A way that cannot be had becomes the next best: COPY_PER_PIECE in those cases; STAGED, else COPY_PER_PIECE, for a
 * peer's memory that this device has no access to; ZERO_COPY for STAGED without device memory for a ring, or with a
 * layer of a block that is larger than a sixteenth of it. kvk_gpu_describe(), the log and the counters say so. AUTO
 * takes ZERO_COPY for memory of a GPU that kernels reach: this one's, or a peer's over their link.
 *
 * Threads: every function may be called from any thread; a job belongs to one thread at a time. Not fork-safe.
 */
#ifndef KVK_GPU_H
#define KVK_GPU_H

#include "kvk/cuda.h"
#include "kvk/digest_range.h"
#include "kvk/move.h"

#include "kv/env.h"

typedef struct kvk_gpu kvk_gpu_t;
typedef struct kvk_gpu_job kvk_gpu_job_t;

typedef enum kvk_gpu_way {
	KVK_GPU_AUTO = 0, /* ZERO_COPY in a GPU's memory; of host memory what was fastest when the device was measured
			     (kvk_gpu_measure), else by a rule */
	KVK_GPU_ZERO_COPY = 1,
	KVK_GPU_STAGED = 2,
	KVK_GPU_COPY_PER_PIECE = 3,
} kvk_gpu_way_t;

typedef struct kvk_gpu_config {
	int device;                 /* ordinal, as the driver counts in this process */
	const kvk_cuda_ops_t *cuda; /* kvk_cuda_load() */
	const kv_env_t *env;        /* NULL: the real one */
	uint32_t sms;               /* most SMs a copy takes unless it says otherwise; 0: 4 to 16 (kvk_gpu_measure) */
	uint32_t jobs;              /* most jobs at a time; 0: 64 */
	uint64_t staging_bytes;     /* ring in device memory for STAGED; 0: 128 MiB; taken at the first use */
	const void *image;          /* kernels, as the driver loads them; NULL: those of this build */
} kvk_gpu_config_t;

/* KV_ERR_UNSUPPORTED: no driver, no such device, or one that cannot use host memory (kvk_gpu_last_error());
 * KV_ERR_NOMEM; KV_ERR_IO: the driver says no. Without kernels it opens all the same, and copies go piece by piece:
 * kvk_gpu_describe() says so. */
kv_status_t kvk_gpu_open(const kvk_gpu_config_t *config, kvk_gpu_t **p_gpu);
/* All jobs must have ended. Unregisters what is still registered. NULL is fine. */
void kvk_gpu_close(kvk_gpu_t *gpu);
/* Why the last call on this thread failed, as a sentence with the driver's word for it; never NULL. */
const char *kvk_gpu_last_error(void);
/* "NVIDIA H200, driver 13000, zero copy and staged": for logs and status. Valid until close. */
const char *kvk_gpu_describe(const kvk_gpu_t *gpu);

/* "GPU-8-4-4-4-12", lower case, as nvidia-smi prints it: the device by the name that all processes know it by. "": the
 * driver cannot say. Valid until close. */
const char *kvk_gpu_uuid(const kvk_gpu_t *gpu);

/* ---- memory that is copied from and to ------------------------------------------------------- */

/* Make host memory known to the device, for as long as it stays mapped here: pins it. 0.035 s/GiB on huge pages, 0.6 on
 * small ones. KV_ERR_LIMIT: the kernel refuses to pin so much (memlock); KV_ERR_IO. Ranges do not overlap. */
kv_status_t kvk_gpu_register(kvk_gpu_t *gpu, void *base, size_t bytes);
/* Before it is unmapped. Waits for nothing: no job may use it. */
void kvk_gpu_unregister(kvk_gpu_t *gpu, void *base);
/* Give memory of a GPU, this one or a peer, an address for the copies of this one: *p_base, which the CPU must not use.
 * `fd`: a descriptor that the CUDA driver exported, which stays the caller's and may be closed at once; `bytes`: all of
 * it. The memory lives at least until it is unmapped here. KV_ERR_ARG; KV_ERR_UNSUPPORTED: the driver has no such
 * calls; KV_ERR_LIMIT: too many ranges; KV_ERR_NOMEM; KV_ERR_IO: the driver refuses (the descriptor is of something
 * else or of another size, or this device does not reach the peer). After a failure nothing is mapped or kept. */
kv_status_t kvk_gpu_map(kvk_gpu_t *gpu, int fd, size_t bytes, void **p_base);
/* Waits for nothing: no job may use it. */
void kvk_gpu_unmap(kvk_gpu_t *gpu, void *base);
/* Does the device see all of these bytes (registered or mapped, in one piece)? Lock-free against copies. */
int kvk_gpu_is_registered(const kvk_gpu_t *gpu, const void *at, size_t bytes);
/* Where the device sees registered or mapped memory: a paged cache in registered memory is described with such
 * addresses. KV_ERR_ARG: it does not. */
kv_status_t kvk_gpu_address(kvk_gpu_t *gpu, const void *at, size_t bytes, kvk_cu_ptr_t *p_address);

/* Does all of the cache lie in memory of this device, at the addresses in base[]? Copies do not ask. The description
 * has passed kvk_paged_check(). KV_ERR_ARG: it does not; KV_ERR_IO. */
kv_status_t kvk_gpu_check_paged(kvk_gpu_t *gpu, const kvk_paged_t *paged);

/* ---- copies ---------------------------------------------------------------------------------- */

typedef enum kvk_gpu_dir {
	KVK_GPU_GATHER,  /* paged cache -> canonical blocks */
	KVK_GPU_SCATTER, /* canonical blocks -> paged cache */
} kvk_gpu_dir_t;

typedef struct kvk_gpu_copy {
	kvk_gpu_dir_t dir;
	kvk_gpu_way_t way;
	const kvk_layout_t *layout; /* read during the call only, as is everything else here but the memory copied */
	const kvk_paged_t *paged;   /* base[]: device addresses of this device */
	uint32_t layer, layers;     /* range within the paged cache's layers; layers 0: all of them */
	/* `data`: pool block, in registered host memory, in mapped memory of a GPU, or in memory the driver knows:
	 * pinned by others, of this device, of a peer. `leaves`: expected digests of a scatter (read during the call),
	 * room for those of a gather (written by the poll that says OK). Layout of leaves as in kvk/move.h, of all the
	 * layers the cache holds, whatever the range. */
	const kvk_move_t *moves;
	uint32_t count;
	/* How many moves AUTO counts: these and those of neighbouring jobs, right before and behind on the stream. 0:
	 * these are all. */
	uint32_t of;
	/* And this many of them come behind this job: a scatter that is not the last need not end in small chunks,
	 * whose kernels leave the link idle. */
	uint32_t rest;
	uint32_t sms;       /* budget; 0: the device's, and all where blocks lie in the memory of a GPU */
	uint32_t stage_sms; /* of the kernels of a ring, which stay inside the device's memory; 0: sms */
	/* Of a scatter that reads nothing but host memory, with a kernel: bytes on their way over the link at a time, 4
	 * KiB a warp at least; 0: 256 KiB, or as measured; UINT32_MAX: any number. More than the link's rate times its
	 * latency bring nothing: they wait in front of it, and with them all else that the device reads there, an
	 * engine's launches first of all. */
	uint32_t max_in_flight;
	/* Of a scatter: nothing that the stream has still to do writes these blocks in the pool, so they may be read
	 * before it has come to the copy. The cache is written in the stream's order in any case. */
	int ready;
	kvk_cu_stream_t stream;
} kvk_gpu_copy_t;

/* Enqueue on the stream. KV_ERR_ARG: a block id out of range or memory the device does not see (nothing is enqueued);
 * KV_ERR_BUSY: all jobs are taken; KV_ERR_LIMIT: more leaves than a job has memory for (4 million): take it in parts;
 * KV_ERR_UNSUPPORTED: digests of a GPU's memory that no kernel makes (none here, or leaves of 240 bytes and less), or a
 * stream that is being captured (decision 035);
 * KV_ERR_IO: the driver refuses, and nothing will tell when what it has taken ends (that it took a part otherwise: the
 * poll says so). count may be 0. */
kv_status_t kvk_gpu_submit(kvk_gpu_t *gpu, const kvk_gpu_copy_t *copy, kvk_gpu_job_t **p_job);
/* PENDING: still running. OK: all bytes are there; digests agreed or are in moves[].leaves. KV_ERR_CORRUPT: see
 * kvk_gpu_move_is_bad(); the others came. KV_ERR_IO: the device has failed, or the driver has refused a part of the
 * copy and what it took has ended; nothing is known of the bytes. The same answer again and again. */
kv_status_t kvk_gpu_poll(kvk_gpu_job_t *job);
/* The same, waiting up to timeout_us, then PENDING: spinning at first, then sleeping between looks. */
kv_status_t kvk_gpu_wait(kvk_gpu_job_t *job, uint64_t timeout_us);
/* After KV_ERR_CORRUPT: is move i bad? */
int kvk_gpu_move_is_bad(const kvk_gpu_job_t *job, uint32_t i);
/* What is enqueued on this stream from now on runs after the job. */
kv_status_t kvk_gpu_order_after_job(kvk_gpu_job_t *job, kvk_cu_stream_t stream);
/* Give it back. It must be over, or its copies must no longer matter: memory they use stays in use until they
 * end. */
void kvk_gpu_release_job(kvk_gpu_job_t *job);

/* ---- digests --------------------------------------------------------------------------------- */

/* The digests of ranges of memory that kernels of this device reach (kvk/digest_range.h), by a kernel on all its SMs,
 * behind what the stream has now. Waits for them, the only call here besides kvk_gpu_wait() that waits. 3 MiB of pinned
 * memory at most, for the call. KV_ERR_ARG: memory that the device does not see; KV_ERR_UNSUPPORTED: no kernel for it
 * here, a peer's memory that kernels do not reach, or a stream that is being captured; KV_ERR_NOMEM; KV_ERR_IO. */
kv_status_t kvk_gpu_digest(kvk_gpu_t *gpu, const kvk_range_t *ranges, uint32_t count, kvk_cu_stream_t stream,
			   uint8_t (*digests)[KVK_RANGE_DIGEST_BYTES]);

/* ---- streams --------------------------------------------------------------------------------- */

/* A stream of the device for copies, at its highest priority or its lowest, that does not wait for the default
 * stream. Lives until close. */
kv_status_t kvk_gpu_create_stream(kvk_gpu_t *gpu, int high_priority, kvk_cu_stream_t *p_stream);
/* What is enqueued on `later` from now on runs after what is on `earlier` now. */
kv_status_t kvk_gpu_order_streams(kvk_gpu_t *gpu, kvk_cu_stream_t earlier, kvk_cu_stream_t later);

/* ---- clocks ---------------------------------------------------------------------------------- */

/* The time the device takes from one point of its streams to another, on its own clock: nothing waits for it. One
 * thread at a time. */
typedef struct kvk_gpu_clock kvk_gpu_clock_t;
/* KV_ERR_NOMEM, KV_ERR_IO. */
kv_status_t kvk_gpu_clock_open(kvk_gpu_t *gpu, kvk_gpu_clock_t **p_clock);
/* Before its device. NULL is fine. */
void kvk_gpu_clock_close(kvk_gpu_clock_t *clock);
/* Start it (end 0; an earlier stop is then forgotten), or stop it, once or again, when the stream comes to here.
 * KV_ERR_IO: it is not. */
kv_status_t kvk_gpu_clock_mark(kvk_gpu_clock_t *clock, int end, kvk_cu_stream_t stream);
/* What is enqueued on the stream from now on runs after the point where the clock was started last, whichever that is
 * at the moment. Any thread. KV_ERR_IO: it does not. */
kv_status_t kvk_gpu_clock_await(const kvk_gpu_clock_t *clock, kvk_cu_stream_t stream);
/* The device has come to where it was started last. 0: it has not, or nobody can tell. Any thread. */
int kvk_gpu_clock_begun(const kvk_gpu_clock_t *clock);
/* PENDING: the device has not come to its end. KV_ERR_ARG: not started and stopped. KV_ERR_IO. */
kv_status_t kvk_gpu_clock_read(kvk_gpu_clock_t *clock, uint64_t *p_ns);

/* ---- choosing -------------------------------------------------------------------------------- */

/* Measure the ways for this layout and cache between 32 MiB of scratch on both sides, and keep the faster for AUTO, of
 * small jobs and of large ones (from 256 MiB on; sixteen behind each other), for copies of all layers; else, and
 * without it, AUTO takes STAGED where 256 KiB and more lie together in a pool block, else ZERO_COPY. Before that,
 * whether the link takes more than 4 SMs (8 with leaves below 4 KiB) and 256 KiB on their way bring: then a copy of
 * which nobody says otherwise takes 16 SMs and all that they have room for. 0.2 s, synchronous, once a device, layout
 * and process. KV_ERR_NOMEM, KV_ERR_IO, KV_ERR_TIMEOUT, KV_ERR_UNSUPPORTED (blocks above 256 MiB): nothing is kept. */
kv_status_t kvk_gpu_measure(kvk_gpu_t *gpu, const kvk_layout_t *layout, const kvk_paged_t *paged);

/* Counters since open. X(name, help) */
#define KVK_GPU_STATS(X)                                                                                               \
	X(gathers, "copies out of the device's cache")                                                                 \
	X(scatters, "copies into the device's cache")                                                                  \
	X(bytes, "bytes copied")                                                                                       \
	X(zero_copy, "copies made by a kernel over the link")                                                          \
	X(staged, "copies made by the copy engine and a kernel")                                                       \
	X(copy_per_piece, "copies made piece by piece by the driver")                                                  \
	X(far, "copies of a peer's memory that kernels of this device may not use")                                    \
	X(corrupt, "blocks whose digest did not agree")                                                                \
	X(busy, "copies refused because all jobs were taken")                                                          \
	X(failures, "calls the driver refused")                                                                        \
	X(registered_bytes, "bytes of host memory known to the device, now")                                           \
	X(mapped_bytes, "bytes of GPU memory mapped, now")
typedef struct kvk_gpu_stats {
#define KVK_GPU_STAT(name, help) uint64_t name;
	KVK_GPU_STATS(KVK_GPU_STAT)
#undef KVK_GPU_STAT
} kvk_gpu_stats_t;
void kvk_gpu_get_stats(const kvk_gpu_t *gpu, kvk_gpu_stats_t *stats);

#endif
