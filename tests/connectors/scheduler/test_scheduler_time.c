/* What steps and loads take, as the ranks report it, and what the scheduling half makes of that: which steps are timed,
 * how long plans wait, what of a hit is loaded. */
#include "connectors/scheduler/sched_rig.h"
#include "scheduler/scheduler.h"
#include "scheduler/step_time.h"

#include <signal.h>
#include <unistd.h>

#define MS UINT64_C(1000000)

static const sr_options_t plain, window = {.groups = 2},
				 alone = {.alone = 1, .cost_model = 1}, /* the cost model needs no daemon */
	stored = {.cost_model = 1, .mode = KVX_LOAD_SYNC}, slow = {.silence = "10s", .wait_us = 1}; /* and not dead */

static sr_request_t a, b, c, d, requests[4];

/* The plan of a step that computes `tokens` tokens after others and runs these synchronous loads: 1: it is timed. */
static int plan(uint32_t before, uint32_t tokens, uint32_t loads)
{
	if (tokens) {
		kvx_scheduler_note_step_tokens(sr.scheduler, before + tokens, tokens);
	}
	sr.scheduler->sync_loads = loads;
	sr_plan();

	return sr.plan.timed;
}

/* The same: the time at which the ranks are told that it takes, in microseconds. */
static uint32_t plan_us(uint32_t before, uint32_t tokens, uint32_t loads)
{
	(void)plan(before, tokens, loads);
	assert_int_equal(sr.plan.work.longest, tokens);

	return sr.plan.work.us;
}

static void tell_step(uint32_t step, uint64_t ns)
{
	kvx_report_step_t *record = sr_begin_report(KVX_RECORD_STEP, sizeof *record);

	record->step = step;
	record->ns = ns;
	sr_give_report();
}

/* A step of these tokens took that long. */
static void teach_step(uint32_t tokens, uint64_t ns)
{
	assert_true(plan(0, tokens, 0));
	tell_step(sr.plan.step, ns);
}

SR_CASE(p7_steps_that_compute_prompts_are_timed, alone)
{
	const kvx_ask_t unknown = {.struct_size = sizeof unknown, .id = "r", .id_len = 1, .tokens = 100};
	const uint64_t mean = 10u * MS - 10u * MS / 8u + 20u * MS / 8u;
	uint32_t step, first, timed = 0;

	for (uint32_t i = 0; i < 10; i++) {
		assert_true(plan(0, 100 + i, 0));
	}
	for (uint32_t i = 0; i < 160; i++) { /* requests that generate: now and then */
		timed += (uint32_t)plan(100 + i, 1, 0);
	}
	assert_int_equal(timed, 10);
	assert_false(plan(0, 0, 0));   /* nothing is computed */
	assert_true(plan(1000, 2, 1)); /* what comes after the load */
	assert_false(plan(1000, 2, 0));
	kvx_scheduler_advance(sr.scheduler, &unknown, 100, 100); /* not to be saved */
	assert_true(plan(0, 0, 0));

	/* Plans are steps ahead of what is reported. */
	(void)plan(0, 1000, 0);
	first = sr.plan.step;
	(void)plan(0, 2000, 0);
	step = sr.plan.step;
	assert_int_equal(kvx_cost_model_compute_ns(&sr.scheduler->cost_model, 0, 1000), 0);
	tell_step(first, 10u * MS);
	tell_step(first, 90u * MS); /* the other rank: they go in step */
	tell_step(step, 20u * MS);
	tell_step(step + 1, 20u * MS); /* never asked for */
	tell_step(0, 20u * MS);
	assert_in_range(kvx_cost_model_compute_ns(&sr.scheduler->cost_model, 0, 1000), 99u * MS / 10u, 101u * MS / 10u);
	assert_int_equal(sr_stats().cost_model_steps, 2);
	assert_int_equal(sr_stats().bad_reports, 0);
	assert_int_equal(sr.scheduler->step_ns, mean);

	assert_true(plan(1000, 2, 1));
	tell_step(sr.plan.step, 1u * MS);
	assert_int_equal(sr_stats().cost_model_steps, 3);
	assert_int_equal(sr.scheduler->light_ns, 1u * MS);
	assert_int_equal(sr.scheduler->step_ns, mean);

	/* Too late: the place is another step's by now. */
	assert_true(plan(0, 1000, 0));
	first = sr.plan.step;
	for (uint32_t i = 0; i < KVX_TIMED_STEPS; i++) {
		assert_true(plan(0, 1000, 0));
	}
	tell_step(first, 10u * MS);
	assert_int_equal(sr_stats().cost_model_steps, 3);
}

