/* Room for leaf digests in the member area: extents by address, first fit. */
#include "impl.h"

kv_status_t kvc_staging_take(kvc_t *kvc, uint64_t words, kvc_extent_t *extent)
{
	const kvc_map_t *map = atomic_load_explicit(&kvc->map, memory_order_relaxed);
	uint64_t at = 0;
	uint32_t i = 0;

	if (!map || words > map->staging_words) {
		return KV_ERR_LIMIT;
	}
	if (words == 0) {
		*extent = (kvc_extent_t){0};
		return KV_OK;
	}
	if (kvc->extent_count == KVC_MAX_EXTENTS) {
		return KV_ERR_BUSY;
	}
	while (i < kvc->extent_count && kvc->extents[i].first - at < words) {
		at = kvc->extents[i].first + kvc->extents[i].words;
		i++;
	}
	if (map->staging_words - at < words) {
		return KV_ERR_BUSY;
	}

	memmove(&kvc->extents[i + 1], &kvc->extents[i], (kvc->extent_count - i) * sizeof kvc->extents[0]);
	kvc->extents[i] = (kvc_extent_t){.first = at, .words = words};
	kvc->extent_count++;
	*extent = kvc->extents[i];

	return KV_OK;
}

void kvc_staging_give(kvc_t *kvc, kvc_extent_t *extent)
{
	for (uint32_t i = 0; extent->words && i < kvc->extent_count; i++) {
		if (kvc->extents[i].first == extent->first) {
			kvc->extent_count--;
			memmove(&kvc->extents[i], &kvc->extents[i + 1],
				(kvc->extent_count - i) * sizeof kvc->extents[0]);
			break;
		}
	}
	*extent = (kvc_extent_t){0};
}

void kvc_staging_reset(kvc_t *kvc)
{
	kvc->extent_count = 0;
}
