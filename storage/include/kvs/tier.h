/* kvs/tier.h -- one storage tier (CPU pool, NVMe files; later GPU), seen by the daemon's core.
 *
 * A tier owns fixed slots, grouped into classes: (namespace, slot geometry). It knows which slot holds what; it knows
 * no tree, no lease and no policy: the core decides what goes in and out, and keeps each tier's set prefix-closed. All
 * calls are made from one thread (the owner of the tier). Transfers end by a callback on that same thread, from
 * kvs_poll() or from inside the call itself.
 *
 * State of a slot:
 *   FREE -> PUT -> READY          an engine fills it
 *   FREE -> FILLING -> READY      read from another tier; or -> TRANSIT when its parent is not in this tier's set
 *   PUT -> READY | TRANSIT | QUARANTINED
 *   TRANSIT -> READY              when its parent has joined the set
 *   any -> QUARANTINED            bad digest, or its writers may still touch it
 *   READY, TRANSIT, QUARANTINED -> FREE
 */
#ifndef KVS_TIER_H
#define KVS_TIER_H

#include "kv/status.h"
#include "kv/types.h"

typedef enum kvs_state {
	KVS_FREE = 0,
	KVS_PUT = 1,
	KVS_FILLING = 2,
	KVS_READY = 3,
	KVS_TRANSIT = 4,
	KVS_QUARANTINED = 5,
} kvs_state_t;

/* What the tiers need to know of a block's layout. */
typedef struct kvs_geometry {
	uint32_t block_bytes; /* payload                                             */
	uint32_t heads;       /* digest roots                                        */
	uint32_t leaves;      /* digest leaves a head                                */
	uint32_t leaf_bytes;  /* leaf i of head h starts at (h x leaves + i) x leaf_bytes, unless opaque pieces are
				 uneven: */
	uint32_t page_bytes;  /* pages of this size, each cut into leaf_bytes pieces, the last shorter  */
} kvs_geometry_t;

/* Bytes and digests of a slot live at byte offset and of length; see kvs_leaf_range(). */
void kvs_leaf_range(const kvs_geometry_t *geometry, uint32_t head, uint32_t leaf, size_t *p_offset, size_t *p_len);

/* Some leaves of some heads of a block. */
typedef struct kvs_leaf_span {
	uint32_t head, heads; /* heads [head, head + heads)            */
	uint32_t leaf, count; /* of each, leaves [leaf, leaf + count)  */
} kvs_leaf_span_t;

/* A space's epoch, with what the superblock says of the space. */
typedef struct kvs_epoch {
	const uint8_t *root; /* 32 bytes */
	const char *ns;
	const char *identity;
	uint64_t epoch;
} kvs_epoch_t;

/* Who a slot belongs to. Goes into the ledger and the NVMe slot header. */
typedef struct kvs_meta {
	kv_key_t key;
	kv_key_t parent;  /* zero: child of the root                              */
	uint8_t root[32]; /* root digest of the space                             */
	uint64_t epoch;
	uint64_t event_hash;
	uint32_t depth; /* 1 for the first block of a prompt                    */
	uint8_t group;
	uint32_t withdrawals; /* of the space when a disk slot was given out (kvs_withdraw()); the disk tier's own */
	uint8_t transient;    /* 1: ends with the daemon, whatever the tier keeps */
} kvs_meta_t;

/* Where a block lies in a tier. Plain value; a stale one answers KV_MISS, never other bytes. */
typedef struct kvs_loc {
	kv_slot_t slot;
	uint32_t gen; /* generation of the slot when it was allocated         */
} kvs_loc_t;

/* Memory of a block: payload and its digests, all of one slot of the CPU tier (or a test's buffer). */
typedef struct kvs_mem {
	void *data;       /* block_bytes, 4096-aligned, room up to the next multiple of 4096 */
	uint64_t *leaves; /* [heads][leaves]                                      */
	uint64_t *roots;  /* [heads]                                              */
	uint32_t region;  /* which registered region it lies in; UINT32_MAX: none */
} kvs_mem_t;

