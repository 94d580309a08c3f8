#include "core/block/block.h"
#include "core/block/events.h"
#include "core/block/quarantine.h"
#include "core/base/core_impl.h"
#include "core/put/pending.h"
#include "core/put/put.h"
#include "core/put/put_impl.h"
#include "core/base/find.h"
#include "core/base/share.h"

static kvd_put_t *put_at(const kvd_core_t *core, uint32_t self)
{
	return kvd_obj_at(&core->puts, self);
}

kvd_put_t *kvd_put_find(kvd_core_t *core, uint64_t id)
{
	uint32_t index = kvd_id_index(id);
	kvd_put_t *put;

	if (id == 0 || index >= core->puts.made) {
		return NULL;
	}
	put = kvd_obj_at(&core->puts, index);

	return put->id == id ? put : NULL;
}

void kvd_put_get_meta(kvd_core_t *core, const kvd_put_t *put, uint32_t index, kvs_meta_t *meta)
{
	const kvd_tree_t *tree = kvd_tree_at(&core->ix, put->tree);

	*meta = (kvs_meta_t){.key = put->entries[index].key,
			     .epoch = tree->epoch,
			     .event_hash = put->entries[index].event_hash,
			     .depth = kvd_put_depth(put, index),
			     .group = (uint8_t)put->group,
			     .transient = put->private_blocks != 0};
	if (!put->unchained) {
		meta->parent = index > 0 ? put->entries[index - 1].key : put->parent;
	}
	memcpy(meta->root, tree->root, sizeof meta->root);
}

/* ---- running puts of a namespace ------------------------------------------------------------- */

static void stop_expiry(kvd_core_t *core, kvd_put_t *put)
{
	if (put->expiry_ns != 0) {
		kvd_list_remove(&core->ns[put->ns]->puts, &core->puts, offsetof(kvd_put_t, of_ns), put->self);
		put->expiry_ns = 0;
	}
}

void kvd_put_extend(kvd_core_t *core, kvd_put_t *put)
{
	/* All puts have the same time to live, so the list stays ordered by it when the newest goes to its end. */
	stop_expiry(core, put);
	put->expiry_ns = core->now_ns + core->config.put_ttl_ns;
	kvd_list_push(&core->ns[put->ns]->puts, &core->puts, offsetof(kvd_put_t, of_ns), put->self);
}

void kvd_put_revoke_oldest(kvd_core_t *core, uint32_t ns)
{
	uint32_t oldest = core->ns[ns]->puts.head;

	if (oldest != KVD_NONE && put_at(core, oldest)->expiry_ns <= core->now_ns) {
		kvd_count(core, KV_M_PUTS_EXPIRED, 1);
		kvd_count_ns(core, ns, KV_NM_PUTS_EXPIRED, 1);
		kvd_put_finish(core, put_at(core, oldest), KV_ERR_REVOKED);
	}
}

/* ---- pins ------------------------------------------------------------------------------------ */

static kvd_pin_t *pin_at(const kvd_core_t *core, uint32_t id)
{
	return kvd_obj_at(&core->pins, id);
}

int kvd_put_may_pin(const kvd_core_t *core, const kvd_put_t *put, uint32_t block)
{
	uint32_t depth = kvd_depth_of(&core->ix, kvd_block_at(&core->ix, block));

	return depth - kvd_index_depth_pinned(&core->ix, block, KVD_PINS_ALL) <=
	       kvd_share_pin_room(core, put->ns, put->slot_class);
}

kv_status_t kvd_put_pin_block(kvd_core_t *core, kvd_put_t *put, uint32_t block)
{
	kv_status_t status = KV_OK;

	if (put->pin == KVD_NONE) {
		status = kvd_pin_create(core, block, KVD_PIN_PUT, put->id, &put->pin);
		put->pin = status == KV_OK ? put->pin : KVD_NONE;
	} else {
		kvd_pin_move(core, put->pin, block);
	}

	return status;
}

