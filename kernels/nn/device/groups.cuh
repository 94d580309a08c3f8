/* groups.cuh -- y = x w in BF16 (kvk_nn_product_t) of groups, each with a matrix of its own. Through ring.cuh.
 *
 * A group's weights are read for each of its tiles. So its last tile, or its only one, has up to 160 rows, and there
 * the operands are swapped: outputs are the first operand of an instruction, which always has 64, and rows are the
 * second, which has any multiple of eight. Each multiplying warp group has one panel of weights, in two halves of 64
 * outputs: of SWIGLU gates and ups, so that a thread has both of an element. Tiles of 128 rows, or nearly so, are
 * computed as those of product.cuh: wider second operands need less of shared memory.
 */
#ifndef KVK_NN_GROUPS_CUH
#define KVK_NN_GROUPS_CUH

#include "nn/device/product.cuh"

namespace nn_product {

using group_ring = ring<KVK_NN_GROUP_ROWS, KVK_NN_GROUP_PANELS, KVK_NN_GROUP_STAGES, KVK_NN_GROUP_STAGES - 2u>;

enum : uint32_t {
	GRAIN = 8, /* rows of an instruction are a multiple of it */
	GRAINS = KVK_NN_GROUP_ROWS / GRAIN,
	FEWEST_AS_ROWS = 105, /* rows of a tile that are the first operand: at fewer, swapped operands are faster */
	HALF_SUMS = KVK_NN_GROUP_ROWS * HALF / GROUP, /* of a thread, in 64 outputs of its panel */
};

static_assert(GRAIN == 8, "rows of a block of the swizzle, and of a matrix that is transposed");
static_assert(KVK_NN_GROUP_PANELS == 2 && KVK_NN_PANEL == 2 * HALF, "a panel a warp group, in two halves");

/* ---- tiles ----------------------------------------------------------------------------------- */

/* As an instruction has them. */
static __device__ __forceinline__ uint32_t round_rows(uint32_t rows)
{
	return (rows + GRAIN - 1u) / GRAIN * GRAIN;
}

/* ---- multiplying ----------------------------------------------------------------------------- */

/* What one warp group has of a tile: a panel, and rows; 0: nothing. */
struct share {
	uint32_t row, rows, panel;
	uint32_t stage_rows, stage_weights; /* where they are in a stage */
};

/* Of two panels one each; of one panel each has half of the rows. */
static __device__ __forceinline__ share find_share(const tile &t, uint32_t which)
{
	if (t.panels == 2u) {
		return {t.row, t.rows, t.panel + which, 0, group_ring::WEIGHTS + which * TILE_BYTES};
	}
	const uint32_t low = min(t.rows, round_rows((t.rows + 1u) / 2u)), from = which * low;

	return {t.row + from, which == 0 ? low : t.rows - low, t.panel, from * ROW_BYTES, group_ring::WEIGHTS};
}

/* The sums of COLUMNS rows in both halves of a panel. */
template <uint32_t COLUMNS> struct column_sums {
	float *d; /* [2][HALF_SUMS] */
	uint32_t stage_rows, stage_weights;

	__device__ __forceinline__ void hold() const
	{
		wgmma::hold<COLUMNS * HALF / GROUP>(d);
		wgmma::hold<COLUMNS * HALF / GROUP>(d + HALF_SUMS);
	}

	__device__ __forceinline__ void enqueue(uint32_t stage, uint32_t step) const
	{
		const uint64_t rows = wgmma::describe(stage + stage_rows), low = wgmma::describe(stage + stage_weights);
		const uint64_t high = wgmma::describe(stage + stage_weights + HALF * ROW_BYTES);

#pragma unroll
		for (uint32_t i = 0; i < KVK_NN_DEPTH / 16u; i++) {
			wgmma::multiply<COLUMNS>(d, low + 2u * i, rows + 2u * i, step | i);
			wgmma::multiply<COLUMNS>(d + HALF_SUMS, high + 2u * i, rows + 2u * i, step | i);
		}
	}
};

/* By instructions of the fewest rows that are enough. Rows that are not there make sums of whatever lies there. */
template <uint32_t COLUMNS>
static __device__ __forceinline__ void sum_share(const block &b, uint32_t done, const share &own, uint32_t columns, float *d)
{
	if (columns == COLUMNS) {
		sum_tile<group_ring>(b, done, column_sums<COLUMNS>{d, own.stage_rows, own.stage_weights});
	} else if constexpr (COLUMNS > GRAIN) {
		sum_share<COLUMNS - GRAIN>(b, done, own, columns, d);
	}
}

/* ---- storing --------------------------------------------------------------------------------- */

/* A thread's sums: d[m][4 i + 2 h + j] is output 64 m + 16 * warp + lane / 4 + 8 h of the panel, and row
 * 8 i + 2 (lane % 4) + j of the share. */

/* Of a matrix of 8 x 8 lane l has row l / 4, columns 2 (l % 4) and the next; then of the transposed one. */
static __device__ __forceinline__ uint32_t transpose_matrix(uint32_t pair)
{
	uint32_t out;

	asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));

	return out;
}

