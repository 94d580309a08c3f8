/* Way STAGED: the copy engine between the pool and a ring in the device's memory, a kernel between the ring and the
 * cache.
 *
 * Each direction has a ring of slots and two lines, streams of its own: copies go to one, kernels to the other. A step
 * takes the next slot and has two halves, the copies and the kernel; which comes first is the direction. So the copy
 * engine has its next work before it has done the last, whatever the kernels do. A slot's events order its halves, and
 * the next step that takes it:
 *
 *     first half:  wait empty, work, record filled        second half:  wait filled, work, record empty
 *
 * The first halves wait for the caller's stream, and the caller's stream for both lines after the last step; of a
 * scatter whose blocks are ready, only kernels wait, so that one copy's blocks are on their way while the kernels of
 * the one before still run. Where nothing can run beside a half (the kernel of a scatter's last step, of a gather's
 * first) the steps are small. */
#include "stage.h"

#include "context.h"
#include "launch.h"
#include "memory.h"
#include "upload.h"

#define SLOT_GRAIN UINT64_C(256)
#define BATCH_MOST 256u /* copies in a call */

typedef enum line { COPIES, KERNELS } line_t;

/* A copy under way: the same for all of its steps. */
typedef struct stage {
	kvk_gpu_t *gpu;
	kvk_gpu_ring_t *ring;
	const kvk_gpu_plan_t *plan;
	const kvk_gpu_job_t *job;
	uint64_t base_bits;
	uint64_t inputs_at;        /* of the job, as kernels see it */
	int early;                 /* copies do not wait for the caller's stream */
	int used[KVK_GPU_LINES];   /* lines that have work of it */
	int waited[KVK_GPU_LINES]; /* lines that wait for the caller's stream */
	uint32_t turn;             /* after the last step */
} stage_t;

/* Blocks [first, first + count), layers [layer, layer + layers) of the range. */
typedef struct step {
	uint32_t first, count;
	uint32_t layer, layers;
	uint32_t row; /* of job->moves */
	uint32_t turn;
	uint64_t block_bytes;
	kvk_gpu_slot_t *slot;
} step_t;

/* ---- the rings ------------------------------------------------------------------------------- */

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

static void drop_event(kvk_gpu_t *gpu, kvk_cu_event_t *event)
{
	if (*event) {
		KVK_GPU_CALL(gpu, event_destroy, *event);
		*event = NULL;
	}
}

static void drop_ring(kvk_gpu_t *gpu, kvk_gpu_ring_t *ring)
{
	for (uint32_t i = 0; i < KVK_GPU_LINES; i++) {
		if (ring->lines[i].stream) {
			KVK_GPU_CALL(gpu, stream_destroy, ring->lines[i].stream);
			ring->lines[i].stream = NULL;
		}
		drop_event(gpu, &ring->lines[i].done);
	}
	for (uint32_t i = 0; i < KVK_GPU_SLOTS; i++) {
		drop_event(gpu, &ring->slots[i].filled);
		drop_event(gpu, &ring->slots[i].empty);
	}
	drop_event(gpu, &ring->start);
	if (ring->memory) {
		KVK_GPU_CALL(gpu, mem_free, ring->memory);
		ring->memory = 0;
	}
}

static void drop_rings(kvk_gpu_t *gpu)
{
	for (int dir = 0; dir < 2; dir++) {
		if (atomic_load(&gpu->rings[dir].state) > 0) {
			drop_ring(gpu, &gpu->rings[dir]);
		}
		atomic_store(&gpu->rings[dir].state, 0);
	}
}

void kvk_gpu_rings_fini(kvk_gpu_t *gpu)
{
	drop_rings(gpu);
	for (int dir = 0; dir < 2; dir++) {
		pthread_mutex_destroy(&gpu->rings[dir].lock);
	}
}

static kv_status_t make_event(kvk_gpu_t *gpu, kvk_cu_event_t *p_event)
{
	const kv_status_t status = KVK_GPU_CALL(gpu, event_create, p_event, KVK_CU_EVENT_NO_TIME);

	if (status != KV_OK) {
		*p_event = NULL;
	}

	return status;
}

