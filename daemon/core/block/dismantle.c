#include "core/core_impl.h"

#define QUANTUM_BLOCKS 64u
#define DROP_STEPS     4096u

void kvd_hide_tree(kvd_core_t *core, uint32_t id)
{
	kvd_tree_t *tree = kvd_tree_at(&core->ix, id);

	tree->hidden = tree->leaving = 1;
	tree->link = core->dead_trees;
	core->dead_trees = id;
}

void kvd_quarantine(kvd_core_t *core, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);
	kvd_node_t *node, *above;
	uint32_t top;

	if (kvd_tree_of(&core->ix, block)->hidden || kvd_index_dead(&core->ix, block)) {
		return;
	}
	(void)kvd_index_cut(&core->ix, id); /* without memory the run's first blocks go too */
	top = block->node;
	node = kvd_node_at(&core->ix, top);
	kvd_index_kill(&core->ix, top);
	kvd_queue_remove(&core->ix, top);
	/* First come, first taken down: one that lies below a later one has gone before it. */
	kvd_list_push(&core->dead_nodes, &core->ix.nodes, offsetof(kvd_node_t, queue), top);

	if (node->parent == KVD_NONE) {
		return;
	}
	above = kvd_node_at(&core->ix, node->parent);
	kvd_hold(core, above->ids[above->len - 1]); /* leases that end below still read what lies above */
	for (kvd_set_t t = KVD_CPU; t < KVD_TIERS; t++) {
		uint32_t last = above->ids[above->len - 1];

		if (node->n[t] > 0) {
			above->kids[t]--;
			core->policy->join(&core->ix,
					   &core->classes[kvd_tree_at(&core->ix, node->tree)->slot_class].order[t], t,
					   last, core->stamp);
		}
	}
}

/* ---- a bad CPU copy of a block that is on disk ----------------------------------------------- */

/* Every lease whose path goes through the block reads it, or something that goes with it. */
static void revoke_through(kvd_core_t *core, uint32_t id)
{
	uint64_t question = kvd_index_question(&core->ix);

	for (uint32_t c = kvd_block_at(&core->ix, id)->claims.head;
	     c != KVD_NONE;) { /* those that end here, and all that have it by itself */
		const kvd_claim_t *claim = kvd_pool_at(&core->claims, c);
		kvd_lease_t *lease = claim->kind == KVD_CLAIM_LEASE ? kvd_lease_find(core, claim->owner) : NULL;

		c = claim->of_block.next;
		if (lease) {
			kvd_lease_end(core, lease, KV_ERR_REVOKED);
			c = kvd_block_at(&core->ix, id)->claims.head; /* it may have had several */
		}
	}
	for (uint32_t i = core->instance_list.head; i != KVD_NONE; i = kvd_instance_at(core, i)->of_core.next) {
		for (uint32_t l = kvd_instance_at(core, i)->leases.head; l != KVD_NONE;) {
			kvd_lease_t *lease = kvd_pool_at(&core->leases, l);

			l = lease->of_instance.next;
			if (!lease->alone &&
			    kvd_index_passes(&core->ix, kvd_lease_block(core, lease, lease->n), id, question)) {
				kvd_lease_end(core, lease, KV_ERR_REVOKED);
			}
		}
	}
}

/* A leaf of the set at or below the block. KVD_NONE: there is none, or *p_steps are used up. */
static uint32_t leaf_below(const kvd_core_t *core, uint32_t id, kvd_set_t t, uint32_t *p_steps)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);
	const kvd_node_t *node = kvd_node_of(&core->ix, block);

	if (!kvd_in_set(&core->ix, block, t)) {
		return KVD_NONE;
	}
	while (node->n[t] == node->len && node->kids[t] > 0) {
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

kv_status_t kvd_evict_below(kvd_core_t *core, uint32_t id, kvd_set_t t, int force)
{
	uint32_t steps = DROP_STEPS, leaf = leaf_below(core, id, t, &steps);
	const kvd_block_t *block = leaf == KVD_NONE ? NULL : kvd_block_at(&core->ix, leaf);

	while (block && force && !kvd_evictable(&core->ix, block, t) && block->claims.head != KVD_NONE) {
		const kvd_claim_t *claim = kvd_pool_at(&core->claims, block->claims.head);
		kvd_lease_t *lease = claim->kind == KVD_CLAIM_LEASE ? kvd_lease_find(core, claim->owner) : NULL;

		if (lease) {
			kvd_lease_end(core, lease, KV_ERR_REVOKED);
		} else {
			kvd_put_lose(core, block->claims.head);
		}
	}
	if (!block || !kvd_evictable(&core->ix, block, t)) {
		return KV_MISS;
	}
	kvd_block_evict(core, leaf, t, force ? KV_NM_EVICTED_FOR_OTHERS : KV_NM_EVICTED);

	return KV_OK;
}

/* No lease reads it any more. A put that is pinned to it goes on below the disk copy, if there is one. */
static void lose_cpu_leaf(kvd_core_t *core, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);

	while (!kvd_in_set(&core->ix, block, KVD_DISK) && block->claims.head != KVD_NONE) {
		kvd_put_lose(core, block->claims.head);
	}
	core->durable_look |= KVD_LOOK_DROPPED;
	if (block->io == KVD_NONE) {
		kvd_block_evict(core, id, KVD_CPU, KV_NM_EVICTED);
		return;
	}
	kvd_io_orphan(core, id); /* it is being written: the write takes the slot with it */
	kvd_block_leave(core, id, KVD_CPU);
	kvd_block_settle(core, id);
}

