/* kernels/cuda/gpu.h -- the state of a device: kvk_gpu_t and what it consists of. */
#ifndef KVK_CUDA_GPU_H
#define KVK_CUDA_GPU_H

#include "kvk/gpu.h"

#include "cuda/device/args.h"

#include <pthread.h>
#include <stdatomic.h>

#define KVK_GPU_JOBS             64u
#define KVK_GPU_SMS              4u  /* fill the link, */
#define KVK_GPU_SMS_WIDE         16u /* where they do not, */
#define KVK_GPU_SMS_SMALL        8u  /* and this many with leaves of less than KVK_CHUNK */
#define KVK_GPU_RING_BYTES       (UINT64_C(128) << 20)
#define KVK_GPU_STAGES           4u /* of a ring: fewer and larger ones leave the link idle less often */
#define KVK_GPU_RING_STREAMS     2u /* of a ring: copies, kernels */
#define KVK_GPU_ARG_BUFFER_BYTES (UINT64_C(32) << 20) /* of pinned memory for arguments of jobs */
#define KVK_GPU_ARG_BUFFER_LEAST (UINT64_C(256) << 10)
#define KVK_GPU_MAX_JOBS         4096u
#define KVK_GPU_MAX_RANGES       65536u /* pieces of a pool: of 256 MiB they are 16 TiB */
#define KVK_GPU_MAX_STREAM       64u
#define KVK_GPU_LAUNCH_GRAPHS    16u /* streams with a launch graph of their own; the others share the last one */
#define KVK_GPU_MAX_CHOICE       32u
#define KVK_GPU_MAX_UNITS        (UINT64_C(1) << 31)
#define KVK_GPU_MIN_CHUNK        (2u << 20)   /* bytes: STAGED joins blocks to a chunk of this size */
#define KVK_GPU_STAGED_RUN       (256u << 10) /* contiguous bytes from which on AUTO stages, unless it was measured; */
#define KVK_GPU_STAGED_ROW       (48u << 10)  /* of some of the layers: bytes of a row, */
#define KVK_GPU_STAGED_CALL      (2u << 20) /* of a call, on the average; less cost the host more than the link gains */
#define KVK_GPU_LARGE_JOB        (UINT64_C(256) << 20) /* bytes; its first and last chunk take little of its time */
#define KVK_GPU_MAX_IN_FLIGHT    (256u << 10)          /* bytes that a scatter has on their way over the link */
#define KVK_GPU_LEAF_LEAST       241u /* bytes of the smallest leaf the kernels can digest: XXH3's long form */
#define KVK_GPU_PLAIN_GRID       2u   /* blocks an SM, of the plain kernels */
#define KVK_GPU_ERROR_BYTES      256u
#define KVK_GPU_UUID_BYTES       48u

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
#define KVK_CU_CAPTURE_OWN   2 /* relaxed: this thread's calls do not invalidate what another one captures */

/* Where memory is, for the kernels of this device: each kind is harder to reach than those before it. */
typedef enum kvk_gpu_mem_kind {
	KVK_GPU_MEM_HOST, /* the CPU can read it */
	KVK_GPU_MEM_NEAR, /* of a device, and kernels reach it */
	KVK_GPU_MEM_FAR,  /* of another device, and they do not */
} kvk_gpu_mem_kind_t;

/* One range of registered or mapped memory. */
typedef struct kvk_gpu_range {
	_Atomic uint64_t base, end, device, kind;
} kvk_gpu_range_t;

/* Sorted by base. Two of them: readers look in the current one, the writer fills the other and makes it current. */
typedef struct kvk_gpu_table {
	_Atomic uint32_t version; /* odd: being written */
	_Atomic uint32_t count;
	kvk_gpu_range_t ranges[KVK_GPU_MAX_RANGES];
} kvk_gpu_table_t;

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
	int near;    /* some block lies in a device's memory, and kernels reach it */
	int lost;    /* nothing tells when its copies end: its memory is not used again */
	kv_status_t status;
	kvk_gpu_job_t *next; /* free: any order; else by offset in the argument buffer */

	uint64_t at, bytes;    /* in the argument buffer */
	uint64_t inputs;       /* bytes of it, from its start, that kernels read: moves, bases, expected digests */
	kvk_gpu_move_t *moves; /* [count]; STAGED: behind them [staged_ranges][count], where they lie in the ring */
	uint64_t *bases;
	uint64_t *leaves; /* [count][heads][layers][pieces] of the range that is copied; NULL: none */
	uint32_t *bad;
	kvk_move_t *asked;  /* of the caller: data, leaves */
	uint32_t *position; /* of the caller's moves among these; NULL: as they came */
	uint64_t start_at, moves_at, bases_at, leaves_at, bad_at; /* the same, as the device sees them */

	kvk_gpu_dir_t dir;
	kvk_gpu_way_t way;
	kvk_layout_t layout;
	uint32_t count, heads, layers, pieces;
	uint32_t layer, cache_layers;   /* where the range lies in the caller's leaves */
	uint64_t pool_first, pool_head; /* COPY_PER_PIECE: the host makes the digests */
};

