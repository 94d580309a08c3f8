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

static kvk_paged_t describe(const kve_config_t *share, uint32_t blocks, uint32_t first_head, kvk_dtype_t dtype)
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
		.dtype = dtype,
	};
}

static size_t value_bytes(kvk_dtype_t dtype)
{
	return dtype == KVK_DTYPE_F32 ? sizeof(float) : 2u;
}

size_t kve_cache_bytes(const kve_cache_shape_t *shape)
{
	kve_config_t share;

	if (kve_config_check(shape->config, NULL) != KV_OK || shape->blocks == 0 ||
	    kve_config_rank(shape->config, shape->ranks, &share) != KV_OK) {
		return 0;
	}

	return kve_cache_page(&share) * value_bytes(shape->dtype) * shape->blocks * share.layers * shape->ranks;
}

kv_status_t kve_cache_init_at(kve_cache_t *cache, const kve_cache_shape_t *shape, void *memory)
{
	const uint32_t blocks = shape->blocks, ranks = shape->ranks, parts = shape->config->layers * ranks;
	const size_t part = kve_cache_bytes(shape) / parts;
	kve_config_t share;

	if (part == 0 || kve_config_rank(shape->config, ranks, &share) != KV_OK) {
		return KV_ERR_ARG;
	}

	*cache = (kve_cache_t){.ranks = ranks, .free_count = blocks};
	cache->held = calloc(blocks, sizeof *cache->held);
	cache->free_ids = calloc(blocks, sizeof *cache->free_ids);
	if (!cache->held || !cache->free_ids) {
		kve_cache_fini(cache);
		return KV_ERR_NOMEM;
	}

	for (uint32_t i = 0; i < parts; i++) {
		cache->base[i] = (char *)memory + part * i;
	}
	for (uint32_t r = 0; r < ranks; r++) {
		cache->paged[r] = describe(&share, blocks, kve_config_kv_head(shape->config, ranks, r), shape->dtype);
		cache->paged[r].base = cache->base + (size_t)r * share.layers;
	}
	for (uint32_t i = 0; i < blocks; i++) {
		cache->free_ids[i] = blocks - 1 - i;
	}

	return KV_OK;
}

kv_status_t kve_cache_init_ranks(kve_cache_t *cache, const kve_config_t *config, uint32_t blocks, uint32_t ranks)
{
	const kve_cache_shape_t shape = {config, blocks, ranks, KVK_DTYPE_F32};
	const size_t bytes = kve_cache_bytes(&shape);
	void *memory = bytes ? aligned_alloc(64, bytes) : NULL;
	kv_status_t status;

	if (!memory) {
		return bytes ? KV_ERR_NOMEM : KV_ERR_ARG;
	}
	memset(memory, 0, bytes);
	status = kve_cache_init_at(cache, &shape, memory);
	if (status != KV_OK) {
		free(memory);
		return status;
	}
	cache->memory = memory;

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
