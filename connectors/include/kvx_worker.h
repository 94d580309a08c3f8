/* kvx_worker.h -- the worker half of a connector: one in each rank of an engine, next to that rank's paged cache.
 *
 *   begin_step(message)   before the engine writes any block of this step: blocks that are about to be reused and not
 *                         saved yet are saved now
 *   start_async_loads()   asynchronous loads of the step begin
 *   run_sync_loads()      synchronous loads of the step are in the cache, or have failed, when it returns. For a cache
 *                         in GPU memory they come before what the engine enqueues from then on, and
 *                         take_failed_blocks() has the result. kvx_worker_run_layered_loads(): layer by layer, as
 *                         await_layer() asks for them
 *   [the engine computes]
 *   end_step()            what this step has computed goes to the transfer thread; no wait
 *   take_finished()       ids of finished asynchronous loads, successful or not; each exactly once
 *   take_failed_blocks()  blocks whose load has failed: the engine computes them. For a cache in GPU memory call it in
 *                         each step, after end_step(): it waits for the bytes of the synchronous loads, not for the
 *                         step
 *   take_report()         bytes for kvx_scheduler_take_report()
 *
 * A transfer thread owns the attachment to the daemon and moves bytes whether or not the engine steps. Blocks it still
 * has to read are marked; begin_step() checks the marks of the blocks the message says are reused. So a save holds only
 * the step that would overwrite its source.
 *
 * Promise to the engine: no call waits longer than a load's deadline (run_sync_loads) or the copying of the blocks
 * concerned (begin_step); the others never wait. Only take_failed_blocks() waits for a device, and the calls after it
 * if it was not called. take_finished() without a result is one load of an atomic. No failure needs handling.
 *
 * Threads. One thread of the engine calls; the transfer threads are the worker's own, on any CPU the process was given,
 * however the engine has bound its threads. Not fork-safe: a child must not call any function. */
#ifndef KVX_WORKER_H
#define KVX_WORKER_H

#include "kvc.h"
#include "kvk/digest_range.h"
#include "kvk/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvx_worker kvx_worker_t;

/* One group of the engine's cache on this rank, in the order of the identity's groups. */
typedef struct kvx_worker_group {
	uint32_t group;
	const kvk_layout_t *layout; /* of its blocks in the pool; copied */
	/* The heads and layers of it that this rank holds. Its memory stays the engine's and outlives the worker;
	 * base[] is copied. */
	const kvk_paged_t *paged;
	/* Ranks that hold copies of the same heads share them out: each saves its own layers, as the scheduler's
	 * writers say, and loads all. save_layers 0: this rank saves all. */
	uint32_t save_layer_first, save_layers;
} kvx_worker_group_t;

struct kvk_cuda_ops;

/* Where the engine's cache is. */
enum {
	KVX_MEMORY_HOST = 0,
	KVX_MEMORY_CUDA = 1, /* base[] are addresses of a CUDA device */
};

typedef struct kvx_worker_config {
	size_t struct_size;
	const char *socket;
	const char *instance; /* shared with the scheduler */
	const uint8_t *secret;
	uint32_t secret_len;
	uint32_t rank;
	const char *program;
	const kvc_identity_t *identity; /* the same as the scheduler's; `weights` NULL: a step message brings them */
	const kvx_worker_group_t *groups;
	uint32_t group_count;
	uint32_t threads; /* that copy in a synchronous load, the caller included; 0: chosen from the CPUs. Not for a
			     device's cache */
	int prefault;    /* 1: touch the cache's and the pool's pages in the background, so that the first load does not
			    pay for it */
	uint32_t memory; /* KVX_MEMORY_* */
	/* CUDA only. The device's ordinal in this process; most SMs that a copy takes (0: chosen); 1: measure the ways
	 * of copying at open (0.2 s a group); driver and kernels (NULL: the machine's, and those of this build). */
	int device;
	uint32_t sms;
	uint32_t save_sms; /* of a save to host memory while the engine generates; 0: chosen */
	/* Bytes a second of saves to memory of a GPU while the engine computes, except those that another engine waits
	 * for; 0: chosen. */
	uint64_t promote_rate;
	int measure;
	/* CUDA only. Synchronous loads of a step of layer_bytes and more come layer by layer if
	 * kvx_worker_run_layered_loads() is called (0: never) and all their blocks are ready after layer_wait_us (0:
	 * 1000). */
	uint64_t layer_bytes;
	uint32_t layer_wait_us;
	const struct kvk_cuda_ops *cuda;
	const void *image;
} kvx_worker_config_t;

