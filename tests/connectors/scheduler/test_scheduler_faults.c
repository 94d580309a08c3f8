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
	kvx_hit_t hit;
	rig_t rig;
	sr_t sr;

	(void)state;
	rig_init(&rig, sr_program);
	sr_open(&sr, &rig, &(sr_options_t){.foreign = 1, .no_hand = 1});
	sr_request(&sr, &a, "a", 1, 0, 800);
	start_us = now_us();
	for (uint32_t i = 0; i < 2000; i++) {
		kvx_scheduler_match(sr.scheduler, &a.ask, &hit);
		assert_int_equal(hit.tokens, 0);
		sr_place(&sr, &a, 0, 0);
		kvx_scheduler_advance(sr.scheduler, &a.ask, 800, 800);
		(void)sr_step(&sr);
		assert_int_equal(sr.saves + sr.loads, 0);
		assert_false(kvx_scheduler_has_pending(sr.scheduler));
		kvx_scheduler_finish(sr.scheduler, &a.ask);
	}
	assert_true(now_us() - start_us < 20u * 1000000u);
	stats = sr_stats(&sr);
	assert_int_equal(stats.match_no_daemon, 2000);
	assert_int_equal(stats.requests + stats.puts_open + stats.leases_open, 0);
	sr_close(&sr);
	rig_fini(&rig);
}

/* Killed and started again, empty: misses, then hits come back; the blocks it lost are saved from requests still alive.
 */
static void p7_hits_come_back_after_the_daemon_was_killed(void **state)
{
	rig_t rig;
	sr_t sr;

	(void)state;
	sr_start(&sr, &rig, &(sr_options_t){.foreign = 1});
	sr_store(&sr, &a, "a", 1, 0, 160);
	for (uint32_t round = 0; round < 3; round++) {
		rig_kill(&rig);
		(void)sr_step(&sr); /* notices; without it a match is stale for 50 ms and its load dead */
		sr_request(&sr, &b, "b", 1, 0, 160);
		assert_int_equal(sr_run(&sr, &b, 100), 0);
		assert_int_equal(sr.saves, 0);
		kvx_scheduler_finish(sr.scheduler, &b.ask);
		rig_start(&rig);
		sr_wait_ready(&sr);
	}
	assert_true(sr_stats(&sr).attaches >= 4);

	/* Memory is lost, what is on disk may not be; all of it is there again after the next advance. */
	kvx_scheduler_advance(sr.scheduler, &a.ask, 160, 0);
	(void)sr_step(&sr);
	sr_settle(&sr);
	sr_request(&sr, &b, "b", 1, 0, 161);
	assert_int_equal(sr_run(&sr, &b, 100), 160);
	kvx_scheduler_finish(sr.scheduler, &a.ask);
	kvx_scheduler_finish(sr.scheduler, &b.ask);
	sr_stop(&sr, &rig);
}

/* Stopped: a plan waits once, and not longer than it may; later ones do not wait; no engine is kept spinning; all is
 * well after SIGCONT. */
static void p7_a_stopped_daemon_holds_no_step(void **state)
{
	uint64_t start_us, longest = 0, total = 0;
	kvx_hit_t hit;
	rig_t rig;
	sr_t sr;

	(void)state;
	sr_start(&sr, &rig, &(sr_options_t){.foreign = 1, .wait_us = 500, .silence = "50ms"});
	rig_signal(&rig, SIGSTOP);
	for (uint32_t i = 0; i < 100; i++) {
		char id[16];

		(void)snprintf(id, sizeof id, "r%u", i);
		sr_request(&sr, &a, id, i, 0, 80);
		start_us = now_us();
		kvx_scheduler_match(sr.scheduler, &a.ask, &hit);
		sr_place(&sr, &a, i * 4u, 0);
		kvx_scheduler_advance(sr.scheduler, &a.ask, 80, 80);
		(void)sr_step(&sr);
		total += now_us() - start_us;
		longest = now_us() - start_us > longest ? now_us() - start_us : longest;
		kvx_scheduler_finish(sr.scheduler, &a.ask);
		usleep(1000);
	}
	assert_false(kvx_scheduler_has_pending(sr.scheduler));
	assert_true(longest < 900000 && total < 20u * 1000000u); /* one that waits does so for a second */
	for (int i = 0; i < 10000 && sr_stats(&sr).puts_open > 0;
	     i++) { /* what was asked for is given up after a second */
		usleep(1000);
		(void)sr_step(&sr);
	}
	assert_int_equal(sr_stats(&sr).puts_open, 0);
	rig_signal(&rig, SIGCONT);
	sr_wait_ready(&sr);
	sr_request(&sr, &a, "last", 1000, 0, 80);
	(void)sr_run(&sr, &a, 0);
	kvx_scheduler_finish(sr.scheduler, &a.ask);
	sr_stop(&sr, &rig);
}

