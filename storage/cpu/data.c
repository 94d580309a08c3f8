/* Bytes and digests of slots; epochs of spaces. */
#include "geometry.h"
#include "cpu/slab/slab_table.h"
#include "tier_ops.h"

#include "kvs/sigbus.h"

static int is_writable(const kvs_ledger_slot_t *slot)
{
	kvs_state_t state = kvs_ledger_state(slot);

	return state == KVS_PUT || state == KVS_FILLING;
}

static kvs_mem_t mem_of(const kvs_slab_t *slab, kvs_loc_t loc)
{
	uint32_t index = kv_slot_index(loc.slot);

	return (kvs_mem_t){
		.data = kvs_slab_slot(slab, index),
		.leaves = kvs_slab_leaves(slab, index),
		.roots = kvs_slab_roots(slab, index),
		.region = slab->region,
	};
}

static int is_there(const kvs_slab_t *slab, kvs_loc_t loc)
{
	return kvs_slab_ready(slab, kv_slot_index(loc.slot));
}

static void copy_leaves(const kvs_geometry_t *g, uint64_t *to, const uint64_t *from)
{
	memcpy(to, from, (size_t)g->heads * g->leaves * sizeof *to);
}

kv_status_t kvs_pool_mem(kvs_tier_t *tier, kvs_loc_t loc, kvs_mem_t *p_mem)
{
	kvs_ledger_slot_t *record;
	const kvs_pool_slab_t *p = kvs_pool_find(kvs_pool_of(tier), loc, &record);

	if (!p || p->slab.foreign) {
		return p ? KV_ERR_UNSUPPORTED : KV_MISS;
	}
	if (kvs_ledger_state(record) == KVS_FILLING && !is_there(&p->slab, loc)) {
		return atomic_load_explicit(&p->slab.error, memory_order_acquire) ? KV_ERR_NOMEM : KV_ERR_BUSY;
	}
	*p_mem = mem_of(&p->slab, loc);

	return KV_OK;
}

static void count_fault(kvs_pool_t *pool, kv_status_t status)
{
	if (status == KV_ERR_FAULT) {
		kv_metric_add(pool->config.metrics, KV_M_SLAB_FAULTS, 1);
	}
}

kv_status_t kvs_pool_store(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *src, kvs_done_fn done, void *arg)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	kvs_ledger_slot_t *record;
	const kvs_pool_slab_t *p = kvs_pool_find(pool, loc, &record);

	if (!p || p->slab.foreign) {
		return p ? KV_ERR_UNSUPPORTED : KV_MISS;
	}
	if (!is_writable(record)) {
		return KV_ERR_ARG;
	}
	if (!is_there(&p->slab, loc)) {
		return KV_ERR_BUSY;
	}

	const kvs_geometry_t *g = &p->slab.geometry;
	kvs_mem_t slot = mem_of(&p->slab, loc);
	kv_status_t status = kvs_sigbus_copy_block(g, slot.data, src->data, src->leaves, NULL);

	if (status == KV_OK) {
		copy_leaves(g, slot.leaves, src->leaves);
		kvs_compute_roots(g, slot.leaves, slot.roots);
		status = memcmp(slot.roots, src->roots, g->heads * sizeof *slot.roots) == 0 ? KV_OK : KV_ERR_CORRUPT;
	}
	count_fault(pool, status);
	done(arg, status);

	return KV_OK;
}

kv_status_t kvs_pool_load(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *dst, kvs_done_fn done, void *arg)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	kvs_ledger_slot_t *record;
	const kvs_pool_slab_t *p = kvs_pool_find(pool, loc, &record);

	if (!p || kvs_ledger_state(record) == KVS_QUARANTINED) {
		return KV_MISS;
	}
	if (is_writable(record) || p->slab.foreign) {
		return p->slab.foreign ? KV_ERR_UNSUPPORTED : KV_ERR_ARG;
	}

	const kvs_geometry_t *g = &p->slab.geometry;
	kvs_mem_t slot = mem_of(&p->slab, loc);
	kv_status_t status = kvs_sigbus_copy_block(g, dst->data, slot.data, slot.leaves, NULL);

	if (status == KV_OK) {
		copy_leaves(g, dst->leaves, slot.leaves);
		memcpy(dst->roots, slot.roots, g->heads * sizeof *slot.roots);
	}
	count_fault(pool, status);
	done(arg, status);

	return KV_OK;
}

