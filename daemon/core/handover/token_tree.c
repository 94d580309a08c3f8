#include "core/handover/token_tree.h"

#include <string.h>

#define BITS 33u /* of a word */
#define SPAN 64u /* words compared at once */

static kvd_token_node_t *node_at(const kvd_token_tree_t *tree, uint32_t id)
{
	return kvd_obj_at(tree->nodes, id);
}

static kvd_token_item_t *item_at(const kvd_token_tree_t *tree, uint32_t id)
{
	return (kvd_token_item_t *)(void *)((uint8_t *)kvd_obj_at(tree->items, id) + tree->offset);
}

static int is_leaf(const kvd_token_node_t *node)
{
	return node->pos == KVD_NONE;
}

static size_t link_offset(const kvd_token_tree_t *tree)
{
	return tree->offset + offsetof(kvd_token_item_t, of_leaf);
}

/* ---- sequences ------------------------------------------------------------------------------- */

static uint32_t bit_at(const uint32_t *words, uint32_t len, uint32_t pos)
{
	uint32_t word = pos / BITS, bit = pos % BITS;

	if (word >= len) {
		return 0;
	}

	return bit == 0 ? 1 : words[word] >> (BITS - 1 - bit) & 1;
}

/* Words that both begin with. */
static uint32_t count_common(const uint32_t *a, uint32_t a_len, const uint32_t *b, uint32_t b_len)
{
	uint32_t n = 0, most = a_len < b_len ? a_len : b_len;

	while (most - n >= SPAN && memcmp(a + n, b + n, SPAN * sizeof *a) == 0) {
		n += SPAN;
	}
	while (n < most && a[n] == b[n]) {
		n++;
	}

	return n;
}

/* The first bit in which they differ; KVD_NONE: they are the same. */
static uint32_t first_difference(const kvd_token_item_t *a, const kvd_token_item_t *b)
{
	uint32_t n = count_common(a->words, a->len, b->words, b->len);

	if (n == a->len || n == b->len) {
		return a->len == b->len ? KVD_NONE : n * BITS;
	}

	return n * BITS + 1 + (uint32_t)__builtin_clz(a->words[n] ^ b->words[n]);
}

/* ---- ways ------------------------------------------------------------------------------------ */

/* Down by the bits of the words before `end`: an inner node at or behind it, or a leaf. */
static uint32_t descend(const kvd_token_tree_t *tree, const uint32_t *words, uint32_t len, uint32_t end)
{
	uint32_t id = tree->root;
	const kvd_token_node_t *node = node_at(tree, id);

	while (!is_leaf(node) && node->pos < end) {
		id = node->child[bit_at(words, len, node->pos)];
		node = node_at(tree, id);
	}

	return id;
}

/* The leaf with the oldest item below. */
static const kvd_token_node_t *oldest_leaf(const kvd_token_tree_t *tree, uint32_t id)
{
	const kvd_token_node_t *node = node_at(tree, id);

	while (!is_leaf(node)) {
		const kvd_token_node_t *first = node_at(tree, node->child[0]);

		node = first->oldest == node->oldest ? first : node_at(tree, node->child[1]);
	}

	return node;
}

/* `oldest` of the node and of all above it is counted again. */
static void update_oldest(kvd_token_tree_t *tree, uint32_t id)
{
	while (id != KVD_NONE) {
		kvd_token_node_t *node = node_at(tree, id);

		if (is_leaf(node)) {
			node->oldest = item_at(tree, node->items.head)->age;
		} else {
			uint64_t first = node_at(tree, node->child[0])->oldest;
			uint64_t second = node_at(tree, node->child[1])->oldest;

			node->oldest = first < second ? first : second;
		}
		id = node->parent;
	}
}

static uint32_t create_node(kvd_token_tree_t *tree, uint32_t pos)
{
	uint32_t id;
	kv_status_t status = kvd_obj_pool_get(tree->nodes, &id);

	kv_assert(status == KV_OK); /* its memory was reserved with the item */
	*node_at(tree, id) = (kvd_token_node_t){
		.parent = KVD_NONE, .pos = pos, .child = {KVD_NONE, KVD_NONE}, .items = KVD_LIST_EMPTY};

	return id;
}

/* `by` takes the place of the node below its parent. */
static void replace_child(kvd_token_tree_t *tree, uint32_t id, uint32_t by)
{
	uint32_t parent = node_at(tree, id)->parent;
	kvd_token_node_t *above = parent == KVD_NONE ? NULL : node_at(tree, parent);

	*(above ? &above->child[above->child[1] == id] : &tree->root) = by;
	node_at(tree, by)->parent = parent;
}

/* ---- items ----------------------------------------------------------------------------------- */

/* By age: a new one is the youngest, and one that comes back is among the oldest. */
static void link_item(kvd_token_tree_t *tree, uint32_t leaf, uint32_t item)
{
	kvd_list_t *items = &node_at(tree, leaf)->items;
	uint64_t age = item_at(tree, item)->age;
	uint32_t before = KVD_NONE;

	if (items->tail != KVD_NONE && item_at(tree, items->tail)->age > age) {
		for (before = items->head; item_at(tree, before)->age < age;) {
			before = item_at(tree, before)->of_leaf.next;
		}
	}
	kvd_list_insert(items, tree->items, link_offset(tree), item, before);
	item_at(tree, item)->leaf = leaf;
}

