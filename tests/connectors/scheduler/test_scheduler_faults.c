/* The scheduling half when the daemon is absent, stopped, killed, late or full, when ranks never report, when memory is
 * short, and when the engine does things in the worst order. */
#include "connectors/scheduler/sched_rig.h"
#include "kv_child.h"
#include "kv_refuse.h"
#include "scheduler/lease_cache.h"
#include "scheduler/scheduler.h"

#include <signal.h>
#include <unistd.h>

static sr_request_t a, b;

static const sr_options_t plain, sync_loads = {.mode = KVX_LOAD_SYNC}, alone = {.alone = 1}, late = {.wait_us = 1},
				 stopped = {.wait_us = 500, .silence = "50ms", .load_ms = 1000};

/* ---- the machine ----------------------------------------------------------------------------- */

KV_TEST(p7_without_randomness_a_scheduler_is_refused_at_once)
{
	int wstatus = 0;
	pid_t pid = fork();

	if (pid == 0) {
		kvx_scheduler_t *scheduler = NULL;

		alarm(60);
		kv_refuse_randomness("/dev/null");
		_exit(kvx_scheduler_open(NULL, &scheduler) != KVC_ERR_ARG ||
		      strcmp(kvx_scheduler_last_error(), KV_RANDOM_REFUSED) != 0);
	}
	assert_int_equal(waitpid(pid, &wstatus, 0), pid);
	if (child_exit_of(wstatus) == 77) {
		kv_test_skip("needs root, and a kernel that takes seccomp filters");
	}
	assert_int_equal(child_exit_of(wstatus), 0);
}

/* ---- the daemon ------------------------------------------------------------------------------ */

/* No daemon: requests come and go, nothing is found, saved or kept, and it takes next to no time (measured: 2 us a
 * request; the limit, of 10 ms, is for sanitizers and busy machines). */
SR_CASE(p7_without_a_daemon_nothing_is_done_and_nothing_kept, alone)
{
	const uint64_t start = sr_now_ns();
	kvx_scheduler_stats_t stats;

	sr_request(&a, "a", 1, 0, 800);
	for (uint32_t i = 0; i < 2000; i++) {
		assert_int_equal(sr_look_up(&a), 0);
		sr_place(&a, 0, 0);
		(void)sr_step_saves(&a, 800);
		assert_int_equal(sr.plan.saves + sr.plan.loads, 0);
		assert_false(kvx_scheduler_has_pending(sr.scheduler));
		sr_finish(&a);
	}
	assert_true(sr_now_ns() - start < 20000u * KVX_MS);
	stats = sr_stats();
	assert_int_equal(stats.match_no_daemon, 2000);
	assert_int_equal(stats.requests + stats.puts_open + stats.leases_open, 0);
}

/* Killed and started again, empty: misses, then hits come back; the blocks it lost are saved from requests still alive.
 */
SR_CASE(p7_hits_come_back_after_the_daemon_was_killed, plain)
{
	sr_store(&a, "a", 1, 0, 160);
	for (uint32_t round = 0; round < 3; round++) {
		rig_kill(&sr.rig);
		(void)sr_step(); /* notices; without it a match is stale for 50 ms and its load dead */
		sr_request(&b, "b", 1, 0, 160);
		assert_int_equal(sr_run(&b, 100), 0);
		assert_int_equal(sr.plan.saves, 0);
		sr_finish(&b);
		sr_restart_daemon();
	}
	assert_true(sr_stats().attaches >= 4);

	/* Memory is lost, what is on disk may not be; all of it is there again after the next advance. */
	sr_advance(&a, 160, 0);
	(void)sr_step();
	sr_settle();
	sr_request(&b, "b", 1, 0, 161);
	assert_int_equal(sr_run(&b, 100), 160);
}

/* Stopped: a plan waits once; later ones do not wait; no engine is kept spinning; all is well after SIGCONT. Without a
 * processor, one waits more often for the same time. */
