/* The kernels. Copies: a paged cache in the device's memory <-> canonical blocks in the host's, a peer's or its own.
 * Equal to cpu/move.c, bytes and digests. At the end: digests of memory, equal to cpu/digest_range.c.
 *
 * Every warp works for itself: it walks through its leaves chunk by chunk, and each chunk passes through a stage in
 * shared memory, where its digest is made. The pool's side of a chunk is one piece, the cache's side is rows of often
 * no more than 256 bytes. So the bulk kernels let the copy engine move the pool's side, which is far away, with many
 * stages on their way at once, and move the near side in 16-byte vectors by the lanes, which no row is too short for.
 * The plain kernels use loads and stores of the widest kind that the addresses allow on both sides, and run on any
 * device.
 */
#include "args.h"
#include "walk.cuh"

/* The digest's share of a chunk. After the last one it is known: written by a gather, compared by a scatter. */
template <bool GATHER>
static __device__ __forceinline__ void digest_chunk(const kvk_gpu_args_t &args, kvk_xxh3_lane_t *lane, const chunk_t &c,
						    const uint8_t *stage)
{
	if (c.from == 0) {
		kvk_xxh3_reset(lane);
	}
	warp_digest(lane, (const uint64_t *)stage, c.bytes, chunk_last(c));
	if (!chunk_last(c)) {
		return;
	}

	const uint64_t digest = warp_digest_end(lane, c.leaf.bytes);

	if (threadIdx.x % KVK_WARP != 0) {
		return;
	}
	if (GATHER) {
		*(uint64_t *)c.leaf.digest = digest;
	} else if (digest != c.leaf.digest && args.bad) {
		((uint32_t *)args.bad)[c.leaf.move] = 1;
	}
}

#define HELD 8 /* vectors a lane has under way at a time */

/* ---- bulk ------------------------------------------------------------------------------------ */

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

#include "bulk.cuh"

#define VECTOR 16u

/* Few warps with many stages each have the most on their way to memory that is far. */
#define WARPS   (KVK_GPU_THREADS / KVK_WARP)
#define STAGES  (KVK_GPU_SHARED / WARPS / KVK_STAGE)
#define STORING (STAGES / 3)       /* of a gather: may still be read by stores */
#define FILLING (STAGES - STORING) /* the others are being filled */

#if defined(LANES_H) /* a CPU runs it: tests/kernels/lanes.h */
static __align__(128) uint8_t stages[KVK_GPU_SHARED];
#else
extern __shared__ __align__(128) uint8_t stages[];
#endif

/* What is known of a stage besides its bytes. */
typedef struct slot {
	chunk_t chunk;
	uint64_t barrier; /* scatter: the bytes are here */
} slot_t;

static __device__ __forceinline__ uint8_t *stage_of(uint32_t number)
{
	return stages + (threadIdx.x / KVK_WARP * STAGES + number % STAGES) * KVK_STAGE;
}

/* Rows of the cache -> stage. */
template <bool INTERLEAVED>
static __device__ __forceinline__ void load_rows(const kvk_gpu_args_t &args, const rows_t &rows, const chunk_t &c,
						 uint8_t *stage)
{
#pragma unroll 8
	for (uint32_t at = threadIdx.x % KVK_WARP * VECTOR; at < c.bytes; at += KVK_WARP * VECTOR) {
		vector_load(stage + at, cache_at<INTERLEAVED>(args, rows, c.leaf, c.from + at));
	}
}

/* Stage -> rows of the cache; several vectors on their way at once. */
template <bool INTERLEAVED>
static __device__ __forceinline__ void store_rows(const kvk_gpu_args_t &args, const rows_t &rows, const chunk_t &c,
						  const uint8_t *stage)
{
	for (uint32_t from = threadIdx.x % KVK_WARP * VECTOR; from < c.bytes; from += HELD * KVK_WARP * VECTOR) {
		uint4 held[HELD];

#pragma unroll
		for (uint32_t i = 0; i < HELD; i++) {
			const uint32_t at = from + i * KVK_WARP * VECTOR;

			if (at < c.bytes) {
				held[i] = *(const uint4 *)(stage + at);
			}
		}
#pragma unroll
		for (uint32_t i = 0; i < HELD; i++) {
			const uint32_t at = from + i * KVK_WARP * VECTOR;
			const uint64_t to = cache_at<INTERLEAVED>(args, rows, c.leaf, c.from + at);

			if (at < c.bytes) {
				vector_store(to, held[i]);
			}
		}
	}
}