void kvd_quarantine_cpu(kvd_core_t *core, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);
	uint32_t steps = DROP_STEPS, leaf;

	if (kvd_in_set(&core->ix, block, KVD_DISK) && !kvd_tree_of(&core->ix, block)->hidden &&
	    !kvd_index_dead(&core->ix, block)) {
		revoke_through(core, id);
		while ((leaf = leaf_below(core, id, KVD_CPU, &steps)) != KVD_NONE) {
			lose_cpu_leaf(core, leaf);
		}
		if (steps > 0) {
			return;
		}
	}
	kvd_quarantine(core, id);
}

/* ---- disk copies that are in doubt ----------------------------------------------------------- */

/* In memory too, and nothing below it is on disk: it goes there once more. */
static void lose_disk_leaf(kvd_core_t *core, uint32_t id)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);

	kvd_block_leave(core, id, KVD_DISK);
	kvs_free(core->tier[KVD_DISK], block->disk);
	block->disk.slot = KV_SLOT_NONE;
	kvd_write_behind(core, id);
}

/* Written, and waiting for its parent. */
static void lose_written(kvd_core_t *core, uint32_t id)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);

	block->flags &= (uint8_t)~KVD_WRITTEN;
	core->written--;
	kvs_free(core->tier[KVD_DISK], block->disk);
	block->disk.slot = KV_SLOT_NONE;
	kvd_block_unwrite_below(core, id);
	kvd_write_behind(core, id);
}

void kvd_lose_disk(kvd_core_t *core, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);
	uint32_t steps = DROP_STEPS, leaf;

	if (kvd_tree_of(&core->ix, block)->hidden || kvd_index_dead(&core->ix, block)) {
		return; /* it is being taken down, its slot with it */
	}
	if (block->flags & KVD_WRITTEN) {
		lose_written(core, id);
		return;
	}
	while ((leaf = leaf_below(core, id, KVD_DISK, &steps)) != KVD_NONE) {
		uint32_t in_memory = kvd_index_depth_in(&core->ix, leaf, KVD_CPU);
		uint32_t depth = kvd_depth_of(&core->ix, block);

		if (kvd_in_set(&core->ix, kvd_block_at(&core->ix, leaf), KVD_CPU)) {
			lose_disk_leaf(core, leaf);
			continue;
		}
		kvd_quarantine(core, kvd_index_ancestor(&core->ix, leaf, in_memory < depth ? depth : in_memory + 1));
		if (kvd_index_dead(&core->ix, block)) {
			return;
		}
	}
	if (steps == 0) {
		kvd_quarantine(core, id);
	}
}

/* ---- disk copies that cannot be read now ----------------------------------------------------- */

void kvd_set_aside(kvd_core_t *core, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);

	/* Without memory to cut the run it stays visible: an acquire ends above it. */
	if (!kvd_tree_of(&core->ix, block)->hidden && !kvd_index_dead(&core->ix, block) &&
	    kvd_in_set(&core->ix, block, KVD_DISK) && !kvd_in_set(&core->ix, block, KVD_CPU) &&
	    kvd_index_cut(&core->ix, id) == KV_OK && !(kvd_node_of(&core->ix, block)->flags & KVD_NODE_ASIDE)) {
		kvd_index_set_aside(&core->ix, block->node, 1);
		kvd_show_below(core, block->node);
	}
}

void kvd_take_back(kvd_core_t *core, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);

	if (block->pos == 0 && (kvd_node_of(&core->ix, block)->flags & KVD_NODE_ASIDE) &&
	    !kvd_tree_of(&core->ix, block)->hidden && !kvd_index_dead(&core->ix, block)) {
		kvd_index_set_aside(&core->ix, block->node, 0);
		kvd_show_below(core, block->node);
	}
}

/* ---- in quanta ------------------------------------------------------------------------------- */

