/* gpu_walk.cuh -- which leaves a warp moves, in which order, and where each of their bytes lies on both sides.
 *
 * On the pool's side a leaf is contiguous and in its canonical order, which is also the order of its digest: that is the order of a stage. On the cache's
 * side it is rows, K's and V's, one a token.
 */
#ifndef KVK_GPU_WALK_CUH
#define KVK_GPU_WALK_CUH

#include "gpu_args.h"
#include "gpu_warp.cuh"

/* ---- units ------------------------------------------------------------------------------------------------------- */

/* A unit's number, digit by digit, so that the next one is found by adding with carries: no division on the way. */
typedef struct unit {
	uint32_t move, head, layer, piece;
} unit_t;

static __device__ __forceinline__ unit_t unit_of(const kvk_gpu_args_t &args, uint32_t number)
{
	unit_t u;

	u.piece = number % args.pieces;
	number /= args.pieces;
	u.layer = number % args.layers;
	number /= args.layers;
	u.head = number % args.heads;
	u.move = number / args.heads;

	return u;
}

static __device__ __forceinline__ uint32_t add_digit(uint32_t *digit, uint32_t step, uint32_t base)
{
	*digit += step;
	if (*digit < base) {
		return 0;
	}
	*digit -= base;

	return 1;
}

static __device__ __forceinline__ void unit_add(const kvk_gpu_args_t &args, unit_t *u, const unit_t &step)
{
	uint32_t carry = add_digit(&u->piece, step.piece, args.pieces);

	carry = add_digit(&u->layer, step.layer + carry, args.layers);
	carry = add_digit(&u->head, step.head + carry, args.heads);
	u->move += step.move + carry;
}

/* ---- leaves ------------------------------------------------------------------------------------------------------ */

typedef struct leaf {
	uint64_t pool; /* its first byte */
	uint64_t k, v; /* token 0 of its rows */
	uint64_t *digest;
	uint32_t bytes;
} leaf_t;

static __device__ __forceinline__ leaf_t leaf_of(const kvk_gpu_args_t &args, const unit_t &u)
{
	const kvk_gpu_move_t *move = (const kvk_gpu_move_t *)args.moves + u.move;
	const uint32_t layer = args.layer + u.layer;
	const uint64_t in_page = (uint64_t)u.piece * args.leaf_bytes;
	const uint64_t left = args.page_bytes - in_page;
	const uint64_t block = ((const uint64_t *)args.bases)[layer] + move->block * args.cache_stride + in_page;
	const uint64_t number =
		(((uint64_t)u.move * args.heads + u.head) * args.cache_layers + layer) * args.pieces + u.piece;
	leaf_t leaf;

	leaf.pool = move->pool + args.pool_first + u.head * args.pool_head + layer * args.page_bytes + in_page;
	leaf.k = block + args.k.cache_offset + u.head * args.k.cache_head;
	leaf.v = block + args.v.cache_offset + u.head * args.v.cache_head;
	leaf.digest = args.leaves ? (uint64_t *)args.leaves + number : nullptr;
	leaf.bytes = (uint32_t)(left < args.leaf_bytes ? left : args.leaf_bytes);

	return leaf;
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* n / by for all 32-bit n, without dividing (Granlund and Montgomery, 1994). */
typedef struct divider {
	uint32_t by, magic, first, second;
} divider_t;

static __device__ __forceinline__ divider_t divider_of(uint32_t by)
{
	const uint32_t log = by > 1 ? 32 - __clz(by - 1) : 0;
	divider_t d;

	d.by = by;
	d.magic = (uint32_t)((((1ull << log) - by) << 32) / by + 1);
	d.first = log > 1 ? 1 : log;
	d.second = log > 1 ? log - 1 : 0;

	return d;
}

static __device__ __forceinline__ uint32_t divide(const divider_t &d, uint32_t n)
{
	const uint32_t high = __umulhi(d.magic, n);

	return (high + ((n - high) >> d.first)) >> d.second;
}

/* How to find a byte of a leaf in the cache. */
typedef struct rows {
	divider_t k, v;  /* from a token to the next in the leaf */
	uint32_t v_from; /* interleaved: in a token's bytes; else in the leaf's */
	bool interleaved;
} rows_t;

static __device__ __forceinline__ rows_t rows_of(const kvk_gpu_args_t &args)
{
	const bool both = args.v.bytes != 0 && !args.opaque;
	rows_t rows;

	rows.interleaved = both && args.interleaved;
	rows.v_from = both ? (uint32_t)args.v.pool_offset : (uint32_t)args.page_bytes;
	rows.k = divider_of(args.opaque ? (uint32_t)args.page_bytes : (uint32_t)args.k.pool_stride);
	rows.v = both ? divider_of((uint32_t)args.v.pool_stride) : rows.k;

	return rows;
}

static __device__ __forceinline__ uint64_t cache_at(const kvk_gpu_args_t &args, const rows_t &rows, const leaf_t &leaf,
						    uint32_t at)
{
	uint32_t token;
	bool is_v;

	if (rows.interleaved) {
		token = divide(rows.k, at);
		at -= token * rows.k.by;
		is_v = at >= rows.v_from;
		at -= is_v ? rows.v_from : 0;
	} else {
		is_v = at >= rows.v_from;
		at -= is_v ? rows.v_from : 0;
		token = divide(is_v ? rows.v : rows.k, at);
		at -= token * (is_v ? rows.v.by : rows.k.by);
	}

	return (is_v ? leaf.v + token * args.v.cache_stride : leaf.k + token * args.k.cache_stride) + at;
}

/* ---- a warp's way through its leaves, a chunk at a time --------------------------------------------------------------- */

typedef struct walk {
	unit_t unit, step;
	leaf_t leaf;   /* when there is one */
	uint32_t from; /* the chunk, in the leaf */
	uint32_t bytes;
	bool more; /* false: all chunks are done */
} walk_t;

static __device__ __forceinline__ void walk_enter(const kvk_gpu_args_t &args, walk_t *w)
{
	w->more = w->unit.move < args.count;
	if (w->more) {
		w->leaf = leaf_of(args, w->unit);
		w->from = 0;
		w->bytes = kvk_chunk_bytes(w->leaf.bytes);
	}
}

/* Neighbouring warps take neighbouring leaves, which are neighbours in the pool. */
static __device__ __forceinline__ walk_t walk_start(const kvk_gpu_args_t &args)
{
	const uint32_t warps = blockDim.x / KVK_WARP;
	walk_t w;

	w.unit = unit_of(args, blockIdx.x * warps + threadIdx.x / KVK_WARP);
	w.step = unit_of(args, gridDim.x * warps);
	walk_enter(args, &w);

	return w;
}

static __device__ __forceinline__ bool walk_last(const walk_t &w)
{
	return w.from + w.bytes == w.leaf.bytes;
}

static __device__ __forceinline__ void walk_next(const kvk_gpu_args_t &args, walk_t *w)
{
	if (!walk_last(*w)) {
		w->from += w->bytes;
		w->bytes = kvk_chunk_bytes(w->leaf.bytes - w->from);
		return;
	}
	unit_add(args, &w->unit, w->step);
	walk_enter(args, w);
}

#endif
