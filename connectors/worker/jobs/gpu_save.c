/* Saves out of GPU memory, and fences. A block is taken and submitted under one lock, so that a fence finds it waiting
 * or in flight, never between (docs/decisions/011).
 *
 * A gather is right only if no kernel writes its source meanwhile: the engine's next kernels are ordered after it on
 * the device. If the driver refuses that order, the batch is poisoned and counts for nothing, because its digests would
 * be right whatever it has read. */
#include "worker/jobs/gpu_save.h"
#include "worker/cuda/device.h"
#include "worker/cuda/pool_memory.h"
#include "worker/jobs/save.h"

#define STAGE_SMS 64u /* of a staged save's kernels */
#define STAGED_LEAST                                                                                                   \
	(UINT64_C(256) << 10) /* contiguous bytes in the pool from which on the copy engine is worth its calls */

/* ---- submitting ------------------------------------------------------------------------------ */

/* Add waiting blocks of the save: those of the fence, or from the first on. Not OK: why the next one cannot be copied
 * now, or ever. */
static kvc_status_t add_blocks(kvx_worker_t *worker, kvx_gpu_batch_t *batch, kvx_wsave_t *save, int fence)
{
	for (uint32_t i = fence ? 0 : save->at; i < save->n && batch->n < worker->gpu->save_batch; i++) {
		kvk_move_t *move = &worker->gpu->moves[batch->n];
		kvc_status_t status;

		if (atomic_load(&save->state[i]) != KVX_MARK_WAITING ||
		    (fence && !kvx_wsave_is_fenced(worker, save, i))) {
			continue;
		}
		status = kvx_wsave_begin_block(worker, save, i, &move->data);
		if (status == KVC_ALREADY) {
			continue;
		}
		if (status != KVC_OK) {
			return status;
		}
		move->block = save->ids[i];
		move->leaves = batch->leaves + (size_t)batch->n * worker->words;
		batch->saves[batch->n] = save;
		batch->index[batch->n++] = i;
	}

	return KVC_OK;
}

static int is_later(uint32_t point, uint32_t than)
{
	return (int32_t)(point - than) > 0;
}

/* One step saves many puts, some of one block: the batch takes blocks of the puts behind this one too, but not of a
 * later step: it would wait for that. What cannot be added waits for its own turn. */
static void add_other_saves(kvx_worker_t *worker, kvx_gpu_batch_t *batch, const kvx_wsave_t *save)
{
	for (kvx_wjob_t *job = save->job.next_run; job && batch->n < worker->gpu->save_batch; job = job->next_run) {
		kvx_wsave_t *other = (kvx_wsave_t *)job;

		if (job->kind == KVX_WJOB_SAVE && other->group == save->group && other->layout == save->layout &&
		    !is_later(other->point, save->point) && atomic_load(&other->imported) == KVC_OK &&
		    !atomic_load(&other->dropped) && !atomic_load(&other->closed)) {
			(void)add_blocks(worker, batch, other, 0);
		}
	}
}

/* The blocks of the batch are dropped, or wait again. */
static void return_blocks(kvx_worker_t *worker, kvx_gpu_batch_t *batch, int give_up)
{
	for (uint32_t m = 0; m < batch->n; m++) {
		if (give_up) {
			kvx_wsave_end_block(worker, batch->saves[m], batch->index[m], NULL);
		} else {
			kvx_wsave_return_block(batch->saves[m], batch->index[m]);
		}
	}
}

/* SMs of a copy; 0: the device's choice, all of them inside its memory. A copy there takes as many bytes of it whatever
 * the SMs. On few it takes long, and an engine's kernels wait for their slowest SM all the time; on all it holds the
 * step up for a short time (decisions 058, 063). */
static uint32_t choose_sms(const kvx_worker_t *worker, const kvx_wsave_t *save, int fence)
{
	return fence || save->mem != KVX_HOST_MEM ? 0 : worker->gpu->save_sms;
}

/* A save has time, but it runs while the engine computes, and a matrix product waits for its slowest SM: a copy on a
 * few SMs costs it far more than their share. While the device computes prompts, the copy engine takes the bytes over
 * the link, and kernels on many SMs bring them to it, each in a short time (docs/decisions/012). Steps of single tokens
 * wait for memory: there one kernel on few SMs that reads the cache once and writes the pool disturbs them least. */
