/* Hand-overs: a producer names more and more of a prefix, one consumer waits for it. */
#include "impl.h"

#include <stdio.h>

/* ---- the objects ----------------------------------------------------------------------------- */

static kvc_handover_t *handover_new(kvc_space_t *space, const char *transfer, int is_producer)
{
	kvc_t *kvc = space->kvc;
	kvc_handover_t *handover = kv_alloc(&kvc->env, sizeof *handover);

	if (!handover) {
		return NULL;
	}
	handover->kvc = kvc;
	handover->space = space;
	handover->is_producer = is_producer;
	handover->status = KV_PENDING;
	memcpy(handover->transfer, transfer, strlen(transfer) + 1);
	handover->next = kvc->handovers;
	if (kvc->handovers) {
		kvc->handovers->prev = handover;
	}
	kvc->handovers = handover;

	return handover;
}

static void bind_number(kvc_handover_t *handover, uint64_t number)
{
	kvc_handover_t **bucket = &handover->kvc->handover_ids[number % KVC_ID_BUCKETS];

	if (handover->number == 0) {
		handover->number = number;
		handover->chain = *bucket;
		*bucket = handover;
	}
}

static void unbind_number(kvc_handover_t *handover)
{
	kvc_handover_t **link = &handover->kvc->handover_ids[handover->number % KVC_ID_BUCKETS];

	while (*link && *link != handover) {
		link = &(*link)->chain;
	}
	if (*link) {
		*link = handover->chain;
	}
	handover->number = 0;
}

static void handover_free(kvc_handover_t *handover)
{
	kvc_t *kvc = handover->kvc;

	if (handover->number != 0) {
		unbind_number(handover);
	}
	if (handover->prev) {
		handover->prev->next = handover->next;
	} else {
		kvc->handovers = handover->next;
	}
	if (handover->next) {
		handover->next->prev = handover->prev;
	}
	if (kvc->tail_of == handover) {
		kvc_forget_requests(kvc, handover);
		kvc->tail_of = NULL;
	}
	kv_free(&kvc->env, handover->tail);
	kv_free(&kvc->env, handover);
}

/* Nothing more comes of it. */
static void end_handover(kvc_handover_t *handover, uint32_t state, kv_status_t why)
{
	handover->state = state;
	handover->status = why;
	handover->awaits_room = 0;
	handover->announced = 0;
	if (state == KV_HANDOVER_ENDED && handover->number != 0) {
		unbind_number(handover);
	}
}

static int is_over(const kvc_handover_t *handover)
{
	return handover->state == KV_HANDOVER_FAILED || handover->state == KV_HANDOVER_ENDED;
}

/* Its owner has freed it, and no answer is awaited: the daemon is told, unless it knows. A producer that has sent its
 * last leaves the hand-over to the consumer. */
static void finish_free(kvc_handover_t *handover)
{
	int leaves = handover->is_producer && !handover->abort && handover->state == KV_HANDOVER_COMPLETE;
	kv_msg_handover_done_t msg = {.number = handover->number,
				      .flags = handover->is_producer ? KV_HANDOVER_ABORT | KV_HANDOVER_BY_PRODUCER
					       : handover->abort     ? KV_HANDOVER_ABORT
								     : 0,
				      .status = handover->is_producer ? (int32_t)handover->why : 0};

	if (handover->number != 0 && !leaves && kvc_check_process(handover->kvc) == KVC_OK) {
		kvc_send_oneway(handover->kvc, KV_CODE_HANDOVER_DONE, &msg);
	}
	handover_free(handover);
}

void kvc_handovers_lost(kvc_t *kvc)
{
	kvc->tail_of = NULL;
	kvc->tails_wanted = 0;
	for (kvc_handover_t *handover = kvc->handovers; handover; handover = handover->next) {
		end_handover(handover, KV_HANDOVER_ENDED, is_over(handover) ? handover->status : KV_ERR_REVOKED);
	}
}

void kvc_handovers_destroy(kvc_t *kvc)
{
	while (kvc->handovers) {
		handover_free(kvc->handovers);
	}
}

void kvc_handovers_of_space_end(const kvc_space_t *space)
{
	kvc_handover_t *next;

	for (kvc_handover_t *handover = space->kvc->handovers; handover; handover = next) {
		next = handover->next;
		if (handover->space == space) {
			handover->space = NULL;
			kvc_handover_done(handover, 1);
		}
	}
}