/* Matrix m of the four of a turn, [8 outputs][8 rows], rounded: of products both halves' two of eight rows; of gates
 * times ups two of each eight of 16 rows. */
template <kvk_nn_out_t OUT> static __device__ __forceinline__ uint32_t round_matrix(const float *d, uint32_t turn, uint32_t m)
{
	const uint32_t h = m % 2u;

	if (OUT == KVK_NN_BF16) {
		const float *from = d + m / 2u * HALF_SUMS + 4u * turn + 2u * h;

		return transpose_matrix(pack(from[0], from[1]));
	}
	const float *gates = d + 4u * (2u * turn + m / 2u) + 2u * h, *ups = gates + HALF_SUMS;

	return transpose_matrix(pack(open_gate(gates[0]) * ups[0], open_gate(gates[1]) * ups[1]));
}

/* BF16: in each turn a lane gets eight outputs that follow each other, of matrix lane % 4. Turns of 16 rows are taken
 * together: while one waits for other lanes, the other one is computed. */
template <kvk_nn_out_t OUT>
static __device__ __forceinline__ void store_share_rounded(const kvk_nn_product_t &p, const share &own, const float *d)
{
	constexpr bool IS_HALVED = OUT == KVK_NN_SWIGLU;
	constexpr uint32_t ROWS = IS_HALVED ? 2u * GRAIN : GRAIN, OUTPUTS = IS_HALVED ? HALF : KVK_NN_PANEL;
	constexpr uint32_t TURNS = 2u * GRAIN / ROWS;
	const uint32_t width = IS_HALVED ? p.n / 2u : p.n;
	const uint32_t m = threadIdx.x % 4u, warp = threadIdx.x / 32u % 4u, lane = threadIdx.x % 32u;
	const uint32_t low = lane / 4u + (IS_HALVED ? m / 2u * GRAIN : 0);
	const uint32_t output = own.panel * OUTPUTS + (IS_HALVED ? 0 : m / 2u * HALF) + warp * 16u + m % 2u * 8u;
	kvk_bf16_t *y = (kvk_bf16_t *)p.y + (size_t)(own.row + low) * width + output;

#pragma unroll
	for (uint32_t first = 0; first < KVK_NN_GROUP_ROWS / ROWS; first += TURNS) {
		uint4 out[TURNS];

		if (first * ROWS >= own.rows) {
			break;
		}
#pragma unroll
		for (uint32_t t = 0; t < TURNS; t++) {
			out[t] = {round_matrix<OUT>(d, first + t, 0), round_matrix<OUT>(d, first + t, 1),
				  round_matrix<OUT>(d, first + t, 2), round_matrix<OUT>(d, first + t, 3)};
		}
#pragma unroll
		for (uint32_t t = 0; t < TURNS; t++) {
			out[t] = transpose(out[t]);
		}
#pragma unroll
		for (uint32_t t = 0; t < TURNS; t++) {
			const uint32_t row = (first + t) * ROWS;

			if (row + low < own.rows && output < width) {
				*(uint4 *)(y + (size_t)row * width) = out[t];
			}
		}
	}
}

