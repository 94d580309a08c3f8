/* Layouts: refused or exact. One text per layout, leaves that tile the block, paged caches that fit or do not. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "kvk/layout.h"

static const kvk_layout_t plain = {.heads = 8,
				   .layers = 32,
				   .block_tokens = 16,
				   .k_dim = 128,
				   .v_dim = 128,
				   .dtype = KVK_DTYPE_BF16,
				   .inner = KVK_INNER_SPLIT};
static const kvk_layout_t opaque = {.heads = 1,
				    .layers = 4,
				    .block_tokens = 128,
				    .dtype = KVK_DTYPE_BYTE,
				    .inner = KVK_INNER_OPAQUE,
				    .page_bytes = 40000};

static void refused(kvk_layout_t layout, const char *part)
{
	char text[KVK_LAYOUT_TEXT_MAX];
	const char *why = NULL;

	assert_int_equal(kvk_layout_check(&layout, &why), KV_ERR_LAYOUT);
	assert_non_null(why);
	if (!strstr(why, part)) {
		fail_msg("\"%s\" does not speak of %s", why, part);
	}
	assert_int_equal(kvk_layout_check(&layout, NULL), KV_ERR_LAYOUT);
	assert_int_equal(kvk_layout_format(&layout, text, sizeof text), KV_ERR_LAYOUT);
}

#define WITH(base, member, value, part)                                                                                \
	do {                                                                                                           \
		kvk_layout_t changed = base;                                                                           \
		changed.member = value;                                                                                \
		refused(changed, part);                                                                                \
	} while (0)

KV_TEST(p10_a_contradictory_layout_is_refused)
{
	assert_int_equal(kvk_layout_check(&plain, NULL), KV_OK);
	assert_int_equal(kvk_layout_check(&opaque, NULL), KV_OK);
	WITH(plain, heads, 0, "heads");
	WITH(plain, heads, KVK_MAX_HEADS + 1, "heads");
	WITH(plain, layers, 0, "layers");
	WITH(plain, layers, KVK_MAX_LAYERS + 1, "layers");
	WITH(plain, block_tokens, 0, "tokens");
	WITH(plain, block_tokens, KVK_MAX_BLOCK_TOKENS + 1, "tokens");
	WITH(plain, k_dim, 0, "dimension");
	WITH(plain, k_dim, KVK_MAX_DIM + 1, "dimension");
	WITH(plain, v_dim, UINT32_MAX, "dimension");
	WITH(plain, dtype, KVK_DTYPE_COUNT, "type");
	WITH(plain, dtype, (kvk_dtype_t)-1, "type");
	WITH(plain, inner, (kvk_inner_t)3, "inner");
	WITH(plain, page_bytes, 1, "page");
	WITH(opaque, heads, 2, "heads");
	WITH(opaque, k_dim, 1, "dimensions");
	WITH(opaque, v_dim, 1, "dimensions");
	WITH(opaque, page_bytes, 0, "page");
	WITH(opaque, page_bytes, KVK_MAX_BLOCK_BYTES + 1, "page");
	WITH(opaque, page_bytes, KVK_MAX_BLOCK_BYTES, "block");

	kvk_layout_t latent = plain;

	latent.v_dim = 0;
	assert_int_equal(kvk_layout_check(&latent, NULL), KV_OK);
	WITH(latent, inner, KVK_INNER_PACKED, "split");

	kvk_layout_t huge = {KVK_MAX_HEADS, KVK_MAX_LAYERS, KVK_MAX_BLOCK_TOKENS, KVK_MAX_DIM,
			     KVK_MAX_DIM,   KVK_DTYPE_F32,  KVK_INNER_SPLIT,      0};

	refused(huge, "block");
}

static kvk_layout_t random_layout(kv_test_rng_t *rng)
{
	kvk_layout_t layout = {.heads = (uint32_t)kv_test_below(rng, 9) + 1,
			       .layers = (uint32_t)kv_test_below(rng, 9) + 1,
			       .block_tokens = (uint32_t)kv_test_below(rng, 33) + 1,
			       .dtype = (kvk_dtype_t)kv_test_below(rng, KVK_DTYPE_COUNT),
			       .inner = (kvk_inner_t)kv_test_below(rng, 3)};

	if (layout.inner == KVK_INNER_OPAQUE) {
		layout.heads = 1;
		layout.page_bytes = (uint32_t)kv_test_below(rng, 70000) + 1;
		return layout;
	}
	layout.k_dim = (uint32_t)kv_test_below(rng, 200) + 1;
	layout.v_dim = (uint32_t)kv_test_below(rng, 200) + (layout.inner == KVK_INNER_PACKED);

	return layout;
}

KV_TEST(p1_leaves_tile_the_block)
{
	kv_test_rng_t rng = {kv_test_seed()};

	for (int round = 0; round < 500; round++) {
		const kvk_layout_t layout = random_layout(&rng);
		kvk_geometry_t g;
		size_t at = 0;

		assert_int_equal(kvk_layout_check(&layout, NULL), KV_OK);
		kvk_layout_geometry(&layout, &g);
		assert_int_equal(g.leaves, layout.layers * g.pieces);
		assert_int_equal(g.block_bytes, (uint64_t)g.heads * layout.layers * g.page_bytes);
		for (uint32_t head = 0; head < g.heads; head++) {
			for (uint32_t leaf = 0; leaf < g.leaves; leaf++) {
				size_t offset;
				size_t len;

				kvk_layout_leaf(&layout, head, leaf, &offset, &len);
				assert_int_equal(offset, at);
				assert_in_range(len, 1, g.leaf_bytes);
				assert_true(len == g.leaf_bytes || leaf % g.pieces == g.pieces - 1);
				assert_true(layout.inner == KVK_INNER_OPAQUE || len == g.page_bytes);
				at += len;
			}
		}
		assert_int_equal(at, g.block_bytes);
	}
}

KV_TEST(p10_text_and_layout_are_one_to_one)
{
	kv_test_rng_t rng = {kv_test_seed()};
	char text[KVK_LAYOUT_TEXT_MAX];

	assert_int_equal(kvk_layout_format(&plain, text, sizeof text), KV_OK);
	assert_string_equal(text, "kvk1 heads=8 layers=32 tokens=16 k=128 v=128 dtype=bf16 inner=split page=0");
	assert_int_equal(kvk_layout_format(&plain, text, strlen(text)), KV_ERR_TOO_BIG);
	for (int round = 0; round < 500; round++) {
		const kvk_layout_t layout = random_layout(&rng);
		kvk_layout_t back;

		assert_int_equal(kvk_layout_format(&layout, text, sizeof text), KV_OK);
		assert_int_equal(kvk_layout_parse(text, strlen(text), &back, NULL), KV_OK);
		assert_memory_equal(&back, &layout, sizeof back);
	}
}

KV_TEST(p10_only_canonical_text_is_read)
{
	static const char *const bad[] = {
		"",
		"kvk1",
		"kvk2 heads=8 layers=32 tokens=16 k=128 v=128 dtype=bf16 inner=split page=0",
		"kvk1 heads=08 layers=32 tokens=16 k=128 v=128 dtype=bf16 inner=split page=0",
		"kvk1 heads=+8 layers=32 tokens=16 k=128 v=128 dtype=bf16 inner=split page=0",
		"kvk1  heads=8 layers=32 tokens=16 k=128 v=128 dtype=bf16 inner=split page=0",
		"kvk1 heads=8 layers=32 tokens=16 k=128 v=128 dtype=bf16 inner=split page=0 ",
		"kvk1 heads=8 layers=32 tokens=16 k=128 v=128 dtype=bf17 inner=split page=0",
		"kvk1 heads=8 layers=32 tokens=16 k=128 v=128 dtype=bf16 inner=splitpage=0",
		"kvk1 heads=8 layers=32 tokens=16 k=128 v=128 dtype=bf16 inner=split page=",
		"kvk1 heads=8 layers=32 tokens=16 k=128 v=128 dtype=bf16 inner=split",
		"kvk1 heads=4294967304 layers=32 tokens=16 k=128 v=128 dtype=bf16 inner=split page=0",
		"kvk1 layers=32 heads=8 tokens=16 k=128 v=128 dtype=bf16 inner=split page=0",
		"kvk1 heads=0 layers=32 tokens=16 k=128 v=128 dtype=bf16 inner=split page=0",
	};
	kv_test_rng_t rng = {kv_test_seed()};
	char text[KVK_LAYOUT_TEXT_MAX];
	char again[KVK_LAYOUT_TEXT_MAX];
	char longer[2 * KVK_LAYOUT_TEXT_MAX];
	kvk_layout_t layout;
	const char *why = NULL;
	size_t len;

	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		assert_int_equal(kvk_layout_parse(bad[i], strlen(bad[i]), &layout, &why), KV_ERR_LAYOUT);
	}
	memset(longer, ' ', sizeof longer);
	assert_int_equal(kvk_layout_parse(longer, sizeof longer, &layout, &why), KV_ERR_LAYOUT);
	assert_int_equal(kvk_layout_format(&plain, text, sizeof text), KV_OK);
	len = strlen(text);
	assert_int_equal(kvk_layout_parse(text, len + 1, &layout, &why), KV_ERR_LAYOUT); /* the NUL is no part of it */
	for (int round = 0; round < 20000; round++) {
		const size_t at = kv_test_below(&rng, len);
		const char saved = text[at];

		text[at] = (char)kv_test_below(&rng, 128);
		if (kvk_layout_parse(text, len, &layout, &why) == KV_OK) {
			assert_int_equal(kvk_layout_format(&layout, again, sizeof again), KV_OK);
			assert_string_equal(again, text);
		}
		text[at] = saved;
	}
}

