/* wr.h -- workers next to caches of known bytes, and a stand-in for the scheduler: a second member that leases,
 * reserves and writes step messages. A test's state is a wr_t that wr_setup() has opened and wr_teardown() checks. */
#ifndef TESTS_CONNECTORS_WR_H
#define TESTS_CONNECTORS_WR_H

#include "connectors/rig.h"
#include "kv_cmocka.h"
#include "engine/check.h"

#include "kvx_worker.h"
#include "step/message.h"

#define WR_LAYERS 6u
#ifndef WR_PAGE
#define WR_PAGE 20000u /* two leaves, the second shorter */
#endif
#define WR_BLOCKS    64u /* of the engine */
#define WR_KEYS      64u
#define WR_MAX_RANKS 4u
#define WR_LOAD_MS   20000u
#define WR_SEED      UINT64_C(4711)
#define WR_PATIENCE  60000u /* ms: longer than anything takes that is not broken */
#define WR_QUICK_MS  10000u /* far less than that, far more than a busy machine needs */
#define WR_PREFETCH  (KVX_PREFETCH_COMPUTED | KVX_PREFETCH_LAYERS)

typedef struct wr_rank {
	kvx_worker_t *worker;
	uint8_t *cache; /* [layers][blocks][page] */
	void *base[WR_LAYERS];
	kvk_paged_t paged, second;   /* of the first group, of the second */
	uint32_t layers;             /* that are filled and compared */
	uint32_t page;               /* bytes of a block in a layer */
	uint32_t at;                 /* of these bytes, among those of all heads */
	uint32_t saved_first, saved; /* layers that the rank saves; 0: all */
} wr_rank_t;

typedef struct wr {
	/* What a test wants; the rest is 0 in a template. */
	uint32_t rank_count;  /* 0: one */
	int no_daemon, empty; /* empty: nothing is stored */
	int strict;           /* at its end the test has taken all that the workers have to say */
	const char *silence;  /* limits.silence of the daemon; NULL: RIG_SILENCE */
	const char *groups;   /* of the identity: two groups, the second of `layers` layers a rank; NULL: one group */
	uint32_t layers;
	uint32_t heads;       /* of the model, divided among the ranks, or copied to several; 0: pages are opaque, and
				 layers are divided */
	uint32_t stages;      /* with heads: pipeline stages that the ranks belong to, each with its layers; 0: one */
	int latent;           /* the head is a latent vector, without values */
	uint64_t layer_bytes; /* kvx_worker_config_t's */
	uint32_t layer_wait_us;
	uint64_t promote_rate;

	/* What step messages say from now on. */
	uint32_t number;            /* of the space */
	uint32_t group;             /* of loads and saves */
	uint32_t mem;               /* of a load's next part */
	uint32_t timeout_ms;        /* of loads */
	const char *request;        /* of loads; NULL: one for each load */
	const kvc_handle_t *handle; /* of the lease of the next part; NULL: it is exported */
	uint32_t forge_n;           /* leases pretend to have this many blocks; 0: no */

	rig_t rig;
	kvk_layout_t layout, layout2; /* of the first group, of the second */
	char layout_text[KVK_LAYOUTS_TEXT_MAX];
	kvc_identity_t identity;
	kvc_writer_t writers[WR_MAX_RANKS], writers2[WR_MAX_RANKS];
	wr_rank_t rank[WR_MAX_RANKS];
	kvc_t *kvc; /* the scheduler's */
	kvc_space_t *space;
	kvc_key_t keys[WR_KEYS];
	kvx_msg_buf_t message;
	uint32_t step;
	uint64_t killed, attaches[WR_MAX_RANKS]; /* when the daemon was killed: its incarnation, the ranks' count */
} wr_t;

extern const uint32_t wr_eight[8];              /* engine blocks that are stored */
extern const uint32_t wr_other[8];              /* engine blocks that are loaded to */
extern const wr_t wr_one, wr_layered, wr_alone; /* templates; alone: without a daemon */

