/* The lookup buffer: a hand-over whose id is made of its tokens, so the same tokens find it again. */
#include "inproc/buffer.h"
#include "inproc/handover.h"
#include "scheduler/handover_calls.h"

#include "kv/key.h"

#include <stdio.h>
#include <string.h>

/* "lookup-" and a SHA-256 of space, salt and tokens in hexadecimal digits. Empty: there are no tokens, or no space. */
static void make_id(const kvx_t *kvx, const uint32_t *tokens, uint32_t n, const char *salt,
		    char id[KVC_MAX_TRANSFER + 1u])
{
	struct {
		uint8_t root[32], salt[32], tokens[32];
	} name;
	uint8_t digest[32];

	id[0] = '\0';
	if (!tokens || kvx_scheduler_get_root(kvx->scheduler, name.root) != KVC_OK) {
		return;
	}
	kv_sha256(salt ? salt : "", salt ? strlen(salt) : 0, name.salt);
	kv_sha256(tokens, n * sizeof *tokens, name.tokens);
	kv_sha256(&name, sizeof name, digest);
	id += snprintf(id, KVC_MAX_TRANSFER, "lookup-");
	for (size_t i = 0; i < sizeof digest; i++) {
		id += snprintf(id, 3, "%02x", digest[i]);
	}
}

kvc_status_t kvx_insert(kvx_t *kvx, const kvx_insert_t *insert, kvx_send_t **p_send)
{
	char id[KVC_MAX_TRANSFER + 1u];
	kvx_chunk_t chunk;
	uint64_t blocks;

	*p_send = NULL;
	if (!insert || insert->struct_size < sizeof *insert) {
		return KVC_MISS;
	}
	blocks = ((uint64_t)insert->n_tokens + kvx->block_tokens - 1u) / kvx->block_tokens;
	if (!insert->wait && !kvx_buffer_has_room(kvx, blocks * kvx->block_bytes + insert->hidden_len)) {
		return KVC_ERR_BUSY;
	}
	make_id(kvx, insert->tokens, insert->n_tokens, insert->salt, id);
	chunk = (kvx_chunk_t){.struct_size = sizeof chunk,
			      .transfer = id,
			      .tokens = insert->tokens,
			      .n_tokens = insert->n_tokens,
			      .salt = insert->salt,
			      .computed = insert->n_tokens,
			      .blocks = insert->blocks,
			      .last = 1,
			      .tail = insert->hidden,
			      .tail_len = insert->hidden_len,
			      .deadline_ms = insert->deadline_ms,
			      .ttl_ms = insert->ttl_ms};

	return kvx_send_begin(kvx, &chunk, insert->wait ? KVX_SEND_INSERT_WAITS : KVX_SEND_INSERT, p_send) ==
			       KVC_PENDING
		       ? KVC_PENDING
		       : KVC_MISS;
}

kvc_status_t kvx_drop_select(kvx_t *kvx, const kvx_select_t *given, kvx_recv_t **p_recv, kvx_recv_result_t *result)
{
	static const kvx_select_t none; /* which kvx_recv() refuses */
	const kvx_select_t *select = given && given->struct_size >= sizeof *given ? given : &none;
	const uint64_t room = (uint64_t)select->n_blocks * kvx->block_tokens;
	const kvx_prefix_t prefix = {.struct_size = sizeof prefix,
				     .tokens = select->tokens,
				     .n_tokens = select->n_tokens < room ? select->n_tokens : (uint32_t)room,
				     .salt = select->salt,
				     .blocks = select->blocks,
				     .deadline_ms = select->deadline_ms};
	char id[KVC_MAX_TRANSFER + 1u];

	make_id(kvx, select->tokens, select->n_tokens, select->salt, id);

	return kvx_recv(kvx, id, &prefix, p_recv, result);
}
