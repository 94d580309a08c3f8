/* storage/cpu/adopt.h -- what a daemon that has crashed left in memory, taken over by the next one (decision 059). */
#ifndef KVS_CPU_ADOPT_H
#define KVS_CPU_ADOPT_H

#include "pool.h"

/* Take over the slabs of an earlier daemon's ledger, as far as they fit. Whole blocks wait for kvs_pool_recover();
 * unfinished slots are QUARANTINED until kvs_pool_free_before(). What is damaged is left out, counted and logged. */
void kvs_pool_adopt(kvs_pool_t *pool);
kv_status_t kvs_pool_recover(kvs_tier_t *tier, kvs_found_fn found, void *arg, uint32_t max);
kv_status_t kvs_pool_recover_use(kvs_tier_t *tier, uint32_t memory, kvs_used_fn used, void *arg, uint32_t max);
/* Forget blocks that have not been reported. */
void kvs_pool_end_adoption(kvs_pool_t *pool);

#endif
