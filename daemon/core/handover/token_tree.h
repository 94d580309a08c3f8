/* token_tree.h -- finds among sequences of u32 words the one that agrees longest with a given one: equal over the
 * shorter length. A crit-bit tree (decision 044).
 *
 *            pos                        an inner node is the first bit in which the sequences below it differ
 *           0/ \1
 *        leaf   pos                     a leaf is one sequence, and all items that have it, oldest first
 *              0/ \1
 *           leaf   leaf
 *
 * A sequence is 33 bits a word: "there is a word", then its bits. So one that is the beginning of another differs from
 * it in the bit after its end, and all beginnings of a sequence lie next to the way to it. `oldest` of each node makes
 * the oldest item of a subtree known.
 *
 * One lookup compares the words of two sequences once, and visits the nodes of one way. Items are records of a pool:
 *
 *   out --add--> in --remove--> out
 */
#ifndef KVD_CORE_TOKEN_TREE_H
#define KVD_CORE_TOKEN_TREE_H

#include "core/list.h"

/* In the record of an item. The words stay as they are while it is in a tree. */
typedef struct kvd_token_item {
	const uint32_t *words;
	uint32_t len;
	uint32_t leaf; /* KVD_NONE: in no tree */
	uint64_t age;  /* the smaller, the older; of one item */
	kvd_link_t of_leaf;
} kvd_token_item_t;

typedef struct kvd_token_node {
	uint64_t oldest; /* smallest age below */
	uint32_t parent; /* KVD_NONE: the root */
	uint32_t pos;    /* the bit, counted from the first; KVD_NONE: a leaf */
	uint32_t child[2];
	kvd_list_t items; /* of a leaf, by age */
} kvd_token_node_t;

typedef struct kvd_token_tree {
	kvd_obj_pool_t *nodes; /* may be shared with other trees */
	const kvd_obj_pool_t *items;
	size_t offset; /* of kvd_token_item_t in an item */
	uint32_t root;
} kvd_token_tree_t;

/* Nodes that `items` items need at most, of all trees of a pool together. */
static inline uint64_t kvd_token_tree_nodes(uint64_t items)
{
	return 2 * items;
}

/* The pool has nodes for all items (kvd_token_tree_nodes()). */
void kvd_token_tree_add(kvd_token_tree_t *tree, uint32_t item);
void kvd_token_tree_remove(kvd_token_tree_t *tree, uint32_t item);
/* The item whose words are the beginning of these, or the other way round: the longest agreement, then the oldest.
 * KVD_NONE: there is none. */
uint32_t kvd_token_tree_find(const kvd_token_tree_t *tree, const uint32_t *words, uint32_t len);
/* Walks everything: the number of items, or UINT64_MAX when the tree is not what is said above. */
uint64_t kvd_token_tree_check(const kvd_token_tree_t *tree);

#endif
