/* storage/cpu/carve.h -- new slabs within the limit. */
#ifndef KVS_CPU_CARVE_H
#define KVS_CPU_CARVE_H

#include "pool.h"

/* A new slab for the class. KV_ERR_FULL: none fits under the limit, or the kernel refuses the memory. */
kv_status_t kvs_pool_carve(kvs_pool_t *pool, uint32_t slot_class);
/* Bytes of data, digests and records; records count as far as the ledger has not charged them yet. */
uint64_t kvs_pool_slab_cost(const kvs_pool_t *pool, const kvs_geometry_t *geometry, uint64_t slots, uint64_t page);
/* The most slots the next slab of the class could have, if `instead` (may be NULL) had gone. */
uint32_t kvs_pool_fit_slots(const kvs_pool_t *pool, uint32_t slot_class, uint64_t page, const kvs_pool_slab_t *instead);

#endif
