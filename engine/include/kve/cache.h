/* kve/cache.h -- the paged cache: per layer [block][K|V][token][kv_head][head_dim], and who holds which block.
 *
 * A block is free or has one or more holders: the request it belongs to, and a save that still reads it. It is free again when the last of them
 * lets go. One thread.
 */
#ifndef KVE_CACHE_H
#define KVE_CACHE_H

#include "kve/config.h"

typedef struct kve_cache {
	kvk_paged_t paged; /* what a connector is told; base points below */
	void *base[KVE_MAX_LAYERS];
	void *memory;
	uint32_t *holders;  /* [blocks]                                     */
	uint32_t *free_ids; /* stack; the first free_count entries are free */
	uint32_t free_count;
} kve_cache_t;

/* Zeroed cache of `blocks` blocks. The struct must not move afterwards. KV_ERR_ARG: bad config or no block. KV_ERR_NOMEM. */
kv_status_t kve_cache_init(kve_cache_t *cache, const kve_config_t *config, uint32_t blocks);
void kve_cache_fini(kve_cache_t *cache);

/* n blocks with one holder each. KV_ERR_FULL: fewer are free; nothing was taken. */
kv_status_t kve_cache_take(kve_cache_t *cache, uint32_t n, uint32_t *p_ids);
/* One more holder of each of n blocks that are held. */
void kve_cache_hold(kve_cache_t *cache, const uint32_t *ids, uint32_t n);
/* One holder less of each. */
void kve_cache_drop(kve_cache_t *cache, const uint32_t *ids, uint32_t n);

/* Floats of one layer's block. */
size_t kve_cache_page(const kve_config_t *config);

#endif
