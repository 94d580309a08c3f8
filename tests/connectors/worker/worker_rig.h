/* worker_rig.h -- a worker beside a cache of known bytes, and a stand-in for the scheduler: a second member that
 * leases, reserves and writes plans. */
#ifndef TESTS_CONNECTORS_WORKER_RIG_H
#define TESTS_CONNECTORS_WORKER_RIG_H

#include "connectors/rig.h"

#include "kvx_worker.h"
#include "step/message.h"

#define WR_LAYERS 6u
#ifndef WR_PAGE
#define WR_PAGE 20000u /* two leaves, the second shorter */
#endif
#define WR_BLOCKS    64u /* of the engine */
#define WR_KEYS      64u
#define WR_MAX_RANKS 2u
#define WR_LOAD_MS   20000u
#define WR_SEED      UINT64_C(4711)
#define WR_PATIENCE  60000u /* ms: longer than anything takes that is not broken */

typedef struct wr_rank {
	kvx_worker_t *worker;
	uint8_t *cache; /* [layers][blocks][page] */
	void *base[WR_LAYERS];
	kvk_paged_t paged, padded; /* of the first group, of the second */
	uint32_t layers;           /* filled and looked at */
} wr_rank_t;

typedef struct wr {
	rig_t *rig;
	kvk_layout_t layout;
	char layout_text[KVK_LAYOUT_TEXT_MAX];
	kvc_identity_t identity;
	kvc_writer_t writers[WR_MAX_RANKS];
	uint32_t rank_count;
	wr_rank_t rank[WR_MAX_RANKS];
	kvc_t *kvc; /* the scheduler's */
	kvc_space_t *space;
	kvc_key_t keys[WR_KEYS];
	kvx_msg_buf_t plan;
	uint32_t step;
	const char
		*groups; /* of the identity; two groups, the second of `layers` layers on each rank. NULL: one group */
	uint32_t layers;
	uint32_t forge_n;     /* leases in plans pretend to have this many blocks; 0: no */
	uint32_t number;      /* of the space that loads name */
	uint32_t group;       /* named by loads */
	uint32_t timeout_ms;  /* of loads */
	uint64_t layer_bytes; /* kvx_worker_config_t's */
	uint32_t layer_wait_us;
} wr_t;

extern const uint32_t wr_eight[8]; /* engine blocks that are stored */
extern const uint32_t wr_other[8]; /* that are loaded to */

/* Scheduler attached, workers open and proved. */
void wr_init(wr_t *wr, rig_t *rig, uint32_t ranks);
/* The same of a wr_t that is set up already; without a daemon there is neither scheduler nor proof. */
void wr_init_with(wr_t *wr, rig_t *rig, uint32_t ranks, int daemon);
void wr_fini(wr_t *wr);
/* The same with a daemon of its own, in which wr_eight are stored with seed 1; and the end of both, when nothing is
 * open. */
void wr_start(wr_t *wr, rig_t *rig, const char *program, uint32_t ranks);
void wr_finish(wr_t *wr, rig_t *rig);
/* Open the rank's worker again, after it was closed; waits until it is proved when `prove`. */
void wr_open_rank(wr_t *wr, uint32_t rank, int prove);

/* Every engine block of every rank gets the bytes of `seed` and its number; check that block b has those of block `as`.
 */
void wr_fill(wr_t *wr, uint32_t seed);
void wr_fill_block(wr_rank_t *rank, uint32_t block, uint32_t seed, uint32_t as);
int wr_block_is(const wr_rank_t *rank, uint32_t block, uint32_t seed, uint32_t as);
/* The same as a kernel of the engine sees it, in its turn: *p_wrong is counted when it has not. */
void wr_look_block(const wr_rank_t *rank, uint32_t block, uint32_t seed, uint32_t as, uint32_t *p_wrong);

void wr_look_layer(const wr_rank_t *rank, uint32_t block, uint32_t layer, uint32_t as, uint32_t *p_wrong); /* seed 1 */

/* Plans. */
void wr_plan(wr_t *wr);
void wr_plan_fence(wr_t *wr, const uint32_t *ids, uint32_t n);
void wr_plan_save(wr_t *wr, const kvc_put_t *put, uint32_t flags, const uint32_t *ids, uint32_t n);
/* Lease NULL: dead. */
void wr_plan_load(wr_t *wr, const kvc_lease_t *lease, uint32_t flags, uint64_t load, const uint32_t *ids, uint32_t n);
void wr_plan_drop(wr_t *wr, uint64_t load);
void wr_plan_space(wr_t *wr, uint32_t number, const char *text);
/* Finish the plan and begin() on all ranks. */
void wr_begin(wr_t *wr);

/* Reserve keys [from, n); granted when it returns. */
kvc_put_t *wr_put(wr_t *wr, uint32_t from, uint32_t n);
/* Lease the blocks of these keys in the second group, or NULL. */
kvc_lease_t *wr_lease_keys(wr_t *wr, const kvc_key_t *keys, uint32_t n);
/* Reserve these keys in the second group; not granted yet. */
kvc_put_t *wr_put_keys(wr_t *wr, const kvc_key_t *keys, uint32_t n);
/* Until the put is visible: its status. */
kvc_status_t wr_put_wait(wr_t *wr, kvc_put_t *put);
kvc_lease_t *wr_lease(wr_t *wr, uint32_t skip, uint32_t n);
/* Keys [0, n) are stored, key i from engine block ids[i]; in one step. */
void wr_store(wr_t *wr, const uint32_t *ids, uint32_t n);

/* What a load has come to: status of the report of the rank, waited for; and what finished() said of it. */
typedef struct wr_end {
	kvx_report_loaded_t loaded;
	char id[16];
	int failed;
	uint32_t errors[WR_BLOCKS];
	uint32_t error_count;
} wr_end_t;
/* Until no load is open: times of steps, as the first rank reports them. */
uint32_t wr_hear_steps(wr_t *wr, kvx_report_step_t *steps, uint32_t cap);
void wr_wait_load(wr_rank_t *rank, uint64_t load, int async, wr_end_t *end);
/* The next DROPPED of the rank's reports, waited for: its put. */
uint64_t wr_wait_dropped(wr_rank_t *rank);
/* The rank has nothing more to say. */
void wr_check_silent(wr_rank_t *rank);
uint64_t wr_now_ms(void);

#endif
