/* The lookup buffer: hand-overs that are found by their tokens. The daemon has the entries and matches them; what is
 * handed out travels in the tail (inproc/lookup_entry.h). */
#include "inproc/buffer.h"
#include "inproc/handover.h"
#include "inproc/lookup_entry.h"

#include "kv/struct.h"

#include <stdlib.h>
#include <string.h>

/* The tokens under roi (NULL: all), and the salt behind them. 0: no memory. */
static int lookup_init(kvx_lookup_t *lookup, const uint32_t *tokens, uint32_t n, const uint8_t *roi, const char *salt)
{
	const size_t salt_bytes = salt && *salt ? strlen(salt) + 1u : 0;
	uint32_t *kept = malloc(n * sizeof *kept + salt_bytes + 1u);

	if (!kept) {
		return 0;
	}
	*lookup = (kvx_lookup_t){.tokens = kept};
	for (uint32_t i = 0; i < n; i++) {
		if (!roi || roi[i]) {
			kept[lookup->n++] = tokens[i];
		}
	}
	if (salt_bytes > 0) {
		lookup->salt = memcpy(kept + n, salt, salt_bytes);
	}

	return 1;
}

static kvc_status_t check_insert(const kvx_t *kvx, const kvx_insert_t *insert, const kvx_lookup_entry_t *entry)
{
	const uint64_t blocks = (insert->n_tokens + kvx->block_tokens - 1u) / kvx->block_tokens;
	const size_t bytes = kvx_lookup_entry_bytes(entry);

	if (!insert->tokens || insert->n_tokens == 0 || insert->n_tokens > KVC_MAX_SELECT || bytes > KVC_MAX_TAIL ||
	    (insert->hidden_len > 0 && !insert->hidden)) {
		return KVC_ERR_ARG;
	}
	if (!insert->wait && !kvx_buffer_has_room(kvx, blocks * kvx->block_bytes + bytes)) {
		return KVC_ERR_BUSY;
	}

	return KVC_OK;
}

/* A send of the whole prompt, whose tail is the entry. */
static kvc_status_t send_entry(kvx_t *kvx, const kvx_insert_t *insert, const kvx_lookup_entry_t *entry,
			       const kvx_lookup_t *lookup, kvx_send_t **p_send)
{
	const size_t bytes = kvx_lookup_entry_bytes(entry);
	void *tail = malloc(bytes);
	const kvx_chunk_t chunk = {.struct_size = sizeof chunk,
				   .tokens = insert->tokens,
				   .n_tokens = insert->n_tokens,
				   .salt = insert->salt,
				   .computed = insert->n_tokens,
				   .blocks = insert->blocks,
				   .last = 1,
				   .tail = tail,
				   .tail_len = (uint32_t)bytes,
				   .deadline_ms = insert->deadline_ms,
				   .ttl_ms = insert->ttl_ms};
	kvc_status_t status = KVC_ERR_NOMEM;

	if (tail) {
		kvx_lookup_entry_pack(entry, tail);
		status = kvx_send_begin(kvx, &chunk, lookup, p_send);
	}
	free(tail);

	return status;
}

kvc_status_t kvx_insert(kvx_t *kvx, const kvx_insert_t *insert, kvx_send_t **p_send)
{
	kvx_lookup_entry_t entry;
	kvx_lookup_t lookup;
	kvc_status_t status;

	*p_send = NULL;
	if (!insert || insert->struct_size < sizeof *insert) {
		return KVC_MISS;
	}
	entry = (kvx_lookup_entry_t){.tokens = insert->tokens,
				     .n = insert->n_tokens,
				     .roi = insert->roi,
				     .hidden = insert->hidden,
				     .hidden_len = insert->hidden_len};
	status = check_insert(kvx, insert, &entry);
	if (status != KVC_OK) {
		return status == KVC_ERR_BUSY ? status : KVC_MISS;
	}
	if (!lookup_init(&lookup, insert->tokens, insert->n_tokens, insert->roi, insert->salt)) {
		return KVC_MISS;
	}
	lookup.wait = insert->wait;
	status = lookup.n > 0 ? send_entry(kvx, insert, &entry, &lookup, p_send) : KVC_ERR_ARG;
	if (status != KVC_PENDING) {
		free(lookup.tokens);
	}

	return status == KVC_PENDING ? status : KVC_MISS;
}

kvc_status_t kvx_drop_select(kvx_t *kvx, const kvx_select_t *select, kvx_recv_t **p_recv, kvx_recv_result_t *result)
{
	const kvx_prefix_t room = {.struct_size = sizeof room,
				   .n_tokens = select ? select->n_blocks * kvx->block_tokens : 0,
				   .blocks = select ? select->blocks : NULL,
				   .deadline_ms = select ? select->deadline_ms : 0};
	kvx_lookup_t lookup;
	kvc_status_t status = KVC_ERR_ARG;

	*p_recv = NULL;
	if (select && select->struct_size >= sizeof *select && select->n_blocks <= UINT32_MAX / kvx->block_tokens &&
	    select->n_tokens <= KVC_MAX_SELECT && (select->tokens || select->n_tokens == 0)) {
		status = lookup_init(&lookup, select->tokens, select->n_tokens, select->roi, select->salt)
				 ? KVC_OK
				 : KVC_ERR_NOMEM;
	}
	if (status == KVC_OK && lookup.n == 0 && select->n_tokens > 0) {
		free(lookup.tokens);
		status = KVC_ERR_ARG; /* none of its tokens counts: that is not any */
	}
	if (status == KVC_OK) {
		return kvx_recv_lookup(kvx, &room, &lookup, p_recv, result);
	}
	kvx->stats.recvs++;
	kvx->stats.recvs_refused++;
	if (result) {
		kv_struct_fill(result, &(kvx_recv_result_t){.status = KVC_MISS, .cause = status}, sizeof *result);
	}

	return KVC_MISS;
}
