/* Puts: ask for slots, fill them and digest on the way. put_end.c hands them in. */
#include "impl.h"

/* ---- the objects ----------------------------------------------------------------------------- */

kvc_put_t *kvc_put_new(kvc_space_t *space)
{
	kvc_t *kvc = space->kvc;
	kvc_put_t *put = kvc->free_puts;

	if (put) {
		kvc_put_t was = *put;

		kvc->free_puts = was.next;
		*put = (kvc_put_t){.order = was.order, .order_cap = was.order_cap};
	} else {
		put = kv_alloc(&kvc->env, sizeof *put);
		if (!put) {
			return NULL;
		}
	}
	put->space = space;
	put->serial = ++kvc->serial;
	atomic_store(&put->status, KV_PENDING);
	put->result = (kvc_put_result_t){.status = KVC_PENDING, .durable_status = KVC_MISS};
	put->prev = kvc->last_put;
	if (kvc->last_put) {
		kvc->last_put->next = put;
	} else {
		kvc->puts = put;
	}
	kvc->last_put = put;
	kvc->puts_open++;

	return put;
}

static void unbind_put(kvc_t *kvc, const kvc_put_t *put)
{
	kvc_put_t **link = &kvc->put_ids[put->grant.id % KVC_ID_BUCKETS];

	while (*link && *link != put) {
		link = &(*link)->chain;
	}
	if (*link) {
		*link = put->chain;
	}
}

void kvc_put_forget(kvc_put_t *put)
{
	kvc_space_t *space = put->space;
	kvc_t *kvc = space->kvc;

	/* Staging of an older session has gone with it. */
	if (!put->staging_lost) {
		kvc_staging_give(kvc, &put->staging);
	}
	if (put->grant.map) {
		unbind_put(kvc, put);
	}
	kvc_grant_drop(&put->grant);
	if (put->prev) {
		put->prev->next = put->next;
	} else {
		kvc->puts = put->next;
	}
	if (put->next) {
		put->next->prev = put->prev;
	} else {
		kvc->last_put = put->prev;
	}
	kvc->puts_open--;
	put->next = kvc->free_puts;
	kvc->free_puts = put;
	if (space->puts_left && --space->puts_left == 0) {
		kvc_space_free(space);
	}
}

void kvc_puts_destroy(kvc_t *kvc)
{
	while (kvc->puts) {
		kvc_put_forget(kvc->puts);
	}
	while (kvc->free_puts) {
		kvc_put_t *put = kvc->free_puts;

		kvc->free_puts = put->next;
		kv_free(&kvc->env, put->order);
		kv_free(&kvc->env, put);
	}
}

/* All puts of the session that has just ended are over. */
void kvc_puts_lost(kvc_t *kvc)
{
	kvc_put_t *next;

	for (kvc_put_t *put = kvc->puts; put; put = next) {
		next = put->next;
		put->staging_lost = 1;
		/* CLOSED, not REVOKED: no member gave it up. */
		if (atomic_load(&put->status) == KV_PENDING) {
			atomic_store(&put->status, KV_ERR_CLOSED);
		}
		if (put->result.status == KVC_PENDING) {
			put->result.status = KVC_ERR_CLOSED;
		}
		if (put->result.durable_status == KVC_PENDING) {
			put->result.durable_status = KVC_ERR_CLOSED;
		}
		if (put->freed) {
			kvc_put_forget(put);
		}
	}
}

/* ---- asking ---------------------------------------------------------------------------------- */

kv_status_t kvc_put_range(const kvc_geometry_t *g, const kvc_writer_t *range, uint32_t *p_words)
{
	if (range->head_count > g->heads || range->head_first > g->heads - range->head_count ||
	    range->layer_count > g->layers || range->layer_first > g->layers - range->layer_count) {
		return KV_ERR_COVERAGE;
	}
	*p_words = range->head_count * range->layer_count * g->pieces;

	return KV_OK;
}

