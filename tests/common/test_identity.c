/* Identity: one text per identity, refused unless complete and canonical. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "golden_keys.h"

#include "kv/identity.h"

static const kv_identity_t sample = {
	.model = "llama 3=8b",
	.weights = "sha256:0123",
	.dtype = "bf16",
	.quantization = "none",
	.rope = "theta=500000",
	.lora = "none",
	.hash = "kv1",
	.hash_tokens = "16",
	.groups = "0:full:16",
	.layout = "kvk1 heads=8 layers=32 tokens=16 k=128 v=128 dtype=bf16 inner=split page=0",
	.page_format = "plain",
};

static const char *const *member(const kv_identity_t *identity, size_t i)
{
	return (const char *const *)(const void *)identity + i;
}

#define COUNT_FIELD(name, required, help) +1
#define FIELDS                            (0 KV_IDENTITY_FIELDS(COUNT_FIELD))

static kv_status_t parse(const char *text, size_t len, kv_identity_t *identity)
{
	static char storage[KV_IDENTITY_MAX_TEXT + FIELDS];
	const char *field;

	return kv_identity_parse(text, len, identity, storage, len + FIELDS, &field);
}

KV_TEST(p1_the_root_digest_is_the_pinned_one)
{
	char text[KV_IDENTITY_MAX_TEXT];
	char hex[65];
	uint8_t root[32];

	assert_int_equal(kv_identity_text(&sample, text, sizeof text, NULL), KV_OK);
	assert_int_equal(kv_identity_root("default", text, strlen(text), root), KV_OK);
	for (size_t i = 0; i < sizeof root; i++) {
		snprintf(hex + 2 * i, 3, "%02x", root[i]);
	}
	assert_string_equal(hex, GOLDEN_ROOT);
}

KV_TEST(p8_another_namespace_is_another_root)
{
	uint8_t a[32];
	uint8_t b[32];

	assert_int_equal(kv_identity_root("a", "model=x\n", 8, a), KV_OK);
	assert_int_equal(kv_identity_root("b", "model=x\n", 8, b), KV_OK);
	assert_memory_not_equal(a, b, sizeof a);

	/* A namespace cannot smuggle in a line of its own. */
	assert_int_equal(kv_identity_root("a\nmodel=x", "", 0, b), KV_OK);
	assert_memory_not_equal(a, b, sizeof a);
	assert_int_equal(kv_identity_root("", "", 0, b), KV_ERR_ARG);
	assert_int_equal(kv_identity_root("a", "", KV_IDENTITY_MAX_TEXT + 1, b), KV_ERR_TOO_BIG);
}

KV_TEST(p10_a_missing_field_is_refused_by_name)
{
	static const char *const names[] = {
#define NAME(name, required, help) required ? #name : NULL,
		KV_IDENTITY_FIELDS(NAME)
#undef NAME
	};
	char text[KV_IDENTITY_MAX_TEXT];

	for (size_t i = 0; i < FIELDS; i++) {
		kv_identity_t identity = sample;
		const char *field = NULL;

		*(const char **)(void *)((char *)&identity + i * sizeof(char *)) = i % 2 ? "" : NULL;
		if (names[i]) {
			assert_int_equal(kv_identity_text(&identity, text, sizeof text, &field), KV_ERR_IDENTITY);
			assert_string_equal(field, names[i]);
		} else {
			assert_int_equal(kv_identity_text(&identity, text, sizeof text, &field), KV_OK);
		}
	}
}

