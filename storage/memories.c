/* Several pools as one tier: numbers are translated, and each call goes to the pool that the number names. */
#include "kvs/memories.h"

#define CLASS_BITS 24u
#define CLASS_MASK ((1u << CLASS_BITS) - 1u)

typedef struct memories {
	kvs_tier_t tier;
	kvs_tier_ops_t ops;
	kv_env_t env;
	uint32_t count;
	kvs_tier_t *pool[KVS_MEMORIES];
} memories_t;

_Static_assert(KVS_HOST_SLABS + KVS_MEMORY_SLABS * (KVS_MEMORIES - 1u) <= KV_SLOT_MAX_SLAB + 1u,
	       "slots name all slabs");

static memories_t *memories_of(kvs_tier_t *tier)
{
	return (memories_t *)tier;
}

/* NULL: no memory has such a slab. */
static kvs_tier_t *pool_of_slab(kvs_tier_t *tier, uint32_t slab)
{
	const memories_t *m = memories_of(tier);
	const uint32_t memory = kvs_memory_of_slab(slab);

	return memory < m->count ? m->pool[memory] : NULL;
}

static kvs_tier_t *pool_of(kvs_tier_t *tier, kvs_loc_t loc)
{
	return loc.slot == KV_SLOT_NONE ? NULL : pool_of_slab(tier, kv_slot_slab(loc.slot));
}

static uint32_t local_slab(uint32_t slab)
{
	return slab - kvs_memories_base(kvs_memory_of_slab(slab));
}

/* A class was named by class_open, so its pool is there. */
static kvs_tier_t *pool_of_class(kvs_tier_t *tier, uint32_t slot_class)
{
	return memories_of(tier)->pool[slot_class >> CLASS_BITS];
}

static kvs_loc_t globalise(kvs_loc_t loc, uint32_t memory)
{
	return (kvs_loc_t){kv_slot_make(kv_slot_slab(loc.slot) + kvs_memories_base(memory), kv_slot_index(loc.slot)),
			   loc.gen};
}

/* ---- classes --------------------------------------------------------------------------------- */

static kv_status_t class_open_in(kvs_tier_t *tier, uint32_t memory, const char *ns, const kvs_geometry_t *geometry,
				 uint32_t *p_class)
{
	const memories_t *m = memories_of(tier);
	uint32_t local;
	kv_status_t status =
		memory < m->count ? kvs_class_open(m->pool[memory], ns, geometry, &local) : KV_ERR_TIER_OFF;

	if (status == KV_OK) {
		*p_class = memory << CLASS_BITS | local;
	}

	return status;
}

static kv_status_t class_open(kvs_tier_t *tier, const char *ns, const kvs_geometry_t *geometry, uint32_t *p_class)
{
	return class_open_in(tier, 0, ns, geometry, p_class);
}

static void class_close(kvs_tier_t *tier, uint32_t slot_class)
{
	kvs_class_close(pool_of_class(tier, slot_class), slot_class & CLASS_MASK);
}

static const char *class_ns(kvs_tier_t *tier, uint32_t slot_class)
{
	return kvs_class_ns(pool_of_class(tier, slot_class), slot_class & CLASS_MASK);
}

static uint64_t class_bytes(kvs_tier_t *tier, uint32_t slot_class)
{
	return kvs_class_bytes(pool_of_class(tier, slot_class), slot_class & CLASS_MASK);
}

static uint64_t slot_bytes(kvs_tier_t *tier, uint32_t slot_class)
{
	return kvs_slot_bytes(pool_of_class(tier, slot_class), slot_class & CLASS_MASK);
}

/* The maximum of a namespace is one of host memory. */
static kv_status_t set_cap(kvs_tier_t *tier, const char *ns, uint64_t bytes)
{
	return kvs_tier_cap(memories_of(tier)->pool[0], ns, bytes);
}

/* ---- slots ----------------------------------------------------------------------------------- */

static kv_status_t alloc_slot(kvs_tier_t *tier, uint32_t slot_class, kvs_state_t state, uint64_t owner,
			      const kvs_meta_t *meta, kvs_loc_t *p_loc)
{
	kv_status_t status =
		kvs_alloc(pool_of_class(tier, slot_class), slot_class & CLASS_MASK, state, owner, meta, p_loc);

	if (status == KV_OK) {
		*p_loc = globalise(*p_loc, slot_class >> CLASS_BITS);
	}

	return status;
}

