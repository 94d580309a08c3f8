/* Where a request is computed. */
#include "decide.h"

#include <float.h>

#define PATIENCE 4 /* of a prompt in the queue, in its own work */

double kvp_prefill_ns(const kvp_costs_t *costs, uint32_t tokens, uint32_t hit)
{
	double all = tokens, there = hit < tokens ? hit : tokens;

	return costs->fixed_ns + costs->token_ns * (all - there) + costs->pair_ns * (all * all - there * there);
}

double kvp_queue_rank(double queued_ns, double work_ns)
{
	return queued_ns + PATIENCE * work_ns;
}

static double load_ns(const kvp_costs_t *costs, const kvp_engine_load_t *engine)
{
	return costs->transfer_ns * (double)(engine->own < engine->hit ? engine->hit - engine->own : 0);
}

static double transfer_ns(const kvp_costs_t *costs, uint32_t tokens, uint32_t hit)
{
	return costs->handover_ns + costs->transfer_ns * (double)(hit < tokens ? tokens - hit : 0);
}

/* Index of the decode engine with the least cost, or decode_n. */
static uint32_t choose_decode(const kvp_scene_t *scene, uint32_t tokens)
{
	uint32_t best = scene->decode_n;
	double least = DBL_MAX;

	for (uint32_t i = 0; i < scene->decode_n; i++) {
		const kvp_engine_load_t *engine = &scene->decode[i];
		double cost = engine->backlog_ns + engine->running * scene->costs.running_ns +
			      kvp_prefill_ns(&scene->costs, tokens, engine->hit) + load_ns(&scene->costs, engine);

		if (engine->usable && cost * engine->slowness < least) {
			least = cost * engine->slowness;
			best = i;
		}
	}

	return best;
}

/* Chunks of a prompt wait for the tokens of the others there. */
static double local_ns(const kvp_costs_t *costs, const kvp_engine_load_t *engine, double prefill_ns)
{
	return costs->fixed_ns + (engine->backlog_ns + prefill_ns - costs->fixed_ns) * costs->local_factor;
}

typedef struct best_prefill {
	uint32_t usable, with_room; /* engines */
	uint32_t index;             /* of the best one with room */
	double total_ns, wait_ns;   /* of that one */
	double least_wait_ns;       /* of all usable ones */
} best_prefill_t;

static best_prefill_t choose_prefill(const kvp_scene_t *scene, uint32_t tokens, uint32_t decode_hit)
{
	best_prefill_t best = {.total_ns = DBL_MAX, .least_wait_ns = DBL_MAX};

	for (uint32_t i = 0; i < scene->prefill_n; i++) {
		const kvp_engine_load_t *engine = &scene->prefill[i];
		double wait = engine->backlog_ns * engine->slowness;
		double total = wait + kvp_prefill_ns(&scene->costs, tokens, engine->hit) * engine->slowness +
			       transfer_ns(&scene->costs, tokens, decode_hit);

		if (!engine->usable) {
			continue;
		}
		best.usable++;
		best.least_wait_ns = wait < best.least_wait_ns ? wait : best.least_wait_ns;
		if (engine->running == 0 || (engine->running < scene->max_running && wait < scene->ahead_ns)) {
			best.with_room++;
			if (total < best.total_ns) {
				best.total_ns = total;
				best.wait_ns = wait;
				best.index = i;
			}
		}
	}

	return best;
}

void kvp_decide(const kvp_scene_t *scene, const kvp_question_t *question, kvp_choice_t *choice)
{
	const uint32_t decode = choose_decode(scene, question->tokens);
	const kvp_engine_load_t *engine = &scene->decode[decode];
	best_prefill_t best;
	double wait, handover_ns;

	*choice = (kvp_choice_t){.verdict = KVP_NO_DECODE, .decode = decode};
	if (decode == scene->decode_n) {
		return;
	}
	choice->prefill_ns = kvp_prefill_ns(&scene->costs, question->tokens, engine->hit);
	best = choose_prefill(scene, question->tokens, engine->hit);
	wait = question->waited_ns + (best.with_room ? best.wait_ns : best.least_wait_ns) +
	       (best.usable ? scene->queue_ns / best.usable : 0);
	handover_ns = wait + choice->prefill_ns + transfer_ns(&scene->costs, question->tokens, engine->hit);
	if (question->whole) {
		choice->verdict = KVP_LOCAL_WHOLE;
	} else if (best.usable == 0) {
		choice->verdict = KVP_LOCAL_NO_PREFILL;
	} else if (choice->prefill_ns <= kvp_prefill_ns(&scene->costs, scene->thresholds.min_tokens, 0) &&
		   local_ns(&scene->costs, engine, choice->prefill_ns) <= handover_ns) {
		choice->verdict = KVP_LOCAL_SHORT;
	} else if (wait > scene->thresholds.max_wait_ns) {
		choice->verdict = KVP_LOCAL_WAIT;
	} else if (best.with_room == 0 || scene->queue_ns > 0) {
		choice->verdict = KVP_QUEUE;
	} else {
		choice->verdict = KVP_HANDOVER;
		choice->prefill = best.index;
		choice->prefill_ns = kvp_prefill_ns(&scene->costs, question->tokens, scene->prefill[best.index].hit);
	}
}
