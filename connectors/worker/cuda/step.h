/* worker/cuda/step.h -- what a step does on the device: its order on the streams, and the verdict its saves wait for;
 * the engine's thread. */
#ifndef KVX_CUDA_STEP_H
#define KVX_CUDA_STEP_H

#include "worker/cuda/state.h"

/* Untracked copies come before what the engine does next. */
void kvx_gpu_step_begin(kvx_worker_t *worker);
/* What the step computes. */
void kvx_gpu_set_work(kvx_worker_t *worker, const kvx_msg_work_t *work);
/* All synchronous loads are submitted and come before what the engine enqueues from now on. 1: layer by layer. */
int kvx_gpu_step_load(kvx_worker_t *worker, int layers);
/* Saves of this step come after it, and are submitted when its synchronous loads have succeeded. */
void kvx_gpu_step_end(kvx_worker_t *worker);
/* Wait for the synchronous loads of the step (at most until their deadline), then submit the saves that waited for
 * them. */
void kvx_gpu_step_settle(kvx_worker_t *worker);

#endif
