/* Slabs that go: emptied by the core, let go by everybody who maps them, their memory another class's. */
#include "cpu/slab/carve.h"
#include "cpu/slab/slab_table.h"
#include "tier_ops.h"

#include <fcntl.h>

static kvs_pool_slab_t *slab_at(const kvs_pool_t *pool, uint32_t slab)
{
	return slab < pool->slab_count ? pool->slabs[slab] : NULL;
}

static uint32_t count_slabs(kvs_tier_t *tier)
{
	return kvs_pool_of(tier)->slab_count;
}

static kv_status_t describe_slab(kvs_tier_t *tier, uint32_t slab, kvs_slab_desc_t *p_desc)
{
	const kvs_pool_slab_t *p = slab_at(kvs_pool_of(tier), slab);

	if (!p || p->state == KVS_SLAB_ZOMBIE || p->hidden) {
		return KV_MISS;
	}
	*p_desc = (kvs_slab_desc_t){
		.slot_class = p->slot_class,
		.slots = p->slab.slots,
		.taken = p->taken,
		.open = p->open,
		.retiring = p->state == KVS_SLAB_RETIRING,
		.retired = p->state == KVS_SLAB_RETIRED,
	};

	return KV_OK;
}

static uint32_t slots_gained(kvs_tier_t *tier, uint32_t slab, uint32_t for_class)
{
	const kvs_pool_t *pool = kvs_pool_of(tier);
	const kvs_pool_slab_t *p = slab_at(pool, slab);

	return p && for_class < pool->class_count ? kvs_pool_fit_slots(pool, for_class, 4096u, p) : 0;
}

static kv_status_t describe_slot(kvs_tier_t *tier, kv_slot_t slot, kvs_loc_t *p_loc, kvs_meta_t *p_meta)
{
	const kvs_pool_slab_t *p = slab_at(kvs_pool_of(tier), kv_slot_slab(slot));
	uint32_t index = kv_slot_index(slot);
	const kvs_ledger_slot_t *record;

	if (!p || p->state > KVS_SLAB_RETIRING || index >= p->slab.slots ||
	    kvs_ledger_state(&p->slots[index]) != KVS_READY) {
		return KV_MISS;
	}
	record = &p->slots[index];
	*p_loc = (kvs_loc_t){slot, record->gen};
	*p_meta = (kvs_meta_t){.key = record->key,
			       .parent = record->parent,
			       .epoch = record->epoch,
			       .event_hash = record->event_hash,
			       .depth = record->depth,
			       .group = record->group,
			       .transient = record->transient};
	memcpy(p_meta->root, record->root, sizeof p_meta->root);

	return KV_OK;
}

static uint64_t count_free_slots(kvs_tier_t *tier, uint32_t slot_class)
{
	const kvs_pool_t *pool = kvs_pool_of(tier);

	return slot_class < pool->class_count ? pool->classes[slot_class].free_slots : 0;
}

static uint64_t count_open_slots(kvs_tier_t *tier, uint32_t slot_class)
{
	return kvs_pool_of(tier)->classes[slot_class].open_slots;
}

static int is_short(kvs_tier_t *tier, uint32_t slot_class)
{
	const kvs_pool_t *pool = kvs_pool_of(tier);
	const kvs_class_t *class = &pool->classes[slot_class];
	uint64_t slots = class->newest == KVS_NONE ? 0 : pool->slabs[class->newest]->slab.slots;

	return class->free_slots <= slots / 4u && kvs_pool_fit_slots(pool, slot_class, 4096u, NULL) == 0;
}

/* Out of its class's lists, or back into them. */
static void relist_slab(kvs_pool_t *pool, kvs_pool_slab_t *p, int in)
{
	const int there[KVS_LISTS] = {p->stack != KVS_NONE, p->fresh < p->slab.slots};

	for (kvs_list_t list = KVS_WARM; list < KVS_LISTS; list++) {
		if (there[list] && in) {
			kvs_pool_link(pool, p, list, 0);
		} else if (there[list]) {
			kvs_pool_unlink(pool, p, list);
		}
	}
}

static uint64_t slab_bytes(kvs_tier_t *tier, uint32_t slot_class)
{
	(void)slot_class;

	return kvs_pool_of(tier)->config.slab_bytes;
}

/* Memory that has been retired becomes the next slab as soon as it comes back, and the core sees the free slots. */
static int is_coming(kvs_tier_t *tier, uint32_t slot_class)
{
	(void)tier;
	(void)slot_class;

	return 0;
}

