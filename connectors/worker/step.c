/* A step as the engine calls it. */
#include "worker/cuda/layers.h"
#include "worker/cuda/prefetch.h"
#include "worker/cuda/step.h"
#include "worker/host/copy_threads.h"
#include "worker/jobs/save.h"
#include "worker/prefault.h"
#include "worker/step_begin.h"
#include "worker/timing.h"

void kvx_worker_begin_step(kvx_worker_t *worker, const void *message, size_t len)
{
	if (!kvx_prefetch_matches(worker, message, len)) {
		kvx_step_begin(worker, message, len);
	}
	if (!worker->sync) {
		kvx_timing_start(worker);
	}
}

static int run_sync_loads(kvx_worker_t *worker, int layers)
{
	int layered = 0;
	uint64_t start;

	if (!worker->sync) {
		return 0;
	}
	start = kvx_worker_now_ns();
	if (worker->gpu) {
		layered = kvx_gpu_step_load(worker, layers);
	} else {
		kvx_copy_threads_run_loads(worker);
	}
	kvx_stat_add(&worker->stats.load_wait_ns, kvx_worker_now_ns() - start);
	if (layered) {
		kvx_timing_cancel(worker);
	} else {
		kvx_timing_start(worker);
	}

	return layered;
}

void kvx_worker_run_sync_loads(kvx_worker_t *worker)
{
	(void)run_sync_loads(worker, 0);
}

int kvx_worker_run_layered_loads(kvx_worker_t *worker)
{
	return run_sync_loads(worker, 1);
}

void kvx_worker_await_layer(kvx_worker_t *worker, uint32_t layer)
{
	if (worker->gpu && !kvx_layers_await(worker, layer)) {
		kvx_gpu_step_settle(worker);
	}
}

void kvx_worker_end_step(kvx_worker_t *worker)
{
	if (worker->prefetch.begun) {
		return; /* a prefetch has begun the next step, and has given up what waited for this one */
	}
	worker->calls_seen |= KVX_CALLED_END;
	kvx_timing_stop(worker);
	if (worker->gpu) {
		kvx_gpu_step_end(worker);
	} else {
		kvx_saves_submit_deferred(worker, 0);
	}
	kvx_prefault_defer(worker, KVX_PREFAULT_PAUSE_NS);
}
