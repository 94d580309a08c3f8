/* The block allocator against a plain array. */
#include "engine/check.h"

#include "kve/cache.h"

#define BLOCKS 40u

KV_TEST(every_block_is_free_or_held_and_never_given_twice)
{
	uint32_t count[BLOCKS] = {0}, ids[BLOCKS], held;
	uint64_t seed = 21;
	kve_cache_t cache;

	assert_int_equal(kve_cache_init(&cache, &kve_config_tiny, BLOCKS), KV_OK);
	for (int step = 0; step < 20000; step++) {
		const uint32_t id = below(&seed, BLOCKS), n = 1 + below(&seed, 6), before = cache.free_count;

		switch (below(&seed, 2)) {
		case 0:
			if (kve_cache_take(&cache, n, ids) != KV_OK) {
				assert_true(before < n && cache.free_count == before);
				break;
			}
			for (uint32_t i = 0; i < n; i++) {
				assert_true(ids[i] < BLOCKS && count[ids[i]] == 0);
				count[ids[i]] = 1;
			}
			break;
		default:
			if (count[id] > 0) {
				kve_cache_give(&cache, &id, 1);
				count[id] = 0;
			}
			break;
		}

		held = 0;
		for (uint32_t i = 0; i < BLOCKS; i++) {
			held += count[i] > 0;
		}
		assert_int_equal(cache.free_count + held, BLOCKS);
	}
	kve_cache_fini(&cache);
}

KV_TEST(the_cache_describes_itself_as_the_layout_says)
{
	kve_cache_t cache;
	kvk_layout_t layout;
	kvk_geometry_t geometry;
	const char *why = "";

	assert_int_equal(kve_cache_init(&cache, &kve_config_demo, 3), KV_OK);
	kve_config_layout(&kve_config_demo, &layout);
	assert_int_equal(kvk_layout_check(&layout, &why), KV_OK);
	assert_int_equal(kvk_paged_check(&cache.paged[0], &layout, &why), KV_OK);
	kvk_layout_geometry(&layout, &geometry);
	assert_int_equal(geometry.block_bytes,
			 kve_config_demo.layers * kve_cache_page(&kve_config_demo) * sizeof(float));
	kve_cache_fini(&cache);
	assert_int_equal(kve_cache_init(&cache, &kve_config_demo, 0), KV_ERR_ARG);
}

KV_TEST_MAIN(NULL, NULL)
