/* storage/nvme/format/super.h -- the superblock of a disk tier: classes, spaces and their epochs.
 *
 * Two whole copies of one generation, superblock.0 and superblock.1, in files with room to grow, each overwritten in
 * place and synced, one after the other:
 * a torn update leaves the other copy, a rotten copy too, and neither a start nor an update needs a new block of the
 * file system. The newest valid copy counts. It has the last word on epochs. Not thread-safe; the tier's owner changes
 * it, and hands encoded images to the thread that writes them.
 */
#ifndef KVS_NVME_FORMAT_SUPER_H
#define KVS_NVME_FORMAT_SUPER_H

#include "kv/env.h"
#include "kvs/tier.h"

#define KVS_SUPER_VERSION      2u /* 1, read too: files as long as their image */
#define KVS_SUPER_MAX_CLASSES  256u
#define KVS_SUPER_MAX_SPACES   16384u
#define KVS_SUPER_MAX_BYTES    (16u << 20)
#define KVS_SUPER_SLACK        (64u << 10)
#define KVS_SUPER_STEP         (256u << 10)
#define KVS_SUPER_MAX_NS       64u
#define KVS_SUPER_MAX_IDENTITY 8192u

typedef struct kvs_super_class {
	char ns[KVS_SUPER_MAX_NS + 1u];
	kvs_geometry_t geometry;
	uint32_t slots_per_file;
} kvs_super_class_t;

typedef struct kvs_super_space {
	uint8_t root[32];
	uint64_t epoch;
	uint32_t withdrawals; /* in this epoch: a header of a slot given out before the last one does not count */
	char ns[KVS_SUPER_MAX_NS + 1u];
	char *identity; /* owned */
	uint32_t identity_len;
} kvs_super_space_t;

typedef struct kvs_super {
	const kv_env_t *env;
	uint64_t uuid;              /* drawn when the directory was made; the metadata carries it too */
	uint64_t generation;        /* of the last encoded image */
	kvs_super_class_t *classes; /* KVS_SUPER_MAX_CLASSES long; index is the class id */
	uint32_t class_count;
	uint32_t space_count;
	uint32_t space_cap;
	kvs_super_space_t *spaces; /* sorted by root */
	uint64_t bytes;            /* of an image */
} kvs_super_t;

/* KV_ERR_NOMEM. */
kv_status_t kvs_super_init(kvs_super_t *super, const kv_env_t *env);
void kvs_super_fini(kvs_super_t *super);

/* KV_ERR_LIMIT: too many classes, or the image would be too large. */
kv_status_t kvs_super_class_add(kvs_super_t *super, const kvs_super_class_t *slot_class, uint32_t *p_class);

/* Add a space or change its epoch. KV_ERR_LIMIT, KV_ERR_NOMEM, KV_ERR_TOO_BIG; nothing has changed then. */
kv_status_t kvs_super_space_set(kvs_super_t *super, const uint8_t root[32], const char *ns, const char *identity,
				uint64_t epoch);

/* Remove the spaces that are not used, but for the one with the greatest epoch; how many. */
uint32_t kvs_super_spaces_drop(kvs_super_t *super, kvs_root_used_fn used, void *ctx);
/* 0: there is none. */
uint64_t kvs_super_last_epoch(const kvs_super_t *super);

/* One withdrawal more. KV_MISS: unknown; KV_ERR_LIMIT: a header could not name the next one. */
kv_status_t kvs_super_space_withdraw(kvs_super_t *super, const uint8_t root[32]);

/* NULL: unknown. Valid until the next change. */
const kvs_super_space_t *kvs_super_space_find(const kvs_super_t *super, const uint8_t root[32]);

/* Encode with the next generation into memory from env (kv_free it). KV_ERR_NOMEM. */
kv_status_t kvs_super_encode(kvs_super_t *super, uint8_t **p_image, size_t *p_len);

/* Decode into an initialised, empty super. KV_ERR_FOREIGN: not a superblock. KV_ERR_VERSION, KV_ERR_CORRUPT,
 * KV_ERR_NOMEM. */
kv_status_t kvs_super_decode(kvs_super_t *super, const uint8_t *image, size_t len);

/* Bytes of the file for an image of `len` bytes. */
static inline size_t kvs_super_room(size_t len)
{
	return (len + KVS_SUPER_SLACK + KVS_SUPER_STEP - 1u) / KVS_SUPER_STEP * KVS_SUPER_STEP;
}

/* Length of the image at the front of a file of `len` bytes, by its own word; `len` when it cannot be one. */
size_t kvs_super_image_bytes(const uint8_t *file, size_t len);

/* Read both copies and keep the newest valid one; *p_found counts the files that exist, *p_stale is 1 when the copies
 * differ or have no room (write again). KV_ERR_FOREIGN or KV_ERR_VERSION: no valid copy. KV_ERR_IO, KV_ERR_NOMEM. */
kv_status_t kvs_super_load(kvs_super_t *super, int dir_fd, uint32_t *p_found, int *p_stale);

/* Replace both copies. Any thread. `sync` 0: without syncing. KV_ERR_IO, KV_ERR_NOSPC; *p_sync_failed is 1 when what
 * failed was a sync. */
kv_status_t kvs_super_write(int dir_fd, const uint8_t *image, size_t len, int sync, int *p_sync_failed);

#endif
