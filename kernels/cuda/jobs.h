/* kernels/cuda/jobs.h -- jobs, from submit to end. */
#ifndef KVK_CUDA_JOBS_H
#define KVK_CUDA_JOBS_H

#include "gpu.h"

kv_status_t kvk_gpu_jobs_init(kvk_gpu_t *gpu, uint32_t count);
void kvk_gpu_jobs_fini(kvk_gpu_t *gpu);

#endif
