/* How the kernels of kvk/nn.h get to a stream. */
#include "nn/gpu.h"

#include "cuda/driver/context.h"

kv_status_t kvk_nn_launch(kvk_nn_gpu_t *nn, kvk_nn_kernel_t kernel, const kvk_nn_grid_t *grid, const void *args,
			  kvk_cu_stream_t stream)
{
	void *params[] = {(void *)(uintptr_t)args};
	kv_status_t status = kvk_gpu_enter(nn->gpu);

	if (status == KV_OK) {
		status = KVK_GPU_CALL(nn->gpu, launch, nn->kernels[kernel], grid->x, grid->y, 1, grid->threads, 1, 1,
				      grid->shared_bytes, stream, params, NULL);
		kvk_gpu_leave(nn->gpu);
	}

	return status;
}
