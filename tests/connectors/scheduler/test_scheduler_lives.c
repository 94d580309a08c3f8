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

static void start(sr_t *sr, rig_t *rig)
{
	ahead_ns = 0;
	sr_start(sr, rig, &(sr_options_t){.foreign = 1, .load_ms = LOAD_MS, .open = open_ahead});
}

/* A look at everything without a plan: how often was a put kept? */
static uint32_t poll_and_count_kept(sr_t *sr)
{
	kept = 0;
	(void)kvx_scheduler_has_pending(sr->scheduler);

	return kept;
}

/* A step that the ranks do not hear of. */
static void plan(sr_t *sr)
{
	const void *bytes;
	size_t len;

	kvx_scheduler_build_message(sr->scheduler, &bytes, &len);
}

/* Ranks that never report: the lease is kept alive past its time to live, then given back. */
static void p4_leases_no_rank_reports_are_given_back(void **state)
{
	static sr_request_t a, b;
	kvx_hit_t hit;
	rig_t rig;
	sr_t sr;

	(void)state;
	start(&sr, &rig);
	sr_store(&sr, &a, "a", 1, 0, 80);
	sr_request(&sr, &b, "b", 1, 0, 100);
	sr_match(&sr, &b, &hit);
	sr_place(&sr, &b, 100, 0);
	kvx_scheduler_start_load(sr.scheduler, &b.ask, &hit);
	plan(&sr);
	for (uint32_t i = 0; i < 3; i++) {
		jump(LOAD_MS + 1u);
		renewed = 0;
		plan(&sr);
		assert_int_equal(renewed, 1);
		assert_int_equal(sr_stats(&sr).leases_open, 1);
	}
	jump(LOAD_MS);
	plan(&sr);
	assert_int_equal(sr_stats(&sr).leases_open, 0);
	assert_int_equal(sr_stats(&sr).loads_failed, 1);
	kvx_scheduler_finish(sr.scheduler, &a.ask);
	kvx_scheduler_finish(sr.scheduler, &b.ask);
	sr_stop(&sr, &rig);
}

/* A request of ten blocks is computed, and its save is in the hands of a rank that does not write it yet. */
static void begin_save(sr_t *sr, rig_t *rig, sr_request_t *request)
{
	start(sr, rig);
	sr->hold_saves = 1;
	sr_request(sr, request, "a", 1, 0, 80);
	(void)sr_run(sr, request, 0);
	assert_non_null(sr->cached);
}

static void end_save(sr_t *sr, rig_t *rig, const sr_request_t *request)
{
	sr_release_save(sr);
	for (int i = 0; i < 10000 && sr_stats(sr).save_done < 10; i++) {
		(void)kvc_poll(sr->kvc, 1);
		(void)sr_step(sr);
	}
	assert_int_equal(sr_stats(sr).save_done, 10);
	assert_int_equal(sr_stats(sr).save_lost, 0);
	assert_int_equal(sr_stats(sr).saves, 1);
	kvx_scheduler_finish(sr->scheduler, &request->ask);
	sr_stop(sr, rig);
}

/* A prefill of minutes, in an engine that plans a step ahead: the put is kept alive at each look, and its blocks become
 * visible. */
static void p7_a_save_lives_as_long_as_its_step_takes(void **state)
{
	static sr_request_t request;
	rig_t rig;
	sr_t sr;

	(void)state;
	begin_save(&sr, &rig, &request);
	plan(&sr); /* of the next step, while that one is computed */
	for (uint32_t i = 0; i < 10; i++) {
		jump(30000);
		assert_int_equal(poll_and_count_kept(&sr), 1);
		assert_int_equal(sr_stats(&sr).puts_open, 1);
	}
	plan(&sr); /* its step is over: the ranks write it now */
	assert_int_equal(poll_and_count_kept(&sr), 1);
	end_save(&sr, &rig, &request);
}

/* Ranks that have long computed the step: the daemon alone decides how long the put lives, and a rank that is late
 * after all is not too late. */
static void p7_a_save_that_is_late_is_left_to_its_time_to_live(void **state)
{
	static sr_request_t request;
	rig_t rig;
	sr_t sr;

	(void)state;
	begin_save(&sr, &rig, &request);
	plan(&sr);
	plan(&sr);
	assert_int_equal(poll_and_count_kept(&sr), 1);
	jump(10000);
	assert_int_equal(poll_and_count_kept(&sr), 0);
	jump(1000000);
	plan(&sr);
	assert_int_equal(poll_and_count_kept(&sr), 0);
	assert_int_equal(sr_stats(&sr).puts_open, 1);
	end_save(&sr, &rig, &request);
}

