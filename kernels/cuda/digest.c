/* Digests of memory by a kernel: tables of pieces and their digests are in pinned memory, in two batches that take
 * turns, so that the host fills one while the device works at the other. */
#include "args.h"
#include "cuda/driver/context.h"
#include "cpu/range_state.h"
#include "cuda/driver/launch.h"
#include "cuda/driver/memory.h"

#define BATCHES      2u
#define PIECES       65536u /* of a batch: 1 GiB takes longer than the host's work for it */
#define PIECES_LEAST 64u
#define PIECE_BYTES  (sizeof(kvk_gpu_piece_t) + sizeof(uint64_t)) /* of pinned memory */

_Static_assert(KVK_GPU_PIECE == KVK_PIECE && KVK_GPU_PIECE_PAD == KVK_PIECE_PAD, "the kernel's pieces are the CPU's");

typedef struct batch {
	kvk_cu_event_t done;
	kvk_gpu_piece_t *pieces; /* [each]; behind them [each] digests */
	uint64_t *digests;
	uint64_t at;    /* as the device sees it */
	uint32_t count; /* of the pieces on their way; 0: none */
} batch_t;

/* A place among the pieces of all ranges. */
typedef struct cursor {
	uint32_t range;
	uint64_t bytes; /* of it that are behind */
} cursor_t;

typedef struct digest_call {
	kvk_gpu_t *gpu;
	const kvk_range_t *ranges;
	uint64_t *seen; /* [count] where the device sees them */
	uint32_t count;
	kvk_cu_stream_t stream;
	void *memory; /* of both batches */
	uint32_t each;
	batch_t batches[BATCHES];
	cursor_t filled, folded;
	kvk_range_state_t state; /* of the range at `folded` */
	uint8_t (*digests)[KVK_RANGE_DIGEST_BYTES];
} digest_call_t;

