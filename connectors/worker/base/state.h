/* worker/base/state.h -- the state of a kvx_worker_t, and which thread owns which part of it.
 *
 * The engine's thread parses step messages, creates loads and saves, and frees them. The transfer thread owns the
 * attachment (kvc_t) and everything made of it: it imports leases and puts, publishes which blocks may be copied, ends
 * puts and releases leases. Any thread may copy blocks.
 *
 *   a load or save   created by the engine's thread -> submitted -> transfer thread -> `completed` -> freed by the
 *                    engine's thread
 *   a copy           active++, still open?, take blocks, copy, active--; the thread that closes a job waits until
 *                    active is 0
 *
 * This header has no functions of a module: each module's header has its own, so a file sees the modules it calls and
 * no others.
 */
#ifndef KVX_WORKER_STATE_H
#define KVX_WORKER_STATE_H

#include "common/cpus.h"
#include "kvx_worker.h"
#include "step/message.h"

#include "kv/env.h"
#include "kv/shm.h"
#include "kvk/gpu.h"
#include "kvk/move.h"

#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>

#define KVX_WORKER_SPACES  1024u        /* numbers of adapters */
#define KVX_WORKER_MOVES   32u          /* blocks a batch */
#define KVX_WORKER_BATCH   (256u << 10) /* bytes a batch */
#define KVX_WORKER_THREADS 16u
#define KVX_WORKER_STEPS   8u    /* steps with a failed load that are remembered */
#define KVX_WORKER_NAMES   1024u /* finished loads to name: as many as a scheduler has at a time */
#define KVX_ERR_FAULT      ((kvc_status_t)KV_ERR_FAULT) /* a slab this process has not mapped yet */
#define KVX_NS_A_MS        UINT64_C(1000000)

struct kvx_wload;
typedef struct kvx_wname kvx_wname_t;
typedef struct kvx_wgpu kvx_wgpu_t;

/* Threads sleep at it until it is opened. */
typedef struct kvx_gate {
	_Atomic uint32_t seq;
	_Atomic uint32_t waiters;
} kvx_gate_t;

typedef enum kvx_wjob_kind { KVX_WJOB_LOAD, KVX_WJOB_SAVE, KVX_WJOB_NAME } kvx_wjob_kind_t;

/* First member of everything that the engine's thread submits to the transfer thread. */
typedef struct kvx_wjob {
	kvx_wjob_kind_t kind;
	struct kvx_wjob *next;      /* in the engine's list */
	struct kvx_wjob *next_run;  /* submitted, or in the transfer thread's list */
	_Atomic uint32_t completed; /* the transfer thread does not use it any longer */
} kvx_wjob_t;

/* One group of the engine's cache, checked; its pointers are copied. */
typedef struct kvx_wgroup {
	uint32_t group;
	uint32_t index;      /* in the worker's groups and the identity's */
	kvk_layout_t layout; /* of its blocks in the pool */
	kvk_geometry_t geometry;
	kvk_paged_t paged;
	kvk_paged_t saved; /* the layers of it that this rank saves: other ranks may hold copies, and save the rest */
	uint64_t block_bytes; /* in the cache, of this rank's heads and layers */
	uint64_t saved_bytes; /* of it, those that this rank saves */
	uint32_t words;       /* leaves of this rank's heads and layers */
	uint32_t batch;       /* blocks that a CPU copies at once */
} kvx_wgroup_t;

/* Memory that is freed with the worker. */
typedef struct kvx_owned {
	struct kvx_owned *next;
	_Alignas(max_align_t) uint8_t bytes[];
} kvx_owned_t;

/* Buffers for one batch; each copying thread has one. */
typedef struct kvx_scratch {
	kvk_move_t moves[KVX_WORKER_MOVES];
	uint64_t *leaves; /* [batch][words] of the worker */
} kvx_scratch_t;

/* A space of a number, in one mem; the transfer thread's. */
typedef struct kvx_wspace {
	kvc_space_t *space; /* NULL: not requested */
	uint64_t next_open_ns;
	int known;                            /* the layouts have been read */
	kvk_layout_t layouts[KVX_MAX_GROUPS]; /* of the pool's blocks: their inner order may differ from ours */
} kvx_wspace_t;

/* How far the engine's cache has been touched. */
typedef struct kvx_wprefault {
	uint32_t group; /* index */
	uint32_t layer;
	size_t at; /* bytes of the layer */
} kvx_wprefault_t;

typedef struct kvx_wstats {
#define KVX_WORKER_COUNTER(name, help) _Atomic uint64_t name;
	KVX_WORKER_STATS(KVX_WORKER_COUNTER)
#undef KVX_WORKER_COUNTER
	_Atomic uint64_t loads_open, saves_open, marked;
} kvx_wstats_t;

/* An asynchronous load that has finished, as kvx_worker_take_finished() names it. */
typedef struct kvx_finished {
	int failed;
	uint32_t len;
	char id[KVX_MAX_ID];
} kvx_finished_t;

/* A thread that only copies. */
typedef struct kvx_copy_thread {
	kvx_worker_t *worker;
	pthread_t thread;
	kvx_scratch_t scratch;
} kvx_copy_thread_t;

/* A step begun before kvx_worker_begin_step(); the engine's thread. */
typedef struct kvx_prefetch {
	int begun;  /* and begin_step() has not been called yet */
	size_t len; /* of its message */
	uint64_t digest;
	void *stream; /* the engine's at that time */
} kvx_prefetch_t;

/* Calls seen since begin_step(): with all of them the step is complete. */
#define KVX_CALLED_END           1u
#define KVX_CALLED_FAILED_BLOCKS 2u
#define KVX_CALLED_REPORT        4u

