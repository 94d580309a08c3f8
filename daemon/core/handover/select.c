/* HANDOVER_SELECT, and entries that are offered to it: who agrees with whom (decision 044). */
#include "core/handover/handover_impl.h"
#include "core/tenant/member.h"
#include "core/tenant/share.h"

#define STALE_TRIES     256u /* records found whose side or epoch has ended */
#define REOFFER_QUANTUM 64u
#define QUANTUM_WORDS   65536u /* compared, more than those of one sequence */
#define HEAD_WORDS      3u     /* namespace, space, bytes of the bucket */

/* ---- sequences ------------------------------------------------------------------------------- */

static uint32_t bucket_words(uint32_t bytes)
{
	return (bytes + 3) / 4;
}

kv_status_t kvd_handover_make_words(kvd_core_t *core, const kvd_space_t *space, const kv_slice_t *bucket,
				    const kv_slice_t *tokens, kvd_words_t *words)
{
	/* Sequences of two buckets never agree: the length comes before the bytes. */
	const uint32_t head[HEAD_WORDS] = {space->ns, space->id, bucket->len};
	uint32_t count = HEAD_WORDS + bucket_words(bucket->len);

	if (tokens->len % sizeof(uint32_t) != 0) {
		return KV_ERR_ARG;
	}
	words->len = count + tokens->len / (uint32_t)sizeof(uint32_t);
	words->words = kv_alloc(core->env, words->len * sizeof *words->words); /* zeroed */
	if (!words->words) {
		return KV_ERR_NOMEM;
	}
	memcpy(words->words, head, sizeof head);
	if (bucket->len > 0) {
		memcpy(words->words + HEAD_WORDS, bucket->data, bucket->len);
	}
	if (tokens->len > 0) {
		memcpy(words->words + count, tokens->data, tokens->len);
	}

	return KV_OK;
}

uint32_t kvd_handover_select_tokens(const kvd_handover_t *entry)
{
	return entry->select.words ? entry->select.len - HEAD_WORDS - bucket_words(entry->select.words[2]) : 0;
}

/* ---- pairs ----------------------------------------------------------------------------------- */

/* The record of the tree that agrees best. KV_MISS: none does. KV_ERR_BUSY: too many of those found had ended. */
static kv_status_t find_live(kvd_core_t *core, const kvd_token_tree_t *tree, const kvd_words_t *words,
			     kvd_handover_t **p_found)
{
	uint64_t compared = 0;

	for (uint32_t tries = 0; tries < STALE_TRIES && compared <= QUANTUM_WORDS; tries++, compared += words->len) {
		uint32_t id = kvd_token_tree_find(tree, words->words, words->len);
		kvd_handover_t *found = id == KVD_NONE ? NULL : kvd_handover_settle(core, kvd_handover_at(core, id));

		if (id == KVD_NONE) {
			return KV_MISS;
		}
		if (found && found->select.leaf != KVD_NONE) {
			*p_found = found;
			return KV_OK;
		}
	}

	return KV_ERR_BUSY;
}

/* The consumer that waits has the entry; its own record has done its work. */
static void move_consumer(kvd_core_t *core, kvd_handover_t *waiter, kvd_handover_t *entry)
{
	kv_msg_t msg;

	kvd_handover_withdraw(core, entry);
	entry->consumer = waiter->consumer;
	waiter->consumer = (kvd_handover_side_t){0};
	entry->asked_ns = waiter->asked_ns;
	kvd_handover_set_expiry(core, entry, waiter->expiry_ns);
	msg.handover = kvd_handover_describe(core, entry);
	msg.handover.moved = msg.handover.number;
	msg.handover.number = waiter->number;
	kvd_handover_discard(core, waiter);
	kvd_member_notify(core, entry->consumer.member, KV_CODE_HANDOVER, &msg);
	if (entry->state == KV_HANDOVER_COMPLETE) {
		kvd_handover_end_wait(core, entry);
	}
}

void kvd_handover_offer(kvd_core_t *core, kvd_handover_t *entry)
{
	const kvd_words_t words = {(uint32_t *)(uintptr_t)entry->select.words, entry->select.len};
	kvd_handover_t *waiter;
	kv_status_t status = find_live(core, &core->waiting, &words, &waiter);

	if (status == KV_OK) {
		move_consumer(core, waiter, entry);
		return;
	}
	if (entry->select.leaf == KVD_NONE) {
		kvd_token_tree_add(&core->offers, entry->self);
	}
	if (status == KV_ERR_BUSY && !entry->is_reoffered) { /* the next quantum goes on */
		entry->is_reoffered = 1;
		kvd_list_push(&core->reoffers, &core->handovers, offsetof(kvd_handover_t, of_reoffers), entry->self);
	}
}

