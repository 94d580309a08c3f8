/* worker/cuda/save.h -- saves out of GPU memory, and fences. */
#ifndef KVX_CUDA_SAVE_H
#define KVX_CUDA_SAVE_H

#include "worker/cuda/state.h"

/* Submit blocks of the save, and of those behind it while the batch has room: *p_moved blocks. Transfer thread. */
kvc_status_t kvx_gpu_send_save(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t *p_moved);
/* Blocks of the fence are read, or will be before what the engine enqueues from now on, or are given up. Engine's
 * thread. */
void kvx_gpu_save_fenced(kvx_worker_t *worker);

#endif