static kvk_gpu_way_t choose_way(const kvx_worker_t *worker, const kvx_wsave_t *save)
{
	const kvk_paged_t *paged = &save->group->saved;
	const uint64_t run = (uint64_t)paged->layers * save->group->geometry.page_bytes *
			     (paged->layers == save->group->layout.layers ? paged->heads : 1u);

	if (save->mem != KVX_HOST_MEM) {
		return KVK_GPU_AUTO;
	}
	if (!kvx_gpu_computes_prompts(worker->gpu)) {
		return KVK_GPU_ZERO_COPY;
	}

	return run >= STAGED_LEAST ? KVK_GPU_STAGED : KVK_GPU_AUTO;
}

static kvx_save_lane_t *lane_of(kvx_worker_t *worker, const kvx_wsave_t *save)
{
	return &worker->gpu->saves[save->mem != KVX_HOST_MEM];
}

static void complete_saves(kvx_worker_t *worker, kvx_gpu_batch_t *batch, kvc_status_t status)
{
	const int good = status == KVC_OK && !batch->poisoned;

	if (batch->lane != KVX_LANE_FENCE) {
		atomic_fetch_sub(&lane_of(worker, batch->saves[0])->bytes_in_flight,
				 batch->n * (uint64_t)batch->saves[0]->group->geometry.block_bytes);
	}
	for (uint32_t m = 0; m < batch->n; m++) {
		kvx_wsave_end_block(worker, batch->saves[m], batch->index[m],
				    good ? batch->leaves + (size_t)m * worker->words : NULL);
	}
	kvx_stat_add(&worker->stats.save_ns, kvx_worker_now_ns() - batch->begin_ns);
}

/* The stream's next copies come after the step that has computed the save's blocks, and not after those that the engine
 * has enqueued since: it is far ahead of the device. */
static kvc_status_t order_saves(const kvx_wgpu_t *gpu, kvx_save_lane_t *lane, const kvx_wsave_t *save)
{
	if (is_later(save->point, lane->point_reached)) {
		const kvc_status_t status =
			(kvc_status_t)kvk_gpu_clock_await(gpu->point[save->point % KVX_GPU_POINTS], lane->stream);

		if (status != KVC_OK) {
			return status;
		}
		lane->point_reached = save->point;
	}

	return KVC_OK;
}

/* Submit one batch of waiting blocks of the save, those of the fence or from the first on: *p_sent blocks. Lock held.
 * PENDING: no batch is free, or the driver has no job; else why a block cannot be copied now, or ever. */
static kvc_status_t send_batch(kvx_worker_t *worker, kvx_wsave_t *save, int fence, uint32_t *p_sent)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvx_save_lane_t *lane = lane_of(worker, save);
	kvx_gpu_batch_t *batch = kvx_gpu_batch_find(gpu, fence                       ? KVX_LANE_FENCE
							 : save->mem == KVX_HOST_MEM ? KVX_LANE_SAVE
										     : KVX_LANE_NEAR_SAVE);
	kvk_gpu_copy_t copy = {.dir = KVK_GPU_GATHER,
			       .layout = save->layout,
			       .paged = &save->group->saved,
			       .moves = gpu->moves,
			       .way = fence ? KVK_GPU_AUTO : choose_way(worker, save),
			       .sms = choose_sms(worker, save, fence),
			       .stage_sms = STAGE_SMS,
			       .stream = fence ? gpu->compute : lane->stream};
	kvc_status_t status, sent;

	*p_sent = 0;
	if (!batch) {
		return KVC_PENDING;
	}
	batch->done = complete_saves;
	batch->n = 0;
	status = add_blocks(worker, batch, save, fence);
	if (status == KVC_OK && !fence) {
		add_other_saves(worker, batch, save);
	}
	if (batch->n > 0) {
		copy.count = batch->n;
		sent = fence ? KVC_OK : order_saves(gpu, lane, save);
		sent = sent == KVC_OK ? kvx_gpu_batch_submit(worker, batch, &copy) : sent;
		*p_sent = sent == KVC_OK ? batch->n : 0;
		atomic_fetch_add(&lane->bytes_in_flight,
				 fence ? 0u : *p_sent * (uint64_t)save->group->geometry.block_bytes);
		if (sent != KVC_OK) {
			return_blocks(worker, batch, sent != KVC_ERR_BUSY);
			status = sent == KVC_ERR_BUSY ? KVC_PENDING : sent;
		}
	}

	return status;
}

