/* The list of a step: its literal order, its rules, planted mistakes, and the walk. */
#include "checker.h"

#include "kv/types.h"

#include <stdio.h>

/* "D1 send 0": vLLM's names; the last number is the layer. A0 and A1 are the halves of attention, "first" and "second"
 * the microbatches. */
static void name_item(const kve_overlap_item_t *item, char name[32])
{
	static const char *const parts[KVE_PHASES][2] = {
		[KVE_PHASE_QKV] = {"A0"},
		[KVE_PHASE_ATTENTION] = {"A1"},
		[KVE_PHASE_DISPATCH_SEND] = {"D", " send"},
		[KVE_PHASE_DISPATCH_RECV] = {"D", " recv"},
		[KVE_PHASE_EXPERTS] = {"MLP", ""},
		[KVE_PHASE_COMBINE_SEND] = {"C", " send"},
		[KVE_PHASE_SHARED] = {"S", ""},
		[KVE_PHASE_COMBINE_RECV] = {"C", " recv"},
	};
	const char *const *part = parts[item->phase];

	if (part[1]) {
		snprintf(name, 32, "%s%u%s %u", part[0], item->microbatch, part[1], item->layer);
	} else {
		snprintf(name, 32, "%s %s %u", part[0], item->microbatch ? "second" : "first", item->layer);
	}
}

static void assert_order(const list_t *list, const char *const *names, size_t count)
{
	assert_int_equal(list->n, count);
	for (uint32_t i = 0; i < list->n; i++) {
		char name[32];

		name_item(&list->items[i], name);
		assert_string_equal(name, names[i]);
	}
}

/* A layer between two others is literally the order of the design; attention leads in, and does not follow the last. */
KV_TEST(the_order_of_a_layer_is_that_of_the_design)
{
	static const char *const order[] = {
		"A0 second 0", "A1 second 0",
		/* layer 0 */
		"D1 send 0", "A0 first 0", "A1 first 0", "D1 recv 0", "D0 send 0", "MLP1 0", "D0 recv 0", "C1 send 0",
		"S1 0", "MLP0 0", "C1 recv 0", "C0 send 0", "S0 0", "A0 second 1", "A1 second 1", "C0 recv 0",
		/* layer 1 */
		"D1 send 1", "A0 first 1", "A1 first 1", "D1 recv 1", "D0 send 1", "MLP1 1", "D0 recv 1", "C1 send 1",
		"S1 1", "MLP0 1", "C1 recv 1", "C0 send 1", "S0 1", "A0 second 2", "A1 second 2", "C0 recv 1",
		/* layer 2, the last */
		"D1 send 2", "A0 first 2", "A1 first 2", "D1 recv 2", "D0 send 2", "MLP1 2", "D0 recv 2", "C1 send 2",
		"S1 2", "MLP0 2", "C1 recv 2", "C0 send 2", "S0 2", "C0 recv 2"};
	const list_t list = make_list(KVE_OVERLAP_DBO, 3, 1);

	assert_order(&list, order, KV_COUNT_OF(order));
}

KV_TEST(one_batch_receives_after_each_send)
{
	static const char *const order[] = {"A0 first 0", "A1 first 0", "D0 send 0",  "D0 recv 0",  "MLP0 0",
					    "C0 send 0",  "C0 recv 0",  "A0 first 1", "A1 first 1", "D0 send 1",
					    "D0 recv 1",  "MLP0 1",     "C0 send 1",  "C0 recv 1"};
	const list_t list = make_list(KVE_OVERLAP_SEQ, 2, 0);

	assert_order(&list, order, KV_COUNT_OF(order));
}

KV_TEST(every_phase_starts_after_what_it_needs)
{
	for (uint32_t layers = 1; layers <= 8; layers++) {
		for (int shared = 0; shared <= 1; shared++) {
			const list_t seq = make_list(KVE_OVERLAP_SEQ, layers, shared);
			const list_t dbo = make_list(KVE_OVERLAP_DBO, layers, shared);

			assert_null(check_list(&seq));
			assert_null(check_list(&dbo));
		}
	}
}

/* ---- planted mistakes ------------------------------------------------------------------------- */

