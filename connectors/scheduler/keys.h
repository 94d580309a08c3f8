/* scheduler/keys.h -- keys of a request: the engine's hashes, or the request's own chain. */
#ifndef KVX_SCHEDULER_KEYS_H
#define KVX_SCHEDULER_KEYS_H

#include "scheduler/state.h"

/* The keys of one request, made when they are looked at. */
typedef struct kvx_key_view {
	kvx_scheduler_t *scheduler;
	const kvc_space_t *space;
	const kvx_hashes_t *hashes;
	const kvx_request_t *request;
	uint32_t n; /* units that have one */
	int bad;    /* one of them was missing */
	kvc_key_source_t source;
} kvx_key_view_t;

/* Keys of the request's first `tokens` tokens, in its space. */
void kvx_key_view_init(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_request_t *request, uint32_t tokens,
		       kvx_key_view_t *view);

/* What the keys of a prompt are made of: another daemon has other keys for it. */
typedef struct kvx_prompt_names {
	void *bytes;         /* kv_free() */
	uint32_t hash_bytes; /* of the engine's hashes; 0: tokens, u32 each */
	uint32_t n;          /* hashes, or tokens */
} kvx_prompt_names_t;
/* Those of the prompt of a hand-over that the request receives. KVC_MISS: not all are known yet, or it has extra keys
 * of ours, which tokens do not name. KVC_ERR_NOMEM. */
kvc_status_t kvx_prompt_names_copy(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_request_t *request,
				   const kvx_shandover_t *h, kvx_prompt_names_t *names);

#endif
