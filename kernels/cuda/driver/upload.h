/* kernels/cuda/driver/upload.h -- the arguments of a job once more, in the memory of the device. */
#ifndef KVK_CUDA_UPLOAD_H
#define KVK_CUDA_UPLOAD_H

#include "cuda/gpu.h"

void kvk_gpu_device_args_init(kvk_gpu_t *gpu);
void kvk_gpu_device_args_fini(kvk_gpu_t *gpu);
/* Where kernels that are enqueued on the stream from now on read the job's inputs: in the device's memory, if that can
 * be had, else where the host has written them. */
uint64_t kvk_gpu_upload_args(kvk_gpu_t *gpu, const kvk_gpu_job_t *job, kvk_cu_stream_t stream);

#endif
