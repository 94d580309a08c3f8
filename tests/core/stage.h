/* stage.h -- one universe with a space and a chain of keys, for tests that tell one story each. */
#ifndef TESTS_CORE_STAGE_H
#define TESTS_CORE_STAGE_H

#include "universe.h"

static universe_t u_;
static kvd_space_info_t space_;
static u_member_t *m_;      /* instance "engine", rank 0, scheduler and worker */
static kv_key_t keys_[512]; /* one chain */
static kv_key_t fork_[512]; /* shares the first 8 with it */

static inline void stage_keys(void)
{
	u_chain(NULL, 1, keys_, 512);
	memcpy(fork_, keys_, 8 * sizeof *keys_);
	u_chain(&keys_[7], 2, &fork_[8], 504);
}

/* The space is in memory of the GPU, if there is one. */
static inline void stage_in(const u_config_t *config)
{
	universe_init(&u_, config, NULL);
	m_ = u_join(&u_, 0, "engine", 2, 0);
	u_.memory = config->gpu_slots > 0;
	space_ = u_space(&u_, 0, "model");
	stage_keys();
}

static inline void stage(uint32_t cpu, uint32_t disk)
{
	stage_in(&(u_config_t){.cpu_slots = cpu, .disk_slots = disk});
}

/* Until nothing is in flight; and all is as it must be. */
static inline void settle_and_check(void)
{
	u_settle(&u_);
	universe_check(&u_);
}

static inline void tick_and_check(uint32_t times)
{
	u_tick(&u_, times);
	universe_check(&u_);
}

/* Blocks [first, n) of keys_, in memory and on disk. */
static inline void put_settled(uint32_t first, uint32_t n)
{
	assert_int_equal(u_put(&u_, m_, &space_, keys_, first, n), n - first);
	u_settle(&u_);
}

/* The first n blocks of keys_, on disk only. */
static inline void put_on_disk(uint32_t n)
{
	put_settled(0, n);
	u_evict(&u_, KV_TIER_CPU, n);
}

/* All of a put that has begun. */
static inline void put_end(const u_put_t *put)
{
	u_put_write(&u_, put);
	assert_int_equal(u_put_end(&u_, put->member, put, 0, put->n), KV_OK);
}

static inline void stage_end(void)
{
	universe_leave(&u_);
	universe_fini(&u_);
}

static inline uint64_t stage_free_slots(void)
{
	return u_.cpu.free_count;
}

static inline uint64_t stage_quarantined(void)
{
	kvs_usage_t usage;

	kvs_usage(&u_.cpu.tier, &usage);

	return usage.quarantined_slots;
}

#endif