kv_status_t kvs_pool_set_leaves(kvs_tier_t *tier, kvs_loc_t loc, const kvs_leaf_span_t *span, const uint64_t *values)
{
	kvs_ledger_slot_t *record;
	const kvs_pool_slab_t *p = kvs_pool_find(kvs_pool_of(tier), loc, &record);

	if (!p) {
		return KV_MISS;
	}

	const kvs_geometry_t *g = &p->slab.geometry;

	if (!is_writable(record) || span->head > g->heads || span->heads > g->heads - span->head ||
	    span->leaf > g->leaves || span->count > g->leaves - span->leaf) {
		return KV_ERR_ARG;
	}

	uint64_t *leaves = kvs_slab_leaves(&p->slab, kv_slot_index(loc.slot));

	for (uint32_t h = 0; h < span->heads; h++) {
		memcpy(leaves + ((size_t)span->head + h) * g->leaves + span->leaf, values + (size_t)h * span->count,
		       span->count * sizeof *values);
	}

	return KV_OK;
}

kv_status_t kvs_pool_compute_roots(kvs_tier_t *tier, kvs_loc_t loc)
{
	kvs_ledger_slot_t *record;
	const kvs_pool_slab_t *p = kvs_pool_find(kvs_pool_of(tier), loc, &record);

	if (!p) {
		return KV_MISS;
	}
	if (!is_writable(record)) {
		return KV_ERR_ARG;
	}

	uint32_t index = kv_slot_index(loc.slot);

	kvs_compute_roots(&p->slab.geometry, kvs_slab_leaves(&p->slab, index), kvs_slab_roots(&p->slab, index));

	return KV_OK;
}

/* Spaces are opened rarely: a list is enough. */
static kvs_pool_epoch_t *epoch_find(const kvs_pool_t *pool, const uint8_t root[32])
{
	for (uint32_t i = 0; i < pool->epoch_count; i++) {
		if (pool->epochs[i].epoch != 0 && memcmp(pool->epochs[i].root, root, 32) == 0) {
			return &pool->epochs[i];
		}
	}

	return NULL;
}

/* In the place of one that was dropped, if there is one. */
static kvs_pool_epoch_t *epoch_add(kvs_pool_t *pool, const uint8_t root[32])
{
	for (uint32_t i = 0; pool->epochs_dropped > 0 && i < pool->epoch_count; i++) {
		if (pool->epochs[i].epoch == 0) {
			pool->epochs_dropped--;
			memcpy(pool->epochs[i].root, root, 32);
			return &pool->epochs[i];
		}
	}
	if (pool->epoch_count == pool->epoch_cap) {
		uint32_t cap = pool->epoch_cap ? pool->epoch_cap * 2u : 16u;
		size_t size = sizeof *pool->epochs;
		kvs_pool_epoch_t *grown = kv_resize(&pool->env, pool->epochs, pool->epoch_cap * size, cap * size);

		if (!grown) {
			return NULL;
		}
		pool->epochs = grown;
		pool->epoch_cap = cap;
	}

	kvs_pool_epoch_t *e = &pool->epochs[pool->epoch_count++];

	memcpy(e->root, root, 32);

	return e;
}

kv_status_t kvs_pool_epoch_set(kvs_tier_t *tier, const kvs_epoch_t *epoch, kvs_done_fn done, void *arg)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	kvs_pool_epoch_t *e = epoch_find(pool, epoch->root);

	const uint32_t kept = pool->ledger.header->epochs_cap;

	if (!e && pool->epochs_dropped == 0 && pool->epoch_count == (kept ? kept : KVS_POOL_MAX_EPOCHS)) {
		return KV_ERR_LIMIT;
	}
	if (!e) {
		e = epoch_add(pool, epoch->root);
	}
	if (!e) {
		return KV_ERR_NOMEM;
	}
	e->epoch = epoch->epoch;
	if (kept) {
		kvs_ledger_set_epoch(&pool->ledger, (uint32_t)(e - pool->epochs), e->root, e->epoch);
	}
	done(arg, KV_OK);

	return KV_OK;
}

uint32_t kvs_pool_epochs_drop(kvs_tier_t *tier, uint32_t memory, kvs_root_used_fn used, void *ctx)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	uint32_t n = 0;

	(void)memory;
	for (uint32_t i = 0; i < pool->epoch_count; i++) {
		kvs_pool_epoch_t *e = &pool->epochs[i];

		if (e->epoch != 0 && !used(ctx, e->root)) {
			e->epoch = 0;
			if (pool->ledger.header->epochs_cap) {
				kvs_ledger_set_epoch(&pool->ledger, i, e->root, 0);
			}
			n++;
		}
	}
	pool->epochs_dropped += n;

	return n;
}

uint64_t kvs_pool_epoch_get(kvs_tier_t *tier, const uint8_t root[32])
{
	const kvs_pool_epoch_t *e = epoch_find(kvs_pool_of(tier), root);

	return e ? e->epoch : 0;
}
