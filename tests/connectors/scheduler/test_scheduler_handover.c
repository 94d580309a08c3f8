/* Hand-overs in the scheduling half: what one request computes another loads, as it comes, and whatever ends it the
 * engine learns of it. Both requests are of one half here: the daemon knows sides, not instances. */
#include "connectors/scheduler/sched_rig.h"

#include <signal.h>
#include <unistd.h>

static sr_request_t p, d;

static const sr_options_t plain, own_keys = {.own_keys = 1}, window = {.groups = 2};

#define WAIT_MS 60000u

/* With row 1 the tokens after the last whole block are handed over, too. */
static kvx_transfer_t transfer(const sr_request_t *request, uint32_t timeout_ms)
{
	const uint32_t whole = request->n / SR_UNIT * SR_UNIT;

	return (kvx_transfer_t){.struct_size = sizeof(kvx_transfer_t),
				.id = "x",
				.timeout_ms = timeout_ms,
				.tokens = request->tokens + whole,
				.n_tokens = sr.row ? request->n - whole : 0};
}

static kvx_outcome_t outcome(const sr_request_t *request)
{
	kvx_outcome_t outcome = {.struct_size = sizeof outcome};

	kvx_scheduler_get_outcome(sr.scheduler, &request->ask, &outcome);

	return outcome;
}

/* The consumer is promised all whole blocks of n tokens, and has got blocks from 100 on. */
static void receive(uint32_t n, uint32_t timeout_ms)
{
	kvx_transfer_t from;

	sr_request(&d, "d", 1, 0, n);
	d.ask.whole = 1;
	from = transfer(&d, timeout_ms);
	assert_int_equal(kvx_scheduler_receive(sr.scheduler, &d.ask, &from), KVC_OK);
	assert_int_equal(sr_match(&d), sr.row ? n : n / SR_UNIT * SR_UNIT);
	assert_true(sr.hit.async);
	sr_place(&d, 100, 0);
	sr_start_load(&d);
}

static void begin_sending(uint32_t n)
{
	kvx_transfer_t to;

	sr_request(&p, "p", 1, 0, n);
	to = transfer(&p, 0);
	assert_int_equal(kvx_scheduler_send(sr.scheduler, &p.ask, &to), KVC_OK);
	assert_int_equal(kvx_scheduler_send(sr.scheduler, &p.ask, &to), KVC_ERR_EXISTS);
	assert_int_equal(sr_match(&p), 0);
	sr_place(&p, 0, 0);
}

/* The producer computes up to that token. */
static void compute(uint32_t from, uint32_t to)
{
	sr_compute(&p, from / SR_UNIT, (to + SR_UNIT - 1u) / SR_UNIT);
	sr_advance(&p, to, to - from);
	(void)sr_step();
}

/* Chunks are loaded while more is computed, the last one after its producer has ended, and nothing is kept. */
static void p1_chunks_are_loaded_as_they_come(void)
{
	const int whole = sr.groups > 1; /* several groups come in one piece */

	receive(203, WAIT_MS);
	begin_sending(203);
	SR_UNTIL(kvx_scheduler_has_sent(sr.scheduler, &p.ask));
	assert_int_equal(sr_stats().loads_done + sr_stats().handover_pieces, 0);
	compute(0, 80);
	if (!whole) {
		SR_UNTIL(sr_is_right(&d, 0, 10));
		assert_true(sr_stats().handover_pieces > 0);
		assert_int_equal(outcome(&d).load, KVC_PENDING);
	}
	compute(80, 160);
	compute(160, 203);
	sr_finish(&p);
	assert_true(kvx_scheduler_has_pending(sr.scheduler));
	SR_UNTIL(outcome(&d).load != KVC_PENDING);
	assert_int_equal(outcome(&d).load, KVC_OK);
	assert_true(sr_is_right(&d, 0, sr.row ? 26 : 25));
	SR_UNTIL(!sr.scheduler->handovers);
	assert_int_equal(sr_stats().handovers_sent, 1);
	assert_int_equal(sr_stats().handovers_received, 1);
	assert_int_equal(sr_stats().loads_done, 1);
	assert_int_equal(sr_stats().loads_failed, 0);
	SR_UNTIL(rig_counter(&sr.rig, "kvd_handovers") == 0);
}

