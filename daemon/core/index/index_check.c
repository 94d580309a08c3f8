/* The walk that verifies all invariants of the index. */
#include "core/index/index.h"

#include <stdio.h>

typedef struct kvd_sums {
	uint64_t blocks;
	uint64_t in[KVD_TIERS];
	uint64_t marks, extra_marks;
} kvd_sums_t;

/* A sentence when something about this run's children does not hold. */
static const char *check_children(const kvd_index_t *ix, uint32_t id)
{
	const kvd_node_t *node = kvd_node_at(ix, id);
	uint32_t children = 0, children_in[KVD_TIERS] = {0, 0};

	for (uint32_t c = node->children.head; c != KVD_NONE; c = kvd_node_at(ix, c)->siblings.next) {
		const kvd_node_t *child = kvd_node_at(ix, c);

		children++;
		for (kvd_set_t t = KVD_CPU; t < KVD_TIERS; t++) {
			children_in[t] += child->n[t] > 0 && !(child->flags & KVD_NODE_DEAD) ? 1 : 0;
			if (child->n[t] > 0 && node->n[t] < node->len && !(child->flags & KVD_NODE_DEAD)) {
				return "a block is in a set without its parent";
			}
		}
		if (child->parent != id || child->tree != node->tree || child->depth0 != node->depth0 + node->len) {
			return "a child disagrees with its parent";
		}
	}
	if (children != node->child_count || children_in[KVD_CPU] != node->children_in[KVD_CPU] ||
	    children_in[KVD_DISK] != node->children_in[KVD_DISK]) {
		return "children are miscounted";
	}

	return NULL;
}

static const char *check_pins(const kvd_index_t *ix, uint32_t id, kvd_pin_class_t pins)
{
	const kvd_node_t *node = kvd_node_at(ix, id);
	const kvd_pinned_t *pinned = &node->pinned[pins];
	uint32_t children = 0, ends = 0, deepest = 0;

	for (uint32_t c = node->children.head; c != KVD_NONE; c = kvd_node_at(ix, c)->siblings.next) {
		children += kvd_node_at(ix, c)->pinned[pins].blocks > 0 ? 1 : 0;
	}
	if (children != pinned->children || (children > 0 && pinned->blocks != node->len)) {
		return "pinned children are miscounted";
	}
	for (uint32_t i = 0; i < node->len; i++) {
		if (kvd_index_has_pin(kvd_block_at(ix, node->ids[i]), pins)) {
			ends++;
			deepest = i + 1;
		}
	}

	return ends != pinned->ends || (children == 0 && deepest != pinned->blocks) ? "a run's pins are miscounted"
										    : NULL;
}

static const char *check_marks(const kvd_index_t *ix, uint32_t id, kvd_set_t t, kvd_sums_t *sums)
{
	const kvd_node_t *node = kvd_node_at(ix, id);
	uint32_t count = 0, last = UINT32_MAX;
	int leaf_marked = 0;

	for (uint32_t m = node->marks[t]; m != KVD_NONE; count++) {
		const kvd_mark_t *mark = kvd_obj_at(&ix->marks, m);

		if (mark->node != id || mark->pos >= node->n[t] || mark->pos >= last) {
			return "a mark is out of order";
		}
		last = mark->pos;
		leaf_marked |= mark->pos + 1 == node->n[t];
		m = mark->shallower;
	}
	sums->marks += count;
	sums->extra_marks += count > 1 ? count - 1 : 0;
	if (node->n[t] > 0 && kvd_index_is_leaf(ix, kvd_block_at(ix, node->ids[node->n[t] - 1]), t) && !leaf_marked) {
		return "a leaf of a set has no mark";
	}

	return NULL;
}

static const char *check_run(const kvd_index_t *ix, uint32_t id, kvd_sums_t *sums)
{
	const kvd_node_t *node = kvd_node_at(ix, id);
	if (node->len == 0 || node->len > KVD_RUN_MAX || node->len > node->cap || node->n[KVD_CPU] > node->len ||
	    node->n[KVD_DISK] > node->len || node->hit > node->len) {
		return "a run's counters are out of range";
	}
	if (node->hit > 0 && node->parent != KVD_NONE &&
	    kvd_node_at(ix, node->parent)->hit < kvd_node_at(ix, node->parent)->len) {
		return "a block was hit, and its parent was not";
	}
	for (uint32_t i = 0; i < node->len; i++) {
		const kvd_block_t *block = kvd_block_at(ix, node->ids[i]);
		int filled = (block->flags & (KVD_FILLING | KVD_TRANSIT)) != 0;

		if (block->node != id || block->pos != i) {
			return "a block does not know its run";
		}
		if ((node->slots[i] != KV_SLOT_NONE) != (i < node->n[KVD_CPU] || filled) ||
		    (i < node->n[KVD_CPU] && filled)) {
			return "a block's CPU slot and its state disagree";
		}
		if (i < node->n[KVD_DISK] && block->disk.slot == KV_SLOT_NONE) {
			return "a block of the disk set has no disk slot";
		}
		if (!(kvd_tree_at(ix, node->tree)->hidden) && kvd_index_is_shown(ix, block) &&
		    kvd_index_find(ix, node->tree, &block->key, block->group) != node->ids[i]) {
			return "a block is not found by its key";
		}
	}
	sums->blocks += node->len;
	sums->in[KVD_CPU] += node->n[KVD_CPU];
	sums->in[KVD_DISK] += node->n[KVD_DISK];

	return NULL;
}

static const char *check_tree(const kvd_index_t *ix, uint32_t id, kvd_sums_t *all)
{
	const kvd_tree_t *tree = kvd_tree_at(ix, id);
	kvd_sums_t sums = {0};
	const char *wrong = NULL;
	uint32_t aside = 0;

	for (uint32_t n = tree->children.head; n != KVD_NONE && !wrong; n = kvd_index_next_run(ix, n)) {
		aside += (kvd_node_at(ix, n)->flags & KVD_NODE_ASIDE) != 0;
		wrong = check_run(ix, n, &sums);
		wrong = wrong ? wrong : check_children(ix, n);
		wrong = wrong ? wrong : check_pins(ix, n, KVD_PINS_ALL);
		wrong = wrong ? wrong : check_pins(ix, n, KVD_PINS_HANDOVER);
		wrong = wrong ? wrong : check_marks(ix, n, KVD_CPU, &sums);
		wrong = wrong ? wrong : check_marks(ix, n, KVD_DISK, &sums);
	}
	if (!wrong && (sums.blocks != tree->blocks || sums.in[KVD_CPU] != tree->in[KVD_CPU] ||
		       sums.in[KVD_DISK] != tree->in[KVD_DISK] || aside != tree->aside_nodes)) {
		wrong = "a tree's sums are off";
	}
	all->blocks += sums.blocks;
	all->marks += sums.marks;
	all->extra_marks += sums.extra_marks;

	return wrong;
}

int kvd_index_check(const kvd_index_t *ix, char *why, size_t cap)
{
	kvd_sums_t all = {0};
	const char *wrong = NULL;

	for (uint32_t t = 0; t < ix->trees.made && !wrong; t++) {
		if (kvd_tree_at(ix, t)->live) {
			wrong = check_tree(ix, t, &all);
		}
	}
	if (!wrong &&
	    (all.blocks != ix->blocks.used || all.marks != ix->marks.used || all.extra_marks != ix->extra_marks)) {
		wrong = "blocks or marks have leaked";
	}
	if (wrong) {
		snprintf(why, cap, "%s", wrong);
	}

	return wrong == NULL;
}