/* ---- what arrives ---------------------------------------------------------------------------- */

static void on_tail(kvc_t *kvc, void *object, const kvc_answer_t *answer)
{
	kvc_handover_t *handover = object;

	kvc->tail_of = NULL;
	if (answer->status == KV_OK) {
		const kv_slice_t *tail = &answer->reply->handover_tail_reply.tail;

		handover->tail = tail->len == handover->tail_bytes ? kv_alloc(&kvc->env, tail->len) : NULL;
		if (handover->tail) {
			memcpy(handover->tail, tail->data, tail->len);
			return;
		}
	}
	if (!is_over(handover)) { /* what is handed over is of no use without it */
		end_handover(handover, KV_HANDOVER_FAILED, answer->status == KV_OK ? KV_ERR_NOMEM : answer->status);
	}
}

static int wants_tail(const kvc_handover_t *handover)
{
	return !handover->is_producer && !handover->freed && handover->state == KV_HANDOVER_COMPLETE &&
	       handover->tail_bytes > 0 && !handover->tail;
}

static void note_state(kvc_handover_t *handover, const kv_msg_handover_t *now)
{
	handover->state = now->state;
	handover->n = now->n;
	handover->partial = now->partial;
	handover->announced = handover->is_producer ? now->announced : 0;
	handover->tail_bytes = now->tail_bytes;
	handover->kvc->tails_wanted |= wants_tail(handover);
}

/* One at a time: the daemon closes a session that lets a few megabytes wait. */
void kvc_handovers_fetch_tails(kvc_t *kvc)
{
	kvc_handover_t *handover = kvc->handovers;

	if (!kvc->tails_wanted || kvc->tail_of) {
		return;
	}
	while (handover && !wants_tail(handover)) {
		handover = handover->next;
	}
	kvc->tails_wanted = handover != NULL;
	if (handover) {
		kv_msg_handover_tail_t msg = {.number = handover->number};
		kvc_ask_t ask = {
			.code = KV_CODE_HANDOVER_TAIL, .msg = &msg, .done = on_tail, .object = handover, .fd = -1};

		kvc->tail_of = kvc_send(kvc, &ask) == KV_OK ? handover : NULL;
	}
}

void kvc_handovers_note_room(kvc_t *kvc)
{
	for (kvc_handover_t *handover = kvc->handovers; handover; handover = handover->next) {
		if (handover->awaits_room) {
			handover->awaits_room = 0;
			handover->status = KV_ERR_BUSY;
		}
	}
}

void kvc_handover_notice(kvc_t *kvc, const kv_msg_handover_t *msg)
{
	kvc_handover_t *next;

	for (kvc_handover_t *handover = kvc->handover_ids[msg->number % KVC_ID_BUCKETS]; handover; handover = next) {
		next = handover->chain;
		if (handover->number != msg->number || handover->is_producer != (msg->side == 1)) {
			continue;
		}
		note_state(handover, msg);
		if (is_over(handover)) {
			end_handover(handover, msg->state, (kv_status_t)msg->status);
		}
	}
}

/* A session that has ended has ended its hand-overs. */
static kv_status_t status_of_answer(const kvc_answer_t *answer)
{
	return answer->status == KV_ERR_CLOSED ? KV_ERR_REVOKED : answer->status;
}

static void report_failure(kvc_handover_t *handover, const kvc_answer_t *answer, const char *what)
{
	if (answer->status == KV_ERR_STALE_EPOCH && handover->space) {
		kvc_space_stale(handover->space);
	}
	kvc_fail_request(answer->status, answer->detail, "%s %s", what, handover->transfer);
}

static void on_sent(kvc_t *kvc, void *object, const kvc_answer_t *answer)
{
	kvc_handover_t *handover = object;
	const kv_status_t status = status_of_answer(answer);

	(void)kvc;
	handover->asking = 0;
	if (status == KV_OK) {
		const kv_msg_handover_send_reply_t *reply = &answer->reply->handover_send_reply;

		bind_number(handover, reply->number);
		handover->n = reply->n;
		handover->taken = reply->taken != 0;
		handover->bytes = reply->bytes;
		handover->state = reply->state;
		handover->announced = reply->announced;
	}
	if (!is_over(handover)) { /* else a notice has said why */
		handover->awaits_room = status == KV_ERR_BUSY && handover->await_room && !handover->freed;
		handover->status = handover->awaits_room ? KV_PENDING : status;
	}
	if (answer->expired) { /* it cannot be known what the daemon has done of it */
		handover->state = KV_HANDOVER_FAILED;
	}
	if (status < 0 && handover->status == status) {
		report_failure(handover, answer, "handing over");
	}
	if (handover->freed) {
		finish_free(handover);
	}
}

