/* What GPU copies do when the driver refuses: any call, each resource, at any time. */
#include "gpu_rig.h"

#define MAX_CALLS 2000000u
#ifdef KVD_SANITIZE /* several times slower */
#define STRIDE 151u
#define CUTS   80u
#else
#define STRIDE 31u
#define CUTS   400u
#endif
#ifdef __SANITIZE_THREAD__ /* there is one thread here: nothing new to see */
#define KINDS 1
#else
#define KINDS 3
#endif

static void start(uint64_t seed, int lazy)
{
	gpu_rig_init(&rig_, &(fake_cuda_config_t){.seed = seed, .lazy = lazy, .major = 9});
}

/* Everything a copy uses. Returns how many of the copies failed. */
static int copy_all_ways(gpu_case_t *c)
{
	kvk_cu_stream_t stream = NULL;
	int failures = kvk_gpu_create_stream(c->gpu, 1, &stream) != KV_OK;

	failures += kvk_gpu_measure(c->gpu, &c->layout, &c->paged) != KV_OK;
	for (int i = 0; i < 6; i++) {
		const kvk_gpu_dir_t dir = (kvk_gpu_dir_t)(i % 2);
		const kvk_gpu_copy_t copy = gpu_case_copy(c, dir, (kvk_gpu_way_t)(1 + i / 2), stream);
		kvk_gpu_job_t *job = NULL;
		kv_status_t status = kvk_gpu_submit(c->gpu, &copy, &job);

		if (status != KV_OK) {
			assert_true(status == KV_ERR_IO || status == KV_ERR_ARG || status == KV_ERR_UNSUPPORTED);
			assert_null(job);
			assert_true(strlen(kvk_gpu_last_error()) > 10);
			failures++;
			continue;
		}
		failures += kvk_gpu_order_after_job(job, stream) != KV_OK;
		failures += kvk_gpu_order_streams(c->gpu, stream, NULL) != KV_OK;
		status = gpu_rig_finish(job);
		/* A gather that came in part leaves blocks that are not what their digests say. */
		assert_true(status == KV_OK || status == KV_ERR_IO || (status == KV_ERR_CORRUPT && failures > 0));
		failures += status != KV_OK;
		kvk_gpu_release_job(job);
	}

	return failures;
}

/* Once each call of the driver, in turn: the copy that used it fails or takes another way, and everything goes on. */
KV_TEST(p6_any_call_of_the_driver_may_fail)
{
	kv_test_rng_t rng = {kv_test_seed()};

	for (int kind = 0; kind < KINDS; kind++) {
		const uint64_t seed = kv_test_rand(&rng);
		uint64_t n = 0;
		int failed = 1;

		while (failed && n < MAX_CALLS) {
			kv_test_rng_t same = {seed};
			gpu_case_t c;

			start(seed, 1);
			gpu_case_init(&c, &same, gpu_rig_open(&rig_), gpu_case_kind(kind));
			if (gpu_case_is_near(&c)) {
				gpu_case_ask_no_digests(&c);
			}
			fake_cuda_limit_pinned(32 << 10); /* little to measure */
			/* The many pieces of way EACH are much the same. */
			n += n < 200 ? 1 : STRIDE + n / 64;
			fake_cuda_fail_nth(n);
			copy_all_ways(&c);
			failed = fake_cuda_failed();
			fake_cuda_fail_nth(0);

			/* What was left half way ends; then the next copy is as good as any. */
			fake_cuda_drain();
			gpu_case_refill(&c);
			gpu_case_check(&c, KVK_GPU_SCATTER, (kvk_gpu_way_t)(n % 4), NULL);
			gpu_case_fini(&c);
			gpu_rig_fini(&rig_);
		}
		assert_true(n > 50 && n < MAX_CALLS);
	}
}

static int has_several_steps(const gpu_case_t *c)
{
	return gpu_case_is_usual(c) && c->count >= 12 && (uint64_t)c->paged.heads * c->g.page_bytes <= 8192;
}

/* The driver refuses one call in the middle of a copy: the copy is not reported as ended while what was enqueued still
 * writes its memory. */
