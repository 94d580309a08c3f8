/* kve bench: a step of a rank, as one batch and as two microbatches, by the device's clock. */
#include "setup.h"
#include "timeline.h"

#include "kv/env.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct values {
	setup_options_t setup; /* first */
	uint64_t tokens, sequences, context, rounds;
	int json;
	char timeline[KV_OPTION_STRING_MAX];
} values_t;

#define AT(field) offsetof(values_t, field)
static const kv_option_t rows[] = {
	SETUP_OPTIONS,
	{"tokens", KV_OPTION_U64, "64", "2", "16384", NULL, 0, AT(tokens), "Tokens of a rank's step."},
	{"sequences", KV_OPTION_U64, "1", "1", "256", NULL, 0, AT(sequences),
	 "Sequences that they belong to, in equal parts; as many as tokens: a step that decodes."},
	{"context", KV_OPTION_U64, "0", "0", "65536", NULL, 0, AT(context), "Tokens of each in the cache before."},
	{"rounds", KV_OPTION_U64, "5", "1", "1000", NULL, 0, AT(rounds), "Measured steps of each kind."},
	{"json", KV_OPTION_BOOL, "false", NULL, NULL, NULL, 0, AT(json), "Print the figures as one JSON object."},
	{"timeline", KV_OPTION_PATH, "", NULL, NULL, NULL, 0, AT(timeline),
	 "File for a trace of a step that ui.perfetto.dev shows."},
};
#undef AT

/* Kinds of steps, measured in turn. */
typedef enum kind { SEQ, DBO, SEQ_APART, DBO_APART, KINDS } kind_t;

typedef struct measured {
	uint64_t step_ns; /* from the first phase's begin to the last one's end */
	uint64_t phase_ns[KVE_PHASES];
	kve_clock_result_t result;
} measured_t;

typedef struct run {
	const values_t *values;
	const setup_t *setup;
	kve_group_t *group;
	uint32_t blocks; /* of a sequence */
	uint32_t kinds;  /* DBO needs ranks */
} run_t;

typedef struct worker {
	const run_t *run;
	kve_rank_t *rank;
	kve_cache_t cache;
	kve_span_t spans[KVE_MAX_SPANS];
	uint32_t *tokens, *ids;
	kve_clock_interval_t *intervals, *kept; /* of the last measured step; of kind DBO, or SEQ without it */
	measured_t *measured;                   /* [rounds][KINDS] */
	kv_status_t status;
	pthread_t thread;
} worker_t;

/* ---- a rank ------------------------------------------------------------------------------------ */

static kv_status_t prepare(worker_t *w, uint32_t number)
{
	const values_t *v = w->run->values;
	const uint32_t sequences = (uint32_t)v->sequences, each = (uint32_t)(v->tokens / v->sequences),
		       blocks = w->run->blocks, vocab = w->run->setup->model.vocab;
	uint32_t n;
	kv_status_t status = kve_rank_create(w->run->group, number, &w->rank);

	if (status == KV_OK) {
		status = kve_rank_open_cache(w->rank, sequences * blocks, 1, &w->cache);
	}
	if (status != KV_OK) {
		return status;
	}
	(void)kve_rank_items(w->rank, KVE_OVERLAP_DBO, &n);
	w->tokens = calloc(v->tokens, sizeof *w->tokens);
	w->ids = calloc((size_t)sequences * blocks, sizeof *w->ids);
	w->intervals = calloc(n, sizeof *w->intervals);
	w->kept = calloc(n, sizeof *w->kept);
	w->measured = calloc(v->rounds * KINDS, sizeof *w->measured);
	if (!w->tokens || !w->ids || !w->intervals || !w->kept || !w->measured) {
		return KV_ERR_NOMEM;
	}
	for (uint64_t t = 0; t < v->tokens; t++) { /* routing is the model's: tokens that differ */
		w->tokens[t] = (uint32_t)((t * 2654435761u + (uint64_t)number * 40503u) % vocab);
	}
	status = kve_cache_take(&w->cache, sequences * blocks, w->ids);
	for (uint32_t s = 0; s < sequences; s++) {
		w->spans[s] = (kve_span_t){w->tokens + (size_t)s * each, each, (uint32_t)v->context,
					   w->ids + (size_t)s * blocks,  NULL, NULL};
	}

	return status;
}