SR_CASE(p7_a_stopped_daemon_holds_no_step, stopped)
{
	const uint64_t start = sr_now_ns();
	uint32_t waits = 0;

	rig_signal(&sr.rig, SIGSTOP);
	for (uint32_t i = 0; i < 100; i++) {
		const uint32_t before = sr.naps + sr.awaits;
		char id[16];

		(void)snprintf(id, sizeof id, "r%u", i);
		sr_request(&a, id, i, 0, 80);
		(void)sr_look_up(&a);
		sr_place(&a, i * 4u, 0);
		(void)sr_step_saves(&a, 80);
		waits += sr.naps + sr.awaits > before;
		sr_finish(&a);
		usleep(1000);
	}
	assert_false(kvx_scheduler_has_pending(sr.scheduler));
	assert_true(waits <= 10);
	assert_true(sr_now_ns() - start < 20000u * KVX_MS); /* a call that waits for its answer does so for a second */
	SR_UNTIL(sr_stats().puts_open == 0);                /* what was asked for is given up after load_ms */
	rig_signal(&sr.rig, SIGCONT);
	sr_wait_ready();
	sr_request(&a, "last", 1000, 0, 80);
	(void)sr_run(&a, 0);
}

/* An answer that comes after its plan: the engine is asked to step once more, and the blocks go out early. */
SR_CASE(p7_a_late_answer_goes_out_in_a_later_message, late)
{
	sr_request(&a, "a", 1, 0, 160);
	sr_place(&a, 0, 0);
	sr_compute(&a, 0, 20);
	rig_signal(&sr.rig, SIGSTOP);
	assert_int_equal(sr_step_saves(&a, 160), 0);
	assert_true(kvx_scheduler_has_pending(sr.scheduler));
	rig_signal(&sr.rig, SIGCONT);
	SR_UNTIL(sr.plan.saves > 0)
	assert_int_equal(sr.plan.early, 1);
	assert_int_equal(sr.plan.save_blocks, 20);
	assert_int_equal(sr_stats().late_answers, 1);
}

/* A lease that does not come in time is nothing promised; it is there when the engine asks again, and goes back when
 * the request runs without. */
SR_CASE(p7_nothing_is_promised_that_is_not_leased, late)
{
	sr_store(&a, "a", 1, 0, 80);
	sr_request(&b, "b", 1, 0, 100);
	rig_signal(&sr.rig, SIGSTOP);
	assert_int_equal(sr_look_up(&b), 0);
	assert_int_equal(sr.hit.why, KV_WHY_TIMEOUT);
	rig_signal(&sr.rig, SIGCONT);
	SR_UNTIL(sr_look_up(&b) == 80)
	sr_place(&b, 100, 0);
	(void)sr_step_saves(&b, 100); /* the engine has computed it instead */
	assert_int_equal(sr.plan.loads, 0);
	assert_int_equal(sr_stats().leases_open, 0);
}

/* The daemon dies between promise and plan: the ranks are told that the load is dead, and the request computes. */
SR_CASE(p7_a_load_whose_daemon_died_is_reported_as_failed, plain)
{
	sr_find(&b, 100);
	rig_kill(&sr.rig);
	(void)kvx_scheduler_has_pending(sr.scheduler);
	sr_start_load(&b);
	(void)sr_step();
	assert_int_equal(sr.plan.dead, 1);
	assert_int_equal(sr.plan.failed_blocks, 10);
	assert_int_equal(sr_stats().lease_lost, 1);
	assert_int_equal(sr_stats().leases_open, 0);
}

/* Reports and tables that make no sense: counted, ignored. */
SR_CASE(p10_unsound_reports_and_block_tables_are_refused, plain)
{
	static const uint32_t ids[4] = {1, 2, SR_BLOCKS, 4};
	static const kvx_block_table_t tables[] = {
		{.struct_size = sizeof tables[0], .n = 4, .fresh = 4, .ids = ids},
		{.struct_size = sizeof tables[0], .n = 2, .fresh = 4, .ids = ids, .group = 7},
		{.struct_size = sizeof tables[0], .n = 2, .fresh = 4, .ids = ids, .first = 3},
	};
	const kvx_ask_t asks[] = {{.struct_size = sizeof asks[0], .id = "x", .id_len = KVX_MAX_ID + 1, .tokens = 100},
				  {.struct_size = sizeof asks[0], .id = "x", .id_len = 1, .tokens = 100}};
	_Alignas(8) uint8_t junk[64] = {1, 2, 3};

	kvx_scheduler_take_report(sr.scheduler, NULL, 0);
	kvx_scheduler_take_report(sr.scheduler, junk, sizeof junk);
	kvx_scheduler_take_report(sr.scheduler, junk + 1, 20);
	assert_int_equal(sr_stats().bad_reports, 3);
	for (uint32_t i = 0; i < 6; i++) {
		assert_int_equal(kvx_scheduler_append_blocks(sr.scheduler, &asks[i / 3], &tables[i % 3]), KVC_ERR_ARG);
	}
	for (uint32_t i = 0; i < 2; i++) { /* the second has no hashes */
		kvx_scheduler_match(sr.scheduler, &asks[i], &sr.hit);
		assert_int_equal(sr.hit.tokens, 0);
		kvx_scheduler_advance(sr.scheduler, &asks[i], 100, 100);
		kvx_scheduler_finish(sr.scheduler, &asks[i]);
	}
}