KV_TEST(p4_a_copy_is_not_over_while_a_part_of_it_runs)
{
	kv_test_rng_t rng = {kv_test_seed()};
	const uint64_t seed = kv_test_rand(&rng);
	uint64_t n = 0, waited = 0, late = 0;
	int failed = 1;

	while (failed && ++n < MAX_CALLS) {
		kv_test_rng_t same = {seed};
		kvk_gpu_job_t *job = NULL;
		kv_status_t status;
		kvk_gpu_t *gpu;
		kvk_gpu_copy_t copy;
		gpu_case_t c;
		uint8_t *before;

		start(seed, 1);
		rig_.config.staging_bytes = UINT64_C(128) << 10;
		gpu = gpu_rig_open(&rig_);
		gpu_case_until(&c, &same, gpu, KVK_PAGED_KV_TOKEN_HEAD, has_several_steps);
		copy = gpu_case_copy(&c, KVK_GPU_GATHER, KVK_GPU_STAGED, NULL);
		gpu_rig_copy(gpu, &copy); /* its ring is there */
		gpu_case_refill(&c);
		before = malloc(c.pool_bytes);
		memcpy(before, c.pool, c.pool_bytes);
		fake_cuda_hold(1);
		fake_cuda_fail_nth(n);
		status = kvk_gpu_submit(gpu, &copy, &job);
		failed = fake_cuda_failed();
		fake_cuda_fail_nth(0);
		if (status == KV_OK) {
			assert_int_equal(kvk_gpu_poll(job), KV_PENDING);
			waited += failed != 0;
		}
		fake_cuda_hold(0);
		fake_cuda_drain();
		late += status != KV_OK && memcmp(before, c.pool, c.pool_bytes) != 0;
		if (status == KV_OK) {
			status = gpu_rig_finish(job);
			assert_true(status == KV_OK || (failed && status == KV_ERR_IO));
			kvk_gpu_release_job(job);
		}
		free(before);
		gpu_case_fini(&c);
		gpu_rig_fini(&rig_);
	}
	print_message("%u calls, %u waited for\n", (unsigned)n, (unsigned)waited);
	assert_true(waited > 0);
	assert_int_equal(late, 0);
}

KV_TEST(p6_open_fails_whole_or_opens)
{
	uint64_t n = 0;
	int failed = 1;

	while (failed && ++n < MAX_CALLS) {
		kv_status_t status;

		start(n, 0);
		fake_cuda_fail_nth(n);
		status = gpu_rig_try_open(&rig_);
		failed = fake_cuda_failed();
		assert_true(status == KV_OK || status == KV_ERR_IO || status == KV_ERR_UNSUPPORTED);
		assert_int_equal(status == KV_OK, rig_.gpu != NULL);
		assert_true(failed || status == KV_OK);
		fake_cuda_fail_nth(0);
		gpu_rig_fini(&rig_);
	}
	assert_true(n > 20 && n < MAX_CALLS);
}

KV_TEST(p6_open_and_measure_live_without_memory)
{
	kv_test_rng_t rng = {kv_test_seed()};

	start(1, 0);
	KV_TEST_EACH_FAILURE(&rig_.t, n)
	{
		const kv_status_t status = gpu_rig_try_open(&rig_);

		assert_int_equal(status, kv_test_failed(&rig_.t) ? KV_ERR_NOMEM : KV_OK);
		kvk_gpu_close(rig_.gpu);
		rig_.gpu = NULL;
		assert_true(fake_cuda_clean());
		assert_int_equal(kv_test_env_live(&rig_.t), 0);
	}
	fake_cuda_stop();

	for (uint64_t n = 1; n <= 2; n++) {
		kvk_gpu_t *gpu;
		gpu_case_t c;

		start(1, 0);
		gpu = gpu_rig_open(&rig_);
		gpu_case_init(&c, &rng, gpu, KVK_PAGED_OPAQUE);
		kv_test_fail_nth(&rig_.t, n);
		assert_int_equal(kvk_gpu_measure(gpu, &c.layout, &c.paged), KV_ERR_NOMEM);
		kv_test_fail_nth(&rig_.t, 0);
		assert_int_equal(kvk_gpu_measure(gpu, &c.layout, &c.paged), KV_OK);
		gpu_case_fini(&c);
		gpu_rig_fini(&rig_);
	}
}

KV_TEST(p6_registering_fails_whole_or_registers)
{
	static _Alignas(4096) uint8_t memory[2][8192];

	for (uint64_t n = 1; n < 6; n++) {
		kvk_gpu_t *gpu;
		kvk_gpu_stats_t stats;
		kv_status_t status;

		start(n, 0);
		gpu = gpu_rig_open(&rig_);
		fake_cuda_fail_nth(n);
		status = kvk_gpu_register(gpu, memory[0], sizeof memory[0]);
		kvk_gpu_get_stats(gpu, &stats);
		assert_int_equal(stats.registered_bytes, status == KV_OK ? sizeof memory[0] : 0);
		assert_int_equal(kvk_gpu_is_registered(gpu, memory[0], sizeof memory[0]), status == KV_OK);
		assert_int_equal(fake_cuda_live().registered, status == KV_OK);

		/* The driver may say no when it gives back: it has done so, or it never will. */
		fake_cuda_fail_nth(2);
		kvk_gpu_unregister(gpu, memory[0]);
		fake_cuda_fail_nth(0);
		assert_false(kvk_gpu_is_registered(gpu, memory[0], 1));
		kvk_gpu_unregister(gpu, memory[0]);
		assert_int_equal(kvk_gpu_register(gpu, memory[1], sizeof memory[1]), KV_OK);
		gpu_rig_fini(&rig_); /* unregisters what is left */
	}
}

