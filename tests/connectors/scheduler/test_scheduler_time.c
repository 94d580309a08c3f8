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
static void open_alone(rig_t *rig, sr_t *sr)
{
	rig_init(rig, sr_program);
	assert_int_equal(sr_open(sr, rig, &(sr_options_t){.foreign = 1, .cost_model = 1, .no_hand = 1}), KVC_OK);
}

static void close_alone(rig_t *rig, sr_t *sr)
{
	sr_close(sr);
	rig_fini(rig);
}

/* A plan, and what it says of its step. */
typedef struct told {
	uint32_t step;
	int timed, worked;
	kvx_msg_work_t work;
} told_t;

static told_t plan(sr_t *sr)
{
	told_t told = {.step = sr->scheduler->step};
	const kvx_record_header_t *record;
	const void *bytes;
	kvx_msg_reader_t cursor;
	size_t len;

	kvx_scheduler_build_message(sr->scheduler, &bytes, &len);
	if (len == 0) {
		return told;
	}
	assert_true(kvx_msg_open(&cursor, KVX_MSG_MAGIC, bytes, len));
	while ((record = kvx_msg_next(&cursor)) != NULL) {
		told.timed |= record->type == KVX_RECORD_TIME;
		if (record->type == KVX_RECORD_WORK) {
			told.work = *(const kvx_msg_work_t *)(const void *)record;
			told.worked++;
		}
	}
	assert_false(cursor.bad);

	return told;
}

/* A step in which a request computes `tokens` tokens after others: was it asked to be timed? Its number. */
static int plan_step(sr_t *sr, uint32_t before, uint32_t tokens, uint32_t *p_step)
{
	const kvx_ask_t ask = {.struct_size = sizeof ask, .id = "r", .id_len = 1, .tokens = before + tokens};
	told_t told;

	if (tokens) {
		kvx_scheduler_advance(sr->scheduler, &ask, before + tokens, tokens);
	}
	told = plan(sr);
	*p_step = told.step;

	return told.timed;
}

static void tell_step(sr_t *sr, uint32_t step, uint64_t ns)
{
	kvx_report_step_t *record;

	kvx_msg_reset(&sr->report, KVX_REPORT_MAGIC);
	record = kvx_msg_add_record(&sr->report, KVX_RECORD_STEP, sizeof *record);
	record->step = step;
	record->ns = ns;
	kvx_msg_finish(&sr->report, step);
	kvx_scheduler_take_report(sr->scheduler, sr->report.data, sr->report.len);
}

static void p7_steps_that_compute_prompts_are_timed(void **state)
{
	uint32_t step, first, timed = 0;
	rig_t rig;
	sr_t sr;

	(void)state;
	open_alone(&rig, &sr);
	for (uint32_t i = 0; i < 10; i++) {
		assert_true(plan_step(&sr, 0, 100 + i, &step));
	}
	for (uint32_t i = 0; i < 160; i++) { /* requests that generate: now and then */
		timed += (uint32_t)plan_step(&sr, 100 + i, 1, &step);
	}
	assert_int_equal(timed, 10);
	assert_false(plan_step(&sr, 0, 0, &step)); /* nothing is computed */
	sr.scheduler->sync_loads = 1;              /* what comes after the load */
	assert_true(plan_step(&sr, 1000, 2, &step));
	assert_false(plan_step(&sr, 1000, 2, &step));
	kvx_scheduler_note_step_tokens(sr.scheduler, 100, 100); /* not to be saved */
	assert_true(plan_step(&sr, 0, 0, &step));

	/* Plans are steps ahead of what is reported. */
	assert_true(plan_step(&sr, 0, 1000, &first));
	assert_true(plan_step(&sr, 0, 2000, &step));
	assert_int_equal(kvx_cost_model_compute_ns(&sr.scheduler->cost_model, 0, 1000), 0);
	tell_step(&sr, first, 10u * MS);
	tell_step(&sr, first, 90u * MS); /* the other rank: they go in step */
	tell_step(&sr, step, 20u * MS);
	tell_step(&sr, step + 1, 20u * MS); /* never asked for */
	tell_step(&sr, 0, 20u * MS);
	assert_in_range(kvx_cost_model_compute_ns(&sr.scheduler->cost_model, 0, 1000), 99u * MS / 10u, 101u * MS / 10u);
	assert_int_equal(sr_stats(&sr).cost_model_steps, 2);
	assert_int_equal(sr_stats(&sr).bad_reports, 0);
	assert_int_equal(sr.scheduler->step_ns, 10u * MS - 10u * MS / 8u + 20u * MS / 8u);

	sr.scheduler->sync_loads = 1;
	assert_true(plan_step(&sr, 1000, 2, &step));
	tell_step(&sr, step, 1u * MS);
	assert_int_equal(sr_stats(&sr).cost_model_steps, 3);
	assert_int_equal(sr.scheduler->light_ns, 1u * MS);
	assert_int_equal(sr.scheduler->step_ns, 10u * MS - 10u * MS / 8u + 20u * MS / 8u);

	/* Too late: the place is another step's by now. */
	assert_true(plan_step(&sr, 0, 1000, &first));
	for (uint32_t i = 0; i < KVX_TIMED_STEPS; i++) {
		assert_true(plan_step(&sr, 0, 1000, &step));
	}
	tell_step(&sr, first, 10u * MS);
	assert_int_equal(sr_stats(&sr).cost_model_steps, 3);
	close_alone(&rig, &sr);
}

