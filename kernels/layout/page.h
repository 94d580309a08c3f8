/* kernels/layout/page.h -- where K and V of one page (head, layer) lie, token by token; private to kernels/.
 *
 * Every order of a page that is not opaque is two rows of `tokens` pieces, one of K and one of V, each with an
 * offset and a stride. Gather, scatter and permute are all "walk the rows of one description and of another side
 * by side".
 */
#ifndef KVK_LAYOUT_PAGE_H
#define KVK_LAYOUT_PAGE_H

#include "kvk/layout.h"

typedef struct kvk_row {
	size_t offset; /* of token 0, from the start of the page or of the paged block */
	size_t stride; /* from a token to the next                                     */
} kvk_row_t;

typedef struct kvk_rows {
	kvk_row_t k;
	kvk_row_t v;
} kvk_rows_t;

/* Of a page in a canonical block. */
kvk_rows_t kvk_page_rows(const kvk_layout_t *layout);

/* Of local head `head` in one layer of a paged block; not for opaque caches. */
kvk_rows_t kvk_paged_rows(const kvk_paged_t *paged, uint32_t head);

/* Bytes of one token's K and V. */
size_t kvk_k_bytes(const kvk_layout_t *layout);
size_t kvk_v_bytes(const kvk_layout_t *layout);

/* Bytes of one block in one layer of a paged cache, all heads held here; what lies between heads does not count. */
size_t kvk_paged_block_bytes(const kvk_paged_t *paged);

/* From a head to the next, in the orders that begin with the head. */
size_t kvk_paged_head_stride(const kvk_paged_t *paged);

/* Its address; layer counts from this rank's first. */
uint8_t *kvk_paged_block(const kvk_paged_t *paged, uint32_t layer, uint32_t block);

#endif