KV_TEST(p10_what_is_too_long_is_refused)
{
	static char longer[KV_IDENTITY_MAX_VALUE + 2];
	char text[KV_IDENTITY_MAX_TEXT];
	kv_identity_t identity = sample;
	const char *field = NULL;
	size_t needed;

	memset(longer, 'x', sizeof longer - 1);
	identity.rope = longer;
	assert_int_equal(kv_identity_text(&identity, text, sizeof text, &field), KV_ERR_TOO_BIG);
	assert_string_equal(field, "rope");

	identity = sample;
	longer[KV_IDENTITY_MAX_VALUE] = '\0';
	memset(longer, '%', KV_IDENTITY_MAX_VALUE);
	identity.model = longer;
	identity.extra = longer;
	assert_int_equal(kv_identity_text(&identity, text, sizeof text, &field), KV_ERR_TOO_BIG);

	assert_int_equal(kv_identity_text(&sample, text, sizeof text, NULL), KV_OK);
	needed = strlen(text) + 1;
	for (size_t cap = 0; cap < needed; cap++) {
		assert_int_equal(kv_identity_text(&sample, text, cap, NULL), KV_ERR_TOO_BIG);
	}
	assert_int_equal(kv_identity_text(&sample, text, needed, NULL), KV_OK);
}

/* Any bytes in any value come back, and the text of what was read is the text that was read. */
KV_TEST(p10_text_and_identity_are_one_to_one)
{
	kv_test_rng_t rng = {kv_test_seed()};
	static char values[FIELDS][200];
	static char text[KV_IDENTITY_MAX_TEXT + 1];
	static char again[KV_IDENTITY_MAX_TEXT + 1];

	for (int round = 0; round < 300; round++) {
		kv_identity_t identity;
		kv_identity_t back;

		for (size_t i = 0; i < FIELDS; i++) {
			const size_t n = kv_test_below(&rng, 60) + (i + 1 < FIELDS);

			for (size_t k = 0; k < n; k++) {
				values[i][k] = (char)(kv_test_below(&rng, 255) + 1);
			}
			values[i][n] = '\0';
			*(const char **)(void *)((char *)&identity + i * sizeof(char *)) = values[i];
		}
		assert_int_equal(kv_identity_text(&identity, text, sizeof text, NULL), KV_OK);
		assert_int_equal(parse(text, strlen(text), &back), KV_OK);
		for (size_t i = 0; i < FIELDS; i++) {
			assert_string_equal(*member(&back, i), values[i]);
		}
		assert_int_equal(kv_identity_text(&back, again, sizeof again, NULL), KV_OK);
		assert_string_equal(again, text);
	}
}

KV_TEST(p10_only_canonical_text_is_read)
{
	kv_test_rng_t rng = {kv_test_seed()};
	char text[KV_IDENTITY_MAX_TEXT];
	static char rewritten[KV_IDENTITY_MAX_TEXT];
	kv_identity_t identity;
	size_t len;

	assert_int_equal(kv_identity_text(&sample, text, sizeof text, NULL), KV_OK);
	len = strlen(text);
	for (size_t cut = 0; cut < len; cut++) {
		assert_int_equal(parse(text, cut, &identity), KV_ERR_IDENTITY);
	}
	for (int round = 0; round < 20000; round++) {
		const size_t at = kv_test_below(&rng, len);
		const char saved = text[at];

		text[at] = (char)kv_test_below(&rng, 256);
		if (parse(text, len, &identity) == KV_OK) {
			assert_int_equal(kv_identity_text(&identity, rewritten, sizeof rewritten, NULL), KV_OK);
			assert_int_equal(strlen(rewritten), len);
			assert_memory_equal(rewritten, text, len);
		}
		text[at] = saved;
	}
}

