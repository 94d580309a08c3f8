/* kve/engine.h -- the reference engine: requests in, greedy tokens out, continuous batching, and a true user of libkvx.
 *
 * Life of a request:  WAITING (for cache blocks, in order of arrival) -> LOADING (its cached prefix) -> PREFILL (the
 *                     rest, in chunks) -> DECODE -> DONE.
 * Full blocks are saved behind its back: the prompt's when prefill has ended, the generated ones when the request has.
 * With or without a store, the tokens are the same: what is not loaded is computed, to the same bits.
 *
 * Prefill and decode on two engines: the first computes the prompt and one token, and sends what is in its cache chunk
 * by chunk, or once at the end, with that token in the tail. The second receives it while it is LOADING, and goes on
 * with the next token. What it does not receive in time it computes.
 *
 * One thread at a time calls everything. Data parallel ranks are engines with a group in common (kve/parallel.h).
 */
#ifndef KVE_ENGINE_H
#define KVE_ENGINE_H

#include "kve/rank.h"
#include "kvx_handover.h"

typedef struct kve_engine kve_engine_t;

typedef struct kve_engine_config {
	kve_config_t model; /* ignored with a group */
	kve_group_t *group; /* borrowed: this engine is one of its ranks; NULL: it is alone */
	uint32_t rank;      /* its number there */
	uint32_t cache_blocks;
	uint32_t max_running; /* requests computed together: 1 to half of kve_group_max_rows(), and to KVE_MAX_SPANS */
	kve_devices_t *devices; /* borrowed, without a group: one, to compute on in BF16; NULL: in fp32 on the CPU */
	uint32_t max_rows;      /* with devices: kve_group_config_t */
	int store;              /* 0: no kvd, everything is computed */
	const char *socket;     /* of kvd; NULL: the usual one */
	const char *program;    /* shown by kvctl; NULL: the process name */
	uint32_t load_ms;       /* deadline of a load; 0: libkvx' default */
	uint32_t attach_ms;     /* longest wait for a kvd that is there, when the engine is made; 0: libkvx' default */
	const char *peer;       /* of kvd: its node has the engine that sends; NULL: this one's */
	uint32_t ranks;         /* tensor parallel ranks, each with a cache of its own; 0: one */
} kve_engine_config_t;

typedef enum kve_state { KVE_WAITING, KVE_LOADING, KVE_PREFILL, KVE_DECODE, KVE_DONE } kve_state_t;

/* What an engine does with the prompt of a request. */
typedef enum kve_handover {
	KVE_KEEP,       /* nothing: no other engine is involved */
	KVE_SEND,       /* send it as it is computed */
	KVE_SEND_WHOLE, /* send it when it is computed */
	KVE_RECV,       /* receive it */
} kve_handover_t;

/* Read it, do not write it. */
typedef struct kve_request {
	kve_state_t state;
	uint32_t rank; /* that has it */
	uint64_t id;
	uint64_t session;
	uint32_t turn;
	uint32_t n_prompt;
	uint32_t max_new;
	uint32_t *tokens; /* prompt, then what was generated */
	uint32_t n_tokens;
	double *log_probabilities; /* [max_new] natural, of what was generated; zeros, if they were not asked for */
	uint32_t n_computed;       /* tokens whose keys and values are in the cache */
	uint32_t prompt_computed;  /* of the prompt's, those that this engine has computed */
	kvx_load_result_t load;    /* what the store had; zeros without one */
	kvx_send_result_t send;    /* zeros without one */
	kvx_recv_result_t recv;    /* zeros without one; its tail is gone */
	uint64_t submit_ns, first_token_ns, done_ns;
} kve_request_t;

typedef struct kve_ask {
	const uint32_t *tokens; /* copied */
	uint32_t n_tokens;      /* at least 1 */
	uint32_t max_new;       /* at least 1; n_tokens + max_new <= max_tokens of the model */
	uint64_t session;
	uint32_t turn;
	int log_probabilities;   /* wanted: they cost a device a copy of all logits a token */
	kve_handover_t handover; /* ignored without a store */
	const char *transfer;    /* its id, at most KVC_MAX_TRANSFER bytes, copied; NULL: made from the prompt */
	uint32_t handover_ms;    /* longest wait for the other engine; 0: libkvx' default */
} kve_ask_t;

/* KV_ERR_ARG, KV_ERR_NOMEM; KV_ERR_IO: a device. An absent daemon is no error. */
kv_status_t kve_engine_create(const kve_engine_config_t *config, kve_engine_t **p_engine);
/* Abort everything; requests not released yet are freed too. NULL is fine. */
void kve_engine_destroy(kve_engine_t *engine);

/* Queue a request; it is the engine's until kve_engine_release(). KV_ERR_ARG: a token, a length, a transfer id, or more
 * blocks than the cache has. KV_ERR_NOMEM. */
kv_status_t kve_engine_submit(kve_engine_t *engine, const kve_ask_t *ask, kve_request_t **p_request);
/* One step: move loads and saves on, admit, compute one batch. Of a rank among others, which all take it together.
 * *p_unfinished (may be NULL): the requests that are not DONE; among others those of all ranks that were not before
 * they computed, the same on each. KV_ERR_TIMEOUT: a rank has not come (kve_engine_lost()); KV_ERR_IO: a device has
 * failed. That was the last step, and requests stay as they are. */
kv_status_t kve_engine_step(kve_engine_t *engine, uint32_t *p_unfinished);
/* Leave the others: their next step ends. */
void kve_engine_abandon(kve_engine_t *engine);
/* The ranks that have not come, a bit each. */
uint32_t kve_engine_lost(const kve_engine_t *engine);
/* The caller is through with a request. One that is not DONE is aborted: its load or save ends at once. */
void kve_engine_release(kve_engine_t *engine, kve_request_t *request);
/* Wait until saves have ended, at most timeout_ms. Returns the number still under way. */
uint32_t kve_engine_flush(kve_engine_t *engine, uint32_t timeout_ms);

/* NULL without a store. */
kvx_t *kve_engine_store(kve_engine_t *engine);
kve_rank_stats_t kve_engine_rank_stats(const kve_engine_t *engine);
/* Free cache blocks. */
uint32_t kve_engine_free_blocks(const kve_engine_t *engine);

#endif
