/* What steps and loads take, as the ranks report it, and what the scheduling half makes of that: which steps are timed,
 * how long plans wait, what of a hit is loaded. Built with the part's sources. */
#include "connectors/scheduler/sched_rig.h"
#include "engine/check.h"
#include "kv_test.h"
#include "scheduler/scheduler.h"
#include "scheduler/step_time.h"

#include <signal.h>
#include <unistd.h>

#define MS UINT64_C(1000000)

static uint32_t waits; /* times somebody slept for an answer of the daemon */

kvc_status_t __real_kvc_poll_us(kvc_t *kvc, uint32_t timeout_us);
kvc_status_t __wrap_kvc_poll_us(kvc_t *kvc, uint32_t timeout_us);
kvc_status_t __wrap_kvc_poll_us(kvc_t *kvc, uint32_t timeout_us)
{
	waits += timeout_us > 0;

	return __real_kvc_poll_us(kvc, timeout_us);
}

/* Without a daemon: the cost model and its steps need none. */
static void start_alone(void)
{
	sr_start(&(sr_options_t){.foreign = 1, .cost_model = 1, .alone = 1});
}

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

static void p7_steps_that_compute_prompts_are_timed(void **state)
{
	const kvx_ask_t unknown = {.struct_size = sizeof unknown, .id = "r", .id_len = 1, .tokens = 100};
	const uint64_t mean = 10u * MS - 10u * MS / 8u + 20u * MS / 8u;
	uint32_t step, first, timed = 0;

	(void)state;
	start_alone();
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
	sr_abandon();
}

