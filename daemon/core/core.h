/* daemon/core/core.h -- the core: index, leases, puts, tiers and policy of one daemon, as a library without I/O.
 *
 * One thread calls everything here. The core reaches the outside only through kvd_world_t and the tiers, so the daemon
 * and the deterministic universe of the tests run the same code. Long work is cut into quanta, each bounded by a count
 * of blocks or entries, run by kvd_core_tick().
 *
 * Hosts:    daemon/io (sockets), tests/core (a seeded universe).
 * Modules:  base/, index/ (radix tree), block/, lease/, put/, handover/, ends/; README.md lists them
 */
#ifndef KVD_CORE_H
#define KVD_CORE_H

#include "kv/env.h"
#include "kv/identity.h"
#include "kv/metric.h"
#include "kv/shm.h"
#include "kv/wire.h"
#include "kvs/tier.h"

typedef struct kvd_core kvd_core_t;

/* Ids are never reused within an incarnation; 0 is none. */
typedef uint64_t kvd_member_t;
typedef uint64_t kvd_instance_t;

/* One event for subscribers, borrowed for the call. STORED: each block is the parent of the next (of a full group;
 * others come one by one). REMOVED: a set, leaf first. Arrays may be NULL with count 0. Nothing of a new epoch is
 * announced before all of the old one has been removed. */
typedef enum kvd_event_type { KVD_EVENT_STORED, KVD_EVENT_REMOVED } kvd_event_type_t;
typedef struct kvd_event {
	kvd_event_type_t type;
	const char *ns;
	uint32_t space; /* of the namespace: not its number, which others get */
	uint8_t group;
	kv_group_rule_t rule;
	kv_tier_t medium;
	uint32_t count;         /* blocks */
	const uint64_t *hashes; /* event hashes */
	int has_parent;
	uint64_t parent_hash;
	uint32_t block_tokens;
	const uint32_t *tokens; /* count x block_tokens, or NULL */
	const char *lora;       /* identity's adapter, NULL for none */
} kvd_event_t;

/* Slots that an instance may touch: a lease or a put. */
typedef struct kvd_grant {
	uint64_t id; /* of the lease or put */
	kvd_instance_t instance;
	const kv_lease_header_t *header; /* kind, n, skip, group and space are read from it */
	kvs_loc_t deepest;               /* slot of the deepest block; of an unchained group: of the last */
	const kv_key_t *deepest_key;
	uint64_t expiry_ns; /* 0: never (puts) */
} kvd_grant_t;

/* One request, decoded. */
typedef struct kvd_ask {
	uint32_t ns;
	kvd_member_t member; /* 0: not joined */
	uint16_t code;
	uint64_t frame_id; /* handed back with a late answer */
	const kv_msg_t *msg;
} kvd_ask_t;

struct kv_json; /* kv/json.h */

typedef struct kvd_world {
	kv_env_t env;
	void *ctx;
	kvs_tier_t *cpu;  /* never NULL */
	kvs_tier_t *disk; /* NULL: no disk tier */
	kv_metrics_t *metrics;
	/* Queue a notice (KV_NOTICE_LIST) to a member. Never blocks, never fails: a member that does not read is closed
	 * by the host. */
	void (*notify)(void *ctx, kvd_member_t member, uint16_t code, const kv_msg_t *msg);
	/* Queue an event. Never blocks; events of one call to the core form one batch. */
	void (*publish)(void *ctx, const kvd_event_t *event);
	/* Add a record of slots to the ledger, and remove it (kvs_pool_add_record). */
	kv_status_t (*ledger_add)(void *ctx, const kvd_grant_t *grant);
	void (*ledger_remove)(void *ctx, uint64_t id);
	/* Digests of a put into the digest table (kvs_pool_set_leaves), and roots (kvs_pool_compute_roots). */
	kv_status_t (*set_leaves)(void *ctx, kvs_loc_t loc, const kvs_leaf_span_t *span, const uint64_t *values);
	kv_status_t (*compute_roots)(void *ctx, kvs_loc_t loc);
	/* Add what the host knows of a member to its object in STATUS. NULL: nothing. */
	void (*describe)(void *ctx, kvd_member_t member, struct kv_json *json);
	/* Not NULL: the disk tier is off, and its epochs are unknown. Note that this space was reset; kvd_core_attach()
	 * is called when the note has become an epoch on disk. Other than KV_OK: the reset is refused. */
	kv_status_t (*note_reset)(void *ctx, const kvs_epoch_t *epoch);
} kvd_world_t;