typedef struct kvs_usage {
	uint64_t limit_bytes;   /* fixed cap                                        */
	uint64_t charged_bytes; /* whole slabs or files, digests and metadata too   */
	uint64_t slots;         /* carved so far                                    */
	uint64_t free_slots;
	uint64_t used_slots;        /* PUT, FILLING, READY, TRANSIT                     */
	uint64_t quarantined_slots; /* free + used + quarantined == slots               */
	uint64_t used_bytes;
	uint64_t quarantined_bytes;
} kvs_usage_t;

/* What a tier can do now. Whatever stops it is tried again with growing pauses; a restart is never needed. */
typedef enum kvs_health {
	KVS_HEALTH_OK = 0,
	KVS_HEALTH_FULL = 1, /* the file system has no room for more files; blocks in place of evicted ones are taken */
	KVS_HEALTH_NOT_GROWING = 2, /* no file can be made, for another reason: blocks are taken where slots are free,
				       and none is evicted for one */
	KVS_HEALTH_READ_ONLY = 3,   /* no block is taken, no flush and no epoch: TIER_OFF; loads go on */
	KVS_HEALTH_OFF = 4,         /* loads are refused too: TIER_OFF */
} kvs_health_t;

typedef struct kvs_tier_state {
	kvs_health_t health;
	uint64_t since_ns; /* clock of the environment */
	uint64_t retry_ns; /* the next try */
	char reason[128];  /* what failed and why; "" while all is well */
} kvs_tier_state_t;

/* "ok", "full", "not_growing", "read_only", "off": the word of status and documents. */
const char *kvs_health_name(kvs_health_t health);

typedef struct kvs_tier kvs_tier_t;

/* Ends a transfer. `status`: OK, or KV_ERR_CORRUPT (header or digest), KV_ERR_FAULT (memory taken away), KV_ERR_IO,
 * KV_ERR_NOSPC, KV_MISS (the location is stale). It runs only when the device has let go of the memory: a stuck device
 * holds its transfers back, and the core answers waiting requests at its own deadline. */
typedef void (*kvs_done_fn)(void *arg, kv_status_t status);

/* One block found at open. Return other than KV_OK to have it dropped (its slot is freed). KV_PENDING: not now, but
 * with what is below it after all others. */
typedef kv_status_t (*kvs_found_fn)(void *arg, uint32_t slot_class, kvs_loc_t loc, const kvs_meta_t *meta);

/* One block that was found and kept, in order of use. */
typedef void (*kvs_used_fn)(void *arg, kvs_loc_t loc, const kv_key_t *key, uint8_t group);

/* A slab, or a slot file, as the core sees it when it decides which class it should belong to. */
typedef struct kvs_slab_desc {
	uint32_t slot_class;
	uint32_t slots;
	uint32_t taken; /* not FREE */
	uint32_t open;  /* of them, not READY either; of a file: 0 */
	int retiring;   /* 1: gives out no slot */
	int retired;    /* 1: empty for good; its memory is still there */
} kvs_slab_desc_t;

/* Slabs and slot files that change their class. A retired file is removed when its rows are deleted:
 *
 *   USED --leave--> LEAVING --every slot FREE, retire--> RETIRED --nobody maps it--> its memory is another class's
 *   LEAVING --stay--> USED
 */
