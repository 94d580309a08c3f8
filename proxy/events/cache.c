/* Which prefixes an engine has in its own cache. */
#include "events/cache.h"

#include "kv/digest.h"
#include "kv/mp.h"

#include <stdlib.h>
#include <string.h>

#define TABLE_LEAST      1024u
#define BLOCK_TOKENS_MAX 4096u
#define ADAPTERS_MAX     256u
#define NEST_MAX         4u
#define LABEL_CAP        1024u /* bytes of a unit's extra keys, as msgpack */

/* Open addressing; 0 is no key. */
typedef struct table {
	struct entry {
		uint64_t key, value;
	} * entries;
	uint32_t cap, n; /* cap: a power of two, or 0 */
} table_t;

struct kvp_cache {
	table_t by_hash;    /* the engine's hash -> digest of the content */
	table_t by_content; /* that digest -> the engine's hash */
	uint32_t max_blocks;
	uint32_t block_tokens; /* of all blocks; 0: none yet */
	uint64_t group;        /* the one whose blocks are kept */
	int has_group, has_seq;
	uint64_t next_seq;
	uint64_t adapters[ADAPTERS_MAX]; /* digests of their names */
	uint32_t adapter_n;
	kvp_cache_stats_t stats;
	uint32_t unit[4 + BLOCK_TOKENS_MAX]; /* what is digested: parent, extra keys, tokens */
};

/* ---- tables ---------------------------------------------------------------------------------- */

static uint64_t key_of(uint64_t key)
{
	return key ? key : 1;
}

/* Where the key is, or the empty entry where it would be. The table has an empty one. */
static uint32_t find_entry(const table_t *table, uint64_t key)
{
	uint32_t i = (uint32_t)(key * UINT64_C(0x9e3779b97f4a7c15) >> 32) & (table->cap - 1);

	while (table->entries[i].key != 0 && table->entries[i].key != key) {
		i = (i + 1) & (table->cap - 1);
	}

	return i;
}

static const uint64_t *table_get(const table_t *table, uint64_t key)
{
	uint32_t i;

	if (table->n == 0) {
		return NULL;
	}
	i = find_entry(table, key_of(key));

	return table->entries[i].key ? &table->entries[i].value : NULL;
}

/* 0: out of memory, and nothing has changed. */
static int make_room(table_t *table)
{
	table_t grown = {.cap = table->cap ? 2 * table->cap : TABLE_LEAST, .n = table->n};

	if (table->cap && table->n < table->cap / 2) {
		return 1;
	}
	grown.entries = calloc(grown.cap, sizeof *grown.entries);
	if (!grown.entries) {
		return 0;
	}
	for (uint32_t i = 0; i < table->cap; i++) {
		if (table->entries[i].key) {
			grown.entries[find_entry(&grown, table->entries[i].key)] = table->entries[i];
		}
	}
	free(table->entries);
	*table = grown;

	return 1;
}

static void table_put(table_t *table, uint64_t key, uint64_t value)
{
	uint32_t i = find_entry(table, key_of(key));

	table->n += table->entries[i].key == 0;
	table->entries[i] = (struct entry){key_of(key), value};
}

static void table_remove(table_t *table, uint64_t key)
{
	uint32_t hole, i;

	if (!table_get(table, key)) {
		return;
	}
	hole = i = find_entry(table, key_of(key));
	table->entries[hole].key = 0;
	table->n--;
	for (;;) { /* entries behind the hole that belong before it move there */
		struct entry moved;

		i = (i + 1) & (table->cap - 1);
		moved = table->entries[i];
		if (moved.key == 0) {
			return;
		}
		table->entries[i].key = 0;
		table->entries[find_entry(table, moved.key)] = moved;
	}
}

static void table_clear(table_t *table)
{
	free(table->entries);
	*table = (table_t){0};
}

/* ---- blocks ---------------------------------------------------------------------------------- */

static void clear_blocks(kvp_cache_t *cache)
{
	table_clear(&cache->by_hash);
	table_clear(&cache->by_content);
	cache->block_tokens = 0;
	cache->has_group = 0;
	cache->adapter_n = 0;
}

static void remove_block(kvp_cache_t *cache, uint64_t hash)
{
	const uint64_t *content = table_get(&cache->by_hash, hash), *owner;

	if (content) {
		owner = table_get(&cache->by_content, *content);
		if (owner && *owner == hash) {
			table_remove(&cache->by_content, *content);
		}
		table_remove(&cache->by_hash, hash);
	}
}

