/* Loads that go wrong, or whose request is gone before they are over: what the engine computed after them, what is
 * saved, what stays leased. Built with the part's sources. */
#include "connectors/scheduler/sched_rig.h"
#include "engine/check.h"
#include "kv_test.h"
#include "scheduler/lease_cache.h"
#include "scheduler/scheduler.h"

#include <unistd.h>

#define MS UINT64_C(1000000)

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

static void report_loaded(sr_t *sr, uint64_t number, uint32_t blocks)
{
	kvx_report_loaded_t *record;

	kvx_msg_reset(&sr->report, KVX_REPORT_MAGIC);
	record = kvx_msg_add_record(&sr->report, KVX_RECORD_LOADED, sizeof *record);
	record->load = number;
	record->blocks = blocks;
	record->ns = 1000;
	kvx_msg_finish(&sr->report, 1);
	kvx_scheduler_take_report(sr->scheduler, sr->report.data, sr->report.len);
}

/* A rank is slow to read, and the queue to the daemon is full when its lease must be renewed. */
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
	sr_find(&sr, &request, 100, &hit);
	kvx_scheduler_start_load(sr.scheduler, &request.ask, &hit);
	refuse = 1;
	start = kv_now_ns(&kv_env_posix);
	while (kv_now_ns(&kv_env_posix) - start < 2600u * MS) { /* leased for 2 s */
		kvx_scheduler_build_message(sr.scheduler, &bytes, &len);
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
static void p1_dependents_of_a_failed_load_of_a_gone_request_are_named(void **state)
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
		kvx_scheduler_start_load(sr.scheduler, &request.ask, &hit);
		kvx_scheduler_build_message(sr.scheduler, &bytes, &len);
		kvx_scheduler_finish(sr.scheduler, &request.ask);
		sr_request(&sr, &other, "other", 2, 0, 40); /* gets five of its blocks */
		sr_place(&sr, &other, 115, 0);
		report_loaded(&sr, sr.scheduler->load_number, good ? 10 : 9);
		n = kvx_scheduler_take_invalidated(sr.scheduler, ids, 4);
		assert_int_equal(n, good ? 0 : 4);
		n += kvx_scheduler_take_invalidated(sr.scheduler, ids + n, SR_BLOCKS - n);
		assert_int_equal(n, good ? 0 : 15);
		for (uint32_t i = 0; i < n; i++) {
			assert_int_equal(ids[i], 100 + i);
		}
		assert_int_equal(kvx_scheduler_take_invalidated(sr.scheduler, ids, SR_BLOCKS), 0);
		kvx_scheduler_finish(sr.scheduler, &other.ask);
	}
	sr_stop(&sr, &rig);
}

/* Ten blocks are stored. A request of twenty is to load them, into blocks from 100. */
static void begin_load(sr_t *sr, rig_t *rig, sr_request_t *request, kvx_hit_t *p_hit)
{
	sr_start(sr, rig, &(sr_options_t){.foreign = 1, .mode = KVX_LOAD_SYNC});
	sr_find(sr, request, 160, p_hit);
}

/* Two steps; each computes and saves five blocks after the load. */
static void plan_two_steps(sr_t *sr, const sr_request_t *request)
{
	const void *bytes;
	size_t len;

	for (uint32_t computed = 120; computed <= 160; computed += 40) {
		kvx_scheduler_advance(sr->scheduler, &request->ask, computed, 40);
		kvx_scheduler_build_message(sr->scheduler, &bytes, &len);
	}
	assert_int_equal(sr_stats(sr).puts_open, 2);
}

/* Plans are a step ahead: the request is aborted when the step after that of its load has been planned, and before the
 * load is known to have failed. */
static void p1_saves_after_a_failed_load_of_a_gone_request_are_revoked(void **state)
{
	static sr_request_t request;
	kvx_hit_t hit;
	rig_t rig;
	sr_t sr;

	(void)state;
	begin_load(&sr, &rig, &request, &hit);
	kvx_scheduler_start_load(sr.scheduler, &request.ask, &hit);
	plan_two_steps(&sr, &request);
	kvx_scheduler_finish(sr.scheduler, &request.ask);
	report_loaded(&sr, sr.scheduler->load_number, 9);
	assert_int_equal(sr_stats(&sr).puts_open, 0);
	assert_int_equal(sr_stats(&sr).save_lost, 10);
	sr_stop(&sr, &rig);
}

/* The same, and what is leased for it is of another daemon than the one that is asked now; or it was given back, as
 * nobody had asked for it in a while. */
