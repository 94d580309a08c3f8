/* What makes a layout valid, what follows from it, and its one canonical text. */
#include "kvk/layout.h"

#include <stdio.h>

typedef struct dtype_row {
	const char *text;
	uint32_t bytes;
} dtype_row_t;

static const dtype_row_t dtypes[KVK_DTYPE_COUNT] = {
#define DTYPE_ROW(NAME, text, bytes) {text, bytes},
	KVK_DTYPE_LIST(DTYPE_ROW)
#undef DTYPE_ROW
};

static const char *const inners[] = {"split", "packed", "opaque"};

uint32_t kvk_dtype_bytes(kvk_dtype_t dtype)
{
	return dtypes[dtype].bytes;
}

static kv_status_t set_reason(const char **p_why, const char *why)
{
	if (p_why) {
		*p_why = why;
	}

	return KV_ERR_LAYOUT;
}

/* ---- layout ---------------------------------------------------------------------------------- */

/* Of fields that are in range: nothing here overflows 64 bits. */
static uint64_t page_bytes(const kvk_layout_t *layout)
{
	if (layout->inner == KVK_INNER_OPAQUE) {
		return layout->page_bytes;
	}

	return (uint64_t)layout->block_tokens * (layout->k_dim + layout->v_dim) * kvk_dtype_bytes(layout->dtype);
}

static kv_status_t check_inner(const kvk_layout_t *layout, const char **p_why)
{
	if (layout->inner == KVK_INNER_OPAQUE) {
		if (layout->heads != 1) {
			return set_reason(p_why, "opaque pages cannot be split by head: heads must be 1");
		}
		if (layout->k_dim != 0 || layout->v_dim != 0) {
			return set_reason(p_why, "opaque pages have no dimensions: k and v must be 0");
		}
		if (layout->page_bytes == 0 || layout->page_bytes > KVK_MAX_BLOCK_BYTES) {
			return set_reason(p_why, "the page of an opaque layout is empty or too large");
		}
		return KV_OK;
	}

	if (layout->page_bytes != 0) {
		return set_reason(p_why, "only opaque layouts give a page size");
	}
	if (layout->k_dim == 0 || layout->k_dim > KVK_MAX_DIM || layout->v_dim > KVK_MAX_DIM) {
		return set_reason(p_why, "a dimension is out of range");
	}
	if (layout->v_dim == 0 && layout->inner != KVK_INNER_SPLIT) {
		return set_reason(p_why, "without V there is one inner order: split");
	}

	return KV_OK;
}

kv_status_t kvk_layout_check(const kvk_layout_t *layout, const char **p_why)
{
	kv_status_t status;

	if (layout->heads == 0 || layout->heads > KVK_MAX_HEADS) {
		return set_reason(p_why, "the number of heads is out of range");
	}
	if (layout->layers == 0 || layout->layers > KVK_MAX_LAYERS) {
		return set_reason(p_why, "the number of layers is out of range");
	}
	if (layout->block_tokens == 0 || layout->block_tokens > KVK_MAX_BLOCK_TOKENS) {
		return set_reason(p_why, "the number of tokens a block is out of range");
	}
	if ((unsigned)layout->dtype >= KVK_DTYPE_COUNT) {
		return set_reason(p_why, "the type is not known");
	}
	if ((unsigned)layout->inner >= KV_COUNT_OF(inners)) {
		return set_reason(p_why, "the inner order is not known");
	}
	status = check_inner(layout, p_why);
	if (status != KV_OK) {
		return status;
	}
	if (page_bytes(layout) * layout->heads * layout->layers > KVK_MAX_BLOCK_BYTES) {
		return set_reason(p_why, "the block is too large");
	}

	return KV_OK;
}

void kvk_layout_geometry(const kvk_layout_t *layout, kvk_geometry_t *geometry)
{
	const uint32_t page = (uint32_t)page_bytes(layout);
	const int opaque = layout->inner == KVK_INNER_OPAQUE;
	const uint32_t pieces = opaque ? (page + KVK_OPAQUE_LEAF - 1) / KVK_OPAQUE_LEAF : 1;

	*geometry = (kvk_geometry_t){
		.block_bytes = layout->heads * layout->layers * page,
		.page_bytes = page,
		.heads = layout->heads,
		.leaves = layout->layers * pieces,
		.leaf_bytes = opaque && page > KVK_OPAQUE_LEAF ? KVK_OPAQUE_LEAF : page,
		.pieces = pieces,
	};
}

