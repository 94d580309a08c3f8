/* Where a request is computed: every verdict, and properties that hold for all loads. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "decide.h"

static const kvp_costs_t costs = {.fixed_ns = 10e6,
				  .token_ns = 20e3,
				  .pair_ns = 0.5,
				  .handover_ns = 5e6,
				  .transfer_ns = 2e3,
				  .local_factor = 1,
				  .running_ns = 1e6};

static kvp_engine_load_t up(uint32_t running, double backlog_ns)
{
	return (kvp_engine_load_t){.usable = 1, .running = running, .backlog_ns = backlog_ns, .slowness = 1};
}

static kvp_choice_t decide(const kvp_engine_load_t *prefill, uint32_t n, const kvp_engine_load_t *decode, uint32_t m,
			   kvp_question_t question)
{
	const kvp_scene_t scene = {.costs = costs,
				   .thresholds = {100, 1e9},
				   .prefill = prefill,
				   .prefill_n = n,
				   .decode = decode,
				   .decode_n = m,
				   .max_running = 2,
				   .ahead_ns = 1e9};
	kvp_choice_t choice;

	kvp_decide(&scene, &question, &choice);

	return choice;
}

KV_TEST(p5_the_engine_with_the_least_wait_prefill_and_transfer_is_chosen)
{
	const kvp_engine_load_t decode[] = {up(3, 0), up(1, 0)};
	kvp_engine_load_t prefill[] = {up(1, 50e6), up(1, 20e6), up(0, 0)};
	kvp_choice_t choice;

	prefill[2].usable = 0;
	choice = decide(prefill, 3, decode, 2, (kvp_question_t){.tokens = 1000});
	assert_int_equal(choice.verdict, KVP_HANDOVER);
	assert_int_equal(choice.prefill, 1);
	assert_int_equal(choice.decode, 1);
	assert_true(choice.prefill_ns == kvp_prefill_ns(&costs, 1000, 0));
	prefill[1].slowness = 4; /* 80 ms, and four times the prefill */
	assert_int_equal(decide(prefill, 3, decode, 2, (kvp_question_t){.tokens = 1000}).prefill, 0);
	prefill[1].hit = 990; /* little is left of it there */
	prefill[1].slowness = 1;
	prefill[1].backlog_ns = 55e6;
	assert_int_equal(decide(prefill, 3, decode, 2, (kvp_question_t){.tokens = 1000}).prefill, 1);
}

KV_TEST(p5_a_hit_draws_a_request_until_its_engine_is_busier)
{
	kvp_engine_load_t decode[] = {up(0, 0), up(4, 0)};

	decode[1].hit = 900;
	assert_int_equal(decide(NULL, 0, decode, 2, (kvp_question_t){.tokens = 1000}).decode, 1);
	decode[1].running = 40;
	assert_int_equal(decide(NULL, 0, decode, 2, (kvp_question_t){.tokens = 1000}).decode, 0);
}

KV_TEST(p5_what_is_in_an_own_cache_need_not_be_loaded)
{
	kvp_engine_load_t decode[] = {up(0, 0), up(0, 0)};

	decode[0].hit = decode[1].hit = 900;
	assert_int_equal(decide(NULL, 0, decode, 2, (kvp_question_t){.tokens = 1000}).decode, 0);
	decode[1].own = 64;
	assert_int_equal(decide(NULL, 0, decode, 2, (kvp_question_t){.tokens = 1000}).decode, 1);
	decode[0].hit = 950;
	decode[1].own = 0;
	assert_int_equal(decide(NULL, 0, decode, 2, (kvp_question_t){.tokens = 1000}).decode, 0);
}

