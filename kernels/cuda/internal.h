/* kernels/cuda/internal.h -- what the files of the GPU copies share; private to kernels/.
 *
 * gpu.c          the device: open, streams, calls of the driver and how they fail
 * memory.c   host memory the device sees, and the pinned memory that arguments of jobs lie in
 * args.c     a copy, described for the kernels; which way it goes
 * jobs.c     submit, poll, wait, end
 * clock.c    what the device's clock says of its streams
 * upload.c   arguments of jobs once more in the device's memory
 * stage.c    way STAGED; copy_per_piece.c way EACH; measure.c which way is faster
 */
#ifndef KVK_CUDA_INTERNAL_H
#define KVK_CUDA_INTERNAL_H

#include "kvk/gpu.h"

#include "cuda/device/args.h"

#include <pthread.h>
#include <stdatomic.h>

#define KVK_GPU_JOBS        64u
#define KVK_GPU_SMS         4u  /* fill the link, */
#define KVK_GPU_SMS_WIDE    16u /* where they do not, */
#define KVK_GPU_SMS_SMALL   8u  /* and so many with leaves of less than a chunk */
#define KVK_GPU_RING_BYTES  (UINT64_C(128) << 20)
#define KVK_GPU_SLOTS       4u                   /* of a ring: fewer and larger ones leave the link idle less often */
#define KVK_GPU_LINES       2u                   /* of a ring: copies, kernels */
#define KVK_GPU_AREA_BYTES  (UINT64_C(32) << 20) /* of pinned memory for arguments of jobs */
#define KVK_GPU_AREA_LEAST  (UINT64_C(256) << 10)
#define KVK_GPU_MAX_JOBS    4096u
#define KVK_GPU_MAX_RANGES  65536u /* pieces of a pool: of 256 MiB they are 16 TiB */
#define KVK_GPU_MAX_STREAM  64u
#define KVK_GPU_STARTERS    16u /* streams whose kernels do not wait for each other because they are launched alike */
#define KVK_GPU_MAX_CHOICE  32u
#define KVK_GPU_MAX_UNITS   (UINT64_C(1) << 31)
#define KVK_GPU_TAPER       (2u << 20)   /* bytes of the smallest step of STAGED that blocks are put together for */
#define KVK_GPU_STAGED_RUN  (256u << 10) /* contiguous bytes from which on AUTO stages, unless it was measured; */
#define KVK_GPU_STAGED_ROW  (48u << 10)  /* of some of the layers: bytes of a row, */
#define KVK_GPU_STAGED_CALL (2u << 20)   /* of a call, on the average; less cost the host more than the link gains */
#define KVK_GPU_LARGE_JOB   (UINT64_C(256) << 20) /* bytes of a job whose first and last step take little of its time */
#define KVK_GPU_WINDOW      (256u << 10)          /* bytes that a scatter has on their way over the link */
#define KVK_GPU_LEAF_LEAST  241u /* bytes of the smallest leaf the kernels can digest: XXH3's long form */
#define KVK_GPU_PLAIN_GRID  2u   /* blocks an SM, of the plain kernels */
#define KVK_GPU_WHY_BYTES   256u

#define KVK_GPU_NO_STREAM UINTPTR_MAX

/* Results of the driver that mean something of their own. */
#define KVK_CU_INVALID       1
#define KVK_CU_OUT_OF_MEMORY 2
#define KVK_CU_NO_DEVICE     100
#define KVK_CU_OS_ERROR      304
#define KVK_CU_NOT_PERMITTED 800
#define KVK_CU_NOT_SUPPORTED 801
#define KVK_CU_PEER_ON       704
#define KVK_CU_EVENT_NO_TIME 2u
#define KVK_CU_STREAM_OWN    1u      /* does not wait for the default stream */
#define KVK_CU_HOST_MAPPED   3u      /* portable, mapped: the same bits for host_alloc and host_register */
#define KVK_CU_PRIORITY_HIGH (-1000) /* the driver takes the nearest it has */
#define KVK_CU_PRIORITY_LOW  1000
#define KVK_CU_CAPTURE_OWN   2 /* relaxed: this thread's calls do not spoil what another one captures */

/* One range of registered memory. */
typedef struct kvk_gpu_range {
	_Atomic uint64_t base, end, device;
} kvk_gpu_range_t;

/* Sorted by base. Two of them: readers look in the current one, the writer fills the other and makes it current. */
typedef struct kvk_gpu_table {
	_Atomic uint32_t version; /* odd: being written */
	_Atomic uint32_t count;
	kvk_gpu_range_t ranges[KVK_GPU_MAX_RANGES];
} kvk_gpu_table_t;

