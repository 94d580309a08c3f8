/* index.h -- the radix index: which blocks are known, and in which tiers' sets they are.
 *
 * A tree per (space, epoch). A node is a run of blocks, each the parent of the next; children hang under a run's end
 * only, so that a path is a few runs and its CPU slots are a few plain arrays. (key, group) -> block is a hash table
 * over all trees.
 *
 *            tree                         slots[]  3 4 5 6        one u32 a block: copied as it is into a lease
 *             |                           n[CPU] = 4              blocks of the run in the CPU set: always a prefix
 *                                                                 of the run
 *        [b1 b2 b3 b4]                    n[DISK] = 2
 *         /        \
 *   [b5 b6 b7]    [c5 c6]
 *
 * Each tier's set is prefix-closed, so one counter a run and tier says it all: block i is in tier t's set iff i < n[t].
 * State of a block, per tier:   out --join (parent is in, run's next)--> in --leave (no child is in)--> out
 * State of a block:             insert --> known --> remove (in no set, no child, no reference)
 *
 * A pin keeps its block and the path above it, so the pinned blocks of a run are a prefix of it as well. `pinned`
 * counts each of them once, whatever the number of its pins (decision 025); and so once more for the pins of hand-over
 * entries alone, which have a limit of their own (decision 042).
 *
 * Blocks of `window` and `state` groups are unchained: each is a run of one block at the root, which joins and leaves a
 * set without regard to others (decision 010). A tree may have as many of them as the index holds. A private block is
 * unchained in every group (decision 044): it is neither in the mirror nor in events, and does not go to disk. What a
 * lease or hand-over has held it leaves when the last one ends.
 *
 * A run splits where a branch begins and is merged when the branch has gone; ids of blocks never change.
 * Invariants (kvd_index_check): the above, counts of children, depths, hash entries, marks on every leaf of a set.
 */
#ifndef KVD_CORE_INDEX_H
#define KVD_CORE_INDEX_H

#include "core/base/list.h"

#include "kv/metric.h"
#include "kvs/tier.h"

#define KVD_TIERS   2u
#define KVD_RUN_MAX 1024u

typedef enum kvd_set { KVD_CPU = 0, KVD_DISK = 1 } kvd_set_t;

/* block.flags */
#define KVD_FILLING       1u /* its CPU slot is being read from disk                                     */
#define KVD_TRANSIT       2u /* its CPU slot holds the bytes, but its parent is not in the CPU set */
#define KVD_DISK_UNLINKED 4u /* its disk slot holds the bytes, but its parent is not in the disk set */
#define KVD_OFF_LRU_CPU   8u /* its mark was found pinned and is off the list (policy.h) */
#define KVD_OFF_LRU_DISK  16u
#define KVD_EVENT_PENDING 32u  /* not announced to subscribers yet (events.h) */
#define KVD_DUP_CHECK     64u  /* named by the PUT_START that is being checked, and by nothing else            */
#define KVD_HANDED_OVER   128u /* a hand-over entry has a pin on it: the first of its pins (block.h) */

/* 64 bytes: one cache line of what is known about a block. Its CPU slot lies in its run. */
typedef struct kvd_block {
	kv_key_t key;
	uint64_t event_hash;
	kvs_loc_t disk; /* slot KV_SLOT_NONE: none                                                 */
	uint32_t cpu_gen;
	uint32_t node;
	uint32_t hash_next;
	uint32_t refs;   /* references of leases, of writes below it, and of subtrees that are being taken down */
	uint32_t io;     /* transfer that reads or writes one of its slots (transfer.h)             */
	kvd_list_t pins; /* leases, puts and hand-overs that end here (block.h)                   */
	uint16_t pos;    /* in its run                                                              */
	uint8_t group;
	uint8_t flags;
} kvd_block_t;
_Static_assert(sizeof(kvd_block_t) == 64, "one cache line");

/* Recency of a run up to a position (policy.h): blocks [0, pos] were touched at `stamp` or later. */
typedef struct kvd_mark {
	uint64_t stamp;
	kvd_link_t order;   /* of the class; oldest first                                               */
	uint32_t shallower; /* next mark of this node and tier                                          */
	uint32_t node;
	uint32_t pos;
	uint32_t off_lru;
} kvd_mark_t;

/* node.flags */
#define KVD_NODE_DEAD      1u  /* this run and everything below is invisible and being taken down          */
#define KVD_NODE_QUEUED    2u  /* waits for write-behind                                                   */
#define KVD_NODE_ASIDE     4u  /* the device cannot read its first block now: hidden, with everything below */
#define KVD_NODE_PRIVATE   8u  /* its one block is private: QUEUED, it waits to be dropped */
#define KVD_NODE_HELD      16u /* PRIVATE: a lease or a hand-over has had it */
#define KVD_NODE_WITHDRAWN 32u /* DEAD at its top, since it was withdrawn */