/* ---- how long leases and puts are kept -------------------------------------------------------- */

static void jump(uint32_t ms)
{
	sr.ahead_ns += ms * KVX_MS;
}

/* A look at everything without a plan: how often was a put kept? */
static uint32_t poll_and_count_kept(void)
{
	sr.keeps = 0;
	(void)kvx_scheduler_has_pending(sr.scheduler);

	return sr.keeps;
}

/* Ranks that never report: the lease is kept alive past its time to live, then given back. */
SR_CASE(p4_leases_no_rank_reports_are_given_back, plain)
{
	sr_find(&b, 100);
	sr_start_load(&b);
	sr_plan();
	for (uint32_t i = 0; i < 3; i++) {
		jump(SR_LOAD_MS + 1u);
		sr.renewals = 0;
		sr_plan();
		assert_int_equal(sr.renewals, 1);
		assert_int_equal(sr_stats().leases_open, 1);
	}
	jump(SR_LOAD_MS);
	sr_plan();
	assert_int_equal(sr_stats().leases_open, 0);
	assert_int_equal(sr_stats().loads_failed, 1);
}

/* The queue to the daemon is full when the lease must be renewed, which ends twice load_ms after the last renewal. */
SR_CASE(p7_a_lease_that_could_not_be_renewed_is_renewed_in_time, sync_loads)
{
	sr_find(&b, 100);
	sr_start_load(&b);
	sr_plan();
	sr.renewals = 0;
	sr.refuse_renewals = 1;
	jump(SR_LOAD_MS + 1u);
	sr_plan();
	assert_int_equal(sr.refuse_renewals + sr.renewals, 0);
	jump(SR_LOAD_MS / 2u);
	sr_plan();
	assert_int_equal(sr.renewals, 1);
	sr_report_loaded(sr.load, 10);
	assert_int_equal(sr_stats().loads_done, 1);
}

/* A request of ten blocks is computed, and its save is in the hands of a rank that does not write it yet. */
static void begin_save(void)
{
	sr.hold_saves = 1;
	sr_request(&a, "a", 1, 0, 80);
	(void)sr_run(&a, 0);
	assert_non_null(sr.held);
}

static void end_save(void)
{
	sr_release_save();
	SR_UNTIL((kvc_poll(sr.kvc, 1), sr_stats().save_done == 10))
	assert_int_equal(sr_stats().save_lost, 0);
	assert_int_equal(sr_stats().saves, 1);
}

/* A prefill of minutes, in an engine that plans a step ahead: the put is kept alive at each look, and its blocks become
 * visible. */
SR_CASE(p7_a_save_lives_as_long_as_its_step_takes, plain)
{
	begin_save();
	sr_plan(); /* of the next step, while that one is computed */
	for (uint32_t i = 0; i < 10; i++) {
		jump(30000);
		assert_int_equal(poll_and_count_kept(), 1);
		assert_int_equal(sr_stats().puts_open, 1);
	}
	sr_plan(); /* its step is over: the ranks write it now */
	assert_int_equal(poll_and_count_kept(), 1);
	end_save();
}

/* Ranks that have long computed the step. */
static void wait_until_save_is_late(void)
{
	sr_plan();
	sr_plan();
	(void)poll_and_count_kept();
	jump(10000);
	assert_int_equal(poll_and_count_kept(), 0);
}

/* The daemon alone decides how long the put lives, and a rank that is late after all is not too late. */
SR_CASE(p7_a_save_that_is_late_is_left_to_its_time_to_live, plain)
{
	begin_save();
	wait_until_save_is_late();
	jump(1000000);
	sr_plan();
	assert_int_equal(poll_and_count_kept(), 0);
	assert_int_equal(sr_stats().puts_open, 1);
	end_save();
}

