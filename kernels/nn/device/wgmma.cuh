/* wgmma.cuh -- what kernels share that use the matrix instructions of a warp group (sm_90a). These are asynchronous:
 * open() before the first one, close() after the last one of a group; wait<N>() until at most N groups still run. */
#ifndef KVK_NN_WGMMA_CUH
#define KVK_NN_WGMMA_CUH

#include "cuda/device/bulk.cuh"

namespace wgmma {

/* A factor in shared memory, in columns of rows of 128 bytes, eight of them 1,024 bytes behind the eight before, in the
 * swizzle of 128 bytes (1 in the two upper bits). 16 inputs further in a row is 32 bytes, 2 here, since addresses are
 * swizzled after they are summed. `column`: bytes to the next column, if outputs lie side by side; else 16. */
static __device__ __forceinline__ uint64_t describe(uint32_t address, uint32_t column = 16u)
{
	return (uint64_t)1 << 62 | (uint64_t)(1024u >> 4) << 32 | (uint64_t)(column >> 4) << 16 | (address & 0x3ffffu) >> 4;
}

/* What threads have written to registers comes before. */
static __device__ __forceinline__ void open(void)
{
	asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void close(void)
{
	asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int N> static __device__ __forceinline__ void wait(void)
{
	asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* Nothing that touches these sums, a multiple of four, moves across it. */
template <uint32_t COUNT> static __device__ __forceinline__ void hold(float *d)
{
#pragma unroll
	for (uint32_t i = 0; i < COUNT; i += 4u) {
		asm volatile("" : "+f"(d[i]), "+f"(d[i + 1u]), "+f"(d[i + 2u]), "+f"(d[i + 3u])::"memory");
	}
}

/* One arrival for the whole warp, of what all its lanes did before. */
static __device__ __forceinline__ void arrive(uint64_t *barrier)
{
	__syncwarp();
	if (threadIdx.x % 32u == 0) {
		asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
	}
}

} // namespace wgmma

#endif
