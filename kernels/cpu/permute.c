/* From one inner order to another. */
#include "kvk/move.h"

#include "layout/page.h"

#include "kv/digest.h"

static void copy_row(uint8_t *dst, kvk_row_t to, const uint8_t *src, kvk_row_t from, size_t bytes, uint32_t tokens)
{
	for (uint32_t t = 0; t < tokens; t++) {
		memcpy(dst + to.offset + t * to.stride, src + from.offset + t * from.stride, bytes);
	}
}

kv_status_t kvk_permute(const kvk_layout_t *from, const void *src, const kvk_layout_t *to, void *dst)
{
	kvk_geometry_t g;
	kvk_rows_t in;
	kvk_rows_t out;

	if (!kvk_layout_convertible(from, to)) {
		return KV_ERR_LAYOUT;
	}
	kvk_layout_geometry(from, &g);
	if (from->inner == to->inner) {
		kv_copy_stream(dst, src, g.block_bytes);
		return KV_OK;
	}

	in = kvk_page_rows(from);
	out = kvk_page_rows(to);
	for (size_t at = 0; at < g.block_bytes; at += g.page_bytes) {
		const uint8_t *page_in = (const uint8_t *)src + at;
		uint8_t *page_out = (uint8_t *)dst + at;

		copy_row(page_out, out.k, page_in, in.k, kvk_k_bytes(from), from->block_tokens);
		copy_row(page_out, out.v, page_in, in.v, kvk_v_bytes(from), from->block_tokens);
	}

	return KV_OK;
}