static void clean_up(worker_t *w)
{
	kve_rank_close_cache(w->rank, &w->cache);
	kve_rank_destroy(w->rank);
	free(w->tokens);
	free(w->ids);
	free(w->intervals);
	free(w->kept);
	free(w->measured);
}

static void sum_phases(const kve_overlap_item_t *items, uint32_t n, const kve_clock_interval_t *intervals,
		       uint64_t *sums)
{
	memset(sums, 0, KVE_PHASES * sizeof *sums);
	for (uint32_t i = 0; i < n; i++) {
		sums[items[i].phase] += intervals[i].end - intervals[i].start;
	}
}

static kv_status_t run_step(worker_t *w, kind_t kind, measured_t *measured)
{
	const values_t *v = w->run->values;
	const int dbo = kind == DBO || kind == DBO_APART;
	const kve_step_count_t own = {.count = {.tokens = (uint32_t)v->tokens}};
	const kve_overlap_mode_t mode = dbo ? KVE_OVERLAP_DBO : KVE_OVERLAP_SEQ;
	const kve_dbo_step_t cut = {.mode = mode, .most = (uint32_t)v->tokens, .split = (uint32_t)v->tokens / 2};
	kv_status_t status = kve_rank_set_trace(w->rank, kind == SEQ || kind == DBO ? KVE_TRACE_RUN : KVE_TRACE_APART);
	kve_step_t step;
	uint32_t n;

	if (status == KV_OK) {
		status = kve_rank_agree(w->rank, &own, &step); /* all begin together */
	}
	if (status == KV_OK) {
		status = kve_rank_forward(w->rank, &w->cache, w->spans, (uint32_t)v->sequences, &cut);
	}
	if (status == KV_OK) {
		status = kve_rank_read_trace(w->rank, w->intervals);
	}
	if (status == KV_OK) {
		const kve_overlap_item_t *items = kve_rank_items(w->rank, mode, &n);

		kve_clock_measure(items, n, w->intervals, &measured->result);
		measured->step_ns = measured->result.makespan;
		sum_phases(items, n, w->intervals, measured->phase_ns);
		if (kind == DBO || (kind == SEQ && w->run->kinds == 1)) {
			memcpy(w->kept, w->intervals, n * sizeof *w->kept);
		}
	}

	return status;
}

/* Each kind once. */
static void run_round(worker_t *w, measured_t *measured)
{
	for (uint32_t k = 0; k < KINDS && w->status == KV_OK; k++) {
		if (w->run->kinds == KINDS || k == SEQ || k == SEQ_APART) {
			w->status = run_step(w, (kind_t)k, &measured[k]);
		}
	}
}

static void *run_rank(void *arg)
{
	worker_t *w = arg;
	measured_t warm[KINDS];

	run_round(w, warm);
	for (uint64_t r = 0; r < w->run->values->rounds && w->status == KV_OK; r++) {
		run_round(w, &w->measured[r * KINDS]);
	}

	return NULL;
}

/* ---- what it comes to -------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
	const double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static double median(double *values, uint64_t n)
{
	qsort(values, n, sizeof *values, by_value);

	return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

/* Figures of a step; PHASE + p is of phase p. */
enum { STEP, COMPUTE, TRANSPORT, HIDDEN, PHASE };

static double read_figure(const measured_t *m, uint32_t figure)
{
	switch (figure) {
	case STEP:
		return (double)m->step_ns;
	case COMPUTE:
		return (double)m->result.compute;
	case TRANSPORT:
		return (double)m->result.transport;
	case HIDDEN:
		return kve_clock_hidden_share(&m->result) * 1e3;
	default:
		return (double)m->phase_ns[figure - PHASE];
	}
}

