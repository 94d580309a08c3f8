/* rows.cuh -- the operations of kvk/nn.h that wait for memory: drawn weights, embeddings, norms, heads, choices.
 *
 * A row's sums go in an order that its shape alone fixes. */
#ifndef KVK_NN_ROWS_CUH
#define KVK_NN_ROWS_CUH

#include "nn/device/rows.h"

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <stdint.h>

#define ROWS_LANES 32u
#define ROWS_ALL   0xffffffffu
#define ROWS_NONE  0xffffffffu

static __device__ __forceinline__ uint32_t rows_pack(float low, float high)
{
	const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);

	return (uint32_t)__bfloat16_as_ushort(pair.y) << 16 | __bfloat16_as_ushort(pair.x);
}

static __device__ __forceinline__ float rows_low(uint32_t pair)
{
	return __uint_as_float(pair << 16);
}

static __device__ __forceinline__ float rows_high(uint32_t pair)
{
	return __uint_as_float(pair & 0xffff0000u);
}

/* The sum of neighbours, `lanes` of them: a power of two. All lanes of the warp call. */
static __device__ __forceinline__ float rows_sum(float sum, uint32_t lanes)
{
	for (uint32_t apart = lanes / 2; apart > 0; apart /= 2) {
		sum += __shfl_xor_sync(ROWS_ALL, sum, apart);
	}

	return sum;
}

/* 1 / sqrt(mean of squares + eps) */
static __device__ __forceinline__ float rows_norm_scale(float squares, uint32_t n, float eps)
{
	return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(squares, (float)n), eps)));
}

/* ---- weights --------------------------------------------------------------------------------- */

#define ROWS_STEP UINT64_C(0x9e3779b97f4a7c15) /* of the generator's counter */

/* The operations of engine/weights.c: the same bits. */
static __device__ __forceinline__ float rows_drawn(const kvk_nn_draw_t &d, uint64_t counter)
{
	uint64_t z = counter;

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
	z ^= z >> 31;

	const float u = __fadd_rn(__fmul_rn((float)(int32_t)(z >> 40), 1.0f / 8388608.0f), -1.0f);

	return __fadd_rn(d.middle, __fmul_rn(d.width, u));
}

/* Value number i. */
static __device__ __forceinline__ float rows_value(const kvk_nn_draw_t &d, uint64_t i)
{
	return rows_drawn(d, d.seed + (i + 1) * ROWS_STEP);
}

/* Eight values from number i on, `apart` numbers from one to the next. */
static __device__ __forceinline__ uint4 rows_values(const kvk_nn_draw_t &d, uint64_t i, uint64_t apart)
{
	uint64_t counter = d.seed + (i + 1) * ROWS_STEP;
	const uint64_t step = apart * ROWS_STEP;
	uint32_t words[4];

#pragma unroll
	for (uint32_t w = 0; w < 4; w++, counter += 2 * step) {
		words[w] = rows_pack(rows_drawn(d, counter), rows_drawn(d, counter + step));
	}

	return make_uint4(words[0], words[1], words[2], words[3]);
}

/* Outputs that each panel gets. */
static __device__ __forceinline__ uint32_t rows_panel_outputs(const kvk_nn_draw_t &d)
{
	return d.order == KVK_NN_TILES ? KVK_NN_PANEL : KVK_NN_PANEL / 2;
}

/* The 16 bytes number `piece` of what is written, in the order of memory: see kvk_nn_weight_at(). */
static __device__ __forceinline__ void rows_draw_piece(const kvk_nn_draw_t &d, uint64_t piece)
{
	const uint32_t outputs = rows_panel_outputs(d), tile_pieces = outputs * 8, tiles = d.k / KVK_NN_DEPTH;
	const uint32_t tile = (uint32_t)(piece / tile_pieces), at = (uint32_t)(piece % tile_pieces), place = at % 8;
	const uint32_t row = at / 8 + (d.order == KVK_NN_UPS ? KVK_NN_PANEL / 2 : 0);
	const uint32_t output = tile / tiles * outputs + at / 8;
	const uint32_t input = tile % tiles * KVK_NN_DEPTH + (place ^ row % 8) * 8;
	const uint64_t number = d.first + ((uint64_t)(output / 16) * d.k + input) * 16 + output % 16;

	((uint4 *)d.to)[((uint64_t)tile * KVK_NN_PANEL + row) * 8 + place] = output < d.n ? rows_values(d, number, 16) : uint4();
}

