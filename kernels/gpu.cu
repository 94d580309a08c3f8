/* The copy kernels: a paged cache in the device's memory <-> canonical blocks in the host's, a peer's or its own. Equal to move_cpu.c, bytes and digests.
 *
 * Every warp works for itself: it walks through its leaves chunk by chunk, and each chunk passes through a stage in shared memory, where its digest is
 * made. The pool's side of a chunk is one piece, the cache's side is rows of often no more than 256 bytes. So the bulk kernels let the copy engine
 * move the pool's side, which is far away, with many stages on their way at once, and move the near side in 16-byte vectors by the lanes, which no row is
 * too short for. The plain kernels use loads and stores of the widest kind that the addresses allow on both sides, and run on any device.
 */
#include "gpu_args.h"
#include "gpu_walk.cuh"

/* Lane's digest of what was read: out on a gather, compared on a scatter. */
static __device__ __forceinline__ void check(const kvk_gpu_args_t &args, const walk_t &w, uint64_t digest,
					     uint64_t expected)
{
	if (digest != expected && args.bad && threadIdx.x % KVK_WARP == 0) {
		((uint32_t *)args.bad)[w.unit.move] = 1;
	}
}

/* The digest's share of a chunk; after the last one it is known. */
static __device__ __forceinline__ uint64_t digest_chunk(kvk_xxh3_lane_t *lane, const walk_t &w, const uint8_t *stage)
{
	if (w.from == 0) {
		kvk_xxh3_reset(lane);
	}
	warp_digest(lane, (const uint64_t *)stage, w.bytes, walk_last(w));

	return walk_last(w) ? warp_digest_end(lane, w.leaf.bytes) : 0;
}

/* ---- bulk ------------------------------------------------------------------------------------------------------- */

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

#include "gpu_bulk.cuh"

#define WARPS   (KVK_GPU_THREADS / KVK_WARP)
#define STAGES  (KVK_GPU_SHARED / WARPS / KVK_STAGE)
#define STORING (STAGES / 3)       /* stages of a gather that may still be read by stores */
#define FILLING (STAGES - STORING) /* the others are being filled */
#define VECTOR  16u

extern __shared__ __align__(128) uint8_t stages[];

static __device__ __forceinline__ uint8_t *stage_of(uint32_t number)
{
	return stages + (threadIdx.x / KVK_WARP * STAGES + number % STAGES) * KVK_STAGE;
}

/* Rows of the cache -> stage. A group for every chunk, empty ones after the end, so that groups can be counted. */
static __device__ __forceinline__ void fill(const kvk_gpu_args_t &args, const rows_t &rows, walk_t *w, uint8_t *stage)
{
	if (w->more) {
#pragma unroll 4
		for (uint32_t at = threadIdx.x % KVK_WARP * VECTOR; at < w->bytes; at += KVK_WARP * VECTOR) {
			vector_load(stage + at, cache_at(args, rows, w->leaf, w->from + at));
		}
		walk_next(args, w);
	}
	vector_commit();
}

extern "C" __global__ void __launch_bounds__(KVK_GPU_THREADS, 1)
	kvk_gather_bulk(const __grid_constant__ kvk_gpu_args_t args)
{
	const uint32_t index = threadIdx.x % KVK_WARP;
	const rows_t rows = rows_of(args);
	walk_t w = walk_start(args);
	walk_t ahead = w;
	kvk_xxh3_lane_t lane;

	kvk_xxh3_init(&lane, index);
	for (uint32_t i = 0; i < FILLING; i++) {
		fill(args, rows, &ahead, stage_of(i));
	}

	for (uint32_t i = 0; w.more; i++) {
		uint8_t *stage = stage_of(i);

		vector_wait<FILLING - 1>();
		bulk_fence();
		__syncwarp();
		if (index == 0) {
			bulk_store(w.leaf.pool + w.from, stage, w.bytes);
		}

		if (w.leaf.digest) { /* while the store is under way */
			const uint64_t digest = digest_chunk(&lane, w, stage);

			if (walk_last(w) && index == 0) {
				*w.leaf.digest = digest;
			}
		}

		if (index == 0) {
			bulk_stores_read<STORING>();
		}
		__syncwarp();
		fill(args, rows, &ahead, stage_of(i + FILLING));
		walk_next(args, &w);
	}
	bulk_stores_done();
}