/* The next chunk into a stage. A group for every stage, empty ones after the end, so that groups can be counted. */
static __device__ __forceinline__ void fill(const kvk_gpu_args_t &args, const rows_t &rows, walk_t *w, slot_t *slot,
					    uint8_t *stage)
{
	const chunk_t &c = w->chunk;

	if (threadIdx.x % KVK_WARP == 0) {
		slot->chunk = c;
	}
	if (c.bytes > 0) {
		if (rows.interleaved) {
			load_rows<true>(args, rows, c, stage);
		} else {
			load_rows<false>(args, rows, c, stage);
		}
		walk_next<true>(args, w);
	}
	vector_commit();
}

extern "C" __global__ void __launch_bounds__(KVK_GPU_THREADS, 1)
	kvk_gather_bulk(const __grid_constant__ kvk_gpu_args_t args)
{
	__shared__ slot_t all_slots[WARPS][STAGES];
	slot_t *slots = all_slots[threadIdx.x / KVK_WARP];
	const uint32_t index = threadIdx.x % KVK_WARP;
	const rows_t rows = rows_of(args);
	walk_t ahead = walk_start<true>(args);
	kvk_xxh3_lane_t lane;

	kvk_xxh3_init(&lane, index);
	for (uint32_t i = 0; i < FILLING; i++) {
		fill(args, rows, &ahead, &slots[i], stage_of(i));
	}

	for (uint32_t i = 0;; i++) {
		uint8_t *stage = stage_of(i);

		vector_wait<FILLING - 1>();
		bulk_fence();
		__syncwarp();
		const chunk_t c = slots[i % STAGES].chunk;

		if (c.bytes == 0) {
			break;
		}
		if (index == 0) {
			bulk_store(c.leaf.pool + c.from, stage, c.bytes);
		}
		if (args.leaves) { /* while the store is under way */
			digest_chunk<true>(args, &lane, c, stage);
		}

		if (index == 0) {
			bulk_stores_read<STORING>();
		}
		__syncwarp();
		fill(args, rows, &ahead, &slots[(i + FILLING) % STAGES], stage_of(i + FILLING));
	}
	bulk_stores_done();
}

/* Pool -> stage. */
static __device__ __forceinline__ void request(const kvk_gpu_args_t &args, walk_t *w, slot_t *slot, uint8_t *stage)
{
	const chunk_t &c = w->chunk;

	if (threadIdx.x % KVK_WARP == 0) {
		slot->chunk = c;
		if (c.bytes > 0) {
			barrier_expect(&slot->barrier, c.bytes);
			bulk_load(stage, c.leaf.pool + c.from, c.bytes, &slot->barrier);
		}
	}
	if (c.bytes > 0) {
		walk_next<false>(args, w);
	}
}

extern "C" __global__ void __launch_bounds__(KVK_GPU_THREADS, 1)
	kvk_scatter_bulk(const __grid_constant__ kvk_gpu_args_t args)
{
	__shared__ slot_t all_slots[WARPS][STAGES];
	slot_t *slots = all_slots[threadIdx.x / KVK_WARP];
	const uint32_t index = threadIdx.x % KVK_WARP;
	const rows_t rows = rows_of(args);
	walk_t ahead = walk_start<false>(args);
	const uint32_t on_their_way = args.ahead > 0 && args.ahead < STAGES ? args.ahead : STAGES;
	kvk_xxh3_lane_t lane;

	kvk_xxh3_init(&lane, index);
	if (index < STAGES) {
		barrier_init(&slots[index].barrier, 1);
		barrier_init_done();
	}
	__syncwarp();
	for (uint32_t i = 0; i < on_their_way; i++) {
		request(args, &ahead, &slots[i], stage_of(i));
	}
	__syncwarp();

	for (uint32_t i = 0;; i++) {
		slot_t *slot = &slots[i % STAGES];
		uint8_t *stage = stage_of(i);
		const chunk_t c = slot->chunk;

		if (c.bytes == 0) {
			break;
		}
		barrier_wait(&slot->barrier, i / STAGES % 2);
		if (rows.interleaved) {
			store_rows<true>(args, rows, c, stage);
		} else {
			store_rows<false>(args, rows, c, stage);
		}
		if (args.leaves) {
			digest_chunk<false>(args, &lane, c, stage);
		}

		__syncwarp(); /* everybody has read the stage: it can be filled again, and so can all before it */
		request(args, &ahead, &slots[(i + on_their_way) % STAGES], stage_of(i + on_their_way));
		__syncwarp();
	}
}