/* Count the blocks to be written; the grant and n are known. */
kv_status_t kvc_put_bind(kvc_put_t *put)
{
	kvc_t *kvc = put->space->kvc;
	kvc_put_t **bucket = &kvc->put_ids[put->grant.id % KVC_ID_BUCKETS];

	if (put->order_cap < put->n + 1u) {
		size_t bytes = (put->n + 1u) * sizeof *put->order;
		uint32_t *order = kv_resize(&kvc->env, put->order, put->order_cap * sizeof *put->order, bytes);

		if (!order) {
			return KV_ERR_NOMEM;
		}
		put->order = order;
		put->order_cap = put->n + 1u;
	}
	put->order[0] = 0;
	for (uint32_t i = 0; i < put->n; i++) {
		put->order[i + 1] = put->order[i] + (kvc_grant_slot(&put->grant, i) != KV_SLOT_NONE);
	}
	put->kept_ns = kv_now_ns(&kvc->env);
	put->chain = *bucket;
	*bucket = put;

	return KV_OK;
}

static kv_status_t take_put_grant(kvc_t *kvc, kvc_put_t *put, const kv_msg_put_start_reply_t *reply)
{
	kv_status_t status;

	if (reply->n > put->asked || reply->already > reply->n) {
		return KV_ERR_PROTO;
	}
	put->n = reply->n;
	if (reply->put == 0) {
		/* Nothing to write: all of it is visible, or nothing was granted. */
		put->result.visible = reply->n;
		put->result.status = reply->n ? KVC_OK : KVC_ERR_BUSY;
		put->result.durable_status = KVC_MISS;
		return reply->n ? KV_OK : KV_ERR_BUSY;
	}
	status = kvc_grant_take(kvc, reply->put, reply->offset, reply->n, KV_LEASE_PUT, &put->grant);
	if (status == KV_OK) {
		status = kvc_put_bind(put);
	}

	return status;
}

/* It was granted and cannot be kept: no member will write there. */
static void decline_grant(kvc_t *kvc, kvc_put_t *put, uint64_t id)
{
	kv_msg_put_revoke_t revoke = {.put = id};
	kv_msg_drained_t drained = {.what = 0, .id = id};

	kvc_grant_drop(&put->grant);
	kvc_send_oneway(kvc, KV_CODE_PUT_REVOKE, &revoke);
	kvc_send_oneway(kvc, KV_CODE_DRAINED, &drained);
}

static void on_put_started(kvc_t *kvc, void *object, const kvc_answer_t *answer)
{
	kvc_put_t *put = object;
	kv_status_t status = answer->status;

	if (status == KV_OK) {
		const kv_msg_put_start_reply_t *reply = &answer->reply->put_start_reply;

		status = take_put_grant(kvc, put, reply);
		if (status != KV_OK && reply->put) {
			decline_grant(kvc, put, reply->put);
		}
	}
	if (status == KV_ERR_STALE_EPOCH) {
		kvc_space_stale(put->space);
	}
	if (status < 0) {
		put->n = 0;
		put->result.status = (kvc_status_t)status;
		put->result.durable_status = put->durable ? put->result.status : KVC_MISS;
		kvc_fail_request(status, answer->detail, "starting a put of %u blocks", put->asked);
	}
	atomic_store(&put->status, status);
}

/* This member's own range among the writers; none at all when it is not one of them, and a scheduler never is: its
 * rank is one of a rank's, too. */
static kvc_status_t resolve_writer_range(kvc_put_t *put, const kvc_put_options_t *options)
{
	const kvc_space_t *space = put->space;
	const kvc_geometry_t *g = &put->group->geometry;
	kv_status_t status;

	put->range = (kvc_writer_t){.head_count = g->heads, .layer_count = g->layers};
	if (options->writers) {
		put->range = (kvc_writer_t){.rank = space->kvc->rank};
		for (uint32_t i = 0; i < options->writer_count && space->kvc->role != KVC_ROLE_SCHEDULER; i++) {
			if (options->writers[i].rank == space->kvc->rank) {
				put->range = options->writers[i];
			}
		}
	}
	status = kvc_put_range(g, &put->range, &put->words_a_block);
	if (status != KV_OK) {
		return kvc_fail(status,
				"this rank's range of heads and layers is not in a block of %u heads and %u layers",
				g->heads, g->layers);
	}

	return KVC_OK;
}

