/* attention.cuh -- attention of kvk/nn.h, for sm_90a, of tiles of up to 64 virtual rows; attention_wide.cuh has others.
 *
 * A block has one tile of rows and one KV head: its virtual row v is query head v % group of the tile's token
 * v / group. Each of its four warps owns 16 of them over all keys. Keys and values come as halves of tiles of 64 tokens
 * (K of tile 0, V of tile 0, K of tile 1, ...) through a ring of four slots in shared memory: while one is read, three
 * are on their way.
 *
 * Blocks begin in the order of the tiles, those with most keys first, and of a tile by KV head, blockIdx.x. If a head's
 * tiles came one after another, the longest ones of the last head would begin late and end alone.
 *
 * Where all tiles have 32 virtual rows at most, as single tokens do, blocks of two warps and three slots do the same:
 * more of them fit on an SM, so that less is left for a last wave of few blocks.
 *
 * A row's bits depend on its own inputs. Tiles of keys begin at position 0 whatever the tile of rows; all sums run in
 * one order; no sum is split. Key 0 belongs to every row, so each row's maximum is a number from the first tile on: a
 * tile that is masked as a whole for a row leaves the maximum, rescales by 2^0 = 1, and adds zeros.
 *
 * The row's sum is of e^(s - maximum) before the rounding to BF16, as in the twin.
 */
#ifndef KVK_NN_ATTENTION_CUH
#define KVK_NN_ATTENTION_CUH

#include "nn/device/attention.h"

#define ATTENTION_KEYS   KVK_NN_ATTENTION_KEYS
#define ATTENTION_GROUPS (ATTENTION_KEYS / 16u) /* 16 tokens lie in one block of the cache */
#define ATTENTION_ALL    0xffffffffu

extern __shared__ __align__(1024) uint8_t attention_shared[];

/* ---- instructions ---------------------------------------------------------------------------- */

/* 16 bytes to shared memory; bytes = 0: zeros, and nothing is read. */
static __device__ __forceinline__ void attention_copy(uint32_t to, const uint8_t *from, uint32_t bytes)
{
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

static __device__ __forceinline__ void attention_commit(void)
{
	asm volatile("cp.async.commit_group;" ::: "memory");
}

/* This thread's copies have come, but for the last N groups of them. */
template <uint32_t N> static __device__ __forceinline__ void attention_wait(void)
{
	asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Four 8 x 8 matrices. Lane i names row i % 8 of matrix i / 8. It gets two elements of each: row i / 4, columns
 * i % 4 * 2 and the next; transposed: rows i % 4 * 2 and the next, column i / 4. */
static __device__ __forceinline__ void attention_load(uint32_t (&to)[4], uint32_t from)
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
		     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
		     : "r"(from)
		     : "memory");
}

static __device__ __forceinline__ void attention_load_transposed(uint32_t (&to)[4], uint32_t from)
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
		     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
		     : "r"(from)
		     : "memory");
}

/* sum[16][8] += a[16][16] b[16][8]. Of sums lane i has row i / 4, columns i % 4 * 2 and the next, then row
 * i / 4 + 8. */
static __device__ __forceinline__ void attention_multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
	asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
		     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
		     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* 2^x; 2^0 is 1, 2^-inf is 0. */
static __device__ __forceinline__ float attention_exp2(float x)
{
	float y;

	asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));

	return y;
}

/* Two values rounded to BF16, the first in the lower half. */
static __device__ __forceinline__ uint32_t attention_pack(float first, float second)
{
	uint32_t both;

	asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));

	return both;
}

/* ---- keys and values ------------------------------------------------------------------------- */

/* How a thread copies halves, one after another: of each it has one piece of 16 bytes of every STEP-th token. A slot
 * has columns of PITCH bytes of each token, one behind the other. In them the pieces of a token are permuted, c at
 * c ^ (token % 8), so that a matrix's eight rows lie in different banks. */
template <uint32_t D, uint32_t THREADS, uint32_t SLOTS_, uint32_t PITCH_> struct attention_feed {
	static constexpr uint32_t SLOTS = SLOTS_, PITCH = PITCH_;
	static constexpr uint32_t ROW = D * 2u, PIECES = D / 8u, HALF = ATTENTION_KEYS * ROW;
	static constexpr uint32_t STEP = THREADS / PIECES, PASSES = 16u / STEP; /* passes: of 16 tokens */
	static_assert(STEP % 8u == 0 || STEP == 4u, "copy_half() permutes these alone");

	const uint8_t *from; /* this thread's piece of its first token, were that in row 0 of the cache */
	uint32_t entry;      /* of the table: the tile's first block */
	uint32_t within;     /* tokens of that block before the tile */
	uint32_t last;       /* position of the last key */
	uint32_t to;         /* this thread's first piece in slot 0 */
	uint32_t block[ATTENTION_GROUPS]; /* of each 16 tokens of the tile */
};

