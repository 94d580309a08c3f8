/* kernels/nn/gpu.h -- the kernels of kvk/nn.h on a device, and how they are launched. */
#ifndef KVK_NN_GPU_H
#define KVK_NN_GPU_H

#include "nn/nn.h"

/* X(what, kernel's name): kernels take their structure of kvk/nn.h by value. */
#define KVK_NN_KERNELS(X)                                                                                              \
	X(PRODUCT_BF16, "kvk_nn_product_bf16")                                                                         \
	X(PRODUCT_F32, "kvk_nn_product_f32")                                                                           \
	X(PRODUCT_ADD, "kvk_nn_product_add")                                                                           \
	X(PRODUCT_SWIGLU, "kvk_nn_product_swiglu")                                                                     \
	X(PRODUCT_BF16_PANEL, "kvk_nn_product_bf16_panel")                                                             \
	X(PRODUCT_F32_PANEL, "kvk_nn_product_f32_panel")                                                               \
	X(PRODUCT_ADD_PANEL, "kvk_nn_product_add_panel")                                                               \
	X(PRODUCT_SWIGLU_PANEL, "kvk_nn_product_swiglu_panel")                                                         \
	X(PRODUCT_BF16_GROUPS, "kvk_nn_product_bf16_groups")                                                           \
	X(PRODUCT_F32_GROUPS, "kvk_nn_product_f32_groups")                                                             \
	X(PRODUCT_ADD_GROUPS, "kvk_nn_product_add_groups")                                                             \
	X(PRODUCT_SWIGLU_GROUPS, "kvk_nn_product_swiglu_groups")                                                       \
	X(ATTENTION_64, "kvk_nn_attention_64")                                                                         \
	X(ATTENTION_128, "kvk_nn_attention_128")                                                                       \
	X(ATTENTION_64_FEW, "kvk_nn_attention_64_few")                                                                 \
	X(ATTENTION_128_FEW, "kvk_nn_attention_128_few")                                                               \
	X(ATTENTION_64_WIDE, "kvk_nn_attention_64_wide")                                                               \
	X(ATTENTION_128_WIDE, "kvk_nn_attention_128_wide")                                                             \
	X(DRAW, "kvk_nn_draw_values")                                                                                  \
	X(QKV, "kvk_nn_qkv_rows")                                                                                      \
	X(EMBED, "kvk_nn_embed_rows")                                                                                  \
	X(NORM, "kvk_nn_norm_rows")                                                                                    \
	X(ROUTE, "kvk_nn_route_rows")                                                                                  \
	X(CHOOSE, "kvk_nn_choose_rows")

typedef enum kvk_nn_kernel {
#define KVK_NN_KERNEL(what, name) KVK_NN_KERNEL_##what,
	KVK_NN_KERNELS(KVK_NN_KERNEL)
#undef KVK_NN_KERNEL
		KVK_NN_KERNEL_COUNT
} kvk_nn_kernel_t;

typedef struct kvk_nn_gpu {
	kvk_nn_t nn; /* first */
	kvk_gpu_t *gpu;
	kvk_cu_module_t module;
	kvk_cu_function_t kernels[KVK_NN_KERNEL_COUNT];
	uint32_t sms; /* of persistent grids */
} kvk_nn_gpu_t;

typedef struct kvk_nn_grid {
	uint32_t x, y;
	uint32_t threads;
	uint32_t shared_bytes; /* dynamic: at most KVK_NN_SHARED */
} kvk_nn_grid_t;

#define KVK_NN_SHARED 232448u /* bytes that a block of sm_90 may take */

/* launch.c; args: the kernel's one parameter. */
kv_status_t kvk_nn_launch(kvk_nn_gpu_t *nn, kvk_nn_kernel_t kernel, const kvk_nn_grid_t *grid, const void *args,
			  kvk_cu_stream_t stream);

typedef enum kvk_nn_tiles {
	KVK_NN_TILES_OF_ONE_PANEL,  /* 128 rows x 128 outputs */
	KVK_NN_TILES_OF_TWO_PANELS, /* 128 rows x 256 outputs */
	KVK_NN_TILES_OF_GROUPS, /* those, and a group's last 160 rows or fewer; one panel where there is no second */
} kvk_nn_tiles_t;

/* Those of this product, where its blocks are `sms`. */
kvk_nn_tiles_t kvk_nn_choose_tiles(const kvk_nn_product_t *product, uint32_t sms);

/* gpu_product.c, gpu_attention.c, gpu_rows.c */
kv_status_t kvk_nn_gpu_product(kvk_nn_t *nn, const kvk_nn_product_t *product, kvk_cu_stream_t stream);
kv_status_t kvk_nn_gpu_attention(kvk_nn_t *nn, const kvk_nn_attention_t *attention, kvk_cu_stream_t stream);
kv_status_t kvk_nn_gpu_draw(kvk_nn_t *nn, const kvk_nn_draw_t *draw, kvk_cu_stream_t stream);
kv_status_t kvk_nn_gpu_qkv(kvk_nn_t *nn, const kvk_nn_qkv_t *qkv, kvk_cu_stream_t stream);
kv_status_t kvk_nn_gpu_embed(kvk_nn_t *nn, const kvk_nn_embed_t *embed, kvk_cu_stream_t stream);
kv_status_t kvk_nn_gpu_norm(kvk_nn_t *nn, const kvk_nn_norm_t *norm, kvk_cu_stream_t stream);
kv_status_t kvk_nn_gpu_route(kvk_nn_t *nn, const kvk_nn_route_t *route, kvk_cu_stream_t stream);
kv_status_t kvk_nn_gpu_choose(kvk_nn_t *nn, const kvk_nn_choose_t *choose, kvk_cu_stream_t stream);

#endif
