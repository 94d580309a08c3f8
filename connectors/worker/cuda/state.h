/* worker/cuda/state.h -- a worker whose engine's cache is in GPU memory: copies are jobs in flight on streams instead
 * of calls that return when done.
 *
 *   compute             the engine's own stream
 *   load_sync_stream    synchronous loads: after what compute had when they were started, before what compute gets
 *                       afterwards; the host does not wait
 *   load_async_stream   asynchronous loads: after what compute had when they were started
 *   saves[].stream      saves: after what compute had at the end of their step (kvx_gpu_set_save_point()). Those to
 *                       memory of the GPU have a stream of their own: for a hand-over they are sent before older ones
 *                       to host memory, which must not wait for the step that they wait for
 *
 * A batch is one job of the device and the load or saves it copies for. Each of them counts the batch as active until
 * it is complete, so lease, put and pool memory stay as long as the device may use them, whatever else happens
 * (docs/decisions/011-gpu-worker.md). Any thread completes batches. One lock protects batches and jobs together: the
 * device is asked, given jobs and ordered under it; no thread waits under it. Loads and saves have the states they have
 * on a host (worker/base/state.h); a block in flight is TAKEN.
 *
 * A synchronous load may come layer by layer (docs/decisions/012-layerwise-loads.md): its blocks are copied once a
 * layer range, and the engine's kernels of a layer wait for the range of that layer alone.
 */
#ifndef KVX_CUDA_STATE_H
#define KVX_CUDA_STATE_H

#include "worker/jobs/load.h"
#include "worker/jobs/save.h"

#define KVX_GPU_MOVES            256u  /* blocks a job of an asynchronous load at most */
#define KVX_GPU_SYNC_MOVES       1024u /* of a synchronous load: one job a load or layer range, if possible */
#define KVX_GPU_RANGES           32u
#define KVX_GPU_SYNC_BYTES       (UINT64_C(64) << 20) /* of a job of a synchronous load, at least */
#define KVX_GPU_ASYNC_BYTES      (UINT64_C(64) << 20) /* of an asynchronous load's job; at most as many are before it */
#define KVX_GPU_LARGE_LOAD       (UINT64_C(256) << 20) /* asynchronous loads of so much go by the copy engine, */
#define KVX_GPU_LARGE_BYTES      (UINT64_C(16) << 20)  /* in jobs of that size; at most as many are before one */
#define KVX_GPU_SAVE_BYTES       (UINT64_C(32) << 20)  /* of a job of a save */
#define KVX_GPU_NEAR_SPEED       4u /* memory of a GPU takes that many times as many bytes in the same time, or more */
#define KVX_GPU_LOADS            128u /* jobs of loads in flight: a step does not wait to send its own */
#define KVX_GPU_ASYNC_LOADS      8u   /* of asynchronous ones: a synchronous load queues behind them */
#define KVX_GPU_SAVES            16u  /* jobs of saves to host memory, and of fences, in flight */
#define KVX_GPU_SAVES_AHEAD      8u   /* of those without a fence: a fence waits for them */
#define KVX_GPU_NEAR_SAVES       8u   /* jobs of saves to memory of the GPU in flight */
#define KVX_GPU_POINTS           8u   /* a save that is further behind comes after a later step than it must */
#define KVX_GPU_SAVE_AHEAD_BYTES (UINT64_C(64) << 20) /* in the jobs of a save lane */
#define KVX_GPU_PROMOTE_RATE     UINT64_C(6000000000) /* bytes a second of saves that have time, to memory of a GPU */
#define KVX_GPU_IDLE_NS          UINT64_C(50000000)   /* after a step: the engine may compute another one soon */
#define KVX_GPU_BATCHES          (KVX_GPU_LOADS + KVX_GPU_SAVES + KVX_GPU_NEAR_SAVES)
#define KVX_GPU_JOBS             160u /* batches and self-tests */
#define KVX_GPU_STEP_TIMERS      4u
#define KVX_GPU_LOAD_TIMERS      64u /* loads that are timed at once; further ones are not timed */
#define KVX_GPU_TIMERS           (KVX_GPU_STEP_TIMERS + KVX_GPU_LOAD_TIMERS)

/* The stream a batch is on: jobs of one stream end in the order they were submitted in. */
typedef enum kvx_lane {
	KVX_LANE_SYNC,
	KVX_LANE_ASYNC,
	KVX_LANE_SAVE,
	KVX_LANE_NEAR_SAVE, /* to memory of the GPU */
	KVX_LANE_FENCE,
	KVX_LANES
} kvx_lane_t;

typedef struct kvx_gpu_batch kvx_gpu_batch_t;
/* The job has ended. Lock held. */
typedef void kvx_gpu_batch_done_t(kvx_worker_t *worker, kvx_gpu_batch_t *batch, kvc_status_t status);

/* Free when job is NULL. */
struct kvx_gpu_batch {
	kvk_gpu_job_t *job;
	kvx_gpu_batch_done_t *done;
	kvx_lane_t lane;
	kvx_gpu_batch_t *next;                /* in the lane, later */
	kvx_wbatch_t of;                      /* what it copies of a load; its load is NULL: a save's */
	uint64_t serial;                      /* tells whose job it is */
	uint32_t n;                           /* moves, of saves */
	kvx_wsave_t *saves[KVX_WORKER_MOVES]; /* of one group: whose a move is; each counts as active there */
	uint32_t index[KVX_WORKER_MOVES];     /* which block of the save it is of */
	uint64_t *leaves;                     /* [batch][words]: what its gather computes */
	uint64_t begin_ns;
	int poisoned; /* its blocks may have been written meanwhile: what it has read counts for nothing */
};