static kv_status_t set_state(kvs_tier_t *tier, kvs_loc_t loc, kvs_state_t state)
{
	kvs_tier_t *pool = pool_of(tier, loc);

	return pool ? kvs_set_state(pool, kvs_loc_in_pool(loc), state) : KV_MISS;
}

static void free_slot(kvs_tier_t *tier, kvs_loc_t loc)
{
	kvs_tier_t *pool = pool_of(tier, loc);

	if (pool) {
		kvs_free(pool, kvs_loc_in_pool(loc));
	}
}

static void touch(kvs_tier_t *tier, kvs_loc_t loc, uint64_t stamp)
{
	kvs_tier_t *pool = pool_of(tier, loc);

	if (pool) {
		kvs_touch(pool, kvs_loc_in_pool(loc), stamp);
	}
}

static kv_status_t get_mem(kvs_tier_t *tier, kvs_loc_t loc, kvs_mem_t *p_mem)
{
	kvs_tier_t *pool = pool_of(tier, loc);

	return pool ? kvs_mem(pool, kvs_loc_in_pool(loc), p_mem) : KV_MISS;
}

static kv_status_t store(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *src, kvs_done_fn done, void *arg)
{
	kvs_tier_t *pool = pool_of(tier, loc);

	return pool ? kvs_store(pool, kvs_loc_in_pool(loc), src, done, arg) : KV_MISS;
}

static kv_status_t load(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *dst, kvs_done_fn done, void *arg)
{
	kvs_tier_t *pool = pool_of(tier, loc);

	return pool ? kvs_load(pool, kvs_loc_in_pool(loc), dst, done, arg) : KV_MISS;
}

/* ---- the whole ------------------------------------------------------------------------------- */

static kv_status_t flush(kvs_tier_t *tier, kvs_done_fn done, void *arg)
{
	return kvs_flush(memories_of(tier)->pool[0], done, arg);
}

static kv_status_t epoch_set(kvs_tier_t *tier, const kvs_epoch_t *epoch, kvs_done_fn done, void *arg)
{
	return kvs_epoch_set(memories_of(tier)->pool[0], epoch, done, arg);
}

static kv_status_t epoch_set_in(kvs_tier_t *tier, uint32_t memory, const kvs_epoch_t *epoch, kvs_done_fn done,
				void *arg)
{
	const memories_t *m = memories_of(tier);

	return memory < m->count ? kvs_epoch_set(m->pool[memory], epoch, done, arg) : KV_ERR_TIER_OFF;
}

static uint32_t epochs_drop(kvs_tier_t *tier, uint32_t memory, kvs_root_used_fn used, void *ctx)
{
	const memories_t *m = memories_of(tier);

	return memory < m->count ? kvs_epochs_drop(m->pool[memory], 0, used, ctx) : 0;
}

static uint64_t epoch_get(kvs_tier_t *tier, const uint8_t root[32])
{
	uint64_t epoch = 0;

	/* The memory is part of a space's identity, and so of its root digest: at most one pool knows it. */
	for (uint32_t i = 0; i < memories_of(tier)->count && epoch == 0; i++) {
		epoch = kvs_epoch_get(memories_of(tier)->pool[i], root);
	}

	return epoch;
}

static kv_status_t recover(kvs_tier_t *tier, kvs_found_fn found, void *arg, uint32_t max)
{
	return kvs_recover_some(memories_of(tier)->pool[0], found, arg, max);
}

typedef struct finder {
	uint32_t memory;
	kvs_found_fn found;
	void *arg;
} finder_t;

static kv_status_t report_found(void *arg, uint32_t slot_class, kvs_loc_t loc, const kvs_meta_t *meta)
{
	const finder_t *f = arg;

	return f->found(f->arg, f->memory << CLASS_BITS | slot_class, globalise(loc, f->memory), meta);
}

static kv_status_t recover_in(kvs_tier_t *tier, uint32_t memory, kvs_found_fn found, void *arg)
{
	const memories_t *m = memories_of(tier);
	finder_t finder = {memory, found, arg};

	return memory < m->count ? kvs_recover(m->pool[memory], report_found, &finder) : KV_ERR_TIER_OFF;
}

typedef struct user {
	uint32_t memory;
	kvs_used_fn used;
	void *arg;
} user_t;

static void report_used(void *arg, kvs_loc_t loc, const kv_key_t *key, uint8_t group)
{
	const user_t *u = arg;

	u->used(u->arg, globalise(loc, u->memory), key, group);
}