#endif

/* ---- plain ----------------------------------------------------------------------------------- */

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
static __device__ __forceinline__ uint64_t side_at(const kvk_gpu_args_t &args, const rows_t &rows, const chunk_t &c,
						   uint32_t at)
{
	if (!CACHE) {
		return c.leaf.pool + c.from + at;
	}

	return rows.interleaved ? cache_at<true>(args, rows, c.leaf, c.from + at)
				: cache_at<false>(args, rows, c.leaf, c.from + at);
}

template <bool GATHER, typename V>
static __device__ __forceinline__ void copy_chunk(const kvk_gpu_args_t &args, const rows_t &rows, const chunk_t &c,
						  uint8_t *stage)
{
	const uint32_t step = KVK_WARP * (uint32_t)sizeof(V);

	for (uint32_t from = threadIdx.x % KVK_WARP * (uint32_t)sizeof(V); from < c.bytes; from += HELD * step) {
		V held[HELD];

#pragma unroll
		for (uint32_t i = 0; i < HELD; i++) {
			const uint32_t at = from + i * step;

			if (at < c.bytes) {
				held[i] = *(const V *)side_at<GATHER>(args, rows, c, at);
			}
		}
#pragma unroll
		for (uint32_t i = 0; i < HELD; i++) {
			const uint32_t at = from + i * step;

			if (at < c.bytes) {
				*(V *)side_at<!GATHER>(args, rows, c, at) = held[i];
				*(V *)(stage + at) = held[i];
			}
		}
	}
}

template <bool GATHER>
static __device__ __forceinline__ void copy_by(uint32_t vector, const kvk_gpu_args_t &args, const rows_t &rows,
					       const chunk_t &c, uint8_t *stage)
{
	switch (vector) {
	case 16:
		copy_chunk<GATHER, uint4>(args, rows, c, stage);
		break;
	case 4:
		copy_chunk<GATHER, uint32_t>(args, rows, c, stage);
		break;
	default:
		copy_chunk<GATHER, uint8_t>(args, rows, c, stage);
	}
}

