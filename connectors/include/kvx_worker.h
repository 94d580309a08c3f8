/* kvx_worker.h -- the moving half of a connector: one in each rank of an engine, beside that rank's paged cache.
 *
 *   begin(plan)   before the engine may write any block of this step: blocks that are about to be reused and not saved
 * yet are saved now; what can be loaded beside the steps is started by start() start()       asynchronous loads of the
 * plan begin load()        synchronous loads of the plan are in the cache, or have failed, when it returns; of a cache
 * in GPU memory they are put before what the engine enqueues from then on, and errors() knows what has become of them;
 * load_layers(): layer by layer, as layer() names them [the engine computes] end()         what this step has computed
 * goes to the transfer thread; nothing is waited for finished()    ids of asynchronous loads that are over, well or
 * not; each exactly once errors()      blocks whose load failed: the engine computes them. Of a cache in GPU memory
 * asked in each step, after end(): it waits for the bytes of load(), not for the step report()      bytes for
 * kvx_scheduler_take_report()
 *
 * A transfer thread owns the attachment to the daemon and moves bytes whether or not the engine steps. Blocks it still
 * has to read are marked; begin() looks at the marks of the blocks the plan says are reused, so that no save ever holds
 * a step but the one that would overwrite its source.
 *
 * Promise to the engine: no call waits longer than a load's deadline (load) or the copying of the blocks concerned
 * (begin); the others never wait. A device is never waited for but by errors(), and by the calls after it when it was
 * not asked. finished() with nothing to report is one load of an atomic. Nothing fails in a way the engine must handle.
 *
 * Threads. One thread of the engine calls; the transfer threads are the worker's own, on any CPU the process was given,
 * whatever the engine has bound its threads to. Not fork-safe: a child must not call anything.
 */
#ifndef KVX_WORKER_H
#define KVX_WORKER_H

#include "kvc.h"
#include "kvk/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvx_worker kvx_worker_t;

/* One group of the engine's cache on this rank. All groups have the pool block's page size; one with fewer layers than
 * the layout is padded with zero pages in the pool. */
typedef struct kvx_worker_group {
	uint32_t group;
	const kvk_paged_t *paged; /* its memory stays the engine's and outlives the worker; base[] is copied */
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
	const kvc_identity_t *identity; /* the same as the scheduler's; `weights` NULL: they come in a plan */
	const kvk_layout_t *layout;     /* of the pool block */
	kvc_writer_t range;             /* heads and layers of it that this rank holds */
	const kvx_worker_group_t *groups;
	uint32_t group_count;
	uint32_t threads; /* that copy in a synchronous load, the caller included; 0: chosen from the CPUs there are.
			     Not of a device's cache */
	int prefault;    /* 1: touch the cache's and the pool's pages in the background, so that the first load does not
			    pay for it */
	uint32_t memory; /* KVX_MEMORY_* */
	/* Of a CUDA device: its ordinal in this process; most SMs that a copy takes (0: chosen); 1: measure the ways of
	 * copying at open (0.2 s a group); the driver and the kernels (NULL: the machine's, and those of this build).
	 */
	int device;
	uint32_t sms;
	uint32_t save_sms; /* of a save, beside which the engine computes; 0: chosen */
	int measure;
	/* Of a CUDA device: synchronous loads of a step of so many bytes and more come layer by layer, where
	 * load_layers() says that they may (0: none), if all their blocks are there after so long (0: 1000). */
	uint64_t layer_bytes;
	uint32_t layer_wait_us;
	const struct kvk_cuda_ops *cuda;
	const void *image;
} kvx_worker_config_t;

/* Never waits for the daemon. KVC_ERR_ARG: kvx_worker_last_error(). KVC_ERR_NOMEM. */
KVC_API kvc_status_t kvx_worker_open(const kvx_worker_config_t *config, kvx_worker_t **p_worker);
/* Ends the transfer threads; saves not yet copied are given up. A device that still copies is waited for, 3 s at most.
 * NULL is fine. */
KVC_API void kvx_worker_close(kvx_worker_t *worker);
KVC_API const char *kvx_worker_last_error(void);

/* Gather block `from` of a group as a save does and scatter it to block `to` as a load does, digests verified, without
 * the daemon: the caller compares. For the capability self-test at registration, while both blocks are free. */
KVC_API kvc_status_t kvx_worker_roundtrip_test(kvx_worker_t *worker, uint32_t group, uint32_t from, uint32_t to);
/* The second half of the self-test, against the daemon, in a space of its own: store a block, drop it, load it back,
 * compare. OK: passed. PENDING: not done yet (no daemon). Else loads and saves stay off in this process:
 * KVC_ERR_CORRUPT: other bytes came back; of a GPU also KVC_ERR_LIMIT: it cannot be given the pool's memory (the limit
 * on locked memory), KVC_ERR_NOMEM: nor list it, or another error: it cannot copy this cache. */
