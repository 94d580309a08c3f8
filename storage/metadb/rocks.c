/* RocksDB through its C API: see rocks.h. */
#include "rocks.h"

#include "kv/log.h"

#include <dirent.h>
#include <endian.h>
#include <rocksdb/c.h>
#include <stdlib.h>
#include <string.h>

#define ROW_VERSION 1u
#define KEY_BYTES   8u
#define LOGS_MOST   8u /* when the database has been opened; seldom a flush for nothing else */

struct kvs_rocks {
	rocksdb_t *db;
	rocksdb_options_t *options;
	rocksdb_writeoptions_t *lazy;
	rocksdb_writeoptions_t *synced;
	rocksdb_writebatch_t *batch;
	uint64_t uuid;
};

typedef struct raw_row {
	uint32_t version;
	uint32_t gen;
	uint32_t length;
	uint32_t depth;
	uint8_t key[16];
	uint8_t parent[16];
	uint8_t root[32];
	uint64_t epoch;
	uint64_t event_hash;
	uint64_t digest;
	uint64_t group;
} raw_row_t;

_Static_assert(sizeof(raw_row_t) == 112, "a row is 112 bytes");

/* No row can have this key: classes are few. */
static const char mark_key[] = "\377\377\377\377mark";

kv_status_t kvs_rocks_error(const char *sentence)
{
	if (strstr(sentence, "Input/output error")) {
		return KV_ERR_IO; /* it may be wrapped: a file that could not be read is called corrupt */
	}
	if (strncmp(sentence, "Corruption", 10) == 0) {
		return KV_ERR_CORRUPT;
	}
	if (strstr(sentence, "No space left on device") || strstr(sentence, "Disk quota exceeded")) {
		return KV_ERR_NOSPC;
	}
	if (strncmp(sentence, "IO error: lock ", 15) == 0 || strncmp(sentence, "IO error: While lock file", 25) == 0) {
		return KV_ERR_LOCKED;
	}
	if (strstr(sentence, "No such file or directory") || strstr(sentence, "Is a directory") ||
	    strstr(sentence, "ot a directory") || strstr(sentence, "File exists") ||
	    strncmp(sentence, "Invalid argument", 16) == 0 || strncmp(sentence, "NotFound", 8) == 0 ||
	    strncmp(sentence, "Not implemented", 15) == 0) {
		return KV_ERR_CORRUPT; /* a file is gone, or is not what its name says */
	}

	if (strstr(sentence, "Permission denied") || strstr(sentence, "Operation not permitted")) {
		return KV_ERR_PATH;
	}

	return KV_ERR_IO;
}

/* Log the sentence, free it, say what it means. NULL is KV_OK. */
static kv_status_t take_error(const char *doing, char *sentence)
{
	kv_status_t status;

	if (!sentence) {
		return KV_OK;
	}

	status = kvs_rocks_error(sentence);
	kv_log(KV_LOG_ERROR, "meta", "cannot %s: %s", doing, sentence);
	rocksdb_free(sentence);

	return status;
}

static uint64_t clamp(uint64_t value, uint64_t low, uint64_t high)
{
	return value < low ? low : value > high ? high : value;
}

static rocksdb_options_t *make_options(uint64_t allowance)
{
	rocksdb_options_t *o = rocksdb_options_create();
	uint64_t memtable = clamp(allowance / 8u, 256u << 10, 16u << 20);

	rocksdb_options_set_create_if_missing(o, 1);
	rocksdb_options_set_paranoid_checks(o, 1);
	rocksdb_options_set_compression(o, rocksdb_no_compression);
	rocksdb_options_set_write_buffer_size(o, memtable);
	rocksdb_options_set_max_write_buffer_number(o, 2);
	rocksdb_options_set_target_file_size_base(o, memtable);
	rocksdb_options_set_max_total_wal_size(o, clamp(allowance / 2u, 1u << 20, 64u << 20));
	/* A torn last record is what a crash leaves; damage before it is an error and not the end of the log. */
	rocksdb_options_set_wal_recovery_mode(o, rocksdb_tolerate_corrupted_tail_records_recovery);
	rocksdb_options_set_manifest_preallocation_size(o, 64u << 10);
	rocksdb_options_set_max_log_file_size(o, 1u << 20);
	rocksdb_options_set_keep_log_file_num(o, 2);
	rocksdb_options_set_stats_dump_period_sec(o, 0);
	rocksdb_options_set_max_background_jobs(o, 2);
	rocksdb_options_set_max_open_files(o, 256);
	rocksdb_options_set_info_log_level(o, 2); /* warnings */

	return o;
}

