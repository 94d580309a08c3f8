/* The harness: options, rounds, medians, and a result as a JSON line or as a row for people. */
#include "bench.h"

#include "kv/status.h"
#include "kv/system.h"
#include "kv/units.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_NAMES         64u
#define MAX_PARAMS        16u
#define MAX_ROUNDS        10000u
#define DEFAULT_ROUNDS    21u
#define EXIT_USAGE        64
#define EXIT_BENCH_FAILED 70
#define EXIT_SKIPPED      77

/* This invocation. */
static struct {
	const bench_t *bench;
	FILE *out; /* gets JSON lines too; NULL: none */
	const char *params[MAX_PARAMS];
	size_t param_count;
	unsigned rounds; /* 0: each measurement's own */
	int json, quick, header_printed;
} run;

/* What a measurement found. */
typedef struct result {
	const bench_measurement_t *measurement;
	double value, reference, ratio, spread, cpu_ns_per_op, reference_cpu_ns_per_op;
	unsigned rounds;
} result_t;

static const char usage[] =
	"usage: kvd-bench NAME... [--json] [--out FILE] [--rounds N] [--seconds N] [--quick] [--with name=value]...\n"
	"       kvd-bench list | all\n"
	"\n"
	"NAME is a bench, or a family of them (`pool` runs all under pool/). Each measures a value and its reference\n"
	"in turn in the same run and prints medians over rounds; ratio is value over reference, round by round; "
	"spread\n"
	"is the interquartile range over the median. A missed goal is printed, the exit status stays 0.\n"
	"\n"
	"  --json             one object a line, times in ns\n"
	"  --out FILE         these lines to FILE, and the table here\n"
	"  --rounds N         measured rounds (default: each bench's own)\n"
	"  --seconds N        no round begins after so long\n"
	"  --quick            smaller sizes where a bench has any\n"
	"  --with name=value  parameter of a bench; `kvd-bench list` names them\n";

const char *bench_param(const char *name, const char *otherwise)
{
	const size_t n = strlen(name);

	for (size_t i = run.param_count; i > 0; i--) {
		if (strncmp(run.params[i - 1], name, n) == 0 && run.params[i - 1][n] == '=') {
			return run.params[i - 1] + n + 1;
		}
	}

	return otherwise;
}

uint64_t bench_param_size(const char *name, uint64_t otherwise)
{
	const char *text = bench_param(name, NULL);
	uint64_t bytes = otherwise;

	if (text && kv_parse_size(text, &bytes) != KV_OK) {
		fprintf(stderr, "kvd-bench: --with %s=%s: not a size\n", name, text);
		exit(EXIT_USAGE);
	}

	return bytes;
}

int bench_quick(void)
{
	return run.quick;
}

/* ---- report ---------------------------------------------------------------------------------- */

static int is_goal_met(const result_t *r)
{
	const bench_measurement_t *m = r->measurement;

	if (m->goal == BENCH_RATIO_AT_LEAST) {
		return r->ratio >= m->goal_value;
	}

	return (m->goal == BENCH_VALUE_AT_MOST ? r->value : r->ratio) <= m->goal_value;
}

static const char *const goal_words[] = {
	[BENCH_NO_GOAL] = "-",
	[BENCH_RATIO_AT_MOST] = "ratio <=",
	[BENCH_RATIO_AT_LEAST] = "ratio >=",
	[BENCH_VALUE_AT_MOST] = "value <=",
};

static void print_json(FILE *out, const result_t *r)
{
	const bench_measurement_t *m = r->measurement;

	fprintf(out, "{\"name\":\"%s\",\"value\":%.6g,\"unit\":\"%s\",", m->name, r->value, m->unit);
	if (m->reference_fn) {
		fprintf(out, "\"reference\":\"%s\",\"reference_value\":%.6g,\"ratio\":%.4f", m->reference, r->reference,
			r->ratio);
	} else {
		fprintf(out, "\"reference\":null,\"reference_value\":null,\"ratio\":null");
	}
	fprintf(out, ",\"rounds\":%u,\"spread\":%.4f,\"cpu_ns_per_op\":%.6g", r->rounds, r->spread, r->cpu_ns_per_op);
	if (m->reference_fn) {
		fprintf(out, ",\"reference_cpu_ns_per_op\":%.6g", r->reference_cpu_ns_per_op);
	}
	if (m->goal != BENCH_NO_GOAL) {
		fprintf(out, ",\"goal\":\"%s %g\",\"goal_met\":%s", goal_words[m->goal], m->goal_value,
			is_goal_met(r) ? "true" : "false");
	}
	fprintf(out, "}\n");
	fflush(out);
}