/* Never waits for the daemon. KVC_ERR_ARG: kvx_worker_last_error(). KVC_ERR_NOMEM. */
KVC_API kvc_status_t kvx_worker_open(const kvx_worker_config_t *config, kvx_worker_t **p_worker);
/* End the transfer threads; saves not copied yet are given up. A device that still copies is awaited for 3 s at most.
 * NULL is fine. */
KVC_API void kvx_worker_close(kvx_worker_t *worker);
KVC_API const char *kvx_worker_last_error(void);

/* Gather block `from` of a group as a save does and scatter it to block `to` as a load does, digests verified, without
 * the daemon: the caller compares. For the self-test at registration, while both blocks are free. */
KVC_API kvc_status_t kvx_worker_roundtrip_test(kvx_worker_t *worker, uint32_t group, uint32_t from, uint32_t to);
/* The self-test against the daemon, in a space of its own: store a block, drop it, load it back, compare. OK: passed.
 * PENDING: not done yet (no daemon). Else loads and saves stay off in this process. KVC_ERR_CORRUPT: other bytes came
 * back. On a GPU also KVC_ERR_LIMIT: the limit on locked memory keeps the pool from it; KVC_ERR_NOMEM: no memory to
 * list the pool; another error: it cannot copy this cache. */
KVC_API kvc_status_t kvx_worker_self_test_status(const kvx_worker_t *worker);

/* 1: attached to a daemon, and the self-test has passed. */
KVC_API int kvx_worker_is_ready(const kvx_worker_t *worker);

/* For a cache in GPU memory: the CUstream that the next step is enqueued on, before begin_step(); NULL, as at first:
 * the legacy default stream. */
KVC_API void kvx_worker_set_stream(kvx_worker_t *worker, void *stream);
/* begin_step() and start_async_loads() of a message with synchronous loads, and the sending of these, as soon as the
 * message is made: an engine whose halves share a thread prepares its inputs between the message and begin_step(), and
 * may enqueue nothing there that touches blocks of the message. The begin_step() with the same bytes that follows finds
 * it done; start_async_loads() and run_sync_loads() are called as usual. Any other begin_step(), or closing, gives it
 * up. Waits 1 ms (layer_wait_us) and 2 us a block at most.
 *
 * 1: begun. 0: nothing has happened: the cache is not a device's; no synchronous loads; or the step before is not
 * complete: since its begin_step() take_failed_blocks(), take_report() and (with COMPUTED) end_step() must have been
 * called. */
#define KVX_PREFETCH_COMPUTED 1u /* the step before computes, so it has an end_step() */
#define KVX_PREFETCH_LAYERS   2u /* kvx_worker_run_layered_loads() may follow */
KVC_API int kvx_worker_prefetch_step(kvx_worker_t *worker, const void *message, size_t len, uint32_t flags);
KVC_API void kvx_worker_begin_step(kvx_worker_t *worker, const void *message, size_t len);
KVC_API void kvx_worker_start_async_loads(kvx_worker_t *worker);
KVC_API void kvx_worker_run_sync_loads(kvx_worker_t *worker);
/* run_sync_loads() of an engine that calls await_layer() for each layer of the cache before it enqueues what reads that
 * layer, on the stream of this step. 1: it must: each layer comes before what is enqueued from its await_layer() on. 0:
 * all layers do, as with run_sync_loads(), and await_layer() does nothing. */
KVC_API int kvx_worker_run_layered_loads(kvx_worker_t *worker);
/* The engine is about to read `layer` of the first group's paged cache; beyond its layers: everything. No wait. If a
 * layer was not awaited before end_step() or take_failed_blocks(), blocks of these loads count as failed, and later
 * loads come whole. */
KVC_API void kvx_worker_await_layer(kvx_worker_t *worker, uint32_t layer);
KVC_API void kvx_worker_end_step(kvx_worker_t *worker);

/* The next id of a finished asynchronous load: its length, at most cap bytes of it copied; 0: none. *p_failed (may be
 * NULL): 1 if a block was not loaded. */
KVC_API uint32_t kvx_worker_take_finished(kvx_worker_t *worker, char *id, uint32_t cap, int *p_failed);
/* Up to cap ids of blocks whose load has failed, each once; how many. Those of an asynchronous load are there when
 * take_finished() names it, and maybe not earlier: ask afterwards. Those of a load whose request is gone (DROP) are not
 * named. */
KVC_API uint32_t kvx_worker_take_failed_blocks(kvx_worker_t *worker, uint32_t *ids, uint32_t cap);
/* The next report, valid until the next call; *p_len 0: none. */
KVC_API void kvx_worker_take_report(kvx_worker_t *worker, const void **p_bytes, size_t *p_len);
/* Wait until a load or save has ended that no call has seen yet, timeout_us at most. The caller's thread copies blocks
 * of loads meanwhile, if the cache is in host memory. */
