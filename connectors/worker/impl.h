/* worker/impl.h -- what the files of kvx_worker_t share.
 *
 * Two owners. The engine's thread parses plans, makes loads and saves, and frees them. The transfer thread owns the
 * attachment (kvc_t) and everything made of it: it imports leases and puts, says which blocks are ready, hands in,
 * gives back. Blocks are copied by whoever has time.
 *
 *   a load or save   made by the engine -> queue -> transfer thread -> `over` -> freed by the engine
 *   a copy           active++, is it still open?, take blocks, copy, active--; who closes a job waits until active is 0
 *
 * Files: worker.c (open, close), worker/config.c (configuration), worker/step.c (begin .. end), worker/cuda/prefetch.c,
 * worker/transfer.c (transfer thread), worker/submit.c (what the threads hand each other), worker/wait.c (gates,
 * queue), worker/spaces.c (attachment, spaces), worker/load.c, worker/host/copy_threads.c (who copies a synchronous
 * load), worker/save.c, worker/fence.c, worker/move.c, worker/timing.c (what takes how long), worker/completion.c,
 * worker/self_test.c, worker/prefault.c, common/cpus.c. Of a cache in GPU memory: worker/cuda/impl.h.
 */
#ifndef KVX_WORKER_IMPL_H
#define KVX_WORKER_IMPL_H

#include "common/await.h"
#include "kvx_worker.h"
#include "step/message.h"
#include "common/cpus.h"

#include "kv/env.h"
#include "kv/shm.h"
#include "kvk/gpu.h"
#include "kvk/move.h"

#include <pthread.h>
#include <stdatomic.h>

#define KVX_WORKER_QUEUE   1024u        /* jobs handed over and not taken yet */
#define KVX_WORKER_SPACES  1024u        /* numbers of adapters */
#define KVX_WORKER_TEXT    4096u        /* bytes of an adapter's text */
#define KVX_WORKER_MOVES   32u          /* blocks a batch */
#define KVX_WORKER_BATCH   (256u << 10) /* bytes a batch */
#define KVX_WORKER_THREADS 16u
#define KVX_WORKER_STEPS   8u    /* plans with a failed load that are remembered */
#define KVX_WORKER_LOST    1024u /* ids of loads there was no memory for: as many as a scheduler has at a time */
#define KVX_ERR_FAULT      ((kvc_status_t)KV_ERR_FAULT) /* a slab this process has not heard of yet */
#define KVX_NS_A_MS        UINT64_C(1000000)

/* ---- waiting (worker/wait.c)
 * ------------------------------------------------------------------------------------------------- */

/* Something threads sleep at until it is opened. */
typedef struct kvx_gate {
	_Atomic uint32_t seq;
	_Atomic uint32_t waiters;
} kvx_gate_t;
uint32_t kvx_gate_seen(kvx_gate_t *gate);
/* Until it has been opened since `seen`, or timeout_ns. */
void kvx_gate_wait(kvx_gate_t *gate, uint32_t seen, uint64_t timeout_ns);
void kvx_gate_open(kvx_gate_t *gate);
void kvx_pause(void);

typedef enum kvx_job_kind { KVX_WJOB_LOAD, KVX_WJOB_SAVE, KVX_WJOB_SPACE } kvx_job_kind_t;

/* What goes through the queue. */
typedef struct kvx_wjob {
	kvx_job_kind_t kind;
	struct kvx_wjob *next;     /* in the engine's list */
	struct kvx_wjob *next_run; /* in the transfer thread's list */
	_Atomic uint32_t over;     /* the transfer thread has let go of it */
} kvx_wjob_t;

/* One producer, one consumer. */
typedef struct kvx_queue {
	_Atomic uint32_t head, tail; /* put, taken */
	kvx_wjob_t *ring[KVX_WORKER_QUEUE];
} kvx_queue_t;
int kvx_queue_put(kvx_queue_t *queue, kvx_wjob_t *job);
kvx_wjob_t *kvx_queue_take(kvx_queue_t *queue);
int kvx_queue_empty(kvx_queue_t *queue);

/* ---- moving (worker/move.c)
 * -------------------------------------------------------------------------------------------------- */

/* One group of the engine's cache, checked, its pointers kept. */
typedef struct kvx_wgroup {
	uint32_t group;
	kvk_paged_t paged;
	void **base;
	int padded; /* it has fewer layers than the rank's range */
} kvx_wgroup_t;

