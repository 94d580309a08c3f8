/* storage/nvme/recover.h -- what survived: read at the open, reported parents first. */
#ifndef KVS_NVME_RECOVER_H
#define KVS_NVME_RECOVER_H

#include "nvme.h"

/* At the open, by its thread: read the rows, or the headers. KV_ERR_IO: headers that are needed cannot be read. */
kv_status_t kvs_recovery_read(kvs_nvme_t *nvme);
void kvs_recovery_free(kvs_nvme_t *nvme);
kv_status_t kvs_nvme_recover(kvs_tier_t *tier, kvs_found_fn found, void *arg, uint32_t max);

#endif