typedef struct kvx_pool_piece {
	uint64_t again_ns;   /* refused: not tried before */
	uint64_t awaited_ns; /* when it was asked for before the daemon had touched it; 0: never */
	uint32_t tries;      /* that were refused */
	int known;
} kvx_pool_piece_t;

/* One slab of the pool; its pieces are registered with the device one by one. */
typedef struct kvx_pool_slab {
	struct kvx_pool_slab *next;
	uint8_t *base;
	size_t bytes, each; /* of the slab, of a piece */
	kvc_memory_t memory;
	uint32_t pieces;
	kvx_pool_piece_t piece[]; /* [pieces] */
} kvx_pool_slab_t;

/* Who sends the loads of a prefetched step. The transfer thread begins and ends BUSY, the engine's thread everything
 * else; the step's synchronous loads and kvx_wlayers belong to the thread whose state it is. */
typedef enum kvx_presend {
	KVX_PRESEND_NONE,  /* the engine's thread */
	KVX_PRESEND_ASKED, /* nobody yet: the one that comes first */
	KVX_PRESEND_BUSY,  /* the transfer thread is at it */
	KVX_PRESEND_DONE   /* the engine's thread, which has not seen it yet */
} kvx_presend_t;

/* Synchronous loads that come layer by layer; the engine's thread, unless a step is prefetched. */
typedef struct kvx_wlayers {
	uint64_t least_bytes; /* of a step's loads; 0: all come whole */
	uint64_t wait_ns;     /* for all blocks to be ready */
	int disabled;         /* for good: the engine has skipped a layer */
	uint32_t work_us;     /* what the step computes while it loads; 0: not known */
	double rate;          /* bytes of loads a microsecond; 0: not known */
	uint32_t count;       /* ranges of the step's loads; 0: they came whole */
	uint32_t end[KVX_GPU_RANGES];
	uint32_t ordered;      /* what the engine enqueues comes after ranges [0, ordered) */
	uint32_t layers_named; /* layers the engine has awaited */
	uint8_t *named;        /* [layers] */
	struct {
		kvx_gpu_batch_t *batch; /* NULL: none was needed */
		uint64_t serial;
	} last[KVX_GPU_RANGES]; /* the last batch submitted up to the end of the range */
} kvx_wlayers_t;

/* The engine's thread starts and reads it; the thread that submits a load's last copy stops it. */
typedef struct kvx_gpu_timer {
	kvk_gpu_clock_t *clock; /* NULL: the driver has refused */
	int running;
	uint32_t step;
} kvx_gpu_timer_t;

/* Saves of one lane. */
typedef struct kvx_save_lane {
	kvk_cu_stream_t stream;
	uint32_t point_reached;           /* what the stream has comes after it; under the lock */
	_Atomic uint64_t bytes_in_flight; /* in its batches, of whole blocks */
} kvx_save_lane_t;

struct kvx_wgpu {
	kvk_gpu_t *gpu;
	kvk_cu_stream_t load_sync_stream, load_async_stream;
	kvx_save_lane_t saves[2]; /* to host memory, to memory of the GPU */
	uint32_t save_sms;
	uint64_t large_load; /* bytes */
	uint64_t promote_rate;
	uint64_t promote_ns;              /* the pace allows the next batch then; the transfer thread's */
	_Atomic uint64_t busy_until_ns;   /* the engine computes, or has a moment ago */
	_Atomic uint32_t is_prefill_step; /* the step that the engine enqueues computes prompts */
	_Atomic uint32_t prefill_marked;  /* prefill_end tells where the last such step ends */
	kvk_gpu_clock_t *prefill_end;
	_Atomic uint32_t untracked_copies;      /* a copy into the cache may be running that no batch tracks */
	_Atomic uint32_t in_flight;             /* batches */
	_Atomic uint32_t loads_in_flight;       /* batches for loads */
	_Atomic uint32_t device_lost;           /* the device hangs: memory it may use is never freed */
	kvk_gpu_clock_t *point[KVX_GPU_POINTS]; /* the last ones, by their number: recorded by the engine's thread */
	_Atomic uint64_t shutdown_ns;           /* closing: end of the wait for the device; 0: not closing */
	_Atomic uint32_t presend;               /* kvx_presend_t */

	/* the engine's thread */
	_Atomic(kvk_cu_stream_t) compute; /* any thread that asks for digests reads it */
	uint32_t points;                  /* of the compute stream that saves come after: how many there were */
	int begin_point;                  /* the one of this step's complete blocks is among them */
	int ended;                        /* end_step() was called, and its synchronous loads are not settled yet */
	int prefetched;            /* the step's loads have begun, and run_sync_loads() has not been called yet */
	int presend_layers;        /* layer by layer, if that pays */
	uint64_t presend_until_ns; /* the end of the wait for their blocks */
	kvx_wlayers_t layers;
	kvx_gpu_timer_t timers[KVX_GPU_TIMERS]; /* of steps, then of loads */
	uint32_t step_at;                       /* the next to be used for a step */

	/* under the lock */
	pthread_mutex_t lock;
	uint32_t sync_batch, async_batch, large_batch, save_batch; /* blocks a job */
	uint32_t async_blocks_in_flight;                           /* of asynchronous loads */
	uint64_t serial;
	kvx_gpu_batch_t *first[KVX_LANES], *last[KVX_LANES];
	kvx_gpu_batch_t batches[KVX_GPU_BATCHES]; /* loads, then saves */
	kvk_move_t moves[KVX_GPU_SYNC_MOVES];
	uint64_t *expected; /* [the largest batch of a load][words] */

	/* the owner of the attachment */
	kvx_pool_slab_t *slabs;
	uint32_t refused_pieces; /* that are tried again */

	kvx_worker_t *next_leaked; /* see kvx_gpu_leak_until_exit() */
};

#endif
