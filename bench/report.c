/* A result as a JSON line or as a row for people. */
#include "run.h"

#include <stdarg.h>
#include <stdio.h>

/* 1 met, 0 missed, -1 no goal. */
static int goal_met(const bench_result_t *r)
{
	const double goal = r->measurement->goal_value;

	switch (r->measurement->goal) {
	case BENCH_RATIO_AT_MOST:
		return r->ratio <= goal;
	case BENCH_RATIO_AT_LEAST:
		return r->ratio >= goal;
	case BENCH_VALUE_AT_MOST:
		return r->value <= goal;
	case BENCH_VALUE_AT_LEAST:
		return r->value >= goal;
	case BENCH_NO_GOAL:
		break;
	}

	return -1;
}

static const char *goal_text(const bench_measurement_t *m, char *out, size_t cap)
{
	static const char *const words[] = {
		[BENCH_RATIO_AT_MOST] = "ratio <=",
		[BENCH_RATIO_AT_LEAST] = "ratio >=",
		[BENCH_VALUE_AT_MOST] = "value <=",
		[BENCH_VALUE_AT_LEAST] = "value >=",
	};

	if (m->goal == BENCH_NO_GOAL) {
		snprintf(out, cap, "-");
	} else {
		snprintf(out, cap, "%s %g", words[m->goal], m->goal_value);
	}

	return out;
}

/* The only strings that may need escaping are reasons; names and units are ours. */
static void print_json_text(const char *text)
{
	putchar('"');
	for (; *text; text++) {
		const unsigned char c = (unsigned char)*text;

		if (c == '"' || c == '\\') {
			printf("\\%c", c);
		} else if (c < 0x20) {
			printf("\\u%04x", c);
		} else {
			putchar(c);
		}
	}
	putchar('"');
}

static void report_json(const bench_result_t *r)
{
	const bench_measurement_t *m = r->measurement;
	char goal[64];

	printf("{\"name\":");
	print_json_text(m->name);
	printf(",\"value\":%.6g,\"unit\":", r->value);
	print_json_text(m->unit);
	if (m->reference_fn) {
		printf(",\"reference\":");
		print_json_text(m->reference);
		printf(",\"reference_value\":%.6g,\"ratio\":%.4f", r->reference, r->ratio);
	} else {
		printf(",\"reference\":null,\"reference_value\":null,\"ratio\":null");
	}
	printf(",\"rounds\":%u,\"spread\":%.4f,\"cpu_ns_per_op\":%.6g", r->rounds, r->spread, r->cpu_ns_per_op);
	if (m->reference_fn) {
		printf(",\"reference_cpu_ns_per_op\":%.6g", r->reference_cpu_ns_per_op);
	}
	if (m->goal != BENCH_NO_GOAL) {
		printf(",\"goal\":");
		print_json_text(goal_text(m, goal, sizeof goal));
		printf(",\"goal_met\":%s", goal_met(r) ? "true" : "false");
	}
	printf("}\n");
}

static void report_row(bench_run_t *run, const bench_result_t *r)
{
	static const char *const verdicts[] = {"", "MISSED", "met"};
	const bench_measurement_t *m = r->measurement;
	char goal[64];

	if (!run->header_printed) {
		printf("%-28s %12s %-5s %12s %7s %7s %7s %11s %11s  %s\n", "bench", "value", "unit", "reference",
		       "ratio", "rounds", "spread", "cpu ns/op", "reference's", "goal");
		run->header_printed = 1;
	}
	printf("%-28s %12.5g %-5s ", m->name, r->value, m->unit);
	if (m->reference_fn) {
		printf("%12.5g %7.3f ", r->reference, r->ratio);
	} else {
		printf("%12s %7s ", "-", "-");
	}
	printf("%7u %6.1f%% %11.5g ", r->rounds, 100 * r->spread, r->cpu_ns_per_op);
	if (m->reference_fn) {
		printf("%11.5g  ", r->reference_cpu_ns_per_op);
	} else {
		printf("%11s  ", "-");
	}
	printf("%s %s", goal_text(m, goal, sizeof goal), verdicts[goal_met(r) + 1]);
	if (m->reference_fn) {
		printf("  (against %s)", m->reference);
	}
	putchar('\n');
}

void bench_report(bench_run_t *run, const bench_result_t *result)
{
	if (run->json) {
		report_json(result);
	} else {
		report_row(run, result);
	}
	fflush(stdout);
}

void bench_report_reason(bench_run_t *run, const char *what, const char *reason)
{
	if (!run->json) {
		printf("%-28s %s: %s\n", run->bench->name, what, reason);
	} else {
		printf("{\"name\":");
		print_json_text(run->bench->name);
		printf(",\"%s\":", what);
		print_json_text(reason);
		printf("}\n");
	}
	fflush(stdout);
}

bench_outcome_t bench_skip(bench_run_t *run, const char *format, ...)
{
	char reason[512];
	va_list args;

	va_start(args, format);
	vsnprintf(reason, sizeof reason, format, args);
	va_end(args);
	bench_report_reason(run, "skipped", reason);

	return BENCH_SKIPPED;
}

bench_outcome_t bench_fail(bench_run_t *run, const char *format, ...)
{
	char reason[512];
	va_list args;

	va_start(args, format);
	vsnprintf(reason, sizeof reason, format, args);
	va_end(args);
	bench_report_reason(run, "failed", reason);

	return BENCH_FAILED;
}