typedef enum kvd_policy_kind { KVD_POLICY_LRU = 0, KVD_POLICY_FIFO = 1 } kvd_policy_kind_t;

typedef struct kvd_core_config {
	uint64_t incarnation;
	uint64_t max_index_blocks; /* blocks the index may hold; sizes the mirrors too */
	uint32_t max_spaces;       /* that are open, and one, per namespace; <= KV_MIRROR_MAX_SPACES */
	uint32_t max_instances;
	uint32_t max_members;
	uint32_t max_leases; /* per instance */
	/* Per instance. 0 for either: both together may be half of the CPU share. */
	uint64_t max_pinned_bytes;     /* slots that read leases keep from eviction, promotions included */
	uint64_t max_unfinished_bytes; /* slots of unfinished puts */
	uint64_t lease_ttl_ns;         /* default, and the largest granted */
	uint32_t max_handovers;        /* hand-over entries of a namespace; 0: none. An instance: max_leases of them */
	uint64_t max_handover_bytes;   /* that they keep, of a namespace; 0: a quarter of its CPU share */
	uint64_t handover_ttl_ns;      /* of an entry without a consumer, and of a consumer's wait */
	uint64_t handover_min_ttl_ns;  /* of an entry without a consumer, where another lacks room */
	uint64_t put_ttl_ns; /* a put without KEEP or PUT_END for this time is revoked when its namespace lacks room */
	uint32_t write_behind_depth; /* disk writes in flight */
	uint32_t read_depth;         /* disk reads in flight */
	int write_behind;            /* 1: eager, parent first */
	int admission; /* 1: new blocks are taken by second use while the pool thrashes (block/admission.h) */
	kvd_policy_kind_t policy;
	uint64_t
		stale_ns; /* age of a heartbeat at which clients take the daemon for stalled (kv/shm.h); 0: the usual */
} kvd_core_config_t;

/* Nothing of `world` is copied but the struct itself; tiers stay the host's and are closed after kvd_core_destroy().
 * Transfers may still be in flight then: what they need of the core lives until the last of their callbacks has run. */
kv_status_t kvd_core_create(const kvd_core_config_t *config, const kvd_world_t *world, kvd_core_t **p_core);
void kvd_core_destroy(kvd_core_t *core);

/* ---- namespaces: one per listening socket, given at start ------------------------------------ */

/* Size of a mirror for this configuration, header included. */
uint64_t kvd_mirror_bytes(const kvd_core_config_t *config);
/* `mirror`: zeroed, page-aligned memory of kvd_mirror_bytes(), shared with clients by the host. */
kv_status_t kvd_namespace_add(kvd_core_t *core, const char *name, void *mirror, uint32_t *p_ns);
/* What a namespace has a share of (share.h). */
typedef enum kvd_resource {
	KVD_SHARE_CPU,
	KVD_SHARE_DISK,
	KVD_SHARE_INDEX,
	KVD_SHARE_GPU, /* of the first GPU; those of the others follow */
	KVD_SHARES = KVD_SHARE_GPU + KV_MAX_DEVICES
} kvd_resource_t;
/* Bytes of the tiers, blocks of the index. `given` 0, the value without this call: an equal part of what the other
 * namespaces were not given. `max`: what the namespace never exceeds, borrowed or not, nor its share; 0: no maximum.
 * KV_ERR_ARG: no such namespace. */
typedef struct kvd_parts {
	uint64_t given[KVD_SHARES], max[KVD_SHARES];
} kvd_parts_t;
kv_status_t kvd_namespace_share(kvd_core_t *core, uint32_t ns, const kvd_parts_t *parts);
/* The memory of a GPU (kvs/pool.h), which the CPU tier given to the core must be able to take (kvs/memories.h): spaces
 * can be opened in it from now on. Stays the host's until the core is destroyed. KV_ERR_LIMIT, KV_ERR_UNSUPPORTED. */
kv_status_t kvd_core_add_memory(kvd_core_t *core, kvs_tier_t *pool, uint32_t *p_memory);
/* Take in the blocks that a memory has kept through a crash, after all namespaces are there and before members join.
 * Spaces appear when they are opened, with the epoch that the memory has kept. What there is no memory for is left out,
 * counted and logged. */
