/* worker/jobs/gpu_load.h -- which loads are sent to the device, and when; and those that come layer by layer. */
#ifndef KVX_CUDA_LOAD_H
#define KVX_CUDA_LOAD_H

#include "worker/cuda/state.h"

/* Submit what the oldest asynchronous loads have ready, unless synchronous loads are being copied: how many blocks.
 * Transfer thread. */
uint32_t kvx_gpu_send_async_loads(kvx_worker_t *worker, uint64_t now);
/* All synchronous loads of the step are submitted, or have failed, when it returns. `layers`: they may come layer by
 * layer; 1: they do. */
int kvx_gpu_send_sync_loads(kvx_worker_t *worker, int layers);
/* Before the engine asks for them: the transfer thread submits what is ready of them; `layers`: layer by layer, if that
 * pays. If it has not come to that when the engine asks, the engine's thread submits them. */
void kvx_gpu_prefetch_loads(kvx_worker_t *worker, int layers);
/* Submit them, if their blocks are ready or the wait for them has ended: 1. Transfer thread. */
uint32_t kvx_gpu_send_prefetched(kvx_worker_t *worker, uint64_t now);
/* The engine has not asked for prefetched loads: no more of them is sent, what was sent comes before what the engine
 * enqueues from now on, and they have failed. */
void kvx_gpu_cancel_prefetch(kvx_worker_t *worker);

/* The engine is about to read the layer: order its stream after the range it is in. 0: the driver refuses, so the host
 * must wait for all loads. */
int kvx_layers_await(kvx_worker_t *worker, uint32_t layer);
/* No further layer is read: what the engine has not awaited comes before what it does next. If it has skipped a layer,
 * the loads have failed. */
void kvx_layers_close(kvx_worker_t *worker);
/* A load of these bytes took the device ns. */
void kvx_layers_add_rate_sample(kvx_worker_t *worker, uint64_t bytes, uint64_t ns);

#endif
