/* kernels/cuda/driver/context.h -- calls of the driver, and how they fail. */
#ifndef KVK_CUDA_CONTEXT_H
#define KVK_CUDA_CONTEXT_H

#include "cuda/gpu.h"

/* Make the device's context the thread's; after it, kvk_gpu_leave(). */
kv_status_t kvk_gpu_enter(kvk_gpu_t *gpu);
void kvk_gpu_leave(kvk_gpu_t *gpu);

/* A call of the driver came back with `error`: KV_OK for 0; else it is named for kvk_gpu_last_error(), and KV_ERR_IO
 * (KV_ERR_NOMEM: out of memory). `member`: offset of the function in the table. */
kv_status_t kvk_cuda_check_result(const kvk_cuda_ops_t *cuda, size_t member, int error);
#define KVK_CUDA_CALL(cuda, member, ...)                                                                               \
	kvk_cuda_check_result(cuda, offsetof(kvk_cuda_ops_t, member), (cuda)->member(__VA_ARGS__))
/* Has the driver these functions, which it may lack? KV_ERR_UNSUPPORTED: the first that it lacks is named. */
kv_status_t kvk_cuda_require(const kvk_cuda_ops_t *cuda, const size_t *members, size_t count);

/* "GPU-8-4-4-4-12", lower case, as nvidia-smi prints it. "": the driver cannot say. `device`: the driver's handle. */
void kvk_cuda_format_uuid(const kvk_cuda_ops_t *cuda, int device, char text[KVK_GPU_UUID_BYTES]);

/* kvk_cuda_check_result(), and failures are counted. */
kv_status_t kvk_gpu_check_result(kvk_gpu_t *gpu, size_t member, int error);
#define KVK_GPU_CALL(gpu, member, ...)                                                                                 \
	kvk_gpu_check_result(gpu, offsetof(kvk_cuda_ops_t, member), (gpu)->cuda->member(__VA_ARGS__))
/* The same, for a call that alone can tell when copies end: one that fails is repeated twice. A driver that refuses
 * three times has lost its context, and with it all copies (docs/decisions/011). */
#define KVK_GPU_CALL_AGAIN(gpu, member, ...)                                                                           \
	(KVK_GPU_CALL(gpu, member, __VA_ARGS__) == KV_OK || KVK_GPU_CALL(gpu, member, __VA_ARGS__) == KV_OK            \
		 ? KV_OK                                                                                               \
		 : KVK_GPU_CALL(gpu, member, __VA_ARGS__))

/* Say why a call fails, for kvk_gpu_last_error(). */
kv_status_t kvk_gpu_set_error(kv_status_t status, const char *format, ...) __attribute__((format(printf, 2, 3)));

void kvk_gpu_add_count(_Atomic uint64_t *counter, uint64_t n);

#endif
