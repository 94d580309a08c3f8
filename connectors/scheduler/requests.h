/* requests.h -- what the scheduling half keeps of a request: its block table, how far it is saved, and its own keys.
 *
 * Found by the engine's id. Requests come and go by the million; objects and their arrays are used again. A pointer
 * stays good until the request is removed; who must outlive it keeps the serial number and asks again.
 */
#ifndef KVX_REQUESTS_H
#define KVX_REQUESTS_H

#include "step/message.h"

#include "kv/env.h"

/* A block of the engine, and how often it had been allocated when it was put here: another count means that it is
 * somebody else's now. */
typedef struct kvx_table_entry {
	uint32_t id, gen;
} kvx_table_entry_t;

typedef struct kvx_request_group {
	kvx_table_entry_t *entries;
	uint32_t n, cap;
	uint32_t asked; /* blocks [0, asked) are stored, reserved or given up */
} kvx_request_group_t;

/* Own keys only. */
typedef struct kvx_chain_state {
	kvc_key_t *keys;
	uint32_t n, cap;
	uint32_t given; /* tokens seen */
	uint32_t *tail; /* given % unit of them are not in a key yet */
	uint8_t *extra; /* extra keys of that unit */
	uint32_t extra_len, extra_cap, tail_cap;
	uint64_t epoch; /* of the space; 0: no chain */
	kvc_chain_t chain;
} kvx_chain_state_t;

typedef struct kvx_request {
	struct kvx_request *next; /* of the same bucket, or free */
	uint64_t hash, serial;
	char *id;
	uint32_t id_len, id_cap;
	uint32_t space;          /* number */
	uint32_t computed;       /* tokens, as of the last advance */
	uint32_t next_at;        /* tokens at which there is something to save */
	uint32_t asked_to;       /* tokens before which all is stored, reserved or given up */
	uint32_t tries;          /* reservations refused in a row */
	uint64_t retry_ns;       /* none is made before */
	uint64_t generation;     /* of the daemon and space when saving began; another one: begin again */
	int failed;              /* a load has failed: the store is not asked again */
	int block_table_invalid; /* its table is wrong or incomplete: not saved until the next one */
	int outdated; /* has blocks computed with weights that are gone, or after garbage: not saved until it has others
		       */
	uint32_t invalid_until; /* its load within a step has failed: blocks before that token are good when computed */
	uint32_t invalid_step;  /* in a later step than this */
	uint32_t cpu_tokens, disk_tokens, why;
	uint64_t match_ns, load_ns;
	struct kvx_sload *cached; /* leased already, until it is admitted; NULL: nothing */
	size_t tentative_bytes;   /* bytes of plans that wait for a load of what was found */
	kvx_chain_state_t own;
	kvx_request_group_t groups[];
} kvx_request_t;

typedef struct kvx_requests {
	const kv_env_t *env;
	kvx_request_t **buckets;
	uint32_t bucket_count; /* a power of two */
	uint32_t group_count, count;
	uint64_t seed, serial;
	kvx_request_t *last; /* found; NULL: none */
	kvx_request_t *free;
	uint32_t free_count;
} kvx_requests_t;

kvc_status_t kvx_requests_init(kvx_requests_t *requests, const kv_env_t *env, uint32_t group_count);
void kvx_requests_fini(kvx_requests_t *requests);

uint64_t kvx_requests_hash(const kvx_requests_t *requests, const char *id, uint32_t len);
/* NULL: unknown. */
kvx_request_t *kvx_requests_find(kvx_requests_t *requests, const char *id, uint32_t len);
/* The one with that id and serial number, or NULL. */
kvx_request_t *kvx_requests_find_serial(kvx_requests_t *requests, const char *id, uint32_t len, uint64_t serial);
/* The same, made when unknown. NULL: out of memory, or an id of no or more than KVX_MAX_ID bytes. */
kvx_request_t *kvx_requests_find_or_add(kvx_requests_t *requests, const char *id, uint32_t len);
void kvx_requests_remove(kvx_requests_t *requests, kvx_request_t *request);
/* Room for n blocks in the table of group `index`. */
kvc_status_t kvx_request_reserve(kvx_requests_t *requests, kvx_request_t *request, uint32_t index, uint32_t n);
/* Calls fn for each. */
void kvx_requests_for_each(kvx_requests_t *requests, void (*fn)(void *ctx, kvx_request_t *request), void *ctx);

#endif