/* Of a step that computes these tokens and runs these loads. */
static told_t plan_work(sr_t *sr, uint32_t before, uint32_t tokens, uint32_t loads)
{
	if (tokens) {
		kvx_scheduler_note_step_tokens(sr->scheduler, before + tokens, tokens);
	}
	sr->scheduler->sync_loads = loads;

	return plan(sr);
}

static void p7_ranks_learn_what_a_step_computes(void **state)
{
	uint32_t step;
	told_t told;
	rig_t rig;
	sr_t sr;

	(void)state;
	open_alone(&rig, &sr);
	assert_int_equal(plan_work(&sr, 100, 1, 0).worked, 0); /* a request that generates */
	assert_int_equal(plan_work(&sr, 0, 0, 0).worked, 0);
	told = plan_work(&sr, 0, 1000, 0);
	assert_int_equal(told.worked, 1);
	assert_int_equal(told.work.longest, 1000);
	assert_int_equal(told.work.us, 0); /* not known yet */

	assert_true(plan_step(&sr, 0, 1000, &step));
	tell_step(&sr, step, 10u * MS);
	assert_in_range(plan_work(&sr, 0, 2000, 0).work.us, 19800, 20200);

	/* Few tokens beside a load take as long as one of each request that generates. */
	for (uint32_t i = 0; !plan_step(&sr, 100 + i, 1, &step); i++) {
		assert_true(i < 100);
	}
	tell_step(&sr, step, 5u * MS);
	told = plan_work(&sr, 1000, 10, 1);
	assert_int_equal(told.work.longest, 10);
	assert_in_range(told.work.us, 5000, 5100);
	assert_in_range(plan_work(&sr, 0, 2000, 1).work.us, 14800, 15200); /* five are any step's */
	close_alone(&rig, &sr);
}

static void p7_a_message_waits_for_little_of_its_step(void **state)
{
	uint32_t step;
	rig_t rig;
	sr_t sr;

	(void)state;
	open_alone(&rig, &sr);
	sr.scheduler->wait_us = 500;
	sr.scheduler->wait_asked = 0;
	kvx_scheduler_note_step_tokens(sr.scheduler, 1000, 1000);
	assert_int_equal(kvx_step_time_max_wait_ns(sr.scheduler), 500000); /* nothing is known */
	assert_true(plan_step(&sr, 0, 0, &step));
	tell_step(&sr, step, 10u * MS);
	kvx_scheduler_note_step_tokens(sr.scheduler, 1000, 1000);
	assert_in_range(kvx_step_time_max_wait_ns(sr.scheduler), 75000, 80000);
	sr.scheduler->wait_asked = 1;
	assert_int_equal(kvx_step_time_max_wait_ns(sr.scheduler), 500000);
	sr.scheduler->wait_asked = 0;
	kvx_scheduler_note_step_tokens(sr.scheduler, 8000, 7000);
	assert_in_range(kvx_step_time_max_wait_ns(sr.scheduler), 500000, 500000);
	(void)plan_step(&sr, 0, 0, &step);
	for (uint32_t i = 0; i < 100; i++) {
		kvx_scheduler_note_step_tokens(sr.scheduler, 1000 + i, 1);
	}
	assert_int_equal(kvx_step_time_max_wait_ns(sr.scheduler), 0);
	close_alone(&rig, &sr);
}

