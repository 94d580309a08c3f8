/* kernels/cuda/device/xxh3.h -- XXH3-64 (seed 0, more than 240 bytes) as the 32 lanes of a warp share it; equal to
 * kv_digest().
 *
 * XXH3 keeps eight accumulators and adds a stripe of 64 bytes to them at a time. Within a block of 16 stripes it only
 * adds, so the order is free: lane l takes word l % 8 of every fourth stripe from l / 8 on, and the four groups of
 * lanes meet in one sum. After a block each accumulator is scrambled, and that cannot be reordered. What follows the
 * last scramble, and the last 64 bytes once more, are added; then the eight are merged.
 *
 * What one lane does is here and compiles as C, so that a test on any machine proves it; only the exchange between
 * lanes is left to warp.cuh.
 */
#ifndef KVK_CUDA_DEVICE_XXH3_H
#define KVK_CUDA_DEVICE_XXH3_H

#include <stdint.h>

#if defined(__CUDACC__)
#define KVK_LANE_FN    static __device__ __forceinline__
#define KVK_LANE_TABLE static __constant__ const
#else
#define KVK_LANE_FN    static inline
#define KVK_LANE_TABLE static const
#endif

#define KVK_XXH3_MIN     241u  /* bytes: shorter input is hashed in another way */
#define KVK_XXH3_BLOCK   1024u /* bytes from a scramble to the next */
#define KVK_XXH3_STRIPE  64u
#define KVK_XXH3_STRIPES (KVK_XXH3_BLOCK / KVK_XXH3_STRIPE)
#define KVK_XXH3_GROUPS  4u /* of eight lanes */

