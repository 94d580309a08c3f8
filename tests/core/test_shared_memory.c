/* The two shared areas the core writes: the mirror, read back as a client reads it, and the lease area's allocator,
 * against plain models. */
#include "kv_cmocka.h"

#include "core/lease/extent_alloc.h"
#include "kv_test.h"
#include "core/block/mirror.h"

#define KEYS 3000u

/* ---- mirror ---------------------------------------------------------------------------------- */

static uint8_t lookup(const void *memory, const kv_key_t *key, uint8_t group)
{
	const kv_mirror_header_t *header = memory;
	const kv_mirror_bucket_t *buckets = (const void *)((const uint8_t *)memory + header->buckets_offset);

	for (uint32_t d = 0; d < KV_MIRROR_MAX_PROBE; d++) {
		const kv_mirror_bucket_t *bucket = &buckets[(kv_key_hash(key) + d) & (header->bucket_count - 1)];

		assert_int_equal(bucket->seq % 2, 0);
		for (uint32_t way = 0; way < KV_MIRROR_WAYS; way++) {
			const kv_mirror_entry_t *entry = &bucket->entry[way];

			if (entry->tiers && entry->group == group && kv_key_equal(&entry->key, key)) {
				return entry->tiers;
			}
		}
		if (bucket->entry[0].overflow == 0) {
			break;
		}
	}

	return 0;
}

/* `crowd`: how many different home buckets the keys have; 0: all. */
static void mirror_model(uint64_t blocks, uint32_t keys, uint32_t crowd)
{
	static kv_key_t key[KEYS];
	static uint8_t tiers[KEYS];
	kv_test_rng_t rng = {.state = kv_test_seed()};
	void *memory = calloc(1, kvd_mirror_size(blocks));
	kvd_mirror_t mirror;
	uint64_t there = 0, left_out = 0;

	kvd_mirror_init(&mirror, memory, blocks, 5);
	memset(tiers, 0, sizeof tiers);
	for (uint32_t i = 0; i < keys; i++) {
		kv_test_fill(&rng, key[i].b, sizeof key[i].b);
		if (crowd) {
			uint64_t home = i % crowd;
			memcpy(key[i].b, &home, sizeof home);
		}
	}
	for (uint32_t step = 0; step < 60000; step++) {
		uint32_t i = (uint32_t)kv_test_below(&rng, keys);
		uint8_t now = (uint8_t)kv_test_below(&rng, 4);

		if (kvd_mirror_set(&mirror, &key[i], 0, now) == KV_OK) {
			tiers[i] = now;
		} else {
			left_out++;
			assert_int_equal(tiers[i], 0);
		}
		assert_int_equal(lookup(memory, &key[i], 0), tiers[i]);
		assert_int_equal(lookup(memory, &key[i], 1), 0);
	}
	for (uint32_t i = 0; i < keys; i++) {
		assert_int_equal(lookup(memory, &key[i], 0), tiers[i]);
		there += tiers[i] != 0;
		assert_int_equal(kvd_mirror_set(&mirror, &key[i], 0, 0), KV_OK);
	}
	assert_int_equal(mirror.entries, 0);
	assert_true(there > 0 && (crowd == 1) == (left_out > 0));
	for (uint64_t b = 0; b <= mirror.mask; b++) { /* empty again: no bucket counts an overflow */
		assert_int_equal(mirror.buckets[b].entry[0].overflow, 0);
	}
	free(memory);
}

KV_TEST(p3_a_reader_finds_what_was_written_and_nothing_else)
{
	mirror_model(KEYS, KEYS, 0);
	mirror_model(200, 90, 7);
}

KV_TEST(p5_a_block_without_a_free_entry_in_reach_is_left_out)
{
	mirror_model(1000, 400, 1);
}

/* ---- lease area ------------------------------------------------------------------------------ */

#define ROOMS 200u

KV_TEST(p4_extents_do_not_overlap_and_all_space_returns)
{
	static uint8_t owner[1 << 18];
	static struct {
		uint32_t extent;
		uint64_t offset, bytes;
	} room[ROOMS];
	kv_test_env_t env;
	kvd_obj_pool_t extents;
	kvd_extent_alloc_t area;
	uint32_t all, taken = 0, busy = 0;

	kv_test_env_init(&env);
	memset(room, 0, sizeof room);
	assert_int_equal(kvd_obj_pool_init(&extents, &env.env, sizeof(kvd_extent_t), 4096), KV_OK);
	assert_int_equal(kvd_extent_alloc_init(&area, &extents, owner, sizeof owner, 32), KV_OK);
	all = area.units_free;
	for (uint32_t step = 0; step < 100000; step++) {
		uint32_t i = (uint32_t)kv_test_below(&env.rng, ROOMS);

		if (room[i].bytes == 0) {
			uint64_t bytes = 1 + kv_test_below(&env.rng, kv_test_below(&env.rng, 8) ? 600 : 40000);

			if (kvd_extent_take(&area, bytes, &room[i].extent, &room[i].offset) != KV_OK) {
				busy++;
				continue;
			}
			room[i].bytes = bytes;
			taken++;
			assert_true(room[i].offset >= 64 && room[i].offset % 64 == 0 &&
				    room[i].offset + bytes <= sizeof owner);
			for (uint64_t b = 0; b < bytes; b++) {
				assert_int_equal(owner[room[i].offset + b], 0);
			}
			memset(owner + room[i].offset, 1, bytes);
		} else {
			memset(owner + room[i].offset, 0, room[i].bytes);
			kvd_extent_give(&area, room[i].extent);
			room[i].bytes = 0;
		}
		if (step % 100 == 0) {
			assert_true(kvd_extent_alloc_check(&area));
		}
	}
	assert_true(taken > 1000 && busy > 0);
	for (uint32_t i = 0; i < ROOMS; i++) {
		if (room[i].bytes) {
			kvd_extent_give(&area, room[i].extent);
		}
	}
	assert_int_equal(area.units_free, all);
	assert_int_equal(extents.used, 1);
	kvd_extent_alloc_fini(&area);
	kvd_obj_pool_fini(&extents);
	assert_int_equal(kv_test_env_live(&env), 0);
}
