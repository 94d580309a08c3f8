#include "gpu_internal.h"

static uint32_t within(uint32_t n, uint32_t least, uint32_t most)
{
	return n < least ? least : n < most ? n : most;
}

void kvk_gpu_tune_init(kvk_gpu_t *gpu)
{
	gpu->tune = (kvk_gpu_tune_t){.slots = KVK_GPU_SLOTS_MOST,
				     .copy_streams = 2,
				     .kernel_streams = 2,
				     .batch = 1,
				     .sorted = 1,
				     .taper = 1,
				     .uploads = KVK_GPU_UPLOAD_STAGED | KVK_GPU_UPLOAD_NEAR,
				     .cluster = 1,
				     .wide = 1};
}

void kvk_gpu_get_tune(const kvk_gpu_t *gpu, kvk_gpu_tune_t *tune)
{
	*tune = gpu->tune;
}

void kvk_gpu_set_tune(kvk_gpu_t *gpu, const kvk_gpu_tune_t *tune)
{
	/* Rings are made by it. Outside of the context nothing is there to be dropped, or nothing can be. */
	if (kvk_gpu_enter(gpu) == KV_OK) {
		kvk_gpu_rings_drop(gpu);
		kvk_gpu_leave(gpu);
	}
	gpu->tune = *tune;
	gpu->tune.slots = within(tune->slots, 2, KVK_GPU_SLOTS_MOST);
	gpu->tune.copy_streams = within(tune->copy_streams, 0, KVK_GPU_LINES_MOST - 1);
	gpu->tune.cluster = within(tune->cluster, 1, 8);
	gpu->tune.kernel_streams = within(tune->kernel_streams, 1, KVK_GPU_LINES_MOST - gpu->tune.copy_streams);
}