/* Given up before it was answered, and asked for again by now: the daemon has taken both questions for one, so it is
 * not given back. */
static int is_asked_again(const kvc_handover_t *handover)
{
	const kvc_handover_t *other = handover->kvc->handovers;

	while (other && (other->freed || other->is_producer || other->space != handover->space || is_over(other) ||
			 strcmp(other->transfer, handover->transfer) != 0)) {
		other = other->next;
	}

	return other != NULL;
}

static void on_received(kvc_t *kvc, void *object, const kvc_answer_t *answer)
{
	kvc_handover_t *handover = object;

	(void)kvc;
	handover->asking = 0;
	if (answer->status == KV_OK) {
		const kv_msg_handover_recv_reply_t *reply = &answer->reply->handover_recv_reply;

		bind_number(handover, reply->number);
		handover->bytes = reply->bytes;
		note_state(handover, &(kv_msg_handover_t){.state = reply->state,
							  .n = reply->n,
							  .partial = reply->partial,
							  .tail_bytes = reply->tail_bytes});
		handover->status = reply->state == KV_HANDOVER_FAILED ? (kv_status_t)reply->status : KV_PENDING;
	} else {
		report_failure(handover, answer, "receiving");
		end_handover(handover, KV_HANDOVER_ENDED, status_of_answer(answer));
	}
	if (handover->freed && is_asked_again(handover)) {
		handover_free(handover);
	} else if (handover->freed) {
		finish_free(handover);
	}
}

/* ---- asking ---------------------------------------------------------------------------------- */

static kvc_status_t check_transfer(const char *transfer)
{
	size_t len = transfer ? strnlen(transfer, KVC_MAX_TRANSFER + 1) : 0;

	if (len == 0 || len > KVC_MAX_TRANSFER) {
		return kvc_fail(KV_ERR_ARG, "a transfer id has 1 to %u bytes", KVC_MAX_TRANSFER);
	}

	return KVC_OK;
}

static kvc_status_t send_request(kvc_handover_t *handover, uint16_t code, const void *msg, kvc_answer_fn done)
{
	kvc_ask_t ask = {.code = code, .msg = msg, .done = done, .object = handover, .fd = -1};
	kv_status_t sent = kvc_send(handover->kvc, &ask);

	if (sent != KV_OK) {
		return kvc_fail(sent, "%s could not be sent: %s", kv_request_find(code)->name, kv_status_text(sent));
	}
	handover->asking = 1;

	return KVC_OK;
}

/* Of a full group its last block names those before it, when they are visible; else each is named, from the first that
 * is not handed over. */
static uint32_t first_named(const kvc_handover_t *handover, const kvc_handover_chunk_t *chunk, const kvc_group_t *group,
			    uint32_t end)
{
	const uint32_t there = handover->n / group->units;

	return chunk->ahead && there < end - 1 ? there : end - 1;
}

