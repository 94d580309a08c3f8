/* GPU copies over a fake driver, compared with the CPU twin bit for bit. */
#include "gpu_rig.h"

#ifdef KVD_SANITIZE /* several times slower */
#define ROUNDS 48
#else
#define ROUNDS 300
#endif

static kvk_gpu_way_t draw_way(kv_test_rng_t *rng)
{
	static const kvk_gpu_way_t ways[] = {KVK_GPU_AUTO, KVK_GPU_ZERO_COPY, KVK_GPU_STAGED, KVK_GPU_COPY_PER_PIECE};

	return ways[kv_test_below(rng, KV_COUNT_OF(ways))];
}

/* A device of some kind, with room for some blocks and not for others. */
static kvk_gpu_t *start(kv_test_rng_t *rng, uint64_t staging)
{
	const fake_cuda_config_t driver = {
		.seed = kv_test_rand(rng), .lazy = kv_test_below(rng, 4) != 0, .major = kv_test_below(rng, 2) ? 9 : 8};

	gpu_rig_init(&rig_, &driver);
	rig_.config.staging_bytes = staging;
	fake_cuda_limit_pinned(4 << 20);

	return gpu_rig_open(&rig_);
}

/* Cases of every kind in turn, each on a device of its own. Returns the sum of what the checks return. */
static uint64_t each_round(int rounds, uint64_t staging, uint64_t (*check)(gpu_case_t *c, kv_test_rng_t *rng))
{
	kv_test_rng_t rng = {kv_test_seed()};
	uint64_t sum = 0;

	for (int round = 0; round < rounds; round++) {
		gpu_case_t c;

		gpu_case_init(&c, &rng, start(&rng, staging), gpu_case_kind(round));
		sum += check(&c, &rng);
		gpu_case_fini(&c);
		gpu_rig_fini(&rig_);
	}

	return sum;
}