/* fp32: eight lanes' outputs of a row are a sector of memory. */
template <kvk_nn_out_t OUT>
static __device__ __forceinline__ void store_share_floats(const kvk_nn_product_t &p, const share &own, const float *d)
{
	const uint32_t warp = threadIdx.x / 32u % 4u, lane = threadIdx.x % 32u, low = lane % 4u * 2u;
	const uint32_t output = own.panel * KVK_NN_PANEL + warp * 16u + lane / 4u;
	float *y = (float *)p.y + (size_t)(own.row + low) * p.n + output;

#pragma unroll
	for (uint32_t i = 0; i < GRAINS; i++) {
		if (i * GRAIN >= own.rows) {
			break;
		}
#pragma unroll
		for (uint32_t v = 0; v < 8u; v++) {
			const uint32_t m = v / 4u, h = v / 2u % 2u, j = v % 2u;
			float *to = y + (size_t)(i * GRAIN + j) * p.n + m * HALF + h * 8u;

			if (i * GRAIN + low + j < own.rows && output + m * HALF + h * 8u < p.n) {
				const float sum = d[m * HALF_SUMS + 4u * i + 2u * h + j];

				*to = OUT == KVK_NN_ADD ? *to + sum : sum;
			}
		}
	}
}

static __device__ __forceinline__ bool is_as_rows(const tile &t)
{
	return t.panels == KVK_NN_GROUP_PANELS && t.rows >= FEWEST_AS_ROWS && t.rows <= KVK_NN_PRODUCT_ROWS;
}

/* By one warp group, with swapped operands. */
template <kvk_nn_out_t OUT>
static __device__ __forceinline__ void compute_share(const kvk_nn_product_t &p, const block &b, const share &own, uint32_t done)
{
	/* The same in all lanes, which the compiler must know. */
	const uint32_t columns = __shfl_sync(ALL_LANES, round_rows(own.rows), 0);
	float d[2u * HALF_SUMS] = {};

	if (columns == 0) {
		pass_tile<group_ring>(b, done);
		return;
	}
	sum_share<KVK_NN_GROUP_ROWS>(b, done, own, columns, d);
	if (OUT == KVK_NN_BF16 || OUT == KVK_NN_SWIGLU) {
		store_share_rounded<OUT>(p, own, d);
	} else {
		store_share_floats<OUT>(p, own, d);
	}
}

template <kvk_nn_out_t OUT>
static __device__ __forceinline__ void compute_groups(const kvk_nn_product_t &p, const block &b, uint32_t count, uint32_t which)
{
	for (uint32_t done = 0; done < count * b.steps; done += b.steps) {
		const tile t = read_tile<group_ring>(b, done);

		if (__shfl_sync(ALL_LANES, is_as_rows(t), 0)) {
			compute_rows<OUT, group_ring>(p, b, t, which, done);
		} else {
			compute_share<OUT>(p, b, find_share(t, which), done);
		}
	}
}

template <kvk_nn_out_t OUT> static __device__ __forceinline__ void run_groups(const kvk_nn_product_t &p)
{
	const block b = open_block<group_ring>(p);
	const tiles<KVK_NN_GROUP_ROWS> all = open_tiles<KVK_NN_GROUP_ROWS>(p, b, KVK_NN_GROUP_PANELS);

	run_roles<group_ring>(p, b, all, [&](uint32_t which) { compute_groups<OUT>(p, b, all.count, which); });
}

} // namespace nn_product

NN_PRODUCT_KERNEL(kvk_nn_product_bf16_groups, run_groups<KVK_NN_BF16>)
NN_PRODUCT_KERNEL(kvk_nn_product_f32_groups, run_groups<KVK_NN_F32>)
NN_PRODUCT_KERNEL(kvk_nn_product_add_groups, run_groups<KVK_NN_ADD>)
NN_PRODUCT_KERNEL(kvk_nn_product_swiglu_groups, run_groups<KVK_NN_SWIGLU>)

#endif