/* Whose pins are counted: those of all owners, and those of hand-over entries. */
typedef enum kvd_pin_class { KVD_PINS_ALL, KVD_PINS_HANDOVER, KVD_PIN_CLASSES } kvd_pin_class_t;

typedef struct kvd_pinned {
	uint32_t blocks;   /* blocks [0, blocks) of the run are pinned */
	uint32_t children; /* child nodes with pinned blocks           */
	uint32_t ends;     /* blocks of the run with pins of their own */
} kvd_pinned_t;

typedef struct kvd_node {
	uint32_t tree;
	uint32_t slot_class; /* of its blocks, which are of one group                        */
	uint32_t parent;
	kvd_list_t children;
	kvd_link_t siblings;
	uint32_t child_count;
	uint32_t depth0; /* blocks before the run                                         */
	uint32_t len, cap;
	uint32_t n[KVD_TIERS];
	uint32_t children_in[KVD_TIERS]; /* child nodes whose first block is in the set                    */
	uint32_t hit; /* blocks [0, hit) were hit since they were saved; if there are any, so were all above */
	kvd_pinned_t pinned[KVD_PIN_CLASSES];
	uint32_t marks[KVD_TIERS]; /* deepest first                                                  */
	kvd_link_t queue;          /* of write-behind while QUEUED, of what is taken down while DEAD */
	uint32_t flags;
	uint64_t answer; /* the last question about the path to this run, and its answer, as a number (decision 026) */
	uint32_t *slots; /* [cap] CPU slots; KV_SLOT_NONE: none                            */
	uint32_t *ids;   /* [cap] blocks; same allocation                                  */
} kvd_node_t;

/* Blocks of one group lie in slots of one class. */
typedef struct kvd_tree_group {
	uint32_t slot_class;
	uint8_t group;
} kvd_tree_group_t;

typedef struct kvd_tree {
	uint32_t link; /* next tree to take down */
	uint32_t live;
	uint32_t space;                         /* index in kvd_ns_t.spaces; KVD_NONE: recovered, not opened yet  */
	uint32_t ns;                            /* KVD_NONE: recovered, not opened yet                            */
	kvd_tree_group_t groups[KV_MAX_GROUPS]; /* that have blocks, or may have */
	uint32_t group_count;
	kvd_list_t children;
	uint32_t hidden;      /* 1: no lookup finds anything in it                              */
	uint32_t puts;        /* that refer to it: an empty hidden tree stays until the last has ended */
	uint32_t pins;        /* on its blocks */
	uint32_t leaving;     /* 1: on the list of trees to take down */
	uint32_t mute;        /* 1: new blocks are not announced yet (events.h) */
	uint32_t cursor;      /* next run of a walk in quanta (parents first); KVD_NONE: none    */
	uint32_t floor;       /* the walk ends at a run with fewer blocks before it            */
	uint32_t dead_nodes;  /* its nodes flagged dead at their top */
	uint32_t aside_nodes; /* its nodes flagged ASIDE */
	uint64_t alive;       /* the answer of runs that were not below one of them when the last one was added */
	uint64_t shown; /* the question whether a run is dead or below one set aside; a new one with every change */
	uint64_t epoch;
	uint64_t blocks;
	uint64_t private_blocks; /* of them */
	uint64_t *tally;         /* counts the blocks of all trees of one owner (share.h); NULL: not counted */
	uint64_t in[KVD_TIERS];
	uint8_t root[32];
} kvd_tree_t;

typedef struct kvd_index {
	const kv_env_t *env;
	kv_metrics_t *metrics;
	kvd_obj_pool_t blocks, nodes, marks, trees;
	uint32_t *heads; /* block + 1; 0: empty                                            */
	uint64_t head_mask;
	uint64_t seed[2];
	uint64_t dead_nodes;  /* nodes flagged dead at their top, of all trees                  */
	uint64_t answers;     /* numbers given to answers of walks                              */
	uint64_t extra_marks; /* marks beyond one a node and tier                               */
	kvd_list_t queue;     /* write-behind's nodes, oldest first                             */
	kvd_list_t unheld;    /* nodes of private blocks to be dropped                          */
	uint64_t queued;
	uint64_t inserted; /* changes when a lookup may find a block that it did not find before */
} kvd_index_t;

/* Both are borrowed until kvd_index_fini(). KV_ERR_ARG: max_blocks is 0 or too large; KV_ERR_NOMEM. */
kv_status_t kvd_index_init(kvd_index_t *ix, const kv_env_t *env, kv_metrics_t *metrics, uint64_t max_blocks);
void kvd_index_fini(kvd_index_t *ix);

