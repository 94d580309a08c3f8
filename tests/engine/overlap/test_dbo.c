/* Whether a step is split, against all counts of small ranks; and its slices. */
#include "checker.h"

#include "kv/types.h"

static const kve_dbo_config_t usual = {.enabled = 1,
				       .data_parallel = 2,
				       .expert_parallel = 1,
				       .decode_threshold = KVE_DBO_DECODE_THRESHOLD,
				       .prefill_threshold = KVE_DBO_PREFILL_THRESHOLD};

/* ---- configuration ---------------------------------------------------------------------------- */

static void assert_refused(kve_dbo_config_t config, const char *option)
{
	const char *why = kve_dbo_check(&config);

	assert_non_null(why);
	assert_non_null(strstr(why, option));
	assert_null(strchr(why, '\n'));
}

KV_TEST(overlap_without_ranks_to_overlap_is_refused_with_a_sentence)
{
	kve_dbo_config_t config = usual;

	assert_null(kve_dbo_check(&config));
	config.data_parallel = 1;
	assert_refused(config, "--data-parallel-size");
	config.data_parallel = 2;
	config.expert_parallel = 0;
	assert_refused(config, "--enable-expert-parallel");
	config.expert_parallel = 1;
	config.decode_threshold = 0;
	assert_refused(config, "--dbo-decode-token-threshold");
	config.decode_threshold = 1;
	config.prefill_threshold = 0;
	assert_refused(config, "--dbo-prefill-token-threshold");
	config.prefill_threshold = 1;
	assert_null(kve_dbo_check(&config));

	const kve_dbo_config_t off = {.decode_threshold = 1, .prefill_threshold = 1, .data_parallel = 1};

	assert_null(kve_dbo_check(&off));
}

/* ---- the decision ----------------------------------------------------------------------------- */

/* vLLM's coordinate_batch_across_dp for two microbatches, with the same names. */
static int expect_dbo(const kve_dbo_config_t *config, const kve_dbo_count_t *counts, uint32_t ranks, uint32_t *p_max)
{
	uint32_t max_padded = 0, min_unpadded = UINT32_MAX;
	int all_want = 1;

	for (uint32_t r = 0; r < ranks; r++) {
		const int uniform_decode = !counts[r].prefill;
		const uint32_t threshold = uniform_decode ? config->decode_threshold : config->prefill_threshold;

		all_want &= counts[r].tokens >= threshold;
		max_padded = counts[r].tokens > max_padded ? counts[r].tokens : max_padded;
		min_unpadded = counts[r].tokens < min_unpadded ? counts[r].tokens : min_unpadded;
	}
	*p_max = max_padded;

	return all_want && max_padded >= 2 && !(max_padded / 2 * (2 - 1) >= min_unpadded);
}

static void assert_decision(const kve_dbo_config_t *config, const kve_dbo_count_t *counts, uint32_t ranks)
{
	const kve_dbo_step_t step = kve_dbo_decide(config, counts, ranks);
	uint32_t max;
	const int dbo = expect_dbo(config, counts, ranks, &max);

	assert_int_equal(step.mode, dbo ? KVE_OVERLAP_DBO : KVE_OVERLAP_SEQ);
	assert_int_equal(step.most, max);
	for (uint32_t r = 0; r < ranks; r++) {
		uint32_t first[2], n[2];

		for (uint32_t m = 0; m < 2; m++) {
			kve_dbo_part(&step, counts[r].tokens, m, &first[m], &n[m]);
		}
		assert_int_equal(n[0] + n[1], counts[r].tokens);
		assert_int_equal(first[KVE_LEADING], 0);
		assert_int_equal(first[0], n[KVE_LEADING]);
		assert_int_equal(n[KVE_LEADING], dbo ? max / 2 : 0);
		assert_true(!dbo || (n[0] > 0 && n[1] > 0));
	}
}

KV_TEST(all_ranks_split_or_none_for_all_counts)
{
	kve_dbo_config_t config = usual;

	for (uint32_t decode = 1; decode <= 3; decode++) {
		for (uint32_t prefill = 1; prefill <= 5; prefill += 2) {
			config.decode_threshold = decode;
			config.prefill_threshold = prefill;
			for (uint32_t code = 0; code < 16u * 16 * 16; code++) {
				const kve_dbo_count_t counts[3] = {{code % 8, code / 8 % 2},
								   {code / 16 % 8, code / 128 % 2},
								   {code / 256 % 8, code / 2048 % 2}};

				assert_decision(&config, counts, 2);
				assert_decision(&config, counts, 3);
			}
		}
	}
}

