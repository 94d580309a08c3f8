/* Loads are sent to the device in batches: asynchronous ones as their blocks become ready, synchronous ones when the
 * engine runs them, or when their step is prefetched (docs/decisions/016). The verdict of a batch is known when it
 * completes: the digests the device has compared, and the lease, which must still be valid after all bytes have
 * arrived.
 *
 * Synchronous loads may come layer by layer (docs/decisions/012). All blocks of a layer range are sent before the next
 * range, and what the engine enqueues for a layer is ordered after the last job of its range. The host waits for
 * nothing.
 *
 * Ranges are small at both ends: the engine waits for the first one before it can begin, and computes the last one
 * after everything has arrived. Between them they are larger, because each range costs a launch.
 *
 * Whole blocks load faster than layer by layer. If a step computes less than it loads, most of what comes layer by
 * layer has nothing to overlap with. So where the step's work is known, the first blocks come whole, and only as many
 * by layers as are loaded during the computation.
 *
 * The engine awaits each layer before it enqueues what reads it. A layer that it has not awaited by the end of the step
 * may have been read too early: then all blocks of these loads have failed, the step's blocks are not stored, and later
 * loads come whole. */
#include "worker/jobs/gpu_load.h"
#include "worker/cuda/device.h"
#include "worker/jobs/load.h"
#include "worker/base/submit.h"

#include "kv/log.h"

#include <string.h>

#define PARTS      5u /* the largest range has a fifth of the layers */
#define NAP_NS     UINT64_C(100000)
#define LOOKUP_NS  2000u /* of the transfer thread, when busy, to look up a block */
#define RATE_DECAY 64u   /* the best rate decays by this part with each load */
/* Before its deadline a load does not yield to synchronous loads. */
#define YIELD_DEADLINE_MARGIN_NS UINT64_C(500000000)

/* ---- which ranges ---------------------------------------------------------------------------- */

static void add_range(kvx_wlayers_t *l, uint32_t layers)
{
	if (kv_holds(l->count < KVX_GPU_RANGES)) {
		l->end[l->count] = (l->count > 0 ? l->end[l->count - 1] : 0) + layers;
		l->count++;
	}
}

/* 1, 2, 4, .. layers from both ends, then parts of what lies between. 0: they do not add up. */
static int plan_ranges(kvx_wlayers_t *l, uint32_t layers)
{
	const uint32_t most = layers / PARTS > 2 ? layers / PARTS : 2;
	uint32_t left = layers, size, pieces;

	l->count = 0;
	for (size = 1; size <= most && left >= 2 * size; size *= 2) {
		add_range(l, size);
		left -= 2 * size;
	}
	pieces = (left + most - 1) / most;
	for (uint32_t i = 0; i < pieces; i++) {
		add_range(l, left / pieces + (i < left % pieces ? 1u : 0u));
	}
	while ((size /= 2) > 0) {
		add_range(l, size);
	}

	return kv_holds(l->count > 0 && l->end[l->count - 1] == layers);
}

static uint32_t range_of(const kvx_wlayers_t *l, uint32_t layer)
{
	uint32_t r = 0;

	while (r + 1 < l->count && layer >= l->end[r]) {
		r++;
	}

	return r;
}

/* ---- whether --------------------------------------------------------------------------------- */

/* Blocks of the step's loads with a destination. */
static uint32_t count_wanted(const kvx_worker_t *worker)
{
	uint32_t blocks = 0;

	for (const kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		blocks += load->wanted;
	}

	return blocks;
}

/* 1: every block of every load may be taken; -1: one of them never will be. */
static int check_ready(const kvx_worker_t *worker)
{
	int all = 1;

	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		if (atomic_load(&load->cause) != KVC_PENDING) {
			return -1;
		}
		for (uint32_t p = 0; p < load->parts; p++) {
			all = all && atomic_load(&load->part[p].limit) == load->part[p].n;
		}
	}

	return all;
}

