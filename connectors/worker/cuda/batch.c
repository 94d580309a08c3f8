/* Batches in flight: jobs of the device, and the load or saves they copy for. */
#include "worker/cuda/batch.h"
#include "worker/cuda/timers.h"

static kvx_gpu_batch_t *find_free(kvx_gpu_batch_t *batches, uint32_t count, uint32_t keep)
{
	kvx_gpu_batch_t *found = NULL;
	uint32_t free = 0;

	for (uint32_t i = 0; i < count; i++) {
		if (!batches[i].job) {
			found = found ? found : &batches[i];
			free++;
		}
	}

	return free > keep ? found : NULL;
}

kvx_gpu_batch_t *kvx_gpu_batch_for_load(kvx_wgpu_t *gpu, uint32_t flags)
{
	const uint32_t keep = flags & KVX_MSG_ASYNC ? KVX_GPU_LOADS - KVX_GPU_ASYNC_LOADS : 0;

	return find_free(gpu->batches, KVX_GPU_LOADS, keep);
}

kvx_gpu_batch_t *kvx_gpu_batch_for_save(kvx_wgpu_t *gpu, int fence)
{
	return find_free(gpu->batches + KVX_GPU_LOADS, KVX_GPU_SAVES, fence ? 0 : KVX_GPU_SAVES - KVX_GPU_SAVES_AHEAD);
}

/* The driver has refused a job for its size: from now on jobs have at most `most` blocks. */
static void shrink_batches(kvx_wgpu_t *gpu, uint32_t most)
{
	gpu->sync_batch = gpu->sync_batch < most ? gpu->sync_batch : most;
	gpu->async_batch = gpu->async_batch < most ? gpu->async_batch : most;
	gpu->save_batch = gpu->save_batch < most ? gpu->save_batch : most;
}

/* Append it to its lane. */
static void append_to_lane(kvx_wgpu_t *gpu, kvx_gpu_batch_t *batch)
{
	batch->next = NULL;
	if (gpu->first[batch->lane]) {
		gpu->last[batch->lane]->next = batch;
	} else {
		gpu->first[batch->lane] = batch;
	}
	gpu->last[batch->lane] = batch;
}

kvc_status_t kvx_gpu_batch_submit(kvx_worker_t *worker, kvx_gpu_batch_t *batch, const kvk_gpu_copy_t *copy)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvk_gpu_job_t *job = NULL;
	kvc_status_t status = (kvc_status_t)kvk_gpu_submit(gpu->gpu, copy, &job);

	if (status == KVC_OK) {
		batch->job = job;
		batch->begin_ns = kvx_worker_now_ns();
		batch->poisoned = 0;
		batch->serial = ++gpu->serial;
		append_to_lane(gpu, batch);
		atomic_fetch_add(&gpu->in_flight, 1u);
		atomic_fetch_add(&gpu->loads_in_flight, batch->of.load ? 1u : 0u);
		atomic_fetch_add(&gpu->save_blocks_in_flight, batch->of.load ? 0u : copy->count);
		if (batch->of.load) {
			kvx_timers_mark_load_end(gpu, batch->of.load, copy->stream);
		}
	} else if (status == KVC_ERR_LIMIT && copy->count > 1) {
		shrink_batches(gpu, copy->count / 2);
		status = KVC_ERR_BUSY;
	}

	return status;
}

static void complete_batch(kvx_worker_t *worker, kvx_gpu_batch_t *batch, kvc_status_t status)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvk_gpu_job_t *job = batch->job;
	const uint32_t loading = batch->of.load ? 1u : 0u;

	/* done() may drop the last reference to the load or save: neither is used after it. */
	if (batch->of.load && status != KVC_OK && status != KVC_ERR_CORRUPT) {
		atomic_store(&gpu->untracked_copies, 1u);
	}
	batch->done(worker, batch, status);
	kvk_gpu_release_job(job);
	batch->job = NULL;
	batch->of.load = NULL;
	atomic_fetch_sub(&gpu->loads_in_flight, loading);
	atomic_fetch_sub(&gpu->save_blocks_in_flight, loading ? 0u : batch->n);
	atomic_fetch_sub(&gpu->in_flight, 1u);
}

/* Jobs of a lane end in order, so the driver is asked about its first job only: every call to it delays the engine's
 * own launches. */
static uint32_t complete_lane(kvx_worker_t *worker, kvx_lane_t lane)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvx_gpu_batch_t *batch;
	uint32_t landed = 0;

	while ((batch = gpu->first[lane]) != NULL) {
		const kvc_status_t status = (kvc_status_t)kvk_gpu_poll(batch->job);

		if (status == KVC_PENDING) {
			break;
		}
		gpu->first[lane] = batch->next;
		complete_batch(worker, batch, status);
		landed++;
	}

	return landed;
}

uint32_t kvx_gpu_complete_batches(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;
	uint32_t landed = 0;

	if (atomic_load(&gpu->in_flight) == 0) {
		return 0;
	}
	(void)pthread_mutex_lock(&gpu->lock);
	for (uint32_t lane = 0; lane < KVX_LANES; lane++) {
		landed += complete_lane(worker, (kvx_lane_t)lane);
	}
	(void)pthread_mutex_unlock(&gpu->lock);
	if (landed > 0) {
		kvx_gate_open(&worker->progress);
	}

	return landed;
}