static int add_block(kvp_cache_t *cache, uint64_t hash, uint64_t content)
{
	if (cache->by_hash.n >= cache->max_blocks || !make_room(&cache->by_hash) || !make_room(&cache->by_content)) {
		return 0;
	}
	remove_block(cache, hash); /* what the engine called so before */
	table_put(&cache->by_hash, hash, content);
	table_put(&cache->by_content, content, hash);

	return 1;
}

static uint64_t content_of(uint32_t *unit, uint64_t parent, uint64_t extra, uint32_t tokens)
{
	memcpy(unit, &parent, sizeof parent);
	memcpy(unit + 2, &extra, sizeof extra);

	return kv_digest(unit, (4 + (size_t)tokens) * sizeof *unit);
}

/* ---- messages -------------------------------------------------------------------------------- */

typedef struct list {
	kv_mp_reader_t at; /* its first element */
	uint32_t n;
} list_t;

typedef struct event {
	enum { OTHER, STORED, REMOVED, CLEARED } type;
	list_t hashes, tokens, extras;
	int has_parent, is_elsewhere, is_partial_group, has_group; /* elsewhere: in no memory that computes */
	uint64_t parent, block_tokens, group, adapter;
} event_t;

static int is(const kv_mp_item_t *item, const char *text)
{
	return item->type == KV_MP_STR && item->len == strlen(text) && memcmp(item->data, text, item->len) == 0;
}

/* A list or nil. */
static kv_status_t read_list(kv_mp_reader_t *reader, list_t *list)
{
	kv_mp_reader_t start = *reader;
	kv_mp_item_t item;
	kv_status_t status = kv_mp_next(&start, &item);

	if (status == KV_OK && item.type != KV_MP_ARRAY && item.type != KV_MP_NIL) {
		status = KV_ERR_PROTO;
	}
	if (status == KV_OK) {
		*list = (list_t){start, item.type == KV_MP_ARRAY ? item.len : 0};
		status = kv_mp_skip(reader, NEST_MAX);
	}

	return status;
}

/* vLLM's hashes are numbers, or bytes where VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is 0. */
static kv_status_t number_of(const kv_mp_item_t *item, uint64_t *p_number)
{
	switch (item->type) {
	case KV_MP_UINT:
		*p_number = item->value;
		return KV_OK;
	case KV_MP_INT:
		*p_number = (uint64_t)item->negative;
		return KV_OK;
	case KV_MP_BIN:
		*p_number = kv_digest(item->data, item->len);
		return KV_OK;
	default:
		return KV_ERR_PROTO;
	}
}

static void note_scalar(event_t *event, const kv_mp_item_t *key, const kv_mp_item_t *item)
{
	if (is(key, "type")) {
		event->type = is(item, "BlockStored")        ? STORED
			      : is(item, "BlockRemoved")     ? REMOVED
			      : is(item, "AllBlocksCleared") ? CLEARED
							     : OTHER;
	} else if (is(key, "block_size")) {
		event->block_tokens = item->type == KV_MP_UINT ? item->value : 0;
	} else if (is(key, "medium")) {
		event->is_elsewhere = item->type != KV_MP_NIL && !is(item, "GPU");
	} else if (is(key, "group_idx")) {
		event->has_group = item->type == KV_MP_UINT;
		event->group = item->value;
	} else if (is(key, "kv_cache_spec_kind")) {
		event->is_partial_group =
			item->type != KV_MP_NIL && !is(item, "full_attention") && !is(item, "mla_attention");
	} else if (is(key, "lora_name")) {
		event->adapter = item->type == KV_MP_STR ? kv_digest(item->data, item->len) : 0;
	}
}

static kv_status_t read_field(kv_mp_reader_t *reader, event_t *event)
{
	kv_mp_item_t key, item;
	kv_status_t status = kv_mp_next(reader, &key);

	if (status != KV_OK || key.type != KV_MP_STR) {
		return KV_ERR_PROTO;
	}
	if (is(&key, "block_hashes")) {
		return read_list(reader, &event->hashes);
	}
	if (is(&key, "token_ids")) {
		return read_list(reader, &event->tokens);
	}
	if (is(&key, "extra_keys")) {
		return read_list(reader, &event->extras);
	}
	if (is(&key, "parent_block_hash")) {
		status = kv_mp_next(reader, &item);
		event->has_parent = status == KV_OK && item.type != KV_MP_NIL;
		return event->has_parent ? number_of(&item, &event->parent) : status;
	}
	item = (kv_mp_item_t){.type = KV_MP_NIL};
	if (kv_mp_next(&(kv_mp_reader_t){reader->at, reader->end}, &item) == KV_OK) {
		note_scalar(event, &key, &item);
	}

	return kv_mp_skip(reader, NEST_MAX);
}

