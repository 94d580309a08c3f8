/* Keys: pinned to golden vectors, the same from every implementation, and different wherever the prefix is. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "golden_keys.h"
#include "hash/key_sha.h"

#include "kv/key.h"

#define MAX_TOKENS (4u * KV_MAX_UNIT_TOKENS)

static uint32_t tokens[MAX_TOKENS];
static uint8_t extra[KV_MAX_EXTRA_BYTES];
static uint8_t root[32];

static int setup(void **state)
{
	const char *hex = GOLDEN_ROOT;

	(void)state;
	for (uint32_t i = 0; i < MAX_TOKENS; i++) {
		tokens[i] = (uint32_t)((i * UINT64_C(2654435761) + 12345) % 151936);
	}
	for (uint32_t i = 0; i < sizeof extra; i++) {
		extra[i] = (uint8_t)(i * 7 + 3);
	}
	for (size_t i = 0; i < sizeof root; i++) {
		unsigned byte;

		if (sscanf(hex + 2 * i, "%2x", &byte) != 1) {
			return -1;
		}
		root[i] = (uint8_t)byte;
	}

	return 0;
}

static void assert_key(const kv_key_t *key, const char *hex)
{
	char text[33];

	kv_key_format(key, text);
	assert_string_equal(text, hex);
}

KV_TEST(p1_keys_are_the_pinned_ones)
{
	for (size_t i = 0; i < KV_COUNT_OF(golden_chains); i++) {
		const golden_chain_t *g = &golden_chains[i];
		kv_chain_t chain;
		kv_key_t keys[4];
		uint32_t done;

		assert_int_equal(kv_chain_init(&chain, root, g->unit, g->epoch), KV_OK);
		assert_int_equal(kv_chain_tokens(&chain, tokens, 4, keys, &done), KV_OK);
		assert_int_equal(done, 4);
		for (int k = 0; k < 4; k++) {
			assert_key(&keys[k], g->keys[k]);
		}
	}
}

KV_TEST(p1_extra_keys_are_in_the_key)
{
	for (size_t i = 0; i < KV_COUNT_OF(golden_extras); i++) {
		const golden_extra_t *g = &golden_extras[i];
		kv_chain_t chain;
		kv_key_t key;

		assert_int_equal(kv_chain_init(&chain, root, g->unit, 0), KV_OK);
		assert_int_equal(kv_chain_unit(&chain, extra, g->extra_len, tokens, &key), KV_OK);
		assert_key(&key, g->first);
		assert_int_equal(kv_chain_unit(&chain, NULL, 0, tokens + g->unit, &key), KV_OK);
		assert_key(&key, g->second);
	}
}

KV_TEST(p1_foreign_hashes_are_bound_to_the_space)
{
	kv_chain_t chain;
	kv_chain_t other;
	kv_key_t key;
	kv_key_t elsewhere;

	assert_int_equal(kv_chain_init(&chain, root, 16, 0), KV_OK);
	assert_int_equal(kv_chain_init(&other, root, 16, 1), KV_OK);
	for (size_t i = 0; i < KV_COUNT_OF(golden_binds); i++) {
		assert_int_equal(kv_key_bind(&chain, extra, golden_binds[i].len, &key), KV_OK);
		assert_key(&key, golden_binds[i].key);
		assert_int_equal(kv_key_bind(&other, extra, golden_binds[i].len, &elsewhere), KV_OK);
		assert_false(kv_key_equal(&key, &elsewhere));
	}
	assert_int_equal(kv_key_bind(&chain, extra, 15, &key), KV_ERR_ARG);
	assert_int_equal(kv_key_bind(&chain, extra, 61, &key), KV_ERR_ARG);
}

KV_TEST(p10_a_refused_token_changes_nothing_from_its_unit_on)
{
	static const uint32_t units[] = {1, 8, 16, 20, 32, 48};

	for (size_t i = 0; i < KV_COUNT_OF(units); i++) {
		const uint32_t unit = units[i];

		for (uint32_t at = 0; at < 5 * unit; at++) {
			const uint32_t saved = tokens[at];
			const uint32_t good = at / unit;
			kv_key_t keys[5];
			kv_key_t expected[5];
			kv_chain_t chain;
			kv_chain_t reference;
			uint32_t done = 99;

			kv_chain_init(&chain, root, unit, 3);
			kv_chain_init(&reference, root, unit, 3);
			assert_int_equal(kv_chain_tokens(&reference, tokens, good, expected, NULL), KV_OK);
			memset(expected + good, 0xee, (5 - good) * sizeof *expected);
			memset(keys, 0xee, sizeof keys);
			tokens[at] = KV_TOKEN_REFUSED;
			assert_int_equal(kv_chain_tokens(&chain, tokens, 5, keys, &done), KV_ERR_ARG);
			assert_int_equal(done, good);
			assert_memory_equal(keys, expected, sizeof keys);
			assert_memory_equal(&chain, &reference, sizeof chain);
			assert_int_equal(kv_chain_unit(&chain, extra, 3, tokens + good * unit, keys), KV_ERR_ARG);
			assert_memory_equal(&chain, &reference, sizeof chain);
			tokens[at] = saved;
		}
	}
}

KV_TEST(p10_arguments_out_of_range_are_refused)
{
	kv_chain_t chain;
	kv_key_t key;

	assert_int_equal(kv_chain_init(&chain, root, 0, 0), KV_ERR_ARG);
	assert_int_equal(kv_chain_init(&chain, root, KV_MAX_UNIT_TOKENS + 1, 0), KV_ERR_ARG);
	assert_int_equal(kv_chain_init(&chain, root, 16, 0), KV_OK);
	assert_int_equal(kv_chain_unit(&chain, extra, KV_MAX_EXTRA_BYTES + 1, tokens, &key), KV_ERR_ARG);
}

/* One unit at a time, all at once, from a copied state: always the same keys. */
KV_TEST(p1_a_chain_can_be_cut_and_continued_anywhere)
{
	kv_test_rng_t rng = {kv_test_seed()};

	for (int round = 0; round < 200; round++) {
		const uint32_t unit = (uint32_t)kv_test_below(&rng, 70) + 1;
		const uint32_t cut = (uint32_t)kv_test_below(&rng, 21);
		kv_key_t whole[20];
		kv_key_t parts[20];
		kv_chain_t chain;
		kv_chain_t copy;

		kv_chain_init(&chain, root, unit, 0);
		copy = chain;
		kv_chain_tokens(&chain, tokens, 20, whole, NULL);
		kv_chain_tokens(&copy, tokens, cut, parts, NULL);
		for (uint32_t i = cut; i < 20; i++) {
			kv_chain_unit(&copy, NULL, 0, tokens + (size_t)i * unit, &parts[i]);
		}
		assert_memory_equal(whole, parts, sizeof whole);
		assert_memory_equal(&chain, &copy, sizeof chain);
	}
}