/* A request of n tokens is computed and its blocks are asked for; the answer will be late. */
static void ask_of_a_stopped_daemon(sr_t *sr, const rig_t *rig, sr_request_t *request, uint32_t n)
{
	sr_request(sr, request, "a", 1, 0, n);
	sr_place(sr, request, 0, 0);
	sr_compute(sr, request, 0, n / SR_UNIT);
	rig_signal(rig, SIGSTOP);
	kvx_scheduler_advance(sr->scheduler, &request->ask, n, n);
	(void)sr_step(sr);
	assert_int_equal(sr->saves, 0);
	assert_true(sr_stats(sr).puts_open > 0);
}

/* An answer that comes after its plan: the engine is asked to step once more, and the blocks go out early. */
static void p7_a_late_answer_goes_out_in_a_later_message(void **state)
{
	rig_t rig;
	sr_t sr;
	int i;

	(void)state;
	sr_start(&sr, &rig, &(sr_options_t){.foreign = 1, .wait_us = 1});
	ask_of_a_stopped_daemon(&sr, &rig, &a, 160);
	assert_true(kvx_scheduler_has_pending(sr.scheduler));
	rig_signal(&rig, SIGCONT);
	for (i = 0; i < 1000 && sr.saves == 0; i++) {
		usleep(1000);
		(void)sr_step(&sr);
	}
	assert_int_equal(sr.early, 1);
	assert_int_equal(sr.save_blocks, 20);
	assert_int_equal(sr_stats(&sr).late_answers, 1);
	kvx_scheduler_finish(sr.scheduler, &a.ask);
	sr_stop(&sr, &rig);
}

/* The same, but the blocks were allocated to somebody else meanwhile: in the very plan, they still hold what they did;
 * before it, they do not. */
static void p1_blocks_reallocated_before_the_answer_are_not_saved(void **state)
{
	rig_t rig;
	sr_t sr;

	(void)state;
	for (uint32_t before = 0; before < 2; before++) {
		sr_start(&sr, &rig, &(sr_options_t){.foreign = 1, .wait_us = 1});
		ask_of_a_stopped_daemon(&sr, &rig, &a, 80);
		kvx_scheduler_finish(sr.scheduler, &a.ask);
		sr_request(&sr, &b, "b", 2, 0, 40);
		sr_place(&sr, &b, 5, 0);
		if (before) {
			(void)sr_step(&sr);
			sr_compute(&sr, &b, 0, 5);
		}
		rig_signal(&rig, SIGCONT);
		for (int i = 0; i < 1000 && sr_stats(&sr).late_answers == 0; i++) {
			usleep(1000);
			(void)kvx_scheduler_has_pending(sr.scheduler);
		}
		(void)sr_step(&sr);
		assert_int_equal(sr.early, !before);
		assert_int_equal(sr_stats(&sr).save_lost, before ? 10 : 0);
		kvx_scheduler_finish(sr.scheduler, &b.ask);
		sr_stop(&sr, &rig);
	}
}

/* A request whose id is too long for us is not saved, but what it was given is fenced: old bytes of its blocks must not
 * be saved. */
