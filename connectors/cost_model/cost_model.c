/* Measured times, and the decisions that follow from them. */
#include "cost_model/cost_model.h"

#include <string.h>

#define MEMORY_BYTES 4.0 /* a nanosecond: guessed until it was measured */
#define DISK_BYTES   1.0
#define MIN_SAMPLES  3u /* measurements of a tier before it is known */
#define AGE_NS       UINT64_C(300000000000)
#define FULL_STEP    512u /* tokens of a step whose fixed part is small compared to theirs */
#define STOP_RATIO   0.9  /* of what it saves, a load may take */
#define RESUME_RATIO 0.8
#define TELLING      8.0 /* a load tells of its tier if more than this part of its time went there */

void kvx_cost_model_init(kvx_cost_model_t *model, uint32_t block_tokens, uint64_t token_bytes)
{
	memset(model, 0, sizeof *model);
	model->block_tokens = block_tokens ? block_tokens : 1u;
	model->token_bytes = token_bytes ? token_bytes : 1u;
	model->cpu.guess = MEMORY_BYTES;
	model->disk.guess = DISK_BYTES;
	model->cpu.fit.age_ns = AGE_NS;
	model->disk.fit.age_ns = AGE_NS;
}

/* ---- what is known --------------------------------------------------------------------------- */

/* The fitted time, or the time measured near this length if that is longer: short loads hidden in a step say nothing
 * about long ones. */
static double tier_ns(const kvx_cost_model_t *model, const kvx_cost_tier_t *tier, uint32_t tokens)
{
	double fitted, near;

	if (tokens == 0 || tier->fit.count == 0) {
		return (double)model->token_bytes * tokens / tier->guess;
	}
	fitted = tier->fit.a + tier->fit.b * tokens;
	near = kvx_fit_nearest(&tier->fit, tokens);

	return fitted > near ? fitted : near;
}

void kvx_cost_model_add_load(kvx_cost_model_t *model, uint32_t cpu, uint32_t disk, uint64_t ns, uint64_t now_ns)
{
	kvx_cost_tier_t *tier = disk ? &model->disk : &model->cpu;
	kvx_fit_sample_t sample = {.n = disk ? disk : cpu, .ns = (double)ns, .at_ns = now_ns};

	sample.ns -= disk ? tier_ns(model, &model->cpu, cpu) : 0;
	if (sample.ns * TELLING > (double)ns) {
		kvx_fit_add(&tier->fit, &sample);
		tier->sampled_ns = now_ns;
	}
}

void kvx_step_work_add(kvx_step_work_t *work, uint32_t before, uint32_t tokens)
{
	work->tokens += tokens;
	work->square += (double)tokens * (2.0 * before + tokens);
}

void kvx_cost_model_add_step(kvx_cost_model_t *model, const kvx_step_work_t *work, uint64_t ns)
{
	kvx_fit_add(&model->prefill, &(kvx_fit_sample_t){.n = work->tokens, .q = work->square, .ns = (double)ns});
}

uint64_t kvx_cost_model_load_ns(const kvx_cost_model_t *model, uint32_t cpu, uint32_t disk)
{
	return (uint64_t)(tier_ns(model, &model->cpu, cpu) + tier_ns(model, &model->disk, disk)) + 1u;
}

