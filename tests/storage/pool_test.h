/* pool_test.h -- what the pool's tests share: a pool on a test environment, with blocks. */
#ifndef POOL_TEST_H
#define POOL_TEST_H

#include "block_test.h"

#include "kvs/ledger.h"
#include "kvs/pool.h"

#include "cpu/pool.h"

#include <unistd.h>

static inline kvs_pool_config_t pool_config(kv_metrics_t *metrics, uint64_t limit_bytes, uint64_t slab_bytes)
{
	return (kvs_pool_config_t){
		.limit_bytes = limit_bytes,
		.slab_bytes = slab_bytes,
		.huge = KVS_HUGE_OFF,
		.incarnation = 7,
		.metrics = metrics,
	};
}

static inline kvs_meta_t meta_of(uint64_t seed)
{
	kvs_meta_t meta = {.epoch = seed * 3, .event_hash = seed * 5, .depth = (uint32_t)(seed % 9) + 1};

	memset(meta.key.b, 0x11, sizeof meta.key.b);
	memcpy(meta.key.b, &seed, sizeof seed);
	memset(meta.parent.b, meta.depth == 1 ? 0 : 0x22, sizeof meta.parent.b);
	memset(meta.root, 0x33, sizeof meta.root);

	return meta;
}

static inline kv_status_t store(kvs_tier_t *t, kvs_loc_t loc, const kvs_mem_t *mem)
{
	outcome_t o = {0, KV_OK};
	kv_status_t status = kvs_store(t, loc, mem, record_outcome, &o);

	assert_int_equal(o.calls, status == KV_OK);

	return status == KV_OK ? o.status : status;
}

static inline kv_status_t load(kvs_tier_t *t, kvs_loc_t loc, const kvs_mem_t *mem)
{
	outcome_t o = {0, KV_OK};
	kv_status_t status = kvs_load(t, loc, mem, record_outcome, &o);

	assert_int_equal(o.calls, status == KV_OK);

	return status == KV_OK ? o.status : status;
}

/* A READY block with the bytes of `seed`. */
static inline kvs_loc_t put(kvs_tier_t *t, uint32_t slot_class, const kvs_geometry_t *g, uint64_t seed)
{
	static block_t b;
	kvs_meta_t meta = meta_of(seed);
	kvs_loc_t loc;

	block_fill(g, seed, &b);
	assert_int_equal(kvs_alloc(t, slot_class, KVS_PUT, 1, &meta, &loc), KV_OK);
	assert_int_equal(store(t, loc, &b.mem), KV_OK);
	assert_int_equal(kvs_set_state(t, loc, KVS_READY), KV_OK);

	return loc;
}

/* What comes of it when the memory is there, or has been refused. */
static inline kv_status_t alloc_settled(kvs_tier_t *tier, uint32_t class, kvs_state_t slot_state)
{
	kvs_meta_t meta = meta_of(1);
	kvs_loc_t loc;
	kv_status_t status;

	while ((status = kvs_alloc(tier, class, slot_state, 1, &meta, &loc)) == KV_ERR_BUSY) {
		usleep(100);
	}

	return status;
}

static inline void check(kvs_tier_t *t)
{
	char detail[256];

	if (kvs_check(t, detail, sizeof detail) != KV_OK) {
		fail_msg("%s", detail);
	}
}

/* ---- a pool of the test's own ---------------------------------------------------------------- */

static kv_test_env_t t_;
static kv_metrics_t metrics_;
static kvs_pool_config_t config_; /* until it is opened */
static kvs_sys_t sys_;            /* likewise */
static kvs_tier_t *pool_;
static uint32_t __attribute__((unused)) class_; /* of `plain` blocks in "ns" */

static inline void pool_set_up(uint64_t limit_bytes, uint64_t slab_bytes)
{
	kv_test_env_init(&t_);
	memset(&metrics_, 0, sizeof metrics_);
	config_ = pool_config(&metrics_, limit_bytes, slab_bytes);
	sys_ = kvs_sys_posix;
	pool_ = NULL;
}

static inline void pool_open(void)
{
	assert_int_equal(kvs_pool_open_with(&config_, &t_.env, &sys_, &pool_), KV_OK);
}

static inline void pool_begin(void)
{
	pool_open();
	assert_int_equal(kvs_class_open(pool_, "ns", &plain, &class_), KV_OK);
}

static inline void pool_begun(uint64_t limit_bytes, uint64_t slab_bytes)
{
	pool_set_up(limit_bytes, slab_bytes);
	pool_begin();
}

static inline void pool_end(void)
{
	if (pool_) {
		check(pool_);
	}
	kvs_close(pool_);
	pool_ = NULL;
	assert_int_equal(kv_test_env_live(&t_), 0);
}

/* A test between a `begin` and pool_end(): POOL_TEST(p1_what_it_defends, pool_begun(1u << 20, 256u << 10)). */
#define POOL_TEST(name, begin) KV_TEST_BETWEEN(name, begin, pool_end())

#endif
