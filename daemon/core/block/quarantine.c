#include "core/block/block.h"
#include "core/block/quarantine.h"
#include "core/base/core_impl.h"

void kvd_hide_tree(kvd_core_t *core, uint32_t id)
{
	kvd_tree_t *tree = kvd_tree_at(&core->ix, id);

	tree->hidden = tree->leaving = 1;
	tree->link = core->dead_trees;
	core->dead_trees = id;
}

void kvd_tree_release(kvd_core_t *core, uint32_t id)
{
	const kvd_tree_t *tree = kvd_tree_at(&core->ix, id);

	if (tree->hidden && tree->blocks == 0 && tree->puts == 0) {
		kvd_tree_destroy(&core->ix, id);
	}
}

static void hide_subtree(kvd_core_t *core, uint32_t id, uint32_t flags)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);
	kvd_node_t *node, *above;
	uint32_t top;

	if (kvd_tree_of(&core->ix, block)->hidden || kvd_index_is_dead(&core->ix, block)) {
		return;
	}
	(void)kvd_index_split_before(&core->ix, id); /* without memory the run's first blocks go too */
	top = block->node;
	node = kvd_node_at(&core->ix, top);
	kvd_index_mark_dead(&core->ix, top);
	node->flags |= flags;
	core->withdrawn_tops += flags & KVD_NODE_WITHDRAWN ? 1 : 0;
	kvd_queue_remove(&core->ix, top);
	/* First in, first out: a dead top that lies below a later one is gone when that one is taken down. */
	kvd_list_push(&core->dead_nodes, &core->ix.nodes, offsetof(kvd_node_t, queue), top);

	if (node->parent == KVD_NONE) {
		return;
	}
	above = kvd_node_at(&core->ix, node->parent);
	kvd_block_ref(core, above->ids[above->len - 1]); /* leases that end below still read the block above */
	for (kvd_set_t t = KVD_CPU; t < KVD_TIERS; t++) {
		uint32_t last = above->ids[above->len - 1];

		if (node->n[t] > 0) {
			above->children_in[t]--;
			core->policy->join(&core->ix, &core->classes[node->slot_class].order[t], t, last, core->stamp);
		}
	}
}

void kvd_quarantine_subtree(kvd_core_t *core, uint32_t id)
{
	hide_subtree(core, id, 0);
}

void kvd_withdraw_subtree(kvd_core_t *core, uint32_t id)
{
	hide_subtree(core, id, KVD_NODE_WITHDRAWN);
}
