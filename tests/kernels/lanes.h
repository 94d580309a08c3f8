// lanes.h -- CUDA's words for lanes.cc: the kernels compiled as C++, every lane of a warp a thread of its own that the
// others wait for.
//
// What is asynchronous on a device happens as late as it may here: a copy lands when somebody has waited for it and is
// read when no lane may write it, and memory that is being written holds rubbish till then. So a missing wait, a
// wrong count of what is on its way or a stage filled too early show.
#ifndef LANES_H
#define LANES_H

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

#define __CUDACC__ 1
#define __device__
#define __global__
#define __constant__
#define __shared__ static
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

#define LANES_CHECK(condition)                                                                                         \
	do {                                                                                                           \
		if (!(condition)) {                                                                                    \
			printf("lanes: line %d: not so: %s\n", __LINE__, #condition);                                  \
			abort();                                                                                       \
		}                                                                                                      \
	} while (0)

struct lanes_dim {
	unsigned x;
};
extern lanes_dim threadIdx, blockIdx, blockDim, gridDim;

struct __align__(16) uint4
{
	uint32_t x, y, z, w;
};

// ---- meeting ------------------------------------------------------------------------------------

// Until all lanes are at this line.
void lanes_meet(int line);
// Two, in turn: the next exchange begins while slow lanes read of this one.
extern uint64_t lanes_given[2][32];
extern unsigned lanes_exchanges[32];

template <typename T> static inline T lanes_exchange(T value, unsigned from, int line)
{
	const unsigned lane = threadIdx.x % 32, turn = lanes_exchanges[lane]++ % 2;

	lanes_given[turn][lane] = (uint64_t)value;
	lanes_meet(line);

	return (T)lanes_given[turn][from % 32];
}

#define __shfl_sync(mask, value, from)     lanes_exchange(value, from, __LINE__)
#define __shfl_xor_sync(mask, value, bits) lanes_exchange(value, threadIdx.x % 32 ^ (bits), __LINE__)
#define __syncwarp()                       lanes_meet(__LINE__)

static inline void __threadfence_system()
{
}

// ---- arithmetic ---------------------------------------------------------------------------------

template <typename T> static inline T __ldg(const T *at)
{
	return *at;
}

static inline uint32_t __umulhi(uint32_t a, uint32_t b)
{
	return (uint32_t)((uint64_t)a * b >> 32);
}

static inline int __clz(uint32_t x)
{
	return x ? __builtin_clz(x) : 32;
}

// ---- in place of cuda/device/bulk.cuh ------------------------------------------------------------------

#define KVK_GPU_BULK_CUH

struct lanes_copy {
	void *to;
	const void *from;
	uint32_t bytes;
};
extern std::map<uint64_t *, lanes_copy> lanes_loads;         // by barrier
extern std::deque<lanes_copy> lanes_stores[32];              // by lane
extern std::deque<std::vector<lanes_copy>> lanes_groups[32]; // by lane
extern std::vector<lanes_copy> lanes_group[32];              // not committed yet

static inline void lanes_do(const lanes_copy &c)
{
	memcpy(c.to, c.from, c.bytes);
}

static inline bool lanes_aligned(uint64_t a, const void *b, uint32_t bytes)
{
	return (a | (uintptr_t)b | bytes) % 16 == 0;
}

// A barrier is the number of phases that are over.
static inline void barrier_init(uint64_t *barrier, uint32_t arrivals)
{
	LANES_CHECK(arrivals == 1);
	*barrier = 0;
}

static inline void barrier_init_done()
{
}

static inline void barrier_expect(uint64_t *barrier, uint32_t bytes)
{
	LANES_CHECK(lanes_loads.count(barrier) == 0);
	lanes_loads[barrier] = {nullptr, nullptr, bytes};
}

static inline void bulk_load(void *stage, uint64_t from, uint32_t bytes, uint64_t *barrier)
{
	LANES_CHECK(lanes_loads.count(barrier) == 1 && lanes_loads[barrier].bytes == bytes &&
		    lanes_aligned(from, stage, bytes));
	lanes_loads[barrier] = {stage, (const void *)from, bytes};
	memset(stage, 0xee, bytes);
}

static inline void barrier_wait(uint64_t *barrier, uint32_t parity)
{
	if (*barrier % 2 == parity) {
		LANES_CHECK(lanes_loads.count(barrier) == 1); // else it would wait for ever
		lanes_do(lanes_loads[barrier]);
		lanes_loads.erase(barrier);
		++*barrier;
	}
}

static inline void bulk_fence()
{
}

static inline void bulk_store(uint64_t to, const void *stage, uint32_t bytes)
{
	LANES_CHECK(lanes_aligned(to, stage, bytes));
	lanes_stores[threadIdx.x % 32].push_back({(void *)to, stage, bytes});
}

template <int N> static inline void bulk_stores_read()
{
	std::deque<lanes_copy> &mine = lanes_stores[threadIdx.x % 32];

	for (; mine.size() > N; mine.pop_front()) {
		lanes_do(mine.front());
	}
}

static inline void bulk_stores_done()
{
	bulk_stores_read<0>();
}

static inline void vector_load(void *stage, uint64_t from)
{
	LANES_CHECK(lanes_aligned(from, stage, 16));
	memset(stage, 0xdd, 16);
	lanes_group[threadIdx.x % 32].push_back({stage, (const void *)from, 16});
}

static inline void vector_commit()
{
	std::vector<lanes_copy> &open = lanes_group[threadIdx.x % 32];

	lanes_groups[threadIdx.x % 32].push_back(open);
	open.clear();
}

template <int N> static inline void vector_wait()
{
	std::deque<std::vector<lanes_copy>> &mine = lanes_groups[threadIdx.x % 32];

	for (; mine.size() > N; mine.pop_front()) {
		for (const lanes_copy &copy : mine.front()) {
			lanes_do(copy);
		}
	}
}

static inline void vector_store(uint64_t to, uint4 v)
{
	LANES_CHECK(to % 16 == 0);
	memcpy((void *)to, &v, sizeof v);
}

#endif