static kv_status_t next_number(list_t *list, uint64_t *p_number)
{
	kv_mp_item_t item;
	kv_status_t status = kv_mp_next(&list->at, &item);

	return status == KV_OK ? number_of(&item, p_number) : status;
}

static void note_adapter(kvp_cache_t *cache, uint64_t adapter)
{
	for (uint32_t i = 0; i < cache->adapter_n; i++) {
		if (cache->adapters[i] == adapter) {
			return;
		}
	}
	if (adapter && cache->adapter_n < ADAPTERS_MAX) {
		cache->adapters[cache->adapter_n++] = adapter;
	}
}

/* Of the block that is next in the event's lists. */
static kv_status_t next_block(kvp_cache_t *cache, event_t *event, uint64_t *p_hash, uint64_t *p_extra)
{
	const uint8_t *extra = event->extras.at.at;
	kv_status_t status = next_number(&event->hashes, p_hash);
	uint64_t token = 0;

	for (uint32_t i = 0; status == KV_OK && i < cache->block_tokens; i++) {
		status = next_number(&event->tokens, &token);
		if (status == KV_OK && token > UINT32_MAX) {
			status = KV_ERR_PROTO;
		}
		cache->unit[4 + i] = (uint32_t)token;
	}
	*p_extra = 0;
	if (status == KV_OK && event->extras.n > 0) {
		status = kv_mp_skip(&event->extras.at, NEST_MAX);
		if (status == KV_OK && *extra != 0xc0) { /* not nil */
			*p_extra = kv_digest(extra, (size_t)(event->extras.at.at - extra));
		}
	}

	return status;
}

/* Do the event's blocks belong to the group and the size of block that is kept? The first event decides which. */
static int is_kept(kvp_cache_t *cache, const event_t *event)
{
	const uint64_t group = event->has_group ? event->group : 0;

	if (event->type == STORED && !cache->has_group && !event->is_partial_group && event->block_tokens > 0 &&
	    event->block_tokens <= BLOCK_TOKENS_MAX && event->hashes.n > 0) {
		cache->has_group = 1;
		cache->group = group;
		cache->block_tokens = (uint32_t)event->block_tokens;
	}

	return cache->has_group && group == cache->group && !event->is_elsewhere;
}

static kv_status_t store(kvp_cache_t *cache, event_t *event)
{
	const uint64_t *parent = event->has_parent ? table_get(&cache->by_hash, event->parent) : NULL;
	uint64_t content = parent ? *parent : 0;
	kv_status_t status = KV_OK;

	if ((event->has_parent && !parent) || event->block_tokens != cache->block_tokens ||
	    event->tokens.n != (uint64_t)event->hashes.n * cache->block_tokens ||
	    (event->extras.n > 0 && event->extras.n != event->hashes.n)) {
		cache->stats.left_out += event->hashes.n;
		return KV_OK;
	}
	note_adapter(cache, event->adapter);
	for (uint32_t i = 0; i < event->hashes.n; i++) {
		uint64_t hash, extra;

		status = next_block(cache, event, &hash, &extra);
		if (status != KV_OK) {
			break;
		}
		content = content_of(cache->unit, content, extra, cache->block_tokens);
		if (!add_block(cache, hash, content)) {
			cache->stats.left_out += event->hashes.n - i;
			break;
		}
	}

	return status;
}

static kv_status_t take_event(kvp_cache_t *cache, kv_mp_reader_t *reader)
{
	event_t event = {0};
	kv_mp_item_t map;
	kv_status_t status = kv_mp_next(reader, &map);

	if (status != KV_OK || map.type != KV_MP_MAP) {
		return KV_ERR_PROTO;
	}
	for (uint32_t i = 0; i < map.len && status == KV_OK; i++) {
		status = read_field(reader, &event);
	}
	if (status != KV_OK) {
		return status;
	}
	if (event.type == CLEARED) {
		clear_blocks(cache);
	} else if (event.type == STORED && is_kept(cache, &event)) {
		status = store(cache, &event);
	} else if (event.type == REMOVED && is_kept(cache, &event)) {
		for (uint64_t hash; event.hashes.n > 0 && status == KV_OK; event.hashes.n--) {
			status = next_number(&event.hashes, &hash);
			if (status == KV_OK) {
				remove_block(cache, hash);
			}
		}
	}

	return status;
}

