/* Way STAGED: the copy engine between the pool and a ring in the device's memory, a kernel between the ring and the cache.
 *
 * Each direction has a ring of slots with a stream of its own each. A step takes the next slot: its copies and its kernel go to the slot's stream, so that
 * the steps of neighbouring slots overlap and those of one slot follow each other, whichever job they belong to. The slots wait for the caller's
 * stream before the first step, and the caller's stream for the slots after the last. */
#include "gpu_internal.h"

#define SLOT_GRAIN UINT64_C(256)

/* A copy under way: the same for all of its steps. */
typedef struct stage {
	kvk_gpu_t *gpu;
	kvk_gpu_ring_t *ring;
	const kvk_gpu_plan_t *plan;
	const kvk_gpu_job_t *job;
	uint64_t base_bits;
	int used[KVK_GPU_SLOTS]; /* slots that wait for the caller's stream already */
} stage_t;

/* Blocks [first, first + count), layers [layer, layer + layers) of the range. */
typedef struct step {
	uint32_t first, count;
	uint32_t layer, layers;
	uint32_t row; /* of job->moves */
	uint64_t block_bytes;
	kvk_gpu_slot_t *slot;
} step_t;

/* ---- the rings --------------------------------------------------------------------------------------------------- */

uint64_t kvk_gpu_ring_slot_bytes(const kvk_gpu_t *gpu)
{
	return gpu->ring_bytes / 2 / KVK_GPU_SLOTS / SLOT_GRAIN * SLOT_GRAIN;
}

void kvk_gpu_rings_init(kvk_gpu_t *gpu)
{
	for (int dir = 0; dir < 2; dir++) {
		pthread_mutex_init(&gpu->rings[dir].lock, NULL);
	}
}

static void drop_ring(kvk_gpu_t *gpu, kvk_gpu_ring_t *ring)
{
	for (uint32_t i = 0; i < KVK_GPU_SLOTS; i++) {
		kvk_gpu_slot_t *slot = &ring->slots[i];

		if (slot->stream) {
			KVK_GPU_CALL(gpu, stream_destroy, slot->stream);
		}
		if (slot->done) {
			KVK_GPU_CALL(gpu, event_destroy, slot->done);
		}
	}
	if (ring->start) {
		KVK_GPU_CALL(gpu, event_destroy, ring->start);
	}
	if (ring->memory) {
		KVK_GPU_CALL(gpu, mem_free, ring->memory);
	}
}

void kvk_gpu_rings_fini(kvk_gpu_t *gpu)
{
	for (int dir = 0; dir < 2; dir++) {
		if (atomic_load(&gpu->rings[dir].state) > 0) {
			drop_ring(gpu, &gpu->rings[dir]);
		}
		pthread_mutex_destroy(&gpu->rings[dir].lock);
	}
}

static kv_status_t make_ring(kvk_gpu_t *gpu, kvk_gpu_ring_t *ring)
{
	kv_status_t status;

	ring->slot_bytes = kvk_gpu_ring_slot_bytes(gpu);
	status = KVK_GPU_CALL(gpu, mem_alloc, &ring->memory, ring->slot_bytes * KVK_GPU_SLOTS);
	if (status != KV_OK) {
		ring->memory = 0;
		return status;
	}
	status = KVK_GPU_CALL(gpu, event_create, &ring->start, KVK_CU_EVENT_NO_TIME);
	if (status != KV_OK) {
		ring->start = NULL;
	}
	for (uint32_t i = 0; i < KVK_GPU_SLOTS && status == KV_OK; i++) {
		kvk_gpu_slot_t *slot = &ring->slots[i];

		slot->at = ring->memory + i * ring->slot_bytes;
		status = KVK_GPU_CALL(gpu, stream_create, &slot->stream, KVK_CU_STREAM_OWN, KVK_CU_PRIORITY_HIGH);
		if (status != KV_OK) {
			slot->stream = NULL;
			break;
		}
		status = KVK_GPU_CALL(gpu, event_create, &slot->done, KVK_CU_EVENT_NO_TIME);
		if (status != KV_OK) {
			slot->done = NULL;
		}
	}

	return status;
}

int kvk_gpu_ring_ready(kvk_gpu_t *gpu, kvk_gpu_dir_t dir)
{
	kvk_gpu_ring_t *ring = &gpu->rings[dir];

	if (atomic_load(&ring->state) == 0) {
		pthread_mutex_lock(&ring->lock);
		if (atomic_load(&ring->state) == 0 && make_ring(gpu, ring) == KV_OK) {
			atomic_store(&ring->state, 1);
		} else if (atomic_load(&ring->state) == 0) {
			kv_logf(gpu->env, KV_LOG_WARN, "gpu",
				"no ring in device memory: whole blocks go over the link by kernels device %d why %s",
				gpu->ordinal, kvk_gpu_why());
			drop_ring(gpu, ring);
			atomic_store(&ring->state, -1);
		}
		pthread_mutex_unlock(&ring->lock);
	}

	return atomic_load(&ring->state) > 0;
}

/* ---- one step ---------------------------------------------------------------------------------------------------- */

/* Bytes that lie together on both sides, not enqueued yet. */
typedef struct run {
	uint64_t pool, ring, bytes;
} run_t;

static kv_status_t copy_run(const stage_t *s, const step_t *step, const run_t *run)
{
	if (run->bytes == 0) {
		return KV_OK;
	}
	if (s->plan->copy->dir == KVK_GPU_SCATTER) {
		return KVK_GPU_CALL(s->gpu, copy_async, run->ring, run->pool, run->bytes, step->slot->stream);
	}

	return KVK_GPU_CALL(s->gpu, copy_async, run->pool, run->ring, run->bytes, step->slot->stream);
}