/* What a copy is made of, decided before anything is taken. */
typedef struct kvk_gpu_plan {
	const kvk_gpu_copy_t *copy;
	kvk_gpu_args_t args; /* but for the addresses */
	kvk_geometry_t geometry;
	kvk_gpu_way_t way;
	uint32_t sms;
	uint32_t window;        /* of a scatter over the link; 0: any number of bytes */
	int digests;            /* some move has leaves */
	int far;                /* some block lies where no kernel reaches it: only the driver's copies do */
	uint32_t staged_layers; /* layers a step of STAGED takes */
	uint32_t staged_steps;  /* ceil(layers / staged_layers); other ways: 0 */
	uint64_t pool_bytes;    /* of a block */
} kvk_gpu_plan_t;

typedef enum kvk_gpu_job_state {
	KVK_GPU_JOB_FREE,
	KVK_GPU_JOB_RUNNING,
	KVK_GPU_JOB_OVER,   /* its answer is known */
	KVK_GPU_JOB_ENDING, /* given back while its copies may still run */
} kvk_gpu_job_state_t;

struct kvk_gpu_job {
	kvk_gpu_t *gpu;
	kvk_cu_event_t event;
	_Atomic kvk_gpu_job_state_t state;
	int refused; /* the driver has taken a part of it */
	int near;    /* some block lies in a device's memory */
	int lost;    /* nothing tells when its copies end: its memory is not used again */
	kv_status_t status;
	kvk_gpu_job_t *next; /* free: any order; else by place in the area */

	uint64_t at, bytes;    /* in the area */
	uint64_t inputs;       /* bytes of it, from its start, that kernels read: moves, bases, expected digests */
	kvk_gpu_move_t *moves; /* [count]; STAGED: behind them [staged_steps][count], where they lie in the ring */
	uint64_t *bases;
	uint64_t *leaves; /* [count][heads][layers][pieces] of the range that is copied; NULL: none */
	uint32_t *bad;
	kvk_move_t *asked; /* of the caller: data, leaves */
	uint32_t *place;   /* of the caller's moves among these; NULL: as they came */
	uint64_t start_at, moves_at, bases_at, leaves_at, bad_at; /* the same, as the device sees them */

	kvk_gpu_dir_t dir;
	kvk_gpu_way_t way;
	kvk_layout_t layout;
	uint32_t count, heads, layers, pieces;
	uint32_t layer, cache_layers;   /* where the range lies in the caller's leaves */
	uint64_t pool_first, pool_head; /* way EACH: the host makes the digests */
};

/* A part of a ring. */
typedef struct kvk_gpu_slot {
	kvk_cu_ptr_t at;
	kvk_cu_event_t filled, empty; /* when they were recorded last */
} kvk_gpu_slot_t;

/* A stream of a ring. */
typedef struct kvk_gpu_line {
	kvk_cu_stream_t stream;
	kvk_cu_event_t done;
} kvk_gpu_line_t;

typedef struct kvk_gpu_ring {
	pthread_mutex_t lock; /* a copy enqueues its steps without another one's between */
	atomic_int state;     /* 0: not made yet, 1: there, -1: cannot be had */
	int broken;           /* a step was enqueued in part: nothing is known of the slots until all lines have met */
	uint32_t turn;
	uint64_t slot_bytes;
	kvk_cu_ptr_t memory;
	kvk_cu_event_t start;
	kvk_gpu_slot_t slots[KVK_GPU_SLOTS];
	kvk_gpu_line_t lines[KVK_GPU_LINES];
} kvk_gpu_ring_t;

/* The area once more, in the device's memory: what a job's kernels read lies there at the same place, once its upload
 * has come. */
typedef struct kvk_gpu_mirror {
	pthread_mutex_t lock;
	atomic_int state; /* as a ring's */
	kvk_cu_ptr_t memory;
	kvk_cu_stream_t stream;
	kvk_cu_event_t come;
} kvk_gpu_mirror_t;

/* What kvk_gpu_measure() found. */
typedef struct kvk_gpu_choice {
	kvk_layout_t layout;
	kvk_paged_kind_t kind;
	uint32_t heads, layers;
	kvk_gpu_way_t way[2][2]; /* by direction; of small jobs and of large ones */
	int wide;                /* the link takes more than few SMs and KVK_GPU_WINDOW bring */
} kvk_gpu_choice_t;

