/* disaggregation -- two prefill and two decode engines behind the proxy's decisions, against the better of two ways
 * that do not decide: the same engines with every request handed over, and four engines that hand nothing over.
 * Simulated (pd_sim.h), with costs of an 8B model on one H200 as measured (docs/figures.md). Mean and p99 of the time
 * to the first token and of the time a token after it. Goal: no ratio above 1, one below.
 *
 * The two thresholds are fitted on the first half of a trace and judged on the second. --with trace=FILE takes one in
 * Mooncake's format (kvctl/trace.h); without it one is made: conversations of several turns, from a fixed seed. --with
 * rate=2 doubles the rate of arrivals; chunk=N and decode_chunk=N are the tokens of prompts a step, of engines that do
 * both and of decode engines. A table of all three ways goes to standard error, and the thresholds as options of
 * kvd-pd-proxy. */
#include "bench.h"
#include "pd_sim.h"

#include "kv/types.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SECONDS         1800.0 /* of the made trace */
#define TURNS           0.8    /* probability of another one */
#define NEVER_WAITS     1e18
#define LONGEST_WAIT_MS 3600e3 /* that the option takes */
#define WORSE_IS_WORSE  1.0    /* a ratio above it counts alone */

static const pd_model_t h200_8b = {.request_ns = 6e6,
				   .step_ns = 3.5e6,
				   .weights_ns = 3.5e6,
				   .token_ns = 20.3e3,
				   .pair_ns = 0.472,
				   .kv_ns = 33,
				   .handover_ns = 5e6,
				   .transfer_ns = 2.6e3,
				   .chunk = 2048,
				   .prefill_chunk = 8192,
				   .decode_chunk = 172, /* what a step computes while it reads the weights */
				   .pool_blocks = 16384,
				   .rate = 1};

static struct {
	trace_t trace;
	pd_model_t model;
	pd_result_t always, never, conditional; /* of the second half */
	kvp_thresholds_t fitted;
	int is_done;
} work;

/* ---- a trace of our own ---------------------------------------------------------------------- */

static double draw_uniform(uint64_t *seed)
{
	return ((double)(bench_random(seed) >> 11) + 0.5) / 9007199254740992.0;
}

/* Log-normal, with this median. */
static double draw_length(uint64_t *seed, double median, double sigma)
{
	return median * exp(sigma * sqrt(-2 * log(draw_uniform(seed))) * cos(6.283185307179586 * draw_uniform(seed)));
}

static int compare_times(const void *a, const void *b)
{
	const trace_request_t *x = a, *y = b;

	return x->timestamp_ms != y->timestamp_ms ? (x->timestamp_ms > y->timestamp_ms ? 1 : -1)
						  : (x->first > y->first) - (x->first < y->first);
}

/* Turns of a conversation share all blocks of the one before but its last. */
static void add_turn(trace_t *trace, double at_ms, uint32_t tokens, uint32_t outputs, const trace_request_t *before)
{
	trace_request_t *request = &trace->requests[trace->count++];
	uint32_t shared = before ? before->count - 1 : 0;

	*request = (trace_request_t){.timestamp_ms = (uint64_t)at_ms,
				     .input_tokens = tokens,
				     .output_tokens = outputs,
				     .first = (uint32_t)trace->id_count,
				     .count = (tokens + TRACE_BLOCK_TOKENS - 1) / TRACE_BLOCK_TOKENS};
	for (uint32_t i = 0; i < request->count; i++) {
		uint64_t id = i < shared ? trace->ids[before->first + i] : trace->id_count + i;

		trace->ids[trace->id_count + i] = id;
	}
	trace->id_count += request->count;
	trace->input_tokens += tokens;
}

static int make_trace(trace_t *trace)
{
	const uint32_t most = 16384, longest = 131072;
	uint64_t seed = 18;

	trace->requests = calloc(most, sizeof *trace->requests);
	trace->ids = malloc((size_t)most * (longest / TRACE_BLOCK_TOKENS) * sizeof *trace->ids);
	if (!trace->requests || !trace->ids) {
		return 0;
	}
	for (double start = 0; start < SECONDS && trace->count < most / 2;) {
		double tokens = draw_length(&seed, 7000, 1.1), at = start;
		trace_request_t *before = NULL;

		do {
			double outputs = draw_length(&seed, 250, 0.8);

			outputs = outputs > 4000 ? 4000 : outputs;
			if (tokens > longest) {
				break;
			}
			add_turn(trace, at * 1e3, (uint32_t)tokens + 1, (uint32_t)outputs + 1, before);
			before = &trace->requests[trace->count - 1];
			tokens += outputs + draw_length(&seed, 500, 1.5);
			at += 20 - 30 * log(draw_uniform(&seed));
		} while (draw_uniform(&seed) < TURNS && trace->count < most);
		start -= 1.2 * log(draw_uniform(&seed));
	}
	qsort(trace->requests, trace->count, sizeof *trace->requests, compare_times);

	return 1;
}

/* ---- the thresholds -------------------------------------------------------------------------- */

/* The worst of the four ratios to the better of the two ways; where none is above 1 their sum decides. */
static double judge_result(const pd_result_t *result, const pd_result_t *always, const pd_result_t *never)
{
	double worst = 0, sum = 0;

	for (int i = 0; i < PD_FIGURES; i++) {
		double ratio = result->ns[i] / fmin(always->ns[i], never->ns[i]);

		worst = fmax(worst, ratio);
		sum += ratio;
	}

	return worst > WORSE_IS_WORSE ? PD_FIGURES * worst : sum;
}