KVC_API kvc_status_t kvx_worker_self_test_status(const kvx_worker_t *worker);

/* Of a cache in GPU memory: the CUstream that the next step is enqueued on, before begin(); NULL, as at first: the
 * legacy default stream. */
KVC_API void kvx_worker_set_stream(kvx_worker_t *worker, void *stream);
/* begin() and start() of a plan with synchronous loads, and the sending of these, as soon as it is made: an engine
 * whose halves share a thread prepares its inputs between the plan and begin(), and may enqueue nothing there that
 * touches blocks of the plan. The begin() with the same bytes that follows finds it done; start() and load() have to
 * come as ever. Any other begin() gives it up, as a step that is gone, and so does closing. Waits 1 ms (layer_wait_us)
 * and 2 us a block at most. 1: begun. 0: nothing has happened: not of a device; no synchronous loads; the step before
 * is not over: since its begin() errors(), report() and (with COMPUTED) end() have to have been called. */
#define KVX_PREFETCH_COMPUTED 1u /* the step before computes something: it has an end() */
#define KVX_PREFETCH_LAYERS   2u /* load_layers() may follow */
KVC_API int kvx_worker_prefetch_step(kvx_worker_t *worker, const void *message, size_t len, uint32_t flags);
KVC_API void kvx_worker_begin_step(kvx_worker_t *worker, const void *message, size_t len);
KVC_API void kvx_worker_start_async_loads(kvx_worker_t *worker);
KVC_API void kvx_worker_run_sync_loads(kvx_worker_t *worker);
/* load() by an engine that calls layer() for each layer of the cache before it enqueues what reads that layer, on the
 * stream of this step. 1: it has to: each layer is put before what is enqueued from its layer() on. 0: all layers are,
 * as with load(), and layer() does nothing. */
KVC_API int kvx_worker_run_layered_loads(kvx_worker_t *worker);
/* `layer` of the first group's paged cache is about to be read; one beyond its layers: so is everything. Waits for
 * nothing. If some layer is not named before end(), or errors(), blocks of these loads count as failed, and
 * load_layers() is load() from then on. */
KVC_API void kvx_worker_await_layer(kvx_worker_t *worker, uint32_t layer);
KVC_API void kvx_worker_end_step(kvx_worker_t *worker);

/* The next id of an asynchronous load that is over: its length, at most cap bytes of it copied; 0: there is none.
 * *p_failed (may be NULL): 1 when not every block came. */
KVC_API uint32_t kvx_worker_take_finished(kvx_worker_t *worker, char *id, uint32_t cap, int *p_failed);
/* Up to cap block ids whose load failed, each once; how many. Those of an asynchronous load are there before finished()
 * names it; those of a load whose request is gone (DROP) are not named. */
KVC_API uint32_t kvx_worker_take_failed_blocks(kvx_worker_t *worker, uint32_t *ids, uint32_t cap);
/* What the scheduler should know, valid until the next call; *p_len 0: nothing. */
KVC_API void kvx_worker_take_report(kvx_worker_t *worker, const void **p_bytes, size_t *p_len);
/* Wait until everything handed over is saved and visible to the daemon, or timeout_ms have passed. For tests and
 * shutdown. */
KVC_API kvc_status_t kvx_worker_flush(kvx_worker_t *worker, uint32_t timeout_ms);

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
	X(layered, "loads within a step that came layer by layer")                                                     \
	X(layers_skipped, "of these, those of which the engine had read a layer without waiting for it")               \
	X(loads_prefetched, "loads within a step that were begun when it was planned")                                 \
	X(saves, "saves begun")                                                                                        \
	X(save_blocks, "blocks handed in")                                                                             \
	X(save_bytes, "bytes saved")                                                                                   \
	X(save_ns, "nanoseconds of copying for saves")                                                                 \
	X(save_dropped, "saves given up: daemon gone, put revoked, or the step's loads had failed")                    \
	X(fences, "times a block was about to be reused before it was saved")                                          \
	X(fence_ns, "nanoseconds the engine waited for that")                                                          \
	X(broken_invariants,                                                                                           \
	  "invariants found broken; above 0 the half has detached for good: please report the log line")               \
	X(bad_messages, "plans that made no sense")                                                                    \
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
	uint64_t loads_open, saves_open, marked; /* now: loads and saves under way, blocks still to be read */
	uint64_t registered_bytes;               /* now: of the pool that the GPU sees */
} kvx_worker_stats_t;
KVC_API void kvx_worker_get_stats(const kvx_worker_t *worker, kvx_worker_stats_t *stats);

#ifdef __cplusplus
}
#endif
#endif
