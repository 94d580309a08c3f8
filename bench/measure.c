/* Rounds, medians and clocks. */
#include "run.h"

#include <stdlib.h>
#include <time.h>

#define DEFAULT_ROUNDS 21u

/* All rounds of one measurement. */
typedef struct rounds {
	double *value;
	double *reference;
	double *ratio;
	double *cpu;
	double *reference_cpu;
} rounds_t;

static uint64_t clock_ns(clockid_t clock)
{
	struct timespec ts;

	clock_gettime(clock, &ts);

	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

uint64_t bench_now_ns(void)
{
	return clock_ns(CLOCK_MONOTONIC);
}

uint64_t bench_thread_cpu_ns(void)
{
	return clock_ns(CLOCK_THREAD_CPUTIME_ID);
}

uint64_t bench_process_cpu_ns(void)
{
	return clock_ns(CLOCK_PROCESS_CPUTIME_ID);
}

static int compare_doubles(const void *a, const void *b)
{
	const double x = *(const double *)a;
	const double y = *(const double *)b;

	return (x > y) - (x < y);
}

double bench_quantile(double *values, size_t count, double quantile)
{
	double position;
	size_t below;

	if (count == 0) {
		return 0;
	}
	qsort(values, count, sizeof *values, compare_doubles);
	position = quantile * (double)(count - 1);
	below = (size_t)position;
	if (below + 1 >= count) {
		return values[count - 1];
	}

	return values[below] + (position - (double)below) * (values[below + 1] - values[below]);
}

static bench_outcome_t take_sample(bench_run_t *run, bench_sample_fn fn, void *arg, bench_sample_t *sample)
{
	const uint64_t before = bench_thread_cpu_ns();
	bench_outcome_t outcome;

	*sample = (bench_sample_t){0};
	outcome = fn(run, arg, sample);
	if (sample->cpu_ns == 0) {
		sample->cpu_ns = (double)(bench_thread_cpu_ns() - before);
	}
	if (sample->ops == 0) {
		sample->ops = 1;
	}

	return outcome;
}

/* Reference, then value. */
static bench_outcome_t take_round(bench_run_t *run, const bench_measurement_t *m, const rounds_t *rounds, size_t i)
{
	bench_sample_t value;
	bench_sample_t reference = {0};
	bench_outcome_t outcome = BENCH_DONE;

	if (m->reference_fn) {
		outcome = take_sample(run, m->reference_fn, m->arg, &reference);
	}
	if (outcome == BENCH_DONE) {
		outcome = take_sample(run, m->value_fn, m->arg, &value);
	}
	if (outcome != BENCH_DONE) {
		return outcome;
	}
	rounds->value[i] = value.value;
	rounds->reference[i] = reference.value;
	rounds->ratio[i] = reference.value > 0 ? value.value / reference.value : 0;
	rounds->cpu[i] = value.cpu_ns / value.ops;
	rounds->reference_cpu[i] = m->reference_fn ? reference.cpu_ns / reference.ops : 0;

	return BENCH_DONE;
}

static bench_result_t summarise(const bench_measurement_t *m, const rounds_t *rounds, unsigned n)
{
	bench_result_t r = {.measurement = m, .rounds = n};

	r.value = bench_quantile(rounds->value, n, 0.5);
	r.reference = bench_quantile(rounds->reference, n, 0.5);
	r.ratio = bench_quantile(rounds->ratio, n, 0.5);
	r.cpu_ns_per_op = bench_quantile(rounds->cpu, n, 0.5);
	r.reference_cpu_ns_per_op = bench_quantile(rounds->reference_cpu, n, 0.5);
	if (r.value > 0) {
		r.spread = (bench_quantile(rounds->value, n, 0.75) - bench_quantile(rounds->value, n, 0.25)) / r.value;
	}

	return r;
}

bench_outcome_t bench_measure(bench_run_t *run, const bench_measurement_t *m)
{
	const unsigned own = m->rounds ? m->rounds : DEFAULT_ROUNDS;
	const unsigned n = run->rounds ? run->rounds : own;
	double *memory = calloc((size_t)5 * n, sizeof *memory);
	const rounds_t rounds = {memory, memory + n, memory + (size_t)2 * n, memory + (size_t)3 * n,
				 memory + (size_t)4 * n};
	bench_outcome_t outcome;
	bench_result_t result;

	if (!memory) {
		return bench_fail(run, "no memory for %u rounds", n);
	}

	outcome = take_round(run, m, &rounds, 0);
	for (unsigned i = 0; i < n && outcome == BENCH_DONE; i++) {
		outcome = take_round(run, m, &rounds, i);
	}
	if (outcome == BENCH_DONE) {
		result = summarise(m, &rounds, n);
		bench_report(run, &result);
	}
	free(memory);

	return outcome;
}
