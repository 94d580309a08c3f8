/* worker/cuda/impl.h -- a worker whose engine's cache is in GPU memory: copies are jobs in flight on streams instead of
 * calls that return when done.
 *
 *   compute   the engine's own stream
 *   urgent    loads that a step needs: after what compute had at load(), before what compute gets afterwards; the host
 * does not wait beside    loads beside the steps, by kernels: after what compute had at start() low       saves: after
 * what compute had at end(), of early ones at begin()
 *
 * A flight is one job and whom it is for: a load, or as many saves as have blocks for it. They count it as active until
 * it has landed, so lease, put and pool memory stay as long as the device may use them, whatever else happens. Any
 * thread lands what is over. One lock holds flights and jobs together: asking, submitting and ordering are done under
 * it, waiting never is. All states are those of loads and saves on hosts (worker/impl.h); a block in flight is TAKEN.
 *
 * A synchronous load may come layer by layer: the same blocks again and again, each time of the next few layers, and
 * the engine's kernels of a layer wait for its range alone.
 *
 * Files: worker/cuda/device.c (device, streams, order), worker/cuda/batch.c, worker/cuda/load.c, worker/cuda/layers.c,
 * worker/cuda/prefetch.c, worker/cuda/save.c (and fences), worker/cuda/pool_memory.c (pool memory the device sees),
 * worker/cuda/roundtrip.c (self-tests).
 */
#ifndef KVX_WORKER_GPU_H
#define KVX_WORKER_GPU_H

#include "worker/impl.h"

#define KVX_GPU_MOVES        256u  /* blocks a job of a load beside the steps at most */
#define KVX_GPU_SYNC_MOVES   1024u /* of one that a step needs: one job a load or layer range, if it can be */
#define KVX_GPU_RANGES       32u
#define KVX_GPU_SYNC_BYTES   (UINT64_C(64) << 20) /* of such a job, at least */
#define KVX_GPU_BESIDE_BYTES (UINT64_C(16) << 20) /* of a job beside the steps */
#define KVX_GPU_SAVE_BYTES   (UINT64_C(32) << 20) /* of a job of a save */
#define KVX_GPU_LOADS        128u                 /* jobs of loads in flight: a step does not wait to send its own; */
#define KVX_GPU_BESIDE       8u  /* of these beside the steps: a load that a step needs is behind them */
#define KVX_GPU_SAVES        16u /* jobs of saves in flight; */
#define KVX_GPU_AHEAD        8u  /* of these not for a fence, */
#define KVX_GPU_AHEAD_BYTES  (UINT64_C(64) << 20) /* and bytes in them: a fence waits for them */
#define KVX_GPU_FLIGHTS      (KVX_GPU_LOADS + KVX_GPU_SAVES)
#define KVX_GPU_JOBS         160u /* flights and self-tests */
#define KVX_GPU_CLOCKS       64u  /* loads that are timed at a time; of more nobody knows what they took */
#define KVX_GPU_STEPS        4u   /* steps that are */

/* The stream a flight is on: jobs of one end in the order they were submitted in. */
typedef enum kvx_lane { KVX_LANE_SYNC, KVX_LANE_BESIDE, KVX_LANE_SAVE, KVX_LANE_FENCE, KVX_LANES } kvx_lane_t;

/* Free when job is NULL. */
typedef struct kvx_flight {
	kvk_gpu_job_t *job;
	kvx_lane_t lane;
	struct kvx_flight *next; /* in the lane, later */
	kvx_wload_t *load;       /* NULL: a save's */
	kvx_wpart_t *part;
	uint32_t first, count;                /* of the load's part */
	uint32_t layer, layers;               /* of the load's group; layers 0: all */
	uint32_t ranges;                      /* of the load's ranges these are */
	uint64_t serial;                      /* tells whose job it is */
	uint32_t n;                           /* moves, of saves */
	kvx_wsave_t *saves[KVX_WORKER_MOVES]; /* of one group: whose a move is; each counts as active there */
	uint32_t place[KVX_WORKER_MOVES];     /* which block of the save it is of */
	uint64_t *leaves;                     /* [batch][words]: what its gather finds */
	uint64_t begin_ns;
	int poisoned; /* its blocks may have been written meanwhile: what it has read counts for nothing */
} kvx_flight_t;

