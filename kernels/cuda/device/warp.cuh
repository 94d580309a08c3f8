/* warp.cuh -- the digest of a leaf made by one warp, chunk by chunk out of shared memory. */
#ifndef KVK_GPU_WARP_CUH
#define KVK_GPU_WARP_CUH

#include "xxh3.h"

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

/* The next bytes of a leaf, more than BLOCKS - 1 blocks of them, or anything up to BLOCKS and a stripe when they are
 * not FULL. All sums are made before any is used: the lanes' exchanges are long ways that go side by side then, and
 * only the scrambles wait for each other. */
template <uint32_t BLOCKS, bool FULL>
static __device__ __forceinline__ void warp_blocks(kvk_xxh3_lane_t *lane, const uint64_t *words, uint32_t bytes,
						   bool last)
{
	const uint32_t stripes = kvk_chunk_stripes(bytes, last);
	const uint32_t blocks = kvk_chunk_blocks(bytes, last);
	const uint64_t tail = last ? warp_sum(kvk_xxh3_tail(lane, words, bytes)) : 0;
	uint64_t sums[BLOCKS];

#pragma unroll
	for (uint32_t i = 0; i < BLOCKS; i++) {
		const uint32_t before = i * KVK_XXH3_STRIPES;
		const bool whole = FULL && i + 1 < BLOCKS;

		sums[i] = warp_sum(kvk_xxh3_block(lane, words + before * 8,
						  whole              ? KVK_XXH3_STRIPES
						  : stripes > before ? stripes - before
								     : 0));
	}
#pragma unroll
	for (uint32_t i = 0; i < BLOCKS; i++) {
		lane->acc += sums[i];
		if ((FULL && i + 1 < BLOCKS) || i < blocks) {
			kvk_xxh3_scramble(lane);
		}
	}
	lane->acc += tail;
}

static __device__ __forceinline__ void warp_digest(kvk_xxh3_lane_t *lane, const uint64_t *words, uint32_t bytes,
						   bool last)
{
	if (bytes == KVK_CHUNK) {
		warp_blocks<KVK_CHUNK / KVK_XXH3_BLOCK, true>(lane, words, bytes, last);
	} else if (bytes <= KVK_XXH3_BLOCK) {
		warp_blocks<1, false>(lane, words, bytes, last);
	} else {
		warp_blocks<KVK_CHUNK / KVK_XXH3_BLOCK, false>(lane, words, bytes, last);
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
