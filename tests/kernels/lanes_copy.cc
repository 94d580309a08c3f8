// The kernels of cuda/device/kernels.cu on a CPU.
#include "lanes.h"

#include "cuda/device/kernels.cu"

static void (*kernel)(kvk_gpu_args_t); // null: the one that digests
static kvk_gpu_args_t kernel_args;
static kvk_gpu_digest_args_t digest_args;

static void run_kernel()
{
	if (kernel) {
		kernel(kernel_args);
	} else {
		kvk_digest_pieces(digest_args);
	}
}

extern "C" void lanes_launch(const char *name, unsigned grid, unsigned threads, const void *args)
{
	static const struct {
		const char *name;
		void (*kernel)(kvk_gpu_args_t);
	} kernels[] = {{KVK_GPU_GATHER_BULK, kvk_gather_bulk},
		       {KVK_GPU_SCATTER_BULK, kvk_scatter_bulk},
		       {KVK_GPU_GATHER_PLAIN, kvk_gather_plain},
		       {KVK_GPU_SCATTER_PLAIN, kvk_scatter_plain}};

	kernel = nullptr;
	for (const auto &k : kernels) {
		kernel = strcmp(k.name, name) == 0 ? k.kernel : kernel;
	}
	if (kernel) {
		kernel_args = *(const kvk_gpu_args_t *)args;
	} else {
		LANES_CHECK(strcmp(name, KVK_GPU_DIGEST_PIECES) == 0);
		digest_args = *(const kvk_gpu_digest_args_t *)args;
	}
	lanes_run(grid, threads, run_kernel, stages, sizeof stages, sizeof stages);
}