typedef struct kvs_rebalance_ops {
	/* Slabs are numbered below this. */
	uint32_t (*slab_count)(kvs_tier_t *tier);
	/* KV_MISS: there is no such slab now. */
	kv_status_t (*describe_slab)(kvs_tier_t *tier, uint32_t slab, kvs_slab_desc_t *p_desc);
	/* Slots of another class that its memory would make. */
	uint32_t (*slots_gained)(kvs_tier_t *tier, uint32_t slab, uint32_t for_class);
	/* Bytes of a whole slab of the class. */
	uint64_t (*slab_bytes)(kvs_tier_t *tier, uint32_t slot_class);
	/* What a READY slot holds; of a slot of a file key and group only. KV_MISS: the slot is in another state, or
	 * does not exist. */
	kv_status_t (*describe_slot)(kvs_tier_t *tier, kv_slot_t slot, kvs_loc_t *p_loc, kvs_meta_t *p_meta);
	/* Free slots that alloc would give, of all of a class's slabs. */
	uint64_t (*free_slots)(kvs_tier_t *tier, uint32_t slot_class);
	/* All slots of those of the class's slabs that have an open one. NULL, of files: none has. */
	uint64_t (*open_slots)(kvs_tier_t *tier, uint32_t slot_class);
	/* 1: less than a quarter of a slab is free, and no memory is left for another slab. */
	int (*is_short)(kvs_tier_t *tier, uint32_t slot_class);
	/* 1: what was retired for the class will be its own soon. */
	int (*is_coming)(kvs_tier_t *tier, uint32_t slot_class);
	void (*begin_retire)(kvs_tier_t *tier, uint32_t slab);
	void (*cancel_retire)(kvs_tier_t *tier, uint32_t slab);
	/* KV_ERR_BUSY: a slot is not FREE. What comes free is for `for_class`. */
	kv_status_t (*retire)(kvs_tier_t *tier, uint32_t slab, uint32_t for_class);
} kvs_rebalance_ops_t;

/* What a tier reports unasked, from inside kvs_poll(). Any call to the tier but kvs_poll() and kvs_close() may
 * be made from there. */
typedef struct kvs_watch {
	void *arg;
	/* The bytes of a stored slot may be wrong: a sync failed since they were written, or their
	 * file is gone. The slot is QUARANTINED and waits to be freed; nothing may be acknowledged that rests on it. */
	void (*lost)(void *arg, kvs_loc_t loc, const kv_key_t *key, uint8_t group);
	/* The device cannot read a stored slot (0), or has read it again (1). It keeps its block meanwhile: the tier
	 * reads it again after pauses, and reports the result: readable, or lost. NULL: no report. */
	void (*readable)(void *arg, kvs_loc_t loc, const kv_key_t *key, uint8_t group, int readable);
} kvs_watch_t;

/* Does the space of this root have something, or somebody who uses it? */
typedef int (*kvs_root_used_fn)(void *ctx, const uint8_t root[32]);

