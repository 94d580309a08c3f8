/* Attention of kvk/nn.h on a device: a block a tile of rows and KV head. */
#include "nn/gpu.h"

#include "cuda/driver/context.h"
#include "nn/device/attention.h"

#define MOST_TILES  65535u /* a grid's second dimension */
#define FEW_ROWS    32u    /* virtual ones of a tile */
#define NORMAL_ROWS 64u

/* A kernel of each size of blocks, and one of each head_dim, 128 and 64. */
typedef struct kernel {
	kvk_nn_kernel_t of_dim[2];
	uint32_t threads, slots;
	uint32_t rest_bytes; /* of shared memory behind the slots */
} kernel_t;

static const kernel_t few = {{KVK_NN_KERNEL_ATTENTION_128_FEW, KVK_NN_KERNEL_ATTENTION_64_FEW},
			     KVK_NN_ATTENTION_FEW_THREADS,
			     KVK_NN_ATTENTION_FEW_SLOTS,
			     0};
static const kernel_t normal = {
	{KVK_NN_KERNEL_ATTENTION_128, KVK_NN_KERNEL_ATTENTION_64}, KVK_NN_ATTENTION_THREADS, KVK_NN_ATTENTION_SLOTS, 0};
static const kernel_t wide = {{KVK_NN_KERNEL_ATTENTION_128_WIDE, KVK_NN_KERNEL_ATTENTION_64_WIDE},
			      KVK_NN_ATTENTION_WIDE_THREADS,
			      KVK_NN_ATTENTION_WIDE_SLOTS,
			      KVK_NN_ATTENTION_WIDE_REST};

/* The smallest blocks only if they are more than the next larger ones that fit on the device at once: fewer, and each
 * one's own speed counts. */
static const kernel_t *choose_kernel(const kvk_nn_gpu_t *own, const kvk_nn_attention_t *attention)
{
	const kvk_nn_heads_t *shape = &attention->shape;
	const uint64_t blocks = (uint64_t)attention->tiles * shape->kv_heads;
	const uint64_t rows = (uint64_t)attention->most_rows * shape->heads / shape->kv_heads; /* virtual ones */

	if (rows == 0 || rows > NORMAL_ROWS) {
		return &wide;
	}

	return rows <= FEW_ROWS && blocks > 3u * (uint64_t)own->sms ? &few : &normal;
}

kv_status_t kvk_nn_gpu_attention(kvk_nn_t *nn, const kvk_nn_attention_t *attention, kvk_cu_stream_t stream)
{
	kvk_nn_gpu_t *own = (kvk_nn_gpu_t *)nn;
	const kvk_nn_heads_t *shape = &attention->shape;
	const kernel_t *kernel = choose_kernel(own, attention);
	const kvk_nn_grid_t grid = {
		.x = shape->kv_heads,
		.y = attention->tiles,
		.threads = kernel->threads,
		.shared_bytes = kernel->slots * KVK_NN_ATTENTION_SLOT(shape->head_dim) + kernel->rest_bytes,
	};

	if (attention->tiles > MOST_TILES) {
		return kvk_gpu_set_error(KV_ERR_UNSUPPORTED, "attention of %u tiles, where a grid has %u",
					 attention->tiles, MOST_TILES);
	}

	return kvk_nn_launch(own, kernel->of_dim[shape->head_dim == 64], &grid, attention, stream);
}