template <bool GATHER> static __device__ __forceinline__ void copy_plain(const kvk_gpu_args_t &args)
{
	__shared__ __align__(16) uint8_t stages_plain[KVK_GPU_THREADS / KVK_WARP][KVK_STAGE];
	uint8_t *stage = stages_plain[threadIdx.x / KVK_WARP];
	const rows_t rows = rows_of(args);
	kvk_xxh3_lane_t lane;

	kvk_xxh3_init(&lane, threadIdx.x % KVK_WARP);
	for (walk_t w = walk_start<GATHER>(args); w.chunk.bytes > 0; walk_next<GATHER>(args, &w)) {
		const chunk_t &c = w.chunk;

		copy_by<GATHER>(vector_bytes(args, c.leaf), args, rows, c, stage);
		if (args.leaves) {
			__syncwarp();
			digest_chunk<GATHER>(args, &lane, c, stage);
			__syncwarp(); /* everybody has read the stage */
		}
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

/* ---- digests of memory ----------------------------------------------------------------------- */

/* The next bytes of a piece -> stage, by the widest vector that the address allows; nothing beyond them is read. */
template <typename V>
static __device__ __forceinline__ void load_bytes(uint64_t at, uint32_t bytes, uint8_t *stage)
{
	const uint32_t index = threadIdx.x % KVK_WARP, step = KVK_WARP * (uint32_t)sizeof(V);
	const uint32_t whole = bytes / (uint32_t)sizeof(V) * (uint32_t)sizeof(V);

	for (uint32_t from = index * (uint32_t)sizeof(V); from < whole; from += HELD * step) {
		V held[HELD];

#pragma unroll
		for (uint32_t i = 0; i < HELD; i++) {
			if (from + i * step < whole) {
				held[i] = *(const V *)(at + from + i * step);
			}
		}
#pragma unroll
		for (uint32_t i = 0; i < HELD; i++) {
			if (from + i * step < whole) {
				*(V *)(stage + from + i * step) = held[i];
			}
		}
	}
	for (uint32_t i = whole + index; i < bytes; i += KVK_WARP) {
		stage[i] = *(const uint8_t *)(at + i);
	}
}

/* The digest of a piece, in every lane. */
static __device__ __forceinline__ uint64_t digest_piece(kvk_xxh3_lane_t *lane, uint64_t at, uint32_t bytes,
							uint8_t *stage)
{
	const uint32_t padded = (bytes + KVK_GPU_PIECE_PAD - 1) / KVK_GPU_PIECE_PAD * KVK_GPU_PIECE_PAD;
	uint32_t n;

	kvk_xxh3_reset(lane);
	for (uint32_t from = 0; from < padded; from += n) {
		const uint32_t left = bytes - from;

		n = kvk_chunk_bytes(padded - from);

		const uint32_t real = left < n ? left : n;

		if (at % 16 == 0) {
			load_bytes<uint4>(at + from, real, stage);
		} else if (at % 4 == 0) {
			load_bytes<uint32_t>(at + from, real, stage);
		} else {
			load_bytes<uint8_t>(at + from, real, stage);
		}
		for (uint32_t i = real + threadIdx.x % KVK_WARP; i < n; i += KVK_WARP) {
			stage[i] = 0;
		}
		__syncwarp();
		warp_digest(lane, (const uint64_t *)stage, n, from + n == padded);
		__syncwarp(); /* everybody has read the stage */
	}

	return warp_digest_end(lane, padded);
}

/* Each warp has its share of the pieces, which are neighbours. The table and the digests are the host's: a lane reads
 * one of the next 32 entries, and writes one of the last 32 digests. */
extern "C" __global__ void __launch_bounds__(KVK_GPU_THREADS, 2)
	kvk_digest_pieces(const __grid_constant__ kvk_gpu_digest_args_t args)
{
	__shared__ __align__(16) uint8_t stages_digest[KVK_GPU_THREADS / KVK_WARP][KVK_STAGE];
	const kvk_gpu_piece_t *pieces = (const kvk_gpu_piece_t *)args.pieces;
	uint8_t *stage = stages_digest[threadIdx.x / KVK_WARP];
	const uint32_t index = threadIdx.x % KVK_WARP;
	const uint32_t warps = gridDim.x * (KVK_GPU_THREADS / KVK_WARP);
	const uint32_t warp = blockIdx.x * (KVK_GPU_THREADS / KVK_WARP) + threadIdx.x / KVK_WARP;
	const uint32_t end = (uint32_t)((uint64_t)args.count * (warp + 1) / warps);
	kvk_gpu_piece_t mine = {0, 0};
	uint64_t digest = 0;
	kvk_xxh3_lane_t lane;

	kvk_xxh3_init(&lane, index);
	for (uint32_t i = (uint32_t)((uint64_t)args.count * warp / warps), of = 0; i < end; i++) {
		if (of == 0 && i + index < end) {
			mine = pieces[i + index];
		}

		const uint64_t at = __shfl_sync(KVK_WHOLE, mine.at, of);
		const uint64_t bytes = __shfl_sync(KVK_WHOLE, mine.bytes, of);
		const uint64_t made = digest_piece(&lane, at, (uint32_t)bytes, stage);

		digest = index == of ? made : digest;
		of = (of + 1) % KVK_WARP;
		if (of == 0 || i + 1 == end) {
			const uint32_t last = of == 0 ? KVK_WARP - 1 : of - 1;

			if (index <= last) {
				((uint64_t *)args.digests)[i - last + index] = digest;
			}
		}
	}
}