/* Leases that end here: what is ready lies above the dead top, or they are revoked. */
static void drop_claims(kvd_core_t *core, uint32_t id, uint32_t top_depth)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);

	while (block->claims.head != KVD_NONE) {
		const kvd_claim_t *claim = kvd_pool_at(&core->claims, block->claims.head);
		kvd_lease_t *lease = claim->kind == KVD_CLAIM_LEASE ? kvd_lease_find(core, claim->owner) : NULL;

		if (!lease) {
			kvd_put_lose(core, block->claims.head);
		} else if (top_depth > 1 && lease->ready < top_depth) {
			kvd_lease_cut(core, lease, top_depth, KV_ERR_CORRUPT);
		} else {
			kvd_lease_end(core, lease, KV_ERR_REVOKED);
		}
	}
}

/* The block is the last of a run without children. */
static void take_down(kvd_core_t *core, uint32_t id, uint32_t top_depth)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);

	drop_claims(core, id, top_depth);
	kvd_io_orphan(core, id);
	for (kvd_set_t t = KVD_CPU; t < KVD_TIERS; t++) {
		if (kvd_in_set(&core->ix, block, t)) {
			kvd_block_leave(core, id, t);
		}
	}
	if (*kvd_slot_of(&core->ix, block) != KV_SLOT_NONE) {
		kvd_block_drop_slot(core, id);
	}
	if (block->disk.slot != KV_SLOT_NONE) {
		if (block->flags & KVD_WRITTEN) {
			block->flags &= (uint8_t)~KVD_WRITTEN;
			core->written--;
		}
		kvs_free(core->tier[KVD_DISK], block->disk);
		block->disk.slot = KV_SLOT_NONE;
	}
	kvd_mirror_sync(core, id);
	if (core->gather.count > 0 && core->gather.last == id) {
		core->gather.last = KVD_NONE;
	}
	kv_assert(block->holds == 0);
	kvd_index_remove(&core->ix, id);
}

/* Leaf first below `top`, at most *p_left blocks; 1 when the whole subtree has gone. */
static int dismantle_below(kvd_core_t *core, uint32_t top, uint32_t *p_left)
{
	uint32_t top_depth =
		kvd_node_at(&core->ix, top)->flags & KVD_NODE_DEAD ? kvd_node_at(&core->ix, top)->depth0 + 1 : 0;
	uint32_t id = top;

	while (*p_left > 0) {
		const kvd_node_t *node = kvd_node_at(&core->ix, id);
		uint32_t parent = node->parent, len = node->len;

		if (node->children.head != KVD_NONE) {
			id = node->children.head;
			continue;
		}
		take_down(core, node->ids[len - 1], top_depth);
		*p_left -= 1;
		if (len == 1) {
			if (id == top) {
				return 1;
			}
			id = parent;
		}
	}

	return 0;
}

void kvd_tree_release(kvd_core_t *core, uint32_t id)
{
	const kvd_tree_t *tree = kvd_tree_at(&core->ix, id);

	if (tree->hidden && tree->blocks == 0 && tree->puts == 0) {
		kvd_tree_destroy(&core->ix, id);
	}
}

int kvd_dismantle_run(kvd_core_t *core)
{
	uint32_t left = QUANTUM_BLOCKS;

	while (left > 0 && core->dead_nodes.head != KVD_NONE) {
		uint32_t top = core->dead_nodes.head;
		uint32_t above = kvd_index_parent(&core->ix, kvd_node_at(&core->ix, top)->ids[0]);

		kvd_list_remove(&core->dead_nodes, &core->ix.nodes, offsetof(kvd_node_t, queue), top);
		if (!dismantle_below(core, top, &left)) {
			kvd_list_push_front(&core->dead_nodes, &core->ix.nodes, offsetof(kvd_node_t, queue), top);
		} else if (above != KVD_NONE) {
			kvd_unhold(core, above);
			kvd_block_settle(core, above);
		}
	}
	while (left > 0 && core->dead_nodes.head == KVD_NONE && core->dead_trees != KVD_NONE) {
		uint32_t id = core->dead_trees;
		kvd_tree_t *tree = kvd_tree_at(&core->ix, id);

		if (tree->children.head != KVD_NONE) {
			(void)dismantle_below(core, tree->children.head, &left);
			continue;
		}
		kvd_events_flush(core);
		core->dead_trees = tree->link;
		tree->leaving = 0;
		if (tree->ns != KVD_NONE) {
			kvd_space_left(core, tree->ns, tree->space);
		}
		kvd_tree_release(core, id);
	}

	return core->dead_nodes.head != KVD_NONE || core->dead_trees != KVD_NONE;
}
