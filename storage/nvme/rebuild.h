/* storage/nvme/rebuild.h -- rows made from slot headers, when the metadata is lost. */
#ifndef KVS_NVME_REBUILD_H
#define KVS_NVME_REBUILD_H

#include "nvme.h"

/* Read all slot headers as if they were rows. */
kv_status_t kvs_rebuild_rows(kvs_nvme_t *nvme, kvs_row_fn row, void *arg);
/* Read the slot's block: is it the one with this key, and are its bytes right? */
int kvs_rebuild_block_is_whole(kvs_nvme_t *nvme, kv_slot_t slot, const kvs_meta_t *meta);

#endif