KV_TEST(p10_text_and_layouts_of_groups_are_one_to_one)
{
	kv_test_rng_t rng = {kv_test_seed()};
	char text[KVK_LAYOUTS_TEXT_MAX];

	for (int round = 0; round < 500; round++) {
		const uint32_t count = 1 + (uint32_t)kv_test_below(&rng, 8);
		kvk_layout_t layouts[8], back[8];
		const char *why = NULL;
		size_t len;

		for (uint32_t g = 0; g < count; g++) {
			layouts[g] = g > 0 && kv_test_below(&rng, 2) ? layouts[g - 1] : random_layout(&rng);
		}
		assert_int_equal(kvk_layouts_format(layouts, count, text, sizeof text), KV_OK);
		len = strlen(text);
		assert_int_equal(kvk_layouts_parse(text, len, back, count, &why), KV_OK);
		assert_memory_equal(back, layouts, count * sizeof *layouts);
		assert_int_equal(kvk_layouts_format(layouts, count, text, len), KV_ERR_TOO_BIG);
		if (strchr(text, ';')) { /* else it is the text of any number of groups */
			assert_int_equal(kvk_layouts_parse(text, len, back, count - 1, &why), KV_ERR_LAYOUT);
			assert_int_equal(kvk_layouts_parse(text, len, back, count + 1, &why), KV_ERR_LAYOUT);
		}
		for (int i = 0; i < 50; i++) {
			const size_t at = kv_test_below(&rng, len);
			const char saved = text[at];
			char again[KVK_LAYOUTS_TEXT_MAX];

			text[at] = (char)kv_test_below(&rng, 128);
			if (kvk_layouts_parse(text, len, back, count, &why) == KV_OK) {
				assert_int_equal(kvk_layouts_format(back, count, again, sizeof again), KV_OK);
				assert_string_equal(again, text);
			}
			text[at] = saved;
		}
	}
}

