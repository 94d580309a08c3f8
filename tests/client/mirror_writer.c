/* The writer's side of the mirror. One thread writes. */
#include "mirror_writer.h"

#include "kv/env.h"

#define WORDS 5u /* of an entry */

typedef struct words {
	_Atomic uint32_t seq;
	_Atomic uint32_t entry[KV_MIRROR_WAYS][WORDS];
} words_t;

uint64_t mirror_bytes(uint64_t buckets)
{
	return KV_MIRROR_HEADER_BYTES + KV_MIRROR_MAX_SPACES * sizeof(uint64_t) + buckets * sizeof(kv_mirror_bucket_t);
}

void mirror_init(void *base, uint64_t buckets, uint64_t incarnation)
{
	kv_mirror_header_t *header = base;

	header->magic = KV_MIRROR_MAGIC;
	header->version = KV_SHM_VERSION;
	header->incarnation = incarnation;
	header->bucket_count = buckets;
	header->epochs_offset = KV_MIRROR_HEADER_BYTES;
	header->buckets_offset = KV_MIRROR_HEADER_BYTES + KV_MIRROR_MAX_SPACES * sizeof(uint64_t);
	header->total_bytes = mirror_bytes(buckets);
}

void mirror_beat(void *base, uint64_t now_ns)
{
	atomic_store(&((kv_mirror_header_t *)base)->heartbeat_ns, now_ns);
}

void mirror_epoch(void *base, uint32_t space, uint64_t epoch)
{
	const kv_mirror_header_t *header = base;
	_Atomic uint64_t *epochs = (_Atomic uint64_t *)((uint8_t *)base + header->epochs_offset);

	atomic_store(&epochs[space], epoch);
}

static words_t *bucket_at(void *base, uint64_t at)
{
	const kv_mirror_header_t *header = base;
	words_t *buckets = (words_t *)((uint8_t *)base + header->buckets_offset);

	return &buckets[at & (header->bucket_count - 1)];
}

static int entry_is(const _Atomic uint32_t *entry, const kv_key_t *key, uint8_t group)
{
	uint32_t words[4], last = atomic_load(&entry[4]);

	memcpy(words, key->b, sizeof words);
	for (uint32_t i = 0; i < 4; i++) {
		if (atomic_load(&entry[i]) != words[i]) {
			return 0;
		}
	}

	return (last & 0xffu) == group && (last >> 8 & 0xffu) != 0;
}

static void write_entry(words_t *bucket, uint32_t way, const kv_key_t *key, uint8_t group, uint8_t tiers)
{
	uint32_t words[4];
	uint32_t keep = atomic_load(&bucket->entry[way][4]) & 0xffff0000u;

	memcpy(words, key->b, sizeof words);
	atomic_fetch_add(&bucket->seq, 1u);
	for (uint32_t i = 0; i < 4; i++) {
		atomic_store(&bucket->entry[way][i], tiers ? words[i] : 0u);
	}
	atomic_store(&bucket->entry[way][4], keep | (tiers ? (uint32_t)tiers << 8 | group : 0u));
	atomic_fetch_add(&bucket->seq, 1u);
}

static void overflow_add(words_t *bucket, int by)
{
	uint32_t word = atomic_load(&bucket->entry[0][4]);
	uint32_t count = word >> 16;

	if (count == 65535u) {
		return;
	}
	atomic_fetch_add(&bucket->seq, 1u);
	atomic_store(&bucket->entry[0][4], (word & 0xffffu) | (count + (uint32_t)by) << 16);
	atomic_fetch_add(&bucket->seq, 1u);
}

/* Where the key is: distance from home and way; -1: nowhere. */
static int find(void *base, const kv_key_t *key, uint8_t group, uint32_t *p_way)
{
	for (uint32_t i = 0; i < KV_MIRROR_MAX_PROBE; i++) {
		words_t *bucket = bucket_at(base, kv_key_hash(key) + i);

		for (uint32_t way = 0; way < KV_MIRROR_WAYS; way++) {
			if (entry_is(bucket->entry[way], key, group)) {
				*p_way = way;
				return (int)i;
			}
		}
	}

	return -1;
}

static int find_empty(void *base, const kv_key_t *key, uint32_t *p_way)
{
	for (uint32_t i = 0; i < KV_MIRROR_MAX_PROBE; i++) {
		words_t *bucket = bucket_at(base, kv_key_hash(key) + i);

		for (uint32_t way = 0; way < KV_MIRROR_WAYS; way++) {
			if ((atomic_load(&bucket->entry[way][4]) >> 8 & 0xffu) == 0) {
				*p_way = way;
				return (int)i;
			}
		}
	}

	return -1;
}

int mirror_set(void *base, const kv_key_t *key, uint8_t group, uint8_t tiers)
{
	uint64_t home = kv_key_hash(key);
	uint32_t way = 0;
	int at = find(base, key, group, &way);

	if (at >= 0) {
		write_entry(bucket_at(base, home + (uint32_t)at), way, key, group, tiers);
		for (int i = 0; i < at && tiers == 0; i++) {
			overflow_add(bucket_at(base, home + (uint32_t)i), -1);
		}
		return 0;
	}
	if (tiers == 0) {
		return 0;
	}
	at = find_empty(base, key, &way);
	if (at < 0) {
		return -1;
	}
	/* A reader must be led past full buckets before the entry is there to be found. */
	for (int i = 0; i < at; i++) {
		overflow_add(bucket_at(base, home + (uint32_t)i), 1);
	}
	write_entry(bucket_at(base, home + (uint32_t)at), way, key, group, tiers);

	return 0;
}

void mirror_lock(void *base, const kv_key_t *key, int locked)
{
	words_t *bucket = bucket_at(base, kv_key_hash(key));
	uint32_t seq = atomic_load(&bucket->seq);

	kv_assert((seq & 1u) == (locked ? 0u : 1u));
	atomic_store(&bucket->seq, seq + 1u);
}