/* The graph of one kernel with which kernels get to a stream. */
typedef struct kvk_gpu_starter {
	kvk_cu_stream_t stream;
	kvk_cu_graph_t graph;
	kvk_cu_node_t node;
	kvk_cu_exec_t exec;
} kvk_gpu_starter_t;

typedef struct kvk_gpu_counters {
#define KVK_GPU_STAT(name, help) _Atomic uint64_t name;
	KVK_GPU_STATS(KVK_GPU_STAT)
#undef KVK_GPU_STAT
} kvk_gpu_counters_t;

struct kvk_gpu {
	const kvk_cuda_ops_t *cuda;
	const kv_env_t *env;
	int device;
	int ordinal;
	kvk_cu_context_t context;
	kvk_cu_module_t module;
	kvk_cu_function_t plain[2]; /* by direction; NULL: no kernels */
	kvk_cu_function_t bulk[2];  /* NULL: not on this device */
	uint32_t sms_all, sms;      /* sms 0: what fills the link */
	uint64_t ring_bytes;
	char name[96];
	char description[KVK_GPU_WHY_BYTES + 160];

	pthread_mutex_t lock; /* jobs, streams, choices' writers, peers */
	kvk_gpu_job_t *jobs;
	uint32_t job_count;
	kvk_gpu_job_t *idle;
	kvk_gpu_job_t *busy; /* by place in the area */
	atomic_uint ending;
	uint8_t *area;
	uint64_t area_at, area_bytes;

	kvk_cu_stream_t streams[KVK_GPU_MAX_STREAM];
	uint32_t stream_count;
	kvk_cu_event_t order; /* of kvk_gpu_after() */
	uint64_t peers, far;  /* bit: device whose memory kernels of this one may use; may not */

	pthread_mutex_t starters_lock;
	kvk_gpu_starter_t starters[KVK_GPU_STARTERS];
	uint32_t starter_count;
	int no_starters; /* the driver does not have, or make, them */

	pthread_mutex_t ranges_lock; /* writers */
	kvk_gpu_table_t *tables;     /* two */
	atomic_uint current;

	atomic_int no_batch;     /* the driver has the call and does not take it */
	atomic_uintptr_t linked; /* stream of the last scatter, if its kernel reads the link */
	kvk_gpu_ring_t rings[2]; /* by direction */
	kvk_gpu_mirror_t mirror;
	kvk_gpu_choice_t choices[KVK_GPU_MAX_CHOICE];
	atomic_uint choice_count;
	kvk_gpu_counters_t counters;
};

/* ---- gpu.c ----------------------------------------------------------------------------------- */

/* Make the device's context the thread's; after it, kvk_gpu_leave(). */
kv_status_t kvk_gpu_enter(kvk_gpu_t *gpu);
void kvk_gpu_leave(kvk_gpu_t *gpu);

/* A call of the driver came back with `error`: KV_OK for 0; else it is counted, named for kvk_gpu_why(), and KV_ERR_IO
 * (KV_ERR_NOMEM: out of memory). `member`: offset of the function in the table. */
kv_status_t kvk_gpu_result(kvk_gpu_t *gpu, size_t member, int error);
#define KVK_GPU_CALL(gpu, member, ...)                                                                                 \
	kvk_gpu_result(gpu, offsetof(kvk_cuda_ops_t, member), (gpu)->cuda->member(__VA_ARGS__))

/* Say why a call fails, for kvk_gpu_why(). */
kv_status_t kvk_gpu_refuse(kv_status_t status, const char *format, ...) __attribute__((format(printf, 2, 3)));

void kvk_gpu_count(_Atomic uint64_t *counter, uint64_t n);

/* ---- memory.c ---------------------------------------------------------------------------- */

/* Tables, lock and area; undone by fini, which unregisters what is left (in the context). */
kv_status_t kvk_gpu_memory_init(kvk_gpu_t *gpu);
void kvk_gpu_memory_fini(kvk_gpu_t *gpu);
typedef enum kvk_gpu_place {
	KVK_GPU_HOST, /* the CPU can read it */
	KVK_GPU_NEAR, /* of a device, and kernels reach it */
	KVK_GPU_FAR,  /* of another device, and they do not */
} kvk_gpu_place_t;

/* Device address of memory that the device sees: registered, else known to the driver. KV_ERR_ARG. */
kv_status_t kvk_gpu_translate(kvk_gpu_t *gpu, const void *at, size_t bytes, uint64_t *p_address,
			      kvk_gpu_place_t *p_place);

/* Do all of these bytes lie in one registration, or in one piece of memory that the driver gave? It refuses a copy that
 * goes from one into the next. */
