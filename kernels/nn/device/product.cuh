/* product.cuh -- y = x w in BF16 (kvk_nn_product_t) by the matrix instructions of sm_90a, through ring.cuh.
 *
 * Tiles have 128 rows x PANELS panels of weights: two, 256 outputs, or one, where tiles of two are too few for the SMs
 * (the host chooses). Each of the two multiplying warp groups has 64 of the rows, the first operand of its
 * instructions, times all of the outputs.
 */
#ifndef KVK_NN_PRODUCT_CUH
#define KVK_NN_PRODUCT_CUH

#include "nn/device/tiles.cuh"

namespace nn_product {

template <uint32_t PANELS>
using wide_ring = ring<KVK_NN_PRODUCT_ROWS, PANELS, KVK_NN_PRODUCT_STAGES(PANELS), KVK_NN_PRODUCT_STAGES(PANELS) - 2u>;

/* Of the sums, in a thread. */
static constexpr __device__ uint32_t count_values(uint32_t panels)
{
	return panels * KVK_NN_PANEL * HALF / GROUP;
}

/* ---- multiplying ----------------------------------------------------------------------------- */

/* The sums of one warp group. */
template <class RING> struct row_sums {
	float *d;
	uint32_t half;

	__device__ __forceinline__ void hold() const
	{
		wgmma::hold<count_values(RING::PANELS)>(d);
	}

	__device__ __forceinline__ void enqueue(uint32_t stage, uint32_t step) const
	{
		const uint64_t rows = wgmma::describe(stage + half * HALF * ROW_BYTES);
		const uint64_t weights = wgmma::describe(stage + RING::WEIGHTS);

#pragma unroll
		for (uint32_t i = 0; i < KVK_NN_DEPTH / 16u; i++) {
			wgmma::multiply<RING::PANELS * KVK_NN_PANEL>(d, rows + 2u * i, weights + 2u * i, step | i);
		}
	}
};

/* ---- storing --------------------------------------------------------------------------------- */

/* Two neighbouring outputs 8 i + 2 (lane % 4) of y: rounded products, or gates times ups. */
template <kvk_nn_out_t OUT> static __device__ __forceinline__ uint32_t round_pair(const float *d, uint32_t i, uint32_t h)
{
	if (OUT == KVK_NN_BF16) {
		return pack(d[4u * i + 2u * h], d[4u * i + 2u * h + 1u]);
	}
	/* 64 gates, 64 ups, 64 gates, 64 ups: y's eight outputs i are eight gates, and the ups 64 behind them. */
	const uint32_t at = 4u * (i + i / 8u * 8u) + 2u * h;

	return pack(open_gate(d[at]) * d[at + 32u], open_gate(d[at + 1u]) * d[at + 33u]);
}

/* BF16: of 32 outputs a lane gets eight that follow each other. Eight rows that are not there are left out. */
template <kvk_nn_out_t OUT, uint32_t PANELS>
static __device__ __forceinline__ void store_rounded(const kvk_nn_product_t &p, const tile &t, uint32_t row, const float *d)
{
	constexpr uint32_t OUTPUTS = KVK_NN_PRODUCT_OUTPUTS(PANELS) / (OUT == KVK_NN_SWIGLU ? 2u : 1u);
	const uint32_t width = OUT == KVK_NN_SWIGLU ? p.n / 2u : p.n;
	const uint32_t first = t.panel * (OUTPUTS / PANELS) + threadIdx.x % 4u * 8u;

#pragma unroll
	for (uint32_t h = 0; h < 2u; h++) {
		kvk_bf16_t *y = (kvk_bf16_t *)p.y + (size_t)(t.row + row + 8u * h) * width + first;

		if (!__any_sync(ALL_LANES, row + 8u * h < t.rows)) {
			continue;
		}
#pragma unroll
		for (uint32_t m = 0; m < OUTPUTS / 32u; m++) {
			const uint4 out = transpose({round_pair<OUT>(d, 4u * m, h), round_pair<OUT>(d, 4u * m + 1u, h),
						     round_pair<OUT>(d, 4u * m + 2u, h), round_pair<OUT>(d, 4u * m + 3u, h)});

			if (row + 8u * h < t.rows && first + 32u * m < width) {
				*(uint4 *)(y + 32u * m) = out;
			}
		}
	}
}

/* If it is there. In the order of the source: the compiler would load a pair, add and store it before the next. */
static __device__ __forceinline__ float2 load_pair(const float *from, bool is_there)
{
	float2 out;

	asm volatile("{\n"
		     ".reg .pred there;\n"
		     "setp.ne.u32 there, %3, 0;\n"
		     "mov.f32 %0, 0f00000000;\n"
		     "mov.f32 %1, 0f00000000;\n"
		     "@there ld.volatile.global.v2.f32 {%0, %1}, [%2];\n"
		     "}\n"
		     : "=f"(out.x), "=f"(out.y)
		     : "l"(from), "r"((uint32_t)is_there)
		     : "memory");

	return out;
}

/* fp32: four lanes' pairs are a sector of memory. What is added to is loaded for a whole row, then stored. */
template <kvk_nn_out_t OUT, uint32_t PANELS>
static __device__ __forceinline__ void store_floats(const kvk_nn_product_t &p, const tile &t, uint32_t row, const float *d)
{
	constexpr uint32_t PAIRS = count_values(PANELS) / 4u; /* of a row */
	const uint32_t first = t.panel * KVK_NN_PANEL + threadIdx.x % 4u * 2u;

#pragma unroll
	for (uint32_t h = 0; h < 2u; h++) {
		float *y = (float *)p.y + (size_t)(t.row + row + 8u * h) * p.n + first;
		float2 old[PAIRS];

		if (row + 8u * h >= t.rows) {
			continue;
		}
		if (OUT == KVK_NN_ADD) {
#pragma unroll
			for (uint32_t i = 0; i < PAIRS; i++) {
				old[i] = load_pair(y + 8u * i, first + 8u * i < p.n);
			}
		}
#pragma unroll
		for (uint32_t i = 0; i < PAIRS; i++) {
			float2 out = {d[4u * i + 2u * h], d[4u * i + 2u * h + 1u]};

			if (OUT == KVK_NN_ADD) {
				out = {old[i].x + out.x, old[i].y + out.y};
			}
			if (first + 8u * i < p.n) {
				*(float2 *)(y + 8u * i) = out;
			}
		}
	}
}

/* By one warp group: 64 rows of the tile, those from 64 * half on. */
template <kvk_nn_out_t OUT, class RING>
static __device__ __forceinline__ void compute_rows(const kvk_nn_product_t &p, const block &b, const tile &t, uint32_t half, uint32_t done)
{
	const uint32_t row = half * HALF + threadIdx.x / 32u % 4u * 16u + threadIdx.x % 32u / 4u;
	float d[count_values(RING::PANELS)] = {};

	sum_tile<RING>(b, done, row_sums<RING>{d, half});
	if (OUT == KVK_NN_BF16 || OUT == KVK_NN_SWIGLU) {
		store_rounded<OUT, RING::PANELS>(p, t, row, d);
	} else {
		store_floats<OUT, RING::PANELS>(p, t, row, d);
	}
}

template <kvk_nn_out_t OUT, uint32_t PANELS>
static __device__ __forceinline__ void compute_wide(const kvk_nn_product_t &p, const block &b, uint32_t count, uint32_t half)
{
	for (uint32_t done = 0; done < count * b.steps; done += b.steps) {
		const tile t = read_tile<wide_ring<PANELS>>(b, done);

		if (half * HALF >= t.rows) {
			pass_tile<wide_ring<PANELS>>(b, done);
			continue;
		}
		compute_rows<OUT, wide_ring<PANELS>>(p, b, t, half, done);
	}
}

template <kvk_nn_out_t OUT, uint32_t PANELS> static __device__ __forceinline__ void run_wide(const kvk_nn_product_t &p)
{
	const block b = open_block<wide_ring<PANELS>>(p);
	const tiles<KVK_NN_PRODUCT_ROWS> all = open_tiles<KVK_NN_PRODUCT_ROWS>(p, b, PANELS);

	run_roles<wide_ring<PANELS>>(p, b, all, [&](uint32_t half) { compute_wide<OUT, PANELS>(p, b, all.count, half); });
}

} // namespace nn_product

