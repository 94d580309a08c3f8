/* The table of keys, and questions about the path above a block. */
#include "core/index/index_impl.h"

/* ---- the table of keys ----------------------------------------------------------------------- */

__extension__ typedef unsigned __int128 wide_t;

/* Keys are chosen by clients: a secret decides which of them share a bucket. */
static uint64_t bucket_of(const kvd_index_t *ix, const kv_key_t *key, uint8_t group)
{
	uint64_t low, high;
	wide_t product;

	memcpy(&low, key->b, sizeof low);
	memcpy(&high, key->b + 8, sizeof high);
	product = (wide_t)(low ^ ix->seed[0]) * (high ^ ix->seed[1] ^ group);

	return ((uint64_t)product ^ (uint64_t)(product >> 64)) & ix->head_mask;
}

void kvd_table_add(kvd_index_t *ix, uint32_t id)
{
	kvd_block_t *block = kvd_block_at(ix, id);
	uint32_t *head = &ix->heads[bucket_of(ix, &block->key, block->group)];

	block->hash_next = *head;
	*head = id + 1;
}

void kvd_table_remove(kvd_index_t *ix, uint32_t id)
{
	kvd_block_t *block = kvd_block_at(ix, id);
	uint32_t *link = &ix->heads[bucket_of(ix, &block->key, block->group)];

	while (*link != id + 1) {
		kv_assert(*link != 0);
		link = &kvd_block_at(ix, *link - 1)->hash_next;
	}
	*link = block->hash_next;
}

/* The block of this key and group that follows `id` in the table, KVD_NONE: the first one. KVD_NONE: no more. */
static uint32_t next_in_bucket(const kvd_index_t *ix, uint32_t id, const kv_key_t *key, uint8_t group)
{
	uint32_t link = id == KVD_NONE ? ix->heads[bucket_of(ix, key, group)] : kvd_block_at(ix, id)->hash_next;

	while (link != 0 &&
	       (!kv_key_equal(&kvd_block_at(ix, link - 1)->key, key) || kvd_block_at(ix, link - 1)->group != group)) {
		link = kvd_block_at(ix, link - 1)->hash_next;
	}

	return link != 0 ? link - 1 : KVD_NONE;
}

/* ---- questions about the path ---------------------------------------------------------------- */

#define BELOW_DEAD UINT64_MAX /* an answer that never expires */

/* Is run `id` or one above it `top`, or has one of them one of `flags`? Each run on the way keeps the answer, and the
 * next walk ends there. So a hostile chain of runs of one block each, asked for at every depth, is walked once
 * (decision 026). */
static int search_above(const kvd_index_t *ix, uint32_t id, uint32_t top, uint32_t flags, uint64_t no, uint64_t yes)
{
	uint32_t at = id;
	uint64_t answer = no, steps = 0;

	/* Up to the first run that knows the answer. */
	for (; at != KVD_NONE; at = kvd_node_at(ix, at)->parent, steps++) {
		const kvd_node_t *node = kvd_node_at(ix, at);

		if (node->answer == yes || at == top || (node->flags & flags)) {
			answer = yes;
			break;
		}
		if (node->answer == no) {
			break;
		}
	}
	/* All runs on the way know it now. */
	for (; id != at; id = kvd_node_at(ix, id)->parent) {
		kvd_node_at(ix, id)->answer = answer;
	}
	kv_metric_add(ix->metrics, KV_M_INDEX_STEPS, steps);

	return answer == yes;
}

/* Is the node, or one above it, being taken down? */
int kvd_node_is_dead(const kvd_index_t *ix, uint32_t id)
{
	const kvd_tree_t *tree = kvd_tree_at(ix, kvd_node_at(ix, id)->tree);

	return tree->dead_nodes > 0 && search_above(ix, id, KVD_NONE, KVD_NODE_DEAD, tree->alive, BELOW_DEAD);
}

void kvd_index_mark_dead(kvd_index_t *ix, uint32_t id)
{
	kvd_node_t *node = kvd_node_at(ix, id);
	kvd_tree_t *tree = kvd_tree_at(ix, node->tree);

	node->flags |= KVD_NODE_DEAD;
	ix->dead_nodes++;
	tree->dead_nodes++;
	/* Kept answers "not below a dead run" expire at once, without a visit: the next walk leaves a new number.
	 * Answers "below a dead run" hold until the run is gone (decision 026). */
	tree->alive = ++ix->answers;
	tree->shown = kvd_index_new_question(ix);
}

uint64_t kvd_index_new_question(kvd_index_t *ix)
{
	return ix->answers += 2; /* the number is the answer yes, the one before it the answer no */
}

int kvd_index_passes_through(const kvd_index_t *ix, uint32_t id, uint32_t above_id, uint64_t question)
{
	const kvd_block_t *block = kvd_block_at(ix, id), *above = kvd_block_at(ix, above_id);

	/* Within one run the positions decide. */
	if (block->node == above->node) {
		return block->pos >= above->pos;
	}

	return kvd_node_of(ix, block)->tree == kvd_node_of(ix, above)->tree &&
	       search_above(ix, block->node, above->node, 0, question - 1, question);
}

int kvd_index_is_dead(const kvd_index_t *ix, const kvd_block_t *block)
{
	return kvd_node_is_dead(ix, block->node);
}