static kv_status_t recover_use(kvs_tier_t *tier, uint32_t memory, kvs_used_fn used, void *arg, uint32_t max)
{
	const memories_t *m = memories_of(tier);
	user_t user = {memory, used, arg};

	return memory < m->count ? kvs_recover_use(m->pool[memory], 0, report_used, &user, max) : KV_ERR_TIER_OFF;
}

static void usage_of(kvs_tier_t *tier, uint32_t memory, kvs_usage_t *p_usage)
{
	if (memory < memories_of(tier)->count) {
		kvs_usage(memories_of(tier)->pool[memory], p_usage);
	}
}

static void sum_usage(kvs_tier_t *tier, kvs_usage_t *p_usage)
{
	*p_usage = (kvs_usage_t){0};
	for (uint32_t i = 0; i < memories_of(tier)->count; i++) {
		kvs_usage_t one;

		kvs_usage(memories_of(tier)->pool[i], &one);
		p_usage->limit_bytes += one.limit_bytes;
		p_usage->charged_bytes += one.charged_bytes;
		p_usage->slots += one.slots;
		p_usage->free_slots += one.free_slots;
		p_usage->used_slots += one.used_slots;
		p_usage->quarantined_slots += one.quarantined_slots;
		p_usage->used_bytes += one.used_bytes;
		p_usage->quarantined_bytes += one.quarantined_bytes;
	}
}

static int event_fd(kvs_tier_t *tier)
{
	return kvs_event_fd(memories_of(tier)->pool[0]);
}

static uint32_t poll_all(kvs_tier_t *tier, uint32_t max)
{
	uint32_t ran = 0;

	for (uint32_t i = 0; i < memories_of(tier)->count && (ran < max || max == 0); i++) {
		ran += kvs_poll(memories_of(tier)->pool[i], max - ran);
	}

	return ran;
}

static uint32_t in_flight(kvs_tier_t *tier)
{
	uint32_t sum = 0;

	for (uint32_t i = 0; i < memories_of(tier)->count; i++) {
		sum += kvs_in_flight(memories_of(tier)->pool[i]);
	}

	return sum;
}

static kv_status_t check_all(kvs_tier_t *tier, char *detail, size_t cap)
{
	kv_status_t status = KV_OK;

	for (uint32_t i = 0; i < memories_of(tier)->count && status == KV_OK; i++) {
		status = kvs_check(memories_of(tier)->pool[i], detail, cap);
	}

	return status;
}

static void close_tier(kvs_tier_t *tier)
{
	kv_env_t env = memories_of(tier)->env;

	kv_free(&env, tier);
}

static kv_status_t add_memory(kvs_tier_t *tier, kvs_tier_t *pool, uint32_t *p_memory)
{
	memories_t *m = memories_of(tier);

	if (m->count == KVS_MEMORIES) {
		return KV_ERR_LIMIT;
	}
	*p_memory = m->count;
	m->pool[m->count++] = pool;

	return KV_OK;
}

/* ---- slabs that change their class ----------------------------------------------------------- */

static const kvs_rebalance_ops_t *ops_of(const kvs_tier_t *pool)
{
	return pool->ops->rebalance;
}

static uint32_t slab_count(kvs_tier_t *tier)
{
	const uint32_t last = memories_of(tier)->count - 1u;

	return kvs_memories_base(last) +
	       ops_of(memories_of(tier)->pool[last])->slab_count(memories_of(tier)->pool[last]);
}

static kv_status_t describe_slab(kvs_tier_t *tier, uint32_t slab, kvs_slab_desc_t *p_desc)
{
	kvs_tier_t *pool = pool_of_slab(tier, slab);
	kv_status_t status = pool ? ops_of(pool)->describe_slab(pool, local_slab(slab), p_desc) : KV_MISS;

	if (status == KV_OK) {
		p_desc->slot_class |= kvs_memory_of_slab(slab) << CLASS_BITS;
	}

	return status;
}

static uint32_t slots_gained(kvs_tier_t *tier, uint32_t slab, uint32_t for_class)
{
	kvs_tier_t *pool = pool_of_slab(tier, slab);

	return pool && pool == pool_of_class(tier, for_class)
		       ? ops_of(pool)->slots_gained(pool, local_slab(slab), for_class & CLASS_MASK)
		       : 0;
}

static uint64_t slab_bytes(kvs_tier_t *tier, uint32_t slot_class)
{
	kvs_tier_t *pool = pool_of_class(tier, slot_class);

	return ops_of(pool)->slab_bytes(pool, slot_class & CLASS_MASK);
}

