/* Which loads are sent to the device, and when: asynchronous ones as their blocks become ready, synchronous ones when
 * the engine runs them, or when their step is prefetched (docs/decisions/016). */
#include "worker/cuda/load.h"
#include "worker/cuda/batch.h"
#include "worker/cuda/device.h"
#include "worker/cuda/layers.h"
#include "worker/cuda/load_batch.h"
#include "worker/cuda/timers.h"
#include "worker/jobs/load.h"
#include "worker/submit.h"

#define YIELD_DEADLINE_MARGIN_NS                                                                                       \
	UINT64_C(500000000) /* before its deadline a load does not yield to synchronous loads */

/* Send a batch of the part, if there is one and a batch is free: how many blocks. Lock held. */
static uint32_t send_part(kvx_worker_t *worker, kvx_wload_t *load, kvx_wpart_t *part)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvx_gpu_batch_t *batch = kvx_gpu_batch_for_load(gpu, load->flags);
	kvc_status_t status;

	if (!batch) {
		return 0;
	}
	batch->count =
		kvx_wpart_take(part, load->flags & KVX_MSG_ASYNC ? gpu->async_batch : gpu->sync_batch, &batch->first);
	if (batch->count == 0) {
		return 0;
	}
	batch->load = load;
	batch->part = part;
	batch->layer = 0;
	batch->layers = 0;
	batch->ranges = load->ranges;
	status = kvx_gpu_load_submit_batch(worker, batch);
	if (status == KVC_ERR_BUSY) {
		atomic_store(&part->next, batch->first); /* only this thread takes blocks of the load */
	} else if (status != KVC_OK) {
		kvx_wload_close(worker, load, status);
	}
	if (!batch->job) {
		batch->load = NULL;
	}

	return status == KVC_ERR_BUSY ? 0 : batch->count;
}

/* Send one batch of the load: how many blocks. */
static uint32_t send_batch(kvx_worker_t *worker, kvx_wload_t *load)
{
	uint32_t count = 0;

	atomic_fetch_add(&load->active, 1u);
	if (atomic_load(&load->may_copy) && atomic_load(&load->cause) == KVC_PENDING) {
		(void)pthread_mutex_lock(&worker->gpu->lock);
		for (uint32_t p = 0; p < load->parts && count == 0; p++) {
			count = send_part(worker, load, &load->part[p]);
		}
		(void)pthread_mutex_unlock(&worker->gpu->lock);
	}
	atomic_fetch_sub(&load->active, 1u);

	return count;
}

/* ---- asynchronous loads (transfer thread) ------------------------------------------------------ */

/* The device is copying a synchronous load. Asynchronous loads yield to it, because two streams would share the link
 * (docs/decisions/015); not while its copies still wait for the step before. */
static int sync_copies_run(kvx_wgpu_t *gpu)
{
	const kvx_gpu_batch_t *batch;
	int begun;

	(void)pthread_mutex_lock(&gpu->lock);
	batch = gpu->first[KVX_LANE_SYNC];
	begun = batch && kvx_timers_load_has_begun(gpu, batch->load);
	(void)pthread_mutex_unlock(&gpu->lock);

	return begun;
}

uint32_t kvx_gpu_send_async_loads(kvx_worker_t *worker, uint64_t now)
{
	int busy = -1; /* not known yet */
	uint32_t total = 0, count;

	for (kvx_wjob_t *job = worker->run; job; job = job->next_run) {
		kvx_wload_t *load = (kvx_wload_t *)job;

		if (job->kind != KVX_WJOB_LOAD || !(load->flags & KVX_MSG_ASYNC)) {
			continue;
		}
		busy = busy < 0 ? sync_copies_run(worker->gpu) : busy;
		if (busy && now + YIELD_DEADLINE_MARGIN_NS < load->deadline_ns) {
			worker->polls_soon = 1;
			continue;
		}
		do {
			count = send_batch(worker, load);
			total += count;
		} while (count > 0);
	}

	return total;
}

/* ---- synchronous loads (engine's thread) --------------------------------------------------------- */

/* Every block of every load is submitted, or the load has failed. */
static int all_sent(const kvx_worker_t *worker)
{
	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		for (uint32_t p = 0; p < load->parts && atomic_load(&load->cause) == KVC_PENDING; p++) {
			if (atomic_load(&load->part[p].next) < load->part[p].n) {
				return 0;
			}
		}
	}

	return 1;
}

/* Send a batch of each load that has one: how many blocks. */
static uint32_t send_some(kvx_worker_t *worker)
{
	uint32_t moved = 0;

	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		moved += send_batch(worker, load);
	}

	return moved;
}

static void send_until_sent(kvx_worker_t *worker)
{
	uint32_t spins = 0;

	while (!all_sent(worker)) {
		const uint32_t seen = kvx_gate_read(&worker->progress);

		if (send_some(worker) > 0) {
			spins = 0;
		} else if (!all_sent(worker)) {
			kvx_gpu_load_wait(worker, seen, &spins);
		}
	}
}

/* Copies may begin after all that the engine has enqueued. 0: the driver refuses, so the loads have failed. */
static int start_sync_loads(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;
	const int ordered = kvx_gpu_order_streams(worker, gpu->compute, gpu->load_sync_stream);

	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		if (!ordered) {
			kvx_wload_close(worker, load, (kvc_status_t)KV_ERR_IO);
		} else {
			kvx_timers_start_load(worker, load, gpu->load_sync_stream);
		}
		atomic_store(&load->may_copy, 1u);
	}
	kvx_transfer_wake(worker);

	return ordered;
}

void kvx_gpu_prefetch_loads(kvx_worker_t *worker, int layers)
{
	worker->gpu->sync_loads_sent = 1;
	if (!start_sync_loads(worker)) {
		return;
	}
	if (kvx_layers_await_blocks(worker) && layers && kvx_layers_send(worker)) {
		return;
	}
	while (send_some(worker) > 0) {
	}
}

void kvx_gpu_cancel_prefetch(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;

	if (!gpu->sync_loads_sent) {
		return;
	}
	gpu->sync_loads_sent = 0;
	gpu->layers.count = 0;
	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		load->layer_skipped = 1; /* loaded blocks have failed too: the engine has not waited for them */
		atomic_store(&load->cancel, 1u);
	}
	kvx_transfer_wake(worker);
	if (!kvx_gpu_order_streams(worker, gpu->load_sync_stream, gpu->compute)) {
		atomic_store(&gpu->untracked_copies, 1u);
	}
}

int kvx_gpu_send_sync_loads(kvx_worker_t *worker, int layers)
{
	kvx_wgpu_t *gpu = worker->gpu;
	const int prefetched = gpu->sync_loads_sent;
	int layered;

	gpu->sync_loads_sent = 0;
	if (prefetched) {
		layered = layers && gpu->layers.count > 0;
	} else {
		layered = start_sync_loads(worker) && layers && kvx_layers_send(worker);
	}
	if (layered) {
		for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
			kvx_stat_add(&worker->stats.layered, 1);
		}
		return 1;
	}
	gpu->layers.count = 0; /* even if they were prefetched in layer order */
	send_until_sent(worker);

	return 0;
}