static __device__ __forceinline__ void rows_draw_matrix(const kvk_nn_draw_t &d, uint64_t own, uint64_t threads)
{
	const uint64_t count = (uint64_t)d.n * d.k;

	for (uint64_t v = own; v < count / 8; v += threads) {
		((uint4 *)d.to)[v] = rows_values(d, d.first + v * 8, 1);
	}
	if (own < count % 8) {
		const uint64_t i = count / 8 * 8 + own;

		((kvk_bf16_t *)d.to)[i] = (kvk_bf16_t)rows_pack(rows_value(d, d.first + i), 0.0f);
	}
}

extern "C" __global__ void __launch_bounds__(KVK_NN_ROWS_THREADS) kvk_nn_draw_values(const __grid_constant__ kvk_nn_draw_t d)
{
	const uint64_t threads = (uint64_t)gridDim.x * KVK_NN_ROWS_THREADS;
	const uint64_t own = (uint64_t)blockIdx.x * KVK_NN_ROWS_THREADS + threadIdx.x;

	if (d.order == KVK_NN_ROW_F32) {
		for (uint64_t i = own; i < d.n; i += threads) {
			((float *)d.to)[i] = rows_value(d, d.first + i);
		}
	} else if (d.order == KVK_NN_ROWS) {
		rows_draw_matrix(d, own, threads);
	} else {
		const uint32_t outputs = rows_panel_outputs(d), panels = (d.n + outputs - 1) / outputs;
		const uint64_t pieces = (uint64_t)panels * outputs * (d.k / 8);

		for (uint64_t piece = own; piece < pieces; piece += threads) {
			rows_draw_piece(d, piece);
		}
	}
}

/* ---- embedding ------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(KVK_NN_ROWS_THREADS) kvk_nn_embed_rows(const __grid_constant__ kvk_nn_embed_t e)
{
	const uint2 *from = (const uint2 *)(e.table + (size_t)__ldg(e.tokens + blockIdx.x) * e.hidden);
	float4 *to = (float4 *)(e.x + (size_t)blockIdx.x * e.hidden);

#pragma unroll 4
	for (uint32_t q = threadIdx.x; q < e.hidden / 4; q += KVK_NN_ROWS_THREADS) {
		const uint2 v = __ldg(from + q);

		to[q] = make_float4(rows_low(v.x), rows_high(v.x), rows_low(v.y), rows_high(v.y));
	}
}

/* ---- norm ------------------------------------------------------------------------------------ */

#define ROWS_KEPT 8u /* quads of a row that a thread keeps in registers: rows of 8,192; what is beyond is read twice */

static __device__ __forceinline__ float4 rows_plus(float4 x, uint2 added)
{
	return make_float4(x.x + rows_low(added.x), x.y + rows_high(added.x), x.z + rows_low(added.y), x.w + rows_high(added.y));
}

static __device__ __forceinline__ float rows_squares(float4 x)
{
	return x.x * x.x + x.y * x.y + (x.z * x.z + x.w * x.w);
}

static __device__ __forceinline__ uint2 rows_normed(float4 x, float scale, float4 gain)
{
	return make_uint2(rows_pack(x.x * scale * gain.x, x.y * scale * gain.y), rows_pack(x.z * scale * gain.z, x.w * scale * gain.w));
}

/* A thread's quads come, and go back with what is added; the sum of their squares. All loads are on their way before
 * the first store. */