void kvd_entry_pin_block(kvd_core_t *core, kvd_put_t *put, uint32_t index, uint32_t block)
{
	kvd_entry_t *entry = &put->entries[index];

	if (kvd_pin_create(core, block, KVD_PIN_PUT, put->id, &entry->pin) != KV_OK) {
		entry->pin = KVD_NONE;
		return;
	}
	pin_at(core, entry->pin)->entry = index;
	put->pinned_entries++;
}

static void unpin_entry(kvd_core_t *core, kvd_put_t *put, uint32_t index)
{
	kvd_pin_drop(core, put->entries[index].pin);
	put->entries[index].pin = KVD_NONE;
	put->pinned_entries--;
}

void kvd_put_drop_pin(kvd_core_t *core, uint32_t pin)
{
	kvd_put_t *put = kvd_put_find(core, pin_at(core, pin)->owner);

	if (put->unchained) {
		unpin_entry(core, put, pin_at(core, pin)->entry);
	} else {
		kvd_pin_drop(core, put->pin);
		put->pin = KVD_NONE;
	}
	core->durable_changed |= KVD_DURABLE_DROPPED;
}

void kvd_put_unpin(kvd_core_t *core, kvd_put_t *put)
{
	if (put->pin != KVD_NONE) {
		kvd_pin_drop(core, put->pin);
		put->pin = KVD_NONE;
	}
	for (uint32_t i = 0; put->pinned_entries > 0; i++) {
		if (put->entries[i].pin != KVD_NONE) {
			unpin_entry(core, put, i);
		}
	}
}

/* ---- entries --------------------------------------------------------------------------------- */

void kvd_entry_free(kvd_core_t *core, kvd_put_t *put, kvd_entry_t *entry)
{
	kvs_free(core->tier[KVD_CPU], entry->loc);
	entry->loc.slot = KV_SLOT_NONE;
	kvd_share_count_unfinished(core, kvd_instance_at(core, put->instance), put->slot_class, 0);
}

void kvd_entry_push_full(kvd_put_t *put, uint32_t index)
{
	put->entries[index].next_full = KVD_NONE;
	if (put->full_head == KVD_NONE) {
		put->full_head = index;
	} else {
		put->entries[put->full_tail].next_full = index;
	}
	put->full_tail = index;
}

uint32_t kvd_entry_pop_full(kvd_put_t *put)
{
	uint32_t index = put->full_head;

	if (index != KVD_NONE) {
		put->full_head = put->entries[index].next_full;
	}

	return index;
}

static int is_visible(const kvd_entry_t *entry)
{
	return entry->state == KVD_ENTRY_ALREADY || entry->state == KVD_ENTRY_VISIBLE ||
	       entry->state == KVD_ENTRY_DUPLICATE;
}

void kvd_put_count_visible(kvd_put_t *put)
{
	while (put->next < put->n && is_visible(&put->entries[put->next])) {
		put->next++;
	}
}

uint32_t kvd_put_count_unfinished(const kvd_put_t *put)
{
	uint32_t count = 0;

	for (uint32_t i = put->next; i < put->n; i++) {
		count += is_visible(&put->entries[i]) ? 0 : 1;
	}

	return count;
}

/* ---- a put ends ------------------------------------------------------------------------------ */

/* Header and room in the lease area. */
static void retire_header(kvd_core_t *core, kvd_put_t *put)
{
	if (put->header) {
		kvd_grant_revoke(put->header);
		put->header = NULL;
	}
	if (put->extent != KVD_NONE) {
		kvd_extent_give(&kvd_instance_at(core, put->instance)->extent_alloc, put->extent);
		put->extent = KVD_NONE;
	}
}

static void free_arrays(kvd_core_t *core, kvd_put_t *put)
{
	kv_free(core->env, put->entries);
	kv_free(core->env, put->ended);
	kv_free(core->env, put->writers);
	kv_free(core->env, put->tokens);
}

