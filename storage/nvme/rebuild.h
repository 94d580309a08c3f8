/* storage/nvme/rebuild.h -- rows made from slot headers, when the metadata is lost. */
#ifndef KVS_NVME_REBUILD_H
#define KVS_NVME_REBUILD_H

#include "nvme.h"

/* Read all slot headers as if they were rows. */
kv_status_t kvs_rebuild_rows(kvs_nvme_t *nvme, kvs_row_fn row, void *arg);
/* Write what has a header again, as it is: a sync has failed since it was written, and the kernel may have dropped it.
 * KV_ERR_IO, KV_ERR_NOSPC, KV_ERR_NOMEM: not all of it. */
kv_status_t kvs_rebuild_write_again(kvs_nvme_t *nvme);

/* Count slots, or what stands for them, that cannot be read now (config.unreadable). */
void kvs_rebuild_count_unread(const kvs_nvme_t *nvme, uint64_t count);

/* What lies in a slot whose header names a block. In this order one is the better copy of it. */
typedef enum kvs_copy {
	KVS_COPY_TORN,   /* other bytes, or another block */
	KVS_COPY_UNREAD, /* the device did not read it, or there was no memory */
	KVS_COPY_WHOLE
} kvs_copy_t;

/* Read the slot's block: is it the one with this key, and are its bytes right? */
kvs_copy_t kvs_rebuild_check_copy(kvs_nvme_t *nvme, kv_slot_t slot, const kvs_meta_t *meta);

#endif