/* The consumer may come when all is there, and does not wait then; the entry ends with its admission. */
static void p7_what_is_stored_is_not_waited_for(void)
{
	kvx_transfer_t from;

	begin_sending(160);
	compute(0, 160);
	sr_finish(&p);
	sr_settle();
	assert_int_equal(sr_stats().handovers_sent, 1);
	sr_request(&d, "d", 1, 0, 161);
	d.ask.whole = 1;
	from = transfer(&d, WAIT_MS);
	assert_int_equal(kvx_scheduler_receive(sr.scheduler, &d.ask, &from), KVC_OK);
	assert_int_equal(sr_match(&d), 160);
	assert_false(sr.hit.async);
	sr_place(&d, 100, 0);
	sr_start_load(&d);
	(void)sr_step();
	assert_true(sr_is_right(&d, 0, 20));
	assert_null(sr.scheduler->handovers);
	SR_UNTIL(rig_counter(&sr.rig, "kvd_handovers") == 0);
}

/* All is stored but the tokens after the last whole block: they come, if they are there, and else nothing is awaited.
 */
static void p7_a_private_block_that_is_there_is_loaded(void)
{
	kvx_transfer_t from;

	begin_sending(163);
	compute(0, 163);
	sr_finish(&p);
	sr_settle();
	memset(sr.cache, 0, (size_t)SR_BLOCKS * sr.block_bytes);
	receive(163, WAIT_MS);
	SR_UNTIL(outcome(&d).load != KVC_PENDING);
	assert_int_equal(outcome(&d).load, KVC_OK);
	assert_true(sr_is_right(&d, 0, 21));
	sr_finish(&d);

	sr_request(&d, "e", 1, 0, 163);
	d.ask.whole = 1;
	from = transfer(&d, WAIT_MS);
	from.id = "y";
	assert_int_equal(kvx_scheduler_receive(sr.scheduler, &d.ask, &from), KVC_OK);
	assert_int_equal(sr_match(&d), 160);
	assert_false(sr.hit.async);
}

/* Its save is lost: the blocks before it come, and the load has failed at its last block only. */
static void p7_a_private_block_that_was_not_saved_is_computed(void)
{
	receive(203, WAIT_MS);
	begin_sending(203);
	compute(0, 200);
	SR_UNTIL(sr_stats().save_done == 25);
	sr.drop_saves = 1;
	compute(200, 203);
	sr_finish(&p);
	SR_UNTIL(outcome(&d).load != KVC_PENDING);
	assert_int_equal(sr.plan.failed_blocks, 1);
	assert_true(sr_is_right(&d, 0, 25));
	sr.drop_saves = 0;
}

/* What has come before is loaded, the rest fails, and the request is not promised it again. */
static void must_fail_with(uint32_t blocks)
{
	SR_UNTIL(outcome(&d).load != KVC_PENDING);
	assert_true(outcome(&d).load < 0 || outcome(&d).load == KVC_MISS);
	assert_true(sr_is_right(&d, 0, blocks));
	assert_int_equal(sr_stats().handovers_receive_failed, 1);
	assert_int_equal(sr_match(&d), 0);
}

static void p7_an_aborted_producer_fails_the_rest_at_once(void)
{
	uint64_t start;

	receive(200, WAIT_MS);
	begin_sending(200);
	compute(0, 80);
	SR_UNTIL(sr_is_right(&d, 0, 10));
	sr.hold_saves = 1;
	compute(80, 160);
	SR_UNTIL(sr.held);
	start = sr_now_ns();
	kvx_scheduler_abort_send(sr.scheduler, &p.ask);
	sr_finish(&p);
	must_fail_with(10);
	assert_true(sr_now_ns() - start < 5000u * KVX_MS); /* the save in progress is not waited for */
	assert_int_equal(sr_stats().handovers_send_failed, 1);
	sr_release_save();
}

/* Its request has ended as it should, but blocks of it were not saved. */
static void p7_what_a_producer_did_not_save_is_computed(void)
{
	receive(200, WAIT_MS);
	begin_sending(200);
	compute(0, 80);
	SR_UNTIL(sr_is_right(&d, 0, 10));
	sr.drop_saves = 1;
	compute(80, 200);
	sr_finish(&p);
	must_fail_with(10);
	sr.drop_saves = 0;
	SR_UNTIL(!sr.scheduler->handovers);
	assert_int_equal(sr_stats().handovers_send_failed, 1);
}

static void p5_a_producer_that_never_comes_is_awaited_for_a_time(void)
{
	receive(200, 300);
	for (int i = 0; i < 5; i++) {
		(void)sr_step();
		assert_int_equal(sr.plan.loads, 0);
		assert_true(kvx_scheduler_awaits_peer(sr.scheduler));
	}
	must_fail_with(0);
	assert_false(kvx_scheduler_awaits_peer(sr.scheduler));
}