GPU_TEST(p6_a_pin_that_the_kernel_refuses_is_a_limit)
{
	static _Alignas(4096) uint8_t memory[4096];
	kvk_gpu_t *gpu;
	kvk_gpu_stats_t before, stats;

	start(1, 0);
	gpu = gpu_rig_open(&rig_);
	kvk_gpu_get_stats(gpu, &before);
	fake_cuda_fail_always(offsetof(kvk_cuda_ops_t, host_register), 2);
	assert_int_equal(kvk_gpu_register(gpu, memory, sizeof memory), KV_ERR_LIMIT);
	assert_non_null(strstr(kvk_gpu_last_error(), "cuMemHostRegister"));
	assert_non_null(strstr(kvk_gpu_last_error(), "CUDA_ERROR_OUT_OF_MEMORY"));
	fake_cuda_fail_always(offsetof(kvk_cuda_ops_t, host_register), 999);
	assert_int_equal(kvk_gpu_register(gpu, memory, sizeof memory), KV_ERR_IO);
	fake_cuda_fail_always(0, 0);
	kvk_gpu_get_stats(gpu, &stats);
	assert_int_equal(stats.failures, before.failures + 2);
}

/* One copy each way, all right, whatever the device lacks. */
static void copy_and_compare(gpu_case_t *c, kvk_gpu_way_t way)
{
	for (int dir = 0; dir < 2; dir++) {
		gpu_case_check(c, (kvk_gpu_dir_t)dir, way, NULL);
		gpu_case_refill(c);
	}
}

GPU_TEST(p6_without_kernels_copies_go_piece_by_piece)
{
	kv_test_rng_t rng = {kv_test_seed()};
	kvk_gpu_t *gpu;
	kvk_gpu_stats_t stats;
	gpu_case_t c;

	start(1, 1);
	rig_.config.image = "made for another device";
	gpu = gpu_rig_open(&rig_);
	assert_non_null(strstr(kvk_gpu_describe(gpu), "Fake 0"));
	assert_non_null(strstr(kvk_gpu_describe(gpu), "piece by piece: cuModuleLoadData"));
	gpu_case_usual(&c, &rng, gpu, KVK_PAGED_TOKEN_HEAD_KV);
	assert_int_equal(kvk_gpu_measure(gpu, &c.layout, &c.paged), KV_OK);
	copy_and_compare(&c, KVK_GPU_AUTO);
	copy_and_compare(&c, KVK_GPU_STAGED);
	kvk_gpu_get_stats(gpu, &stats);
	assert_int_equal(stats.copy_per_piece, 4);
	assert_int_equal(fake_cuda_launches(), 0);
	gpu_case_fini(&c);
}

static int has_six_moves(const gpu_case_t *c)
{
	return c->count >= 6;
}

/* Whatever part of a staged copy was enqueued when a call failed: another stream's, which takes the same memory of the
 * ring at once, is right. */
KV_TEST(p6_a_staged_copy_cut_short_spoils_no_other)
{
	kv_test_rng_t rng = {kv_test_seed()};
	uint32_t cut = 0;

	for (uint64_t round = 0; round < CUTS; round++) {
		kvk_gpu_t *gpu;
		gpu_case_t c[2];
		kvk_cu_stream_t streams[2];
		kvk_gpu_copy_t copy;
		kvk_gpu_job_t *job = NULL;

		start(kv_test_rand(&rng), 1);
		rig_.config.staging_bytes = UINT64_C(16) << (10 + round % 4);
		gpu = gpu_rig_open(&rig_);
		for (int i = 0; i < 2; i++) {
			assert_int_equal(kvk_gpu_create_stream(gpu, 0, &streams[i]), KV_OK);
			gpu_case_until(&c[i], &rng, gpu, KVK_PAGED_HEAD_TOKEN_KV, has_six_moves);
			gpu_case_ask_no_digests(&c[i]);
		}
		copy = gpu_case_copy(&c[0], (kvk_gpu_dir_t)(round % 2), KVK_GPU_STAGED, streams[0]);
		fake_cuda_fail_nth(12 + kv_test_below(&rng, 60));
		if (kvk_gpu_submit(gpu, &copy, &job) == KV_OK) {
			kvk_gpu_release_job(job);
		} else {
			cut++;
		}
		fake_cuda_fail_nth(0);
		gpu_case_check(&c[1], (kvk_gpu_dir_t)(round % 2), KVK_GPU_STAGED, streams[1]);
		fake_cuda_drain();
		gpu_case_fini(&c[1]);
		gpu_case_fini(&c[0]);
		gpu_rig_fini(&rig_);
	}
	assert_true(cut > CUTS / 10);
}