typedef struct kvs_tier_ops {
	const char *medium;                   /* "CPU", "DISK" */
	const kvs_rebalance_ops_t *rebalance; /* NULL: slots have no class, every one of them is anybody's */
	kv_status_t (*class_open)(kvs_tier_t *tier, const char *ns, const kvs_geometry_t *geometry, uint32_t *p_class);
	void (*class_close)(kvs_tier_t *tier, uint32_t slot_class);
	const char *(*class_ns)(kvs_tier_t *tier, uint32_t slot_class);
	uint64_t (*class_bytes)(kvs_tier_t *tier, uint32_t slot_class);
	kv_status_t (*cap)(kvs_tier_t *tier, const char *ns, uint64_t bytes);
	kv_status_t (*alloc)(kvs_tier_t *tier, uint32_t slot_class, kvs_state_t state, uint64_t owner,
			     const kvs_meta_t *meta, kvs_loc_t *p_loc);
	kv_status_t (*set_state)(kvs_tier_t *tier, kvs_loc_t loc, kvs_state_t state);
	void (*free)(kvs_tier_t *tier, kvs_loc_t loc);
	kv_status_t (*mem)(kvs_tier_t *tier, kvs_loc_t loc, kvs_mem_t *p_mem);
	kv_status_t (*store)(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *src, kvs_done_fn done, void *arg);
	kv_status_t (*load)(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *dst, kvs_done_fn done, void *arg);
	kv_status_t (*flush)(kvs_tier_t *tier, kvs_done_fn done, void *arg);
	kv_status_t (*epoch_set)(kvs_tier_t *tier, const kvs_epoch_t *epoch, kvs_done_fn done, void *arg);
	uint64_t (*epoch_get)(kvs_tier_t *tier, const uint8_t root[32]);
	uint64_t (*epoch_last)(kvs_tier_t *tier); /* NULL: not asked for, the tier is no disk */
	uint32_t (*epochs_drop)(kvs_tier_t *tier, uint32_t memory, kvs_root_used_fn used, void *ctx);
	kv_status_t (*recover)(kvs_tier_t *tier, kvs_found_fn found, void *arg, uint32_t max);
	void (*usage)(kvs_tier_t *tier, kvs_usage_t *p_usage);
	int (*event_fd)(kvs_tier_t *tier);
	uint32_t (*poll)(kvs_tier_t *tier, uint32_t max);
	uint32_t (*in_flight)(kvs_tier_t *tier);
	kv_status_t (*check)(kvs_tier_t *tier, char *detail, size_t cap);
	void (*close)(kvs_tier_t *tier);
	void (*state)(kvs_tier_t *tier, kvs_tier_state_t *p_state); /* NULL: always OK */
	void (*watch)(kvs_tier_t *tier, const kvs_watch_t *watch);  /* NULL: it loses nothing */
	kv_status_t (*readable)(kvs_tier_t *tier, kvs_loc_t loc);   /* NULL: always */
	/* NULL: use is not kept over a restart. */
	void (*touch)(kvs_tier_t *tier, kvs_loc_t loc, uint64_t stamp);
	kv_status_t (*recover_use)(kvs_tier_t *tier, uint32_t memory, kvs_used_fn used, void *arg, uint32_t max);
	/* A tier of several memories (kvs/memories.h); NULL: it is one. add_memory: KV_ERR_LIMIT. */
	kv_status_t (*add_memory)(kvs_tier_t *tier, kvs_tier_t *pool, uint32_t *p_memory);
	kv_status_t (*class_open_in)(kvs_tier_t *tier, uint32_t memory, const char *ns, const kvs_geometry_t *geometry,
				     uint32_t *p_class);
	void (*usage_of)(kvs_tier_t *tier, uint32_t memory, kvs_usage_t *p_usage);
	kv_status_t (*epoch_set_in)(kvs_tier_t *tier, uint32_t memory, const kvs_epoch_t *epoch, kvs_done_fn done,
				    void *arg);
	kv_status_t (*recover_in)(kvs_tier_t *tier, uint32_t memory, kvs_found_fn found, void *arg);
	uint64_t (*slot_bytes)(kvs_tier_t *tier, uint32_t slot_class); /* NULL: no class of it is recovered in memory */
	/* NULL: what is freed there never comes back. */
	kv_status_t (*withdraw)(kvs_tier_t *tier, const uint8_t root[32], kvs_done_fn done, void *arg);
} kvs_tier_ops_t;

struct kvs_tier {
	const kvs_tier_ops_t *ops;
};

/* Find or create the class of slots with this geometry in a namespace. Slots of one class are interchangeable.
 * KV_ERR_LIMIT: too many classes, and all are used. KV_ERR_BUSY: one that nobody uses has slabs or files, or they have
 * gone just now. KV_ERR_LAYOUT: impossible geometry. KV_ERR_ARG: no name, or one too long. A tier that is off knows the
 * class too, and will have its blocks later. The CPU tier carves the class's first slab here, when there is room. */
static inline kv_status_t kvs_class_open(kvs_tier_t *t, const char *ns, const kvs_geometry_t *g, uint32_t *p_class)
{
	return t->ops->class_open(t, ns, g, p_class);
}

/* The same in memory number `memory` of the tier; 0 is the one that every tier has. KV_ERR_TIER_OFF: there is no such
 * memory. */
