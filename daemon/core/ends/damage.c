#include "core/block/block.h"
#include "core/ends/damage.h"
#include "core/block/quarantine.h"
#include "core/block/visibility.h"
#include "core/base/core_impl.h"
#include "core/handover/handover.h"
#include "core/lease/lease.h"
#include "core/put/put.h"
#include "core/base/find.h"

#define DROP_STEPS 4096u

/* A leaf of the set at or below the block. KVD_NONE: there is none, or *p_steps are used up. */
static uint32_t find_leaf_below(const kvd_core_t *core, uint32_t id, kvd_set_t t, uint32_t *p_steps)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);
	const kvd_node_t *node = kvd_node_of(&core->ix, block);

	if (!kvd_in_set(&core->ix, block, t)) {
		return KVD_NONE;
	}
	while (node->n[t] == node->len && node->children_in[t] > 0) {
		const kvd_node_t *below = kvd_node_at(&core->ix, node->children.head);

		while (below->n[t] == 0 || (below->flags & KVD_NODE_DEAD)) {
			below = kvd_node_at(&core->ix, below->siblings.next);
			if (--*p_steps == 0) {
				return KVD_NONE;
			}
		}
		node = below;
		if (--*p_steps == 0) {
			return KVD_NONE;
		}
	}

	return --*p_steps == 0 ? KVD_NONE : node->ids[node->n[t] - 1];
}

/* Of a put, which goes on without it, or of a hand-over entry. */
static void drop_pin(kvd_core_t *core, uint32_t pin, kv_status_t why)
{
	if (((const kvd_pin_t *)kvd_obj_at(&core->pins, pin))->kind == KVD_PIN_HANDOVER) {
		kvd_handover_lose_block(core, pin, why);
	} else {
		kvd_put_drop_pin(core, pin);
	}
}

kv_status_t kvd_block_evict_below(kvd_core_t *core, uint32_t id, kvd_set_t t, int force)
{
	uint32_t steps = DROP_STEPS, leaf = find_leaf_below(core, id, t, &steps);
	const kvd_block_t *block = leaf == KVD_NONE ? NULL : kvd_block_at(&core->ix, leaf);

	while (block && force && !kvd_block_is_evictable(&core->ix, block, t) && block->pins.head != KVD_NONE) {
		const kvd_pin_t *pin = kvd_obj_at(&core->pins, block->pins.head);
		kvd_lease_t *lease = pin->kind == KVD_PIN_LEASE ? kvd_lease_find(core, pin->owner) : NULL;

		if (lease) {
			kvd_lease_end(core, lease, KV_ERR_REVOKED);
		} else {
			drop_pin(core, block->pins.head, KV_ERR_REVOKED);
		}
	}
	if (!block || !kvd_block_is_evictable(&core->ix, block, t)) {
		return KV_MISS;
	}
	kvd_block_evict(core, leaf, t, force ? KV_NM_EVICTED_FOR_OTHERS : KV_NM_EVICTED);

	return KV_OK;
}

/* ---- bad bytes in memory --------------------------------------------------------------------- */

/* Every lease whose path goes through the block reads it, or something that goes with it. */
static void revoke_leases_through(kvd_core_t *core, uint32_t id)
{
	uint64_t question = kvd_index_new_question(&core->ix);

	/* Leases pinned here: those that end here, and unchained ones that have the block. */
	for (uint32_t c = kvd_block_at(&core->ix, id)->pins.head; c != KVD_NONE;) {
		const kvd_pin_t *pin = kvd_obj_at(&core->pins, c);
		kvd_lease_t *lease = pin->kind == KVD_PIN_LEASE ? kvd_lease_find(core, pin->owner) : NULL;

		c = pin->of_block.next;
		if (lease) {
			kvd_lease_end(core, lease, KV_ERR_REVOKED);
			c = kvd_block_at(&core->ix, id)->pins.head; /* the lease may have had several pins here */
		}
	}
	/* Others hang on a block anywhere below, and no block knows those: all leases are asked. They share the runs'
	 * answers to one question, so no run is visited twice (decision 026). */
	for (uint32_t i = core->instance_list.head; i != KVD_NONE; i = kvd_instance_at(core, i)->of_core.next) {
		for (uint32_t l = kvd_instance_at(core, i)->leases.head; l != KVD_NONE;) {
			kvd_lease_t *lease = kvd_obj_at(&core->leases, l);

			l = lease->of_instance.next;
			if (!lease->unchained &&
			    kvd_index_passes_through(&core->ix, kvd_lease_deepest(core, lease), id, question)) {
				kvd_lease_end(core, lease, KV_ERR_REVOKED);
			}
		}
	}
}

/* No lease reads it now. Puts and hand-over entries that are pinned to it go on with the disk copy, if there is one. */
static void drop_cpu_leaf(kvd_core_t *core, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);

	while (!kvd_in_set(&core->ix, block, KVD_DISK) && block->pins.head != KVD_NONE) {
		drop_pin(core, block->pins.head, KV_ERR_CORRUPT);
	}
	core->durable_changed |= KVD_DURABLE_DROPPED;
	if (block->io == KVD_NONE) {
		kvd_block_evict(core, id, KVD_CPU, KV_NM_EVICTED);
		return;
	}
	kvd_block_detach_io(core, id); /* it is being written: the write takes the slot with it */
	kvd_block_leave(core, id, KVD_CPU);
	kvd_block_forget_unused(core, id);
}

