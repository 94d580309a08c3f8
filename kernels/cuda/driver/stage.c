/* Way STAGED: the copy engine between the pool and a ring in the device's memory, a kernel between the ring and the
 * cache (decision 014).
 *
 * Each direction has a ring of stages and two streams of its own: one for copies, one for kernels. A chunk takes the
 * next stage and has two halves, the copies and the kernel; the direction says which is first. So the copy engine has
 * its next work before it has done the last, whatever the kernels do. Events of a stage order its halves, and the next
 * chunk that takes it:
 *
 *     first half:  wait empty, work, record filled        second half:  wait filled, work, record empty
 *
 * The first halves wait for the caller's stream, and the caller's stream waits for both streams after the last chunk.
 * Of a scatter whose blocks are ready, only kernels wait: one copy's blocks are in flight while the kernels of the copy
 * before it still run. The kernel of a scatter's last chunk and of a gather's first have no other work at their side,
 * so these chunks are small. */
#include "stage.h"

#include "context.h"
#include "launch.h"
#include "memory.h"
#include "upload.h"

#define STAGE_GRAIN UINT64_C(256)
#define BATCH_MOST  256u /* copies in a call */

typedef enum ring_stream { COPY_STREAM, KERNEL_STREAM } ring_stream_t;

/* A copy under way: the same for all of its chunks. */
typedef struct staged_copy {
	kvk_gpu_t *gpu;
	kvk_gpu_ring_t *ring;
	const kvk_gpu_copy_desc_t *desc;
	const kvk_gpu_job_t *job;
	uint64_t base_bits;
	uint64_t inputs_at;               /* of the job, as kernels see it */
	int early;                        /* copies do not wait for the caller's stream */
	int used[KVK_GPU_RING_STREAMS];   /* streams that have work of it */
	int waited[KVK_GPU_RING_STREAMS]; /* streams that wait for the caller's stream */
	uint32_t pos;                     /* after the last chunk */
} staged_copy_t;

/* Blocks [first, first + count), layers [layer, layer + layers) of the range. */
typedef struct chunk {
	uint32_t first, count;
	uint32_t layer, layers;
	uint32_t row; /* of job->moves */
	uint32_t pos;
	uint64_t block_bytes;
	kvk_gpu_stage_t *stage;
} chunk_t;

/* ---- the rings ------------------------------------------------------------------------------- */