/* The daemon needs the room of a put that is no longer renewed: it is reserved again. */
static void p7_a_save_that_the_daemon_ended_is_reserved_again(void **state)
{
	static sr_request_t request;
	kvc_put_t *rival = NULL;
	kvc_key_t many[2048];
	rig_t rig;
	sr_t sr;

	(void)state;
	(void)setenv("KVD_PUT_TTL", "100ms", 1);
	begin_save(&sr, &rig, &request);
	(void)unsetenv("KVD_PUT_TTL");
	plan(&sr);
	plan(&sr);
	(void)poll_and_count_kept(&sr);
	jump(10000);
	assert_int_equal(poll_and_count_kept(&sr), 0);
	usleep(200000);
	for (uint32_t i = 0; i < 2048; i++) {
		many[i] = (kvc_key_t){{0x77, (uint8_t)i, (uint8_t)(i >> 8)}};
	}
	assert_int_equal(kvc_put_start(sr.space, many, 0, 2048, NULL, &rival), KVC_OK);
	assert_int_equal(kvc_put_ready(rival, 0), KVC_OK);
	assert_int_equal(rig_counter(&rig, "kvd_puts_expired_total"), 1);
	kvc_put_free(rival);
	kvc_put_free(sr.cached);
	sr.cached = NULL;
	sr.hold_saves = 0;
	for (int i = 0; i < 10000 && sr_stats(&sr).save_done < 10; i++) {
		(void)kvc_poll(sr.kvc, 1);
		kvx_scheduler_advance(sr.scheduler, &request.ask, 80, 0);
		(void)sr_step(&sr);
		jump(100);
	}
	assert_int_equal(sr_stats(&sr).save_lost, 10);
	assert_int_equal(sr_stats(&sr).save_done, 10);
	kvx_scheduler_finish(sr.scheduler, &request.ask);
	sr_stop(&sr, &rig);
}

/* Ranks that never hand anything in fill the table of puts: those that are late make room for others. */
static void p5_saves_that_are_late_make_room_when_the_table_is_full(void **state)
{
	const uint32_t taken = KVX_PUTS_MAX - 8u; /* all places but eight */
	static sr_request_t request;
	rig_t rig;
	sr_t sr;

	(void)state;
	start(&sr, &rig);
	sr.scheduler->put_count += taken;
	sr_request(&sr, &request, "a", 1, 0, 80);
	sr_place(&sr, &request, 0, 0);
	for (uint32_t n = SR_UNIT; n <= 80; n += SR_UNIT) {
		kvx_scheduler_advance(sr.scheduler, &request.ask, n, SR_UNIT);
		plan(&sr);
	}
	assert_int_equal(sr_stats(&sr).saves, 8);
	jump(5000);
	plan(&sr);
	kvx_scheduler_advance(sr.scheduler, &request.ask, 80, 0);
	assert_int_equal(sr_stats(&sr).saves, 8);
	jump(10000); /* the last ones were told later */
	plan(&sr);
	assert_int_equal(sr_stats(&sr).puts_open, KVX_PUTS_MAX - 1u);
	jump(2000); /* what was refused or lost is not asked for again at once */
	kvx_scheduler_advance(sr.scheduler, &request.ask, 80, 0);
	assert_int_equal(sr_stats(&sr).saves, 9);
	sr.scheduler->put_count -= taken;
	kvx_scheduler_finish(sr.scheduler, &request.ask);
	kvx_scheduler_revoke_saves(sr.scheduler);
	sr_stop(&sr, &rig);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p4_leases_no_rank_reports_are_given_back),
		cmocka_unit_test(p7_a_save_lives_as_long_as_its_step_takes),
		cmocka_unit_test(p7_a_save_that_is_late_is_left_to_its_time_to_live),
		cmocka_unit_test(p7_a_save_that_the_daemon_ended_is_reserved_again),
		cmocka_unit_test(p5_saves_that_are_late_make_room_when_the_table_is_full),
	};

	if (argc < 2) {
		fprintf(stderr, "usage: %s <kvd>\n", argv[0]);
		return 2;
	}
	sr_program = argv[1];

	return cmocka_run_group_tests(tests, NULL, NULL);
}