void kvd_core_adopt(kvd_core_t *core, uint32_t memory);
/* Take in what the disk tier has kept. Call once, after all namespaces are there and before members join. Spaces appear
 * when they are opened; until then their blocks wait under their root digest. */
kv_status_t kvd_core_recover(kvd_core_t *core);
/* The disk tier that was off (kvd_world_t.note_reset) is there: take in some of its blocks. KV_PENDING: call it again,
 * with everything else going on meanwhile. Nothing of them is visible before kvd_core_attach(), and the tier stays open
 * from then on. KV_ERR_LIMIT, KV_ERR_NOMEM, at the first call only: the tier is not used, and may be closed. */
kv_status_t kvd_core_take_in(kvd_core_t *core, kvs_tier_t *disk);
/* All are taken in, and each noted reset is an epoch on disk. Each space that is open goes from its temporary epoch to
 * the one on disk, as by a reset: what was kept under the temporary epoch leaves, and requests that name it are
 * answered STALE_EPOCH. */
void kvd_core_attach(kvd_core_t *core);

/* ---- members --------------------------------------------------------------------------------- */

/* Memory of the new member and its instance, given by the host: the lease area (one per instance: `lease_area` is what
 * the host gave for the first member) and the member area, header fields of both filled in by the core. */
typedef struct kvd_join {
	uint32_t ns;
	const char *instance; /* NUL-terminated id */
	const uint8_t *secret;
	uint32_t secret_len;
	uint32_t role;
	uint32_t rank;
} kvd_join_t;

/* Two steps, since the areas' sizes depend on whether the instance is new. find: existing instance or 0; checks the
 * secret (KV_ERR_SECRET). */
kv_status_t kvd_instance_find(kvd_core_t *core, const kvd_join_t *join, kvd_instance_t *p_instance);
/* A new instance with its lease area (zeroed, lease_bytes long, stays the host's until kvd_instances_reap() says the
 * instance has gone). */
kv_status_t kvd_instance_create(kvd_core_t *core, const kvd_join_t *join, void *lease_area, uint64_t lease_bytes,
				kvd_instance_t *p_instance);
/* When it fails, drop a new instance: without members nothing would ever end it. */
kv_status_t kvd_member_add(kvd_core_t *core, kvd_instance_t instance, const kvd_join_t *join, kvd_member_t *p_member);
/* The instance ends if it has no member. */
void kvd_instance_drop(kvd_core_t *core, kvd_instance_t instance);

/* The member's connection has ended (end of file). Its puts are revoked; slots it may still touch stay QUARANTINED
 * until it is dead or drained. With the last open member of an instance that has no such slot the instance ends
 * (kvd_instances_reap), and with it all its closed members. */
void kvd_member_closed(kvd_core_t *core, kvd_member_t member);
/* `by` is an open member of the same instance, rank and role, and a later connection of the same attachment as
 * `closed`: what the core waits for from `closed` it waits for from `by` now, and `closed` is gone. `drained`: that
 * connection's copies have ended, nothing of it is waited for. */
void kvd_member_absorb(kvd_core_t *core, kvd_member_t closed, kvd_member_t by, int drained);
/* It no longer touches anything, so nothing of it is waited for. Its socket is at end of file, and its process has
 * ended (`died`: that revokes its instance's puts, as ranks write them together), or its last message said that it has
 * unmapped everything. */
void kvd_member_gone(kvd_core_t *core, kvd_member_t member, int died);
/* Instances that ended since the last call: the host frees their areas. Returns how many ids were written. */
uint32_t kvd_instances_reap(kvd_core_t *core, kvd_instance_t *out, uint32_t cap);

/* ---- requests -------------------------------------------------------------------------------- */

