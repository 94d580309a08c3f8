/* The small operations of kvk/nn.h on a device: grids of the kernels of rows.cuh. */
#include "nn/device/rows.h"
#include "nn/gpu.h"

#define DRAW_BLOCKS 8u /* an SM */

static uint64_t blocks_of(uint64_t items, uint32_t block_items)
{
	return (items + block_items - 1u) / block_items;
}

/* Blocks with a number each. */
static kv_status_t launch(kvk_nn_t *nn, kvk_nn_kernel_t kernel, uint64_t blocks, uint32_t threads, const void *args,
			  kvk_cu_stream_t stream)
{
	const kvk_nn_grid_t grid = {.x = (uint32_t)blocks, .y = 1, .threads = threads};

	return blocks <= INT32_MAX ? kvk_nn_launch((kvk_nn_gpu_t *)nn, kernel, &grid, args, stream) : KV_ERR_ARG;
}

kv_status_t kvk_nn_gpu_draw(kvk_nn_t *nn, const kvk_nn_draw_t *draw, kvk_cu_stream_t stream)
{
	const uint32_t most = ((kvk_nn_gpu_t *)nn)->sms * DRAW_BLOCKS;
	const uint64_t count = draw->order == KVK_NN_ROW_F32 ? draw->n : (uint64_t)draw->n * draw->k;
	const uint64_t blocks = blocks_of(count, KVK_NN_ROWS_THREADS * (draw->order == KVK_NN_ROW_F32 ? 1u : 8u));

	return launch(nn, KVK_NN_KERNEL_DRAW, blocks < most ? blocks : most, KVK_NN_ROWS_THREADS, draw, stream);
}

kv_status_t kvk_nn_gpu_qkv(kvk_nn_t *nn, const kvk_nn_qkv_t *qkv, kvk_cu_stream_t stream)
{
	const uint64_t heads = (uint64_t)qkv->rows * (qkv->shape.heads + 2u * qkv->shape.kv_heads);
	const uint64_t blocks = blocks_of(heads * (qkv->shape.head_dim / 16u), KVK_NN_ROWS_THREADS);

	return launch(nn, KVK_NN_KERNEL_QKV, blocks, KVK_NN_ROWS_THREADS, qkv, stream);
}

kv_status_t kvk_nn_gpu_embed(kvk_nn_t *nn, const kvk_nn_embed_t *embed, kvk_cu_stream_t stream)
{
	return launch(nn, KVK_NN_KERNEL_EMBED, embed->rows, KVK_NN_ROWS_THREADS, embed, stream);
}

kv_status_t kvk_nn_gpu_norm(kvk_nn_t *nn, const kvk_nn_norm_t *norm, kvk_cu_stream_t stream)
{
	if (!norm->added && !norm->y) {
		return KV_OK;
	}

	return launch(nn, KVK_NN_KERNEL_NORM, norm->rows, KVK_NN_ROWS_THREADS, norm, stream);
}

kv_status_t kvk_nn_gpu_route(kvk_nn_t *nn, const kvk_nn_route_t *route, kvk_cu_stream_t stream)
{
	return launch(nn, KVK_NN_KERNEL_ROUTE, blocks_of(route->rows, KVK_NN_ROUTE_ROWS), KVK_NN_ROUTE_ROWS * 32u,
		      route, stream);
}

kv_status_t kvk_nn_gpu_choose(kvk_nn_t *nn, const kvk_nn_choose_t *choose, kvk_cu_stream_t stream)
{
	return launch(nn, KVK_NN_KERNEL_CHOOSE, (uint64_t)choose->rows * KVK_NN_CHOOSE_BLOCKS, KVK_NN_CHOOSE_THREADS,
		      choose, stream);
}