static inline kv_status_t kvs_class_open_in(kvs_tier_t *t, uint32_t memory, const char *ns, const kvs_geometry_t *g,
					    uint32_t *p_class)
{
	return t->ops->class_open_in ? t->ops->class_open_in(t, memory, ns, g, p_class)
	       : memory == 0         ? kvs_class_open(t, ns, g, p_class)
				     : KV_ERR_TIER_OFF;
}

/* Nobody uses the class until it is opened again: it has no block. When it has no slab or file either, its number may
 * be given to another one (decision 088). */
static inline void kvs_class_close(kvs_tier_t *t, uint32_t slot_class)
{
	t->ops->class_close(t, slot_class);
}

/* The namespace of a class that class_open or recover has named; the tier's memory, and good until it closes. */
static inline const char *kvs_class_ns(kvs_tier_t *t, uint32_t slot_class)
{
	return t->ops->class_ns(t, slot_class);
}

/* Bytes of the slabs or slot files that the class has, empty slots included: what its namespace is charged. */
static inline uint64_t kvs_class_bytes(kvs_tier_t *t, uint32_t slot_class)
{
	return t->ops->class_bytes(t, slot_class);
}

/* The classes of the namespace get no slab or slot file with which their bytes together would be more; UINT64_MAX: as
 * many as fit. What they have already stays theirs. KV_ERR_LIMIT: too many namespaces. */
static inline kv_status_t kvs_tier_cap(kvs_tier_t *t, const char *ns, uint64_t bytes)
{
	return t->ops->cap(t, ns, bytes);
}

/* Take a free slot and give it to `owner` (put or lease id) in `state` (PUT or FILLING). May carve a new slab or file
 * within the tier's limit. KV_ERR_FULL: nothing free; evict and try again. KV_ERR_BUSY: there will be memory in a
 * moment, evict nothing. KV_ERR_TIER_OFF: not now, and evicting would not help. KV_ERR_NOSPC. Disk,
 * KV_ERR_STALE_EPOCH: kvs_epoch_set() has not been told of this epoch of the space, so the block would not outlive a
 * restart. */
static inline kv_status_t kvs_alloc(kvs_tier_t *t, uint32_t slot_class, kvs_state_t state, uint64_t owner,
				    const kvs_meta_t *meta, kvs_loc_t *p_loc)
{
	return t->ops->alloc(t, slot_class, state, owner, meta, p_loc);
}

/* Move a slot along the diagram above. KV_MISS: stale location. KV_ERR_ARG: not an edge of the diagram. */
static inline kv_status_t kvs_set_state(kvs_tier_t *t, kvs_loc_t loc, kvs_state_t state)
{
	return t->ops->set_state(t, loc, state);
}

/* Give a slot back; a stale location is ignored. A disk slot under a write in flight is freed when that has ended. */
static inline void kvs_free(kvs_tier_t *t, kvs_loc_t loc)
{
	t->ops->free(t, loc);
}

/* Memory of a CPU slot. KV_ERR_UNSUPPORTED from tiers without memory that this process sees, KV_MISS when stale.
 * KV_ERR_BUSY: it has not been touched yet, ask again; KV_ERR_NOMEM: it cannot be now. */
static inline kv_status_t kvs_mem(kvs_tier_t *t, kvs_loc_t loc, kvs_mem_t *p_mem)
{
	return t->ops->mem(t, loc, p_mem);
}

/* Write src (payload, leaves, roots) into the slot. KV_OK: done runs exactly once and src stays untouched until then.
 * Any other value: never. Disk: the slot turns READY and its metadata is queued for the next batch; it survives a
 * restart after the next flush. KV_ERR_BUSY: queue full. */
static inline kv_status_t kvs_store(kvs_tier_t *t, kvs_loc_t loc, const kvs_mem_t *src, kvs_done_fn done, void *arg)
{
	return t->ops->store(t, loc, src, done, arg);
}

/* Read the slot into dst, checking header (key, generation, length) and every leaf digest; dst->leaves and dst->roots
 * are filled. KV_OK: done runs exactly once. KV_ERR_BUSY: queue full. Loads submitted between two polls go to the
 * device as one batch. */
