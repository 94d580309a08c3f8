/* The virtual clock. */
#include "kve/clock.h"

typedef struct run {
	const kve_clock_costs_t *costs;
	kve_clock_interval_t *intervals;
	uint32_t n;
	uint64_t streams[KVE_STREAMS];
	uint64_t events[KVE_EVENTS];
} run_t;

static kv_status_t run_phase(void *ctx, kve_phase_t phase, uint32_t layer, uint32_t microbatch, kve_stream_t stream)
{
	run_t *run = ctx;
	const uint64_t start = run->streams[stream];

	(void)layer;
	(void)microbatch;
	run->streams[stream] += run->costs->of[phase];
	run->intervals[run->n++] = (kve_clock_interval_t){start, run->streams[stream]};

	return KV_OK;
}

static kv_status_t record_event(void *ctx, uint32_t event, kve_stream_t stream)
{
	run_t *run = ctx;

	run->events[event] = run->streams[stream];

	return KV_OK;
}

static kv_status_t await_event(void *ctx, uint32_t event, kve_stream_t stream)
{
	run_t *run = ctx;

	if (run->streams[stream] < run->events[event]) {
		run->streams[stream] = run->events[event];
	}

	return KV_OK;
}

/* By phase, not by stream: a list may have its transport on the wrong one. */
static int is_transport(kve_phase_t phase)
{
	return phase == KVE_PHASE_DISPATCH_SEND || phase == KVE_PHASE_DISPATCH_RECV ||
	       phase == KVE_PHASE_COMBINE_SEND || phase == KVE_PHASE_COMBINE_RECV;
}

/* Transport and compute are each in order of time, so `first` never goes back. */
static uint64_t sum_hidden(const kve_overlap_item_t *items, uint32_t n, const kve_clock_interval_t *intervals)
{
	uint64_t hidden = 0;
	uint32_t first = 0;

	for (uint32_t t = 0; t < n; t++) {
		if (!is_transport(items[t].phase)) {
			continue;
		}
		while (first < n && (is_transport(items[first].phase) || intervals[first].end <= intervals[t].start)) {
			first++;
		}
		for (uint32_t c = first; c < n; c++) {
			const uint64_t start =
				intervals[c].start > intervals[t].start ? intervals[c].start : intervals[t].start;
			const uint64_t end = intervals[c].end < intervals[t].end ? intervals[c].end : intervals[t].end;

			if (is_transport(items[c].phase)) {
				continue;
			}
			if (intervals[c].start >= intervals[t].end) {
				break;
			}
			if (items[c].microbatch != items[t].microbatch && start < end) {
				hidden += end - start;
			}
		}
	}

	return hidden;
}

void kve_clock_measure(const kve_overlap_item_t *items, uint32_t n, const kve_clock_interval_t *intervals,
		       kve_clock_result_t *result)
{
	*result = (kve_clock_result_t){.hidden = sum_hidden(items, n, intervals)};
	for (uint32_t i = 0; i < n; i++) {
		*(is_transport(items[i].phase) ? &result->transport : &result->compute) +=
			intervals[i].end - intervals[i].start;
		result->makespan = intervals[i].end > result->makespan ? intervals[i].end : result->makespan;
	}
}

void kve_clock_run(const kve_overlap_item_t *items, uint32_t n, const kve_clock_costs_t *costs,
		   kve_clock_interval_t *intervals, kve_clock_result_t *result)
{
	static const kve_overlap_ops_t ops = {run_phase, record_event, await_event};
	run_t run = {.costs = costs, .intervals = intervals};

	(void)kve_overlap_run(items, n, &ops, &run);
	kve_clock_measure(items, n, intervals, result);
}

uint64_t kve_clock_bound(const kve_clock_result_t *result)
{
	return result->compute > result->transport ? result->compute : result->transport;
}

double kve_clock_hidden_share(const kve_clock_result_t *result)
{
	return result->transport ? (double)result->hidden / (double)result->transport : 0;
}

double kve_clock_efficiency(const kve_clock_result_t *result)
{
	const uint64_t all = result->compute + result->transport, bound = kve_clock_bound(result);

	return all > bound ? (double)(all - result->makespan) / (double)(all - bound) : 0;
}