/* When to stop waiting for blocks that are not ready. */
static uint64_t end_of_wait(const kvx_worker_t *worker)
{
	return kvx_worker_now_ns() + worker->gpu->layers.wait_ns + (uint64_t)count_wanted(worker) * LOOKUP_NS;
}

/* If some blocks still have to be read from a disk, the others are better sent at once. */
static int await_blocks(kvx_worker_t *worker)
{
	const uint64_t until = end_of_wait(worker);
	uint32_t spins = 0;
	int there;

	for (;;) {
		const uint32_t seen = kvx_gate_read(&worker->progress);

		there = check_ready(worker);
		if (there != 0 || kvx_worker_now_ns() >= until) {
			return there > 0;
		}
		kvx_gate_pause(&worker->progress, seen, &spins, NAP_NS);
	}
}

static int can_send_layers(kvx_worker_t *worker)
{
	const kvx_wlayers_t *l = &worker->gpu->layers;
	const kvx_wgroup_t *group = &worker->groups[0];

	/* Several groups share block ids, and have no synchronous loads. */
	if (l->least_bytes == 0 || l->disabled || worker->group_count > 1 || group->paged.layers < 2) {
		return 0;
	}

	return count_wanted(worker) * group->block_bytes >= l->least_bytes && await_blocks(worker);
}

/* ---- what comes whole ------------------------------------------------------------------------ */

void kvx_layers_add_rate_sample(kvx_worker_t *worker, uint64_t bytes, uint64_t ns)
{
	kvx_wlayers_t *l = &worker->gpu->layers;
	const double rate = ns ? (double)bytes * 1e3 / (double)ns : 0;

	/* The best rate counts: other traffic may slow a load down. */
	if (ns && bytes >= l->least_bytes) {
		l->rate -= l->rate / RATE_DECAY;
		l->rate = rate > l->rate ? rate : l->rate;
	}
}

/* How many of the step's blocks come whole, before the others. */
static uint64_t count_whole_blocks(const kvx_worker_t *worker)
{
	const kvx_wlayers_t *l = &worker->gpu->layers;
	const double bytes = (double)worker->groups[0].block_bytes;
	const double all = (double)count_wanted(worker), overlapped = l->work_us * l->rate / bytes;

	/* A few blocks are not worth jobs of their own. */
	return overlapped > 0 && (all - overlapped) * bytes >= (double)l->least_bytes ? (uint64_t)(all - overlapped)
										      : 0;
}

static void split_whole_blocks(kvx_worker_t *worker)
{
	uint64_t whole = count_whole_blocks(worker);

	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		for (uint32_t p = 0; p < load->parts; p++) {
			kvx_wpart_t *part = &load->part[p];

			part->whole_blocks = whole < part->n ? (uint32_t)whole : part->n;
			whole -= part->whole_blocks;
		}
	}
}

/* The synchronous loads come in layer ranges, if that pays and all their blocks are ready. 0: nothing was done. */
static int plan_layers(kvx_worker_t *worker)
{
	kvx_wlayers_t *l = &worker->gpu->layers;
	const uint32_t all = count_wanted(worker);

	if (!can_send_layers(worker) || !plan_ranges(l, worker->groups[0].paged.layers)) {
		return 0;
	}
	l->ordered = 0;
	l->layers_named = 0;
	memset(l->named, 0, worker->groups[0].paged.layers);
	l->last[0].batch = NULL;
	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		load->ranges = l->count;
		load->batch_total_blocks = all;
		atomic_store(&load->remaining, atomic_load(&load->remaining) * l->count);
	}
	split_whole_blocks(worker);

	return 1;
}

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

/* The copy engine moves a large load faster than kernels do, but what an engine copies in before it computes queues
 * behind all that the copy engine has. So an asynchronous load is given to it in small jobs; small loads, which come
 * beside many steps, go by kernels (docs/decisions/018). */
static int is_large(const kvx_wgpu_t *gpu, const kvx_wload_t *load)
{
	uint64_t bytes = 0;

	for (uint32_t p = 0; p < load->parts; p++) {
		bytes += load->part[p].n * load->part[p].group->block_bytes;
	}

	return bytes >= gpu->large_load;
}