/* Microseconds, or for HIDDEN a share: the median over rounds of the slowest rank's. */
static double middle(const worker_t *workers, const run_t *run, kind_t kind, uint32_t figure)
{
	const uint64_t rounds = run->values->rounds;
	double *values = calloc(rounds, sizeof *values), result = 0;

	for (uint64_t r = 0; values && r < rounds; r++) {
		for (uint32_t w = 0; w < run->setup->ranks; w++) {
			const double value = read_figure(&workers[w].measured[r * KINDS + kind], figure) / 1e3;

			values[r] = value > values[r] || w == 0 ? value : values[r];
		}
	}
	if (values) {
		result = median(values, rounds);
	}
	free(values);

	return result;
}

/* Microseconds a step. */
typedef struct figures {
	double step, compute, transport; /* phases each alone */
	double phases[KVE_PHASES];       /* each alone */
	double busy;                     /* compute's phases as they run */
	double hidden;                   /* share of the transport */
} figures_t;

static figures_t read_figures(const worker_t *workers, const run_t *run, kind_t kind)
{
	const kind_t apart = kind + SEQ_APART;
	figures_t f = {
		.step = middle(workers, run, kind, STEP),
		.compute = middle(workers, run, apart, COMPUTE),
		.transport = middle(workers, run, apart, TRANSPORT),
		.busy = middle(workers, run, kind, COMPUTE),
		.hidden = middle(workers, run, kind, HIDDEN),
	};

	for (uint32_t p = 0; p < KVE_PHASES; p++) {
		f.phases[p] = middle(workers, run, apart, PHASE + p);
	}

	return f;
}

static void print_row(const char *name, const figures_t *f, uint32_t layers)
{
	static const char *const names[KVE_PHASES] = {"QKV",     "attention",    "dispatch send", "dispatch recv",
						      "experts", "combine send", "shared",        "combine recv"};

	printf("%-17s %9.1f us a step, %7.1f a layer; phases alone: compute %.1f, transport %.1f:", name, f->step,
	       f->step / layers, f->compute, f->transport);
	for (uint32_t p = 0; p < KVE_PHASES; p++) {
		printf("%s %s %.1f", p ? "," : "", names[p], f->phases[p]);
	}
	printf("\n");
}

static void print_json(const run_t *run, const figures_t *seq, const figures_t *dbo)
{
	const values_t *v = run->values;

	printf("{\"ranks\":%u,\"gpus\":%" PRIu64 ",\"link\":%d,\"layers\":%u,\"tokens\":%" PRIu64
	       ",\"context\":%" PRIu64 ",\"seq_us\":%.1f,\"seq_compute_us\":%.1f,\"seq_transport_us\":%.1f",
	       run->setup->ranks, v->setup.gpus, v->setup.link, run->setup->model.layers, v->tokens, v->context,
	       seq->step, seq->compute, seq->transport);
	if (dbo) {
		printf(",\"dbo_us\":%.1f,\"dbo_compute_us\":%.1f,\"dbo_transport_us\":%.1f,\"dbo_busy_us\":%.1f,\"hidden\":%.4f",
		       dbo->step, dbo->compute, dbo->transport, dbo->busy, dbo->hidden);
	}
	printf("}\n");
}

static void print_results(const worker_t *workers, const run_t *run)
{
	const int cut = run->kinds == KINDS;
	const figures_t seq = read_figures(workers, run, SEQ);
	const figures_t dbo = cut ? read_figures(workers, run, DBO) : seq;
	const double bound = dbo.compute > dbo.transport ? dbo.compute : dbo.transport;

	if (run->values->json) {
		print_json(run, &seq, cut ? &dbo : NULL);
		return;
	}
	print_row("one batch", &seq, run->setup->model.layers);
	if (cut) {
		print_row("two microbatches", &dbo, run->setup->model.layers);
		printf("two microbatches: %.3f x, bound %.3f x, overlap efficiency %.3f, %.1f %% of the transport under "
		       "compute, whose phases then run at %.3f of their speed alone\n",
		       seq.step / dbo.step, seq.step / bound, (seq.step - dbo.step) / (seq.step - bound),
		       100 * dbo.hidden, dbo.compute / dbo.busy);
	}
}

