/* The digest as the lanes of a warp make it is XXH3-64: the lanes run here one after the other, and what they exchange
 * on a device is summed. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "../../kernels/cuda/device/xxh3.h"

#include "kv/digest.h"

#define LANES 32u
#define MOST  70000u

typedef struct warp {
	kvk_xxh3_lane_t lane[LANES];
} warp_t;

/* Every lane's share, met as on the device: the neighbour's part goes to the accumulator beside, and groups add up. */
static void warp_add(warp_t *warp, const kvk_xxh3_sum_t *sums)
{
	uint64_t all[8] = {0};

	for (uint32_t i = 0; i < LANES; i++) {
		all[i % 8] += sums[i].own + sums[i ^ 1].neighbour;
	}
	for (uint32_t i = 0; i < LANES; i++) {
		warp->lane[i].acc += all[i % 8];
	}
}

static void warp_chunk(warp_t *warp, const uint64_t *words, uint32_t bytes, int last)
{
	const uint32_t stripes = kvk_chunk_stripes(bytes, last);
	const uint32_t blocks = kvk_chunk_blocks(bytes, last);
	kvk_xxh3_sum_t sums[LANES];

	for (uint32_t from = 0; from < stripes; from += KVK_XXH3_STRIPES) {
		for (uint32_t i = 0; i < LANES; i++) {
			sums[i] = kvk_xxh3_block(&warp->lane[i], words + from * 8, stripes - from);
		}
		warp_add(warp, sums);
		for (uint32_t i = 0; i < LANES && from / KVK_XXH3_STRIPES < blocks; i++) {
			kvk_xxh3_scramble(&warp->lane[i]);
		}
	}
	if (last) {
		for (uint32_t i = 0; i < LANES; i++) {
			sums[i] = kvk_xxh3_tail(&warp->lane[i], words, bytes);
		}
		warp_add(warp, sums);
	}
}

static uint64_t warp_end(const warp_t *warp, uint32_t bytes)
{
	uint64_t folds = 0;

	for (uint32_t i = 0; i < 8; i += 2) {
		const kvk_xxh3_lane_t *even = &warp->lane[i];
		const kvk_xxh3_lane_t *odd = &warp->lane[i + 1];

		folds += kvk_xxh3_fold(even->acc ^ even->merge, odd->acc ^ odd->merge);
	}

	return kvk_xxh3_end(folds, bytes);
}

/* Chunk by chunk through a stage of just the size a kernel has, poisoned in between. */
static uint64_t warp_digest(const uint8_t *data, uint32_t bytes)
{
	uint64_t stage[KVK_STAGE / 8];
	warp_t warp;
	uint32_t n;

	for (uint32_t i = 0; i < LANES; i++) {
		kvk_xxh3_init(&warp.lane[i], i);
		kvk_xxh3_reset(&warp.lane[i]);
	}
	for (uint32_t from = 0; from < bytes; from += n) {
		n = kvk_chunk_bytes(bytes - from);
		assert_true(n <= sizeof stage);
		memset(stage, 0xa5, sizeof stage);
		memcpy(stage, data + from, n);
		warp_chunk(&warp, stage, n, from + n == bytes);
	}

	return warp_end(&warp, bytes);
}

static uint8_t *random_bytes(kv_test_rng_t *rng, size_t n)
{
	uint8_t *data = malloc(n);

	assert_non_null(data);
	kv_test_fill(rng, data, n);

	return data;
}

/* All lengths to three chunks and a bit, which have every remainder of every chunk, block, stripe and word. */
KV_TEST(lengths_up_to_three_chunks)
{
	kv_test_rng_t rng = {kv_test_seed()};
	uint8_t *data = random_bytes(&rng, MOST);

	for (uint32_t n = KVK_XXH3_MIN; n <= 3 * KVK_CHUNK + 200; n++) {
		if (warp_digest(data, n) != kv_digest(data, n)) {
			fail_msg("%u bytes: the digests differ", n);
		}
	}
	free(data);
}

KV_TEST(lengths_around_blocks_and_by_chance)
{
	kv_test_rng_t rng = {kv_test_seed()};
	uint8_t *data = random_bytes(&rng, MOST);

	for (uint32_t block = 1; block * KVK_XXH3_BLOCK + 66 <= MOST; block++) {
		for (uint32_t n = block * KVK_XXH3_BLOCK - 66; n <= block * KVK_XXH3_BLOCK + 66; n++) {
			if (n >= KVK_XXH3_MIN && warp_digest(data, n) != kv_digest(data, n)) {
				fail_msg("%u bytes: the digests differ", n);
			}
		}
	}
	for (uint32_t i = 0; i < 2000; i++) {
		const uint32_t at = (uint32_t)kv_test_below(&rng, 64);
		const uint32_t n = KVK_XXH3_MIN + (uint32_t)kv_test_below(&rng, MOST - KVK_XXH3_MIN - at);

		if (warp_digest(data + at, n) != kv_digest(data + at, n)) {
			fail_msg("%u bytes at %u: the digests differ", n, at);
		}
	}
	free(data);
}
