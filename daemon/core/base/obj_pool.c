#include "core/base/obj_pool.h"

#include <string.h>

kv_status_t kvd_obj_pool_init(kvd_obj_pool_t *pool, const kv_env_t *env, uint32_t item_bytes, uint32_t limit)
{
	uint32_t chunks = (limit >> KVD_OBJ_POOL_CHUNK_BITS) + 1;

	*pool = (kvd_obj_pool_t){.env = env, .item_bytes = item_bytes, .limit = limit, .free_head = KVD_NONE};
	pool->chunks = kv_alloc(env, (size_t)chunks * sizeof *pool->chunks);

	return pool->chunks ? KV_OK : KV_ERR_NOMEM;
}

void kvd_obj_pool_fini(kvd_obj_pool_t *pool)
{
	if (!pool->chunks) {
		return;
	}
	for (uint32_t i = 0; i < pool->made >> KVD_OBJ_POOL_CHUNK_BITS; i++) {
		kv_free(pool->env, pool->chunks[i]);
	}
	kv_free(pool->env, pool->chunks);
	pool->chunks = NULL;
}

/* In the last four bytes: the first ones say of most objects whether they are used, also while they are free. */
static uint32_t *link_of(const kvd_obj_pool_t *pool, uint32_t id)
{
	return (uint32_t *)(void *)((uint8_t *)kvd_obj_at(pool, id) + pool->item_bytes - sizeof(uint32_t));
}

static kv_status_t grow_pool(kvd_obj_pool_t *pool)
{
	uint8_t *chunk;
	uint32_t first = pool->made;

	if (first >= pool->limit) {
		return KV_ERR_LIMIT;
	}
	chunk = kv_alloc(pool->env, (size_t)KVD_OBJ_POOL_CHUNK * pool->item_bytes);
	if (!chunk) {
		return KV_ERR_NOMEM;
	}
	pool->chunks[first >> KVD_OBJ_POOL_CHUNK_BITS] = chunk;
	pool->made += KVD_OBJ_POOL_CHUNK;

	for (uint32_t i = KVD_OBJ_POOL_CHUNK; i-- > 0;) {
		*link_of(pool, first + i) = pool->free_head;
		pool->free_head = first + i;
	}

	return KV_OK;
}

kv_status_t kvd_obj_pool_get(kvd_obj_pool_t *pool, uint32_t *p_id)
{
	uint32_t id;

	if (pool->used >= pool->limit) {
		return KV_ERR_LIMIT;
	}
	if (pool->free_head == KVD_NONE) {
		kv_status_t status = grow_pool(pool);

		if (status != KV_OK) {
			return status;
		}
	}
	id = pool->free_head;
	pool->free_head = *link_of(pool, id);
	pool->used++;
	memset(kvd_obj_at(pool, id), 0, pool->item_bytes);
	*p_id = id;

	return KV_OK;
}

void kvd_obj_pool_put(kvd_obj_pool_t *pool, uint32_t id)
{
	kv_assert(id < pool->made && pool->used > 0);
	*link_of(pool, id) = pool->free_head;
	pool->free_head = id;
	pool->used--;
}

kv_status_t kvd_obj_pool_reserve(kvd_obj_pool_t *pool, uint64_t count)
{
	while (pool->made < count) {
		kv_status_t status = grow_pool(pool);

		if (status != KV_OK) {
			return status;
		}
	}

	return KV_OK;
}