void kvd_token_tree_add(kvd_token_tree_t *tree, uint32_t id)
{
	const kvd_token_item_t *item = item_at(tree, id);
	uint32_t leaf, at, inner, pos;

	if (tree->root == KVD_NONE) {
		tree->root = leaf = create_node(tree, KVD_NONE);
	} else {
		at = descend(tree, item->words, item->len, KVD_NONE);
		pos = first_difference(item, item_at(tree, node_at(tree, at)->items.head));
		if (pos == KVD_NONE) {
			leaf = at;
		} else {
			leaf = create_node(tree, KVD_NONE);
			inner = create_node(tree, pos);
			at = descend(tree, item->words, item->len, pos);
			replace_child(tree, at, inner);
			node_at(tree, inner)->child[bit_at(item->words, item->len, pos)] = leaf;
			node_at(tree, inner)->child[!bit_at(item->words, item->len, pos)] = at;
			node_at(tree, leaf)->parent = node_at(tree, at)->parent = inner;
		}
	}
	link_item(tree, leaf, id);
	update_oldest(tree, leaf);
}

void kvd_token_tree_remove(kvd_token_tree_t *tree, uint32_t id)
{
	kvd_token_item_t *item = item_at(tree, id);
	uint32_t leaf = item->leaf, above = node_at(tree, leaf)->parent;
	kvd_list_t *items = &node_at(tree, leaf)->items;

	kvd_list_remove(items, tree->items, link_offset(tree), id);
	item->leaf = KVD_NONE;
	if (items->head != KVD_NONE) {
		update_oldest(tree, leaf);
		return;
	}
	if (above == KVD_NONE) {
		tree->root = KVD_NONE;
	} else {
		const kvd_token_node_t *node = node_at(tree, above);

		replace_child(tree, above, node->child[node->child[0] == leaf]);
		update_oldest(tree, node->parent);
		kvd_obj_pool_put(tree->nodes, above);
	}
	kvd_obj_pool_put(tree->nodes, leaf);
}

/* ---- looking --------------------------------------------------------------------------------- */

uint32_t kvd_token_tree_find(const kvd_token_tree_t *tree, const uint32_t *words, uint32_t len)
{
	const kvd_token_item_t *item;
	const kvd_token_node_t *leaf;
	uint32_t id, common;

	if (tree->root == KVD_NONE) {
		return KVD_NONE;
	}
	/* All below begin with the words, or none does: one of them says which. */
	id = descend(tree, words, len, len * BITS);
	leaf = oldest_leaf(tree, id);
	item = item_at(tree, leaf->items.head);
	common = count_common(words, len, item->words, item->len);
	if (common == len || common == item->len) {
		return leaf->items.head;
	}
	/* The longest of those that the words begin with: it ends next to the way, and not behind what was compared. */
	for (uint32_t below = id; (id = node_at(tree, below)->parent) != KVD_NONE; below = id) {
		const kvd_token_node_t *node = node_at(tree, id);

		if (node->pos % BITS == 0 && node->pos / BITS <= common && node->child[1] == below) {
			return node_at(tree, node->child[0])->items.head;
		}
	}

	return KVD_NONE;
}

/* ---- check ----------------------------------------------------------------------------------- */

/* Items of a leaf that stand in order and have its words; UINT64_MAX: they do not. */
static uint64_t check_leaf(const kvd_token_tree_t *tree, uint32_t id)
{
	const kvd_token_node_t *leaf = node_at(tree, id);
	const kvd_token_item_t *first = item_at(tree, leaf->items.head), *item;
	uint64_t count = 0, age = 0;

	for (uint32_t i = leaf->items.head; i != KVD_NONE; i = item->of_leaf.next, count++) {
		item = item_at(tree, i);
		if (item->leaf != id || (count > 0 && item->age <= age) || first_difference(first, item) != KVD_NONE) {
			return UINT64_MAX;
		}
		age = item->age;
	}

	return leaf->oldest == first->age ? count : UINT64_MAX;
}

/* Do both children stand where they should: their oldest leaf has the bit, and they lie behind? */
static int is_inner_right(const kvd_token_tree_t *tree, uint32_t id)
{
	const kvd_token_node_t *node = node_at(tree, id);
	uint64_t oldest = UINT64_MAX;

	for (uint32_t c = 0; c < 2; c++) {
		const kvd_token_node_t *child = node_at(tree, node->child[c]);
		const kvd_token_item_t *item = item_at(tree, oldest_leaf(tree, node->child[c])->items.head);

		if (child->parent != id || child->pos <= node->pos || bit_at(item->words, item->len, node->pos) != c) {
			return 0;
		}
		oldest = child->oldest < oldest ? child->oldest : oldest;
	}

	return oldest == node->oldest;
}

uint64_t kvd_token_tree_check(const kvd_token_tree_t *tree)
{
	uint32_t id = tree->root, from;
	uint64_t items = 0;

	while (id != KVD_NONE) {
		const kvd_token_node_t *node = node_at(tree, id);

		if (!is_leaf(node)) {
			if (!is_inner_right(tree, id)) {
				return UINT64_MAX;
			}
			id = node->child[0];
			continue;
		}
		uint64_t count = check_leaf(tree, id);

		if (count == UINT64_MAX) {
			return UINT64_MAX;
		}
		items += count;
		do { /* up, until there is a second child to go to */
			from = id;
			id = node_at(tree, from)->parent;
		} while (id != KVD_NONE && node_at(tree, id)->child[1] == from);
		id = id == KVD_NONE ? id : node_at(tree, id)->child[1];
	}

	return items;
}