kv_status_t kvd_tree_create(kvd_index_t *ix, uint32_t *p_tree);
void kvd_tree_destroy(kvd_index_t *ix, uint32_t tree); /* must be empty */

static inline kvd_block_t *kvd_block_at(const kvd_index_t *ix, uint32_t id)
{
	return kvd_obj_at(&ix->blocks, id);
}
static inline kvd_node_t *kvd_node_at(const kvd_index_t *ix, uint32_t id)
{
	return kvd_obj_at(&ix->nodes, id);
}
static inline kvd_tree_t *kvd_tree_at(const kvd_index_t *ix, uint32_t id)
{
	return kvd_obj_at(&ix->trees, id);
}
static inline kvd_node_t *kvd_node_of(const kvd_index_t *ix, const kvd_block_t *block)
{
	return kvd_node_at(ix, block->node);
}
static inline kvd_tree_t *kvd_tree_of(const kvd_index_t *ix, const kvd_block_t *block)
{
	return kvd_tree_at(ix, kvd_node_of(ix, block)->tree);
}
/* Class of the slots of a block. */
static inline uint32_t kvd_class_of(const kvd_index_t *ix, const kvd_block_t *block)
{
	return kvd_node_of(ix, block)->slot_class;
}
/* Class of a group's blocks; KVD_NONE: the tree has no such group. */
static inline uint32_t kvd_tree_class(const kvd_tree_t *tree, uint8_t group)
{
	for (uint32_t i = 0; i < tree->group_count; i++) {
		if (tree->groups[i].group == group) {
			return tree->groups[i].slot_class;
		}
	}

	return KVD_NONE;
}
static inline uint32_t *kvd_slot_of(const kvd_index_t *ix, const kvd_block_t *block)
{
	return &kvd_node_of(ix, block)->slots[block->pos];
}
/* 1 for the first block of a prompt. */
static inline uint32_t kvd_depth_of(const kvd_index_t *ix, const kvd_block_t *block)
{
	return kvd_node_of(ix, block)->depth0 + block->pos + 1;
}
static inline int kvd_in_set(const kvd_index_t *ix, const kvd_block_t *block, kvd_set_t t)
{
	return block->pos < kvd_node_of(ix, block)->n[t];
}
static inline int kvd_is_private(const kvd_index_t *ix, const kvd_block_t *block)
{
	return (kvd_node_of(ix, block)->flags & KVD_NODE_PRIVATE) != 0;
}
/* kv_tier_t bits. */
uint8_t kvd_tiers_of(const kvd_index_t *ix, const kvd_block_t *block);

/* The block, or KVD_NONE. Nothing hidden, dead or set aside is found. */
uint32_t kvd_index_find(const kvd_index_t *ix, uint32_t tree, const kv_key_t *key, uint8_t group);
/* The block of any tree that has this disk slot; KVD_NONE: none. */
uint32_t kvd_index_find_on_disk(const kvd_index_t *ix, const kv_key_t *key, uint8_t group, kvs_loc_t disk);
/* Tier bits of all blocks of namespace `ns` with this key, UNREADABLE for one that is set aside: as the mirror has it.
 */
uint8_t kvd_index_tiers_of_key(const kvd_index_t *ix, uint32_t ns, const kv_key_t *key, uint8_t group);
/* A block of this key that is being taken down in the tree and is not EVENT_PENDING; KVD_NONE: none. */
uint32_t kvd_index_find_dying(const kvd_index_t *ix, uint32_t tree, const kv_key_t *key, uint8_t group);
/* The visible block of this key whose slot in tier t's set is at `loc`, of any tree; KVD_NONE: none. */
uint32_t kvd_index_find_in_slot(const kvd_index_t *ix, const kv_key_t *key, uint8_t group, kvd_set_t t, kvs_loc_t loc);
/* Is a block of this key being taken down in the tree, and no other one there? */
int kvd_index_is_quarantined(const kvd_index_t *ix, uint32_t tree, const kv_key_t *key, uint8_t group);
/* Is the block below a node that is being taken down? O(1), but for one visit of each run after each
 * kvd_index_mark_dead() in its tree. */