/* Its body says how much of what is tested a round has had: `least` of all. */
#define ROUNDS_TEST(name, rounds, staging, least)                                                                      \
	static uint64_t name##_round(gpu_case_t *c, kv_test_rng_t *rng);                                               \
	KV_TEST(name)                                                                                                  \
	{                                                                                                              \
		assert_true(each_round(rounds, staging, name##_round) >= (least));                                     \
	}                                                                                                              \
	static uint64_t name##_round(gpu_case_t *c, kv_test_rng_t *rng)

static int digests_asked(const gpu_case_t *c)
{
	int asked = 0;

	for (uint32_t i = 0; i < c->count; i++) {
		asked |= c->moves[i].leaves != NULL;
	}

	return asked;
}

/* It is taken, without digests where nobody can make them: the host cannot read the blocks, and no kernel makes them. */
static kvk_gpu_job_t *submit(gpu_case_t *c, const kvk_gpu_copy_t *copy)
{
	const int impossible = gpu_case_is_near(c) && digests_asked(c) &&
			       (copy->way == KVK_GPU_COPY_PER_PIECE || gpu_case_has_small_leaf(c));
	kvk_gpu_job_t *job;
	kv_status_t status = kvk_gpu_submit(c->gpu, copy, &job);

	assert_int_equal(status == KV_ERR_UNSUPPORTED, impossible);
	if (impossible) {
		gpu_case_ask_no_digests(c);
		status = kvk_gpu_submit(c->gpu, copy, &job);
	}
	assert_int_equal(status, KV_OK);

	return job;
}

/* Rings of 1 to 128 KiB a slot: several steps, blocks cut by layers, blocks too large for it. */
KV_TEST(p1_every_way_copies_what_the_twin_copies)
{
	kv_test_rng_t rng = {kv_test_seed()};
	kvk_gpu_stats_t sum = {0};
	uint64_t bulk = 0;

	for (int round = 0; round < ROUNDS; round++) {
		kvk_gpu_t *gpu = start(&rng, UINT64_C(8) << (10 + kv_test_below(&rng, 8)));
		const uint64_t looked_up = fake_cuda_calls(offsetof(kvk_cuda_ops_t, pointer_attribute));
		kvk_gpu_stats_t before, stats;
		kvk_cu_stream_t stream = NULL;
		gpu_case_t c;

		if (kv_test_below(&rng, 2)) {
			assert_int_equal(kvk_gpu_create_stream(gpu, 1, &stream), KV_OK);
		}
		kvk_gpu_get_stats(gpu, &before);
		gpu_case_init(&c, &rng, gpu, gpu_case_kind(round));
		for (int turn = 0; turn < 4; turn++) {
			const kvk_gpu_dir_t dir = (kvk_gpu_dir_t)(turn % 2);
			kvk_gpu_copy_t copy = gpu_case_copy(&c, dir, draw_way(&rng), stream);
			kvk_gpu_job_t *job;

			copy.sms = (uint32_t)kv_test_below(&rng, 3);
			job = submit(&c, &copy);
			assert_int_equal(gpu_rig_finish(job), KV_OK);
			gpu_rig_end(job);
			gpu_case_twin(&c, dir);
			gpu_case_equal(&c);
			gpu_case_refill(&c);
		}
		kvk_gpu_get_stats(gpu, &stats);
		assert_int_equal(stats.gathers, 2);
		assert_int_equal(stats.scatters, 2);
		assert_int_equal(stats.corrupt + stats.busy + stats.far, 0);
		assert_int_equal(stats.failures, before.failures);
		if (c.kind == CASE_MAPPED) { /* where it lies is known */
			assert_int_equal(fake_cuda_calls(offsetof(kvk_cuda_ops_t, pointer_attribute)), looked_up);
		}
		sum.zero_copy += stats.zero_copy;
		sum.staged += stats.staged;
		sum.copy_per_piece += stats.copy_per_piece;
		bulk += fake_cuda_bulk_launches();
		gpu_case_fini(&c);
		gpu_rig_fini(&rig_);
	}
	/* The rounds went everywhere. */
	assert_true(sum.zero_copy > ROUNDS / 2 && sum.staged > ROUNDS / 6 && sum.copy_per_piece > ROUNDS / 4 &&
		    bulk > ROUNDS / 8);
}

ROUNDS_TEST(p1_a_flipped_bit_is_told_of_exactly_its_block, ROUNDS, UINT64_C(1) << 20, ROUNDS / 4)
{
	const kvk_gpu_copy_t copy = gpu_case_copy(c, KVK_GPU_SCATTER, draw_way(rng), NULL);
	kvk_gpu_stats_t stats;
	kvk_gpu_job_t *job;
	uint32_t broken;
	size_t at;

	if (!digests_asked(c) || gpu_case_is_near(c)) {
		return 0;
	}
	do {
		broken = (uint32_t)kv_test_below(rng, c->count);
	} while (!c->moves[broken].leaves);
	at = gpu_case_some_byte(c, broken);
	c->pool[at] ^= (uint8_t)(1u << kv_test_below(rng, 8));
	assert_int_equal(kvk_gpu_submit(c->gpu, &copy, &job), KV_OK);
	assert_int_equal(gpu_rig_finish(job), KV_ERR_CORRUPT);
	assert_int_equal(gpu_rig_finish(job), KV_ERR_CORRUPT);
	for (uint32_t i = 0; i < c->count; i++) {
		assert_int_equal(kvk_gpu_move_is_bad(job, i), i == broken);
	}
	assert_int_equal(kvk_gpu_move_is_bad(job, c->count), 0);
	kvk_gpu_release_job(job);
	kvk_gpu_get_stats(c->gpu, &stats);
	assert_int_equal(stats.corrupt, 1);

	/* The others came; nobody checks what has no digests. */
	c->twin_pool[at] = c->pool[at];
	gpu_case_twin(c, KVK_GPU_SCATTER);
	gpu_case_equal(c);
	c->moves[broken].leaves = NULL;
	gpu_rig_copy(c->gpu, &copy);

	return 1;
}

/* Other blocks of the cache: the first becomes the last. */
static void turn_blocks(gpu_case_t *c)
{
	for (uint32_t i = 0; i < c->count; i++) {
		c->moves[i].block = c->paged.blocks - 1 - c->moves[i].block;
	}
}

/* Gather on one stream; the scatter of the same blocks into another cache waits for it, by kvk_gpu_order_after_job or
 * kvk_gpu_order_streams, while nothing has run yet. */
ROUNDS_TEST(p1_a_copy_runs_after_what_it_was_ordered_after, ROUNDS / 2, UINT64_C(1) << 20, ROUNDS / 2)
{
	kvk_cu_stream_t streams[2];
	kvk_gpu_job_t *jobs[2];
	kvk_gpu_copy_t copy;

	assert_int_equal(kvk_gpu_create_stream(c->gpu, 1, &streams[0]), KV_OK);
	assert_int_equal(kvk_gpu_create_stream(c->gpu, 0, &streams[1]), KV_OK);
	gpu_case_ask_no_digests(c);
	fake_cuda_hold(1);
	copy = gpu_case_copy(c, KVK_GPU_GATHER, draw_way(rng), streams[0]);
	assert_int_equal(kvk_gpu_submit(c->gpu, &copy, &jobs[0]), KV_OK);
	if (kv_test_below(rng, 2)) {
		assert_int_equal(kvk_gpu_order_after_job(jobs[0], streams[1]), KV_OK);
	} else {
		assert_int_equal(kvk_gpu_order_streams(c->gpu, streams[0], streams[1]), KV_OK);
	}
	turn_blocks(c);
	copy = gpu_case_copy(c, KVK_GPU_SCATTER, draw_way(rng), streams[1]);
	copy.ready = 0;
	assert_int_equal(kvk_gpu_submit(c->gpu, &copy, &jobs[1]), KV_OK);
	assert_int_equal(kvk_gpu_poll(jobs[1]), KV_PENDING);
	fake_cuda_hold(0);
	gpu_rig_end(jobs[1]);
	assert_int_equal(kvk_gpu_poll(jobs[0]), KV_OK);
	kvk_gpu_release_job(jobs[0]);
	turn_blocks(c);
	gpu_case_twin(c, KVK_GPU_GATHER);
	turn_blocks(c);
	gpu_case_twin(c, KVK_GPU_SCATTER);
	gpu_case_equal(c);

	return 1;
}

/* Blocks of the pool that are ready are read early, but into the cache they go after what the stream has: a gather of
 * what lies there. */
ROUNDS_TEST(p1_a_scatter_of_ready_blocks_writes_in_its_turn, ROUNDS / 2, UINT64_C(1) << 20, 1)
{
	kvk_cu_stream_t stream;
	kvk_gpu_job_t *jobs[2];
	kvk_move_t in[CASE_MOVES];
	kvk_gpu_copy_t copy;

	assert_int_equal(kvk_gpu_create_stream(c->gpu, 1, &stream), KV_OK);
	gpu_case_ask_no_digests(c);
	c->count /= 2;
	for (uint32_t i = 0; i < c->count; i++) {
		in[i] = (kvk_move_t){.block = c->moves[i].block, .data = c->moves[c->count + i].data};
	}
	fake_cuda_hold(1);
	copy = gpu_case_copy(c, KVK_GPU_GATHER, draw_way(rng), stream);
	assert_int_equal(kvk_gpu_submit(c->gpu, &copy, &jobs[0]), KV_OK);
	copy = gpu_case_copy(c, KVK_GPU_SCATTER, draw_way(rng), stream);
	copy.moves = in;
	copy.ready = 1;
	assert_int_equal(kvk_gpu_submit(c->gpu, &copy, &jobs[1]), KV_OK);
	fake_cuda_hold(0);
	gpu_rig_end(jobs[1]);
	gpu_rig_end(jobs[0]);
	gpu_case_twin(c, KVK_GPU_GATHER);
	memcpy(c->moves, in, c->count * sizeof *in);
	gpu_case_twin(c, KVK_GPU_SCATTER);
	gpu_case_equal(c);

	return c->count;
}

/* Several jobs under way at a time, on streams of their own, through one ring; some given back before they have
 * ended. */
KV_TEST(p4_jobs_given_back_early_keep_their_memory_until_they_end)
{
	enum { JOBS = 4 };
	kv_test_rng_t rng = {kv_test_seed()};

	for (int round = 0; round < ROUNDS / 6; round++) {
		kvk_gpu_t *gpu = start(&rng, UINT64_C(1) << 20);
		gpu_case_t cases[JOBS];
		kvk_cu_stream_t streams[JOBS];
		kvk_gpu_job_t *job;

		for (int i = 0; i < JOBS; i++) {
			assert_int_equal(kvk_gpu_create_stream(gpu, 0, &streams[i]), KV_OK);
			gpu_case_init(&cases[i], &rng, gpu, gpu_case_kind((int)kv_test_below(&rng, 6)));
			if (gpu_case_is_near(&cases[i])) {
				gpu_case_ask_no_digests(&cases[i]);
			}
		}
		for (int turn = 0; turn < 3 * JOBS; turn++) {
			const kvk_gpu_copy_t copy = gpu_case_copy(&cases[turn % JOBS], KVK_GPU_SCATTER, draw_way(&rng),
								  streams[turn % JOBS]);
			kv_status_t status;

			do {
				status = kvk_gpu_submit(gpu, &copy, &job);
			} while (status == KV_ERR_BUSY);
			assert_int_equal(status, KV_OK);
			kvk_gpu_release_job(job);
		}
		fake_cuda_drain();
		for (int i = 0; i < JOBS; i++) {
			gpu_case_twin(&cases[i], KVK_GPU_SCATTER);
			gpu_case_equal(&cases[i]);
			gpu_case_fini(&cases[i]);
		}
		gpu_rig_fini(&rig_);
	}
}

/* Blocks beside each other in the pool, in an order of chance: one copy a step, and so few calls. */
ROUNDS_TEST(p5_neighbours_in_the_pool_are_one_copy, ROUNDS, UINT64_C(64) << 20, 1)
{
	enum { STEPS = 8 };
	const size_t copies = offsetof(kvk_cuda_ops_t, copy_async), batches = offsetof(kvk_cuda_ops_t, copy_batch);
	const uint64_t before = fake_cuda_calls(copies) + fake_cuda_calls(batches);
	kvk_gpu_copy_t copy;

	(void)rng;
	if (!gpu_case_is_whole(c) || c->count % 7 == 0) {
		return 0;
	}
	gpu_case_ask_no_digests(c);
	for (uint32_t i = 0; i < c->count; i++) { /* without gaps, and shuffled */
		c->moves[i].data = c->pool + (size_t)((i * 7 + 3) % c->count) * c->g.block_bytes;
	}
	copy = gpu_case_copy(c, KVK_GPU_SCATTER, KVK_GPU_STAGED, NULL);
	gpu_rig_copy(c->gpu, &copy);
	assert_true(fake_cuda_calls(copies) + fake_cuda_calls(batches) <= before + STEPS);

	return 1;
}

/* Blocks of 8 heads and 12 layers, pages of 8 KiB, which nobody has written: they take no memory. */
enum { BLOCKS = 700, HELD = 2, LAYERS = 12, PAGE = 8192, BLOCK = 8 * LAYERS * PAGE };

typedef struct large {
	gpu_rig_t rig;
	kvk_gpu_t *gpu;
	kvk_layout_t layout;
	kvk_paged_t paged;
	void *base[LAYERS];
	kvk_move_t moves[BLOCKS];
	uint8_t *pool;
	kvk_cu_ptr_t cache;
} large_t;

/* `apart`: every second place of the pool. */
static void large_init(large_t *l, int apart)
{
	*l = (large_t){.layout = {.heads = 8, .layers = LAYERS, .block_tokens = 16, .k_dim = 128, .v_dim = 128},
		       .paged = {.kind = KVK_PAGED_KV_TOKEN_HEAD, .blocks = HELD, .layers = LAYERS, .heads = 8},
		       .pool = aligned_alloc(4096, (size_t)2 * BLOCKS * BLOCK)};
	gpu_rig_init(&l->rig, NULL);
	l->rig.config.staging_bytes = UINT64_C(64) << 20;
	l->gpu = gpu_rig_open(&l->rig);
	l->layout.dtype = l->paged.dtype = KVK_DTYPE_BF16;
	l->layout.inner = KVK_INNER_SPLIT;
	l->paged.block_tokens = l->layout.block_tokens;
	l->paged.k_dim = l->paged.v_dim = l->layout.k_dim;
	l->paged.base = l->base;
	l->cache = gpu_rig_alloc((size_t)HELD * BLOCK);
	assert_int_equal(kvk_gpu_register(l->gpu, l->pool, (size_t)2 * BLOCKS * BLOCK), KV_OK);
	for (uint32_t i = 0; i < LAYERS; i++) {
		l->base[i] = (void *)(uintptr_t)(l->cache + (size_t)i * HELD * (BLOCK / LAYERS));
	}
	for (uint32_t i = 0; i < BLOCKS; i++) {
		l->moves[i] = (kvk_move_t){.block = i % HELD, .data = l->pool + (apart ? 2 * i : i) * (size_t)BLOCK};
	}
}

static void large_fini(large_t *l)
{
	kvk_gpu_unregister(l->gpu, l->pool);
	gpu_rig_free(l->cache);
	free(l->pool);
	gpu_rig_fini(&l->rig);
}

/* How often the ring is used for 1 and for 6 of the layers. */
static void ranges(int apart, uint64_t *p_staged)
{
	static large_t l;

	large_init(&l, apart);
	for (uint32_t layers = 1; layers <= 6; layers += 5) {
		const kvk_gpu_copy_t copy = {.dir = KVK_GPU_SCATTER,
					     .layout = &l.layout,
					     .paged = &l.paged,
					     .layer = 2,
					     .layers = layers,
					     .moves = l.moves,
					     .count = BLOCKS};
		kvk_gpu_stats_t before, after;

		kvk_gpu_get_stats(l.gpu, &before);
		gpu_rig_copy(l.gpu, &copy);
		kvk_gpu_get_stats(l.gpu, &after);
		*p_staged++ = after.staged - before.staged;
	}
	large_fini(&l);
}

/* Ten of them fit a slot. The last ones go by fewer and fewer, so that little is left when the link is idle, unless
 * others come behind them. */
KV_TEST(p5_a_part_of_a_load_is_not_cut_small_at_its_end)
{
	static large_t l;

	large_init(&l, 0);
	for (uint32_t rest = 0; rest <= 1; rest++) {
		const kvk_gpu_copy_t copy = {.dir = KVK_GPU_SCATTER,
					     .way = KVK_GPU_STAGED,
					     .layout = &l.layout,
					     .paged = &l.paged,
					     .moves = l.moves,
					     .count = 30,
					     .rest = rest};
		const uint64_t before = fake_cuda_launches();

		gpu_rig_copy(l.gpu, &copy);
		if (rest > 0) {
			assert_int_equal(fake_cuda_launches() - before, 3);
		} else {
			assert_true(fake_cuda_launches() - before > 3);
		}
	}
	large_fini(&l);
}

KV_TEST(p5_layer_ranges_are_copied_by_rows_where_rows_are_long)
{
	const size_t rows = offsetof(kvk_cuda_ops_t, copy_rows);
	uint64_t staged[2];

	ranges(1, staged);
	assert_int_equal(staged[0] + staged[1], 0);
	ranges(0, staged);
	assert_int_equal(staged[0], 0);
	assert_int_equal(staged[1], 1);
	assert_in_range(fake_cuda_calls(rows), 8, 100); /* not one a block */
}

static int is_usual_and_whole(const gpu_case_t *c)
{
	return gpu_case_is_usual(c) && gpu_case_is_whole(c);
}

/* The pool in two registrations that follow each other, as pieces of a slab do, or slabs: the driver refuses a copy
 * that goes from one into the other. */
KV_TEST(p1_no_copy_goes_from_one_registration_into_the_next)
{
	kv_test_rng_t rng = {kv_test_seed()};

	for (int round = 0; round < ROUNDS / 12; round++) {
		kvk_gpu_t *gpu = start(&rng, UINT64_C(64) << 20);
		gpu_case_t c;
		size_t at;

		gpu_case_until(&c, &rng, gpu, gpu_case_kind(round),
			       is_usual_and_whole); /* else blocks are no neighbours */
		at = (1 + kv_test_below(&rng, c.count - 1)) * c.g.block_bytes;
		for (uint32_t i = 0; i < c.count; i++) { /* without gaps */
			c.moves[i].data = c.pool + (size_t)i * c.g.block_bytes;
		}
		gpu_case_refill(&c);
		kvk_gpu_unregister(gpu, c.pool);
		assert_int_equal(kvk_gpu_register(gpu, c.pool, at), KV_OK);
		assert_int_equal(kvk_gpu_register(gpu, c.pool + at, c.pool_bytes - at), KV_OK);
		gpu_case_check(&c, KVK_GPU_SCATTER, KVK_GPU_STAGED, NULL);
		gpu_case_check(&c, KVK_GPU_GATHER, KVK_GPU_STAGED, NULL);
		assert_int_equal(fake_cuda_faults(), 0);
		kvk_gpu_unregister(gpu, c.pool + at);
		gpu_case_fini(&c);
		gpu_rig_fini(&rig_);
	}
}