static inline kv_status_t kvs_load(kvs_tier_t *t, kvs_loc_t loc, const kvs_mem_t *dst, kvs_done_fn done, void *arg)
{
	return t->ops->load(t, loc, dst, done, arg);
}

/* done runs when everything stored before this call is durable, data synced, then metadata synced, but for what the
 * watch has been told is lost. KV_ERR_IO: a sync has failed; what it leaves unverified is reported lost before
 * kvs_poll() returns. */
static inline kv_status_t kvs_flush(kvs_tier_t *t, kvs_done_fn done, void *arg)
{
	return t->ops->flush(t, done, arg);
}

/* Record a space's epoch in the synced superblock; done runs when it is on disk. epoch_get: 0 when the space is
 * unknown. */
static inline kv_status_t kvs_epoch_set(kvs_tier_t *t, const kvs_epoch_t *epoch, kvs_done_fn done, void *arg)
{
	return t->ops->epoch_set(t, epoch, done, arg);
}
static inline uint64_t kvs_epoch_get(kvs_tier_t *t, const uint8_t root[32])
{
	return t->ops->epoch_get(t, root);
}
/* The greatest epoch of all spaces of the tier; 0: it has none. */
static inline uint64_t kvs_epoch_last(kvs_tier_t *t)
{
	return t->ops->epoch_last(t);
}
/* Forget the epochs of spaces that are not used, but for the greatest one: epoch_last stays what it was. `memory` as in
 * kvs_epoch_set_in(), 0 for a disk. Returns how many are forgotten; on disk that is so with the next epoch set. */
static inline uint32_t kvs_epochs_drop(kvs_tier_t *t, uint32_t memory, kvs_root_used_fn used, void *ctx)
{
	return t->ops->epochs_drop ? t->ops->epochs_drop(t, memory, used, ctx) : 0;
}

/* Blocks of the space that were freed before this call never come back: not with a row that a crash has kept, and, when
 * the metadata is lost, not with a header that still lies in a slot. So headers of the space count only if their slot
 * was given out after the call (decision 070). done runs when that is on disk; KV_ERR_IO: ask again. Any value but
 * KV_OK: done never runs. KV_MISS: the tier has nothing of the space. KV_ERR_LIMIT: only a new epoch helps. */
static inline kv_status_t kvs_withdraw(kvs_tier_t *t, const uint8_t root[32], kvs_done_fn done, void *arg)
{
	return t->ops->withdraw ? t->ops->withdraw(t, root, done, arg) : KV_MISS;
}

/* An epoch in the memory that the space lies in. epoch_get asks all of them. */
static inline kv_status_t kvs_epoch_set_in(kvs_tier_t *t, uint32_t memory, const kvs_epoch_t *epoch, kvs_done_fn done,
					   void *arg)
{
	return t->ops->epoch_set_in ? t->ops->epoch_set_in(t, memory, epoch, done, arg) : KV_ERR_UNSUPPORTED;
}

/* Report blocks that survived, parents before children (by depth), at most `max` of them; KV_PENDING: there are more.
 * KV_MISS: all have been reported once, and the next call begins with those that were put off; these must not be put
 * off again. Called after open, before anything else but kvs_epoch_set(), kvs_class_open(), kvs_free() and kvs_poll(),
 * until all are reported. Blocks of an old epoch and blocks whose ancestors are missing are dropped and counted, not
 * reported. */
static inline kv_status_t kvs_recover_some(kvs_tier_t *t, kvs_found_fn found, void *arg, uint32_t max)
{
	return t->ops->recover(t, found, arg, max);
}
/* All of them. */
static inline kv_status_t kvs_recover(kvs_tier_t *t, kvs_found_fn found, void *arg)
{
	return t->ops->recover(t, found, arg, UINT32_MAX);
}
/* The same of one of its memories. A block is not put off there: PENDING drops it. */
static inline kv_status_t kvs_recover_in(kvs_tier_t *t, uint32_t memory, kvs_found_fn found, void *arg)
{
	return t->ops->recover_in ? t->ops->recover_in(t, memory, found, arg) : KV_OK;
}
/* After kvs_recover() or kvs_recover_in() has reported all: blocks that were kept, least recently used first, and of
 * those used alike the shallow ones; at most `max` of them. KV_PENDING: there are more. A block may be left out that
 * has a child used as late. */