/* Staging for as many blocks as fit at all. */
static kvc_status_t reserve_staging(kvc_put_t *put, uint32_t count)
{
	kvc_t *kvc = put->space->kvc;
	uint64_t words = atomic_load_explicit(&kvc->map, memory_order_relaxed)->staging_words;
	kv_status_t status;

	/* The daemon reads the digests of a block out of staging when it answers PUT_END: blocks without room there
	 * are not asked for, and the caller puts them with its next put. */
	put->asked = count;
	if (put->words_a_block && words / put->words_a_block < count) {
		put->asked = (uint32_t)(words / put->words_a_block);
	}
	if (put->asked == 0) {
		return kvc_fail(KV_ERR_LIMIT,
				"one block has %u leaf digests and the staging only %llu words; raise staging_blocks",
				put->words_a_block, (unsigned long long)words);
	}
	status = kvc_staging_take(kvc, (uint64_t)put->asked * put->words_a_block, &put->staging);
	if (status != KV_OK) {
		return kvc_fail(status, "no staging is left for %u blocks; end or free other puts first", put->asked);
	}
	put->window_blocks = put->asked;

	return KVC_OK;
}

/* Private blocks, and those of the other groups, are unchained. */
static int has_parent(const kvc_group_t *group, uint32_t from, const kvc_put_options_t *options)
{
	return from != 0 && group->rule == KV_RULE_FULL && !options->private_blocks;
}

_Static_assert(sizeof(kvc_writer_t) == KV_WRITER_BYTES, "a writer goes over the wire as it is");

static kvc_status_t send_start(kvc_put_t *put, const kvc_key_t *keys, const kvc_put_options_t *options)
{
	kvc_space_t *space = put->space;
	const kvc_group_t *group = put->group;
	uint32_t at = put->from - options->base;
	kv_msg_put_start_t msg = {
		.space = atomic_load_explicit(&space->id, memory_order_relaxed),
		.epoch = atomic_load_explicit(&space->epoch, memory_order_relaxed),
		.group = group->number,
		.flags = (options->durable ? KV_PUT_DURABLE : 0u) | (options->private_blocks ? KV_PUT_PRIVATE : 0u) |
			 (options->yields ? KV_PUT_YIELD : 0u) | (options->optional ? KV_PUT_OPTIONAL : 0u),
		.depth = put->from,
		.keys = {keys[at].b, put->asked * (uint32_t)sizeof keys[0]},
	};
	kvc_ask_t ask = {.code = KV_CODE_PUT_START, .msg = &msg, .done = on_put_started, .object = put, .fd = -1};
	kv_status_t sent;

	if (has_parent(group, put->from, options)) {
		memcpy(msg.parent.b, keys[at - 1].b, sizeof msg.parent.b);
	}
	if (options->event_hashes) {
		msg.event_hashes = (kv_slice_t){(const uint8_t *)(options->event_hashes + at), put->asked * 8u};
	}
	if (options->tokens) {
		msg.tokens = (kv_slice_t){(const uint8_t *)(options->tokens + (size_t)at * group->block_tokens),
					  put->asked * group->block_tokens * 4u};
	}
	if (options->writers) {
		msg.writers = (kv_slice_t){(const uint8_t *)options->writers, options->writer_count * KV_WRITER_BYTES};
	}
	sent = kvc_send(space->kvc, &ask);
	if (sent != KV_OK) {
		return kvc_fail(sent, "PUT_START of %u blocks could not be sent: %s", put->asked, kv_status_text(sent));
	}

	return KVC_OK;
}

