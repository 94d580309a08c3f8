#include "core/block/visibility.h"
#include "core/base/core_impl.h"

#define FILL_QUANTUM 256u

void kvd_block_sync_mirror(kvd_core_t *core, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);
	uint32_t ns = kvd_tree_of(&core->ix, block)->ns;

	if (ns != KVD_NONE && !kvd_is_private(&core->ix, block) &&
	    kvd_mirror_set(&core->ns[ns]->mirror, &block->key, block->group,
			   kvd_index_tiers_of_key(&core->ix, ns, &block->key, block->group)) != KV_OK) {
		kvd_count(core, KV_M_MIRROR_LEFT_OUT, 1);
	}
}

/* ---- walks in quanta ------------------------------------------------------------------------- */

/* One run after the other, parents first; 1 when the quantum is used up. */
static int show_some_of_tree(kvd_core_t *core, kvd_tree_t *tree, uint32_t *p_left)
{
	while (tree->cursor != KVD_NONE) {
		const kvd_node_t *node = kvd_node_at(&core->ix, tree->cursor);

		if (*p_left == 0) {
			return 1;
		}
		for (uint32_t i = 0; i < node->len; i++) {
			kvd_block_sync_mirror(core, node->ids[i]);
			if (!tree->mute) {
				kvd_event_announce(core, node->ids[i]);
			}
		}
		*p_left -= node->len < *p_left ? node->len : *p_left;
		tree->cursor = kvd_index_next_run(&core->ix, tree->cursor);
		/* The walk was of a subtree, and has left it. */
		if (tree->cursor != KVD_NONE && kvd_node_at(&core->ix, tree->cursor)->depth0 < tree->floor) {
			tree->cursor = KVD_NONE;
		}
	}

	return 0;
}

void kvd_show_tree(kvd_core_t *core, kvd_tree_t *tree)
{
	tree->cursor = tree->children.head;
	tree->floor = 0;
	core->showing = 1;
}

void kvd_show_below(kvd_core_t *core, uint32_t node)
{
	kvd_tree_t *tree = kvd_tree_at(&core->ix, kvd_node_at(&core->ix, node)->tree);

	if (tree->cursor != KVD_NONE) { /* one walk at a time */
		kvd_show_tree(core, tree);
	} else if (tree->ns != KVD_NONE) {
		tree->cursor = node;
		tree->floor = kvd_node_at(&core->ix, node)->depth0 + 1;
		core->showing = 1;
	}
}

int kvd_visibility_run(kvd_core_t *core)
{
	uint32_t left = FILL_QUANTUM;

	if (!core->showing) {
		return 0;
	}
	for (uint32_t n = 0; n < core->ns_count; n++) {
		for (uint32_t i = 0; i < core->ns[n]->space_made; i++) {
			const kvd_space_t *space = core->ns[n]->spaces[i];

			if (space && show_some_of_tree(core, kvd_tree_at(&core->ix, space->tree), &left)) {
				return 1;
			}
		}
	}
	core->showing = 0;

	return 0;
}

void kvd_space_end_old_tree(kvd_core_t *core, uint32_t ns, uint32_t id)
{
	kvd_space_t *space = core->ns[ns]->spaces[id];
	kvd_tree_t *tree = kvd_tree_at(&core->ix, space->tree);

	space->leaving--;
	if (space->leaving == 0) {
		tree->mute = 0;
		kvd_show_tree(core, tree);
	}
}

/* ---- blocks that cannot be read now ---------------------------------------------------------- */

void kvd_block_set_aside(kvd_core_t *core, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);

	/* Without memory to split the run the block stays visible, and an ACQUIRE ends above it. */
	if (!kvd_tree_of(&core->ix, block)->hidden && !kvd_index_is_dead(&core->ix, block) &&
	    kvd_in_set(&core->ix, block, KVD_DISK) && !kvd_in_set(&core->ix, block, KVD_CPU) &&
	    kvd_index_split_before(&core->ix, id) == KV_OK &&
	    !(kvd_node_of(&core->ix, block)->flags & KVD_NODE_ASIDE)) {
		kvd_index_set_aside(&core->ix, block->node, 1);
		kvd_show_below(core, block->node);
	}
}

void kvd_block_take_back(kvd_core_t *core, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);

	if (block->pos == 0 && (kvd_node_of(&core->ix, block)->flags & KVD_NODE_ASIDE) &&
	    !kvd_tree_of(&core->ix, block)->hidden && !kvd_index_is_dead(&core->ix, block)) {
		kvd_index_set_aside(&core->ix, block->node, 0);
		kvd_show_below(core, block->node);
	}
}
