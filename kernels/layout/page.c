/* The orders kvd knows, as rows of K and V. */
#include "page.h"

size_t kvk_k_bytes(const kvk_layout_t *layout)
{
	return (size_t)layout->k_dim * kvk_dtype_bytes(layout->dtype);
}

size_t kvk_v_bytes(const kvk_layout_t *layout)
{
	return (size_t)layout->v_dim * kvk_dtype_bytes(layout->dtype);
}

kvk_rows_t kvk_page_rows(const kvk_layout_t *layout)
{
	const size_t k = kvk_k_bytes(layout);
	const size_t v = kvk_v_bytes(layout);

	if (layout->inner == KVK_INNER_PACKED) {
		/* [token][k | v] */
		return (kvk_rows_t){.k = {0, k + v}, .v = {k, k + v}};
	}

	/* K [token][k], then V [token][v] */
	return (kvk_rows_t){.k = {0, k}, .v = {k * layout->block_tokens, v}};
}

kvk_rows_t kvk_paged_rows(const kvk_paged_t *paged, uint32_t head)
{
	const size_t element = kvk_dtype_bytes(paged->dtype);
	const size_t k = paged->k_dim * element;
	const size_t v = paged->v_dim * element;
	const size_t tokens = paged->block_tokens;
	const size_t heads = paged->heads;

	const size_t page = head * kvk_paged_head_stride(paged);

	switch (paged->kind) {
	case KVK_PAGED_HEAD_TOKEN_KV:
		/* [head][token][k | v] */
		return (kvk_rows_t){.k = {page, k + v}, .v = {page + k, k + v}};
	case KVK_PAGED_HEAD_KV_TOKEN:
		/* [head]: K [token][k], then V [token][v] */
		return (kvk_rows_t){.k = {page, k}, .v = {page + tokens * k, v}};
	case KVK_PAGED_TOKEN_HEAD_KV:
		/* [token][head][k | v] */
		return (kvk_rows_t){.k = {head * (k + v), heads * (k + v)}, .v = {head * (k + v) + k, heads * (k + v)}};
	case KVK_PAGED_KV_HEAD_TOKEN:
		/* K [head][token][k], then V [head][token][v] */
		return (kvk_rows_t){.k = {head * tokens * k, k}, .v = {heads * tokens * k + head * tokens * v, v}};
	case KVK_PAGED_KV_TOKEN_HEAD:
	case KVK_PAGED_OPAQUE:
	case KVK_PAGED_KIND_COUNT:
		break;
	}

	/* K [token][head][k], then V [token][head][v] */
	return (kvk_rows_t){.k = {head * k, heads * k}, .v = {tokens * heads * k + head * v, heads * v}};
}

size_t kvk_paged_block_bytes(const kvk_paged_t *paged)
{
	if (paged->kind == KVK_PAGED_OPAQUE) {
		return paged->page_bytes;
	}

	return (size_t)paged->heads * paged->block_tokens * (paged->k_dim + paged->v_dim) *
	       kvk_dtype_bytes(paged->dtype);
}

size_t kvk_paged_head_stride(const kvk_paged_t *paged)
{
	return paged->head_stride ? paged->head_stride : kvk_paged_block_bytes(paged) / paged->heads;
}

uint8_t *kvk_paged_block(const kvk_paged_t *paged, uint32_t layer, uint32_t block)
{
	const size_t stride = paged->block_stride ? paged->block_stride : kvk_paged_block_bytes(paged);

	return (uint8_t *)paged->base[layer] + stride * block;
}
