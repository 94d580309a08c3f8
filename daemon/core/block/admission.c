#include "core/block/admission.h"
#include "core/block/slot_class.h"

#define WINDOW_MIN  64u /* blocks: fewer say nothing */
#define HIT_FEW     16u /* one hit in that number of lost blocks is too few: the pool thrashes */
#define HIT_ENOUGH  8u  /* one hit in that number of offered blocks is enough: it no longer does */
#define OFFER_PARTS 4u  /* parts of a pool's worth that an offer's window has */

/* ---- keys that are in no tier ---------------------------------------------------------------- */

static uint32_t print_of(uint64_t hash)
{
	return (uint32_t)(hash >> 32) & ~3u;
}

static kvd_ghost_t *ghost_at(const kvd_core_t *core, uint64_t hash)
{
	return &core->ghosts[hash & core->ghost_mask];
}

static kvd_ghost_kind_t kind_of(const kvd_ghost_t *ghost, uint64_t hash)
{
	return (ghost->print & ~3u) == print_of(hash) ? (kvd_ghost_kind_t)(ghost->print & 3u) : KVD_GHOST_NONE;
}

kvd_ghost_kind_t kvd_ghost_find(const kvd_core_t *core, const kv_key_t *key)
{
	uint64_t hash = kv_key_hash(key);

	return kind_of(ghost_at(core, hash), hash);
}

/* Stamps count requests. They are kept in 32 bits: only their distance to now is compared. */
static uint32_t age_of(const kvd_core_t *core, uint64_t stamp)
{
	uint64_t age = core->stamp - stamp;

	return age < UINT32_MAX ? (uint32_t)age : UINT32_MAX;
}

/* Requests since the key was asked for last; UINT32_MAX: it is not known. */
static uint32_t ghost_age(const kvd_core_t *core, uint64_t hash)
{
	const kvd_ghost_t *ghost = ghost_at(core, hash);

	return kind_of(ghost, hash) == KVD_GHOST_NONE ? UINT32_MAX : (uint32_t)core->stamp - ghost->stamp;
}

static void set_ghost(kvd_core_t *core, uint64_t hash, kvd_ghost_kind_t kind, uint64_t stamp)
{
	*ghost_at(core, hash) = (kvd_ghost_t){.print = print_of(hash) | (uint32_t)kind, .stamp = (uint32_t)stamp};
}

/* ---- the pool of a class --------------------------------------------------------------------- */

/* The tier whose evictions lose blocks. */
static kvd_set_t last_tier(const kvd_core_t *core, uint32_t slot_class)
{
	return kvd_class_has_disk(core, slot_class) && core->config.write_behind ? KVD_DISK : KVD_CPU;
}

/* Blocks that the pool has. */
static uint32_t pool_blocks(const kvd_core_t *core, uint32_t slot_class)
{
	uint64_t blocks = core->classes[slot_class].order[last_tier(core, slot_class)].blocks;

	return blocks < UINT32_MAX ? (uint32_t)blocks : UINT32_MAX;
}

static uint32_t window_of(uint32_t blocks)
{
	return blocks > WINDOW_MIN ? blocks : WINDOW_MIN;
}

/* Are there slots for that many blocks, without an eviction? */
static int has_room(const kvd_core_t *core, uint32_t slot_class, uint32_t blocks)
{
	const kvd_set_t t = last_tier(core, slot_class);
	const uint32_t tier_class = core->classes[slot_class].tier_class[t];
	const kvs_rebalance_ops_t *ops = kvd_slab_ops(core, t);
	kvs_usage_t usage;

	if (tier_class == KVD_NONE) {
		return 1;
	}
	if (ops && ops->slab_count(core->tier[t]) > 0) {
		return ops->free_slots(core->tier[t], tier_class) >= blocks ||
		       !ops->is_short(core->tier[t], tier_class);
	}
	kvs_usage_of(core->tier[t], core->classes[slot_class].memory, &usage);

	return usage.free_slots >= blocks;
}

