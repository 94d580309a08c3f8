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

/* The number the next slab gets; KVS_NONE: all are taken. */
uint32_t kvs_pool_next_number(const kvs_pool_t *pool);
/* Into the ledger and the sums, all its slots free, and where its class finds it. */
void kvs_pool_link_slab(kvs_pool_t *pool, kvs_pool_slab_t *p);
/* The name that a descriptor of a slab is held under: `what` is "slab" or "digest". */
#define KVS_HOLD_NAME 32u
void kvs_pool_name(char out[KVS_HOLD_NAME], const char *what, uint64_t id);
/* Hand its descriptors to the keeper, or have the keeper drop those of the slab with this id. */
void kvs_pool_hold_slab(const kvs_pool_t *pool, const kvs_slab_t *slab);
void kvs_pool_drop_slab(const kvs_pool_t *pool, uint64_t id);

#endif