/* The blocks that a sequence after n units needs of each group, as parts, and their keys. */
static kvc_status_t name_blocks(const kvc_handover_t *handover, const kvc_handover_chunk_t *chunk,
				uint32_t parts[KV_MAX_GROUPS][3], kv_msg_handover_send_t *msg)
{
	kvc_space_t *space = handover->space;
	kvc_blocks_t blocks[KV_MAX_GROUPS];
	uint32_t count = 0, at = 0;
	kv_key_t *keys;

	for (uint32_t g = 0; g < space->group_count; g++) {
		const kvc_group_t *group = &space->groups[g];

		blocks[g] = kvc_group_blocks(space, group, chunk->n);
		if (group->rule == KV_RULE_STATE && chunk->partial > 0) {
			blocks[g].first = blocks[g].end;
		}
		if (group->rule == KV_RULE_FULL) {
			blocks[g].first = first_named(handover, chunk, group, blocks[g].end);
		}
		count += blocks[g].end - blocks[g].first;
	}
	if (count > KV_MAX_BLOCKS || chunk->n > KV_MAX_BLOCKS) {
		return kvc_fail(KV_ERR_ARG, "a hand-over of %u units: at most %u blocks", chunk->n, KV_MAX_BLOCKS);
	}
	keys = kvc_reserve_keys(space->kvc, count);
	if (!keys) {
		return kvc_fail(KV_ERR_NOMEM, "out of memory for the keys of a hand-over");
	}
	for (uint32_t g = 0; g < space->group_count; g++) {
		const uint32_t part[3] = {space->groups[g].number, blocks[g].end, blocks[g].end - blocks[g].first};

		memcpy(parts[g], part, sizeof part);
		for (uint32_t i = blocks[g].first; i < blocks[g].end; i++) {
			keys[at++] = kvc_block_key(chunk->source, &space->groups[g], i);
		}
	}
	msg->parts = (kv_slice_t){(const uint8_t *)parts, space->group_count * KV_HANDOVER_PART_BYTES};
	msg->keys = (kv_slice_t){keys->b, count * KV_KEY_BYTES};

	return KVC_OK;
}

static kvc_status_t send_chunk(kvc_handover_t *handover, const kvc_handover_chunk_t *chunk)
{
	kvc_space_t *space = handover->space;
	uint32_t parts[KV_MAX_GROUPS][3];
	kv_msg_handover_send_t msg = {
		.transfer = kv_slice_str(handover->transfer),
		.number = handover->number,
		.space = atomic_load_explicit(&space->id, memory_order_relaxed),
		.epoch = atomic_load_explicit(&space->epoch, memory_order_relaxed),
		.flags = (chunk->last ? KV_HANDOVER_LAST : 0u) | (chunk->await_room ? KV_HANDOVER_AWAIT_ROOM : 0u) |
			 (chunk->ahead ? KV_HANDOVER_AHEAD : 0u),
		.ttl_ms = chunk->ttl_ms,
		.partial = chunk->partial,
		.tail = {chunk->tail, chunk->tail_len},
	};
	kvc_status_t status = KVC_OK;

	if (chunk->n > handover->n || (chunk->ahead && chunk->n > 0)) {
		status = name_blocks(handover, chunk, parts, &msg);
	}
	if (chunk->partial > 0) {
		chunk->source->key(chunk->source->ctx, chunk->n, (kvc_key_t *)(void *)&msg.private_key);
	}
	if (status == KVC_OK) {
		handover->was_announced |= chunk->ahead != 0;
		handover->await_room = chunk->await_room != 0;
		handover->partial = chunk->partial;
		status = send_request(handover, KV_CODE_HANDOVER_SEND, &msg, on_sent);
	}
	if (status == KVC_OK) {
		handover->status = KV_PENDING;
	}

	return status;
}

static kvc_status_t check_chunk(const kvc_space_t *space, const kvc_handover_chunk_t *chunk)
{
	if (chunk->n % space->granule != 0) {
		return kvc_fail(KV_ERR_ARG, "%u units do not end in a block of every group: a multiple of %u does",
				chunk->n, space->granule);
	}
	for (uint32_t g = 0; g < space->group_count; g++) {
		if (chunk->partial >= space->groups[g].block_tokens) {
			return kvc_fail(KV_ERR_ARG, "%u tokens are no partial block of group %u", chunk->partial,
					space->groups[g].number);
		}
	}
	if (chunk->partial > 0 && !chunk->last) {
		return kvc_fail(KV_ERR_ARG, "kvc_handover_send: a partial block before the last chunk");
	}
	if ((chunk->n > 0 || chunk->partial > 0) && (!chunk->source || !chunk->source->key)) {
		return kvc_fail(KV_ERR_ARG, "kvc_handover_send: blocks without a key source");
	}
	if (chunk->ahead && (space->group_count != 1 || space->groups[0].rule != KV_RULE_FULL)) {
		return kvc_fail(KV_ERR_ARG, "kvc_handover_send: blocks are announced in a space of one full group");
	}
	if (chunk->tail_len > KVC_MAX_TAIL || (chunk->tail_len > 0 && !chunk->tail)) {
		return kvc_fail(KV_ERR_ARG, "a tail of %u bytes: at most %u, and not NULL", chunk->tail_len,
				KVC_MAX_TAIL);
	}

	return KVC_OK;
}

