/* Leaf digests and head roots of a canonical block. */
#include "kvk/move.h"

#include "kv/digest.h"

#define XXH_STATIC_LINKING_ONLY /* the state on the stack */
#include <xxhash.h>

/* The root is made while the leaves go by, so that no caller needs room for leaves it does not want. */
static uint64_t digest_head(const kvk_geometry_t *g, const uint8_t *data, uint64_t *leaves)
{
	XXH3_state_t root;
	uint32_t leaf = 0;

	XXH3_64bits_reset(&root);
	while (leaf < g->leaves) {
		const size_t in_page = (size_t)(leaf % g->pieces) * g->leaf_bytes;
		const size_t left = g->page_bytes - in_page;
		const size_t n = left < g->leaf_bytes ? left : g->leaf_bytes;
		const uint64_t digest = kv_digest(data, n);

		XXH3_64bits_update(&root, &digest, sizeof digest);
		if (leaves) {
			leaves[leaf] = digest;
		}
		data += n;
		leaf++;
	}

	return XXH3_64bits_digest(&root);
}

void kvk_digest_block(const kvk_layout_t *layout, const void *data, uint64_t *leaves, uint64_t *roots)
{
	kvk_geometry_t g;

	kvk_layout_geometry(layout, &g);
	for (uint32_t head = 0; head < g.heads; head++) {
		const uint8_t *bytes = (const uint8_t *)data + (size_t)head * layout->layers * g.page_bytes;
		const uint64_t root = digest_head(&g, bytes, leaves ? leaves + (size_t)head * g.leaves : NULL);

		if (roots) {
			roots[head] = root;
		}
	}
}
