/* PUT_START: what is asked for, checked; then slots, entries and the header that ranks see. */
#include "core/block/admission.h"
#include "core/block/block.h"
#include "core/block/room.h"
#include "core/base/core_impl.h"
#include "core/lease/extent_alloc.h"
#include "core/put/pending.h"
#include "core/put/put.h"
#include "core/put/put_impl.h"
#include "core/base/find.h"
#include "core/base/share.h"

/* What a PUT_START asks for, checked; nothing is reserved yet. */
typedef struct kvd_draft {
	kvd_space_t *space;
	kvd_member_rec_t *member;
	kvd_instance_rec_t *instance;
	const kv_msg_put_start_t *ask;
	const kv_group_t *group;
	const kvd_group_blocks_t *blocks; /* of it */
	uint32_t unchained;               /* 1: of an unchained group, or private */
	uint32_t n;
	uint32_t already;
	uint32_t tracked; /* 1: it counts for admission */
	uint32_t base;    /* deepest visible block: the parent, or the last ALREADY one; KVD_NONE: none */
	uint32_t writer_count;
} kvd_draft_t;

static kv_key_t key_at(const kvd_draft_t *draft, uint32_t i)
{
	kv_key_t key;

	memcpy(&key, draft->ask->keys.data + (size_t)i * KV_KEY_BYTES, sizeof key);

	return key;
}

/* ---- writers --------------------------------------------------------------------------------- */

static uint32_t word_at(kv_slice_t bytes, uint32_t index)
{
	uint32_t word;

	memcpy(&word, bytes.data + (size_t)index * sizeof word, sizeof word);

	return word;
}

static kvd_writer_t writer_at(const kvd_draft_t *draft, uint32_t i)
{
	kv_slice_t bytes = draft->ask->writers;

	if (bytes.len == 0) {
		return (kvd_writer_t){
			.rank = 0, .heads = draft->blocks->geometry.heads, .layers = draft->blocks->layers};
	}

	return (kvd_writer_t){
		.rank = word_at(bytes, i * 5u),
		.head = word_at(bytes, i * 5u + 1),
		.heads = word_at(bytes, i * 5u + 2),
		.layer = word_at(bytes, i * 5u + 3),
		.layers = word_at(bytes, i * 5u + 4),
	};
}

static int are_disjoint(const kvd_writer_t *a, const kvd_writer_t *b)
{
	return a->rank != b->rank && (a->head + a->heads <= b->head || b->head + b->heads <= a->head ||
				      a->layer + a->layers <= b->layer || b->layer + b->layers <= a->layer);
}

/* Every (head, layer) has exactly one writer: ranges lie inside, do not overlap, and their areas add up. */
static kv_status_t check_writers(kvd_draft_t *draft)
{
	const kvd_group_blocks_t *blocks = draft->blocks;
	uint64_t area = 0;
	uint32_t count = draft->ask->writers.len == 0 ? 1 : draft->ask->writers.len / KV_WRITER_BYTES;

	if (draft->ask->writers.len % KV_WRITER_BYTES != 0 || count > KV_MAX_WRITERS) {
		return KV_ERR_COVERAGE;
	}
	for (uint32_t i = 0; i < count; i++) {
		kvd_writer_t w = writer_at(draft, i);

		if (w.heads == 0 || w.layers == 0 || w.head >= blocks->geometry.heads ||
		    w.heads > blocks->geometry.heads - w.head || w.layer >= blocks->layers ||
		    w.layers > blocks->layers - w.layer || w.rank > 65535) {
			return KV_ERR_COVERAGE;
		}
		area += (uint64_t)w.heads * w.layers;
		for (uint32_t j = 0; j < i; j++) {
			kvd_writer_t other = writer_at(draft, j);

			if (!are_disjoint(&w, &other)) {
				return KV_ERR_COVERAGE;
			}
		}
	}
	draft->writer_count = count;

	return area == (uint64_t)blocks->geometry.heads * blocks->layers ? KV_OK : KV_ERR_COVERAGE;
}

/* ---- the path -------------------------------------------------------------------------------- */

/* Is the block one of this depth? Nothing lies below a private block. */
static int is_parent(const kvd_core_t *core, uint32_t id, uint32_t depth)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);

	return kvd_depth_of(&core->ix, block) == depth && !kvd_is_private(&core->ix, block);
}