static void begin_retire(kvs_tier_t *tier, uint32_t slab)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	kvs_pool_slab_t *p = slab_at(pool, slab);

	if (p && p->state == KVS_SLAB_USED) {
		relist_slab(pool, p, 0);
		pool->classes[p->slot_class].free_slots -= p->slab.slots - p->taken;
		p->state = KVS_SLAB_RETIRING;
	}
}

static void cancel_retire(kvs_tier_t *tier, uint32_t slab)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	kvs_pool_slab_t *p = slab_at(pool, slab);

	if (p && p->state == KVS_SLAB_RETIRING) {
		p->state = KVS_SLAB_USED;
		relist_slab(pool, p, 1);
		pool->classes[p->slot_class].free_slots += p->slab.slots - p->taken;
	}
}

static kv_status_t retire_slab(kvs_tier_t *tier, uint32_t slab, uint32_t for_class)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	kvs_pool_slab_t *p = slab_at(pool, slab);

	if (!p || p->state != KVS_SLAB_RETIRING || for_class >= pool->class_count) {
		return KV_MISS;
	}
	if (p->taken > 0) {
		return KV_ERR_BUSY;
	}

	kvs_class_t *class = &pool->classes[p->slot_class];

	kvs_ledger_remove_slab(&pool->ledger, slab);
	class->newest = class->newest == slab ? KVS_NONE : class->newest;
	p->state = KVS_SLAB_RETIRED;
	p->for_class = for_class;
	pool->usage.slots -= p->slab.slots;
	pool->usage.free_slots -= p->slab.slots;
	pool->version++;
	(void)kvs_prefault_drop(pool->prefault, &p->slab);
	kv_metric_add(pool->config.metrics, KV_M_SLABS_RETIRED, 1);

	return KV_OK;
}

const kvs_rebalance_ops_t kvs_pool_rebalance_ops = {
	.slab_count = count_slabs,
	.describe_slab = describe_slab,
	.slots_gained = slots_gained,
	.slab_bytes = slab_bytes,
	.describe_slot = describe_slot,
	.free_slots = count_free_slots,
	.open_slots = count_open_slots,
	.is_short = is_short,
	.is_coming = is_coming,
	.begin_retire = begin_retire,
	.cancel_retire = cancel_retire,
	.retire = retire_slab,
};

/* ---- the memory ------------------------------------------------------------------------------ */

/* Our mapping and descriptors, and the pages, which seals against resizing do not forbid: a mapping or a descriptor we
 * have not heard of (the keeper's whose message was lost, a process's of a connection before) would keep what the limit
 * no longer counts. */
static void free_slab_memory(kvs_pool_t *pool, kvs_pool_slab_t *p)
{
	uint64_t digest_bytes = p->slab.foreign ? 0 : p->slab.digest.bytes;

	kvs_pool_drop_slab(pool, p->slab.id);
	if (!p->slab.foreign &&
	    fallocate(p->slab.data.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)p->slab.data.bytes) != 0) {
		kv_logf(&pool->env, KV_LOG_WARN, "pool",
			"the pages of a retired slab stay with the processes that map it slab %u", p->slab.number);
	}
	pool->usage.charged_bytes -= p->slab.data.bytes;
	pool->classes[p->slot_class].bytes -= p->slab.data.bytes;
	pool->held--;
	kvs_slab_destroy(&p->slab, &pool->env);
	p->slab.digest.bytes = digest_bytes; /* charged until nobody maps them */
	p->state = KVS_SLAB_ZOMBIE;
}

kv_status_t kvs_pool_release(kvs_tier_t *tier, uint32_t slab, int unmapped)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	kvs_pool_slab_t *p = slab_at(pool, slab);
	uint32_t for_class;
	int was_zombie;

	if (!p || p->state < KVS_SLAB_RETIRED) {
		return KV_MISS;
	}
	was_zombie = p->state == KVS_SLAB_ZOMBIE;
	for_class = p->for_class;
	/* The pre-fault thread must be out of the slab before its pages go: it would make them exist again, charged to
	 * no slab (decision 013). */
	if (!was_zombie) {
		if ((p->slab.foreign && !unmapped) || !kvs_prefault_drop(pool->prefault, &p->slab)) {
			return KV_ERR_BUSY;
		}
		free_slab_memory(pool, p);
	}
	if (unmapped) {
		pool->usage.charged_bytes -= p->slab.digest.bytes;
		pool->slabs[slab] = NULL;
		kv_free(&pool->env, p);
	}
	kvs_pool_update_gauges(pool);
	if (!was_zombie && !pool->classes[for_class].unused) {
		(void)kvs_pool_carve(pool, for_class);
	}

	return KV_OK;
}
