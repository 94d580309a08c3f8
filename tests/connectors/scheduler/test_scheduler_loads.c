/* Loads that go wrong, or whose request is gone before they are over: what the engine computed after them, what is
 * saved, what stays leased. Built with the part's sources. */
#include "connectors/scheduler/sched_rig.h"
#include "engine/check.h"
#include "kv_test.h"
#include "scheduler/load.h"
#include "scheduler/scheduler.h"

#include <unistd.h>

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

/* A rank is slow to read, and the queue to the daemon is full when its lease must be renewed. */
static void p7_a_lease_that_could_not_be_renewed_is_renewed_in_time(void **state)
{
	static sr_request_t request;
	const kvx_sload_t *load;
	uint64_t start;

	(void)state;
	sr_start(&(sr_options_t){.foreign = 1, .mode = KVX_LOAD_SYNC, .load_ms = 1000});
	sr_find(&request, 100);
	sr_start_load(&request);
	refuse = 1;
	start = kv_now_ns(&kv_env_posix);
	while (kv_now_ns(&kv_env_posix) - start < 2600u * KVX_MS) { /* leased for 2 s */
		sr_plan();
		usleep(150000); /* a step */
	}
	assert_int_equal(refuse, 0);
	load = sr.scheduler->loads;
	assert_non_null(load);
	assert_int_equal(kvc_lease_state(load->part[0].lease), KVC_OK);
	sr_report_loaded(load->number, load->blocks);
	assert_int_equal(sr_stats().loads_done, 1);
	sr_stop();
}

/* The engine may have cached what it computed after a load whose failure it learns of when the request is gone. */
static void p1_dependents_of_a_failed_load_of_a_gone_request_are_named(void **state)
{
	static sr_request_t request, other;
	uint32_t ids[SR_BLOCKS], n = 0;

	(void)state;
	sr_start(&(sr_options_t){.foreign = 1, .mode = KVX_LOAD_SYNC});
	sr_store(&request, "first", 1, 0, 80);
	sr_finish(&request);
	for (uint32_t good = 0; good < 2; good++) {
		sr_request(&request, good ? "good" : "bad", 1, 0, 160);
		assert_int_equal(sr_match(&request), 80);
		sr_place(&request, 100, 0);
		sr_start_load(&request);
		sr_plan();
		sr_finish(&request);
		sr_request(&other, "other", 2, 0, 40); /* gets five of its blocks */
		sr_place(&other, 115, 0);
		sr_report_loaded(sr.scheduler->load_number, good ? 10 : 9);
		n = kvx_scheduler_take_invalidated(sr.scheduler, ids, 4);
		assert_int_equal(n, good ? 0 : 4);
		n += kvx_scheduler_take_invalidated(sr.scheduler, ids + n, SR_BLOCKS - n);
		assert_int_equal(n, good ? 0 : 15);
		for (uint32_t i = 0; i < n; i++) {
			assert_int_equal(ids[i], 100 + i);
		}
		assert_int_equal(kvx_scheduler_take_invalidated(sr.scheduler, ids, SR_BLOCKS), 0);
		sr_finish(&other);
	}
	sr_stop();
}

/* Ten blocks are stored. A request of twenty is to load them, into blocks from 100. What is leased for it is of another
 * daemon than the one that is asked now, or it was given back, as nobody had asked for it in a while. */
typedef enum leased { LEASED, OTHER_DAEMON, GIVEN_BACK } leased_t;

static void begin_load(sr_request_t *request, leased_t leased)
{
	kvx_request_t *found;

	sr_start(&(sr_options_t){.foreign = 1, .mode = KVX_LOAD_SYNC});
	sr_find(request, 160);
	found = kvx_requests_find(&sr.scheduler->requests, request->ask.id, request->ask.id_len);
	if (leased == GIVEN_BACK) {
		kvx_lease_cache_give_back(sr.scheduler, found->cached);
	} else if (leased == OTHER_DAEMON) {
		found->cached->generation--;
	}
	sr_start_load(request);
}

/* Two steps; each computes and saves five blocks after the load. */
static void plan_two_steps(const sr_request_t *request)
{
	for (uint32_t computed = 120; computed <= 160; computed += 40) {
		sr_advance(request, computed, 40);
		sr_plan();
	}
	assert_int_equal(sr_stats().puts_open, 2);
}

/* Plans are a step ahead: the request is aborted when the step after that of its load has been planned, and before the
 * load is known to have failed. */
static void p1_saves_after_a_failed_load_of_a_gone_request_are_revoked(void **state)
{
	static sr_request_t request;

	(void)state;
	begin_load(&request, LEASED);
	plan_two_steps(&request);
	sr_finish(&request);
	sr_report_loaded(sr.scheduler->load_number, 9);
	assert_int_equal(sr_stats().puts_open, 0);
	assert_int_equal(sr_stats().save_lost, 10);
	sr_stop();
}

/* A load that has become impossible when its step begins fails like any other: while the ranks have not said so, the
 * request may end ... */
static void p1_dependents_of_a_lost_load_of_a_gone_request_are_named(void **state)
{
	static sr_request_t request;
	uint32_t ids[SR_BLOCKS];

	(void)state;
	for (leased_t leased = OTHER_DAEMON; leased <= GIVEN_BACK; leased++) {
		begin_load(&request, leased);
		sr_plan();
		sr_finish(&request);
		sr_report_loaded(sr.scheduler->load_number, 0);
		assert_int_equal(kvx_scheduler_take_invalidated(sr.scheduler, ids, SR_BLOCKS), 20);
		assert_int_equal(sr_stats().lease_lost, 1);
		sr_stop();
	}
}

/* ... or steps may be planned that save what they compute after it. */
static void p1_saves_after_a_lost_load_are_given_up(void **state)
{
	static sr_request_t request;

	(void)state;
	for (leased_t leased = OTHER_DAEMON; leased <= GIVEN_BACK; leased++) {
		begin_load(&request, leased);
		plan_two_steps(&request);
		sr_report_loaded(sr.scheduler->load_number, 0);
		assert_int_equal(sr_stats().puts_open, 0);
		assert_int_equal(sr_stats().loads_failed, 1);
		sr_stop();
	}
}

/* Its blocks are another request's by the time its load is known to have failed. */
static void p7_a_failed_load_of_a_gone_request_costs_others_no_saves(void **state)
{
	static sr_request_t request, other;

	(void)state;
	begin_load(&request, LEASED);
	sr_plan();
	sr_finish(&request);
	sr_request(&other, "other", 2, 0, 160);
	sr_place(&other, 100, 0);
	sr_advance(&other, 160, 160);
	sr_plan();
	assert_int_equal(sr_stats().puts_open, 1);
	sr_report_loaded(sr.scheduler->load_number, 9);
	assert_int_equal(sr_stats().puts_open, 1);
	assert_int_equal(sr_stats().save_lost, 0);
	kvx_scheduler_revoke_saves(sr.scheduler); /* the ranks do not write */
	sr_stop();
}

SR_MAIN(cmocka_unit_test(p7_a_lease_that_could_not_be_renewed_is_renewed_in_time),
	cmocka_unit_test(p1_dependents_of_a_failed_load_of_a_gone_request_are_named),
	cmocka_unit_test(p1_saves_after_a_failed_load_of_a_gone_request_are_revoked),
	cmocka_unit_test(p1_dependents_of_a_lost_load_of_a_gone_request_are_named),
	cmocka_unit_test(p1_saves_after_a_lost_load_are_given_up),
	cmocka_unit_test(p7_a_failed_load_of_a_gone_request_costs_others_no_saves))