/* Timing of the current step: not requested; requested, and not started yet; running. */
typedef enum kvx_timing { KVX_TIMING_NONE = 0, KVX_TIMING_REQUESTED = 1, KVX_TIMING_RUNNING = 2 } kvx_timing_t;

struct kvx_worker {
	/* constant after open */
	kvx_wgpu_t *gpu; /* NULL: the cache is in host memory */
	char layout_text[KVK_LAYOUTS_TEXT_MAX];
	kvc_identity_t identity; /* `weights` NULL: they come with the number of a space */
	uint32_t rank;
	kvx_wgroup_t *groups;
	uint32_t group_count;
	uint32_t max_blocks;
	uint32_t words;       /* leaves of this rank, of the group that has most */
	uint32_t block_bytes; /* in the pool, of the group that has most */
	uint32_t batch;       /* of the group that has most */
	uint32_t threads;
	kvx_cpus_t cpus; /* that the threads may use */
	int prefault;
	kvx_owned_t *owned;
	int no_memory; /* an allocation has failed while it was opened */

	/* shared */
	_Atomic(kvx_wjob_t *) submitted; /* and not taken by the transfer thread yet, newest first */
	kvx_gate_t progress;             /* the engine waits at it */
	kvx_gate_t work;                 /* copy threads wait at it */
	_Atomic uint32_t asleep, pokes, stop;
	_Atomic uint32_t completions;     /* jobs that the transfer thread has completed */
	_Atomic uint64_t incarnation;     /* of the daemon; 0: not attached */
	_Atomic int32_t self_test_status; /* kvx_worker_self_test_status() */
	_Atomic uint32_t unacked;         /* puts whose acknowledgement is awaited */
	_Atomic uint64_t idle_from;       /* the engine counts as idle from then on, if no step comes */
	_Atomic uint16_t *save_marks;     /* [max_blocks] saves that have not read the block yet */
	kvx_wstats_t stats;
	int event_fd;

	/* threads that copy the synchronous loads of a step */
	_Atomic(struct kvx_wload *) shared_loads;
	_Atomic uint32_t copy_threads_inside;
	uint32_t copy_thread_count;
	kvx_copy_thread_t copy_threads[KVX_WORKER_THREADS];

	/* the engine's thread */
	kvx_wjob_t *loads;      /* submitted or completed, oldest first */
	kvx_wjob_t **loads_end; /* where the next goes */
	kvx_wjob_t *saves;
	kvx_wjob_t **saves_end;
	kvx_wjob_t *deferred; /* saves of this step that wait for end_step() */
	kvx_wjob_t **deferred_end;
	struct kvx_wload *sync; /* synchronous loads of this step */
	uint32_t completions_seen;
	kvx_finished_t *finished; /* [KVX_WORKER_NAMES] a ring: [finished_taken, finished_added) are not named yet */
	uint32_t finished_added, finished_taken;
	uint32_t step;       /* of the current step message */
	uint32_t calls_seen; /* KVX_CALLED_* */
	kvx_prefetch_t prefetch;
	kvx_timing_t timing;
	uint64_t timed_ns;                      /* start of the timed step, where a host computes */
	uint64_t copied_ns;                     /* total time of the loads that had all their blocks at the start */
	uint32_t failed_step[KVX_WORKER_STEPS]; /* steps in which a synchronous load has failed */
	uint32_t failed_steps;                  /* how many ever */
	uint64_t *failed; /* bit a block: its load has failed and kvx_worker_take_failed_blocks() has not named it */
	uint32_t failed_count;
	uint64_t *fence; /* bit a block: it is about to be reused */
	uint32_t fence_count;
	uint32_t reached_reported;
	kvx_msg_buf_t report[2];
	uint32_t report_at;
	kvx_scratch_t scratch;

	/* the transfer thread */
	pthread_t thread;
	int started;
	kvc_t *kvc;
	kvx_wjob_t *run; /* jobs in progress, oldest first */
	kvx_wjob_t **run_end;
	kvx_wspace_t spaces[KVX_MEMS][KVX_WORKER_SPACES];
	kvx_wname_t *names[KVX_WORKER_SPACES]; /* NULL: the identity's own names, of number 0 */
	char *mems[KVX_MEMS];                  /* UUID of the GPU of each; NULL: not known, or host memory */
	_Atomic uint32_t reached;              /* bit a mem: that of another engine's GPU can be loaded from */
	int has_refused_device;                /* a slab in memory of a GPU could not be mapped: it was logged */
	uint32_t space_top;                    /* numbers below it may be in use */
	kvx_scratch_t transfer_scratch;
	uint64_t self_test_ns; /* the self-test is not tried before */
	kvx_wprefault_t prefaulted;
	uint64_t polled_ns;
	int polls_soon; /* a job waits for the daemon or the device: sleep briefly */
};

static inline void kvx_stat_add(_Atomic uint64_t *counter, uint64_t n)
{
	atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

/* NULL: this rank has no such group. */
static inline const kvx_wgroup_t *kvx_worker_find_group(const kvx_worker_t *worker, uint32_t group)
{
	for (uint32_t i = 0; i < worker->group_count; i++) {
		if (worker->groups[i].group == group) {
			return &worker->groups[i];
		}
	}

	return NULL;
}

/* Zeroed, and freed with the worker; NULL: there is none. While it is opened. */
static inline void *kvx_worker_alloc(kvx_worker_t *worker, size_t n, size_t size)
{
	kvx_owned_t *owned = calloc(1, sizeof *owned + n * size);

	if (!owned) {
		worker->no_memory = 1;
		return NULL;
	}
	owned->next = worker->owned;
	worker->owned = owned;

	return owned->bytes;
}

static inline uint64_t kvx_worker_now_ns(void)
{
	return kv_now_ns(&kv_env_posix);
}

#endif
