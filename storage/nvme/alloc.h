/* storage/nvme/alloc.h -- classes, slots and sums, as the tier's user sees them. */
#ifndef KVS_NVME_ALLOC_H
#define KVS_NVME_ALLOC_H

#include "kvs/tier.h"

kv_status_t kvs_nvme_class_open(kvs_tier_t *tier, const char *ns, const kvs_geometry_t *geometry, uint32_t *p_class);
void kvs_nvme_class_close(kvs_tier_t *tier, uint32_t slot_class);
const char *kvs_nvme_class_ns(kvs_tier_t *tier, uint32_t slot_class);
uint64_t kvs_nvme_class_bytes(kvs_tier_t *tier, uint32_t slot_class);
kv_status_t kvs_nvme_alloc(kvs_tier_t *tier, uint32_t slot_class, kvs_state_t state, uint64_t owner,
			   const kvs_meta_t *meta, kvs_loc_t *p_loc);
kv_status_t kvs_nvme_set_state(kvs_tier_t *tier, kvs_loc_t loc, kvs_state_t state);
void kvs_nvme_free(kvs_tier_t *tier, kvs_loc_t loc);
void kvs_nvme_usage(kvs_tier_t *tier, kvs_usage_t *p_usage);
kv_status_t kvs_nvme_check(kvs_tier_t *tier, char *detail, size_t cap);

#endif
