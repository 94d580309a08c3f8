/* What steps take: the ranks are asked to time them, and the cost model learns from their reports. A message waits for
 * answers only a small part of its step, and the ranks learn what a step computes while they copy.
 *
 * An engine may plan a step before the last has ended, so only a rank knows when a step begins and ends
 * (worker/jobs/report.c). Steps that load or compute more than single tokens are timed, of the others one in SELDOM. Of
 * a step that loads, the part after its loads is timed, unless they come layer by layer (docs/decisions/015). */
#include "scheduler/step_time.h"

#define SELDOM    16u
#define SMOOTHING 8u
#define PART      128u /* part of a step's time that its message may wait */

/* More than single tokens of requests that generate. */
static int is_prefill(const kvx_scheduler_t *scheduler)
{
	return scheduler->longest >= scheduler->unit;
}

void kvx_scheduler_note_step_tokens(kvx_scheduler_t *scheduler, uint32_t computed, uint32_t prefill)
{
	scheduler->longest = prefill > scheduler->longest ? prefill : scheduler->longest;
	kvx_step_work_add(&scheduler->work, computed > prefill ? computed - prefill : 0, prefill);
}

uint64_t kvx_step_time_max_wait_ns(kvx_scheduler_t *scheduler)
{
	const uint64_t most = scheduler->wait_us * UINT64_C(1000);
	uint64_t worth;

	if (!is_prefill(scheduler)) {
		return 0; /* the block that a decoding request fills can be saved a step later */
	}
	if (scheduler->wait_asked) {
		return most;
	}
	worth = kvx_cost_model_step_ns(&scheduler->cost_model, &scheduler->work) / PART;

	return worth && worth < most ? worth : most;
}

/* Expected time of the step: a few tokens take as long as one for each request. */
static uint32_t work_us(kvx_scheduler_t *scheduler)
{
	uint64_t ns = kvx_cost_model_step_ns(&scheduler->cost_model, &scheduler->work);

	ns = ns > scheduler->light_ns ? ns : scheduler->light_ns;

	return ns / 1000u < UINT32_MAX ? (uint32_t)(ns / 1000u) : UINT32_MAX;
}

static void emit_work(kvx_scheduler_t *scheduler)
{
	kvx_msg_work_t *record;

	if ((!is_prefill(scheduler) && !scheduler->sync_loads) || !kvx_message_reserve(scheduler, sizeof *record)) {
		return;
	}
	record = kvx_msg_add_record(&scheduler->message, KVX_RECORD_WORK, sizeof *record);
	record->longest = scheduler->longest;
	record->us = work_us(scheduler);
}

void kvx_step_time_emit(kvx_scheduler_t *scheduler)
{
	const int prefill = is_prefill(scheduler), loads = scheduler->sync_loads > 0;
	kvx_timed_step_t *timed = &scheduler->timed[scheduler->step % KVX_TIMED_STEPS];

	emit_work(scheduler);
	scheduler->untimed++;
	if (scheduler->work.tokens && (prefill || loads || scheduler->untimed >= SELDOM) &&
	    kvx_message_reserve(scheduler, sizeof(kvx_msg_time_t))) {
		(void)kvx_msg_add_record(&scheduler->message, KVX_RECORD_TIME, sizeof(kvx_msg_time_t));
		*timed = (kvx_timed_step_t){.step = scheduler->step,
					    .asked = 1,
					    .prefill = prefill,
					    .loads = loads,
					    .single_request = scheduler->longest == scheduler->work.tokens,
					    .work = scheduler->work};
		scheduler->untimed = 0;
	}
	scheduler->work = (kvx_step_work_t){0};
	scheduler->longest = 0;
	scheduler->sync_loads = 0;
}

static void update_mean(uint64_t *p_mean, uint64_t ns)
{
	*p_mean = *p_mean ? *p_mean - *p_mean / SMOOTHING + ns / SMOOTHING : ns;
}

/* The first report counts: all ranks run the same step. */
void kvx_step_time_take_report(kvx_scheduler_t *scheduler, const kvx_report_step_t *report)
{
	kvx_timed_step_t *timed = &scheduler->timed[report->step % KVX_TIMED_STEPS];

	if (!timed->asked || timed->step != report->step || report->ns == 0) {
		return;
	}
	timed->asked = 0;
	scheduler->stats.cost_model_steps++;
	if (!timed->loads) { /* a hit that leaves little to compute would make steps look short */
		update_mean(&scheduler->step_ns, report->ns);
	}
	if (timed->prefill ||
	    timed->single_request) { /* the time of many decoding requests depends on what they read */
		kvx_cost_model_add_step(&scheduler->cost_model, &timed->work, report->ns);
	}
	if (!timed->prefill) {
		update_mean(&scheduler->light_ns, report->ns);
	}
}