int kvk_gpu_in_one(kvk_gpu_t *gpu, const void *at, size_t bytes);

/* ---- args.c ------------------------------------------------------------------------------ */

/* Check a copy and choose its way; `far` as in the plan. KV_ERR_ARG, KV_ERR_UNSUPPORTED. */
kv_status_t kvk_gpu_plan(kvk_gpu_t *gpu, const kvk_gpu_copy_t *copy, int far, kvk_gpu_plan_t *plan);
/* Contiguous bytes of a move in the pool, when `layers` of the cache's are moved. */
uint64_t kvk_gpu_run_bytes(const kvk_layout_t *layout, const kvk_paged_t *paged, uint32_t layers, uint32_t page_bytes);
/* Pages or pieces: what a warp takes at a time. */
uint64_t kvk_gpu_units(const kvk_gpu_args_t *args);
/* May the bulk kernels run with these arguments? `addresses`: all of the pool's and of the cache's, or-ed. */
int kvk_gpu_bulk_fits(const kvk_gpu_args_t *args, uint64_t addresses);

/* ---- jobs.c ------------------------------------------------------------------------------ */

kv_status_t kvk_gpu_jobs_init(kvk_gpu_t *gpu, uint32_t count);
void kvk_gpu_jobs_fini(kvk_gpu_t *gpu);
/* The copies have ended well: hand out digests, or look at what the device thought of them. */
kv_status_t kvk_gpu_conclude(kvk_gpu_job_t *job);

/* ---- launch.c ----------------------------------------------------------------------------- */

void kvk_gpu_starters_init(kvk_gpu_t *gpu);
void kvk_gpu_starters_fini(kvk_gpu_t *gpu);
/* How a kernel is started. */
typedef struct kvk_gpu_launch {
	kvk_gpu_dir_t dir;
	uint32_t sms;
	uint64_t addresses; /* all of the pool's and of the cache's, or-ed */
	uint64_t window;    /* bytes of a scatter that may be on their way at a time; 0: any number */
	kvk_cu_stream_t stream;
} kvk_gpu_launch_t;

/* The copy kernel that these arguments allow, on as many SMs as it has work for. */
kv_status_t kvk_gpu_launch(kvk_gpu_t *gpu, const kvk_gpu_launch_t *launch, const kvk_gpu_args_t *args);

/* ---- upload.c ---------------------------------------------------------------------------- */

void kvk_gpu_mirror_init(kvk_gpu_t *gpu);
void kvk_gpu_mirror_fini(kvk_gpu_t *gpu);
/* Where kernels that are enqueued on the stream from now on read the job's inputs: in the device's memory, if that can
 * be had, else where the host has written them. */
uint64_t kvk_gpu_upload(kvk_gpu_t *gpu, const kvk_gpu_job_t *job, kvk_cu_stream_t stream);

/* ---- stage.c, copy_per_piece.c, measure.c -------------------------------------------------- */

void kvk_gpu_rings_init(kvk_gpu_t *gpu);
/* No copy is under way: the next one makes them anew. */
void kvk_gpu_rings_drop(kvk_gpu_t *gpu);
void kvk_gpu_rings_fini(kvk_gpu_t *gpu);
/* Is there a ring for this direction? Made at the first call (in the context or not). */
int kvk_gpu_ring_ready(kvk_gpu_t *gpu, kvk_gpu_dir_t dir);
/* Bytes that a step may take: what a slot of a ring holds. */
uint64_t kvk_gpu_ring_slot_bytes(const kvk_gpu_t *gpu);
kv_status_t kvk_gpu_stage(kvk_gpu_t *gpu, const kvk_gpu_plan_t *plan, kvk_gpu_job_t *job);

kv_status_t kvk_gpu_each(kvk_gpu_t *gpu, const kvk_gpu_plan_t *plan, const kvk_gpu_job_t *job);
/* All copies have ended: make the digests of a gather, compare those of a scatter, in job->leaves and job->bad. */
void kvk_gpu_each_digest(kvk_gpu_job_t *job);

/* What was measured for this cache and a copy of so many bytes; KVK_GPU_AUTO: nothing. */
kvk_gpu_way_t kvk_gpu_chosen(const kvk_gpu_t *gpu, const kvk_gpu_copy_t *copy, uint64_t bytes);
/* Was more to be had of the link with many SMs and all that they have room for on its way? */
int kvk_gpu_is_wide(const kvk_gpu_t *gpu, const kvk_gpu_copy_t *copy);

#endif
