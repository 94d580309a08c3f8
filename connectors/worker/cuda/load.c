/* Loads are sent to the device in batches: asynchronous ones as their blocks become ready, synchronous ones when the
 * engine runs them, or when their step is prefetched (docs/decisions/016). The verdict of a batch is known when it
 * completes: the digests the device has compared, and the lease, which must still be valid after all bytes have
 * arrived. */
#include "worker/cuda/load.h"
#include "worker/cuda/batch.h"
#include "worker/cuda/device.h"
#include "worker/cuda/layers.h"
#include "worker/cuda/timers.h"
#include "worker/jobs/load.h"
#include "worker/submit.h"

#define YIELD_DEADLINE_MARGIN_NS                                                                                       \
	UINT64_C(500000000) /* before its deadline a load does not yield to synchronous loads */

/* ---- one batch ------------------------------------------------------------------------------- */

/* Blocks of the part that come whole after this batch. */
static uint32_t blocks_behind(const kvx_wbatch_t *batch)
{
	const kvx_wpart_t *part = batch->part;
	const uint32_t end = batch->load->batch_total_blocks ? part->whole_blocks : part->n;
	const uint32_t at = batch->first + batch->count;

	return batch->layers || end < at ? 0 : end - at;
}

static void complete_load(kvx_worker_t *worker, kvx_gpu_batch_t *batch, kvc_status_t status)
{
	kvx_wload_t *load = batch->of.load;

	kvx_wbatch_complete(worker, &batch->of, status, batch->job, batch->of.count);
	atomic_fetch_sub(&load->active, 1u);
}

/* Submit the blocks and layers that the batch names of its load. BUSY: not now. The load counts the batch as active
 * until it is complete. Asynchronous loads are copied by kernels: the engine's own input copies would queue behind them
 * in the copy engine. Lock held. */
static kvc_status_t submit_batch(kvx_worker_t *worker, kvx_gpu_batch_t *batch)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvx_wload_t *load = batch->of.load;
	kvx_wpart_t *part = batch->of.part;
	const uint32_t moves = kvx_wbatch_prepare(worker, &batch->of, gpu->moves, gpu->expected);
	const int async = (load->flags & KVX_MSG_ASYNC) != 0;
	const kvk_gpu_copy_t copy = {.dir = KVK_GPU_SCATTER,
				     .way = async ? KVK_GPU_ZERO_COPY : KVK_GPU_AUTO,
				     .layout = load->layout,
				     .paged = &part->group->paged,
				     .layer = batch->of.layer,
				     .layers = batch->of.layers,
				     .moves = gpu->moves,
				     .count = moves,
				     .of = part->n,
				     .rest = blocks_behind(&batch->of),
				     .ready = 1, /* leased: no writer touches it */
				     .stream = async ? gpu->load_async_stream : gpu->load_sync_stream};
	kvc_status_t status = kvc_lease_state(part->lease);

	batch->lane = async ? KVX_LANE_ASYNC : KVX_LANE_SYNC;
	batch->done = complete_load;
	if (status != KVC_OK) {
		return status;
	}
	if (moves == 0) {
		kvx_wbatch_complete(worker, &batch->of, KVC_OK, NULL, 0);
		return KVC_OK;
	}
	atomic_fetch_add(&load->active, 1u);
	kvx_timers_restart_load(gpu, load, copy.stream);
	status = kvx_gpu_batch_submit(worker, batch, &copy);
	if (status == KVC_OK) {
		load->submitted = 1;
	} else {
		atomic_fetch_sub(&load->active, 1u);
	}
	if (status == (kvc_status_t)KV_ERR_IO) {
		atomic_store(&gpu->untracked_copies, 1u); /* a part of it may have been enqueued */
	}

	return status;
}

/* One pass over the blocks of loads that come layer by layer: those that come whole, or range r of the others. */
typedef struct kvx_wpass {
	int whole;
	uint32_t r; /* 0 for whole blocks: the engine's first layer waits for them */
} kvx_wpass_t;

/* Blocks of the part before this one may be sent now; without a pass: those that are ready. */
static uint32_t part_end(kvx_wpart_t *part, const kvx_wpass_t *pass)
{
	return !pass ? atomic_load(&part->limit) : pass->whole ? part->whole_blocks : part->n;
}

