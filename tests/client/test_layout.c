/* The builders of layout and group texts write what the daemon takes, and refuse what it refuses. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "kvc.h"

#include "kv/identity.h"
#include "kvk/layout.h"

static const kvk_layout_t llama = {
	.heads = 8, .layers = 32, .block_tokens = 16, .k_dim = 128, .v_dim = 128, .dtype = KVK_DTYPE_BF16};

KV_TEST(p10_a_layout_text_is_the_one_the_daemon_parses)
{
	const kvk_layout_t mla = {
		.heads = 1, .layers = 61, .block_tokens = 64, .k_dim = 576, .dtype = KVK_DTYPE_FP8_E4M3};
	const kvk_layout_t opaque = {.heads = 1,
				     .layers = 4,
				     .block_tokens = 128,
				     .dtype = KVK_DTYPE_BYTE,
				     .inner = KVK_INNER_OPAQUE,
				     .page_bytes = 65536};
	const kvk_layout_t *all[] = {&llama, &mla, &opaque};
	char text[KVK_LAYOUT_TEXT_MAX];

	for (size_t i = 0; i < KV_COUNT_OF(all); i++) {
		kvk_layout_t parsed;
		const char *why = NULL;

		assert_int_equal(kvc_layout_text(all[i], 1, text, sizeof text), KVC_OK);
		assert_int_equal(kvk_layout_parse(text, strlen(text), &parsed, &why), KV_OK);
		assert_memory_equal(&parsed, all[i], sizeof parsed);
	}
	assert_int_equal(kvc_layout_text(&llama, 1, text, sizeof text), KVC_OK);
	assert_string_equal(text, "kvk1 heads=8 layers=32 tokens=16 k=128 v=128 dtype=bf16 inner=split page=0");
}

/* Refused with a sentence that holds `part`. */
static void layout_refused(kvk_layout_t layout, kvc_status_t status, const char *part)
{
	char text[KVK_LAYOUT_TEXT_MAX];

	assert_int_equal(kvc_layout_text(&layout, 1, text, sizeof text), status);
	if (!strstr(kvc_last_error(), part)) {
		fail_msg("\"%s\" does not say \"%s\"", kvc_last_error(), part);
	}
}

KV_TEST(p10_a_layout_that_cannot_be_is_refused_by_name)
{
	kvk_layout_t layout = llama;
	char text[KVK_LAYOUT_TEXT_MAX];

	layout.heads = 0;
	layout_refused(layout, KVC_ERR_LAYOUT, "heads");
	layout = llama;
	layout.dtype = KVK_DTYPE_COUNT;
	layout_refused(layout, KVC_ERR_LAYOUT, "type");
	layout = llama;
	layout.page_bytes = 4096;
	layout_refused(layout, KVC_ERR_LAYOUT, "opaque");
	assert_int_equal(kvc_layout_text(&llama, 1, text, 40), KVC_ERR_TOO_BIG);
	assert_int_equal(kvc_layout_text(NULL, 1, text, sizeof text), KVC_ERR_ARG);
	assert_int_equal(kvc_layout_text(&llama, 1, NULL, 0), KVC_ERR_ARG);
	assert_int_equal(kvc_layout_text(&llama, 0, text, sizeof text), KVC_ERR_ARG);
	assert_int_equal(kvc_layout_text(&llama, 17, text, sizeof text), KVC_ERR_ARG);
}

KV_TEST(p10_a_group_text_is_the_one_the_daemon_parses)
{
	const kvc_group_info_t groups[] = {{.group = 0, .rule = KVC_RULE_FULL, .block_tokens = 16},
					   {.group = 1, .rule = KVC_RULE_WINDOW, .block_tokens = 16, .window = 4096},
					   {.group = 7, .rule = KVC_RULE_STATE, .block_tokens = 32}};
	kvc_group_info_t bad = {.group = 0, .rule = KVC_RULE_WINDOW, .block_tokens = 16};
	char text[KVC_GROUPS_TEXT_MAX];
	uint32_t hash_tokens, n = 0;
	kv_group_t parsed[KV_MAX_GROUPS];

	assert_int_equal(kvc_groups_text(groups, 3, text, sizeof text), KVC_OK);
	assert_string_equal(text, "0:full:16,1:window:16:4096,7:state:32");
	assert_int_equal(kv_identity_groups(&(kv_identity_t){.hash_tokens = "16", .groups = text}, &hash_tokens, parsed,
					    KV_MAX_GROUPS, &n),
			 KV_OK);
	assert_int_equal(n, 3);
	assert_int_equal(parsed[1].window, 4096);

	assert_int_equal(kvc_groups_text(&bad, 1, text, sizeof text), KV_ERR_IDENTITY); /* a window of no tokens */
	bad.rule = 9;
	assert_int_equal(kvc_groups_text(&bad, 1, text, sizeof text), KV_ERR_IDENTITY);
	assert_int_equal(kvc_groups_text((const kvc_group_info_t[]){groups[1], groups[0]}, 2, text, sizeof text),
			 KV_ERR_IDENTITY);
	assert_int_equal(kvc_groups_text(groups, 0, text, sizeof text), KV_ERR_IDENTITY);
	assert_int_equal(kvc_groups_text(groups, 3, text, 20), KVC_ERR_TOO_BIG);
	assert_int_equal(kvc_groups_text(NULL, 1, text, sizeof text), KVC_ERR_ARG);
}
