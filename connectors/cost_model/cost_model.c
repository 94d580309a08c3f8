/* Measured times, and the decisions that follow from them. */
#include "cost_model/cost_model.h"

#include <string.h>

#define MEMORY_BYTES 4.0 /* a nanosecond: guessed until it was measured */
#define DISK_BYTES   1.0
#define FULL_STEP    512u /* tokens of a step whose fixed part is small compared to theirs */
#define STOP_RATIO   0.9  /* of what it saves, a load may take */
#define RESUME_RATIO 0.8

void kvx_cost_model_init(kvx_cost_model_t *model, uint32_t block_tokens, uint64_t token_bytes)
{
	memset(model, 0, sizeof *model);
	model->block_tokens = block_tokens ? block_tokens : 1u;
	model->token_bytes = token_bytes ? token_bytes : 1u;
	model->cpu.age_ns = KVX_COST_AGE_NS;
	model->disk.age_ns = KVX_COST_AGE_NS;
}

/* ---- what is known --------------------------------------------------------------------------- */

/* The fitted time, or the time measured near this length if that is longer: short loads hidden in a step say nothing
 * about long ones. */
static double tier_ns(kvx_cost_model_t *model, kvx_fit_t *tier, uint32_t tokens, double guess)
{
	double fitted, near;

	if (tokens == 0 || tier->known == 0) {
		return (double)model->token_bytes * tokens / guess;
	}
	fitted = kvx_fit_total(tier, tokens, 0);
	near = kvx_fit_nearest(tier, tokens);

	return fitted > near ? fitted : near;
}

static double memory_ns(kvx_cost_model_t *model, uint32_t tokens)
{
	return tier_ns(model, &model->cpu, tokens, MEMORY_BYTES);
}

static double disk_ns(kvx_cost_model_t *model, uint32_t tokens)
{
	return tier_ns(model, &model->disk, tokens, DISK_BYTES);
}

void kvx_cost_model_add_load(kvx_cost_model_t *model, const kvx_load_sample_t *load)
{
	kvx_fit_sample_t sample = {.n = load->cpu, .ns = (double)load->ns, .at_ns = load->now_ns};

	if (load->ns == 0) {
		return; /* not timed */
	}
	if (load->disk == 0) {
		kvx_fit_add(&model->cpu, &sample);
		return;
	}
	sample.n = load->disk;
	sample.ns -= memory_ns(model, load->cpu);
	sample.ns = sample.ns > 1 ? sample.ns : 1;
	kvx_fit_add(&model->disk, &sample);
}

void kvx_step_work_add(kvx_step_work_t *work, uint32_t before, uint32_t tokens)
{
	work->tokens += tokens;
	work->square += (double)tokens * (2.0 * before + tokens);
}

void kvx_cost_model_add_step(kvx_cost_model_t *model, const kvx_step_work_t *work, uint64_t ns)
{
	const kvx_fit_sample_t sample = {.n = work->tokens, .q = work->square, .ns = (double)ns};

	kvx_fit_add(&model->prefill, &sample);
}

uint64_t kvx_cost_model_load_ns(kvx_cost_model_t *model, uint32_t cpu, uint32_t disk)
{
	return (uint64_t)(memory_ns(model, cpu) + disk_ns(model, disk)) + 1u;
}

static double compute_ns(kvx_cost_model_t *model, uint32_t before, uint32_t tokens)
{
	kvx_step_work_t work = {0};

	kvx_step_work_add(&work, before, tokens);

	return kvx_fit_marginal(&model->prefill, work.tokens, work.square);
}

/* Tokens that one step must have computed before the cost of `tokens` is known: the time of a smaller step is mostly
 * its fixed part. */
static uint32_t min_step_tokens(uint32_t tokens)
{
	return tokens / 2u < FULL_STEP ? tokens / 2u : FULL_STEP;
}

static int computing_is_known(const kvx_cost_model_t *model, uint32_t tokens)
{
	return model->prefill.most > 0 && model->prefill.most >= min_step_tokens(tokens);
}

