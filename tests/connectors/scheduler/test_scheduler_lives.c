/* How long the scheduling half keeps what it has lent to its ranks: leases and puts, by a clock that the test moves.
 * Built with the part's sources. */
#include "connectors/scheduler/sched_rig.h"
#include "engine/check.h"
#include "scheduler/scheduler.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define LOAD_MS 10000u

static uint64_t ahead_ns;      /* of the clock of the rest of the process */
static uint32_t renewed, kept; /* calls */

static uint64_t env_now(void *ctx)
{
	(void)ctx;

	return kv_now_ns(&kv_env_posix) + ahead_ns;
}

static void jump(uint32_t ms)
{
	ahead_ns += ms * KVX_MS;
}

kvc_status_t __real_kvc_lease_renew(kvc_lease_t *lease, uint32_t ttl_ms);
kvc_status_t __wrap_kvc_lease_renew(kvc_lease_t *lease, uint32_t ttl_ms);
kvc_status_t __wrap_kvc_lease_renew(kvc_lease_t *lease, uint32_t ttl_ms)
{
	renewed++;

	return __real_kvc_lease_renew(lease, ttl_ms);
}

kvc_status_t __real_kvc_put_keep(kvc_put_t *put);
kvc_status_t __wrap_kvc_put_keep(kvc_put_t *put);
kvc_status_t __wrap_kvc_put_keep(kvc_put_t *put)
{
	kept++;

	return __real_kvc_put_keep(put);
}

static kv_env_t env;

static kvc_status_t open_ahead(const kvx_scheduler_config_t *config, kvx_scheduler_t **p_scheduler)
{
	env = kv_env_posix;
	env.now_ns = env_now;

	return kvx_scheduler_open_in(&env, config, p_scheduler);
}

static void start(void)
{
	ahead_ns = 0;
	sr_start(&(sr_options_t){.foreign = 1, .load_ms = LOAD_MS, .open = open_ahead});
}

/* A look at everything without a plan: how often was a put kept? */
static uint32_t poll_and_count_kept(void)
{
	kept = 0;
	(void)kvx_scheduler_has_pending(sr.scheduler);

	return kept;
}

/* Ranks that never report: the lease is kept alive past its time to live, then given back. */
static void p4_leases_no_rank_reports_are_given_back(void **state)
{
	static sr_request_t request;

	(void)state;
	start();
	sr_find(&request, 100);
	sr_start_load(&request);
	sr_plan();
	for (uint32_t i = 0; i < 3; i++) {
		jump(LOAD_MS + 1u);
		renewed = 0;
		sr_plan();
		assert_int_equal(renewed, 1);
		assert_int_equal(sr_stats().leases_open, 1);
	}
	jump(LOAD_MS);
	sr_plan();
	assert_int_equal(sr_stats().leases_open, 0);
	assert_int_equal(sr_stats().loads_failed, 1);
	sr_stop();
}

/* A request of ten blocks is computed, and its save is in the hands of a rank that does not write it yet. */
static void begin_save(sr_request_t *request)
{
	start();
	sr.hold_saves = 1;
	sr_request(request, "a", 1, 0, 80);
	(void)sr_run(request, 0);
	assert_non_null(sr.cached);
}

static void end_save(void)
{
	sr_release_save();
	SR_UNTIL((kvc_poll(sr.kvc, 1), sr_stats().save_done == 10))
	assert_int_equal(sr_stats().save_lost, 0);
	assert_int_equal(sr_stats().saves, 1);
	sr_stop();
}

/* A prefill of minutes, in an engine that plans a step ahead: the put is kept alive at each look, and its blocks become
 * visible. */
static void p7_a_save_lives_as_long_as_its_step_takes(void **state)
{
	static sr_request_t request;

	(void)state;
	begin_save(&request);
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

/* Ranks that have long computed the step: the daemon alone decides how long the put lives, and a rank that is late
 * after all is not too late. */
static void p7_a_save_that_is_late_is_left_to_its_time_to_live(void **state)
{
	static sr_request_t request;

	(void)state;
	begin_save(&request);
	sr_plan();
	sr_plan();
	assert_int_equal(poll_and_count_kept(), 1);
	jump(10000);
	assert_int_equal(poll_and_count_kept(), 0);
	jump(1000000);
	sr_plan();
	assert_int_equal(poll_and_count_kept(), 0);
	assert_int_equal(sr_stats().puts_open, 1);
	end_save();
}

/* The daemon needs the room of a put that is no longer renewed: it is reserved again. */
static void p7_a_save_that_the_daemon_ended_is_reserved_again(void **state)
{
	static sr_request_t request;
	kvc_put_t *rival = NULL;
	kvc_key_t many[2048];

	(void)state;
	(void)setenv("KVD_PUT_TTL", "100ms", 1);
	begin_save(&request);
	(void)unsetenv("KVD_PUT_TTL");
	sr_plan();
	sr_plan();
	(void)poll_and_count_kept();
	jump(10000);
	assert_int_equal(poll_and_count_kept(), 0);
	usleep(200000);
	for (uint32_t i = 0; i < 2048; i++) {
		many[i] = (kvc_key_t){{0x77, (uint8_t)i, (uint8_t)(i >> 8)}};
	}
	assert_int_equal(kvc_put_start(sr.space, many, 0, 2048, NULL, &rival), KVC_OK);
	assert_int_equal(kvc_put_ready(rival, 0), KVC_OK);
	assert_int_equal(rig_counter(&sr.rig, "kvd_puts_expired_total"), 1);
	kvc_put_free(rival);
	kvc_put_free(sr.cached);
	sr.cached = NULL;
	sr.hold_saves = 0;
	jump(2000);
	sr_wait_saved(&request, 10);
	assert_int_equal(sr_stats().save_lost, 10);
	sr_stop();
}

/* Ranks that never hand anything in fill the table of puts: those that are late make room for others. */
static void p5_saves_that_are_late_make_room_when_the_table_is_full(void **state)
{
	const uint32_t taken = KVX_PUTS_MAX - 8u; /* all places but eight */
	static sr_request_t request;

	(void)state;
	start();
	sr.scheduler->put_count += taken;
	sr_request(&request, "a", 1, 0, 80);
	sr_place(&request, 0, 0);
	for (uint32_t n = SR_UNIT; n <= 80; n += SR_UNIT) {
		sr_advance(&request, n, SR_UNIT);
		sr_plan();
	}
	assert_int_equal(sr_stats().saves, 8);
	jump(5000);
	sr_plan();
	sr_advance(&request, 80, 0);
	assert_int_equal(sr_stats().saves, 8);
	jump(10000); /* the last ones were told later */
	sr_plan();
	assert_int_equal(sr_stats().puts_open, KVX_PUTS_MAX - 1u);
	jump(2000); /* what was refused or lost is not asked for again at once */
	sr_advance(&request, 80, 0);
	assert_int_equal(sr_stats().saves, 9);
	sr.scheduler->put_count -= taken;
	sr_finish(&request);
	kvx_scheduler_revoke_saves(sr.scheduler);
	sr_stop();
}

SR_MAIN(cmocka_unit_test(p4_leases_no_rank_reports_are_given_back),
	cmocka_unit_test(p7_a_save_lives_as_long_as_its_step_takes),
	cmocka_unit_test(p7_a_save_that_is_late_is_left_to_its_time_to_live),
	cmocka_unit_test(p7_a_save_that_the_daemon_ended_is_reserved_again),
	cmocka_unit_test(p5_saves_that_are_late_make_room_when_the_table_is_full))