static void p7_ranks_learn_what_a_step_computes(void **state)
{
	uint32_t asked = 0;

	(void)state;
	start_alone();
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
	sr_abandon();
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

static void p7_a_message_waits_for_little_of_its_step(void **state)
{
	(void)state;
	start_alone();
	sr.scheduler->wait_us = 500;
	sr.scheduler->wait_asked = 0;
	assert_int_equal(max_wait_ns(1, 1000), 500000); /* nothing is known */
	teach_step(1000, 10u * MS);
	assert_in_range(max_wait_ns(1, 1000), 75000, 80000);
	assert_int_equal(max_wait_ns(8, 1000), 500000);
	assert_int_equal(max_wait_ns(100, 1), 0);
	sr.scheduler->wait_asked = 1;
	assert_int_equal(max_wait_ns(1, 1000), 500000);
	sr_abandon();
}

/* Requests that generate fill a block now and then: no plan waits for that, and the block is saved all the same. */
static void p7_a_step_that_generates_waits_for_no_answer(void **state)
{
	static sr_request_t request;
	uint32_t saved = 0, early = 0;

	(void)state;
	sr_start(&(sr_options_t){.foreign = 1});
	sr_request(&request, "g", 3, 0, 160);
	sr_place(&request, 0, 0);
	sr_compute(&request, 0, 20);
	sr_advance(&request, 80, 80);
	(void)sr_step();
	assert_int_equal(sr.plan.save_blocks, 10);
	waits = 0;
	for (uint32_t computed = 81; computed <= 160; computed++) {
		sr_advance(&request, computed, 1);
		(void)sr_step();
		saved += sr.plan.save_blocks;
		early += sr.plan.early;
	}
	for (uint32_t i = 0; i < 1000 && saved < 10; i++) { /* an idle engine goes on while something is pending */
		(void)kvx_scheduler_has_pending(sr.scheduler);
		(void)sr_step();
		saved += sr.plan.save_blocks;
		early += sr.plan.early;
		usleep(100);
	}
	assert_int_equal(waits, 0);
	assert_int_equal(saved, 10);
	assert_true(early > 0);
	assert_int_equal(sr_stats().late_answers, 0);
	sr_stop();
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

static void restart(void)
{
	rig_wait_written(&sr.rig);
	rig_stop(&sr.rig); /* what is on disk is committed, too */
	rig_start(&sr.rig);
	sr_wait_ready();
}

/* n tokens are stored, on disk alone. */
static void start_stored(uint32_t n)
{
	static sr_request_t request;

	sr_start(&(sr_options_t){.foreign = 1, .cost_model = 1, .mode = KVX_LOAD_SYNC});
	sr_store(&request, "first", 0, 0, n);
	sr_finish(&request);
	restart();
}

/* A prompt of 1,000 tokens is looked up, whose first `local` tokens the engine has: what is loaded. */
static uint32_t loaded_of(const char *id, uint32_t local)
{
	static sr_request_t request;
	uint32_t tokens;

	sr_request(&request, id, 0, 0, 1000);
	request.ask.local = local;
	tokens = sr_match(&request);
	assert_int_equal(sr.hit.stored, 1000 - SR_UNIT);
	assert_int_equal(sr.hit.disk_tokens, 0);
	assert_int_equal(sr.hit.declined, tokens == 0);
	assert_int_equal(sr_match(&request), tokens); /* again: the same answer, counted once */
	sr_finish(&request);

	return tokens;
}

static void p7_a_part_that_does_not_pay_is_not_loaded(void **state)
{
	static sr_request_t head;

	(void)state;
	start_stored(1000);
	teach(20, 2, 50);
	assert_int_equal(loaded_of("all on disk", 0), 0);
	assert_int_equal(sr_stats().cost_model_stops, 1);
	teach(20, 2, 5); /* a faster disk: the first half is loaded, and is in memory from then on */
	sr_request(&head, "head", 0, 0, 504);
	assert_int_equal(sr_run(&head, 0), 496);
	sr_finish(&head);
	sr_settle();
	teach(20, 2, 50);
	assert_int_equal(loaded_of("half in memory", 0), 496);
	assert_int_equal(sr_stats().cost_model_cuts, 1);
	assert_int_equal(loaded_of("engine has it", 496), 0);
	teach(1, 2, 50); /* neither does memory */
	assert_int_equal(loaded_of("nothing pays", 0), 0);
	assert_int_equal(sr_stats().cost_model_cuts, 1);
	sr_stop();
}

/* A prompt of 1,000 tokens is stored that others find. */
static void start_first(sr_request_t *request)
{
	sr_start(&(sr_options_t){.foreign = 1});
	sr_store(request, "first", 0, 0, 1000);
	sr_finish(request);
}

static void finish_all(const sr_request_t *requests, uint32_t count)
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

static void p7_synchronous_loads_of_a_step_have_a_common_limit(void **state)
{
	static sr_request_t requests[4];

	(void)state;
	start_first(&requests[0]);
	for (uint32_t round = 0; round < 4; round++) {
		const uint32_t busy = round % 2;

		teach(1000, 10, 10);
		sr.scheduler->step_ns = 15u * MS;
		for (uint32_t i = 0; i < 4; i++) { /* two of them in 25 ms, one during a step of 15 */
			assert_int_equal(goes_beside(&requests[i], 4 * round + i, busy), i >= (busy ? 1u : 2u));
		}
		(void)sr_step();
		finish_all(requests, 4);
	}
	sr_stop();
}

/* It has the answers of a step when it has planned, and begun, the next one: a load inside that would hold them up; and
 * an asynchronous one would be overtaken. */
static void p7_an_engine_planning_ahead_has_one_synchronous_load(void **state)
{
	static sr_request_t requests[3];

	(void)state;
	start_first(&requests[0]);
	for (uint32_t round = 0; round < 6; round++) {
		const int large = round % 2 != 0;

		teach(1000, large ? 30 : 10, 30);
		assert_false(goes_beside(&requests[0], 3 * round, 0)); /* nobody waits: however long */
		sr.ahead = 1;
		(void)sr_step();
		assert_int_equal(goes_beside(&requests[1], 3 * round + 1, 0), large);
		kvx_scheduler_take_report(sr.scheduler, sr.report.data, sr.report.len);
		teach(1000, large ? 30 : 10, 30); /* the stand-in is faster */
		assert_int_equal(goes_beside(&requests[2], 3 * round + 2, 0), large);
		sr.ahead = 0;
		finish_all(requests, 3);
	}
	sr_stop();
}

/* Nothing is known of the disk, and its guess does not pay: a piece is loaded, which is measured. */
static void p7_a_disk_is_sampled_by_a_piece(void **state)
{
	static sr_request_t request;
	kvx_step_work_t work = {0};
	uint32_t loaded;

	(void)state;
	start_stored(2000);
	kvx_cost_model_init(&sr.scheduler->cost_model, SR_UNIT, 1000);
	kvx_step_work_add(&work, 0, 1000);
	kvx_cost_model_add_step(&sr.scheduler->cost_model, &work,
				UINT64_C(900000)); /* 0.9 us a token, 1 us to load it */
	sr_request(&request, "piece", 0, 0, 2000);
	loaded = sr_run(&request, 0);
	assert_in_range(loaded, SR_UNIT, 2000 * 9 / 10 / KVX_COST_SAMPLE_SHARE);
	assert_int_equal(sr_stats().cost_model_samples, 1);
	assert_int_equal(sr.scheduler->cost_model.disk.fit.count, 1);
	sr_stop();
}

/* The number of the step that was to be timed and computes these tokens. */
static uint32_t timed_of(uint32_t tokens)
{
	for (uint32_t i = 0; i < KVX_TIMED_STEPS; i++) {
		if (sr.scheduler->timed[i].asked && sr.scheduler->timed[i].work.tokens == tokens) {
			return sr.scheduler->timed[i].step;
		}
	}
	fail_msg("no step of %u tokens is timed", (unsigned)tokens);

	return 0;
}

/* Engine and daemon were restarted, and all that is asked for is on disk: the first hit leaves enough to be computed,
 * and its step tells. */
static void p7_the_first_hit_on_a_disk_teaches_the_compute_cost(void **state)
{
	static sr_request_t request;
	kvx_cost_model_t *cost_model;
	uint32_t loaded;

	(void)state;
	start_stored(2000);
	cost_model = &sr.scheduler->cost_model;
	kvx_cost_model_init(cost_model, SR_UNIT, 100000); /* 0.1 ms a token, at the guess */
	sr_request(&request, "bet", 0, 0, 2000);
	loaded = sr_run(&request, 0);
	assert_int_equal(loaded, 2000 - 512);
	assert_int_equal(kvx_cost_model_compute_ns(cost_model, 0, 2000), 0);
	tell_step(timed_of(512), 51200u * MS);
	assert_in_range(kvx_cost_model_compute_ns(cost_model, 0, 512), 51100u * MS, 51300u * MS);
	sr_finish(&request);
	sr_settle();
	sr_request(&request, "known", 0, 0, 2000);
	assert_int_equal(sr_run(&request, 0), 2000 - SR_UNIT);
	sr_stop();
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

static void p7_after_a_late_answer_waits_are_shorter_until_one_is_early(void **state)
{
	static sr_request_t a, b, c, d;

	(void)state;
	sr_start(&(sr_options_t){.foreign = 1, .silence = "10s", .wait_us = 1}); /* slow, and not dead */
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
	sr_stop();
}

SR_MAIN(cmocka_unit_test(p7_steps_that_compute_prompts_are_timed),
	cmocka_unit_test(p7_ranks_learn_what_a_step_computes),
	cmocka_unit_test(p7_a_message_waits_for_little_of_its_step),
	cmocka_unit_test(p7_a_step_that_generates_waits_for_no_answer),
	cmocka_unit_test(p7_a_part_that_does_not_pay_is_not_loaded),
	cmocka_unit_test(p7_synchronous_loads_of_a_step_have_a_common_limit),
	cmocka_unit_test(p7_an_engine_planning_ahead_has_one_synchronous_load),
	cmocka_unit_test(p7_after_a_late_answer_waits_are_shorter_until_one_is_early),
	cmocka_unit_test(p7_a_disk_is_sampled_by_a_piece),
	cmocka_unit_test(p7_the_first_hit_on_a_disk_teaches_the_compute_cost))