static __device__ __forceinline__ float rows_norm_load(float4 *x, const uint2 *added, uint32_t quads, float4 (&kept)[ROWS_KEPT])
{
	uint2 more[ROWS_KEPT];
	float squares = 0.0f;

#pragma unroll
	for (uint32_t j = 0; j < ROWS_KEPT; j++) {
		const uint32_t q = j * KVK_NN_ROWS_THREADS + threadIdx.x;

		kept[j] = q < quads ? x[q] : float4();
		more[j] = q < quads && added ? __ldg(added + q) : uint2();
	}
#pragma unroll
	for (uint32_t j = 0; j < ROWS_KEPT; j++) {
		const uint32_t q = j * KVK_NN_ROWS_THREADS + threadIdx.x;

		if (q < quads && added) {
			kept[j] = rows_plus(kept[j], more[j]);
			x[q] = kept[j];
		}
		squares += rows_squares(kept[j]);
	}
	for (uint32_t q = ROWS_KEPT * KVK_NN_ROWS_THREADS + threadIdx.x; q < quads; q += KVK_NN_ROWS_THREADS) {
		float4 v = x[q];

		if (added) {
			v = rows_plus(v, __ldg(added + q));
			x[q] = v;
		}
		squares += rows_squares(v);
	}

	return squares;
}

/* The sum over a block, the same in all threads. */
static __device__ __forceinline__ float rows_block_sum(float sum)
{
	__shared__ float warps[KVK_NN_ROWS_THREADS / ROWS_LANES];

	sum = rows_sum(sum, ROWS_LANES);
	if (threadIdx.x % ROWS_LANES == 0) {
		warps[threadIdx.x / ROWS_LANES] = sum;
	}
	__syncthreads();
	sum = 0.0f;
#pragma unroll
	for (uint32_t w = 0; w < KVK_NN_ROWS_THREADS / ROWS_LANES; w++) {
		sum += warps[w];
	}

	return sum;
}

extern "C" __global__ void __launch_bounds__(KVK_NN_ROWS_THREADS) kvk_nn_norm_rows(const __grid_constant__ kvk_nn_norm_t n)
{
	const uint32_t row = blockIdx.x, from = n.pick ? __ldg(n.pick + row) : row, quads = n.hidden / 4;
	const uint2 *added = n.added ? (const uint2 *)(n.added + (size_t)row * n.hidden) : nullptr;
	const float4 *gain = (const float4 *)n.gain;
	float4 *x = (float4 *)(n.x + (size_t)from * n.hidden);
	uint2 *y = (uint2 *)(n.y + (size_t)row * n.hidden);
	float4 kept[ROWS_KEPT];
	const float squares = rows_norm_load(x, added, quads, kept);

	if (!n.y) {
		return;
	}
	const float scale = rows_norm_scale(rows_block_sum(squares), n.hidden, n.eps);

#pragma unroll
	for (uint32_t j = 0; j < ROWS_KEPT; j++) {
		const uint32_t q = j * KVK_NN_ROWS_THREADS + threadIdx.x;

		if (q < quads) {
			y[q] = rows_normed(kept[j], scale, __ldg(gain + q));
		}
	}
	for (uint32_t q = ROWS_KEPT * KVK_NN_ROWS_THREADS + threadIdx.x; q < quads; q += KVK_NN_ROWS_THREADS) {
		y[q] = rows_normed(x[q], scale, __ldg(gain + q));
	}
}

/* ---- heads ----------------------------------------------------------------------------------- */

static __device__ __forceinline__ void rows_unpack(uint4 v, float (&x)[8])
{
	const uint32_t words[4] = {v.x, v.y, v.z, v.w};

#pragma unroll
	for (uint32_t w = 0; w < 4; w++) {
		x[2 * w] = rows_low(words[w]);
		x[2 * w + 1] = rows_high(words[w]);
	}
}

static __device__ __forceinline__ uint4 rows_round(const float (&x)[8])
{
	return make_uint4(rows_pack(x[0], x[1]), rows_pack(x[2], x[3]), rows_pack(x[4], x[5]), rows_pack(x[6], x[7]));
}

/* x * scale * gain of eight. */
static __device__ __forceinline__ void rows_scale(float (&x)[8], float scale, const float *gain)
{
	const float4 low = __ldg((const float4 *)gain), high = __ldg((const float4 *)gain + 1);
	const float gains[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};

#pragma unroll
	for (uint32_t i = 0; i < 8; i++) {
		x[i] = x[i] * scale * gains[i];
	}
}