static kv_status_t describe_slot(kvs_tier_t *tier, kv_slot_t slot, kvs_loc_t *p_loc, kvs_meta_t *p_meta)
{
	const kvs_loc_t at = {slot, 0};
	kvs_tier_t *pool = pool_of(tier, at);
	kv_status_t status =
		pool ? ops_of(pool)->describe_slot(pool, kvs_loc_in_pool(at).slot, p_loc, p_meta) : KV_MISS;

	if (status == KV_OK) {
		*p_loc = globalise(*p_loc, kvs_memory_of_slab(kv_slot_slab(slot)));
	}

	return status;
}

static uint64_t free_slots(kvs_tier_t *tier, uint32_t slot_class)
{
	kvs_tier_t *pool = pool_of_class(tier, slot_class);

	return ops_of(pool)->free_slots(pool, slot_class & CLASS_MASK);
}

static uint64_t open_slots(kvs_tier_t *tier, uint32_t slot_class)
{
	kvs_tier_t *pool = pool_of_class(tier, slot_class);

	return ops_of(pool)->open_slots(pool, slot_class & CLASS_MASK);
}

static int is_short(kvs_tier_t *tier, uint32_t slot_class)
{
	kvs_tier_t *pool = pool_of_class(tier, slot_class);

	return ops_of(pool)->is_short(pool, slot_class & CLASS_MASK);
}

static int is_coming(kvs_tier_t *tier, uint32_t slot_class)
{
	kvs_tier_t *pool = pool_of_class(tier, slot_class);

	return ops_of(pool)->is_coming(pool, slot_class & CLASS_MASK);
}

static void begin_retire(kvs_tier_t *tier, uint32_t slab)
{
	kvs_tier_t *pool = pool_of_slab(tier, slab);

	ops_of(pool)->begin_retire(pool, local_slab(slab));
}

static void cancel_retire(kvs_tier_t *tier, uint32_t slab)
{
	kvs_tier_t *pool = pool_of_slab(tier, slab);

	ops_of(pool)->cancel_retire(pool, local_slab(slab));
}

static kv_status_t retire(kvs_tier_t *tier, uint32_t slab, uint32_t for_class)
{
	kvs_tier_t *pool = pool_of_slab(tier, slab);

	return pool == pool_of_class(tier, for_class)
		       ? ops_of(pool)->retire(pool, local_slab(slab), for_class & CLASS_MASK)
		       : KV_ERR_ARG;
}

static const kvs_rebalance_ops_t rebalance_ops = {
	.slab_count = slab_count,
	.describe_slab = describe_slab,
	.slots_gained = slots_gained,
	.slab_bytes = slab_bytes,
	.describe_slot = describe_slot,
	.free_slots = free_slots,
	.open_slots = open_slots,
	.is_short = is_short,
	.is_coming = is_coming,
	.begin_retire = begin_retire,
	.cancel_retire = cancel_retire,
	.retire = retire,
};

static const kvs_tier_ops_t memories_ops = {
	.medium = "CPU",
	.class_open = class_open,
	.class_close = class_close,
	.class_ns = class_ns,
	.class_bytes = class_bytes,
	.cap = set_cap,
	.alloc = alloc_slot,
	.set_state = set_state,
	.free = free_slot,
	.mem = get_mem,
	.store = store,
	.load = load,
	.flush = flush,
	.epoch_set = epoch_set,
	.epoch_get = epoch_get,
	.epochs_drop = epochs_drop,
	.recover = recover,
	.usage = sum_usage,
	.event_fd = event_fd,
	.poll = poll_all,
	.in_flight = in_flight,
	.check = check_all,
	.touch = touch,
	.close = close_tier,
	.add_memory = add_memory,
	.class_open_in = class_open_in,
	.usage_of = usage_of,
	.epoch_set_in = epoch_set_in,
	.recover_in = recover_in,
	.recover_use = recover_use,
	.slot_bytes = slot_bytes,
};

kv_status_t kvs_memories_open(kvs_tier_t *host, const kv_env_t *env, kvs_tier_t **p_tier)
{
	memories_t *m = kv_alloc(env, sizeof *m);

	if (!m) {
		return KV_ERR_NOMEM;
	}
	m->ops = memories_ops;
	m->ops.rebalance = host->ops->rebalance ? &rebalance_ops : NULL;
	m->tier.ops = &m->ops;
	m->env = *env;
	m->pool[0] = host;
	m->count = 1;
	*p_tier = &m->tier;

	return KV_OK;
}
