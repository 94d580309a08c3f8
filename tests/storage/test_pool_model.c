/* Random operations on the pool, and the same on a plain array; every sum is compared after every step. */
#include "pool_test.h"

#define STEPS 20000u /* with the slabs that there are; and as many while slabs come and go */
#define MOST  512u

typedef struct model_block {
	kvs_loc_t loc;
	kvs_state_t state;
	uint64_t content; /* seed of its bytes; 0: none yet */
	uint32_t class;
} model_block_t;

typedef struct model {
	model_block_t block[MOST];
	uint32_t n, full;
	kvs_loc_t dead[64]; /* locations that are stale */
	uint32_t deaths;
	int prefault; /* a thread touches the memory */
} model_t;

static const kvs_geometry_t *const geometry_of[] = {&plain, &opaque, &plain};
static const char *const ns_of[] = {"a", "a", "b"};

static int allowed(kvs_state_t from, kvs_state_t to)
{
	switch (from) {
	case KVS_PUT:
	case KVS_FILLING:
		return to == KVS_READY || to == KVS_TRANSIT || to == KVS_QUARANTINED;
	case KVS_READY:
		return to == KVS_QUARANTINED || to == KVS_FREE;
	case KVS_TRANSIT:
		return to == KVS_READY || to == KVS_QUARANTINED || to == KVS_FREE;
	case KVS_QUARANTINED:
		return to == KVS_FREE;
	default:
		return 0;
	}
}

static void bury(model_t *m, uint32_t i)
{
	m->dead[m->deaths++ % KV_COUNT_OF(m->dead)] = m->block[i].loc;
	m->block[i] = m->block[--m->n];
}

static void step_alloc(kvs_tier_t *pool, model_t *m, kv_test_rng_t *rng)
{
	model_block_t *b = &m->block[m->n];
	kvs_state_t state = kv_test_below(rng, 2) ? KVS_PUT : KVS_FILLING;
	kvs_meta_t meta = meta_of(kv_test_rand(rng));
	uint32_t class = (uint32_t)kv_test_below(rng, 3);
	kvs_loc_t loc;

	if (m->n == MOST) {
		return;
	}

	kv_status_t status = kvs_alloc(pool, class, state, 5, &meta, &loc);

	assert_true(status == KV_OK || status == KV_ERR_FULL || (m->prefault && status == KV_ERR_BUSY));
	m->full += status == KV_ERR_FULL;
	if (status == KV_OK) {
		for (uint32_t i = 0; i < m->n; i++) {
			assert_int_not_equal(m->block[i].loc.slot, loc.slot);
		}
		*b = (model_block_t){loc, state, 0, class};
		m->n++;
	}
}

static void step_store(kvs_tier_t *pool, const model_t *m, model_block_t *b, kv_test_rng_t *rng)
{
	static block_t buf;
	uint64_t content = kv_test_rand(rng) | 1u;
	int writable = b->state == KVS_PUT || b->state == KVS_FILLING;
	kv_status_t status;

	block_fill(geometry_of[b->class], content, &buf);
	while ((status = store(pool, b->loc, &buf.mem)) == KV_ERR_BUSY && m->prefault && b->state == KVS_FILLING) {
		usleep(100); /* its memory has not been touched yet */
	}
	assert_int_equal(status, writable ? KV_OK : KV_ERR_ARG);
	b->content = writable ? content : b->content;
}

static void step_load(kvs_tier_t *pool, const model_block_t *b)
{
	static block_t got;
	kv_status_t status;

	block_blank(&got);
	status = load(pool, b->loc, &got.mem);
	if (b->state == KVS_QUARANTINED) {
		assert_int_equal(status, KV_MISS);
	} else if (b->state == KVS_PUT || b->state == KVS_FILLING) {
		assert_int_equal(status, KV_ERR_ARG);
	} else if (b->content) {
		assert_int_equal(status, KV_OK);
		block_check(geometry_of[b->class], b->content, &got);
	}
}

static void step_state(kvs_tier_t *pool, model_t *m, uint32_t i, kv_test_rng_t *rng)
{
	kvs_state_t to = (kvs_state_t)kv_test_below(rng, 7);
	int ok = allowed(m->block[i].state, to);

	assert_int_equal(kvs_set_state(pool, m->block[i].loc, to), ok ? KV_OK : KV_ERR_ARG);
	if (ok && to == KVS_FREE) {
		bury(m, i);
	} else if (ok) {
		m->block[i].state = to;
	}
}

static void step_stale(kvs_tier_t *pool, const model_t *m, kv_test_rng_t *rng)
{
	uint64_t known = m->deaths < KV_COUNT_OF(m->dead) ? m->deaths : KV_COUNT_OF(m->dead);
	kvs_mem_t mem;

	if (known > 0) {
		kvs_loc_t loc = m->dead[kv_test_below(rng, known)];

		assert_int_equal(kvs_mem(pool, loc, &mem), KV_MISS);
		assert_int_equal(kvs_set_state(pool, loc, KVS_QUARANTINED), KV_MISS);
		kvs_free(pool, loc);
	}
}

