/* What kernels read of a job, in one piece to the device's memory: they look moves up in many small reads, which over a
 * link take longer than the copies of a small job, and stand in the way of those of a large one. On a stream of its
 * own, so that it runs beside what came before. */
#include "upload.h"

#include "context.h"

void kvk_gpu_device_args_init(kvk_gpu_t *gpu)
{
	pthread_mutex_init(&gpu->device_args.lock, NULL);
}

static void free_device_args(kvk_gpu_t *gpu)
{
	kvk_gpu_device_args_t *m = &gpu->device_args;

	if (m->stream) {
		KVK_GPU_CALL(gpu, stream_destroy, m->stream);
	}
	if (m->come) {
		KVK_GPU_CALL(gpu, event_destroy, m->come);
	}
	if (m->memory) {
		KVK_GPU_CALL(gpu, mem_free, m->memory);
	}
}

void kvk_gpu_device_args_fini(kvk_gpu_t *gpu)
{
	if (atomic_load(&gpu->device_args.state) > 0) {
		free_device_args(gpu);
	}
	pthread_mutex_destroy(&gpu->device_args.lock);
}

static kv_status_t make_device_args(kvk_gpu_t *gpu)
{
	kvk_gpu_device_args_t *m = &gpu->device_args;
	kv_status_t status = KVK_GPU_CALL(gpu, mem_alloc, &m->memory, gpu->arg_buffer_bytes);

	if (status != KV_OK) {
		m->memory = 0;
		return status;
	}
	status = KVK_GPU_CALL(gpu, stream_create, &m->stream, KVK_CU_STREAM_OWN, KVK_CU_PRIORITY_HIGH);
	if (status != KV_OK) {
		m->stream = NULL;
		return status;
	}
	status = KVK_GPU_CALL(gpu, event_create, &m->come, KVK_CU_EVENT_NO_TIME);
	if (status != KV_OK) {
		m->come = NULL;
	}

	return status;
}

/* Under the lock. */
static int device_args_ready(kvk_gpu_t *gpu)
{
	kvk_gpu_device_args_t *m = &gpu->device_args;

	if (atomic_load(&m->state) == 0) {
		if (make_device_args(gpu) == KV_OK) {
			atomic_store(&m->state, 1);
		} else {
			kv_logf(gpu->env, KV_LOG_INFO, "gpu",
				"no device memory for arguments: kernels read the host's device %d why %s",
				gpu->ordinal, kvk_gpu_last_error());
			free_device_args(gpu);
			atomic_store(&m->state, -1);
		}
	}

	return atomic_load(&m->state) > 0;
}

uint64_t kvk_gpu_upload_args(kvk_gpu_t *gpu, const kvk_gpu_job_t *job, kvk_cu_stream_t stream)
{
	kvk_gpu_device_args_t *m = &gpu->device_args;
	uint64_t at = job->start_at;

	pthread_mutex_lock(&m->lock);
	/* An upload that nobody waits for does no harm: those that go to the same place later come after it. */
	if (device_args_ready(gpu) &&
	    KVK_GPU_CALL(gpu, copy_async, m->memory + job->at, job->start_at, job->inputs, m->stream) == KV_OK &&
	    KVK_GPU_CALL(gpu, event_record, m->come, m->stream) == KV_OK &&
	    KVK_GPU_CALL(gpu, stream_wait, stream, m->come, 0) == KV_OK) {
		at = m->memory + job->at;
	}
	pthread_mutex_unlock(&m->lock);

	return at;
}
