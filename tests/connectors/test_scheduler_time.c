/* What steps and loads take, as the ranks report it, and what the scheduling half makes of that: which steps are timed, how long plans wait, what of a hit is
 * loaded. Built with the part's sources. */
#include "connectors/sched_rig.h"
#include "engine/check.h"
#include "kv_test.h"
#include "scheduler_impl.h"

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

static uint32_t refuse; /* renewals that find no room in the queue to the daemon */

kvc_status_t __real_kvc_lease_renew(kvc_lease_t *lease, uint32_t ttl_ms);
kvc_status_t __wrap_kvc_lease_renew(kvc_lease_t *lease, uint32_t ttl_ms);
kvc_status_t __wrap_kvc_lease_renew(kvc_lease_t *lease, uint32_t ttl_ms)
{
	if (refuse > 0) {
		refuse--;
		return KVC_ERR_BUSY;
	}

	return __real_kvc_lease_renew(lease, ttl_ms);
}

/* Without a daemon: the guard and its steps need none. */
static void open_alone(rig_t *rig, sr_t *sr)
{
	rig_init(rig, sr_program);
	assert_int_equal(sr_open(sr, rig, &(sr_options_t){.foreign = 1, .guard = 1, .no_hand = 1}), KVC_OK);
}

static void close_alone(rig_t *rig, sr_t *sr)
{
	sr_close(sr);
	rig_fini(rig);
}

/* A step in which a request computes so many tokens after others: was it asked to be timed? Its number. */
static int plan_step(sr_t *sr, uint32_t before, uint32_t tokens, uint32_t *p_step)
{
	const kvx_ask_t ask = {.struct_size = sizeof ask, .id = "r", .id_len = 1, .tokens = before + tokens};
	const kvx_record_header_t *record;
	const void *bytes;
	kvx_cursor_t cursor;
	int timed = 0;
	size_t len;

	if (tokens) {
		kvx_scheduler_advance(sr->scheduler, &ask, before + tokens, tokens);
	}
	*p_step = sr->scheduler->step;
	kvx_scheduler_plan(sr->scheduler, &bytes, &len);
	if (len == 0) {
		return 0;
	}
	assert_true(kvx_cursor_open(&cursor, KVX_PLAN_MAGIC, bytes, len));
	while ((record = kvx_cursor_next(&cursor)) != NULL) {
		timed |= record->type == KVX_RECORD_TIME;
	}
	assert_false(cursor.bad);

	return timed;
}

static void tell_step(sr_t *sr, uint32_t step, uint64_t ns)
{
	kvx_report_step_t *record;

	kvx_bytes_reset(&sr->report, KVX_REPORT_MAGIC);
	record = kvx_bytes_record(&sr->report, KVX_RECORD_STEP, sizeof *record);
	record->step = step;
	record->ns = ns;
	kvx_bytes_finish(&sr->report, step);
	kvx_scheduler_report(sr->scheduler, sr->report.data, sr->report.len);
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
	sr.scheduler->sync_loads = 1;              /* much of it is the load */
	assert_false(plan_step(&sr, 0, 100, &step));
	assert_true(plan_step(&sr, 0, 100, &step));
	kvx_scheduler_computes(sr.scheduler, 100, 100); /* not to be saved */
	assert_true(plan_step(&sr, 0, 0, &step));

	/* Plans are steps ahead of what is reported. */
	assert_true(plan_step(&sr, 0, 1000, &first));
	assert_true(plan_step(&sr, 0, 2000, &step));
	assert_int_equal(kvx_guard_compute_ns(&sr.scheduler->guard, 0, 1000), 0);
	tell_step(&sr, first, 10u * MS);
	tell_step(&sr, first, 90u * MS); /* the other rank: they go in step */
	tell_step(&sr, step, 20u * MS);
	tell_step(&sr, step + 1, 20u * MS); /* never asked for */
	tell_step(&sr, 0, 20u * MS);
	assert_in_range(kvx_guard_compute_ns(&sr.scheduler->guard, 0, 1000), 99u * MS / 10u, 101u * MS / 10u);
	assert_int_equal(sr_stats(&sr).guard_steps, 2);
	assert_int_equal(sr_stats(&sr).bad_reports, 0);
	assert_int_equal(sr.scheduler->step_ns, 10u * MS - 10u * MS / 8u + 20u * MS / 8u);

	/* Too late: the place is another step's by now. */
	assert_true(plan_step(&sr, 0, 1000, &first));
	for (uint32_t i = 0; i < KVX_TIMED; i++) {
		assert_true(plan_step(&sr, 0, 1000, &step));
	}
	tell_step(&sr, first, 10u * MS);
	assert_int_equal(sr_stats(&sr).guard_steps, 2);
	close_alone(&rig, &sr);
}

