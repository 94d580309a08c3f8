/* core_impl.h -- the state of a core, which all its modules share. It includes the lowest modules only; a file that
 * calls a higher one includes that module's header (decision 034).
 */
#ifndef KVD_CORE_IMPL_H
#define KVD_CORE_IMPL_H

#include "core/block/events.h"
#include "core/core.h"
#include "core/index/index.h"
#include "core/index/policy.h"
#include "core/base/list.h"
#include "core/base/records.h"
#include "core/base/wheel.h"

#define KVD_EXPLAIN_KEYS    4096u
#define KVD_PENDING_HEADS   32768u
#define KVD_HANDOVER_HEADS  4096u
#define KVD_DURABLE_STORED  1u  /* something is on disk or synced, or waits for it newly */
#define KVD_DURABLE_DROPPED 2u  /* something will not be written after all */
#define KVD_ID_BITS         24u /* of an id: the record's index; above it a sequence number that never comes back */

/* What was last heard of a key, and when. */
typedef struct kvd_ghost {
	uint32_t print; /* of the key; the lowest two bits: kvd_ghost_kind_t */
	uint32_t stamp;
} kvd_ghost_t;

typedef struct kvd_recovery {
	uint32_t tree; /* of the last block: the next one's too, most often */
	uint64_t blocks;
	uint64_t refused;
	int lending;   /* each namespace has had its share */
	int all_found; /* blocks of the disk: what is left is their use */
} kvd_recovery_t;

struct kvd_core {
	kvd_core_config_t config;
	kvd_world_t world;
	const kv_env_t *env; /* &world.env */
	kvs_tier_t *tier[KVD_TIERS];
	kvs_tier_t *coming; /* the disk tier while its blocks are taken in, and tier[KVD_DISK] is still NULL */
	kvd_recovery_t recovery;
	const kvd_policy_ops_t *policy;
	uint32_t gpu_memories; /* memories 1 .. of the CPU tier */

	kvd_index_t ix;
	kvd_ns_t *ns[KVD_MAX_NAMESPACES];
	uint32_t ns_count;
	uint64_t unowned_blocks; /* of trees whose namespace is not configured */
	kvd_class_t *classes;
	uint32_t class_count, class_cap;

	kvd_obj_pool_t pins, leases, puts, pendings, ios, extents, instances, members, handovers;
	kvd_list_t instance_list;
	kvd_instance_t *reaped; /* ids the host has not fetched; with those that live at most twice max_instances */
	uint32_t reaped_count;

	uint64_t sequence;   /* of ids */
	uint64_t last_epoch; /* given to a space */
	uint64_t epochs_drop_ns
		[KVD_MEMORIES]; /* those of a disk (0) or a memory that is full are not looked at before */
	uint64_t stamp;         /* of touches */
	uint64_t now_ns;        /* of the running call */
	const char *why_busy;   /* of the running request; NULL: it is not refused with KV_ERR_BUSY */
	uint64_t gauge_due_ns;
	uint32_t gauge_ns; /* the namespace whose gauges are set next */

	kvd_wheel_t lease_wheel, handover_wheel;
	uint64_t refs; /* sum over leases and transfers */

	kvd_list_t fills; /* queued */
	uint32_t reads, writes;
	int memory_waits;                   /* the oldest of fills waits for its slot's memory */
	uint32_t transit, disk_unlinked;    /* blocks flagged TRANSIT, DISK_UNLINKED */
	uint64_t stores, flushing, flushed; /* sequence numbers of finished stores */
	uint64_t flush_due_ns;              /* 0: nothing to flush; in the time to come: the last one failed */
	uint64_t write_after_ns;            /* no write-behind is started before */
	uint64_t write_wait_ns;             /* how long it waited after the last failure; 0: the last write went well */
	int flush_busy;
	kv_status_t flush_status;

	uint32_t handover_heads[KVD_HANDOVER_HEADS]; /* by transfer id */
	uint32_t handover_sweep;                     /* entries before it are looked at: a side or an epoch has ended */
	uint32_t announced_count;                    /* entries that wait for blocks to become visible */
	uint32_t announced_ns;                       /* namespaces are looked at in rotation: the next one */
	uint64_t announced_seen;                     /* ix.inserted when all of these entries became due last */

	kvd_list_t run_puts; /* to look at again */
	uint32_t pending_heads[KVD_PENDING_HEADS];
	uint32_t run_count;
	uint32_t put_blocks;       /* blocks of one put that may become visible in a row now */
	int puts_left;             /* a put has had its share of blocks and goes on with the next tick */
	uint32_t durable_owed;     /* ended puts that owe a DURABLE */
	int showing;               /* some mirror is not filled after recovery */
	uint32_t durable_changed;  /* KVD_DURABLE_*: what acknowledgements owed wait for has changed */
	uint64_t durable_question; /* asked of runs since the last look: will its blocks be written? */
	int disk_lost; /* the tier has taken blocks back, and acknowledgements owed have not been looked at */