KV_TEST(p5_each_threshold_keeps_a_request_local)
{
	kvp_engine_load_t decode = up(0, 0), prefill = up(0, 0);

	assert_int_equal(decide(&prefill, 1, &decode, 1, (kvp_question_t){.tokens = 101}).verdict, KVP_HANDOVER);
	assert_int_equal(decide(&prefill, 1, &decode, 1, (kvp_question_t){.tokens = 100}).verdict, KVP_LOCAL_SHORT);
	assert_int_equal(decide(&prefill, 1, &decode, 1, (kvp_question_t){.tokens = 999, .whole = 1}).verdict,
			 KVP_LOCAL_WHOLE);
	assert_int_equal(decide(&prefill, 0, &decode, 1, (kvp_question_t){.tokens = 999}).verdict,
			 KVP_LOCAL_NO_PREFILL);
	decode.backlog_ns = 20e6; /* the prefill engine is done before it begins */
	assert_int_equal(decide(&prefill, 1, &decode, 1, (kvp_question_t){.tokens = 100}).verdict, KVP_HANDOVER);
	decode.backlog_ns = 0;
	decode.hit = 950;
	assert_int_equal(decide(&prefill, 1, &decode, 1, (kvp_question_t){.tokens = 999}).verdict, KVP_LOCAL_SHORT);
	decode.hit = 5000; /* more than the prompt has */
	assert_int_equal(decide(&prefill, 1, &decode, 1, (kvp_question_t){.tokens = 999}).verdict, KVP_LOCAL_SHORT);
	decode.hit = 0;
	prefill = up(1, 1.1e9);
	assert_int_equal(decide(&prefill, 1, &decode, 1, (kvp_question_t){.tokens = 999}).verdict, KVP_LOCAL_WAIT);
	prefill = up(1, 0.5e9);
	assert_int_equal(decide(&prefill, 1, &decode, 1, (kvp_question_t){.tokens = 999}).verdict, KVP_HANDOVER);
	prefill = up(2, 0.5e9);
	assert_int_equal(decide(&prefill, 1, &decode, 1, (kvp_question_t){.tokens = 999}).verdict, KVP_QUEUE);
	assert_int_equal(decide(&prefill, 1, &decode, 1, (kvp_question_t){.tokens = 999, .waited_ns = 0.6e9}).verdict,
			 KVP_LOCAL_WAIT);
	decode.usable = 0;
	assert_int_equal(decide(&prefill, 1, &decode, 1, (kvp_question_t){.tokens = 999}).verdict, KVP_NO_DECODE);
}

KV_TEST(p5_a_short_prompt_overtakes_a_long_one_for_a_while)
{
	assert_true(kvp_queue_rank(0, 10e9) > kvp_queue_rank(1e9, 0.1e9));
	assert_true(kvp_queue_rank(0, 10e9) < kvp_queue_rank(40e9, 0.1e9));
	assert_true(kvp_queue_rank(0, 1e9) < kvp_queue_rank(1, 1e9));
}

KV_TEST(p5_no_unusable_and_no_full_engine_is_ever_chosen)
{
	kv_test_rng_t rng = {kv_test_seed()};

	for (int round = 0; round < 20000; round++) {
		kvp_engine_load_t loads[6];
		kvp_question_t question = {.tokens = (uint32_t)kv_test_below(&rng, 100000),
					   .waited_ns = (double)kv_test_below(&rng, 2000000000)};
		kvp_choice_t choice;

		for (size_t i = 0; i < 6; i++) {
			loads[i] = (kvp_engine_load_t){.usable = kv_test_below(&rng, 3) > 0,
						       .running = (uint32_t)kv_test_below(&rng, 4),
						       .hit = (uint32_t)kv_test_below(&rng, 100000),
						       .backlog_ns = (double)kv_test_below(&rng, 2000000000),
						       .slowness = 0.25 + (double)kv_test_below(&rng, 8)};
		}
		choice = decide(loads, 3, loads + 3, 3, question);
		if (choice.verdict == KVP_NO_DECODE) {
			assert_false(loads[3].usable || loads[4].usable || loads[5].usable);
			continue;
		}
		assert_true(loads[3 + choice.decode].usable);
		if (choice.verdict == KVP_HANDOVER) {
			assert_true(loads[choice.prefill].usable && loads[choice.prefill].running < 2);
		}
		if (choice.verdict == KVP_HANDOVER || choice.verdict == KVP_QUEUE) {
			assert_true(question.waited_ns <= 1e9);
		}
		if (choice.verdict == KVP_LOCAL_NO_PREFILL) {
			assert_false(loads[0].usable || loads[1].usable || loads[2].usable);
		}
	}
}