/* A part of a ring. */
typedef struct kvk_gpu_stage {
	kvk_cu_ptr_t at;
	kvk_cu_event_t filled, empty; /* when they were recorded last */
} kvk_gpu_stage_t;

/* A stream of a ring. */
typedef struct kvk_gpu_ring_stream {
	kvk_cu_stream_t stream;
	kvk_cu_event_t done;
} kvk_gpu_ring_stream_t;

typedef struct kvk_gpu_ring {
	pthread_mutex_t lock; /* a copy enqueues its chunks without another one's between */
	atomic_int state;     /* 0: not made yet, 1: there, -1: cannot be had */
	int broken;   /* a chunk was enqueued in part: nothing is known of the stages until both streams have met */
	uint32_t pos; /* of the next stage */
	uint64_t stage_bytes;
	kvk_cu_ptr_t memory;
	kvk_cu_event_t start;
	kvk_gpu_stage_t stages[KVK_GPU_STAGES];
	kvk_gpu_ring_stream_t streams[KVK_GPU_RING_STREAMS];
} kvk_gpu_ring_t;

/* The argument buffer once more, in the memory of the device: a job's kernels read there, at the same offset, once its
 * upload has arrived. */
typedef struct kvk_gpu_device_args {
	pthread_mutex_t lock;
	atomic_int state; /* as a ring's */
	kvk_cu_ptr_t memory;
	kvk_cu_stream_t stream;
	kvk_cu_event_t come;
} kvk_gpu_device_args_t;

/* What kvk_gpu_measure() found. */
typedef struct kvk_gpu_choice {
	kvk_layout_t layout;
	kvk_paged_kind_t kind;
	uint32_t heads, layers;
	kvk_gpu_way_t way[2][2]; /* by direction; of small jobs and of large ones */
	int wide;                /* the link takes more than few SMs and KVK_GPU_MAX_IN_FLIGHT bring */
} kvk_gpu_choice_t;

/* The graph of one kernel with which kernels get to a stream. */
typedef struct kvk_gpu_launch_graph {
	kvk_cu_stream_t stream;
	kvk_cu_graph_t graph;
	kvk_cu_node_t node;
	kvk_cu_exec_t exec;
} kvk_gpu_launch_graph_t;

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
	char uuid[KVK_GPU_UUID_BYTES];
	kvk_cu_context_t context;
	kvk_cu_module_t module;
	kvk_cu_function_t plain[2]; /* by direction; NULL: no kernels */
	kvk_cu_function_t bulk[2];  /* NULL: not on this device */
	kvk_cu_function_t digest_pieces;
	uint32_t sms_all, sms; /* sms 0: what fills the link */
	uint64_t ring_bytes;
	char name[96];
	char description[KVK_GPU_ERROR_BYTES + 160];

	pthread_mutex_t lock; /* jobs, streams, choices' writers, peers */
	kvk_gpu_job_t *jobs;
	uint32_t job_count;
	kvk_gpu_job_t *idle;
	kvk_gpu_job_t *busy; /* by offset in the argument buffer */
	atomic_uint ending;
	uint8_t *arg_buffer;
	uint64_t arg_buffer_at, arg_buffer_bytes;

	kvk_cu_stream_t streams[KVK_GPU_MAX_STREAM];
	uint32_t stream_count;
	kvk_cu_event_t order; /* of kvk_gpu_order_streams() */
	uint64_t peers, far;  /* bit: device whose memory kernels of this one may use; may not */

	pthread_mutex_t launch_lock;
	kvk_gpu_launch_graph_t launch_graphs[KVK_GPU_LAUNCH_GRAPHS];
	uint32_t launch_graph_count;
	int no_launch_graphs; /* the driver does not have, or make, them */

	pthread_mutex_t ranges_lock; /* writers */
	kvk_gpu_table_t *tables;     /* two */
	atomic_uint current;

	atomic_int no_batch;     /* the driver has the call and does not take it */
	atomic_uintptr_t linked; /* stream of the last scatter, if its kernel reads the link */
	kvk_gpu_ring_t rings[2]; /* by direction */
	kvk_gpu_device_args_t device_args;
	kvk_gpu_choice_t choices[KVK_GPU_MAX_CHOICE];
	atomic_uint choice_count;
	kvk_gpu_counters_t counters;
};

#endif
