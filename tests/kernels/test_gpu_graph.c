/* Copies that become a part of a CUDA graph: what moves when, what may be asked, and that no call is made that would
 * spoil the capture. */
#include "gpu_rig.h"

#ifdef KVD_SANITIZE /* several times slower */
#define ROUNDS 24
#else
#define ROUNDS 200
#endif
#define LAUNCHES 3

static const kvk_paged_kind_t kinds[] = {KVK_PAGED_KV_TOKEN_HEAD, KVK_PAGED_HEAD_TOKEN_KV, KVK_PAGED_OPAQUE,
					 KVK_PAGED_KV_HEAD_TOKEN};

static kvk_gpu_t *start(gpu_rig_t *rig, kv_test_rng_t *rng, const void *image)
{
	const fake_cuda_config_t driver = {
		.seed = kv_test_rand(rng), .lazy = 1, .major = kv_test_below(rng, 2) ? 9 : 8};

	gpu_rig_init(rig, &driver);
	fake_cuda_limit_pinned(1 << 20);
	rig->config.image = image;
	rig->config.jobs = 4;

	return gpu_rig_open(rig);
}

static kv_status_t finish(kvk_gpu_job_t *job)
{
	fake_cuda_drain();

	return gpu_rig_finish(job);
}

/* Digests that somebody can make: by a kernel, or by the host, which has to see the block. */
static void some_case(gpu_case_t *c, kv_test_rng_t *rng, kvk_gpu_t *gpu, kvk_paged_kind_t kind)
{
	gpu_case_init(c, rng, gpu, kind);
	while (c->kind == CASE_ON_DEVICE || c->count == 0) {
		gpu_case_fini(c);
		gpu_case_init(c, rng, gpu, kind);
	}
}

/* Other bytes where a scatter goes, the same for the twin. */
static void spoil_cache(gpu_case_t *c)
{
	kv_test_fill(c->rng, c->twin_cache, c->cache_bytes);
	memcpy((void *)(uintptr_t)c->cache, c->twin_cache, c->cache_bytes);
}

static void p1_a_captured_copy_is_made_at_each_launch_of_the_graph(void **state)
{
	kv_test_rng_t rng = {kv_test_seed()};

	(void)state;
	for (int round = 0; round < ROUNDS; round++) {
		const kvk_gpu_dir_t dir = (kvk_gpu_dir_t)(round % 2);
		gpu_rig_t rig;
		kvk_gpu_t *gpu = start(&rig, &rng, fake_cuda_image());
		kvk_cu_stream_t streams[2];
		kvk_gpu_job_t *job = NULL, *other = NULL;
		kvk_gpu_copy_t copy;
		kvk_gpu_stats_t stats;
		fake_graph_t *graph;
		gpu_case_t c, beside;

		assert_int_equal(kvk_gpu_stream(gpu, 1, &streams[0]), KV_OK);
		assert_int_equal(kvk_gpu_stream(gpu, 1, &streams[1]), KV_OK);
		some_case(&c, &rng, gpu, kinds[(size_t)round % KV_COUNT_OF(kinds)]);
		some_case(&beside, &rng, gpu, kinds[kv_test_below(&rng, KV_COUNT_OF(kinds))]);
		copy = gpu_case_copy(&c, dir, (kvk_gpu_way_t)kv_test_below(&rng, 4), streams[0]);
		fake_cuda_capture(streams[0], (int)kv_test_below(&rng, 2) * 2);
		assert_int_equal(kvk_gpu_submit(gpu, &copy, &job), KV_OK);
		assert_int_equal(kvk_gpu_poll(job), KV_PENDING);
		/* Another copy goes all its way meanwhile, staged ones and their rings included. */
		copy = gpu_case_copy(&beside, dir, (kvk_gpu_way_t)kv_test_below(&rng, 4), streams[1]);
		assert_int_equal(kvk_gpu_submit(gpu, &copy, &other), KV_OK);
		assert_int_equal(finish(other), KV_OK);
		kvk_gpu_end(other);
		gpu_case_twin(&beside, dir);
		gpu_case_equal(&beside);
		graph = fake_cuda_captured(streams[0]);
		assert_non_null(graph);
		gpu_case_equal(&c); /* nothing has moved */
		assert_int_equal(kvk_gpu_poll(job), KV_PENDING);

		for (uint32_t i = 1; i <= LAUNCHES; i++) {
			if (dir == KVK_GPU_GATHER) {
				gpu_case_refill(&c);
			} else {
				spoil_cache(&c);
			}
			assert_int_equal(kvk_gpu_again(job), KV_OK);
			assert_int_equal(kvk_gpu_poll(job), KV_PENDING);
			fake_cuda_graph_launch(graph, streams[1]);
			assert_int_equal(finish(job), KV_OK);
			assert_int_equal(kvk_gpu_poll(job), KV_OK);
			assert_int_equal(*kvk_gpu_word(job), i);
			gpu_case_twin(&c, dir);
			gpu_case_equal(&c);
		}
		kvk_gpu_get_stats(gpu, &stats);
		assert_int_equal(stats.captured, 1);
		assert_int_equal(stats.corrupt, 0);
		kvk_gpu_end(job);
		fake_cuda_graph_free(graph);
		gpu_case_fini(&beside);
		gpu_case_fini(&c);
		gpu_rig_fini(&rig);
	}
}

