/* obj_pool.h -- objects of one size, named by 32-bit ids: pointers stay good until the object is given back, ids are
 * half as wide.
 *
 * Memory comes in chunks of 1,024 objects and is kept until the pool ends, so that a busy core stops allocating after
 * its first minutes.
 *
 *   UNMADE --chunk--> FREE <--get, put--> USED
 */
#ifndef KVD_CORE_OBJ_POOL_H
#define KVD_CORE_OBJ_POOL_H

#include "kv/env.h"
#include "kv/status.h"

#define KVD_NONE                UINT32_MAX
#define KVD_OBJ_POOL_CHUNK_BITS 10u
#define KVD_OBJ_POOL_CHUNK      (1u << KVD_OBJ_POOL_CHUNK_BITS)

typedef struct kvd_obj_pool {
	const kv_env_t *env;
	uint8_t **chunks;
	uint32_t item_bytes;
	uint32_t limit;
	uint32_t made; /* objects that have memory */
	uint32_t used;
	uint32_t free_head;
} kvd_obj_pool_t;

/* `item_bytes`: a multiple of 4; at most `limit` objects. KV_ERR_NOMEM. */
kv_status_t kvd_obj_pool_init(kvd_obj_pool_t *pool, const kv_env_t *env, uint32_t item_bytes, uint32_t limit);
void kvd_obj_pool_fini(kvd_obj_pool_t *pool);

/* A zeroed object. KV_ERR_LIMIT, KV_ERR_NOMEM. */
kv_status_t kvd_obj_pool_get(kvd_obj_pool_t *pool, uint32_t *p_id);
/* It keeps all but its last four bytes until the next get. */
void kvd_obj_pool_put(kvd_obj_pool_t *pool, uint32_t id);

/* Make memory until `count` objects have some: later gets cannot fail until they are used up. */
kv_status_t kvd_obj_pool_reserve(kvd_obj_pool_t *pool, uint64_t count);

static inline void *kvd_obj_at(const kvd_obj_pool_t *pool, uint32_t id)
{
	return pool->chunks[id >> KVD_OBJ_POOL_CHUNK_BITS] + (size_t)(id & (KVD_OBJ_POOL_CHUNK - 1)) * pool->item_bytes;
}

#endif
