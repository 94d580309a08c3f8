#include "core/block/mirror.h"

#define ENTRY_WORDS (sizeof(kv_mirror_entry_t) / sizeof(uint32_t))

static uint64_t bucket_count(uint64_t blocks)
{
	uint64_t count = 64;

	while (count * 2 < blocks + blocks / 8) { /* 3 entries a bucket: a load of about 0.6 at the most */
		count *= 2;
	}

	return count;
}

static uint64_t epochs_offset(void)
{
	return KV_MIRROR_HEADER_BYTES;
}

static uint64_t buckets_offset(void)
{
	return epochs_offset() + KV_MIRROR_MAX_SPACES * sizeof(uint64_t);
}

uint64_t kvd_mirror_size(uint64_t blocks)
{
	return buckets_offset() + bucket_count(blocks) * sizeof(kv_mirror_bucket_t);
}

void kvd_mirror_init(kvd_mirror_t *mirror, void *memory, uint64_t blocks, uint64_t incarnation)
{
	kv_mirror_header_t *header = memory;

	*mirror = (kvd_mirror_t){
		.header = header,
		.epochs = (void *)((uint8_t *)memory + epochs_offset()),
		.buckets = (void *)((uint8_t *)memory + buckets_offset()),
		.mask = bucket_count(blocks) - 1,
	};
	header->version = KV_SHM_VERSION;
	header->features = 0;
	header->incarnation = incarnation;
	header->bucket_count = mirror->mask + 1;
	header->buckets_offset = buckets_offset();
	header->epochs_offset = epochs_offset();
	header->total_bytes = kvd_mirror_size(blocks);
	header->magic = KV_MIRROR_MAGIC;
}

/* Readers run at the same time, without locks: an entry is stored word by word between an odd and an even sequence
 * number. The release fence keeps the words behind the odd number, the release store keeps them before the even one. */
static void store_entry(kv_mirror_bucket_t *bucket, uint32_t way, const kv_mirror_entry_t *entry)
{
	uint32_t seq = atomic_load_explicit(&bucket->seq, memory_order_relaxed);
	_Atomic uint32_t *to = (void *)((uint8_t *)bucket + sizeof(uint32_t) + way * sizeof *entry);
	uint32_t words[ENTRY_WORDS];

	memcpy(words, entry, sizeof words);
	atomic_store_explicit(&bucket->seq, seq + 1, memory_order_relaxed);
	atomic_thread_fence(memory_order_release);
	for (size_t i = 0; i < ENTRY_WORDS; i++) {
		atomic_store_explicit(&to[i], words[i], memory_order_relaxed);
	}
	atomic_store_explicit(&bucket->seq, seq + 2, memory_order_release);
}

/* How many entries were pushed past this bucket; kept in its first entry. A search may stop at 0. */
static void add_overflow(kv_mirror_bucket_t *bucket, int delta)
{
	kv_mirror_entry_t entry = bucket->entry[0];

	if (entry.overflow == UINT16_MAX) {
		return;
	}
	entry.overflow = (uint16_t)(entry.overflow + delta);
	store_entry(bucket, 0, &entry);
}

/* Where the block is: probe distance and way, or the first empty way (found 0), or none (-1). */
typedef struct kvd_mirror_pos {
	int found;
	uint32_t distance;
	uint32_t way;
} kvd_mirror_pos_t;

static kvd_mirror_pos_t find_entry(const kvd_mirror_t *mirror, const kv_key_t *key, uint8_t group)
{
	uint64_t home = kv_key_hash(key);
	kvd_mirror_pos_t pos = {.found = -1};
	int more = 1;

	for (uint32_t d = 0; d < KV_MIRROR_MAX_PROBE && (more || pos.found < 0); d++) {
		const kv_mirror_bucket_t *bucket = &mirror->buckets[(home + d) & mirror->mask];

		for (uint32_t way = 0; way < KV_MIRROR_WAYS; way++) {
			const kv_mirror_entry_t *entry = &bucket->entry[way];

			if (entry->tiers == 0 && pos.found < 0) {
				pos = (kvd_mirror_pos_t){.found = 0, .distance = d, .way = way};
			}
			if (more && entry->tiers != 0 && entry->group == group && kv_key_equal(&entry->key, key)) {
				return (kvd_mirror_pos_t){.found = 1, .distance = d, .way = way};
			}
		}
		more = more && bucket->entry[0].overflow != 0;
	}

	return pos;
}

kv_status_t kvd_mirror_set(kvd_mirror_t *mirror, const kv_key_t *key, uint8_t group, uint8_t tiers)
{
	kvd_mirror_pos_t pos = find_entry(mirror, key, group);
	uint64_t home = kv_key_hash(key);
	kv_mirror_bucket_t *bucket = &mirror->buckets[(home + pos.distance) & mirror->mask];
	kv_mirror_entry_t entry;

	if (pos.found != 1 && tiers == 0) {
		return KV_OK;
	}
	if (pos.found < 0) {
		return KV_ERR_FULL;
	}

	entry = (kv_mirror_entry_t){.group = group, .tiers = tiers, .overflow = bucket->entry[pos.way].overflow};
	if (tiers != 0) {
		entry.key = *key;
	}
	if (pos.found == 0) {
		/* A reader must not stop short of an entry: count the overflow before the entry appears, and take it
		 * off after it went. */
		for (uint32_t d = 0; d < pos.distance; d++) {
			add_overflow(&mirror->buckets[(home + d) & mirror->mask], 1);
		}
		mirror->entries++;
	}
	store_entry(bucket, pos.way, &entry);
	if (tiers == 0) {
		for (uint32_t d = 0; d < pos.distance; d++) {
			add_overflow(&mirror->buckets[(home + d) & mirror->mask], -1);
		}
		mirror->entries--;
	}

	return KV_OK;
}

void kvd_mirror_set_heartbeat(kvd_mirror_t *mirror, uint64_t now_ns)
{
	atomic_store_explicit(&mirror->header->heartbeat_ns, now_ns, memory_order_release);
}

void kvd_mirror_set_unreadable(kvd_mirror_t *mirror, uint64_t tiers)
{
	atomic_store_explicit(&mirror->header->unreadable, tiers, memory_order_relaxed);
}

void kvd_mirror_set_epoch(kvd_mirror_t *mirror, uint32_t space, uint64_t epoch)
{
	if (space < KV_MIRROR_MAX_SPACES) {
		atomic_store_explicit(&mirror->epochs[space], epoch, memory_order_release);
	}
}