KV_TEST(thresholds_are_those_of_the_options)
{
	static const struct {
		kve_dbo_count_t counts[2];
		int dbo;
	} cases[] = {
		{{{32, 0}, {32, 0}}, 1},    {{{32, 0}, {31, 0}}, 0},   {{{512, 1}, {512, 1}}, 1},
		{{{512, 1}, {511, 1}}, 0},  {{{512, 1}, {300, 0}}, 1}, {{{512, 1}, {256, 0}}, 0},
		{{{511, 1}, {300, 0}}, 0},  {{{4096, 1}, {0, 0}}, 0},  {{{1024, 1}, {513, 1}}, 1},
		{{{1026, 1}, {513, 1}}, 0},
	};
	kve_dbo_config_t off = usual;

	off.enabled = 0;
	for (size_t i = 0; i < KV_COUNT_OF(cases); i++) {
		assert_int_equal(kve_dbo_decide(&usual, cases[i].counts, 2).mode == KVE_OVERLAP_DBO, cases[i].dbo);
		assert_int_equal(kve_dbo_decide(&off, cases[i].counts, 2).mode, KVE_OVERLAP_SEQ);
		assert_int_equal(kve_dbo_decide(&usual, cases[i].counts, 1).mode, KVE_OVERLAP_SEQ);
	}
}

/* ---- slices ----------------------------------------------------------------------------------- */

#define SPANS_MAX  6u
#define TOKENS_MAX 64u

typedef struct batch {
	kve_span_t spans[SPANS_MAX];
	uint32_t n, tokens;
	uint32_t ids[TOKENS_MAX]; /* of all spans, each its number in the batch */
	uint32_t blocks[SPANS_MAX];
	float logits[SPANS_MAX];
	uint32_t chosen[SPANS_MAX];
} batch_t;

static void draw_batch(batch_t *b, uint64_t *seed)
{
	b->n = 1 + below(seed, SPANS_MAX);
	b->tokens = 0;
	for (uint32_t s = 0; s < b->n; s++) {
		b->spans[s] = (kve_span_t){.tokens = b->ids + b->tokens,
					   .n = 1 + below(seed, 10),
					   .start = below(seed, 100),
					   .blocks = &b->blocks[s],
					   .logits = below(seed, 3) ? &b->logits[s] : NULL,
					   .chosen = below(seed, 3) ? &b->chosen[s] : NULL};
		for (uint32_t i = 0; i < b->spans[s].n; i++) {
			b->ids[b->tokens] = b->tokens;
			b->tokens++;
		}
	}
}

/* A slice's tokens are the next of the batch, each at its position with its sequence's blocks. */
static uint32_t check_slice(const batch_t *b, const kve_span_t *slice, uint32_t n, uint32_t at)
{
	for (uint32_t k = 0; k < n; k++) {
		assert_true(slice[k].n > 0);
		for (uint32_t i = 0; i < slice[k].n; i++, at++) {
			const kve_span_t *span = b->spans;

			while (at >= (uint32_t)(span->tokens - b->ids) + span->n) {
				span++;
			}
			const uint32_t in_span = at - (uint32_t)(span->tokens - b->ids);

			assert_int_equal(slice[k].tokens[i], at);
			assert_int_equal(slice[k].start + i, span->start + in_span);
			assert_ptr_equal(slice[k].blocks, span->blocks);
			if (i + 1 == slice[k].n) {
				assert_ptr_equal(slice[k].logits, in_span + 1 == span->n ? span->logits : NULL);
				assert_ptr_equal(slice[k].chosen, in_span + 1 == span->n ? span->chosen : NULL);
			}
		}
	}

	return at;
}

KV_TEST(slices_have_each_token_once_at_its_position)
{
	uint64_t seed = 38;
	batch_t b;

	for (uint32_t round = 0; round < 300; round++) {
		draw_batch(&b, &seed);
		for (uint32_t split = 0; split <= b.tokens; split++) {
			const kve_dbo_step_t step = {KVE_OVERLAP_DBO, b.tokens, split};
			uint32_t at = 0;

			for (uint32_t i = 0; i < 2; i++) {
				kve_span_t slice[SPANS_MAX];
				uint32_t first, n, spans;

				kve_dbo_part(&step, b.tokens, i == 0 ? KVE_LEADING : 1 - KVE_LEADING, &first, &n);
				assert_int_equal(first, at);
				spans = kve_dbo_slice(b.spans, b.n, first, n, slice);
				assert_in_range(spans, 0, b.n);
				at = check_slice(&b, slice, spans, at);
			}
			assert_int_equal(at, b.tokens);
		}
	}
}

KV_TEST_MAIN(NULL, NULL)
