/* Hand-overs in the scheduling half: what one request computes another loads, as it comes, and whatever ends it the
 * engine learns of it. Both requests are of one half here: the daemon knows sides, not instances. */
#include "connectors/scheduler/sched_rig.h"
#include "scheduler/names/spaces.h"

#include <signal.h>
#include <unistd.h>

static sr_request_t p, d;

static const sr_options_t plain,
	own_keys = {.own_keys = 1}, window = {.groups = 2}, async_loads = {.mode = KVX_LOAD_ASYNC},
	impatient = {.silence = "500ms", .wait_us = 500}, lenient = {.silence = "10s", .wait_us = 500};

#define WAIT_MS 60000u
#define PRIVATE 1  /* rows: the tokens after the last whole block are handed over, too */
#define PEER    2  /* the consumer's producer is on another node */
#define OTHER   4  /* the consumer has another adapter: its space is another one */
#define SECOND  8  /* and comes after its producer has saved all */
#define ABORT   16 /* the engine aborts the producer */

/* ---- another node ---------------------------------------------------------------------------- */

/* What was fetched last, and how often. The daemon here plays the peer: what it is asked to fetch, it has. */
static struct {
	uint32_t calls;
	kvc_status_t refused; /* answered instead */
	int real;             /* the daemon itself is asked: it has no peers */
	char peer[KVC_MAX_PEER + 1];
	uint32_t hash_bytes, n, n_tokens;
	uint8_t names[SR_MAX_TOKENS * sizeof(uint32_t)];
	uint32_t rest[SR_UNIT]; /* tokens after the hashed units */
} fetched;

kvc_status_t __real_kvc_handover_fetch(kvc_space_t *space, const kvc_fetch_t *fetch, kvc_handover_t **p_handover);
kvc_status_t __wrap_kvc_handover_fetch(kvc_space_t *space, const kvc_fetch_t *fetch, kvc_handover_t **p_handover);

kvc_status_t __wrap_kvc_handover_fetch(kvc_space_t *space, const kvc_fetch_t *fetch, kvc_handover_t **p_handover)
{
	fetched.calls++;
	if (fetched.refused != KVC_OK) {
		return fetched.refused;
	}
	if (fetched.real) {
		return __real_kvc_handover_fetch(space, fetch, p_handover);
	}
	snprintf(fetched.peer, sizeof fetched.peer, "%s", fetch->peer);
	fetched.hash_bytes = fetch->hashes ? fetch->hash_bytes : 0;
	fetched.n_tokens = fetch->prompt ? fetch->prompt->n_tokens : 0;
	fetched.n = fetch->hashes ? fetch->n_hashes : fetched.n_tokens;
	memcpy(fetched.names, fetch->hashes ? fetch->hashes : (const void *)fetch->prompt->tokens,
	       fetched.n * (fetched.hash_bytes ? fetched.hash_bytes : sizeof(uint32_t)));
	if (fetch->hashes && fetched.n_tokens > 0) {
		const uint32_t whole = fetch->n_hashes * SR_UNIT;

		memcpy(fetched.rest, fetch->prompt->tokens + whole,
		       (fetched.n_tokens - whole) * sizeof fetched.rest[0]);
	}

	return kvc_handover_recv(space, fetch->transfer, fetch->timeout_ms, p_handover);
}

/* The peer was asked once, for what the consumer's keys are made of. */
static void check_fetched(void)
{
	const uint32_t units = d.n / SR_UNIT;

	assert_int_equal(fetched.calls, sr.row & PEER ? 1 : 0);
	if (fetched.calls == 0) {
		return;
	}
	assert_string_equal(fetched.peer, "node1");
	if (sr.options.own_keys) {
		assert_int_equal(fetched.hash_bytes, 0);
		assert_int_equal(fetched.n, sr.row & PRIVATE ? d.n : units * SR_UNIT);
		assert_memory_equal(fetched.names, d.tokens, fetched.n * sizeof d.tokens[0]);
	} else {
		assert_int_equal(fetched.hash_bytes, sizeof d.hash[0]);
		assert_int_equal(fetched.n, units);
		assert_memory_equal(fetched.names, d.hash, units * sizeof d.hash[0]);
		assert_int_equal(fetched.n_tokens, sr.row & PRIVATE ? d.n : 0);
		assert_memory_equal(fetched.rest, d.tokens + units * SR_UNIT,
				    sr.row & PRIVATE ? (d.n % SR_UNIT) * sizeof d.tokens[0] : 0);
	}
}