KV_TEST(p10_runs_of_equal_layouts_have_one_text)
{
#define ONE "kvk1 heads=8 layers=32 tokens=16 k=128 v=128 dtype=bf16 inner=split page=0"
#define TWO "kvk1 heads=4 layers=32 tokens=16 k=128 v=128 dtype=bf16 inner=split page=0"
	static const char *const bad[] = {
		"2*" ONE,
		"1*" ONE ";1*" ONE,
		"1*" ONE ";1*" TWO ";",
		";1*" ONE ";1*" TWO,
		"01*" ONE ";1*" TWO,
		"0*" ONE ";2*" TWO,
		ONE ";" TWO,
		"2*" ONE ";1*" TWO,
		"1*" ONE ";4294967297*" TWO,
	};
	static const char good[] = "1*" ONE ";1*" TWO;
	kvk_layout_t layouts[2];
	const char *why = NULL;

	assert_int_equal(kvk_layouts_parse(good, strlen(good), layouts, 2, &why), KV_OK);
	assert_int_equal(layouts[1].heads, 4);
	assert_int_equal(kvk_layouts_parse(ONE, strlen(ONE), layouts, 2, &why), KV_OK);
	assert_memory_equal(&layouts[0], &layouts[1], sizeof layouts[0]);
	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		assert_int_equal(kvk_layouts_parse(bad[i], strlen(bad[i]), layouts, 2, &why), KV_ERR_LAYOUT);
	}
}

KV_TEST(only_the_inner_order_may_differ)
{
	kvk_layout_t other = plain;

	assert_true(kvk_layout_convertible(&plain, &plain));
	other.inner = KVK_INNER_PACKED;
	assert_true(kvk_layout_convertible(&plain, &other));
	other.layers--;
	assert_false(kvk_layout_convertible(&plain, &other));
	assert_false(kvk_layout_convertible(&opaque, &opaque));
}

/* ---- paged caches ---------------------------------------------------------------------------- */

static void *layer_base[32];

static void paged_refused(kvk_paged_t paged, const kvk_layout_t *layout, const char *part)
{
	const char *why = NULL;

	assert_int_equal(kvk_paged_check(&paged, layout, &why), KV_ERR_LAYOUT);
	if (!strstr(why, part)) {
		fail_msg("\"%s\" does not speak of %s", why, part);
	}
}