typedef struct kvx_wpiece {
	uint64_t again_ns; /* refused: not tried before */
	uint32_t tries;    /* that were refused */
	int known;
} kvx_wpiece_t;

/* One slab of the pool; pieces of it are made known to the device one by one. */
typedef struct kvx_wslab {
	struct kvx_wslab *next;
	uint8_t *base;
	size_t bytes, each;   /* of the slab, of a piece */
	uint32_t pieces, at;  /* before `at` all have been tried */
	kvx_wpiece_t piece[]; /* [pieces] */
} kvx_wslab_t;

/* Synchronous loads that come layer by layer; the engine's thread. */
typedef struct kvx_wlayers {
	uint64_t least_bytes; /* of a step's loads; 0: all come whole */
	uint64_t wait_ns;     /* for all blocks to be there */
	int off;              /* for good: the engine has skipped a layer */
	uint32_t work_us;     /* what the step computes beside its loads; 0: not known */
	double rate;          /* bytes of loads a microsecond; 0: not known */
	uint32_t count;       /* ranges of the step's loads; 0: they came whole */
	uint32_t end[KVX_GPU_RANGES];
	uint32_t waited; /* what the engine enqueues comes after ranges [0, waited) */
	uint32_t said;   /* layers the engine has named */
	uint8_t *named;  /* [layers] */
	struct {
		kvx_flight_t *flight; /* NULL: none was needed */
		uint64_t serial;
	} last[KVX_GPU_RANGES]; /* of those submitted so far, at the end of the range */
} kvx_wlayers_t;

typedef enum kvx_clock_state { KVX_CLOCK_FREE = 0, KVX_CLOCK_RUNS = 1 } kvx_clock_state_t;

/* The engine's thread; a load's is stopped by who submits for it. */
typedef struct kvx_wclock {
	kvk_gpu_clock_t *clock; /* NULL: could not be had */
	kvx_clock_state_t state;
	uint32_t step;
} kvx_wclock_t;

struct kvx_wgpu {
	kvk_gpu_t *gpu;
	kvk_cu_stream_t urgent, beside, low;
	uint32_t save_sms;
	_Atomic uint32_t crowded;  /* the step computes prompts */
	_Atomic uint32_t loose;    /* a copy into the cache may be running that no flight knows of */
	_Atomic uint32_t airborne; /* flights */
	_Atomic uint32_t loading;  /* of these for loads */
	_Atomic uint32_t leaving;  /* blocks in those for saves */
	_Atomic uint32_t lost;     /* the device hangs: what it may use is left as it is */
	_Atomic uint64_t quit_ns;  /* closing: no longer is waited for the device; 0: not closing */
	_Atomic uint64_t refused;  /* tries to make a piece of the pool known that failed */

	/* the engine's thread */
	kvk_cu_stream_t compute;
	int ended;     /* end() was there, and this step's synchronous loads are not known yet */
	int unordered; /* saves of this step cannot be put in order after it */
	int sent;      /* its synchronous loads have begun, and load() has not come yet */
	kvx_wlayers_t layers;
	kvx_wclock_t clocks[KVX_GPU_CLOCKS], steps[KVX_GPU_STEPS];
	uint32_t step_at; /* the next to be used */

	/* under the lock */
	pthread_mutex_t lock;
	uint32_t sync_batch, beside_batch, save_batch; /* blocks a job */
	uint64_t serial;
	kvx_flight_t *first[KVX_LANES], *last[KVX_LANES];
	kvx_flight_t flights[KVX_GPU_FLIGHTS]; /* loads, then saves */
	kvk_move_t moves[KVX_GPU_SYNC_MOVES];
	uint64_t *expected; /* [the largest batch of a load][words] */
	uint64_t *padded;   /* [words] */

