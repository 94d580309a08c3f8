/* The model's bits depend on tokens and weights alone: not on chunking, batching, block placement, compiler or what
 * memory held before. */
#include "engine/check.h"
#include "engine/reference.h"

#include "kve/rank.h"
#include "kve/real.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BLOCKS 64u
#define LENGTH 150u

typedef struct rig {
	kve_group_t *group;
	kve_rank_t *rank;
	kve_cache_t cache;
	uint32_t blocks[BLOCKS];
	float *logits;
} rig_t;

static void rig_open_ranks(rig_t *rig, const kve_config_t *config, uint32_t ranks)
{
	const kve_group_config_t alone = {.model = config};

	memset(rig, 0, sizeof *rig);
	assert_int_equal(kve_group_create(&alone, &rig->group), KV_OK);
	assert_int_equal(kve_rank_create(rig->group, 0, &rig->rank), KV_OK);
	assert_int_equal(kve_cache_init_ranks(&rig->cache, config, BLOCKS, ranks), KV_OK);
	assert_int_equal(kve_cache_take(&rig->cache, BLOCKS, rig->blocks), KV_OK);
	rig->logits = calloc(config->vocab, sizeof(float));
	assert_non_null(rig->logits);
}

static void rig_open(rig_t *rig, const kve_config_t *config)
{
	rig_open_ranks(rig, config, 1);
}

static void rig_close(rig_t *rig)
{
	free(rig->logits);
	kve_cache_fini(&rig->cache);
	kve_rank_destroy(rig->rank);
	kve_group_destroy(rig->group);
}

static void random_tokens(uint64_t *seed, uint32_t *tokens, uint32_t n, uint32_t vocab)
{
	for (uint32_t i = 0; i < n; i++) {
		tokens[i] = below(seed, vocab);
	}
}

/* Compute tokens [from, to) in chunks of at most `chunk`; logits of the last. */
static void prefill(rig_t *rig, const uint32_t *tokens, uint32_t from, uint32_t to, uint32_t chunk)
{
	while (from < to) {
		const uint32_t n = to - from < chunk ? to - from : chunk;
		const kve_span_t span = {tokens + from, n, from, rig->blocks, rig->logits, NULL};

		assert_int_equal(kve_rank_forward(rig->rank, &rig->cache, &span, 1, NULL), KV_OK);
		from += n;
	}
}

static void generate(rig_t *rig, uint32_t *tokens, uint32_t n, uint32_t more)
{
	const uint32_t vocab = kve_group_model(rig->group)->vocab;

	prefill(rig, tokens, 0, n, KVE_MAX_ROWS);
	for (uint32_t i = 0; i < more; i++) {
		tokens[n + i] = kve_argmax(rig->logits, vocab);
		prefill(rig, tokens, n + i, n + i + 1, 1);
	}
}

static void equals_the_plain_one(const kve_config_t *config, uint32_t length)
{
	uint32_t tokens[LENGTH];
	uint64_t seed = 11;
	rig_t rig;
	reference_t *plain = reference_create(config);

	rig_open(&rig, config);
	random_tokens(&seed, tokens, length, config->vocab);
	for (uint32_t i = 0; i < length; i++) {
		const float *expected = reference_feed(plain, tokens[i]);

		prefill(&rig, tokens, i, i + 1, 1);
		assert_memory_equal(rig.logits, expected, config->vocab * sizeof(float));
	}
	rig_close(&rig);
	reference_destroy(plain);
}

KV_TEST(the_paged_model_equals_the_plain_one_bit_for_bit)
{
	const uint32_t groups[] = {6, 8, KVE_MAX_GROUP};
	kve_config_t wide = kve_config_tiny;

	equals_the_plain_one(&kve_config_tiny, LENGTH);
	for (size_t i = 0; i < KV_COUNT_OF(groups); i++) {
		wide.heads = groups[i] * wide.kv_heads;
		equals_the_plain_one(&wide, 20);
	}
}

/* With and without a shared expert, norms of queries and keys, and weights that sum to 1. */
KV_TEST(the_model_with_experts_equals_the_plain_one_bit_for_bit)
{
	kve_config_t bare = kve_config_moe;

	bare.inner = 0;
	bare.norm_top_k = bare.qk_norm = 0;
	bare.groups = 1;
	equals_the_plain_one(&kve_config_moe, 20);
	equals_the_plain_one(&bare, 20);
}

