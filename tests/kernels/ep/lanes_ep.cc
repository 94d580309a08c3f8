// The kernels of ep/device/ep.cu on a CPU.
#include "lanes.h"

#include "kvk/bf16.h"

// ---- in place of ep/device/system.cuh -----------------------------------------------------------

#define KVK_EP_SYSTEM_CUH

static uint64_t load_acquire(uint64_t at)
{
	return *(const volatile uint64_t *)at;
}

// What it releases has been stored.
static void store_release(uint64_t at, uint64_t value)
{
	LANES_CHECK(lanes_all_stored());
	*(volatile uint64_t *)at = value;
}

extern "C" {
uint64_t lanes_clock; // goes on as it is looked at
void (*lanes_look_at_clock)(void); // what happens then; null: nothing
}

static uint64_t now_ns()
{
	if (lanes_look_at_clock) {
		lanes_look_at_clock();
	}

	return lanes_clock += 1000;
}

static kvk_bf16_t __float2bfloat16_rn(float value)
{
	return kvk_bf16_round(value);
}

static kvk_bf16_t __bfloat16_as_ushort(kvk_bf16_t value)
{
	return value;
}

#include "ep/device/ep.cu"

static void (*kernel)(kvk_ep_args_t);
static kvk_ep_args_t kernel_args;

static void run_kernel()
{
	kernel(kernel_args);
}

extern "C" void lanes_launch_ep(const char *name, unsigned grid, unsigned threads, unsigned bytes, const void *args)
{
	static const struct {
		const char *name;
		void (*kernel)(kvk_ep_args_t);
	} kernels[] = {{KVK_EP_ROUTE, kvk_ep_route}, {KVK_EP_PUSH, kvk_ep_push},    {KVK_EP_WAIT, kvk_ep_wait},
		       {KVK_EP_COUNT, kvk_ep_count}, {KVK_EP_PLACE, kvk_ep_place},  {KVK_EP_REDUCE, kvk_ep_reduce},
		       {KVK_EP_SUM, kvk_ep_sum},     {KVK_EP_RETURN, kvk_ep_return}, {KVK_EP_PULL, kvk_ep_pull},
		       {KVK_EP_FLAG, kvk_ep_flag}};

	kernel = nullptr;
	for (const auto &k : kernels) {
		kernel = strcmp(k.name, name) == 0 ? k.kernel : kernel;
	}
	LANES_CHECK(kernel);
	kernel_args = *(const kvk_ep_args_t *)args;
	lanes_run(grid, threads, run_kernel, shared, bytes, sizeof shared);
}
