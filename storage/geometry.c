/* Where the leaves of a block lie. */
#include "geometry.h"

#include "kv/digest.h"

#define MAX_BLOCK_BYTES (1u << 30)

/* Pieces a page is cut into; a geometry without pages has pages of one leaf. */
static uint32_t pieces_of(const kvs_geometry_t *g)
{
	return g->page_bytes <= g->leaf_bytes ? 1u : (g->page_bytes - 1u) / g->leaf_bytes + 1u;
}

static uint32_t page_of(const kvs_geometry_t *g)
{
	return g->page_bytes == 0 ? g->leaf_bytes : g->page_bytes;
}

void kvs_leaf_range(const kvs_geometry_t *geometry, uint32_t head, uint32_t leaf, size_t *p_offset, size_t *p_len)
{
	size_t index = (size_t)head * geometry->leaves + leaf;

	if (geometry->page_bytes <= geometry->leaf_bytes) {
		*p_offset = index * page_of(geometry);
		*p_len = page_of(geometry);
		return;
	}

	size_t page = geometry->page_bytes;
	size_t pieces = pieces_of(geometry);
	size_t start = index % pieces * geometry->leaf_bytes;
	size_t left = page - start;

	*p_offset = index / pieces * page + start;
	*p_len = left < geometry->leaf_bytes ? left : geometry->leaf_bytes;
}

kv_status_t kvs_geometry_check(const kvs_geometry_t *geometry)
{
	const kvs_geometry_t *g = geometry;

	if (g->block_bytes == 0 || g->block_bytes > MAX_BLOCK_BYTES || g->heads == 0 || g->leaves == 0 ||
	    g->leaf_bytes == 0) {
		return KV_ERR_ARG;
	}
	if (g->block_bytes % page_of(g) != 0) {
		return KV_ERR_ARG;
	}

	uint64_t tiles = (uint64_t)(g->block_bytes / page_of(g)) * pieces_of(g);

	return (uint64_t)g->heads * g->leaves == tiles ? KV_OK : KV_ERR_ARG;
}

int kvs_geometry_equal(const kvs_geometry_t *a, const kvs_geometry_t *b)
{
	return a->block_bytes == b->block_bytes && a->heads == b->heads && a->leaves == b->leaves &&
	       a->leaf_bytes == b->leaf_bytes && page_of(a) == page_of(b);
}

uint32_t kvs_geometry_stride(const kvs_geometry_t *geometry)
{
	return (geometry->block_bytes + 4095u) & ~4095u;
}

void kvs_compute_roots(const kvs_geometry_t *geometry, const uint64_t *leaves, uint64_t *p_roots)
{
	for (uint32_t head = 0; head < geometry->heads; head++) {
		p_roots[head] = kv_digest_root(leaves + (size_t)head * geometry->leaves, geometry->leaves);
	}
}
