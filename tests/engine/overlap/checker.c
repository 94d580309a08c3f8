/* The rules of a list: each phase once, on its stream, after what it needs by streams and events alone. */
#include "checker.h"

#include "kv/types.h"

#include <stdio.h>

list_t make_list(kve_overlap_mode_t mode, uint32_t layers, int shared)
{
	const kve_dbo_step_t step = {.mode = mode, .most = 9, .split = 4};
	list_t list = {.shape = {mode, layers, shared}};

	list.n = kve_overlap_count(&list.shape);
	assert_in_range(list.n, 1, ITEMS_MAX);
	kve_overlap_list(&list.shape, list.items);
	for (uint32_t m = 0; m < KVE_MAX_MICROBATCHES; m++) {
		uint32_t first, n;

		kve_dbo_part(&step, 9, m, &first, &n);
		list.earlier = first == 0 && n > 0 ? m : list.earlier;
	}

	return list;
}

kve_clock_result_t run_clock(const list_t *list, const kve_clock_costs_t *costs, kve_clock_interval_t *intervals)
{
	kve_clock_result_t result;

	kve_clock_run(list->items, list->n, costs, intervals, &result);

	return result;
}

/* ---- what precedes what ----------------------------------------------------------------------- */

/* The item that the wait of item i is for: as in CUDA, the last record that was enqueued before. n: none. */
static uint32_t awaited(const list_t *list, uint32_t i)
{
	for (uint32_t r = i; r-- > 0;) {
		if (list->items[r].record == list->items[i].wait) {
			return r;
		}
	}

	return list->n;
}

static uint32_t previous_of_stream(const list_t *list, uint32_t i)
{
	for (uint32_t p = i; p-- > 0;) {
		if (list->items[p].stream == list->items[i].stream) {
			return p;
		}
	}

	return list->n;
}

/* before[i][j]: item j has ended when item i starts. */
static void close_order(const list_t *list, uint8_t before[ITEMS_MAX][ITEMS_MAX])
{
	memset(before, 0, ITEMS_MAX * sizeof before[0]);
	for (uint32_t i = 0; i < list->n; i++) {
		const uint32_t direct[] = {previous_of_stream(list, i),
					   list->items[i].wait == KVE_NO_EVENT ? list->n : awaited(list, i)};

		for (size_t d = 0; d < KV_COUNT_OF(direct); d++) {
			if (direct[d] < list->n) {
				before[i][direct[d]] = 1;
				for (uint32_t j = 0; j < list->n; j++) {
					before[i][j] |= before[direct[d]][j];
				}
			}
		}
	}
}

void time_list(const list_t *list, const kve_clock_costs_t *costs, kve_clock_interval_t *intervals)
{
	static uint8_t before[ITEMS_MAX][ITEMS_MAX];

	close_order(list, before);
	for (uint32_t i = 0; i < list->n; i++) {
		intervals[i].start = 0;
		for (uint32_t j = 0; j < i; j++) {
			intervals[i].start = before[i][j] && intervals[j].end > intervals[i].start ? intervals[j].end
												   : intervals[i].start;
		}
		intervals[i].end = intervals[i].start + costs->of[list->items[i].phase];
	}
}

/* ---- rules ------------------------------------------------------------------------------------ */

/* n: there is none */
static uint32_t find(const list_t *list, kve_phase_t phase, uint32_t layer, uint32_t microbatch)
{
	for (uint32_t i = 0; i < list->n; i++) {
		const kve_overlap_item_t *item = &list->items[i];

		if (item->phase == phase && item->layer == layer && item->microbatch == microbatch) {
			return i;
		}
	}

	return list->n;
}

static uint32_t microbatches(const list_t *list)
{
	return list->shape.mode == KVE_OVERLAP_DBO ? 2 : 1;
}

static int is_transport(kve_phase_t phase)
{
	return phase == KVE_PHASE_DISPATCH_SEND || phase == KVE_PHASE_DISPATCH_RECV ||
	       phase == KVE_PHASE_COMBINE_SEND || phase == KVE_PHASE_COMBINE_RECV;
}

