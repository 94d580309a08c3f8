/* What GPU copies refuse, how much they take at a time, what they know of memory, and how they choose. */
#include "cuda/args.h"
#include "gpu_rig.h"
#include "cuda/device/xxh3.h"

#include <pthread.h>
#include <unistd.h>

static kvk_gpu_t *start(const fake_cuda_config_t *driver, uint32_t jobs)
{
	gpu_rig_init(&rig_, driver);
	rig_.config.jobs = jobs;

	return gpu_rig_open(&rig_);
}

/* ---- refusals -------------------------------------------------------------------------------- */

GPU_TEST(p10_a_copy_that_cannot_be_meant_enqueues_nothing)
{
	kv_test_rng_t rng = {kv_test_seed()};
	kvk_gpu_t *gpu = start(NULL, 4);
	kvk_gpu_job_t *job = NULL;
	uint8_t *unseen = malloc(1 << 20);
	gpu_case_t c;

	gpu_case_usual(&c, &rng, gpu, KVK_PAGED_HEAD_TOKEN_KV);

	const kvk_gpu_copy_t good = gpu_case_copy(&c, KVK_GPU_SCATTER, KVK_GPU_AUTO, NULL);
	kvk_move_t last = c.moves[c.count - 1];
	kvk_gpu_copy_t bad = good;

	bad.layer = c.paged.layers;
	bad.layers = 0;
	assert_int_equal(kvk_gpu_submit(gpu, &bad, &job), KV_ERR_ARG);
	bad = good;
	bad.layers = c.paged.layers - c.layer + 1;
	assert_int_equal(kvk_gpu_submit(gpu, &bad, &job), KV_ERR_ARG);
	assert_non_null(strstr(kvk_gpu_last_error(), "are not in the cache"));
	bad = good;
	bad.way = (kvk_gpu_way_t)4;
	assert_int_equal(kvk_gpu_submit(gpu, &bad, &job), KV_ERR_ARG);
	bad = good;
	bad.dir = (kvk_gpu_dir_t)2;
	assert_int_equal(kvk_gpu_submit(gpu, &bad, &job), KV_ERR_ARG);
	c.moves[c.count - 1].block = c.paged.blocks;
	assert_int_equal(kvk_gpu_submit(gpu, &good, &job), KV_ERR_ARG);
	c.moves[c.count - 1] = last;
	c.moves[c.count - 1].data = unseen;
	assert_int_equal(kvk_gpu_submit(gpu, &good, &job), KV_ERR_ARG);
	assert_non_null(strstr(kvk_gpu_last_error(), "does not see"));
	c.moves[c.count - 1].data = c.pool + c.pool_bytes - c.g.block_bytes + 1; /* a byte too far */
	assert_int_equal(kvk_gpu_submit(gpu, &good, &job), KV_ERR_ARG);
	c.moves[c.count - 1].data = NULL;
	assert_int_equal(kvk_gpu_submit(gpu, &good, &job), KV_ERR_ARG);
	c.moves[c.count - 1] = last;
	assert_null(job);
	fake_cuda_drain();
	gpu_case_equal(&c);
	assert_int_equal(fake_cuda_launches(), 0);

	/* None of them took a job for good. */
	for (int i = 0; i < 8; i++) {
		gpu_rig_copy(gpu, &good);
	}
	free(unseen);
	gpu_case_fini(&c);
}

/* Whichever is outermost: layers, blocks or heads. A byte before it or behind it belongs to nobody. */
GPU_TEST(p10_a_cache_that_is_not_all_in_the_device_s_memory_is_found_out)
{
	kv_test_rng_t rng = {kv_test_seed()};
	kvk_gpu_t *gpu = start(NULL, 4);

	for (int round = 0; round < 40; round++) {
		gpu_case_t c;
		size_t span;

		gpu_case_init(&c, &rng, gpu, gpu_case_kind(round));
		assert_int_equal(kvk_gpu_check_paged(gpu, &c.paged), KV_OK);
		c.base[0] = (uint8_t *)c.base[0] - 1;
		assert_int_equal(kvk_gpu_check_paged(gpu, &c.paged), KV_ERR_ARG);
		assert_non_null(strstr(kvk_gpu_last_error(), "is not in memory of device 0"));

		c.paged.layers = 1;
		span = (size_t)c.paged.blocks * c.paged.heads * c.g.page_bytes;
		c.base[0] = (uint8_t *)(uintptr_t)c.cache + c.cache_bytes - span;
		c.paged.block_stride = c.paged.head_stride = 0;
		if (c.paged.kind == KVK_PAGED_HEAD_TOKEN_KV || c.paged.kind == KVK_PAGED_HEAD_KV_TOKEN) {
			c.paged.block_stride = c.g.page_bytes;
			c.paged.head_stride = (size_t)c.paged.blocks * c.g.page_bytes;
		}
		assert_int_equal(kvk_gpu_check_paged(gpu, &c.paged), KV_OK);
		c.base[0] = (uint8_t *)c.base[0] + 1;
		assert_int_equal(kvk_gpu_check_paged(gpu, &c.paged), KV_ERR_ARG);
		gpu_case_fini(&c);
	}
}