void kvp_cache_take(kvp_cache_t *cache, uint64_t seq, const uint8_t *payload, size_t len)
{
	kv_mp_reader_t reader = {payload, payload + len};
	kv_mp_item_t batch, events;
	kv_status_t status;

	cache->stats.messages++;
	if (cache->has_seq && seq != cache->next_seq) {
		cache->stats.gaps++;
		clear_blocks(cache);
	}
	cache->has_seq = 1;
	cache->next_seq = seq + 1;
	status = kv_mp_next(&reader, &batch);
	if (status == KV_OK && (batch.type != KV_MP_ARRAY || batch.len < 2)) {
		status = KV_ERR_PROTO;
	}
	if (status == KV_OK) {
		status = kv_mp_skip(&reader, 0); /* its time */
	}
	if (status == KV_OK) {
		status = kv_mp_next(&reader, &events);
	}
	if (status == KV_OK && events.type != KV_MP_ARRAY) {
		status = KV_ERR_PROTO;
	}
	for (uint32_t i = 0; status == KV_OK && i < events.len; i++) {
		status = take_event(cache, &reader);
	}
	if (status != KV_OK) {
		cache->stats.malformed++;
		clear_blocks(cache);
	}
}

void kvp_cache_forget(kvp_cache_t *cache)
{
	cache->has_seq = 0;
	clear_blocks(cache);
}

/* ---- lookups --------------------------------------------------------------------------------- */

/* The digest of a unit's extra keys as vLLM's events have them: a list of the adapter's name, and of the salt in the
 * first unit. 0: none. */
static uint64_t extra_of(const char *adapter, const char *salt)
{
	uint8_t bytes[LABEL_CAP];
	kv_mp_writer_t writer = {bytes, sizeof bytes, 0};
	msgpack_packer packer = kv_mp_packer(&writer);
	const char *const texts[] = {adapter, salt};

	if (!*adapter && !*salt) {
		return 0;
	}
	msgpack_pack_array(&packer, (size_t)(*adapter != '\0') + (*salt != '\0'));
	for (unsigned i = 0; i < 2; i++) {
		if (*texts[i]) {
			msgpack_pack_str(&packer, strlen(texts[i]));
			msgpack_pack_str_body(&packer, texts[i], strlen(texts[i]));
		}
	}

	return kv_digest(bytes, writer.len < sizeof bytes ? writer.len : sizeof bytes);
}

uint32_t kvp_cache_hit(const kvp_cache_t *cache, const kvp_prefix_question_t *question)
{
	const uint64_t model = kv_digest(question->model, strlen(question->model));
	const uint32_t size = cache->block_tokens, units = size ? question->n / size : 0;
	uint32_t unit[4 + BLOCK_TOKENS_MAX], done;
	const char *adapter = "";
	uint64_t content = 0, other;

	for (uint32_t i = 0; i < cache->adapter_n; i++) {
		adapter = cache->adapters[i] == model ? question->model : adapter;
	}
	other = extra_of(adapter, "");
	for (done = 0; done < units; done++) {
		memcpy(unit + 4, question->tokens + (size_t)done * size, size * sizeof *unit);
		content = content_of(unit, content, done == 0 ? extra_of(adapter, question->salt) : other, size);
		if (!table_get(&cache->by_content, content)) {
			break;
		}
	}

	return done * size;
}

void kvp_cache_stats(const kvp_cache_t *cache, kvp_cache_stats_t *stats)
{
	*stats = cache->stats;
	stats->blocks = cache->by_hash.n;
}

kvp_cache_t *kvp_cache_create(uint32_t max_blocks)
{
	kvp_cache_t *cache = calloc(1, sizeof *cache);

	if (cache) {
		cache->max_blocks = max_blocks;
	}

	return cache;
}

void kvp_cache_destroy(kvp_cache_t *cache)
{
	if (cache) {
		clear_blocks(cache);
		free(cache);
	}
}
