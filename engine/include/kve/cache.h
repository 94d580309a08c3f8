/* kve/cache.h -- the paged cache: per rank and layer [block][K|V][token][kv_head][head_dim], and which blocks are free.
 * A block id names that block of every rank. One thread. */
#ifndef KVE_CACHE_H
#define KVE_CACHE_H

#include "kve/config.h"

typedef struct kve_cache {
	uint32_t ranks;
	kvk_paged_t paged[KVE_MAX_RANKS];           /* what a connector is told; base points below */
	void *base[KVE_MAX_RANKS * KVE_MAX_LAYERS]; /* of all layers of the first rank, then of the next */
	void *memory;                               /* NULL: it is another's */
	uint8_t *held;                              /* [blocks]: 1 while a request has it */
	uint32_t *free_ids;                         /* stack; the first free_count entries are free */
	uint32_t free_count;
} kve_cache_t;

typedef struct kve_cache_shape {
	const kve_config_t *config;
	uint32_t blocks, ranks; /* of attention: kve_config_rank() */
	kvk_dtype_t dtype;      /* F32 or BF16 */
} kve_cache_shape_t;

/* Bytes of all pages; 0: a bad shape. */
size_t kve_cache_bytes(const kve_cache_shape_t *shape);
/* A cache in these bytes, which may be a device's; they stay the caller's and are not touched. KV_ERR_ARG,
 * KV_ERR_NOMEM. */
kv_status_t kve_cache_init_at(kve_cache_t *cache, const kve_cache_shape_t *shape, void *memory);

/* Zeroed cache of `blocks` blocks, for one rank. The struct must not move afterwards. KV_ERR_ARG: bad config or no
 * block. KV_ERR_NOMEM. */
kv_status_t kve_cache_init(kve_cache_t *cache, const kve_config_t *config, uint32_t blocks);
/* The same for tensor parallel ranks, each with its own KV heads. KV_ERR_ARG, too: kve_config_rank(). */
kv_status_t kve_cache_init_ranks(kve_cache_t *cache, const kve_config_t *config, uint32_t blocks, uint32_t ranks);
void kve_cache_fini(kve_cache_t *cache);

/* n blocks of its own. KV_ERR_FULL: fewer are free; nothing was taken. What is in them is undefined. */
kv_status_t kve_cache_take(kve_cache_t *cache, uint32_t n, uint32_t *p_ids);
/* Give n taken blocks back. */
void kve_cache_give(kve_cache_t *cache, const uint32_t *ids, uint32_t n);

/* Floats of one layer's block; of a rank's share of the configuration, those of the rank. */
size_t kve_cache_page(const kve_config_t *config);

#endif
