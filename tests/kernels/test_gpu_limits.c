/* What GPU copies refuse, how much they take at a time, what they know of memory, and how they choose. */
#include "gpu_case.h"

#include <pthread.h>

static kvk_gpu_t *start(kv_test_env_t *t, const fake_cuda_config_t *driver, uint32_t jobs)
{
	const kvk_gpu_config_t config = {.cuda = fake_cuda_ops(),
					 .env = &t->env,
					 .image = fake_cuda_image(),
					 .staging_bytes = UINT64_C(4) << 20,
					 .jobs = jobs};
	kvk_gpu_t *gpu = NULL;

	fake_cuda_start(driver);
	fake_cuda_limit_pinned(256 << 10);
	kv_test_env_init(t);
	assert_int_equal(kvk_gpu_open(&config, &gpu), KV_OK);
	fake_cuda_limit_pinned(0);

	return gpu;
}

static void stop(kv_test_env_t *t, kvk_gpu_t *gpu)
{
	kvk_gpu_close(gpu);
	assert_true(fake_cuda_clean());
	assert_int_equal(kv_test_env_live(t), 0);
	fake_cuda_stop();
}

static kv_status_t finish(kvk_gpu_job_t *job)
{
	kv_status_t status;

	do {
		status = kvk_gpu_poll(job);
	} while (status == KV_PENDING);

	return status;
}

static const fake_cuda_config_t hopper = {.seed = 1, .lazy = 1, .major = 9};

/* Some case with moves, whose pool is host memory and whose pages the kernels can digest. */
static void some_case(gpu_case_t *c, kv_test_rng_t *rng, kvk_gpu_t *gpu)
{
	gpu_case_init(c, rng, gpu, KVK_PAGED_HEAD_TOKEN_KV);
	while (c->kind != CASE_REGISTERED || c->count < 2 || c->g.page_bytes <= 240) {
		gpu_case_fini(c);
		gpu_case_init(c, rng, gpu, KVK_PAGED_HEAD_TOKEN_KV);
	}
}

/* ---- refusals ---------------------------------------------------------------------------------------------------- */

static void p10_a_copy_that_cannot_be_meant_enqueues_nothing(void **state)
{
	kv_test_rng_t rng = {kv_test_seed()};
	kv_test_env_t t;
	kvk_gpu_t *gpu = start(&t, &hopper, 4);
	kvk_gpu_job_t *job = NULL;
	uint8_t *unseen = malloc(1 << 20);
	gpu_case_t c;

	(void)state;
	some_case(&c, &rng, gpu);

	const kvk_gpu_copy_t good = gpu_case_copy(&c, KVK_GPU_SCATTER, KVK_GPU_AUTO, NULL);
	kvk_move_t last = c.moves[c.count - 1];
	kvk_gpu_copy_t bad = good;

	bad.layer = c.paged.layers;
	bad.layers = 0;
	assert_int_equal(kvk_gpu_submit(gpu, &bad, &job), KV_ERR_ARG);
	bad = good;
	bad.layers = c.paged.layers - c.layer + 1;
	assert_int_equal(kvk_gpu_submit(gpu, &bad, &job), KV_ERR_ARG);
	assert_non_null(strstr(kvk_gpu_why(), "are not in the cache"));
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
	assert_non_null(strstr(kvk_gpu_why(), "does not see"));
	c.moves[c.count - 1].data = c.pool + c.pool_bytes - c.g.block_bytes + 1; /* a byte too far */
	assert_int_equal(kvk_gpu_submit(gpu, &good, &job), KV_ERR_ARG);
	c.moves[c.count - 1].data = NULL;
	assert_int_equal(kvk_gpu_submit(gpu, &good, &job), KV_ERR_ARG);
	c.moves[c.count - 1] = last;
	assert_null(job);
	fake_cuda_drain();
	gpu_case_equal(&c);
	assert_int_equal(fake_cuda_calls(offsetof(kvk_cuda_ops_t, launch)), 0);

	/* None of them took a job for good. */
	for (int i = 0; i < 8; i++) {
		assert_int_equal(kvk_gpu_submit(gpu, &good, &job), KV_OK);
		assert_int_equal(finish(job), KV_OK);
		kvk_gpu_end(job);
	}
	free(unseen);
	gpu_case_fini(&c);
	stop(&t, gpu);
}

