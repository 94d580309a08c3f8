/* scheduler/keys.h -- keys of a request: the engine's hashes, or the request's own chain. */
#ifndef KVX_SCHEDULER_KEYS_H
#define KVX_SCHEDULER_KEYS_H

#include "scheduler/base/state.h"

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
	uint32_t *tokens; /* [n_tokens], to the last one; kv_free() frees the hashes too. With hashes only those after
			     the hashed units are set; n_tokens 0: there are none */
	uint32_t n_tokens;
	uint8_t *hashes; /* [n_hashes], the engine's, hash_bytes each; NULL: the tokens name it */
	uint32_t hash_bytes, n_hashes;
} kvx_prompt_names_t;
/* Those of the prompt of a hand-over that the request receives. KVC_MISS: not all are known yet, or it has extra keys
 * of ours, which tokens do not name. KVC_ERR_NOMEM. */
kvc_status_t kvx_prompt_names_copy(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_request_t *request,
				   const kvx_shandover_t *h, kvx_prompt_names_t *names);

#endif
