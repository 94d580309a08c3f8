#include "core/block/block.h"
#include "core/block/room.h"
#include "core/base/core_impl.h"
#include "core/base/share.h"
#include "core/block/slot_class.h"

#define NOBODY KVD_MAX_NAMESPACES /* owner of blocks whose namespace is not configured */

/* ---- in a tier ------------------------------------------------------------------------------- */

kv_status_t kvd_make_room(kvd_core_t *core, uint32_t slot_class, kvd_set_t t)
{
	uint32_t victim = core->policy->victim(&core->ix, &core->classes[slot_class].order[t], t);

	if (victim == KVD_NONE) {
		return KV_MISS;
	}
	kvd_block_evict(core, victim, t, KV_NM_EVICTED);

	return KV_OK;
}

/* A slot of the tier, after as many evictions as it takes. */
static kv_status_t alloc_or_evict(kvd_core_t *core, uint32_t slot_class, kvd_set_t t, const kvd_use_t *use,
				  kvs_loc_t *p_loc)
{
	uint32_t tier_class = core->classes[slot_class].tier_class[t];
	kv_status_t status = kvs_alloc(core->tier[t], tier_class, use->state, use->owner, use->meta, p_loc);

	for (uint32_t tries = 0; status == KV_ERR_FULL && tries < 64; tries++) {
		/* A file of another class is on its way: the request waits, and the class keeps its blocks (decision
		 * 025). */
		if (t == KVD_DISK && kvd_class_expects_slots(core, slot_class, t)) {
			return kvd_busy(core,
					"a file of the disk tier is on its way from another namespace; try again");
		}
		if (kvd_make_room(core, slot_class, t) != KV_OK) {
			break;
		}
		status = kvs_alloc(core->tier[t], tier_class, use->state, use->owner, use->meta, p_loc);
	}

	if (status == KV_ERR_FULL) {
		return kvd_busy(core,
				"the tier has no room, and nothing in it can be evicted: all is leased, handed over "
				"or being written, or the system refuses it memory (kvctl status); release leases, "
				"or make the tier larger");
	}
	if (status == KV_ERR_BUSY) {
		(void)kvd_busy(core, t == KVD_DISK
					     ? KVD_DISK_IS_BUSY
					     : "memory of the pool is not ready yet: the daemon is still touching "
					       "it for the first time; try again");
	}

	return status;
}

kv_status_t kvd_slot_alloc(kvd_core_t *core, uint32_t slot_class, kvd_set_t t, const kvd_use_t *use, kvs_loc_t *p_loc)
{
	kv_status_t status = alloc_or_evict(core, slot_class, t, use, p_loc);

	/* Also where there was a slot: a class asks for a slab while it still has some, before it has to evict its own
	 * blocks (decision 013). */
	kvd_class_request_slots(core, slot_class, t);

	return status;
}

/* ---- in the index ---------------------------------------------------------------------------- */

/* The coldest block of all classes and tiers of the owner. 0: nothing of it can go. */
static int evict_coldest(kvd_core_t *core, uint32_t owner, kv_ns_metric_t why)
{
	uint32_t ns = owner == NOBODY ? KVD_NONE : owner, victim = KVD_NONE;
	uint64_t least = UINT64_MAX, stamp = 0;
	kvd_set_t from = KVD_CPU;

	/* One clock stamps the marks of all classes and tiers, so their ages compare. */
	for (uint32_t c = 0; c < core->class_count; c++) {
		for (kvd_set_t t = KVD_CPU; t < KVD_TIERS && core->classes[c].ns == ns; t++) {
			uint32_t id = kvd_class_coldest(core, c, t, &stamp);

			/* At equal age the disk: a block that is only there leaves the index at once. */
			if (id != KVD_NONE && stamp <= least) {
				least = stamp;
				victim = id;
				from = t;
			}
		}
	}
	if (victim != KVD_NONE) {
		kvd_block_evict(core, victim, from, why);
	}

	return victim != KVD_NONE;
}

kv_status_t kvd_make_index_room(kvd_core_t *core, uint32_t ns)
{
	uint8_t passed[NOBODY + 1] = {0};

	/* At its maximum a namespace does not borrow: the block that goes is its own. */
	if (core->ns[ns]->blocks >= kvd_share_max(core, ns, KVD_SHARE_INDEX)) {
		return evict_coldest(core, ns, KV_NM_EVICTED) ? KV_OK : KV_MISS;
	}
	for (;;) {
		uint32_t from = ns;
		/* It counts with the block that it wants: of those equally far over, it gives itself. */
		uint64_t most = passed[ns] ? 0 : kvd_share_over(core, ns, KVD_SHARE_INDEX, 1);

		for (uint32_t n = 0; n <= NOBODY; n++) {
			uint64_t over = n < core->ns_count ? kvd_share_over(core, n, KVD_SHARE_INDEX, 0)
					: n == NOBODY      ? core->unowned_blocks
							   : 0;

			if (n != ns && !passed[n] && over > most) {
				most = over;
				from = n;
			}
		}
		if (passed[from]) {
			return KV_MISS;
		}
		/* All that a namespace has may be pinned or referenced: then the next one gives. */
		if (evict_coldest(core, from, from == ns ? KV_NM_EVICTED : KV_NM_EVICTED_FOR_OTHERS)) {
			return KV_OK;
		}
		passed[from] = 1;
	}
}
