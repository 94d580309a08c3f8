/* Slots: who gets which, and what state it is in. */
#include "alloc.h"

#include "cpu/slab/carve.h"
#include "geometry.h"
#include "cpu/slab/slab_table.h"
#include "tier_ops.h"

#include "kv/digest.h"

/* ---- classes --------------------------------------------------------------------------------- */

/* The class whose memory is kept ready: of the first one all there is, or of the one that was in want of fresh memory
 * last. */
static void set_ahead_class(kvs_pool_t *pool, uint32_t slot_class)
{
	if (pool->config.ahead_bytes != KVS_AHEAD_ALL || pool->ahead_class == KVS_NONE) {
		pool->ahead_class = slot_class;
	}
}

static int has_slab(const kvs_pool_t *pool, uint32_t slot_class)
{
	uint32_t slab = 0;

	while (slab < pool->slab_count && (!pool->slabs[slab] || pool->slabs[slab]->slot_class != slot_class)) {
		slab++;
	}

	return slab < pool->slab_count;
}

/* For a new class: one more, or that of a class that nobody uses and that has no slab, not even one that members may
 * still map. */
static kv_status_t find_number(kvs_pool_t *pool, uint32_t *p_class)
{
	kv_status_t status = KV_ERR_LIMIT;

	if (pool->class_count < KVS_POOL_MAX_CLASSES) {
		*p_class = pool->class_count++;
		return KV_OK;
	}
	for (uint32_t i = 0; i < pool->class_count && status != KV_OK; i++) {
		if (pool->classes[i].unused) {
			*p_class = i;
			status = has_slab(pool, i) ? KV_ERR_BUSY : KV_OK;
		}
	}

	return status;
}

kv_status_t kvs_pool_find_class(kvs_pool_t *pool, const char *ns, const kvs_geometry_t *geometry, uint32_t *p_class)
{
	size_t len = strlen(ns);
	kv_status_t status;

	if (len == 0 || len >= sizeof pool->classes[0].ns) {
		return KV_ERR_ARG;
	}
	if (kvs_geometry_check(geometry) != KV_OK) {
		return KV_ERR_LAYOUT;
	}

	for (uint32_t i = 0; i < pool->class_count; i++) {
		if (strcmp(pool->classes[i].ns, ns) == 0 && kvs_geometry_equal(&pool->classes[i].geometry, geometry)) {
			pool->classes[i].unused = 0;
			*p_class = i;
			return KV_OK;
		}
	}
	status = find_number(pool, p_class);
	if (status != KV_OK) {
		return status;
	}

	kvs_class_t *class = &pool->classes[*p_class];

	*class = (kvs_class_t){.geometry = *geometry, .newest = KVS_NONE};
	memcpy(class->ns, ns, len + 1);
	memset(class->first, 0xff, sizeof class->first);
	memset(class->last, 0xff, sizeof class->last);
	pool->classes_made++;

	return KV_OK;
}

kv_status_t kvs_pool_class_open(kvs_tier_t *tier, const char *ns, const kvs_geometry_t *geometry, uint32_t *p_class)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	const uint64_t made = pool->classes_made;
	kv_status_t status = kvs_pool_find_class(pool, ns, geometry, p_class);

	if (status == KV_OK) {
		set_ahead_class(pool, *p_class);
	}
	if (status == KV_OK && pool->classes_made > made) {
		/* It is touched before the first put. A pool that is full now may have room later. */
		if (kvs_pool_carve(pool, *p_class) == KV_OK) {
			kvs_pool_warm(pool, pool->slabs[pool->classes[*p_class].newest]);
		}
	}

	return status;
}

void kvs_pool_class_close(kvs_tier_t *tier, uint32_t slot_class)
{
	kvs_pool_t *pool = kvs_pool_of(tier);

	pool->classes[slot_class].unused = 1;
	if (pool->ahead_class == slot_class) {
		pool->ahead_class = KVS_NONE;
	}
}