uint64_t kvk_gpu_ring_stage_bytes(const kvk_gpu_t *gpu)
{
	return gpu->ring_bytes / 2 / KVK_GPU_STAGES / STAGE_GRAIN * STAGE_GRAIN;
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
	for (uint32_t i = 0; i < KVK_GPU_RING_STREAMS; i++) {
		if (ring->streams[i].stream) {
			KVK_GPU_CALL(gpu, stream_destroy, ring->streams[i].stream);
			ring->streams[i].stream = NULL;
		}
		drop_event(gpu, &ring->streams[i].done);
	}
	for (uint32_t i = 0; i < KVK_GPU_STAGES; i++) {
		drop_event(gpu, &ring->stages[i].filled);
		drop_event(gpu, &ring->stages[i].empty);
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

static kv_status_t make_streams(kvk_gpu_t *gpu, kvk_gpu_ring_t *ring)
{
	/* Somebody waits for what is loaded; what is saved takes what others leave. */
	const int priority = ring == &gpu->rings[KVK_GPU_SCATTER] ? KVK_CU_PRIORITY_HIGH : KVK_CU_PRIORITY_LOW;
	kv_status_t status = KV_OK;

	for (uint32_t i = 0; i < KVK_GPU_RING_STREAMS && status == KV_OK; i++) {
		kvk_gpu_ring_stream_t *stream = &ring->streams[i];

		status = KVK_GPU_CALL(gpu, stream_create, &stream->stream, KVK_CU_STREAM_OWN, priority);
		if (status != KV_OK) {
			stream->stream = NULL;
			break;
		}
		status = make_event(gpu, &stream->done);
	}

	return status;
}

static kv_status_t make_ring(kvk_gpu_t *gpu, kvk_gpu_ring_t *ring)
{
	kv_status_t status;

	ring->stage_bytes = kvk_gpu_ring_stage_bytes(gpu);
	ring->broken = 0;
	status = KVK_GPU_CALL(gpu, mem_alloc, &ring->memory, ring->stage_bytes * KVK_GPU_STAGES);
	if (status != KV_OK) {
		ring->memory = 0;
		return status;
	}
	status = make_event(gpu, &ring->start);
	for (uint32_t i = 0; i < KVK_GPU_STAGES && status == KV_OK; i++) {
		kvk_gpu_stage_t *stage = &ring->stages[i];

		stage->at = ring->memory + i * ring->stage_bytes;
		status = make_event(gpu, &stage->filled);
		status = status == KV_OK ? make_event(gpu, &stage->empty) : status;
	}

	return status == KV_OK ? make_streams(gpu, ring) : status;
}

int kvk_gpu_ring_is_ready(kvk_gpu_t *gpu, kvk_gpu_dir_t dir)
{
	kvk_gpu_ring_t *ring = &gpu->rings[dir];

	if (atomic_load(&ring->state) == 0) {
		pthread_mutex_lock(&ring->lock);
		if (atomic_load(&ring->state) == 0 && make_ring(gpu, ring) == KV_OK) {
			atomic_store(&ring->state, 1);
		} else if (atomic_load(&ring->state) == 0) {
			kv_logf(gpu->env, KV_LOG_WARN, "gpu",
				"no ring in device memory: whole blocks go over the link by kernels device %d why %s",
				gpu->ordinal, kvk_gpu_last_error());
			drop_ring(gpu, ring);
			atomic_store(&ring->state, -1);
		}
		pthread_mutex_unlock(&ring->lock);
	}

	return atomic_load(&ring->state) > 0;
}

/* ---- copies of a chunk ----------------------------------------------------------------------- */

/* Pieces that lie together on both sides, not enqueued yet. */
typedef struct batch {
	const staged_copy_t *stage;
	kvk_cu_stream_t stream;
	int apart; /* the next one is a copy of its own */
	size_t count;
	kvk_cu_ptr_t dst[BATCH_MOST], src[BATCH_MOST];
	size_t bytes[BATCH_MOST];
} batch_t;

/* KV_ERR_UNSUPPORTED: there is no such call, or it does not take these. */
static kv_status_t flush_as_one(batch_t *b)
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

	return kvk_gpu_check_result(gpu, offsetof(kvk_cuda_ops_t, copy_batch), error);
}

static kv_status_t flush_batch(batch_t *b)
{
	kv_status_t status = flush_as_one(b);

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
	const int in = b->stage->desc->copy->dir == KVK_GPU_SCATTER;
	const uint64_t dst = in ? ring : pool;
	const uint64_t src = in ? pool : ring;
	kv_status_t status = KV_OK;

	if (b->count > 0 && !b->apart && b->dst[b->count - 1] + b->bytes[b->count - 1] == dst &&
	    b->src[b->count - 1] + b->bytes[b->count - 1] == src) {
		b->bytes[b->count - 1] += bytes;
		return KV_OK;
	}
	if (b->count == BATCH_MOST) {
		status = flush_batch(b);
	}
	b->dst[b->count] = dst;
	b->src[b->count] = src;
	b->bytes[b->count++] = bytes;
	b->apart = 0;

	return status;
}

/* May block i be copied together with the one before it? */
static int block_follows(const staged_copy_t *s, uint32_t i)
{
	const uint8_t *before = s->job->asked[i - 1].data;
	const uint64_t bytes = s->desc->pool_bytes;

	return (const uint8_t *)s->job->asked[i].data == before + bytes &&
	       kvk_gpu_is_contiguous(s->gpu, before, 2 * bytes);
}

/* Of each head all that the pool has, so of each block one piece. */
static kv_status_t copy_pieces(const staged_copy_t *s, const chunk_t *chunk, kvk_cu_stream_t stream)
{
	const uint64_t piece = s->desc->args.heads * s->desc->args.pool_head;
	uint64_t ring = chunk->stage->at;
	kv_status_t status = KV_OK;
	batch_t batch;

	batch.stage = s;
	batch.stream = stream;
	batch.count = 0;
	for (uint32_t i = 0; i < chunk->count && status == KV_OK; i++) {
		batch.apart = i > 0 && !block_follows(s, chunk->first + i);
		status =
			add_piece(&batch, s->job->moves[chunk->first + i].pool + s->desc->args.pool_first, ring, piece);
		ring += piece;
	}

	return status == KV_OK ? flush_batch(&batch) : status;
}

/* Of each head some layers: rows that lie as far from each other as heads do, also where a block follows another. */
static kv_status_t copy_rows(const staged_copy_t *s, const chunk_t *chunk, kvk_cu_stream_t stream)
{
	const kvk_gpu_args_t *args = &s->desc->args;
	const uint64_t width = chunk->layers * args->page_bytes;
	const int joins = args->heads * args->pool_head == s->desc->pool_bytes;
	kvk_cu_side_t pool = {.type = KVK_CU_SIDE_ANY, .pitch = args->pool_head};
	kvk_cu_side_t ring = {.type = KVK_CU_SIDE_ANY, .pitch = width, .at = chunk->stage->at};
	kv_status_t status = KV_OK;
	uint32_t blocks;

	for (uint32_t i = 0; i < chunk->count && status == KV_OK; i += blocks) {
		const int in = s->desc->copy->dir == KVK_GPU_SCATTER;
		kvk_cu_rows_t rows = {.width = width};

		blocks = 1;
		while (joins && i + blocks < chunk->count && block_follows(s, chunk->first + i + blocks)) {
			blocks++;
		}
		pool.at = s->job->moves[chunk->first + i].pool + args->pool_first + chunk->layer * args->page_bytes;
		rows.height = (size_t)blocks * args->heads;
		rows.from = in ? pool : ring;
		rows.to = in ? ring : pool;
		status = KVK_GPU_CALL(s->gpu, copy_rows, &rows, stream);
		ring.at += rows.height * width;
	}

	return status;
}

/* Between the pool and the stage, where all layers of a chunk and all heads follow each other. */
static kv_status_t copy_blocks(const staged_copy_t *s, const chunk_t *chunk, kvk_cu_stream_t stream)
{
	const kvk_gpu_args_t *args = &s->desc->args;

	return chunk->layers * args->page_bytes == args->pool_head ? copy_pieces(s, chunk, stream)
								   : copy_rows(s, chunk, stream);
}

/* ---- the kernel of a chunk ------------------------------------------------------------------- */

static uint64_t first_move(const staged_copy_t *s, const chunk_t *chunk)
{
	return (uint64_t)chunk->row * s->job->count + chunk->first;
}

/* What the kernel will read: before it is uploaded. */
static kv_status_t write_moves(staged_copy_t *s, chunk_t *chunk)
{
	kvk_gpu_move_t *moves = s->job->moves + first_move(s, chunk);

	for (uint32_t i = 0; i < chunk->count; i++) {
		moves[i] = (kvk_gpu_move_t){.pool = chunk->stage->at + i * chunk->block_bytes,
					    .block = s->job->moves[chunk->first + i].block};
	}

	return KV_OK;
}

/* Between the stage and the cache. */
static kv_status_t launch_permute(const staged_copy_t *s, const chunk_t *chunk, kvk_cu_stream_t stream)
{
	const kvk_gpu_job_t *job = s->job;
	kvk_gpu_args_t args = s->desc->args;
	kvk_gpu_launch_t launch = {.addresses = s->base_bits | chunk->stage->at | chunk->block_bytes};

	args.moves = s->inputs_at + (job->moves_at - job->start_at) + first_move(s, chunk) * sizeof(kvk_gpu_move_t);
	args.bases = s->inputs_at + (job->bases_at - job->start_at) + chunk->layer * sizeof(uint64_t);
	if (job->leaves_at) {
		const uint64_t leaf =
			((uint64_t)chunk->first * args.heads * args.cache_layers + chunk->layer) * args.pieces;
		const uint64_t leaves = s->desc->copy->dir == KVK_GPU_GATHER
						? job->leaves_at
						: s->inputs_at + (job->leaves_at - job->start_at);

		args.leaves = leaves + leaf * sizeof(uint64_t);
		args.bad = job->bad_at + chunk->first * sizeof(uint32_t);
	}
	args.count = chunk->count;
	args.layers = chunk->layers;
	args.pool_first = 0;
	args.pool_head = chunk->layers * args.page_bytes;
	launch.sms = s->desc->sms;
	launch.dir = s->desc->copy->dir;
	launch.stream = stream;

	return kvk_gpu_launch_copy(s->gpu, &launch, &args);
}

/* ---- one chunk ------------------------------------------------------------------------------- */

/* The caller's stream comes before the first halves; where the blocks of a scatter are ready, before its kernels. */
static kv_status_t wait_start(staged_copy_t *s, ring_stream_t which)
{
	const ring_stream_t waits = s->desc->copy->dir == KVK_GPU_SCATTER && !s->early ? COPY_STREAM : KERNEL_STREAM;

	if (which != waits || s->waited[which]) {
		return KV_OK;
	}
	s->waited[which] = 1;

	return KVK_GPU_CALL(s->gpu, stream_wait, s->ring->streams[which].stream, s->ring->start, 0);
}

static kv_status_t do_half(staged_copy_t *s, const chunk_t *chunk, ring_stream_t which)
{
	const kvk_cu_stream_t stream = s->ring->streams[which].stream;
	const kv_status_t status = wait_start(s, which);

	s->used[which] = 1;
	if (status != KV_OK) {
		return status;
	}

	return which == KERNEL_STREAM ? launch_permute(s, chunk, stream) : copy_blocks(s, chunk, stream);
}

static kv_status_t copy_chunk(staged_copy_t *s, chunk_t *chunk)
{
	kvk_gpu_t *gpu = s->gpu;
	const ring_stream_t first = s->desc->copy->dir == KVK_GPU_GATHER ? KERNEL_STREAM : COPY_STREAM;
	const ring_stream_t second = first == KERNEL_STREAM ? COPY_STREAM : KERNEL_STREAM;
	const kvk_cu_stream_t before = s->ring->streams[first].stream;
	const kvk_cu_stream_t after = s->ring->streams[second].stream;
	kv_status_t status = KVK_GPU_CALL(gpu, stream_wait, before, chunk->stage->empty, 0);

	if (status == KV_OK) {
		status = do_half(s, chunk, first);
	}
	if (status == KV_OK) {
		s->used[second] = 1;
		status = KVK_GPU_CALL(gpu, event_record, chunk->stage->filled, before);
		status = status == KV_OK ? KVK_GPU_CALL(gpu, stream_wait, after, chunk->stage->filled, 0) : status;
	}
	if (status == KV_OK) {
		status = do_half(s, chunk, second);
	}

	return status == KV_OK ? KVK_GPU_CALL(gpu, event_record, chunk->stage->empty, after) : status;
}

/* ---- all of them ----------------------------------------------------------------------------- */

/* Blocks of the next chunk, of `left`; `done` came before it. */
static uint32_t chunk_blocks(const staged_copy_t *s, const chunk_t *chunk, uint32_t fit, uint32_t done, uint32_t left)
{
	const uint32_t least = (uint32_t)((KVK_GPU_MIN_CHUNK + chunk->block_bytes - 1) / chunk->block_bytes);
	uint32_t n;

	if (s->desc->copy->dir == KVK_GPU_SCATTER) {
		n = s->desc->copy->rest ? left : (left + 1) / 2;
	} else {
		n = done;
	}
	n = n < least ? least : n;
	n = n < fit ? n : fit;

	return n < left ? n : left;
}

static kv_status_t for_chunks(staged_copy_t *s, kv_status_t (*visit)(staged_copy_t *s, chunk_t *chunk))
{
	const kvk_gpu_copy_desc_t *desc = s->desc;
	const kvk_gpu_args_t *args = &desc->args;
	kv_status_t status = KV_OK;
	uint32_t pos = s->ring->pos;

	for (uint32_t row = 0; row < desc->staged_ranges && status == KV_OK; row++) {
		chunk_t chunk = {.layer = row * desc->staged_layers, .row = 1 + row};
		uint32_t fit;

		chunk.layers = args->layers - chunk.layer;
		chunk.layers = chunk.layers < desc->staged_layers ? chunk.layers : desc->staged_layers;
		chunk.block_bytes = (uint64_t)args->heads * chunk.layers * args->page_bytes;
		fit = (uint32_t)(s->ring->stage_bytes / chunk.block_bytes);
		while (chunk.first < args->count && status == KV_OK) {
			chunk.count = chunk_blocks(s, &chunk, fit, chunk.first, args->count - chunk.first);
			chunk.pos = pos++;
			chunk.stage = &s->ring->stages[chunk.pos % KVK_GPU_STAGES];
			status = visit(s, &chunk);
			chunk.first += chunk.count;
		}
	}
	s->pos = pos;

	return status;
}

/* The caller's stream goes on after the ring's streams. */
static kv_status_t join_streams(const staged_copy_t *s)
{
	kv_status_t status = KV_OK;

	for (uint32_t i = 0; i < KVK_GPU_RING_STREAMS; i++) {
		const kvk_gpu_ring_stream_t *stream = &s->ring->streams[i];

		if (s->used[i] &&
		    (KVK_GPU_CALL_AGAIN(s->gpu, event_record, stream->done, stream->stream) != KV_OK ||
		     KVK_GPU_CALL_AGAIN(s->gpu, stream_wait, s->desc->copy->stream, stream->done, 0) != KV_OK)) {
			status = KV_ERR_IO;
		}
	}

	return status;
}

/* A chunk that was enqueued in part leaves no event that says when its stage is free: each stream waits for the
 * other. */
static kv_status_t resync_streams(kvk_gpu_t *gpu, kvk_gpu_ring_t *ring)
{
	kv_status_t status = KV_OK;

	for (uint32_t i = 0; i < KVK_GPU_RING_STREAMS && status == KV_OK; i++) {
		status = KVK_GPU_CALL(gpu, event_record, ring->streams[i].done, ring->streams[i].stream);
	}
	for (uint32_t i = 0; i < KVK_GPU_RING_STREAMS && status == KV_OK; i++) {
		status = KVK_GPU_CALL(gpu, stream_wait, ring->streams[i].stream, ring->streams[1 - i].done, 0);
	}
	if (status == KV_OK) {
		ring->broken = 0;
	}

	return status;
}

/* Under the ring's lock. */
static kv_status_t copy_chunks(staged_copy_t *s, kvk_gpu_job_t *job)
{
	kvk_gpu_t *gpu = s->gpu;
	kv_status_t status = s->ring->broken ? resync_streams(gpu, s->ring) : KV_OK;

	if (status != KV_OK) {
		return status;
	}
	status = for_chunks(s, write_moves);
	if (status == KV_OK) {
		s->inputs_at = kvk_gpu_upload_args(gpu, job, s->desc->copy->stream);
		status = KVK_GPU_CALL(gpu, event_record, s->ring->start, s->desc->copy->stream);
	}
	if (status != KV_OK) {
		return status;
	}
	status = for_chunks(s, copy_chunk);
	s->ring->broken = status != KV_OK;
	s->ring->pos = s->pos;
	if (join_streams(s) != KV_OK) {
		job->lost = 1; /* its event would not cover the work of the ring's streams */
		status = KV_ERR_IO;
	}

	return status;
}

kv_status_t kvk_gpu_copy_staged(kvk_gpu_t *gpu, const kvk_gpu_copy_desc_t *desc, kvk_gpu_job_t *job)
{
	kvk_gpu_ring_t *ring = &gpu->rings[desc->copy->dir];
	staged_copy_t s = {.gpu = gpu, .ring = ring, .desc = desc, .job = job};
	kv_status_t status;

	/* If the copy engine shared the link with the kernel before it, what was asked for first would come later. */
	if (desc->copy->dir == KVK_GPU_SCATTER) {
		s.early = atomic_exchange(&gpu->linked, KVK_GPU_NO_STREAM) != (uintptr_t)desc->copy->stream &&
			  desc->copy->ready;
	}
	for (uint32_t l = 0; l < job->layers; l++) {
		s.base_bits |= job->bases[l];
	}
	pthread_mutex_lock(&ring->lock);
	status = copy_chunks(&s, job);
	pthread_mutex_unlock(&ring->lock);

	return status;
}
