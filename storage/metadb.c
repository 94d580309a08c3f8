/* RocksDB through its C API: see metadb.h. */
#include "metadb.h"

#include <dirent.h>
#include <endian.h>
#include <fcntl.h>
#include <rocksdb/c.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#define ROW_VERSION 1u
#define KEY_BYTES   8u

struct kvs_metadb {
	const kv_env_t *env;
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

kv_status_t kvs_metadb_error(const char *sentence)
{
	if (strncmp(sentence, "Corruption", 10) == 0) {
		return KV_ERR_CORRUPT;
	}
	if (strstr(sentence, "No space left on device") || strstr(sentence, "Disk quota exceeded")) {
		return KV_ERR_NOSPC;
	}
	if (strncmp(sentence, "IO error: lock ", 15) == 0 || strncmp(sentence, "IO error: While lock file", 25) == 0) {
		return KV_ERR_LOCKED;
	}
	if (strstr(sentence, "No such file or directory") || strncmp(sentence, "Invalid argument", 16) == 0 ||
	    strncmp(sentence, "NotFound", 8) == 0 || strncmp(sentence, "Not implemented", 15) == 0) {
		return KV_ERR_CORRUPT; /* a file is gone, or is not what its name says */
	}

	return KV_ERR_IO;
}

/* Log the sentence, free it, say what it means. NULL is KV_OK. */
static kv_status_t take_error(const kv_env_t *env, const char *doing, char *sentence)
{
	kv_status_t status;

	if (!sentence) {
		return KV_OK;
	}

	status = kvs_metadb_error(sentence);
	kv_logf(env, KV_LOG_ERROR, "nvme", "metadata: cannot %s: %s", doing, sentence);
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

static kv_status_t check_mark(kvs_metadb_t *db, int *p_fresh)
{
	rocksdb_readoptions_t *read = rocksdb_readoptions_create();
	char *error = NULL;
	size_t len = 0;
	char *value = rocksdb_get(db->db, read, mark_key, KEY_BYTES, &len, &error);

	*p_fresh = !value || len != sizeof db->uuid || memcmp(value, &db->uuid, sizeof db->uuid) != 0;
	rocksdb_free(value);
	rocksdb_readoptions_destroy(read);

	return take_error(db->env, "read the mark", error);
}

kv_status_t kvs_metadb_open(const char *path, const kv_env_t *env, uint64_t allowance, uint64_t uuid,
			    kvs_metadb_t **p_db, int *p_fresh)
{
	kvs_metadb_t *db = kv_alloc(env, sizeof *db);
	char *error = NULL;
	kv_status_t status;

	if (!db) {
		return KV_ERR_NOMEM;
	}

	*db = (kvs_metadb_t){.env = env, .uuid = uuid};
	db->options = make_options(allowance);
	db->lazy = rocksdb_writeoptions_create();
	db->synced = rocksdb_writeoptions_create();
	rocksdb_writeoptions_set_sync(db->synced, 1);
	db->batch = rocksdb_writebatch_create();
	db->db = rocksdb_open(db->options, path, &error);
	status = take_error(env, "open it", error);
	if (status == KV_OK) {
		status = check_mark(db, p_fresh);
	}
	if (status != KV_OK) {
		kvs_metadb_close(db);
		return status;
	}

	*p_db = db;

	return KV_OK;
}

void kvs_metadb_close(kvs_metadb_t *db)
{
	char *error = NULL;

	if (!db) {
		return;
	}
	if (db->db) {
		/* A bare close leaves the rows in the log, and the next open replays it. */
		rocksdb_flushoptions_t *flush = rocksdb_flushoptions_create();

		rocksdb_flush(db->db, flush, &error);
		take_error(db->env, "flush it", error);
		rocksdb_flushoptions_destroy(flush);
		rocksdb_close(db->db);
	}
	rocksdb_writebatch_destroy(db->batch);
	rocksdb_writeoptions_destroy(db->synced);
	rocksdb_writeoptions_destroy(db->lazy);
	rocksdb_options_destroy(db->options);
	kv_free(db->env, db);
}

static void make_key(uint32_t slot_class, kv_slot_t slot, char out[KEY_BYTES])
{
	uint32_t words[2] = {htobe32(slot_class), htobe32(slot)};

	memcpy(out, words, sizeof words);
}

void kvs_metadb_put(kvs_metadb_t *db, const kvs_row_t *row)
{
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

	memcpy(raw.key, row->meta.key.b, sizeof raw.key);
	memcpy(raw.parent, row->meta.parent.b, sizeof raw.parent);
	memcpy(raw.root, row->meta.root, sizeof raw.root);
	make_key(row->slot_class, row->slot, key);
	rocksdb_writebatch_put(db->batch, key, sizeof key, (const char *)&raw, sizeof raw);
}

void kvs_metadb_delete(kvs_metadb_t *db, uint32_t slot_class, kv_slot_t slot)
{
	char key[KEY_BYTES];

	make_key(slot_class, slot, key);
	rocksdb_writebatch_delete(db->batch, key, sizeof key);
}

kv_status_t kvs_metadb_commit(kvs_metadb_t *db, int sync)
{
	char *error = NULL;

	rocksdb_write(db->db, sync ? db->synced : db->lazy, db->batch, &error);
	rocksdb_writebatch_clear(db->batch);

	return take_error(db->env, "write a batch", error);
}

kv_status_t kvs_metadb_mark(kvs_metadb_t *db)
{
	rocksdb_writebatch_put(db->batch, mark_key, KEY_BYTES, (const char *)&db->uuid, sizeof db->uuid);

	return kvs_metadb_commit(db, 1);
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

kv_status_t kvs_metadb_scan(kvs_metadb_t *db, kvs_row_fn row, void *arg)
{
	rocksdb_readoptions_t *read = rocksdb_readoptions_create();
	rocksdb_iterator_t *it;
	kv_status_t status = KV_OK;
	char *error = NULL;

	rocksdb_readoptions_set_fill_cache(read, 0);
	rocksdb_readoptions_set_readahead_size(read, 2u << 20);
	it = rocksdb_create_iterator(db->db, read);
	for (rocksdb_iter_seek_to_first(it); status == KV_OK && rocksdb_iter_valid(it); rocksdb_iter_next(it)) {
		size_t key_len;
		size_t value_len;
		const char *key = rocksdb_iter_key(it, &key_len);
		const char *value = rocksdb_iter_value(it, &value_len);
		kvs_row_t found;

		if (key_len == KEY_BYTES && memcmp(key, mark_key, KEY_BYTES) == 0) {
			continue;
		}
		status = key_len == KEY_BYTES && value_len == sizeof(raw_row_t) ? read_row(key, value, &found)
										: KV_ERR_CORRUPT;
		if (status == KV_OK) {
			status = row(arg, &found);
		}
	}
	rocksdb_iter_get_error(it, &error);
	rocksdb_iter_destroy(it);
	rocksdb_readoptions_destroy(read);
	if (error) {
		return take_error(db->env, "scan it", error);
	}

	return status;
}

uint64_t kvs_metadb_bytes(const char *path)
{
	DIR *dir = opendir(path);
	const struct dirent *entry;
	uint64_t bytes = 0;

	if (!dir) {
		return 0;
	}
	while ((entry = readdir(dir)) != NULL) {
		struct stat st;

		if (fstatat(dirfd(dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode)) {
			bytes += (uint64_t)st.st_blocks * 512u;
		}
	}
	closedir(dir);

	return bytes;
}

void kvs_metadb_remove(const char *path)
{
	DIR *dir = opendir(path);
	const struct dirent *entry;

	if (!dir) {
		return;
	}
	while ((entry = readdir(dir)) != NULL) {
		if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
			unlinkat(dirfd(dir), entry->d_name, 0);
		}
	}
	closedir(dir);
	rmdir(path);
}
