/* storage/cpu/tier_ops.h -- the functions behind the ops table of pool.c, which alone calls them. */
#ifndef KVS_CPU_TIER_OPS_H
#define KVS_CPU_TIER_OPS_H

#include "kvs/tier.h"

/* ---- alloc.c: classes, slots and their states ------------------------------------------------ */
kv_status_t kvs_pool_class_open(kvs_tier_t *tier, const char *ns, const kvs_geometry_t *geometry, uint32_t *p_class);
void kvs_pool_class_close(kvs_tier_t *tier, uint32_t slot_class);
const char *kvs_pool_class_ns(kvs_tier_t *tier, uint32_t slot_class);
uint64_t kvs_pool_class_bytes(kvs_tier_t *tier, uint32_t slot_class);
kv_status_t kvs_pool_alloc(kvs_tier_t *tier, uint32_t slot_class, kvs_state_t state, uint64_t owner,
			   const kvs_meta_t *meta, kvs_loc_t *p_loc);
kv_status_t kvs_pool_set_state(kvs_tier_t *tier, kvs_loc_t loc, kvs_state_t state);
void kvs_pool_free(kvs_tier_t *tier, kvs_loc_t loc);
void kvs_pool_touch(kvs_tier_t *tier, kvs_loc_t loc, uint64_t stamp);

/* ---- rebalance.c: slabs that go to another class --------------------------------------------- */
extern const kvs_rebalance_ops_t kvs_pool_rebalance_ops;

/* ---- data.c: bytes, digests, epochs ---------------------------------------------------------- */
kv_status_t kvs_pool_mem(kvs_tier_t *tier, kvs_loc_t loc, kvs_mem_t *p_mem);
kv_status_t kvs_pool_store(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *src, kvs_done_fn done, void *arg);
kv_status_t kvs_pool_load(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *dst, kvs_done_fn done, void *arg);
kv_status_t kvs_pool_epoch_set(kvs_tier_t *tier, const kvs_epoch_t *epoch, kvs_done_fn done, void *arg);
uint64_t kvs_pool_epoch_get(kvs_tier_t *tier, const uint8_t root[32]);
uint32_t kvs_pool_epochs_drop(kvs_tier_t *tier, uint32_t memory, kvs_root_used_fn used, void *ctx);

/* ---- check.c: the sums, counted again -------------------------------------------------------- */
kv_status_t kvs_pool_check(kvs_tier_t *tier, char *detail, size_t cap);

#endif
