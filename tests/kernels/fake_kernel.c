/* Memory that the device sees, and the kernels, as cuda/device/args.h has them in words: one byte range after the
 * other, digests by libxxhash. */
#include "fake_cuda_internal.h"

#include <xxhash.h>

/* ---- memory ---------------------------------------------------------------------------------- */

fake_range_t *fake_range_of(uint64_t at, fake_kind_t kind)
{
	for (size_t i = 0; i < FAKE_RANGES; i++) {
		fake_range_t *r = &fake.ranges[i];

		if (r->kind == kind && r->base <= at && at < r->base + r->bytes) {
			return r;
		}
	}

	return NULL;
}

int fake_range_add(fake_kind_t kind, void *base, size_t bytes)
{
	for (size_t i = 0; i < FAKE_RANGES; i++) {
		if (fake.ranges[i].kind == FAKE_NONE) {
			fake.ranges[i] = (fake_range_t){kind, (uint64_t)(uintptr_t)base, bytes};
			return 0;
		}
	}
	fake_fault("too many ranges for the test");

	return CU_UNKNOWN;
}

int fake_range_drop(fake_kind_t kind, uint64_t base)
{
	fake_range_t *r = fake_range_of(base, kind);

	if (!r || r->base != base) {
		fake_fault("memory given back that was not given");
		return CU_INVALID;
	}
	r->kind = FAKE_NONE;

	return 0;
}

void *fake_resolve(uint64_t at, size_t bytes)
{
	const int tagged = (at & FAKE_TAG) != 0;
	const uint64_t plain = at & ~FAKE_TAG;

	for (size_t i = 0; i < FAKE_RANGES; i++) {
		const fake_range_t *r = &fake.ranges[i];
		const int host = r->kind == FAKE_PINNED || r->kind == FAKE_REGISTERED;

		if (r->kind != FAKE_NONE && host == tagged && r->base <= plain && plain + bytes <= r->base + r->bytes) {
			return (void *)(uintptr_t)plain;
		}
	}
	fake_fault("an address that the device does not see");

	return NULL;
}

/* ---- kernels --------------------------------------------------------------------------------- */

/* One page of a move while it is copied. */
typedef struct page {
	const kvk_gpu_args_t *args;
	int gather;
	uint64_t pool, cache; /* the page's first byte; the block's first byte in its layer */
	uint32_t head;
	uint8_t *canonical; /* its bytes in the order of the digest */
} page_t;

static int is_gather(size_t kernel)
{
	return kernel % 2 == 0;
}

static void copy_bytes(const page_t *p, uint64_t pool, uint64_t cache, uint64_t bytes)
{
	void *in_pool = fake_resolve(pool, bytes);
	void *in_cache = fake_resolve(cache, bytes);

	if (in_pool && in_cache) {
		memcpy(p->gather ? in_pool : in_cache, p->gather ? in_cache : in_pool, bytes);
	}
}

/* Piece `token` of K or V; its bytes also go to where the digest wants them. */
static uint8_t *copy_piece(const page_t *p, const kvk_gpu_row_t *row, uint32_t token, uint8_t *out)
{
	const uint64_t pool = p->pool + row->pool_offset + token * row->pool_stride;
	const uint64_t cache = p->cache + row->cache_offset + p->head * row->cache_head + token * row->cache_stride;
	const void *source;

	if (row->bytes == 0) {
		return out;
	}
	source = fake_resolve(p->gather ? cache : pool, row->bytes);
	if (source) {
		memcpy(out, source, row->bytes);
	}
	copy_bytes(p, pool, cache, row->bytes);

	return out + row->bytes;
}

static void copy_page(const page_t *p)
{
	const kvk_gpu_args_t *a = p->args;
	uint8_t *out = p->canonical;

	if (a->interleaved) {
		for (uint32_t t = 0; t < a->tokens; t++) {
			out = copy_piece(p, &a->k, t, out);
			out = copy_piece(p, &a->v, t, out);
		}
	} else {
		for (uint32_t t = 0; t < a->tokens; t++) {
			out = copy_piece(p, &a->k, t, out);
		}
		for (uint32_t t = 0; t < a->tokens; t++) {
			out = copy_piece(p, &a->v, t, out);
		}
	}
	if ((uint64_t)(out - p->canonical) != a->page_bytes) {
		fake_fault("rows that are not a page");
	}
}

