/* One batch of a load into GPU memory. Its verdict is known when it completes: the digests the device has compared, and
 * the lease, which must still be valid after all bytes have arrived. */
#include "worker/cuda/load_batch.h"
#include "worker/cuda/batch.h"
#include "worker/cuda/timers.h"
#include "worker/host/move.h"
#include "worker/jobs/load.h"

#define SPINS    4000u
#define NAP_NS   UINT64_C(100000)
#define GRACE_NS UINT64_C(20000000) /* past its deadline the engine ends a load itself */

/* The group has all layers, so its expected leaves are those of the block and need no copy. */
static void expect_in_place(const kvx_worker_t *worker, const kvx_wpart_t *part, const kvx_source_t *source,
			    kvk_move_t *move)
{
	const uint64_t *leaves = source->leaves + (size_t)part->group->paged.first_head * worker->geometry.leaves;

	move->data = (void *)(uintptr_t)source->data; /* scatter only reads both */
	move->leaves = (uint64_t *)(uintptr_t)leaves;
}

/* The moves of blocks [first, first + count) that are wanted: how many. */
static uint32_t prepare_moves(const kvx_worker_t *worker, const kvx_wpart_t *part, uint32_t first, uint32_t count)
{
	kvx_wgpu_t *gpu = worker->gpu;
	uint32_t n = 0;

	for (uint32_t i = first; i < first + count; i++) {
		if (part->ids[i] == KVX_NO_BLOCK) {
			continue;
		}
		if (part->group->paged.layers == worker->layout.layers) {
			expect_in_place(worker, part, &part->sources[i], &gpu->moves[n]);
		} else {
			kvx_move_prepare(worker, part->group, &part->sources[i], &gpu->moves[n],
					 gpu->expected + (size_t)n * worker->words);
		}
		gpu->moves[n++].block = part->ids[i];
	}

	return n;
}

/* `count` more blocks of the load are done. */
static void count_done(kvx_worker_t *worker, kvx_wload_t *load, uint32_t count)
{
	if (atomic_fetch_sub(&load->remaining, count) == count) {
		kvx_wload_close(worker, load, KVC_OK);
	}
}

static void complete_load(kvx_worker_t *worker, kvx_gpu_batch_t *batch, kvc_status_t status)
{
	kvx_wload_t *load = batch->load;
	kvx_wpart_t *part = batch->part;
	const kvk_paged_t *paged = &part->group->paged;
	const kvc_status_t after = kvc_lease_state(part->lease);
	const kvc_status_t verdict = after != KVC_OK ? after : status;
	uint32_t good = 0, move = 0;

	if (verdict == KVC_OK || verdict == KVC_ERR_CORRUPT) {
		for (uint32_t i = batch->first; i < batch->first + batch->count; i++) {
			if (part->ids[i] == KVX_NO_BLOCK) {
				continue;
			}
			if (status == KVC_ERR_CORRUPT && kvk_gpu_move_is_bad(batch->job, move)) {
				part->results[i] = KVX_BLOCK_BAD;
			} else {
				part->ranges_done[i] = (uint8_t)(part->ranges_done[i] + batch->ranges);
				part->results[i] =
					part->ranges_done[i] == load->ranges ? KVX_BLOCK_GOOD : part->results[i];
				good += part->ranges_done[i] == load->ranges;
			}
			move++;
		}
		atomic_fetch_add(&load->verified, good);
		atomic_fetch_add(&load->bytes,
				 (uint64_t)good * paged->heads * paged->layers * worker->geometry.page_bytes);
	}
	if (verdict == KVC_OK) {
		count_done(worker, load, batch->count * batch->ranges);
	} else {
		kvx_wload_close(worker, load, verdict);
	}
	atomic_fetch_sub(&load->active, 1u);
}

/* Blocks of the part that come whole after this batch. */
static uint32_t blocks_behind(const kvx_wload_t *load, const kvx_wpart_t *part, const kvx_gpu_batch_t *batch)
{
	const uint32_t end = load->batch_total_blocks ? part->whole_blocks : part->n, at = batch->first + batch->count;

	return batch->layers || end < at ? 0 : end - at;
}

/* Asynchronous loads are copied by kernels: the engine's own input copies would queue behind them in the copy engine.
 */
kvc_status_t kvx_gpu_load_submit_batch(kvx_worker_t *worker, kvx_gpu_batch_t *batch)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvx_wload_t *load = batch->load;
	kvx_wpart_t *part = batch->part;
	const uint32_t moves = prepare_moves(worker, part, batch->first, batch->count);
	const int async = (load->flags & KVX_MSG_ASYNC) != 0;
	const kvk_gpu_copy_t copy = {.dir = KVK_GPU_SCATTER,
				     .way = async ? KVK_GPU_ZERO_COPY : KVK_GPU_AUTO,
				     .layout = load->layout,
				     .paged = &part->group->paged,
				     .layer = batch->layer,
				     .layers = batch->layers,
				     .moves = gpu->moves,
				     .count = moves,
				     .of = part->n,
				     .rest = blocks_behind(load, part, batch),
				     .ready = 1, /* leased: no writer touches it */
				     .stream = async ? gpu->load_async_stream : gpu->load_sync_stream};
	kvc_status_t status = kvc_lease_state(part->lease);

	batch->lane = async ? KVX_LANE_ASYNC : KVX_LANE_SYNC;
	batch->done = complete_load;
	if (status != KVC_OK) {
		return status;
	}
	if (moves == 0) {
		count_done(worker, load, batch->count * batch->ranges);
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

void kvx_gpu_load_wait(kvx_worker_t *worker, uint32_t seen, uint32_t *p_spins)
{
	const uint64_t now = kvx_worker_now_ns();

	if (kvx_gpu_complete_batches(worker) > 0) {
		*p_spins = 0;
		return;
	}
	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		if (now >= load->deadline_ns + GRACE_NS) {
			kvx_wload_close(worker, load, KVC_ERR_TIMEOUT);
		}
	}
	if ((*p_spins)++ < SPINS) {
		kvx_cpu_relax();
	} else {
		kvx_gate_wait(&worker->progress, seen, NAP_NS);
	}
}
