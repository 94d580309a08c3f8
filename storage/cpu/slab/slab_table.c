/* The slabs of a pool, their lists and the metrics of their sums. */
#include "slab_table.h"

kvs_pool_slab_t *kvs_pool_find(const kvs_pool_t *pool, kvs_loc_t loc, kvs_ledger_slot_t **p_slot)
{
	uint32_t number = kv_slot_slab(loc.slot);
	uint32_t index = kv_slot_index(loc.slot);

	if (number >= pool->slab_count || !pool->slabs[number] || index >= pool->slabs[number]->slab.slots) {
		return NULL;
	}

	kvs_ledger_slot_t *slot = &pool->slabs[number]->slots[index];

	if (slot->gen != loc.gen || kvs_ledger_state(slot) == KVS_FREE) {
		return NULL;
	}
	*p_slot = slot;

	return pool->slabs[number];
}

void kvs_pool_link(kvs_pool_t *pool, kvs_pool_slab_t *p, kvs_list_t list, int first)
{
	kvs_class_t *class = &pool->classes[p->slot_class];
	uint32_t self = p->slab.number;

	p->prev[list] = first ? KVS_NONE : class->last[list];
	p->next[list] = first ? class->first[list] : KVS_NONE;
	if (p->prev[list] == KVS_NONE) {
		class->first[list] = self;
	} else {
		pool->slabs[p->prev[list]]->next[list] = self;
	}
	if (p->next[list] == KVS_NONE) {
		class->last[list] = self;
	} else {
		pool->slabs[p->next[list]]->prev[list] = self;
	}
}

void kvs_pool_unlink(kvs_pool_t *pool, kvs_pool_slab_t *p, kvs_list_t list)
{
	kvs_class_t *class = &pool->classes[p->slot_class];

	if (p->prev[list] == KVS_NONE) {
		class->first[list] = p->next[list];
	} else {
		pool->slabs[p->prev[list]]->next[list] = p->next[list];
	}
	if (p->next[list] == KVS_NONE) {
		class->last[list] = p->prev[list];
	} else {
		pool->slabs[p->next[list]]->prev[list] = p->prev[list];
	}
}

void kvs_pool_update_gauges(kvs_pool_t *pool)
{
	const int gpu = pool->config.take != NULL;
	kvs_usage_t *shown = &pool->shown;
	const kvs_usage_t *usage = &pool->usage;
	kv_metrics_t *m = pool->config.metrics;

	/* The change is added: pools of several GPUs are one tier. */
	kv_metric_add(m, gpu ? KV_M_GPU_LIMIT_BYTES : KV_M_CPU_LIMIT_BYTES, usage->limit_bytes - shown->limit_bytes);
	kv_metric_add(m, gpu ? KV_M_GPU_BYTES : KV_M_CPU_BYTES, usage->charged_bytes - shown->charged_bytes);
	kv_metric_add(m, gpu ? KV_M_GPU_USED_BYTES : KV_M_CPU_USED_BYTES, usage->used_bytes - shown->used_bytes);
	kv_metric_add(m, gpu ? KV_M_GPU_QUARANTINED_BYTES : KV_M_CPU_QUARANTINED_BYTES,
		      usage->quarantined_bytes - shown->quarantined_bytes);
	*shown = *usage;
}