static void p7_a_plan_waits_for_little_of_its_step(void **state)
{
	uint32_t step;
	rig_t rig;
	sr_t sr;

	(void)state;
	open_alone(&rig, &sr);
	sr.scheduler->wait_us = 500;
	sr.scheduler->wait_asked = 0;
	kvx_scheduler_computes(sr.scheduler, 1000, 1000);
	assert_int_equal(kvx_time_wait_ns(sr.scheduler), 500000); /* nothing is known */
	assert_true(plan_step(&sr, 0, 0, &step));
	tell_step(&sr, step, 10u * MS);
	kvx_scheduler_computes(sr.scheduler, 1000, 1000);
	assert_in_range(kvx_time_wait_ns(sr.scheduler), 75000, 80000);
	sr.scheduler->wait_asked = 1;
	assert_int_equal(kvx_time_wait_ns(sr.scheduler), 500000);
	sr.scheduler->wait_asked = 0;
	kvx_scheduler_computes(sr.scheduler, 8000, 7000);
	assert_in_range(kvx_time_wait_ns(sr.scheduler), 500000, 500000);
	(void)plan_step(&sr, 0, 0, &step);
	for (uint32_t i = 0; i < 100; i++) {
		kvx_scheduler_computes(sr.scheduler, 1000 + i, 1);
	}
	assert_int_equal(kvx_time_wait_ns(sr.scheduler), 0);
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
		(void)kvx_scheduler_pending(sr.scheduler);
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

static void report_loaded(sr_t *sr, uint64_t number, uint32_t blocks)
{
	kvx_report_loaded_t *record;

	kvx_bytes_reset(&sr->report, KVX_REPORT_MAGIC);
	record = kvx_bytes_record(&sr->report, KVX_RECORD_LOADED, sizeof *record);
	record->load = number;
	record->blocks = blocks;
	record->ns = 1000;
	kvx_bytes_finish(&sr->report, 1);
	kvx_scheduler_report(sr->scheduler, sr->report.data, sr->report.len);
}

/* A rank is slow to read, and the queue to the daemon is full when its lease is to be renewed. */
static void p7_a_lease_that_could_not_be_renewed_is_renewed_in_time(void **state)
{
	static sr_request_t request;
	const kvx_sload_t *load;
	const void *bytes;
	kvx_hit_t hit;
	uint64_t start;
	size_t len;
	rig_t rig;
	sr_t sr;

	(void)state;
	sr_start(&sr, &rig, &(sr_options_t){.foreign = 1, .mode = KVX_LOAD_SYNC, .load_ms = 1000});
	sr_store(&sr, &request, "first", 1, 0, 80);
	kvx_scheduler_finish(sr.scheduler, &request.ask);
	sr_request(&sr, &request, "second", 1, 0, 100);
	sr_match(&sr, &request, &hit);
	assert_int_equal(hit.tokens, 80);
	sr_place(&sr, &request, 100, 0);
	kvx_scheduler_load(sr.scheduler, &request.ask, &hit);
	refuse = 1;
	start = kv_now_ns(&kv_env_posix);
	while (kv_now_ns(&kv_env_posix) - start < 2600u * MS) { /* leased for 2 s */
		kvx_scheduler_plan(sr.scheduler, &bytes, &len);
		usleep(150000); /* a step */
	}
	assert_int_equal(refuse, 0);
	load = sr.scheduler->loads;
	assert_non_null(load);
	assert_int_equal(kvc_lease_state(load->part[0].lease), KVC_OK);
	report_loaded(&sr, load->number, load->blocks);
	assert_int_equal(sr_stats(&sr).loads_done, 1);
	kvx_scheduler_finish(sr.scheduler, &request.ask);
	sr_stop(&sr, &rig);
}

/* The engine may have cached what it computed after a load whose failure it learns of when the request is gone. */
static void p1_what_came_after_a_failed_load_of_a_request_that_is_gone_is_named(void **state)
{
	static sr_request_t request, other;
	uint32_t ids[SR_BLOCKS], n = 0;
	const void *bytes;
	kvx_hit_t hit;
	size_t len;
	rig_t rig;
	sr_t sr;

	(void)state;
	sr_start(&sr, &rig, &(sr_options_t){.foreign = 1, .mode = KVX_LOAD_SYNC});
	sr_store(&sr, &request, "first", 1, 0, 80);
	kvx_scheduler_finish(sr.scheduler, &request.ask);
	for (uint32_t good = 0; good < 2; good++) {
		sr_request(&sr, &request, good ? "good" : "bad", 1, 0, 160);
		sr_match(&sr, &request, &hit);
		assert_int_equal(hit.tokens, 80);
		sr_place(&sr, &request, 100, 0);
		kvx_scheduler_load(sr.scheduler, &request.ask, &hit);
		kvx_scheduler_plan(sr.scheduler, &bytes, &len);
		kvx_scheduler_finish(sr.scheduler, &request.ask);
		sr_request(&sr, &other, "other", 2, 0, 40); /* gets five of its blocks */
		sr_place(&sr, &other, 115, 0);
		report_loaded(&sr, sr.scheduler->load_number, good ? 10 : 9);
		n = kvx_scheduler_spoilt(sr.scheduler, ids, 4);
		assert_int_equal(n, good ? 0 : 4);
		n += kvx_scheduler_spoilt(sr.scheduler, ids + n, SR_BLOCKS - n);
		assert_int_equal(n, good ? 0 : 15);
		for (uint32_t i = 0; i < n; i++) {
			assert_int_equal(ids[i], 100 + i);
		}
		assert_int_equal(kvx_scheduler_spoilt(sr.scheduler, ids, SR_BLOCKS), 0);
		kvx_scheduler_finish(sr.scheduler, &other.ask);
	}
	sr_stop(&sr, &rig);
}

/* Ten blocks are stored. A request of twenty is to load them, into blocks from 100. */
static void begin_load(sr_t *sr, rig_t *rig, sr_request_t *request, kvx_hit_t *p_hit)
{
	sr_start(sr, rig, &(sr_options_t){.foreign = 1, .mode = KVX_LOAD_SYNC});
	sr_store(sr, request, "first", 1, 0, 80);
	kvx_scheduler_finish(sr->scheduler, &request->ask);
	sr_settle(sr);
	sr_request(sr, request, "second", 1, 0, 160);
	sr_match(sr, request, p_hit);
	assert_int_equal(p_hit->tokens, 80);
	sr_place(sr, request, 100, 0);
}

/* Plans are a step ahead: the request is aborted when the step after that of its load has been planned, and before the load is known to have failed. */
static void p1_saves_after_a_failed_load_of_a_request_that_is_gone_are_given_up(void **state)
{
	static sr_request_t request;
	const void *bytes;
	kvx_hit_t hit;
	size_t len;
	rig_t rig;
	sr_t sr;

	(void)state;
	begin_load(&sr, &rig, &request, &hit);
	kvx_scheduler_load(sr.scheduler, &request.ask, &hit);
	for (uint32_t computed = 120; computed <= 160; computed += 40) {
		kvx_scheduler_advance(sr.scheduler, &request.ask, computed, 40);
		kvx_scheduler_plan(sr.scheduler, &bytes, &len);
	}
	assert_int_equal(sr_stats(&sr).puts_open, 2);
	kvx_scheduler_finish(sr.scheduler, &request.ask);
	report_loaded(&sr, sr.scheduler->load_number, 9);
	assert_int_equal(sr_stats(&sr).puts_open, 0);
	assert_int_equal(sr_stats(&sr).save_lost, 10);
	sr_stop(&sr, &rig);
}

/* What is leased for it is of another daemon than the one that is asked now; or it was given back, as nobody had asked for it in a while. */
static void lose_hold(sr_t *sr, const sr_request_t *request, int all)
{
	kvx_request_t *found = kvx_requests_find(&sr->scheduler->requests, request->ask.id, request->ask.id_len);

	if (all) {
		kvx_hold_drop(sr->scheduler, found);
	} else {
		found->held->era--;
	}
}

/* A load that cannot be done any more when its step begins fails like any other: while the ranks have not said so, the request may end ... */
static void p1_what_came_after_a_lost_load_of_a_request_that_is_gone_is_named(void **state)
{
	static sr_request_t request;
	uint32_t ids[SR_BLOCKS];
	const void *bytes;
	kvx_hit_t hit;
	size_t len;
	rig_t rig;
	sr_t sr;

	(void)state;
	for (int all = 0; all < 2; all++) {
		begin_load(&sr, &rig, &request, &hit);
		lose_hold(&sr, &request, all);
		kvx_scheduler_load(sr.scheduler, &request.ask, &hit);
		kvx_scheduler_plan(sr.scheduler, &bytes, &len);
		kvx_scheduler_finish(sr.scheduler, &request.ask);
		report_loaded(&sr, sr.scheduler->load_number, 0);
		assert_int_equal(kvx_scheduler_spoilt(sr.scheduler, ids, SR_BLOCKS), 20);
		assert_int_equal(sr_stats(&sr).lease_lost, 1);
		sr_stop(&sr, &rig);
	}
}

/* ... or steps may be planned that save what they compute after it. */
static void p1_saves_after_a_lost_load_are_given_up(void **state)
{
	static sr_request_t request;
	const void *bytes;
	kvx_hit_t hit;
	size_t len;
	rig_t rig;
	sr_t sr;

	(void)state;
	for (int all = 0; all < 2; all++) {
		begin_load(&sr, &rig, &request, &hit);
		lose_hold(&sr, &request, all);
		kvx_scheduler_load(sr.scheduler, &request.ask, &hit);
		for (uint32_t computed = 120; computed <= 160; computed += 40) {
			kvx_scheduler_advance(sr.scheduler, &request.ask, computed, 40);
			kvx_scheduler_plan(sr.scheduler, &bytes, &len);
		}
		assert_int_equal(sr_stats(&sr).puts_open, 2);
		report_loaded(&sr, sr.scheduler->load_number, 0);
		assert_int_equal(sr_stats(&sr).puts_open, 0);
		assert_int_equal(sr_stats(&sr).loads_failed, 1);
		kvx_scheduler_finish(sr.scheduler, &request.ask);
		sr_stop(&sr, &rig);
	}
}

/* Its blocks are another request's by the time its load is known to have failed. */
static void p7_a_failed_load_of_a_request_that_is_gone_costs_others_no_saves(void **state)
{
	static sr_request_t request, other;
	const void *bytes;
	kvx_hit_t hit;
	size_t len;
	rig_t rig;
	sr_t sr;

	(void)state;
	begin_load(&sr, &rig, &request, &hit);
	kvx_scheduler_load(sr.scheduler, &request.ask, &hit);
	kvx_scheduler_plan(sr.scheduler, &bytes, &len);
	kvx_scheduler_finish(sr.scheduler, &request.ask);
	sr_request(&sr, &other, "other", 2, 0, 160);
	sr_place(&sr, &other, 100, 0);
	kvx_scheduler_advance(sr.scheduler, &other.ask, 160, 160);
	kvx_scheduler_plan(sr.scheduler, &bytes, &len);
	assert_int_equal(sr_stats(&sr).puts_open, 1);
	report_loaded(&sr, sr.scheduler->load_number, 9);
	assert_int_equal(sr_stats(&sr).puts_open, 1);
	assert_int_equal(sr_stats(&sr).save_lost, 0);
	kvx_scheduler_revoke(sr.scheduler); /* the ranks do not write */
	kvx_scheduler_finish(sr.scheduler, &other.ask);
	sr_stop(&sr, &rig);
}

/* ---- what of a hit is loaded -------------------------------------------------------------------------------------------------- */

/* Microseconds a token. */
static void teach(sr_t *sr, double compute, double memory, double disk)
{
	kvx_guard_t *guard = &sr->scheduler->guard;
	kvx_guard_work_t work = {0};

	kvx_guard_init(guard, SR_UNIT, sr->scheduler->token_bytes);
	kvx_guard_work_add(&work, 0, 1000);
	kvx_guard_computed(guard, &work, (uint64_t)(compute * 1e6));
	for (uint32_t i = 0; i < 3; i++) {
		const kvx_guard_load_t load = {.cpu = 1000, .ns = (uint64_t)(memory * 1e6), .now_ns = 1};
		const kvx_guard_load_t tail = {.disk = 1000, .ns = (uint64_t)(disk * 1e6), .now_ns = 1};

		kvx_guard_loaded(guard, &load);
		kvx_guard_loaded(guard, &tail);
	}
}

static void restart(rig_t *rig, sr_t *sr)
{
	rig_wait_written(rig);
	rig_stop(rig); /* what is on disk is committed, too */
	rig_start(rig);
	sr_wait_ready(sr);
}

static void p7_a_part_that_does_not_pay_is_not_loaded(void **state)
{
	static sr_request_t all, head;
	kvx_hit_t hit;
	rig_t rig;
	sr_t sr;

	(void)state;
	sr_start(&sr, &rig, &(sr_options_t){.foreign = 1, .guard = 1, .mode = KVX_LOAD_SYNC});
	sr_store(&sr, &all, "first", 0, 0, 1000);
	kvx_scheduler_finish(sr.scheduler, &all.ask);
	restart(&rig, &sr);

	/* All of it is on disk. */
	teach(&sr, 20, 2, 50);
	sr_request(&sr, &all, "all", 0, 0, 1000);
	sr_match(&sr, &all, &hit);
	assert_int_equal(hit.stored, 1000 - SR_UNIT);
	assert_int_equal(hit.tokens, 0);
	assert_true(hit.declined);
	assert_int_equal(sr_stats(&sr).guard_stops, 1);
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
	assert_int_equal(sr_stats(&sr).guard_cuts, 1);
	sr_match(&sr, &all, &hit); /* again: the same answer, counted once */
	assert_int_equal(hit.tokens, 496);
	assert_int_equal(sr_stats(&sr).guard_cuts, 1);
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

/* Nothing is known of the disk, and its guess does not pay: a piece is loaded, which is measured. */
static void p7_a_disk_is_tried_by_a_piece(void **state)
{
	static sr_request_t request;
	kvx_guard_work_t work = {0};
	uint32_t loaded;
	rig_t rig;
	sr_t sr;

	(void)state;
	sr_start(&sr, &rig, &(sr_options_t){.foreign = 1, .guard = 1, .mode = KVX_LOAD_SYNC});
	sr_store(&sr, &request, "first", 0, 0, 2000);
	kvx_scheduler_finish(sr.scheduler, &request.ask);
	restart(&rig, &sr);
	kvx_guard_init(&sr.scheduler->guard, SR_UNIT, 1000);
	kvx_guard_work_add(&work, 0, 1000);
	kvx_guard_computed(&sr.scheduler->guard, &work, 900u * 1000u); /* 0.9 us a token, 1 us to load it */
	sr_request(&sr, &request, "piece", 0, 0, 2000);
	loaded = sr_run(&sr, &request, 0);
	assert_in_range(loaded, SR_UNIT, 2000 * 9 / 10 / KVX_GUARD_SHARE);
	assert_int_equal(sr_stats(&sr).guard_probes, 1);
	assert_int_equal(sr.scheduler->guard.disk.known, 1);
	kvx_scheduler_finish(sr.scheduler, &request.ask);
	sr_stop(&sr, &rig);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p7_steps_that_compute_prompts_are_timed),
		cmocka_unit_test(p7_a_plan_waits_for_little_of_its_step),
		cmocka_unit_test(p7_a_step_that_generates_waits_for_no_answer),
		cmocka_unit_test(p7_a_lease_that_could_not_be_renewed_is_renewed_in_time),
		cmocka_unit_test(p1_what_came_after_a_failed_load_of_a_request_that_is_gone_is_named),
		cmocka_unit_test(p1_saves_after_a_failed_load_of_a_request_that_is_gone_are_given_up),
		cmocka_unit_test(p1_what_came_after_a_lost_load_of_a_request_that_is_gone_is_named),
		cmocka_unit_test(p1_saves_after_a_lost_load_are_given_up),
		cmocka_unit_test(p7_a_failed_load_of_a_request_that_is_gone_costs_others_no_saves),
		cmocka_unit_test(p7_a_part_that_does_not_pay_is_not_loaded),
		cmocka_unit_test(p7_a_disk_is_tried_by_a_piece),
	};

	if (argc < 2) {
		(void)fprintf(stderr, "usage: %s <kvd>\n", argv[0]);
		return 2;
	}
	sr_program = argv[1];

	return cmocka_run_group_tests(tests, NULL, NULL);
}
