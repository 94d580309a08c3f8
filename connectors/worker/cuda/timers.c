/* Timers on the device's streams. */
#include "worker/cuda/timers.h"

#define END_NS UINT64_C(200000)

void kvx_timers_open(kvx_wgpu_t *gpu)
{
	for (uint32_t i = 0; i < KVX_GPU_STEP_TIMERS; i++) {
		(void)kvk_gpu_clock_open(gpu->gpu, &gpu->step_timers[i].clock);
	}
	for (uint32_t i = 0; i < KVX_GPU_LOAD_TIMERS; i++) {
		(void)kvk_gpu_clock_open(gpu->gpu, &gpu->load_timers[i].clock);
	}
}

void kvx_timers_close(kvx_wgpu_t *gpu)
{
	for (uint32_t i = 0; i < KVX_GPU_STEP_TIMERS; i++) {
		kvk_gpu_clock_close(gpu->step_timers[i].clock);
	}
	for (uint32_t i = 0; i < KVX_GPU_LOAD_TIMERS; i++) {
		kvk_gpu_clock_close(gpu->load_timers[i].clock);
	}
}

int kvx_timers_start_step(kvx_wgpu_t *gpu)
{
	const kvx_gpu_timer_t *timer = &gpu->step_timers[gpu->step_at];

	return timer->clock && !timer->running && kvk_gpu_clock_mark(timer->clock, 0, gpu->compute) == KV_OK;
}

void kvx_timers_stop_step(kvx_wgpu_t *gpu, uint32_t step)
{
	kvx_gpu_timer_t *timer = &gpu->step_timers[gpu->step_at];

	if (kvk_gpu_clock_mark(timer->clock, 1, gpu->compute) == KV_OK) {
		timer->running = 1;
		timer->step = step;
		gpu->step_at = (gpu->step_at + 1u) % KVX_GPU_STEP_TIMERS;
	}
}

int kvx_timers_poll_step(kvx_wgpu_t *gpu, uint32_t *p_step, uint64_t *p_ns)
{
	for (uint32_t i = 0; i < KVX_GPU_STEP_TIMERS; i++) {
		kvx_gpu_timer_t *timer = &gpu->step_timers[i];
		kv_status_t status;

		if (!timer->running) {
			continue;
		}
		status = kvk_gpu_clock_read(timer->clock, p_ns);
		if (status == KV_PENDING) {
			continue;
		}
		timer->running = 0;
		if (status == KV_OK) {
			*p_step = timer->step;
			return 1;
		}
	}

	return 0;
}

void kvx_timers_start_load(kvx_worker_t *worker, kvx_wload_t *load, kvk_cu_stream_t stream)
{
	kvx_wgpu_t *gpu = worker->gpu;

	for (uint32_t i = 0; i < KVX_GPU_LOAD_TIMERS && !load->timer; i++) {
		kvx_gpu_timer_t *timer = &gpu->load_timers[i];

		if (timer->clock && !timer->running && kvk_gpu_clock_mark(timer->clock, 0, stream) == KV_OK) {
			timer->running = 1;
			load->timer = i + 1u;
		}
	}
}

int kvx_timers_load_has_begun(const kvx_wgpu_t *gpu, const kvx_wload_t *load)
{
	return load->timer && kvk_gpu_clock_begun(gpu->load_timers[load->timer - 1u].clock);
}

void kvx_timers_restart_load(kvx_wgpu_t *gpu, const kvx_wload_t *load, kvk_cu_stream_t stream)
{
	if (load->timer && !load->submitted && !load->batch_total_blocks && atomic_load(&load->all_ready)) {
		(void)kvk_gpu_clock_mark(gpu->load_timers[load->timer - 1u].clock, 0, stream);
	}
}

void kvx_timers_mark_load_end(kvx_wgpu_t *gpu, const kvx_wload_t *load, kvk_cu_stream_t stream)
{
	if (load->timer) {
		(void)kvk_gpu_clock_mark(gpu->load_timers[load->timer - 1u].clock, 1, stream);
	}
}

uint64_t kvx_timers_load_ns(kvx_worker_t *worker, kvx_wload_t *load)
{
	const uint64_t wall = load->end_ns - load->begin_ns, until = kvx_worker_now_ns() + END_NS;
	kvx_gpu_timer_t *timer;
	uint64_t ns = 0;
	kv_status_t status;

	if (!load->timer) {
		return atomic_load(&load->all_ready) ? 0 : wall;
	}
	timer = &worker->gpu->load_timers[load->timer - 1u];
	/* The end mark is next on the stream after the last job, which has ended. */
	do {
		status = kvk_gpu_clock_read(timer->clock, &ns);
	} while (status == KV_PENDING && kvx_worker_now_ns() < until);
	timer->running = 0;
	load->timer = 0;

	return status == KV_OK && ns < wall ? ns : wall;
}