/* A driver that has the call and does not take it: one by one, and it is asked once. */
GPU_TEST(p6_without_batches_copies_go_one_by_one)
{
	const size_t member = offsetof(kvk_cuda_ops_t, copy_batch);
	kv_test_rng_t rng = {kv_test_seed()};
	kvk_gpu_t *gpu;
	kvk_gpu_stats_t before;
	gpu_case_t c;

	start(1, 1);
	gpu = gpu_rig_open(&rig_);
	kvk_gpu_get_stats(gpu, &before); /* pinned memory was asked for in vain */
	fake_cuda_fail_always(member, 801);
	for (int round = 0; round < 20; round++) {
		kvk_gpu_stats_t stats;

		gpu_case_init(&c, &rng, gpu, gpu_case_kind(round));
		gpu_case_ask_no_digests(&c);
		gpu_case_check(&c, KVK_GPU_GATHER, KVK_GPU_STAGED, NULL);
		kvk_gpu_get_stats(gpu, &stats);
		assert_int_equal(stats.failures, before.failures);
		gpu_case_fini(&c);
	}
	assert_int_equal(fake_cuda_calls(member), 1);
}

GPU_TEST(p6_without_a_ring_whole_blocks_go_over_the_link)
{
	kv_test_rng_t rng = {kv_test_seed()};
	kvk_gpu_t *gpu;
	kvk_gpu_stats_t before, stats;
	gpu_case_t c;

	start(1, 1);
	gpu = gpu_rig_open(&rig_);
	assert_non_null(strstr(kvk_gpu_describe(gpu), "zero copy and staged"));
	gpu_case_usual(&c, &rng, gpu, KVK_PAGED_TOKEN_HEAD_KV);
	kvk_gpu_get_stats(gpu, &before);
	fake_cuda_fail_always(offsetof(kvk_cuda_ops_t, mem_alloc), 2);
	copy_and_compare(&c, KVK_GPU_STAGED);
	copy_and_compare(&c, KVK_GPU_STAGED);
	fake_cuda_fail_always(0, 0);
	kvk_gpu_get_stats(gpu, &stats);
	assert_int_equal(stats.staged, 0);
	assert_int_equal(stats.zero_copy, 4);
	assert_int_equal(stats.failures, before.failures + 3); /* asked for once a direction, once for arguments */
	assert_int_equal(atomic_load(&rig_.t.lines[1]), 2);    /* and said */
	gpu_case_fini(&c);
}

GPU_TEST(p6_with_little_pinned_memory_there_are_fewer_jobs)
{
	kv_test_rng_t rng = {kv_test_seed()};
	kvk_gpu_t *gpu;
	gpu_case_t c;

	start(1, 1);
	fake_cuda_limit_pinned(1 << 20);
	gpu = gpu_rig_open(&rig_);
	fake_cuda_limit_pinned(0);
	gpu_case_usual(&c, &rng, gpu, KVK_PAGED_TOKEN_HEAD_KV);
	fake_cuda_limit_pinned(1);
	copy_and_compare(&c, KVK_GPU_AUTO);
	assert_int_equal(kvk_gpu_measure(gpu, &c.layout, &c.paged), KV_ERR_NOMEM);
	copy_and_compare(&c, KVK_GPU_AUTO);
	gpu_case_fini(&c);
	kvk_gpu_close(rig_.gpu);
	rig_.gpu = NULL;
	fake_cuda_limit_pinned(1000);
	assert_int_equal(gpu_rig_try_open(&rig_), KV_ERR_NOMEM);
	assert_null(rig_.gpu);
}

GPU_TEST(p10_what_is_no_device_is_not_supported)
{
	const char *why = NULL;
	const kvk_cuda_ops_t *driver = kvk_cuda_load(&why);

	assert_non_null(why);
	assert_true(strlen(why) > 10);
	assert_ptr_equal(driver, kvk_cuda_load(NULL));
	start(1, 0);
	rig_.config.cuda = NULL;
	assert_int_equal(gpu_rig_try_open(&rig_), KV_ERR_UNSUPPORTED);
	rig_.config.cuda = fake_cuda_ops();
	rig_.config.device = 1;
	assert_int_equal(gpu_rig_try_open(&rig_), KV_ERR_UNSUPPORTED);
	assert_string_equal(kvk_gpu_last_error(), "there is no device 1: the driver counts 1");
	rig_.config.device = -1;
	assert_int_equal(gpu_rig_try_open(&rig_), KV_ERR_UNSUPPORTED);
	rig_.config.device = 0;
	fake_cuda_fail_always(offsetof(kvk_cuda_ops_t, init), 100);
	assert_int_equal(gpu_rig_try_open(&rig_), KV_ERR_UNSUPPORTED);
	assert_non_null(strstr(kvk_gpu_last_error(), "cuInit answered"));
}
