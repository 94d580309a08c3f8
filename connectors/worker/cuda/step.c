/* What comes before and after a step on the device's streams, and the verdicts its saves wait for. */
#include "worker/cuda/step.h"
#include "worker/cuda/batch.h"
#include "worker/cuda/device.h"
#include "worker/cuda/layers.h"
#include "worker/cuda/load.h"
#include "worker/failures.h"
#include "worker/jobs/save.h"
#include "worker/jobs/load.h"

#define PREFILL_TOKENS 16u /* of a request that a step computes: its kernels are of many waves of all SMs */

void kvx_gpu_step_begin(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;

	if (atomic_exchange(&gpu->untracked_copies, 0u) &&
	    !(kvx_gpu_order_streams(worker, gpu->load_sync_stream, gpu->compute) &&
	      kvx_gpu_order_streams(worker, gpu->load_async_stream, gpu->compute))) {
		atomic_store(&gpu->untracked_copies, 1u);
	}
	gpu->ended = 0;
	gpu->unordered = 0;
}

void kvx_gpu_set_work(kvx_worker_t *worker, const kvx_msg_work_t *work)
{
	worker->gpu->layers.work_us = work->us;
	atomic_store(&worker->gpu->is_prefill_step, work->longest >= PREFILL_TOKENS);
}

/* Until all are settled, or closed late: then their copies are ordered before the engine's next kernels on the device.
 */
static void wait_settled(kvx_worker_t *worker)
{
	uint32_t spins = 0;
	int late = 0;

	while (!late && !kvx_sync_loads_settled(worker)) {
		const uint32_t seen = kvx_gate_read(&worker->progress);

		late = kvx_gpu_complete_batches(worker) == 0 && kvx_sync_loads_pause(worker, seen, &spins);
	}
}

void kvx_gpu_step_settle(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;
	const uint64_t start = kvx_worker_now_ns();

	kvx_gpu_cancel_prefetch(worker);
	kvx_layers_close(worker);
	if (worker->sync && atomic_load(&worker->sync->may_copy)) {
		wait_settled(worker);
		kvx_sync_loads_close(worker);
		kvx_stat_add(&worker->stats.load_wait_ns, kvx_worker_now_ns() - start);
	}
	if (gpu->ended) {
		gpu->ended = 0;
		kvx_saves_submit_deferred(worker, gpu->unordered);
	}
}

int kvx_gpu_step_load(kvx_worker_t *worker, int layers)
{
	kvx_wgpu_t *gpu = worker->gpu;

	if (kvx_gpu_send_sync_loads(worker, layers)) {
		return 1;
	}
	if (!kvx_gpu_order_streams(worker, gpu->load_sync_stream, gpu->compute)) {
		atomic_store(&gpu->untracked_copies, 1u);
		kvx_gpu_step_settle(worker); /* then the host waits */
	}

	return 0;
}

void kvx_gpu_step_end(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;

	kvx_gpu_cancel_prefetch(worker);
	kvx_layers_close(worker);
	if (worker->deferred) {
		gpu->unordered = !kvx_gpu_order_streams(worker, gpu->compute, gpu->save_stream);
	}
	gpu->ended = 1;
	if (worker->sync) {
		(void)kvx_gpu_complete_batches(worker);
	}
	if (kvx_sync_loads_settled(worker)) {
		kvx_gpu_step_settle(worker);
	}
}