static kv_status_t check_mark(kvs_rocks_t *db, int *p_marked)
{
	rocksdb_readoptions_t *read = rocksdb_readoptions_create();
	char *error = NULL;
	size_t len = 0;
	char *value = rocksdb_get(db->db, read, mark_key, KEY_BYTES, &len, &error);

	*p_marked = value && len == sizeof db->uuid && memcmp(value, &db->uuid, sizeof db->uuid) == 0;
	rocksdb_free(value);
	rocksdb_readoptions_destroy(read);

	return take_error("read the mark", error);
}

static uint32_t count_logs(const char *path)
{
	DIR *dir = opendir(path);
	const struct dirent *entry;
	uint32_t count = 0;

	while (dir && (entry = readdir(dir)) != NULL) {
		const char *dot = strrchr(entry->d_name, '.');

		count += dot && strcmp(dot, ".log") == 0;
	}
	if (dir) {
		closedir(dir);
	}

	return count;
}

static kv_status_t flush(kvs_rocks_t *db)
{
	rocksdb_flushoptions_t *options = rocksdb_flushoptions_create();
	char *error = NULL;

	rocksdb_flush(db->db, options, &error);
	rocksdb_flushoptions_destroy(options);

	return take_error("flush the database", error);
}

/* Each open begins a log, and the library (7.8) deletes older ones only when it flushes a row: opens that are followed
 * by no write leave one empty log each. The mark, written again, is such a row. */
static void delete_old_logs(kvs_rocks_t *db, const char *path)
{
	if (count_logs(path) > LOGS_MOST && kvs_rocks_mark(db, 0) == KV_OK) {
		(void)flush(db);
	}
}

kv_status_t kvs_rocks_open(const char *path, int writes, uint64_t allowance, uint64_t uuid, kvs_rocks_t **p_db,
			   int *p_marked)
{
	kvs_rocks_t *db = calloc(1, sizeof *db);
	char *error = NULL;
	kv_status_t status;

	if (!db) {
		return KV_ERR_NOMEM;
	}

	db->uuid = uuid;
	db->options = make_options(allowance);
	db->lazy = rocksdb_writeoptions_create();
	db->synced = rocksdb_writeoptions_create();
	rocksdb_writeoptions_set_sync(db->synced, 1);
	db->batch = rocksdb_writebatch_create();
	db->db = writes ? rocksdb_open(db->options, path, &error)
			: rocksdb_open_for_read_only(db->options, path, 0, &error);
	status = take_error("open the database", error);
	if (status == KV_OK) {
		status = check_mark(db, p_marked);
	}
	if (status != KV_OK) {
		kvs_rocks_close(db);
		return status;
	}
	if (writes && *p_marked) {
		delete_old_logs(db, path);
	}

	*p_db = db;

	return KV_OK;
}

kv_status_t kvs_rocks_close(kvs_rocks_t *db)
{
	kv_status_t status = KV_OK;

	if (db->db) {
		status = flush(db); /* a bare close leaves the rows in the log, and the next open replays it */
		rocksdb_close(db->db);
	}
	rocksdb_writebatch_destroy(db->batch);
	rocksdb_writeoptions_destroy(db->synced);
	rocksdb_writeoptions_destroy(db->lazy);
	rocksdb_options_destroy(db->options);
	free(db);

	return status;
}

static void make_key(uint32_t slot_class, kv_slot_t slot, char out[KEY_BYTES])
{
	uint32_t words[2] = {htobe32(slot_class), htobe32(slot)};

	memcpy(out, words, sizeof words);
}

