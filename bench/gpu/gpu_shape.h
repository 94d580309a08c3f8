// gpu_shape.h -- what programs that copy through kvk/gpu.h share: a cache and blocks of one shape, and a copy between
// them.
#ifndef GPU_SHAPE_H
#define GPU_SHAPE_H

#define _Noreturn __attribute__((noreturn)) // C's word
extern "C" {
#include "kvk/gpu.h"
}
#include "gpu_copy.h"

static const uint32_t HEADS = 8, LAYERS = 32, DIM = 128, ROW = 256; // bf16: rows of 256 B

struct shape {
	kvk_layout_t layout;
	kvk_paged_t paged;
	std::vector<void *> base;
	std::vector<kvk_move_t> moves;
	std::vector<uint64_t> leaves;
	uint64_t bytes;
	uint32_t layers = 0;        // how many, from the first; 0: all
	uint32_t max_in_flight = 0; // bytes of a scatter on their way; 0: kvk's
};

// Of `ranks` ranks one, whose heads are a part of each block: the pool then has that many times the bytes.
// apart: every second place of the pool is somebody else's, so that no two blocks are neighbours there.
struct share {
	uint32_t ranks = 1;
	bool apart = false;
};

// Fragments of `fragment` bytes, K and V of one head and layer; blocks in an order of chance on both sides.
static void make_shape(shape &s, uint32_t fragment, kvk_paged_kind_t kind, uint8_t *pool, bool digests, share part = {})
{
	const uint32_t ranks = part.ranks, heads = HEADS / ranks;
	const uint64_t block = (uint64_t)HEADS * LAYERS * fragment, held = block / ranks;
	const uint64_t stride = part.apart ? 2 * block : block;
	const uint32_t count = (uint32_t)(ranks * bench.bytes / stride);

	s.layout = {};
	s.layout.heads = HEADS;
	s.layout.layers = LAYERS;
	s.layout.block_tokens = fragment / (2 * ROW);
	s.layout.k_dim = s.layout.v_dim = DIM;
	s.layout.dtype = KVK_DTYPE_BF16;
	s.layout.inner = kind == KVK_PAGED_HEAD_TOKEN_KV ? KVK_INNER_PACKED : KVK_INNER_SPLIT;
	s.base.resize(LAYERS);
	for (uint32_t i = 0; i < LAYERS; i++) {
		s.base[i] = bench.cache + (uint64_t)i * count * heads * fragment;
	}
	s.paged = {};
	s.paged.kind = kind;
	s.paged.blocks = count;
	s.paged.layers = LAYERS;
	s.paged.heads = heads;
	s.paged.block_tokens = s.layout.block_tokens;
	s.paged.k_dim = s.paged.v_dim = DIM;
	s.paged.dtype = KVK_DTYPE_BF16;
	s.paged.base = s.base.data();
	s.bytes = held * count;
	s.moves.resize(count);
	s.leaves.assign((uint64_t)count * heads * LAYERS, 0);
	std::vector<uint32_t> order(count);
	for (uint32_t i = 0; i < count; i++) {
		order[i] = i;
	}
	std::shuffle(order.begin(), order.end(), std::mt19937(7));
	for (uint32_t i = 0; i < count; i++) {
		s.moves[i] = {order[i], 0, pool + (uint64_t)order[count - 1 - i] * stride,
			      digests ? s.leaves.data() + (uint64_t)i * heads * LAYERS : nullptr};
	}
}

static kvk_gpu_job_t *submit(shape &s, kvk_gpu_dir_t dir, kvk_gpu_way_t way, uint32_t sms, cudaStream_t stream)
{
	kvk_gpu_copy_t copy = {};
	kvk_gpu_job_t *job;

	copy.dir = dir;
	copy.way = way;
	copy.layout = &s.layout;
	copy.paged = &s.paged;
	copy.moves = s.moves.data();
	copy.count = (uint32_t)s.moves.size();
	copy.layers = s.layers;
	copy.sms = sms;
	copy.max_in_flight = s.max_in_flight;
	copy.ready = dir == KVK_GPU_SCATTER; // the pool's bytes are never on their way
	copy.stream = (kvk_cu_stream_t)stream;
	must_kv(kvk_gpu_submit(bench.gpu, &copy, &job));

	return job;
}

static void finish(kvk_gpu_job_t *job)
{
	must_kv(kvk_gpu_wait(job, 60000000));
	kvk_gpu_release_job(job);
}

#endif
