/* Memory, copies and events of a device: the driver's calls, in its context. */
#include "kvk/compute.h"

#include "cuda/driver/context.h"

#include <string.h>

static kv_status_t leave_with(kvk_gpu_t *gpu, kv_status_t status)
{
	kvk_gpu_leave(gpu);

	return status;
}

uint32_t kvk_gpu_sms(const kvk_gpu_t *gpu)
{
	return gpu->sms_all;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static kv_status_t alloc_zeroed(kvk_gpu_t *gpu, size_t bytes, kvk_cu_ptr_t *p_at)
{
	static const size_t members[] = {offsetof(kvk_cuda_ops_t, mem_set), offsetof(kvk_cuda_ops_t, context_wait)};
	kv_status_t status = kvk_cuda_require(gpu->cuda, members, KV_COUNT_OF(members));

	if (status == KV_OK) {
		status = KVK_GPU_CALL(gpu, mem_alloc, p_at, bytes ? bytes : 1);
	}
	if (status != KV_OK) {
		return status;
	}
	status = KVK_GPU_CALL(gpu, mem_set, *p_at, 0, bytes);
	if (status == KV_OK) {
		status = kvk_gpu_check_result(gpu, members[1], gpu->cuda->context_wait());
	}
	if (status != KV_OK) {
		KVK_GPU_CALL(gpu, mem_free, *p_at);
	}

	return status;
}

kv_status_t kvk_gpu_alloc(kvk_gpu_t *gpu, size_t bytes, void **p_at)
{
	kvk_cu_ptr_t at = 0;
	kv_status_t status = kvk_gpu_enter(gpu);

	if (status == KV_OK) {
		status = leave_with(gpu, alloc_zeroed(gpu, bytes, &at));
	}
	*p_at = status == KV_OK ? (void *)(uintptr_t)at : NULL;

	return status;
}

void kvk_gpu_free(kvk_gpu_t *gpu, void *at)
{
	if (at && kvk_gpu_enter(gpu) == KV_OK) {
		(void)leave_with(gpu, KVK_GPU_CALL(gpu, mem_free, (kvk_cu_ptr_t)(uintptr_t)at));
	}
}

kv_status_t kvk_gpu_alloc_host(kvk_gpu_t *gpu, size_t bytes, void **p_at)
{
	kv_status_t status = kvk_gpu_enter(gpu);

	*p_at = NULL;
	if (status == KV_OK) {
		status = leave_with(gpu, KVK_GPU_CALL(gpu, host_alloc, p_at, bytes ? bytes : 1, KVK_CU_HOST_MAPPED));
	}
	if (status == KV_OK) {
		memset(*p_at, 0, bytes);
	}

	return status;
}

void kvk_gpu_free_host(kvk_gpu_t *gpu, void *at)
{
	if (at && kvk_gpu_enter(gpu) == KV_OK) {
		(void)leave_with(gpu, KVK_GPU_CALL(gpu, host_free, at));
	}
}

kv_status_t kvk_gpu_copy_bytes(kvk_gpu_t *gpu, void *to, const void *from, size_t bytes, kvk_cu_stream_t stream)
{
	kv_status_t status = bytes ? kvk_gpu_enter(gpu) : KV_OK;

	if (bytes && status == KV_OK) {
		status = leave_with(gpu, KVK_GPU_CALL(gpu, copy_async, (kvk_cu_ptr_t)(uintptr_t)to,
						      (kvk_cu_ptr_t)(uintptr_t)from, bytes, stream));
	}

	return status;
}

/* ---- events ---------------------------------------------------------------------------------- */

kv_status_t kvk_gpu_event_create(kvk_gpu_t *gpu, int timed, kvk_cu_event_t *p_event)
{
	kv_status_t status = kvk_gpu_enter(gpu);

	*p_event = NULL;
	if (status == KV_OK) {
		status = leave_with(gpu, KVK_GPU_CALL(gpu, event_create, p_event, timed ? 0 : KVK_CU_EVENT_NO_TIME));
	}

	return status;
}

void kvk_gpu_event_destroy(kvk_gpu_t *gpu, kvk_cu_event_t event)
{
	if (event && kvk_gpu_enter(gpu) == KV_OK) {
		(void)leave_with(gpu, KVK_GPU_CALL(gpu, event_destroy, event));
	}
}

kv_status_t kvk_gpu_event_record(kvk_gpu_t *gpu, kvk_cu_event_t event, kvk_cu_stream_t stream)
{
	const kv_status_t status = kvk_gpu_enter(gpu);

	return status == KV_OK ? leave_with(gpu, KVK_GPU_CALL(gpu, event_record, event, stream)) : status;
}

kv_status_t kvk_gpu_event_await(kvk_gpu_t *gpu, kvk_cu_event_t event, kvk_cu_stream_t stream)
{
	const kv_status_t status = kvk_gpu_enter(gpu);

	return status == KV_OK ? leave_with(gpu, KVK_GPU_CALL(gpu, stream_wait, stream, event, 0)) : status;
}

kv_status_t kvk_gpu_event_elapsed(kvk_gpu_t *gpu, kvk_cu_event_t begin, kvk_cu_event_t end, float *p_ms)
{
	const kv_status_t status = kvk_gpu_enter(gpu);

	return status == KV_OK ? leave_with(gpu, KVK_GPU_CALL(gpu, event_elapsed, p_ms, begin, end)) : status;
}

static kv_status_t sync_by_event(kvk_gpu_t *gpu, kvk_cu_stream_t stream)
{
	kvk_cu_event_t event;
	kv_status_t status = KVK_GPU_CALL(gpu, event_create, &event, KVK_CU_EVENT_NO_TIME);

	if (status != KV_OK) {
		return status;
	}
	status = KVK_GPU_CALL(gpu, event_record, event, stream);
	if (status == KV_OK) {
		status = KVK_GPU_CALL(gpu, event_wait, event);
	}
	KVK_GPU_CALL(gpu, event_destroy, event);

	return status;
}

kv_status_t kvk_gpu_sync_stream(kvk_gpu_t *gpu, kvk_cu_stream_t stream)
{
	const kv_status_t status = kvk_gpu_enter(gpu);

	return status == KV_OK ? leave_with(gpu, sync_by_event(gpu, stream)) : status;
}
