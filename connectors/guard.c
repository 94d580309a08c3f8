/* Measured times, and what follows from them. */
#include "guard.h"

#include <string.h>

#define PIECE 1024u /* tokens a sample is scaled to */

void kvx_guard_init(kvx_guard_t *guard, uint32_t block_tokens)
{
	memset(guard, 0, sizeof *guard);
	guard->block_tokens = block_tokens ? block_tokens : 1u;
}

static uint32_t bucket_of(const kvx_guard_t *guard, uint32_t tokens)
{
	const uint32_t blocks = tokens / guard->block_tokens;
	const uint32_t bucket = blocks > 1u ? 31u - (uint32_t)__builtin_clz(blocks) : 0;

	return bucket < KVX_GUARD_BUCKETS ? bucket : KVX_GUARD_BUCKETS - 1u;
}

static void learn(const kvx_guard_t *guard, kvx_guard_line_t *line, uint32_t tokens, uint64_t ns)
{
	kvx_guard_cell_t *cell = &line->cell[bucket_of(guard, tokens)];
	uint64_t sorted[KVX_GUARD_SAMPLES] = {0};
	uint32_t n = 0;

	/* Over 100 s is a machine that slept, and no time of ours. */
	if (tokens == 0 || ns == 0 || ns > UINT64_C(100000000000)) {
		return;
	}
	cell->sample[cell->at] = ns * PIECE / tokens + 1u;
	cell->at = (cell->at + 1u) % KVX_GUARD_SAMPLES;
	cell->count += cell->count < KVX_GUARD_SAMPLES;

	for (uint32_t i = 0; i < cell->count; i++) {
		uint32_t at = n++;

		while (at > 0 && sorted[at - 1] > cell->sample[i]) {
			sorted[at] = sorted[at - 1];
			at--;
		}
		sorted[at] = cell->sample[i];
	}
	cell->median = sorted[n / 2];
}

/* The cell of that length, or the nearest that knows something, the longer first. NULL: none does. */
static const kvx_guard_cell_t *nearest(const kvx_guard_line_t *line, uint32_t bucket)
{
	for (uint32_t d = 0; d < KVX_GUARD_BUCKETS; d++) {
		if (bucket + d < KVX_GUARD_BUCKETS && line->cell[bucket + d].count) {
			return &line->cell[bucket + d];
		}
		if (d <= bucket && line->cell[bucket - d].count) {
			return &line->cell[bucket - d];
		}
	}

	return NULL;
}

static uint64_t cost(const kvx_guard_t *guard, const kvx_guard_line_t *line, uint32_t tokens)
{
	const kvx_guard_cell_t *cell = tokens ? nearest(line, bucket_of(guard, tokens)) : NULL;

	return cell ? cell->median * tokens / PIECE + 1u : 0;
}

void kvx_guard_loaded(kvx_guard_t *guard, uint32_t cpu, uint32_t disk, uint64_t ns)
{
	uint64_t memory;

	if (disk == 0) {
		learn(guard, &guard->cpu, cpu, ns);
		return;
	}
	memory = cost(guard, &guard->cpu, cpu);
	learn(guard, &guard->disk, disk, ns > memory ? ns - memory : 1u);
}

void kvx_guard_computed(kvx_guard_t *guard, uint32_t tokens, uint64_t ns)
{
	learn(guard, &guard->prefill, tokens, ns);
}

uint64_t kvx_guard_load_ns(const kvx_guard_t *guard, uint32_t cpu, uint32_t disk)
{
	const uint64_t memory = cost(guard, &guard->cpu, cpu), storage = cost(guard, &guard->disk, disk);

	return (cpu && !memory) || (disk && !storage) ? 0 : memory + storage;
}

uint64_t kvx_guard_compute_ns(const kvx_guard_t *guard, uint32_t tokens)
{
	return cost(guard, &guard->prefill, tokens);
}

/* Enough measured at the very length to stop it? */
static int is_sure(const kvx_guard_t *guard, const kvx_guard_line_t *line, uint32_t tokens)
{
	return tokens && line->cell[bucket_of(guard, tokens)].count >= KVX_GUARD_LEAST;
}

/* What to do about a length, when loading and computing take so long (0: unknown). */
static kvx_guard_verdict_t judge(kvx_guard_stop_t *stop, uint64_t now, uint64_t load, uint64_t compute, int *p_turned)
{
	*p_turned = 0;
	if (!load || !compute) {
		return stop->stopped ? KVX_GUARD_NO : KVX_GUARD_PAYS;
	}
	if (!stop->stopped && load > compute + compute / 10u) {
		*p_turned = 1;
		*stop = (kvx_guard_stop_t){.stopped = 1, .probe_ns = now};
	} else if (stop->stopped && load + load / 10u < compute) {
		*p_turned = -1;
		stop->stopped = 0;
	}
	if (!stop->stopped) {
		return KVX_GUARD_PAYS;
	}

	stop->asked++;
	if (stop->asked < KVX_GUARD_EVERY && now - stop->probe_ns < KVX_GUARD_PROBE_NS) {
		return KVX_GUARD_NO;
	}
	stop->asked = 0;
	stop->probe_ns = now;

	return KVX_GUARD_PROBE;
}

static void decide(kvx_guard_t *guard, const kvx_guard_question_t *q, kvx_guard_answer_t *answer)
{
	const uint32_t whole = bucket_of(guard, q->cpu + q->disk), tail = bucket_of(guard, q->disk);
	kvx_guard_verdict_t of_tail = KVX_GUARD_PAYS;
	uint64_t load;
	int ignored, sure;

	*answer = (kvx_guard_answer_t){.verdict = KVX_GUARD_PAYS};
	if (q->disk && q->cpu) {
		load = is_sure(guard, &guard->disk, q->disk) || guard->tail[tail].stopped
			       ? cost(guard, &guard->disk, q->disk)
			       : 0;
		of_tail = judge(&guard->tail[tail], q->now_ns, load, kvx_guard_compute_ns(guard, q->disk), &ignored);
		answer->cut = of_tail == KVX_GUARD_NO;
	}

	sure = (answer->cut || !q->disk ? is_sure(guard, &guard->cpu, q->cpu)
					: is_sure(guard, &guard->disk, q->disk)) ||
	       guard->whole[whole].stopped;
	load = sure ? kvx_guard_load_ns(guard, q->cpu, answer->cut ? 0 : q->disk) : 0;
	answer->verdict = judge(&guard->whole[whole], q->now_ns, load,
				kvx_guard_compute_ns(guard, q->cpu + (answer->cut ? 0 : q->disk)), &answer->turned);
	answer->from = guard->block_tokens << whole;
	if (answer->verdict == KVX_GUARD_PAYS && of_tail == KVX_GUARD_PROBE) {
		answer->verdict = KVX_GUARD_PROBE;
	}
}

void kvx_guard_ask(kvx_guard_t *guard, const kvx_guard_question_t *question, kvx_guard_answer_t *answer)
{
	kvx_guard_said_t *said = &guard->said[question->who % KVX_GUARD_MEMORY];

	if (said->who == question->who && said->cpu == question->cpu && said->disk == question->disk && said->ns &&
	    question->now_ns - said->ns < KVX_GUARD_SAME_NS) {
		*answer = said->answer;
		answer->turned = 0;
		answer->again = 1;
		return;
	}
	decide(guard, question, answer);
	*said = (kvx_guard_said_t){question->who, question->now_ns, question->cpu, question->disk, *answer};
}
