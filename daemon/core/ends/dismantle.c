#include "core/block/block.h"
#include "core/ends/dismantle.h"
#include "core/block/quarantine.h"
#include "core/block/visibility.h"
#include "core/base/core_impl.h"
#include "core/handover/handover.h"
#include "core/lease/lease.h"
#include "core/put/put.h"

#define QUANTUM_BLOCKS 64u

/* What is being taken down: a dead subtree, or a part of a hidden tree. */
typedef struct top {
	uint32_t depth; /* of its first block; 0: a hidden tree */
	int withdrawn;
} top_t;

/* End the leases pinned here, or cut those whose ready blocks all lie above the dead top. Hand-overs fail. Puts go on
 * without the pin, but below a withdrawn block they end. */
static void drop_pins(kvd_core_t *core, uint32_t id, const top_t *top)
{
	const kv_status_t why = top->withdrawn ? KV_ERR_REVOKED : KV_ERR_CORRUPT;
	const kvd_block_t *block = kvd_block_at(&core->ix, id);

	while (block->pins.head != KVD_NONE) {
		const kvd_pin_t *pin = kvd_obj_at(&core->pins, block->pins.head);
		kvd_lease_t *lease = pin->kind == KVD_PIN_LEASE ? kvd_lease_find(core, pin->owner) : NULL;

		if (pin->kind == KVD_PIN_HANDOVER) {
			kvd_handover_lose_block(core, block->pins.head, why);
		} else if (!lease && top->withdrawn) {
			kvd_put_withdraw_pin(core, block->pins.head);
		} else if (!lease) {
			kvd_put_drop_pin(core, block->pins.head);
		} else if (top->depth > 1 && lease->ready < top->depth) {
			kvd_lease_cut_before(core, lease, top->depth, why);
		} else {
			kvd_lease_end(core, lease, KV_ERR_REVOKED);
		}
	}
}

/* The block is the last of a run without children. */
static void dismantle_block(kvd_core_t *core, uint32_t id, const top_t *top)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);

	drop_pins(core, id, top);
	kvd_block_detach_io(core, id);
	for (kvd_set_t t = KVD_CPU; t < KVD_TIERS; t++) {
		if (kvd_in_set(&core->ix, block, t)) {
			kvd_block_leave(core, id, t);
		}
	}
	if (*kvd_slot_of(&core->ix, block) != KV_SLOT_NONE) {
		kvd_block_free_cpu_slot(core, id);
	}
	if (block->disk.slot != KV_SLOT_NONE) {
		if (block->flags & KVD_DISK_UNLINKED) {
			block->flags &= (uint8_t)~KVD_DISK_UNLINKED;
			core->disk_unlinked--;
		}
		kvs_free(core->tier[KVD_DISK], block->disk);
		block->disk.slot = KV_SLOT_NONE;
	}
	kvd_block_sync_mirror(core, id);
	/* Its id may be another block's soon: the gathered events must not go on from it. */
	if (core->gather.count > 0 && core->gather.last == id) {
		core->gather.last = KVD_NONE;
	}
	kv_assert(block->refs == 0);
	kvd_index_remove(&core->ix, id);
}

/* Leaf first below `top`, at most *p_left blocks; 1 when the whole subtree has gone. */
static int dismantle_below(kvd_core_t *core, uint32_t top, uint32_t *p_left)
{
	const kvd_node_t *first = kvd_node_at(&core->ix, top);
	const top_t what = {.depth = first->flags & KVD_NODE_DEAD ? first->depth0 + 1 : 0,
			    .withdrawn = (first->flags & KVD_NODE_WITHDRAWN) != 0};
	uint32_t id = top;

	/* Sets are prefix-closed and a run gives blocks at its end only: a child goes before its parent. */
	while (*p_left > 0) {
		const kvd_node_t *node = kvd_node_at(&core->ix, id);
		uint32_t parent = node->parent, len = node->len;

		if (node->children.head != KVD_NONE) {
			id = node->children.head;
			continue;
		}
		dismantle_block(core, node->ids[len - 1], &what);
		core->withdrawn += what.withdrawn ? 1 : 0;
		*p_left -= 1;
		if (len == 1) {
			if (id == top) {
				core->withdrawn_tops -= what.withdrawn ? 1 : 0;
				return 1;
			}
			id = parent;
		}
	}

	return 0;
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
			kvd_block_unref(core, above);
			kvd_block_forget_unused(core, above);
		}
	}
	/* Trees after dead subtrees: a hidden tree may have some, whose tops are still on the list. */
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
			kvd_space_end_old_tree(core, tree->ns, tree->space);
		}
		kvd_tree_release(core, id);
	}

	return core->dead_nodes.head != KVD_NONE || core->dead_trees != KVD_NONE;
}