/* Blocks of the tile at `position`. They are used a step later, so that no copy waits for this load. */
template <class F>
static __device__ __forceinline__ void attention_look_up(const kvk_nn_attention_t &a, F &f, uint32_t position)
{
	uint32_t entry = f.entry, within = f.within;

#pragma unroll
	for (uint32_t g = 0; g < ATTENTION_GROUPS; g++) {
		f.block[g] = position + g * 16u <= f.last ? __ldg(a.blocks + entry) : 0;
		within += 16u;
		if (within == a.shape.block_tokens) {
			within = 0;
			entry++;
		}
	}
}

/* To the tile at `position`, the next one. */
template <class F>
static __device__ __forceinline__ void attention_advance(const kvk_nn_attention_t &a, F &f, uint32_t position)
{
#pragma unroll
	for (uint32_t g = 0; g < ATTENTION_GROUPS; g++) {
		f.within += 16u;
		if (f.within == a.shape.block_tokens) {
			f.within = 0;
			f.entry++;
		}
	}
	attention_look_up(a, f, position);
}

template <class F> static __device__ __forceinline__ uint32_t attention_slot(uint32_t position, uint32_t which)
{
	return (position / ATTENTION_KEYS * 2u + which) % F::SLOTS;
}

/* Keys (WHICH: 0) or values (1) of the tile at `position`. */
template <uint32_t WHICH, class F>
static __device__ __forceinline__ void attention_copy_half(const kvk_nn_attention_t &a, const F &f, uint32_t position)
{
	const uint32_t left = f.last - position, token = threadIdx.x / f.PIECES, token_bytes = a.shape.kv_heads * f.ROW;
	const uint32_t to = f.to + attention_slot<F>(position, WHICH) * f.HALF;
	uint32_t within = f.within;

#pragma unroll
	for (uint32_t g = 0; g < ATTENTION_GROUPS; g++) {
		const uint32_t row = (f.block[g] * 2u + WHICH) * a.shape.block_tokens + within;
		const uint8_t *from = f.from + (uint64_t)row * token_bytes;

#pragma unroll
		for (uint32_t i = 0; i < f.PASSES; i++) {
			const uint32_t later = g * 16u + i * f.STEP;

			/* Beyond the last key the cache may hold NaN, and 0 times that is not 0. Four tokens later the place of a
			 * piece has another upper bit, where token is below 4. */
			attention_copy((to + later * f.PITCH) ^ (later % 8u << 4), from + i * f.STEP * token_bytes,
				       token + later <= left ? 16u : 0);
		}
		within = within + 16u == a.shape.block_tokens ? 0 : within + 16u;
	}
}

/* The next half; values are the last of their tile. One group of copies also where no half is left: attention_wait()
 * counts them. */
template <uint32_t WHICH, class F>
static __device__ __forceinline__ void attention_copy_next(const kvk_nn_attention_t &a, F &f, uint32_t position)
{
	if (position <= f.last) {
		attention_copy_half<WHICH>(a, f, position);
		if (WHICH == 1u) {
			attention_advance(a, f, position + ATTENTION_KEYS);
		}
	}
	attention_commit();
}

