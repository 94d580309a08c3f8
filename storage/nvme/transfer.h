/* storage/nvme/transfer.h -- transfers as the owner sees them: start, finish, count. */
#ifndef KVS_NVME_TRANSFER_H
#define KVS_NVME_TRANSFER_H

#include "nvme.h"

kv_status_t kvs_nvme_store(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *src, kvs_done_fn done, void *arg);
kv_status_t kvs_nvme_load(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *dst, kvs_done_fn done, void *arg);
/* A load of a stored slot, readable or not. KV_ERR_BUSY: no transfer is free. */
kv_status_t kvs_load_submit(kvs_nvme_t *nvme, kvs_loc_t loc, const kvs_mem_t *dst, kvs_done_fn done, void *arg);
/* Wake the I/O threads for the transfers that were submitted since the last call. */
void kvs_flush_submissions(kvs_nvme_t *nvme);
/* Finish at most `max` transfers; returns how many. */
uint32_t kvs_transfers_finish(kvs_nvme_t *nvme, uint32_t max);

#endif