static void p1_a_bit_flipped_between_launches_is_told_of_at_the_next(void **state)
{
	kv_test_rng_t rng = {kv_test_seed()};
	uint32_t told = 0;

	(void)state;
	for (int round = 0; round < ROUNDS; round++) {
		gpu_rig_t rig;
		kvk_gpu_t *gpu = start(&rig, &rng, fake_cuda_image());
		kvk_cu_stream_t stream;
		kvk_gpu_job_t *job = NULL;
		kvk_gpu_copy_t copy;
		kvk_gpu_stats_t stats;
		fake_graph_t *graph;
		uint32_t broken;
		gpu_case_t c;
		size_t at;

		assert_int_equal(kvk_gpu_stream(gpu, 1, &stream), KV_OK);
		some_case(&c, &rng, gpu, kinds[(size_t)round % KV_COUNT_OF(kinds)]);
		broken = (uint32_t)kv_test_below(&rng, c.count);
		at = gpu_case_some_byte(&c, broken);
		copy = gpu_case_copy(&c, KVK_GPU_SCATTER, (kvk_gpu_way_t)kv_test_below(&rng, 4), stream);
		fake_cuda_capture(stream, 0);
		assert_int_equal(kvk_gpu_submit(gpu, &copy, &job), KV_OK);
		graph = fake_cuda_captured(stream);
		assert_non_null(graph);
		for (int i = 0; i < LAUNCHES && c.moves[broken].leaves; i++) {
			c.pool[at] ^= 8;
			assert_int_equal(kvk_gpu_again(job), KV_OK);
			fake_cuda_graph_launch(graph, stream);
			assert_int_equal(finish(job), KV_ERR_CORRUPT);
			c.pool[at] ^= 8;
			/* A good launch makes no bad one good. */
			fake_cuda_graph_launch(graph, stream);
			assert_int_equal(finish(job), KV_ERR_CORRUPT);
			for (uint32_t k = 0; k < c.count; k++) {
				assert_int_equal(kvk_gpu_bad(job, k), k == broken);
			}
			assert_int_equal(kvk_gpu_again(job), KV_OK);
			fake_cuda_graph_launch(graph, stream);
			assert_int_equal(finish(job), KV_OK);
			told++;
			kvk_gpu_get_stats(gpu, &stats);
			assert_true(stats.corrupt >= (uint64_t)i + 1);
		}
		kvk_gpu_end(job);
		fake_cuda_graph_free(graph);
		gpu_case_fini(&c);
		gpu_rig_fini(&rig);
	}
	assert_true(told > ROUNDS);
}