/* Requests that generate fill a block now and then: no plan waits for that, and the block is saved all the same. */
static void p7_a_step_that_generates_waits_for_no_answer(void **state)
{
	static sr_request_t request;
	uint32_t saved = 0, early = 0;
	rig_t rig;
	sr_t sr;

	(void)state;
	sr_start(&sr, &rig, &(sr_options_t){.foreign = 1});
	sr_request(&sr, &request, "g", 3, 0, 160);
	sr_place(&sr, &request, 0, 0);
	sr_compute(&sr, &request, 0, 20);
	kvx_scheduler_advance(sr.scheduler, &request.ask, 80, 80);
	(void)sr_step(&sr);
	assert_int_equal(sr.save_blocks, 10);
	waits = 0;
	for (uint32_t computed = 81; computed <= 160; computed++) {
		kvx_scheduler_advance(sr.scheduler, &request.ask, computed, 1);
		(void)sr_step(&sr);
		saved += sr.save_blocks;
		early += sr.early;
	}
	for (uint32_t i = 0; i < 1000 && saved < 10; i++) { /* an idle engine goes on while something is pending */
		(void)kvx_scheduler_has_pending(sr.scheduler);
		(void)sr_step(&sr);
		saved += sr.save_blocks;
		early += sr.early;
		usleep(100);
	}
	assert_int_equal(waits, 0);
	assert_int_equal(saved, 10);
	assert_true(early > 0);
	assert_int_equal(sr_stats(&sr).late_answers, 0);
	kvx_scheduler_finish(sr.scheduler, &request.ask);
	sr_stop(&sr, &rig);
}

/* ---- what of a hit is loaded ----------------------------------------------------------------- */

/* Microseconds a token. */
static void teach(sr_t *sr, double compute, double memory, double disk)
{
	kvx_cost_model_t *cost_model = &sr->scheduler->cost_model;
	kvx_step_work_t work = {0};

	kvx_cost_model_init(cost_model, SR_UNIT, sr->scheduler->token_bytes);
	kvx_step_work_add(&work, 0, 1000);
	kvx_cost_model_add_step(cost_model, &work, (uint64_t)(compute * 1e6));
	for (uint32_t i = 0; i < 3; i++) {
		kvx_cost_model_add_load(cost_model, 1000, 0, (uint64_t)(memory * 1e6), 1);
		kvx_cost_model_add_load(cost_model, 0, 1000, (uint64_t)(disk * 1e6), 1);
	}
}

static void restart(rig_t *rig, sr_t *sr)
{
	rig_wait_written(rig);
	rig_stop(rig); /* what is on disk is committed, too */
	rig_start(rig);
	sr_wait_ready(sr);
}

/* n tokens are stored, on disk alone. */
static void start_stored(rig_t *rig, sr_t *sr, uint32_t n)
{
	static sr_request_t request;

	sr_start(sr, rig, &(sr_options_t){.foreign = 1, .cost_model = 1, .mode = KVX_LOAD_SYNC});
	sr_store(sr, &request, "first", 0, 0, n);
	kvx_scheduler_finish(sr->scheduler, &request.ask);
	restart(rig, sr);
}

