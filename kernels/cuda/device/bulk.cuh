/* bulk.cuh -- the copy engine inside an SM (sm_90): one instruction moves a whole piece between global and shared
 * memory, and an mbarrier or a group of the issuing thread tells when. A few warps keep a link busy that plain loads
 * need most of the device for, because nobody waits for single lines.
 */
#ifndef KVK_GPU_BULK_CUH
#define KVK_GPU_BULK_CUH

#include <stdint.h>

static __device__ __forceinline__ uint32_t shared_address(const void *at)
{
	return (uint32_t)__cvta_generic_to_shared(at);
}

/* ---- global -> shared, told by an mbarrier --------------------------------------------------- */

static __device__ __forceinline__ void barrier_init(uint64_t *barrier, uint32_t arrivals)
{
	asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
		     : "memory");
}

/* Initialised barriers are ordinary stores; the copy engine is to see them. */
static __device__ __forceinline__ void barrier_init_done(void)
{
	asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
	asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* One arrival, and `bytes` that are still to come. */
static __device__ __forceinline__ void barrier_expect(uint64_t *barrier, uint32_t bytes)
{
	asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
		     : "memory");
}

/* Sleeps in hardware; after it the bytes are visible to this thread. */
static __device__ __forceinline__ void barrier_wait(uint64_t *barrier, uint32_t parity)
{
	asm volatile("{\n"
		     ".reg .pred done;\n"
		     "again:\n"
		     "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
		     "@!done bra again;\n"
		     "}\n" ::"r"(shared_address(barrier)),
		     "r"(parity)
		     : "memory");
}

static __device__ __forceinline__ void bulk_load(void *stage, uint64_t from, uint32_t bytes, uint64_t *barrier)
{
	asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
			     shared_address(stage)),
		     "l"(from), "r"(bytes), "r"(shared_address(barrier))
		     : "memory");
}

/* ---- shared -> global, told by groups -------------------------------------------------------- */

/* What this warp has written to shared memory, for the copy engine: every lane, before the lanes meet and one of them
 * issues the copy. */
static __device__ __forceinline__ void bulk_fence(void)
{
	asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

static __device__ __forceinline__ void bulk_store_in_group(uint64_t to, const void *stage, uint32_t bytes)
{
	asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
		     "r"(shared_address(stage)), "r"(bytes)
		     : "memory");
}

static __device__ __forceinline__ void bulk_end_group(void)
{
	asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* One group. */
static __device__ __forceinline__ void bulk_store(uint64_t to, const void *stage, uint32_t bytes)
{
	bulk_store_in_group(to, stage, bytes);
	bulk_end_group();
}

/* Until at most N of this thread's stores may still be reading their stages. */
template <int N> static __device__ __forceinline__ void bulk_stores_read(void)
{
	asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

/* Until all of this thread's stores are where they go. */
static __device__ __forceinline__ void bulk_stores_done(void)
{
	asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* ---- global -> shared in single vectors, without registers (sm_80) --------------------------- */

static __device__ __forceinline__ void vector_load(void *stage, uint64_t from)
{
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(stage)), "l"(from) : "memory");
}

static __device__ __forceinline__ void vector_store(uint64_t to, uint4 v)
{
	asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
		     : "memory");
}

static __device__ __forceinline__ void vector_commit(void)
{
	asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until at most N of this thread's groups are on their way. */
template <int N> static __device__ __forceinline__ void vector_wait(void)
{
	asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#endif