void kvk_layout_leaf(const kvk_layout_t *layout, uint32_t head, uint32_t leaf, size_t *p_offset, size_t *p_len)
{
	kvk_geometry_t g;

	kvk_layout_geometry(layout, &g);

	const size_t page = (size_t)head * layout->layers + leaf / g.pieces;
	const size_t in_page = (size_t)(leaf % g.pieces) * g.leaf_bytes;
	const size_t left = g.page_bytes - in_page;

	*p_offset = page * g.page_bytes + in_page;
	*p_len = left < g.leaf_bytes ? left : g.leaf_bytes;
}

int kvk_layout_convertible(const kvk_layout_t *a, const kvk_layout_t *b)
{
	return a->inner != KVK_INNER_OPAQUE && b->inner != KVK_INNER_OPAQUE && a->heads == b->heads &&
	       a->layers == b->layers && a->block_tokens == b->block_tokens && a->k_dim == b->k_dim &&
	       a->v_dim == b->v_dim && a->dtype == b->dtype && a->page_bytes == b->page_bytes;
}

/* ---- text ------------------------------------------------------------------------------------ */

kv_status_t kvk_layout_format(const kvk_layout_t *layout, char *out, size_t cap)
{
	kv_status_t status = kvk_layout_check(layout, NULL);
	int n;

	if (status != KV_OK) {
		return status;
	}
	n = snprintf(out, cap, "kvk1 heads=%u layers=%u tokens=%u k=%u v=%u dtype=%s inner=%s page=%u", layout->heads,
		     layout->layers, layout->block_tokens, layout->k_dim, layout->v_dim, dtypes[layout->dtype].text,
		     inners[layout->inner], layout->page_bytes);

	return n >= 0 && (size_t)n < cap ? KV_OK : KV_ERR_TOO_BIG;
}

/* Where parsing stands in a NUL-terminated copy. */
static int take_text(const char **p_at, const char *text)
{
	const size_t n = strlen(text);

	if (strncmp(*p_at, text, n) != 0) {
		return 0;
	}
	*p_at += n;

	return 1;
}

static int take_number(const char **p_at, const char *name, uint32_t *p_value)
{
	uint64_t value = 0;
	const char *first;

	if (!take_text(p_at, name)) {
		return 0;
	}
	for (first = *p_at; **p_at >= '0' && **p_at <= '9'; (*p_at)++) {
		value = value * 10 + (uint64_t)(**p_at - '0');
		if (value > UINT32_MAX) {
			return 0;
		}
	}
	*p_value = (uint32_t)value;

	return *p_at > first;
}

static int take_dtype(const char **p_at, kvk_dtype_t *p_dtype)
{
	if (!take_text(p_at, " dtype=")) {
		return 0;
	}
	for (unsigned i = 0; i < KVK_DTYPE_COUNT; i++) {
		const size_t n = strlen(dtypes[i].text);

		if (strncmp(*p_at, dtypes[i].text, n) == 0 && (*p_at)[n] == ' ') {
			*p_at += n;
			*p_dtype = (kvk_dtype_t)i;
			return 1;
		}
	}

	return 0;
}

static int take_inner(const char **p_at, kvk_inner_t *p_inner)
{
	if (!take_text(p_at, " inner=")) {
		return 0;
	}
	for (unsigned i = 0; i < KV_COUNT_OF(inners); i++) {
		if (take_text(p_at, inners[i])) {
			*p_inner = (kvk_inner_t)i;
			return 1;
		}
	}

	return 0;
}

kv_status_t kvk_layout_parse(const char *text, size_t len, kvk_layout_t *layout, const char **p_why)
{
	char copy[KVK_LAYOUT_TEXT_MAX];
	char canonical[KVK_LAYOUT_TEXT_MAX];
	kvk_layout_t parsed = {0};
	const char *at = copy;
	kv_status_t status;

	if (len >= sizeof copy) {
		return set_reason(p_why, "the layout text is too long");
	}
	memcpy(copy, text, len);
	copy[len] = '\0';

	if (!take_number(&at, "kvk1 heads=", &parsed.heads) || !take_number(&at, " layers=", &parsed.layers) ||
	    !take_number(&at, " tokens=", &parsed.block_tokens) || !take_number(&at, " k=", &parsed.k_dim) ||
	    !take_number(&at, " v=", &parsed.v_dim) || !take_dtype(&at, &parsed.dtype) ||
	    !take_inner(&at, &parsed.inner) || !take_number(&at, " page=", &parsed.page_bytes)) {
		return set_reason(p_why, "the layout text is not one this version writes");
	}
	status = kvk_layout_check(&parsed, p_why);
	if (status != KV_OK) {
		return status;
	}
	if (kvk_layout_format(&parsed, canonical, sizeof canonical) != KV_OK || strlen(canonical) != len ||
	    memcmp(canonical, text, len) != 0) {
		return set_reason(p_why, "the layout text is not in its canonical form");
	}
	*layout = parsed;

	return KV_OK;
}