static void print_row(const result_t *r)
{
	const bench_measurement_t *m = r->measurement;

	if (!run.header_printed) {
		printf("%-44s %10s %-5s %10s %7s %6s %7s %11s %11s  %s\n", "bench", "value", "unit", "reference",
		       "ratio", "rounds", "spread", "cpu ns/op", "reference's", "goal");
		run.header_printed = 1;
	}
	printf("%-44s %10.5g %-5s %10.5g %7.3f %6u %6.1f%% %11.5g %11.5g  %s", m->name, r->value, m->unit, r->reference,
	       r->ratio, r->rounds, 100 * r->spread, r->cpu_ns_per_op, r->reference_cpu_ns_per_op, goal_words[m->goal]);
	if (m->goal != BENCH_NO_GOAL) {
		printf(" %g %s", m->goal_value, is_goal_met(r) ? "met" : "MISSED");
	}
	if (m->reference_fn) {
		printf("  (against %s)", m->reference);
	}
	putchar('\n');
	fflush(stdout);
}

/* Reasons may hold paths and messages of others: quotes and control characters do not reach JSON. */
bench_outcome_t bench_end(bench_outcome_t outcome, const char *format, ...)
{
	char reason[512];
	va_list args;

	va_start(args, format);
	vsnprintf(reason, sizeof reason, format, args);
	va_end(args);
	for (char *c = reason; run.json && *c; c++) {
		*c = *c == '"' || *c == '\\' || (unsigned char)*c < 0x20 ? '\'' : *c;
	}
	printf(run.json ? "{\"name\":\"%s\",\"%s\":\"%s\"}\n" : "%-44s %s: %s\n", run.bench->name,
	       outcome == BENCH_SKIPPED ? "skipped" : "failed", reason);
	fflush(stdout);

	return outcome;
}

/* ---- rounds ---------------------------------------------------------------------------------- */

static bench_outcome_t take_sample(bench_sample_fn fn, void *arg, bench_sample_t *sample)
{
	const uint64_t before = bench_thread_cpu_ns();
	const bench_outcome_t outcome = fn(arg, sample);

	if (sample->cpu_ns == 0) {
		sample->cpu_ns = (double)(bench_thread_cpu_ns() - before);
	}
	sample->cpu_ns /= sample->ops == 0 ? 1 : sample->ops;

	return outcome;
}

typedef double rounds_t[5][MAX_ROUNDS]; /* value, reference, ratio, CPU, the reference's CPU */

/* Reference, then value. */
static bench_outcome_t take_round(void *arg, const bench_measurement_t *m, rounds_t rounds, unsigned i)
{
	bench_sample_t value = {0}, reference = {.is_reference = 1};
	bench_outcome_t outcome = BENCH_DONE;

	if (m->reference_fn) {
		outcome = take_sample(m->reference_fn, arg, &reference);
	}
	if (outcome == BENCH_DONE) {
		outcome = take_sample(m->value_fn, arg, &value);
	}
	rounds[0][i] = value.value;
	rounds[1][i] = reference.value;
	rounds[2][i] = reference.value > 0 ? value.value / reference.value : 0;
	rounds[3][i] = value.cpu_ns;
	rounds[4][i] = reference.cpu_ns;

	return outcome;
}

bench_outcome_t bench_measure(void *arg, const bench_measurement_t *m)
{
	static rounds_t rounds;
	const unsigned own = m->rounds ? m->rounds : DEFAULT_ROUNDS, n = run.rounds ? run.rounds : own;
	bench_outcome_t outcome = take_round(arg, m, rounds, 0);
	result_t r = {.measurement = m};

	while (r.rounds < n && outcome == BENCH_DONE && !bench_late()) {
		outcome = take_round(arg, m, rounds, r.rounds);
		r.rounds += outcome == BENCH_DONE;
	}
	if (outcome != BENCH_DONE) {
		return outcome;
	}
	if (r.rounds == 0) {
		return bench_fail("%s: no time is left to measure (--seconds)", m->name);
	}
	r.value = bench_quantile(rounds[0], r.rounds, 0.5);
	r.reference = bench_quantile(rounds[1], r.rounds, 0.5);
	r.ratio = bench_quantile(rounds[2], r.rounds, 0.5);
	r.cpu_ns_per_op = bench_quantile(rounds[3], r.rounds, 0.5);
	r.reference_cpu_ns_per_op = bench_quantile(rounds[4], r.rounds, 0.5);
	r.spread = bench_quantile(rounds[0], r.rounds, 0.75) - bench_quantile(rounds[0], r.rounds, 0.25);
	r.spread = r.value > 0 ? r.spread / r.value : 0;
	if (run.json) {
		print_json(stdout, &r);
	} else {
		print_row(&r);
	}
	if (run.out) {
		print_json(run.out, &r);
	}

	return BENCH_DONE;
}