KV_TEST(p10_each_way_of_not_being_canonical_is_refused)
{
	static const char *const bad_models[] = {
		"model=\n",    "model=a%41\n", "model=%3d\n", "model=%00\n",        "model=%0\n",  "model=%\n",
		"model=a=b\n", "model=a\tb\n", "Model=a\n",   "model=a\nmodel=a\n", "weights=a\n",
	};
	char canonical[KV_IDENTITY_MAX_TEXT];
	char text[KV_IDENTITY_MAX_TEXT + 64];
	char storage[64];
	kv_identity_t identity;
	const char *rest;
	const char *field = NULL;

	assert_int_equal(kv_identity_text(&sample, canonical, sizeof canonical, NULL), KV_OK);
	rest = strchr(canonical, '\n') + 1;
	for (size_t i = 0; i < KV_COUNT_OF(bad_models); i++) {
		snprintf(text, sizeof text, "%s%s", bad_models[i], rest);
		assert_int_equal(parse(text, strlen(text), &identity), KV_ERR_IDENTITY);
	}
	snprintf(text, sizeof text, "%sextra=\n", canonical);
	assert_int_equal(parse(text, strlen(text), &identity), KV_ERR_IDENTITY);
	snprintf(text, sizeof text, "%sextra=a\nmore=b\n", canonical);
	assert_int_equal(parse(text, strlen(text), &identity), KV_ERR_IDENTITY);
	snprintf(text, sizeof text, "%sextra=a\n", canonical);
	assert_int_equal(parse(text, strlen(text), &identity), KV_OK);
	assert_int_equal(kv_identity_parse(text, strlen(text), &identity, storage, sizeof storage, &field), KV_ERR_ARG);
	assert_int_equal(kv_identity_parse(text, KV_IDENTITY_MAX_TEXT + 1, &identity, storage, sizeof storage, &field),
			 KV_ERR_TOO_BIG);
}

static kv_status_t groups_of(const char *hash_tokens, const char *groups, kv_group_t *out, uint32_t *p_count)
{
	kv_identity_t identity = sample;
	uint32_t unit;

	identity.hash_tokens = hash_tokens;
	identity.groups = groups;

	return kv_identity_groups(&identity, &unit, out, 4, p_count);
}

KV_TEST(p10_groups_are_read_or_refused)
{
	static const char *const malformed[] = {
		KV_ROWS("", "0", "0:full", "0:full:", "0:full:0", "0:full:24", "0:full:16,", ",0:full:16",
			"0:full:16,0:full:16", "1:full:16,0:full:16", "00:full:16", "0:full:016", "256:full:16",
			"0:full:16 ", "0:none:16", "0:full:4112", "0:full:16:5", "0:window:16", "0:window:16:0",
			"-1:full:16", "0:full:99999999999999999999")};
	static const char *const bad_units[] = {"", "0", "016", "x", "16x", "4097"};
	kv_group_t groups[4];
	uint32_t count = 0;

	assert_int_equal(groups_of("16", "0:full:16", groups, &count), KV_OK);
	assert_int_equal(count, 1);
	assert_int_equal(groups[0].block_tokens, 16);
	assert_int_equal(groups_of("16", "0:full:16,3:full:64", groups, &count), KV_OK);
	assert_int_equal(count, 2);
	assert_int_equal(groups[1].id, 3);
	assert_int_equal(groups_of("16", "0:full:16,1:window:16:1024", groups, &count), KV_OK);
	assert_int_equal(count, 2);
	assert_int_equal(groups[1].rule, KV_RULE_WINDOW);
	assert_int_equal(groups[1].window, 1024);
	assert_int_equal(groups_of("16", "0:state:32", groups, &count), KV_OK);
	assert_int_equal(groups[0].rule, KV_RULE_STATE);
	assert_int_equal(groups[0].block_tokens, 32);
	assert_int_equal(groups_of("1", "0:full:1,1:full:1,2:full:1,3:full:1,4:full:1", groups, &count),
			 KV_ERR_TOO_BIG);
	for (size_t i = 0; i < KV_COUNT_OF(malformed); i++) {
		assert_int_equal(groups_of("16", malformed[i], groups, &count), KV_ERR_IDENTITY);
	}
	for (size_t i = 0; i < KV_COUNT_OF(bad_units); i++) {
		assert_int_equal(groups_of(bad_units[i], "0:full:16", groups, &count), KV_ERR_IDENTITY);
	}
}
