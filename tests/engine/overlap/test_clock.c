/* The virtual clock, against small cases by hand and against a second computation. */
#include "checker.h"

#include "kv/types.h"

static kve_clock_interval_t intervals[ITEMS_MAX];

static void assert_interval(const list_t *list, kve_phase_t phase, uint32_t microbatch, uint64_t start, uint64_t end)
{
	for (uint32_t i = 0; i < list->n; i++) {
		if (list->items[i].phase == phase && list->items[i].microbatch == microbatch &&
		    list->items[i].layer == 0) {
			assert_int_equal(intervals[i].start, start);
			assert_int_equal(intervals[i].end, end);
			return;
		}
	}
	fail();
}

/* Attention 10, dispatch 20, experts 30, combine 40. */
static const kve_clock_costs_t uneven = {{4, 6, 20, 0, 30, 40, 0, 0}};

KV_TEST(the_clock_of_one_batch_is_that_by_hand)
{
	const list_t list = make_list(KVE_OVERLAP_SEQ, 1, 0);
	const kve_clock_result_t r = run_clock(&list, &uneven, intervals);

	assert_interval(&list, KVE_PHASE_DISPATCH_SEND, 0, 10, 30);
	assert_interval(&list, KVE_PHASE_EXPERTS, 0, 30, 60);
	assert_interval(&list, KVE_PHASE_COMBINE_SEND, 0, 60, 100);
	assert_int_equal(r.makespan, 100);
	assert_int_equal(r.compute, 40);
	assert_int_equal(r.transport, 60);
	assert_int_equal(r.hidden, 0);
	assert_true(kve_clock_efficiency(&r) == 0);
}

KV_TEST(the_clock_of_two_microbatches_is_that_by_hand)
{
	const list_t list = make_list(KVE_OVERLAP_DBO, 1, 0);
	const kve_clock_result_t r = run_clock(&list, &uneven, intervals);

	assert_interval(&list, KVE_PHASE_QKV, 1, 0, 4);
	assert_interval(&list, KVE_PHASE_ATTENTION, 1, 4, 10);
	assert_interval(&list, KVE_PHASE_DISPATCH_SEND, 1, 10, 30);
	assert_interval(&list, KVE_PHASE_ATTENTION, 0, 14, 20);
	assert_interval(&list, KVE_PHASE_EXPERTS, 1, 30, 60);
	assert_interval(&list, KVE_PHASE_DISPATCH_SEND, 0, 30, 50);
	assert_interval(&list, KVE_PHASE_COMBINE_SEND, 1, 60, 100);
	assert_interval(&list, KVE_PHASE_EXPERTS, 0, 60, 90);
	assert_interval(&list, KVE_PHASE_COMBINE_SEND, 0, 100, 140);
	assert_int_equal(r.makespan, 140);
	assert_int_equal(kve_clock_bound(&r), 120);
	assert_int_equal(r.hidden, 10 + 20 + 30);
	assert_true(kve_clock_hidden_share(&r) == 0.5);
	assert_true(kve_clock_efficiency(&r) == 60.0 / 80.0);
}

/* Shared experts lie under the own combine, which does not count. */
KV_TEST(shared_experts_do_not_hide_the_own_transport)
{
	static const kve_clock_costs_t costs = {{5, 5, 10, 0, 10, 20, 10, 0}};
	const list_t list = make_list(KVE_OVERLAP_DBO, 1, 1);
	const kve_clock_result_t r = run_clock(&list, &costs, intervals);

	assert_interval(&list, KVE_PHASE_SHARED, 1, 30, 40);
	assert_interval(&list, KVE_PHASE_EXPERTS, 0, 40, 50);
	assert_interval(&list, KVE_PHASE_SHARED, 0, 50, 60);
	assert_int_equal(r.makespan, 70);
	assert_int_equal(r.hidden, 30);
}

/* Two FIFO streams have a chain of 700 a layer; neither stream alone needs more than 600. */
KV_TEST(eight_layers_take_what_the_cost_model_says)
{
	static const kve_clock_costs_t halves = {{50, 50, 150, 0, 200, 150, 0, 0}},
				       whole = {{100, 100, 300, 0, 400, 300, 0, 0}};
	const list_t dbo = make_list(KVE_OVERLAP_DBO, 8, 0), seq = make_list(KVE_OVERLAP_SEQ, 8, 0);
	const kve_clock_result_t r = run_clock(&dbo, &halves, intervals);

	assert_int_equal(r.makespan, 5700);
	assert_int_equal(kve_clock_bound(&r), 4800);
	assert_int_equal(run_clock(&seq, &whole, intervals).makespan, 9600);
}

KV_TEST(without_anything_to_overlap_shares_are_zero)
{
	static const kve_clock_costs_t nothing, computes = {{1, 1, 0, 0, 1, 0, 0, 0}};
	const list_t list = make_list(KVE_OVERLAP_DBO, 2, 0);
	const kve_clock_result_t empty = run_clock(&list, &nothing, intervals),
				 compute = run_clock(&list, &computes, intervals);

	assert_int_equal(empty.makespan, 0);
	assert_true(kve_clock_hidden_share(&empty) == 0 && kve_clock_efficiency(&empty) == 0);
	assert_int_equal(compute.makespan, 12);
	assert_true(kve_clock_hidden_share(&compute) == 0 && kve_clock_efficiency(&compute) == 0);
}

/* Unit by unit of time. */
static uint64_t count_hidden(const list_t *list, uint64_t makespan)
{
	uint64_t hidden = 0;

	for (uint64_t t = 0; t < makespan; t++) {
		uint32_t on[KVE_STREAMS] = {UINT32_MAX, UINT32_MAX};

		for (uint32_t i = 0; i < list->n; i++) {
			if (intervals[i].start <= t && t < intervals[i].end) {
				on[list->items[i].stream] = list->items[i].microbatch;
			}
		}
		hidden += on[0] != UINT32_MAX && on[1] != UINT32_MAX && on[0] != on[1];
	}

	return hidden;
}

KV_TEST(the_clock_is_that_of_streams_and_events)
{
	uint64_t seed = 37;

	for (uint32_t round = 0; round < 200; round++) {
		const list_t list = make_list(round % 4 ? KVE_OVERLAP_DBO : KVE_OVERLAP_SEQ, 1 + below(&seed, 4),
					      (int)below(&seed, 2));
		kve_clock_interval_t expected[ITEMS_MAX];
		kve_clock_costs_t costs;
		uint64_t end = 0;

		for (unsigned p = 0; p < KVE_PHASES; p++) {
			costs.of[p] = below(&seed, 8);
		}

		const kve_clock_result_t r = run_clock(&list, &costs, intervals);

		time_list(&list, &costs, expected);
		for (uint32_t i = 0; i < list.n; i++) {
			assert_int_equal(intervals[i].start, expected[i].start);
			assert_int_equal(intervals[i].end, expected[i].end);
			end = intervals[i].end > end ? intervals[i].end : end;
		}
		assert_int_equal(r.makespan, end);
		assert_true(r.makespan >= kve_clock_bound(&r));
		assert_int_equal(r.hidden, count_hidden(&list, end));
	}
}

KV_TEST_MAIN(NULL, NULL)
