/* Trees, the queue of runs that wait for write-behind, and the walk that verifies everything. */
#include "core/index/index.h"

#include <stdio.h>

kv_status_t kvd_index_init(kvd_index_t *ix, const kv_env_t *env, kv_metrics_t *metrics, uint64_t max_blocks)
{
	uint64_t heads = 1024;
	kv_status_t status;

	*ix = (kvd_index_t){.env = env, .metrics = metrics, .queue = KVD_LIST_EMPTY};
	if (max_blocks == 0 || max_blocks > INT32_MAX / 4) {
		return KV_ERR_ARG;
	}
	while (heads < max_blocks) {
		heads *= 2;
	}
	ix->head_mask = heads - 1;
	kv_random(env, ix->seed, sizeof ix->seed);

	status = kvd_pool_init(&ix->blocks, env, sizeof(kvd_block_t), (uint32_t)max_blocks);
	if (status == KV_OK) {
		status = kvd_pool_init(&ix->nodes, env, sizeof(kvd_node_t), (uint32_t)max_blocks + 1);
	}
	if (status == KV_OK) {
		status = kvd_pool_init(&ix->marks, env, sizeof(kvd_mark_t),
				       (uint32_t)max_blocks * 4 + 4 * KVD_POOL_CHUNK);
	}
	if (status == KV_OK) {
		status = kvd_pool_init(&ix->trees, env, sizeof(kvd_tree_t), 1u << 20);
	}
	if (status == KV_OK) {
		ix->heads = kv_alloc(env, heads * sizeof *ix->heads);
		status = ix->heads ? KV_OK : KV_ERR_NOMEM;
	}
	if (status != KV_OK) {
		kvd_index_fini(ix);
	}

	return status;
}

uint32_t kvd_index_next(const kvd_index_t *ix, uint32_t id)
{
	const kvd_node_t *node = kvd_node_at(ix, id);

	if (node->children.head != KVD_NONE) {
		return node->children.head;
	}
	while (node->siblings.next == KVD_NONE) {
		if (node->parent == KVD_NONE) {
			return KVD_NONE;
		}
		node = kvd_node_at(ix, node->parent);
	}

	return node->siblings.next;
}

void kvd_index_fini(kvd_index_t *ix)
{
	/* Runs own their arrays; a free run in the pool has none that is still ours, so follow the trees. */
	for (uint32_t t = 0; ix->trees.chunks && t < ix->trees.made; t++) {
		const kvd_tree_t *tree = kvd_tree_at(ix, t);

		if (!tree->live) {
			continue;
		}
		for (uint32_t id = tree->children.head; id != KVD_NONE; id = kvd_index_next(ix, id)) {
			kv_free(ix->env, kvd_node_at(ix, id)->slots);
		}
	}
	kv_free(ix->env, ix->heads);
	ix->heads = NULL;
	kvd_pool_fini(&ix->blocks);
	kvd_pool_fini(&ix->nodes);
	kvd_pool_fini(&ix->marks);
	kvd_pool_fini(&ix->trees);
}

kv_status_t kvd_tree_create(kvd_index_t *ix, uint32_t *p_tree)
{
	kv_status_t status = kvd_pool_get(&ix->trees, p_tree);

	if (status == KV_OK) {
		*kvd_tree_at(ix, *p_tree) = (kvd_tree_t){.live = 1,
							 .space = KVD_NONE,
							 .ns = KVD_NONE,
							 .slot_class = KVD_NONE,
							 .children = KVD_LIST_EMPTY,
							 .cursor = KVD_NONE};
	}

	return status;
}

void kvd_tree_destroy(kvd_index_t *ix, uint32_t id)
{
	kvd_tree_t *tree = kvd_tree_at(ix, id);

	kv_assert(tree->children.head == KVD_NONE && tree->blocks == 0);
	tree->live = 0;
	kvd_pool_put(&ix->trees, id);
}

void kvd_queue_push(kvd_index_t *ix, uint32_t id)
{
	kvd_node_t *node = kvd_node_at(ix, id);

	if (node->flags & (KVD_NODE_QUEUED | KVD_NODE_DEAD)) {
		return;
	}
	node->flags |= KVD_NODE_QUEUED;
	kvd_list_push(&ix->queue, &ix->nodes, offsetof(kvd_node_t, queue), id);
	ix->queued++;
}

void kvd_queue_remove(kvd_index_t *ix, uint32_t id)
{
	kvd_node_t *node = kvd_node_at(ix, id);

	if (!(node->flags & KVD_NODE_QUEUED)) {
		return;
	}
	node->flags &= ~KVD_NODE_QUEUED;
	kvd_list_remove(&ix->queue, &ix->nodes, offsetof(kvd_node_t, queue), id);
	ix->queued--;
}

/* ---- the walk -------------------------------------------------------------------------------- */

typedef struct kvd_sums {
	uint64_t blocks;
	uint64_t in[KVD_TIERS];
	uint64_t marks, extra_marks;
} kvd_sums_t;

