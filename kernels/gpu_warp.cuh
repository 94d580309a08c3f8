/* gpu_warp.cuh -- the digest of a leaf made by one warp, chunk by chunk out of shared memory. */
#ifndef KVK_GPU_WARP_CUH
#define KVK_GPU_WARP_CUH

#include "gpu_xxh3.h"

#define KVK_WARP  32u
#define KVK_WHOLE 0xffffffffu /* every lane takes part */

/* The lanes meet: neighbours swap what is the other's, then the four groups add up. Everybody knows the result. */
static __device__ __forceinline__ uint64_t warp_sum(kvk_xxh3_sum_t sum)
{
	uint64_t all = sum.own + __shfl_xor_sync(KVK_WHOLE, sum.neighbour, 1);

	all += __shfl_xor_sync(KVK_WHOLE, all, 8);
	all += __shfl_xor_sync(KVK_WHOLE, all, 16);

	return all;
}

/* The next bytes of a leaf. Sums of several blocks are on their way at once; only the scrambles wait for each other. */
static __device__ __forceinline__ void warp_digest(kvk_xxh3_lane_t *lane, const uint64_t *words, uint32_t bytes,
						   bool last)
{
	const uint32_t blocks = kvk_chunk_blocks(bytes, last);

#pragma unroll 4
	for (uint32_t i = 0; i < blocks; i++) {
		lane->acc += warp_sum(kvk_xxh3_block(lane, words + i * (KVK_XXH3_BLOCK / 8), KVK_XXH3_STRIPES));
		kvk_xxh3_scramble(lane);
	}

	if (last) {
		kvk_xxh3_sum_t sum =
			kvk_xxh3_block(lane, words + blocks * (KVK_XXH3_BLOCK / 8), kvk_chunk_stripes(bytes));
		const kvk_xxh3_sum_t tail = kvk_xxh3_tail(lane, words, bytes);

		sum.own += tail.own;
		sum.neighbour += tail.neighbour;
		lane->acc += warp_sum(sum);
	}
}

/* After the last chunk, in every lane. */
static __device__ __forceinline__ uint64_t warp_digest_end(const kvk_xxh3_lane_t *lane, uint64_t bytes)
{
	const uint64_t merged = lane->acc ^ lane->merge;
	uint64_t folds = kvk_xxh3_fold(merged, __shfl_xor_sync(KVK_WHOLE, merged, 1));

	folds += __shfl_xor_sync(KVK_WHOLE, folds, 2);
	folds += __shfl_xor_sync(KVK_WHOLE, folds, 4);

	return kvk_xxh3_end(folds, bytes);
}

#endif