/* What a scatter's stage has besides its bytes. */
typedef struct slot {
	uint64_t barrier; /* the chunk is here, and what its leaf's digest shall be */
	uint64_t expected;
} slot_t;

/* Pool -> stage, by lane 0. The expected digest comes the same way: it may lie as far away as the block. */
static __device__ __forceinline__ void request(const kvk_gpu_args_t &args, walk_t *w, uint8_t *stage, slot_t *slot)
{
	if (!w->more) {
		return;
	}
	if (threadIdx.x % KVK_WARP == 0) {
		barrier_expect(&slot->barrier, w->bytes);
		bulk_load(stage, w->leaf.pool + w->from, w->bytes, &slot->barrier);
		if (w->leaf.digest && walk_last(*w)) {
			vector_load_8(&slot->expected, (uint64_t)w->leaf.digest);
		}
		vector_arrive(&slot->barrier);
	}
	walk_next(args, w);
}

/* Stage -> rows of the cache. */
static __device__ __forceinline__ void drain(const kvk_gpu_args_t &args, const rows_t &rows, const walk_t &w,
					     const uint8_t *stage)
{
#pragma unroll 4
	for (uint32_t at = threadIdx.x % KVK_WARP * VECTOR; at < w.bytes; at += KVK_WARP * VECTOR) {
		*(uint4 *)cache_at(args, rows, w.leaf, w.from + at) = *(const uint4 *)(stage + at);
	}
}

extern "C" __global__ void __launch_bounds__(KVK_GPU_THREADS, 1)
	kvk_scatter_bulk(const __grid_constant__ kvk_gpu_args_t args)
{
	__shared__ slot_t slots[WARPS][STAGES];
	slot_t *slot = slots[threadIdx.x / KVK_WARP];
	const rows_t rows = rows_of(args);
	walk_t w = walk_start(args);
	walk_t ahead = w;
	kvk_xxh3_lane_t lane;

	kvk_xxh3_init(&lane, threadIdx.x % KVK_WARP);
	if (threadIdx.x % KVK_WARP < STAGES) {
		barrier_init(&slot[threadIdx.x % KVK_WARP].barrier, 2); /* the bytes, and the expected digest */
		barrier_init_done();
	}
	__syncwarp();
	for (uint32_t i = 0; i < STAGES; i++) {
		request(args, &ahead, stage_of(i), &slot[i]);
	}

	for (uint32_t i = 0; w.more; i++) {
		uint8_t *stage = stage_of(i);

		barrier_wait(&slot[i % STAGES].barrier, i / STAGES % 2);
		drain(args, rows, w, stage);
		if (w.leaf.digest) {
			const uint64_t digest = digest_chunk(&lane, w, stage);

			if (walk_last(w)) {
				check(args, w, digest, slot[i % STAGES].expected);
			}
		}

		__syncwarp(); /* everybody has read the stage: it can be filled again */
		request(args, &ahead, stage, &slot[i % STAGES]);
		walk_next(args, &w);
	}
}

#endif

/* ---- plain ------------------------------------------------------------------------------------------------------ */

#define HELD 8 /* vectors a lane has under way */

/* The widest vector that all pieces of a leaf are made of, on both sides. */
static __device__ __forceinline__ uint32_t vector_bytes(const kvk_gpu_args_t &args, const leaf_t &leaf)
{
	uint64_t all = leaf.pool | leaf.k | leaf.bytes;

	if (!args.opaque) {
		all |= args.k.bytes | args.k.cache_stride;
		if (args.v.bytes) {
			all |= leaf.v | args.v.bytes | args.v.cache_stride;
		}
	}

	return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 1;
}