/* The daemon needs the room of a put that is no longer renewed: it is reserved again. */
SR_CASE(p7_a_save_that_the_daemon_ended_is_reserved_again, plain)
{
	kvc_put_t *rival = NULL;
	kvc_key_t many[2048];

	rig_kill(&sr.rig);
	(void)setenv("KVD_PUT_TTL", "100ms", 1);
	sr_restart_daemon();
	(void)unsetenv("KVD_PUT_TTL");
	begin_save();
	wait_until_save_is_late();
	usleep(200000);
	for (uint32_t i = 0; i < 2048; i++) {
		many[i] = (kvc_key_t){{0x77, (uint8_t)i, (uint8_t)(i >> 8)}};
	}
	assert_int_equal(kvc_put_start(sr.space[KVX_HOST_MEM], many, 0, 2048, NULL, &rival), KVC_OK);
	assert_int_equal(kvc_put_ready(rival, 0), KVC_OK);
	assert_int_equal(rig_counter(&sr.rig, "kvd_puts_expired_total"), 1);
	kvc_put_free(rival);
	kvc_put_free(sr.held);
	sr.held = NULL;
	sr.hold_saves = 0;
	jump(2000);
	sr_wait_saved(&a, 10);
	assert_int_equal(sr_stats().save_lost, 10);
}