KV_TEST(a_router_takes_the_largest_and_of_equals_the_lowest)
{
	const kve_config_t c = {.experts = 6, .top_k = 4};
	float logits[] = {0.0f, 2.0f, 1.0f, 2.0f, -90.0f, 1.0f}, weights[4];
	uint32_t ids[4];

	kve_route(&c, logits, 1, ids, weights);
	assert_int_equal(ids[0], 1);
	assert_int_equal(ids[1], 3);
	assert_int_equal(ids[2], 2);
	assert_int_equal(ids[3], 5);
	assert_true(weights[0] == weights[1] && weights[2] == weights[3] && weights[1] > weights[2]);
}

KV_TEST(any_chunking_gives_the_same_logits_and_the_same_cache)
{
	static const uint32_t chunks[] = {1, 3, 7, 16, 33, 64};
	const size_t layer = kve_cache_page(&kve_config_tiny) * sizeof(float);
	uint32_t tokens[LENGTH];
	uint64_t seed = 12, expected = 0;
	rig_t rig;

	random_tokens(&seed, tokens, LENGTH, kve_config_tiny.vocab);
	for (size_t i = 0; i < KV_COUNT_OF(chunks); i++) {
		uint64_t hash = HASH_START;

		rig_open(&rig, &kve_config_tiny);
		prefill(&rig, tokens, 0, LENGTH, chunks[i]);
		hash = hash_bytes(hash, rig.logits, kve_config_tiny.vocab * sizeof(float));
		for (uint32_t l = 0; l < kve_config_tiny.layers; l++) {
			hash = hash_bytes(hash, rig.cache.base[l], layer * BLOCKS);
		}
		if (i == 0) {
			expected = hash;
		}
		assert_true(hash == expected);
		rig_close(&rig);
	}
}

/* More ranks than KV heads, too: a head is then computed and kept by several. */
KV_TEST(any_number_of_ranks_gives_the_same_logits)
{
	static const kve_config_t *const configs[] = {&kve_config_tiny, &kve_config_demo};
	uint32_t tokens[LENGTH];

	for (size_t i = 0; i < KV_COUNT_OF(configs); i++) {
		uint64_t seed = 15, expected = 0;

		random_tokens(&seed, tokens, LENGTH, configs[i]->vocab);
		for (uint32_t ranks = 1; ranks <= 4; ranks *= 2) {
			uint64_t hash;
			rig_t rig;

			rig_open_ranks(&rig, configs[i], ranks);
			prefill(&rig, tokens, 0, LENGTH - 2, 64);
			prefill(&rig, tokens, LENGTH - 2, LENGTH, 1);
			hash = hash_bytes(HASH_START, rig.logits, configs[i]->vocab * sizeof(float));
			expected = ranks == 1 ? hash : expected;
			assert_true(hash == expected);
			rig_close(&rig);
		}
	}
}

KV_TEST(what_cannot_be_divided_among_ranks_is_refused)
{
	kve_config_t config = kve_config_tiny;
	kve_cache_t cache;

	assert_int_equal(kve_cache_init_ranks(&cache, &config, BLOCKS, 0), KV_ERR_ARG);
	assert_int_equal(kve_cache_init_ranks(&cache, &config, BLOCKS, 3), KV_ERR_ARG);
	assert_int_equal(kve_cache_init_ranks(&cache, &config, BLOCKS, 2 * KVE_MAX_RANKS), KV_ERR_ARG);
	config.inner = 48;
	assert_int_equal(kve_cache_init_ranks(&cache, &config, BLOCKS, 2), KV_ERR_ARG);
}

/* Blocks given in another order, and full of not-a-number before: nothing outside the sequence is ever read. */
KV_TEST(placement_and_stale_bytes_do_not_matter)
{
	uint32_t tokens[LENGTH];
	uint64_t seed = 13;
	rig_t a, b;

	random_tokens(&seed, tokens, LENGTH, kve_config_tiny.vocab);
	rig_open(&a, &kve_config_tiny);
	rig_open(&b, &kve_config_tiny);
	for (uint32_t i = 0; i < BLOCKS; i++) {
		b.blocks[i] = a.blocks[BLOCKS - 1 - i];
	}
	for (uint32_t l = 0; l < kve_config_tiny.layers; l++) {
		memset(b.cache.base[l], 0xff, kve_cache_page(&kve_config_tiny) * sizeof(float) * BLOCKS);
	}
	prefill(&a, tokens, 0, LENGTH, 64);
	prefill(&b, tokens, 0, LENGTH, 29);
	assert_memory_equal(a.logits, b.logits, kve_config_tiny.vocab * sizeof(float));
	rig_close(&a);
	rig_close(&b);
}