/* What a recv records is recorded behind the next send, which is the other microbatch's. */
static void record_after_yield(list_t *list)
{
	for (uint32_t i = 0; i < list->n; i++) {
		if (list->items[i].phase != KVE_PHASE_DISPATCH_RECV && list->items[i].phase != KVE_PHASE_COMBINE_RECV) {
			continue;
		}
		for (uint32_t s = i + 1; s < list->n; s++) {
			if (list->items[s].stream == KVE_STREAM_TRANSPORT) {
				list->items[s].record = list->items[i].record;
				list->items[i].record = KVE_NO_EVENT;
				break;
			}
		}
	}
}

static void use_one_stream(list_t *list)
{
	for (uint32_t i = 0; i < list->n; i++) {
		list->items[i].stream = KVE_STREAM_COMPUTE;
	}
}

static void give_trailing_one_the_earlier_tokens(list_t *list)
{
	list->earlier = 1 - list->earlier;
}

static void forget_a_hook(list_t *list)
{
	uint32_t i = list->n / 2;

	while (list->items[i].phase != KVE_PHASE_DISPATCH_RECV) {
		i++;
	}
	list->n--;
	memmove(&list->items[i], &list->items[i + 1], (list->n - i) * sizeof list->items[0]);
}

static void forget_waits(list_t *list, kve_phase_t phase)
{
	for (uint32_t i = 0; i < list->n; i++) {
		list->items[i].wait = list->items[i].phase == phase ? KVE_NO_EVENT : list->items[i].wait;
	}
}

static void forget_waits_for_arrivals(list_t *list)
{
	forget_waits(list, KVE_PHASE_EXPERTS);
}

static void forget_waits_between_layers(list_t *list)
{
	forget_waits(list, KVE_PHASE_QKV);
}

static void forget_records(list_t *list)
{
	for (uint32_t i = 0; i < list->n; i++) {
		list->items[i].record = KVE_NO_EVENT;
	}
}

static void give_to_other_microbatch(kve_overlap_item_t *item)
{
	uint32_t *const events[] = {&item->wait, &item->record};

	for (size_t i = 0; i < KV_COUNT_OF(events); i++) {
		if (*events[i] != KVE_NO_EVENT) {
			*events[i] = (*events[i] + KVE_EVENTS_OF_MICROBATCH) % KVE_EVENTS;
		}
	}
	item->microbatch = 1 - item->microbatch;
}

/* In the last layer microbatch 0 has its experts first. Every input is there. */
static void combine_in_another_order(list_t *list)
{
	uint32_t i = list->n - 1;

	while (list->items[i].phase != KVE_PHASE_DISPATCH_RECV) {
		give_to_other_microbatch(&list->items[i--]);
	}
	give_to_other_microbatch(&list->items[i - 1]);

	const kve_overlap_item_t recv = list->items[i];

	list->items[i] = list->items[i - 1];
	list->items[i - 1] = recv;
}

KV_TEST(planted_mistakes_of_the_order_are_found_by_name)
{
	static const struct {
		void (*plant)(list_t *list);
		const char *broken;
	} mistakes[] = {
		{record_after_yield, "an event is recorded after the yield"},
		{use_one_stream, "compute and transport are on one stream"},
		{give_trailing_one_the_earlier_tokens, "keys are read before the earlier tokens have written them"},
		{forget_a_hook, "a receive hook is missing"},
		{forget_waits_for_arrivals, "a phase starts before its input is there"},
		{forget_waits_between_layers, "a layer starts before the one below has ended"},
		{forget_records, "an event is waited for that nothing has recorded"},
		{combine_in_another_order, "the halves are not in the order of the dispatches"},
	};

	for (size_t i = 0; i < KV_COUNT_OF(mistakes); i++) {
		list_t list = make_list(KVE_OVERLAP_DBO, 4, 1);

		mistakes[i].plant(&list);
		assert_non_null(check_list(&list));
		assert_string_equal(check_list(&list), mistakes[i].broken);
	}
}

/* ---- overlap ---------------------------------------------------------------------------------- */

