/* Copies while an engine captures a CUDA graph: no call is made that would invalidate the capture. */
#include "gpu_rig.h"

#ifdef KVD_SANITIZE /* several times slower */
#define ROUNDS 24
#else
#define ROUNDS 200
#endif

static kvk_gpu_t *start(kv_test_rng_t *rng, const void *image)
{
	const fake_cuda_config_t driver = {
		.seed = kv_test_rand(rng), .lazy = 1, .major = kv_test_below(rng, 2) ? 9 : 8};

	gpu_rig_init(&rig_, &driver);
	fake_cuda_limit_pinned(1 << 20);
	rig_.config.image = image;
	rig_.config.jobs = 4;

	return gpu_rig_open(&rig_);
}

static void end_job(kvk_gpu_job_t *job)
{
	fake_cuda_drain();
	gpu_rig_end(job);
}

/* Digests that somebody can make: by a kernel, or by the host, which has to see the block. */
static int is_seen(const gpu_case_t *c)
{
	return !gpu_case_is_near(c) && c->count > 0;
}

KV_TEST(p1_copies_run_while_another_stream_is_captured)
{
	kv_test_rng_t rng = {kv_test_seed()};

	for (int round = 0; round < ROUNDS; round++) {
		const kvk_gpu_dir_t dir = (kvk_gpu_dir_t)(round % 2);
		kvk_gpu_t *gpu = start(&rng, fake_cuda_image());
		kvk_cu_stream_t streams[2];
		kvk_gpu_job_t *job = NULL;
		kvk_gpu_copy_t copy;
		gpu_case_t c;

		assert_int_equal(kvk_gpu_create_stream(gpu, 1, &streams[0]), KV_OK);
		assert_int_equal(kvk_gpu_create_stream(gpu, 1, &streams[1]), KV_OK);
		gpu_case_until(&c, &rng, gpu, gpu_case_kind(round), is_seen);
		fake_cuda_capture(streams[0], (int)kv_test_below(&rng, 2) * 2);
		/* Staged copies and their rings included. */
		copy = gpu_case_copy(&c, dir, (kvk_gpu_way_t)kv_test_below(&rng, 4), streams[1]);
		assert_int_equal(kvk_gpu_submit(gpu, &copy, &job), KV_OK);
		end_job(job);
		gpu_case_twin(&c, dir);
		gpu_case_equal(&c);
		assert_true(fake_cuda_captured(streams[0]));
		gpu_case_fini(&c);
		gpu_rig_fini(&rig_);
	}
}

/* The fake driver's own rules, else the others would prove nothing. */
KV_TEST(p6_the_fake_driver_minds_what_spoils_a_capture)
{
	const kvk_cuda_ops_t *cuda = fake_cuda_ops();
	kv_test_rng_t rng = {kv_test_seed()};

	for (int what = 0; what < 6; what++) {
		kvk_gpu_t *gpu = start(&rng, fake_cuda_image());
		kvk_cu_stream_t stream, other;
		kvk_cu_context_t context;
		kvk_cu_event_t event;
		kvk_cu_ptr_t ptr;
		int device;

		assert_int_equal(kvk_gpu_create_stream(gpu, 1, &stream), KV_OK);
		assert_int_equal(kvk_gpu_create_stream(gpu, 1, &other), KV_OK);
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
			(void)fake_cuda_captured(stream);
			assert_true(fake_cuda_faults() > 0);
		} else {
			assert_false(fake_cuda_captured(stream));
		}
		assert_int_equal(cuda->event_destroy(event), 0);
		assert_int_equal(cuda->context_pop(&context), 0);
		assert_int_equal(cuda->context_release(device), 0);
		kvk_gpu_close(gpu);
		fake_cuda_stop();
	}
}

/* A graph takes no copies: the submit is refused, the capture stays valid and the next copy is as good as any. */
KV_TEST(p10_a_copy_on_a_captured_stream_is_refused)
{
	kv_test_rng_t rng = {kv_test_seed()};

	for (uint64_t n = 0; n < 20; n++) {
		kvk_gpu_t *gpu = start(&rng, n % 2 ? "no image that it knows" : fake_cuda_image());
		kvk_gpu_job_t *job = NULL;
		kvk_cu_stream_t stream;
		kvk_gpu_copy_t copy;
		kv_status_t status;
		gpu_case_t c;

		assert_int_equal(kvk_gpu_create_stream(gpu, 1, &stream), KV_OK);
		gpu_case_until(&c, &rng, gpu, KVK_PAGED_KV_TOKEN_HEAD, is_seen);
		copy = gpu_case_copy(&c, KVK_GPU_GATHER, KVK_GPU_AUTO, stream);
		fake_cuda_capture(stream, 0);
		fake_cuda_fail_nth(n / 2); /* 0: none of its calls fails */
		status = kvk_gpu_submit(gpu, &copy, &job);
		fake_cuda_fail_nth(0);
		assert_true(status == KV_ERR_UNSUPPORTED || (n >= 2 && status == KV_ERR_IO));
		assert_null(job);
		assert_true(fake_cuda_captured(stream));
		assert_int_equal(kvk_gpu_submit(gpu, &copy, &job), KV_OK);
		end_job(job);
		gpu_case_twin(&c, KVK_GPU_GATHER);
		gpu_case_equal(&c);
		gpu_case_fini(&c);
		gpu_rig_fini(&rig_);
	}
}

/* A capture that the engine's own call has invalidated. */
KV_TEST(p10_a_copy_on_an_invalid_capture_is_refused)
{
	kv_test_rng_t rng = {kv_test_seed()};
	kvk_gpu_t *gpu = start(&rng, fake_cuda_image());
	kvk_gpu_job_t *job = NULL;
	kvk_cu_stream_t stream;
	kvk_gpu_copy_t copy;
	gpu_case_t c;

	assert_int_equal(kvk_gpu_create_stream(gpu, 1, &stream), KV_OK);
	gpu_case_until(&c, &rng, gpu, KVK_PAGED_KV_TOKEN_HEAD, is_seen);
	copy = gpu_case_copy(&c, KVK_GPU_GATHER, KVK_GPU_AUTO, stream);
	fake_cuda_capture(stream, 2);
	assert_int_equal(fake_cuda_faults(), 0);
	fake_cuda_call(stream, free, NULL);
	assert_int_equal(kvk_gpu_submit(gpu, &copy, &job), KV_ERR_IO);
	assert_null(job);
	assert_false(fake_cuda_captured(stream));
	gpu_case_fini(&c);
	kvk_gpu_close(gpu);
	fake_cuda_stop();
}
