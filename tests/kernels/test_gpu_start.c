/* How kernels get to streams: as graphs of one, and what is done where the driver makes none. */
#include "gpu_rig.h"

#ifdef KVD_SANITIZE /* several times slower */
#define ROUNDS 10
#else
#define ROUNDS 60
#endif
#define STREAMS 20u /* more than have a graph of their own */

#define OF(member)    offsetof(kvk_cuda_ops_t, member)
#define CALLS(member) fake_cuda_calls(OF(member))

static kvk_gpu_t *start(const kvk_cuda_ops_t *ops)
{
	gpu_rig_init(&rig_, NULL);
	rig_.config.cuda = ops ? ops : rig_.config.cuda;

	return gpu_rig_open(&rig_);
}

/* Out and in, both ways of copying with kernels, as the twin does. */
static void copy_and_compare(kvk_gpu_t *gpu, kv_test_rng_t *rng, kvk_cu_stream_t stream)
{
	for (int i = 0; i < 4; i++) {
		gpu_case_t c;

		gpu_case_usual(&c, rng, gpu, KVK_PAGED_KV_TOKEN_HEAD);
		gpu_case_check(&c, (kvk_gpu_dir_t)(i % 2), i < 2 ? KVK_GPU_ZERO_COPY : KVK_GPU_STAGED, stream);
		gpu_case_fini(&c);
	}
}

GPU_TEST(kernels_come_as_graphs_made_once_a_stream)
{
	kv_test_rng_t rng = {kv_test_seed()};
	kvk_cu_stream_t streams[2];
	uint64_t made;
	kvk_gpu_t *gpu = start(NULL);

	for (int i = 0; i < 2; i++) {
		assert_int_equal(kvk_gpu_create_stream(gpu, i, &streams[i]), KV_OK);
		copy_and_compare(gpu, &rng, streams[i]);
	}
	made = CALLS(graph_exec);
	assert_int_equal(made, 4); /* two streams, and that of each ring's kernels */
	for (int round = 0; round < ROUNDS; round++) {
		copy_and_compare(gpu, &rng, streams[round % 2]);
	}
	assert_int_equal(CALLS(graph_exec), made);
	assert_int_equal(CALLS(launch), 0);
	assert_true(CALLS(graph_launch) >= UINT64_C(4) * (ROUNDS + 2));
}

/* Copies of many streams on their way at once: each kernel has the arguments it was launched with. */
KV_TEST(p1_streams_that_share_a_graph_copy_their_own)
{
	kv_test_rng_t rng = {kv_test_seed()};

	for (int round = 0; round < ROUNDS; round++) {
		const kvk_gpu_dir_t dir = (kvk_gpu_dir_t)(round % 2);
		kvk_gpu_job_t *jobs[STREAMS];
		gpu_case_t cases[STREAMS];
		kvk_gpu_t *gpu;

		gpu_rig_init(&rig_, NULL);
		fake_cuda_limit_pinned(8 << 20);
		rig_.config.jobs = STREAMS;
		gpu = gpu_rig_open(&rig_);
		for (uint32_t i = 0; i < STREAMS; i++) {
			kvk_cu_stream_t stream;
			kvk_gpu_copy_t copy;

			assert_int_equal(kvk_gpu_create_stream(gpu, 1, &stream), KV_OK);
			gpu_case_usual(&cases[i], &rng, gpu, KVK_PAGED_KV_TOKEN_HEAD);
			copy = gpu_case_copy(&cases[i], dir, KVK_GPU_ZERO_COPY, stream);
			assert_int_equal(kvk_gpu_submit(gpu, &copy, &jobs[i]), KV_OK);
		}
		for (uint32_t i = 0; i < STREAMS; i++) {
			gpu_rig_end(jobs[i]);
			gpu_case_twin(&cases[i], dir);
			gpu_case_equal(&cases[i]);
			gpu_case_fini(&cases[i]);
		}
		assert_true(CALLS(graph_exec) < STREAMS);
		assert_int_equal(CALLS(graph_launch), STREAMS);
		gpu_rig_fini(&rig_);
	}
}

/* Refused at the first copy, or not there at all; the log says it once. */
KV_TEST(p6_without_graphs_kernels_are_launched_plainly)
{
	static const size_t members[] = {OF(graph_create), OF(graph_add), OF(graph_exec), OF(graph_change)};
	kv_test_rng_t rng = {kv_test_seed()};

	for (size_t i = 0; i < 2 * KV_COUNT_OF(members); i++) {
		const size_t member = members[i / 2];
		kvk_cuda_ops_t ops = *fake_cuda_ops();
		kvk_cu_stream_t stream;
		kvk_gpu_t *gpu;

		if (i % 2 == 0) {
			memset((uint8_t *)&ops + member, 0, sizeof(void *));
		}
		gpu = start(i % 2 == 0 ? &ops : NULL);
		assert_int_equal(kvk_gpu_create_stream(gpu, 1, &stream), KV_OK);
		fake_cuda_fail_always(member, 801);
		copy_and_compare(gpu, &rng, stream);
		copy_and_compare(gpu, &rng, stream);
		fake_cuda_fail_always(0, 0);
		assert_int_equal(fake_cuda_calls(member), i % 2);
		assert_int_equal(CALLS(graph_launch), 0);
		assert_true(CALLS(launch) >= 8);
		assert_int_equal(atomic_load(&rig_.t.lines[KV_LOG_INFO]), 2); /* the device is open; and that */
		gpu_rig_fini(&rig_);
	}
}

GPU_TEST(p6_a_launch_that_fails_is_a_copy_that_fails)
{
	kv_test_rng_t rng = {kv_test_seed()};
	kvk_gpu_job_t *job = NULL;
	kvk_gpu_copy_t copy;
	gpu_case_t c;
	kvk_gpu_t *gpu = start(NULL);

	gpu_case_usual(&c, &rng, gpu, KVK_PAGED_KV_TOKEN_HEAD);
	copy = gpu_case_copy(&c, KVK_GPU_SCATTER, KVK_GPU_ZERO_COPY, NULL);
	fake_cuda_fail_always(OF(graph_launch), 719);
	assert_int_equal(kvk_gpu_submit(gpu, &copy, &job), KV_OK);
	assert_non_null(strstr(kvk_gpu_last_error(), "cuGraphLaunch"));
	assert_int_equal(gpu_rig_finish(job), KV_ERR_IO);
	kvk_gpu_release_job(job);
	fake_cuda_fail_always(0, 0);
	gpu_case_fini(&c);
	copy_and_compare(gpu, &rng, NULL);
	assert_int_equal(CALLS(launch), 0);
}
