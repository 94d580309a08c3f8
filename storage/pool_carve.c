/* Carving: the next slab of a class, exactly within what the limit leaves. */
#include "pool_priv.h"

#include "leaf.h"

#include <errno.h>
#include <stdio.h>

/* How long the kernel is not asked again after it has refused memory. */
#define RETRY_NS UINT64_C(1000000000)

uint64_t kvs_pool_slab_cost(const kvs_geometry_t *geometry, uint64_t slots, uint64_t page)
{
	return kvs_slab_data_bytes(geometry, slots, page) + kvs_slab_digest_bytes(geometry, slots) +
	       kvs_ledger_chunk_bytes(slots);
}

static uint64_t smaller(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* The most slots that slab size, limit, max_blocks and slot numbers allow the next slab. */
static uint32_t plan(const kvs_pool_t *pool, const kvs_geometry_t *geometry, uint64_t page)
{
	uint64_t room = pool->usage.limit_bytes - pool->usage.charged_bytes;
	uint64_t stride = kvs_geometry_stride(geometry);
	uint64_t most = smaller(KV_SLOT_MAX_INDEX + 1u, room / stride);
	uint64_t least = 0;

	most = smaller(most, pool->config.slab_bytes < stride ? 1u : pool->config.slab_bytes / stride);
	if (pool->config.max_blocks > 0) {
		most = smaller(most, pool->config.max_blocks - pool->usage.slots);
	}

	/* Cost grows with the slots: the largest count that fits lies in [least, most]. */
	while (least < most) {
		uint64_t middle = least + (most - least + 1u) / 2u;

		if (kvs_pool_slab_cost(geometry, middle, page) <= room) {
			least = middle;
		} else {
			most = middle - 1u;
		}
	}

	return (uint32_t)least;
}

/* Reserved huge pages were refused: the rest of the pool does without, said once. */
static void without_huge(kvs_pool_t *pool, int error)
{
	pool->huge = 0;
	kv_logf(&pool->env, pool->config.huge == KVS_HUGE_ON ? KV_LOG_WARN : KV_LOG_INFO, "pool",
		"no reserved huge pages, see vm.nr_hugepages error \"%s\"; going on with %s", strerror(-error),
		pool->thp ? "transparent huge pages" : "small pages");
}

static int create(kvs_pool_t *pool, kvs_pool_slab_t *p, int huge, uint32_t slots)
{
	p->slab.geometry = pool->classes[p->slot_class].geometry;
	p->slab.number = pool->slab_count;
	p->slab.slots = slots;
	p->slab.huge = huge;

	return kvs_slab_create(&p->slab, pool->sys, &pool->env);
}

/* 0, 1 when nothing fits, or -errno. */
static int create_best(kvs_pool_t *pool, kvs_pool_slab_t *p)
{
	const kvs_geometry_t *geometry = &pool->classes[p->slot_class].geometry;
	uint32_t slots = pool->huge ? plan(pool, geometry, KVS_HUGE_PAGE) : 0;

	if (slots > 0) {
		int error = create(pool, p, 1, slots);

		if (!error) {
			return 0;
		}
		if (error == -EMFILE || error == -ENFILE) {
			return error; /* not for want of huge pages */
		}
		without_huge(pool, error);
	}
	slots = plan(pool, geometry, 4096u);

	return slots > 0 ? create(pool, p, 0, slots) : 1;
}

static void admit(kvs_pool_t *pool, kvs_pool_slab_t *p)
{
	const kvs_slab_t *slab = &p->slab;
	const kvs_class_t *class = &pool->classes[p->slot_class];
	char name[32];

	p->slots = kvs_ledger_add(&pool->ledger, slab, p->slot_class, class->ns);
	pool->slabs[pool->slab_count++] = p;
	pool->usage.slots += slab->slots;
	pool->usage.free_slots += slab->slots;
	pool->usage.charged_bytes += slab->data.bytes + slab->digest.bytes + kvs_ledger_chunk_bytes(slab->slots);
	kv_assert(pool->usage.charged_bytes <= pool->usage.limit_bytes);

	if (pool->prefault) {
		kvs_prefault_add(pool->prefault, &p->slab);
	}
	if (pool->config.hold) {
		snprintf(name, sizeof name, "slab.%u", slab->number);
		pool->config.hold(pool->config.hold_ctx, name, slab->data.fd);
		snprintf(name, sizeof name, "digest.%u", slab->number);
		pool->config.hold(pool->config.hold_ctx, name, slab->digest.fd);
	}
	kv_metric_set(pool->config.metrics, KV_M_CPU_HUGE_PAGES, slab->huge || pool->thp);
	kvs_pool_gauges(pool);
}

kv_status_t kvs_pool_carve(kvs_pool_t *pool, uint32_t slot_class, uint32_t *p_slab)
{
	if (pool->slab_count == KVS_POOL_MAX_SLABS ||
	    (pool->carve_after_ns > 0 && kv_now_ns(&pool->env) < pool->carve_after_ns)) {
		return KV_ERR_FULL;
	}

	/* A full pool is asked again and again: it answers before anything is allocated. */
	if (plan(pool, &pool->classes[slot_class].geometry, 4096u) == 0) {
		return KV_ERR_FULL;
	}

	kvs_pool_slab_t *p = kv_alloc(&pool->env, sizeof *p);
	int error = -ENOMEM;

	if (p) {
		p->slot_class = slot_class;
		error = create_best(pool, p);
	}
	if (error) {
		kv_free(&pool->env, p);
	}
	if (error < 0) {
		pool->carve_after_ns = kv_now_ns(&pool->env) + RETRY_NS;
		kv_logf(&pool->env, KV_LOG_WARN, "pool", "no new slab, trying again in a second slab %u error \"%s\"",
			pool->slab_count, strerror(-error));
	}
	if (error) {
		return KV_ERR_FULL;
	}

	pool->carve_after_ns = 0;
	*p_slab = p->slab.number;
	admit(pool, p);

	return KV_OK;
}