/* Send a batch of the part, if there is one and a batch is free: how many blocks. Lock held. */
static uint32_t send_part(kvx_worker_t *worker, kvx_wload_t *load, kvx_wpart_t *part, const kvx_wpass_t *pass)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvx_wlayers_t *l = &gpu->layers;
	kvx_gpu_batch_t *batch = kvx_gpu_batch_for_load(gpu, load->flags);
	const uint32_t most = load->flags & KVX_MSG_ASYNC ? gpu->async_batch : gpu->sync_batch;
	kvx_wbatch_t of = {.load = load, .part = part, .ranges = load->ranges};
	kvc_status_t status;

	of.count = batch ? kvx_wpart_take(part, part_end(part, pass), most, &of.first) : 0;
	if (of.count == 0) {
		return 0;
	}
	if (pass && !pass->whole) {
		of.layer = pass->r > 0 ? l->end[pass->r - 1] : 0;
		of.layers = l->end[pass->r] - of.layer;
		of.ranges = 1;
	}
	batch->of = of;
	status = submit_batch(worker, batch);
	if (status == KVC_ERR_BUSY) {
		atomic_store(&part->next, of.first); /* only this thread takes blocks of the load */
	} else if (status != KVC_OK) {
		kvx_wload_close(worker, load, status);
	}
	if (!batch->job) {
		batch->of.load = NULL;
	} else if (pass) {
		l->last[pass->r].batch = batch;
		l->last[pass->r].serial = batch->serial;
	}

	return status == KVC_ERR_BUSY ? 0 : of.count;
}

/* Send one batch of the load: how many blocks. */
static uint32_t send_batch(kvx_worker_t *worker, kvx_wload_t *load, const kvx_wpass_t *pass)
{
	uint32_t count = 0;

	atomic_fetch_add(&load->active, 1u);
	if (atomic_load(&load->may_copy) && atomic_load(&load->cause) == KVC_PENDING) {
		(void)pthread_mutex_lock(&worker->gpu->lock);
		for (uint32_t p = 0; p < load->parts && count == 0; p++) {
			count = send_part(worker, load, &load->part[p], pass);
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
	begun = batch && kvx_timers_load_has_begun(gpu, batch->of.load);
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
			count = send_batch(worker, load, NULL);
			total += count;
		} while (count > 0);
	}

	return total;
}

/* ---- synchronous loads (engine's thread) --------------------------------------------------------- */

/* Every block of every load is submitted, with a pass those of the pass, or the load has failed. */
static int all_sent(const kvx_worker_t *worker, const kvx_wpass_t *pass)
{
	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		for (uint32_t p = 0; p < load->parts && atomic_load(&load->cause) == KVC_PENDING; p++) {
			kvx_wpart_t *part = &load->part[p];

			if (atomic_load(&part->next) < (pass ? part_end(part, pass) : part->n)) {
				return 0;
			}
		}
	}

	return 1;
}

/* Send a batch of each load that has one: how many blocks. */
static uint32_t send_some(kvx_worker_t *worker, const kvx_wpass_t *pass)
{
	uint32_t moved = 0;

	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		moved += send_batch(worker, load, pass);
	}

	return moved;
}

static void send_until_sent(kvx_worker_t *worker, const kvx_wpass_t *pass)
{
	uint32_t spins = 0;

	while (!all_sent(worker, pass)) {
		const uint32_t seen = kvx_gate_read(&worker->progress);

		if (send_some(worker, pass) > 0 || kvx_gpu_complete_batches(worker) > 0) {
			spins = 0;
		} else if (!all_sent(worker, pass)) {
			(void)kvx_sync_loads_pause(worker, seen, &spins);
		}
	}
}

static void send_pass(kvx_worker_t *worker, const kvx_wpass_t *pass)
{
	kvx_wlayers_t *l = &worker->gpu->layers;

	if (pass->r > 0) {
		l->last[pass->r] = l->last[pass->r - 1];
	}
	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		for (uint32_t p = 0; p < load->parts; p++) {
			atomic_store(&load->part[p].next, pass->whole ? 0 : load->part[p].whole_blocks);
		}
	}
	send_until_sent(worker, pass);
}

/* Layer by layer, if that pays and all blocks are ready. 0: nothing was done. */
static int send_layers(kvx_worker_t *worker)
{
	if (!kvx_layers_plan(worker)) {
		return 0;
	}
	send_pass(worker, &(kvx_wpass_t){.whole = 1});
	for (uint32_t r = 0; r < worker->gpu->layers.count; r++) {
		send_pass(worker, &(kvx_wpass_t){.r = r});
	}

	return 1;
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
	if (kvx_layers_await_blocks(worker) && layers && send_layers(worker)) {
		return;
	}
	while (send_some(worker, NULL) > 0) {
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
		layered = start_sync_loads(worker) && layers && send_layers(worker);
	}
	if (layered) {
		for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
			kvx_stat_add(&worker->stats.layered, 1);
		}
		return 1;
	}
	gpu->layers.count = 0; /* even if they were prefetched in layer order */
	send_until_sent(worker, NULL);

	return 0;
}
