/* fake_engine.h -- an engine without a model: a paged cache, a block allocator that reuses blocks at once, chunked
 * prefill, preemption, aborts, prefix sharing, a sliding-window group; one scheduling half, and a worker for each rank.
 * What a token leaves in the cache follows from the tokens before it, so that whatever a load brings is compared, byte
 * by byte, with what computing would have left there. */
#ifndef TESTS_CONNECTORS_FAKE_ENGINE_H
#define TESTS_CONNECTORS_FAKE_ENGINE_H

#include "connectors/rig.h"

#include "kv_test.h"
#include "kvx_scheduler.h"
#include "kvx_worker.h"
#include "step/message.h"

#define FE_UNIT     16u
#define FE_LAYERS   4u
#define FE_TOKENS   512u /* of a request at most */
#define FE_PLACES   (FE_TOKENS / FE_UNIT)
#define FE_BLOCKS   96u
#define FE_REQUESTS 24u
#define FE_RANKS    2u
#define FE_WINDOW   40u  /* tokens of the second group */
#define FE_BUDGET   128u /* tokens a step */
#define FE_WAIT_US                                                                                                     \
	50000u /* on a busy machine an answer takes its time; a daemon that is stopped costs so much a step */
#define FE_LOAD_MS 5000u

typedef enum fe_state { FE_FREE, FE_WAITING, FE_LOADING, FE_RUNNING, FE_ABORTED } fe_state_t;

typedef struct fe_request {
	fe_state_t state;
	char id[24];
	uint32_t tokens[FE_TOKENS];
	uint64_t prefix[FE_TOKENS]; /* hash of the tokens up to and with this one */
	uint8_t hash[FE_PLACES][32];
	uint32_t prompt, total;   /* tokens */
	uint32_t computed, known; /* known: prompt and what has been generated */
	uint32_t step_tokens;     /* computed in this step */
	uint32_t ids[2][FE_PLACES];
	uint32_t n, told;            /* places in the table; of these, told to kvx */
	uint32_t load_from, load_to; /* tokens being loaded */
	int sync_load, preempted;
	uint64_t order;
	kvx_hashes_t hashes;
	kvx_ask_t ask;
} fe_request_t;

typedef struct fe_options {
	uint32_t ranks, groups, page_bytes;
	int mode, cost_model, foreign;
	int sharing; /* living requests share blocks of equal prefixes */
	int swap;    /* negative control: loads go to each other's blocks */
	uint32_t conversations, step_us;
	uint32_t faults; /* the daemon in one step of this many is killed or stopped; 0: never */
} fe_options_t;

typedef struct fe {
	fe_options_t options;
	rig_t *rig;
	kv_test_rng_t rng;
	kvk_layout_t layout;
	char layout_text[KVK_LAYOUT_TEXT_MAX];
	kvc_identity_t identity;
	kvc_writer_t writers[FE_RANKS];
	kvx_scheduler_t *scheduler;
	kvx_worker_t *worker[FE_RANKS];
	uint8_t *cache; /* [layer][block][page] */
	void *base[FE_LAYERS];
	kvk_paged_t paged[FE_RANKS];
	fe_request_t request[FE_REQUESTS];
	uint32_t free_ids[FE_BLOCKS], free_count; /* last freed, first used */
	uint32_t refs[FE_BLOCKS];
	uint64_t holds[FE_BLOCKS]; /* prefix a full block is of; 0: none */
	uint64_t order, serial;
	uint8_t *plan; /* a copy: workers get bytes that came over a wire */
	size_t plan_cap;
	uint8_t bad[FE_BLOCKS];       /* errors() has named it since it was allocated */
	uint32_t loaded[FE_REQUESTS]; /* ranks on which its asynchronous load is over */
	int load_failed[FE_REQUESTS];
	uint32_t stopped; /* steps until SIGCONT */
	/* what happened */
	uint64_t steps, finished, aborted, preempted, wrong_bytes, checked_tokens, sync_loads, async_loads,
		failed_loads, hit_tokens, computed_tokens;
} fe_t;

void fe_open(fe_t *fe, rig_t *rig, const fe_options_t *options);
void fe_close(fe_t *fe);
/* Run until n requests have ended, then end the rest and wait until nothing is under way. */
void fe_run(fe_t *fe, uint64_t requests);

/* ---- between fake_engine.c and fake_engine_step.c -------------------------------------------- */

/* With `garbage`, what a model leaves when something before was wrong. */
void fe_compute(fe_t *fe, const fe_request_t *r, uint32_t from, uint32_t to, int garbage);
void fe_check_tokens(fe_t *fe, const fe_request_t *r, uint32_t from, uint32_t to);
void fe_blocks_give(fe_t *fe, fe_request_t *r);
/* Places for `tokens` tokens, none of the window's before `from`. 0: too few blocks are free; nothing is taken then. */
int fe_blocks_for(fe_t *fe, fe_request_t *r, uint32_t tokens, uint32_t from);
/* Whole blocks of the same prefix that the living hold: shared. Returns tokens. */
uint32_t fe_share(fe_t *fe, fe_request_t *r);
void fe_slide(fe_t *fe, fe_request_t *r);
void fe_place(fe_t *fe, fe_request_t *r, uint32_t first, uint32_t fresh);
void fe_request_begin(fe_t *fe, fe_request_t *r);
void fe_request_end(fe_t *fe, fe_request_t *r, int aborted);
void fe_ask_refresh(fe_request_t *r);
void fe_feed_tokens(fe_t *fe, fe_request_t *r);
fe_request_t *fe_oldest(fe_t *fe, fe_state_t state, uint64_t after);
fe_request_t *fe_youngest_running(fe_t *fe);
uint32_t fe_window_first(uint32_t tokens);

#endif
