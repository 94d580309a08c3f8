/* Slots: who gets which, and what state it is in. */
#include "pool_priv.h"

#include "kv/digest.h"
#include "leaf.h"

/* A new slab becomes the class's fresh one, or waits behind it. */
static int carve(kvs_pool_t *pool, uint32_t slot_class)
{
	kvs_class_t *class = &pool->classes[slot_class];
	uint32_t slab;

	if (kvs_pool_carve(pool, slot_class, &slab) != KV_OK) {
		return 0;
	}
	if (class->fresh_slab == KVS_NONE) {
		class->fresh_slab = slab;
		class->fresh_next = 0;
		return 1;
	}
	if (class->ahead_count == 0) {
		class->ahead_first = slab;
	} else {
		pool->slabs[class->ahead_last]->ahead_next = slab;
	}
	class->ahead_last = slab;
	class->ahead_count++;

	return 1;
}

/* The fresh slab is used up. */
static void next_fresh(kvs_pool_t *pool, kvs_class_t *class)
{
	class->fresh_slab = KVS_NONE;
	class->fresh_next = 0;
	if (class->ahead_count > 0) {
		class->fresh_slab = class->ahead_first;
		class->ahead_first = pool->slabs[class->fresh_slab]->ahead_next;
		class->ahead_count--;
	}
}

/* A class needs more than its first slab: if none has before, it is the one that memory is kept ready for. */
static void more_wanted(kvs_pool_t *pool, uint32_t slot_class)
{
	if (pool->ahead_class == KVS_NONE) {
		pool->ahead_class = slot_class;
	}
}

void kvs_pool_ahead(kvs_tier_t *tier)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	const kvs_class_t *class;
	const kvs_slab_t *last;

	if (!pool->prefault || pool->config.ahead_bytes == 0 || pool->ahead_class == KVS_NONE) {
		return;
	}
	class = &pool->classes[pool->ahead_class];
	if (class->fresh_slab == KVS_NONE) {
		return; /* the pool is full, or the next put carves */
	}

	/* One at a time, touched before the next: no faster than there is time for it. */
	last = &pool->slabs[class->ahead_count > 0 ? class->ahead_last : class->fresh_slab]->slab;
	if (kvs_slab_ready(last, last->slots - 1) && class->ahead_count * last->data.bytes < pool->config.ahead_bytes) {
		carve(pool, pool->ahead_class);
	}
}

kv_status_t kvs_pool_class_open(kvs_tier_t *tier, const char *ns, const kvs_geometry_t *geometry, uint32_t *p_class)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	size_t len = strlen(ns);

	if (len == 0 || len >= sizeof pool->classes[0].ns) {
		return KV_ERR_ARG;
	}
	if (kvs_geometry_check(geometry) != KV_OK) {
		return KV_ERR_LAYOUT;
	}

	for (uint32_t i = 0; i < pool->class_count; i++) {
		if (strcmp(pool->classes[i].ns, ns) == 0 && kvs_geometry_equal(&pool->classes[i].geometry, geometry)) {
			*p_class = i;
			return KV_OK;
		}
	}
	if (pool->class_count == KVS_POOL_MAX_CLASSES) {
		return KV_ERR_LIMIT;
	}

	kvs_class_t *class = &pool->classes[pool->class_count];

	memcpy(class->ns, ns, len + 1);
	class->geometry = *geometry;
	class->stack = KV_SLOT_NONE;
	class->fresh_slab = KVS_NONE;
	class->ahead_first = KVS_NONE;
	class->ahead_last = KVS_NONE;
	*p_class = pool->class_count++;
	/* Pre-faulting starts before the first put. A pool that is full now may have room later. */
	carve(pool, *p_class);

	return KV_OK;
}

/* A slot that was used before. */
static kv_slot_t take_warm(const kvs_pool_t *pool, kvs_class_t *class)
{
	kv_slot_t slot = class->stack;

	if (slot != KV_SLOT_NONE) {
		class->stack = pool->slabs[kv_slot_slab(slot)]->slab.next[kv_slot_index(slot)];
	}

	return slot;
}

/* A slot nobody had yet: of the older slab first, which the pre-fault thread has reached first. */
static kv_slot_t take_fresh(kvs_pool_t *pool, uint32_t slot_class)
{
	kvs_class_t *class = &pool->classes[slot_class];

	if (class->fresh_slab == KVS_NONE && !carve(pool, slot_class)) {
		return KV_SLOT_NONE;
	}

	const kvs_slab_t *slab = &pool->slabs[class->fresh_slab]->slab;
	kv_slot_t slot = kv_slot_make(class->fresh_slab, class->fresh_next);

	if (!kvs_slab_ready(slab, class->fresh_next)) {
		kv_metric_add(pool->config.metrics, KV_M_CPU_FIRST_TOUCH, 1);
	}
	class->fresh_next++;

	/* Where one class has the limit to itself, its next slab is begun while a quarter of this one is left. */
	if (class->fresh_next == slab->slots - slab->slots / 4u) {
		more_wanted(pool, slot_class);
		if (pool->prefault && pool->class_count == 1 && class->ahead_count == 0) {
			carve(pool, slot_class);
		}
	}
	if (class->fresh_next == slab->slots) {
		next_fresh(pool, class);
	}

	return slot;
}

