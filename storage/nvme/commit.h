/* storage/nvme/commit.h -- durability: rounds of the commit thread. */
#ifndef KVS_NVME_COMMIT_H
#define KVS_NVME_COMMIT_H

#include "nvme.h"

kv_status_t kvs_nvme_flush(kvs_tier_t *tier, kvs_done_fn done, void *arg);
kv_status_t kvs_nvme_epoch_set(kvs_tier_t *tier, const kvs_epoch_t *epoch, kvs_done_fn done, void *arg);
kv_status_t kvs_nvme_withdraw(kvs_tier_t *tier, const uint8_t root[32], kvs_done_fn done, void *arg);
uint64_t kvs_nvme_epoch_get(kvs_tier_t *tier, const uint8_t root[32]);
uint64_t kvs_nvme_epoch_last(kvs_tier_t *tier);
uint32_t kvs_nvme_epochs_drop(kvs_tier_t *tier, uint32_t memory, kvs_root_used_fn used, void *ctx);
/* Take the answer of a round and start the next when one is due. Returns callbacks run. */
uint32_t kvs_commit_step(kvs_nvme_t *nvme);
/* The rows cannot be written: a fault of the metadata, or of the file system if that is full. */
void kvs_commit_raise_meta(kvs_nvme_t *nvme, const char *doing, kv_status_t status);
/* All blocks that a rebuild has found are verified, and their rows written: the metadata may say so. */
int kvs_mark_is_due(const kvs_nvme_t *nvme);
void *kvs_commit_main(void *nvme);
/* Before the commit thread has work: sync the directory of slot files and each of them. */
kv_status_t kvs_commit_sync_all(kvs_nvme_t *nvme);

#endif
