/* storage/metadb/rocks.h -- the rows in RocksDB, as the metadata process sees them. One thread. */
#ifndef KVS_METADB_ROCKS_H
#define KVS_METADB_ROCKS_H

#include "metadb.h"

typedef struct kvs_rocks kvs_rocks_t;

/* Open or, if it `writes`, create the directory `path` for the tier `uuid`, with buffers and log that fit `allowance`
 * bytes. *p_marked: it has this tier's mark. KV_ERR_LOCKED, KV_ERR_NOSPC, KV_ERR_CORRUPT (unreadable), KV_ERR_IO,
 * KV_ERR_NOMEM. Errors of all calls are logged. */
kv_status_t kvs_rocks_open(const char *path, int writes, uint64_t allowance, uint64_t uuid, kvs_rocks_t **p_db,
			   int *p_marked);
/* Flush and close. */
kv_status_t kvs_rocks_close(kvs_rocks_t *db);

/* Collect a change; kvs_rocks_commit() writes all of them or none. */
void kvs_rocks_add(kvs_rocks_t *db, const kvs_row_change_t *change);
kv_status_t kvs_rocks_commit(kvs_rocks_t *db, int sync);
kv_status_t kvs_rocks_mark(kvs_rocks_t *db, int sync);

/* At most `cap` rows from class << 32 | slot on. *p_more: there are others behind them. */
kv_status_t kvs_rocks_read(kvs_rocks_t *db, uint64_t from, kvs_row_change_t *out, uint32_t cap, uint32_t *p_count,
			   int *p_more);

/* RocksDB's errors are sentences: tell a held lock, a full disk, damage and the rest apart. */
kv_status_t kvs_rocks_error(const char *sentence);

#endif