static void p1_blocks_of_a_request_that_is_not_served_are_not_saved(void **state)
{
	char id[KVX_MAX_ID + 2];
	rig_t rig;
	sr_t sr;

	(void)state;
	memset(id, 'x', sizeof id);
	sr_start(&sr, &rig, &(sr_options_t){.foreign = 1, .wait_us = 1});
	ask_of_a_stopped_daemon(&sr, &rig, &a, 80);
	kvx_scheduler_finish(sr.scheduler, &a.ask);

	sr_request(&sr, &b, "b", 2, 0, 40);
	for (uint32_t i = 0; i < 5; i++) {
		b.ids[0][i] = 5 + i;
	}
	const kvx_block_table_t table = {.struct_size = sizeof table, .n = 5, .ids = b.ids[0]};
	const kvx_ask_t ask = {.struct_size = sizeof ask, .id = id, .id_len = sizeof id, .tokens = 40};

	assert_int_equal(kvx_scheduler_append_blocks(sr.scheduler, &ask, &table), KVC_ERR_ARG);
	(void)sr_step(&sr);
	assert_int_equal(sr.fences, 5);
	sr_compute(&sr, &b, 0, 5);
	rig_signal(&rig, SIGCONT);
	for (int i = 0; i < 1000 && sr_stats(&sr).late_answers == 0; i++) {
		usleep(1000);
		(void)kvx_scheduler_has_pending(sr.scheduler);
	}
	(void)sr_step(&sr);
	assert_int_equal(sr.saves, 0);
	assert_int_equal(sr_stats(&sr).save_lost, 10);
	sr_stop(&sr, &rig);
}

/* A lease that does not come in time is nothing promised; it is there when the engine asks again, and goes back when
 * the request runs without. */
static void p7_nothing_is_promised_that_is_not_leased(void **state)
{
	kvx_hit_t hit;
	rig_t rig;
	sr_t sr;

	(void)state;
	sr_start(&sr, &rig, &(sr_options_t){.foreign = 1, .wait_us = 1});
	sr_store(&sr, &a, "a", 1, 0, 80);
	sr_request(&sr, &b, "b", 1, 0, 100);
	rig_signal(&rig, SIGSTOP);
	kvx_scheduler_match(sr.scheduler, &b.ask, &hit);
	assert_int_equal(hit.tokens, 0);
	assert_int_equal(hit.why, KV_WHY_TIMEOUT);
	rig_signal(&rig, SIGCONT);
	for (int i = 0; i < 1000 && hit.tokens == 0; i++) {
		usleep(1000);
		(void)sr_step(&sr);
		kvx_scheduler_match(sr.scheduler, &b.ask, &hit);
	}
	assert_int_equal(hit.tokens, 80);
	sr_place(&sr, &b, 100, 0);
	kvx_scheduler_advance(sr.scheduler, &b.ask, 100, 100); /* the engine has computed it instead */
	(void)sr_step(&sr);
	assert_int_equal(sr.loads, 0);
	assert_int_equal(sr_stats(&sr).leases_open, 0);
	kvx_scheduler_finish(sr.scheduler, &a.ask);
	kvx_scheduler_finish(sr.scheduler, &b.ask);
	sr_stop(&sr, &rig);
}

/* The daemon dies between promise and plan: the ranks are told that the load is dead, and the request computes. */
static void p7_a_load_whose_daemon_died_is_reported_as_failed(void **state)
{
	kvx_hit_t hit;
	rig_t rig;
	sr_t sr;

	(void)state;
	sr_start(&sr, &rig, &(sr_options_t){.foreign = 1});
	sr_store(&sr, &a, "a", 1, 0, 80);
	sr_request(&sr, &b, "b", 1, 0, 100);
	kvx_scheduler_match(sr.scheduler, &b.ask, &hit);
	assert_int_equal(hit.tokens, 80);
	sr_place(&sr, &b, 100, 0);
	rig_kill(&rig);
	(void)kvx_scheduler_has_pending(sr.scheduler);
	kvx_scheduler_start_load(sr.scheduler, &b.ask, &hit);
	(void)sr_step(&sr);
	assert_int_equal(sr.dead, 1);
	assert_int_equal(sr.failed_blocks, 10);
	assert_int_equal(sr_stats(&sr).lease_lost, 1);
	assert_int_equal(sr_stats(&sr).leases_open, 0);
	kvx_scheduler_finish(sr.scheduler, &a.ask);
	kvx_scheduler_finish(sr.scheduler, &b.ask);
	sr_close(&sr);
	rig_fini(&rig);
}