/* Balanced: what a microbatch computes between two transfers takes about as long as one of them. */
KV_TEST(transport_lies_under_compute_and_planted_mistakes_end_that)
{
	static const kve_clock_costs_t balanced[] = {{{50, 50, 100, 0, 100, 100, 0, 0}},
						     {{60, 40, 90, 0, 100, 90, 10, 0}},
						     {{50, 50, 150, 0, 200, 150, 0, 0}}};
	static void (*const mistakes[])(list_t *) = {record_after_yield, use_one_stream};
	kve_clock_interval_t intervals[ITEMS_MAX];

	for (size_t b = 0; b < KV_COUNT_OF(balanced); b++) {
		const list_t list = make_list(KVE_OVERLAP_DBO, 8, 1);
		const kve_clock_result_t good = run_clock(&list, &balanced[b], intervals);

		assert_true(kve_clock_hidden_share(&good) >= 0.8);
		assert_true(kve_clock_efficiency(&good) >= 0.8);
		for (size_t i = 0; i < KV_COUNT_OF(mistakes); i++) {
			list_t bad = list;

			mistakes[i](&bad);

			const kve_clock_result_t result = run_clock(&bad, &balanced[b], intervals);

			assert_true(kve_clock_hidden_share(&result) <= 0.04);
			assert_true(kve_clock_efficiency(&result) <= 0.1);
		}
	}
}

/* ---- the walk --------------------------------------------------------------------------------- */

typedef struct call {
	char kind; /* w, r, p */
	uint32_t event;
	kve_stream_t stream;
	kve_phase_t phase;
	uint32_t layer, microbatch;
} call_t;

typedef struct log {
	call_t calls[4 * ITEMS_MAX];
	uint32_t n, fails_at; /* number of the call that fails */
} log_t;

static kv_status_t add_call(log_t *log, call_t call)
{
	log->calls[log->n] = call;

	return log->n++ == log->fails_at ? KV_ERR_TIMEOUT : KV_OK;
}

static kv_status_t log_run(void *ctx, kve_phase_t phase, uint32_t layer, uint32_t microbatch, kve_stream_t stream)
{
	return add_call(
		ctx, (call_t){.kind = 'p', .stream = stream, .phase = phase, .layer = layer, .microbatch = microbatch});
}

static kv_status_t log_record(void *ctx, uint32_t event, kve_stream_t stream)
{
	return add_call(ctx, (call_t){.kind = 'r', .stream = stream, .event = event});
}

static kv_status_t log_wait(void *ctx, uint32_t event, kve_stream_t stream)
{
	return add_call(ctx, (call_t){.kind = 'w', .stream = stream, .event = event});
}

static const kve_overlap_ops_t log_ops = {log_run, log_record, log_wait};

static void assert_call(const call_t *call, char kind, uint32_t event, kve_stream_t stream)
{
	assert_int_equal(call->kind, kind);
	assert_int_equal(call->event, event);
	assert_int_equal(call->stream, stream);
}

KV_TEST(each_item_waits_runs_and_records_and_results_are_awaited_at_the_end)
{
	static log_t log;
	const kve_overlap_mode_t modes[] = {KVE_OVERLAP_SEQ, KVE_OVERLAP_DBO};

	for (size_t i = 0; i < KV_COUNT_OF(modes); i++) {
		const list_t list = make_list(modes[i], 2, 1);
		uint32_t at = 0;

		log = (log_t){.fails_at = UINT32_MAX};
		assert_int_equal(kve_overlap_run(list.items, list.n, &log_ops, &log), KV_OK);
		for (uint32_t k = 0; k < list.n; k++) {
			const kve_overlap_item_t *item = &list.items[k];

			if (item->wait != KVE_NO_EVENT) {
				assert_call(&log.calls[at++], 'w', item->wait, item->stream);
			}
			assert_call(&log.calls[at], 'p', 0, item->stream);
			assert_int_equal(log.calls[at].phase, item->phase);
			assert_int_equal(log.calls[at].layer, item->layer);
			assert_int_equal(log.calls[at++].microbatch, item->microbatch);
			if (item->record != KVE_NO_EVENT) {
				assert_call(&log.calls[at++], 'r', item->record, item->stream);
			}
		}
		for (uint32_t m = 0; m <= (modes[i] == KVE_OVERLAP_DBO); m++) {
			assert_call(&log.calls[at++], 'w', kve_event_of(m, KVE_EVENT_COMBINED), KVE_STREAM_COMPUTE);
		}
		assert_int_equal(at, log.n);
	}
}

KV_TEST(the_first_error_ends_the_walk)
{
	static log_t log;
	const list_t list = make_list(KVE_OVERLAP_DBO, 2, 1);
	uint32_t calls = 0;

	do {
		log = (log_t){.fails_at = calls++};
		if (kve_overlap_run(list.items, list.n, &log_ops, &log) == KV_OK) {
			break;
		}
		assert_int_equal(log.n, calls);
	} while (1);
	assert_int_equal(log.n, calls - 1);
	assert_true(calls > 2 * list.n);
}

KV_TEST_MAIN(NULL, NULL)