/* Ranks that never hand anything in fill the table of puts: those that are late make room for others. */
SR_CASE(p5_saves_that_are_late_make_room_when_the_table_is_full, plain)
{
	const uint32_t taken = KVX_PUTS_MAX - 8u; /* all places but eight */

	sr.scheduler->put_count += taken;
	sr_request(&a, "a", 1, 0, 80);
	sr_place(&a, 0, 0);
	for (uint32_t n = SR_UNIT; n <= 80; n += SR_UNIT) {
		sr_advance(&a, n, SR_UNIT);
		sr_plan();
	}
	assert_int_equal(sr_stats().saves, 8);
	jump(5000);
	sr_plan();
	sr_advance(&a, 80, 0);
	assert_int_equal(sr_stats().saves, 8);
	jump(10000); /* the last ones were told later */
	sr_plan();
	assert_int_equal(sr_stats().puts_open, KVX_PUTS_MAX - 1u);
	jump(2000); /* what was refused or lost is not asked for again at once */
	sr_advance(&a, 80, 0);
	assert_int_equal(sr_stats().saves, 9);
	sr.scheduler->put_count -= taken;
	kvx_scheduler_revoke_saves(sr.scheduler);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* As sr_run(), but place() may say that there is no memory; a hit that was promised is loaded, or the ranks said that
 * it failed. 1: they were told before they began. */
static uint32_t live(const char *id, uint32_t seed, uint32_t n, uint32_t base, int fail_after_match)
{
	const uint32_t full = n / SR_UNIT;
	kvx_block_table_t table = {.struct_size = sizeof table, .n = full, .ids = a.ids[0]};
	kvc_status_t placed;

	sr_request(&a, id, seed, 40, n);
	for (uint32_t i = 0; i < full; i++) {
		a.ids[0][i] = base + i;
	}
	(void)sr_look_up(&a);
	sr.no_memory = fail_after_match;
	placed = kvx_scheduler_append_blocks(sr.scheduler, &a.ask, &table);
	if (sr.hit.tokens) {
		assert_int_equal(placed, KVC_OK);
		sr_start_load(&a);
	}
	sr_compute(&a, sr.hit.tokens / SR_UNIT, full);
	sr_advance(&a, n, n - sr.hit.tokens);
	(void)sr_step();
	sr.no_memory = 0;
	assert_int_equal(sr.plan.fences, full);
	if (sr.hit.tokens) {
		assert_int_equal(sr.plan.loads, 1);
		assert_int_equal(sr.plan.loaded_blocks + sr.plan.failed_blocks, sr.hit.tokens / SR_UNIT);
		assert_true(sr.plan.failed_blocks || sr_is_right(&a, 0, full));
	}
	sr_finish(&a);

	return sr.plan.dead;
}

/* Every allocation fails in turn, and then all of them for a while: no load that was promised is broken without the
 * ranks being told, nothing wrong is loaded or saved, nothing leaks. */
SR_CASE(p5_lack_of_memory_breaks_no_promise, sync_loads)
{
	uint32_t dead = 0;

	sr_close();
	KV_TEST_EACH_FAILURE(&sr_env, n)
	{
		if (sr_open(&sync_loads) != KVC_OK) {
			assert_int_equal(kv_test_env_live(&sr_env), 0);
			continue;
		}
		sr_wait_ready();
		for (uint32_t i = 0; i < 4; i++) {
			char id[16];

			(void)snprintf(id, sizeof id, "m%u", i);
			(void)live(id, i / 2u + (uint32_t)n * 10u, 120, i * 20u, 0);
		}
		sr_settle();
		for (uint32_t i = 0; i < 2; i++) { /* and none at all from the promise on */
			dead += live("last", 40, 80, 100, 1);
			sr_settle();
		}
		sr_close();
	}
	assert_int_equal(dead, 0); /* what was promised needs no memory */
	assert_int_equal(sr_open(&sync_loads), KVC_OK);
}

/* Nor can be remembered what was given back before the engine came to load it: the ranks are told all the same. */
SR_CASE(p5_a_lost_load_without_memory_is_reported_as_failed, sync_loads)
{
	sr_find(&b, 160);
	kvx_lease_cache_give_back(sr.scheduler, kvx_requests_find(&sr.scheduler->requests, "second", 6)->cached);
	sr.no_memory = 1;
	sr_start_load(&b);
	(void)sr_step();
	sr.no_memory = 0;
	assert_int_equal(sr.plan.dead, 1);
	assert_int_equal(sr.plan.failed_blocks, 10);
	assert_null(sr.scheduler->loads);
	assert_int_equal(sr_stats().loads_failed, 1);
}

/* What several matches have found may be loaded in one plan, later: each has kept what telling the ranks takes. */
SR_CASE(p5_loads_found_in_earlier_steps_need_no_memory, sync_loads)
{
	enum { LOADS = 8, BLOCKS = 120 }; /* more than fit beside each other in a plan of one of them */
	static sr_request_t request[LOADS];
	const size_t reserved = sr.scheduler->reserved_bytes;

	sr_store(&request[0], "first", 0, BLOCKS * SR_UNIT, BLOCKS * SR_UNIT);
	for (uint32_t i = 0; i < LOADS; i++) {
		char id[16];

		(void)snprintf(id, sizeof id, "later %u", i);
		sr_request(&request[i], id, i + 1u, BLOCKS * SR_UNIT, (BLOCKS + 2) * SR_UNIT);
		assert_int_equal(sr_match(&request[i]), BLOCKS * SR_UNIT);
		sr_place(&request[i], 0, UINT32_MAX); /* the same bytes into the same blocks */
		(void)sr_step();
	}
	sr.no_memory = 1;
	for (uint32_t i = 0; i < LOADS; i++) {
		sr_start_load(&request[i]); /* equal hits */
	}
	assert_true(sr_step() > 4096);
	sr.no_memory = 0;
	assert_int_equal(sr.plan.loads, LOADS);
	assert_int_equal(sr.plan.loaded_blocks, LOADS * BLOCKS);
	for (uint32_t i = 0; i < LOADS; i++) {
		assert_true(sr_is_right(&request[i], 0, BLOCKS));
	}
	assert_int_equal(sr.scheduler->reserved_bytes, reserved);
}

/* Last, since it is for good: a plan that does not fit fences all blocks, the daemon is left, and the engine goes on
 * with misses. */
SR_CASE(p7_a_broken_message_detaches_the_engine_and_fences_all, plain)
{
	const kvx_record_header_t *record;
	const void *bytes = NULL;
	kvx_msg_reader_t cursor;
	size_t len = 0;

	sr_find(&b, 100);
	sr.scheduler->message.failed = 1;
	kvx_scheduler_build_message(sr.scheduler, &bytes, &len);
	assert_true(kvx_msg_open(&cursor, KVX_MSG_MAGIC, bytes, len));
	record = kvx_msg_next(&cursor);
	assert_non_null(record);
	assert_int_equal(record->type, KVX_RECORD_FENCE);
	assert_int_equal(((const kvx_msg_fence_t *)(const void *)record)->n, 0);
	assert_null(kvx_msg_next(&cursor));
	assert_false(cursor.bad);
	assert_int_equal(sr_stats().broken_invariants, 1);
	assert_int_equal(kvc_fd(sr.scheduler->kvc), -1);
	for (uint32_t i = 0; i < 3; i++) {
		assert_int_equal(sr_look_up(&b), 0);
		(void)sr_step_saves(&b, 100);
		assert_int_equal(sr.plan.saves + sr.plan.loads, 0);
		assert_false(kvx_scheduler_has_pending(sr.scheduler));
	}
}

SR_MAIN
