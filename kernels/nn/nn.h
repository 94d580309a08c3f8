/* kernels/nn/nn.h -- what runs the operations of kvk/nn.h: kernels, or the twin. */
#ifndef KVK_NN_INSIDE_H
#define KVK_NN_INSIDE_H

#include "kvk/nn.h"

/* Shapes have been checked, and there is something to do. */
typedef struct kvk_nn_ops {
	kv_status_t (*draw)(kvk_nn_t *nn, const kvk_nn_draw_t *draw, kvk_cu_stream_t stream);
	kv_status_t (*product)(kvk_nn_t *nn, const kvk_nn_product_t *product, kvk_cu_stream_t stream);
	kv_status_t (*qkv)(kvk_nn_t *nn, const kvk_nn_qkv_t *qkv, kvk_cu_stream_t stream);
	kv_status_t (*attention)(kvk_nn_t *nn, const kvk_nn_attention_t *attention, kvk_cu_stream_t stream);
	kv_status_t (*embed)(kvk_nn_t *nn, const kvk_nn_embed_t *embed, kvk_cu_stream_t stream);
	kv_status_t (*norm)(kvk_nn_t *nn, const kvk_nn_norm_t *norm, kvk_cu_stream_t stream);
	kv_status_t (*route)(kvk_nn_t *nn, const kvk_nn_route_t *route, kvk_cu_stream_t stream);
	kv_status_t (*choose)(kvk_nn_t *nn, const kvk_nn_choose_t *choose, kvk_cu_stream_t stream);
	void (*close)(kvk_nn_t *nn);
} kvk_nn_ops_t;

struct kvk_nn {
	const kvk_nn_ops_t *ops;
};

#endif
