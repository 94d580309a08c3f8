/* worker/cuda/layers.h -- synchronous loads that come layer by layer; the engine's thread. */
#ifndef KVX_CUDA_LAYERS_H
#define KVX_CUDA_LAYERS_H

#include "worker/cuda/state.h"

/* Wait a little for all blocks of the synchronous loads to be ready. 0: some are not, or will not be. */
int kvx_layers_await_blocks(kvx_worker_t *worker);
/* A load of these bytes took the device ns. */
void kvx_layers_add_rate_sample(kvx_worker_t *worker, uint64_t bytes, uint64_t ns);
/* The synchronous loads come in layer ranges, if that pays and all their blocks are ready. 0: nothing was done. */
int kvx_layers_plan(kvx_worker_t *worker);
/* The engine is about to read the layer: order its stream after the range it is in. 0: the driver refuses, so the host
 * must wait for all loads. */
int kvx_layers_await(kvx_worker_t *worker, uint32_t layer);
/* No further layer is read: what the engine has not awaited comes before what it does next. If it has skipped a layer,
 * the loads have failed. */
void kvx_layers_close(kvx_worker_t *worker);

#endif
