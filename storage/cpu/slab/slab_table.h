/* storage/cpu/slab/slab_table.h -- the slabs of a pool: who finds them, and the lists of those with free slots. */
#ifndef KVS_CPU_SLAB_TABLE_H
#define KVS_CPU_SLAB_TABLE_H

#include "cpu/pool.h"

/* The slab and record of a location that is not stale; NULL otherwise. */
kvs_pool_slab_t *kvs_pool_find(const kvs_pool_t *pool, kvs_loc_t loc, kvs_ledger_slot_t **p_slot);

/* Add a slab to a list of its class, or take it out. */
void kvs_pool_link(kvs_pool_t *pool, kvs_pool_slab_t *p, kvs_list_t list, int first);
void kvs_pool_unlink(kvs_pool_t *pool, kvs_pool_slab_t *p, kvs_list_t list);

/* Bring the metrics to the sums. */
void kvs_pool_update_gauges(kvs_pool_t *pool);

#endif