/* Which of the three sums a state belongs to. */
typedef enum sum { SUM_FREE, SUM_USED, SUM_QUARANTINED } sum_t;

static sum_t sum_of(kvs_state_t state)
{
	switch (state) {
	case KVS_FREE:
		return SUM_FREE;
	case KVS_QUARANTINED:
		return SUM_QUARANTINED;
	default:
		return SUM_USED;
	}
}

static void account(kvs_pool_t *pool, uint32_t stride, kvs_state_t from, kvs_state_t to)
{
	kvs_usage_t *u = &pool->usage;
	uint64_t *slots[] = {&u->free_slots, &u->used_slots, &u->quarantined_slots};
	sum_t old = sum_of(from);
	sum_t new = sum_of(to);

	if (old == new) {
		return;
	}

	kv_assert(*slots[old] > 0);
	--*slots[old];
	++*slots[new];
	if (old == SUM_USED) {
		u->used_bytes -= stride;
	} else if (old == SUM_QUARANTINED) {
		u->quarantined_bytes -= stride;
	}
	if (new == SUM_USED) {
		u->used_bytes += stride;
	} else if (new == SUM_QUARANTINED) {
		u->quarantined_bytes += stride;
	}
	kvs_pool_gauges(pool);
}

kv_status_t kvs_pool_alloc(kvs_tier_t *tier, uint32_t slot_class, kvs_state_t state, uint64_t owner,
			   const kvs_meta_t *meta, kvs_loc_t *p_loc)
{
	kvs_pool_t *pool = kvs_pool_of(tier);

	if (slot_class >= pool->class_count || (state != KVS_PUT && state != KVS_FILLING)) {
		return KV_ERR_ARG;
	}

	kv_slot_t slot = take_warm(pool, &pool->classes[slot_class]);

	if (slot == KV_SLOT_NONE) {
		slot = take_fresh(pool, slot_class);
	}
	if (slot == KV_SLOT_NONE) {
		return KV_ERR_FULL;
	}

	kvs_pool_slab_t *p = pool->slabs[kv_slot_slab(slot)];
	kvs_ledger_slot_t *record = &p->slots[kv_slot_index(slot)];

	kv_assert(kvs_ledger_state(record) == KVS_FREE);
	p_loc->slot = slot;
	p_loc->gen = kvs_ledger_take(record, state, owner, p->slab.geometry.block_bytes, meta);
	account(pool, p->slab.stride, KVS_FREE, state);

	return KV_OK;
}

static void push(kvs_pool_t *pool, kvs_pool_slab_t *p, kv_slot_t slot)
{
	kvs_class_t *class = &pool->classes[p->slot_class];

	p->slab.next[kv_slot_index(slot)] = class->stack;
	class->stack = slot;
}

/* The edges of the diagram in kvs/tier.h; FREE is left by alloc only. */
static int is_edge(kvs_state_t from, kvs_state_t to)
{
	static const uint8_t edges[] = {
		[KVS_FREE] = 0,
		[KVS_PUT] = 1u << KVS_READY | 1u << KVS_TRANSIT | 1u << KVS_QUARANTINED,
		[KVS_FILLING] = 1u << KVS_READY | 1u << KVS_TRANSIT | 1u << KVS_QUARANTINED,
		[KVS_READY] = 1u << KVS_QUARANTINED | 1u << KVS_FREE,
		[KVS_TRANSIT] = 1u << KVS_READY | 1u << KVS_QUARANTINED | 1u << KVS_FREE,
		[KVS_QUARANTINED] = 1u << KVS_FREE,
	};

	return to <= KVS_QUARANTINED && (edges[from] >> to & 1u);
}

static void move(kvs_pool_t *pool, kvs_pool_slab_t *p, kvs_loc_t loc, kvs_state_t to)
{
	uint32_t index = kv_slot_index(loc.slot);
	kvs_ledger_slot_t *record = &p->slots[index];
	kvs_state_t from = kvs_ledger_state(record);
	uint64_t digest = record->digest;

	if ((from == KVS_PUT || from == KVS_FILLING) && (to == KVS_READY || to == KVS_TRANSIT)) {
		digest = kv_digest_root(kvs_slab_roots(&p->slab, index), p->slab.geometry.heads);
	}
	kvs_ledger_move(record, to, digest);
	account(pool, p->slab.stride, from, to);
	if (to == KVS_FREE) {
		push(pool, p, loc.slot);
	}
}

kv_status_t kvs_pool_set_state(kvs_tier_t *tier, kvs_loc_t loc, kvs_state_t state)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	kvs_ledger_slot_t *record;
	kvs_pool_slab_t *p = kvs_pool_find(pool, loc, &record);

	if (!p) {
		return KV_MISS;
	}
	if (!is_edge(kvs_ledger_state(record), state)) {
		return KV_ERR_ARG;
	}
	move(pool, p, loc, state);

	return KV_OK;
}

/* From PUT and FILLING the way to FREE leads through QUARANTINED, which is the first store of every move. */
void kvs_pool_free(kvs_tier_t *tier, kvs_loc_t loc)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	kvs_ledger_slot_t *record;
	kvs_pool_slab_t *p = kvs_pool_find(pool, loc, &record);

	if (p) {
		move(pool, p, loc, KVS_FREE);
	}
}
