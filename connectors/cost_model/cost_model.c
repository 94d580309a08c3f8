/* Measured times, and what follows from them. */
#include "cost_model/cost_model.h"

#include <string.h>

#define MEMORY_BYTES 4.0 /* a nanosecond: guessed until it was measured */
#define DISK_BYTES   1.0
#define MUCH         512u /* tokens of a step whose fixed part is small beside them */
#define STOP         0.9  /* of what it saves, a load may take */
#define RESUME       0.8

void kvx_guard_init(kvx_guard_t *guard, uint32_t block_tokens, uint64_t token_bytes)
{
	memset(guard, 0, sizeof *guard);
	guard->block_tokens = block_tokens ? block_tokens : 1u;
	guard->token_bytes = token_bytes ? token_bytes : 1u;
	guard->cpu.age_ns = KVX_GUARD_AGE_NS;
	guard->disk.age_ns = KVX_GUARD_AGE_NS;
}

/* ---- what is known
 * ----------------------------------------------------------------------------------------------------------- */

/* As fitted; where that is less than what was measured near this length, the latter. */
static double tier_ns(kvx_guard_t *guard, kvx_curve_t *tier, uint32_t tokens, double guess)
{
	double fitted, near;

	if (tokens == 0 || tier->known == 0) {
		return (double)guard->token_bytes * tokens / guess;
	}
	fitted = kvx_curve_whole(tier, tokens, 0);
	near = kvx_curve_near(tier, tokens);

	return fitted > near ? fitted : near;
}

static double memory_ns(kvx_guard_t *guard, uint32_t tokens)
{
	return tier_ns(guard, &guard->cpu, tokens, MEMORY_BYTES);
}

static double disk_ns(kvx_guard_t *guard, uint32_t tokens)
{
	return tier_ns(guard, &guard->disk, tokens, DISK_BYTES);
}

void kvx_guard_loaded(kvx_guard_t *guard, const kvx_guard_load_t *load)
{
	kvx_curve_sample_t sample = {.n = load->cpu, .ns = (double)load->ns, .at_ns = load->now_ns};

	if (load->ns == 0) {
		return; /* nobody knows */
	}
	if (load->disk == 0) {
		kvx_curve_learn(&guard->cpu, &sample);
		return;
	}
	sample.n = load->disk;
	sample.ns -= memory_ns(guard, load->cpu);
	sample.ns = sample.ns > 1 ? sample.ns : 1;
	kvx_curve_learn(&guard->disk, &sample);
}

void kvx_guard_work_add(kvx_guard_work_t *work, uint32_t before, uint32_t tokens)
{
	work->tokens += tokens;
	work->square += (double)tokens * (2.0 * before + tokens);
}

void kvx_guard_computed(kvx_guard_t *guard, const kvx_guard_work_t *work, uint64_t ns)
{
	const kvx_curve_sample_t sample = {.n = work->tokens, .q = work->square, .ns = (double)ns};

	kvx_curve_learn(&guard->prefill, &sample);
}

uint64_t kvx_guard_load_ns(kvx_guard_t *guard, uint32_t cpu, uint32_t disk)
{
	return (uint64_t)(memory_ns(guard, cpu) + disk_ns(guard, disk)) + 1u;
}

static double compute_ns(kvx_guard_t *guard, uint32_t before, uint32_t tokens)
{
	kvx_guard_work_t work = {0};

	kvx_guard_work_add(&work, before, tokens);

	return kvx_curve_share(&guard->prefill, work.tokens, work.square);
}

/* So many have to have been computed in one step before it is known what computing `tokens` adds to one: of fewer, most
 * of the time may be the step's own. */
static uint32_t enough(uint32_t tokens)
{
	return tokens / 2u < MUCH ? tokens / 2u : MUCH;
}

static int computing_is_known(const kvx_guard_t *guard, uint32_t tokens)
{
	return guard->prefill.most > 0 && guard->prefill.most >= enough(tokens);
}