static void p7_a_part_that_does_not_pay_is_not_loaded(void **state)
{
	static sr_request_t all, head;
	kvx_hit_t hit;
	rig_t rig;
	sr_t sr;

	(void)state;
	start_stored(&rig, &sr, 1000);

	/* All of it is on disk. */
	teach(&sr, 20, 2, 50);
	sr_request(&sr, &all, "all", 0, 0, 1000);
	sr_match(&sr, &all, &hit);
	assert_int_equal(hit.stored, 1000 - SR_UNIT);
	assert_int_equal(hit.tokens, 0);
	assert_true(hit.declined);
	assert_int_equal(sr_stats(&sr).cost_model_stops, 1);
	kvx_scheduler_finish(sr.scheduler, &all.ask);

	/* A faster disk: the first half is loaded, and is in memory from then on. */
	teach(&sr, 20, 2, 5);
	sr_request(&sr, &head, "head", 0, 0, 504);
	assert_int_equal(sr_run(&sr, &head, 0), 496);
	kvx_scheduler_finish(sr.scheduler, &head.ask);
	sr_settle(&sr);
	teach(&sr, 20, 2, 50);
	sr_request(&sr, &all, "half", 0, 0, 1000);
	sr_match(&sr, &all, &hit);
	assert_int_equal(hit.stored, 1000 - SR_UNIT);
	assert_int_equal(hit.tokens, 496);
	assert_int_equal(hit.disk_tokens, 0);
	assert_false(hit.declined);
	assert_int_equal(sr_stats(&sr).cost_model_cuts, 1);
	sr_match(&sr, &all, &hit); /* again: the same answer, counted once */
	assert_int_equal(hit.tokens, 496);
	assert_int_equal(sr_stats(&sr).cost_model_cuts, 1);
	kvx_scheduler_finish(sr.scheduler, &all.ask);

	/* The engine has that half itself. */
	sr_request(&sr, &all, "rest", 0, 0, 1000);
	all.ask.local = 496;
	sr_match(&sr, &all, &hit);
	assert_int_equal(hit.tokens, 0);
	assert_true(hit.declined);
	kvx_scheduler_finish(sr.scheduler, &all.ask);

	/* Neither does memory: nothing is loaded. */
	teach(&sr, 1, 2, 50);
	sr_request(&sr, &all, "none", 0, 0, 1000);
	sr_match(&sr, &all, &hit);
	assert_int_equal(hit.tokens, 0);
	assert_true(hit.declined);
	kvx_scheduler_finish(sr.scheduler, &all.ask);
	sr_stop(&sr, &rig);
}

/* A prompt of 1,000 tokens is stored that others find. */
static void start_first(rig_t *rig, sr_t *sr, sr_request_t *request)
{
	sr_start(sr, rig, &(sr_options_t){.foreign = 1});
	sr_store(sr, request, "first", 0, 0, 1000);
	kvx_scheduler_finish(sr->scheduler, &request->ask);
}

static void finish_all(sr_t *sr, const sr_request_t *requests, uint32_t count)
{
	sr_settle(sr);
	for (uint32_t i = 0; i < count; i++) {
		kvx_scheduler_finish(sr->scheduler, &requests[i].ask);
	}
	sr_settle(sr);
}

/* A hit of 992 tokens, ten milliseconds in memory: is it loaded asynchronously? It is admitted to the step at hand.
 */
static int goes_beside(sr_t *sr, sr_request_t *request, uint32_t number, uint32_t busy)
{
	char id[8];
	kvx_hit_t hit;

	(void)snprintf(id, sizeof id, "r%u", (unsigned)number);
	sr_request(sr, request, id, 0, 0, 1000);
	request->ask.busy = busy;
	sr_match(sr, request, &hit);
	assert_int_equal(hit.tokens, 1000 - SR_UNIT);
	sr_place(sr, request, number % 4 * 125, 0);
	kvx_scheduler_start_load(sr->scheduler, &request->ask, &hit);

	return hit.async;
}

