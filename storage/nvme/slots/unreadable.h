/* storage/nvme/slots/unreadable.h -- slots that the device cannot read for a while keep their blocks, set aside
 * (decision 032). Owner's thread only. */
#ifndef KVS_NVME_UNREADABLE_H
#define KVS_NVME_UNREADABLE_H

#include "nvme/nvme.h"

/* A read of the slot has failed: it is tried again after a pause that grows, and given up after ten minutes. The watch
 * is told. */
void kvs_aside_add(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s);
/* A read of the slot has succeeded: the watch is told. */
void kvs_aside_resolve(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s);
/* The slot whose pause ended first; KV_SLOT_NONE: every pause goes on. */
kv_slot_t kvs_aside_next(const kvs_nvme_t *nvme, uint64_t now);
kv_status_t kvs_nvme_readable(kvs_tier_t *tier, kvs_loc_t loc);

#endif