void kvd_quarantine_cpu_copy(kvd_core_t *core, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);
	uint32_t steps = DROP_STEPS, leaf;

	if (kvd_in_set(&core->ix, block, KVD_DISK) && !kvd_tree_of(&core->ix, block)->hidden &&
	    !kvd_index_is_dead(&core->ix, block)) {
		revoke_leases_through(core, id);
		while ((leaf = find_leaf_below(core, id, KVD_CPU, &steps)) != KVD_NONE) {
			drop_cpu_leaf(core, leaf);
		}
		if (steps > 0) {
			return;
		}
	}
	kvd_quarantine_subtree(core, id);
}

kv_status_t kvd_report_bad_block(kvd_core_t *core, kvd_member_t member_id, const kv_msg_bad_block_t *ask,
				 kv_msg_bad_block_reply_t *reply)
{
	kvd_member_rec_t *member = kvd_member_find(core, member_id);
	kvd_lease_t *lease = member ? kvd_lease_find_own(core, member, ask->lease) : NULL;
	uint32_t id, depth;

	if (!lease) {
		return member ? KV_ERR_NOT_FOUND : KV_ERR_NOT_JOINED;
	}
	if (ask->index >= lease->n - lease->skip || lease->skip + ask->index >= lease->ready) {
		return KV_ERR_ARG;
	}
	depth = lease->skip + ask->index + 1;
	id = kvd_lease_block(core, lease, depth);
	reply->quarantined = lease->unchained ? 1 : lease->n - depth + 1; /* at the least: those of this lease */
	kv_logf(core->env, KV_LOG_WARN, "core", "a member found wrong bytes in a leased block, instance %s depth %u",
		kvd_instance_at(core, lease->instance)->name, depth);
	kvd_count(core, KV_M_BAD_BLOCKS, 1);
	kvd_quarantine_cpu_copy(core, id);

	return KV_OK;
}

/* ---- disk copies that the tier no longer vouches for ----------------------------------------- */

/* It is in memory too, and nothing below it is on disk: it is written again. */
static void drop_disk_leaf(kvd_core_t *core, uint32_t id)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);

	kvd_block_leave(core, id, KVD_DISK);
	kvs_free(core->tier[KVD_DISK], block->disk);
	block->disk.slot = KV_SLOT_NONE;
	kvd_block_queue_write(core, id);
}

/* Stored, and waiting for its parent. */
static void drop_unlinked_copy(kvd_core_t *core, uint32_t id)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);

	block->flags &= (uint8_t)~KVD_DISK_UNLINKED;
	core->disk_unlinked--;
	kvs_free(core->tier[KVD_DISK], block->disk);
	block->disk.slot = KV_SLOT_NONE;
	kvd_block_requeue_below(core, id);
	kvd_block_queue_write(core, id);
}

void drop_disk_copy(kvd_core_t *core, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);
	uint32_t steps = DROP_STEPS, leaf;

	if (kvd_tree_of(&core->ix, block)->hidden || kvd_index_is_dead(&core->ix, block)) {
		return; /* it is being taken down, its slot with it */
	}
	if (block->flags & KVD_DISK_UNLINKED) {
		drop_unlinked_copy(core, id);
		return;
	}
	while ((leaf = find_leaf_below(core, id, KVD_DISK, &steps)) != KVD_NONE) {
		uint32_t in_memory = kvd_index_depth_in(&core->ix, leaf, KVD_CPU);
		uint32_t depth = kvd_depth_of(&core->ix, block);

		/* The blocks in memory are a prefix of the path to the leaf: what is deeper is only on disk, and is
		 * lost. */
		if (kvd_in_set(&core->ix, kvd_block_at(&core->ix, leaf), KVD_CPU)) {
			drop_disk_leaf(core, leaf);
			continue;
		}
		kvd_quarantine_subtree(core,
				       kvd_index_ancestor(&core->ix, leaf, in_memory < depth ? depth : in_memory + 1));
		if (kvd_index_is_dead(&core->ix, block)) {
			return;
		}
	}
	/* Too many blocks below it for one call: hidden at once, and taken down in quanta. */
	if (steps == 0) {
		kvd_quarantine_subtree(core, id);
	}
}

/* ---- reports of the disk tier ---------------------------------------------------------------- */

/* The tier no longer vouches for a slot. A slot without a block belongs to a transfer, which frees it. */
static void on_disk_lost(void *arg, kvs_loc_t loc, const kv_key_t *key, uint8_t group)
{
	kvd_core_t *core = arg;
	uint32_t id = kvd_index_find_on_disk(&core->ix, key, group, loc);

	if (id != KVD_NONE) {
		drop_disk_copy(core, id);
		core->disk_lost = 1;
	}
}

static void on_disk_readable(void *arg, kvs_loc_t loc, const kv_key_t *key, uint8_t group, int readable)
{
	kvd_core_t *core = arg;
	uint32_t id = kvd_index_find_on_disk(&core->ix, key, group, loc);

	if (id != KVD_NONE) {
		(readable ? kvd_block_take_back : kvd_block_set_aside)(core, id);
	}
}

void kvd_watch_disk(kvd_core_t *core)
{
	kvs_tier_watch(core->tier[KVD_DISK],
		       &(kvs_watch_t){.arg = core, .lost = on_disk_lost, .readable = on_disk_readable});
}