uint64_t kvx_guard_compute_ns(kvx_guard_t *guard, uint32_t before, uint32_t tokens)
{
	return computing_is_known(guard, tokens) ? (uint64_t)compute_ns(guard, before, tokens) + 1u : 0;
}

uint64_t kvx_guard_step_ns(kvx_guard_t *guard, const kvx_guard_work_t *work)
{
	return computing_is_known(guard, work->tokens)
		       ? (uint64_t)kvx_curve_whole(&guard->prefill, work->tokens, work->square) + 1u
		       : 0;
}

/* ---- what follows
 * ------------------------------------------------------------------------------------------------------------ */

static uint32_t bucket_of(const kvx_guard_t *guard, uint32_t tokens)
{
	const uint32_t blocks = tokens / guard->block_tokens;
	const uint32_t bucket = blocks > 1u ? 31u - (uint32_t)__builtin_clz(blocks) : 0;

	return bucket < KVX_GUARD_BUCKETS ? bucket : KVX_GUARD_BUCKETS - 1u;
}

/* A part of a hit: what loading it takes and saves. */
typedef struct kvx_guard_part {
	kvx_guard_stop_t *stop;
	uint32_t tokens;
	double load, saves;
	int known; /* measured often enough; else a piece of it is loaded whenever it is asked for */
	int of_disk;
} kvx_guard_part_t;

static void turn(kvx_guard_t *guard, const kvx_guard_part_t *part, int turned, kvx_guard_answer_t *answer)
{
	if (answer->turned) {
		return;
	}
	answer->turned = turned;
	answer->from = guard->block_tokens << bucket_of(guard, part->tokens);
	answer->of_disk = part->of_disk;
	answer->load_ns = (uint64_t)part->load;
	answer->compute_ns = (uint64_t)part->saves;
}

/* Does the part pay? When it has been stopped before, is it time to see again? */
static kvx_guard_verdict_t judge(kvx_guard_t *guard, const kvx_guard_part_t *part, uint64_t now,
				 kvx_guard_answer_t *answer)
{
	kvx_guard_stop_t *stop = part->stop;
	const int pays = part->load < (stop->stopped ? RESUME : STOP) * part->saves;

	if (!part->known) {
		return pays ? KVX_GUARD_PAYS : KVX_GUARD_PROBE;
	}
	if (pays) {
		if (stop->stopped) {
			turn(guard, part, -1, answer);
		}
		stop->stopped = 0;
		return KVX_GUARD_PAYS;
	}
	if (!stop->stopped) {
		turn(guard, part, 1, answer);
		*stop = (kvx_guard_stop_t){.stopped = 1, .probe_ns = now};
	}

	stop->asked++;
	if (stop->asked < KVX_GUARD_EVERY && now - stop->probe_ns < KVX_GUARD_PROBE_NS) {
		return KVX_GUARD_NO;
	}
	stop->asked = 0;
	stop->probe_ns = now;

	return KVX_GUARD_PROBE;
}

static uint32_t minus(uint32_t a, uint32_t b)
{
	return a > b ? a - b : 0;
}

/* The most tokens of `most` that take so long; a part at its guess is slower than a line through it. */
static uint32_t piece(const kvx_guard_question_t *q, uint32_t most, double load, double ns)
{
	const double tokens = load > 0 ? most * (ns / load) : 0;
	const uint32_t fit = tokens < most ? (uint32_t)tokens : most;

	return q->grain ? fit / q->grain * q->grain : 0;
}

/* Too little was computed yet: memory is loaded, of disk what is worth a bet. Enough is left to be computed that the
 * next one needs no bet; where a hit may not be cut, every other one is left. */