/* The secret of seed 0. */
KVK_LANE_TABLE uint8_t kvk_xxh3_secret[192] = {
	0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
	0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
	0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
	0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
	0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
	0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
	0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
	0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
	0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
	0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
	0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

__extension__ typedef unsigned __int128 kvk_u128_t;

/* What a lane keeps: the keys of its place, and its accumulator, the same in all groups after each exchange. */
typedef struct kvk_xxh3_lane {
	uint64_t acc, first;
	uint64_t stripe[KVK_XXH3_STRIPES / KVK_XXH3_GROUPS]; /* keys for stripes group, group + 4, ... */
	uint64_t scramble, last, merge;
	uint32_t word;  /* of a stripe, and which accumulator: 0 .. 7 */
	uint32_t group; /* 0 .. 3 */
} kvk_xxh3_lane_t;

/* Words are added to the neighbour's accumulator, their products with the key to the own one. Both are sums until the
 * lanes meet. */
typedef struct kvk_xxh3_sum {
	uint64_t own;
	uint64_t neighbour; /* belongs to accumulator word ^ 1 */
} kvk_xxh3_sum_t;

KVK_LANE_FN uint64_t kvk_xxh3_key(uint32_t at)
{
	uint64_t key = 0;

	for (uint32_t i = 0; i < 8; i++) {
		key |= (uint64_t)kvk_xxh3_secret[at + i] << (8 * i);
	}

	return key;
}

/* What accumulator `word` begins with: 32-bit primes 3, 2 and 1, 64-bit primes 1 to 5. */
KVK_LANE_FN uint64_t kvk_xxh3_first(uint32_t word)
{
	switch (word) {
	case 0:
		return 0xc2b2ae3d;
	case 1:
		return 0x9e3779b185ebca87;
	case 2:
		return 0xc2b2ae3d27d4eb4f;
	case 3:
		return 0x165667b19e3779f9;
	case 4:
		return 0x85ebca77c2b2ae63;
	case 5:
		return 0x85ebca77;
	case 6:
		return 0x27d4eb2f165667c5;
	default:
		return 0x9e3779b1;
	}
}

/* Once a lane (0 .. 31). */
KVK_LANE_FN void kvk_xxh3_init(kvk_xxh3_lane_t *lane, uint32_t index)
{
	const uint32_t from_end = (uint32_t)sizeof kvk_xxh3_secret - KVK_XXH3_STRIPE;

	lane->word = index % 8;
	lane->group = index / 8;
	lane->first = kvk_xxh3_first(lane->word);
	lane->acc = lane->first;
	for (uint32_t i = 0; i < KVK_XXH3_STRIPES / KVK_XXH3_GROUPS; i++) {
		lane->stripe[i] = kvk_xxh3_key(8 * (lane->group + KVK_XXH3_GROUPS * i + lane->word));
	}
	lane->scramble = kvk_xxh3_key(from_end + 8 * lane->word);
	lane->last = kvk_xxh3_key(from_end - 7 + 8 * lane->word);
	lane->merge = kvk_xxh3_key(11 + 8 * lane->word);
}

/* Before the first byte of a leaf. */
KVK_LANE_FN void kvk_xxh3_reset(kvk_xxh3_lane_t *lane)
{
	lane->acc = lane->first;
}

KVK_LANE_FN void kvk_xxh3_mix(kvk_xxh3_sum_t *sum, uint64_t word, uint64_t key)
{
	const uint64_t keyed = word ^ key;

	sum->own += (uint64_t)(uint32_t)keyed * (uint32_t)(keyed >> 32);
	sum->neighbour += word;
}

/* Of the first `stripes` stripes of a block (as 64-bit words), those of this lane. More than there are in a block is
 * all of them. The words behind are read, too, and count as nothing: lanes that differ in what they do cost more. */
KVK_LANE_FN kvk_xxh3_sum_t kvk_xxh3_block(const kvk_xxh3_lane_t *lane, const uint64_t *block, uint32_t stripes)
{
	kvk_xxh3_sum_t sum = {0, 0};

	for (uint32_t i = 0; i < KVK_XXH3_STRIPES / KVK_XXH3_GROUPS; i++) {
		const uint32_t stripe = lane->group + KVK_XXH3_GROUPS * i;
		const uint64_t word = block[stripe * 8 + lane->word];
		const int counts = stripes >= KVK_XXH3_STRIPES || stripe < stripes;

		kvk_xxh3_mix(&sum, counts ? word : 0, counts ? lane->stripe[i] : 0);
	}

	return sum;
}

/* The 64 bytes that end `bytes` bytes after `words`, wherever in a word that is: the first group's share. May read to
 * the end of the word behind. */
KVK_LANE_FN kvk_xxh3_sum_t kvk_xxh3_tail(const kvk_xxh3_lane_t *lane, const uint64_t *words, uint32_t bytes)
{
	const uint32_t at = bytes - KVK_XXH3_STRIPE + 8 * lane->word;
	const uint32_t shift = 8 * (at % 8);
	kvk_xxh3_sum_t sum = {0, 0};

	if (lane->group == 0) {
		uint64_t word = words[at / 8] >> shift;

		if (shift != 0) {
			word |= words[at / 8 + 1] << (64 - shift);
		}
		kvk_xxh3_mix(&sum, word, lane->last);
	}

	return sum;
}

KVK_LANE_FN void kvk_xxh3_scramble(kvk_xxh3_lane_t *lane)
{
	lane->acc = (lane->acc ^ lane->acc >> 47 ^ lane->scramble) * 0x9e3779b1;
}

/* Lanes of even words: their accumulator and the next one's, both after ^ merge. The digest is made of the sum over the
 * four pairs. */
KVK_LANE_FN uint64_t kvk_xxh3_fold(uint64_t a, uint64_t b)
{
	const kvk_u128_t product = (kvk_u128_t)a * b;

	return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* The digest of a leaf of `bytes` bytes. */
KVK_LANE_FN uint64_t kvk_xxh3_end(uint64_t folds, uint64_t bytes)
{
	uint64_t h = folds + bytes * 0x9e3779b185ebca87;

	h = (h ^ h >> 37) * 0x165667919e3779f9;

	return h ^ h >> 32;
}

/* ---- chunks ---------------------------------------------------------------------------------- */

/* A leaf passes through a stage in chunks. All but the last are KVK_CHUNK, whole blocks; the last one has at least 64
 * bytes when the leaf has, so that the last stripe never lies across two. Stages begin at multiples of 128 bytes: the
 * copy engine asks a link for whole lines only then (8 % of PCIe's rate). */
#define KVK_CHUNK      4096u
#define KVK_CHUNK_MOST (KVK_CHUNK + KVK_XXH3_STRIPE - 1)
#define KVK_STAGE      (KVK_CHUNK + 128)

KVK_LANE_FN uint32_t kvk_chunk_bytes(uint32_t left)
{
	return left <= KVK_CHUNK_MOST ? left : KVK_CHUNK;
}

/* How many stripes of a chunk are mixed in their order, and how many of its blocks are scrambled: the last block of a
 * leaf is not, even when it is whole, and its last stripe is the tail's. */
KVK_LANE_FN uint32_t kvk_chunk_stripes(uint32_t bytes, int last)
{
	return (last ? bytes - 1 : bytes) / KVK_XXH3_STRIPE;
}

KVK_LANE_FN uint32_t kvk_chunk_blocks(uint32_t bytes, int last)
{
	return (last ? bytes - 1 : bytes) / KVK_XXH3_BLOCK;
}

#endif