void kvs_rocks_add(kvs_rocks_t *db, const kvs_row_change_t *change)
{
	const kvs_row_t *row = &change->row;
	raw_row_t raw = {
		.version = ROW_VERSION,
		.gen = row->gen,
		.length = row->length,
		.depth = row->meta.depth,
		.epoch = row->meta.epoch,
		.event_hash = row->meta.event_hash,
		.digest = row->digest,
		.group = row->meta.group,
	};
	char key[KEY_BYTES];

	make_key(row->slot_class, row->slot, key);
	if (!change->is_put) {
		rocksdb_writebatch_delete(db->batch, key, sizeof key);
		return;
	}
	memcpy(raw.key, row->meta.key.b, sizeof raw.key);
	memcpy(raw.parent, row->meta.parent.b, sizeof raw.parent);
	memcpy(raw.root, row->meta.root, sizeof raw.root);
	rocksdb_writebatch_put(db->batch, key, sizeof key, (const char *)&raw, sizeof raw);
}

kv_status_t kvs_rocks_commit(kvs_rocks_t *db, int sync)
{
	char *error = NULL;

	rocksdb_write(db->db, sync ? db->synced : db->lazy, db->batch, &error);
	rocksdb_writebatch_clear(db->batch);

	return take_error("write a batch", error);
}

kv_status_t kvs_rocks_mark(kvs_rocks_t *db, int sync)
{
	rocksdb_writebatch_put(db->batch, mark_key, KEY_BYTES, (const char *)&db->uuid, sizeof db->uuid);

	return kvs_rocks_commit(db, sync);
}

static kv_status_t read_row(const char *key, const char *value, kvs_row_t *p_row)
{
	uint32_t words[2];
	raw_row_t raw;

	memcpy(words, key, sizeof words);
	memcpy(&raw, value, sizeof raw);
	if (raw.version != ROW_VERSION || raw.group > UINT8_MAX) {
		return KV_ERR_CORRUPT;
	}

	*p_row = (kvs_row_t){
		.meta = {.epoch = raw.epoch, .event_hash = raw.event_hash, .depth = raw.depth},
		.digest = raw.digest,
		.slot_class = be32toh(words[0]),
		.slot = be32toh(words[1]),
		.gen = raw.gen,
		.length = raw.length,
	};
	p_row->meta.group = (uint8_t)raw.group;
	memcpy(p_row->meta.key.b, raw.key, sizeof raw.key);
	memcpy(p_row->meta.parent.b, raw.parent, sizeof raw.parent);
	memcpy(p_row->meta.root, raw.root, sizeof raw.root);

	return KV_OK;
}

static int is_mark(const char *key, size_t len)
{
	return len == KEY_BYTES && memcmp(key, mark_key, KEY_BYTES) == 0;
}

kv_status_t kvs_rocks_read(kvs_rocks_t *db, uint64_t from, kvs_row_change_t *out, uint32_t cap, uint32_t *p_count,
			   int *p_more)
{
	rocksdb_readoptions_t *read = rocksdb_readoptions_create();
	rocksdb_iterator_t *it;
	kv_status_t status = KV_OK;
	char *error = NULL;
	char first[KEY_BYTES];
	uint32_t count = 0;

	rocksdb_readoptions_set_fill_cache(read, 0);
	it = rocksdb_create_iterator(db->db, read);
	make_key((uint32_t)(from >> 32), (kv_slot_t)from, first);
	rocksdb_iter_seek(it, first, sizeof first);
	for (; status == KV_OK && count < cap && rocksdb_iter_valid(it); rocksdb_iter_next(it)) {
		size_t key_len;
		size_t value_len;
		const char *key = rocksdb_iter_key(it, &key_len);
		const char *value = rocksdb_iter_value(it, &value_len);

		if (is_mark(key, key_len)) {
			continue;
		}
		out[count].is_put = 1;
		status = key_len == KEY_BYTES && value_len == sizeof(raw_row_t)
				 ? read_row(key, value, &out[count++].row)
				 : KV_ERR_CORRUPT;
	}
	*p_count = count;
	*p_more = rocksdb_iter_valid(it) != 0;
	rocksdb_iter_get_error(it, &error);
	rocksdb_iter_destroy(it);
	rocksdb_readoptions_destroy(read);
	if (error) {
		return take_error("read rows", error);
	}

	return status;
}