SR_CASE(p7_ranks_learn_what_a_step_computes, alone)
{
	uint32_t asked = 0;

	(void)plan(100, 1, 0); /* a request that generates */
	assert_int_equal(sr.plan.work.h.type, 0);
	(void)plan(0, 0, 0);
	assert_int_equal(sr.plan.work.h.type, 0);
	assert_int_equal(plan_us(0, 1000, 0), 0); /* not known yet */
	teach_step(1000, 10u * MS);
	assert_in_range(plan_us(0, 2000, 0), 19800, 20200);

	/* Few tokens beside a load take as long as one of each request that generates. */
	while (!plan(100, 1, 0)) {
		assert_true(++asked < 100);
	}
	tell_step(sr.plan.step, 5u * MS);
	assert_in_range(plan_us(1000, 10, 1), 5000, 5100);
	assert_in_range(plan_us(0, 2000, 1), 14800, 15200); /* five are any step's */
}

/* How long the message of a step that computes n times `tokens` tokens may wait. */
static uint64_t max_wait_ns(uint32_t n, uint32_t tokens)
{
	uint64_t ns;

	for (uint32_t i = 0; i < n; i++) {
		kvx_scheduler_note_step_tokens(sr.scheduler, 1000, tokens);
	}
	ns = kvx_step_time_max_wait_ns(sr.scheduler);
	(void)plan(0, 0, 0);

	return ns;
}

SR_CASE(p7_a_message_waits_for_little_of_its_step, alone)
{
	sr.scheduler->wait_us = 500;
	sr.scheduler->wait_asked = 0;
	assert_int_equal(max_wait_ns(1, 1000), 500000); /* nothing is known */
	teach_step(1000, 10u * MS);
	assert_in_range(max_wait_ns(1, 1000), 75000, 80000);
	assert_int_equal(max_wait_ns(8, 1000), 500000);
	assert_int_equal(max_wait_ns(100, 1), 0);
	sr.scheduler->wait_asked = 1;
	assert_int_equal(max_wait_ns(1, 1000), 500000);
}

/* Requests that generate fill a block now and then: no plan waits for that, and the block is saved all the same. */
SR_CASE(p7_a_step_that_generates_waits_for_no_answer, plain)
{
	uint32_t saved = 0, early = 0;

	sr_request(&d, "g", 3, 0, 160);
	sr_place(&d, 0, 0);
	sr_compute(&d, 0, 20);
	sr_advance(&d, 80, 80);
	(void)sr_step();
	assert_int_equal(sr.plan.save_blocks, 10);
	sr.naps = 0;
	for (uint32_t computed = 81; computed <= 160; computed++) {
		sr_advance(&d, computed, 1);
		(void)sr_step();
		saved += sr.plan.save_blocks;
		early += sr.plan.early;
	}
	for (uint32_t i = 0; i < 10000 && saved < 10; i++) { /* an idle engine goes on while something is pending */
		(void)kvx_scheduler_has_pending(sr.scheduler);
		(void)sr_step();
		saved += sr.plan.save_blocks;
		early += sr.plan.early;
		usleep(1000);
	}
	assert_int_equal(sr.naps, 0);
	assert_int_equal(saved, 10);
	assert_true(early > 0);
	assert_int_equal(sr_stats().late_answers, 0);
}

/* ---- what of a hit is loaded ----------------------------------------------------------------- */

/* Microseconds a token. */
static void teach(double compute, double memory, double disk)
{
	kvx_cost_model_t *cost_model = &sr.scheduler->cost_model;
	kvx_step_work_t work = {0};

	kvx_cost_model_init(cost_model, SR_UNIT, sr.scheduler->token_bytes);
	kvx_step_work_add(&work, 0, 1000);
	kvx_cost_model_add_step(cost_model, &work, (uint64_t)(compute * 1e6));
	for (uint32_t i = 0; i < 3; i++) {
		kvx_cost_model_add_load(cost_model, 1000, 0, (uint64_t)(memory * 1e6), 1);
		kvx_cost_model_add_load(cost_model, 0, 1000, (uint64_t)(disk * 1e6), 1);
	}
}