KV_TEST(sequences_computed_together_equal_sequences_computed_alone)
{
	const uint32_t vocab = kve_config_tiny.vocab;
	uint32_t one[40], two[23];
	float *logits = calloc(2 * (size_t)vocab, sizeof(float));
	uint64_t seed = 14;
	rig_t rig;

	assert_non_null(logits);
	rig_open(&rig, &kve_config_tiny);
	random_tokens(&seed, one, 40, vocab);
	random_tokens(&seed, two, 23, vocab);

	const kve_span_t spans[] = {{one, 40, 0, rig.blocks, logits, NULL},
				    {two, 23, 0, rig.blocks + 8, logits + vocab, NULL}};
	assert_int_equal(kve_rank_forward(rig.rank, &rig.cache, spans, 2, NULL), KV_OK);

	prefill(&rig, one, 0, 40, 64);
	assert_memory_equal(rig.logits, logits, vocab * sizeof(float));
	prefill(&rig, two, 0, 23, 64);
	assert_memory_equal(rig.logits, logits + vocab, vocab * sizeof(float));
	rig_close(&rig);
	free(logits);
}

KV_TEST(one_early_token_changes_the_output)
{
	enum { PROMPT = 400, MORE = 24 };
	uint32_t a[PROMPT + MORE], b[PROMPT + MORE];
	uint64_t seed = 15;
	rig_t rig;

	rig_open(&rig, &kve_config_demo);
	random_tokens(&seed, a, PROMPT, kve_config_demo.vocab);
	generate(&rig, a, PROMPT, MORE);
	for (uint32_t round = 0; round < 3; round++) {
		memcpy(b, a, sizeof b);
		b[round * 9] ^= 1;
		generate(&rig, b, PROMPT, MORE);
		assert_memory_not_equal(a + PROMPT, b + PROMPT, MORE * sizeof(uint32_t));
	}
	rig_close(&rig);
}

/* Fixed for ever: another value means another model, and every stored cache of it is foreign. */
KV_TEST(the_bits_of_a_seed_never_change)
{
	enum { PROMPT = 100, MORE = 50 };
	uint32_t tokens[PROMPT + MORE];
	uint64_t seed = 16, hash;
	rig_t rig;

	rig_open(&rig, &kve_config_tiny);
	random_tokens(&seed, tokens, PROMPT, kve_config_tiny.vocab);
	generate(&rig, tokens, PROMPT, MORE);
	hash = hash_bytes(HASH_START, tokens, sizeof tokens);
	hash = hash_bytes(hash, rig.logits, kve_config_tiny.vocab * sizeof(float));
	assert_int_equal(hash, UINT64_C(0xb92471e49cf70316));
	rig_close(&rig);
}

KV_TEST(bad_spans_are_refused_and_compute_nothing)
{
	const uint32_t good[2] = {1, 2}, outside[1] = {kve_config_tiny.vocab}, nowhere[1] = {BLOCKS};
	rig_t rig;

	rig_open(&rig, &kve_config_tiny);

	const kve_span_t bad[] = {
		{good, 0, 0, rig.blocks, rig.logits, NULL},
		{outside, 1, 0, rig.blocks, rig.logits, NULL},
		{good, 2, kve_config_tiny.max_tokens - 1, rig.blocks, rig.logits, NULL},
		{good, KVE_MAX_ROWS + 1, 0, rig.blocks, rig.logits, NULL},
		{good, 1, 0, nowhere, rig.logits, NULL},
	};
	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		assert_int_equal(kve_rank_forward(rig.rank, &rig.cache, &bad[i], 1, NULL), KV_ERR_ARG);
		assert_true(rig.logits[0] == 0.0f);
	}
	rig_close(&rig);
}

/* What is beyond max_tokens has no angle in the rope's table and no place among the scores. */
KV_TEST(no_span_reaches_beyond_the_longest_sequence)
{
	kve_config_t shortest = kve_config_tiny;
	uint32_t tokens[KVE_MAX_ROWS] = {0};
	rig_t rig;

	shortest.max_tokens = 16;
	rig_open(&rig, &shortest);
	for (uint32_t n = 1; n <= KVE_MAX_ROWS; n++) {
		for (uint32_t start = 0; start <= 17; start++) {
			const kve_span_t span = {tokens, n, start, rig.blocks, rig.logits, NULL};

			assert_int_equal(kve_rank_forward(rig.rank, &rig.cache, &span, 1, NULL),
					 start + n <= 16 ? KV_OK : KV_ERR_ARG);
		}
	}
	rig_close(&rig);
}