/* ---- fixtures -------------------------------------------------------------------------------- */

/* Daemon, scheduler and workers, proved; wr_eight are stored with seed 1. */
int wr_setup(void **state);
/* No job is open, the daemon has neither lease nor put, the device was used as it may be, and nothing of it is left. */
int wr_teardown(void **state);
/* A case, of a template. */
#define WR_ADD(id, function, with, setup, teardown)                                                                    \
	KV_TEST_ADD(id, .name = #function, .test_func = function##_run, .setup_func = setup,                           \
		    .teardown_func = teardown, .initial_state = (void *)(uintptr_t) & (with))
#define WR_CASE_IN(function, with, setup, teardown)                                                                    \
	static void function(wr_t *wr);                                                                                \
	static void function##_run(void **state)                                                                       \
	{                                                                                                              \
		function(*state);                                                                                      \
	}                                                                                                              \
	WR_ADD(function, function, with, setup, teardown)                                                              \
	static void function(wr_t *wr)
#define WR_CASE(function, with) WR_CASE_IN(function, with, wr_setup, wr_teardown)
#define WR_ALSO(function, with) WR_ADD(KV_TEST_ID, function, with, wr_setup, wr_teardown)
/* main(): its argument is the daemon's program, if a case has one. */
extern const char *wr_program;
#define WR_MAIN                                                                                                        \
	int main(int argc, char **argv)                                                                                \
	{                                                                                                              \
		wr_program = argc > 1 ? argv[1] : NULL;                                                                \
                                                                                                                       \
		return kv_test_run(NULL, NULL);                                                                        \
	}

/* The two for a test with its own sequence; *wr is a template. */
void wr_open(wr_t *wr);
void wr_close(wr_t *wr);
/* kvx_worker_open()'s argument for a rank; `groups` are two. */
kvx_worker_config_t wr_config(const wr_t *wr, uint32_t rank, kvx_worker_group_t *groups);
/* Open the rank's worker again, after it was closed; waits until it is proved when `prove`. */
void wr_open_rank(wr_t *wr, uint32_t rank, int prove);
void wr_reopen(wr_t *wr); /* the first rank's */
/* All workers are closed; as many as these are opened, with caches of their own. */
void wr_set_ranks(wr_t *wr, uint32_t count);
kvc_status_t wr_await_self_test(const wr_t *wr);
/* kill -9; then another daemon, when scheduler and workers have found it. */
void wr_kill(wr_t *wr);
void wr_restart(wr_t *wr);
kvx_worker_stats_t wr_stats(const wr_t *wr, uint32_t rank);
uint64_t wr_now_ms(void);

/* ---- bytes ----------------------------------------------------------------------------------- */

/* Write every engine block of every rank, or one, with the bytes of a seed and a block number. */
void wr_fill(wr_t *wr, uint32_t seed);
void wr_fill_block(wr_rank_t *rank, uint32_t block, uint32_t seed, uint32_t as);
/* Does the block have these bytes? */
int wr_block_is(const wr_rank_t *rank, uint32_t block, uint32_t seed, uint32_t as);
/* Bytes of a block: of a seed and a block number, in some layers. */
typedef struct wr_content {
	uint32_t block, seed, as, first_layer, end_layer;
} wr_content_t;
/* Compare as a kernel of the engine, in stream order: *p_wrong is incremented if they are others. */
void wr_compare(const wr_rank_t *rank, wr_content_t content, uint32_t *p_wrong);

/* Kernels that do nothing: what is enqueued from now on runs late. */
void wr_be_late(void);

/* ---- step messages --------------------------------------------------------------------------- */