#define PAGED_WITH(member, value, part)                                                                                \
	do {                                                                                                           \
		kvk_paged_t changed = paged;                                                                           \
		changed.member = value;                                                                                \
		paged_refused(changed, &plain, part);                                                                  \
	} while (0)

KV_TEST(p10_a_paged_cache_that_does_not_fit_is_refused)
{
	kvk_layout_t invalid = plain;
	kvk_paged_t raw = {.kind = KVK_PAGED_OPAQUE,
			   .blocks = 3,
			   .layers = 4,
			   .heads = 1,
			   .block_tokens = 128,
			   .dtype = KVK_DTYPE_BYTE,
			   .page_bytes = 40000,
			   .base = layer_base};
	kvk_paged_t paged = {.kind = KVK_PAGED_KV_TOKEN_HEAD,
			     .blocks = 100,
			     .layers = 16,
			     .first_layer = 16,
			     .heads = 4,
			     .first_head = 4,
			     .block_tokens = 16,
			     .k_dim = 128,
			     .v_dim = 128,
			     .dtype = KVK_DTYPE_BF16,
			     .base = layer_base};

	for (size_t i = 0; i < KV_COUNT_OF(layer_base); i++) {
		layer_base[i] = layer_base;
	}
	assert_int_equal(kvk_paged_check(&paged, &plain, NULL), KV_OK);
	assert_int_equal(kvk_paged_check(&raw, &opaque, NULL), KV_OK);
	raw.page_bytes--;
	paged_refused(raw, &opaque, "page size");
	PAGED_WITH(kind, KVK_PAGED_KIND_COUNT, "kind");
	PAGED_WITH(kind, KVK_PAGED_OPAQUE, "opaque");
	PAGED_WITH(first_layer, 17, "layers");
	PAGED_WITH(first_layer, UINT32_MAX, "layers");
	PAGED_WITH(layers, 0, "layers");
	PAGED_WITH(layers, UINT32_MAX, "layers");
	PAGED_WITH(first_head, 5, "heads");
	PAGED_WITH(heads, 0, "heads");
	PAGED_WITH(block_tokens, 32, "tokens");
	PAGED_WITH(k_dim, 64, "dimension");
	PAGED_WITH(v_dim, 0, "dimension");
	PAGED_WITH(dtype, KVK_DTYPE_F16, "type");
	PAGED_WITH(page_bytes, 1, "page size");
	PAGED_WITH(blocks, 0, "no blocks");
	PAGED_WITH(base, NULL, "memory");
	PAGED_WITH(block_stride, 4 * 16 * 256 * 2 - 1, "overlap");
	PAGED_WITH(block_stride, SIZE_MAX / 64, "address space");
	PAGED_WITH(head_stride, 16 * 256 * 2, "begins with the head");
	paged.block_stride = 4 * 16 * 256 * 2;
	assert_int_equal(kvk_paged_check(&paged, &plain, NULL), KV_OK);
	layer_base[15] = NULL;
	paged_refused(paged, &plain, "memory");
	invalid.heads = 0;
	paged_refused(paged, &invalid, "heads");
}

#define APART(heads_, blocks_, text)                                                                                   \
	do {                                                                                                           \
		paged.head_stride = heads_;                                                                            \
		paged.block_stride = blocks_;                                                                          \
		if (*text) {                                                                                           \
			paged_refused(paged, &plain, text);                                                            \
		} else {                                                                                               \
			assert_int_equal(kvk_paged_check(&paged, &plain, NULL), KV_OK);                                \
		}                                                                                                      \
	} while (0)

KV_TEST(p10_heads_apart_may_hold_layers_or_blocks_but_not_each_other)
{
	const size_t page = (size_t)16 * 256 * 2;
	kvk_paged_t paged = {.kind = KVK_PAGED_HEAD_KV_TOKEN,
			     .blocks = 100,
			     .layers = 16,
			     .heads = 4,
			     .block_tokens = 16,
			     .k_dim = 128,
			     .v_dim = 128,
			     .dtype = KVK_DTYPE_BF16,
			     .base = layer_base};

	for (size_t i = 0; i < KV_COUNT_OF(layer_base); i++) {
		layer_base[i] = layer_base;
	}
	APART(0, 0, "");
	APART(page, 4 * page, "");
	APART(16 * page, 64 * page, "");
	APART(16 * page, 49 * page, "");
	APART(16 * page, 49 * page - 1, "overlap");
	APART(100 * page, page, "");
	APART(100 * page - 1, page, "overlap");
	APART(100 * page, page - 1, "overlap");
	APART(page - 1, 64 * page, "overlap");
	APART(16 * page, 0, "overlap");
	APART(SIZE_MAX / 4, SIZE_MAX / 128, "address space");
	APART(SIZE_MAX / 2, 64 * page, "address space");
}