static int is_optional(const kv_msg_put_start_t *ask)
{
	return (ask->flags & (KV_PUT_OPTIONAL | KV_PUT_DURABLE | KV_PUT_PRIVATE)) == KV_PUT_OPTIONAL;
}

static kv_status_t check_parent(kvd_core_t *core, kvd_draft_t *draft)
{
	const kv_msg_put_start_t *ask = draft->ask;

	draft->base = KVD_NONE;
	if (kv_key_is_zero(&ask->parent)) {
		return ask->depth == 0 ? KV_OK : KV_ERR_ARG;
	}
	draft->base = kvd_index_find(&core->ix, draft->space->tree, &ask->parent, (uint8_t)ask->group);
	if (draft->base != KVD_NONE) {
		return is_parent(core, draft->base, ask->depth) ? KV_OK : KV_ERR_ARG;
	}
	if (ask->depth == 0) {
		return KV_ERR_ARG;
	}
	/* An engine starts a child's put before its ranks have written the parent: the child waits for that key. */
	if (kvd_pending_has_instance(core, draft->space->tree, &ask->parent, ask->group, draft->instance->self)) {
		return KV_OK;
	}
	if (kvd_index_find_aside(&core->ix, draft->space->tree, &ask->parent, (uint8_t)ask->group) != KVD_NONE) {
		kvd_count(core, KV_M_PARENT_UNREADABLE, 1);
		return KV_ERR_PARENT_UNREADABLE;
	}
	/* The next chunk of a prompt, sent before the answer to the last one was read. */
	if (draft->tracked && is_optional(ask) && kvd_ghost_find(core, &ask->parent) == KVD_GHOST_REFUSED) {
		return KV_ERR_NOT_ADMITTED;
	}
	kvd_count(core, KV_M_NO_PARENT, 1);

	return KV_ERR_NO_PARENT;
}

/* Which of the keys are visible: the first ones, each below the one before it, or the request contradicts the tree. */
static kv_status_t count_already(kvd_core_t *core, kvd_draft_t *draft)
{
	draft->already = 0;
	for (uint32_t i = 0; i < draft->n; i++) {
		kv_key_t key = key_at(draft, i);
		uint32_t id = kvd_index_find(&core->ix, draft->space->tree, &key, (uint8_t)draft->ask->group);

		if (kv_key_is_zero(&key) || kv_key_equal(&key, &draft->ask->parent)) { /* no block is its own parent */
			return KV_ERR_ARG;
		}
		if (id == KVD_NONE) {
			continue;
		}
		if (draft->already != i || kvd_index_parent(&core->ix, id) != draft->base ||
		    kvd_is_private(&core->ix, kvd_block_at(&core->ix, id))) {
			return KV_ERR_ARG;
		}
		draft->already++;
		draft->base = id;
	}

	return KV_OK;
}

/* Each key once. Those that are visible are touched. */
static kv_status_t check_unchained_keys(kvd_core_t *core, kvd_draft_t *draft)
{
	kv_status_t status = KV_OK;
	uint32_t checked = 0;

	draft->base = KVD_NONE;
	draft->already = 0;
	/* DUP_CHECK finds a key that is named twice without a table of keys. The second loop takes it back. */
	for (; checked < draft->n && status == KV_OK; checked++) {
		kv_key_t key = key_at(draft, checked);
		uint32_t id = kvd_index_find(&core->ix, draft->space->tree, &key, draft->group->id);
		kvd_block_t *block = id == KVD_NONE ? NULL : kvd_block_at(&core->ix, id);

		if (kv_key_is_zero(&key) || (block && (block->flags & KVD_DUP_CHECK))) {
			status = KV_ERR_ARG;
		} else if (block) {
			block->flags |= KVD_DUP_CHECK;
			draft->already++;
		}
	}
	for (uint32_t i = 0; i < checked && draft->already > 0; i++) {
		kv_key_t key = key_at(draft, i);
		uint32_t id = kvd_index_find(&core->ix, draft->space->tree, &key, draft->group->id);

		if (id != KVD_NONE) {
			kvd_block_at(&core->ix, id)->flags &= (uint8_t)~KVD_DUP_CHECK;
			if (status == KV_OK) {
				kvd_block_touch_path(core, id);
				kvd_private_block_renew(core, id);
			}
		}
	}

	return status;
}