/* A new message, of the next step; then its records. */
void wr_message(wr_t *wr);
void wr_add_fence(wr_t *wr, const uint32_t *ids, uint32_t n);
void wr_add_save(wr_t *wr, const kvc_put_t *put, uint32_t flags, const uint32_t *ids, uint32_t n);
/* Lease NULL: it has none. */
void wr_add_load(wr_t *wr, const kvc_lease_t *lease, uint32_t flags, uint64_t load, const uint32_t *ids, uint32_t n);
/* Another part of that load, of wr->group. */
void wr_add_part(wr_t *wr, const kvc_lease_t *lease, const uint32_t *ids, uint32_t n);
void wr_add_drop(wr_t *wr, uint64_t load);
#define WR_WEIGHTS "w1"
void wr_add_space(wr_t *wr, uint32_t number, const char *adapter);
/* The GPU of the second spaces. */
void wr_add_device(wr_t *wr, uint32_t mem, const char *uuid);
void wr_add_work(wr_t *wr, uint32_t longest, uint32_t us);
void wr_add_time(wr_t *wr);
/* A new message that loads wr_other as load 7, fenced. */
void wr_message_load(wr_t *wr, const kvc_lease_t *lease, uint32_t flags);
/* ---- hooks of a step, on all ranks ------------------------------------------------------------- */

void wr_begin(wr_t *wr);
void wr_run_loads(wr_t *wr); /* asynchronous and synchronous ones */
void wr_end(wr_t *wr);
void wr_step(wr_t *wr); /* the three */
/* As an engine does that computes layer by layer. */
void wr_await_layers(const wr_rank_t *rank);
/* On the first rank: a kernel of the step before writes wr_other; then begin a step that loads them, layered if it may
 * be: does it? */
int wr_begin_layered(wr_t *wr, const kvc_lease_t *lease);
/* kvx_worker_prefetch_step() of the message, on the first rank. */
int wr_prefetch(wr_t *wr, uint32_t flags);
/* Until the transfer thread has sent them. */
void wr_wait_prefetched(const wr_t *wr);
uint32_t wr_count_failed(wr_t *wr); /* blocks of the first rank */
/* Take reports until no job is open. */
void wr_drain(wr_t *wr);
/* Loads, saves and marked blocks of a rank. */
uint64_t wr_count_open(const wr_t *wr, uint32_t rank);

/* ---- the store ------------------------------------------------------------------------------- */

/* Reserve keys [from, n); granted when it returns. */
kvc_put_t *wr_put(wr_t *wr, uint32_t from, uint32_t n);
/* Until the put is visible: its status. */
kvc_status_t wr_put_wait(kvc_put_t *put);
kvc_lease_t *wr_lease(wr_t *wr, uint32_t skip, uint32_t n);
/* Release it, and the daemon has done so when this returns. */
void wr_revoke(wr_t *wr, kvc_lease_t *lease);
/* A step that saves these blocks. */
void wr_save(wr_t *wr, const kvc_put_t *put, const uint32_t *ids, uint32_t n);

/* ---- reports --------------------------------------------------------------------------------- */

/* How load 7 has ended on the first rank: its report, waited for, and what the engine was told. */
typedef struct wr_end {
	kvx_report_loaded_t loaded;
	char id[16];
	int failed;
	uint32_t errors[WR_BLOCKS];
	uint32_t error_count;
} wr_end_t;
void wr_wait_load(wr_t *wr, uint32_t flags, wr_end_t *end);
/* After the step of wr_message_load(). */
void wr_load(wr_t *wr, const kvc_lease_t *lease, uint32_t flags, wr_end_t *end);
/* wr_other have the bytes that wr_eight had with a seed. */
void wr_check_other(wr_t *wr, uint32_t seed);
/* The records of the next report that are of a type, `size` bytes each; others must be LOADED. How many. */
uint32_t wr_take_records(wr_rank_t *rank, uint32_t type, void *out, size_t size, uint32_t cap);
/* Until no load is open: times of steps, as the first rank reports them. */
uint32_t wr_take_steps(wr_t *wr, kvx_report_step_t *steps, uint32_t cap);
/* The next DROPPED of the first rank's reports, waited for: its put. */
uint64_t wr_wait_dropped(wr_t *wr);
/* The rank has nothing more to say. */
void wr_check_silent(wr_rank_t *rank);

#endif
