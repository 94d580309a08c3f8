/* The simulation of bench/disaggregation.c, against times worked out by hand. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "pd_sim.h"

static const pd_model_t model = {.request_ns = 1e6,
				 .step_ns = 2e6,
				 .weights_ns = 3e6,
				 .token_ns = 10e3,
				 .kv_ns = 10,
				 .handover_ns = 4e6,
				 .transfer_ns = 1e3,
				 .chunk = 1000,
				 .prefill_chunk = 1000,
				 .decode_chunk = 1000,
				 .pool_blocks = 100,
				 .rate = 1};
static const pd_setup_t pair = {1, 1, {0, 1e18}}, single = {0, 1, {0, 1e18}};

static pd_result_t simulate(trace_request_t *requests, uint32_t n, uint64_t *ids, const pd_setup_t *setup)
{
	const trace_t trace = {.requests = requests, .count = n, .ids = ids, .id_count = 8};
	pd_result_t result;

	assert_true(pd_simulate(&trace, &model, setup, n - 1, n, &result));
	assert_int_equal(result.requests, 1);

	return result;
}

static void near(double have, double want)
{
	assert_true(have > want - 1 && have < want + 1);
}

static void p10_times_of_one_request_are_those_worked_out_by_hand(void **state)
{
	trace_request_t request = {.input_tokens = 1500, .output_tokens = 3, .count = 3};
	uint64_t ids[8] = {0, 1, 2, 3, 4, 5, 6, 7};
	pd_result_t result = simulate(&request, 1, ids, &single);

	(void)state;
	/* 1,000 tokens, then 500: 5 ms, more than the weights take; then two steps of one token */
	near(result.ns[PD_TTFT_MEAN], 1e6 + (2e6 + 10e6) + (2e6 + 5e6));
	near(result.ns[PD_TPOT_MEAN], 2e6 + 3e6 + 10 * 1501.5);
	assert_int_equal(result.handed_over, 0);
	result = simulate(&request, 1, ids, &pair);
	assert_int_equal(result.handed_over, 1);
	near(result.ns[PD_TTFT_MEAN], 1e6 + 12e6 + 7e6 + 4e6 + 1.5e6 + (2e6 + 3e6 + 10 * 1500));
}

static void p10_a_second_prompt_computes_only_what_the_pool_lacks(void **state)
{
	trace_request_t requests[2] = {
		{.input_tokens = 1024, .output_tokens = 1, .count = 2},
		{.timestamp_ms = 1000, .input_tokens = 1224, .output_tokens = 1, .first = 2, .count = 3}};
	uint64_t ids[8] = {0, 1, 0, 1, 2, 3, 4, 5};

	(void)state;
	near(simulate(requests, 2, ids, &single).ns[PD_TTFT_MEAN], 1e6 + 1024 * 1e3 + 2e6 + 3e6); /* 200 tokens: 2 ms */
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p10_times_of_one_request_are_those_worked_out_by_hand),
		cmocka_unit_test(p10_a_second_prompt_computes_only_what_the_pool_lacks),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