static inline kv_status_t kvs_recover_use(kvs_tier_t *t, uint32_t memory, kvs_used_fn used, void *arg, uint32_t max)
{
	return t->ops->recover_use ? t->ops->recover_use(t, memory, used, arg, max) : KV_OK;
}
/* Bytes of a slot of a class that recover_in has named. */
static inline uint64_t kvs_slot_bytes(kvs_tier_t *t, uint32_t slot_class)
{
	return t->ops->slot_bytes ? t->ops->slot_bytes(t, slot_class) : 0;
}
static inline void kvs_usage(kvs_tier_t *t, kvs_usage_t *p_usage)
{
	t->ops->usage(t, p_usage);
}
/* Of one of its memories; of one that it does not have: zeros. */
static inline void kvs_usage_of(kvs_tier_t *t, uint32_t memory, kvs_usage_t *p_usage)
{
	*p_usage = (kvs_usage_t){0};
	if (t->ops->usage_of) {
		t->ops->usage_of(t, memory, p_usage);
	} else if (memory == 0) {
		t->ops->usage(t, p_usage);
	}
}
static inline void kvs_tier_state(kvs_tier_t *t, kvs_tier_state_t *p_state)
{
	*p_state = (kvs_tier_state_t){.health = KVS_HEALTH_OK};
	if (t->ops->state) {
		t->ops->state(t, p_state);
	}
}
/* What a load would answer at once. KV_ERR_IO: the device could not read this slot, and has not yet read it again.
 * KV_ERR_TIER_OFF: it reads none. The block is still there. */
static inline kv_status_t kvs_readable(kvs_tier_t *t, kvs_loc_t loc)
{
	return t->ops->readable ? t->ops->readable(t, loc) : KV_OK;
}
/* The path down to this READY block was used, at `stamp` of the caller's count since the open: the order of
 * kvs_recover_use() after the next open. A few stores in memory, of any block at any rate. */
static inline void kvs_touch(kvs_tier_t *t, kvs_loc_t loc, uint64_t stamp)
{
	if (t->ops->touch) {
		t->ops->touch(t, loc, stamp);
	}
}
/* Copied; {0}: no reports. Without a watch, a flush after a loss ends with KV_ERR_IO. */
static inline void kvs_tier_watch(kvs_tier_t *t, const kvs_watch_t *watch)
{
	if (t->ops->watch) {
		t->ops->watch(t, watch);
	}
}
/* Readable when kvs_poll() has something to do; -1: never. */
static inline int kvs_event_fd(kvs_tier_t *t)
{
	return t->ops->event_fd(t);
}
/* Run at most `max` callbacks; returns how many ran. Also starts what was queued since the last call. */
static inline uint32_t kvs_poll(kvs_tier_t *t, uint32_t max)
{
	return t->ops->poll(t, max);
}
static inline uint32_t kvs_in_flight(kvs_tier_t *t)
{
	return t->ops->in_flight(t);
}
/* Verify the tier's own sums (free + used + quarantined == slots, bytes, file sizes). `detail` gets a sentence.
 * KV_ERR_INTERNAL when one fails. */
static inline kv_status_t kvs_check(kvs_tier_t *t, char *detail, size_t cap)
{
	return t->ops->check(t, detail, cap);
}
/* Wait for transfers (bounded), sync, and free everything. Callbacks of unfinished transfers run with KV_ERR_CLOSED. */
static inline void kvs_close(kvs_tier_t *t)
{
	if (t) {
		t->ops->close(t);
	}
}

#endif
