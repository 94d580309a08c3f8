/* The scheduling half with memory of two GPUs: what another engine has saved in that of its own GPU is loaded from
 * there when it is the longest prefix, and when every rank has said that it can. Spaces in host memory stand in. */
#include "connectors/scheduler/sched_rig.h"
#include "engine/check.h"
#include "scheduler/names/spaces.h"

#include <unistd.h>

#define OTHER (KVX_IN_DEVICE + 1u)

static sr_request_t a, b, c;

static const sr_options_t first = {.device = SR_DEVICE_THERE, .own = "fake-1", .other = "fake-0"},
			  second = {.device = SR_DEVICE_THERE, .own = "fake-0", .other = "fake-1"},
			  first_window = {.device = SR_DEVICE_THERE, .groups = 2, .own = "fake-1", .other = "fake-0"},
			  second_window = {.device = SR_DEVICE_THERE, .groups = 2, .own = "fake-0", .other = "fake-1"},
			  alone = {.device = SR_DEVICE_THERE};

static void say_reached(void)
{
	kvx_report_reached_t *record = sr_begin_report(KVX_RECORD_REACHED, sizeof *record);

	assert_non_null(record);
	record->place = OTHER;
	sr_give_report();
}

/* Another engine has used the first `n` tokens twice, on its own GPU. */
static void store_there(uint32_t n)
{
	assert_int_equal(sr_use(&a, "a", 1, n, n), 0);
	assert_int_equal(sr_use(&b, "b", 2, n, n + 8u), n);
	assert_int_equal(sr_stats().device_blocks, n / SR_UNIT * sr.groups);
	assert_int_equal(sr_stats().other_device_tokens, 0);
}

/* From now on it is the engine on the other GPU. */
static void become_second(const sr_options_t *options)
{
	sr_close();
	assert_int_equal(sr_open(options), KVC_OK);
	sr_wait_ready();
	say_reached();
}

/* And it lies in the memory of both GPUs then: it was used a second time. */
SR_CASE(p1_another_gpu_s_blocks_are_loaded_from_there, first)
{
	store_there(80);
	become_second(&second);
	sr_request(&c, "c", 3, 80, 88);
	assert_int_equal(sr_match(&c), 80);
	assert_int_equal(sr.hit.device_tokens, 80);
	assert_int_equal(sr_stats().leases_open, 1);
	assert_int_equal(sr_run(&c, 100), 80); /* and all bytes are right */
	sr_finish(&c);
	sr_settle();
	assert_int_equal(sr_stats().other_device_tokens, 80);
	assert_int_equal(sr_count_stored(KVX_IN_DEVICE, &c), 10);
	assert_int_equal(sr_use(&a, "a2", 4, 80, 88), 80);
	assert_int_equal(sr_stats().device_tokens, 160);
	assert_int_equal(sr_stats().other_device_tokens, 80);
}

/* Its memory may be out of reach for a rank, or its spaces not open yet: then the host serves. */
SR_CASE(p7_a_gpu_that_no_rank_has_reached_is_not_counted_on, first)
{
	store_there(80);
	sr_close();
	assert_int_equal(sr_open(&second), KVC_OK);
	sr_wait_ready();
	assert_int_equal(sr_use(&c, "c", 3, 80, 88), 80);
	assert_int_equal(sr.hit.device_tokens, 0);
	assert_int_equal(sr_stats().loads_failed, 0);
	say_reached();
	assert_int_equal(kvc_space_reset(sr.space[KVX_IN_DEVICE]), KVC_OK);
	assert_int_equal(sr_use(&b, "b2", 4, 80, 88), 80);
	assert_int_equal(sr_stats().other_device_tokens, 80);
}

