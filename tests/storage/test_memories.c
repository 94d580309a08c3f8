/* Pools whose data memory comes from elsewhere, and several pools as one tier. */
#include "pool_test.h"

#include "kvs/memories.h"

#include <fcntl.h>
#include <sys/mman.h>

#define SLAB (256u << 10)

/* Descriptors of memory, as kvd-gpu would give them; those out of stock are -1. */
typedef struct stock {
	uint32_t left, taken;
} stock_t;

static int take_slab(void *ctx)
{
	stock_t *stock = ctx;
	int fd;

	if (stock->left == 0) {
		return -1;
	}
	stock->left--;
	stock->taken++;
	fd = memfd_create("stock", MFD_CLOEXEC);
	assert_true(fd >= 0);
	assert_int_equal(ftruncate(fd, SLAB), 0);

	return fd;
}

static kvs_tier_t *open_pool(kv_test_env_t *t, stock_t *stock, uint32_t slabs)
{
	kvs_pool_config_t config = pool_config(&metrics_, (uint64_t)slabs * SLAB, SLAB);
	kvs_tier_t *pool;

	config.take = take_slab;
	config.take_ctx = stock;
	config.memory = KV_SLAB_CUDA;
	config.max_slabs = KVS_MEMORY_SLABS;
	assert_int_equal(kvs_pool_open(&config, &t->env, &pool), KV_OK);

	return pool;
}

static uint32_t fill(kvs_tier_t *tier, uint32_t class, kvs_loc_t *locs)
{
	kvs_meta_t meta = meta_of(1);
	uint32_t n = 0;

	while (n < 400 && kvs_alloc(tier, class, KVS_PUT, 1, &meta, &locs[n]) == KV_OK) {
		n++;
	}

	return n;
}

KV_TEST(p5_foreign_memory_is_used_to_the_slab_and_never_touched)
{
	kv_test_env_t t;
	stock_t stock = {.left = 3};
	uint32_t class, fds = kv_test_count_fds(getpid(), ""), n;
	static kvs_loc_t locs[400];
	kvs_slab_info_t info;
	kvs_usage_t usage;
	block_t block;

	kv_test_env_init(&t);
	kvs_tier_t *pool = open_pool(&t, &stock, 4);

	assert_string_equal(pool->ops->medium, "GPU");
	assert_int_equal(kvs_class_open(pool, "ns", &plain, &class), KV_OK);
	n = fill(pool, class, locs);
	assert_int_equal(n, 3 * (SLAB / 12288)); /* the fourth slab is not to be had */
	kvs_usage(pool, &usage);
	assert_int_equal(usage.charged_bytes, 3 * SLAB);
	assert_int_equal(kv_metric_get(&metrics_, KV_M_GPU_BYTES), 3 * SLAB);
	assert_int_equal(kv_metric_get(&metrics_, KV_M_GPU_LIMIT_BYTES), 4 * SLAB);
	assert_int_equal(kv_metric_get(&metrics_, KV_M_CPU_BYTES), 0);

	assert_int_equal(kvs_pool_slab(pool, 1, &info), KV_OK);
	assert_int_equal(info.memory, KV_SLAB_CUDA);
	assert_int_equal(info.bytes, SLAB);
	assert_null(info.base);
	block_fill(&plain, 5, &block);
	assert_int_equal(kvs_mem(pool, locs[0], &block.mem), KV_ERR_UNSUPPORTED);
	assert_int_equal(store(pool, locs[0], &block.mem), KV_ERR_UNSUPPORTED);
	assert_int_equal(kvs_pool_set_leaves(pool, locs[0], &(kvs_leaf_span_t){0, 2, 0, 3}, block.leaves), KV_OK);
	assert_int_equal(kvs_pool_compute_roots(pool, locs[0]), KV_OK);
	assert_int_equal(kvs_set_state(pool, locs[0], KVS_READY), KV_OK);
	assert_int_equal(load(pool, locs[0], &block.mem), KV_ERR_UNSUPPORTED);
	check(pool);

	stock.left = 1; /* more has come: asked for again after a pause */
	t.now_ns += UINT64_C(2000000000);
	assert_int_equal(fill(pool, class, locs + n), SLAB / 12288);
	check(pool);
	kvs_close(pool);
	assert_int_equal(kv_metric_get(&metrics_, KV_M_GPU_BYTES), 0);
	assert_int_equal(kv_test_count_fds(getpid(), ""), fds);
	assert_int_equal(kv_test_env_live(&t), 0);
}