static double compute_ns(const kvx_cost_model_t *model, uint32_t before, uint32_t tokens)
{
	kvx_step_work_t work = {0};

	kvx_step_work_add(&work, before, tokens);

	return model->prefill.b * work.tokens + model->prefill.c * work.square;
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

uint64_t kvx_cost_model_compute_ns(const kvx_cost_model_t *model, uint32_t before, uint32_t tokens)
{
	return computing_is_known(model, tokens) ? (uint64_t)compute_ns(model, before, tokens) + 1u : 0;
}

uint64_t kvx_cost_model_step_ns(const kvx_cost_model_t *model, const kvx_step_work_t *work)
{
	const kvx_fit_t *fit = &model->prefill;
	const double ns = fit->a + fit->b * work->tokens + fit->c * work->square;

	return computing_is_known(model, work->tokens) ? (uint64_t)ns + 1u : 0;
}

/* ---- what follows ---------------------------------------------------------------------------- */

/* A part of a hit: what loading it takes, and what it saves. */
typedef struct kvx_cost_part {
	kvx_cost_tier_t *tier;
	uint32_t tokens;
	double load, saves;
} kvx_cost_part_t;

/* Choose for one part. A tier that was not measured often enough is sampled at each lookup. */
static kvx_cost_choice_t judge_part(kvx_cost_model_t *model, const kvx_cost_part_t *part, uint64_t now,
				    kvx_cost_decision_t *answer)
{
	kvx_cost_tier_t *tier = part->tier;
	const uint32_t blocks = part->tokens / model->block_tokens;
	const uint32_t length = 31u - (uint32_t)__builtin_clz(blocks | 1u);
	const int stopped = (tier->stopped >> length & 1u) != 0;
	const int pays = part->load < (stopped ? RESUME_RATIO : STOP_RATIO) * part->saves;

	if (tier->fit.count < MIN_SAMPLES) {
		return pays ? KVX_LOAD : KVX_LOAD_SAMPLE;
	}
	if (pays == stopped) {
		tier->stopped ^= 1u << length;
		answer->state_changed = stopped ? -1 : 1;
		answer->from = model->block_tokens << length;
		answer->on_disk = tier == &model->disk;
		answer->load_ns = (uint64_t)part->load;
		answer->compute_ns = (uint64_t)part->saves;
	}
	if (pays) {
		return KVX_LOAD;
	}

	tier->asked++;
	if (tier->asked < KVX_COST_SAMPLE_EVERY && now - tier->sampled_ns < KVX_COST_SAMPLE_NS) {
		return KVX_RECOMPUTE;
	}
	tier->asked = 0;
	tier->sampled_ns = now;

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
	const uint32_t most = q->grain ? subtract(q->disk, subtract(min_step_tokens(hit), rest)) : q->disk;
	const double load = tier_ns(model, &model->disk, most);

	answer->cpu = q->cpu;
	if (q->grain) {
		answer->disk = tokens_within(q, most, load, KVX_COST_EXPLORE_NS);
	} else if (model->explored++ % 2u == 0 && load <= KVX_COST_EXPLORE_NS) {
		answer->disk = most;
	}
	answer->choice = answer->cpu + answer->disk ? KVX_LOAD : KVX_RECOMPUTE;
}

/* Tokens of a sample: it takes a small share of the computing that is done anyway. */
static uint32_t sample_tokens(const kvx_cost_model_t *model, const kvx_cost_query_t *q, const kvx_cost_part_t *part)
{
	const uint32_t left = subtract(q->total, q->local), hit = q->cpu + q->disk;

	return tokens_within(q, part->tokens, part->load,
			     compute_ns(model, q->local, left > hit ? left : hit) / KVX_COST_SAMPLE_SHARE);
}

void kvx_cost_model_decide(kvx_cost_model_t *model, const kvx_cost_query_t *q, kvx_cost_decision_t *answer)
{
	const kvx_cost_part_t head = {&model->cpu, q->cpu, tier_ns(model, &model->cpu, q->cpu),
				      compute_ns(model, q->local, q->cpu)};
	kvx_cost_part_t tail = {&model->disk, q->disk, tier_ns(model, &model->disk, q->disk),
				compute_ns(model, q->local + q->cpu, q->disk)};
	kvx_cost_choice_t choice = KVX_LOAD;

	*answer = (kvx_cost_decision_t){.choice = KVX_RECOMPUTE};
	if (!computing_is_known(model, q->cpu + q->disk)) {
		explore(model, q, answer);
		return;
	}
	if (q->cpu && model->cpu.fit.count >= MIN_SAMPLES) {
		choice = judge_part(model, &head, q->now_ns, answer);
	}
	if (choice == KVX_LOAD_SAMPLE) {
		answer->cpu = sample_tokens(model, q, &head);
		answer->choice = answer->cpu ? KVX_LOAD_SAMPLE : KVX_RECOMPUTE;
		return;
	}
	if (choice == KVX_LOAD && q->cpu) {
		answer->cpu = q->cpu;
		answer->choice = KVX_LOAD;
	} else if (choice == KVX_RECOMPUTE) { /* the tail may make up for the head */
		tail.load += head.load;
		tail.saves += head.saves;
	}
	if (q->disk == 0) {
		return;
	}

	choice = judge_part(model, &tail, q->now_ns, answer);
	if (choice == KVX_LOAD) {
		answer->cpu = q->cpu;
		answer->disk = q->disk;
		answer->choice = KVX_LOAD;
	} else if (choice == KVX_LOAD_SAMPLE && answer->cpu == q->cpu) {
		answer->disk = sample_tokens(model, q, &tail);
		answer->choice = answer->disk ? KVX_LOAD_SAMPLE : answer->choice;
	}
}