static void p10_memory_is_registered_once(void **state)
{
	static _Alignas(4096) uint8_t memory[16384];
	kv_test_env_t t;
	kvk_gpu_t *gpu = start(&t, &hopper, 4);

	(void)state;
	assert_int_equal(kvk_gpu_register(gpu, memory + 4096, 8192), KV_OK);
	assert_int_equal(kvk_gpu_register(gpu, memory, 4097), KV_ERR_ARG);
	assert_int_equal(kvk_gpu_register(gpu, memory + 12287, 10), KV_ERR_ARG);
	assert_int_equal(kvk_gpu_register(gpu, memory, sizeof memory), KV_ERR_ARG);
	assert_int_equal(kvk_gpu_register(gpu, memory + 6000, 10), KV_ERR_ARG);
	assert_int_equal(kvk_gpu_register(gpu, NULL, 10), KV_ERR_ARG);
	assert_int_equal(kvk_gpu_register(gpu, memory, 0), KV_ERR_ARG);
	assert_int_equal(kvk_gpu_register(gpu, memory, 4096), KV_OK);
	assert_int_equal(kvk_gpu_register(gpu, memory + 12288, 4096), KV_OK);
	assert_false(kvk_gpu_sees(gpu, memory, 4097)); /* two ranges: the device may have them apart */
	assert_false(kvk_gpu_sees(gpu, memory, SIZE_MAX));
	kvk_gpu_unregister(gpu, memory + 1);
	kvk_gpu_unregister(gpu, NULL);
	assert_true(kvk_gpu_sees(gpu, memory, 4096));
	stop(&t, gpu);
}

/* ---- limits ------------------------------------------------------------------------------------------------------ */

static void p5_jobs_are_bounded_and_come_back(void **state)
{
	kv_test_rng_t rng = {kv_test_seed()};
	kv_test_env_t t;
	kvk_gpu_t *gpu = start(&t, &hopper, 3);
	kvk_gpu_job_t *jobs[3];
	kvk_gpu_job_t *more = NULL;
	kvk_gpu_stats_t stats;
	gpu_case_t c;

	(void)state;
	some_case(&c, &rng, gpu);

	const kvk_gpu_copy_t copy = gpu_case_copy(&c, KVK_GPU_SCATTER, KVK_GPU_ZERO_COPY, NULL);

	fake_cuda_hold(1);
	for (int i = 0; i < 3; i++) {
		assert_int_equal(kvk_gpu_submit(gpu, &copy, &jobs[i]), KV_OK);
	}
	assert_int_equal(kvk_gpu_submit(gpu, &copy, &more), KV_ERR_BUSY);
	kvk_gpu_end(jobs[1]); /* not over: still taken */
	assert_int_equal(kvk_gpu_submit(gpu, &copy, &more), KV_ERR_BUSY);
	assert_int_equal(kvk_gpu_wait(jobs[0], 0), KV_PENDING);
	kvk_gpu_get_stats(gpu, &stats);
	assert_int_equal(stats.busy, 2);
	fake_cuda_hold(0);
	fake_cuda_drain();
	assert_int_equal(kvk_gpu_submit(gpu, &copy, &more), KV_OK);
	assert_int_equal(kvk_gpu_wait(jobs[0], 0), KV_OK);
	kvk_gpu_end(jobs[0]);
	kvk_gpu_end(jobs[2]);
	kvk_gpu_end(more);
	kvk_gpu_end(NULL);
	fake_cuda_drain();
	gpu_case_fini(&c);
	stop(&t, gpu);
}