int kvd_index_is_withdrawn(kvd_index_t *ix, const kvd_block_t *block)
{
	uint64_t question;

	if (!kvd_node_is_dead(ix, block->node)) {
		return 0;
	}
	question = kvd_index_new_question(ix);

	return search_above(ix, block->node, KVD_NONE, KVD_NODE_WITHDRAWN, question - 1, question);
}

int kvd_index_is_shown(const kvd_index_t *ix, const kvd_block_t *block)
{
	const kvd_tree_t *tree = kvd_tree_of(ix, block);

	if (tree->aside_nodes == 0) {
		return !kvd_node_is_dead(ix, block->node);
	}

	return !search_above(ix, block->node, KVD_NONE, KVD_NODE_DEAD | KVD_NODE_ASIDE, tree->shown - 1, tree->shown);
}

/* ---- finding a block ------------------------------------------------------------------------- */

uint32_t kvd_index_find(const kvd_index_t *ix, uint32_t tree, const kv_key_t *key, uint8_t group)
{
	uint32_t id = KVD_NONE;

	while ((id = next_in_bucket(ix, id, key, group)) != KVD_NONE) {
		const kvd_block_t *block = kvd_block_at(ix, id);

		if (kvd_node_of(ix, block)->tree == tree && !kvd_tree_at(ix, tree)->hidden &&
		    kvd_index_is_shown(ix, block)) {
			break;
		}
	}

	return id;
}

uint32_t kvd_index_find_aside(const kvd_index_t *ix, uint32_t tree, const kv_key_t *key, uint8_t group)
{
	uint32_t id = KVD_NONE;

	while (kvd_tree_at(ix, tree)->aside_nodes > 0 && (id = next_in_bucket(ix, id, key, group)) != KVD_NONE) {
		const kvd_block_t *block = kvd_block_at(ix, id);

		if (kvd_node_of(ix, block)->tree == tree && !kvd_index_is_dead(ix, block) &&
		    !kvd_index_is_shown(ix, block)) {
			break;
		}
	}

	return id;
}

uint32_t kvd_index_find_on_disk(const kvd_index_t *ix, const kv_key_t *key, uint8_t group, kvs_loc_t disk)
{
	uint32_t id = KVD_NONE;

	while ((id = next_in_bucket(ix, id, key, group)) != KVD_NONE) {
		const kvd_block_t *block = kvd_block_at(ix, id);

		if (block->disk.slot == disk.slot && block->disk.gen == disk.gen) {
			break;
		}
	}

	return id;
}

uint32_t kvd_index_find_dying(const kvd_index_t *ix, uint32_t tree, const kv_key_t *key, uint8_t group)
{
	uint32_t id = KVD_NONE;

	while (kvd_tree_at(ix, tree)->dead_nodes > 0 && (id = next_in_bucket(ix, id, key, group)) != KVD_NONE) {
		const kvd_block_t *block = kvd_block_at(ix, id);

		if (kvd_node_of(ix, block)->tree == tree && !(block->flags & KVD_EVENT_PENDING) &&
		    kvd_index_is_dead(ix, block)) {
			break;
		}
	}

	return id;
}

uint32_t kvd_index_find_in_slot(const kvd_index_t *ix, const kv_key_t *key, uint8_t group, kvd_set_t t, kvs_loc_t loc)
{
	uint32_t id = KVD_NONE;

	while ((id = next_in_bucket(ix, id, key, group)) != KVD_NONE) {
		const kvd_block_t *block = kvd_block_at(ix, id);
		kvs_loc_t at = t == KVD_DISK ? block->disk : (kvs_loc_t){*kvd_slot_of(ix, block), block->cpu_gen};

		if (at.slot == loc.slot && at.gen == loc.gen && kvd_in_set(ix, block, t) &&
		    !kvd_tree_of(ix, block)->hidden && !kvd_index_is_dead(ix, block)) {
			break;
		}
	}

	return id;
}

int kvd_index_is_quarantined(const kvd_index_t *ix, uint32_t tree, const kv_key_t *key, uint8_t group)
{
	uint32_t id = KVD_NONE;

	do {
		id = next_in_bucket(ix, id, key, group);
	} while (id != KVD_NONE && kvd_node_of(ix, kvd_block_at(ix, id))->tree != tree);

	return id != KVD_NONE && kvd_index_find(ix, tree, key, group) == KVD_NONE &&
	       kvd_index_find_aside(ix, tree, key, group) == KVD_NONE;
}

uint8_t kvd_tiers_of(const kvd_index_t *ix, const kvd_block_t *block)
{
	return (uint8_t)((kvd_in_set(ix, block, KVD_CPU) ? KV_TIER_CPU : 0) |
			 (kvd_in_set(ix, block, KVD_DISK) ? KV_TIER_DISK : 0));
}

uint8_t kvd_index_tiers_of_key(const kvd_index_t *ix, uint32_t ns, const kv_key_t *key, uint8_t group)
{
	uint32_t id = KVD_NONE;
	uint8_t tiers = 0;

	while ((id = next_in_bucket(ix, id, key, group)) != KVD_NONE) {
		const kvd_block_t *block = kvd_block_at(ix, id);
		const kvd_tree_t *tree = kvd_tree_of(ix, block);

		if (tree->ns == ns && !tree->hidden && !kvd_index_is_dead(ix, block)) {
			uint8_t in = kvd_tiers_of(ix, block);

			tiers |= in == 0 || kvd_index_is_shown(ix, block) ? in : KV_TIER_UNREADABLE;
		}
	}

	return tiers;
}