static void bet(kvx_guard_t *guard, const kvx_guard_question_t *q, kvx_guard_answer_t *answer)
{
	const uint32_t hit = q->cpu + q->disk, rest = minus(q->total, q->local + hit);
	const uint32_t most = minus(q->disk, minus(enough(hit), rest));

	answer->cpu = q->cpu;
	if (q->grain) {
		answer->disk = piece(q, most, disk_ns(guard, most), KVX_GUARD_BET_NS);
	} else {
		answer->disk = guard->bets++ % 2u == 0 && disk_ns(guard, q->disk) <= KVX_GUARD_BET_NS ? q->disk : 0;
	}
	answer->verdict = answer->cpu + answer->disk ? KVX_GUARD_PAYS : KVX_GUARD_NO;
}

/* Which part of a probe's tokens is loaded. */
static uint32_t probe(kvx_guard_t *guard, const kvx_guard_question_t *q, const kvx_guard_part_t *part)
{
	const uint32_t left = minus(q->total, q->local);
	const double all = compute_ns(guard, q->local, left > q->cpu + q->disk ? left : q->cpu + q->disk);

	return piece(q, part->tokens, part->load, all / KVX_GUARD_SHARE);
}

static void decide(kvx_guard_t *guard, const kvx_guard_question_t *q, kvx_guard_answer_t *answer)
{
	const kvx_guard_part_t head = {
		.stop = &guard->whole[bucket_of(guard, q->cpu)],
		.tokens = q->cpu,
		.load = memory_ns(guard, q->cpu),
		.saves = compute_ns(guard, q->local, q->cpu),
		.known = guard->cpu.known >= KVX_GUARD_LEAST,
	};
	kvx_guard_part_t tail = {
		.stop = &guard->tail[bucket_of(guard, q->disk)],
		.tokens = q->disk,
		.load = disk_ns(guard, q->disk),
		.saves = compute_ns(guard, q->local + q->cpu, q->disk),
		.known = guard->disk.known >= KVX_GUARD_LEAST,
		.of_disk = 1,
	};
	kvx_guard_verdict_t verdict = KVX_GUARD_PAYS;

	*answer = (kvx_guard_answer_t){.verdict = KVX_GUARD_NO};
	if (!computing_is_known(guard, q->cpu + q->disk)) {
		bet(guard, q, answer);
		return;
	}
	if (q->cpu && head.known) {
		verdict = judge(guard, &head, q->now_ns, answer);
	}
	if (verdict != KVX_GUARD_PAYS) { /* what follows may make up for it */
		tail.load += head.load;
		tail.saves += head.saves;
	}
	if (verdict == KVX_GUARD_PROBE) {
		answer->cpu = probe(guard, q, &head);
		answer->verdict = answer->cpu ? KVX_GUARD_PROBE : KVX_GUARD_NO;
		return;
	}
	if (verdict == KVX_GUARD_PAYS && q->cpu) {
		answer->cpu = q->cpu;
		answer->verdict = KVX_GUARD_PAYS;
	}
	if (q->disk == 0) {
		return;
	}

	switch (judge(guard, &tail, q->now_ns, answer)) {
	case KVX_GUARD_PAYS:
		answer->cpu = q->cpu;
		answer->disk = q->disk;
		answer->verdict = KVX_GUARD_PAYS;
		break;
	case KVX_GUARD_PROBE:
		answer->disk = answer->cpu == q->cpu ? probe(guard, q, &tail) : 0;
		answer->verdict = answer->disk ? KVX_GUARD_PROBE : answer->verdict;
		break;
	case KVX_GUARD_NO:
		break;
	}
}

void kvx_guard_ask(kvx_guard_t *guard, const kvx_guard_question_t *q, kvx_guard_answer_t *answer)
{
	kvx_guard_said_t *said = &guard->said[q->who % KVX_GUARD_MEMORY];

	if (said->who == q->who && said->local == q->local && said->cpu == q->cpu && said->disk == q->disk &&
	    said->ns && q->now_ns - said->ns < KVX_GUARD_SAME_NS) {
		*answer = said->answer;
		answer->turned = 0;
		answer->again = 1;
		return;
	}
	decide(guard, q, answer);
	*said = (kvx_guard_said_t){q->who, q->now_ns, q->local, q->cpu, q->disk, *answer};
}