static const char *check_completeness(const list_t *list)
{
	uint32_t found = 0;

	for (uint32_t l = 0; l < list->shape.layers; l++) {
		for (uint32_t m = 0; m < microbatches(list); m++) {
			for (unsigned p = 0; p < KVE_PHASES; p++) {
				const uint32_t i = find(list, (kve_phase_t)p, l, m);

				if (p == KVE_PHASE_SHARED && !list->shape.shared) {
					continue;
				}
				if (i == list->n) {
					return p == KVE_PHASE_DISPATCH_RECV || p == KVE_PHASE_COMBINE_RECV
						       ? "a receive hook is missing"
						       : "a phase is missing";
				}
				found++;
			}
		}
	}

	return found == list->n ? NULL : "a phase is there twice, or is none of the shape";
}

static const char *check_streams(const list_t *list)
{
	for (uint32_t i = 0; i < list->n; i++) {
		if (list->items[i].stream != (kve_stream_t)is_transport(list->items[i].phase)) {
			return "compute and transport are on one stream";
		}
	}

	return NULL;
}

/* A wait is for a record of its own microbatch: one that was enqueued after a yield covers the other one's work. */
static const char *check_events(const list_t *list)
{
	for (uint32_t i = 0; i < list->n; i++) {
		const uint32_t r = list->items[i].wait == KVE_NO_EVENT ? i : awaited(list, i);

		if (r == list->n) {
			return "an event is waited for that nothing has recorded";
		}
		if (list->items[r].microbatch != list->items[i].microbatch) {
			return "an event is recorded after the yield";
		}
	}

	return NULL;
}

static const char *check_dependencies(const list_t *list)
{
	static const struct {
		kve_phase_t phase, needs;
	} rules[] = {
		{KVE_PHASE_ATTENTION, KVE_PHASE_QKV},
		{KVE_PHASE_DISPATCH_SEND, KVE_PHASE_ATTENTION},
		{KVE_PHASE_DISPATCH_RECV, KVE_PHASE_DISPATCH_SEND},
		{KVE_PHASE_EXPERTS, KVE_PHASE_DISPATCH_RECV},
		{KVE_PHASE_COMBINE_SEND, KVE_PHASE_EXPERTS},
		{KVE_PHASE_SHARED, KVE_PHASE_ATTENTION},
		{KVE_PHASE_COMBINE_RECV, KVE_PHASE_COMBINE_SEND},
	};
	static uint8_t before[ITEMS_MAX][ITEMS_MAX];

	close_order(list, before);
	for (uint32_t l = 0; l < list->shape.layers; l++) {
		for (uint32_t m = 0; m < microbatches(list); m++) {
			for (size_t r = 0; r < KV_COUNT_OF(rules); r++) {
				const uint32_t i = find(list, rules[r].phase, l, m);

				if (i < list->n && !before[i][find(list, rules[r].needs, l, m)]) {
					return "a phase starts before its input is there";
				}
			}
			if (l > 0 &&
			    !before[find(list, KVE_PHASE_QKV, l, m)][find(list, KVE_PHASE_COMBINE_RECV, l - 1, m)]) {
				return "a layer starts before the one below has ended";
			}
		}
		if (microbatches(list) == 2 && !before[find(list, KVE_PHASE_ATTENTION, l, 1 - list->earlier)]
						      [find(list, KVE_PHASE_QKV, l, list->earlier)]) {
			return "keys are read before the earlier tokens have written them";
		}
	}

	return NULL;
}

/* All ranks number dispatches as they send them, and call the other halves in that order. */
static const char *check_numbers(const list_t *list)
{
	uint32_t order[KVE_PHASES] = {0}, sent[ITEMS_MAX];

	for (uint32_t i = 0; i < list->n; i++) {
		const kve_overlap_item_t *item = &list->items[i];
		const uint32_t id = item->layer * 2 + item->microbatch;

		if (!is_transport(item->phase)) {
			continue;
		}
		if (item->phase == KVE_PHASE_DISPATCH_SEND) {
			sent[order[KVE_PHASE_DISPATCH_SEND]] = id;
		} else if (order[item->phase] >= order[KVE_PHASE_DISPATCH_SEND] || sent[order[item->phase]] != id) {
			return "the halves are not in the order of the dispatches";
		}
		order[item->phase]++;
	}

	return NULL;
}

const char *check_list(const list_t *list)
{
	const char *(*const rules[])(const list_t *) = {check_completeness, check_streams, check_events,
							check_dependencies, check_numbers};
	const char *broken = NULL;

	for (size_t r = 0; r < KV_COUNT_OF(rules) && !broken; r++) {
		broken = rules[r](list);
	}

	return broken;
}
