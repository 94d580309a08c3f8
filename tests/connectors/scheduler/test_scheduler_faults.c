/* The scheduling half when the daemon is absent, stopped, killed, late or full, and when the engine does things in the
 * worst order. */
#include "connectors/scheduler/sched_rig.h"
#include "engine/check.h"

#include "kv/env.h"
#include "kv_test.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static sr_request_t a, b;

static uint64_t now_us(void)
{
	return kv_now_ns(&kv_env_posix) / 1000u;
}

/* No daemon: requests come and go, nothing is found, saved or kept, and it takes next to no time (measured: 2 us a
 * request; the limit, of 10 ms, is for sanitizers and busy machines). */
static void p7_without_a_daemon_nothing_is_done_and_nothing_kept(void **state)
{
	kvx_scheduler_stats_t stats;
	uint64_t start_us;

	(void)state;
	sr_start(&(sr_options_t){.foreign = 1, .alone = 1});
	sr_request(&a, "a", 1, 0, 800);
	start_us = now_us();
	for (uint32_t i = 0; i < 2000; i++) {
		assert_int_equal(sr_look_up(&a), 0);
		sr_place(&a, 0, 0);
		sr_advance(&a, 800, 800);
		(void)sr_step();
		assert_int_equal(sr.plan.saves + sr.plan.loads, 0);
		assert_false(kvx_scheduler_has_pending(sr.scheduler));
		sr_finish(&a);
	}
	assert_true(now_us() - start_us < 20u * 1000000u);
	stats = sr_stats();
	assert_int_equal(stats.match_no_daemon, 2000);
	assert_int_equal(stats.requests + stats.puts_open + stats.leases_open, 0);
	sr_abandon();
}

/* Killed and started again, empty: misses, then hits come back; the blocks it lost are saved from requests still alive.
 */
static void p7_hits_come_back_after_the_daemon_was_killed(void **state)
{
	(void)state;
	sr_start(&(sr_options_t){.foreign = 1});
	sr_store(&a, "a", 1, 0, 160);
	for (uint32_t round = 0; round < 3; round++) {
		rig_kill(&sr.rig);
		(void)sr_step(); /* notices; without it a match is stale for 50 ms and its load dead */
		sr_request(&b, "b", 1, 0, 160);
		assert_int_equal(sr_run(&b, 100), 0);
		assert_int_equal(sr.plan.saves, 0);
		sr_finish(&b);
		rig_start(&sr.rig);
		sr_wait_ready();
	}
	assert_true(sr_stats().attaches >= 4);

	/* Memory is lost, what is on disk may not be; all of it is there again after the next advance. */
	sr_advance(&a, 160, 0);
	(void)sr_step();
	sr_settle();
	sr_request(&b, "b", 1, 0, 161);
	assert_int_equal(sr_run(&b, 100), 160);
	sr_stop();
}

/* Stopped: a plan waits once, and not longer than it may; later ones do not wait; no engine is kept spinning; all is
 * well after SIGCONT. */
static void p7_a_stopped_daemon_holds_no_step(void **state)
{
	uint64_t start_us, longest = 0, total = 0;

	(void)state;
	sr_start(&(sr_options_t){.foreign = 1, .wait_us = 500, .silence = "50ms"});
	rig_signal(&sr.rig, SIGSTOP);
	for (uint32_t i = 0; i < 100; i++) {
		char id[16];

		(void)snprintf(id, sizeof id, "r%u", i);
		sr_request(&a, id, i, 0, 80);
		start_us = now_us();
		(void)sr_look_up(&a);
		sr_place(&a, i * 4u, 0);
		sr_advance(&a, 80, 80);
		(void)sr_step();
		total += now_us() - start_us;
		longest = now_us() - start_us > longest ? now_us() - start_us : longest;
		sr_finish(&a);
		usleep(1000);
	}
	assert_false(kvx_scheduler_has_pending(sr.scheduler));
	assert_true(longest < 900000 && total < 20u * 1000000u); /* one that waits does so for a second */
	SR_UNTIL(sr_stats().puts_open == 0)                      /* what was asked for is given up after a second */
	rig_signal(&sr.rig, SIGCONT);
	sr_wait_ready();
	sr_request(&a, "last", 1000, 0, 80);
	(void)sr_run(&a, 0);
	sr_stop();
}

