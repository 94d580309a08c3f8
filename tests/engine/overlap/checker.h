/* checker.h -- whether a list of a step holds its rules, without the code that makes lists. */
#ifndef TESTS_ENGINE_OVERLAP_CHECKER_H
#define TESTS_ENGINE_OVERLAP_CHECKER_H

#include "../check.h"
#include "kve/clock.h"
#include "kve/dbo.h"

#define ITEMS_MAX 160u

typedef struct list {
	kve_overlap_shape_t shape;
	uint32_t earlier; /* microbatch with the earlier tokens of the batch */
	uint32_t n;
	kve_overlap_item_t items[ITEMS_MAX];
} list_t;

/* The product's list of that shape, and its microbatch with the earlier tokens. */
list_t make_list(kve_overlap_mode_t mode, uint32_t layers, int shared);

/* NULL: all rules hold. Else the name of the first broken one. */
const char *check_list(const list_t *list);

kve_clock_result_t run_clock(const list_t *list, const kve_clock_costs_t *costs, kve_clock_interval_t *intervals);

/* When each item starts and ends, from its streams and events alone: the earliest time. */
void time_list(const list_t *list, const kve_clock_costs_t *costs, kve_clock_interval_t *intervals);

#endif