static void begin_lost_load(sr_t *sr, rig_t *rig, sr_request_t *request, int all)
{
	kvx_request_t *found;
	kvx_hit_t hit;

	begin_load(sr, rig, request, &hit);
	found = kvx_requests_find(&sr->scheduler->requests, request->ask.id, request->ask.id_len);
	if (all) {
		kvx_lease_cache_give_back(sr->scheduler, found->cached);
	} else {
		found->cached->generation--;
	}
	kvx_scheduler_start_load(sr->scheduler, &request->ask, &hit);
}

/* A load that has become impossible when its step begins fails like any other: while the ranks have not said so, the
 * request may end ... */
static void p1_dependents_of_a_lost_load_of_a_gone_request_are_named(void **state)
{
	static sr_request_t request;
	uint32_t ids[SR_BLOCKS];
	const void *bytes;
	size_t len;
	rig_t rig;
	sr_t sr;

	(void)state;
	for (int all = 0; all < 2; all++) {
		begin_lost_load(&sr, &rig, &request, all);
		kvx_scheduler_build_message(sr.scheduler, &bytes, &len);
		kvx_scheduler_finish(sr.scheduler, &request.ask);
		report_loaded(&sr, sr.scheduler->load_number, 0);
		assert_int_equal(kvx_scheduler_take_invalidated(sr.scheduler, ids, SR_BLOCKS), 20);
		assert_int_equal(sr_stats(&sr).lease_lost, 1);
		sr_stop(&sr, &rig);
	}
}

/* ... or steps may be planned that save what they compute after it. */
static void p1_saves_after_a_lost_load_are_given_up(void **state)
{
	static sr_request_t request;
	rig_t rig;
	sr_t sr;

	(void)state;
	for (int all = 0; all < 2; all++) {
		begin_lost_load(&sr, &rig, &request, all);
		plan_two_steps(&sr, &request);
		report_loaded(&sr, sr.scheduler->load_number, 0);
		assert_int_equal(sr_stats(&sr).puts_open, 0);
		assert_int_equal(sr_stats(&sr).loads_failed, 1);
		kvx_scheduler_finish(sr.scheduler, &request.ask);
		sr_stop(&sr, &rig);
	}
}

/* Its blocks are another request's by the time its load is known to have failed. */
static void p7_a_failed_load_of_a_gone_request_costs_others_no_saves(void **state)
{
	static sr_request_t request, other;
	const void *bytes;
	kvx_hit_t hit;
	size_t len;
	rig_t rig;
	sr_t sr;

	(void)state;
	begin_load(&sr, &rig, &request, &hit);
	kvx_scheduler_start_load(sr.scheduler, &request.ask, &hit);
	kvx_scheduler_build_message(sr.scheduler, &bytes, &len);
	kvx_scheduler_finish(sr.scheduler, &request.ask);
	sr_request(&sr, &other, "other", 2, 0, 160);
	sr_place(&sr, &other, 100, 0);
	kvx_scheduler_advance(sr.scheduler, &other.ask, 160, 160);
	kvx_scheduler_build_message(sr.scheduler, &bytes, &len);
	assert_int_equal(sr_stats(&sr).puts_open, 1);
	report_loaded(&sr, sr.scheduler->load_number, 9);
	assert_int_equal(sr_stats(&sr).puts_open, 1);
	assert_int_equal(sr_stats(&sr).save_lost, 0);
	kvx_scheduler_revoke_saves(sr.scheduler); /* the ranks do not write */
	kvx_scheduler_finish(sr.scheduler, &other.ask);
	sr_stop(&sr, &rig);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p7_a_lease_that_could_not_be_renewed_is_renewed_in_time),
		cmocka_unit_test(p1_dependents_of_a_failed_load_of_a_gone_request_are_named),
		cmocka_unit_test(p1_saves_after_a_failed_load_of_a_gone_request_are_revoked),
		cmocka_unit_test(p1_dependents_of_a_lost_load_of_a_gone_request_are_named),
		cmocka_unit_test(p1_saves_after_a_lost_load_are_given_up),
		cmocka_unit_test(p7_a_failed_load_of_a_gone_request_costs_others_no_saves),
	};

	if (argc < 2) {
		(void)fprintf(stderr, "usage: %s <kvd>\n", argv[0]);
		return 2;
	}
	sr_program = argv[1];

	return cmocka_run_group_tests(tests, NULL, NULL);
}