KVC_API void kvx_worker_wait(kvx_worker_t *worker, uint32_t timeout_us);
/* The engine is about to give away the memory of its cache (vLLM's sleep), with no step in progress: every save reads
 * its blocks now, or is given up. What it has sent to a device is in its streams when this returns. */
KVC_API void kvx_worker_finish_saves(kvx_worker_t *worker);
/* 1: a submitted save still has to read one of these blocks. */
KVC_API int kvx_worker_has_unsaved(const kvx_worker_t *worker, const uint32_t *ids, uint32_t n);
/* Wait until all submitted saves are visible to the daemon, or timeout_ms have passed. For tests and shutdown. */
KVC_API kvc_status_t kvx_worker_flush(kvx_worker_t *worker, uint32_t timeout_ms);

/* The digests of ranges of memory (kvk/digest_range.h), of the device for a cache in GPU memory, else of this process:
 * what an engine's weights are, as they lie there. Waits until all has been read, on a device behind what the stream of
 * kvx_worker_set_stream() has; work of other streams that writes there must have ended. Of bytes that are written
 * meanwhile any may be read. Any thread may call it while the engine's calls others, until kvx_worker_close(). Not OK:
 * kvx_worker_last_error(). KVC_ERR_ARG: no such memory; KVC_ERR_NOMEM; KVC_ERR_UNSUPPORTED: there is no kernel for it,
 * or the stream is being captured; KVC_ERR_IO: the device has failed. */
KVC_API kvc_status_t kvx_worker_digest(kvx_worker_t *worker, const kvk_range_t *ranges, uint32_t count,
				       uint8_t (*digests)[KVK_RANGE_DIGEST_BYTES]);

/* X(name, help): counters since kvx_worker_open(). */
#define KVX_WORKER_STATS(X)                                                                                            \
	X(loads, "loads begun")                                                                                        \
	X(loads_failed, "loads that did not bring every block")                                                        \
	X(load_corrupt, "blocks whose bytes did not match their digest")                                               \
	X(load_timeouts, "loads given up at their deadline")                                                           \
	X(load_lost, "loads whose lease or daemon went away")                                                          \
	X(load_blocks, "blocks loaded and verified")                                                                   \
	X(load_bytes, "bytes loaded")                                                                                  \
	X(load_ns, "nanoseconds that loads took, of several at a time each its own part, summed")                      \
	X(load_wait_ns, "nanoseconds the engine waited in steps for loads")                                            \
	X(layered, "synchronous loads that came layer by layer")                                                       \
	X(layers_skipped, "of these, loads with a layer that the engine read without awaiting it")                     \
	X(loads_prefetched, "synchronous loads that were begun when their step was planned")                           \
	X(saves, "saves begun")                                                                                        \
	X(save_blocks, "blocks that saves were asked to read")                                                         \
	X(save_bytes, "bytes saved")                                                                                   \
	X(save_ns, "nanoseconds of copying for saves")                                                                 \
	X(save_dropped, "saves given up: daemon gone, put revoked, or the step's loads had failed")                    \
	X(fences, "times a block was about to be reused before it was saved")                                          \
	X(fence_ns, "nanoseconds the engine waited for that")                                                          \
	X(broken_invariants,                                                                                           \
	  "invariants found broken; above 0 the half has detached for good: please report the log line")               \
	X(bad_messages, "step messages that were not sound")                                                           \
	X(self_tests, "self-tests passed")                                                                             \
	X(self_test_failures, "self-tests that brought other bytes back")                                              \
	X(attaches, "attachments to a daemon")                                                                         \
	X(gpu_bytes, "bytes copied by the GPU")                                                                        \
	X(gpu_zero_copy, "GPU copies made by a kernel over the link")                                                  \
	X(gpu_staged, "GPU copies made by the copy engine and a kernel")                                               \
	X(gpu_copy_per_piece, "GPU copies made piece by piece by the driver")                                          \
	X(gpu_failures, "calls the GPU's driver refused")                                                              \
	X(gpu_refused, "times the driver refused to let the GPU see a piece of the pool")
typedef struct kvx_worker_stats {
	size_t struct_size;
#define KVX_WORKER_STAT(name, help) uint64_t name;
	KVX_WORKER_STATS(KVX_WORKER_STAT)
#undef KVX_WORKER_STAT
	uint64_t loads_open, saves_open, marked; /* now: loads and saves in progress, blocks still to be read */
	uint64_t registered_bytes;               /* now: of the pool that the GPU sees */
} kvx_worker_stats_t;
KVC_API kvc_status_t kvx_worker_get_stats(const kvx_worker_t *worker, kvx_worker_stats_t *stats);

#ifdef __cplusplus
}
#endif
#endif