/* Eight pairs. Each product and each sum is rounded, as in the twin: a difference of products may be far smaller than
 * they are. */
static __device__ __forceinline__ void rows_rotate(float (&a)[8], float (&b)[8], const float4 *rotation)
{
#pragma unroll
	for (uint32_t i = 0; i < 8; i += 2) {
		const float4 r = __ldg(rotation + i / 2);
		const float a0 = a[i], b0 = b[i], a1 = a[i + 1], b1 = b[i + 1];

		a[i] = __fsub_rn(__fmul_rn(a0, r.x), __fmul_rn(b0, r.y));
		b[i] = __fadd_rn(__fmul_rn(b0, r.x), __fmul_rn(a0, r.y));
		a[i + 1] = __fsub_rn(__fmul_rn(a1, r.z), __fmul_rn(b1, r.w));
		b[i + 1] = __fadd_rn(__fmul_rn(b1, r.z), __fmul_rn(a1, r.w));
	}
}

/* Where a head of a row goes. */
static __device__ __forceinline__ kvk_bf16_t *rows_head_to(const kvk_nn_qkv_t &q, uint32_t row, uint32_t head, kvk_nn_row_t place)
{
	const uint32_t heads = q.shape.heads, kv_heads = q.shape.kv_heads, dim = q.shape.head_dim, tokens = q.shape.block_tokens;
	const size_t page = (size_t)tokens * kv_heads * dim;

	if (head < heads) {
		return q.q_out + ((size_t)row * heads + head) * dim;
	}
	const uint32_t block = __ldg(q.blocks + (size_t)place.sequence * q.max_blocks + place.position / tokens);
	const uint32_t value = head >= heads + kv_heads, kv_head = head - heads - value * kv_heads;

	return q.cache + ((size_t)block * 2 + value) * page + ((size_t)(place.position % tokens) * kv_heads + kv_head) * dim;
}

/* head_dim / 16 lanes a head; each has eight of its pairs. */
extern "C" __global__ void __launch_bounds__(KVK_NN_ROWS_THREADS) kvk_nn_qkv_rows(const __grid_constant__ kvk_nn_qkv_t q)
{
	const uint32_t dim = q.shape.head_dim, half = dim / 2, lanes = dim / 16, part = threadIdx.x % lanes;
	const uint32_t roped = q.shape.heads + q.shape.kv_heads, all = roped + q.shape.kv_heads;
	const uint32_t item = (uint32_t)(((uint64_t)blockIdx.x * KVK_NN_ROWS_THREADS + threadIdx.x) / lanes);
	const bool is_there = item / all < q.rows;
	const uint32_t row = is_there ? item / all : 0, head = item % all; /* all lanes take part in the sums */
	const kvk_bf16_t *from = q.qkv + ((size_t)row * all + head) * dim + part * 8;
	const uint4 first = __ldg((const uint4 *)from), second = __ldg((const uint4 *)(from + half));
	const kvk_nn_row_t place = {__ldg(&q.places[row].sequence), __ldg(&q.places[row].position)};
	const float *gain = head < q.shape.heads ? q.q_gain : q.k_gain;
	float a[8], b[8], squares = 0.0f;

	rows_unpack(first, a);
	rows_unpack(second, b);
#pragma unroll
	for (uint32_t i = 0; i < 8; i++) {
		squares += a[i] * a[i] + b[i] * b[i];
	}
	squares = rows_sum(squares, lanes);
	if (!is_there) {
		return;
	}
	uint4 *to = (uint4 *)(rows_head_to(q, row, head, place) + part * 8);

	if (head >= roped) {
		to[0] = first;
		to[half / 8] = second;
		return;
	}
	if (gain) {
		const float scale = rows_norm_scale(squares, dim, q.eps);

		rows_scale(a, scale, gain + part * 8);
		rows_scale(b, scale, gain + half + part * 8);
	}
	rows_rotate(a, b, (const float4 *)(q.rotation + (size_t)place.position * dim + part * 16));
	to[0] = rows_round(a);
	to[half / 8] = rows_round(b);
}