static void set_thrashing(const kvd_core_t *core, kvd_admission_t *admission, int thrashing)
{
	admission->thrashing = thrashing;
	admission->since = core->stamp;
	admission->lost = admission->lost_hit = 0;
	admission->offered = admission->would_hit = admission->refused = 0;
}

int kvd_admission_applies(const kvd_core_t *core, uint32_t slot_class)
{
	return core->config.admission && core->classes[slot_class].memory == KVD_HOST_MEM;
}

int kvd_admission_wants_all(kvd_core_t *core, uint32_t slot_class, uint32_t blocks)
{
	return !core->classes[slot_class].admission.thrashing || has_room(core, slot_class, blocks);
}

int kvd_admission_wants(kvd_core_t *core, uint32_t slot_class, const kv_key_t *key)
{
	uint64_t stamp = 0;

	return kvd_class_coldest(core, slot_class, last_tier(core, slot_class), &stamp) == KVD_NONE ||
	       ghost_age(core, kv_key_hash(key)) < age_of(core, stamp);
}

/* A pool's worth of offers is KVD_LAPS laps; the stamps at which the last ones began tell how old a key may be that the
 * pool would still have, had it taken all. */
static void count_lap(const kvd_core_t *core, uint32_t slot_class, kvd_admission_t *admission)
{
	if (++admission->lap >= window_of(pool_blocks(core, slot_class)) / KVD_LAPS) {
		admission->lap = 0;
		admission->laps[admission->next_lap] = core->stamp;
		admission->next_lap = (admission->next_lap + 1) % KVD_LAPS;
	}
}

void kvd_admission_add_offer(kvd_core_t *core, uint32_t slot_class, const kv_key_t *key, kvd_ghost_kind_t kind)
{
	kvd_admission_t *admission = &core->classes[slot_class].admission;
	uint64_t hash = kv_key_hash(key);

	/* The put whose evictions made the pool thrash had been admitted before: that none of it was refused says nothing. */
	if (!admission->thrashing || admission->since != core->stamp) {
		admission->offered++;
		admission->refused += kind == KVD_GHOST_REFUSED;
		admission->would_hit += ghost_age(core, hash) < age_of(core, admission->laps[admission->next_lap]);
	}
	count_lap(core, slot_class, admission);
	set_ghost(core, hash, kind, core->stamp);
	if (kind == KVD_GHOST_REFUSED) {
		kvd_count_ns(core, core->classes[slot_class].ns, KV_NM_NOT_ADMITTED, 1);
	}
	if (admission->offered < window_of(pool_blocks(core, slot_class) / OFFER_PARTS)) {
		return;
	}
	if (admission->thrashing &&
	    (admission->would_hit > admission->offered / HIT_ENOUGH || admission->refused == 0)) {
		set_thrashing(core, admission, 0);
	}
	admission->offered = admission->would_hit = admission->refused = 0;
}

void kvd_admission_add_lost(kvd_core_t *core, uint32_t slot_class, const kvd_block_t *block, int hit, uint64_t stamp)
{
	kvd_class_t *class = &core->classes[slot_class];
	kvd_admission_t *admission = &class->admission;

	/* Remembered for a while, so that a miss can say EVICTED and not ABSENT. */
	set_ghost(core, kv_key_hash(&block->key), KVD_GHOST_EVICTED, stamp);
	if (class->ns != KVD_NONE && class->memory == KVD_HOST_MEM && !hit) {
		kvd_count_ns(core, class->ns, KV_NM_EVICTED_UNHIT, 1);
	}
	admission->lost++;
	admission->lost_hit += hit ? 1 : 0;
	if (admission->lost < window_of(pool_blocks(core, slot_class))) {
		return;
	}
	if (!admission->thrashing && admission->lost_hit < admission->lost / HIT_FEW) {
		set_thrashing(core, admission, kvd_admission_applies(core, slot_class));
	}
	admission->lost = admission->lost_hit = 0;
}

int kvd_admission_thrashes(const kvd_core_t *core, uint32_t ns)
{
	for (uint32_t c = 0; c < core->class_count; c++) {
		if (core->classes[c].ns == ns && core->classes[c].admission.thrashing) {
			return 1;
		}
	}

	return 0;
}
