/* Copying a block leaf by leaf, with its digests in the same pass. */
#include "impl.h"

#include "kv/digest.h"

#define KVC_CHUNK 64u /* digests compared at a time */

void kvc_copy_leaves(const kvc_geometry_t *g, const kvc_leaves_t *range, void *dst, const void *src, uint64_t *digests)
{
	int even = g->page_bytes % g->leaf_bytes == 0; /* leaves of one size, over all pages */
	uint32_t end = range->first + range->count;

	for (uint32_t leaf = range->first; leaf < end;) {
		uint32_t last = g->pieces - 1u - leaf % g->pieces; /* leaves before the short one of this page */
		uint32_t run = even ? end - leaf : last;
		size_t len, at = kvc_leaf(g, range->head, leaf, &len);

		run = run == 0 ? 1 : run < end - leaf ? run : end - leaf;
		kv_copy_digest_leaves((uint8_t *)dst + at, (const uint8_t *)src + at, len, run, digests);
		digests += run;
		leaf += run;
	}
}

kv_status_t kvc_copy_checked(const kvc_geometry_t *g, void *dst, const void *src, const uint64_t *leaves)
{
	uint64_t digests[KVC_CHUNK] = {0}, wrong = 0;
	kvc_leaves_t range;

	for (range.head = 0; range.head < g->heads; range.head++) {
		for (range.first = 0; range.first < g->leaves; range.first += range.count) {
			range.count = g->leaves - range.first;
			range.count = range.count < KVC_CHUNK ? range.count : KVC_CHUNK;
			kvc_copy_leaves(g, &range, dst, src, digests);
			for (uint32_t i = 0; i < range.count; i++) {
				wrong |= digests[i] ^ __atomic_load_n(leaves++, __ATOMIC_RELAXED);
			}
		}
	}

	return wrong ? KV_ERR_CORRUPT : KV_OK;
}