static void compare(kvs_tier_t *pool, const model_t *m)
{
	uint64_t used = 0, quarantined = 0, used_bytes = 0, quarantined_bytes = 0;
	kvs_usage_t u;

	for (uint32_t i = 0; i < m->n; i++) {
		uint64_t stride = (geometry_of[m->block[i].class]->block_bytes + 4095u) / 4096u * 4096u;

		if (m->block[i].state == KVS_QUARANTINED) {
			quarantined++;
			quarantined_bytes += stride;
		} else {
			used++;
			used_bytes += stride;
		}
	}
	kvs_usage(pool, &u);
	assert_int_equal(u.used_slots, used);
	assert_int_equal(u.quarantined_slots, quarantined);
	assert_int_equal(u.used_bytes, used_bytes);
	assert_int_equal(u.quarantined_bytes, quarantined_bytes);
	assert_int_equal(u.free_slots + used + quarantined, u.slots);
	assert_true(u.charged_bytes <= u.limit_bytes);
	assert_int_equal(kv_metric_get(&metrics_, KV_M_CPU_USED_BYTES), used_bytes);
	assert_int_equal(kv_metric_get(&metrics_, KV_M_CPU_QUARANTINED_BYTES), quarantined_bytes);
}

static void step(kvs_tier_t *pool, model_t *m, kv_test_rng_t *rng)
{
	uint32_t i = (uint32_t)kv_test_below(rng, MOST);
	uint64_t what = kv_test_below(rng, 16);

	if (m->n == 0 || what < 5) {
		step_alloc(pool, m, rng);
		return;
	}
	i %= m->n;
	if (what < 8) {
		step_store(pool, m, &m->block[i], rng);
	} else if (what < 10) {
		step_load(pool, &m->block[i]);
	} else if (what < 14) {
		step_state(pool, m, i, rng);
	} else if (what < 15) {
		kvs_free(pool, m->block[i].loc);
		bury(m, i);
	} else {
		step_stale(pool, m, rng);
	}
}

/* ---- with slabs that go ---------------------------------------------------------------------- */

#define NUMBERS 512u

/* What is known of a slab: told to leave, retired, its memory gone but its number not. */
typedef enum fate { STAYS, LEAVES, GONE, GHOST } fate_t;

/* No location of a slab that has left may be given out; all that is in it stays readable. */
static void step_change(kvs_tier_t *pool, fate_t *fate, kv_test_rng_t *rng)
{
	const kvs_rebalance_ops_t *ops = pool->ops->rebalance;
	uint32_t count = ops->slab_count(pool), slab = count ? (uint32_t)kv_test_below(rng, count) : 0;
	uint32_t to = (uint32_t)kv_test_below(rng, 3);
	kvs_slab_desc_t look;
	kv_status_t status = ops->describe_slab(pool, slab, &look);

	assert_true(count <= NUMBERS);
	assert_int_equal(status, fate[slab] == GHOST || (fate[slab] == STAYS && status == KV_MISS) ? KV_MISS : KV_OK);
	if (status == KV_OK && fate[slab] == STAYS) {
		assert_true(!look.retiring && !look.retired);
		ops->begin_retire(pool, slab);
		fate[slab] = LEAVES;
	} else if (fate[slab] == LEAVES && look.taken == 0) {
		assert_int_equal(ops->retire(pool, slab, to), KV_OK);
		fate[slab] = GONE;
	} else if (fate[slab] == LEAVES) {
		assert_int_equal(ops->retire(pool, slab, to), KV_ERR_BUSY);
		if (kv_test_below(rng, 3) == 0) {
			ops->cancel_retire(pool, slab);
			fate[slab] = STAYS;
		}
	} else if (fate[slab] >= GONE) {
		int unmapped = (int)kv_test_below(rng, 2);

		status = kvs_pool_release(pool, slab, unmapped);
		assert_true(status == KV_OK || (fate[slab] == GONE && status == KV_ERR_BUSY));
		if (status == KV_OK) {
			fate[slab] = unmapped ? STAYS : GHOST;
		}
	}
}

static void run_model(int prefault)
{
	static fate_t fate[NUMBERS];
	static model_t m;
	kv_test_rng_t rng;
	uint32_t class;

	memset(&m, 0, sizeof m);
	m.prefault = prefault;
	memset(fate, 0, sizeof fate);
	pool_set_up(3u << 20, 150000);
	rng.state = kv_test_seed() + 7u + (uint64_t)prefault;
	config_.prefault = prefault;
	pool_open();
	for (uint32_t i = 0; i < 3; i++) {
		assert_int_equal(kvs_class_open(pool_, ns_of[i], geometry_of[i], &class), KV_OK);
		assert_int_equal(class, i);
	}
	for (uint32_t i = 0; i < 2 * STEPS; i++) {
		const int slabs_go = i >= STEPS;
		const uint32_t before = m.n;

		step(pool_, &m, &rng);
		if (m.n > before) {
			assert_int_equal(fate[kv_slot_slab(m.block[before].loc.slot)], STAYS);
		}
		if (slabs_go && i % 4 == 0) {
			step_change(pool_, fate, &rng);
		}
		/* Every now and then little is held, so that slabs come empty. */
		while (slabs_go && i % 400 == 0 && m.n > 8) {
			kvs_free(pool_, m.block[8].loc);
			bury(&m, 8);
		}
		compare(pool_, &m);
		if (i % 64 == 0) {
			check(pool_);
		}
	}
	assert_true(m.full > 20 && kv_metric_get(&metrics_, KV_M_SLABS_RETIRED) > 20);
	while (m.n > 0) {
		kvs_free(pool_, m.block[0].loc);
		bury(&m, 0);
	}
	compare(pool_, &m);
	pool_end();
}

KV_TEST(p4_sums_hold_after_every_step)
{
	run_model(0);
}

KV_TEST(p4_sums_hold_with_the_prefault_thread_running)
{
	run_model(1);
}