kvc_status_t kvc_handover_send(kvc_space_t *space, const kvc_handover_chunk_t *given, kvc_handover_t **p_handover)
{
	kvc_handover_chunk_t chunk;
	kvc_handover_t *handover;
	kvc_status_t status;

	if (!space || !given || !p_handover || given->struct_size < offsetof(kvc_handover_chunk_t, partial) ||
	    (*p_handover && (!(*p_handover)->is_producer || (*p_handover)->space != space))) {
		return kvc_fail(KV_ERR_ARG,
				"kvc_handover_send: an argument is NULL, struct_size is not set, or another's handle");
	}
	kv_struct_read(&chunk, given, sizeof chunk);
	handover = *p_handover;
	status = kvc_space_usable(space);
	if (status == KVC_OK) {
		status = check_chunk(space, &chunk);
	}
	if (status == KVC_OK && !handover) {
		status = check_transfer(chunk.transfer);
	}
	if (status != KVC_OK) {
		return status;
	}
	if (handover) {
		if (is_over(handover) && handover->status == KV_OK && handover->was_announced && chunk.last &&
		    chunk.n <= handover->n) {
			return KVC_OK; /* complete and taken before its producer knew */
		}
		if (is_over(handover)) {
			return kvc_fail(handover->status == KV_OK ? KV_ERR_EXISTS : handover->status,
					"the hand-over %s goes on no longer", handover->transfer);
		}
		if (chunk.n < handover->n && handover->was_announced && chunk.partial == 0) {
			chunk.n = handover->n; /* they have been handed over meanwhile */
		}
		if (chunk.n < handover->n) {
			return kvc_fail(KV_ERR_ARG, "%u units of %s are handed over already", handover->n,
					handover->transfer);
		}
		return handover->asking || handover->awaits_room ? KVC_PENDING : send_chunk(handover, &chunk);
	}
	handover = handover_new(space, chunk.transfer, 1);
	if (!handover) {
		return kvc_fail(KV_ERR_NOMEM, "out of memory for a hand-over");
	}
	status = send_chunk(handover, &chunk);
	if (status != KVC_OK) {
		handover_free(handover);
		return status;
	}
	*p_handover = handover;

	return KVC_OK;
}

static kvc_status_t ask_to_receive(kvc_handover_t *handover, uint32_t timeout_ms)
{
	const kv_msg_handover_recv_t msg = {
		.transfer = kv_slice_str(handover->transfer),
		.space = atomic_load_explicit(&handover->space->id, memory_order_relaxed),
		.epoch = atomic_load_explicit(&handover->space->epoch, memory_order_relaxed),
		.timeout_ms = timeout_ms,
	};

	return send_request(handover, KV_CODE_HANDOVER_RECV, &msg, on_received);
}

kvc_status_t kvc_handover_recv(kvc_space_t *space, const char *transfer, uint32_t timeout_ms,
			       kvc_handover_t **p_handover)
{
	kvc_handover_t *handover;
	kvc_status_t status;

	if (!space || !p_handover) {
		return kvc_fail(KV_ERR_ARG, "kvc_handover_recv: an argument is NULL");
	}
	status = check_transfer(transfer);
	if (status == KVC_OK) {
		status = kvc_space_usable(space);
	}
	if (status != KVC_OK) {
		return status;
	}
	handover = handover_new(space, transfer, 0);
	if (!handover) {
		return kvc_fail(KV_ERR_NOMEM, "out of memory for a hand-over");
	}
	status = ask_to_receive(handover, timeout_ms);
	if (status != KVC_OK) {
		handover_free(handover);
		return status;
	}
	*p_handover = handover;

	return KVC_OK;
}

/* ---- from another node ----------------------------------------------------------------------- */

/* The daemon has passed it on: wait for what comes of it, as for any hand-over. */
static void on_fetched(kvc_t *kvc, void *object, const kvc_answer_t *answer)
{
	kvc_handover_t *handover = object;
	kvc_status_t status = status_of_answer(answer);

	(void)kvc;
	handover->asking = 0;
	if (status != KV_OK) {
		report_failure(handover, answer, "fetching");
	} else if (!handover->freed) {
		status = handover->space ? ask_to_receive(handover, answer->reply->fetch_reply.timeout_ms)
					 : KVC_ERR_CLOSED;
	}
	if (status != KV_OK) {
		end_handover(handover, KV_HANDOVER_ENDED, (kv_status_t)status);
	}
	if (handover->freed && !handover->asking) {
		finish_free(handover);
	}
}