/* The engine's own GPU is faster than the other one, and the other one than the host. */
SR_CASE(p1_the_own_gpu_is_preferred_unless_it_has_much_less, first)
{
	static const struct {
		uint32_t own, device, other; /* tokens */
	} row[] = {{72, 72, 0}, {64, 64, 0}, {56, 80, 80}, {0, 80, 80}};

	store_there(80);
	for (uint32_t i = 0; i < KV_COUNT_OF(row); i++) {
		const uint64_t before = sr_stats().other_device_tokens;
		char id[16];

		if (i == 0) {
			become_second(&second);
		} else {
			assert_int_equal(kvc_space_reset(sr.space[KVX_IN_DEVICE]), KVC_OK);
			SR_UNTIL(sr.scheduler->spaces[0].devices[KVX_IN_DEVICE].open);
		}
		if (row[i].own > 0) {
			sr.scheduler->places[OTHER].ranks = 0; /* as if it were out of reach */
			(void)snprintf(id, sizeof id, "fill%u", i);
			(void)sr_use(&b, id, 10u + i, row[i].own, row[i].own + 8u);
			sr.scheduler->places[OTHER].ranks = 1;
		}
		(void)snprintf(id, sizeof id, "look%u", i);
		sr_request(&c, id, 3, 80, 88);
		assert_int_equal(sr_match(&c), 80);
		assert_int_equal(sr.hit.device_tokens, row[i].device);
		assert_int_equal(sr_run(&c, 100), 80);
		sr_finish(&c);
		sr_settle();
		assert_int_equal(sr_stats().other_device_tokens - before, row[i].other);
		assert_int_equal(sr_stats().loads_failed, 0);
	}
}

/* Evicted there between match and lease. */
SR_CASE(p6_a_lost_lease_on_another_gpu_is_the_host_s, first)
{
	store_there(80);
	become_second(&second);
	sr.miss_device_leases = 1;
	sr_request(&c, "c", 3, 80, 88);
	assert_int_equal(sr_match(&c), 80);
	assert_int_equal(sr.hit.device_tokens, 0);
	assert_int_equal(sr_run(&c, 100), 80);
	sr_finish(&c);
	sr_settle();
	sr.miss_device_leases = 0;
}

/* A rank cannot load from there after all. */
SR_CASE(p7_another_gpu_that_fails_is_left_alone_for_a_while, first)
{
	store_there(80);
	become_second(&second);
	sr.fail_device = KVC_ERR_TIER_OFF;
	assert_int_equal(sr_use(&c, "c", 3, 80, 88), 80); /* it computes all of it */
	assert_int_equal(sr_stats().loads_failed, 1);
	assert_int_equal(kvc_space_reset(sr.space[KVX_IN_DEVICE]), KVC_OK);
	sr.fail_device = KVC_OK;
	assert_int_equal(sr_use(&b, "b2", 4, 80, 88), 80);
	assert_int_equal(sr.hit.device_tokens, 0);
	assert_int_equal(sr_stats().loads_failed, 1);
}

/* No space has a block of the old ones, also not those that other engines have saved. */
SR_CASE(p1_new_weights_find_nothing_on_other_gpus, first)
{
	store_there(80);
	become_second(&second);
	sr_name_weights("w2");
	SR_UNTIL(sr.scheduler->spaces[sr.scheduler->base].devices[OTHER].open);
	assert_int_equal(sr_use(&c, "c", 3, 80, 88), 0);
}

/* Several groups are loaded from one place. */
SR_CASE(p1_several_groups_come_from_the_other_gpu, first_window)
{
	store_there(80);
	become_second(&second_window);
	assert_int_equal(sr_use(&c, "c", 3, 80, 88), 80);
	assert_int_equal(sr.hit.device_tokens, 80);
	assert_int_equal(sr_stats().other_device_tokens, 80);
}

SR_CASE(p10_a_report_of_a_place_that_is_none_is_refused, alone)
{
	static const uint32_t wrong[] = {KVX_IN_HOST, KVX_IN_DEVICE, KVX_PLACES, UINT32_MAX};

	for (uint32_t i = 0; i < KV_COUNT_OF(wrong); i++) {
		kvx_report_reached_t *record = sr_begin_report(KVX_RECORD_REACHED, sizeof *record);

		record->place = wrong[i];
		sr_give_report();
		assert_int_equal(sr_stats().bad_reports, i + 1u);
	}
}

SR_MAIN