uint64_t kvx_cost_model_compute_ns(kvx_cost_model_t *model, uint32_t before, uint32_t tokens)
{
	return computing_is_known(model, tokens) ? (uint64_t)compute_ns(model, before, tokens) + 1u : 0;
}

uint64_t kvx_cost_model_step_ns(kvx_cost_model_t *model, const kvx_step_work_t *work)
{
	return computing_is_known(model, work->tokens)
		       ? (uint64_t)kvx_fit_total(&model->prefill, work->tokens, work->square) + 1u
		       : 0;
}

/* ---- what follows ---------------------------------------------------------------------------- */

static uint32_t bucket_of(const kvx_cost_model_t *model, uint32_t tokens)
{
	const uint32_t blocks = tokens / model->block_tokens;
	const uint32_t bucket = blocks > 1u ? 31u - (uint32_t)__builtin_clz(blocks) : 0;

	return bucket < KVX_COST_BUCKETS ? bucket : KVX_COST_BUCKETS - 1u;
}

/* A part of a hit: what loading it takes, and what it saves. */
typedef struct kvx_cost_part {
	kvx_cost_hysteresis_t *hysteresis;
	uint32_t tokens;
	double load, saves;
	int known; /* measured often enough; else a sample of it is loaded at each lookup */
	int on_disk;
} kvx_cost_part_t;

static void record_change(kvx_cost_model_t *model, const kvx_cost_part_t *part, int state_changed,
			  kvx_cost_decision_t *answer)
{
	if (answer->state_changed) {
		return;
	}
	answer->state_changed = state_changed;
	answer->from = model->block_tokens << bucket_of(model, part->tokens);
	answer->on_disk = part->on_disk;
	answer->load_ns = (uint64_t)part->load;
	answer->compute_ns = (uint64_t)part->saves;
}

/* Choose for one part. A stopped part is sampled every KVX_COST_SAMPLE_EVERY lookups, or after KVX_COST_SAMPLE_NS. */
static kvx_cost_choice_t judge_part(kvx_cost_model_t *model, const kvx_cost_part_t *part, uint64_t now,
				    kvx_cost_decision_t *answer)
{
	kvx_cost_hysteresis_t *hysteresis = part->hysteresis;
	const int pays = part->load < (hysteresis->stopped ? RESUME_RATIO : STOP_RATIO) * part->saves;

	if (!part->known) {
		return pays ? KVX_LOAD : KVX_LOAD_SAMPLE;
	}
	if (pays) {
		if (hysteresis->stopped) {
			record_change(model, part, -1, answer);
		}
		hysteresis->stopped = 0;
		return KVX_LOAD;
	}
	if (!hysteresis->stopped) {
		record_change(model, part, 1, answer);
		*hysteresis = (kvx_cost_hysteresis_t){.stopped = 1, .sampled_ns = now};
	}

	hysteresis->asked++;
	if (hysteresis->asked < KVX_COST_SAMPLE_EVERY && now - hysteresis->sampled_ns < KVX_COST_SAMPLE_NS) {
		return KVX_RECOMPUTE;
	}
	hysteresis->asked = 0;
	hysteresis->sampled_ns = now;

	return KVX_LOAD_SAMPLE;
}

static uint32_t subtract(uint32_t a, uint32_t b)
{
	return a > b ? a - b : 0;
}

/* The most tokens of `most` that load within ns, if all of them take `load`. */
static uint32_t tokens_within(const kvx_cost_query_t *q, uint32_t most, double load, double ns)
{
	const double tokens = load > 0 ? most * (ns / load) : 0;
	const uint32_t fit = tokens < most ? (uint32_t)tokens : most;

	return q->grain ? fit / q->grain * q->grain : 0;
}

/* The cost of computing is not known yet (docs/decisions/015). Memory is loaded, and of disk what the exploration
 * budget covers. Enough tokens are left to be computed that the next decision needs no exploration; of hits that may
 * not be cut, every other one is computed. */
