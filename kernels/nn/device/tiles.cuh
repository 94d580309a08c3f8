/* tiles.cuh -- which tiles of a product each block computes, and in which order: each finds its own, from tables that
 * are the same in all.
 *
 * The rows of a group are cut into tiles of 128 rows, then a last one of up to LAST. Tiles are numbered group by group,
 * in a group column by column, in bands: blocks that run at the same time read the same weights, and the same rows soon
 * after. A wave is as many tiles as there are blocks. From wave to wave the blocks turn: else one that once has the
 * last tile of a group, which is smaller or larger than others, would have such a tile each time.
 */
#ifndef KVK_NN_TILES_CUH
#define KVK_NN_TILES_CUH

#include "nn/device/ring.cuh"

namespace nn_product {

enum : uint32_t {
	BAND = 16, /* row tiles that take turns with one tile of weights, before the next */
};

/* LAST: rows of a group's last tile, at most. */
template <uint32_t LAST> struct tiles {
	uint32_t *first;         /* [groups + 1], in shared memory */
	uint32_t *before;        /* [groups + 1]: row tiles of the groups before each, in shared memory */
	uint32_t groups, panels; /* panels: of a tile */
	uint32_t columns;        /* tiles side by side */
	uint32_t count;          /* tiles of this block */
	uint32_t wave, turn;     /* the next one's; by how many blocks each wave is turned */
};

template <uint32_t LAST> static __device__ __forceinline__ uint32_t count_wide(uint32_t rows)
{
	return rows > LAST ? (rows - LAST + KVK_NN_PRODUCT_ROWS - 1u) / KVK_NN_PRODUCT_ROWS : 0;
}

template <uint32_t LAST> static __device__ __forceinline__ uint32_t count_rows(const tiles<LAST> &all, uint32_t group)
{
	return all.first[group + 1] - all.first[group];
}

/* Of the lanes before this one. */
static __device__ __forceinline__ uint32_t sum_before(uint32_t own)
{
	uint32_t up = own;

	for (uint32_t d = 1; d < 32u; d *= 2u) {
		const uint32_t other = __shfl_up_sync(ALL_LANES, up, d);

		up += threadIdx.x % 32u >= d ? other : 0;
	}

	return up - own;
}

template <uint32_t LAST> static __device__ __forceinline__ uint32_t count_row_tiles(uint32_t rows)
{
	const uint32_t wide = count_wide<LAST>(rows);

	return wide + (rows > wide * KVK_NN_PRODUCT_ROWS);
}

/* By one warp. */
template <uint32_t LAST> static __device__ __forceinline__ void count_tiles(const tiles<LAST> &all)
{
	const uint32_t each = (all.groups + 31u) / 32u;
	const uint32_t from = min(threadIdx.x * each, all.groups), to = min(from + each, all.groups);
	uint32_t n = 0;

	for (uint32_t g = from; g < to; g++) {
		n += count_row_tiles<LAST>(count_rows(all, g));
	}
	n = sum_before(n);
	for (uint32_t g = from; g < to; g++) {
		all.before[g] = n;
		n += count_row_tiles<LAST>(count_rows(all, g));
	}
	if (threadIdx.x == 31u) {
		all.before[all.groups] = n;
	}
}

/* Of this block, in the next wave. */
template <uint32_t LAST> static __device__ __forceinline__ uint32_t find_number(const tiles<LAST> &all)
{
	return all.wave * gridDim.x + (blockIdx.x + all.wave * all.turn) % gridDim.x;
}

/* Groups have one tile, two, three or five beside each other, mostly: a step through the numbers that is no multiple of
 * these meets each of their tiles. */
static __device__ __forceinline__ uint32_t choose_turn(void)
{
	uint32_t step = gridDim.x;

	while (step % 2u == 0 || step % 3u == 0 || step % 5u == 0) {
		step++;
	}

	return step - gridDim.x;
}

/* Ends with all threads met. */
template <uint32_t LAST>
static __device__ __forceinline__ tiles<LAST> open_tiles(const kvk_nn_product_t &p, const block &b, uint32_t panels)
{
	tiles<LAST> all;

	all.groups = p.first ? p.groups : 1u;
	all.first = b.rest;
	all.before = all.first + all.groups + 1u;
	all.panels = panels;
	all.columns = (b.panels + panels - 1u) / panels;
	for (uint32_t g = threadIdx.x; g <= all.groups; g += blockDim.x) {
		all.first[g] = p.first ? p.first[g] : g == 0 ? 0 : p.max_rows;
	}
	__syncthreads();
	if (threadIdx.x < 32u) {
		count_tiles(all);
	}
	__syncthreads();
	const uint32_t n = all.before[all.groups] * all.columns;

	all.turn = choose_turn();
	all.wave = n / gridDim.x;
	all.count = all.wave + (find_number(all) < n);
	all.wave = 0;

	return all;
}

/* That tile `number` is of. */
template <uint32_t LAST> static __device__ __forceinline__ uint32_t find_group(const tiles<LAST> &all, uint32_t number)
{
	uint32_t g = 0, end = all.groups;

	while (end - g > 1u) {
		const uint32_t middle = (g + end) / 2u;

		if (all.before[middle] * all.columns <= number) {
			g = middle;
		} else {
			end = middle;
		}
	}

	return g;
}

/* Of a group with that many columns and row tiles, tile `number`: x is the column, y the row tile. */
static __device__ __forceinline__ uint2 place_tile(uint32_t columns, uint32_t row_tiles, uint32_t number)
{
	const uint32_t band_tiles = BAND * columns, band = number / band_tiles, rest = number - band * band_tiles;
	const uint32_t high = min((uint32_t)BAND, row_tiles - band * BAND);

	return {rest / high, band * BAND + rest % high};
}

/* The next tile of this block, `count` times. */
template <uint32_t LAST> static __device__ __forceinline__ tile next_tile(const block &b, tiles<LAST> *all)
{
	const uint32_t number = find_number(*all), g = find_group(*all, number), rows = count_rows(*all, g);
	const uint2 at = place_tile(all->columns, all->before[g + 1] - all->before[g], number - all->before[g] * all->columns);
	const uint32_t panel = at.x * all->panels, row = at.y * KVK_NN_PRODUCT_ROWS, left = rows - row;

	all->wave++;

	return {all->first[g] + row, at.y < count_wide<LAST>(rows) ? min(KVK_NN_PRODUCT_ROWS, left) : left, panel,
		min(all->panels, b.panels - panel), g};
}

} // namespace nn_product

#endif