/* The fake driver's own rules, else the others would prove nothing. */
static void p6_the_fake_driver_minds_what_spoils_a_capture(void **state)
{
	const kvk_cuda_ops_t *cuda = fake_cuda_ops();
	kv_test_rng_t rng = {kv_test_seed()};

	(void)state;
	for (int what = 0; what < 6; what++) {
		gpu_rig_t rig;
		kvk_gpu_t *gpu = start(&rig, &rng, fake_cuda_image());
		kvk_cu_stream_t stream, other;
		kvk_cu_context_t context;
		kvk_cu_event_t event;
		kvk_cu_ptr_t ptr;
		int device;

		assert_int_equal(kvk_gpu_stream(gpu, 1, &stream), KV_OK);
		assert_int_equal(kvk_gpu_stream(gpu, 1, &other), KV_OK);
		assert_int_equal(cuda->device_get(&device, 0), 0);
		assert_int_equal(cuda->context_retain(&context, device), 0);
		assert_int_equal(cuda->context_push(context), 0);
		assert_int_equal(cuda->event_create(&event, 2), 0);
		assert_int_equal(cuda->event_record(event, other), 0);
		fake_cuda_capture(stream, 0);
		switch (what) {
		case 0:
			assert_int_equal(cuda->event_query(event), 900);
			break;
		case 1:
			assert_int_equal(cuda->mem_alloc(&ptr, 100), 900);
			break;
		case 2:
			assert_int_equal(cuda->stream_wait(stream, event, 0), 905);
			break;
		case 3:
			assert_int_equal(cuda->event_record(event, stream), 0);
			assert_int_equal(cuda->event_query(event), 900);
			break;
		case 4:
			assert_int_equal(cuda->host_register(&ptr, sizeof ptr, 3), 900);
			break;
		default:
			assert_int_equal(cuda->event_record(event, stream), 0);
			assert_int_equal(cuda->stream_wait(other, event, 0), 0); /* and does not come back */
		}
		assert_true(what == 5 || fake_cuda_faults() > 0);
		if (what == 5) {
			fake_cuda_graph_free(fake_cuda_captured(stream));
			assert_true(fake_cuda_faults() > 0);
		} else {
			assert_null(fake_cuda_captured(stream));
		}
		assert_int_equal(cuda->event_destroy(event), 0);
		assert_int_equal(cuda->context_pop(&context), 0);
		assert_int_equal(cuda->context_release(device), 0);
		kvk_gpu_close(gpu);
		fake_cuda_stop();
	}
}