	/* who owns the attachment */
	kvx_wslab_t *slabs;
	uint32_t waiting; /* pieces that were refused, and are tried again */

	kvx_worker_t *left; /* see kvx_gpu_leave() */
};

/* worker/cuda/device.c */
kvc_status_t kvx_gpu_open(kvx_worker_t *worker, const kvx_worker_config_t *config);
void kvx_gpu_close(kvx_worker_t *worker);
/* From now on the device is not waited for much longer. */
void kvx_gpu_quit(kvx_worker_t *worker);
/* It was waited for long enough: transfer thread, closing. */
int kvx_gpu_hangs(kvx_worker_t *worker);
/* A worker whose device hangs is left to the end of the process. 0: it does not. */
int kvx_gpu_leave(kvx_worker_t *worker);
/* The device will not do, as it has just said: nothing is loaded or saved any more. Transfer thread. Returns the
 * status. */
kvc_status_t kvx_gpu_decline(kvx_worker_t *worker, kvc_status_t status);
/* What is enqueued on `later` from now on runs after what is on `earlier` now. 0: the driver refuses. */
int kvx_gpu_order(kvx_worker_t *worker, kvk_cu_stream_t earlier, kvk_cu_stream_t later);
/* begin(): copies nobody knows the end of come before what the engine does next. */
void kvx_gpu_begin(kvx_worker_t *worker);
/* What the step computes. */
void kvx_gpu_work(kvx_worker_t *worker, const kvx_plan_work_t *work);
/* Early saves come after what the engine has enqueued. 0: they must not be made. */
int kvx_gpu_early(kvx_worker_t *worker);
/* start(): loads beside the steps come after what the engine has enqueued. 0: they must not begin. */
int kvx_gpu_start(kvx_worker_t *worker);
/* end(): saves of this step come after it, and are handed over when its synchronous loads are known to have come. */
void kvx_gpu_end(kvx_worker_t *worker);
/* Wait for the synchronous loads of the step (at most until their deadline), then hand over the saves that waited for
 * them. */
void kvx_gpu_settle(kvx_worker_t *worker);
/* The device's part of the counters. */
void kvx_gpu_stats(const kvx_worker_t *worker, kvx_worker_stats_t *stats);

/* worker/cuda/batch.c */
/* A free flight for a load, or a save; NULL: there is none now. Lock held. */
kvx_flight_t *kvx_flight_of_load(kvx_wgpu_t *gpu, uint32_t flags);
kvx_flight_t *kvx_flight_of_save(kvx_wgpu_t *gpu, int fence);
/* Lock held. Not OK: nothing is in flight; KV_ERR_BUSY: try again later. */
kvc_status_t kvx_flight_submit(kvx_worker_t *worker, kvx_flight_t *flight, const kvk_gpu_copy_t *copy);
/* Land what is over: how many. Any thread. */
uint32_t kvx_flight_land(kvx_worker_t *worker);

/* worker/timing.c */
void kvx_clocks_open(kvx_wgpu_t *gpu);
void kvx_clocks_close(kvx_wgpu_t *gpu);
/* The load's copies may begin where the stream is now, if there is a clock for it. Before the load goes. */
void kvx_clock_load(kvx_worker_t *worker, kvx_wload_t *load, kvk_cu_stream_t stream);
/* Its copies begin where the stream is now, behind those of others, if it has waited for nothing else. Lock held. */
void kvx_clock_turn(kvx_wgpu_t *gpu, const kvx_wload_t *load, kvk_cu_stream_t stream);
/* Its copies may run: the device has done what they come behind. 0: it has not, or there is no clock for it. Lock held,
 * some of it in flight. */
int kvx_clock_begun(const kvx_wgpu_t *gpu, const kvx_wload_t *load);
/* Copies of it end where the stream is now. Lock held. */
void kvx_clock_sent(kvx_wgpu_t *gpu, const kvx_wload_t *load, kvk_cu_stream_t stream);