static int show_timeline(const worker_t *worker, const run_t *run)
{
	const kve_overlap_mode_t mode = run->kinds == KINDS ? KVE_OVERLAP_DBO : KVE_OVERLAP_SEQ;
	uint32_t n;
	const kve_overlap_item_t *items = kve_rank_items(worker->rank, mode, &n);
	const timeline_t timeline = {items, worker->kept, n};

	for (uint32_t i = 0; i < n; i++) {
		worker->kept[i].start /= 1000;
		worker->kept[i].end /= 1000;
	}
	if (!run->values->json) {
		timeline_print(&timeline, stdout);
	}

	return run->values->timeline[0] ? timeline_write(&timeline, run->values->timeline) : 0;
}

/* ---- the command ------------------------------------------------------------------------------- */

static kv_status_t run_workers(worker_t *workers, const run_t *run)
{
	kv_status_t status = KV_OK;

	kv_assert(run->setup->ranks > 0);
	for (uint32_t r = 0; r < run->setup->ranks; r++) {
		workers[r].run = run;
	}
	if (!run->values->json) { /* before it is taken */
		setup_print_memory(run->group, (uint32_t)run->values->sequences * run->blocks);
	}
	for (uint32_t r = 0; r < run->setup->ranks && status == KV_OK; r++) {
		status = prepare(&workers[r], r);
	}
	if (status != KV_OK) {
		return status;
	}
	for (uint32_t r = 1; r < run->setup->ranks; r++) {
		if (pthread_create(&workers[r].thread, NULL, run_rank, &workers[r]) != 0) {
			exit(EXIT_MEMORY); /* ranks that run wait for it */
		}
	}
	(void)run_rank(&workers[0]);
	for (uint32_t r = 0; r < run->setup->ranks; r++) {
		if (r > 0) {
			(void)pthread_join(workers[r].thread, NULL);
		}
		status = status == KV_OK ? workers[r].status : status;
	}

	return status;
}

static int measure(const values_t *values, const setup_t *setup)
{
	const uint32_t end = (uint32_t)(values->context + values->tokens / values->sequences);
	const kve_group_config_t config = {.model = &setup->model,
					   .ranks = setup->ranks,
					   .devices = setup->devices,
					   .max_rows = (uint32_t)values->tokens};
	run_t run = {.values = values,
		     .setup = setup,
		     .blocks = (end + setup->model.block_tokens - 1) / setup->model.block_tokens,
		     .kinds = setup->ranks > 1 ? KINDS : 1};
	worker_t *workers = calloc(setup->ranks, sizeof *workers);
	kv_status_t status = workers ? kve_group_create(&config, &run.group) : KV_ERR_NOMEM;
	int rc = 0;

	if (status == KV_OK) {
		status = run_workers(workers, &run);
	}
	if (status == KV_OK) {
		print_results(workers, &run);
		rc = show_timeline(&workers[0], &run);
	} else {
		rc = setup_fail("bench", &values->setup, status);
	}
	for (uint32_t r = 0; workers && r < setup->ranks; r++) {
		clean_up(&workers[r]);
	}
	kve_group_destroy(run.group);
	free(workers);

	return rc;
}

static int run_bench(const void *given)
{
	const values_t *values = given;
	setup_t setup;
	int rc = 0;

	if (values->tokens % values->sequences != 0) {
		return fail("%s", "--tokens is not a multiple of --sequences");
	}
	rc = setup_open(&setup, &values->setup);
	if (rc == 0 && values->context + values->tokens / values->sequences > setup.model.max_tokens) {
		rc = fail("%s", "--context and --tokens are more than the model's longest sequence");
	}
	if (rc == 0) {
		rc = measure(values, &setup);
	}
	setup_close(&setup);

	return rc;
}

static const char *const required[] = {NULL};

const command_t command_bench = {
	.name = "bench",
	.about = "a step of each rank, as one batch and as two microbatches",
	.usage = "[--config FILE] [--device cpu|gpu] [--data-parallel-size N] [--tokens N] ...",
	.table = {rows, KV_COUNT_OF(rows), "KVE_"},
	.required = required,
	.value_bytes = sizeof(values_t),
	.run = run_bench,
};
