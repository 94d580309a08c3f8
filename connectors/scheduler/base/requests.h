/* scheduler/base/requests.h -- the one record that the scheduler half keeps of a request: its block table, how far it
 * is saved, its own keys, and its loads, puts and hand-overs, which point at it.
 *
 *   added, found by the engine's id --the engine ends it--> ended --its last load, put or hand-over is gone--> freed */
#ifndef KVX_REQUESTS_H
#define KVX_REQUESTS_H

#include "cost_model/cost_model.h"
#include "step/message.h"

#include "kv/env.h"

/* A block of the engine, and its generation when it was entered (scheduler/base/state.h). */
typedef struct kvx_table_entry {
	uint32_t id, gen;
} kvx_table_entry_t;

typedef struct kvx_request_group {
	kvx_table_entry_t *entries;
	uint32_t n, cap;
	uint32_t asked[2]; /* blocks [0, asked) are stored, reserved or given up: in host memory, in the own GPU's */
} kvx_request_group_t;

/* Own keys only. */
typedef struct kvx_chain_state {
	kvc_key_t *keys;
	uint32_t *tokens; /* events name them */
	uint32_t n, cap;  /* units */
	uint32_t partial; /* tokens of the last unit, which is a private block; 0: there is none */
	uint64_t epoch;   /* of the space; 0: no chain */
	int has_extra;    /* extra keys are in it, so its tokens alone do not name it */
	kvc_chain_t chain;
} kvx_chain_state_t;

typedef struct kvx_request {
	struct kvx_request *next; /* of the same bucket */
	uint64_t hash;
	char *id; /* in the same allocation */
	uint32_t id_len;
	int ended; /* the engine has ended it: it is not found, and has no tables */
	uint64_t ended_ns;
	uint32_t space;      /* number */
	uint32_t computed;   /* tokens, as of the last advance */
	uint32_t tries;      /* reservations refused in a row */
	uint64_t retry_ns;   /* not before */
	uint64_t generation; /* when saving began; another one: match again what is stored, and begin again */
	int failed;          /* a load has failed: the store is not looked up again */
	int was_sent;        /* it was handed over to another instance */
	int unsavable;       /* its table is wrong or incomplete, or has garbage: nothing is saved until the next one */
	uint32_t to_device;  /* tokens from the start that are saved in memory of the GPU; 0: none are handed over there
			      */
	uint32_t garbage_until; /* its synchronous load has failed: blocks before that token are valid when computed */
	uint32_t garbage_from;  /* the first block of that load */
	uint32_t found;         /* blocks from the start of its table that others may have computed */
	kvx_cost_query_t cost_query; /* last question to the cost model; now_ns 0: none */
	kvx_cost_decision_t cost_answer;
	uint32_t gpu_tokens, cpu_tokens, disk_tokens, why;
	kvc_key_t first_missing; /* that `why` is of; zero: none, or not known */
	int was_seen;            /* it was advanced once: what it had then is in GPU memory, or was refused */
	uint64_t match_ns, load_ns;
	kvc_status_t load_status; /* of the last load; PENDING: not every rank has reported it */
	kvc_status_t refused;     /* why blocks were not saved; OK: all that were asked for were granted since */
	uint32_t refusals;        /* since blocks became visible */
	uint64_t unwanted;        /* generation in which the daemon did not want its blocks; 0: it was not refused */
	struct kvx_sload *cached; /* leased until the engine admits it; NULL: nothing */
	struct kvx_sload *loads, **loads_end; /* that the engine has admitted, the oldest first */
	struct kvx_sput *puts, **puts_end;    /* the same way */
	struct kvx_shandover *handover[2];    /* in host memory, and in memory of a GPU; NULL: none */
	kvx_chain_state_t own;
	kvx_request_group_t groups[];
} kvx_request_t;

typedef struct kvx_requests {
	const kv_env_t *env;
	kvx_request_t **buckets;
	uint32_t bucket_count; /* a power of two */
	uint32_t group_count, count;
	uint64_t seed;
	kvx_request_t *last; /* the last one found; NULL: none */
} kvx_requests_t;

static inline int kvx_ask_is_sound(const kvx_ask_t *ask)
{
	return ask && ask->struct_size >= sizeof *ask && ask->id && ask->id_len > 0 && ask->id_len <= KVX_MAX_ID;
}

kvc_status_t kvx_requests_init(kvx_requests_t *requests, const kv_env_t *env, uint32_t group_count);
void kvx_requests_fini(kvx_requests_t *requests);

/* Of a text that clients may choose: seeded, so that they cannot choose a bucket. */
uint64_t kvx_requests_hash(const kvx_requests_t *requests, const char *id, uint32_t len);
/* NULL: unknown. */
kvx_request_t *kvx_requests_find(const kvx_requests_t *requests, const char *id, uint32_t len);
/* The one it is about, NULL: none is known. */
kvx_request_t *kvx_requests_find_asked(const kvx_requests_t *requests, const kvx_ask_t *ask);
/* Added if it is unknown. NULL: out of memory, or the id is empty or longer than KVX_MAX_ID bytes. */
kvx_request_t *kvx_requests_find_or_add(kvx_requests_t *requests, const char *id, uint32_t len);
/* The engine ends it. Its loads, puts and hand-overs keep the record until the last of them is gone. */
void kvx_requests_remove(kvx_requests_t *requests, kvx_request_t *request);
/* A load, put or hand-over of it is gone. */
void kvx_request_release(const kvx_requests_t *requests, kvx_request_t *request);
/* Memory for n entries in the table of group `index`. */
kvc_status_t kvx_request_reserve(kvx_requests_t *requests, kvx_request_t *request, uint32_t index, uint32_t n);
/* The one after `request`, NULL: the first; NULL after the last. */
kvx_request_t *kvx_requests_next(const kvx_requests_t *requests, const kvx_request_t *request);

#endif