static kv_status_t check_draft(kvd_core_t *core, kvd_draft_t *draft)
{
	const kv_msg_put_start_t *ask = draft->ask;
	kv_status_t status;

	draft->n = ask->keys.len / KV_KEY_BYTES;
	if (draft->n == 0 || draft->n > KV_MAX_BLOCKS || ask->keys.len % KV_KEY_BYTES != 0 ||
	    (ask->event_hashes.len != 0 && ask->event_hashes.len != (uint64_t)draft->n * sizeof(uint64_t)) ||
	    (ask->tokens.len != 0 &&
	     ask->tokens.len != (uint64_t)draft->n * draft->group->block_tokens * sizeof(uint32_t)) ||
	    ask->depth > INT32_MAX - draft->n ||
	    (ask->flags & (KV_PUT_DURABLE | KV_PUT_PRIVATE)) == (KV_PUT_DURABLE | KV_PUT_PRIVATE)) {
		return KV_ERR_ARG;
	}
	status = check_writers(draft);
	if (status == KV_OK && draft->unchained) {
		return check_unchained_keys(core, draft);
	}
	if (status == KV_OK) {
		status = check_parent(core, draft);
	}

	return status == KV_OK ? count_already(core, draft) : status;
}

/* ---- admission ------------------------------------------------------------------------------- */

static int is_visible(const kvd_core_t *core, const kvd_draft_t *draft, uint32_t i)
{
	kv_key_t key = key_at(draft, i);

	return draft->unchained ? kvd_index_find(&core->ix, draft->space->tree, &key, draft->group->id) != KVD_NONE
				: i < draft->already;
}

/* Blocks [from, to) were offered, and taken or refused. */
static void add_offers(kvd_core_t *core, const kvd_draft_t *draft, uint32_t from, uint32_t to, kvd_ghost_kind_t kind)
{
	for (uint32_t i = from; draft->tracked && i < to; i++) {
		kv_key_t key = key_at(draft, i);

		if (!is_visible(core, draft, i)) {
			kvd_admission_add_offer(core, draft->blocks->slot_class, &key, kind);
		}
	}
}

static int is_wanted(kvd_core_t *core, const kvd_draft_t *draft, uint32_t i)
{
	kv_key_t key = key_at(draft, i);

	return is_visible(core, draft, i) || kvd_admission_wants(core, draft->blocks->slot_class, &key);
}

/* How many blocks from the first are wanted. A key names all that is before it: who asked for one block of a path asked
 * for those above, also where the table has forgotten some of them. */
static uint32_t count_wanted(kvd_core_t *core, const kvd_draft_t *draft)
{
	uint32_t wanted = draft->unchained ? 0 : draft->n;

	while (draft->unchained && wanted < draft->n && is_wanted(core, draft, wanted)) {
		wanted++;
	}
	while (!draft->unchained && wanted > 0 && !is_wanted(core, draft, wanted - 1)) {
		wanted--;
	}

	return wanted;
}

/* Shorten the draft to the blocks that are wanted: a child goes where its parent goes. What is cut off here is not
 * counted: the client offers it again, and is refused then, once. */
static kv_status_t admit(kvd_core_t *core, kvd_draft_t *draft)
{
	if (!draft->tracked || !is_optional(draft->ask) ||
	    kvd_admission_wants_all(core, draft->blocks->slot_class, draft->n - draft->already)) {
		return KV_OK;
	}
	draft->n = count_wanted(core, draft);

	return draft->n > 0 ? KV_OK : KV_ERR_NOT_ADMITTED;
}

/* ---- the put --------------------------------------------------------------------------------- */

