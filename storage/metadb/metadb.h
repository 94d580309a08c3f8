/* storage/metadb/metadb.h -- what is where: (class, slot) -> whose block it is. One synced batch a flush.
 *
 * RocksDB keeps the rows, in a process of its own (kvd_meta.c): the library may abort, hang or be killed, and only the
 * rows are away for a while. This is the tier's end of it; docs/decisions/023-metadata-process.md says why.
 *
 *   no process --any call--> process, database open --death, hang, error or nonsense--> no process
 *
 * A database is believed only with its mark, which is written when it holds the row of every block. What is damaged, or
 * not believed, or has not opened for ten minutes, is moved aside; an empty one without a mark takes its place, so that
 * the next start reads the slots' headers instead.
 *
 * Used by one thread at a time (recovery: the owner; then the commit thread). Calls block, each for a bounded time.
 */
#ifndef KVS_METADB_METADB_H
#define KVS_METADB_METADB_H

#include "kv/env.h"
#include "kv/metric.h"
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

typedef struct kvs_row_change {
	kvs_row_t row; /* delete: class and slot */
	int is_put;
} kvs_row_change_t;

typedef struct kvs_metadb_config {
	const char *path;   /* directory; the caller's for as long as the handle lives */
	int dir_fd;         /* the directory it lies in, as "meta" */
	uint64_t allowance; /* bytes its buffers and log fit into */
	uint64_t uuid;      /* of the tier */
	int sync;           /* 1: what is written is synced */
	kv_metrics_t *metrics;
} kvs_metadb_config_t;

/* Return other than KV_OK to end the scan. */
typedef kv_status_t (*kvs_row_fn)(void *arg, const kvs_row_t *row);

/* A handle without a process. KV_ERR_NOMEM; KV_ERR_PATH: there is no program kvd-meta beside this one. */
kv_status_t kvs_metadb_create(const kvs_metadb_config_t *config, const kv_env_t *env, kvs_metadb_t **p_db);
/* Flush, end the process, free. NULL: nothing. */
void kvs_metadb_close(kvs_metadb_t *db);

/* Of all calls below: KV_ERR_NOSPC, KV_ERR_CORRUPT (the database), KV_ERR_LOCKED (another process has it open),
 * KV_ERR_TIMEOUT (the process did not answer, and was killed), KV_ERR_IO (the library says so, or the process died),
 * KV_ERR_PROTO (its answer makes no sense), KV_ERR_BUSY (no process could be started). After any of them there is no
 * process, and the next call starts one: at once if the last had opened the database and had room, or was the first
 * that had not; else after a pause of 0.1 s to 60 s, twice as long each time. Until it has passed calls repeat the
 * failure. */

/* Start the process and open or create the database. *p_marked: 1 when it holds a row of every block; on a full file
 * system it is opened for reading. One without a mark, or damaged, is replaced by an empty one where the tier has
 * slots. What does not open for another reason within 3 s is left as it is, and the status says why; with `must_open`
 * it is replaced too. KV_OK with *p_marked 0: the rows are not to be had. */
kv_status_t kvs_metadb_open(kvs_metadb_t *db, int has_slots, int must_open, int *p_marked);
/* Sleep until a process may be started again, 0.1 s at least. 0: that would be after `until_ns`. */
int kvs_metadb_await_retry(const kvs_metadb_t *db, uint64_t until_ns);
/* All rows have been read: a database that was opened for reading is closed, and opened for writing by a later call.
 * KV_OK, or why no process has it open. */
kv_status_t kvs_metadb_end_reading(kvs_metadb_t *db);
/* What is there is not to be believed: move it aside and open an empty one without a mark. When that fails, a later
 * call does it before anything else. */
kv_status_t kvs_metadb_replace(kvs_metadb_t *db);
/* Make all changes durable, or none. A process that has died is replaced by another one at once and the changes are
 * written there. count 0: only see that the database is open. */
kv_status_t kvs_metadb_write(kvs_metadb_t *db, const kvs_row_change_t *change, uint32_t count);
/* Write the mark that says: complete. KV_ERR_CORRUPT: rows were lost since it was opened or replaced. */
kv_status_t kvs_metadb_mark(kvs_metadb_t *db);
/* All rows of a database with a mark, in order of class and slot. A row that cannot be one is KV_ERR_CORRUPT. The
 * callback may write. */
kv_status_t kvs_metadb_scan(kvs_metadb_t *db, kvs_row_fn row, void *arg);

/* The process's socket: a hang-up there says that it has ended, and kvs_metadb_note_death() follows. -1: none. The
 * death returns 1 if another one is worth a start at once: else it would die at once, too, and the next write tries. */
int kvs_metadb_fd(const kvs_metadb_t *db);
int kvs_metadb_note_death(kvs_metadb_t *db);

/* Bytes of all files, as the file system counts them. Any thread. 0 when the directory is not there. */
uint64_t kvs_metadb_bytes(const char *path);

#endif
