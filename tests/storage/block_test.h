/* block_test.h -- what the tests of both tiers share: two geometries, blocks in the test's own memory whose bytes follow
 * from a seed, and what a callback said. */
#ifndef BLOCK_TEST_H
#define BLOCK_TEST_H

#include "kv/digest.h"
#include "kv_cmocka.h"
#include "kv_test.h"
#include "kvs/tier.h"

/* 2 heads x 3 layers of 2 KiB, and an opaque one: 2 pages of 5000 bytes in pieces of 4096. */
static const kvs_geometry_t plain = {
	.block_bytes = 12288, .heads = 2, .leaves = 3, .leaf_bytes = 2048, .page_bytes = 2048};
static const kvs_geometry_t opaque __attribute__((unused)) = {
	.block_bytes = 10000, .heads = 1, .leaves = 4, .leaf_bytes = 4096, .page_bytes = 5000};

typedef struct block {
	_Alignas(4096) uint8_t data[16384];
	uint64_t leaves[16];
	uint64_t roots[4];
	kvs_mem_t mem;
} block_t;

static inline void block_fill(const kvs_geometry_t *g, uint64_t seed, block_t *b)
{
	kv_test_rng_t rng = {seed};

	kv_test_fill(&rng, b->data, g->block_bytes);
	for (uint32_t h = 0; h < g->heads; h++) {
		for (uint32_t l = 0; l < g->leaves; l++) {
			size_t offset, len;

			kvs_leaf_range(g, h, l, &offset, &len);
			b->leaves[h * g->leaves + l] = kv_digest(b->data + offset, len);
		}
		b->roots[h] = kv_digest_root(b->leaves + (size_t)h * g->leaves, g->leaves);
	}
	b->mem = (kvs_mem_t){b->data, b->leaves, b->roots, UINT32_MAX};
}

static inline void block_blank(block_t *b)
{
	memset(b, 0xee, sizeof *b);
	b->mem = (kvs_mem_t){b->data, b->leaves, b->roots, UINT32_MAX};
}

/* The bytes and digests of `seed`. */
static inline void block_check(const kvs_geometry_t *g, uint64_t seed, const block_t *got)
{
	static block_t want;

	block_fill(g, seed, &want);
	assert_memory_equal(got->data, want.data, g->block_bytes);
	assert_memory_equal(got->leaves, want.leaves, (size_t)g->heads * g->leaves * 8u);
	assert_memory_equal(got->roots, want.roots, (size_t)g->heads * 8u);
}

typedef struct outcome {
	int calls;
	kv_status_t status;
} outcome_t;

static inline void record_outcome(void *arg, kv_status_t status)
{
	outcome_t *o = arg;

	o->calls++;
	o->status = status;
}

#endif