/* Submit the blocks and layers that the batch names of its load. BUSY: not now. The load counts the batch as active
 * until it is complete. Lock held. */
static kvc_status_t submit_batch(kvx_worker_t *worker, kvx_gpu_batch_t *batch)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvx_wload_t *load = batch->of.load;
	kvx_wpart_t *part = batch->of.part;
	const uint32_t moves = kvx_wbatch_prepare(worker, &batch->of, gpu->moves, gpu->expected);
	const int async = batch->lane == KVX_LANE_ASYNC;
	const kvk_gpu_copy_t copy = {.dir = KVK_GPU_SCATTER,
				     .way = async && !is_large(gpu, load) ? KVK_GPU_ZERO_COPY : KVK_GPU_AUTO,
				     .layout = part->layout,
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

/* Blocks of a batch. */
static uint32_t most_blocks(const kvx_wgpu_t *gpu, const kvx_wload_t *load, const kvx_wpart_t *part)
{
	uint32_t blocks = is_large(gpu, load) ? gpu->large_batch : gpu->async_batch;

	if (part->mem != KVX_HOST_MEM) {
		blocks = gpu->async_batch * KVX_GPU_NEAR_SPEED;
	}

	return (load->flags & KVX_MSG_ASYNC) && blocks < gpu->sync_batch ? blocks : gpu->sync_batch;
}

/* Send a batch of the part, if there is one and a batch is free: how many blocks. Lock held. */
static uint32_t send_part(kvx_worker_t *worker, kvx_wload_t *load, kvx_wpart_t *part, const kvx_wpass_t *pass)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvx_wlayers_t *l = &gpu->layers;
	const int async = (load->flags & KVX_MSG_ASYNC) != 0;
	kvx_gpu_batch_t *batch = kvx_gpu_batch_find(gpu, async ? KVX_LANE_ASYNC : KVX_LANE_SYNC);
	const uint32_t most = most_blocks(gpu, load, part);
	kvx_wbatch_t of = {.load = load, .part = part, .ranges = load->ranges};
	kvc_status_t status;

	/* A synchronous load would wait for all that is in flight (docs/decisions/018). */
	if (batch && !(async && gpu->async_blocks_in_flight > most)) {
		of.count = kvx_wpart_take(part, part_end(part, pass), most, &of.first);
	}
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
	if (!plan_layers(worker)) {
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

/* ---- loads of a prefetched step (docs/decisions/016) --------------------------------------------- */

void kvx_gpu_prefetch_loads(kvx_worker_t *worker, int layers)
{
	kvx_wgpu_t *gpu = worker->gpu;

	gpu->prefetched = 1;
	gpu->layers.count = 0;
	if (!start_sync_loads(worker)) {
		return;
	}
	gpu->presend_layers = layers;
	gpu->presend_until_ns = end_of_wait(worker);
	atomic_store(&gpu->presend, KVX_PRESEND_ASKED);
	kvx_transfer_wake(worker);
}

uint32_t kvx_gpu_send_prefetched(kvx_worker_t *worker, uint64_t now)
{
	kvx_wgpu_t *gpu = worker->gpu;
	uint32_t state = KVX_PRESEND_ASKED;
	int there;

	if (atomic_load_explicit(&gpu->presend, memory_order_relaxed) != KVX_PRESEND_ASKED ||
	    !atomic_compare_exchange_strong(&gpu->presend, &state, KVX_PRESEND_BUSY)) {
		return 0;
	}
	there = check_ready(worker);
	if (there == 0 && now < gpu->presend_until_ns) {
		atomic_store(&gpu->presend, KVX_PRESEND_ASKED);
		worker->polls_soon = 1;
		return 0;
	}
	if (there <= 0 || !gpu->presend_layers || !send_layers(worker)) {
		while (send_some(worker, NULL) > 0) {
		}
	}
	atomic_store(&gpu->presend, KVX_PRESEND_DONE);
	kvx_gate_open(&worker->progress);

	return 1;
}

/* The loads of the step are the engine's thread's. 1: a prefetch has sent them, but for blocks that were not ready. */
static int take_prefetched(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;
	uint32_t spins = 0;

	for (;;) {
		const uint32_t seen = kvx_gate_read(&worker->progress);
		uint32_t state = atomic_load(&gpu->presend);

		if (state != KVX_PRESEND_BUSY &&
		    atomic_compare_exchange_strong(&gpu->presend, &state, KVX_PRESEND_NONE)) {
			return state == KVX_PRESEND_DONE;
		}
		kvx_gate_pause(&worker->progress, seen, &spins, NAP_NS);
	}
}

void kvx_gpu_cancel_prefetch(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;

	if (!gpu->prefetched) {
		return;
	}
	(void)take_prefetched(worker);
	gpu->prefetched = 0;
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
	const int sent = take_prefetched(worker), started = gpu->prefetched || start_sync_loads(worker);
	int layered;

	gpu->prefetched = 0;
	if (sent) {
		layered = layers && gpu->layers.count > 0;
	} else {
		layered = started && layers && send_layers(worker);
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

/* ---- layers that the engine awaits ----------------------------------------------------------------------- */

/* What the engine enqueues from now on comes after ranges [0, r]. 0: the driver refuses, or there are untracked copies.
 */
static int order_range(kvx_worker_t *worker, uint32_t r)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvx_gpu_batch_t *batch = gpu->layers.last[r].batch;
	int ordered = 1;

	(void)pthread_mutex_lock(&gpu->lock);
	if (atomic_load(&gpu->untracked_copies)) {
		ordered = 0;
	} else if (batch && batch->job && batch->serial == gpu->layers.last[r].serial) {
		ordered = kvk_gpu_order_after_job(batch->job, gpu->compute) == KV_OK;
	}
	(void)pthread_mutex_unlock(&gpu->lock);

	return ordered;
}

/* 0: the host has to wait. */
static int order_all(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;

	gpu->layers.ordered = gpu->layers.count;
	if (kvx_gpu_order_streams(worker, gpu->load_sync_stream, gpu->compute)) {
		return 1;
	}
	atomic_store(&gpu->untracked_copies, 1u);

	return 0;
}

/* The engine has read layers, of the first `layers`, without awaiting them. */
static void fail_skipped_layers(kvx_worker_t *worker, uint32_t layers)
{
	kvx_wlayers_t *l = &worker->gpu->layers;

	l->disabled = 1;
	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		load->layer_skipped = 1;
		kvx_stat_add(&worker->stats.layers_skipped, 1);
	}
	kv_log(KV_LOG_WARN, "kvx",
	       "the engine has read %u of %u layers without saying so: the step's loads count as failed, loads come "
	       "whole from now on",
	       layers - l->layers_named, layers);
}

int kvx_layers_await(kvx_worker_t *worker, uint32_t layer)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvx_wlayers_t *l = &gpu->layers;
	uint32_t r;

	if (gpu->prefetched || l->count == 0) {
		return 1;
	}
	if (layer < worker->groups[0].paged.layers && !l->named[layer]) {
		l->named[layer] = 1;
		l->layers_named++;
	}
	r = range_of(l, layer);
	if (r < l->ordered) {
		return 1;
	}
	if (order_range(worker, r)) {
		l->ordered = r + 1;
		return 1;
	}
	if (order_all(worker)) {
		return 1;
	}
	if (l->layers_named <= layer) { /* not all before this one were named, and what reads them has not waited */
		fail_skipped_layers(worker, layer + 1);
	}
	l->count = 0;

	return 0;
}

void kvx_layers_close(kvx_worker_t *worker)
{
	kvx_wlayers_t *l = &worker->gpu->layers;
	const uint32_t layers = worker->groups[0].paged.layers;

	if (l->count == 0) {
		return;
	}
	if (l->ordered < l->count) {
		(void)order_all(worker);
	}
	l->count = 0;
	if (l->layers_named < layers) {
		fail_skipped_layers(worker, layers);
	}
}