/* A request of n tokens is computed and its blocks are asked for; the answer will be late. */
static void ask_of_a_stopped_daemon(sr_request_t *request, uint32_t n)
{
	sr_request(request, "a", 1, 0, n);
	sr_place(request, 0, 0);
	sr_compute(request, 0, n / SR_UNIT);
	rig_signal(&sr.rig, SIGSTOP);
	sr_advance(request, n, n);
	(void)sr_step();
	assert_int_equal(sr.plan.saves, 0);
	assert_true(sr_stats().puts_open > 0);
}

/* The late answer comes, and goes out with the next message. */
static void continue_daemon(void)
{
	rig_signal(&sr.rig, SIGCONT);
	for (int i = 0; i < 1000 && sr_stats().late_answers == 0; i++) {
		usleep(1000);
		(void)kvx_scheduler_has_pending(sr.scheduler);
	}
	(void)sr_step();
}

/* An answer that comes after its plan: the engine is asked to step once more, and the blocks go out early. */
static void p7_a_late_answer_goes_out_in_a_later_message(void **state)
{
	(void)state;
	sr_start(&(sr_options_t){.foreign = 1, .wait_us = 1});
	ask_of_a_stopped_daemon(&a, 160);
	assert_true(kvx_scheduler_has_pending(sr.scheduler));
	rig_signal(&sr.rig, SIGCONT);
	SR_UNTIL(sr.plan.saves > 0)
	assert_int_equal(sr.plan.early, 1);
	assert_int_equal(sr.plan.save_blocks, 20);
	assert_int_equal(sr_stats().late_answers, 1);
	sr_stop();
}

/* The same, but the blocks were allocated to somebody else meanwhile: in the very plan, they still hold what they did;
 * before it, they do not. */
static void p1_blocks_reallocated_before_the_answer_are_not_saved(void **state)
{
	(void)state;
	for (uint32_t before = 0; before < 2; before++) {
		sr_start(&(sr_options_t){.foreign = 1, .wait_us = 1});
		ask_of_a_stopped_daemon(&a, 80);
		sr_finish(&a);
		sr_request(&b, "b", 2, 0, 40);
		sr_place(&b, 5, 0);
		if (before) {
			(void)sr_step();
			sr_compute(&b, 0, 5);
		}
		continue_daemon();
		assert_int_equal(sr.plan.early, !before);
		assert_int_equal(sr_stats().save_lost, before ? 10 : 0);
		sr_stop();
	}
}

/* A request whose id is too long for us is not saved, but what it was given is fenced: old bytes of its blocks must not
 * be saved. */
static void p1_blocks_of_a_request_that_is_not_served_are_not_saved(void **state)
{
	char id[KVX_MAX_ID + 2];

	(void)state;
	memset(id, 'x', sizeof id);
	sr_start(&(sr_options_t){.foreign = 1, .wait_us = 1});
	ask_of_a_stopped_daemon(&a, 80);
	sr_finish(&a);

	sr_request(&b, "b", 2, 0, 40);
	for (uint32_t i = 0; i < 5; i++) {
		b.ids[0][i] = 5 + i;
	}
	const kvx_block_table_t table = {.struct_size = sizeof table, .n = 5, .ids = b.ids[0]};
	const kvx_ask_t ask = {.struct_size = sizeof ask, .id = id, .id_len = sizeof id, .tokens = 40};

	assert_int_equal(kvx_scheduler_append_blocks(sr.scheduler, &ask, &table), KVC_ERR_ARG);
	(void)sr_step();
	assert_int_equal(sr.plan.fences, 5);
	sr_compute(&b, 0, 5);
	continue_daemon();
	assert_int_equal(sr.plan.saves, 0);
	assert_int_equal(sr_stats().save_lost, 10);
	sr_stop();
}