/* Room for one batch; each thread that copies has one. */
typedef struct kvx_scratch {
	kvk_move_t moves[KVX_WORKER_MOVES];
	uint32_t place[KVX_WORKER_MOVES]; /* which block of the job a move is of */
	uint64_t *leaves;                 /* [batch][words] */
	uint64_t *gathered;               /* [words]: of a padded group, without its missing layers */
} kvx_scratch_t;

/* A block in the pool: where it lies and what its leaves are. */
typedef struct kvx_source {
	const void *data;
	const uint64_t *leaves; /* of the whole block */
} kvx_source_t;

/* Block `from` of the group into the pool block at data, missing layers zero; leaves[words]: of this rank's range. */
kvc_status_t kvx_move_out(const kvx_worker_t *worker, const kvx_wgroup_t *group, const kvk_layout_t *layout,
			  uint32_t from, void *data, kvx_scratch_t *scratch);
/* Fill a move but for its block: expected leaves of this group's layers are copied out of the block's, to
 * leaves[words]. */
void kvx_move_prepare(const kvx_worker_t *worker, const kvx_wgroup_t *group, const kvx_source_t *source,
		      kvk_move_t *move, uint64_t *leaves);
/* Of a padded group. Zero the pages of the rank's range that it has no layer for; */
void kvx_move_zero(const kvx_worker_t *worker, const kvx_wgroup_t *group, uint8_t *data);
/* gathered leaves to their places among those of the range, and those of zero pages beside them. */
void kvx_move_pad(const kvx_worker_t *worker, const kvx_wgroup_t *group, const uint64_t *gathered, uint64_t *leaves);

/* ---- spaces (worker/spaces.c)
 * ------------------------------------------------------------------------------------------------- */

/* Transfer thread only. */
typedef struct kvx_wspace {
	kvc_space_t *space; /* NULL: not asked for */
	char *lora;         /* number 0: NULL */
	uint64_t next_open_ns;
	int known;           /* layout has been read */
	kvk_layout_t layout; /* of the pool's blocks: inner order may differ from ours */
} kvx_wspace_t;

typedef struct kvx_wadapter {
	kvx_wjob_t job;
	uint32_t number;
	char text[];
} kvx_wadapter_t;

/* ---- loads (worker/load.c)
 * --------------------------------------------------------------------------------------------------- */

typedef enum kvx_block_end { KVX_BLOCK_OPEN = 0, KVX_BLOCK_GOOD = 1, KVX_BLOCK_BAD = 2 } kvx_block_end_t;

typedef struct kvx_wpart {
	const kvx_wgroup_t *group;
	kvc_handle_t handle;
	uint32_t n, first;
	uint32_t *ids;          /* [n] */
	kvx_source_t *sources;  /* [n], filled up to `limit` */
	uint8_t *ends;          /* [n] kvx_block_end_t, written by who copies */
	uint8_t *came;          /* [n] layer ranges of it that have come; of a cache in GPU memory */
	uint32_t at;            /* blocks sent of the layer range at hand; */
	uint32_t whole;         /* before these, all layers of a block came together */
	kvc_lease_t *lease;     /* transfer thread's; copiers look at its state */
	uint32_t reach;         /* blocks of it the lease covers */
	_Atomic uint32_t next;  /* taken */
	_Atomic uint32_t limit; /* may be taken */
} kvx_wpart_t;

typedef struct kvx_wload {
	kvx_wjob_t job;
	uint64_t id;
	uint32_t space, flags, parts, id_len;
	int imported;
	int failed;      /* errors() has been told its blocks */
	int gone;        /* dropped: nobody asks for its blocks */
	int reported;    /* only finished() has still to name it */
	int skipped;     /* the engine did not say of each layer that it was about to read it: what it computed may be
			    garbage */
	uint32_t ranges; /* of layers that it comes in: 1 but for synchronous ones of a cache in GPU memory */
	uint32_t clock;  /* which of the device's times it, from 1; 0: none */
	uint32_t wanted; /* blocks that go somewhere, */
	uint32_t of;     /* and those of all loads that it comes with layer by layer; 0: it comes by itself */
	int sent;        /* some of it was submitted; under the lock */
	uint64_t begin_ns, deadline_ns, end_ns;
	uint64_t served_ns;      /* the worker's when it began */
	uint64_t silent_ns;      /* since when the daemon has been silent while it was waited for; 0: it is not */
	_Atomic uint32_t there;  /* no block was waited for */
	_Atomic uint32_t go;     /* copying may begin */
	_Atomic uint32_t cancel; /* DROP */
	_Atomic int32_t cause;   /* PENDING: open; OK: all blocks came; else why not */
	_Atomic uint32_t active; /* copiers inside */
	_Atomic uint32_t left;   /* blocks not yet good, times ranges */
	_Atomic uint32_t good;   /* blocks copied and verified */
	_Atomic uint64_t bytes;
	char *request; /* [id_len] */
	struct kvx_wload *next_sync;
	const kvk_layout_t *layout;
	kvx_wpart_t part[];
} kvx_wload_t;

