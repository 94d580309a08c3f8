/* storage/cpu/pool_impl.h -- the CPU pool behind kvs/pool.h, for its own files.
 *
 *   pool.c        open and close, the ops table
 *   check.c  the sums, counted again
 *   slots.c  classes, alloc, states, free
 *   carve.c  new slabs within the limit, and memory ahead of need
 *   rebalance.c slabs that go, so that another class may have their memory
 *   data.c   bytes and digests, claims, epochs
 *
 * Everything runs on the owner's thread but the pre-fault thread, which reads a slab's areas and writes its
 * ready_bytes.
 */
#ifndef KVS_CPU_POOL_IMPL_H
#define KVS_CPU_POOL_IMPL_H

#include "caps.h"
#include "ledger.h"
#include "slab.h"

#include "kvs/pool.h"

#define KVS_POOL_MAX_CLASSES 256u
#define KVS_POOL_MAX_SLABS   (KV_SLOT_MAX_SLAB + 1u)
#define KVS_POOL_MAX_EPOCHS  65536u
#define KVS_NONE             UINT32_MAX

/* A class has two lists of its slabs: those with slots that were used before (the one where a slot was freed last is
 * first: its memory is warm), and those with slots that were never given out (the oldest is first: the pre-fault thread
 * has reached it first). A slab that is leaving is in neither. */
typedef enum kvs_list { KVS_WARM = 0, KVS_FRESH = 1, KVS_LISTS = 2 } kvs_list_t;

typedef struct kvs_class {
	char ns[128];
	kvs_geometry_t geometry;
	uint32_t first[KVS_LISTS], last[KVS_LISTS]; /* slabs; KVS_NONE */
	uint64_t free_slots;                        /* of slabs that are not leaving */
	uint64_t bytes;                             /* of slabs whose memory is ours */
	uint32_t newest;                            /* the slab carved last; KVS_NONE */
} kvs_class_t;

typedef enum kvs_slab_state { KVS_SLAB_USED, KVS_SLAB_LEAVING, KVS_SLAB_RETIRED, KVS_SLAB_GHOST } kvs_slab_state_t;

/* Invariant: the free slots of a slab = its stack + those that are fresh = slots - taken. */
typedef struct kvs_pool_slab {
	kvs_slab_t slab;
	uint32_t slot_class;
	uint32_t for_class; /* RETIRED: whose turn it is */
	kvs_slab_state_t state;
	uint64_t serial;
	kvs_ledger_slot_t *slots; /* in the ledger */
	uint32_t stack;           /* index of the slot freed last; KVS_NONE */
	uint32_t fresh;           /* slots [fresh, slots) were never given out */
	uint32_t taken;           /* slots that are not FREE */
	uint32_t open;            /* of them, not READY */
	uint32_t prev[KVS_LISTS], next[KVS_LISTS];
} kvs_pool_slab_t;

typedef struct kvs_pool_epoch {
	uint8_t root[32];
	uint64_t epoch;
} kvs_pool_epoch_t;

typedef struct kvs_pool {
	kvs_tier_t tier;
	kvs_pool_config_t config;
	kv_env_t env;
	const kvs_sys_t *sys;
	kvs_ledger_t ledger;
	kvs_prefault_t *prefault; /* NULL: off */
	int huge;                 /* still asking for reserved huge pages */
	int thp;
	uint64_t carve_after_ns; /* the kernel refused memory: not asked again before */
	uint32_t ahead_class;    /* kvs_pool_ahead() works for it; KVS_NONE */

	kvs_class_t *classes; /* [KVS_POOL_MAX_CLASSES] */
	uint32_t class_count;
	kvs_pool_slab_t **slabs; /* [KVS_POOL_MAX_SLABS], NULL where a slab has gone */
	uint32_t slab_count;     /* numbers that have been used */
	uint32_t held;           /* slabs whose memory is ours */
	uint64_t version;        /* slabs that have come and gone */
	kvs_pool_epoch_t *epochs;
	uint32_t epoch_count;
	uint32_t epoch_cap;

	kvs_usage_t usage;
	kvs_caps_t caps;
} kvs_pool_t;

/* kvs_pool_open() with another table of system calls. */
kv_status_t kvs_pool_open_with(const kvs_pool_config_t *config, const kv_env_t *env, const kvs_sys_t *sys,
			       kvs_tier_t **p_tier);

/* The pool behind a tier that kvs_pool_open() made. */
kvs_pool_t *kvs_pool_of(kvs_tier_t *tier);

/* The slab and record of a location that is not stale; NULL otherwise. */
kvs_pool_slab_t *kvs_pool_find(const kvs_pool_t *pool, kvs_loc_t loc, kvs_ledger_slot_t **p_slot);

/* Bring the gauges up to the sums. */
void kvs_pool_gauges(const kvs_pool_t *pool);

/* slots.c */
kv_status_t kvs_pool_class_open(kvs_tier_t *tier, const char *ns, const kvs_geometry_t *geometry, uint32_t *p_class);
const char *kvs_pool_class_ns(kvs_tier_t *tier, uint32_t slot_class);
uint64_t kvs_pool_class_bytes(kvs_tier_t *tier, uint32_t slot_class);
kv_status_t kvs_pool_alloc(kvs_tier_t *tier, uint32_t slot_class, kvs_state_t state, uint64_t owner,
			   const kvs_meta_t *meta, kvs_loc_t *p_loc);
kv_status_t kvs_pool_set_state(kvs_tier_t *tier, kvs_loc_t loc, kvs_state_t state);
void kvs_pool_free(kvs_tier_t *tier, kvs_loc_t loc);

/* In or out of one of its class's lists. */
void kvs_pool_link(kvs_pool_t *pool, kvs_pool_slab_t *p, kvs_list_t list, int first);
void kvs_pool_unlink(kvs_pool_t *pool, kvs_pool_slab_t *p, kvs_list_t list);

/* carve.c: a new slab for the class, within the limit. KV_ERR_FULL when none fits or the kernel refuses. */
kv_status_t kvs_pool_carve(kvs_pool_t *pool, uint32_t slot_class);
/* Bytes of data, digests and records; of the records as far as the place has not been charged for them. */
uint64_t kvs_pool_slab_cost(const kvs_pool_t *pool, const kvs_geometry_t *geometry, uint64_t slots, uint64_t page);
/* The most slots the next slab of the class could have, if `instead` (may be NULL) had gone. */
uint32_t kvs_pool_plan(const kvs_pool_t *pool, uint32_t slot_class, uint64_t page, const kvs_pool_slab_t *instead);

/* rebalance.c */
extern const kvs_change_ops_t kvs_pool_change_ops;

/* data.c */
kv_status_t kvs_pool_mem(kvs_tier_t *tier, kvs_loc_t loc, kvs_mem_t *p_mem);
kv_status_t kvs_pool_store(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *src, kvs_done_fn done, void *arg);
kv_status_t kvs_pool_load(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *dst, kvs_done_fn done, void *arg);
kv_status_t kvs_pool_epoch_set(kvs_tier_t *tier, const kvs_epoch_t *epoch, kvs_done_fn done, void *arg);
uint64_t kvs_pool_epoch_get(kvs_tier_t *tier, const uint8_t root[32]);

/* check.c */
kv_status_t kvs_pool_check(kvs_tier_t *tier, char *detail, size_t cap);

#endif