/* A sentence when something about this run's children does not hold. */
static const char *children_wrong(const kvd_index_t *ix, uint32_t id)
{
	const kvd_node_t *node = kvd_node_at(ix, id);
	uint32_t children = 0, kids[KVD_TIERS] = {0, 0}, pinned = 0;

	for (uint32_t c = node->children.head; c != KVD_NONE; c = kvd_node_at(ix, c)->siblings.next) {
		const kvd_node_t *child = kvd_node_at(ix, c);

		children++;
		pinned += child->pinned > 0 ? 1 : 0;
		for (kvd_set_t t = KVD_CPU; t < KVD_TIERS; t++) {
			kids[t] += child->n[t] > 0 && !(child->flags & KVD_NODE_DEAD) ? 1 : 0;
			if (child->n[t] > 0 && node->n[t] < node->len && !(child->flags & KVD_NODE_DEAD)) {
				return "a block is in a set without its parent";
			}
		}
		if (child->parent != id || child->tree != node->tree || child->depth0 != node->depth0 + node->len) {
			return "a child disagrees with its parent";
		}
	}
	if (pinned != node->pinned_kids || (pinned > 0 && node->pinned != node->len)) {
		return "pinned children are miscounted";
	}
	if (children != node->child_count || kids[KVD_CPU] != node->kids[KVD_CPU] ||
	    kids[KVD_DISK] != node->kids[KVD_DISK]) {
		return "children are miscounted";
	}

	return NULL;
}

static const char *marks_wrong(const kvd_index_t *ix, uint32_t id, kvd_set_t t, kvd_sums_t *sums)
{
	const kvd_node_t *node = kvd_node_at(ix, id);
	uint32_t count = 0, last = UINT32_MAX;
	int leaf_marked = 0;

	for (uint32_t m = node->marks[t]; m != KVD_NONE; count++) {
		const kvd_mark_t *mark = kvd_pool_at(&ix->marks, m);

		if (mark->node != id || mark->pos >= node->n[t] || mark->pos >= last) {
			return "a mark is out of its place";
		}
		last = mark->pos;
		leaf_marked |= mark->pos + 1 == node->n[t];
		m = mark->shallower;
	}
	sums->marks += count;
	sums->extra_marks += count > 1 ? count - 1 : 0;
	if (node->n[t] > 0 && kvd_index_leaf(ix, kvd_block_at(ix, node->ids[node->n[t] - 1]), t) && !leaf_marked) {
		return "a leaf of a set has no mark";
	}

	return NULL;
}

static const char *run_wrong(const kvd_index_t *ix, uint32_t id, kvd_sums_t *sums)
{
	const kvd_node_t *node = kvd_node_at(ix, id);
	uint32_t claimed = 0, deepest = 0;

	if (node->len == 0 || node->len > KVD_RUN_MAX || node->len > node->cap || node->n[KVD_CPU] > node->len ||
	    node->n[KVD_DISK] > node->len) {
		return "a run's counters are out of range";
	}
	for (uint32_t i = 0; i < node->len; i++) {
		const kvd_block_t *block = kvd_block_at(ix, node->ids[i]);
		int filled = (block->flags & (KVD_FILLING | KVD_TRANSIT)) != 0;

		if (block->node != id || block->pos != i) {
			return "a block does not know its run";
		}
		if (block->claims.head != KVD_NONE) {
			claimed++;
			deepest = i + 1;
		}
		if ((node->slots[i] != KV_SLOT_NONE) != (i < node->n[KVD_CPU] || filled) ||
		    (i < node->n[KVD_CPU] && filled)) {
			return "a block's CPU slot and its state disagree";
		}
		if (i < node->n[KVD_DISK] && block->disk.slot == KV_SLOT_NONE) {
			return "a block of the disk set has no disk slot";
		}
		if (!(kvd_tree_at(ix, node->tree)->hidden) && kvd_index_shown(ix, block) &&
		    kvd_index_find(ix, node->tree, &block->key, block->group) != node->ids[i]) {
			return "a block is not found by its key";
		}
	}
	if (claimed != node->claimed || (node->pinned_kids == 0 && deepest != node->pinned)) {
		return "a run's pins are miscounted";
	}
	sums->blocks += node->len;
	sums->in[KVD_CPU] += node->n[KVD_CPU];
	sums->in[KVD_DISK] += node->n[KVD_DISK];

	return NULL;
}

static const char *tree_wrong(const kvd_index_t *ix, uint32_t id, kvd_sums_t *all)
{
	const kvd_tree_t *tree = kvd_tree_at(ix, id);
	kvd_sums_t sums = {0};
	const char *wrong = NULL;
	uint32_t aside = 0;

	for (uint32_t n = tree->children.head; n != KVD_NONE && !wrong; n = kvd_index_next(ix, n)) {
		aside += (kvd_node_at(ix, n)->flags & KVD_NODE_ASIDE) != 0;
		wrong = run_wrong(ix, n, &sums);
		wrong = wrong ? wrong : children_wrong(ix, n);
		wrong = wrong ? wrong : marks_wrong(ix, n, KVD_CPU, &sums);
		wrong = wrong ? wrong : marks_wrong(ix, n, KVD_DISK, &sums);
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

int kvd_index_sound(const kvd_index_t *ix, char *why, size_t cap)
{
	kvd_sums_t all = {0};
	const char *wrong = NULL;

	for (uint32_t t = 0; t < ix->trees.made && !wrong; t++) {
		if (kvd_tree_at(ix, t)->live) {
			wrong = tree_wrong(ix, t, &all);
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
