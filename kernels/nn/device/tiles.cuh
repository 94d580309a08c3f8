/* tiles.cuh -- which tiles of a product each block computes, and in which order: each finds its own, from tables that
 * are the same in all.
 *
 * The rows of a group are cut into wide tiles of 128 rows, then a last one of up to LAST; one is left out where it has
 * no rows. Wide ones are dealt to the blocks in turn, then last ones from the next block on, so that each block has
 * its share of both. A block goes through the groups in order, as all do: what is read at the same time is the same.
 */
#ifndef KVK_NN_TILES_CUH
#define KVK_NN_TILES_CUH

#include "nn/device/ring.cuh"

namespace nn_product {

enum : uint32_t {
	BAND = 16, /* row tiles that take turns with one tile of weights, before the next */
};

/* Tiles of a kind: `before` has the row tiles of the groups before each. */
struct dealt {
	uint32_t *before; /* [groups + 1], in shared memory */
	uint32_t next;    /* number of this block's next tile: row tile * columns + column */
};

struct tiles {
	uint32_t *first; /* [groups + 1], in shared memory */
	dealt wide, last;
	uint32_t groups, panels;  /* panels: of a tile */
	uint32_t columns;         /* tiles side by side */
	uint32_t count;           /* tiles of this block */
};

template <uint32_t LAST> static __device__ __forceinline__ uint32_t count_wide(uint32_t rows)
{
	return rows > LAST ? (rows - LAST + KVK_NN_PRODUCT_ROWS - 1u) / KVK_NN_PRODUCT_ROWS : 0;
}

static __device__ __forceinline__ uint32_t count_rows(const tiles &all, uint32_t group)
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

/* By one warp. */
template <uint32_t LAST> static __device__ __forceinline__ void count_tiles(const tiles &all)
{
	const uint32_t each = (all.groups + 31u) / 32u;
	const uint32_t from = min(threadIdx.x * each, all.groups), to = min(from + each, all.groups);
	uint32_t wide = 0, last = 0;

	for (uint32_t g = from; g < to; g++) {
		const uint32_t rows = count_rows(all, g), n = count_wide<LAST>(rows);

		wide += n;
		last += rows > n * KVK_NN_PRODUCT_ROWS;
	}
	wide = sum_before(wide);
	last = sum_before(last);
	for (uint32_t g = from; g < to; g++) {
		const uint32_t rows = count_rows(all, g), n = count_wide<LAST>(rows);

		all.wide.before[g] = wide;
		all.last.before[g] = last;
		wide += n;
		last += rows > n * KVK_NN_PRODUCT_ROWS;
	}
	if (threadIdx.x == 31u) {
		all.wide.before[all.groups] = wide;
		all.last.before[all.groups] = last;
	}
}

/* Of this kind, those of this block: one of gridDim.x. */
static __device__ __forceinline__ uint32_t count_dealt(const tiles &all, const dealt &kind)
{
	const uint32_t n = kind.before[all.groups] * all.columns;

	return n > kind.next ? (n - kind.next - 1u) / gridDim.x + 1u : 0;
}

/* Ends with all threads met. */
template <uint32_t LAST>
static __device__ __forceinline__ tiles open_tiles(const kvk_nn_product_t &p, const block &b, uint32_t panels)
{
	tiles all;

	all.groups = p.first ? p.groups : 1u;
	all.first = b.rest;
	all.wide.before = all.first + all.groups + 1u;
	all.last.before = all.wide.before + all.groups + 1u;
	all.panels = panels;
	all.columns = (b.panels + panels - 1u) / panels;
	for (uint32_t g = threadIdx.x; g <= all.groups; g += blockDim.x) {
		all.first[g] = p.first ? p.first[g] : g == 0 ? 0 : p.max_rows;
	}
	__syncthreads();
	if (threadIdx.x < 32u) {
		count_tiles<LAST>(all);
	}
	__syncthreads();
	const uint32_t begin = all.wide.before[all.groups] * all.columns % gridDim.x;

	all.wide.next = blockIdx.x;
	all.last.next = blockIdx.x >= begin ? blockIdx.x - begin : blockIdx.x + gridDim.x - begin;
	all.count = count_dealt(all, all.wide) + count_dealt(all, all.last);

	return all;
}

/* Of the next tile of a kind; groups: there is none. */
static __device__ __forceinline__ uint32_t find_group(const tiles &all, const dealt &kind)
{
	const uint32_t row_tile = kind.next / all.columns;
	uint32_t g = 0, end = all.groups;

	if (row_tile >= kind.before[all.groups]) {
		return all.groups;
	}
	while (end - g > 1u) {
		const uint32_t middle = (g + end) / 2u;

		if (kind.before[middle] <= row_tile) {
			g = middle;
		} else {
			end = middle;
		}
	}

	return g;
}

/* Row tiles of group g that are wide. */
static __device__ __forceinline__ uint32_t count_wide_of(const tiles &all, uint32_t g)
{
	return all.wide.before[g + 1] - all.wide.before[g];
}

/* Of a group, rows come first, in bands: blocks read the same weights at the same time, and the same rows soon after.
 * x is the column, y the row tile. */
static __device__ __forceinline__ uint2 place_wide(const tiles &all, uint32_t g)
{
	const uint32_t number = all.wide.next - all.wide.before[g] * all.columns, band_tiles = BAND * all.columns;
	const uint32_t band = number / band_tiles, rest = number - band * band_tiles;
	const uint32_t high = min((uint32_t)BAND, count_wide_of(all, g) - band * BAND);

	return {rest / high, band * BAND + rest % high};
}

/* The next tile of this block, `count` times: of the earlier group. */
static __device__ __forceinline__ tile next_tile(const block &b, tiles *all)
{
	const uint32_t wide = find_group(*all, all->wide), last = find_group(*all, all->last), g = min(wide, last);
	uint2 at;

	if (wide < last) {
		at = place_wide(*all, g);
		all->wide.next += gridDim.x;
	} else {
		at = {all->last.next - all->last.before[g] * all->columns, count_wide_of(*all, g)};
		all->last.next += gridDim.x;
	}
	const uint32_t panel = at.x * all->panels, row = at.y * KVK_NN_PRODUCT_ROWS, rows = count_rows(*all, g) - row;

	return {all->first[g] + row, wide < last ? min(KVK_NN_PRODUCT_ROWS, rows) : rows, panel,
		min(all->panels, b.panels - panel), g};
}

} // namespace nn_product

#endif