/* Where byte `at` of the chunk is, in the cache or in the pool. */
template <bool CACHE>
static __device__ __forceinline__ uint64_t side_at(const kvk_gpu_args_t &args, const rows_t &rows, const walk_t &w,
						   uint32_t at)
{
	return CACHE ? cache_at(args, rows, w.leaf, w.from + at) : w.leaf.pool + w.from + at;
}

template <bool GATHER, typename V>
static __device__ __forceinline__ void copy_chunk(const kvk_gpu_args_t &args, const rows_t &rows, const walk_t &w,
						  uint8_t *stage)
{
	const uint32_t step = KVK_WARP * (uint32_t)sizeof(V);

	for (uint32_t from = threadIdx.x % KVK_WARP * (uint32_t)sizeof(V); from < w.bytes; from += HELD * step) {
		V held[HELD];

#pragma unroll
		for (uint32_t i = 0; i < HELD; i++) {
			const uint32_t at = from + i * step;

			if (at < w.bytes) {
				held[i] = *(const V *)side_at<GATHER>(args, rows, w, at);
			}
		}
#pragma unroll
		for (uint32_t i = 0; i < HELD; i++) {
			const uint32_t at = from + i * step;

			if (at < w.bytes) {
				*(V *)side_at<!GATHER>(args, rows, w, at) = held[i];
				*(V *)(stage + at) = held[i];
			}
		}
	}
}

template <bool GATHER>
static __device__ __forceinline__ void copy_by(uint32_t vector, const kvk_gpu_args_t &args, const rows_t &rows,
					       const walk_t &w, uint8_t *stage)
{
	switch (vector) {
	case 16:
		copy_chunk<GATHER, uint4>(args, rows, w, stage);
		break;
	case 4:
		copy_chunk<GATHER, uint32_t>(args, rows, w, stage);
		break;
	default:
		copy_chunk<GATHER, uint8_t>(args, rows, w, stage);
	}
}

template <bool GATHER> static __device__ __forceinline__ void copy_plain(const kvk_gpu_args_t &args)
{
	__shared__ __align__(16) uint8_t stages_plain[KVK_GPU_THREADS / KVK_WARP][KVK_STAGE];
	uint8_t *stage = stages_plain[threadIdx.x / KVK_WARP];
	const rows_t rows = rows_of(args);
	kvk_xxh3_lane_t lane;

	kvk_xxh3_init(&lane, threadIdx.x % KVK_WARP);
	for (walk_t w = walk_start(args); w.more; walk_next(args, &w)) {
		const uint64_t expected =
			!GATHER && w.leaf.digest && walk_last(w) ? *w.leaf.digest : 0; /* under way with the bytes */

		copy_by<GATHER>(vector_bytes(args, w.leaf), args, rows, w, stage);
		if (!w.leaf.digest) {
			continue;
		}

		__syncwarp();
		const uint64_t digest = digest_chunk(&lane, w, stage);

		if (walk_last(w) && GATHER && threadIdx.x % KVK_WARP == 0) {
			*w.leaf.digest = digest;
		}
		if (walk_last(w) && !GATHER) {
			check(args, w, digest, expected);
		}
		__syncwarp(); /* everybody has read the stage */
	}
}

extern "C" __global__ void __launch_bounds__(KVK_GPU_THREADS, 2)
	kvk_gather_plain(const __grid_constant__ kvk_gpu_args_t args)
{
	copy_plain<true>(args);
}

extern "C" __global__ void __launch_bounds__(KVK_GPU_THREADS, 2)
	kvk_scatter_plain(const __grid_constant__ kvk_gpu_args_t args)
{
	copy_plain<false>(args);
}