/* Of a plan's record; NULL: out of memory or it makes no sense. */
kvx_wload_t *kvx_wload_create(kvx_worker_t *worker, const kvx_plan_load_t *record);
void kvx_wload_free(kvx_wload_t *load);
/* The first cause stays. */
void kvx_wload_close(kvx_worker_t *worker, kvx_wload_t *load, kvc_status_t cause);
/* Take up to so many blocks: *p_first and how many. Any thread. */
uint32_t kvx_wload_take(kvx_wpart_t *part, uint32_t most, uint32_t *p_first);
/* Copy one batch if there is one: how many blocks. Any thread. */
uint32_t kvx_wload_copy(kvx_worker_t *worker, kvx_wload_t *load, kvx_scratch_t *scratch);
int kvx_wload_settled(kvx_wload_t *load);
/* Transfer thread: import, look what is ready, watch the deadline. 1: it is over and may be forgotten. */
int kvx_wload_step(kvx_worker_t *worker, kvx_wload_t *load, uint64_t now);

/* ---- saves (worker/save.c)
 * --------------------------------------------------------------------------------------------------- */

typedef enum kvx_mark { KVX_MARK_WAITING = 0, KVX_MARK_TAKEN = 1, KVX_MARK_DONE = 2, KVX_MARK_DROPPED = 3 } kvx_mark_t;

typedef struct kvx_wsave {
	kvx_wjob_t job;
	const kvx_wgroup_t *group;
	kvc_handle_t handle;
	uint32_t space, n;
	uint64_t begin_ns;
	kvc_put_t *put;           /* written by the transfer thread before `imported` is OK */
	_Atomic int32_t imported; /* PENDING: not looked at; BUSY: waits for the daemon; OK; or why not */
	_Atomic uint32_t closed;  /* the put must not be touched any more */
	_Atomic uint32_t active;  /* copiers inside */
	_Atomic uint32_t dropped; /* not all will be saved */
	uint32_t step;            /* the plan that computes its last block */
	uint32_t ended;           /* blocks [0, ended) are handed in */
	uint32_t at;              /* blocks [0, at) are done */
	uint64_t stuck_ns;        /* since when it waits for the daemon; 0: it does not */
	const kvk_layout_t *layout;
	uint32_t *ids;           /* [n] */
	_Atomic uint8_t state[]; /* [n] kvx_mark_t */
} kvx_wsave_t;

kvx_wsave_t *kvx_wsave_create(kvx_worker_t *worker, const kvx_plan_save_t *record);
void kvx_wsave_free(kvx_wsave_t *save);
/* Mark its blocks: from now on a fence finds them. */
void kvx_wsave_mark(kvx_worker_t *worker, kvx_wsave_t *save);
/* Copy block i if nobody has: 1 when it was done here. The mark is cleared whatever comes of it. Any thread. */
int kvx_wsave_copy(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t i, kvx_scratch_t *scratch);
/* Block i is the caller's to read; 0: somebody else's. */
int kvx_wsave_claim(kvx_wsave_t *save, uint32_t i);
/* It has been read, or never will be. */
void kvx_wsave_unmark(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t i, kvx_mark_t end);
/* Give block i up if nobody has taken it. */
void kvx_wsave_drop_block(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t i);
/* Transfer thread. Without p_moved it is imported only. 1: it is over and may be forgotten. */
int kvx_wsave_step(kvx_worker_t *worker, kvx_wsave_t *save, uint64_t now, uint32_t *p_moved);
/* Without the daemon or a thread: nothing of it will be saved. */
void kvx_wsave_drop(kvx_worker_t *worker, kvx_wsave_t *save);

