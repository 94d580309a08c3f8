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
	return kve_cache_init_ranks(cache, config, blocks, 1);
}

static kvk_paged_t describe(const kve_config_t *share, uint32_t blocks, uint32_t first_head)
{
	return (kvk_paged_t){
		.kind = KVK_PAGED_KV_TOKEN_HEAD,
		.blocks = blocks,
		.layers = share->layers,
		.heads = share->kv_heads,
		.first_head = first_head,
		.block_tokens = share->block_tokens,
		.k_dim = share->head_dim,
		.v_dim = share->head_dim,
		.dtype = KVK_DTYPE_F32,
	};
}

kv_status_t kve_cache_init_ranks(kve_cache_t *cache, const kve_config_t *config, uint32_t blocks, uint32_t ranks)
{
	kve_config_t share;
	size_t layer;

	if (kve_config_check(config, NULL) != KV_OK || kve_config_rank(config, ranks, &share) != KV_OK || blocks == 0) {
		return KV_ERR_ARG;
	}

	layer = kve_cache_page(&share) * sizeof(float) * blocks;
	*cache = (kve_cache_t){.ranks = ranks, .free_count = blocks};
	cache->memory = aligned_alloc(64, layer * config->layers * ranks);
	cache->held = calloc(blocks, sizeof *cache->held);
	cache->free_ids = calloc(blocks, sizeof *cache->free_ids);
	if (!cache->memory || !cache->held || !cache->free_ids) {
		kve_cache_fini(cache);
		return KV_ERR_NOMEM;
	}

	memset(cache->memory, 0, layer * config->layers * ranks);
	for (uint32_t i = 0; i < config->layers * ranks; i++) {
		cache->base[i] = (char *)cache->memory + layer * i;
	}
	for (uint32_t r = 0; r < ranks; r++) {
		cache->paged[r] = describe(&share, blocks, kve_config_kv_head(config, ranks, r));
		cache->paged[r].base = cache->base + (size_t)r * config->layers;
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
		kv_assert(ids[i] < cache->paged[0].blocks && cache->held[ids[i]]);
		cache->held[ids[i]] = 0;
		cache->free_ids[cache->free_count++] = ids[i];
	}
}