static kv_status_t make_arrays(kvd_core_t *core, kvd_put_t *put, const kvd_draft_t *draft)
{
	const kv_msg_put_start_t *ask = draft->ask;

	put->entries = kv_alloc(core->env, (size_t)draft->n * sizeof *put->entries);
	put->ended = kv_alloc(core->env, ((size_t)draft->n * draft->writer_count + 7) / 8);
	put->writers = kv_alloc(core->env, draft->writer_count * sizeof *put->writers);
	put->tokens = ask->tokens.len > 0 ? kv_alloc(core->env, ask->tokens.len) : NULL;
	if (!put->entries || !put->ended || !put->writers || (ask->tokens.len > 0 && !put->tokens)) {
		return KV_ERR_NOMEM;
	}

	if (put->tokens) {
		memcpy(put->tokens, ask->tokens.data, ask->tokens.len);
	}
	put->writer_count = draft->writer_count;
	for (uint32_t w = 0; w < put->writer_count; w++) {
		put->writers[w] = writer_at(draft, w);
	}
	for (uint32_t i = 0; i < draft->n; i++) {
		kvd_entry_t *entry = &put->entries[i];

		entry->key = key_at(draft, i);
		entry->event_hash = kv_key_hash(&entry->key);
		if (ask->event_hashes.len > 0) {
			memcpy(&entry->event_hash, ask->event_hashes.data + i * sizeof(uint64_t), sizeof(uint64_t));
		}
		entry->loc.slot = KV_SLOT_NONE;
		entry->pending = entry->next_full = entry->pin = KVD_NONE;
		entry->state = KVD_ENTRY_ALREADY;
	}

	return KV_OK;
}

static void fill_put(kvd_core_t *core, kvd_put_t *put, const kvd_draft_t *draft)
{
	const kv_msg_put_start_t *ask = draft->ask;

	put->instance = draft->instance->self;
	put->member = draft->member->id;
	put->ns = draft->space->ns;
	put->tree = draft->space->tree;
	kvd_tree_at(&core->ix, put->tree)->puts++;
	put->pieces = draft->blocks->pieces;
	put->slot_class = draft->blocks->slot_class;
	put->slot_bytes = core->classes[put->slot_class].slot_bytes;
	put->block_tokens = draft->group->block_tokens;
	put->group = ask->group;
	put->unchained = draft->unchained;
	put->private_blocks = ask->flags & KV_PUT_PRIVATE ? 1 : 0;
	put->durable = ask->flags & KV_PUT_DURABLE ? 1 : 0;
	put->yields = ask->flags & KV_PUT_YIELD ? 1 : 0;
	put->running = 1;
	put->full_head = put->full_tail = KVD_NONE;
	if (!put->unchained) {
		put->n = put->next = put->already = draft->already;
		put->depth0 = ask->depth;
		put->parent = ask->parent;
	}
	put->pin = put->extent = put->wait_pending = KVD_NONE;
	put->stamp = core->stamp;
}

/* Is the entry's block visible? In an unchained put it may be anywhere. KV_MISS: it is not. KV_ERR_BUSY: no more may be
 * pinned. */
static kv_status_t take_already(kvd_core_t *core, kvd_put_t *put, uint32_t index)
{
	uint32_t id = put->unchained
			      ? kvd_index_find(&core->ix, put->tree, &put->entries[index].key, (uint8_t)put->group)
			      : KVD_NONE;

	if (id == KVD_NONE) {
		return KV_MISS;
	}
	if (!kvd_put_may_pin(core, put, id)) {
		return kvd_busy(core, KVD_SHARE_IS_FULL);
	}
	kvd_entry_pin_block(core, put, index, id); /* room for the others must not be made by evicting it */
	put->already++;

	return KV_OK;
}

/* May it have one more slot? */
static kv_status_t check_limits(kvd_core_t *core, const kvd_put_t *put, const kvd_instance_rec_t *instance)
{
	if (kvd_share_pin_room(core, put->ns, put->slot_class) == 0) {
		kvd_count(core, KV_M_SHARE_FULL, 1);
		kvd_count_ns(core, put->ns, KV_NM_SHARE_FULL, 1);
		return kvd_busy(core, KVD_SHARE_IS_FULL);
	}
	if (kvd_share_instance_room(core, instance, core->classes[put->slot_class].memory,
				    core->config.max_unfinished_bytes, instance->unfinished_bytes) < put->slot_bytes) {
		return kvd_busy(core, "the instance has as many unfinished bytes as it may (instance.max_unfinished; "
				      "without it half of its namespace's share, with its leases); end puts, or raise "
				      "it");
	}
	if (put->yields && !kvd_share_may_promote(core, put->ns, put->slot_class)) {
		kvd_count(core, KV_M_PUT_YIELDED, 1);
		return kvd_busy(core, "copies of what is stored elsewhere leave half of the namespace's share to "
				      "hand-overs");
	}

	return KV_OK;
}