/* Save what is marked of these blocks before the engine writes them (worker/fence.c). */
void kvx_fence_begin(kvx_worker_t *worker);
void kvx_fence_add(kvx_worker_t *worker, const uint32_t *ids, uint32_t n);
void kvx_fence_end(kvx_worker_t *worker);
/* The same of every block. */
void kvx_fence_all(kvx_worker_t *worker);
/* The put is in this process. Not now: the daemon has to say something first. */
int kvx_fence_wait_imported(kvx_worker_t *worker, kvx_wsave_t *save);

/* ---- self-test (worker/self_test.c)
 * ------------------------------------------------------------------------------------------- */

typedef enum kvx_wtest_step {
	KVX_WTEST_IDLE,
	KVX_WTEST_OPENING,
	KVX_WTEST_PUTTING,
	KVX_WTEST_LEASING,
	KVX_WTEST_OVER
} kvx_wtest_step_t;

/* Transfer thread only. */
typedef struct kvx_wtest {
	kvx_wtest_step_t step;
	uint32_t group; /* the one being proved */
	kvk_layout_t layout;
	char layout_text[KVK_LAYOUT_TEXT_MAX];
	kvk_geometry_t geometry;
	kvk_paged_t paged; /* two blocks in the group's layout: 0 is stored, 1 is read back */
	void **base;
	uint8_t *memory;
	uint64_t *leaves;
	kvk_gpu_job_t *job; /* NULL: none is under way */
	kvc_key_t key;
	kvc_space_t *space;
	kvc_put_t *put;
	int handed_in;
	kvc_lease_t *lease;
	uint64_t next_ns, deadline_ns;
	uint32_t serial;
} kvx_wtest_t;
void kvx_wtest_step(kvx_worker_t *worker, uint64_t now);
void kvx_wtest_fini(kvx_worker_t *worker);
/* For good: nothing is loaded or saved any more, and why. */
void kvx_wtest_decline(kvx_worker_t *worker, kvc_status_t why);

/* How far the engine's cache has been touched. */
typedef struct kvx_wprefault {
	uint32_t group; /* index */
	uint32_t layer;
	size_t at; /* bytes of the layer */
} kvx_wprefault_t;

/* ---- the worker
 * -------------------------------------------------------------------------------------------------------------- */

typedef struct kvx_wstats {
#define KVX_WORKER_COUNTER(name, help) _Atomic uint64_t name;
	KVX_WORKER_STATS(KVX_WORKER_COUNTER)
#undef KVX_WORKER_COUNTER
	_Atomic uint64_t loads_open, saves_open, marked;
} kvx_wstats_t;

typedef struct kvx_lost {
	uint32_t len;
	char id[KVX_MAX_ID];
} kvx_lost_t;

/* A thread that copies and does nothing else. */
typedef struct kvx_helper {
	kvx_worker_t *worker;
	kvx_scratch_t scratch;
} kvx_helper_t;

typedef struct kvx_wgpu kvx_wgpu_t;

/* A plan begun before the engine's begin(); the engine's thread. */
typedef struct kvx_wearly {
	int begun;     /* and begin() has not come yet */
	uint8_t *plan; /* its bytes */
	size_t len, cap;
	void *stream; /* the engine's, as it was then */
} kvx_wearly_t;

/* Calls there were since begin(): with all of them a step is over. */
#define KVX_HAD_END    1u
#define KVX_HAD_ERRORS 2u
#define KVX_HAD_REPORT 4u

/* Of the step at hand: nobody wants its time; from when on what it computes is timed is still to come; it is timed. */
typedef enum kvx_timing { KVX_TIMING_NONE = 0, KVX_TIMING_ASKED = 1, KVX_TIMING_RUNS = 2 } kvx_timing_t;

struct kvx_worker {
	/* constant after open */
	kvx_wgpu_t *gpu; /* NULL: the cache is in host memory */
	kvk_layout_t layout;
	kvk_geometry_t geometry;
	char layout_text[KVK_LAYOUT_TEXT_MAX];
	char *identity_text;
	kvc_identity_t identity; /* but for `weights`, which may come in a plan: transfer thread only */
	char *weights;           /* that came so */
	kvc_writer_t range;
	kvx_wgroup_t *groups;
	uint32_t group_count;
	uint32_t max_blocks;
	uint32_t words; /* leaves of this rank's range */
	uint32_t batch; /* blocks taken at once */
	uint32_t threads;
	kvx_cpus_t cpus; /* that the threads may use */
	int prefault;
	uint64_t *zero_leaves; /* [pieces] digests of a page of zeros */

