/* Products: as many blocks as SMs, which share out the tiles among them (nn/device/product.cuh, groups.cuh). */
#include "nn/gpu.h"

#include "cuda/driver/context.h"
#include "nn/device/product.h"

_Static_assert(KVK_NN_PRODUCT_SHARED(1, KVK_NN_PRODUCT_MAX_GROUPS) <= KVK_NN_SHARED &&
		       KVK_NN_PRODUCT_SHARED(2, KVK_NN_PRODUCT_MAX_GROUPS) <= KVK_NN_SHARED &&
		       KVK_NN_GROUP_SHARED(KVK_NN_PRODUCT_MAX_GROUPS) <= KVK_NN_SHARED,
	       "a block has no room");

/* Time of a tile of one panel in percent of one of two: 64 to 69 on an H200 (gpu_nn product, rows "tiles of 128"); it
 * has half of the products, and 67 % of the bytes. */
#define PANEL_COST 66u

static uint32_t panels_of(kvk_nn_tiles_t tiles)
{
	return tiles == KVK_NN_TILES_OF_ONE_PANEL ? 1 : 2;
}

/* Tiles that a row of y crosses. */
static uint64_t count_outputs(const kvk_nn_product_t *product, uint32_t panels)
{
	const uint64_t outputs = (uint64_t)KVK_NN_PANEL * panels;

	return (product->n + outputs - 1u) / outputs;
}

/* Tiles of y at most: only the device knows how many rows each group has, and each may end amid a tile. */
static uint64_t count_most_tiles(const kvk_nn_product_t *product, uint32_t groups, uint32_t panels)
{
	const uint64_t ends = groups < product->max_rows ? groups : product->max_rows;

	return (product->max_rows / KVK_NN_PRODUCT_ROWS + ends) * count_outputs(product, panels);
}

/* A dense product's: tiles that one block computes, the most of all. */
static uint64_t count_waves(const kvk_nn_product_t *product, uint32_t sms, uint32_t panels)
{
	const uint64_t rows = ((uint64_t)product->max_rows + KVK_NN_PRODUCT_ROWS - 1u) / KVK_NN_PRODUCT_ROWS;

	return (rows * count_outputs(product, panels) + sms - 1u) / sms;
}

/* Two panels need fewer loads for a product; one makes twice as many tiles, which fill the last wave better. */
kvk_nn_tiles_t kvk_nn_choose_tiles(const kvk_nn_product_t *product, uint32_t sms)
{
	if (product->first) {
		return KVK_NN_TILES_OF_GROUPS;
	}

	return count_waves(product, sms, 1) * PANEL_COST < count_waves(product, sms, 2) * 100u
		       ? KVK_NN_TILES_OF_ONE_PANEL
		       : KVK_NN_TILES_OF_TWO_PANELS;
}

kv_status_t kvk_nn_gpu_product(kvk_nn_t *nn, const kvk_nn_product_t *product, kvk_cu_stream_t stream)
{
	static const kvk_nn_kernel_t kernels[][3] = {
		[KVK_NN_BF16] = {KVK_NN_KERNEL_PRODUCT_BF16_PANEL, KVK_NN_KERNEL_PRODUCT_BF16,
				 KVK_NN_KERNEL_PRODUCT_BF16_GROUPS},
		[KVK_NN_F32] = {KVK_NN_KERNEL_PRODUCT_F32_PANEL, KVK_NN_KERNEL_PRODUCT_F32,
				KVK_NN_KERNEL_PRODUCT_F32_GROUPS},
		[KVK_NN_ADD] = {KVK_NN_KERNEL_PRODUCT_ADD_PANEL, KVK_NN_KERNEL_PRODUCT_ADD,
				KVK_NN_KERNEL_PRODUCT_ADD_GROUPS},
		[KVK_NN_SWIGLU] = {KVK_NN_KERNEL_PRODUCT_SWIGLU_PANEL, KVK_NN_KERNEL_PRODUCT_SWIGLU,
				   KVK_NN_KERNEL_PRODUCT_SWIGLU_GROUPS},
	};
	kvk_nn_gpu_t *own = (kvk_nn_gpu_t *)nn;
	const uint32_t groups = product->first ? product->groups : 1;
	const kvk_nn_tiles_t shape = kvk_nn_choose_tiles(product, own->sms);
	const uint32_t panels = panels_of(shape);
	const uint64_t tiles = count_most_tiles(product, groups, panels);
	kvk_nn_grid_t grid = {.y = 1, .threads = KVK_NN_PRODUCT_THREADS};

	if (groups > KVK_NN_PRODUCT_MAX_GROUPS) {
		return kvk_gpu_set_error(KV_ERR_UNSUPPORTED, "a product of %u groups, where a block has room for %u",
					 groups, KVK_NN_PRODUCT_MAX_GROUPS);
	}
	if (tiles > INT32_MAX) { /* the device counts one round of blocks further */
		return kvk_gpu_set_error(KV_ERR_UNSUPPORTED, "a product of %u rows and %u outputs has too many tiles",
					 product->max_rows, product->n);
	}
	grid.x = tiles < own->sms ? (uint32_t)tiles : own->sms;
	grid.shared_bytes =
		shape == KVK_NN_TILES_OF_GROUPS ? KVK_NN_GROUP_SHARED(groups) : KVK_NN_PRODUCT_SHARED(panels, groups);

	return kvk_nn_launch(own, kernels[product->out][shape], &grid, product, stream);
}