/* Slots for the keys that are not visible, up to the limits and the room. */
static kv_status_t take_slots(kvd_core_t *core, kvd_put_t *put, const kvd_draft_t *draft)
{
	kv_status_t status = KV_OK;

	for (uint32_t i = put->n; i < draft->n; i++, put->n++) {
		kvd_entry_t *entry = &put->entries[i];
		kvs_meta_t meta;

		/* Limits first, the slot last: a slot may cost another block its place. */
		status = take_already(core, put, i);
		if (status == KV_OK) {
			continue;
		}
		if (status != KV_MISS) {
			return status;
		}
		if (put->unchained && kvd_pending_is_own(core, put, &entry->key)) {
			return KV_ERR_ARG; /* the same key twice */
		}
		status = check_limits(core, put, draft->instance);
		if (status != KV_OK) {
			return status;
		}
		kvd_put_get_meta(core, put, i, &meta);
		status = kvd_slot_alloc(core, put->slot_class, KVD_CPU, &(kvd_use_t){KVS_PUT, put->id, &meta},
					&entry->loc);
		/* A slab with an open slot cannot be rebalanced, so a namespace over its share may not open another
		 * (decision 025). */
		if (status == KV_OK && !kvd_share_may_open(core, put->slot_class, entry->loc)) {
			kvs_free(core->tier[KVD_CPU], entry->loc);
			status = kvd_busy(core, KVD_SHARE_IS_FULL);
		}
		if (status != KV_OK) {
			entry->loc.slot = KV_SLOT_NONE;
			return status;
		}
		kvd_share_count_unfinished(core, draft->instance, put->slot_class, 1);
		status = kvd_pending_add(core, put, i);
		if (status != KV_OK) {
			kvd_entry_free(core, put, entry);
			return status;
		}
		entry->state = KVD_ENTRY_OPEN;
		entry->left = put->writer_count;
	}

	return KV_OK;
}

/* Header and slots for the ranks, and the ledger. */
static kv_status_t publish_header(kvd_core_t *core, kvd_put_t *put, const kvd_draft_t *draft, uint64_t offset)
{
	kv_lease_header_t *header = (void *)(draft->instance->memory + offset);
	uint32_t *slots = (void *)(header + 1);
	const kvd_entry_t *last = &put->entries[put->n - 1];
	kv_status_t status;

	atomic_store_explicit(&header->state, KV_LEASE_NONE, memory_order_relaxed);
	atomic_store_explicit(&header->id, put->id, memory_order_release);
	header->incarnation = core->config.incarnation;
	header->kind = KV_LEASE_PUT;
	header->group = put->group;
	header->skip = 0;
	header->space = draft->space->id;
	atomic_store_explicit(&header->n, put->n, memory_order_relaxed);
	atomic_store_explicit(&header->ready, put->next, memory_order_relaxed);
	for (uint32_t i = 0; i < put->n; i++) {
		slots[i] = put->entries[i].loc.slot;
	}
	for (uint32_t w = 0; w < put->writer_count; w++) {
		put->writers[w].left = put->n - put->already;
	}
	put->header = header;
	atomic_store_explicit(&header->state, KV_LEASE_ACTIVE, memory_order_release);

	kvd_grant_t grant = {.id = put->id,
			     .instance = draft->instance->id,
			     .header = header,
			     .deepest = last->loc,
			     .deepest_key = &last->key};

	status = core->world.ledger_add(core->world.ctx, &grant);
	put->in_ledger = status == KV_OK ? 1 : 0;

	return status;
}

/* No member has seen the put yet: no notice, no quarantine. */
static void abandon_put(kvd_core_t *core, kvd_put_t *put)
{
	put->running = 0;
	put->durable = 0;
	for (uint32_t i = put->next; i < put->n; i++) {
		if (put->entries[i].state == KVD_ENTRY_OPEN) {
			kvd_pending_remove(core, put, i);
			kvd_entry_free(core, put, &put->entries[i]);
		}
	}
	kvd_put_remove_if_done(core, put);
}