static kvc_status_t check_fetch(const kvc_fetch_t *fetch, const kvc_space_t *space)
{
	const kvc_prompt_t *prompt = fetch->prompt;
	const int by_hashes = fetch->hashes != NULL || !prompt;
	const uint32_t units =
		by_hashes ? fetch->n_hashes : prompt->n_tokens / (space->hash_tokens ? space->hash_tokens : 1);

	if (!fetch->peer || fetch->peer[0] == '\0' || strlen(fetch->peer) > KVC_MAX_PEER) {
		return kvc_fail(KV_ERR_ARG, "kvc_handover_fetch: the name of a peer has 1 to 64 bytes");
	}
	if ((prompt && (!prompt->tokens || prompt->struct_size < sizeof *prompt)) ||
	    (by_hashes && (!fetch->hashes || fetch->hash_bytes < 16 || fetch->hash_bytes > 60))) {
		return kvc_fail(KV_ERR_ARG, "kvc_handover_fetch: neither a prompt nor hashes of 16 to 60 bytes");
	}
	if (prompt && prompt->salt && strlen(prompt->salt) > KVC_MAX_SALT) {
		return kvc_fail(KV_ERR_ARG, "kvc_handover_fetch: a salt has at most %u bytes", KVC_MAX_SALT);
	}
	if (units > KV_MAX_BLOCKS || (units == 0 && (!fetch->transfer || !prompt || prompt->n_tokens == 0))) {
		return kvc_fail(KV_ERR_ARG, "kvc_handover_fetch: a prefix of %u units: 1 to %u", units, KV_MAX_BLOCKS);
	}

	return fetch->transfer ? check_transfer(fetch->transfer) : KVC_OK;
}

/* A name for the hand-over here that no other one has. */
static void draw_transfer(kvc_t *kvc, char out[KVC_MAX_TRANSFER + 1])
{
	uint64_t words[2];

	kv_random(&kvc->env, words, sizeof words);
	snprintf(out, KVC_MAX_TRANSFER + 1, "prefix-%016llx%016llx", (unsigned long long)words[0],
		 (unsigned long long)words[1]);
}

static kv_slice_t tokens_of(const kvc_prompt_t *prompt, uint32_t from, uint32_t n)
{
	return (kv_slice_t){(const uint8_t *)(prompt->tokens + from), n * (uint32_t)sizeof(uint32_t)};
}

/* With hashes: the prompt's tokens after them, as many as a private block may have. */
static kv_slice_t rest_of(const kvc_fetch_t *fetch, const kvc_space_t *space)
{
	const uint64_t whole = (uint64_t)fetch->n_hashes * space->hash_tokens;
	const uint32_t most = space->granule * space->hash_tokens;
	uint32_t n;

	if (!fetch->hashes || !fetch->prompt || !fetch->transfer || fetch->prompt->n_tokens <= whole) {
		return (kv_slice_t){NULL, 0};
	}
	n = fetch->prompt->n_tokens - (uint32_t)whole;

	return tokens_of(fetch->prompt, (uint32_t)whole, n < most ? n : most);
}

static kv_msg_fetch_t fetch_message(const kvc_fetch_t *fetch, const kvc_space_t *space, const char *transfer)
{
	const kvc_prompt_t *prompt = fetch->prompt;

	return (kv_msg_fetch_t){
		.peer = kv_slice_str(fetch->peer),
		.transfer = kv_slice_str(transfer),
		.flags = fetch->transfer ? 0 : KV_FETCH_PREFIX,
		.identity = {(const uint8_t *)space->text, space->text_len},
		.hash_bytes = fetch->hashes ? fetch->hash_bytes : 0,
		.names = fetch->hashes ? (kv_slice_t){fetch->hashes, fetch->n_hashes * fetch->hash_bytes}
				       : tokens_of(prompt, 0, prompt->n_tokens),
		.rest = rest_of(fetch, space),
		.salt = kv_slice_str(prompt && prompt->salt ? prompt->salt : ""),
		.timeout_ms = fetch->timeout_ms,
	};
}

