/* system.cuh -- what C++ has no words for: flags between devices, their clock, BF16. */
#ifndef KVK_EP_SYSTEM_CUH
#define KVK_EP_SYSTEM_CUH

#include <cuda_bf16.h>
#include <stdint.h>

static __device__ __forceinline__ uint64_t load_acquire(uint64_t at)
{
	uint64_t value;

	asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");

	return value;
}

static __device__ __forceinline__ void store_release(uint64_t at, uint64_t value)
{
	asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

static __device__ __forceinline__ uint64_t now_ns(void)
{
	uint64_t value;

	asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));

	return value;
}

#endif