/* ---- experts --------------------------------------------------------------------------------- */

#define ROWS_EXPERTS 32u       /* of a lane: 1,024 of a row */
#define ROWS_TAKEN   INT32_MIN /* below the bits of every probability, as signed integers are ordered */

/* Expert i of a lane: quads of experts lie in the order of lanes. */
static __device__ __forceinline__ uint32_t rows_expert(uint32_t i)
{
	return (i / 4 * ROWS_LANES + threadIdx.x % ROWS_LANES) * 4 + i % 4;
}

/* The row's logits, then their probabilities. Not there: -infinity, then 0. */
static __device__ __forceinline__ void rows_softmax(const float *logits, uint32_t experts, float (&p)[ROWS_EXPERTS])
{
	float max = -INFINITY, sum = 0.0f;

#pragma unroll
	for (uint32_t i = 0; i < ROWS_EXPERTS; i += 4) {
		const uint32_t e = rows_expert(i);
		const float4 v = e < experts ? __ldg((const float4 *)(logits + e)) : make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);

		p[i] = v.x;
		p[i + 1] = v.y;
		p[i + 2] = v.z;
		p[i + 3] = v.w;
		max = fmaxf(max, fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)));
	}
	for (uint32_t apart = ROWS_LANES / 2; apart > 0; apart /= 2) {
		max = fmaxf(max, __shfl_xor_sync(ROWS_ALL, max, apart));
	}
#pragma unroll
	for (uint32_t i = 0; i < ROWS_EXPERTS; i++) {
		p[i] = i / 4 * ROWS_LANES * 4 < experts ? expf(p[i] - max) : 0.0f;
		sum += p[i];
	}
	sum = rows_sum(sum, ROWS_LANES);
#pragma unroll
	for (uint32_t i = 0; i < ROWS_EXPERTS; i++) {
		p[i] = i / 4 * ROWS_LANES * 4 < experts ? __fdiv_rn(p[i], sum) : 0.0f;
	}
}

/* The largest that is left, the lowest expert of equals; it is taken. Probabilities are not negative, so their bits
 * are in their order. */
static __device__ __forceinline__ uint32_t rows_take(int32_t (&left)[ROWS_EXPERTS], uint32_t experts, float *p_weight)
{
	int32_t best = ROWS_TAKEN;
	uint32_t id = ROWS_NONE;

#pragma unroll
	for (uint32_t i = 0; i < ROWS_EXPERTS; i++) {
		if (i / 4 * ROWS_LANES * 4 < experts && left[i] > best) {
			best = left[i];
			id = rows_expert(i);
		}
	}
	const int32_t most = __reduce_max_sync(ROWS_ALL, best);
	const uint32_t winner = __reduce_min_sync(ROWS_ALL, best == most ? id : ROWS_NONE);

#pragma unroll
	for (uint32_t i = 0; i < ROWS_EXPERTS; i++) {
		left[i] = rows_expert(i) == winner ? ROWS_TAKEN : left[i];
	}
	*p_weight = __int_as_float(most);

	return winner;
}

/* A warp a row. */
extern "C" __global__ void __launch_bounds__(KVK_NN_ROUTE_ROWS *ROWS_LANES) kvk_nn_route_rows(const __grid_constant__ kvk_nn_route_t r)
{
	const uint32_t lane = threadIdx.x % ROWS_LANES, row = blockIdx.x * KVK_NN_ROUTE_ROWS + threadIdx.x / ROWS_LANES;
	int32_t left[ROWS_EXPERTS];
	float p[ROWS_EXPERTS], weight = 0.0f, chosen = 0.0f;
	uint32_t id = 0;

	if (row >= r.rows) {
		return;
	}
	rows_softmax(r.logits + (size_t)row * r.experts, r.experts, p);
#pragma unroll
	for (uint32_t i = 0; i < ROWS_EXPERTS; i++) {
		left[i] = rows_expert(i) < r.experts ? __float_as_int(p[i]) : ROWS_TAKEN;
	}
	for (uint32_t k = 0; k < r.top_k; k++) {
		float taken;
		const uint32_t winner = rows_take(left, r.experts, &taken);

		id = lane == k ? winner : id;
		weight = lane == k ? taken : weight;
		chosen += taken;
	}
	if (lane < r.top_k) {
		r.ids[(size_t)row * r.top_k + lane] = id;
		r.weights[(size_t)row * r.top_k + lane] = r.norm_top_k ? __fdiv_rn(weight, chosen) : weight;
	}
}