static void remove_put(kvd_core_t *core, kvd_put_t *put)
{
	kvd_instance_rec_t *instance = kvd_instance_at(core, put->instance);

	kvd_events_flush(core); /* they may borrow its tokens */
	kvd_put_unqueue(core, put);
	kvd_pending_unwait(core, put);
	kvd_put_unpin(core, put);
	retire_header(core, put);
	if (put->in_ledger) {
		core->world.ledger_remove(core->world.ctx, put->id);
	}
	kvd_list_remove(&instance->puts, &core->puts, offsetof(kvd_put_t, of_instance), put->self);
	free_arrays(core, put);
	/* A hidden tree without blocks stays until its last put has ended. */
	kvd_tree_at(&core->ix, put->tree)->puts--;
	if (!kvd_tree_at(&core->ix, put->tree)->leaving) {
		kvd_tree_release(core, put->tree);
	}
	put->id = 0;
	kvd_obj_pool_put(&core->puts, put->self);
}

void kvd_put_remove_if_done(kvd_core_t *core, kvd_put_t *put)
{
	if (!put->running && put->quarantined == 0 && !put->durable) {
		remove_put(core, put);
	}
}

/* Could this rank still write into the put? */
static int is_writer(const kvd_put_t *put, uint32_t rank)
{
	for (uint32_t w = 0; w < put->writer_count; w++) {
		if (put->writers[w].rank == rank && put->writers[w].left > 0) {
			return 1;
		}
	}

	return 0;
}

/* Members that may still write: those whose rank has not ended its ranges; if no member has such a rank, all of the
 * instance. They get PUT_DONE: only they know whether they ever used the put, and the slots wait for their DRAINED. */
static void find_undrained(kvd_core_t *core, kvd_put_t *put, const kv_msg_t *msg)
{
	const kvd_instance_rec_t *instance = kvd_instance_at(core, put->instance);
	uint32_t writers = 0;

	for (int all = 0; all < 2 && writers == 0; all++) {
		for (uint32_t local = 0; local < KVD_INSTANCE_MEMBERS; local++) {
			const kvd_member_rec_t *member = instance->members[local] == KVD_NONE
								 ? NULL
								 : kvd_obj_at(&core->members, instance->members[local]);

			if (member && (all || (member->role != 0 && is_writer(put, member->rank)))) {
				put->undrained[local / 64] |= UINT64_C(1) << local % 64;
				writers++;
				if (member->id != put->member) {
					kvd_member_notify(core, member->id, KV_CODE_PUT_DONE, msg);
				}
			}
		}
	}
}

/* An entry that did not become visible. */
static void lose_entry(kvd_core_t *core, kvd_put_t *put, uint32_t index)
{
	kvd_entry_t *entry = &put->entries[index];

	kvd_pending_remove(core, put, index);
	if (entry->state == KVD_ENTRY_OPEN) {
		/* Its writers may still write into the slot, with copies of a device too: it is not used again before
		 * they are drained or gone. */
		(void)kvs_set_state(core->tier[KVD_CPU], entry->loc, KVS_QUARANTINED);
		entry->state = KVD_ENTRY_QUARANTINED;
		put->quarantined++;
	} else if (entry->state == KVD_ENTRY_FULL) {
		kvd_entry_free(core, put, entry);
		entry->state = KVD_ENTRY_LOST;
	} else if (entry->state == KVD_ENTRY_WRITE_THROUGH) { /* the write in flight gives the slot back */
		kvd_share_count_unfinished(core, kvd_instance_at(core, put->instance), put->slot_class, 0);
		entry->state = KVD_ENTRY_LOST;
	}
}