/* A space: `identity` and `layout` are canonical texts the host has checked; geometry follows from the layout. */
typedef struct kvd_space_open {
	uint32_t ns;
	kvd_member_t member; /* that has it open from now on, until SPACE_CLOSE or its end; 0: none */
	int known;           /* 1: KV_ERR_NOT_FOUND where it was never opened */
	const char *identity;
	uint32_t identity_len;
	uint8_t root[32];
	uint32_t hash_tokens;
	const kv_group_t *groups; /* [group_count], 1 .. KV_MAX_GROUPS of them: copied */
	uint32_t group_count;
	const kvs_geometry_t *geometries; /* [group_count], of their blocks: copied */
	const char *layout;               /* NUL-terminated */
	const char *lora;                 /* NULL: none */
	uint32_t memory; /* that its blocks lie in; 0: host memory and disk, else kvd_core_add_memory() */
} kvd_space_open_t;
typedef struct kvd_space_info {
	uint32_t space;
	uint64_t epoch;
	uint32_t hash_tokens;
	const char *layout; /* of the first attach; borrowed until the next call */
} kvd_space_info_t;
/* KV_ERR_LIMIT: all numbers (max_spaces) are of spaces that something names. KV_ERR_BUSY: blocks of closed spaces are
 * being taken down. */
kv_status_t kvd_space_open(kvd_core_t *core, const kvd_space_open_t *ask, kvd_space_info_t *p_info);

/* ACQUIRE .. BAD_BLOCK, KEEP, WITHDRAW and HANDOVER_* of a member, EXPLAIN of any connection in namespace `ns`:
 * ask->msg is the decoded request, *reply the decoded reply (same code). Slices in the reply are valid until the next
 * call. KV_PENDING: the reply comes later through kvd_world_t.notify's sibling `answer` (SPACE_RESET, WITHDRAW). Any
 * other value than OK is the status of the reply; *detail (static, may be NULL) says more. */
kv_status_t kvd_core_request(kvd_core_t *core, const kvd_ask_t *ask, kv_msg_t *reply, const char **detail);

/* Digest staging of a member: the host maps it and says where; the core copies words out once, through
 * `world.set_leaves`. `fetch` copies `words` values starting at word `first` into out, guarded: KV_ERR_FAULT,
 * KV_ERR_ARG. */
typedef kv_status_t (*kvd_staging_fn)(void *ctx, kvd_member_t member, uint64_t first, uint32_t words, uint64_t *out);
void kvd_core_set_staging(kvd_core_t *core, kvd_staging_fn fetch, void *ctx);
/* Answer to a request that returned KV_PENDING. */
typedef void (*kvd_answer_fn)(void *ctx, kvd_member_t member, uint16_t code, uint64_t frame_id, kv_status_t status,
			      const kv_msg_t *reply);
void kvd_core_set_answer(kvd_core_t *core, kvd_answer_fn answer, void *ctx);

/* One report record copied out of a ring; a bad one is counted and KV_ERR_ARG. Updates the prefix metrics. report->why
 * becomes what the daemon knows of the first missing block: that it was evicted, say. */
kv_status_t kvd_core_report(kvd_core_t *core, kvd_member_t member, kv_report_t *report);

/* ---- time ------------------------------------------------------------------------------------ */

/* Heartbeat, expiry, tier polls, promotions, write-behind, resumable work; at most about 200 us of it. Returns
 * nanoseconds until it wants to be called again (0: at once). Call it after every batch of requests and when a tier's
 * event fd is readable. */
uint64_t kvd_core_tick(kvd_core_t *core);
/* Signal a clean shutdown: heartbeat 0, all leases REVOKED. Transfers still in flight end through the tiers' close. */
void kvd_core_shutdown(kvd_core_t *core);

/* ---- status ---------------------------------------------------------------------------------- */

/* JSON for STATUS (spaces, instances, tiers; only those of namespace ns), TRANSFERS (likewise; some are left out, and
 * counted, where they would fill more than three quarters of cap) and CHECK. Return bytes needed, like snprintf. */
size_t kvd_core_status_json(kvd_core_t *core, uint32_t ns, uint32_t detail, char *out, size_t cap);
/* Did the last space of the namespace that needed a number find none? */
int kvd_core_lacks_spaces(const kvd_core_t *core, uint32_t ns);
size_t kvd_core_transfers_json(kvd_core_t *core, uint32_t ns, char *out, size_t cap);
size_t kvd_core_check_json(kvd_core_t *core, char *out, size_t cap, uint32_t *p_failed);

/* Force one eviction step, for tests: KV_MISS when nothing can go. */
kv_status_t kvd_core_evict_one(kvd_core_t *core, kv_tier_t tier);

#endif
