/* events/cache.h -- which prefixes an engine has in its own cache, as its events tell: messages of vLLM (KVEventBatch
 * in msgpack, events as maps: 0.24 and later).
 *
 * A block is known by its content: a digest of its tokens, its extra keys and all that is before it. The engine's hash
 * finds it again when it is removed, and as the parent of others. What is not known counts as not there: blocks below
 * an unknown parent, beyond the limit, of other media and groups. After a gap, and after a message that cannot be read,
 * nothing is known. On the loop's thread.
 */
#ifndef KVP_EVENTS_CACHE_H
#define KVP_EVENTS_CACHE_H

#include "prefix.h"

#include <stddef.h>

typedef struct kvp_cache kvp_cache_t;

typedef struct kvp_cache_stats {
	uint64_t messages, gaps, malformed; /* malformed: messages that cannot be read */
	uint64_t left_out;                  /* blocks stored whose parent is unknown, or beyond the limit */
	uint32_t blocks;                    /* known now */
} kvp_cache_stats_t;

/* Of at most max_blocks blocks, 64 bytes each; memory comes as they do. NULL: out of memory. */
kvp_cache_t *kvp_cache_create(uint32_t max_blocks);
/* NULL is fine. */
void kvp_cache_destroy(kvp_cache_t *cache);

/* A message has come, or what comes next may have a gap before it. */
void kvp_cache_take(kvp_cache_t *cache, uint64_t seq, const uint8_t *payload, size_t len);
void kvp_cache_forget(kvp_cache_t *cache);

/* Tokens from the first one that are there. */
uint32_t kvp_cache_hit(const kvp_cache_t *cache, const kvp_prefix_question_t *question);
void kvp_cache_stats(const kvp_cache_t *cache, kvp_cache_stats_t *stats);

#endif
