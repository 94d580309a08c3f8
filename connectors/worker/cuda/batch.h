/* worker/cuda/batch.h -- batches in flight. */
#ifndef KVX_CUDA_BATCH_H
#define KVX_CUDA_BATCH_H

#include "worker/cuda/state.h"

/* A free batch for a load, or for saves; NULL: none is free now. Lock held. */
kvx_gpu_batch_t *kvx_gpu_batch_for_load(kvx_wgpu_t *gpu, uint32_t flags);
kvx_gpu_batch_t *kvx_gpu_batch_for_save(kvx_wgpu_t *gpu, int fence);
/* Lock held. Not OK: nothing is in flight; KVC_ERR_BUSY: try again later. */
kvc_status_t kvx_gpu_batch_submit(kvx_worker_t *worker, kvx_gpu_batch_t *batch, const kvk_gpu_copy_t *copy);
/* Complete the batches whose job has ended: how many. Any thread. */
uint32_t kvx_gpu_complete_batches(kvx_worker_t *worker);

#endif