/* Digests of the page's leaves: written by a gather, compared by a scatter. */
static void digest_page(const page_t *p, uint32_t move, uint32_t layer)
{
	const kvk_gpu_args_t *a = p->args;
	const uint64_t first = (((uint64_t)move * a->heads + p->head) * a->cache_layers + layer) * a->pieces;

	for (uint32_t piece = 0; piece < a->pieces; piece++) {
		const uint64_t at = (uint64_t)piece * a->leaf_bytes;
		const uint64_t left = a->page_bytes - at;
		const uint64_t n = left < a->leaf_bytes ? left : a->leaf_bytes;
		uint64_t *leaf = fake_resolve(a->leaves + (first + piece) * sizeof(uint64_t), sizeof(uint64_t));
		const uint64_t digest = XXH3_64bits(p->canonical + at, n);

		if (n <= 240) {
			fake_fault("a leaf too small for the kernels' digest");
		}
		if (!leaf) {
			continue;
		}
		if (p->gather) {
			*leaf = digest;
		} else if (*leaf != digest && a->bad) {
			uint32_t *bad = fake_resolve(a->bad + move * sizeof(uint32_t), sizeof(uint32_t));

			if (bad) {
				*bad = 1;
			}
		}
	}
}

static uint64_t row_bits(const kvk_gpu_row_t *r)
{
	return r->pool_offset | r->pool_stride | r->cache_offset | r->cache_stride | r->cache_head | r->bytes;
}

static void check_bulk(const fake_work_t *work, uint64_t addresses)
{
	const kvk_gpu_args_t *a = &work->args;

	if ((addresses | row_bits(&a->k) | row_bits(&a->v) | a->cache_stride | a->page_bytes | a->pool_head |
	     a->pool_first) %
		    16 !=
	    0) {
		fake_fault("a bulk kernel with something that is no multiple of 16");
	}
	if (work->shared != KVK_GPU_SHARED || fake.functions[work->kernel].shared != KVK_GPU_SHARED) {
		fake_fault("a bulk kernel without its shared memory");
	}
	fake.bulk_launches++;
}

static uint64_t cost_of(const kvk_gpu_args_t *a, const kvk_gpu_move_t *moves)
{
	const uint64_t narrow = a->ahead && fake.narrow_cost ? fake.narrow_cost : 1;

	return moves && moves[0].pool & FAKE_TAG ? fake.link_cost * narrow : 1;
}

void fake_kernel(const fake_work_t *work)
{
	const kvk_gpu_args_t *a = &work->args;
	const kvk_gpu_move_t *moves = fake_resolve(a->moves, a->count * sizeof *moves);
	const uint64_t *bases = fake_resolve(a->bases, (a->layer + a->layers) * sizeof *bases);
	uint8_t *canonical = malloc(a->page_bytes + a->k.bytes + a->v.bytes);
	uint64_t addresses = 0;
	const uint64_t pages = (uint64_t)a->count * a->heads * a->layers;

	for (uint64_t i = 0; i < pages && moves && bases; i++) {
		const uint32_t move = (uint32_t)(i / a->heads / a->layers);
		const uint32_t layer = a->layer + (uint32_t)(i % a->layers);
		page_t p = {.args = a, .gather = is_gather(work->kernel), .canonical = canonical};

		p.head = (uint32_t)(i / a->layers % a->heads);
		p.pool = moves[move].pool + a->pool_first + p.head * a->pool_head + layer * a->page_bytes;
		p.cache = bases[layer] + moves[move].block * a->cache_stride;
		if (i % ((uint64_t)a->heads * a->layers) == 0) {
			fake_cuda_trace("stream %u: %s block %u, layers %u to %u", work->stream,
					p.gather ? "gather" : "scatter", (unsigned)moves[move].block, a->layer,
					a->layer + a->layers);
		}
		addresses |= moves[move].pool | bases[layer];
		copy_page(&p);
		if (a->leaves) {
			digest_page(&p, move, layer);
		}
	}
	if (work->kernel >= FAKE_BULK) {
		check_bulk(work, addresses);
	}
	atomic_fetch_add(&fake.clock, cost_of(a, moves) * pages * a->page_bytes);
	free(canonical);
}