const char *kvs_pool_class_ns(kvs_tier_t *tier, uint32_t slot_class)
{
	return kvs_pool_of(tier)->classes[slot_class].ns;
}

uint64_t kvs_pool_class_bytes(kvs_tier_t *tier, uint32_t slot_class)
{
	return kvs_pool_of(tier)->classes[slot_class].bytes;
}

/* ---- slots ----------------------------------------------------------------------------------- */

/* A slot that was used before, and may be given out in this state. KV_MISS: there is none. */
static kv_status_t pop_warm_slot(kvs_pool_t *pool, const kvs_class_t *class, kvs_state_t state, kv_slot_t *p_slot)
{
	kvs_pool_slab_t *p;
	uint32_t index;

	if (class->first[KVS_WARM] == KVS_NONE) {
		return KV_MISS;
	}
	p = pool->slabs[class->first[KVS_WARM]];
	index = p->stack;
	if (kvs_pool_check_slot(pool, p, index, state) != KV_OK) {
		return KV_MISS;
	}
	p->stack = p->slab.next[index];
	if (p->stack == KVS_NONE) {
		kvs_pool_unlink(pool, p, KVS_WARM);
	}
	*p_slot = kv_slot_make(p->slab.number, index);

	return KV_OK;
}

/* A slot nobody had yet. */
static kv_status_t pop_fresh_slot(kvs_pool_t *pool, uint32_t slot_class, kvs_state_t state, kv_slot_t *p_slot)
{
	kvs_pool_slab_t *p;
	kv_status_t status = kvs_pool_find_fresh(pool, slot_class, state, &p);

	if (status != KV_OK) {
		return status;
	}
	*p_slot = kv_slot_make(p->slab.number, p->fresh);
	p->fresh++;
	kvs_pool_hurry(pool, p);
	set_ahead_class(pool, slot_class);

	/* The next slab is begun while a quarter of this one is left. */
	if (p->fresh == p->slab.slots - p->slab.slots / 4u && pool->prefault && p->next[KVS_FRESH] == KVS_NONE &&
	    kvs_pool_carve(pool, slot_class) == KV_OK) {
		kvs_pool_hurry(pool, pool->slabs[pool->classes[slot_class].newest]);
	}
	if (p->fresh == p->slab.slots) {
		kvs_pool_unlink(pool, p, KVS_FRESH);
	}

	return KV_OK;
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

/* Neither free nor whole. */
static uint32_t is_open(kvs_state_t state)
{
	return state != KVS_FREE && state != KVS_READY;
}

static void count_transition(kvs_pool_t *pool, kvs_pool_slab_t *p, kvs_state_t from, kvs_state_t to)
{
	kvs_usage_t *u = &pool->usage;
	uint32_t stride = p->slab.stride;
	uint64_t *slots[] = {&u->free_slots, &u->used_slots, &u->quarantined_slots};
	sum_t old = sum_of(from);
	sum_t new = sum_of(to);

	const uint64_t counted = p->open > 0 ? p->slab.slots : 0;

	p->open += is_open(to) - is_open(from);
	pool->classes[p->slot_class].open_slots += (p->open > 0 ? p->slab.slots : 0) - counted;
	if (old == new) {
		return;
	}

	kv_assert(*slots[old] > 0);
	--*slots[old];
	++*slots[new];
	p->taken += (from == KVS_FREE ? 1u : 0u) - (to == KVS_FREE ? 1u : 0u);
	if (p->state == KVS_SLAB_USED) {
		pool->classes[p->slot_class].free_slots +=
			(to == KVS_FREE ? 1u : 0u) - (uint64_t)(from == KVS_FREE ? 1u : 0u);
	}
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
	kvs_pool_update_gauges(pool);
}

kv_status_t kvs_pool_alloc(kvs_tier_t *tier, uint32_t slot_class, kvs_state_t state, uint64_t owner,
			   const kvs_meta_t *meta, kvs_loc_t *p_loc)
{
	kvs_pool_t *pool = kvs_pool_of(tier);

	if (slot_class >= pool->class_count || (state != KVS_PUT && state != KVS_FILLING)) {
		return KV_ERR_ARG;
	}

	kv_slot_t slot;
	kv_status_t status = pop_warm_slot(pool, &pool->classes[slot_class], state, &slot);

	if (status != KV_OK) {
		status = pop_fresh_slot(pool, slot_class, state, &slot);
	}
	if (status != KV_OK) {
		return status;
	}

	kvs_pool_slab_t *p = pool->slabs[kv_slot_slab(slot)];
	kvs_ledger_slot_t *record = &p->slots[kv_slot_index(slot)];

	kv_assert(kvs_ledger_state(record) == KVS_FREE);
	p_loc->slot = slot;
	p_loc->gen = kvs_ledger_assign_slot(record, state, owner, p->slab.geometry.block_bytes, meta);
	count_transition(pool, p, KVS_FREE, state);

	return KV_OK;
}

static void push_free_slot(kvs_pool_t *pool, kvs_pool_slab_t *p, uint32_t index)
{
	const kvs_class_t *class = &pool->classes[p->slot_class];
	uint32_t below = p->stack;

	p->slab.next[index] = below;
	p->stack = index;
	if (p->state != KVS_SLAB_USED || class->first[KVS_WARM] == p->slab.number) {
		return;
	}
	if (below != KVS_NONE) {
		kvs_pool_unlink(pool, p, KVS_WARM);
	}
	kvs_pool_link(pool, p, KVS_WARM, 1);
}

void kvs_pool_copy_slot(kvs_pool_t *pool, kvs_pool_slab_t *p, const kvs_ledger_slot_t *from, kvs_state_t state)
{
	const uint32_t index = p->fresh++;

	if (p->fresh == p->slab.slots) {
		kvs_pool_unlink(pool, p, KVS_FRESH);
	}
	kvs_ledger_copy_slot(&p->slots[index], from, state);
	if (state == KVS_FREE) {
		push_free_slot(pool, p, index);
	} else {
		count_transition(pool, p, KVS_FREE, state);
	}
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

static void set_slot_state(kvs_pool_t *pool, kvs_pool_slab_t *p, kvs_loc_t loc, kvs_state_t to)
{
	uint32_t index = kv_slot_index(loc.slot);
	kvs_ledger_slot_t *record = &p->slots[index];
	kvs_state_t from = kvs_ledger_state(record);
	uint64_t digest = record->digest;

	if ((from == KVS_PUT || from == KVS_FILLING) && (to == KVS_READY || to == KVS_TRANSIT)) {
		digest = kv_digest_root(kvs_slab_roots(&p->slab, index), p->slab.geometry.heads);
	}
	/* The ledger first, the sums and the free list after it: whenever the process dies, the ledger says what the
	 * slot is, and the sums are counted from it. */
	kvs_ledger_set_state(record, to, digest);
	count_transition(pool, p, from, to);
	if (to == KVS_FREE) {
		push_free_slot(pool, p, index);
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
	set_slot_state(pool, p, loc, state);

	return KV_OK;
}

/* From PUT and FILLING the way to FREE leads through QUARANTINED, which is the first store of every move. */
void kvs_pool_free(kvs_tier_t *tier, kvs_loc_t loc)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	kvs_ledger_slot_t *record;
	kvs_pool_slab_t *p = kvs_pool_find(pool, loc, &record);

	if (p) {
		set_slot_state(pool, p, loc, KVS_FREE);
	}
}

/* Of memory that a later daemon may take over. */
void kvs_pool_touch(kvs_tier_t *tier, kvs_loc_t loc, uint64_t stamp)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	kvs_ledger_slot_t *record;

	if (pool->config.claim && kvs_pool_find(pool, loc, &record) && kvs_ledger_state(record) == KVS_READY) {
		kvs_ledger_set_use(record, pool->use_base + stamp);
	}
}
