/* worker/jobs/gpu_save.h -- saves out of GPU memory, and fences. */
#ifndef KVX_CUDA_SAVE_H
#define KVX_CUDA_SAVE_H

#include "worker/cuda/state.h"

/* Submit blocks of the save, and of those behind it while the batch has room: *p_moved blocks. Transfer thread. */
kvc_status_t kvx_gpu_send_save(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t *p_moved);
/* Submit one batch of the save's fenced blocks on the engine's stream: how many. 0: none can be submitted now. Engine's
 * thread. */
uint32_t kvx_gpu_send_fenced(kvx_worker_t *worker, kvx_wsave_t *save);
/* What the engine enqueues from now on comes after the batches that read blocks of the fence. Lock held. */
void kvx_gpu_order_fenced(kvx_worker_t *worker);

#endif
