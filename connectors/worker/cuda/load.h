/* worker/cuda/load.h -- which loads are sent to the device, and when. */
#ifndef KVX_CUDA_LOAD_H
#define KVX_CUDA_LOAD_H

#include "worker/cuda/state.h"

/* Submit what the oldest asynchronous loads have ready, unless synchronous loads are being copied: how many blocks.
 * Transfer thread. */
uint32_t kvx_gpu_send_async_loads(kvx_worker_t *worker, uint64_t now);
/* All synchronous loads of the step are submitted, or have failed, when it returns. `layers`: they may come layer by
 * layer; 1: they do. */
int kvx_gpu_send_sync_loads(kvx_worker_t *worker, int layers);
/* Before the engine asks for them: submit what is ready of them; `layers`: layer by layer, if that pays. */
void kvx_gpu_prefetch_loads(kvx_worker_t *worker, int layers);
/* The engine has not asked for prefetched loads: no more of them is sent, what was sent comes before what the engine
 * enqueues from now on, and they have failed. */
void kvx_gpu_cancel_prefetch(kvx_worker_t *worker);

#endif
