/* Flights: jobs on the device, and whom they are for. */
#include "worker/cuda/impl.h"

static kvx_flight_t *first_free(kvx_flight_t *flights, uint32_t count, uint32_t keep)
{
	kvx_flight_t *found = NULL;
	uint32_t free = 0;

	for (uint32_t i = 0; i < count; i++) {
		if (!flights[i].job) {
			found = found ? found : &flights[i];
			free++;
		}
	}

	return free > keep ? found : NULL;
}

kvx_flight_t *kvx_flight_of_load(kvx_wgpu_t *gpu, uint32_t flags)
{
	const uint32_t keep = flags & KVX_PLAN_ASYNC ? KVX_GPU_LOADS - KVX_GPU_BESIDE : 0;

	return first_free(gpu->flights, KVX_GPU_LOADS, keep);
}

kvx_flight_t *kvx_flight_of_save(kvx_wgpu_t *gpu, int fence)
{
	return first_free(gpu->flights + KVX_GPU_LOADS, KVX_GPU_SAVES, fence ? 0 : KVX_GPU_SAVES - KVX_GPU_AHEAD);
}

/* Jobs were too large: from now on they are of so many blocks at most. */
static void shorten(kvx_wgpu_t *gpu, uint32_t most)
{
	gpu->sync_batch = gpu->sync_batch < most ? gpu->sync_batch : most;
	gpu->beside_batch = gpu->beside_batch < most ? gpu->beside_batch : most;
	gpu->save_batch = gpu->save_batch < most ? gpu->save_batch : most;
}

/* Behind the last of its lane. */
static void join_lane(kvx_wgpu_t *gpu, kvx_flight_t *flight)
{
	flight->next = NULL;
	if (gpu->first[flight->lane]) {
		gpu->last[flight->lane]->next = flight;
	} else {
		gpu->first[flight->lane] = flight;
	}
	gpu->last[flight->lane] = flight;
}

kvc_status_t kvx_flight_submit(kvx_worker_t *worker, kvx_flight_t *flight, const kvk_gpu_copy_t *copy)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvk_gpu_job_t *job = NULL;
	kvc_status_t status = (kvc_status_t)kvk_gpu_submit(gpu->gpu, copy, &job);

	if (status == KVC_OK) {
		flight->job = job;
		flight->begin_ns = kvx_worker_now();
		flight->poisoned = 0;
		flight->serial = ++gpu->serial;
		join_lane(gpu, flight);
		atomic_fetch_add(&gpu->airborne, 1u);
		atomic_fetch_add(&gpu->loading, flight->load ? 1u : 0u);
		atomic_fetch_add(&gpu->leaving, flight->load ? 0u : copy->count);
		if (flight->load) {
			kvx_clock_sent(gpu, flight->load, copy->stream);
		}
	} else if (status == KVC_ERR_LIMIT && copy->count > 1) {
		shorten(gpu, copy->count / 2);
		status = KVC_ERR_BUSY;
	}

	return status;
}

static void land(kvx_worker_t *worker, kvx_flight_t *flight, kvc_status_t status)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvk_gpu_job_t *job = flight->job;
	const uint32_t loading = flight->load ? 1u : 0u;

	/* Once its load or save no longer counts it, that may be gone. */
	if (flight->load) {
		if (status != KVC_OK && status != KVC_ERR_CORRUPT) {
			atomic_store(&gpu->loose, 1u);
		}
		kvx_gpu_load_landed(worker, flight, status);
	} else {
		kvx_gpu_save_landed(worker, flight, status);
	}
	kvk_gpu_end(job);
	flight->job = NULL;
	flight->load = NULL;
	atomic_fetch_sub(&gpu->loading, loading);
	atomic_fetch_sub(&gpu->leaving, loading ? 0u : flight->n);
	atomic_fetch_sub(&gpu->airborne, 1u);
}

/* The driver is asked about one flight a lane: whoever asks it holds up who enqueues. */
static uint32_t land_lane(kvx_worker_t *worker, kvx_lane_t lane)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvx_flight_t *flight;
	uint32_t landed = 0;

	while ((flight = gpu->first[lane]) != NULL) {
		const kvc_status_t status = (kvc_status_t)kvk_gpu_poll(flight->job);

		if (status == KVC_PENDING) {
			break;
		}
		gpu->first[lane] = flight->next;
		land(worker, flight, status);
		landed++;
	}

	return landed;
}

uint32_t kvx_flight_land(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;
	uint32_t landed = 0;

	if (atomic_load(&gpu->airborne) == 0) {
		return 0;
	}
	(void)pthread_mutex_lock(&gpu->lock);
	for (uint32_t lane = 0; lane < KVX_LANES; lane++) {
		landed += land_lane(worker, (kvx_lane_t)lane);
	}
	(void)pthread_mutex_unlock(&gpu->lock);
	if (landed > 0) {
		kvx_gate_open(&worker->progress);
	}

	return landed;
}
