/* kve -- what the engine does with a step, without a model. */
#include "timeline.h"

#include "kv/option.h"
#include "kv/system.h"
#include "kv/types.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define EXIT_USAGE  2
#define EXIT_MEMORY 71
#define EXIT_WRITE  74

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

static const kv_option_table_t table = {rows, KV_COUNT_OF(rows), "KVE_"};

static void print_help(FILE *out)
{
	fprintf(out,
		"kve schedule: when the phases of a step run, by a virtual clock\n\n"
		"usage: kve schedule --mode seq|dbo --layers N --attention US --experts US --dispatch US --combine US\n"
		"                    [--shared US] [--timeline FILE]\n"
		"A time is that of one microbatch; of the whole batch with --mode seq.\n\n");
	for (size_t i = 0; i < KV_COUNT_OF(rows); i++) {
		fprintf(out, "  --%-10s %s\n", rows[i].name, rows[i].help);
	}
}

static int fail(const char *format, const char *text)
{
	(void)fputs("kve: ", stderr);
	fprintf(stderr, format, text);
	(void)fputs("\n", stderr);

	return EXIT_USAGE;
}

/* ---- options --------------------------------------------------------------------------------- */

/* "--name=value" or "--name" "value"; *p_i: the last argument that was taken. */
static int set_option(char **argv, int argc, int *p_i, values_t *values, kv_option_source_t *sources)
{
	const char *arg = argv[*p_i], *value = strchr(arg, '=');
	kv_option_error_t error;
	char name[64];
	const size_t len = value ? (size_t)(value - arg) : strlen(arg);

	if (len < 3 || strncmp(arg, "--", 2) != 0 || len - 2 >= sizeof name) {
		return fail("\"%.100s\" is not an option; `kve --help` lists them", arg);
	}
	snprintf(name, sizeof name, "%.*s", (int)len - 2, arg + 2);
	if (!value && *p_i + 1 < argc) {
		value = argv[++*p_i];
	} else if (value) {
		value++;
	} else {
		return fail("--%s needs a value", name);
	}

	return kv_options_set(&table, name, value, values, sources, &error) == KV_OK ? 0 : fail("%s", error.text);
}

static int parse_options(int argc, char **argv, values_t *values)
{
	static const char *const required[] = {"layers", "attention", "experts", "dispatch", "combine"};
	kv_option_source_t sources[KV_COUNT_OF(rows)];
	int rc = 0;

	kv_options_default(&table, values, sources);
	for (int i = 2; i < argc && rc == 0; i++) {
		rc = set_option(argv, argc, &i, values, sources);
	}
	for (size_t i = 0; i < KV_COUNT_OF(required) && rc == 0; i++) {
		for (size_t o = 0; o < KV_COUNT_OF(rows); o++) {
			if (strcmp(rows[o].name, required[i]) == 0 && sources[o] == KV_SOURCE_DEFAULT) {
				rc = fail("--%s is missing; `kve --help` says what it means", required[i]);
			}
		}
	}

	return rc;
}

/* ---- schedule -------------------------------------------------------------------------------- */

static void print_result(const values_t *values, const kve_clock_result_t *r)
{
	printf("%s, layers %" PRIu64 ": %" PRIu64 " us; bound %" PRIu64 " us (compute %" PRIu64 ", transport %" PRIu64
	       ")\n",
	       values->mode == KVE_OVERLAP_DBO ? "dbo" : "seq", values->layers, r->makespan, kve_clock_bound(r),
	       r->compute, r->transport);
	printf("transport under compute of the other microbatch: %.1f %%; overlap efficiency %.2f\n",
	       100 * kve_clock_hidden_share(r), kve_clock_efficiency(r));
}

static int write_trace(const timeline_t *timeline, const char *path)
{
	FILE *file = fopen(path, "w");
	int failed = !file;

	if (file) {
		timeline_trace(timeline, file);
		failed = ferror(file);
		failed |= fclose(file) != 0;
	}
	if (failed) {
		fprintf(stderr, "kve: --timeline %s: %s\n", path, strerror(errno));
	}

	return failed ? EXIT_WRITE : 0;
}

static int run_schedule(const values_t *values)
{
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
		rc = values->timeline[0] ? write_trace(&timeline, values->timeline) : 0;
	}
	free(intervals);
	free(items);

	return rc;
}

int main(int argc, char **argv)
{
	values_t values;
	int rc;

	if (kv_version_asked(argc, argv, "kve")) {
		return 0;
	}
	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "--help") == 0) {
			print_help(stdout);
			return 0;
		}
	}
	if (argc < 2 || strcmp(argv[1], "schedule") != 0) {
		return fail("the command is \"schedule\", not \"%.100s\"; `kve --help` says more",
			    argc < 2 ? "" : argv[1]);
	}

	rc = parse_options(argc, argv, &values);
	if (rc == 0) {
		rc = run_schedule(&values);
	}
	if (fflush(stdout) != 0 && rc == 0) {
		fprintf(stderr, "kve: standard output: %s\n", strerror(errno));
		rc = EXIT_WRITE;
	}

	return rc;
}
