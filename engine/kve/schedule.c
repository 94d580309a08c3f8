/* kve schedule: when the phases of a step run, by a virtual clock. */
#include "command.h"
#include "timeline.h"

#include <inttypes.h>
#include <stdlib.h>

typedef struct values {
	int mode;
	uint64_t layers, attention, experts, dispatch, combine, shared;
	char timeline[KV_OPTION_STRING_MAX];
} values_t;

#define AT(field) offsetof(values_t, field)
#define US(name, field, help)                                                                                          \
	{                                                                                                              \
		name, KV_OPTION_U64, "0", "0", "1000000000", NULL, 0, AT(field), help                                  \
	}

static const kv_option_t rows[] = {
	{"mode", KV_OPTION_ENUM, "dbo", NULL, NULL, "seq,dbo", 0, AT(mode),
	 "seq: one batch; dbo: two microbatches that hide each other's transport."},
	{"layers", KV_OPTION_U64, "1", "1", "1000", NULL, 0, AT(layers), "Layers of the step."},
	US("attention", attention, "Microseconds of attention with its matrices, norms and router."),
	US("experts", experts, "Microseconds of the experts."),
	US("dispatch", dispatch, "Microseconds until rows have arrived at the ranks of their experts."),
	US("combine", combine, "Microseconds until results have arrived back."),
	US("shared", shared, "Microseconds of shared experts; 0: there are none."),
	{"timeline", KV_OPTION_PATH, "", NULL, NULL, NULL, 0, AT(timeline),
	 "File for a trace that ui.perfetto.dev shows, streams as rows."},
};

#undef AT

static void print_result(const values_t *values, const kve_clock_result_t *r)
{
	printf("%s, layers %" PRIu64 ": %" PRIu64 " us; bound %" PRIu64 " us (compute %" PRIu64 ", transport %" PRIu64
	       ")\n",
	       values->mode == KVE_OVERLAP_DBO ? "dbo" : "seq", values->layers, r->makespan, kve_clock_bound(r),
	       r->compute, r->transport);
	printf("transport under compute of the other microbatch: %.1f %%; overlap efficiency %.2f\n",
	       100 * kve_clock_hidden_share(r), kve_clock_efficiency(r));
}

static int run_schedule(const void *given)
{
	const values_t *values = given;
	const kve_overlap_shape_t shape = {.mode = values->mode ? KVE_OVERLAP_DBO : KVE_OVERLAP_SEQ,
					   .layers = (uint32_t)values->layers,
					   .shared = values->shared > 0};
	const kve_clock_costs_t costs = {.of = {
						 [KVE_PHASE_QKV] = values->attention - values->attention / 2,
						 [KVE_PHASE_ATTENTION] = values->attention / 2,
						 [KVE_PHASE_DISPATCH_SEND] = values->dispatch,
						 [KVE_PHASE_EXPERTS] = values->experts,
						 [KVE_PHASE_COMBINE_SEND] = values->combine,
						 [KVE_PHASE_SHARED] = values->shared,
					 }};
	const uint32_t n = kve_overlap_count(&shape);
	kve_overlap_item_t *items = calloc(n, sizeof *items);
	kve_clock_interval_t *intervals = calloc(n, sizeof *intervals);
	const timeline_t timeline = {items, intervals, n};
	kve_clock_result_t result;
	int rc = EXIT_MEMORY;

	if (items && intervals) {
		kve_overlap_list(&shape, items);
		kve_clock_run(items, n, &costs, intervals, &result);
		print_result(values, &result);
		timeline_print(&timeline, stdout);
		rc = values->timeline[0] ? timeline_write(&timeline, values->timeline) : 0;
	}
	free(intervals);
	free(items);

	return rc;
}

static const char *const required[] = {"layers", "attention", "experts", "dispatch", "combine", NULL};

const command_t command_schedule = {
	.name = "schedule",
	.about = "when the phases of a step run, by a virtual clock",
	.usage = "--mode seq|dbo --layers N --attention US --experts US --dispatch US --combine US\n"
		 "                    [--shared US] [--timeline FILE]\n"
		 "A time is that of one microbatch; of the whole batch with --mode seq.",
	.table = {rows, KV_COUNT_OF(rows), "KVE_"},
	.required = required,
	.run = run_schedule,
	.value_bytes = sizeof(values_t),
};
