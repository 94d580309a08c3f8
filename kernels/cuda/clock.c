/* The device's own clock between two points of its streams. */
#include "cuda/driver/context.h"

struct kvk_gpu_clock {
	kvk_gpu_t *gpu;
	kvk_cu_event_t at[2];
	_Atomic int marked[2];
};

kv_status_t kvk_gpu_clock_open(kvk_gpu_t *gpu, kvk_gpu_clock_t **p_clock)
{
	kvk_gpu_clock_t *clock = kv_alloc(gpu->env, sizeof *clock);
	kv_status_t status;

	if (!clock) {
		return KV_ERR_NOMEM;
	}
	clock->gpu = gpu;
	status = kvk_gpu_enter(gpu);
	if (status != KV_OK) {
		goto err_clock;
	}
	for (uint32_t i = 0; i < 2 && status == KV_OK; i++) {
		status = KVK_GPU_CALL(gpu, event_create, &clock->at[i], 0);
	}
	kvk_gpu_leave(gpu);
	if (status != KV_OK) {
		goto err_clock;
	}
	*p_clock = clock;

	return KV_OK;

err_clock:
	kvk_gpu_clock_close(clock);
	return status;
}

void kvk_gpu_clock_close(kvk_gpu_clock_t *clock)
{
	int entered;

	if (!clock) {
		return;
	}
	/* A driver that refuses this refuses the rest, too: what it holds then goes with the process. */
	entered = kvk_gpu_enter(clock->gpu) == KV_OK;
	for (uint32_t i = 0; i < 2 && clock->at[i]; i++) {
		(void)KVK_GPU_CALL(clock->gpu, event_destroy, clock->at[i]);
	}
	if (entered) {
		kvk_gpu_leave(clock->gpu);
	}
	kv_free(clock->gpu->env, clock);
}

kv_status_t kvk_gpu_clock_mark(kvk_gpu_clock_t *clock, int end, kvk_cu_stream_t stream)
{
	const int i = end != 0;
	kv_status_t status = kvk_gpu_enter(clock->gpu);

	clock->marked[i] = 0;
	if (status != KV_OK) {
		return status;
	}
	status = KVK_GPU_CALL(clock->gpu, event_record, clock->at[i], stream);
	kvk_gpu_leave(clock->gpu);
	clock->marked[i] = status == KV_OK;
	if (!end) {
		clock->marked[1] = 0;
	}

	return status;
}

kv_status_t kvk_gpu_clock_await(const kvk_gpu_clock_t *clock, kvk_cu_stream_t stream)
{
	kv_status_t status = kvk_gpu_enter(clock->gpu);

	if (status == KV_OK) {
		status = KVK_GPU_CALL(clock->gpu, stream_wait, stream, clock->at[0], 0);
		kvk_gpu_leave(clock->gpu);
	}

	return status;
}

int kvk_gpu_clock_begun(const kvk_gpu_clock_t *clock)
{
	int begun;

	if (!clock->marked[0] || kvk_gpu_enter(clock->gpu) != KV_OK) {
		return 0;
	}
	begun = clock->gpu->cuda->event_query(clock->at[0]) == 0;
	kvk_gpu_leave(clock->gpu);

	return begun;
}

kv_status_t kvk_gpu_clock_read(kvk_gpu_clock_t *clock, uint64_t *p_ns)
{
	kv_status_t status;
	float ms = 0;
	int error;

	if (!clock->marked[0] || !clock->marked[1]) {
		return kvk_gpu_set_error(KV_ERR_ARG, "the clock has not been started and stopped");
	}
	status = kvk_gpu_enter(clock->gpu);
	if (status != KV_OK) {
		return status;
	}
	error = clock->gpu->cuda->event_elapsed(&ms, clock->at[0], clock->at[1]);
	status = error == KVK_CU_NOT_READY
			 ? KV_PENDING
			 : kvk_gpu_check_result(clock->gpu, offsetof(kvk_cuda_ops_t, event_elapsed), error);
	kvk_gpu_leave(clock->gpu);
	if (status == KV_OK) {
		*p_ns = ms > 0 ? (uint64_t)((double)ms * 1e6) : 0;
	}

	return status;
}
