/* kernels/cuda/driver/stage.h -- way STAGED: a ring in the memory of the device. */
#ifndef KVK_CUDA_STAGE_H
#define KVK_CUDA_STAGE_H

#include "cuda/args.h"

void kvk_gpu_rings_init(kvk_gpu_t *gpu);
void kvk_gpu_rings_fini(kvk_gpu_t *gpu);
/* Is there a ring for this direction? Made at the first call (in the context or not). */
int kvk_gpu_ring_is_ready(kvk_gpu_t *gpu, kvk_gpu_dir_t dir);
/* Bytes that a chunk may take: what a stage of a ring holds. */
uint64_t kvk_gpu_ring_stage_bytes(const kvk_gpu_t *gpu);
kv_status_t kvk_gpu_copy_staged(kvk_gpu_t *gpu, const kvk_gpu_copy_desc_t *desc, kvk_gpu_job_t *job);

#endif
