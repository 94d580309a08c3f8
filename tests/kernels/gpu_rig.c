#include "gpu_rig.h"

#include "fake_cuda_internal.h"

void gpu_rig_init(gpu_rig_t *rig, const fake_cuda_config_t *driver)
{
	static const fake_cuda_config_t hopper = {.seed = 1, .lazy = 1, .major = 9};

	fake_cuda_start(driver ? driver : &hopper);
	fake_cuda_limit_pinned(256 << 10);
	kv_test_env_init(&rig->t);
	rig->gpu = NULL;
	rig->config = (kvk_gpu_config_t){.cuda = fake_cuda_ops(),
					 .env = &rig->t.env,
					 .image = fake_cuda_image(),
					 .staging_bytes = UINT64_C(1) << 20,
					 .jobs = 8};
}

void gpu_rig_fini(gpu_rig_t *rig)
{
	kvk_gpu_close(rig->gpu);
	assert_true(fake_cuda_clean());
	assert_int_equal(kv_test_env_live(&rig->t), 0);
	fake_cuda_stop();
}

kv_status_t gpu_rig_try_open(gpu_rig_t *rig)
{
	return kvk_gpu_open(&rig->config, &rig->gpu);
}

kvk_gpu_t *gpu_rig_open(gpu_rig_t *rig)
{
	assert_int_equal(gpu_rig_try_open(rig), KV_OK);

	return rig->gpu;
}

kv_status_t gpu_rig_finish(kvk_gpu_job_t *job)
{
	kv_status_t status;

	do {
		status = kvk_gpu_poll(job);
	} while (status == KV_PENDING);

	return status;
}

void gpu_rig_end(kvk_gpu_job_t *job)
{
	assert_int_equal(gpu_rig_finish(job), KV_OK);
	kvk_gpu_release_job(job);
}

void gpu_rig_copy(kvk_gpu_t *gpu, const kvk_gpu_copy_t *copy)
{
	kvk_gpu_job_t *job;

	assert_int_equal(kvk_gpu_submit(gpu, copy, &job), KV_OK);
	gpu_rig_end(job);
}

static const kvk_cuda_ops_t *enter_context(void)
{
	const kvk_cuda_ops_t *cuda = fake_cuda_ops();

	assert_int_equal(cuda->context_push((kvk_cu_context_t)(uintptr_t)(0x1000 + FAKE_DEVICE_HANDLE)), 0);

	return cuda;
}

static void leave_context(void)
{
	kvk_cu_context_t popped;

	assert_int_equal(fake_cuda_ops()->context_pop(&popped), 0);
}

kvk_cu_ptr_t gpu_rig_alloc(size_t bytes)
{
	kvk_cu_ptr_t memory;

	assert_int_equal(enter_context()->mem_alloc(&memory, bytes), 0);
	leave_context();

	return memory;
}

void gpu_rig_free(kvk_cu_ptr_t memory)
{
	assert_int_equal(enter_context()->mem_free(memory), 0);
	leave_context();
}

int gpu_rig_alloc_pinned(size_t bytes, void **p_base)
{
	const int error = enter_context()->host_alloc(p_base, bytes, 3);

	leave_context();

	return error == 0;
}

void gpu_rig_free_pinned(void *base)
{
	assert_int_equal(enter_context()->host_free(base), 0);
	leave_context();
}