/* Slabs change hands only as fresh memory, and only when no client maps the old one. */
KV_TEST(p8_a_foreign_slab_changes_hands_as_fresh_memory)
{
	kv_test_env_t t;
	stock_t stock = {.left = 2};
	uint32_t class[2], n, fds = kv_test_count_fds(getpid(), "");
	static kvs_loc_t locs[400];
	const kvs_rebalance_ops_t *ops;
	kvs_slab_desc_t desc;

	kv_test_env_init(&t);
	kvs_tier_t *pool = open_pool(&t, &stock, 2);

	ops = pool->ops->rebalance;
	assert_int_equal(kvs_class_open(pool, "a", &plain, &class[0]), KV_OK);
	n = fill(pool, class[0], locs);
	assert_int_equal(n, 2 * (SLAB / 12288));
	assert_int_equal(kvs_class_open(pool, "b", &opaque, &class[1]), KV_OK);
	assert_int_equal(fill(pool, class[1], locs + n), 0);
	assert_int_equal(ops->slots_gained(pool, 0, class[1]), SLAB / 12288);

	ops->begin_retire(pool, 0);
	for (uint32_t i = 0; i < n; i++) {
		if (kv_slot_slab(locs[i].slot) == 0) {
			kvs_free(pool, locs[i]);
		}
	}
	assert_int_equal(ops->retire(pool, 0, class[1]), KV_OK);
	for (int i = 0; i < 3; i++) { /* a client maps it: nothing happens, however long that lasts */
		assert_int_equal(kvs_pool_release(pool, 0, 0), KV_ERR_BUSY);
	}
	assert_int_equal(stock.taken, 2);
	stock.left = 1;
	assert_int_equal(kvs_pool_release(pool, 0, 1), KV_OK);
	assert_int_equal(stock.taken, 3); /* for the other class, at once */
	assert_int_equal(fill(pool, class[1], locs), SLAB / 12288);
	assert_int_equal(ops->describe_slab(pool, 0, &desc), KV_OK);
	assert_int_equal(desc.slot_class, class[1]);
	check(pool);
	kvs_close(pool);
	assert_int_equal(kv_test_count_fds(getpid(), ""), fds);
	assert_int_equal(kv_test_env_live(&t), 0);
}

/* ---- several pools as one -------------------------------------------------------------------- */

typedef struct model {
	kvs_loc_t loc[400];
	uint32_t memory[400], n;
} model_t;

static void step(kvs_tier_t *tier, const uint32_t class[3], model_t *m, kv_test_rng_t *rng)
{
	if (m->n < 400 && kv_test_below(rng, 5) < 3) {
		uint32_t memory = (uint32_t)kv_test_below(rng, 3);
		kvs_meta_t meta = meta_of(m->n + 1);

		if (kvs_alloc(tier, class[memory], KVS_PUT, 1, &meta, &m -> loc[m->n]) == KV_OK) {
			assert_int_equal(kvs_memory_of_slab(kv_slot_slab(m->loc[m->n].slot)), memory);
			for (uint32_t i = 0; i < m->n; i++) {
				assert_int_not_equal(m->loc[i].slot, m->loc[m->n].slot);
			}
			m->memory[m->n++] = memory;
		}
	} else if (m->n > 0) {
		uint32_t i = (uint32_t)kv_test_below(rng, m->n);
		kvs_loc_t stale = m->loc[i];

		kvs_free(tier, stale);
		assert_int_equal(kvs_set_state(tier, stale, KVS_QUARANTINED), KV_MISS);
		m->loc[i] = m->loc[--m->n];
		m->memory[i] = m->memory[m->n];
	}
}

KV_TEST(p4_pools_behind_one_tier_keep_their_slots_apart)
{
	kv_test_env_t t;
	kv_test_rng_t rng = {kv_test_seed()};
	stock_t stock[2] = {{.left = 3}, {.left = 2}};
	kvs_pool_config_t config = pool_config(&metrics_, 1u << 20, SLAB);
	kvs_tier_t *pool[3], *tier;
	uint32_t class[3], memory;
	static model_t m;

	memset(&m, 0, sizeof m);
	kv_test_env_init(&t);
	config.max_slabs = KVS_HOST_SLABS;
	assert_int_equal(kvs_pool_open(&config, &t.env, &pool[0]), KV_OK);
	assert_int_equal(kvs_memories_open(pool[0], &t.env, &tier), KV_OK);
	assert_int_equal(kvs_class_open_in(tier, 1, "ns", &plain, &class[1]), KV_ERR_TIER_OFF);
	for (uint32_t i = 1; i < 3; i++) {
		pool[i] = open_pool(&t, &stock[i - 1], 3);
		assert_int_equal(tier->ops->add_memory(tier, pool[i], &memory), KV_OK);
		assert_int_equal(memory, i);
	}
	for (uint32_t i = 0; i < 3; i++) {
		assert_int_equal(kvs_class_open_in(tier, i, "ns", &plain, &class[i]), KV_OK);
		assert_string_equal(kvs_class_ns(tier, class[i]), "ns");
	}
	for (uint32_t i = 0; i < 20000; i++) {
		step(tier, class, &m, &rng);
		if (i % 100 == 0) {
			uint64_t used[3] = {0, 0, 0};
			kvs_usage_t sum, one;

			for (uint32_t b = 0; b < m.n; b++) {
				used[m.memory[b]]++;
			}
			for (uint32_t p = 0; p < 3; p++) {
				kvs_usage_of(tier, p, &one);
				assert_int_equal(one.used_slots, used[p]);
			}
			kvs_usage(tier, &sum);
			assert_int_equal(sum.used_slots, m.n);
			check(tier);
		}
	}
	/* A slab never serves a class of another pool. */
	assert_int_equal(tier->ops->rebalance->slots_gained(tier, 0, class[1]), 0);
	assert_int_equal(tier->ops->rebalance->slots_gained(tier, kvs_memories_base(1), class[2]), 0);
	kvs_close(tier);
	for (uint32_t i = 0; i < 3; i++) {
		kvs_close(pool[i]);
	}
	assert_int_equal(kv_test_env_live(&t), 0);
}