/* Between the pool and the slot, where all layers of a step and all heads lie behind each other. */
static kv_status_t copy_blocks(const stage_t *s, const step_t *step)
{
	const kvk_gpu_args_t *args = &s->plan->args;
	const uint64_t piece = step->layers * args->page_bytes;
	const uint64_t pool_first = args->pool_first + step->layer * args->page_bytes;
	uint64_t ring = step->slot->at;
	run_t run = {0};

	for (uint32_t i = 0; i < step->count; i++) {
		const uint64_t pool = s->job->moves[step->first + i].pool + pool_first;

		for (uint32_t head = 0; head < args->heads; head++, ring += piece) {
			const uint64_t from = pool + head * args->pool_head;
			kv_status_t status;

			if (run.bytes > 0 && from == run.pool + run.bytes) {
				run.bytes += piece;
				continue;
			}
			status = copy_run(s, step, &run);
			if (status != KV_OK) {
				return status;
			}
			run = (run_t){from, ring, piece};
		}
	}

	return copy_run(s, step, &run);
}

/* Between the slot and the cache. */
static kv_status_t permute(const stage_t *s, const step_t *step)
{
	const kvk_gpu_job_t *job = s->job;
	const uint64_t row = (uint64_t)step->row * job->count + step->first;
	kvk_gpu_args_t args = s->plan->args;

	for (uint32_t i = 0; i < step->count; i++) {
		job->moves[row + i] = (kvk_gpu_move_t){.pool = step->slot->at + i * step->block_bytes,
						       .block = job->moves[step->first + i].block};
	}
	args.moves = job->moves_at + row * sizeof(kvk_gpu_move_t);
	args.bases = job->bases_at + step->layer * sizeof(uint64_t);
	if (job->leaves_at) {
		const uint64_t leaf =
			((uint64_t)step->first * args.heads * args.cache_layers + step->layer) * args.pieces;

		args.leaves = job->leaves_at + leaf * sizeof(uint64_t);
		args.bad = job->bad_at + step->first * sizeof(uint32_t);
	}
	args.count = step->count;
	args.layers = step->layers;
	args.pool_first = 0;
	args.pool_head = step->layers * args.page_bytes;

	return kvk_gpu_launch(s->gpu, s->plan, &args, s->base_bits | step->slot->at | step->block_bytes,
			      step->slot->stream);
}

static kv_status_t do_step(stage_t *s, step_t *step)
{
	const uint32_t turn = s->ring->turn++ % KVK_GPU_SLOTS;
	kv_status_t status = KV_OK;

	step->slot = &s->ring->slots[turn];
	if (!s->used[turn]) {
		status = KVK_GPU_CALL(s->gpu, stream_wait, step->slot->stream, s->ring->start, 0);
		if (status != KV_OK) {
			return status;
		}
		s->used[turn] = 1;
	}
	if (s->plan->copy->dir == KVK_GPU_SCATTER) {
		status = copy_blocks(s, step);
		return status == KV_OK ? permute(s, step) : status;
	}
	status = permute(s, step);

	return status == KV_OK ? copy_blocks(s, step) : status;
}

/* ---- all of them ------------------------------------------------------------------------------------------------- */

static kv_status_t do_steps(stage_t *s)
{
	const kvk_gpu_plan_t *plan = s->plan;
	const kvk_gpu_args_t *args = &plan->args;
	kv_status_t status = KV_OK;

	for (uint32_t row = 0; row < plan->staged_steps; row++) {
		step_t step = {.layer = row * plan->staged_layers, .row = 1 + row};
		uint32_t fit;

		step.layers = args->layers - step.layer;
		step.layers = step.layers < plan->staged_layers ? step.layers : plan->staged_layers;
		step.block_bytes = (uint64_t)args->heads * step.layers * args->page_bytes;
		fit = (uint32_t)(s->ring->slot_bytes / step.block_bytes);
		while (step.first < args->count && status == KV_OK) {
			step.count = args->count - step.first < fit ? args->count - step.first : fit;
			status = do_step(s, &step);
			step.first += step.count;
		}
		if (status != KV_OK) {
			break;
		}
	}

	return status;
}

/* The caller's stream goes on after the slots. */
static kv_status_t join_slots(const stage_t *s)
{
	kv_status_t status = KV_OK;

	for (uint32_t i = 0; i < KVK_GPU_SLOTS; i++) {
		const kvk_gpu_slot_t *slot = &s->ring->slots[i];

		if (s->used[i] && (KVK_GPU_CALL(s->gpu, event_record, slot->done, slot->stream) != KV_OK ||
				   KVK_GPU_CALL(s->gpu, stream_wait, s->plan->copy->stream, slot->done, 0) != KV_OK)) {
			status = KV_ERR_IO;
		}
	}

	return status;
}

kv_status_t kvk_gpu_stage(kvk_gpu_t *gpu, const kvk_gpu_plan_t *plan, kvk_gpu_job_t *job)
{
	kvk_gpu_ring_t *ring = &gpu->rings[plan->copy->dir];
	stage_t s = {.gpu = gpu, .ring = ring, .plan = plan, .job = job};
	kv_status_t status;

	for (uint32_t l = 0; l < job->layers; l++) {
		s.base_bits |= job->bases[l];
	}
	pthread_mutex_lock(&ring->lock);
	status = KVK_GPU_CALL(gpu, event_record, ring->start, plan->copy->stream);
	if (status == KV_OK) {
		status = do_steps(&s);
		if (join_slots(&s) != KV_OK) {
			job->lost = 1; /* its event would not tell of the slots' work */
			status = KV_ERR_IO;
		}
	}
	pthread_mutex_unlock(&ring->lock);

	return status;
}