/* What the caller gave, in this version's shape. */
static kvc_status_t options_take(const kvc_space_t *space, uint32_t from, const kvc_put_options_t *given,
				 kvc_put_options_t *options, const kvc_group_t **p_group)
{
	const kvc_group_t *group;

	*options = (kvc_put_options_t){.group = space->groups[0].number};
	if (given) {
		memcpy(options, given, given->struct_size < sizeof *options ? given->struct_size : sizeof *options);
	}
	if ((given && given->struct_size < sizeof(size_t) + sizeof(int)) || options->writer_count > KV_MAX_WRITERS) {
		return kvc_fail(KV_ERR_ARG,
				"kvc_put_options_t: struct_size is not set, or there are more than %u writers",
				KV_MAX_WRITERS);
	}
	group = kvc_group_find(space, options->group);
	if (!group) {
		return kvc_fail(KV_ERR_ARG, "kvc_put_options_t: the space has no group %u", options->group);
	}
	if (options->base > from || (options->base == from && has_parent(group, from, options))) {
		return kvc_fail(KV_ERR_ARG,
				"kvc_put_options_t: keys from block %u on do not hold the parent of block %u",
				options->base, from);
	}
	if (options->private_blocks && options->durable) {
		return kvc_fail(KV_ERR_ARG, "kvc_put_options_t: private blocks never become durable");
	}
	*p_group = group;

	return KVC_OK;
}

kvc_status_t kvc_put_start(kvc_space_t *space, const kvc_key_t *keys, uint32_t from, uint32_t n,
			   const kvc_put_options_t *given, kvc_put_t **p_put)
{
	const kvc_group_t *group = NULL;
	kvc_put_options_t options;
	kvc_put_t *put;
	kvc_status_t status;

	if (!space || !keys || !p_put || from >= n || n - from > KV_MAX_BLOCKS) {
		return kvc_fail(KV_ERR_ARG, "kvc_put_start: blocks [%u, %u): at least 1, at most %u", from, n,
				KV_MAX_BLOCKS);
	}
	status = options_take(space, from, given, &options, &group);
	if (status == KVC_OK) {
		status = kvc_space_usable(space);
	}
	if (status != KVC_OK) {
		return status;
	}
	if (!kv_holds(group)) { /* options_take() has found it */
		return kvc_fail(KV_ERR_INTERNAL, "kvc_put_start: no group");
	}
	put = kvc_put_new(space);
	if (!put) {
		return kvc_fail(KV_ERR_NOMEM, "out of memory for a put");
	}
	put->group = group;
	put->from = from;
	put->durable = options.durable != 0;
	put->result.durable_status = put->durable ? KVC_PENDING : KVC_MISS;

	status = resolve_writer_range(put, &options);
	status = status == KVC_OK ? reserve_staging(put, n - from) : status;
	status = status == KVC_OK ? send_start(put, keys, &options) : status;
	if (status != KVC_OK) {
		kvc_put_forget(put);
		return status;
	}
	*p_put = put;

	return KVC_OK;
}

static int is_start_answered(const void *object)
{
	return atomic_load(&((const kvc_put_t *)object)->status) != KV_PENDING;
}

kvc_status_t kvc_put_ready(kvc_put_t *put, uint32_t timeout_ms)
{
	kvc_t *kvc = put->space->kvc;
	kvc_status_t status = kvc_enter(kvc);

	if (status != KVC_OK) {
		return status;
	}
	if (kvc_wait(kvc, is_start_answered, put, kvc_deadline(kvc, timeout_ms)) != KV_OK) {
		return kvc_fail(KV_ERR_TIMEOUT, "no answer to PUT_START yet");
	}

	return atomic_load(&put->status);
}