/* A kernel of that name; then what it runs. */
#define NN_PRODUCT_KERNEL(name, ...)                                                                                   \
	extern "C" __global__ void __launch_bounds__(KVK_NN_PRODUCT_THREADS, 1)                                        \
		name(const __grid_constant__ kvk_nn_product_t p)                                                       \
	{                                                                                                              \
		nn_product::__VA_ARGS__(p);                                                                            \
	}

NN_PRODUCT_KERNEL(kvk_nn_product_bf16, run_wide<KVK_NN_BF16, 2u>)
NN_PRODUCT_KERNEL(kvk_nn_product_f32, run_wide<KVK_NN_F32, 2u>)
NN_PRODUCT_KERNEL(kvk_nn_product_add, run_wide<KVK_NN_ADD, 2u>)
NN_PRODUCT_KERNEL(kvk_nn_product_swiglu, run_wide<KVK_NN_SWIGLU, 2u>)
NN_PRODUCT_KERNEL(kvk_nn_product_bf16_panel, run_wide<KVK_NN_BF16, 1u>)
NN_PRODUCT_KERNEL(kvk_nn_product_f32_panel, run_wide<KVK_NN_F32, 1u>)
NN_PRODUCT_KERNEL(kvk_nn_product_add_panel, run_wide<KVK_NN_ADD, 1u>)
NN_PRODUCT_KERNEL(kvk_nn_product_swiglu_panel, run_wide<KVK_NN_SWIGLU, 1u>)

#endif
