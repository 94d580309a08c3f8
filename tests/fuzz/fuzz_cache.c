/* Any payload as an engine's events, twice: what is then known of its cache stays within the limit, and no message
 * brings more hits than tokens. */
#include "events/cache.h"

#include "kv/env.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MAX_BLOCKS 8u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const uint32_t tokens[64] = {1, 2, 3, 4};
	kvp_cache_t *cache = kvp_cache_create(MAX_BLOCKS);
	kvp_cache_stats_t stats;

	kv_assert(cache);
	for (uint64_t seq = 0; seq < 2; seq++) {
		kvp_cache_take(cache, seq, data, size);
		kvp_cache_stats(cache, &stats);
		kv_assert(stats.blocks <= MAX_BLOCKS);
		kv_assert(kvp_cache_hit(cache, &(kvp_prefix_question_t){"m", "s", tokens, 64}) <= 64);
	}
	kvp_cache_destroy(cache);

	return 0;
}