template <class F>
static __device__ __forceinline__ F attention_open(const kvk_nn_attention_t &a, const kvk_nn_tile_t &tile, uint32_t shared)
{
	constexpr uint32_t COLUMN = F::PITCH / 16u;
	const uint32_t piece = threadIdx.x % F::PIECES, token = threadIdx.x / F::PIECES;
	F f;

	f.from = (const uint8_t *)a.cache + (size_t)(token * a.shape.kv_heads + blockIdx.x) * f.ROW + piece * 16u;
	f.entry = tile.sequence * a.max_blocks;
	f.within = 0;
	f.last = tile.position + tile.rows - 1u;
	f.to = shared + piece / COLUMN * (ATTENTION_KEYS * f.PITCH) + token * f.PITCH + ((piece % COLUMN ^ token % 8u) << 4);
	attention_look_up(a, f, 0);

	return f;
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* The two rows of a lane: lane / 4 of the warp's 16, and lane / 4 + 8. Virtual rows beyond the tile's have queries of 0
 * and the last row's position; their sums are not stored. */
template <uint32_t D> struct attention_rows {
	uint32_t v; /* the warp's first virtual row */
	uint32_t position[2];
	uint32_t first, end;  /* positions of the warp's rows: the least, and beyond the greatest; 0: no rows */
	float max[2], sum[2]; /* sum: of this lane's keys */
	float o[D / 8u][4];
};

template <uint32_t D>
static __device__ __forceinline__ void attention_open_rows(const kvk_nn_attention_t &a, const kvk_nn_tile_t &tile, uint32_t v,
							   attention_rows<D> &r)
{
	const uint32_t group = a.shape.heads / a.shape.kv_heads, end = tile.rows - 1u;

	r.v = v;
	r.first = tile.position + min(v / group, end);
	r.end = v / group < tile.rows ? tile.position + min((v + 15u) / group, end) + 1u : 0;
#pragma unroll
	for (uint32_t i = 0; i < 2u; i++) {
		r.position[i] = tile.position + min((v + threadIdx.x % 32u / 4u + i * 8u) / group, end);
		r.max[i] = -INFINITY;
		r.sum[i] = 0;
	}
#pragma unroll
	for (uint32_t n = 0; n < D / 8u; n++) {
		r.o[n][0] = r.o[n][1] = r.o[n][2] = r.o[n][3] = 0;
	}
}

/* Where a lane's values of its row i of the warp's, which begin at `first`, are among queries and in the result; false:
 * it is no row of the tile. */
template <uint32_t D>
static __device__ __forceinline__ bool attention_find(const kvk_nn_attention_t &a, const kvk_nn_tile_t &tile, uint32_t first, uint32_t i,
						      size_t *p_at)
{
	const uint32_t group = a.shape.heads / a.shape.kv_heads, lane = threadIdx.x % 32u;
	const uint32_t v = first + lane / 4u + i * 8u, token = v / group;

	*p_at = ((size_t)(tile.row + token) * a.shape.heads + blockIdx.x * group + v % group) * D + lane % 4u * 2u;

	return token < tile.rows;
}

/* Queries as the first factor of products: q[k] has inputs 16 k to 16 k + 15 of the rows. */
template <uint32_t D>
static __device__ __forceinline__ void attention_load_queries(const kvk_nn_attention_t &a, const kvk_nn_tile_t &tile, uint32_t v,
							      uint32_t (&q)[D / 16u][4])
{
#pragma unroll
	for (uint32_t i = 0; i < 2u; i++) {
		size_t at;
		const bool is_there = attention_find<D>(a, tile, v, i, &at);

#pragma unroll
		for (uint32_t k = 0; k < D / 16u; k++) {
			q[k][i] = is_there ? __ldg((const uint32_t *)(a.q + at + k * 16u)) : 0;
			q[k][i + 2u] = is_there ? __ldg((const uint32_t *)(a.q + at + k * 16u + 8u)) : 0;
		}
	}
}

/* s[n]: of keys 8 n to 8 n + 7 of the half. Matrices of a load: keys 16 n, inputs 16 k; the next 8 inputs; the next 8
 * keys; both. */
template <uint32_t D>
static __device__ __forceinline__ void attention_score(const uint32_t (&q)[D / 16u][4], uint32_t half, float (&s)[8][4])
{
	const uint32_t lane = threadIdx.x % 32u;
	const uint32_t from = half + (lane / 16u * 8u + lane % 8u) * (D * 2u) + ((lane / 8u % 2u ^ lane % 8u) << 4);

#pragma unroll
	for (uint32_t n = 0; n < 8u; n++) {
		s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
	}
#pragma unroll
	for (uint32_t k = 0; k < D / 16u; k++) {
#pragma unroll
		for (uint32_t n = 0; n < 4u; n++) {
			uint32_t b[4];

			attention_load(b, (from ^ k << 5) + n * 16u * (D * 2u));
			attention_multiply(s[2u * n], q[k], b[0], b[1]);
			attention_multiply(s[2u * n + 1u], q[k], b[2], b[3]);
		}
	}
}

/* Keys from `base` on; those beyond a row's own position count as -inf. */
template <uint32_t D> static __device__ __forceinline__ void attention_mask(const attention_rows<D> &r, uint32_t base, float (&s)[8][4])
{
	const uint32_t key = base + threadIdx.x % 4u * 2u;

#pragma unroll
	for (uint32_t n = 0; n < 8u; n++) {
#pragma unroll
		for (uint32_t i = 0; i < 4u; i++) {
			s[n][i] = key + n * 8u + i % 2u > r.position[i / 2u] ? -INFINITY : s[n][i];
		}
	}
}

/* s becomes e^(s - maximum); what has been summed of values needs `rescale` for the new maximum. */
template <uint32_t D> static __device__ __forceinline__ void attention_soften(attention_rows<D> &r, float (&s)[8][4], float (&rescale)[2])
{
	const float factor = (D == 128u ? 0.08838834764831845f : 0.125f) * 1.4426950408889634f; /* log2(e) / sqrt(D) */

#pragma unroll
	for (uint32_t i = 0; i < 2u; i++) {
		float max = r.max[i], sum = 0, shift;

#pragma unroll
		for (uint32_t n = 0; n < 8u; n++) {
			max = fmaxf(max, fmaxf(s[n][2u * i], s[n][2u * i + 1u]));
		}
		max = fmaxf(max, __shfl_xor_sync(ATTENTION_ALL, max, 1));
		max = fmaxf(max, __shfl_xor_sync(ATTENTION_ALL, max, 2));
		shift = -max * factor;
#pragma unroll
		for (uint32_t n = 0; n < 8u; n++) {
			s[n][2u * i] = attention_exp2(fmaf(s[n][2u * i], factor, shift));
			s[n][2u * i + 1u] = attention_exp2(fmaf(s[n][2u * i + 1u], factor, shift));
			sum += s[n][2u * i] + s[n][2u * i + 1u];
		}
		rescale[i] = attention_exp2((r.max[i] - max) * factor);
		r.sum[i] = fmaf(r.sum[i], rescale[i], sum);
		r.max[i] = max;
	}
}

template <uint32_t D> static __device__ __forceinline__ void attention_rescale(attention_rows<D> &r, const float (&rescale)[2])
{
	/* Times 1 is what it was. */
	if (__any_sync(ATTENTION_ALL, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
		for (uint32_t n = 0; n < D / 8u; n++) {
			r.o[n][0] *= rescale[0];
			r.o[n][1] *= rescale[0];
			r.o[n][2] *= rescale[1];
			r.o[n][3] *= rescale[1];
		}
	}
}

/* Sums of a lane in two products of keys are the first factor of the next: p[k] has keys 16 k to 16 k + 15. */
static __device__ __forceinline__ void attention_round(const float (&s)[8][4], uint32_t (&p)[4][4])
{
#pragma unroll
	for (uint32_t k = 0; k < 4u; k++) {
#pragma unroll
		for (uint32_t i = 0; i < 4u; i++) {
			const float(&of)[4] = s[2u * k + i / 2u];

			p[k][i] = attention_pack(of[i % 2u * 2u], of[i % 2u * 2u + 1u]);
		}
	}
}

/* Matrices of a load: keys 16 k, outputs 16 n; the next 8 keys; the next 8 outputs; both. */
template <uint32_t D>
static __device__ __forceinline__ void attention_weigh(const uint32_t (&p)[4][4], uint32_t half, float (&o)[D / 8u][4])
{
	const uint32_t lane = threadIdx.x % 32u;
	const uint32_t from = half + (lane / 8u % 2u * 8u + lane % 8u) * (D * 2u) + ((lane / 16u ^ lane % 8u) << 4);

#pragma unroll
	for (uint32_t k = 0; k < 4u; k++) {
#pragma unroll
		for (uint32_t n = 0; n < D / 16u; n++) {
			uint32_t b[4];

			attention_load_transposed(b, (from ^ n << 5) + k * 16u * (D * 2u));
			attention_multiply(o[2u * n], p[k], b[0], b[1]);
			attention_multiply(o[2u * n + 1u], p[k], b[2], b[3]);
		}
	}
}

template <uint32_t D> static __device__ __forceinline__ void attention_store(const kvk_nn_attention_t &a, const attention_rows<D> &r)
{
	const kvk_nn_tile_t tile = a.tile[blockIdx.y]; /* again: registers are scarce in between */

#pragma unroll
	for (uint32_t i = 0; i < 2u; i++) {
		size_t at;
		float sum = r.sum[i] + __shfl_xor_sync(ATTENTION_ALL, r.sum[i], 1), share;

		sum += __shfl_xor_sync(ATTENTION_ALL, sum, 2);
		share = 1.0f / sum;
		if (attention_find<D>(a, tile, r.v, i, &at)) {
#pragma unroll
			for (uint32_t n = 0; n < D / 8u; n++) {
				*(uint32_t *)(a.out + at + n * 8u) = attention_pack(r.o[n][2u * i] * share, r.o[n][2u * i + 1u] * share);
			}
		}
	}
}

/* ---- a block --------------------------------------------------------------------------------- */

/* The next half has come, for all threads, and all have read the one before it: its slot is free. */
template <class F> static __device__ __forceinline__ void attention_await(void)
{
	attention_wait<F::SLOTS - 2u>();
	__syncthreads();
}

/* Half h is read while up to h + SLOTS - 1 are on their way: of four slots the values of the next tile behind keys, of
 * three its keys; then what follows. */
template <uint32_t D, uint32_t THREADS, uint32_t SLOTS>
static __device__ __forceinline__ void attention_run(const kvk_nn_attention_t &a)
{
	typedef attention_feed<D, THREADS, SLOTS, D * 2u> feed;
	constexpr uint32_t BEHIND_KEYS = SLOTS == 4u, BEHIND_VALUES = 1u - BEHIND_KEYS;
	const kvk_nn_tile_t tile = a.tile[blockIdx.y];
	const uint32_t shared = (uint32_t)__cvta_generic_to_shared(attention_shared);
	/* Single tokens fill one warp of a block only: another warp in each block, so that the work spreads over an SM's four
	 * schedulers. */
	const uint32_t v = ((threadIdx.x / 32u + blockIdx.x + blockIdx.y) & (THREADS / 32u - 1u)) * 16u;
	feed f = attention_open<feed>(a, tile, shared);
	attention_rows<D> r;
	uint32_t q[D / 16u][4];

	attention_copy_next<0>(a, f, 0);
	attention_copy_next<1>(a, f, 0);
	if (SLOTS == 4u) {
		attention_copy_next<0>(a, f, ATTENTION_KEYS);
	}
	attention_open_rows(a, tile, v, r);
	attention_load_queries<D>(a, tile, v, q);
	for (uint32_t base = 0; base <= f.last; base += ATTENTION_KEYS) {
		uint32_t p[4][4];

		attention_await<feed>();
		attention_copy_next<BEHIND_KEYS>(a, f, base + ATTENTION_KEYS);
		if (base < r.end) {
			float s[8][4], rescale[2];

			attention_score<D>(q, shared + attention_slot<feed>(base, 0) * f.HALF, s);
			if (base + ATTENTION_KEYS - 1u > r.first) {
				attention_mask(r, base, s);
			}
			attention_soften(r, s, rescale);
			attention_rescale(r, rescale);
			attention_round(s, p);
		}
		attention_await<feed>();
		attention_copy_next<BEHIND_VALUES>(a, f, base + (SLOTS - 2u) * ATTENTION_KEYS);
		if (base < r.end) {
			attention_weigh<D>(p, shared + attention_slot<feed>(base, 1) * f.HALF, r.o);
		}
	}
	attention_store(a, r);
}

extern "C" __global__ void __launch_bounds__(KVK_NN_ATTENTION_THREADS, 4)
kvk_nn_attention_64(const __grid_constant__ kvk_nn_attention_t a)
{
	attention_run<64, KVK_NN_ATTENTION_THREADS, KVK_NN_ATTENTION_SLOTS>(a);
}

extern "C" __global__ void __launch_bounds__(KVK_NN_ATTENTION_THREADS, 3)
kvk_nn_attention_128(const __grid_constant__ kvk_nn_attention_t a)
{
	attention_run<128, KVK_NN_ATTENTION_THREADS, KVK_NN_ATTENTION_SLOTS>(a);
}

extern "C" __global__ void __launch_bounds__(KVK_NN_ATTENTION_FEW_THREADS, 8)
kvk_nn_attention_64_few(const __grid_constant__ kvk_nn_attention_t a)
{
	attention_run<64, KVK_NN_ATTENTION_FEW_THREADS, KVK_NN_ATTENTION_FEW_SLOTS>(a);
}

extern "C" __global__ void __launch_bounds__(KVK_NN_ATTENTION_FEW_THREADS, 4)
kvk_nn_attention_128_few(const __grid_constant__ kvk_nn_attention_t a)
{
	attention_run<128, KVK_NN_ATTENTION_FEW_THREADS, KVK_NN_ATTENTION_FEW_SLOTS>(a);
}

#endif
