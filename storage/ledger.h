/* ledger.h -- the writing side of kvs/ledger.h. One thread. */
#ifndef KVS_LEDGER_WRITE_H
#define KVS_LEDGER_WRITE_H

#include "slab.h"

#include "kvs/ledger.h"
#include "kvs/pool.h"

typedef struct kvs_ledger {
	kvs_area_t area;
	kvs_ledger_header_t *header;
	kvs_ledger_claim_t *claims;
	uint32_t claim_count;
	uint64_t next_chunk;    /* offset of the chunk to be added */
	uint64_t charged_bytes; /* header, claims, chunks: what may have been touched */
} kvs_ledger_t;

/* Bytes charged before the first slab. */
uint64_t kvs_ledger_fixed_bytes(uint64_t limit_bytes);

/* Room for every slab that limit_bytes of pool can hold. 0 or -errno. */
int kvs_ledger_create(kvs_ledger_t *ledger, const kvs_sys_t *sys, uint64_t limit_bytes, uint64_t incarnation);
void kvs_ledger_destroy(kvs_ledger_t *ledger);

/* Write the slab's chunk and admit it; returns its slot records, all FREE. */
kvs_ledger_slot_t *kvs_ledger_add(kvs_ledger_t *ledger, const kvs_slab_t *slab, uint32_t slot_class, const char *ns);

/* Give a free slot to an owner: a new generation, all fields, then the state. Returns the generation. */
uint32_t kvs_ledger_take(kvs_ledger_slot_t *slot, kvs_state_t state, uint64_t owner, uint32_t length,
			 const kvs_meta_t *meta);
/* Change the state; `digest` is the block's from READY or TRANSIT on. */
void kvs_ledger_move(kvs_ledger_slot_t *slot, kvs_state_t state, uint64_t digest);

static inline kvs_state_t kvs_ledger_state(const kvs_ledger_slot_t *slot)
{
	return (kvs_state_t)atomic_load_explicit(&slot->state, memory_order_relaxed);
}

/* KV_ERR_LIMIT: seven eighths of the table are taken. An id that is there is replaced. */
kv_status_t kvs_ledger_claim(kvs_ledger_t *ledger, const kvs_claim_t *claim);
void kvs_ledger_unclaim(kvs_ledger_t *ledger, uint64_t id);

#endif
