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

#define FE_UNIT      16u
#define FE_LAYERS    4u
#define FE_TOKENS    512u /* of a request at most */
#define FE_PLACES    (FE_TOKENS / FE_UNIT)
#define FE_BLOCKS    96u
#define FE_REQUESTS  24u
#define FE_RANKS     2u
#define FE_WINDOW    40u  /* tokens of the second group */
#define FE_GENERATED 80u  /* tokens a request generates, at most */
#define FE_BUDGET    128u /* tokens a step */
/* On a busy machine an answer takes its time; a daemon that is stopped costs so much a step. */
#define FE_WAIT_US 50000u
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
	int sync_load;
	uint32_t ranks_done; /* on which its asynchronous load is over */
	int load_failed;     /* on one of them */
	uint64_t order;
	kvx_hashes_t hashes;
	kvx_ask_t ask;
} fe_request_t;

/* 0: the default, which is 1, 1, 1024, 20 and FE_WAIT_US, and for the rest no. */
typedef struct fe_options {
	uint32_t ranks, groups, page_bytes, conversations, wait_us;
	uint32_t step_us; /* as if it were a model */
	int mode, cost_model, own_keys;
	int sharing;     /* living requests share blocks of equal prefixes */
	int swap;        /* negative control: loads go to each other's blocks */
	uint32_t faults; /* the daemon in one step of this many is killed or stopped */
	uint32_t fail;   /* on a rank, of this many loads and saves one */
} fe_options_t;

typedef struct fe {
	fe_options_t options;
	rig_t *rig;
	kv_test_rng_t rng;
	kvk_layout_t layouts[2];
	char layout_text[KVK_LAYOUT_TEXT_MAX];
	kvc_identity_t identity;
	kvc_writer_t writers[2 * FE_RANKS]; /* of the first group, of the second */
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
	uint8_t *message[FE_RANKS];
	uint8_t bad[FE_BLOCKS]; /* errors() has named it since it was allocated */
	uint32_t stopped;       /* steps until SIGCONT */
	/* what happened */
	uint64_t steps, finished, aborted, preempted, wrong_bytes, checked_tokens, sync_loads, async_loads,
		failed_loads, spoilt_loads, spoilt_saves, hit_tokens, computed_tokens;
} fe_t;

void fe_open(fe_t *fe, rig_t *rig, const fe_options_t *options);
void fe_close(fe_t *fe);
/* Run until n requests have ended, then end the rest and wait until nothing is under way. */
void fe_run(fe_t *fe, uint64_t requests);

#endif