int kvd_handover_reoffer_run(kvd_core_t *core)
{
	uint64_t compared = 0;

	for (uint32_t left = REOFFER_QUANTUM; left > 0 && compared <= QUANTUM_WORDS && core->reoffers.head != KVD_NONE;
	     left--) {
		kvd_handover_t *entry = kvd_handover_at(core, core->reoffers.head);

		compared += entry->select.len;
		entry->is_reoffered = 0;
		kvd_list_remove(&core->reoffers, &core->handovers, offsetof(kvd_handover_t, of_reoffers), entry->self);
		entry = kvd_handover_settle(core, entry);
		if (entry && entry->select.leaf != KVD_NONE) {
			kvd_handover_offer(core, entry);
		}
	}

	return core->reoffers.head != KVD_NONE;
}

/* ---- the request ----------------------------------------------------------------------------- */

/* A record that waits, with the words. KV_ERR_BUSY: tokens of a quarter of what entries may keep wait already. */
static kv_status_t create_waiter(kvd_core_t *core, kvd_handover_call_t *call, const kvd_words_t *words)
{
	kvd_ns_t *ns = core->ns[call->space->ns];
	uint64_t bytes = (uint64_t)words->len * sizeof *words->words;
	kv_status_t status;

	if (ns->wait_bytes + bytes > kvd_share_handover_max(core, call->space->ns) / 4u ||
	    !kvd_handover_is_within_share(core, call->space->ns, bytes)) {
		return KV_ERR_BUSY;
	}
	status = kvd_obj_pool_reserve(&core->token_nodes, kvd_token_tree_nodes(core->selects + 1));
	if (status == KV_OK) {
		status = kvd_handover_create(core, call, &(kv_slice_t){NULL, 0});
	}
	if (status != KV_OK) {
		return status;
	}
	call->entry->state = KV_HANDOVER_AWAITED;
	kvd_handover_set_select(core, call->entry, words, &ns->wait_bytes);
	kvd_token_tree_add(&core->waiting, call->entry->self);

	return KV_OK;
}

static kv_status_t select_entry(kvd_core_t *core, kvd_handover_call_t *call, const kv_msg_handover_select_t *ask)
{
	kvd_words_t words = {0};
	kv_status_t status = kvd_handover_make_words(core, call->space, &ask->bucket, &ask->tokens, &words);

	if (status == KV_OK) {
		status = find_live(core, &core->offers, &words, &call->entry);
	}
	if (status == KV_MISS) {
		status = create_waiter(core, call, &words);
		words.words = status == KV_OK ? NULL : words.words;
	} else if (status == KV_OK) {
		kvd_handover_withdraw(core, call->entry);
	}
	kv_free(core->env, words.words);

	return status;
}

kv_status_t kvd_handover_select(kvd_core_t *core, uint32_t ns, kvd_member_t member, const kv_msg_handover_select_t *ask,
				kv_msg_handover_select_reply_t *reply)
{
	const kvd_handover_name_t name = {.ns = ns, .space = ask->space, .epoch = ask->epoch, .member = member};
	kvd_handover_call_t call = {0};
	kv_msg_handover_recv_reply_t answer;
	kv_status_t status = kvd_handover_find_transfer(core, &name, &call);

	if (status == KV_OK && (ask->any != 0) == (ask->tokens.len > 0)) {
		status = KV_ERR_ARG;
	}
	if (status == KV_OK) {
		status = kvd_handover_may_join(core, &call);
	}
	if (status == KV_OK) {
		status = select_entry(core, &call, ask);
	}
	if (status != KV_OK) {
		return status;
	}
	kvd_handover_join_side(core, &call.entry->consumer, &call);
	kvd_handover_begin_wait(core, call.entry, kvd_handover_ttl(core, ask->timeout_ms), &answer);
	_Static_assert(sizeof answer == sizeof *reply, "the same fields");
	memcpy(reply, &answer, sizeof answer);

	return KV_OK;
}