static void p10_what_a_captured_copy_is_not_asked(void **state)
{
	kv_test_rng_t rng = {kv_test_seed()};
	gpu_rig_t rig;
	kvk_gpu_t *gpu = start(&rig, &rng, fake_cuda_image());
	kvk_cu_stream_t stream, other;
	kvk_gpu_job_t *job = NULL, *none = NULL;
	fake_graph_t *graph;
	kvk_gpu_copy_t copy;
	gpu_case_t c;

	(void)state;
	assert_int_equal(kvk_gpu_stream(gpu, 1, &stream), KV_OK);
	assert_int_equal(kvk_gpu_stream(gpu, 1, &other), KV_OK);
	some_case(&c, &rng, gpu, KVK_PAGED_KV_TOKEN_HEAD);
	copy = gpu_case_copy(&c, KVK_GPU_GATHER, KVK_GPU_AUTO, stream);
	assert_int_equal(kvk_gpu_submit(gpu, &copy, &none), KV_OK);
	assert_int_equal(kvk_gpu_again(none), KV_ERR_ARG);
	assert_null((const void *)(uintptr_t)kvk_gpu_word(none));
	assert_int_equal(finish(none), KV_OK);
	kvk_gpu_end(none);
	for (int i = 0; i < 10; i++) { /* more than there are jobs: each comes back */
		fake_cuda_capture(stream, 0);
		assert_int_equal(kvk_gpu_submit(gpu, &copy, &job), KV_OK);
		assert_int_equal(kvk_gpu_order(job, other), KV_ERR_ARG);
		assert_int_equal(kvk_gpu_wait(job, 0), KV_PENDING);
		graph = fake_cuda_captured(stream);
		assert_non_null(graph);
		kvk_gpu_end(job);
		fake_cuda_graph_free(graph);
	}
	/* A capture that somebody else has spoiled. */
	fake_cuda_capture(stream, 2);
	assert_int_equal(fake_cuda_faults(), 0);
	fake_cuda_call(stream, free, NULL);
	job = NULL;
	assert_int_equal(kvk_gpu_submit(gpu, &copy, &job), KV_ERR_IO);
	assert_null(job);
	assert_null(fake_cuda_captured(stream));
	gpu_case_fini(&c);
	kvk_gpu_close(gpu);
	fake_cuda_stop();

	gpu = start(&rig, &rng, "no image that it knows");
	assert_int_equal(kvk_gpu_stream(gpu, 1, &stream), KV_OK);
	some_case(&c, &rng, gpu, KVK_PAGED_KV_TOKEN_HEAD);
	copy = gpu_case_copy(&c, KVK_GPU_GATHER, KVK_GPU_AUTO, stream);
	fake_cuda_capture(stream, 0);
	assert_int_equal(kvk_gpu_submit(gpu, &copy, &job), KV_ERR_UNSUPPORTED);
	fake_cuda_graph_free(fake_cuda_captured(stream));
	gpu_case_fini(&c);
	gpu_rig_fini(&rig);
}

/* Any call of a submit under capture fails once: the capture is given up, and the next copy is as good as any. */
static void p6_a_call_that_fails_under_capture_costs_the_graph_only(void **state)
{
	kv_test_rng_t rng = {kv_test_seed()};
	uint64_t failed = 0;

	(void)state;
	for (uint64_t n = 1; n < 60; n++) {
		gpu_rig_t rig;
		kvk_gpu_t *gpu = start(&rig, &rng, fake_cuda_image());
		kvk_gpu_job_t *job = NULL;
		kvk_cu_stream_t stream;
		kvk_gpu_copy_t copy;
		fake_graph_t *graph;
		gpu_case_t c;

		assert_int_equal(kvk_gpu_stream(gpu, 1, &stream), KV_OK);
		some_case(&c, &rng, gpu, KVK_PAGED_KV_TOKEN_HEAD);
		copy = gpu_case_copy(&c, KVK_GPU_GATHER, n % 2 ? KVK_GPU_EACH : KVK_GPU_ZERO_COPY, stream);
		fake_cuda_capture(stream, 0);
		fake_cuda_fail_nth((n + 1) / 2);
		if (kvk_gpu_submit(gpu, &copy, &job) == KV_OK) {
			kvk_gpu_end(job);
		} else {
			assert_null(job);
			failed++;
		}
		fake_cuda_fail_nth(0);
		graph = fake_cuda_captured(stream);
		if (graph) {
			fake_cuda_graph_free(graph);
		}
		copy = gpu_case_copy(&c, KVK_GPU_GATHER, KVK_GPU_AUTO, stream);
		assert_int_equal(kvk_gpu_submit(gpu, &copy, &job), KV_OK);
		assert_int_equal(finish(job), KV_OK);
		kvk_gpu_end(job);
		gpu_case_twin(&c, KVK_GPU_GATHER);
		gpu_case_equal(&c);
		gpu_case_fini(&c);
		gpu_rig_fini(&rig);
	}
	assert_true(failed > 5);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p1_a_captured_copy_is_made_at_each_launch_of_the_graph),
		cmocka_unit_test(p1_a_bit_flipped_between_launches_is_told_of_at_the_next),
		cmocka_unit_test(p6_the_fake_driver_minds_what_spoils_a_capture),
		cmocka_unit_test(p10_what_a_captured_copy_is_not_asked),
		cmocka_unit_test(p6_a_call_that_fails_under_capture_costs_the_graph_only),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
