/* walk.cuh -- which leaves a warp moves, in which order, and where each of their bytes lies on both sides.
 *
 * On the pool's side a leaf is contiguous and in its canonical order, which is also the order of its digest: that is
 * the order of a stage. On the cache's side it is rows, K's and V's, one a token.
 */
#ifndef KVK_GPU_WALK_CUH
#define KVK_GPU_WALK_CUH

#include "args.h"
#include "warp.cuh"

/* ---- units ----------------------------------------------------------------------------------- */

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

/* ---- leaves ---------------------------------------------------------------------------------- */

typedef struct leaf {
	uint64_t pool;   /* its first byte */
	uint64_t k, v;   /* token 0 of its rows */
	uint64_t digest; /* gather: where it goes; scatter: what it shall be */
	uint32_t move;
	uint32_t bytes; /* 0: there is no such leaf, nor any behind it */
} leaf_t;

template <bool GATHER> static __device__ __forceinline__ leaf_t leaf_of(const kvk_gpu_args_t &args, const unit_t &u)
{
	leaf_t leaf = {0, 0, 0, 0, u.move, 0};

	if (u.move >= args.count) {
		return leaf;
	}

	const kvk_gpu_move_t *move = (const kvk_gpu_move_t *)args.moves + u.move;
	const uint32_t layer = args.layer + u.layer;
	const uint64_t in_page = (uint64_t)u.piece * args.leaf_bytes;
	const uint64_t left = args.page_bytes - in_page;
	const uint64_t base = __ldg((const unsigned long long *)args.bases + layer);
	const uint64_t block = base + __ldg((const unsigned long long *)&move->block) * args.cache_stride + in_page;
	const uint64_t number =
		(((uint64_t)u.move * args.heads + u.head) * args.cache_layers + layer) * args.pieces + u.piece;

	leaf.pool = __ldg((const unsigned long long *)&move->pool) + args.pool_first + u.head * args.pool_head +
		    layer * args.page_bytes + in_page;
	leaf.k = block + args.k.cache_offset + u.head * args.k.cache_head;
	leaf.v = block + args.v.cache_offset + u.head * args.v.cache_head;
	leaf.bytes = (uint32_t)(left < args.leaf_bytes ? left : args.leaf_bytes);
	if (args.leaves) {
		leaf.digest =
			GATHER ? args.leaves + 8 * number : __ldg((const unsigned long long *)args.leaves + number);
	}

	return leaf;
}

static __device__ __forceinline__ leaf_t leaf_from_lane(const leaf_t &leaf, uint32_t lane)
{
	leaf_t l;

	l.pool = __shfl_sync(KVK_WHOLE, leaf.pool, lane);
	l.k = __shfl_sync(KVK_WHOLE, leaf.k, lane);
	l.v = __shfl_sync(KVK_WHOLE, leaf.v, lane);
	l.digest = __shfl_sync(KVK_WHOLE, leaf.digest, lane);
	l.move = __shfl_sync(KVK_WHOLE, leaf.move, lane);
	l.bytes = __shfl_sync(KVK_WHOLE, leaf.bytes, lane);

	return l;
}

/* ---- rows ------------------------------------------------------------------------------------ */

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

/* Address of byte `at` of a leaf. */
template <bool INTERLEAVED>
static __device__ __forceinline__ uint64_t cache_at(const kvk_gpu_args_t &args, const rows_t &rows, const leaf_t &leaf,
						    uint32_t at)
{
	uint32_t token;
	bool is_v;

	if (INTERLEAVED) {
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

	return (is_v ? leaf.v : leaf.k) + token * (is_v ? args.v.cache_stride : args.k.cache_stride) + at;
}

/* ---- a warp's way through its leaves, a chunk at a time -------------------------------------- */

/* What passes through a stage at a time. */
typedef struct chunk {
	leaf_t leaf;
	uint32_t from, bytes; /* in the leaf; bytes 0: there are no more */
} chunk_t;

static __device__ __forceinline__ bool chunk_last(const chunk_t &c)
{
	return c.from + c.bytes == c.leaf.bytes;
}

/* Moves, bases and digests may lie in the host's memory, microseconds away. So each lane looks one of the next 32
 * leaves up, all at once, and the warp then takes them from lane after lane. */
typedef struct walk {
	unit_t unit; /* this lane's */
	unit_t step; /* to its next one */
	leaf_t leaf; /* this lane's */
	uint32_t turn;
	chunk_t chunk; /* the warp's */
} walk_t;

static __device__ __forceinline__ void walk_enter(walk_t *w)
{
	w->chunk.leaf = leaf_from_lane(w->leaf, w->turn);
	w->chunk.from = 0;
	w->chunk.bytes = kvk_chunk_bytes(w->chunk.leaf.bytes);
}

/* A warp takes this many leaves that follow each other: their digests are 32 bytes together, the least that is read
 * over a link. Then the next warp does, so that all of them work in the same part of the pool. */
#define NEIGHBOURS 4u

template <bool GATHER> static __device__ __forceinline__ walk_t walk_start(const kvk_gpu_args_t &args)
{
	const uint32_t warps = blockDim.x / KVK_WARP;
	const uint32_t warp = blockIdx.x * warps + threadIdx.x / KVK_WARP;
	walk_t w;

	const uint32_t index = threadIdx.x % KVK_WARP;

	w.unit = unit_of(args, (index / NEIGHBOURS * warps * gridDim.x + warp) * NEIGHBOURS + index % NEIGHBOURS);
	w.step = unit_of(args, KVK_WARP * warps * gridDim.x);
	w.leaf = leaf_of<GATHER>(args, w.unit);
	w.turn = 0;
	walk_enter(&w);

	return w;
}

/* Not after the end. */
template <bool GATHER> static __device__ __forceinline__ void walk_next(const kvk_gpu_args_t &args, walk_t *w)
{
	if (!chunk_last(w->chunk)) {
		w->chunk.from += w->chunk.bytes;
		w->chunk.bytes = kvk_chunk_bytes(w->chunk.leaf.bytes - w->chunk.from);
		return;
	}

	w->turn++;
	if (w->turn == KVK_WARP) {
		unit_add(args, &w->unit, w->step);
		w->leaf = leaf_of<GATHER>(args, w->unit);
		w->turn = 0;
	}
	walk_enter(w);
}

#endif