/* n tokens are stored, on disk alone. */
static void store_on_disk(uint32_t n)
{
	sr_store(&a, "first", 0, 0, n);
	sr_finish(&a);
	rig_wait_written(&sr.rig);
	rig_stop(&sr.rig); /* what is on disk is committed, too */
	sr_restart_daemon();
}

/* A prompt of 1,000 tokens is looked up, whose first `local` tokens the engine has: what is loaded. */
static uint32_t loaded_of(const char *id, uint32_t local)
{
	uint32_t tokens;

	sr_request(&d, id, 0, 0, 1000);
	d.ask.local = local;
	tokens = sr_match(&d);
	assert_int_equal(sr.hit.stored, 1000 - SR_UNIT);
	assert_int_equal(sr.hit.disk_tokens, 0);
	assert_int_equal(sr.hit.declined, tokens == 0);
	assert_int_equal(sr_match(&d), tokens); /* again: the same answer, counted once */
	sr_finish(&d);

	return tokens;
}

SR_CASE(p7_a_part_that_does_not_pay_is_not_loaded, stored)
{
	store_on_disk(1000);
	teach(20, 2, 50);
	assert_int_equal(loaded_of("all on disk", 0), 0);
	assert_int_equal(sr_stats().cost_model_stops, 1);
	teach(20, 2, 5); /* a faster disk: the first half is loaded, and is in memory from then on */
	sr_request(&b, "head", 0, 0, 504);
	assert_int_equal(sr_run(&b, 0), 496);
	sr_end(&b);
	teach(20, 2, 50);
	assert_int_equal(loaded_of("half in memory", 0), 496);
	assert_int_equal(sr_stats().cost_model_cuts, 1);
	assert_int_equal(loaded_of("engine has it", 496), 0);
	teach(1, 2, 50); /* neither does memory */
	assert_int_equal(loaded_of("nothing pays", 0), 0);
	assert_int_equal(sr_stats().cost_model_cuts, 1);
}

/* Its beginning is in memory. With a window (row 1) nothing is found there: at that length it has other blocks. */
SR_CASE(p7_a_request_may_be_kept_from_the_disk, plain)
{
	store_on_disk(1000);
	sr_request(&b, "head", 0, 0, 504);
	b.ask.memory_only = 1;
	assert_int_equal(sr_match(&b), 0);
	b.ask.memory_only = 0;
	assert_int_equal(sr_run(&b, 0), 496);
	sr_end(&b);

	sr_request(&d, "all", 0, 0, 1000);
	d.ask.memory_only = 1;
	assert_int_equal(sr_match(&d), sr.row ? 0 : 496);
	assert_int_equal(sr.hit.disk_tokens, 0);
	d.ask.memory_only = 0;
	assert_int_equal(sr_match(&d), 992);
}
SR_ALSO(p7_a_request_may_be_kept_from_the_disk, window, 1)

static void finish_all(uint32_t count)
{
	sr_settle();
	for (uint32_t i = 0; i < count; i++) {
		sr_finish(&requests[i]);
	}
	sr_settle();
}

/* A hit of 992 tokens, ten milliseconds in memory: is it loaded asynchronously? It is admitted to the step at hand.
 */
static int goes_beside(sr_request_t *request, uint32_t number, uint32_t busy)
{
	char id[8];

	(void)snprintf(id, sizeof id, "r%u", (unsigned)number);
	sr_request(request, id, 0, 0, 1000);
	request->ask.busy = busy;
	assert_int_equal(sr_match(request), 1000 - SR_UNIT);
	sr_place(request, number % 4 * 125, 0);
	sr_start_load(request);

	return sr.hit.async;
}

SR_CASE(p7_synchronous_loads_of_a_step_have_a_common_limit, plain)
{
	sr_store(&a, "first", 0, 0, 1000); /* that others find */
	for (uint32_t round = 0; round < 4; round++) {
		const uint32_t busy = round % 2;

		teach(1000, 10, 10);
		sr.scheduler->step_ns = 15u * MS;
		for (uint32_t i = 0; i < 4; i++) { /* two of them in 25 ms, one during a step of 15 */
			assert_int_equal(goes_beside(&requests[i], 4 * round + i, busy), i >= (busy ? 1u : 2u));
		}
		(void)sr_step();
		finish_all(4);
	}
}