void kvd_put_finish(kvd_core_t *core, kvd_put_t *put, kv_status_t why)
{
	kv_msg_t msg = {.put_done = {.put = put->id, .n = put->next, .status = why}};
	uint32_t lost = kvd_put_count_unfinished(put);

	stop_expiry(core, put);
	put->running = 0;
	put->status = why;
	kvd_pending_unwait(core, put);
	kvd_grant_revoke(put->header); /* before any slot is free */
	for (uint32_t i = put->next; i < put->n; i++) {
		lose_entry(core, put, i);
	}
	retire_header(core, put);
	if (why == KV_ERR_REVOKED) {
		kvd_count(core, KV_M_PUTS_REVOKED, 1);
	} else if (why == KV_ERR_PARENT_LOST) {
		kvd_count(core, KV_M_PARENT_LOST, lost);
	} else if (why == KV_ERR_PARENT_UNREADABLE) {
		kvd_count(core, KV_M_PARENT_UNREADABLE, 1);
	} else if (why == KV_ERR_NOT_ADMITTED) {
		kvd_count(core, KV_M_NOT_ADMITTED, lost);
	}
	kvd_member_notify(core, put->member, KV_CODE_PUT_DONE, &msg);

	if (put->quarantined > 0) {
		find_undrained(core, put, &msg);
	}
	/* A durable put keeps its pins until its acknowledgement is decided: a block that is evicted meanwhile could
	 * not be acknowledged. */
	if (put->durable) {
		core->durable_owed++;
		core->durable_changed |= KVD_DURABLE_STORED;
	} else {
		kvd_put_unpin(core, put);
	}
	kvd_put_remove_if_done(core, put);
}

/* Those that wait for one of its keys have been made with the same, and end like it. */
void kvd_put_withdraw(kvd_core_t *core, kvd_put_t *put)
{
	put->withdrawn = 1;
	kvd_put_finish(core, put, KV_ERR_REVOKED);
}

void kvd_put_withdraw_pin(kvd_core_t *core, uint32_t pin)
{
	kvd_put_t *put = kvd_put_find(core, pin_at(core, pin)->owner);

	/* One that owes DURABLE has its pin still, and comes back. */
	if (put->running && !put->unchained) {
		kvd_put_withdraw(core, put);
	} else {
		kvd_put_drop_pin(core, pin);
	}
}

void kvd_puts_withdraw_key(kvd_core_t *core, uint32_t tree, const kv_key_t *key, uint32_t group)
{
	uint32_t put;

	while ((put = kvd_pending_first(core, tree, key, group)) != KVD_NONE) {
		kvd_put_withdraw(core, put_at(core, put));
	}
}

static uint32_t drain_member(kvd_core_t *core, kvd_put_t *put, uint32_t local, int before)
{
	const uint64_t bit = UINT64_C(1) << local % 64;
	uint64_t undrained = 0;
	uint32_t freed = 0;

	if (put->running || put->quarantined == 0) {
		return 0;
	}
	/* What a member says of the time before its present connection settles what older ones owed, and no more
	 * (decision 030). */
	put->undrained_older[local / 64] &= ~bit;
	if (!before) {
		put->undrained[local / 64] &= ~bit;
	}
	for (uint32_t w = 0; w < KVD_MEMBER_WORDS; w++) {
		undrained |= put->undrained[w] | put->undrained_older[w];
	}
	if (undrained != 0) {
		return 0;
	}
	for (uint32_t i = put->next; i < put->n; i++) {
		if (put->entries[i].state == KVD_ENTRY_QUARANTINED) {
			kvd_entry_free(core, put, &put->entries[i]);
			put->entries[i].state = KVD_ENTRY_LOST;
			freed++;
		}
	}
	put->quarantined = 0;
	kvd_put_remove_if_done(core, put);

	return freed;
}

static void move_undrained(kvd_put_t *put, uint32_t from, uint32_t to)
{
	uint64_t bit = UINT64_C(1) << from % 64;

	if ((put->undrained[from / 64] | put->undrained_older[from / 64]) & bit) {
		put->undrained[from / 64] &= ~bit;
		put->undrained_older[from / 64] &= ~bit;
		put->undrained_older[to / 64] |= UINT64_C(1) << to % 64;
	}
}

static void destroy_put(kvd_core_t *core, kvd_put_t *put)
{
	if (put->running) {
		kvd_put_finish(core, put, KV_ERR_REVOKED);
		return; /* gone, or LINGERING in the instance's list: the caller comes back */
	}
	if (put->durable) {
		put->durable = 0;
		core->durable_owed--;
	}
	for (uint32_t i = put->next; i < put->n; i++) {
		if (put->entries[i].state == KVD_ENTRY_QUARANTINED) {
			kvd_entry_free(core, put, &put->entries[i]);
		}
	}
	put->quarantined = 0;
	remove_put(core, put);
}