/* ---- options --------------------------------------------------------------------------------- */

/* Is `bench` called `name`, or in the family `name`? */
static int is_named(const bench_t *bench, const char *name)
{
	const size_t n = strlen(name);

	return strcmp(name, "all") == 0 ||
	       (strncmp(bench->name, name, n) == 0 && (bench->name[n] == '\0' || bench->name[n] == '/'));
}

static int list_benches(void)
{
	for (const bench_t *b = bench_list; b->name; b++) {
		printf("%s\n  measures   %s\n  reference  %s\n  goal       %s\n", b->name, b->measures,
		       b->reference ? b->reference : "none", b->goal);
	}

	return 0;
}

/* Is one called so? Else says which may be meant. */
static int is_known(const char *name)
{
	const char *names[MAX_NAMES], *near;
	size_t n = 0;

	for (; bench_list[n].name && !is_named(&bench_list[n], name); n++) {
		names[n] = bench_list[n].name;
	}
	if (bench_list[n].name) {
		return 1;
	}
	near = kv_nearest(name, names, n);
	fprintf(stderr, "kvd-bench: no bench is called %s%s%s; kvd-bench list shows them\n", name,
		near ? "; did you mean " : "", near ? near : "");

	return 0;
}

/* An option that is followed by `value`. Returns 0 for bad usage. */
static int set_option(const char *name, char *value)
{
	uint64_t number = 0;
	const int is_number = kv_parse_u64(value, &number) == KV_OK && number > 0;

	if (strcmp(name, "--rounds") == 0 && is_number && number <= MAX_ROUNDS) {
		run.rounds = (unsigned)number;
	} else if (strcmp(name, "--seconds") == 0 && is_number) {
		bench_limit(number);
	} else if (strcmp(name, "--out") == 0) {
		run.out = fopen(value, "w");
		return run.out != NULL;
	} else if (strcmp(name, "--with") == 0 && strchr(value, '=') && run.param_count < MAX_PARAMS) {
		run.params[run.param_count++] = value;
	} else {
		return 0;
	}

	return 1;
}

/* Reads options and moves the names to the front of argv. Returns their number, -1 for bad usage. */
static int read_options(int argc, char **argv)
{
	int names = 0;

	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "--json") == 0) {
			run.json = 1;
		} else if (strcmp(argv[i], "--quick") == 0) {
			run.quick = 1;
		} else if (argv[i][0] != '-') {
			argv[names++] = argv[i];
		} else if (i + 1 == argc || !set_option(argv[i], argv[i + 1])) {
			return -1;
		} else {
			i++;
		}
	}

	return names;
}

int main(int argc, char **argv)
{
	int names, failed = 0, done = 0;

	if (kv_version_asked(argc, argv, program_invocation_short_name)) {
		return 0;
	}
	bench_limit(0);
	names = read_options(argc, argv);
	if (names <= 0) {
		const int asked = argc == 2 && strcmp(argv[1], "--help") == 0;

		fputs(usage, asked ? stdout : stderr);
		return asked ? 0 : EXIT_USAGE;
	}
	if (strcmp(argv[0], "list") == 0) {
		return list_benches();
	}
	for (int i = 0; i < names; i++) {
		if (!is_known(argv[i])) {
			return EXIT_USAGE;
		}
	}
	for (int i = 0; i < names; i++) {
		for (run.bench = bench_list; run.bench->name; run.bench++) {
			if (is_named(run.bench, argv[i])) {
				const bench_outcome_t outcome = run.bench->run(run.bench->variant);

				failed += outcome == BENCH_FAILED;
				done += outcome == BENCH_DONE;
				bench_unpin();
			}
		}
	}

	return failed ? EXIT_BENCH_FAILED : done ? 0 : EXIT_SKIPPED;
}