static kv_status_t create_put(kvd_core_t *core, const kvd_draft_t *draft, kvd_put_t **p_put, uint64_t *p_offset)
{
	uint32_t index_of_put;
	kvd_put_t *put;
	kv_status_t status = kvd_obj_pool_get(&core->puts, &index_of_put);

	if (status != KV_OK) {
		return status;
	}
	put = kvd_obj_at(&core->puts, index_of_put);
	put->id = kvd_id_make(core, index_of_put);
	put->self = index_of_put;
	fill_put(core, put, draft);
	kvd_list_push_front(&draft->instance->puts, &core->puts, offsetof(kvd_put_t, of_instance), index_of_put);
	status = make_arrays(core, put, draft);
	/* Before any slot: room for the children must not be made by evicting their parent. */
	if (status == KV_OK && draft->base != KVD_NONE) {
		status = kvd_put_may_pin(core, put, draft->base) ? kvd_put_pin_block(core, put, draft->base)
								 : kvd_busy(core, KVD_SHARE_IS_FULL);
	}
	if (status == KV_OK) {
		status = kvd_extent_take(&draft->instance->extent_alloc,
					 sizeof(kv_lease_header_t) + (uint64_t)draft->n * sizeof(uint32_t),
					 &put->extent, p_offset);
		if (status != KV_OK) {
			(void)kvd_busy(core, KVD_LEASE_AREA_IS_FULL);
			put->extent = KVD_NONE;
		}
	}
	if (status == KV_OK) {
		status = take_slots(core, put, draft);
		status = put->n > 0 && status != KV_ERR_ARG ? KV_OK : status; /* a shorter put is better than none */
	}
	if (status == KV_OK && put->unchained) {
		kvd_put_count_visible(put);
		if (!put->durable) {
			kvd_put_unpin(core, put);
		}
	}
	if (status == KV_OK) {
		status = publish_header(core, put, draft, *p_offset);
	}
	if (status != KV_OK) {
		abandon_put(core, put);
		return status;
	}
	kvd_put_extend(core, put);
	*p_put = put;

	return KV_OK;
}

kv_status_t kvd_put_start(kvd_core_t *core, uint32_t ns, kvd_member_t member, const kv_msg_put_start_t *ask,
			  kv_msg_put_start_reply_t *reply)
{
	kvd_draft_t draft = {.ask = ask};
	uint64_t offset;
	kvd_put_t *put;
	kv_status_t status = kvd_member_check(core, ns, member, &draft.member, &draft.instance);

	if (status == KV_OK) {
		status = kvd_space_find(core, ns, ask->space, ask->epoch, &draft.space);
	}
	if (status == KV_OK) {
		status = kvd_space_group(draft.space, ask->group, &draft.group);
	}
	if (status == KV_OK) {
		core->stamp++;
		draft.blocks = kvd_blocks_of(draft.space, draft.group);
		draft.unchained = kvd_group_unchained(draft.group) || (ask->flags & KV_PUT_PRIVATE) ? 1 : 0;
		draft.tracked = kvd_admission_applies(core, draft.blocks->slot_class) && !(ask->flags & KV_PUT_PRIVATE);
		status = check_draft(core, &draft);
	}
	if (status == KV_OK) {
		status = admit(core, &draft);
	}
	if (status == KV_ERR_NOT_ADMITTED) {
		add_offers(core, &draft, 0, ask->keys.len / KV_KEY_BYTES, KVD_GHOST_REFUSED);
	}
	if (status != KV_OK) {
		return status;
	}

	if (draft.base != KVD_NONE) {
		kvd_block_touch_path(core, draft.base);
	}
	kvd_count(core, KV_M_PUT_ALREADY, draft.already);
	*reply = (kv_msg_put_start_reply_t){.n = draft.already, .already = draft.already};
	if (draft.already == draft.n && !(ask->flags & KV_PUT_DURABLE)) {
		return KV_OK;
	}
	status = create_put(core, &draft, &put, &offset);
	if (status == KV_ERR_BUSY || (status == KV_OK && put->n < draft.n)) {
		kvd_put_revoke_oldest(core, ns); /* so that a later request finds room (decision 027) */
	}
	if (status != KV_OK) {
		kvd_count(core, KV_M_PUT_BUSY, 1);
		return status;
	}

	add_offers(core, &draft, 0, put->n, KVD_GHOST_OFFERED);
	kvd_count(core, KV_M_PUTS_STARTED, 1);
	kvd_count(core, KV_M_PUT_BUSY, put->n < draft.n ? 1 : 0);
	reply->put = put->id;
	reply->n = put->n;
	reply->already = put->already;
	reply->offset = offset;
	if (put->next == put->n) {
		kvd_put_queue(core, put); /* nothing to write: it ends with this request's answer or the next tick */
	} else if (draft.base == KVD_NONE && put->depth0 > 0) {
		(void)kvd_pending_wait(core, put);
	}

	return KV_OK;
}