static void p7_synchronous_loads_of_a_step_have_a_common_limit(void **state)
{
	static sr_request_t requests[4];
	rig_t rig;
	sr_t sr;

	(void)state;
	start_first(&rig, &sr, &requests[0]);
	for (uint32_t round = 0; round < 4; round++) {
		const uint32_t busy = round % 2;

		teach(&sr, 1000, 10, 10);
		sr.scheduler->step_ns = 15u * MS;
		for (uint32_t i = 0; i < 4; i++) { /* two of them in 25 ms, one during a step of 15 */
			assert_int_equal(goes_beside(&sr, &requests[i], 4 * round + i, busy), i >= (busy ? 1u : 2u));
		}
		(void)sr_step(&sr);
		finish_all(&sr, requests, 4);
	}
	sr_stop(&sr, &rig);
}

/* It has the answers of a step when it has planned, and begun, the next one: a load inside that would hold them up; and
 * an asynchronous one would be overtaken. */
static void p7_an_engine_planning_ahead_has_one_synchronous_load(void **state)
{
	static sr_request_t requests[3];
	rig_t rig;
	sr_t sr;

	(void)state;
	start_first(&rig, &sr, &requests[0]);
	for (uint32_t round = 0; round < 6; round++) {
		const int large = round % 2 != 0;

		teach(&sr, 1000, large ? 30 : 10, 30);
		assert_false(goes_beside(&sr, &requests[0], 3 * round, 0)); /* nobody waits: however long */
		sr.ahead = 1;
		(void)sr_step(&sr);
		assert_int_equal(goes_beside(&sr, &requests[1], 3 * round + 1, 0), large);
		kvx_scheduler_take_report(sr.scheduler, sr.report.data, sr.report.len);
		teach(&sr, 1000, large ? 30 : 10, 30); /* the stand-in is faster */
		assert_int_equal(goes_beside(&sr, &requests[2], 3 * round + 2, 0), large);
		sr.ahead = 0;
		finish_all(&sr, requests, 3);
	}
	sr_stop(&sr, &rig);
}

/* Nothing is known of the disk, and its guess does not pay: a piece is loaded, which is measured. */
static void p7_a_disk_is_sampled_by_a_piece(void **state)
{
	static sr_request_t request;
	kvx_step_work_t work = {0};
	uint32_t loaded;
	rig_t rig;
	sr_t sr;

	(void)state;
	start_stored(&rig, &sr, 2000);
	kvx_cost_model_init(&sr.scheduler->cost_model, SR_UNIT, 1000);
	kvx_step_work_add(&work, 0, 1000);
	kvx_cost_model_add_step(&sr.scheduler->cost_model, &work,
				UINT64_C(900000)); /* 0.9 us a token, 1 us to load it */
	sr_request(&sr, &request, "piece", 0, 0, 2000);
	loaded = sr_run(&sr, &request, 0);
	assert_in_range(loaded, SR_UNIT, 2000 * 9 / 10 / KVX_COST_SAMPLE_SHARE);
	assert_int_equal(sr_stats(&sr).cost_model_samples, 1);
	assert_int_equal(sr.scheduler->cost_model.disk.fit.count, 1);
	kvx_scheduler_finish(sr.scheduler, &request.ask);
	sr_stop(&sr, &rig);
}

