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

/* Busy units of time of a stream, and those in which both streams have another microbatch. */
typedef struct count {
	uint64_t busy[KVE_STREAMS], hidden;
} count_t;

static count_t count_units(const list_t *list, uint64_t makespan)
{
	count_t count = {.hidden = 0};

	for (uint64_t t = 0; t < makespan; t++) {
		uint32_t on[KVE_STREAMS] = {UINT32_MAX, UINT32_MAX};

		for (uint32_t i = 0; i < list->n; i++) {
			if (intervals[i].start <= t && t < intervals[i].end) {
				on[list->items[i].stream] = list->items[i].microbatch;
				count.busy[list->items[i].stream]++;
			}
		}
		count.hidden += on[0] != UINT32_MAX && on[1] != UINT32_MAX && on[0] != on[1];
	}

	return count;
}

/* In the first round nothing costs time, in the second one only compute. */
static kve_clock_costs_t draw_costs(uint64_t *seed, uint32_t round)
{
	kve_clock_costs_t costs = {{0}};

	for (unsigned p = 0; p < KVE_PHASES && round > 0; p++) {
		costs.of[p] = round == 1 ? p <= KVE_PHASE_ATTENTION : below(seed, 8);
	}

	return costs;
}

KV_TEST(the_clock_is_that_of_streams_and_events)
{
	uint64_t seed = 37;

	for (uint32_t round = 0; round < 200; round++) {
		const list_t list = make_list(round % 4 ? KVE_OVERLAP_DBO : KVE_OVERLAP_SEQ, 1 + below(&seed, 4),
					      (int)below(&seed, 2));
		const kve_clock_costs_t costs = draw_costs(&seed, round);
		const kve_clock_result_t r = run_clock(&list, &costs, intervals);
		kve_clock_interval_t expected[ITEMS_MAX];
		uint64_t end = 0;
		count_t count;

		time_list(&list, &costs, expected);
		for (uint32_t i = 0; i < list.n; i++) {
			assert_int_equal(intervals[i].start, expected[i].start);
			assert_int_equal(intervals[i].end, expected[i].end);
			end = intervals[i].end > end ? intervals[i].end : end;
		}
		count = count_units(&list, end);
		assert_int_equal(r.makespan, end);
		assert_int_equal(r.compute, count.busy[KVE_STREAM_COMPUTE]);
		assert_int_equal(r.transport, count.busy[KVE_STREAM_TRANSPORT]);
		assert_int_equal(r.hidden, count.hidden);
		assert_int_equal(kve_clock_bound(&r), r.compute > r.transport ? r.compute : r.transport);
		assert_true(r.transport > 0 || (kve_clock_hidden_share(&r) == 0 && kve_clock_efficiency(&r) == 0));
		assert_true(round % 4 || kve_clock_efficiency(&r) >= 0);
	}
}

KV_TEST_MAIN(NULL, NULL)