	uint32_t dead_trees;                /* to dismantle, linked by kvd_tree_t.link */
	kvd_list_t dead_nodes;              /* to dismantle */
	struct kvd_withdrawal *withdrawals; /* oldest first (withdraw.h) */
	uint32_t pending_withdrawals;       /* those, and those that the disk tier is recording */
	uint32_t withdrawn_tops;            /* on dead_nodes, by withdrawals */
	uint64_t withdrawn;                 /* blocks taken down below them */
	kvd_ghost_t *ghosts;                /* keys that are in no tier (admission.h) */
	uint64_t ghost_mask;

	kvd_gather_t gather;
	kvd_staging_fn staging;
	void *staging_ctx;
	kvd_answer_fn answer;
	void *answer_ctx;
	kvd_rebalance_t rebalance[KVD_TIERS];
	uint64_t class_down_ns; /* blocks of no further class are taken down before, where its number is only late */
	uint32_t pending_resets;
	uint32_t outstanding;             /* callbacks that the tiers owe */
	void (*closed)(kvd_core_t *core); /* destroyed: frees the memory with the last callback; NULL: not yet */
	uint8_t *explain;                 /* reply of EXPLAIN */
};

static inline void kvd_count(kvd_core_t *core, kv_metric_t id, uint64_t n)
{
	kv_metric_add(core->world.metrics, id, n);
}

static inline void kvd_count_ns(kvd_core_t *core, uint32_t ns, kv_ns_metric_t id, uint64_t n)
{
	kv_ns_metric_add(core->world.metrics, ns, id, n);
}

/* Every callback of a tier begins here: 1 when the core has been destroyed meanwhile, and nothing of it may be touched.
 */
static inline int kvd_callback_enter(kvd_core_t *core)
{
	kv_assert(core->outstanding > 0);
	core->outstanding--;
	if (!core->closed) {
		return 0;
	}
	if (core->outstanding == 0) {
		core->closed(core);
	}

	return 1;
}

/* The disk tier, also while it is coming. */
static inline kvs_tier_t *kvd_disk(const kvd_core_t *core)
{
	return core->coming ? core->coming : core->tier[KVD_DISK];
}

/* Is there a disk for the class's blocks? None for those in the memory of a GPU. */
static inline int kvd_class_has_disk(const kvd_core_t *core, uint32_t slot_class)
{
	return core->tier[KVD_DISK] && core->classes[slot_class].memory == 0;
}

static inline kvd_instance_rec_t *kvd_instance_at(const kvd_core_t *core, uint32_t self)
{
	return kvd_obj_at(&core->instances, self);
}

/* The space's group of this id. KV_ERR_UNSUPPORTED: it has none. */
static inline kv_status_t kvd_space_group(const kvd_space_t *space, uint32_t id, const kv_group_t **p_group)
{
	for (uint32_t i = 0; i < space->group_count; i++) {
		if (space->groups[i].id == id) {
			*p_group = &space->groups[i];
			return KV_OK;
		}
	}

	return KV_ERR_UNSUPPORTED;
}

/* Of one of the space's groups. */
static inline const kvd_group_blocks_t *kvd_blocks_of(const kvd_space_t *space, const kv_group_t *group)
{
	return &space->blocks[group - space->groups];
}

static inline uint64_t kvd_id_make(kvd_core_t *core, uint32_t index)
{
	return ++core->sequence << KVD_ID_BITS | index;
}
static inline uint32_t kvd_id_index(uint64_t id)
{
	return (uint32_t)(id & ((1u << KVD_ID_BITS) - 1));
}

#define KVD_DISK_IS_BUSY "the disk tier is busy with other writes; try again" /* for kvd_busy() */

/* The running request is refused until later: `why` names what is awaited, or the limit, and what to change. Static. */
static inline kv_status_t kvd_busy(kvd_core_t *core, const char *why)
{
	core->why_busy = why;

	return KV_ERR_BUSY;
}

/* A member has gone, or a space has another epoch: entries with them end in quanta. */
static inline void kvd_handovers_sweep(kvd_core_t *core)
{
	core->handover_sweep = core->handovers.made;
}

/* What the header grants is over. A member that still copies sees this when it looks again, if it can have seen
 * anything of a later use of the slots: a release store alone would let later stores pass it. */
static inline void kvd_grant_revoke(kv_lease_header_t *header)
{
	atomic_store_explicit(&header->state, KV_LEASE_REVOKED, memory_order_release);
	atomic_thread_fence(memory_order_release);
}

#endif