/* A lease that does not come in time is nothing promised; it is there when the engine asks again, and goes back when
 * the request runs without. */
static void p7_nothing_is_promised_that_is_not_leased(void **state)
{
	(void)state;
	sr_start(&(sr_options_t){.foreign = 1, .wait_us = 1});
	sr_store(&a, "a", 1, 0, 80);
	sr_request(&b, "b", 1, 0, 100);
	rig_signal(&sr.rig, SIGSTOP);
	assert_int_equal(sr_look_up(&b), 0);
	assert_int_equal(sr.hit.why, KV_WHY_TIMEOUT);
	rig_signal(&sr.rig, SIGCONT);
	SR_UNTIL(sr_look_up(&b) == 80)
	sr_place(&b, 100, 0);
	sr_advance(&b, 100, 100); /* the engine has computed it instead */
	(void)sr_step();
	assert_int_equal(sr.plan.loads, 0);
	assert_int_equal(sr_stats().leases_open, 0);
	sr_stop();
}

/* The daemon dies between promise and plan: the ranks are told that the load is dead, and the request computes. */
static void p7_a_load_whose_daemon_died_is_reported_as_failed(void **state)
{
	(void)state;
	sr_start(&(sr_options_t){.foreign = 1});
	sr_find(&b, 100);
	rig_kill(&sr.rig);
	(void)kvx_scheduler_has_pending(sr.scheduler);
	sr_start_load(&b);
	(void)sr_step();
	assert_int_equal(sr.plan.dead, 1);
	assert_int_equal(sr.plan.failed_blocks, 10);
	assert_int_equal(sr_stats().lease_lost, 1);
	assert_int_equal(sr_stats().leases_open, 0);
	sr_abandon();
}

/* Reports and tables that make no sense: counted, ignored. */
static void p10_unsound_reports_and_block_tables_are_refused(void **state)
{
	const uint32_t ids[4] = {1, 2, SR_BLOCKS, 4};
	kvx_block_table_t table = {.struct_size = sizeof table, .n = 4, .fresh = 4, .ids = ids};
	kvx_ask_t ask = {.struct_size = sizeof ask, .id = "x", .id_len = 1, .tokens = 100};
	_Alignas(8) uint8_t junk[64] = {1, 2, 3};

	(void)state;
	sr_start(&(sr_options_t){.foreign = 1});
	kvx_scheduler_take_report(sr.scheduler, NULL, 0);
	kvx_scheduler_take_report(sr.scheduler, junk, sizeof junk);
	kvx_scheduler_take_report(sr.scheduler, junk + 1, 20);
	assert_int_equal(sr_stats().bad_reports, 3);
	assert_int_equal(kvx_scheduler_append_blocks(sr.scheduler, &ask, &table), KVC_ERR_ARG);
	table.n = 2;
	table.group = 7;
	assert_int_equal(kvx_scheduler_append_blocks(sr.scheduler, &ask, &table), KVC_ERR_ARG);
	table.group = 0;
	table.first = 3;
	assert_int_equal(kvx_scheduler_append_blocks(sr.scheduler, &ask, &table), KVC_ERR_ARG);
	ask.id_len = KVX_MAX_ID + 1;
	assert_int_equal(kvx_scheduler_append_blocks(sr.scheduler, &ask, &table), KVC_ERR_ARG);
	kvx_scheduler_match(sr.scheduler, &ask, &sr.hit);
	assert_int_equal(sr.hit.tokens, 0);
	ask.id_len = 1;
	kvx_scheduler_match(sr.scheduler, &ask, &sr.hit); /* no hashes */
	assert_int_equal(sr.hit.tokens, 0);
	kvx_scheduler_advance(sr.scheduler, &ask, 100, 100);
	kvx_scheduler_finish(sr.scheduler, &ask);
	sr_stop();
}