/* ---- limits ---------------------------------------------------------------------------------- */

GPU_TEST(p5_jobs_are_bounded_and_come_back)
{
	kv_test_rng_t rng = {kv_test_seed()};
	kvk_gpu_t *gpu = start(NULL, 3);
	kvk_gpu_job_t *jobs[3];
	kvk_gpu_job_t *more = NULL;
	kvk_gpu_stats_t stats;
	gpu_case_t c;

	gpu_case_usual(&c, &rng, gpu, KVK_PAGED_HEAD_TOKEN_KV);

	const kvk_gpu_copy_t copy = gpu_case_copy(&c, KVK_GPU_SCATTER, KVK_GPU_ZERO_COPY, NULL);

	fake_cuda_hold(1);
	for (int i = 0; i < 3; i++) {
		assert_int_equal(kvk_gpu_submit(gpu, &copy, &jobs[i]), KV_OK);
	}
	assert_int_equal(kvk_gpu_submit(gpu, &copy, &more), KV_ERR_BUSY);
	kvk_gpu_release_job(jobs[1]); /* not over: still taken */
	assert_int_equal(kvk_gpu_submit(gpu, &copy, &more), KV_ERR_BUSY);
	assert_int_equal(kvk_gpu_wait(jobs[0], 0), KV_PENDING);
	kvk_gpu_get_stats(gpu, &stats);
	assert_int_equal(stats.busy, 2);
	fake_cuda_hold(0);
	fake_cuda_drain();
	assert_int_equal(kvk_gpu_submit(gpu, &copy, &more), KV_OK);
	assert_int_equal(kvk_gpu_wait(jobs[0], 0), KV_OK);
	kvk_gpu_release_job(jobs[0]);
	kvk_gpu_release_job(jobs[2]);
	kvk_gpu_release_job(more);
	kvk_gpu_release_job(NULL);
	fake_cuda_drain();
	gpu_case_fini(&c);
}

/* The memory of arguments, of 256 KiB here, ends before the jobs do. */
GPU_TEST(p5_memory_of_arguments_is_bounded_and_comes_back)
{
	enum { MANY = 4096 };
	kv_test_rng_t rng = {kv_test_seed()};
	kvk_gpu_t *gpu = start(NULL, 64);
	kvk_move_t *moves = calloc(MANY, sizeof *moves);
	kvk_gpu_job_t *jobs[64];
	kvk_gpu_job_t *job = NULL;
	kvk_gpu_copy_t copy;
	gpu_case_t c;
	int taken = 0;

	gpu_case_usual(&c, &rng, gpu, KVK_PAGED_HEAD_TOKEN_KV);
	for (int i = 0; i < MANY; i++) {
		moves[i] = c.moves[0];
		moves[i].leaves = NULL;
	}
	copy = gpu_case_copy(&c, KVK_GPU_SCATTER, KVK_GPU_ZERO_COPY, NULL);
	copy.moves = moves;
	copy.count = MANY;
	fake_cuda_hold(1);
	for (int round = 0; round < 3; round++) {
		copy.count = 1000 + 100 * (uint32_t)round;
		for (taken = 0; kvk_gpu_submit(gpu, &copy, &jobs[taken]) == KV_OK; taken++) {
		}
		assert_in_range(taken, 3, 8);
		fake_cuda_drain();
		while (taken > 0) {
			taken--;
			assert_int_equal(kvk_gpu_poll(jobs[taken]), KV_OK);
			kvk_gpu_release_job(jobs[taken]);
		}
	}
	copy.count = MANY;
	for (int i = 0; i < MANY; i++) {
		moves[i].leaves = c.moves[0].leaves ? c.moves[0].leaves : c.leaves;
	}
	if ((uint64_t)MANY * (c.per_move * 8 + 44) > 256 << 10) {
		copy.layer = copy.layers = 0;
		assert_int_equal(kvk_gpu_submit(gpu, &copy, &job), KV_ERR_LIMIT);
		assert_non_null(strstr(kvk_gpu_last_error(), "in parts"));
	}
	fake_cuda_hold(0);
	free(moves);
	gpu_case_fini(&c);
}