static kv_status_t make_lines(kvk_gpu_t *gpu, kvk_gpu_ring_t *ring)
{
	/* Somebody waits for what is loaded; what is saved takes what others leave. */
	const int priority = ring == &gpu->rings[KVK_GPU_SCATTER] ? KVK_CU_PRIORITY_HIGH : KVK_CU_PRIORITY_LOW;
	kv_status_t status = KV_OK;

	for (uint32_t i = 0; i < KVK_GPU_LINES && status == KV_OK; i++) {
		kvk_gpu_line_t *line = &ring->lines[i];

		status = KVK_GPU_CALL(gpu, stream_create, &line->stream, KVK_CU_STREAM_OWN, priority);
		if (status != KV_OK) {
			line->stream = NULL;
			break;
		}
		status = make_event(gpu, &line->done);
	}

	return status;
}

static kv_status_t make_ring(kvk_gpu_t *gpu, kvk_gpu_ring_t *ring)
{
	kv_status_t status;

	ring->slot_bytes = kvk_gpu_ring_slot_bytes(gpu);
	ring->broken = 0;
	status = KVK_GPU_CALL(gpu, mem_alloc, &ring->memory, ring->slot_bytes * KVK_GPU_SLOTS);
	if (status != KV_OK) {
		ring->memory = 0;
		return status;
	}
	status = make_event(gpu, &ring->start);
	for (uint32_t i = 0; i < KVK_GPU_SLOTS && status == KV_OK; i++) {
		kvk_gpu_slot_t *slot = &ring->slots[i];

		slot->at = ring->memory + i * ring->slot_bytes;
		status = make_event(gpu, &slot->filled);
		status = status == KV_OK ? make_event(gpu, &slot->empty) : status;
	}

	return status == KV_OK ? make_lines(gpu, ring) : status;
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

/* ---- copies of a step ------------------------------------------------------------------------ */

/* Pieces that lie together on both sides, not enqueued yet. */
typedef struct batch {
	const stage_t *stage;
	kvk_cu_stream_t stream;
	int apart; /* the next one is a copy of its own */
	size_t count;
	kvk_cu_ptr_t dst[BATCH_MOST], src[BATCH_MOST];
	size_t bytes[BATCH_MOST];
} batch_t;

/* KV_ERR_UNSUPPORTED: there is no such call, or it does not take these. */
static kv_status_t flush_at_once(batch_t *b)
{
	kvk_gpu_t *gpu = b->stage->gpu;
	kvk_cu_copy_kind_t kind = {.order = KVK_CU_COPY_IN_ORDER, .flags = KVK_CU_COPY_BESIDE_WORK};
	size_t first = 0;
	int error;

	if (!gpu->cuda->copy_batch || b->count < 2 || atomic_load(&gpu->no_batch)) {
		return KV_ERR_UNSUPPORTED;
	}
	error = gpu->cuda->copy_batch(b->dst, b->src, b->bytes, b->count, &kind, &first, 1, b->stream);
	if (error == KVK_CU_INVALID || error == KVK_CU_NOT_SUPPORTED) {
		atomic_store(&gpu->no_batch, 1);
		kv_logf(gpu->env, KV_LOG_INFO, "gpu", "copies go one by one: cuMemcpyBatchAsync answered %d device %d",
			error, gpu->ordinal);
		return KV_ERR_UNSUPPORTED;
	}

	return kvk_gpu_result(gpu, offsetof(kvk_cuda_ops_t, copy_batch), error);
}

static kv_status_t flush(batch_t *b)
{
	kv_status_t status = flush_at_once(b);

	if (status == KV_ERR_UNSUPPORTED) {
		status = KV_OK;
		for (size_t i = 0; i < b->count && status == KV_OK; i++) {
			status = KVK_GPU_CALL(b->stage->gpu, copy_async, b->dst[i], b->src[i], b->bytes[i], b->stream);
		}
	}
	b->count = 0;

	return status;
}

static kv_status_t add_piece(batch_t *b, uint64_t pool, uint64_t ring, uint64_t bytes)
{
	const int in = b->stage->plan->copy->dir == KVK_GPU_SCATTER;
	const uint64_t dst = in ? ring : pool;
	const uint64_t src = in ? pool : ring;
	kv_status_t status = KV_OK;

	if (b->count > 0 && !b->apart && b->dst[b->count - 1] + b->bytes[b->count - 1] == dst &&
	    b->src[b->count - 1] + b->bytes[b->count - 1] == src) {
		b->bytes[b->count - 1] += bytes;
		return KV_OK;
	}
	if (b->count == BATCH_MOST) {
		status = flush(b);
	}
	b->dst[b->count] = dst;
	b->src[b->count] = src;
	b->bytes[b->count++] = bytes;
	b->apart = 0;

	return status;
}

/* May block i be copied together with the one before it? */
static int follows(const stage_t *s, uint32_t i)
{
	const uint8_t *before = s->job->asked[i - 1].data;
	const uint64_t bytes = s->plan->pool_bytes;

	return (const uint8_t *)s->job->asked[i].data == before + bytes && kvk_gpu_in_one(s->gpu, before, 2 * bytes);
}

/* Of each head all that the pool has, so of each block one piece. */
static kv_status_t copy_pieces(const stage_t *s, const step_t *step, kvk_cu_stream_t stream)
{
	const uint64_t piece = s->plan->args.heads * s->plan->args.pool_head;
	uint64_t ring = step->slot->at;
	kv_status_t status = KV_OK;
	batch_t batch;

	batch.stage = s;
	batch.stream = stream;
	batch.count = 0;
	for (uint32_t i = 0; i < step->count && status == KV_OK; i++) {
		batch.apart = i > 0 && !follows(s, step->first + i);
		status = add_piece(&batch, s->job->moves[step->first + i].pool + s->plan->args.pool_first, ring, piece);
		ring += piece;
	}

	return status == KV_OK ? flush(&batch) : status;
}

/* Of each head some layers: rows that lie as far from each other as heads do, also where a block follows another. */
static kv_status_t copy_rows(const stage_t *s, const step_t *step, kvk_cu_stream_t stream)
{
	const kvk_gpu_args_t *args = &s->plan->args;
	const uint64_t width = step->layers * args->page_bytes;
	const int joins = args->heads * args->pool_head == s->plan->pool_bytes;
	kvk_cu_side_t pool = {.type = KVK_CU_SIDE_ANY, .pitch = args->pool_head};
	kvk_cu_side_t ring = {.type = KVK_CU_SIDE_ANY, .pitch = width, .at = step->slot->at};
	kv_status_t status = KV_OK;
	uint32_t blocks;

	for (uint32_t i = 0; i < step->count && status == KV_OK; i += blocks) {
		const int in = s->plan->copy->dir == KVK_GPU_SCATTER;
		kvk_cu_rows_t rows = {.width = width};

		blocks = 1;
		while (joins && i + blocks < step->count && follows(s, step->first + i + blocks)) {
			blocks++;
		}
		pool.at = s->job->moves[step->first + i].pool + args->pool_first + step->layer * args->page_bytes;
		rows.height = (size_t)blocks * args->heads;
		rows.from = in ? pool : ring;
		rows.to = in ? ring : pool;
		status = KVK_GPU_CALL(s->gpu, copy_rows, &rows, stream);
		ring.at += rows.height * width;
	}

	return status;
}

/* Between the pool and the slot, where all layers of a step and all heads lie behind each other. */
static kv_status_t copy_blocks(const stage_t *s, const step_t *step, kvk_cu_stream_t stream)
{
	const kvk_gpu_args_t *args = &s->plan->args;

	return step->layers * args->page_bytes == args->pool_head ? copy_pieces(s, step, stream)
								  : copy_rows(s, step, stream);
}

/* ---- the kernel of a step -------------------------------------------------------------------- */

static uint64_t first_move(const stage_t *s, const step_t *step)
{
	return (uint64_t)step->row * s->job->count + step->first;
}

/* What the kernel will read: before it is uploaded. */
static kv_status_t tell_moves(stage_t *s, step_t *step)
{
	kvk_gpu_move_t *moves = s->job->moves + first_move(s, step);

	for (uint32_t i = 0; i < step->count; i++) {
		moves[i] = (kvk_gpu_move_t){.pool = step->slot->at + i * step->block_bytes,
					    .block = s->job->moves[step->first + i].block};
	}

	return KV_OK;
}

/* Between the slot and the cache. */
static kv_status_t permute(const stage_t *s, const step_t *step, kvk_cu_stream_t stream)
{
	const kvk_gpu_job_t *job = s->job;
	kvk_gpu_args_t args = s->plan->args;
	kvk_gpu_launch_t launch = {.addresses = s->base_bits | step->slot->at | step->block_bytes};

	args.moves = s->inputs_at + (job->moves_at - job->start_at) + first_move(s, step) * sizeof(kvk_gpu_move_t);
	args.bases = s->inputs_at + (job->bases_at - job->start_at) + step->layer * sizeof(uint64_t);
	if (job->leaves_at) {
		const uint64_t leaf =
			((uint64_t)step->first * args.heads * args.cache_layers + step->layer) * args.pieces;
		const uint64_t leaves = s->plan->copy->dir == KVK_GPU_GATHER
						? job->leaves_at
						: s->inputs_at + (job->leaves_at - job->start_at);

		args.leaves = leaves + leaf * sizeof(uint64_t);
		args.bad = job->bad_at + step->first * sizeof(uint32_t);
	}
	args.count = step->count;
	args.layers = step->layers;
	args.pool_first = 0;
	args.pool_head = step->layers * args.page_bytes;
	launch.sms = s->plan->sms;
	launch.dir = s->plan->copy->dir;
	launch.stream = stream;

	return kvk_gpu_launch(s->gpu, &launch, &args);
}

/* ---- one step -------------------------------------------------------------------------------- */

/* The caller's stream comes before the first halves; where the blocks of a scatter are ready, before its kernels. */
static kv_status_t wait_start(stage_t *s, line_t line)
{
	const line_t waits = s->plan->copy->dir == KVK_GPU_SCATTER && !s->early ? COPIES : KERNELS;

	if (line != waits || s->waited[line]) {
		return KV_OK;
	}
	s->waited[line] = 1;

	return KVK_GPU_CALL(s->gpu, stream_wait, s->ring->lines[line].stream, s->ring->start, 0);
}

static kv_status_t do_half(stage_t *s, const step_t *step, line_t line)
{
	const kvk_cu_stream_t stream = s->ring->lines[line].stream;
	const kv_status_t status = wait_start(s, line);

	s->used[line] = 1;
	if (status != KV_OK) {
		return status;
	}

	return line == KERNELS ? permute(s, step, stream) : copy_blocks(s, step, stream);
}

static kv_status_t do_step(stage_t *s, step_t *step)
{
	kvk_gpu_t *gpu = s->gpu;
	const line_t first = s->plan->copy->dir == KVK_GPU_GATHER ? KERNELS : COPIES;
	const line_t second = first == KERNELS ? COPIES : KERNELS;
	const kvk_cu_stream_t before = s->ring->lines[first].stream;
	const kvk_cu_stream_t after = s->ring->lines[second].stream;
	kv_status_t status = KVK_GPU_CALL(gpu, stream_wait, before, step->slot->empty, 0);

	if (status == KV_OK) {
		status = do_half(s, step, first);
	}
	if (status == KV_OK) {
		s->used[second] = 1;
		status = KVK_GPU_CALL(gpu, event_record, step->slot->filled, before);
		status = status == KV_OK ? KVK_GPU_CALL(gpu, stream_wait, after, step->slot->filled, 0) : status;
	}
	if (status == KV_OK) {
		status = do_half(s, step, second);
	}

	return status == KV_OK ? KVK_GPU_CALL(gpu, event_record, step->slot->empty, after) : status;
}

/* ---- all of them ----------------------------------------------------------------------------- */

/* Blocks of the next step, of `left`; `done` came before it. */
static uint32_t step_blocks(const stage_t *s, const step_t *step, uint32_t fit, uint32_t done, uint32_t left)
{
	const uint32_t least = (uint32_t)((KVK_GPU_TAPER + step->block_bytes - 1) / step->block_bytes);
	uint32_t n;

	if (s->plan->copy->dir == KVK_GPU_SCATTER) {
		n = s->plan->copy->rest ? left : (left + 1) / 2;
	} else {
		n = done;
	}
	n = n < least ? least : n;
	n = n < fit ? n : fit;

	return n < left ? n : left;
}

static kv_status_t for_steps(stage_t *s, kv_status_t (*visit)(stage_t *s, step_t *step))
{
	const kvk_gpu_plan_t *plan = s->plan;
	const kvk_gpu_args_t *args = &plan->args;
	kv_status_t status = KV_OK;
	uint32_t turn = s->ring->turn;

	for (uint32_t row = 0; row < plan->staged_steps && status == KV_OK; row++) {
		step_t step = {.layer = row * plan->staged_layers, .row = 1 + row};
		uint32_t fit;

		step.layers = args->layers - step.layer;
		step.layers = step.layers < plan->staged_layers ? step.layers : plan->staged_layers;
		step.block_bytes = (uint64_t)args->heads * step.layers * args->page_bytes;
		fit = (uint32_t)(s->ring->slot_bytes / step.block_bytes);
		while (step.first < args->count && status == KV_OK) {
			step.count = step_blocks(s, &step, fit, step.first, args->count - step.first);
			step.turn = turn++;
			step.slot = &s->ring->slots[step.turn % KVK_GPU_SLOTS];
			status = visit(s, &step);
			step.first += step.count;
		}
	}
	s->turn = turn;

	return status;
}

/* The caller's stream goes on after the lines. */
static kv_status_t join_lines(const stage_t *s)
{
	kv_status_t status = KV_OK;

	for (uint32_t i = 0; i < KVK_GPU_LINES; i++) {
		const kvk_gpu_line_t *line = &s->ring->lines[i];

		if (s->used[i] && (KVK_GPU_CALL(s->gpu, event_record, line->done, line->stream) != KV_OK ||
				   KVK_GPU_CALL(s->gpu, stream_wait, s->plan->copy->stream, line->done, 0) != KV_OK)) {
			status = KV_ERR_IO;
		}
	}

	return status;
}

/* After a step that was enqueued in part no event says when its slot is free: each line waits for the other. */
static kv_status_t mend(kvk_gpu_t *gpu, kvk_gpu_ring_t *ring)
{
	kv_status_t status = KV_OK;

	for (uint32_t i = 0; i < KVK_GPU_LINES && status == KV_OK; i++) {
		status = KVK_GPU_CALL(gpu, event_record, ring->lines[i].done, ring->lines[i].stream);
	}
	for (uint32_t i = 0; i < KVK_GPU_LINES && status == KV_OK; i++) {
		status = KVK_GPU_CALL(gpu, stream_wait, ring->lines[i].stream, ring->lines[1 - i].done, 0);
	}
	if (status == KV_OK) {
		ring->broken = 0;
	}

	return status;
}

/* Under the ring's lock. */
static kv_status_t stage(stage_t *s, kvk_gpu_job_t *job)
{
	kvk_gpu_t *gpu = s->gpu;
	kv_status_t status = s->ring->broken ? mend(gpu, s->ring) : KV_OK;

	if (status != KV_OK) {
		return status;
	}
	status = for_steps(s, tell_moves);
	if (status == KV_OK) {
		s->inputs_at = kvk_gpu_upload(gpu, job, s->plan->copy->stream);
		status = KVK_GPU_CALL(gpu, event_record, s->ring->start, s->plan->copy->stream);
	}
	if (status != KV_OK) {
		return status;
	}
	status = for_steps(s, do_step);
	s->ring->broken = status != KV_OK;
	s->ring->turn = s->turn;
	if (join_lines(s) != KV_OK) {
		job->lost = 1; /* its event would not tell of the lines' work */
		status = KV_ERR_IO;
	}

	return status;
}

kv_status_t kvk_gpu_stage(kvk_gpu_t *gpu, const kvk_gpu_plan_t *plan, kvk_gpu_job_t *job)
{
	kvk_gpu_ring_t *ring = &gpu->rings[plan->copy->dir];
	stage_t s = {.gpu = gpu, .ring = ring, .plan = plan, .job = job};
	kv_status_t status;

	/* If the copy engine shared the link with the kernel before it, what was asked for first would come later. */
	if (plan->copy->dir == KVK_GPU_SCATTER) {
		s.early = atomic_exchange(&gpu->linked, KVK_GPU_NO_STREAM) != (uintptr_t)plan->copy->stream &&
			  plan->copy->ready;
	}
	for (uint32_t l = 0; l < job->layers; l++) {
		s.base_bits |= job->bases[l];
	}
	pthread_mutex_lock(&ring->lock);
	status = stage(&s, job);
	pthread_mutex_unlock(&ring->lock);

	return status;
}