static uint64_t smaller(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* Where the device sees the ranges: an address that it does not know would end the context, and the engine with it. */
static kv_status_t find_ranges(digest_call_t *call, uint64_t *p_pieces)
{
	for (uint32_t i = 0; i < call->count; i++) {
		const kvk_range_t range = call->ranges[i];
		kvk_gpu_mem_kind_t kind = KVK_GPU_MEM_HOST;
		kv_status_t status = KV_OK;
		uint64_t end;

		if (__builtin_add_overflow(range.at, range.bytes, &end)) {
			return kvk_gpu_set_error(KV_ERR_ARG, "a range ends beyond all memory");
		}
		if (range.bytes > 0) {
			status = kvk_gpu_translate(call->gpu, (const void *)(uintptr_t)range.at, range.bytes,
						   &call->seen[i], &kind);
		}
		if (status == KV_OK && kind == KVK_GPU_MEM_FAR) {
			status = kvk_gpu_set_error(KV_ERR_UNSUPPORTED,
						   "kernels of this device do not reach the peer's memory");
		}
		if (status != KV_OK) {
			return status;
		}
		*p_pieces += kvk_count_pieces(range.bytes);
	}

	return KV_OK;
}

static kv_status_t alloc_pinned(digest_call_t *call)
{
	return KVK_GPU_CALL(call->gpu, host_alloc, &call->memory, call->each * PIECE_BYTES * BATCHES,
			    KVK_CU_HOST_MAPPED);
}

/* As much as is needed, or as the driver gives. */
static kv_status_t alloc_batches(digest_call_t *call, uint64_t pieces)
{
	kvk_gpu_t *gpu = call->gpu;
	uint64_t at = 0;
	kv_status_t status;

	call->each = (uint32_t)smaller(pieces > PIECES_LEAST ? pieces : PIECES_LEAST, PIECES);
	status = alloc_pinned(call);
	while (status == KV_ERR_NOMEM && call->each > PIECES_LEAST) {
		call->each = call->each / 2 > PIECES_LEAST ? call->each / 2 : PIECES_LEAST;
		status = alloc_pinned(call);
	}
	if (status != KV_OK) {
		call->memory = NULL;
		return status;
	}
	status = KVK_GPU_CALL(gpu, host_pointer, &at, call->memory, 0);
	for (uint32_t i = 0; i < BATCHES && status == KV_OK; i++) {
		batch_t *batch = &call->batches[i];

		const size_t offset = (size_t)i * call->each * PIECE_BYTES;

		batch->pieces = (kvk_gpu_piece_t *)(void *)((uint8_t *)call->memory + offset);
		batch->at = at + offset;
		batch->digests = (uint64_t *)(void *)(batch->pieces + call->each);
		status = KVK_GPU_CALL(gpu, event_create, &batch->done, KVK_CU_EVENT_NO_TIME);
		batch->done = status == KV_OK ? batch->done : NULL;
	}

	return status;
}

static void free_batches(digest_call_t *call)
{
	for (uint32_t i = 0; i < BATCHES; i++) {
		if (call->batches[i].done) {
			KVK_GPU_CALL(call->gpu, event_destroy, call->batches[i].done);
		}
	}
	if (call->memory) {
		KVK_GPU_CALL(call->gpu, host_free, call->memory);
	}
}

/* The next pieces into the batch's table. */
static void fill(digest_call_t *call, batch_t *batch)
{
	cursor_t *c = &call->filled;

	batch->count = 0;
	while (c->range < call->count && batch->count < call->each) {
		const uint64_t left = call->ranges[c->range].bytes - c->bytes;

		if (left == 0) {
			*c = (cursor_t){.range = c->range + 1};
			continue;
		}
		batch->pieces[batch->count++] =
			(kvk_gpu_piece_t){call->seen[c->range] + c->bytes, smaller(left, KVK_PIECE)};
		c->bytes += smaller(left, KVK_PIECE);
	}
}

/* Digests of the next pieces into those of their ranges. All ranges that then are complete have theirs. */
static void fold(digest_call_t *call, const uint64_t *pieces, uint64_t count)
{
	cursor_t *c = &call->folded;

	while (c->range < call->count) {
		const uint64_t bytes = call->ranges[c->range].bytes;
		const uint64_t n = smaller(count, kvk_count_pieces(bytes - c->bytes));

		if (c->bytes == 0) {
			kvk_range_state_init(&call->state);
		}
		kvk_range_state_add(&call->state, pieces, n);
		c->bytes += smaller(n * KVK_PIECE, bytes - c->bytes);
		pieces += n;
		count -= n;
		if (c->bytes < bytes) {
			return;
		}
		kvk_range_state_end(&call->state, bytes, call->digests[c->range]);
		*c = (cursor_t){.range = c->range + 1};
	}
}

static kv_status_t launch(digest_call_t *call, batch_t *batch)
{
	const kvk_gpu_digest_args_t args = {
		.pieces = batch->at, .digests = batch->at + call->each * sizeof *batch->pieces, .count = batch->count};
	kv_status_t status = kvk_gpu_launch_digest(call->gpu, &args, call->stream);
	/* Whatever the driver has taken: only the event tells when it is over. */
	const kv_status_t marked = KVK_GPU_CALL_AGAIN(call->gpu, event_record, batch->done, call->stream);

	if (marked != KV_OK) {
		batch->count = 0;
	}

	return status == KV_OK ? marked : status;
}

/* A driver that refuses has lost its context, and what ran there. */
static kv_status_t await(digest_call_t *call, batch_t *batch)
{
	return KVK_GPU_CALL_AGAIN(call->gpu, event_wait, batch->done);
}

static kv_status_t digest_batches(digest_call_t *call)
{
	kv_status_t status = KV_OK;
	uint32_t idle = 0;

	for (uint32_t i = 0; idle < BATCHES; i = (i + 1) % BATCHES) {
		batch_t *batch = &call->batches[i];

		if (batch->count > 0) {
			const kv_status_t end = await(call, batch);

			status = status == KV_OK ? end : status;
			if (status == KV_OK) {
				fold(call, batch->digests, batch->count);
			}
			batch->count = 0;
		}
		if (status == KV_OK) {
			fill(call, batch);
		}
		if (batch->count > 0) {
			status = launch(call, batch);
		}
		idle = batch->count > 0 ? 0 : idle + 1;
	}
	if (status == KV_OK) {
		fold(call, call->batches[0].digests, 0); /* ranges of nothing at the end */
	}

	return status;
}

/* In the context. */
static kv_status_t run(digest_call_t *call)
{
	uint64_t pieces = 0;
	kv_status_t status = kvk_gpu_check_capture(call->gpu, call->stream);

	if (status == KV_OK) {
		status = find_ranges(call, &pieces);
	}
	if (status == KV_OK) {
		status = alloc_batches(call, pieces);
		if (status == KV_OK) {
			status = digest_batches(call);
		}
		free_batches(call);
	}

	return status;
}

kv_status_t kvk_gpu_digest(kvk_gpu_t *gpu, const kvk_range_t *ranges, uint32_t count, kvk_cu_stream_t stream,
			   uint8_t (*digests)[KVK_RANGE_DIGEST_BYTES])
{
	digest_call_t call = {.gpu = gpu, .ranges = ranges, .count = count, .stream = stream, .digests = digests};
	kv_status_t status;

	if (!gpu->digest_pieces) {
		return kvk_gpu_set_error(KV_ERR_UNSUPPORTED, "there is no kernel here that digests memory");
	}
	call.seen = kv_alloc(gpu->env, ((size_t)count + 1) * sizeof *call.seen);
	if (!call.seen) {
		return kvk_gpu_set_error(KV_ERR_NOMEM, "out of memory");
	}
	status = kvk_gpu_enter(gpu);
	if (status == KV_OK) {
		status = run(&call);
		kvk_gpu_leave(gpu);
	}
	kv_free(gpu->env, call.seen);

	return status;
}