GPU_TEST(p5_a_wait_ends_in_time)
{
	kv_test_rng_t rng = {kv_test_seed()};
	kvk_gpu_t *gpu;
	kvk_gpu_job_t *job;
	kvk_gpu_copy_t copy;
	gpu_case_t c;
	uint64_t start_ns;

	gpu_rig_init(&rig_, NULL);
	rig_.config.env = NULL; /* time that goes on */
	gpu = gpu_rig_open(&rig_);
	gpu_case_usual(&c, &rng, gpu, KVK_PAGED_HEAD_TOKEN_KV);
	copy = gpu_case_copy(&c, KVK_GPU_SCATTER, KVK_GPU_AUTO, NULL);
	fake_cuda_hold(1);
	assert_int_equal(kvk_gpu_submit(gpu, &copy, &job), KV_OK);
	start_ns = kv_now_ns(&kv_env_posix);
	assert_int_equal(kvk_gpu_wait(job, 3000), KV_PENDING);
	assert_true(kv_now_ns(&kv_env_posix) - start_ns >= 3000000);
	fake_cuda_hold(0);
	assert_int_equal(kvk_gpu_wait(job, 10000000), KV_OK);
	kvk_gpu_release_job(job);
	gpu_case_fini(&c);
}

GPU_TEST(p5_a_copy_takes_no_more_sms_than_it_may)
{
	kv_test_rng_t rng = {kv_test_seed()};
	kvk_gpu_t *gpu = start(NULL, 4);
	unsigned taken, most_staged = 0;
	gpu_case_t c;

	for (int round = 0; round < 40; round++) {
		gpu_case_usual(&c, &rng, gpu, KVK_PAGED_HEAD_TOKEN_KV);
		for (uint32_t sms = 1; sms < 64; sms *= 2) {
			for (int staged = 0; staged < 2; staged++) {
				kvk_gpu_copy_t copy = gpu_case_copy(&c, (kvk_gpu_dir_t)(round % 2),
								    staged ? KVK_GPU_STAGED : KVK_GPU_ZERO_COPY, NULL);

				copy.sms = sms;
				(void)fake_cuda_sms();
				gpu_rig_copy(gpu, &copy);
				assert_true(fake_cuda_sms() <= (sms < 20 ? sms : 20)); /* the device has 20 */
				copy.sms = 0;
				gpu_rig_copy(gpu, &copy);
				assert_true(fake_cuda_sms() <= (c.g.leaf_bytes < KVK_CHUNK ? 8u : 4u));
				copy.sms = 1;
				copy.stage_sms = sms;
				gpu_rig_copy(gpu, &copy);
				taken = fake_cuda_sms();
				assert_true(taken <= (!staged ? 1 : sms < 20 ? sms : 20));
				most_staged = most_staged > taken ? most_staged : taken;
			}
		}
		gpu_case_fini(&c);
	}
	assert_true(most_staged > 4);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Ranges in a model of bytes, each with the number of its range. Two that touch are two: the device may have them
 * apart. */
GPU_TEST(p1_the_device_sees_what_is_registered_and_nothing_else)
{
	enum { BYTES = 64 };
	static _Alignas(4096) uint8_t memory[BYTES];
	kv_test_rng_t rng = {kv_test_seed()};
	kvk_gpu_t *gpu = start(NULL, 1);
	int owner[BYTES] = {0};

	assert_int_equal(kvk_gpu_register(gpu, NULL, 10), KV_ERR_ARG);
	assert_int_equal(kvk_gpu_register(gpu, memory, 0), KV_ERR_ARG);
	kvk_gpu_unregister(gpu, NULL);
	for (int step = 1; step < 4000; step++) {
		const uint32_t at = (uint32_t)kv_test_below(&rng, BYTES);
		const uint32_t n = (uint32_t)kv_test_below(&rng, kv_test_below(&rng, BYTES - at) + 1) + 1;
		int clear = 1;
		int whole = 1;

		for (uint32_t i = 0; i < n; i++) {
			clear = clear && owner[at + i] == 0;
			whole = whole && owner[at + i] == owner[at] && owner[at] != 0;
		}
		assert_int_equal(kvk_gpu_is_registered(gpu, memory + at, n), whole);
		assert_false(kvk_gpu_is_registered(gpu, memory + at, SIZE_MAX));
		if (kv_test_below(&rng, 2)) {
			assert_int_equal(kvk_gpu_register(gpu, memory + at, n), clear ? KV_OK : KV_ERR_ARG);
			for (uint32_t i = 0; i < n && clear; i++) {
				owner[at + i] = step;
			}
		} else { /* which it must begin with */
			const int gone = at == 0 || owner[at] != owner[at - 1] ? owner[at] : 0;

			kvk_gpu_unregister(gpu, memory + at);
			for (uint32_t i = 0; i < BYTES; i++) {
				owner[i] = owner[i] == gone ? 0 : owner[i];
			}
		}
	}
}

static int lies_on_device(const gpu_case_t *c)
{
	return c->kind == CASE_ON_DEVICE && c->count > 0 && c->g.page_bytes > 240;
}

/* A peer that may be used, one whose access somebody else has enabled, one that refuses, one without a link. */
KV_TEST(p8_kernels_use_memory_of_a_peer_only_with_access_to_it)
{
	static const int answers[] = {0, 704, 217, -1};
	const fake_cuda_config_t driver = {.seed = 1, .lazy = 1, .major = 9, .devices = 2};
	kv_test_rng_t rng = {kv_test_seed()};

	for (size_t i = 0; i < KV_COUNT_OF(answers); i++) {
		const int reached = answers[i] == 0 || answers[i] == 704;
		kvk_gpu_t *gpu = start(&driver, 4);
		kvk_gpu_stats_t stats;
		uint64_t asked;
		gpu_case_t c;

		gpu_case_until(&c, &rng, gpu, KVK_PAGED_HEAD_TOKEN_KV, lies_on_device);
		fake_cuda_foreign(1);
		if (answers[i] < 0) {
			fake_cuda_unlink();
		} else {
			fake_cuda_fail_always(offsetof(kvk_cuda_ops_t, peer_enable), answers[i]);
		}
		gpu_case_check(&c, KVK_GPU_GATHER, KVK_GPU_ZERO_COPY, NULL);
		asked = fake_cuda_calls(offsetof(kvk_cuda_ops_t, peer_can));
		gpu_case_refill(&c);
		gpu_case_check(&c, KVK_GPU_GATHER, KVK_GPU_AUTO, NULL);
		assert_int_equal(fake_cuda_calls(offsetof(kvk_cuda_ops_t, peer_can)), asked); /* it is known */
		fake_cuda_fail_always(0, 0);
		kvk_gpu_get_stats(gpu, &stats);
		assert_int_equal(stats.far, reached ? 0 : 2);
		assert_int_equal(stats.staged, stats.far);
		assert_int_equal(stats.zero_copy, reached ? 2 : 0);
		gpu_case_fini(&c);
		gpu_rig_fini(&rig_);
	}
}

/* ---- choosing -------------------------------------------------------------------------------- */

/* As many blocks as fit into the memory that may be pinned, to the next power of two. */
static void check_measured_bytes(const gpu_case_t *c, const kvk_gpu_stats_t *stats, uint64_t pinned)
{
	const uint64_t a_job = stats->bytes / (stats->gathers + stats->scatters);
	kvk_geometry_t g;

	kvk_layout_geometry(&c->layout, &g);
	assert_in_range(a_job / ((uint64_t)c->paged.heads * c->paged.layers * g.page_bytes) * g.block_bytes,
			pinned / 2 - g.block_bytes, pinned);
}

/* AUTO sends it through the ring; else zero copy. */
static int goes_staged(kvk_gpu_t *gpu, const kvk_gpu_copy_t *copy)
{
	kvk_gpu_stats_t before, after;

	kvk_gpu_get_stats(gpu, &before);
	gpu_rig_copy(gpu, copy);
	kvk_gpu_get_stats(gpu, &after);
	assert_int_equal(after.staged - before.staged + after.zero_copy - before.zero_copy, 1);

	return after.staged > before.staged;
}

/* What is measured lies otherwise. */
static int has_heads_apart(const gpu_case_t *c)
{
	return gpu_case_is_usual(c) && c->paged.head_stride != 0 && c->paged.heads > 1;
}

/* Where the engine is slow, or the link is, for kernels: what was measured is taken, of one job and, for large ones, of
 * several behind each other. */
KV_TEST(p5_auto_takes_what_was_faster)
{
	kv_test_rng_t rng = {kv_test_seed()};

	for (int staged = 0; staged < 2; staged++) {
		kvk_gpu_t *gpu;
		kvk_gpu_stats_t stats;
		kvk_gpu_copy_t copy;
		gpu_case_t c;

		gpu = start(NULL, 4);
		rig_.t.env.now_ns = fake_cuda_clock;
		fake_cuda_costs(staged ? 1 : 40, staged ? 40 : 1);
		gpu_case_until(&c, &rng, gpu, KVK_PAGED_HEAD_TOKEN_KV, staged ? has_heads_apart : gpu_case_is_usual);
		c.layer = c.layers = 0;
		fake_cuda_limit_pinned(1 << 20);
		assert_int_equal(kvk_gpu_measure(gpu, &c.layout, &c.paged), KV_OK);
		assert_int_equal(kvk_gpu_measure(gpu, &c.layout, &c.paged), KV_OK); /* known already */
		kvk_gpu_get_stats(gpu, &stats);
		assert_int_equal(stats.gathers, 6 + 6 * 16); /* either way, though 4 jobs fit at a time, or fewer */
		check_measured_bytes(&c, &stats, 1 << 20);
		copy = gpu_case_copy(&c, KVK_GPU_GATHER, KVK_GPU_AUTO, NULL);
		assert_int_equal(kvk_gpu_find_way(gpu, &copy, KVK_GPU_LARGE_JOB),
				 staged ? KVK_GPU_STAGED : KVK_GPU_ZERO_COPY);
		assert_int_equal(goes_staged(gpu, &copy), staged);
		gpu_case_fini(&c);
		gpu_rig_fini(&rig_);
	}
}

/* A job of a large load is as one of many that follow each other: what is faster for one that is alone does not hold
 * for it. */
GPU_TEST(p5_a_part_goes_the_way_of_all)
{
	kv_test_rng_t rng = {kv_test_seed()};
	kvk_gpu_t *gpu = start(NULL, 4);
	kvk_gpu_copy_t copy;
	gpu_case_t c;

	gpu_case_usual(&c, &rng, gpu, KVK_PAGED_HEAD_TOKEN_KV);
	c.layer = c.layers = 0;
	assert_int_equal(kvk_gpu_measure(gpu, &c.layout, &c.paged), KV_OK);
	gpu->choices[0].way[KVK_GPU_SCATTER][0] = KVK_GPU_ZERO_COPY;
	gpu->choices[0].way[KVK_GPU_SCATTER][1] = KVK_GPU_STAGED;
	copy = gpu_case_copy(&c, KVK_GPU_SCATTER, KVK_GPU_AUTO, NULL);
	assert_false(goes_staged(gpu, &copy));
	copy.of = (uint32_t)(KVK_GPU_LARGE_JOB / ((uint64_t)c.paged.heads * c.paged.layers * c.g.page_bytes) + 1);
	assert_true(goes_staged(gpu, &copy));
	gpu_case_fini(&c);
}

/* ---- threads --------------------------------------------------------------------------------- */

typedef struct worker {
	pthread_t thread;
	kvk_gpu_t *gpu;
	kv_test_rng_t rng;
	gpu_case_t c;
	int fd; /* of memory to map */
	size_t bytes;
	int failed;
} worker_t;

static void *copy_on(void *arg)
{
	worker_t *w = arg;

	for (int round = 0; round < 60; round++) {
		const kvk_gpu_copy_t copy =
			gpu_case_copy(&w->c, KVK_GPU_SCATTER, (kvk_gpu_way_t)kv_test_below(&w->rng, 4), NULL);
		kvk_gpu_job_t *job;
		kv_status_t status = kvk_gpu_submit(w->gpu, &copy, &job);

		if (status == KV_OK && kv_test_below(&w->rng, 3)) {
			status = gpu_rig_finish(job);
		}
		if (status == KV_OK) {
			kvk_gpu_release_job(job);
		}
		w->failed += status != KV_OK && status != KV_ERR_BUSY;
	}

	return NULL;
}

static void *register_on(void *arg)
{
	static _Alignas(4096) uint8_t memory[16][4096];
	worker_t *w = arg;

	for (int round = 0; round < 400; round++) {
		uint8_t *at = memory[kv_test_below(&w->rng, 16)];
		void *base = NULL;

		if (round % 4 == 0) {
			w->failed += kvk_gpu_map(w->gpu, w->fd, w->bytes, &base) != KV_OK;
			kvk_gpu_unmap(w->gpu, base);
		}
		if (kvk_gpu_register(w->gpu, at, 4096) != KV_OK) {
			kvk_gpu_unregister(w->gpu, at);
		}
	}

	return NULL;
}

GPU_TEST(p6_threads_copy_while_others_register_and_map)
{
	enum { THREADS = 4 };
	kv_test_rng_t rng = {kv_test_seed()};
	kvk_gpu_t *gpu = start(NULL, 6);
	worker_t workers[THREADS] = {0};

	for (int i = 0; i < THREADS; i++) {
		workers[i].gpu = gpu;
		workers[i].rng.state = kv_test_rand(&rng);
		gpu_case_usual(&workers[i].c, &rng, gpu, KVK_PAGED_HEAD_TOKEN_KV);
	}
	workers[0].bytes = 1;
	kvk_gpu_unmap(gpu, gpu_case_map(gpu, &workers[0].bytes, &workers[0].fd));
	for (int i = 0; i < THREADS; i++) {
		assert_int_equal(pthread_create(&workers[i].thread, NULL, i ? copy_on : register_on, &workers[i]), 0);
	}
	for (int i = 0; i < THREADS; i++) {
		pthread_join(workers[i].thread, NULL);
		assert_int_equal(workers[i].failed, 0);
	}
	close(workers[0].fd);
	fake_cuda_drain();
	for (int i = THREADS - 1; i >= 0; i--) {
		if (i > 0) {
			gpu_case_twin(&workers[i].c, KVK_GPU_SCATTER);
		}
		gpu_case_equal(&workers[i].c);
		gpu_case_fini(&workers[i].c);
	}
}

/* ---- clocks ---------------------------------------------------------------------------------- */

static void take_5_ms(void *args)
{
	(void)args;
	fake_cuda_advance(5000000);
}

GPU_TEST(p7_the_devices_clock_tells_what_a_stream_took)
{
	kvk_gpu_t *gpu = start(NULL, 4);
	kvk_gpu_clock_t *clock = NULL;
	kvk_cu_stream_t stream = NULL;
	uint64_t ns = 0;

	assert_int_equal(kvk_gpu_create_stream(gpu, 1, &stream), KV_OK);
	assert_int_equal(kvk_gpu_clock_open(gpu, &clock), KV_OK);
	assert_int_equal(kvk_gpu_clock_read(clock, &ns), KV_ERR_ARG);
	assert_false(kvk_gpu_clock_begun(clock));
	fake_cuda_hold(1);
	fake_cuda_call(stream, take_5_ms, NULL);
	assert_int_equal(kvk_gpu_clock_mark(clock, 0, stream), KV_OK);
	assert_int_equal(kvk_gpu_clock_read(clock, &ns), KV_ERR_ARG);
	fake_cuda_call(stream, take_5_ms, NULL);
	assert_int_equal(kvk_gpu_clock_mark(clock, 1, stream), KV_OK);
	assert_int_equal(kvk_gpu_clock_read(clock, &ns), KV_PENDING);
	assert_false(kvk_gpu_clock_begun(clock));
	fake_cuda_call(stream, take_5_ms, NULL);
	assert_int_equal(kvk_gpu_clock_mark(clock, 1, stream), KV_OK);
	fake_cuda_hold(0);
	fake_cuda_drain();
	assert_int_equal(kvk_gpu_clock_read(clock, &ns), KV_OK);
	assert_in_range(ns, 9990000, 10010000);
	assert_true(kvk_gpu_clock_begun(clock));
	/* Started again: what it said before is forgotten. */
	assert_int_equal(kvk_gpu_clock_mark(clock, 0, stream), KV_OK);
	assert_int_equal(kvk_gpu_clock_read(clock, &ns), KV_ERR_ARG);
	fake_cuda_fail_always(offsetof(kvk_cuda_ops_t, event_record), 999);
	assert_int_equal(kvk_gpu_clock_mark(clock, 1, stream), KV_ERR_IO);
	assert_int_equal(kvk_gpu_clock_read(clock, &ns), KV_ERR_ARG);
	fake_cuda_fail_always(0, 0);
	kvk_gpu_clock_close(clock);
	for (uint64_t n = 1; n < 6; n++) {
		kv_status_t status;

		clock = NULL;
		fake_cuda_fail_nth(n);
		status = kvk_gpu_clock_open(gpu, &clock);
		fake_cuda_fail_nth(0);
		assert_int_equal(status == KV_OK, clock != NULL);
		kvk_gpu_clock_close(clock);
	}
	kvk_gpu_clock_close(NULL);
}