/* The memory of arguments, of 256 KiB here, ends before the jobs do. */
static void p5_memory_of_arguments_is_bounded_and_comes_back(void **state)
{
	enum { MANY = 4096 };
	kv_test_rng_t rng = {kv_test_seed()};
	kv_test_env_t t;
	kvk_gpu_t *gpu = start(&t, &hopper, 64);
	kvk_move_t *moves = calloc(MANY, sizeof *moves);
	kvk_gpu_job_t *jobs[64];
	kvk_gpu_job_t *job = NULL;
	kvk_gpu_copy_t copy;
	gpu_case_t c;
	int taken = 0;

	(void)state;
	some_case(&c, &rng, gpu);
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
			kvk_gpu_end(jobs[taken]);
		}
	}
	copy.count = MANY;
	for (int i = 0; i < MANY; i++) {
		moves[i].leaves = c.moves[0].leaves ? c.moves[0].leaves : c.leaves;
	}
	if ((uint64_t)MANY * (c.per_move * 8 + 44) > 256 << 10) {
		copy.layer = copy.layers = 0;
		assert_int_equal(kvk_gpu_submit(gpu, &copy, &job), KV_ERR_LIMIT);
		assert_non_null(strstr(kvk_gpu_why(), "in parts"));
	}
	fake_cuda_hold(0);
	free(moves);
	gpu_case_fini(&c);
	stop(&t, gpu);
}

static void p5_a_wait_ends_in_time(void **state)
{
	kv_test_rng_t rng = {kv_test_seed()};
	kvk_gpu_config_t config = {.cuda = fake_cuda_ops(), .image = fake_cuda_image()};
	kvk_gpu_t *gpu = NULL;
	kvk_gpu_job_t *job;
	kvk_gpu_copy_t copy;
	gpu_case_t c;
	uint64_t start_ns;

	(void)state;
	fake_cuda_start(&hopper);
	assert_int_equal(kvk_gpu_open(&config, &gpu), KV_OK);
	some_case(&c, &rng, gpu);
	copy = gpu_case_copy(&c, KVK_GPU_SCATTER, KVK_GPU_AUTO, NULL);
	fake_cuda_hold(1);
	assert_int_equal(kvk_gpu_submit(gpu, &copy, &job), KV_OK);
	start_ns = kv_now_ns(&kv_env_posix);
	assert_int_equal(kvk_gpu_wait(job, 3000), KV_PENDING);
	assert_true(kv_now_ns(&kv_env_posix) - start_ns >= 3000000);
	fake_cuda_hold(0);
	assert_int_equal(kvk_gpu_wait(job, 10000000), KV_OK);
	kvk_gpu_end(job);
	gpu_case_fini(&c);
	kvk_gpu_close(gpu);
	assert_true(fake_cuda_clean());
	fake_cuda_stop();
}