/* ---- ten thousand operations ----------------------------------------------------------------- */

#define LIVE 24u

static kv_test_rng_t rng;
static sr_request_t request[LIVE];
static int alive[LIVE];
static uint32_t computed[LIVE];

static uint32_t random_below(uint32_t n)
{
	return (uint32_t)kv_test_below(&rng, n);
}

static void begin_one(uint32_t i)
{
	static uint32_t serial;
	const uint32_t n = 8u + random_below(150);
	char id[16];

	(void)snprintf(id, sizeof id, "c%u", serial++);
	sr_request(&request[i], id, random_below(30), n / 2u, n);
	request[i].ask.busy = random_below(2);
	request[i].ask.whole = (int)random_below(2);
	(void)sr_look_up(&request[i]);
	sr_place(&request[i], i * (SR_BLOCKS / LIVE), 0);
	if (sr.hit.tokens) {
		sr_start_load(&request[i]);
	}
	sr_compute(&request[i], sr.hit.tokens / SR_UNIT, n / SR_UNIT);
	computed[i] = sr.hit.tokens;
	alive[i] = 1;
}

static void operate(void)
{
	const uint32_t i = random_below(LIVE), what = random_below(100), more = 1u + random_below(40);

	if (!alive[i]) {
		begin_one(i);
	} else if (what < 55) {
		computed[i] = computed[i] + more < request[i].n ? computed[i] + more : request[i].n;
		computed[i] /= random_below(50) == 0 ? 2u : 1u;
		sr_advance(&request[i], computed[i], more);
	} else if (what < 70) {
		sr_finish(&request[i]);
		alive[i] = 0;
	} else if (what < 75) {
		kvx_scheduler_preempt(sr.scheduler, &request[i].ask);
		sr_place(&request[i], i * (SR_BLOCKS / LIVE), 0);
		computed[i] = 0;
	} else {
		sr.fail_loads = random_below(20) == 0;
		sr.drop_saves = random_below(20) == 0;
		(void)sr_step();
	}
}

static void p4_ten_thousand_operations_leak_nothing(void **state)
{
	(void)state;
	rng.state = kv_test_seed();
	sr_start(&(sr_options_t){.foreign = 1, .cost_model = 1, .wait_us = 500});
	for (uint32_t n = 0; n < 10000; n++) {
		operate();
		if (n % 2500 == 2499) {
			rig_kill(&sr.rig);
			(void)sr_step();
			rig_start(&sr.rig);
			sr_wait_ready();
		}
	}
	sr.fail_loads = 0;
	for (uint32_t i = 0; i < LIVE; i++) {
		sr_finish(&request[i]);
	}
	sr_settle();
	assert_int_equal(sr_stats().requests, 0);
	assert_true(sr_stats().loads_done > 100);
	assert_true(sr_stats().save_done > 100);
	sr_stop();
}

SR_MAIN(cmocka_unit_test(p7_without_a_daemon_nothing_is_done_and_nothing_kept),
	cmocka_unit_test(p7_hits_come_back_after_the_daemon_was_killed),
	cmocka_unit_test(p7_a_stopped_daemon_holds_no_step),
	cmocka_unit_test(p7_a_late_answer_goes_out_in_a_later_message),
	cmocka_unit_test(p1_blocks_reallocated_before_the_answer_are_not_saved),
	cmocka_unit_test(p1_blocks_of_a_request_that_is_not_served_are_not_saved),
	cmocka_unit_test(p7_nothing_is_promised_that_is_not_leased),
	cmocka_unit_test(p7_a_load_whose_daemon_died_is_reported_as_failed),
	cmocka_unit_test(p10_unsound_reports_and_block_tables_are_refused),
	cmocka_unit_test(p4_ten_thousand_operations_leak_nothing))
