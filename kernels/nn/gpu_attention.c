/* Attention of kvk/nn.h on a device: a block a tile of rows and KV head. */
#include "nn/gpu.h"

#include "cuda/driver/context.h"

#include <stdbool.h>

/* device/attention.cuh: a ring of halves (keys or values) of tiles of 64 tokens. */
#define THREADS     128u
#define RING_ROWS   (4u * 64u)
#define FEW_THREADS 64u
#define FEW_RING    (3u * 64u)
#define FEW_ROWS    32u    /* virtual ones: 16 a warp */
#define MOST_TILES  65535u /* a grid's second dimension */

/* Smaller blocks, if the tiles are small, and are more than the larger ones that fit on the device at once: fewer, and
 * each one's own speed counts. */
static bool are_few(const kvk_nn_gpu_t *own, const kvk_nn_attention_t *attention)
{
	const kvk_nn_heads_t *shape = &attention->shape;
	const uint64_t blocks = (uint64_t)attention->tiles * shape->kv_heads;

	return attention->most_rows &&
	       (uint64_t)attention->most_rows * shape->heads <= (uint64_t)FEW_ROWS * shape->kv_heads &&
	       blocks > 3u * (uint64_t)own->sms;
}

kv_status_t kvk_nn_gpu_attention(kvk_nn_t *nn, const kvk_nn_attention_t *attention, kvk_cu_stream_t stream)
{
	static const kvk_nn_kernel_t kernels[2][2] = {
		{KVK_NN_KERNEL_ATTENTION_128, KVK_NN_KERNEL_ATTENTION_128_FEW},
		{KVK_NN_KERNEL_ATTENTION_64, KVK_NN_KERNEL_ATTENTION_64_FEW},
	};
	kvk_nn_gpu_t *own = (kvk_nn_gpu_t *)nn;
	const kvk_nn_heads_t *shape = &attention->shape;
	const bool is_few = are_few(own, attention);
	const kvk_nn_grid_t grid = {
		.x = shape->kv_heads,
		.y = attention->tiles,
		.threads = is_few ? FEW_THREADS : THREADS,
		.shared_bytes = (is_few ? FEW_RING : RING_ROWS) * shape->head_dim * (uint32_t)sizeof(kvk_bf16_t),
	};

	if (attention->tiles > MOST_TILES) {
		return kvk_gpu_set_error(KV_ERR_UNSUPPORTED, "attention of %u tiles, where a grid has %u",
					 attention->tiles, MOST_TILES);
	}

	return kvk_nn_launch(own, kernels[shape->head_dim == 64][is_few], &grid, attention, stream);
}
