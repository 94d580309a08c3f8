/* run.h -- what one invocation knows; private to the harness. */
#ifndef KVD_BENCH_RUN_H
#define KVD_BENCH_RUN_H

#include "bench.h"

#define BENCH_MAX_PARAMS 16u
#define BENCH_MAX_ROUNDS 10000u

struct bench_run {
	const bench_t *bench;
	int json;
	int quick;
	unsigned rounds; /* 0: each measurement's own */
	const char *params[BENCH_MAX_PARAMS];
	size_t param_count;
	int header_printed;
};

/* What a measurement found. */
typedef struct bench_result {
	const bench_measurement_t *measurement;
	double value;
	double reference;
	double ratio;
	double spread;
	double cpu_ns_per_op;
	double reference_cpu_ns_per_op;
	unsigned rounds;
} bench_result_t;

void bench_report(bench_run_t *run, const bench_result_t *result);
void bench_report_reason(bench_run_t *run, const char *what, const char *reason);

#endif