/* ---- both sides ------------------------------------------------------------------------------ */

static kvx_transfer_t transfer(const sr_request_t *request, uint32_t timeout_ms)
{
	const uint32_t whole = request->n / SR_UNIT * SR_UNIT;

	return (kvx_transfer_t){.struct_size = sizeof(kvx_transfer_t),
				.id = "x",
				.timeout_ms = timeout_ms,
				.tokens = request->tokens + whole,
				.n_tokens = sr.row & PRIVATE ? request->n - whole : 0,
				.peer = sr.row & PEER ? "node1" : NULL};
}

/* The consumer is promised all whole blocks of n tokens, and has got blocks from 100 on. */
static void receive(uint32_t n, uint32_t timeout_ms)
{
	kvx_transfer_t from;

	memset(&fetched, 0, sizeof fetched);
	sr_request(&d, "d", 1, 0, n);
	d.ask.whole = 1;
	if (sr.row & OTHER) {
		d.ask.lora = "adapter-1:0123";
		do { /* the space is being opened */
			(void)sr_match(&d);
			(void)sr_step();
			usleep(1000);
		} while (sr.hit.why == KV_WHY_NO_DAEMON);
	}
	from = transfer(&d, timeout_ms);
	assert_int_equal(kvx_scheduler_receive(sr.scheduler, &d.ask, &from), KVC_OK);
	assert_int_equal(sr_match(&d), sr.row & PRIVATE ? n : n / SR_UNIT * SR_UNIT);
	assert_true(sr.hit.async);
	check_fetched();
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

/* A consumer waits for these blocks, so they are saved whatever the pool does; also when it comes after a refusal. */
SR_CASE(p7_what_is_handed_over_is_never_refused, plain)
{
	kvx_transfer_t to;

	sr.thrashes = 1;
	sr_request(&p, "p", 1, 0, 200);
	sr_place(&p, 0, 0);
	sr_run_tokens(&p, 0, 80);
	SR_UNTIL(sr_stats().save_not_admitted == 10);
	to = transfer(&p, 0);
	assert_int_equal(kvx_scheduler_send(sr.scheduler, &p.ask, &to), KVC_OK);
	sr_run_tokens(&p, 80, 200); /* at once: it may be the last step */
	SR_UNTIL(sr_stats().save_done == 25);
	assert_int_equal(sr_stats().save_not_admitted, 10);
	assert_int_equal(sr.optional_puts, 1);
	sr_end(&p);
}

/* Chunks are loaded while more is computed, the last one after its producer has ended, and nothing is kept. */
SR_CASE(p1_chunks_are_loaded_as_they_come, plain)
{
	const int whole = sr.groups > 1; /* several groups come in one piece */

	receive(203, WAIT_MS);
	begin_sending(203);
	SR_UNTIL(kvx_scheduler_has_sent(sr.scheduler, &p.ask));
	assert_int_equal(sr_stats().loads_done + sr_stats().handover_pieces, 0);
	sr_run_tokens(&p, 0, 80);
	if (!whole) {
		SR_UNTIL(sr_is_right(&d, 0, 10));
		assert_true(sr_stats().handover_pieces > 0);
		assert_int_equal(sr_outcome(&d).load, KVC_PENDING);
	}
	sr_run_tokens(&p, 80, 160);
	sr_run_tokens(&p, 160, 203);
	sr_finish(&p);
	assert_true(kvx_scheduler_has_pending(sr.scheduler) || sr_stats().handovers_sent == 1);
	sr_await_outcome(&d, KVC_OK);
	assert_true(sr_is_right(&d, 0, sr.row & PRIVATE ? 26 : 25));
	SR_UNTIL(!sr.scheduler->handovers);
	assert_int_equal(sr_stats().handovers_sent, 1);
	assert_int_equal(sr_stats().handovers_received, 1);
	assert_int_equal(sr_stats().loads_done, 1);
	assert_int_equal(sr_stats().loads_failed, 0);
	SR_UNTIL(rig_counter(&sr.rig, "kvd_handovers") == 0);
}
SR_ALSO(p1_chunks_are_loaded_as_they_come, plain, PRIVATE)
SR_ALSO(p1_chunks_are_loaded_as_they_come, own_keys, PRIVATE)
SR_ALSO(p1_chunks_are_loaded_as_they_come, plain, PEER)
SR_ALSO(p1_chunks_are_loaded_as_they_come, own_keys, PEER)
SR_ALSO(p1_chunks_are_loaded_as_they_come, window, PEER)
SR_ALSO(p1_chunks_are_loaded_as_they_come, plain, PEER | PRIVATE)
SR_ALSO(p1_chunks_are_loaded_as_they_come, own_keys, PEER | PRIVATE)
SR_ALSO(p1_chunks_are_loaded_as_they_come, own_keys, 0)
SR_ALSO(p1_chunks_are_loaded_as_they_come, window, 0)

/* The producer plans no further step: its daemon alone tells a consumer, which is another client here. */
static void await_units(kvc_handover_t *taken, uint32_t n, uint32_t state)
{
	kvc_handover_info_t info = {.struct_size = sizeof info};

	for (int i = 0; i < 1000 && (info.n < n || info.state != state); i++) {
		(void)kvc_poll(sr.kvc, 10);
		kvc_handover_get_info(taken, &info);
	}
	assert_int_equal(info.n, n);
	assert_int_equal(info.state, state);
}

SR_CASE(p7_a_chunk_waits_for_no_step_of_its_producer, plain)
{
	kvc_handover_t *taken = NULL;

	assert_int_equal(kvc_handover_recv(sr.space[KVX_HOST_MEM], "x", WAIT_MS, &taken), KVC_OK);
	begin_sending(203);
	sr_run_tokens(&p, 0, 80);
	await_units(taken, 10, KVC_HANDOVER_SENDING);
	sr_run_tokens(&p, 80, 203);
	await_units(taken, 25, KVC_HANDOVER_COMPLETE);
	kvc_handover_done(taken, 0);
	sr_finish(&p);
	SR_UNTIL(!sr.scheduler->handovers && rig_counter(&sr.rig, "kvd_handovers") == 0);
	assert_int_equal(sr_stats().handovers_sent, 1);
}
SR_ALSO(p7_a_chunk_waits_for_no_step_of_its_producer, plain, PRIVATE)

/* The consumer may come when all is there, and does not wait then; the entry ends with its admission, that of a peer too.
 */
SR_CASE(p7_what_is_stored_is_not_waited_for, plain)
{
	kvx_transfer_t from;

	const uint32_t n = sr.row & PRIVATE ? 163 : 160;

	begin_sending(n);
	sr_run_tokens(&p, 0, n);
	sr_end(&p);
	assert_int_equal(sr_stats().handovers_sent, 1);
	memset(&fetched, 0, sizeof fetched);
	sr_request(&d, "d", 1, 0, n == 160 ? 161 : n);
	d.ask.whole = 1;
	from = transfer(&d, WAIT_MS);
	assert_int_equal(kvx_scheduler_receive(sr.scheduler, &d.ask, &from), KVC_OK);
	assert_int_equal(sr_match(&d), 160);
	assert_false(sr.hit.async);
	check_fetched();
	sr_place(&d, 100, 0);
	sr_start_load(&d);
	(void)sr_step();
	assert_true(sr_is_right(&d, 0, 20));
	SR_UNTIL(!sr.scheduler->handovers && rig_counter(&sr.rig, "kvd_handovers") == 0);
}
SR_ALSO(p7_what_is_stored_is_not_waited_for, plain, PRIVATE)
SR_NAMED("p7_what_is_stored_here_is_taken_from_the_peer_too", p7_what_is_stored_is_not_waited_for, plain, PEER)

/* All is stored but the tokens after the last whole block: asynchronous loads bring them, if they are there, and else
 * nothing is awaited. */
SR_CASE_ROW(p7_a_private_block_that_is_there_is_loaded, async_loads, PRIVATE)
{
	kvx_transfer_t from;

	begin_sending(163);
	sr_run_tokens(&p, 0, 163);
	sr_end(&p);
	memset(sr.cache, 0, (size_t)SR_BLOCKS * sr.block_bytes);
	receive(163, WAIT_MS);
	sr_await_outcome(&d, KVC_OK);
	assert_true(sr_is_right(&d, 0, 21));
	sr_finish(&d);

	sr_request(&d, "e", 1, 0, 163);
	d.ask.whole = 1;
	from = transfer(&d, WAIT_MS);
	from.id = "y";
	assert_int_equal(kvx_scheduler_receive(sr.scheduler, &d.ask, &from), KVC_OK);
	assert_int_equal(sr_match(&d), 160);
}

/* Its save is lost: the blocks before it come, and the load has failed at its last block only. */
SR_CASE_ROW(p7_a_private_block_that_was_not_saved_is_computed, plain, PRIVATE)
{
	receive(203, WAIT_MS);
	begin_sending(203);
	sr_run_tokens(&p, 0, 200);
	SR_UNTIL(sr_stats().save_done == 25);
	sr.drop_saves = 1;
	sr_run_tokens(&p, 200, 203);
	sr_finish(&p);
	SR_UNTIL(sr_outcome(&d).load != KVC_PENDING);
	assert_int_equal(sr.plan.failed_blocks, 1);
	assert_true(sr_is_right(&d, 0, 25));
	sr.drop_saves = 0;
}

/* What has come before is loaded, the rest fails, and the request is not promised it again. */
static void must_fail_with(uint32_t blocks)
{
	SR_UNTIL(sr_outcome(&d).load != KVC_PENDING);
	assert_true(sr_outcome(&d).load < 0 || sr_outcome(&d).load == KVC_MISS);
	assert_true(sr_is_right(&d, 0, blocks));
	assert_int_equal(sr_stats().handovers_receive_failed, 1);
	assert_int_equal(sr_match(&d), 0);
}

SR_CASE(p7_an_aborted_producer_fails_the_rest_at_once, plain)
{
	uint64_t start;

	receive(200, WAIT_MS);
	begin_sending(200);
	sr_run_tokens(&p, 0, 80);
	SR_UNTIL(sr_is_right(&d, 0, 10));
	sr.hold_saves = 1;
	sr_run_tokens(&p, 80, 160);
	SR_UNTIL(sr.held);
	start = sr_now_ns();
	kvx_scheduler_abort_send(sr.scheduler, &p.ask);
	sr_finish(&p);
	must_fail_with(10);
	assert_true(sr_now_ns() - start < 5000u * KVX_MS); /* the save in progress is not waited for */
	assert_int_equal(sr_stats().handovers_send_failed, 1);
	sr_release_save();
}

/* Another request has stored the first ten blocks: they are loaded as in an ordinary hit. */
SR_CASE(p7_what_is_stored_comes_though_its_hand_over_has_failed, plain)
{
	static sr_request_t other;
	kvx_transfer_t to;

	sr_store(&other, "o", 1, 0, 80);
	receive(200, WAIT_MS);
	sr_request(&p, "p", 1, 0, 200);
	to = transfer(&p, 0);
	assert_int_equal(kvx_scheduler_send(sr.scheduler, &p.ask, &to), KVC_OK);
	kvx_scheduler_abort_send(sr.scheduler, &p.ask);
	sr_finish(&p);
	must_fail_with(10);
}

/* Its request has ended as it should, but blocks of it were not saved. */
SR_CASE(p7_what_a_producer_did_not_save_is_computed, plain)
{
	receive(200, WAIT_MS);
	begin_sending(200);
	sr_run_tokens(&p, 0, 80);
	SR_UNTIL(sr_is_right(&d, 0, 10));
	sr.drop_saves = 1;
	sr_run_tokens(&p, 80, 200);
	sr_finish(&p);
	must_fail_with(10);
	sr.drop_saves = 0;
	SR_UNTIL(!sr.scheduler->handovers);
	assert_int_equal(sr_stats().handovers_send_failed, 1);
}
SR_NAMED("p7_what_a_peer_did_not_save_is_computed", p7_what_a_producer_did_not_save_is_computed, plain, PEER)

/* Both learn it at once: the consumer computes, the producer ends, and nothing of it stays pinned. */
SR_CASE_ROW(p5_sides_with_other_weights_wait_for_nothing, plain, OTHER)
{
	uint64_t start;

	if (sr.row & SECOND) {
		begin_sending(200);
		sr_run_tokens(&p, 0, 200);
		sr_finish(&p);
		SR_UNTIL(sr_stats().handovers_sent == 1);
		start = sr_now_ns();
		receive(200, WAIT_MS);
	} else {
		receive(200, WAIT_MS);
		start = sr_now_ns();
		begin_sending(200);
		sr_run_tokens(&p, 0, 80);
	}
	must_fail_with(0);
	SR_UNTIL(!sr.scheduler->handovers);
	assert_true(sr_now_ns() - start < 10000u * KVX_MS);
	assert_int_equal(sr_stats().handovers_receive_other, 1);
	assert_int_equal(sr_stats().handovers_send_other, sr.row & SECOND ? 0 : 1);
	SR_UNTIL(rig_counter(&sr.rig, "kvd_handovers") == 0);
	assert_int_equal(rig_counter(&sr.rig, "kvd_handovers_ended_total{result=other_space}"), 1);
}
SR_ALSO(p5_sides_with_other_weights_wait_for_nothing, plain, OTHER | SECOND)

SR_CASE(p5_a_producer_that_never_comes_is_awaited_for_a_time, plain)
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
SR_NAMED("p5_a_peer_that_never_comes_is_awaited_for_a_time", p5_a_producer_that_never_comes_is_awaited_for_a_time,
	 plain, PEER)

/* Milliseconds that a consumer of 200 tokens waits which names no time, and what computing them takes. */
static uint32_t wait_ms(uint64_t *p_compute_ns)
{
	const uint64_t before = sr_now_ns();
	uint32_t ms;

	receive(200, 0);
	ms = sr.scheduler->handovers->timeout_ms;
	assert_in_range(sr.scheduler->handovers->until_ns, before + ms * KVX_MS, sr_now_ns() + ms * KVX_MS);
	*p_compute_ns = kvx_cost_model_compute_ns(&sr.scheduler->cost_model, 0, 200);
	sr_finish(&d);
	SR_UNTIL(!sr.scheduler->handovers && sr.scheduler->load_count == 0);

	return ms;
}

SR_CASE(p5_a_prompt_is_awaited_for_twice_what_computing_it_takes, plain)
{
	kvx_step_work_t work = {0};
	uint64_t compute_ns;
	uint32_t ms;

	assert_int_equal(wait_ms(&compute_ns), 30000); /* nothing is known yet */
	assert_int_equal(compute_ns, 0);
	kvx_step_work_add(&work, 0, 200);
	kvx_cost_model_add_step(&sr.scheduler->cost_model, &work, 300u * KVX_MS);
	ms = wait_ms(&compute_ns);
	assert_int_equal(ms, 1000 + 2 * compute_ns / KVX_MS);
	assert_in_range(compute_ns, KVX_MS, 1000u * KVX_MS);
	for (uint32_t i = 0; i < 100; i++) {
		kvx_cost_model_add_step(&sr.scheduler->cost_model, &work, 60000u * KVX_MS);
	}
	assert_int_equal(wait_ms(&compute_ns), 30000);
	assert_true(compute_ns > 15000u * KVX_MS);
}

/* The daemon has a deadline of its own, and does not tell of it now; nor is it taken for dead. */
SR_CASE(p5_a_stopped_daemon_does_not_prolong_the_wait, lenient)
{
	receive(200, 300);
	(void)sr_step();
	rig_signal(&sr.rig, SIGSTOP);
	SR_UNTIL(sr_outcome(&d).load != KVC_PENDING);
	assert_true(kvx_scheduler_is_ready(sr.scheduler));
	rig_signal(&sr.rig, SIGCONT);
	sr_finish(&d);
	SR_UNTIL(!sr.scheduler->handovers);
}

/* What is computed from here on may be of other weights: its consumer is told at once. */
SR_CASE(p1_weights_that_may_have_changed_end_what_is_handed_over, plain)
{
	kvc_handover_info_t info = {.struct_size = sizeof info};
	kvc_handover_t *taken = NULL;

	assert_int_equal(kvc_handover_recv(sr.space[KVX_HOST_MEM], "x", WAIT_MS, &taken), KVC_OK);
	begin_sending(203);
	sr_run_tokens(&p, 0, 80);
	await_units(taken, 10, KVC_HANDOVER_SENDING);
	kvx_scheduler_suspend(sr.scheduler);
	SR_UNTIL((kvc_handover_get_info(taken, &info), info.status != KVC_PENDING));
	assert_true(info.status < 0);
	kvc_handover_done(taken, 0);
	sr_finish(&p);
	SR_UNTIL(!sr.scheduler->handovers);
}

SR_CASE(p1_weights_that_may_have_changed_wait_for_no_hand_over, plain)
{
	receive(200, WAIT_MS);
	(void)sr_step();
	assert_int_equal(sr_outcome(&d).load, KVC_PENDING);
	kvx_scheduler_suspend(sr.scheduler);
	SR_UNTIL(sr_outcome(&d).load != KVC_PENDING);
	assert_true(sr_outcome(&d).load < 0 || sr_outcome(&d).load == KVC_MISS);
	sr_finish(&d);
	SR_UNTIL(!sr.scheduler->handovers);
}

/* The ranks are told of its load, so that its blocks are freed, and at once of its end. */
SR_CASE(p4_an_aborted_consumer_leaves_nothing, plain)
{
	receive(200, WAIT_MS);
	begin_sending(200);
	sr_run_tokens(&p, 0, 80);
	SR_UNTIL(sr_is_right(&d, 0, 10));
	sr_finish(&d);
	(void)sr_step();
	assert_int_equal(sr.plan.dead, 1);
	assert_true(sr.plan.drops >= 1);
	SR_UNTIL(sr_stats().leases_open == 0 && sr.scheduler->load_count == 0);
	sr_run_tokens(&p, 80, 200);
	sr_finish(&p);
	SR_UNTIL(!sr.scheduler->handovers);
}
SR_NAMED("p4_an_aborted_consumer_of_a_peer_leaves_nothing", p4_an_aborted_consumer_leaves_nothing, plain, PEER)

SR_CASE(p7_without_the_daemon_the_wait_ends, plain)
{
	receive(200, WAIT_MS);
	begin_sending(200);
	(void)sr_step();
	rig_kill(&sr.rig);
	SR_UNTIL(sr_outcome(&d).load != KVC_PENDING);
	sr_finish(&p);
	(void)sr_step();
	assert_false(kvx_scheduler_has_pending(sr.scheduler)); /* the engine may sleep until there is a daemon again */
	sr_restart_daemon();
	SR_UNTIL(!sr.scheduler->handovers);
	assert_int_equal(sr_stats().handovers_send_failed, 1);
}

/* ---- a producer that cannot begin ------------------------------------------------------------ */

/* All of the prompt in one step, and the engine has ended it. */
static void send_in_one_step(uint32_t n)
{
	kvx_transfer_t to;

	sr_request(&p, "p", 1, 0, n);
	to = transfer(&p, 0);
	assert_int_equal(kvx_scheduler_send(sr.scheduler, &p.ask, &to), KVC_OK);
	(void)sr_look_up(&p);
	sr_place(&p, 0, 0);
	sr_run_tokens(&p, 0, n);
	if (sr.row & ABORT) {
		kvx_scheduler_abort_send(sr.scheduler, &p.ask);
	}
	sr_finish(&p);
	(void)sr_step();
	assert_false(kvx_scheduler_has_sent(sr.scheduler, &p.ask));
}

/* The consumer gets all of it when the daemon goes on, or learns that nothing comes. */
SR_CASE(p7_a_prompt_computed_while_the_daemon_is_silent_is_handed_over, impatient)
{
	receive(203, WAIT_MS);
	SR_UNTIL(rig_counter(&sr.rig, "kvd_handovers") == 1);
	rig_signal(&sr.rig, SIGSTOP);
	SR_UNTIL(kvx_space_miss_reason(sr.scheduler, 0) == KV_WHY_DAEMON_STALE);
	send_in_one_step(203);
	assert_int_equal(sr_outcome(&d).load, KVC_PENDING);
	assert_true(kvx_scheduler_has_pending(sr.scheduler));
	rig_signal(&sr.rig, SIGCONT);
	SR_UNTIL(sr_outcome(&d).load != KVC_PENDING);
	if (!(sr.row & ABORT)) { /* else it loads what was saved by then */
		assert_int_equal(sr_outcome(&d).load, KVC_OK);
		assert_true(sr_is_right(&d, 0, sr.row & PRIVATE ? 26 : 25));
	}
	SR_UNTIL(!sr.scheduler->handovers && rig_counter(&sr.rig, "kvd_handovers") == 0);
	assert_int_equal(sr_stats().handovers_sent, sr.row & ABORT ? 0 : 1);
}
SR_ALSO(p7_a_prompt_computed_while_the_daemon_is_silent_is_handed_over, impatient, PRIVATE)
SR_NAMED("p5_a_producer_aborted_while_the_daemon_is_silent_is_not_awaited",
	 p7_a_prompt_computed_while_the_daemon_is_silent_is_handed_over, impatient, ABORT)

/* What it has computed without a daemon is not saved, and the next daemon's consumer does not wait for it. */
SR_CASE(p5_a_producer_that_had_no_daemon_is_not_awaited, plain)
{
	rig_kill(&sr.rig);
	SR_UNTIL(!kvx_daemon_is_alive(sr.scheduler));
	send_in_one_step(200);
	sr_restart_daemon();
	receive(200, WAIT_MS);
	must_fail_with(0);
	SR_UNTIL(!sr.scheduler->handovers);
	assert_int_equal(sr_stats().handovers_send_failed, 1);
}
SR_ALSO(p5_a_producer_that_had_no_daemon_is_not_awaited, plain, ABORT)

/* ---- from another node ----------------------------------------------------------------------- */

static void ask_for_remote(uint32_t n, const char *peer)
{
	kvx_transfer_t from;

	sr_request(&d, "d", 1, 0, n);
	d.ask.whole = 1;
	from = transfer(&d, WAIT_MS);
	from.peer = peer;
	assert_int_equal(kvx_scheduler_receive(sr.scheduler, &d.ask, &from), KVC_OK);
}

/* A name that the daemon does not know: it says so, and the engine computes what it was promised. */
SR_CASE(p7_an_unknown_peer_is_a_miss_at_once, plain)
{
	const uint64_t start = sr_now_ns();

	memset(&fetched, 0, sizeof fetched);
	fetched.real = 1;
	assert_string_equal(kvx_scheduler_peer_name(sr.scheduler), "");
	ask_for_remote(200, "nobody");
	assert_int_equal(sr_match(&d), 200);
	sr_place(&d, 100, 0);
	sr_start_load(&d);
	must_fail_with(0);
	assert_true(sr_now_ns() - start < 5000u * KVX_MS);
	sr_finish(&d);
	SR_UNTIL(!sr.scheduler->handovers);
}

/* Nothing is promised, and nothing is asked for twice. */
SR_CASE_ROW(p7_a_fetch_that_cannot_be_asked_for_promises_nothing, plain, PEER)
{
	memset(&fetched, 0, sizeof fetched);
	fetched.refused = KVC_ERR_BUSY;
	ask_for_remote(200, "node1");
	assert_int_equal(sr_look_up(&d), 0);
	assert_int_equal(sr_look_up(&d), 0);
	assert_int_equal(fetched.calls, 1);
	sr_finish(&d);
	SR_UNTIL(!sr.scheduler->handovers);
}

/* Hashes that are not there yet: the peer is asked when they are. */
SR_CASE_ROW(p7_a_peer_is_asked_when_the_prompt_has_names, plain, PEER)
{
	memset(&fetched, 0, sizeof fetched);
	ask_for_remote(200, "node1");
	d.hashes.n = 24;
	assert_int_equal(sr_look_up(&d), 0);
	assert_int_equal(fetched.calls, 0);
	d.hashes.n = 25;
	assert_int_equal(sr_look_up(&d), 200);
	check_fetched();
	sr_finish(&d);
	SR_UNTIL(!sr.scheduler->handovers);
}

/* Tokens do not say which extra keys are in our own keys. */
SR_CASE_ROW(p7_a_prompt_with_extra_keys_is_not_asked_of_a_peer, own_keys, PEER)
{
	const void *extra[25] = {"an image"};
	const uint32_t extra_len[25] = {8};
	const kvx_units_t units = {.struct_size = sizeof units,
				   .n = 200,
				   .tokens = d.tokens,
				   .extra = extra,
				   .extra_len = extra_len,
				   .extra_count = 25};

	memset(&fetched, 0, sizeof fetched);
	ask_for_remote(200, "node1");
	assert_int_equal(kvx_scheduler_add_tokens(sr.scheduler, &d.ask, &units), KVC_OK);
	assert_int_equal(sr_look_up(&d), 0);
	assert_int_equal(fetched.calls, 0);
	sr_place(&d, 100, 0);
	SR_UNTIL(!sr.scheduler->handovers);
}

SR_CASE(p10_a_peers_name_that_is_too_long_is_refused, plain)
{
	char name[KVC_MAX_PEER + 2];
	kvx_transfer_t from;

	memset(name, 'n', sizeof name - 1);
	name[sizeof name - 1] = '\0';
	sr_request(&d, "d", 1, 0, 200);
	from = transfer(&d, WAIT_MS);
	from.peer = name;
	assert_int_equal(kvx_scheduler_receive(sr.scheduler, &d.ask, &from), KVC_ERR_ARG);
	from.peer = name + 1;
	assert_int_equal(kvx_scheduler_receive(sr.scheduler, &d.ask, &from), KVC_OK);
}

/* Less than a block: nothing is promised, and the entry of its producer is complete at once. */
SR_CASE(p7_a_prompt_shorter_than_a_block_is_computed, plain)
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
SR_CASE(p4_a_promise_that_is_not_taken_is_given_up, plain)
{
	receive(200, WAIT_MS);
	sr_advance(&d, 0, 0);
	kvx_scheduler_preempt(sr.scheduler, &d.ask);
	sr_finish(&d);
	SR_UNTIL(!sr.scheduler->handovers && sr.scheduler->load_count == 0);
}

SR_MAIN