/* worker/cuda/load.c */
/* Submit what the oldest loads beside the steps have ready, unless the device copies a step's: how many blocks.
 * Transfer thread. */
uint32_t kvx_gpu_load_beside(kvx_worker_t *worker, uint64_t now);
/* All synchronous loads of the plan are submitted, or have failed, when it returns. `layers`: they may come layer by
 * layer; 1: they do. */
int kvx_gpu_load(kvx_worker_t *worker, int layers);
/* Before load(): submit what is there of them soon; `layers`: in the order of layers, if that pays. */
void kvx_gpu_load_early(kvx_worker_t *worker, int layers);
/* There were such loads, and load() has not come: no more of them is sent, what was comes before what the engine
 * enqueues from now on, and they have failed. */
void kvx_gpu_load_cancel(kvx_worker_t *worker);
/* Submit what the flight says of its load. BUSY: not now; the load counts the flight from here to its landing. Lock
 * held. */
kvc_status_t kvx_gpu_load_submit(kvx_worker_t *worker, kvx_flight_t *flight);
/* Nothing could be sent: land what is over, end loads that are overdue, else wait a little, unless the gate was opened
 * since `seen`. */
void kvx_gpu_load_wait(kvx_worker_t *worker, uint32_t seen, uint32_t *p_spins);
/* Lock held. */
void kvx_gpu_load_landed(kvx_worker_t *worker, kvx_flight_t *flight, kvc_status_t status);

/* worker/cuda/layers.c */
/* Wait a little for all blocks of the synchronous loads. 0: some are not there, or will not be. */
int kvx_layers_there(kvx_worker_t *worker);
/* A load of so many bytes took the device so long. */
void kvx_layers_learn(kvx_worker_t *worker, uint64_t bytes, uint64_t ns);
/* Submit the synchronous loads in layer ranges, if that pays and all their blocks are there. 0: nothing was done. */
int kvx_layers_send(kvx_worker_t *worker);
/* No layer is read any more: what the engine has not waited for comes before what it does next. Where a layer was read
 * without, the loads have failed. */
void kvx_layers_close(kvx_worker_t *worker);

/* worker/cuda/save.c */
/* Submit some blocks of the save, and of those behind it while there is room: how many. Transfer thread. */
kvc_status_t kvx_gpu_save(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t *p_moved);
/* Blocks of the fence are read, or will be before what the engine enqueues from now on, or are given up. */
void kvx_gpu_fence(kvx_worker_t *worker);
/* Lock held. */
void kvx_gpu_save_landed(kvx_worker_t *worker, kvx_flight_t *flight, kvc_status_t status);

/* worker/cuda/pool_memory.c; who owns the attachment */
/* kvc_config_t.on_memory. */
void kvx_slabs_told(void *worker, const kvc_memory_t *memory, int mapped);
/* The device sees these bytes when it answers OK. KVC_ERR_BUSY: the driver has refused them, ask again later;
 * KVC_ERR_NOMEM: there is no room to remember that; else the worker has declined. */
kvc_status_t kvx_slabs_ensure(kvx_worker_t *worker, const void *at, size_t bytes);
/* In idle times: make a little more of the pool known. 0: nothing to do. */
int kvx_slabs_step(kvx_worker_t *worker);

/* worker/cuda/roundtrip.c */
kvc_status_t kvx_gpu_echo(kvx_worker_t *worker, const kvx_wgroup_t *group, uint32_t from, uint32_t to);
/* Memory of a self-test that the device and the host both see; *p_device is the device's address of it. */
kvc_status_t kvx_gpu_test_memory(kvx_worker_t *worker, size_t bytes, uint8_t **p_memory, uintptr_t *p_device);
void kvx_gpu_test_free(const kvx_worker_t *worker, uint8_t *memory);
/* Begin or ask: PENDING until it is over. */
kvc_status_t kvx_gpu_test_move(kvx_worker_t *worker, const kvk_gpu_copy_t *copy);
/* Nothing of it is under way any more. */
void kvx_gpu_test_stop(kvx_worker_t *worker);

#endif