/* ---- the transfer thread --------------------------------------------------------------------- */

/* Register the memory of the next blocks, at least of the first one: blocks before refused memory can be copied. */
static kvc_status_t register_next(kvx_worker_t *worker, const kvx_wsave_t *save)
{
	kvc_status_t status = KVC_OK;
	uint32_t looked = 0;

	for (uint32_t i = save->at; i < save->n && looked < worker->gpu->save_batch && status == KVC_OK; i++) {
		void *data = NULL;

		if (atomic_load(&save->state[i]) != KVX_MARK_WAITING) {
			continue;
		}
		if (kvc_put_block(save->put, i, &data) == KVC_OK) {
			status = kvx_pool_memory_register(worker, data, save->group->geometry.block_bytes);
		}
		looked++;
	}

	return status == KVC_ERR_BUSY && looked > 1 ? KVC_OK : status;
}

/* Nobody waits for what is saved in memory of a GPU because it was used twice: while the engine computes, its kernels
 * get that memory (decision 063). */
static int has_pace(const kvx_worker_t *worker, const kvx_wsave_t *save, uint64_t now)
{
	return save->mem != KVX_HOST_MEM && !save->urgent && now < atomic_load(&worker->gpu->busy_until_ns);
}

/* A batch that is sent up to its own time late makes the next one no later. */
static void keep_pace(kvx_wgpu_t *gpu, uint64_t sent, uint64_t now)
{
	const double bytes = (double)sent;
	const uint64_t takes = (uint64_t)(bytes * 1e9 / (double)gpu->promote_rate);

	gpu->promote_ns = (now > gpu->promote_ns + takes ? now : gpu->promote_ns) + takes;
}

kvc_status_t kvx_gpu_send_save(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t *p_moved)
{
	kvx_wgpu_t *gpu = worker->gpu;
	const uint64_t now = kvx_worker_now_ns();
	const int paced = has_pace(worker, save, now);
	const uint64_t in_flight = atomic_load(&lane_of(worker, save)->bytes_in_flight);
	const int full = in_flight >= KVX_GPU_SAVE_AHEAD_BYTES * (save->urgent ? KVX_GPU_NEAR_SPEED : 1u);
	kvc_status_t status = full || (paced && now < gpu->promote_ns) ? KVC_PENDING : register_next(worker, save);

	*p_moved = 0;
	if (status == KVC_OK) {
		(void)pthread_mutex_lock(&gpu->lock);
		status = send_batch(worker, save, 0, p_moved);
		(void)pthread_mutex_unlock(&gpu->lock);
	}
	if (paced && *p_moved > 0) {
		keep_pace(gpu, *p_moved * (uint64_t)save->group->geometry.block_bytes, now);
	}
	if (status == KVC_PENDING) {
		worker->polls_soon = 1;
		status = KVC_OK;
	}

	return status;
}

/* ---- fences (engine's thread) ---------------------------------------------------------------- */

uint32_t kvx_gpu_send_fenced(kvx_worker_t *worker, kvx_wsave_t *save)
{
	uint32_t sent = 0;

	(void)pthread_mutex_lock(&worker->gpu->lock);
	(void)send_batch(worker, save, 1, &sent);
	(void)pthread_mutex_unlock(&worker->gpu->lock);
	if (sent == 0) {
		(void)kvx_gpu_complete_batches(worker);
	}

	return sent;
}

/* If the batch reads a block of the fence, what the engine enqueues from now on comes after it. */
static void order_batch(kvx_worker_t *worker, kvx_gpu_batch_t *batch)
{
	for (uint32_t m = 0; m < batch->n; m++) {
		if (kvx_wsave_is_fenced(worker, batch->saves[m], batch->index[m])) {
			if (kvk_gpu_order_after_job(batch->job, worker->gpu->compute) != KV_OK) {
				batch->poisoned = 1;
			}
			return;
		}
	}
}

void kvx_gpu_order_fenced(kvx_worker_t *worker)
{
	for (uint32_t i = KVX_GPU_LOADS; i < KVX_GPU_BATCHES; i++) {
		if (worker->gpu->batches[i].job) {
			order_batch(worker, &worker->gpu->batches[i]);
		}
	}
}
