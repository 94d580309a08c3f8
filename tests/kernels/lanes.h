// lanes.h -- CUDA's words for kernels that are compiled as C++: block after block, every thread of a block a context of
// its own that the others wait for. Which thread goes on, and which block comes next, is drawn from a seed.
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
#define __host__
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
			fprintf(stderr, "lanes: line %d: not so: %s\n", __LINE__, #condition);                         \
			abort();                                                                                       \
		}                                                                                                      \
	} while (0)

#define LANES_THREADS 320u // of a block, at most

struct lanes_dim {
	unsigned x;
};
extern lanes_dim threadIdx, blockIdx, blockDim, gridDim;

struct __align__(16) uint4
{
	uint32_t x, y, z, w;
};

// Runs body once for each thread. `shared`: its `room` bytes are rubbish at first; only `bytes` of them may be used.
void lanes_run(unsigned grid, unsigned threads, void (*body)(), void *shared, size_t bytes, size_t room);
extern "C" void lanes_seed(uint64_t seed);
// What threads of this grid have stored is where it goes, and no block is to come.
bool lanes_all_stored();

// ---- meeting ------------------------------------------------------------------------------------

// Until all 32 lanes of the warp are at this line; all threads of the block that are not over.
void lanes_meet(int line);
void lanes_meet_block(int line);
// Others first.
void lanes_pass();
// Two, in turn: the next exchange begins while slow lanes read of this one.
extern uint64_t lanes_given[2][LANES_THREADS];
extern unsigned lanes_exchanges[LANES_THREADS];

// Of the warp: [32].
template <typename T> static inline const uint64_t *lanes_give(uint32_t mask, T value, int line)
{
	const unsigned self = threadIdx.x, turn = lanes_exchanges[self]++ % 2;

	LANES_CHECK(mask == 0xffffffffu);
	lanes_given[turn][self] = 0;
	memcpy(&lanes_given[turn][self], &value, sizeof value);
	lanes_meet(line);

	return &lanes_given[turn][self / 32 * 32];
}

template <typename T> static inline T lanes_exchange(uint32_t mask, T value, unsigned from, int line)
{
	T given;

	memcpy(&given, &lanes_give(mask, value, line)[from % 32], sizeof given);

	return given;
}

template <typename T, typename F> static inline T lanes_reduce(uint32_t mask, T value, F reduce, int line)
{
	const uint64_t *given = lanes_give(mask, value, line);
	T all = (T)given[0];

	for (unsigned i = 1; i < 32; i++) {
		all = reduce(all, (T)given[i]);
	}

	return all;
}

#define LANES_SELF                         (threadIdx.x % 32)
#define __shfl_sync(mask, value, from)     lanes_exchange(mask, value, from, __LINE__)
#define __shfl_xor_sync(mask, value, bits) lanes_exchange(mask, value, LANES_SELF ^ (bits), __LINE__)
#define __shfl_up_sync(mask, value, n)                                                                                 \
	lanes_exchange(mask, value, LANES_SELF < (n) ? LANES_SELF : LANES_SELF - (n), __LINE__)
#define __reduce_add_sync(mask, value)                                                                                 \
	lanes_reduce(                                                                                                  \
		mask, value, [](uint32_t x, uint32_t y) { return x + y; }, __LINE__)
#define __reduce_min_sync(mask, value)                                                                                 \
	lanes_reduce(                                                                                                  \
		mask, value, [](uint32_t x, uint32_t y) { return x < y ? x : y; }, __LINE__)
#define __ballot_sync(mask, value)                                                                                     \
	lanes_reduce(                                                                                                  \
		mask, (uint32_t)((value) != 0) << LANES_SELF, [](uint32_t x, uint32_t y) { return x | y; }, __LINE__)
#define __any_sync(mask, value) (__ballot_sync(mask, value) != 0)
#define __syncwarp()            lanes_meet(__LINE__)
#define __syncthreads()         lanes_meet_block(__LINE__)
#define __nanosleep(ns)         lanes_pass()