/* The daemon has a deadline of its own, and does not tell of it now. */
static void p5_a_stopped_daemon_does_not_prolong_the_wait(void)
{
	receive(200, 300);
	(void)sr_step();
	rig_signal(&sr.rig, SIGSTOP);
	SR_UNTIL(outcome(&d).load != KVC_PENDING);
	rig_signal(&sr.rig, SIGCONT);
	sr_finish(&d);
	SR_UNTIL(!sr.scheduler->handovers);
}

/* The ranks are told of its load, so that its blocks are freed, and at once of its end. */
static void p4_an_aborted_consumer_leaves_nothing(void)
{
	receive(200, WAIT_MS);
	begin_sending(200);
	compute(0, 80);
	SR_UNTIL(sr_is_right(&d, 0, 10));
	sr_finish(&d);
	(void)sr_step();
	assert_int_equal(sr.plan.dead, 1);
	assert_true(sr.plan.drops >= 1);
	SR_UNTIL(sr_stats().leases_open == 0 && sr.scheduler->load_count == 0);
	compute(80, 200);
	sr_finish(&p);
	SR_UNTIL(!sr.scheduler->handovers);
}

static void p7_without_the_daemon_the_wait_ends(void)
{
	receive(200, WAIT_MS);
	begin_sending(200);
	(void)sr_step();
	rig_kill(&sr.rig);
	SR_UNTIL(outcome(&d).load != KVC_PENDING);
	sr_finish(&p);
	SR_UNTIL(!sr.scheduler->handovers);
	assert_int_equal(sr_stats().handovers_send_failed, 1);
	sr_restart_daemon();
}

/* Less than a block: nothing is promised, and the entry of its producer is complete at once. */
static void p7_a_prompt_shorter_than_a_block_is_computed(void)
{
	kvx_transfer_t from, wrong;

	sr_request(&d, "d", 1, 0, 7);
	d.ask.whole = 1;
	from = wrong = transfer(&d, WAIT_MS);
	wrong.id = "";
	assert_int_equal(kvx_scheduler_receive(sr.scheduler, &d.ask, &wrong), KVC_ERR_ARG);
	assert_int_equal(kvx_scheduler_receive(sr.scheduler, &d.ask, &from), KVC_OK);
	assert_int_equal(sr_look_up(&d), 0);
	sr_place(&d, 100, 0);
	begin_sending(7);
	SR_UNTIL(!sr.scheduler->handovers && rig_counter(&sr.rig, "kvd_handovers") == 0);
	assert_int_equal(sr_stats().handovers_sent, 1);
}

/* It is computed without what was promised: other memory was short, or another connector has it. */
static void p4_a_promise_that_is_not_taken_is_given_up(void)
{
	receive(200, WAIT_MS);
	sr_advance(&d, 0, 0);
	kvx_scheduler_preempt(sr.scheduler, &d.ask);
	sr_finish(&d);
	SR_UNTIL(!sr.scheduler->handovers && sr.scheduler->load_count == 0);
}

SR_MAIN(SR_TEST(p1_chunks_are_loaded_as_they_come, plain),
	SR_ROW("chunks and a private block are loaded", p1_chunks_are_loaded_as_they_come, plain, 1),
	SR_ROW("chunks and a private block are loaded: own keys", p1_chunks_are_loaded_as_they_come, own_keys, 1),
	SR_ROW("p7_a_private_block_that_is_there_is_loaded", p7_a_private_block_that_is_there_is_loaded, plain, 1),
	SR_ROW("p7_a_private_block_that_was_not_saved_is_computed", p7_a_private_block_that_was_not_saved_is_computed,
	       plain, 1),
	SR_NAMED("chunks are loaded as they come: own keys", p1_chunks_are_loaded_as_they_come, own_keys),
	SR_NAMED("chunks are loaded as they come: a window", p1_chunks_are_loaded_as_they_come, window),
	SR_TEST(p7_what_is_stored_is_not_waited_for, plain),
	SR_TEST(p7_an_aborted_producer_fails_the_rest_at_once, plain),
	SR_TEST(p7_what_a_producer_did_not_save_is_computed, plain),
	SR_TEST(p5_a_producer_that_never_comes_is_awaited_for_a_time, plain),
	SR_TEST(p5_a_stopped_daemon_does_not_prolong_the_wait, plain),
	SR_TEST(p4_an_aborted_consumer_leaves_nothing, plain), SR_TEST(p7_without_the_daemon_the_wait_ends, plain),
	SR_TEST(p7_a_prompt_shorter_than_a_block_is_computed, plain),
	SR_TEST(p4_a_promise_that_is_not_taken_is_given_up, plain))
