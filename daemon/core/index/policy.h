/* policy.h -- who goes first: the order of eviction of one tier and class (decision 006).
 *
 * A touch leaves one mark on the deepest block it reached, which means "the path down to here". A block's recency is
 * the newest mark at or below it, so a parent is never older than its child, and plain LRU evicts leaves first. Marks
 * hang in one list, oldest first. The victim is the block under the oldest mark. When it leaves, its mark slides to its
 * parent and keeps its position in the list: the parent is the next victim unless a younger mark lies there or below.
 * All of it is O(1).
 *
 *   mark:  none --touch, join--> ordered --slide--> ordered (one block up)
 *          ordered --oldest, but its block has a child in the set--> none     (the child's mark speaks for it)
 *          ordered --oldest, but its block is pinned--> off_lru --unpin--> ordered
 *
 * A policy decides which calls leave marks; the machinery is shared. LRU: all. FIFO: joins only.
 */
#ifndef KVD_CORE_POLICY_H
#define KVD_CORE_POLICY_H

#include "core/index/index.h"

typedef struct kvd_order {
	kvd_list_t marks; /* oldest first */
	uint64_t count;
	uint64_t blocks; /* in the sets that it orders */
} kvd_order_t;

typedef struct kvd_policy_ops {
	const char *name;
	/* A lease or a put has asked for the path down to `block`, which is in tier t's set. NULL: that leaves no mark.
	 */
	void (*touch)(kvd_index_t *ix, kvd_order_t *order, kvd_set_t t, uint32_t block, uint64_t stamp);
	/* `block` has just joined the set. */
	void (*join)(kvd_index_t *ix, kvd_order_t *order, kvd_set_t t, uint32_t block, uint64_t stamp);
	/* `block` is about to leave the set. */
	void (*leave)(kvd_index_t *ix, kvd_order_t *order, kvd_set_t t, uint32_t block);
	/* The block to evict next: a leaf of the set without pins and references. KVD_NONE: there is none. */
	uint32_t (*victim)(kvd_index_t *ix, kvd_order_t *order, kvd_set_t t);
	/* `block` has lost its last pin or reference. */
	void (*unpin)(kvd_index_t *ix, kvd_order_t *order, kvd_set_t t, uint32_t block);
} kvd_policy_ops_t;

extern const kvd_policy_ops_t kvd_policy_lru;
extern const kvd_policy_ops_t kvd_policy_fifo;

void kvd_order_init(kvd_order_t *order);

/* May tier t give the block up now? */
int kvd_block_is_evictable(const kvd_index_t *ix, const kvd_block_t *block, kvd_set_t t);

#endif
