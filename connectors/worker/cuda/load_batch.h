/* worker/cuda/load_batch.h -- one batch of a load, from its submission to its verdict. */
#ifndef KVX_CUDA_LOAD_BATCH_H
#define KVX_CUDA_LOAD_BATCH_H

#include "worker/cuda/state.h"

/* Submit the blocks and layers that the batch names of its load. BUSY: not now. The load counts the batch as active
 * until it is complete. Lock held. */
kvc_status_t kvx_gpu_load_submit_batch(kvx_worker_t *worker, kvx_gpu_batch_t *batch);
/* Nothing could be sent: complete batches, time out overdue loads, else wait a little, unless the gate was opened since
 * `seen`. */
void kvx_gpu_load_wait(kvx_worker_t *worker, uint32_t seen, uint32_t *p_spins);

#endif