/* ---- all puts of an instance ----------------------------------------------------------------- */

void kvd_puts_revoke(kvd_core_t *core, const kvd_instance_rec_t *instance, const kvd_member_rec_t *member)
{
	for (uint32_t id = instance->puts.head; id != KVD_NONE;) {
		kvd_put_t *put = put_at(core, id);

		id = put->of_instance.next;
		if (put->running && (!member || put->member == member->id || is_writer(put, member->rank))) {
			kvd_put_finish(core, put, KV_ERR_REVOKED);
		}
	}
}

uint32_t kvd_put_drain_member(kvd_core_t *core, uint64_t id, const kvd_member_rec_t *member)
{
	kvd_put_t *put = kvd_put_find(core, id);

	return put && put->instance == member->instance ? drain_member(core, put, member->local, 0) : 0;
}

uint32_t kvd_puts_drain_member(kvd_core_t *core, const kvd_instance_rec_t *instance, uint32_t local, int before)
{
	uint32_t freed = 0;

	for (uint32_t id = instance->puts.head; id != KVD_NONE;) {
		kvd_put_t *put = put_at(core, id);

		id = put->of_instance.next;
		freed += drain_member(core, put, local, before);
	}

	return freed;
}

void kvd_puts_move_undrained(kvd_core_t *core, const kvd_instance_rec_t *instance, uint32_t from, uint32_t to)
{
	for (uint32_t id = instance->puts.head; id != KVD_NONE; id = put_at(core, id)->of_instance.next) {
		move_undrained(put_at(core, id), from, to);
	}
}

int kvd_puts_have_quarantined_slots(const kvd_core_t *core, const kvd_instance_rec_t *instance)
{
	uint32_t id = instance->puts.head;

	while (id != KVD_NONE && put_at(core, id)->quarantined == 0) {
		id = put_at(core, id)->of_instance.next;
	}

	return id != KVD_NONE;
}

void kvd_puts_destroy(kvd_core_t *core, const kvd_instance_rec_t *instance)
{
	while (instance->puts.head != KVD_NONE) {
		destroy_put(core, put_at(core, instance->puts.head));
	}
}

void kvd_puts_free(kvd_core_t *core)
{
	for (uint32_t id = core->instance_list.head; id != KVD_NONE; id = kvd_instance_at(core, id)->of_core.next) {
		for (uint32_t p = kvd_instance_at(core, id)->puts.head; p != KVD_NONE;) {
			kvd_put_t *put = kvd_obj_at(&core->puts, p);

			p = put->of_instance.next;
			free_arrays(core, put);
		}
	}
}

/* ---- requests -------------------------------------------------------------------------------- */

kv_status_t kvd_put_revoke(kvd_core_t *core, kvd_member_t member_id, const kv_msg_put_revoke_t *ask,
			   kv_msg_put_revoke_reply_t *reply)
{
	const kvd_member_rec_t *member = kvd_member_find(core, member_id);
	kvd_put_t *put = member ? kvd_put_find(core, ask->put) : NULL;

	if (!put || put->instance != member->instance || !put->running) {
		return member ? KV_ERR_NOT_FOUND : KV_ERR_NOT_JOINED;
	}
	reply->revoked = kvd_put_count_unfinished(put);
	kvd_put_finish(core, put, KV_ERR_REVOKED);

	return KV_OK;
}

kv_status_t kvd_put_keep(kvd_core_t *core, kvd_member_t member_id, const kv_msg_keep_t *ask, kv_msg_keep_reply_t *reply)
{
	const kvd_member_rec_t *member = kvd_member_find(core, member_id);
	kvd_put_t *put = member ? kvd_put_find(core, ask->put) : NULL;

	if (!put || put->instance != member->instance) {
		return member ? KV_ERR_NOT_FOUND : KV_ERR_NOT_JOINED;
	}
	if (!put->running) {
		return KV_ERR_REVOKED;
	}
	kvd_put_extend(core, put);
	reply->ttl_ms = (uint32_t)(core->config.put_ttl_ns / 1000000u);

	return KV_OK;
}
