/* Synchronous loads that come layer by layer (docs/decisions/012). All blocks of a layer range are sent before the next
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
#include "worker/cuda/layers.h"
#include "worker/cuda/device.h"
#include "worker/jobs/load.h"

#include "kv/log.h"

#include <string.h>

#define PARTS      5u /* the largest range has a fifth of the layers */
#define NAP_NS     UINT64_C(100000)
#define LOOKUP_NS  2000u /* of the transfer thread, when busy, to look up a block */
#define RATE_DECAY 64u   /* the best rate decays by this part with each load */

/* ---- which ranges ---------------------------------------------------------------------------- */

static void add_range(kvx_wlayers_t *l, uint32_t end)
{
	if (kv_holds(l->count < KVX_GPU_RANGES)) {
		l->end[l->count++] = end;
	}
}

/* 1, 2, 4, .. layers from both ends, then parts of what lies between. 0: they do not add up. */
static int plan_ranges(kvx_wlayers_t *l, uint32_t layers)
{
	const uint32_t most = layers / PARTS > 2 ? layers / PARTS : 2;
	uint32_t side[KVX_GPU_RANGES], sides = 0, left = layers, pieces, at = 0;

	for (uint32_t size = 1; size <= most && left >= 2 * size; size *= 2) {
		side[sides++] = size;
		left -= 2 * size;
	}
	l->count = 0;
	for (uint32_t i = 0; i < sides; i++) {
		at += side[i];
		add_range(l, at);
	}
	pieces = (left + most - 1) / most;
	for (uint32_t i = 0; i < pieces; i++) {
		at += left / pieces + (i < left % pieces ? 1u : 0u);
		add_range(l, at);
	}
	for (uint32_t i = sides; i > 0; i--) {
		at += side[i - 1];
		add_range(l, at);
	}

	return kv_holds(l->count > 0 && at == layers && l->end[l->count - 1] == layers);
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

/* If some blocks still have to be read from a disk, the others are better sent at once. */
int kvx_layers_await_blocks(kvx_worker_t *worker)
{
	const uint64_t looking = (uint64_t)count_wanted(worker) * LOOKUP_NS;
	const uint64_t until = kvx_worker_now_ns() + worker->gpu->layers.wait_ns + looking;
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

	return count_wanted(worker) * group->block_bytes >= l->least_bytes && kvx_layers_await_blocks(worker);
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

int kvx_layers_plan(kvx_worker_t *worker)
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

/* ---- the engine's side ----------------------------------------------------------------------- */

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

int kvx_layers_await(kvx_worker_t *worker, uint32_t layer)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvx_wlayers_t *l = &gpu->layers;
	uint32_t r;

	if (l->count == 0 || gpu->sync_loads_sent) {
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
	if (l->layers_named == layers) {
		return;
	}
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