/* It has the answers of a step when it has planned, and begun, the next one: a load inside that would hold them up; and
 * an asynchronous one would be overtaken. */
SR_CASE(p7_an_engine_planning_ahead_has_one_synchronous_load, plain)
{
	sr_store(&a, "first", 0, 0, 1000); /* that others find */
	for (uint32_t round = 0; round < 6; round++) {
		const int large = round % 2 != 0;

		teach(1000, large ? 30 : 10, 30);
		assert_false(goes_beside(&requests[0], 3 * round, 0)); /* nobody waits: however long */
		sr.ahead = 1;
		(void)sr_step();
		assert_int_equal(goes_beside(&requests[1], 3 * round + 1, 0), large);
		sr_give_report();
		teach(1000, large ? 30 : 10, 30); /* the stand-in is faster */
		assert_int_equal(goes_beside(&requests[2], 3 * round + 2, 0), large);
		sr.ahead = 0;
		finish_all(3);
	}
}

/* Nothing is known of the disk, and its guess does not pay: a piece is loaded, which is measured. */
SR_CASE(p7_a_disk_is_sampled_by_a_piece, stored)
{
	kvx_step_work_t work = {0};

	store_on_disk(2000);
	kvx_cost_model_init(&sr.scheduler->cost_model, SR_UNIT, 1000);
	kvx_step_work_add(&work, 0, 1000);
	kvx_cost_model_add_step(&sr.scheduler->cost_model, &work,
				UINT64_C(900000)); /* 0.9 us a token, 1 us to load it */
	sr_request(&d, "piece", 0, 0, 2000);
	assert_in_range(sr_run(&d, 0), SR_UNIT, 2000 * 9 / 10 / KVX_COST_SAMPLE_SHARE);
	assert_int_equal(sr_stats().cost_model_samples, 1);
	assert_int_equal(sr.scheduler->cost_model.disk.fit.count, 1);
}

/* Engine and daemon were restarted, and all that is asked for is on disk: the first hit leaves enough to be computed,
 * and its step tells. */
SR_CASE(p7_the_first_hit_on_a_disk_teaches_the_compute_cost, stored)
{
	kvx_cost_model_t *cost_model = &sr.scheduler->cost_model;

	store_on_disk(2000);
	kvx_cost_model_init(cost_model, SR_UNIT, 100000); /* 0.1 ms a token, at the guess */
	sr_request(&d, "bet", 0, 0, 2000);
	assert_int_equal(sr_run(&d, 0), 2000 - 512);
	assert_int_equal(kvx_cost_model_compute_ns(cost_model, 0, 2000), 0);
	assert_true(sr.plan.timed);
	tell_step(sr.plan.step, 51200u * MS);
	assert_in_range(kvx_cost_model_compute_ns(cost_model, 0, 512), 51100u * MS, 51300u * MS);
	sr_end(&d);
	sr_request(&d, "known", 0, 0, 2000);
	assert_int_equal(sr_run(&d, 0), 2000 - SR_UNIT);
}

/* How long the lookup is prepared to wait for its lease. */
static uint64_t patience_of(sr_request_t *request, const char *name)
{
	const kvx_request_t *found;

	sr_request(request, name, 1, 0, 100);
	(void)sr_look_up(request);
	found = kvx_requests_find(&sr.scheduler->requests, request->ask.id, request->ask.id_len);
	assert_non_null(found);
	assert_non_null(found->cached);

	return found->cached->until_ns - found->cached->asked_ns;
}

SR_CASE(p7_after_a_late_answer_waits_are_shorter_until_one_is_early, slow)
{
	sr_store(&a, "a", 1, 0, 80);
	rig_signal(&sr.rig, SIGSTOP);
	assert_int_equal(patience_of(&b, "b"), 100 * MS);
	assert_true(sr.scheduler->lease_late);
	assert_int_equal(patience_of(&c, "c"), 20 * MS);
	assert_true(sr.scheduler->lease_late);
	rig_signal(&sr.rig, SIGCONT);
	SR_UNTIL(sr_look_up(&b) == 80) /* what has come late is there now */
	SR_UNTIL((sr_look_up(&c), !sr.scheduler->lease_late))
	assert_int_equal(patience_of(&d, "d"), 100 * MS);
}

SR_MAIN
