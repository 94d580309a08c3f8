/* storage/cpu/pool.h -- the state of a CPU pool. Every function of cpu/ runs on the owner's thread; the pre-fault
 * thread reads the memory of a slab and writes its ready_bytes.
 */
#ifndef KVS_CPU_POOL_H
#define KVS_CPU_POOL_H

#include "caps.h"
#include "cpu/slab/ledger.h"
#include "cpu/slab/slab.h"

#include "kv/system.h"
#include "kvs/pool.h"

#define KVS_POOL_MAX_CLASSES 256u
#define KVS_POOL_MAX_SLABS   (KV_SLOT_MAX_SLAB + 1u)
#define KVS_POOL_MAX_EPOCHS  65536u
#define KVS_POOL_KEPT_EPOCHS 4096u /* for a later daemon, of a pool whose blocks are */
#define KVS_NONE             UINT32_MAX

/* A class has two lists of its slabs: those with slots that were used before (the one where a slot was freed last is
 * first: its memory is warm), and those with slots that were never given out (the oldest is first: the pre-fault thread
 * has reached it first; one whose touching has failed is last). A slab that is retiring is in neither. */
typedef enum kvs_list { KVS_WARM = 0, KVS_FRESH = 1, KVS_LISTS = 2 } kvs_list_t;

typedef struct kvs_class {
	char ns[120];
	kvs_geometry_t geometry;
	uint32_t first[KVS_LISTS], last[KVS_LISTS]; /* slabs; KVS_NONE */
	uint64_t free_slots;                        /* of slabs that are not retiring */
	uint64_t open_slots;                        /* all those of slabs with an open one */
	uint64_t bytes;                             /* of slabs whose memory is ours */
	uint32_t newest;                            /* the slab carved last; KVS_NONE */
	int unused;                                 /* nobody has it open */
} kvs_class_t;

typedef enum kvs_slab_state { KVS_SLAB_USED, KVS_SLAB_RETIRING, KVS_SLAB_RETIRED, KVS_SLAB_ZOMBIE } kvs_slab_state_t;

/* Invariant: the free slots of a slab = its stack + those that are fresh = slots - taken. */
typedef struct kvs_pool_slab {
	kvs_slab_t slab;
	uint32_t slot_class;
	uint32_t for_class; /* RETIRED: whose turn it is */
	kvs_slab_state_t state;
	int hidden;        /* it lies on reserved huge pages that may not all be there: nobody has heard of it */
	uint64_t again_ns; /* touching has failed, and is tried again then; 0: it has not */
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
	kvs_tier_ops_t ops; /* with its medium */
	kvs_pool_config_t config;
	kv_env_t env;
	const kvs_sys_t *sys;
	kvs_ledger_t ledger;
	kvs_prefault_t *prefault; /* NULL: off */
	int huge;                 /* still asking for reserved huge pages */
	int thp;
	uint64_t carve_after_ns;       /* the system refused a slab: not asked again before */
	char refused[KV_REFUSED_TEXT]; /* why, since the last one that was made; "": it did not */
	uint32_t warming;              /* first slab of a class, just begun; KVS_NONE */
	uint64_t warming_until_ns;
	uint64_t look_ns;     /* slabs are looked at then (ready.c) */
	uint32_t look_at;     /* the next of them */
	int refusal;          /* errno with which the kernel has refused pages, and which has been logged */
	uint32_t ahead_class; /* kvs_pool_carve_ahead() works for it; KVS_NONE */

	kvs_class_t *classes; /* [KVS_POOL_MAX_CLASSES] */
	uint32_t class_count;
	uint64_t classes_made;
	kvs_pool_slab_t **slabs; /* [KVS_POOL_MAX_SLABS], NULL where a slab has gone */
	uint32_t slab_count;     /* numbers that have been used */
	uint32_t held;           /* slabs whose memory is ours */
	uint64_t version;        /* slabs that have come and gone */
	kvs_pool_epoch_t *epochs;
	uint32_t epoch_count;
	uint32_t epoch_cap;
	uint32_t epochs_dropped; /* of them are 0, and may be another space's */

	struct kvs_adoption *adoption; /* blocks of an earlier daemon that the core has not seen; NULL: none */
	uint32_t unknown_before;       /* writers of earlier daemons that the keeper had not heard of */
	uint64_t use_base;             /* uses counted by the daemons before */
	kvs_usage_t usage;
	kvs_usage_t shown; /* of it, in the metrics */
	kvs_caps_t caps;
} kvs_pool_t;

/* kvs_pool_open() with another table of system calls. */
kv_status_t kvs_pool_open_with(const kvs_pool_config_t *config, const kv_env_t *env, const kvs_sys_t *sys,
			       kvs_tier_t **p_tier);

/* The pool behind a tier that kvs_pool_open() made. */
static inline kvs_pool_t *kvs_pool_of(kvs_tier_t *tier)
{
	kv_assert(tier->ops == &((kvs_pool_t *)tier)->ops);

	return (kvs_pool_t *)tier;
}

#endif