static void p5_a_copy_takes_no_more_sms_than_it_may(void **state)
{
	kv_test_rng_t rng = {kv_test_seed()};
	kv_test_env_t t;
	kvk_gpu_t *gpu = start(&t, &hopper, 4);
	gpu_case_t c;

	(void)state;
	for (int round = 0; round < 40; round++) {
		some_case(&c, &rng, gpu);
		for (uint32_t sms = 1; sms < 64; sms *= 2) {
			kvk_gpu_copy_t copy = gpu_case_copy(&c, KVK_GPU_SCATTER, KVK_GPU_ZERO_COPY, NULL);
			const uint64_t bulk = fake_cuda_bulk_launches();
			kvk_gpu_job_t *job;

			copy.sms = sms;
			assert_int_equal(kvk_gpu_submit(gpu, &copy, &job), KV_OK);
			assert_int_equal(finish(job), KV_OK);
			kvk_gpu_end(job);
			/* Bulk kernels have an SM for themselves; of plain ones two blocks fit. The device has 20. */
			assert_true(fake_cuda_last_grid() <=
				    (sms < 20 ? sms : 20) * (fake_cuda_bulk_launches() > bulk ? 1 : 2));
		}
		gpu_case_fini(&c);
	}
	stop(&t, gpu);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Ranges in a model of pages, each with the number of its range. */
static void p1_the_device_sees_what_is_registered_and_nothing_else(void **state)
{
	enum { PAGES = 64, RANGES = 24 };
	static _Alignas(4096) uint8_t memory[PAGES][64];
	kv_test_rng_t rng = {kv_test_seed()};
	kv_test_env_t t;
	kvk_gpu_t *gpu = start(&t, &hopper, 1);
	int owner[PAGES] = {0};

	(void)state;
	for (int step = 1; step < 4000; step++) {
		const uint32_t at = (uint32_t)kv_test_below(&rng, PAGES);
		const uint32_t n = (uint32_t)kv_test_below(&rng, kv_test_below(&rng, PAGES - at) + 1) + 1;
		int clear = 1;
		int whole = 1;

		for (uint32_t i = 0; i < n; i++) {
			clear = clear && owner[at + i] == 0;
			whole = whole && owner[at + i] == owner[at] && owner[at] != 0;
		}
		assert_int_equal(kvk_gpu_sees(gpu, memory[at], (size_t)n * 64), whole);
		if (kv_test_below(&rng, 2)) {
			assert_int_equal(kvk_gpu_register(gpu, memory[at], (size_t)n * 64), clear ? KV_OK : KV_ERR_ARG);
			for (uint32_t i = 0; i < n && clear; i++) {
				owner[at + i] = step;
			}
		} else if (at == 0 || owner[at] != owner[at - 1]) {
			const int gone = owner[at];

			kvk_gpu_unregister(gpu, memory[at]);
			for (uint32_t i = 0; i < PAGES; i++) {
				owner[i] = owner[i] == gone ? 0 : owner[i];
			}
		}
	}
	stop(&t, gpu);
}

static void copy_on_device(gpu_case_t *c, kvk_gpu_way_t way)
{
	const kvk_gpu_copy_t copy = gpu_case_copy(c, KVK_GPU_GATHER, way, NULL);
	kvk_gpu_job_t *job = NULL;

	gpu_case_refill(c);
	assert_int_equal(kvk_gpu_submit(c->gpu, &copy, &job), KV_OK);
	assert_int_equal(finish(job), KV_OK);
	kvk_gpu_end(job);
	gpu_case_twin(c, KVK_GPU_GATHER);
	gpu_case_equal(c);
}

/* A peer that may be used, one whose access somebody else has enabled, one that refuses, one without a link. */
static void p8_memory_of_a_peer_is_used_by_kernels_only_with_access_to_it(void **state)
{
	static const int answers[] = {0, 704, 217, -1};
	const fake_cuda_config_t driver = {.seed = 1, .lazy = 1, .major = 9, .devices = 2};
	kv_test_rng_t rng = {kv_test_seed()};

	(void)state;
	for (size_t i = 0; i < KV_COUNT_OF(answers); i++) {
		const int reached = answers[i] == 0 || answers[i] == 704;
		kv_test_env_t t;
		kvk_gpu_t *gpu = start(&t, &driver, 4);
		kvk_gpu_stats_t stats;
		uint64_t asked;
		gpu_case_t c;

		gpu_case_init(&c, &rng, gpu, KVK_PAGED_HEAD_TOKEN_KV);
		while (c.kind != CASE_ON_DEVICE || c.count == 0 || c.g.page_bytes <= 240) {
			gpu_case_fini(&c);
			gpu_case_init(&c, &rng, gpu, KVK_PAGED_HEAD_TOKEN_KV);
		}
		fake_cuda_foreign(1);
		if (answers[i] < 0) {
			fake_cuda_unlink();
		} else {
			fake_cuda_fail_always(offsetof(kvk_cuda_ops_t, peer_enable), answers[i]);
		}
		copy_on_device(&c, KVK_GPU_ZERO_COPY);
		asked = fake_cuda_calls(offsetof(kvk_cuda_ops_t, peer_can));
		copy_on_device(&c, KVK_GPU_AUTO);
		assert_int_equal(fake_cuda_calls(offsetof(kvk_cuda_ops_t, peer_can)), asked); /* it is known */
		fake_cuda_fail_always(0, 0);
		kvk_gpu_get_stats(gpu, &stats);
		assert_int_equal(stats.far, reached ? 0 : 2);
		assert_int_equal(stats.staged, stats.far);
		assert_int_equal(stats.zero_copy, reached ? 2 : 0);
		gpu_case_fini(&c);
		stop(&t, gpu);
	}
}

/* ---- choosing ---------------------------------------------------------------------------------------------------- */

/* Where the engine is slow, or the link is, for kernels: what was measured is taken, whatever the size. */
static void p5_auto_takes_what_was_faster(void **state)
{
	kv_test_rng_t rng = {kv_test_seed()};

	(void)state;
	for (int staged = 0; staged < 2; staged++) {
		kv_test_env_t t;
		kvk_gpu_t *gpu;
		kvk_gpu_stats_t before, after;
		kvk_gpu_job_t *job;
		kvk_gpu_copy_t copy;
		gpu_case_t c;

		gpu = start(&t, &hopper, 4);
		t.env.now_ns = fake_cuda_clock;
		fake_cuda_costs(staged ? 1 : 40, staged ? 40 : 1);
		some_case(&c, &rng, gpu);
		while (staged &&
		       (c.paged.head_stride == 0 || c.paged.heads == 1)) { /* what is measured lies otherwise */
			gpu_case_fini(&c);
			some_case(&c, &rng, gpu);
		}
		c.layer = c.layers = 0;
		fake_cuda_limit_pinned(1 << 20);
		assert_int_equal(kvk_gpu_measure(gpu, &c.layout, &c.paged), KV_OK);
		assert_int_equal(kvk_gpu_measure(gpu, &c.layout, &c.paged), KV_OK); /* known already */
		kvk_gpu_get_stats(gpu, &before);
		assert_int_equal(before.gathers, 6);
		copy = gpu_case_copy(&c, KVK_GPU_GATHER, KVK_GPU_AUTO, NULL);
		assert_int_equal(kvk_gpu_submit(gpu, &copy, &job), KV_OK);
		assert_int_equal(finish(job), KV_OK);
		kvk_gpu_end(job);
		kvk_gpu_get_stats(gpu, &after);
		assert_int_equal(after.staged - before.staged, staged);
		assert_int_equal(after.zero_copy - before.zero_copy, !staged);
		gpu_case_fini(&c);
		stop(&t, gpu);
	}
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

typedef struct worker {
	pthread_t thread;
	kvk_gpu_t *gpu;
	kv_test_rng_t rng;
	gpu_case_t c;
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
			status = finish(job);
		}
		if (status == KV_OK) {
			kvk_gpu_end(job);
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

		if (kvk_gpu_register(w->gpu, at, 4096) != KV_OK) {
			kvk_gpu_unregister(w->gpu, at);
		}
	}

	return NULL;
}

static void p6_threads_copy_while_others_register(void **state)
{
	enum { THREADS = 4 };
	kv_test_rng_t rng = {kv_test_seed()};
	kv_test_env_t t;
	kvk_gpu_t *gpu = start(&t, &hopper, 6);
	worker_t workers[THREADS] = {0};

	(void)state;
	for (int i = 0; i < THREADS; i++) {
		workers[i].gpu = gpu;
		workers[i].rng.state = kv_test_rand(&rng);
		some_case(&workers[i].c, &rng, gpu);
	}
	for (int i = 0; i < THREADS; i++) {
		assert_int_equal(pthread_create(&workers[i].thread, NULL, i ? copy_on : register_on, &workers[i]), 0);
	}
	for (int i = 0; i < THREADS; i++) {
		pthread_join(workers[i].thread, NULL);
		assert_int_equal(workers[i].failed, 0);
	}
	fake_cuda_drain();
	for (int i = THREADS - 1; i >= 0; i--) {
		if (i > 0) {
			gpu_case_twin(&workers[i].c, KVK_GPU_SCATTER);
		}
		gpu_case_equal(&workers[i].c);
		gpu_case_fini(&workers[i].c);
	}
	stop(&t, gpu);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p10_a_copy_that_cannot_be_meant_enqueues_nothing),
		cmocka_unit_test(p10_memory_is_registered_once),
		cmocka_unit_test(p5_jobs_are_bounded_and_come_back),
		cmocka_unit_test(p5_memory_of_arguments_is_bounded_and_comes_back),
		cmocka_unit_test(p5_a_wait_ends_in_time),
		cmocka_unit_test(p5_a_copy_takes_no_more_sms_than_it_may),
		cmocka_unit_test(p1_the_device_sees_what_is_registered_and_nothing_else),
		cmocka_unit_test(p8_memory_of_a_peer_is_used_by_kernels_only_with_access_to_it),
		cmocka_unit_test(p5_auto_takes_what_was_faster),
		cmocka_unit_test(p6_threads_copy_while_others_register),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
