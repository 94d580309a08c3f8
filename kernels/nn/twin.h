/* kernels/nn/twin.h -- the operations of kvk/nn.h in host memory. */
#ifndef KVK_NN_TWIN_H
#define KVK_NN_TWIN_H

#include "nn/nn.h"

/* twin_attention.c */
kv_status_t kvk_nn_twin_attention(kvk_nn_t *nn, const kvk_nn_attention_t *attention, kvk_cu_stream_t stream);

#endif