/* Reports and tables that make no sense: counted, ignored. */
static void p10_unsound_reports_and_block_tables_are_refused(void **state)
{
	const uint32_t ids[4] = {1, 2, SR_BLOCKS, 4};
	kvx_block_table_t table = {.struct_size = sizeof table, .n = 4, .fresh = 4, .ids = ids};
	kvx_ask_t ask = {.struct_size = sizeof ask, .id = "x", .id_len = 1, .tokens = 100};
	_Alignas(8) uint8_t junk[64] = {1, 2, 3};
	kvx_hit_t hit;
	rig_t rig;
	sr_t sr;

	(void)state;
	sr_start(&sr, &rig, &(sr_options_t){.foreign = 1});
	kvx_scheduler_take_report(sr.scheduler, NULL, 0);
	kvx_scheduler_take_report(sr.scheduler, junk, sizeof junk);
	kvx_scheduler_take_report(sr.scheduler, junk + 1, 20);
	assert_int_equal(sr_stats(&sr).bad_reports, 3);
	assert_int_equal(kvx_scheduler_append_blocks(sr.scheduler, &ask, &table), KVC_ERR_ARG);
	table.n = 2;
	table.group = 7;
	assert_int_equal(kvx_scheduler_append_blocks(sr.scheduler, &ask, &table), KVC_ERR_ARG);
	table.group = 0;
	table.first = 3;
	assert_int_equal(kvx_scheduler_append_blocks(sr.scheduler, &ask, &table), KVC_ERR_ARG);
	ask.id_len = KVX_MAX_ID + 1;
	assert_int_equal(kvx_scheduler_append_blocks(sr.scheduler, &ask, &table), KVC_ERR_ARG);
	kvx_scheduler_match(sr.scheduler, &ask, &hit);
	assert_int_equal(hit.tokens, 0);
	ask.id_len = 1;
	kvx_scheduler_match(sr.scheduler, &ask, &hit); /* no hashes */
	assert_int_equal(hit.tokens, 0);
	kvx_scheduler_advance(sr.scheduler, &ask, 100, 100);
	kvx_scheduler_finish(sr.scheduler, &ask);
	sr_stop(&sr, &rig);
}

/* ---- ten thousand operations ----------------------------------------------------------------- */

#define LIVE 24u

typedef struct chaos {
	sr_t sr;
	rig_t rig;
	kv_test_rng_t rng;
	sr_request_t request[LIVE];
	int alive[LIVE];
	uint32_t computed[LIVE];
	uint32_t serial;
} chaos_t;

static void begin_one(chaos_t *chaos, uint32_t i)
{
	sr_request_t *request = &chaos->request[i];
	const uint32_t n = 8u + (uint32_t)kv_test_below(&chaos->rng, 150);
	kvx_hit_t hit;
	char id[16];

	(void)snprintf(id, sizeof id, "c%u", chaos->serial++);
	sr_request(&chaos->sr, request, id, (uint32_t)kv_test_below(&chaos->rng, 30), n / 2u, n);
	request->ask.busy = (uint32_t)kv_test_below(&chaos->rng, 2);
	request->ask.whole = (int)kv_test_below(&chaos->rng, 2);
	kvx_scheduler_match(chaos->sr.scheduler, &request->ask, &hit);
	sr_place(&chaos->sr, request, i * (SR_BLOCKS / LIVE), 0);
	if (hit.tokens) {
		kvx_scheduler_start_load(chaos->sr.scheduler, &request->ask, &hit);
	}
	sr_compute(&chaos->sr, request, hit.tokens / SR_UNIT, n / SR_UNIT);
	chaos->computed[i] = hit.tokens;
	chaos->alive[i] = 1;
}

