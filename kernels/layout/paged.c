/* Does an engine's paged cache fit the pool's layout? */
#include "kvk/layout.h"

#include "page.h"

static kv_status_t set_reason(const char **p_why, const char *why)
{
	if (p_why) {
		*p_why = why;
	}

	return KV_ERR_LAYOUT;
}

/* [first, first + count) within [0, total), and not empty. */
static int range_ok(uint32_t first, uint32_t count, uint32_t total)
{
	return count > 0 && first < total && count <= total - first;
}

static int begins_with_head(kvk_paged_kind_t kind)
{
	return kind == KVK_PAGED_HEAD_TOKEN_KV || kind == KVK_PAGED_HEAD_KV_TOKEN;
}

/* Pages of all blocks and heads of a layer, one after another whichever is outermost; what is between them does not
 * matter. */
static kv_status_t check_strides(const kvk_paged_t *paged, size_t stride, const char **p_why)
{
	const size_t head = kvk_paged_head_stride(paged);
	const size_t page = kvk_paged_block_bytes(paged) / paged->heads;
	size_t blocks_span, heads_span;

	if (paged->head_stride && !begins_with_head(paged->kind)) {
		return set_reason(p_why, "only an order that begins with the head has a distance between heads");
	}
	if (__builtin_mul_overflow(stride, (size_t)paged->blocks, &blocks_span) || blocks_span > PTRDIFF_MAX / 2 ||
	    __builtin_mul_overflow(head, (size_t)paged->heads, &heads_span) || heads_span > PTRDIFF_MAX / 2) {
		return set_reason(p_why, "the paged cache is larger than the address space");
	}
	if (head < page) {
		return set_reason(p_why, "the paged cache's heads overlap");
	}
	if (stride < heads_span - head + page && (stride < page || head < blocks_span - stride + page)) {
		return set_reason(p_why, "the paged cache's blocks overlap");
	}

	return KV_OK;
}

static kv_status_t check_memory(const kvk_paged_t *paged, const char **p_why)
{
	const size_t stride = paged->block_stride ? paged->block_stride : kvk_paged_block_bytes(paged);
	kv_status_t status;

	if (paged->blocks == 0) {
		return set_reason(p_why, "the paged cache has no blocks");
	}
	status = check_strides(paged, stride, p_why);
	if (status != KV_OK) {
		return status;
	}
	if (!paged->base) {
		return set_reason(p_why, "the paged cache has no memory");
	}
	for (uint32_t i = 0; i < paged->layers; i++) {
		if (!paged->base[i]) {
			return set_reason(p_why, "a layer of the paged cache has no memory");
		}
	}

	return KV_OK;
}

kv_status_t kvk_paged_check(const kvk_paged_t *paged, const kvk_layout_t *layout, const char **p_why)
{
	const kv_status_t status = kvk_layout_check(layout, p_why);

	if (status != KV_OK) {
		return status;
	}
	if ((unsigned)paged->kind >= KVK_PAGED_KIND_COUNT) {
		return set_reason(p_why, "the kind of paged cache is not known");
	}
	if ((paged->kind == KVK_PAGED_OPAQUE) != (layout->inner == KVK_INNER_OPAQUE)) {
		return set_reason(p_why, "opaque pages need an opaque layout, and the other way round");
	}
	if (!range_ok(paged->first_layer, paged->layers, layout->layers)) {
		return set_reason(p_why, "the rank's layers are not within the model's");
	}
	if (!range_ok(paged->first_head, paged->heads, layout->heads)) {
		return set_reason(p_why, "the rank's heads are not within the model's");
	}
	if (paged->block_tokens != layout->block_tokens) {
		return set_reason(p_why, "the paged cache and the pool disagree on tokens a block");
	}
	if (paged->k_dim != layout->k_dim || paged->v_dim != layout->v_dim) {
		return set_reason(p_why, "the paged cache and the pool disagree on a dimension");
	}
	if (paged->dtype != layout->dtype) {
		return set_reason(p_why, "the paged cache and the pool disagree on the type");
	}
	if (paged->page_bytes != layout->page_bytes) {
		return set_reason(p_why, "the paged cache and the pool disagree on the page size");
	}

	return check_memory(paged, p_why);
}