static inline void __threadfence_system()
{
}

template <typename T> static inline T atomicAdd(T *at, T more)
{
	const T before = *at;

	*at += more;

	return before;
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

static inline int __popc(uint32_t x)
{
	return __builtin_popcount(x);
}

static inline int __ffs(int x)
{
	return __builtin_ffs(x);
}

static inline uint32_t min(uint32_t a, uint32_t b)
{
	return a < b ? a : b;
}

static inline float __fadd_rn(float a, float b)
{
	return a + b;
}

static inline float __fmul_rn(float a, float b)
{
	return a * b;
}

static inline float __uint_as_float(uint32_t bits)
{
	float value;

	memcpy(&value, &bits, sizeof value);

	return value;
}

// ---- in place of cuda/device/bulk.cuh ------------------------------------------------------------------

#define KVK_GPU_BULK_CUH

struct lanes_copy {
	void *to;
	const void *from;
	uint32_t bytes;
};
typedef std::vector<lanes_copy> lanes_group;
struct lanes_landing {
	void *to;
	std::vector<uint8_t> bytes;
};
// Of a thread. Stores that may still read their stages, a group each; have read and not landed; are in no group yet.
struct lanes_way {
	std::deque<lanes_group> stores, loads;
	std::deque<lanes_landing> landing;
	lanes_group store, load;
};
extern std::map<uint64_t *, lanes_copy> lanes_loads; // by barrier
extern lanes_way lanes_ways[LANES_THREADS];

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
	for (unsigned tries = 0; *barrier % 2 == parity && lanes_loads.count(barrier) == 0; tries++) {
		LANES_CHECK(tries < 100000); // else it waits for ever
		lanes_pass();
	}
	if (*barrier % 2 == parity) {
		lanes_do(lanes_loads[barrier]);
		lanes_loads.erase(barrier);
		++*barrier;
	}
}

static inline void bulk_fence()
{
}

static inline void bulk_store_in_group(uint64_t to, const void *stage, uint32_t bytes)
{
	LANES_CHECK(lanes_aligned(to, stage, bytes));
	lanes_ways[threadIdx.x].store.push_back({(void *)to, stage, bytes});
}

static inline void bulk_end_group()
{
	lanes_way &mine = lanes_ways[threadIdx.x];

	mine.stores.push_back(mine.store);
	mine.store.clear();
}

static inline void bulk_store(uint64_t to, const void *stage, uint32_t bytes)
{
	bulk_store_in_group(to, stage, bytes);
	bulk_end_group();
}

template <int N> static inline void bulk_stores_read()
{
	lanes_way &mine = lanes_ways[threadIdx.x];

	for (; mine.stores.size() > N; mine.stores.pop_front()) {
		for (const lanes_copy &copy : mine.stores.front()) {
			const uint8_t *from = (const uint8_t *)copy.from;

			mine.landing.push_back({copy.to, std::vector<uint8_t>(from, from + copy.bytes)});
		}
	}
}

static inline void bulk_stores_done()
{
	lanes_way &mine = lanes_ways[threadIdx.x];

	bulk_stores_read<0>();
	for (; !mine.landing.empty(); mine.landing.pop_front()) {
		memcpy(mine.landing.front().to, mine.landing.front().bytes.data(), mine.landing.front().bytes.size());
	}
}

static inline void vector_load(void *stage, uint64_t from)
{
	LANES_CHECK(lanes_aligned(from, stage, 16));
	memset(stage, 0xdd, 16);
	lanes_ways[threadIdx.x].load.push_back({stage, (const void *)from, 16});
}

static inline void vector_commit()
{
	lanes_way &mine = lanes_ways[threadIdx.x];

	mine.loads.push_back(mine.load);
	mine.load.clear();
}

template <int N> static inline void vector_wait()
{
	std::deque<lanes_group> &mine = lanes_ways[threadIdx.x].loads;

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