static void advance_one(chaos_t *chaos, uint32_t i)
{
	const uint32_t more = 1u + (uint32_t)kv_test_below(&chaos->rng, 40);
	const uint32_t n = chaos->request[i].n;

	chaos->computed[i] = chaos->computed[i] + more < n ? chaos->computed[i] + more : n;
	if (kv_test_below(&chaos->rng, 50) == 0) {
		chaos->computed[i] /= 2u;
	}
	kvx_scheduler_advance(chaos->sr.scheduler, &chaos->request[i].ask, chaos->computed[i], more);
}

static void operate(chaos_t *chaos)
{
	const uint32_t i = (uint32_t)kv_test_below(&chaos->rng, LIVE), what = (uint32_t)kv_test_below(&chaos->rng, 100);

	if (!chaos->alive[i]) {
		begin_one(chaos, i);
	} else if (what < 55) {
		advance_one(chaos, i);
	} else if (what < 70) {
		kvx_scheduler_finish(chaos->sr.scheduler, &chaos->request[i].ask);
		chaos->alive[i] = 0;
	} else if (what < 75) {
		kvx_scheduler_preempt(chaos->sr.scheduler, &chaos->request[i].ask);
		sr_place(&chaos->sr, &chaos->request[i], i * (SR_BLOCKS / LIVE), 0);
		chaos->computed[i] = 0;
	} else {
		chaos->sr.fail_loads = kv_test_below(&chaos->rng, 20) == 0;
		chaos->sr.drop_saves = kv_test_below(&chaos->rng, 20) == 0;
		(void)sr_step(&chaos->sr);
	}
}

static void p4_ten_thousand_operations_leak_nothing(void **state)
{
	static chaos_t chaos;

	(void)state;
	chaos.rng.state = kv_test_seed();
	sr_start(&chaos.sr, &chaos.rig, &(sr_options_t){.foreign = 1, .cost_model = 1, .wait_us = 500});
	for (uint32_t n = 0; n < 10000; n++) {
		operate(&chaos);
		if (n % 2500 == 2499) {
			rig_kill(&chaos.rig);
			(void)sr_step(&chaos.sr);
			rig_start(&chaos.rig);
			sr_wait_ready(&chaos.sr);
		}
	}
	chaos.sr.fail_loads = 0;
	for (uint32_t i = 0; i < LIVE; i++) {
		kvx_scheduler_finish(chaos.sr.scheduler, &chaos.request[i].ask);
	}
	sr_settle(&chaos.sr);
	assert_int_equal(sr_stats(&chaos.sr).requests, 0);
	assert_true(sr_stats(&chaos.sr).loads_done > 100);
	assert_true(sr_stats(&chaos.sr).save_done > 100);
	sr_stop(&chaos.sr, &chaos.rig);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p7_without_a_daemon_nothing_is_done_and_nothing_kept),
		cmocka_unit_test(p7_hits_come_back_after_the_daemon_was_killed),
		cmocka_unit_test(p7_a_stopped_daemon_holds_no_step),
		cmocka_unit_test(p7_a_late_answer_goes_out_in_a_later_message),
		cmocka_unit_test(p1_blocks_reallocated_before_the_answer_are_not_saved),
		cmocka_unit_test(p1_blocks_of_a_request_that_is_not_served_are_not_saved),
		cmocka_unit_test(p7_nothing_is_promised_that_is_not_leased),
		cmocka_unit_test(p7_a_load_whose_daemon_died_is_reported_as_failed),
		cmocka_unit_test(p10_unsound_reports_and_block_tables_are_refused),
		cmocka_unit_test(p4_ten_thousand_operations_leak_nothing),
	};

	if (argc < 2) {
		(void)fprintf(stderr, "usage: %s <kvd>\n", argv[0]);
		return 2;
	}
	sr_program = argv[1];

	return cmocka_run_group_tests(tests, NULL, NULL);
}