	/* shared */
	kvx_queue_t queue;
	kvx_gate_t progress; /* the engine waits at it */
	kvx_gate_t work;     /* helpers wait at it */
	_Atomic uint32_t asleep, pokes, stop;
	_Atomic uint32_t overs;     /* jobs that the transfer thread has let go of */
	_Atomic int32_t proved;     /* kvx_worker_proved() */
	_Atomic uint32_t unacked;   /* puts of which an acknowledgement is awaited */
	_Atomic uint32_t jobs_run;  /* jobs the transfer thread holds */
	_Atomic uint64_t idle_from; /* from when on the engine is taken to be idle, if no step comes */
	_Atomic uint16_t *marks;    /* [max_blocks] saves that still have to read the block */
	kvx_wstats_t stats;
	int event_fd;

	/* crew: who copies the synchronous loads of a step */
	_Atomic(kvx_wload_t *) crew_loads;
	_Atomic uint32_t crew_inside;
	uint32_t helper_count;
	pthread_t helper[KVX_WORKER_THREADS];
	kvx_helper_t helpers[KVX_WORKER_THREADS];

	/* the engine's thread */
	kvx_wjob_t *loads;      /* handed over or ended, oldest first */
	kvx_wjob_t **loads_end; /* where the next goes */
	kvx_wjob_t *saves;
	kvx_wjob_t **saves_end;
	kvx_wjob_t *later; /* saves of this plan that wait for end() */
	kvx_wjob_t **later_end;
	kvx_wjob_t *adapters;
	kvx_wjob_t **adapters_end;
	kvx_wjob_t *untold_adapters; /* that the queue had no room for: handed over with the next plan */
	kvx_wjob_t **untold_adapters_end;
	kvx_wload_t *sync; /* synchronous loads of this plan */
	uint32_t overs_seen;
	uint32_t untold; /* asynchronous loads that are over and not named yet */
	uint32_t step;   /* of the plan at hand */
	uint32_t had;    /* KVX_HAD_* */
	kvx_wearly_t early;
	kvx_timing_t timing;
	uint64_t timed_ns;  /* since then the step is timed, where a host computes */
	uint64_t served_ns; /* what all loads so far have taken, of those that waited for no block */
	uint32_t failed_step[KVX_WORKER_STEPS]; /* plans of which a synchronous load has failed */
	uint32_t failed_steps;                  /* how many ever */
	uint64_t *failed;                       /* bit a block: its load has failed and errors() has not said so */
	uint32_t failed_count;
	uint64_t *fence; /* bit a block: is about to be reused */
	uint32_t fence_count;
	uint64_t fence_until; /* no longer is the transfer thread waited for */
	uint64_t fence_retry; /* no longer is a copy tried again */
	kvx_lost_t *lost;
	uint32_t lost_count;
	kvx_bytes_t report[2];
	uint32_t report_at, report_step;
	kvx_scratch_t scratch;

	/* the transfer thread */
	pthread_t thread;
	int started;
	kvc_t *kvc;
	uint64_t incarnation;
	kvx_wjob_t *run; /* jobs under way, oldest first */
	kvx_wjob_t **run_end;
	kvx_wspace_t spaces[KVX_WORKER_SPACES];
	uint32_t space_top; /* numbers below it may be in use */
	kvx_scratch_t transfer_scratch;
	kvx_wtest_t test;
	kvx_wprefault_t prefaulted;
	uint64_t polled_ns;
	int waiting; /* a load waits for the daemon: sleep briefly */
};

