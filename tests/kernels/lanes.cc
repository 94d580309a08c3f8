// The kernels of cuda/device/kernels.cu on a CPU: block after block, warp after warp, the 32 lanes in turn from one meeting to the next. Bytes, digests and the order of
// things are the device's; speed is not.
#include "lanes.h"

#include "cuda/device/kernels.cu"

#include <ucontext.h>

lanes_dim threadIdx, blockIdx, blockDim, gridDim;
uint64_t lanes_given[2][32];
unsigned lanes_exchanges[32];
std::map<uint64_t *, lanes_copy> lanes_loads;
std::deque<lanes_copy> lanes_stores[32];
std::deque<std::vector<lanes_copy>> lanes_groups[32];
std::vector<lanes_copy> lanes_group[32];

struct lane {
	ucontext_t context;
	std::vector<uint8_t> stack;
	int line; // where it waits; 0: it is over
};

static lane lanes[32];
static ucontext_t outside;
static unsigned current;
static void (*kernel)(kvk_gpu_args_t); // null: the one that digests
static kvk_gpu_args_t kernel_args;
static kvk_gpu_digest_args_t digest_args;

void lanes_meet(int line)
{
	const unsigned self = current;

	lanes[self].line = line;
	swapcontext(&lanes[self].context, &outside);
}

static void run_lane()
{
	if (kernel) {
		kernel(kernel_args);
	} else {
		kvk_digest_pieces(digest_args);
	}
	lanes[current].line = 0;
}

static void start_lane(unsigned i)
{
	lane &l = lanes[i];

	l.stack.resize(256 << 10);
	l.line = -1;
	lanes_exchanges[i] = 0;
	lanes_groups[i].clear(); // empty ones may be left
	getcontext(&l.context);
	l.context.uc_stack.ss_sp = l.stack.data();
	l.context.uc_stack.ss_size = l.stack.size();
	l.context.uc_link = &outside;
	makecontext(&l.context, run_lane, 0);
}

static void run_warp(unsigned warp)
{
	for (unsigned i = 0; i < 32; i++) {
		start_lane(i);
	}
	while (lanes[0].line != 0) {
		for (current = 0; current < 32; current++) {
			threadIdx.x = warp * 32 + current;
			swapcontext(&outside, &lanes[current].context);
			LANES_CHECK(lanes[current].line == lanes[0].line); // all of them meet at the same place
		}
	}
	LANES_CHECK(lanes_loads.empty());
	for (unsigned i = 0; i < 32; i++) {
		LANES_CHECK(lanes_stores[i].empty() && lanes_group[i].empty());
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
	gridDim.x = grid;
	blockDim.x = threads;
	for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
		for (unsigned warp = 0; warp < threads / 32; warp++) {
			run_warp(warp);
		}
	}
}
