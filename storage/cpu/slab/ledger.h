/* storage/cpu/slab/ledger.h -- the writing side of kvs/ledger.h. One thread. */
#ifndef KVS_CPU_LEDGER_H
#define KVS_CPU_LEDGER_H

#include "slab.h"

#include "kvs/ledger.h"
#include "kvs/pool.h"

typedef struct kvs_ledger {
	kvs_shm_t area;
	kvs_ledger_header_t *header;
	kvs_ledger_record_t *records;
	uint32_t record_count;
	uint32_t chunks;   /* slabs at a time */
	uint64_t *touched; /* [chunks] bytes of each chunk that have been written to: sealed memory is not given back */
	uint64_t charged_bytes; /* header, records, chunks: what may have been touched */
} kvs_ledger_t;

/* Bytes charged before the first slab. */
uint64_t kvs_ledger_fixed_bytes(uint64_t limit_bytes);

/* What the ledger of a pool is made for. */
typedef struct kvs_ledger_size {
	uint64_t limit_bytes; /* of the pool */
	uint64_t slab_bytes;  /* of a slab of more than one slot, at most */
	uint64_t incarnation;
	uint32_t max_slabs; /* 0: as many as slots can name */
	uint32_t epochs;    /* spaces whose epochs it can keep */
} kvs_ledger_size_t;

/* Places for the slabs that the pool can hold. 0 or -errno. */
int kvs_ledger_create(kvs_ledger_t *ledger, const kvs_sys_t *sys, const kv_env_t *env, const kvs_ledger_size_t *size);
void kvs_ledger_destroy(kvs_ledger_t *ledger, const kv_env_t *env);

/* Where the records of slab `number` will be. */
kvs_shm_t kvs_ledger_records(const kvs_ledger_t *ledger, uint32_t number, uint64_t slots);
/* What a slab of this many slots would add to charged_bytes in this chunk. */
uint64_t kvs_ledger_slab_cost(const kvs_ledger_t *ledger, uint32_t number, uint64_t slots);
/* Write the slab's chunk and admit it; returns its slot records, all FREE. */
kvs_ledger_slot_t *kvs_ledger_add_slab(kvs_ledger_t *ledger, const kvs_slab_t *slab, uint32_t slot_class,
				       const char *ns);
/* The slab, all of whose slots are FREE, is no more. */
void kvs_ledger_remove_slab(kvs_ledger_t *ledger, uint32_t number);

/* Give a free slot to an owner: a new generation, all fields, then the state. Returns the generation. */
uint32_t kvs_ledger_assign_slot(kvs_ledger_slot_t *slot, kvs_state_t state, uint64_t owner, uint32_t length,
				const kvs_meta_t *meta);
/* Change the state; `digest` is the block's from READY or TRANSIT on. */
void kvs_ledger_set_state(kvs_ledger_slot_t *slot, kvs_state_t state, uint64_t digest);

/* A READY slot was used: `use` is higher each time. */
void kvs_ledger_set_use(kvs_ledger_slot_t *slot, uint64_t use);

/* The slot, which is FREE, is what it was in the ledger of an earlier daemon, but in `state`. */
void kvs_ledger_copy_slot(kvs_ledger_slot_t *slot, const kvs_ledger_slot_t *from, kvs_state_t state);
/* The table's entries before `i` are there. */
void kvs_ledger_set_epoch(kvs_ledger_t *ledger, uint32_t i, const uint8_t root[32], uint64_t epoch);

/* The owner of slots that an earlier daemon left unfinished. */
#define KVS_OWNER_BEFORE UINT64_MAX

static inline kvs_state_t kvs_ledger_state(const kvs_ledger_slot_t *slot)
{
	return (kvs_state_t)atomic_load_explicit(&slot->state, memory_order_relaxed);
}

/* KV_ERR_LIMIT: seven eighths of the table are taken. An id that is there is replaced. */
kv_status_t kvs_ledger_add_record(kvs_ledger_t *ledger, const kvs_record_t *record);
void kvs_ledger_remove_record(kvs_ledger_t *ledger, uint64_t id);

#endif