/* The number of the step that was to be timed and computes these tokens. */
static uint32_t timed_of(const sr_t *sr, uint32_t tokens)
{
	for (uint32_t i = 0; i < KVX_TIMED_STEPS; i++) {
		if (sr->scheduler->timed[i].asked && sr->scheduler->timed[i].work.tokens == tokens) {
			return sr->scheduler->timed[i].step;
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
	rig_t rig;
	sr_t sr;

	(void)state;
	start_stored(&rig, &sr, 2000);
	cost_model = &sr.scheduler->cost_model;
	kvx_cost_model_init(cost_model, SR_UNIT, 100000); /* 0.1 ms a token, at the guess */
	sr_request(&sr, &request, "bet", 0, 0, 2000);
	loaded = sr_run(&sr, &request, 0);
	assert_int_equal(loaded, 2000 - 512);
	assert_int_equal(kvx_cost_model_compute_ns(cost_model, 0, 2000), 0);
	tell_step(&sr, timed_of(&sr, 512), 51200u * MS);
	assert_in_range(kvx_cost_model_compute_ns(cost_model, 0, 512), 51100u * MS, 51300u * MS);
	kvx_scheduler_finish(sr.scheduler, &request.ask);
	sr_settle(&sr);
	sr_request(&sr, &request, "known", 0, 0, 2000);
	assert_int_equal(sr_run(&sr, &request, 0), 2000 - SR_UNIT);
	kvx_scheduler_finish(sr.scheduler, &request.ask);
	sr_stop(&sr, &rig);
}

/* How long the lookup is prepared to wait for its lease. */
static uint64_t patience_of(sr_t *sr, sr_request_t *request, const char *name)
{
	const kvx_request_t *found;
	kvx_hit_t hit;

	sr_request(sr, request, name, 1, 0, 100);
	kvx_scheduler_match(sr->scheduler, &request->ask, &hit);
	found = kvx_requests_find(&sr->scheduler->requests, request->ask.id, request->ask.id_len);
	assert_non_null(found);
	assert_non_null(found->cached);

	return found->cached->until_ns - found->cached->asked_ns;
}

static void p7_after_a_late_answer_waits_are_shorter_until_one_is_early(void **state)
{
	static sr_request_t a, b, c, d;
	kvx_hit_t hit = {0};
	rig_t rig;
	sr_t sr;

	(void)state;
	sr_start(&sr, &rig, &(sr_options_t){.foreign = 1, .silence = "10s", .wait_us = 1}); /* slow, and not dead */
	sr_store(&sr, &a, "a", 1, 0, 80);
	rig_signal(&rig, SIGSTOP);
	assert_int_equal(patience_of(&sr, &b, "b"), 100 * MS);
	assert_true(sr.scheduler->lease_late);
	assert_int_equal(patience_of(&sr, &c, "c"), 20 * MS);
	assert_true(sr.scheduler->lease_late);
	rig_signal(&rig, SIGCONT);
	for (int i = 0; i < 10000 && hit.tokens == 0; i++) {
		usleep(1000);
		(void)sr_step(&sr);
		kvx_scheduler_match(sr.scheduler, &b.ask, &hit); /* what has come late is there now */
	}
	assert_int_equal(hit.tokens, 80);
	for (int i = 0; i < 1000 && sr.scheduler->lease_late; i++) {
		(void)sr_step(&sr);
		kvx_scheduler_match(sr.scheduler, &c.ask, &hit);
	}
	assert_false(sr.scheduler->lease_late);
	assert_int_equal(patience_of(&sr, &d, "d"), 100 * MS);
	kvx_scheduler_finish(sr.scheduler, &a.ask);
	kvx_scheduler_finish(sr.scheduler, &b.ask);
	kvx_scheduler_finish(sr.scheduler, &c.ask);
	kvx_scheduler_finish(sr.scheduler, &d.ask);
	sr_stop(&sr, &rig);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p7_steps_that_compute_prompts_are_timed),
		cmocka_unit_test(p7_ranks_learn_what_a_step_computes),
		cmocka_unit_test(p7_a_message_waits_for_little_of_its_step),
		cmocka_unit_test(p7_a_step_that_generates_waits_for_no_answer),
		cmocka_unit_test(p7_a_part_that_does_not_pay_is_not_loaded),
		cmocka_unit_test(p7_synchronous_loads_of_a_step_have_a_common_limit),
		cmocka_unit_test(p7_an_engine_planning_ahead_has_one_synchronous_load),
		cmocka_unit_test(p7_after_a_late_answer_waits_are_shorter_until_one_is_early),
		cmocka_unit_test(p7_a_disk_is_sampled_by_a_piece),
		cmocka_unit_test(p7_the_first_hit_on_a_disk_teaches_the_compute_cost),
	};

	if (argc < 2) {
		(void)fprintf(stderr, "usage: %s <kvd>\n", argv[0]);
		return 2;
	}
	sr_program = argv[1];

	return cmocka_run_group_tests(tests, NULL, NULL);
}