KV_TEST(p1_both_compression_loops_agree)
{
	const kv_sha_ops_t *native = kv_sha_native();
	const kv_sha_ops_t *library = kv_sha_openssl();
	kv_test_rng_t rng = {kv_test_seed()};
	uint32_t words[16 * 40 + 1];

	if (!native) {
		print_message("# no SHA instructions here: one loop only\n");
		return;
	}
	for (int round = 0; round < 2000; round++) {
		const uint32_t unit_blocks = (uint32_t)kv_test_below(&rng, 4) + 1;
		const uint32_t units = (uint32_t)kv_test_below(&rng, 10);
		kv_key_t keys[2][10] = {0};
		uint32_t states[2][8];

		kv_test_fill(&rng, words, sizeof words);
		kv_test_fill(&rng, states[0], sizeof states[0]);
		memcpy(states[1], states[0], sizeof states[0]);
		if (round % 3 == 0) {
			words[kv_test_below(&rng, 16 * 40)] = KV_TOKEN_REFUSED;
		}
		assert_int_equal(native->chain(states[0], words, unit_blocks, units, keys[0]),
				 library->chain(states[1], words, unit_blocks, units, keys[1]));
		assert_memory_equal(states[0], states[1], sizeof states[0]);
		assert_memory_equal(keys[0], keys[1], sizeof keys[0]);
		native->blocks(states[0], (const uint8_t *)words + round % 4, 40);
		library->blocks(states[1], (const uint8_t *)words + round % 4, 40);
		assert_memory_equal(states[0], states[1], sizeof states[0]);
	}
}

KV_TEST_MAIN(setup, NULL)
