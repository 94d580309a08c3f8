/* kernels/cuda/driver/launch.h -- how kernels get to a stream. */
#ifndef KVK_CUDA_LAUNCH_H
#define KVK_CUDA_LAUNCH_H

#include "cuda/gpu.h"

void kvk_gpu_launch_init(kvk_gpu_t *gpu);
void kvk_gpu_launch_fini(kvk_gpu_t *gpu);
/* How a kernel is started. */
typedef struct kvk_gpu_launch {
	kvk_gpu_dir_t dir;
	uint32_t sms;
	uint64_t addresses;     /* all of the pool's and of the cache's, or-ed */
	uint64_t max_in_flight; /* bytes of a scatter that may be on their way at a time; 0: any number */
	kvk_cu_stream_t stream;
} kvk_gpu_launch_t;

/* The copy kernel that these arguments allow, on as many SMs as it has work for. */
kv_status_t kvk_gpu_launch_copy(kvk_gpu_t *gpu, const kvk_gpu_launch_t *launch, const kvk_gpu_args_t *args);
/* The kernel that digests pieces of memory, on all SMs. */
kv_status_t kvk_gpu_launch_digest(kvk_gpu_t *gpu, const kvk_gpu_digest_args_t *args, kvk_cu_stream_t stream);
/* Pages or pieces: what a warp takes at a time. */
uint64_t kvk_gpu_count_units(const kvk_gpu_args_t *args);

#endif
