/* draw.h -- layouts and caches by chance, for the tests of copies on the CPU and on a device. */
#ifndef TESTS_KERNELS_DRAW_H
#define TESTS_KERNELS_DRAW_H

#include "kv_test.h"

#include "kv/types.h"
#include "kvk/layout.h"

/* A valid layout of that kind, small. */
static inline kvk_layout_t draw_layout(kv_test_rng_t *rng, kvk_paged_kind_t kind)
{
	static const uint32_t dims[] = {1, 3, 16, 40, 64, 80, 128};
	kvk_layout_t l = {.layers = (uint32_t)kv_test_below(rng, 5) + 1,
			  .block_tokens = (uint32_t)kv_test_below(rng, 20) + 1,
			  .dtype = (kvk_dtype_t)kv_test_below(rng, KVK_DTYPE_COUNT)};

	if (kind == KVK_PAGED_OPAQUE) {
		l.heads = 1;
		l.inner = KVK_INNER_OPAQUE;
		l.page_bytes = (uint32_t)kv_test_below(rng, 50000) + 1;
		l.page_bytes = kv_test_below(rng, 2) ? (l.page_bytes + 255) / 256 * 256 : l.page_bytes;
		return l;
	}
	l.heads = (uint32_t)kv_test_below(rng, 6) + 1;
	l.inner = (kvk_inner_t)kv_test_below(rng, 2);
	l.k_dim = dims[kv_test_below(rng, KV_COUNT_OF(dims))];
	l.v_dim = kv_test_below(rng, 3) ? l.k_dim : dims[kv_test_below(rng, KV_COUNT_OF(dims))];
	if (kv_test_below(rng, 8) == 0) {
		l.v_dim = 0;
		l.inner = KVK_INNER_SPLIT;
	}

	return l;
}

/* Heads apart: the other layers lie between them, or all blocks. From a layer to the next; `page`: from a head to what
 * lies behind it. */
static inline size_t draw_heads_apart(kv_test_rng_t *rng, kvk_paged_t *p, size_t page)
{
	if (kv_test_below(rng, 2)) { /* (blocks, heads, layers, page) */
		p->head_stride = page * p->layers;
		p->block_stride = p->head_stride * p->heads;
		return page;
	}
	p->block_stride = page; /* (layers, heads, blocks, page) */
	p->head_stride = page * p->blocks;

	return p->head_stride * p->heads;
}

#endif
