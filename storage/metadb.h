/* metadb.h -- what is where, in RocksDB: (class, slot) -> whose block it is. One synced batch a flush.
 *
 * Used by one thread at a time (recovery: the owner; then the commit thread). The process must never fork without exec after an open.
 */
#ifndef KVS_METADB_H
#define KVS_METADB_H

#include "kv/env.h"
#include "kvs/tier.h"

typedef struct kvs_metadb kvs_metadb_t;

typedef struct kvs_row {
	kvs_meta_t meta;
	uint64_t digest; /* of the block */
	uint32_t slot_class;
	kv_slot_t slot;
	uint32_t gen;
	uint32_t length;
} kvs_row_t;

/* Return other than KV_OK to end the scan. */
typedef kv_status_t (*kvs_row_fn)(void *arg, const kvs_row_t *row);

/* Open or create the directory `path` for the tier `uuid`, with buffers and log that fit `allowance` bytes. *p_fresh is 1 when it holds nothing of this
 * tier. KV_ERR_LOCKED, KV_ERR_NOSPC, KV_ERR_CORRUPT (unreadable: move it aside and rebuild), KV_ERR_IO, KV_ERR_NOMEM. */
kv_status_t kvs_metadb_open(const char *path, const kv_env_t *env, uint64_t allowance, uint64_t uuid,
			    kvs_metadb_t **p_db, int *p_fresh);
void kvs_metadb_close(kvs_metadb_t *db);

/* Collect changes; kvs_metadb_commit() makes them durable (sync 1) or drops them, all or none. Failures are logged. */
void kvs_metadb_put(kvs_metadb_t *db, const kvs_row_t *row);
void kvs_metadb_delete(kvs_metadb_t *db, uint32_t slot_class, kv_slot_t slot);
kv_status_t kvs_metadb_commit(kvs_metadb_t *db, int sync);

/* Write a marker that says: complete. A database without it is fresh. */
kv_status_t kvs_metadb_mark(kvs_metadb_t *db);

/* All rows in order of class and slot. A row that cannot be one is KV_ERR_CORRUPT. */
kv_status_t kvs_metadb_scan(kvs_metadb_t *db, kvs_row_fn row, void *arg);

/* Bytes of all files, as the file system counts them. Any thread. 0 when the directory is not there. */
uint64_t kvs_metadb_bytes(const char *path);

/* Remove a database's directory and the files in it. */
void kvs_metadb_remove(const char *path);

/* RocksDB's errors are sentences: tell a held lock, a full disk, damage and the rest apart. */
kv_status_t kvs_metadb_error(const char *sentence);

#endif