/* ---- the next token -------------------------------------------------------------------------- */

struct rows_best {
	float value;
	uint32_t index;
};

static __device__ __forceinline__ rows_best rows_better(rows_best a, rows_best b)
{
	return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

/* The best of a warp's. */
static __device__ __forceinline__ rows_best rows_warp_best(rows_best best)
{
	for (uint32_t apart = ROWS_LANES / 2; apart > 0; apart /= 2) {
		best = rows_better(best, {__shfl_xor_sync(ROWS_ALL, best.value, apart), __shfl_xor_sync(ROWS_ALL, best.index, apart)});
	}

	return best;
}

/* Of every `threads`-th quad of a row, from number `own` on. A NaN is not chosen. */
static __device__ __forceinline__ rows_best rows_thread_best(const float *x, uint32_t n, uint32_t own, uint32_t threads)
{
	const uint32_t quads = n % 4 == 0 ? n / 4 : 0; /* else rows do not begin at multiples of 16 bytes */
	rows_best best = {-INFINITY, ROWS_NONE};

#pragma unroll 4
	for (uint32_t q = own; q < quads; q += threads) {
		const float4 v = __ldg((const float4 *)x + q);

		best = rows_better(best, {v.x, 4 * q});
		best = rows_better(best, {v.y, 4 * q + 1});
		best = rows_better(best, {v.z, 4 * q + 2});
		best = rows_better(best, {v.w, 4 * q + 3});
	}
	for (uint32_t i = 4 * quads + own; i < n; i += threads) {
		best = rows_better(best, {__ldg(x + i), i});
	}

	return best;
}

/* A cluster a row: one block would be alone with a row of 600 KiB. */
extern "C" __global__ void __cluster_dims__(KVK_NN_CHOOSE_BLOCKS, 1, 1) __launch_bounds__(KVK_NN_CHOOSE_THREADS)
kvk_nn_choose_rows(const __grid_constant__ kvk_nn_choose_t c)
{
	__shared__ rows_best warps[KVK_NN_CHOOSE_THREADS / ROWS_LANES], of_block;
	const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
	const uint32_t row = blockIdx.x / KVK_NN_CHOOSE_BLOCKS, rank = blockIdx.x % KVK_NN_CHOOSE_BLOCKS;
	const uint32_t lane = threadIdx.x % ROWS_LANES, own = rank * KVK_NN_CHOOSE_THREADS + threadIdx.x;
	const rows_best none = {-INFINITY, ROWS_NONE};
	const float *x = c.logits + (size_t)row * c.vocab;
	rows_best best = rows_warp_best(rows_thread_best(x, c.vocab, own, KVK_NN_CHOOSE_BLOCKS * KVK_NN_CHOOSE_THREADS));

	if (lane == 0) {
		warps[threadIdx.x / ROWS_LANES] = best;
	}
	__syncthreads();
	if (threadIdx.x < ROWS_LANES) {
		best = rows_warp_best(lane < KVK_NN_CHOOSE_THREADS / ROWS_LANES ? warps[lane] : none);
	}
	if (threadIdx.x == 0) {
		of_block = best;
	}
	cluster.sync();
	if (rank == 0 && threadIdx.x < ROWS_LANES) {
		best = rows_warp_best(lane < KVK_NN_CHOOSE_BLOCKS ? *cluster.map_shared_rank(&of_block, lane) : none);
		if (lane == 0) {
			c.ids[row] = best.index == ROWS_NONE ? 0 : best.index;
		}
	}
	cluster.sync(); /* blocks stay while others read their memory */
}

#endif
