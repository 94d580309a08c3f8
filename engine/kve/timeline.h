/* timeline.h -- when each item of an enqueue list ran, as plain characters and as a trace for Perfetto. */
#ifndef KVE_TIMELINE_H
#define KVE_TIMELINE_H

#include "kve/clock.h"

#include <stdio.h>

typedef struct timeline {
	const kve_overlap_item_t *items;
	const kve_clock_interval_t *intervals; /* microseconds, one an item */
	uint32_t n;
} timeline_t;

/* A row a stream, of the first layers. */
void timeline_print(const timeline_t *timeline, FILE *out);
/* JSON of Chrome's trace format: streams as rows, microbatches as colours. */
void timeline_trace(const timeline_t *timeline, FILE *out);
/* The trace as a file. Returns 0, or EXIT_WRITE: said on standard error. */
int timeline_write(const timeline_t *timeline, const char *path);

#endif