static inline void kvx_wcount(_Atomic uint64_t *counter, uint64_t n)
{
	atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

static inline uint64_t kvx_worker_now(void)
{
	return kv_now_ns(&kv_env_posix);
}

/* worker/config.c */
/* KVC_ERR_ARG and a sentence in kvx_worker_why(). */
kvc_status_t kvx_worker_refuse(const char *why);
kvc_status_t kvx_worker_check(const kvx_worker_config_t *config);
kvc_status_t kvx_worker_keep(kvx_worker_t *worker, const kvx_worker_config_t *config);
const kvx_wgroup_t *kvx_worker_group(const kvx_worker_t *worker, uint32_t group);
int kvx_scratch_init(kvx_scratch_t *scratch, const kvx_worker_t *worker);
void kvx_scratch_fini(kvx_scratch_t *scratch);

/* worker/transfer.c */
kvc_status_t kvx_worker_run(kvx_worker_t *worker);
void kvx_worker_stop(kvx_worker_t *worker);

/* worker/submit.c */
/* Wake the transfer thread if it sleeps. */
void kvx_worker_wake(kvx_worker_t *worker);
/* Hand over; 0: the queue is full. */
int kvx_worker_hand(kvx_worker_t *worker, kvx_wjob_t *job);
/* The transfer thread (or the engine's, of a job never handed over) has let go of it. */
void kvx_worker_over(kvx_worker_t *worker, kvx_wjob_t *job);
/* Note how many puts still wait for an answer. */
void kvx_worker_acknowledged(kvx_worker_t *worker);

/* worker/step.c */
/* begin(), whatever was begun before. */
void kvx_worker_begin_plan(kvx_worker_t *worker, const void *plan, size_t len);
/* The saves that wait for the end of the step: go on with them, or give them up in good order. */
void kvx_worker_hand_later(kvx_worker_t *worker, int drop);

/* worker/cuda/prefetch.c */
/* begin(): it is the plan that was begun early, so nothing is left to do. 0: it is not, and that one is gone. */
int kvx_early_came(kvx_worker_t *worker, const void *plan, size_t len);

/* worker/spaces.c */
void kvx_wspace_adopt(kvx_worker_t *worker, kvx_wadapter_t *adapter);
void kvx_wspaces_step(kvx_worker_t *worker, uint64_t now);
void kvx_wspaces_close(kvx_worker_t *worker);
/* OK with the space, PENDING while it is being opened, else why there is none. */
kvc_status_t kvx_wspace_get(kvx_worker_t *worker, uint32_t number, uint64_t now, const kvx_wspace_t **p_space);
/* No daemon, or it has not beaten for 50 ms. */
int kvx_wspace_silent(const kvx_worker_t *worker);

/* worker/host/copy_threads.c */
/* Until the worker stops. */
void kvx_crew_help(kvx_helper_t *helper);
/* All synchronous loads of the plan have come or have failed when it returns. */
void kvx_crew_load(kvx_worker_t *worker);
/* They have: say so to errors(), and to the saves of this step. */
void kvx_crew_close(kvx_worker_t *worker);

/* worker/completion.c */
/* Say in the report that a save has come to nothing. */
void kvx_worker_dropped(kvx_worker_t *worker, uint64_t put);
/* Its blocks that did not come go to errors(). */
void kvx_worker_fail_load(kvx_worker_t *worker, kvx_wload_t *load);
/* Look at what is over: report, errors, free. Engine's thread. */
void kvx_worker_reap(kvx_worker_t *worker);
void kvx_worker_fail_block(kvx_worker_t *worker, uint32_t id);
/* Room for all that a report may hold; KVC_ERR_NOMEM. */
kvc_status_t kvx_worker_reserve_reports(kvx_worker_t *worker);
void kvx_worker_fail_record(kvx_worker_t *worker, const kvx_plan_load_t *record);

/* A step took so long. */
void kvx_worker_stepped(kvx_worker_t *worker, uint32_t step, uint64_t ns);

/* worker/timing.c */
/* The plan asks for the time of its step; */
void kvx_clock_ask(kvx_worker_t *worker);
/* What is computed comes now: begin() is over, or all loads inside the step are; end() begins. */
void kvx_clock_begin(kvx_worker_t *worker);
/* It computes while it loads: what takes how long is not to be told. */
void kvx_clock_drop(kvx_worker_t *worker);
void kvx_clock_end(kvx_worker_t *worker);
/* Of a device: steps that are over go into the report. */
void kvx_clock_look(kvx_worker_t *worker);
/* How long a load that is over took. */
uint64_t kvx_clock_took(kvx_worker_t *worker, kvx_wload_t *load);

/* worker/prefault.c */
#define KVX_PREFAULT_PAUSE_NS (20 * KVX_NS_A_MS)    /* after a step the next one may follow at once */
#define KVX_PREFAULT_STEP_NS  (10000 * KVX_NS_A_MS) /* of a step that never ends for the worker */
/* The engine is at work for that long from now on. */
void kvx_prefault_after(kvx_worker_t *worker, uint64_t ns);
/* A little of it; 0: there is nothing to do, or the engine is at work. */
int kvx_prefault_step(kvx_worker_t *worker);

#endif