static void explore(kvx_cost_model_t *model, const kvx_cost_query_t *q, kvx_cost_decision_t *answer)
{
	const uint32_t hit = q->cpu + q->disk, rest = subtract(q->total, q->local + hit);
	const uint32_t most = subtract(q->disk, subtract(min_step_tokens(hit), rest));

	answer->cpu = q->cpu;
	if (q->grain) {
		answer->disk = tokens_within(q, most, disk_ns(model, most), KVX_COST_EXPLORE_NS);
	} else {
		answer->disk =
			model->explored++ % 2u == 0 && disk_ns(model, q->disk) <= KVX_COST_EXPLORE_NS ? q->disk : 0;
	}
	answer->choice = answer->cpu + answer->disk ? KVX_LOAD : KVX_RECOMPUTE;
}

/* Tokens of a sample: it takes a small share of the computing that is done anyway. */
static uint32_t sample_tokens(kvx_cost_model_t *model, const kvx_cost_query_t *q, const kvx_cost_part_t *part)
{
	const uint32_t left = subtract(q->total, q->local);
	const double all = compute_ns(model, q->local, left > q->cpu + q->disk ? left : q->cpu + q->disk);

	return tokens_within(q, part->tokens, part->load, all / KVX_COST_SAMPLE_SHARE);
}

static void decide_parts(kvx_cost_model_t *model, const kvx_cost_query_t *q, kvx_cost_decision_t *answer)
{
	const kvx_cost_part_t head = {
		.hysteresis = &model->head[bucket_of(model, q->cpu)],
		.tokens = q->cpu,
		.load = memory_ns(model, q->cpu),
		.saves = compute_ns(model, q->local, q->cpu),
		.known = model->cpu.known >= KVX_COST_MIN_SAMPLES,
	};
	kvx_cost_part_t tail = {
		.hysteresis = &model->tail[bucket_of(model, q->disk)],
		.tokens = q->disk,
		.load = disk_ns(model, q->disk),
		.saves = compute_ns(model, q->local + q->cpu, q->disk),
		.known = model->disk.known >= KVX_COST_MIN_SAMPLES,
		.on_disk = 1,
	};
	kvx_cost_choice_t choice = KVX_LOAD;

	*answer = (kvx_cost_decision_t){.choice = KVX_RECOMPUTE};
	if (!computing_is_known(model, q->cpu + q->disk)) {
		explore(model, q, answer);
		return;
	}
	if (q->cpu && head.known) {
		choice = judge_part(model, &head, q->now_ns, answer);
	}
	if (choice != KVX_LOAD) { /* the tail may make up for the head */
		tail.load += head.load;
		tail.saves += head.saves;
	}
	if (choice == KVX_LOAD_SAMPLE) {
		answer->cpu = sample_tokens(model, q, &head);
		answer->choice = answer->cpu ? KVX_LOAD_SAMPLE : KVX_RECOMPUTE;
		return;
	}
	if (choice == KVX_LOAD && q->cpu) {
		answer->cpu = q->cpu;
		answer->choice = KVX_LOAD;
	}
	if (q->disk == 0) {
		return;
	}

	switch (judge_part(model, &tail, q->now_ns, answer)) {
	case KVX_LOAD:
		answer->cpu = q->cpu;
		answer->disk = q->disk;
		answer->choice = KVX_LOAD;
		break;
	case KVX_LOAD_SAMPLE:
		answer->disk = answer->cpu == q->cpu ? sample_tokens(model, q, &tail) : 0;
		answer->choice = answer->disk ? KVX_LOAD_SAMPLE : answer->choice;
		break;
	case KVX_RECOMPUTE:
		break;
	}
}

void kvx_cost_model_decide(kvx_cost_model_t *model, const kvx_cost_query_t *q, kvx_cost_decision_t *answer)
{
	kvx_cost_memo_t *memo = &model->memos[q->request % KVX_COST_MEMOS];

	if (memo->request == q->request && memo->local == q->local && memo->cpu == q->cpu && memo->disk == q->disk &&
	    memo->ns && q->now_ns - memo->ns < KVX_COST_MEMO_NS) {
		*answer = memo->answer;
		answer->state_changed = 0;
		answer->repeated = 1;
		return;
	}
	decide_parts(model, q, answer);
	*memo = (kvx_cost_memo_t){q->request, q->now_ns, q->local, q->cpu, q->disk, *answer};
}
