/* kve/clock.h -- a virtual clock for an enqueue list (kve/overlap.h): when each item runs, if phases take given times.
 *
 * Streams are FIFO and start an item when the one before has ended and the event has happened. Ranks are bound to each
 * other: the experts wait for the dispatch of all, the next layer for the combine of all. Where all ranks have the same
 * load, as here, each one's transfers arrive when its own have left, so one rank is enough.
 */
#ifndef KVE_CLOCK_H
#define KVE_CLOCK_H

#include "kve/overlap.h"

/* Time that each phase of one microbatch takes (KVE_OVERLAP_SEQ: of the batch), any unit. */
typedef struct kve_clock_costs {
	uint64_t of[KVE_PHASES];
} kve_clock_costs_t;

typedef struct kve_clock_interval {
	uint64_t start, end;
} kve_clock_interval_t;

typedef struct kve_clock_result {
	uint64_t makespan;
	uint64_t compute, transport; /* sums of what their phases take: neither can be faster */
	uint64_t hidden;             /* transport's time under compute of the other microbatch */
} kve_clock_result_t;

/* What intervals that were measured come to: one an item, in the list's order, each stream's in the order of time. */
void kve_clock_measure(const kve_overlap_item_t *items, uint32_t n, const kve_clock_interval_t *intervals,
		       kve_clock_result_t *result);

/* Run the list; intervals: one an item. */
void kve_clock_run(const kve_overlap_item_t *items, uint32_t n, const kve_clock_costs_t *costs,
		   kve_clock_interval_t *intervals, kve_clock_result_t *result);

/* The larger of compute and transport. */
uint64_t kve_clock_bound(const kve_clock_result_t *result);
/* Of the transport's time; 0 without transport. */
double kve_clock_hidden_share(const kve_clock_result_t *result);
/* (t - makespan) / (t - bound), t being all phases one after the other; 0 where nothing could overlap. */
double kve_clock_efficiency(const kve_clock_result_t *result);

#endif