int kvd_index_is_dead(const kvd_index_t *ix, const kvd_block_t *block);
/* Is it dead because it, or a block above it, was withdrawn? */
int kvd_index_is_withdrawn(kvd_index_t *ix, const kvd_block_t *block);
/* Is it neither dead nor below a run that is set aside? Lookups find such blocks, and the mirror has them as hits. */
int kvd_index_is_shown(const kvd_index_t *ix, const kvd_block_t *block);
/* The block with this key that lookups do not find because it, or one above it, is set aside; KVD_NONE: none. */
uint32_t kvd_index_find_aside(const kvd_index_t *ix, uint32_t tree, const kv_key_t *key, uint8_t group);
/* The node and everything below are hidden, until `aside` is 0. */
void kvd_index_set_aside(kvd_index_t *ix, uint32_t node, int aside);
/* The node and everything below are dead from now on. */
void kvd_index_mark_dead(kvd_index_t *ix, uint32_t node);
/* The number of a new question for kvd_index_passes_through(). */
uint64_t kvd_index_new_question(kvd_index_t *ix);
/* Does the path to `block` pass through `above`, or end there? One question about one `above` visits each run once,
 * whatever the number of blocks asked for. */
int kvd_index_passes_through(const kvd_index_t *ix, uint32_t block, uint32_t above, uint64_t question);

/* Add a block under `parent` (KVD_NONE: at the root). It is in no set yet. KV_ERR_LIMIT: the index is full;
 * KV_ERR_NOMEM. */
kv_status_t kvd_index_insert(kvd_index_t *ix, uint32_t tree, uint32_t parent, const kvs_meta_t *meta,
			     uint32_t *p_block);
/* The block, new and at the root, is private from now on. */
void kvd_index_make_private(kvd_index_t *ix, uint32_t block);
/* Last of its run, without children, in no set. */
int kvd_index_is_removable(const kvd_index_t *ix, const kvd_block_t *block);
void kvd_index_remove(kvd_index_t *ix, uint32_t block);

/* May the block join: is its parent in the set, and is it the next of its run? */
int kvd_index_can_join(const kvd_index_t *ix, const kvd_block_t *block, kvd_set_t t);
void kvd_index_join(kvd_index_t *ix, uint32_t block, kvd_set_t t);
/* In the set, and no child is. */
int kvd_index_is_leaf(const kvd_index_t *ix, const kvd_block_t *block, kvd_set_t t);
void kvd_index_leave(kvd_index_t *ix, uint32_t block, kvd_set_t t);

uint32_t kvd_index_parent(const kvd_index_t *ix, uint32_t block);
/* The block of this depth on the path to `block`; depth is 1 .. the block's own. */
uint32_t kvd_index_ancestor(const kvd_index_t *ix, uint32_t block, uint32_t depth);
/* Ids and CPU slots of the blocks on the path to `block` below depth `skip`, shallow first; either array may be
 * NULL. */
void kvd_index_copy_path(const kvd_index_t *ix, uint32_t block, uint32_t skip, uint32_t *ids, uint32_t *slots);
/* Depth of the deepest block on the path to `block` that is in the set; 0: none. */
uint32_t kvd_index_depth_in(const kvd_index_t *ix, uint32_t block, kvd_set_t t);

/* Depth of the deepest pinned block on the path to `block`; 0: none. */
uint32_t kvd_index_depth_pinned(const kvd_index_t *ix, uint32_t block, kvd_pin_class_t pins);
/* A lease or a hand-over has the path down to `block`: all of it was hit. */
void kvd_index_mark_hit(kvd_index_t *ix, uint32_t block);
static inline int kvd_index_was_hit(const kvd_index_t *ix, const kvd_block_t *block)
{
	return block->pos < kvd_node_of(ix, block)->hit;
}

/* The block has its first pin of the class, or has lost its last one. Returns how many blocks that pins or releases. */
uint32_t kvd_index_pin_path(kvd_index_t *ix, uint32_t block, kvd_pin_class_t pins);
uint32_t kvd_index_unpin_path(kvd_index_t *ix, uint32_t block, kvd_pin_class_t pins);
/* Has the block a pin of its own? */
static inline int kvd_index_has_pin(const kvd_block_t *block, kvd_pin_class_t pins)
{
	return pins == KVD_PINS_ALL ? block->pins.head != KVD_NONE : (block->flags & KVD_HANDED_OVER) != 0;
}

/* Make the block the first of its run, so that its subtree is a node's subtree. KV_ERR_NOMEM, KV_ERR_LIMIT. */
kv_status_t kvd_index_split_before(kvd_index_t *ix, uint32_t block);

/* The next run of the tree, parents first: the first below `node`, else its next sibling or that of a run above it.
 * KVD_NONE: that was the last. */
uint32_t kvd_index_next_run(const kvd_index_t *ix, uint32_t node);

/* Write-behind's queue of nodes; that of private blocks to be dropped. */
void kvd_queue_push(kvd_index_t *ix, uint32_t node);
void kvd_queue_remove(kvd_index_t *ix, uint32_t node);

/* Walks everything; 1 when all invariants hold, else 0 and a sentence. */
int kvd_index_check(const kvd_index_t *ix, char *why, size_t cap);

#endif
