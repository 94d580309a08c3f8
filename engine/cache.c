/* Paged cache and block allocator. */
#include "kve/cache.h"

#include "kv/env.h"

#include <stdlib.h>
#include <string.h>

size_t kve_cache_page(const kve_config_t *config)
{
	return (size_t)2 * config->block_tokens * config->kv_heads * config->head_dim;
}

kv_status_t kve_cache_init(kve_cache_t *cache, const kve_config_t *config, uint32_t blocks)
{
	const size_t layer = kve_cache_page(config) * sizeof(float) * blocks;

	if (kve_config_check(config, NULL) != KV_OK || blocks == 0) {
		return KV_ERR_ARG;
	}

	*cache = (kve_cache_t){
		.paged =
			{
				.kind = KVK_PAGED_KV_TOKEN_HEAD,
				.blocks = blocks,
				.layers = config->layers,
				.heads = config->kv_heads,
				.block_tokens = config->block_tokens,
				.k_dim = config->head_dim,
				.v_dim = config->head_dim,
				.dtype = KVK_DTYPE_F32,
			},
		.free_count = blocks,
	};
	cache->paged.base = cache->base;

	cache->memory = aligned_alloc(64, layer * config->layers);
	cache->held = calloc(blocks, sizeof *cache->held);
	cache->free_ids = calloc(blocks, sizeof *cache->free_ids);
	if (!cache->memory || !cache->held || !cache->free_ids) {
		kve_cache_fini(cache);
		return KV_ERR_NOMEM;
	}

	memset(cache->memory, 0, layer * config->layers);
	for (uint32_t l = 0; l < config->layers; l++) {
		cache->base[l] = (char *)cache->memory + layer * l;
	}
	for (uint32_t i = 0; i < blocks; i++) {
		cache->free_ids[i] = blocks - 1 - i;
	}

	return KV_OK;
}

void kve_cache_fini(kve_cache_t *cache)
{
	free(cache->memory);
	free(cache->held);
	free(cache->free_ids);
	*cache = (kve_cache_t){0};
}

kv_status_t kve_cache_take(kve_cache_t *cache, uint32_t n, uint32_t *p_ids)
{
	if (n > cache->free_count) {
		return KV_ERR_FULL;
	}

	for (uint32_t i = 0; i < n; i++) {
		const uint32_t id = cache->free_ids[--cache->free_count];

		kv_assert(cache->held[id] == 0);
		cache->held[id] = 1;
		p_ids[i] = id;
	}

	return KV_OK;
}

void kve_cache_give(kve_cache_t *cache, const uint32_t *ids, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		kv_assert(ids[i] < cache->paged.blocks && cache->held[ids[i]]);
		cache->held[ids[i]] = 0;
		cache->free_ids[cache->free_count++] = ids[i];
	}
}