static const pd_setup_t all_handed_over = {2, 2, {0, NEVER_WAITS}}, none_handed_over = {0, 4, {0, NEVER_WAITS}};

static int fit_thresholds(const trace_t *trace, const pd_model_t *model, kvp_thresholds_t *fitted)
{
	static const uint32_t tokens[] = {0,    32,   64,   128,  192,  256,  384,  512, 768,
					  1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120};
	static const double waits[] = {0.02e9, 0.05e9, 0.1e9, 0.2e9, 0.5e9, 1e9, 2e9, NEVER_WAITS};
	const uint32_t half = trace->count / 2;
	pd_result_t always, never, result;
	double best = INFINITY;

	if (!pd_simulate(trace, model, &all_handed_over, 0, half, &always) ||
	    !pd_simulate(trace, model, &none_handed_over, 0, half, &never)) {
		return 0;
	}
	for (size_t i = 0; i < KV_COUNT_OF(tokens); i++) {
		for (size_t j = 0; j < KV_COUNT_OF(waits); j++) {
			const pd_setup_t setup = {2, 2, {tokens[i], waits[j]}};
			double value;

			if (!pd_simulate(trace, model, &setup, 0, half, &result)) {
				return 0;
			}
			value = judge_result(&result, &always, &never);
			if (value < best) {
				best = value;
				*fitted = setup.thresholds;
			}
		}
	}

	return 1;
}

static void print_row(const char *name, const pd_result_t *result)
{
	fprintf(stderr, "# %-34s %9.1f %9.1f %9.2f %9.2f %8.1f %%\n", name, result->ns[0] / 1e6, result->ns[1] / 1e6,
		result->ns[2] / 1e6, result->ns[3] / 1e6, 100.0 * result->handed_over / result->requests);
}

static bench_outcome_t prepare(void)
{
	const char *file = bench_param("trace", NULL);
	char detail[256] = "out of memory", name[64];
	const trace_t *trace = &work.trace;
	uint32_t half;
	int done;

	work.model = h200_8b;
	work.model.rate = strtod(bench_param("rate", "1"), NULL);
	work.model.chunk = (uint32_t)bench_param_size("chunk", work.model.chunk);
	work.model.decode_chunk = (uint32_t)bench_param_size("decode_chunk", work.model.decode_chunk);
	if (!(work.model.rate > 0)) {
		return bench_fail("--with rate=%s: not a rate", bench_param("rate", "1"));
	}
	done = file ? trace_read(file, 0, &work.trace, detail, sizeof detail) == KV_OK : make_trace(&work.trace);
	if (!done || trace->count < 100) {
		return bench_fail("%s", done ? "the trace has fewer than 100 requests" : detail);
	}
	half = trace->count / 2;
	done = fit_thresholds(trace, &work.model, &work.fitted) &&
	       pd_simulate(trace, &work.model, &all_handed_over, half, trace->count, &work.always) &&
	       pd_simulate(trace, &work.model, &none_handed_over, half, trace->count, &work.never) &&
	       pd_simulate(trace, &work.model, &(pd_setup_t){2, 2, work.fitted}, half, trace->count, &work.conditional);
	if (!done) {
		return bench_fail("out of memory");
	}
	snprintf(name, sizeof name, "conditional (<= %u tokens, > %.3g s)", work.fitted.min_tokens,
		 work.fitted.max_wait_ns / 1e9);
	fprintf(stderr, "# %-34s %9s %9s %9s %9s %10s\n", "ms; second half", "TTFT mean", "p99", "TPOT mean", "p99",
		"handed over");
	print_row("always: 2 prefill, 2 decode", &work.always);
	print_row("never: 4 that do both", &work.never);
	print_row(name, &work.conditional);
	fprintf(stderr, "# kvd-pd-proxy options, fitted on the first half: --skip.tokens=%u --skip.wait=%.0fms\n",
		work.fitted.min_tokens, fmin(work.fitted.max_wait_ns / 1e6, LONGEST_WAIT_MS));
	work.is_done = 1;

	return BENCH_DONE;
}

static bench_outcome_t take_figure(void *arg, bench_sample_t *p_sample)
{
	const pd_figure_t figure = *(const pd_figure_t *)arg;

	p_sample->value = p_sample->is_reference ? fmin(work.always.ns[figure], work.never.ns[figure])
						 : work.conditional.ns[figure];

	return BENCH_DONE;
}

bench_outcome_t run_disaggregation(int variant)
{
	static const char *const names[] = {"disaggregation/ttft-mean", "disaggregation/ttft-p99",
					    "disaggregation/tpot-mean", "disaggregation/tpot-p99"};
	bench_outcome_t outcome = work.is_done ? BENCH_DONE : prepare();

	(void)variant;
	for (pd_figure_t i = 0; outcome == BENCH_DONE && i < PD_FIGURES; i++) {
		const bench_measurement_t m = {.name = names[i],
					       .unit = "ns",
					       .reference = "the better of always and never",
					       .value_fn = take_figure,
					       .reference_fn = take_figure,
					       .rounds = 1,
					       .goal = BENCH_RATIO_AT_MOST,
					       .goal_value = 1};

		outcome = bench_measure(&i, &m);
	}

	return outcome;
}
