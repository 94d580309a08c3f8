/* records.h -- what the core knows of its tenants: namespaces, spaces, classes of slots, instances and members. Types
 * only; the other headers of this folder have the functions that change them.
 */
#ifndef KVD_CORE_RECORDS_H
#define KVD_CORE_RECORDS_H

#include "core/block/mirror.h"
#include "core/core.h"
#include "core/index/policy.h"
#include "core/lease/extent_alloc.h"

#define KVD_MAX_NAMESPACES 256u
#define KVD_NS_NAME_MAX    64u
_Static_assert(KVD_MAX_NAMESPACES <= KV_METRIC_NAMESPACES && KVD_NS_NAME_MAX < KV_METRIC_NS_NAME,
	       "each has its metrics");

#define KVD_SPACES_KEPT 4u /* spaces of a namespace, for each number: the closed ones among them have blocks */

#define KVD_MEMBER_WORDS     4u /* members an instance can have: 64 a word */
#define KVD_INSTANCE_MEMBERS (64u * KVD_MEMBER_WORDS)

/* The memory of the host, and that of each GPU: what may be kept of each has a limit of its own. */
#define KVD_HOST_MEM 0u
#define KVD_MEMORIES (1u + KV_MAX_DEVICES)

/* Of memory `first` and those after it: 0: all, 1: those of GPUs. */
static inline uint64_t kvd_sum_of_memories(const uint64_t bytes[KVD_MEMORIES], uint32_t first)
{
	uint64_t sum = 0;

	for (uint32_t memory = first; memory < KVD_MEMORIES; memory++) {
		sum += bytes[memory];
	}

	return sum;
}

#define KVD_LAPS 8u

/* Does the class's pool thrash, and what shows it (admission.h)? */
typedef struct kvd_admission {
	int thrashing;
	uint64_t since;                       /* stamp of the request in which that changed */
	uint32_t lost, lost_hit;              /* blocks that left the last tier, and of them were hit */
	uint32_t offered, would_hit, refused; /* new blocks; those that a pool without admission would have */
	uint32_t lap, next_lap;               /* offers in the running lap; the oldest of: */
	uint64_t laps[KVD_LAPS];              /* stamps at which the last laps ended */
} kvd_admission_t;

/* Slots that can replace each other: one namespace, one geometry, one memory. */
typedef struct kvd_class {
	uint32_t ns;                    /* KVD_NONE: found on disk, and the namespace is not configured */
	uint32_t memory;                /* of the CPU tier; 0: the host's. Others have no disk */
	uint32_t tier_class[KVD_TIERS]; /* the tiers' numbers; KVD_NONE: none            */
	uint64_t slot_bytes;            /* charged a slot                                */
	kvd_order_t order[KVD_TIERS];
	kvd_admission_t admission;
	uint64_t used_ns; /* when a slot was last asked for, or a lease given */
	/* rebalance.h, of each tier: */
	uint64_t unit[KVD_TIERS];         /* bytes of a whole slab or file                                */
	uint64_t slots[KVD_TIERS];        /* when they were counted last                                  */
	uint32_t largest[KVD_TIERS];      /* of a slab of these                                           */
	uint32_t wants[KVD_TIERS];        /* 1: it is short of slots, and waits for a slab */
	uint64_t ask_after_ns[KVD_TIERS]; /* it does not ask before: there was none for it                */
} kvd_class_t;

/* A slab or file on its way from one class to another (rebalance.h). */
typedef struct kvd_rebalance {
	uint32_t wanting;    /* classes that are short of slots */
	uint32_t next_class; /* the class to look at next */
	uint32_t slab;       /* KVD_NONE: none is being emptied */
	uint32_t from;       /* classes */
	uint32_t to;         /* KVD_NONE: none, the namespace is over its maximum */
	uint32_t index;      /* slot to look at next */
	uint32_t moved;      /* slots emptied since the last pass */
	uint64_t named;      /* slots of it that open leases name; of files none are */
	int force;           /* a namespace over its share gives to another: leases do not delay it */
	uint64_t give_up_ns;
	uint64_t next_ns; /* none is picked before */
	uint64_t look_ns; /* none of a namespace over its maximum is picked before */
	int orphans;      /* a class lacks a number: empty slabs of classes that nobody has open go */
} kvd_rebalance_t;

/* What the blocks of a group are. */
typedef struct kvd_group_blocks {
	kvs_geometry_t geometry;
	uint32_t slot_class;
	uint32_t layers; /* writers' ranges are in heads and layers */
	uint32_t pieces; /* digest leaves a layer */
} kvd_group_blocks_t;