uint32_t kvc_put_n(const kvc_put_t *put)
{
	return put->n;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* May block i be written? */
static kvc_status_t may_write(const kvc_put_t *put, uint32_t i)
{
	kvc_status_t status = kvc_check_process(put->space->kvc);

	if (status != KVC_OK) {
		return status;
	}
	status = atomic_load_explicit(&put->status, memory_order_acquire);
	if (status != KVC_OK) {
		return kvc_fail((kv_status_t)status, "the put was not granted: %s", kvc_status_text(status));
	}
	if (i >= put->n) {
		return kvc_fail(KV_ERR_ARG, "block %u is not among the %u granted", i, put->n);
	}
	if (!put->grant.map || put->order[i + 1] == put->order[i]) {
		return KVC_ALREADY;
	}
	if (kvc_grant_check(&put->grant) != KV_OK) {
		return kvc_fail(KV_ERR_REVOKED, "put %llu was revoked", (unsigned long long)put->grant.id);
	}

	return KVC_OK;
}

/* Its memory. */
static kvc_status_t find_block_memory(const kvc_put_t *put, uint32_t i, kvc_block_memory_t *memory)
{
	kv_status_t status =
		kvc_slab_find(put->grant.map, &put->group->geometry, kvc_grant_slot(&put->grant, i), memory);

	if (status != KV_OK) {
		return kvc_fail(status, "block %u lies in memory this process does not have: %s", i,
				kv_status_text(status));
	}

	return KVC_OK;
}

/* The same, for a copy by the CPU. */
static kvc_status_t find_host_memory(const kvc_put_t *put, uint32_t i, uint8_t **p_data)
{
	kvc_block_memory_t memory = {0};
	kvc_status_t status = find_block_memory(put, i, &memory);

	if (status == KVC_OK && memory.on_device) {
		return kvc_fail(KV_ERR_UNSUPPORTED, "block %u lies in memory of a GPU, which a CPU does not write", i);
	}
	*p_data = memory.data;

	return status;
}

/* Its words of staging. */
static kvc_status_t find_staging_words(const kvc_put_t *put, uint32_t i, uint64_t **p_words)
{
	uint32_t order = put->order[i], window = atomic_load_explicit(&put->window, memory_order_acquire);

	if (order < window) {
		return kvc_fail(KV_ERR_ARG, "block %u has been handed in", i);
	}
	if (order - window >= put->window_blocks && put->words_a_block) {
		return kvc_fail(KV_ERR_BUSY,
				"the staging holds %u blocks of this put: hand in those before block %u and poll",
				put->window_blocks, i);
	}
	*p_words = put->grant.map->staging + put->staging.first + (size_t)(order - window) * put->words_a_block;

	return KVC_OK;
}

kvc_status_t kvc_put_block(const kvc_put_t *put, uint32_t i, void **p_data)
{
	kvc_block_memory_t memory = {0};
	kvc_status_t status = may_write(put, i);

	if (status == KVC_OK && p_data) {
		status = find_block_memory(put, i, &memory);
	}
	if (status == KVC_OK && p_data) {
		*p_data = memory.data;
	}

	return status;
}

kvc_status_t kvc_put_write(kvc_put_t *put, uint32_t i, const void *src)
{
	const kvc_geometry_t *g = &put->group->geometry;
	const kvc_writer_t *range = &put->range;
	kvc_leaves_t leaves = {.first = range->layer_first * g->pieces, .count = range->layer_count * g->pieces};
	uint8_t *data = NULL;
	uint64_t *word = NULL;
	kvc_status_t status = may_write(put, i);

	status = status == KVC_OK ? find_staging_words(put, i, &word) : status;
	status = status == KVC_OK ? find_host_memory(put, i, &data) : status;
	if (status != KVC_OK) {
		return status == KVC_ALREADY ? KVC_OK : status;
	}
	for (uint32_t h = 0; h < range->head_count; h++) {
		leaves.head = range->head_first + h;
		kvc_copy_leaves(g, &leaves, data, src, word);
		word += leaves.count;
	}
	kvc_count(&put->space->kvc->counters.blocks_put, 1);
	kvc_count(&put->space->kvc->counters.bytes_put,
		  (uint64_t)(g->block_bytes / g->leaves / g->heads) * put->words_a_block);

	return KVC_OK;
}

kvc_status_t kvc_put_digests(kvc_put_t *put, uint32_t i, const uint64_t *leaves)
{
	uint64_t *words = NULL;
	kvc_status_t status = may_write(put, i);

	status = status == KVC_OK ? find_staging_words(put, i, &words) : status;
	if (status != KVC_OK) {
		return status == KVC_ALREADY ? KVC_OK : status;
	}
	if (leaves) {
		if (!kv_holds(words)) {
			return kvc_fail(KV_ERR_INTERNAL, "kvc_put_digests: no staging");
		}
		memcpy(words, leaves, put->words_a_block * sizeof *words);
	}

	return KVC_OK;
}