kvc_status_t kvc_handover_fetch(kvc_space_t *space, const kvc_fetch_t *fetch, kvc_handover_t **p_handover)
{
	char drawn[KVC_MAX_TRANSFER + 1];
	kvc_handover_t *handover;
	kv_msg_fetch_t msg;
	kvc_status_t status;

	if (!space || !fetch || !p_handover || fetch->struct_size < sizeof *fetch) {
		return kvc_fail(KV_ERR_ARG, "kvc_handover_fetch: an argument is NULL, or struct_size is not set");
	}
	status = kvc_space_usable(space);
	if (status == KVC_OK) {
		status = check_fetch(fetch, space);
	}
	if (status != KVC_OK) {
		return status;
	}
	draw_transfer(space->kvc, drawn);
	handover = handover_new(space, fetch->transfer ? fetch->transfer : drawn, 0);
	if (!handover) {
		return kvc_fail(KV_ERR_NOMEM, "out of memory for a hand-over");
	}
	msg = fetch_message(fetch, space, handover->transfer);
	status = send_request(handover, KV_CODE_FETCH, &msg, on_fetched);
	if (status != KVC_OK) {
		handover_free(handover);
		return status;
	}
	*p_handover = handover;

	return KVC_OK;
}

/* ---- looking at one -------------------------------------------------------------------------- */

static kvc_status_t status_of(const kvc_handover_t *handover)
{
	if (handover->is_producer || is_over(handover)) {
		return handover->status;
	}

	return handover->state == KV_HANDOVER_COMPLETE && !wants_tail(handover) ? KVC_OK : KVC_PENDING;
}

kvc_status_t kvc_handover_get_info(const kvc_handover_t *handover, kvc_handover_info_t *info)
{
	kvc_handover_info_t full = {
		.state = handover->state,
		.status = status_of(handover),
		.number = handover->number,
		.n = handover->n,
		.taken = handover->taken,
		.bytes = handover->bytes,
		.tail = handover->tail,
		.tail_len = handover->tail ? handover->tail_bytes : 0,
		.partial = handover->partial,
		.announced = handover->announced,
	};

	return kvc_fill("kvc_handover_get_info", info, &full, sizeof full);
}

/* What a call of kvc_handover_wait() waits for. */
typedef struct kvc_handover_wanted {
	const kvc_handover_t *handover;
	uint32_t n;
} kvc_handover_wanted_t;

static int is_there(const void *object)
{
	const kvc_handover_wanted_t *wanted = object;
	const kvc_handover_t *handover = wanted->handover;

	return status_of(handover) != KVC_PENDING ||
	       (!handover->is_producer && handover->number != 0 && wanted->n > 0 && handover->n >= wanted->n);
}

kvc_status_t kvc_handover_wait(kvc_handover_t *handover, uint32_t n, uint32_t timeout_ms)
{
	const kvc_handover_wanted_t wanted = {.handover = handover, .n = n};
	kvc_t *kvc = handover->kvc;
	kvc_status_t status = kvc_check_process(kvc);

	if (status != KVC_OK) {
		return status;
	}
	if (kvc_wait(kvc, is_there, &wanted, kvc_deadline(kvc, timeout_ms)) != KV_OK) {
		return kvc_fail(KV_ERR_TIMEOUT, "%s: %u units are handed over so far; wait again or compute",
				handover->transfer, handover->n);
	}
	status = status_of(handover);
	if (status < 0) {
		return kvc_fail((kv_status_t)status, "the hand-over %s: %s; %u units of it are there",
				handover->transfer, kvc_status_text(status), handover->n);
	}

	return status == KVC_PENDING ? KVC_OK : status;
}

void kvc_handover_done(kvc_handover_t *handover, int abort)
{
	if (!handover) {
		return;
	}
	handover->abort = abort != 0;
	if (handover->asking && handover->kvc->channel.fd >= 0) {
		handover->freed = 1; /* its answer says what there is to give back */
		return;
	}
	finish_free(handover);
}

void kvc_handover_fail(kvc_handover_t *handover, kvc_status_t why)
{
	if (handover) {
		handover->why = why < 0 ? (kv_status_t)why : KV_OK;
		kvc_handover_done(handover, 1);
	}
}