typedef struct kvd_space {
	uint32_t ns;
	uint32_t id; /* in its namespace: index of its epoch in the mirror; 0: closed, it has none (ends/space.h) */
	uint32_t tree;
	uint32_t memory;    /* that its blocks lie in; 0: host memory and disk */
	uint32_t leaving;   /* trees of old epochs that are still being taken down */
	uint32_t users;     /* open members that have it open */
	uint32_t handovers; /* entries that name it */
	uint64_t used;      /* stamp of when it was opened, or a member left it, last */
	uint64_t epoch;
	uint8_t root[32];
	uint32_t hash_tokens;
	kv_group_t groups[KV_MAX_GROUPS];
	kvd_group_blocks_t blocks[KV_MAX_GROUPS]; /* in the order of the groups */
	uint32_t group_count;
	char *identity, *layout, *lora; /* lora: NULL for none                           */
} kvd_space_t;

#define KVD_FORGOTTEN 1024u /* hand-overs of a namespace whose consumers are told that they have gone */

typedef struct kvd_ns {
	char name[KVD_NS_NAME_MAX + 1];
	kvd_mirror_t mirror;
	kvd_space_t **spaces;                /* [max_spaces * KVD_SPACES_KEPT], closed ones too; NULL: none */
	uint32_t space_made;                 /* all behind are NULL */
	kvd_space_t **numbers;               /* [max_spaces], the open ones by id; NULL: free, 0 is not used */
	uint32_t number_made;                /* ids up to here have been given */
	uint32_t number_count;               /* of them are */
	int spaces_refused;                  /* the last space that needed a number found none */
	kvd_parts_t parts;                   /* as configured (share.h)                     */
	uint64_t share[KVD_SHARES];          /* in force                                    */
	uint64_t blocks;                     /* in the index                                */
	uint64_t pinned_blocks;              /* kept by pins, each counted once             */
	uint64_t pinned_bytes[KVD_MEMORIES]; /* of them */
	/* Kept by pins of hand-over entries, each counted once. */
	uint64_t handover_bytes[KVD_MEMORIES];
	uint64_t tail_bytes;               /* of these entries, announced keys included   */
	kvd_list_t room_waiters;           /* members that wait until entries may keep more */
	kvd_list_t unclaimed;              /* entries without a consumer, which give way to others */
	kvd_list_t failed;                 /* the same, but FAILED: they have only a reason */
	uint64_t forgotten[KVD_FORGOTTEN]; /* names of those that ended before a consumer came; 0: none */
	uint32_t forgotten_next;           /* is used next */
	uint32_t handovers;                /* the entries                                 */
	uint64_t other_space;              /* hand-overs whose sides met in two spaces, */
	char other_space_last[448];        /* the last one, */
	uint64_t other_space_log_ns;       /* and when the next one is logged */
	kvd_list_t announced;              /* of them wait for blocks to become visible   */
	uint32_t announced_count;
	uint32_t announced_due;     /* from the list's head, are looked at: blocks have become visible */
	kvd_list_t puts;            /* running ones (put.h)                        */
	uint64_t unfinished_blocks; /* slots of puts, those in quarantine too      */
	uint64_t unfinished_bytes[KVD_MEMORIES];
} kvd_ns_t;

/* What an instance has handed over that no consumer has claimed, as found in one look (handover/room.c). */
typedef struct kvd_unclaimed {
	uint64_t has;    /* bytes, or entries */
	uint32_t oldest; /* entry; KVD_NONE: none */
} kvd_unclaimed_t;

typedef struct kvd_instance_rec {
	kvd_instance_t id;
	uint32_t self;
	uint32_t ns;
	char name[129];
	uint8_t secret[32];
	uint32_t secret_len;
	kvd_extent_alloc_t extent_alloc;
	uint8_t *memory;
	uint32_t members[KVD_INSTANCE_MEMBERS]; /* member records; KVD_NONE: free */
	uint32_t member_count;
	uint32_t open_count;
	kvd_list_t leases, puts;
	uint32_t lease_count;
	uint32_t handovers; /* hand-over entries that it is a side of; twice where it is both */
	kvd_unclaimed_t unclaimed;
	uint64_t pinned_bytes[KVD_MEMORIES];
	uint64_t unfinished_bytes[KVD_MEMORIES];
	kvd_link_t of_core; /* all instances */
} kvd_instance_rec_t;

typedef struct kvd_member_rec {
	kvd_member_t id;
	uint32_t instance;
	uint32_t local; /* index in kvd_instance_rec_t.members */
	uint32_t role, rank;
	uint32_t open;
	kvd_link_t of_room; /* of kvd_ns_t.room_waiters while room_wanted > 0 */
	uint64_t room_wanted;
	uint64_t room_kept, room_irreclaimable;      /* of its namespace when it was refused */
	uint64_t spaces[KV_MIRROR_MAX_SPACES / 64u]; /* that it has open: a bit each, by id */
} kvd_member_rec_t;

#endif
