/* groups.h -- what the tests of unchained groups share: group 1 is a window, 2 a state, 0 and 5 are full. */
#ifndef TESTS_CORE_GROUPS_H
#define TESTS_CORE_GROUPS_H

#include "stage.h"

static inline void stage_window(uint32_t cpu, uint32_t disk)
{
	stage(cpu, disk);
	u_.group = 1;
}

static inline uint32_t put(uint32_t first, uint32_t n)
{
	return u_put(&u_, m_, &space_, keys_, first, n);
}

static inline uint8_t tiers_of(const kv_key_t *key)
{
	uint8_t tiers;

	u_explain(&u_, 0, &space_, key, 1, &tiers);

	return tiers;
}

static inline void evict_all(kv_tier_t tier)
{
	while (kvd_core_evict_one(u_.core, tier) == KV_OK) {
	}
}

#endif