KV_TEST(our_exp_sin_cos_and_log_are_right)
{
	uint64_t seed = 17;

	for (int i = 0; i < 20000; i++) {
		const double u = (double)(next_random(&seed) >> 11) / 9007199254740992.0;
		const double angle = (u - 0.5) * 1e5;
		const float x = (float)((u - 0.5) * 170.0);
		double s, c;

		kve_sincos64(angle, &s, &c);
		assert_true(fabs(s - sin(angle)) < 1e-10 && fabs(c - cos(angle)) < 1e-10);
		assert_true(fabs(kve_exp64(u * 40 - 20) / exp(u * 40 - 20) - 1.0) < 1e-14);
		assert_true(fabs(kve_log64(u * 1e5 + 1.0) - log(u * 1e5 + 1.0)) < 1e-13);
		assert_true(fabs((double)kve_exp32(x) / exp((double)x) - 1.0) < 1e-6);
	}
	assert_true(kve_exp32(-100.0f) == 0.0f && kve_exp32(0.0f) == 1.0f && isfinite(kve_exp32(1e30f)));
}

/* The name belongs to the identity in kvd: what another model has stored is never loaded. */
KV_TEST(p1_models_of_another_shape_have_another_name)
{
	kve_config_t c = kve_config_moe;
	uint32_t *const fields[] = {&c.vocab, &c.hidden,     &c.layers,  &c.heads, &c.kv_heads,     &c.head_dim,
				    &c.inner, &c.rope_theta, &c.experts, &c.top_k, &c.expert_inner, &c.groups};
	char name[KVE_FINGERPRINT_MAX], other[KVE_FINGERPRINT_MAX];

	kve_weights_fingerprint(&kve_config_moe, name);
	for (size_t i = 0; i < KV_COUNT_OF(fields) + 4; i++) {
		c = kve_config_moe;
		if (i < KV_COUNT_OF(fields)) {
			*fields[i] += 16;
		}
		c.seed += i == KV_COUNT_OF(fields);
		c.qk_norm = i != KV_COUNT_OF(fields) + 1;
		c.norm_top_k = i != KV_COUNT_OF(fields) + 2;
		c.norm_eps = i == KV_COUNT_OF(fields) + 3 ? 1e-6f : c.norm_eps;
		kve_weights_fingerprint(&c, other);
		assert_string_not_equal(name, other);
	}
}

KV_TEST(shapes_that_cannot_be_are_refused)
{
	const char *why = NULL;
	kve_config_t c;
	uint32_t *const fields[] = {&c.vocab,    &c.hidden, &c.layers,       &c.heads,      &c.kv_heads,
				    &c.head_dim, &c.inner,  &c.block_tokens, &c.max_tokens, &c.rope_theta};
	uint32_t *const of_experts[] = {&c.experts, &c.top_k, &c.expert_inner, &c.groups};
	kve_group_t *group;

	for (size_t i = 0; i < KV_COUNT_OF(fields); i++) {
		c = kve_config_tiny;
		*fields[i] = 0;
		why = NULL;
		assert_int_equal(kve_config_check(&c, &why), KV_ERR_ARG);
		assert_non_null(why);
		assert_int_equal(kve_group_create(&(kve_group_config_t){.model = &c}, &group), KV_ERR_ARG);
	}
	for (size_t i = 0; i < KV_COUNT_OF(of_experts); i++) {
		c = kve_config_moe;
		*of_experts[i] = 17;
		why = NULL;
		assert_int_equal(kve_config_check(&c, &why), KV_ERR_ARG);
		assert_non_null(why);
	}
	assert_int_equal(kve_group_create(&(kve_group_config_t){.model = &kve_config_moe, .ranks = 3}, &group),
			 KV_ERR_ARG);
	assert_int_equal(kve_group_create(&(kve_group_config_t){.model = &kve_config_tiny, .ranks = 2}, &group),
			 KV_ERR_ARG);
	c = kve_config_tiny;
	c.heads = (KVE_MAX_GROUP + 1) * c.kv_heads;
	assert_int_equal(kve_config_check(&c, NULL), KV_ERR_ARG);
	assert_int_equal(kve_config_check(&kve_config_demo, NULL), KV_OK);
}

KV_TEST_MAIN(NULL, NULL)
