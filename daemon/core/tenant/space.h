/* space.h -- namespaces, classes of slots, and spaces.
 *
 * A space has one tree per epoch. Reset hides the tree and starts the next epoch with an empty one in O(1); what the
 * old tree held is given back in quanta (dismantle.h), its leases being revoked before any slot is free.
 *
 *   space:  --open--> OPEN (epoch e) --reset--> OPEN (e + 1), answered when the superblock has it
 *   tree:   (recovered, no space) --open--> LIVE --reset--> HIDDEN --dismantled--> gone
 */
#ifndef KVD_CORE_SPACE_H
#define KVD_CORE_SPACE_H

#include "core/core.h"
#include "core/index/index.h"
#include "core/block/mirror.h"
#include "core/index/policy.h"

#define KVD_MAX_NAMESPACES 256u
#define KVD_NS_NAME_MAX    64u
_Static_assert(KVD_MAX_NAMESPACES <= KV_METRIC_NAMESPACES && KVD_NS_NAME_MAX < KV_METRIC_NS_NAME,
	       "each has its metrics");

/* Slots that can replace each other: one namespace, one geometry. */
typedef struct kvd_class {
	uint32_t ns;                    /* KVD_NONE: found on disk, and the namespace is not configured */
	uint32_t tier_class[KVD_TIERS]; /* the tiers' numbers; KVD_NONE: none            */
	uint64_t slot_bytes;            /* charged a slot                                */
	kvd_order_t order[KVD_TIERS];
	uint64_t used_ns; /* when a slot was last asked for, or a lease given */
	/* rebalance.h, of each tier: */
	uint64_t unit[KVD_TIERS];         /* bytes of a whole slab or file                                */
	uint64_t slots[KVD_TIERS];        /* when they were counted last                                  */
	uint32_t largest[KVD_TIERS];      /* of a slab of these                                           */
	uint32_t wants[KVD_TIERS];        /* 1: it is short of slots, and waits for its turn to get a slab */
	uint64_t ask_after_ns[KVD_TIERS]; /* it does not ask before: there was none for it                */
} kvd_class_t;

typedef struct kvd_space {
	uint32_t ns;
	uint32_t id; /* in its namespace; place of its epoch in the mirror */
	uint32_t tree;
	uint32_t slot_class;
	uint32_t leaving; /* trees of old epochs that are still being taken down */
	uint64_t epoch;
	uint8_t root[32];
	uint32_t hash_tokens;
	kv_group_t groups[KV_MAX_GROUPS];
	uint32_t group_count;
	uint32_t layers; /* writers' ranges are in heads and layers       */
	uint32_t pieces; /* digest leaves a layer                         */
	kvs_geometry_t geometry;
	char *identity, *layout, *lora; /* lora: NULL for none                           */
} kvd_space_t;

typedef struct kvd_ns {
	char name[KVD_NS_NAME_MAX + 1];
	kvd_mirror_t mirror;
	kvd_space_t **spaces; /* [max_spaces], by id; 0 is not used            */
	uint32_t space_count;
	kvd_parts_t parts;                            /* as configured (share.h)                     */
	uint64_t share[KVD_SHARES];                   /* in force                                    */
	uint64_t blocks;                              /* in the index                                */
	uint64_t pinned_blocks, pinned_bytes;         /* on the path to a claim, each counted once   */
	kvd_list_t puts;                              /* running ones (put.h)                        */
	uint64_t unfinished_blocks, unfinished_bytes; /* slots of puts, those in quarantine too      */
} kvd_ns_t;

/* The space of a request with keys. KV_ERR_NOT_FOUND, KV_ERR_STALE_EPOCH. */
kv_status_t kvd_space_find(kvd_core_t *core, uint32_t ns, uint32_t id, uint64_t epoch, kvd_space_t **p_space);
/* Its group of this id. KV_ERR_UNSUPPORTED: it has none. */
kv_status_t kvd_space_group(const kvd_space_t *space, uint32_t id, const kv_group_t **p_group);
/* Blocks of such a group have no parent: each stands at the root by itself, comes, is pinned and goes by itself. */
static inline int kvd_group_alone(const kv_group_t *group)
{
	return group->rule != KV_RULE_FULL;
}
/* KV_PENDING when the answer waits for the superblock. */
kv_status_t kvd_space_reset(kvd_core_t *core, uint32_t ns, kvd_member_t member, uint64_t frame_id,
			    const kv_msg_space_reset_t *ask, kv_msg_space_reset_reply_t *reply);
/* One quantum of filling mirrors of recovered spaces; 1 while there is more. */
int kvd_space_fill_mirrors(kvd_core_t *core);
/* Bring the mirror up to date with the whole tree, or with a run and all below it, in such quanta. */
void kvd_show_tree(kvd_core_t *core, kvd_tree_t *tree);
void kvd_show_below(kvd_core_t *core, uint32_t node);
/* A tree of an old epoch has gone. When it was the last, what the new one holds is announced. */
void kvd_space_left(kvd_core_t *core, uint32_t ns, uint32_t id);
void kvd_spaces_fini(kvd_core_t *core);

/* The class made of these tiers' classes; a new one, of namespace ns, when there is none. */
kv_status_t kvd_class_find(kvd_core_t *core, const uint32_t tier_class[KVD_TIERS], uint32_t ns, uint32_t *p_class);

#endif
