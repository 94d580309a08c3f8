/* The scheduling half with a second space, in GPU memory: what is used twice goes there and is loaded from there, and
 * nothing depends on it. A space in host memory stands in for it. */
#include "connectors/scheduler/sched_rig.h"
#include "engine/check.h"
#include "scheduler/names/spaces.h"

#include <unistd.h>

static sr_request_t a, b, c, d;

static const sr_options_t there = {.device = SR_DEVICE_THERE},
			  async_there = {.device = SR_DEVICE_THERE, .mode = KVX_LOAD_ASYNC},
			  by_cost = {.device = SR_DEVICE_THERE, .cost_model = 1},
			  window = {.device = SR_DEVICE_THERE, .groups = 2}, refused = {.device = SR_DEVICE_REFUSED},
			  own_keys = {.own_keys = 1};

/* Eighty tokens are in host memory, and in GPU memory. */
static void store_twice(void)
{
	assert_int_equal(sr_use(&a, "a", 1, 80, 80), 0);
	assert_int_equal(sr_use(&b, "b", 2, 80, 88), 80);
	assert_int_equal(sr_count_stored(KVX_OWN_MEM, &b), 10);
}

SR_CASE(p1_what_is_used_twice_is_loaded_from_the_device, there)
{
	assert_int_equal(sr_use(&a, "a", 1, 80, 80), 0);
	assert_int_equal(sr_stats().gpu_blocks, 0); /* once is not enough */
	assert_int_equal(sr_use(&b, "b", 2, 80, 88), 80);
	assert_int_equal(sr.hit.gpu_tokens, 0);
	assert_int_equal(sr_stats().gpu_blocks, 10);
	assert_int_equal(sr.yielding_puts, 1); /* saves to the host do not */
	assert_int_equal(sr_stats().save_done, 11);
	sr_request(&c, "c", 3, 80, 88);
	assert_int_equal(sr_match(&c), 80);
	assert_int_equal(sr.hit.gpu_tokens, 80);
	assert_int_equal(sr.hit.async, sr.options.mode == KVX_LOAD_ASYNC);
	assert_int_equal(sr_stats().leases_open, 1); /* the host's blocks are not leased */
	assert_int_equal(sr_run(&c, 100), 80);       /* and all bytes are right */
	sr_end(&c);
	assert_int_equal(sr_stats().gpu_tokens, 80);
	assert_int_equal(sr_stats().load_tokens, 160);
	assert_int_equal(sr_stats().gpu_blocks, 10); /* it has them already */
	assert_int_equal(sr_stats().save_busy + sr_stats().save_lost, 0);
}
SR_ALSO(p1_what_is_used_twice_is_loaded_from_the_device, async_there, 0)

static uint64_t count_hits(const char *tier)
{
	char name[64];

	(void)snprintf(name, sizeof name, "kvd_prefix_hit_tokens_total{tier=%s}", tier);

	return (uint64_t)rig_counter(&sr.rig, name);
}

/* An engine ends a request of one step, and then passes on that step's reports. */
SR_CASE(p9_a_request_of_one_step_counts_its_hit, there)
{
	const kvx_ended_t ended = {.struct_size = sizeof ended, .prompt_tokens = 168, .output_tokens = 1};

	store_twice();
	assert_int_equal(sr_use(&a, "a2", 3, 80, 160), 80);
	sr_request(&c, "c", 3, 80, 168);
	assert_int_equal(sr_match(&c), 160);
	sr_place(&c, 200, 0);
	sr_start_load(&c);
	sr.ahead = 1;
	(void)sr_step();
	kvx_scheduler_record_ended(sr.scheduler, &c.ask, &ended);
	sr.ahead = 0;
	sr_give_report();
	sr_finish(&c);
	for (int i = 0; i < 5000 && count_hits("gpu") == 0; i++) {
		(void)kvc_poll(sr.kvc, 0);
		usleep(1000);
	}
	assert_int_equal(count_hits("gpu"), 80);
	assert_int_equal(count_hits("cpu"), 80);
	assert_int_equal(count_hits("disk"), 0);
}

SR_CASE(p1_the_rest_of_a_prefix_comes_from_the_host, there)
{
	store_twice();
	assert_int_equal(sr_use(&a, "a2", 3, 80, 160), 80); /* its other half is in host memory alone */
	sr_request(&c, "c", 3, 80, 168);
	assert_int_equal(sr_match(&c), 160);
	assert_int_equal(sr.hit.gpu_tokens, 80);
	assert_int_equal(sr.hit.disk_tokens, 0);
	assert_int_equal(sr_run(&c, 200), 160);
	sr_end(&c);
	assert_int_equal(sr_stats().gpu_tokens, 160);
	assert_int_equal(sr_count_stored(KVX_OWN_MEM, &c), 20);
	assert_int_equal(sr_use(&d, "d", 3, 80, 168), 160);
	assert_int_equal(sr.hit.gpu_tokens, 160);
}
SR_ALSO(p1_the_rest_of_a_prefix_comes_from_the_host, async_there, 0)

/* What the engine has itself is in neither part. */
SR_CASE(p1_each_part_begins_where_the_engine_s_own_blocks_end, there)
{
	static const uint32_t had[] = {40, 80, 120}, device[] = {40, 0, 0};

	store_twice();
	assert_int_equal(sr_use(&a, "a2", 3, 80, 160), 80);
	for (uint32_t i = 0; i < 3; i++) {
		sr_request(&c, (const char *const[]){"c0", "c1", "c2"}[i], 3, 80, 168);
		c.ask.local = had[i];
		assert_int_equal(sr_match(&c), 160 - had[i]);
		assert_int_equal(sr.hit.gpu_tokens, device[i]);
		sr_place(&c, 100, had[i] / SR_UNIT);
		sr_compute(&c, 0, had[i] / SR_UNIT);
		sr_start_load(&c);
		sr_advance(&c, 168, 8);
		for (uint32_t n = 0; n < 10000 && sr.plan.loaded_blocks == 0; n++) {
			(void)sr_step();
			usleep(100);
		}
		assert_int_equal(sr.plan.parts, device[i] ? 2 : 1);
		assert_int_equal(sr.plan.gpu_blocks, device[i] / SR_UNIT);
		assert_int_equal(sr.plan.failed_blocks, 0);
		assert_true(sr_is_right(&c, 0, 20));
		c.ask.local = 0;
		sr_end(&c);
		assert_int_equal(kvc_space_reset(sr.space[KVX_OWN_MEM]),
				 KVC_OK); /* each begins with ten blocks there */
		sr.plan.loaded_blocks = 0;
		(void)sr_use(&b, (const char *const[]){"r0", "r1", "r2"}[i], 2, 80, 88);
		assert_int_equal(sr_count_stored(KVX_OWN_MEM, &b), 10);
	}
}

/* The engine has computed some of it between two lookups: the leases of before still serve. */
SR_CASE(p1_a_cached_lease_is_cut_at_both_ends, there)
{
	store_twice();
	assert_int_equal(sr_use(&a, "a2", 3, 80, 160), 80);
	sr_request(&c, "c", 3, 80, 168);
	assert_int_equal(sr_match(&c), 160);
	assert_int_equal(sr_stats().leases_open, 2);
	c.ask.local = 96;
	assert_int_equal(sr_match(&c), 64);
	assert_int_equal(sr.hit.gpu_tokens, 0);
	sr_place(&c, 100, 12);
	sr_compute(&c, 0, 12);
	sr_start_load(&c);
	assert_int_equal(sr_stats().leases_open, 1);
	sr_advance(&c, 168, 8);
	(void)sr_step();
	assert_int_equal(sr.plan.parts, 1);
	assert_true(sr_is_right(&c, 0, 20));
	assert_int_equal(sr_stats().gpu_tokens, 80); /* of a2 */
}

/* A prompt of 8 tokens more, whose lease in memory of the GPU comes back empty. */
static void must_come_from_the_host(uint32_t tokens)
{
	sr.miss_device_leases = 1;
	sr_request(&c, "c", 3, 80, tokens + 8);
	assert_int_equal(sr_match(&c), tokens);
	assert_int_equal(sr.hit.gpu_tokens, 0);
	assert_int_equal(sr_run(&c, 100), tokens);
	sr_end(&c);
	sr.miss_device_leases = 0;
}

/* Evicted between match and lease. */
SR_CASE(p6_a_lost_lease_on_the_device_is_the_host_s, there)
{
	store_twice();
	assert_int_equal(sr_use(&a, "a2", 3, 80, 160), 80);
	must_come_from_the_host(160);
}

/* The end of it was: the rest comes from the host. */
SR_CASE(p6_a_shortened_lease_on_the_device_goes_on_in_the_host_s, there)
{
	store_twice();
	assert_int_equal(sr_use(&a, "a2", 3, 80, 160), 80);
	sr.cut_device_leases = 6;
	sr_request(&c, "c", 3, 80, 168);
	assert_int_equal(sr_match(&c), 160);
	assert_int_equal(sr.hit.gpu_tokens, 48);
	assert_int_equal(sr_run(&c, 100), 160);
	assert_true(sr_is_right(&c, 0, 20));
	sr_end(&c);
	sr.cut_device_leases = 0;
}

/* It holds what the host has lost, and is enough. */
SR_CASE(p1_the_device_alone_serves_what_the_host_has_lost, there)
{
	store_twice();
	assert_int_equal(kvc_space_reset(sr.space[KVX_HOST_MEM]), KVC_OK);
	for (uint32_t i = 0; i < 10000 && !kvx_scheduler_is_ready(sr.scheduler); i++) {
		(void)sr_step();
		usleep(1000);
	}
	assert_int_equal(sr_use(&c, "c", 3, 80, 88), 80);
	assert_int_equal(sr.hit.gpu_tokens, 80);
}

/* Blocks of a failed load are saved nowhere. */
SR_CASE(p1_garbage_is_not_saved_to_the_device, there)
{
	assert_int_equal(sr_use(&a, "a", 1, 80, 80), 0);
	sr.fail_loads = 1;
	assert_int_equal(sr_use(&b, "b", 2, 80, 88), 80);
	sr.fail_loads = 0;
	assert_int_equal(sr_stats().gpu_blocks, 0);
	assert_int_equal(sr_count_stored(KVX_OWN_MEM, &b), 0);
	assert_int_equal(sr_use(&c, "c", 3, 80, 88), 80);
	assert_int_equal(sr_count_stored(KVX_OWN_MEM, &c), 10);
}

/* A block that went to another request before its save was handed out is not saved. */
SR_CASE(p1_a_reused_block_is_not_saved_to_the_device, async_there)
{
	assert_int_equal(sr_use(&a, "a", 1, 80, 80), 0);
	sr_request(&b, "b", 2, 80, 88);
	assert_int_equal(sr_match(&b), 80);
	sr_place(&b, 100, 0);
	sr_start_load(&b);
	(void)sr_step();
	sr_advance(&b, 88, 8);
	sr_finish(&b);
	sr_request(&c, "c", 9, 0, 80);
	sr_place(&c, 100, 0); /* in the same step */
	sr_compute(&c, 0, 10);
	(void)sr_step();
	sr_settle();
	assert_int_equal(sr_stats().gpu_blocks, 0);
	assert_int_equal(sr_count_stored(KVX_OWN_MEM, &b), 0);
}

/* Refused, or given up by a rank: the request goes on without. */
SR_CASE(p5_a_refused_save_to_the_device_is_not_repeated, there)
{
	assert_int_equal(sr_use(&a, "a", 1, 80, 80), 0);
	sr_request(&b, "b", 2, 80, 88);
	sr.drop_saves = 1;
	assert_int_equal(sr_run(&b, 100), 80);
	assert_int_equal(sr.plan.urgent_saves, 0); /* nobody waits for it */
	SR_UNTIL(sr_stats().puts_open == 0);
	sr.drop_saves = 0;
	assert_int_equal(sr_stats().gpu_blocks, 0);
	for (uint32_t i = 0; i < 5; i++) {
		sr_advance(&b, 88, 0);
		(void)sr_step();
		assert_int_equal(sr.plan.device_saves, 0);
	}
	sr_settle();
	assert_int_equal(sr_count_stored(KVX_OWN_MEM, &b), 0);
}

/* Its memory cannot be mapped: all comes from the host, and after a minute it is tried again. */
SR_CASE(p7_a_rank_without_the_device_ends_its_use_for_a_while, there)
{
	store_twice();
	sr.fail_device = sr.row ? KVC_ERR_TIER_OFF : KVC_ERR_FAULT;
	assert_int_equal(sr_use(&c, "c", 3, 80, 88), 80); /* it computes all of it */
	assert_int_equal(sr.hit.gpu_tokens, 80);
	assert_int_equal(sr_stats().loads_failed, 1);
	assert_int_equal(sr_use(&d, "d", 4, 80, 88), 80);
	assert_int_equal(sr.hit.gpu_tokens, 0);
	assert_int_equal(sr_stats().loads_failed, 1);
	sr.fail_device = KVC_OK;
	sr.ahead_ns += 61 * UINT64_C(1000000000);
	assert_int_equal(sr_use(&a, "a3", 5, 80, 88), 80);
	assert_int_equal(sr.hit.gpu_tokens, 80);
}
SR_NAMED("p7_a_rank_without_the_device_ends_its_use (no space)", p7_a_rank_without_the_device_ends_its_use_for_a_while,
	 there, 1)

/* What is on the device costs nothing: the cost model is asked about the rest alone. */
SR_CASE(p7_what_the_device_has_always_pays, by_cost)
{
	store_twice();
	assert_int_equal(sr_use(&a, "a2", 3, 80, 160), 80);
	for (uint32_t i = 0; i < 32; i++) { /* loading was slow, computing fast */
		kvx_cost_model_add_load(&sr.scheduler->cost_model, 80, 0, UINT64_C(10000000000), sr_now_ns());
		kvx_cost_model_add_step(&sr.scheduler->cost_model, &(kvx_step_work_t){4096, 4096.0 * 4096.0}, 1000);
	}
	sr.scheduler->cost_model.cpu.stopped = UINT32_MAX;
	sr.scheduler->cost_model.disk.stopped = UINT32_MAX;
	sr.scheduler->cost_model.cpu.sampled_ns = sr.scheduler->cost_model.disk.sampled_ns = sr_now_ns();
	sr_request(&c, "c", 3, 80, 168);
	assert_int_equal(sr_match(&c), 80);
	assert_int_equal(sr.hit.gpu_tokens, 80);
	assert_int_equal(sr.hit.declined, 0);
	assert_int_equal(sr_run(&c, 100), 80);
	assert_int_equal(sr_stats().miss_tokens_declined, 80 * 2);
}

/* Several groups are loaded from one mem: the GPU's if it has as much. */
SR_CASE(p1_several_groups_come_from_one_place, window)
{
	assert_int_equal(sr_use(&a, "a", 1, 80, 80), 0);
	assert_int_equal(sr_use(&b, "b", 2, 80, 88), 80);
	assert_int_equal(sr_use(&c, "c", 3, 80, 88), 80);
	assert_int_equal(sr.hit.gpu_tokens, 80);
	assert_int_equal(sr_use(&a, "a2", 7, 80, 160), 80);
	assert_int_equal(sr.hit.gpu_tokens, 80);
	assert_int_equal(sr_use(&d, "d", 7, 80, 168), 160); /* the host has more */
	assert_int_equal(sr.hit.gpu_tokens, 0);
}

/* Neither space has a block of the old ones. */
SR_CASE(p1_new_weights_find_nothing_on_the_device, there)
{
	store_twice();
	sr_name_weights("w2");
	SR_UNTIL(sr.scheduler->spaces[sr.scheduler->base].mems[KVX_OWN_MEM].open);
	assert_int_equal(sr_use(&c, "c", 3, 80, 88), 0);
	assert_int_equal(sr_use(&d, "d", 4, 80, 88), 80);
	assert_int_equal(sr.hit.gpu_tokens, 0);
	sr_name_weights("w1");
	assert_int_equal(sr_count_stored(KVX_OWN_MEM, &d), 10);
}

SR_CASE(p6_the_device_is_used_again_after_a_restart, there)
{
	store_twice();
	rig_kill(&sr.rig);
	sr_restart_daemon();
	SR_UNTIL(kvx_scheduler_is_ready(sr.scheduler));
	(void)sr_use(&a, "a1", 1, 80, 80);
	(void)sr_use(&b, "b1", 2, 80, 88);
	SR_UNTIL(sr_count_stored(KVX_OWN_MEM, &b) == 10);
	assert_int_equal(sr_use(&c, "c", 3, 80, 88), 80);
	assert_int_equal(sr.hit.gpu_tokens, 80);
}

/* It is asked for every two seconds, and never logged. */
SR_CASE(p7_a_refused_device_is_asked_for_now_and_then, refused)
{
	uint32_t before;

	SR_UNTIL(sr.refusals > 0);
	before = sr.refusals;
	for (uint32_t i = 0; i < 20; i++) {
		(void)sr_step();
	}
	assert_int_equal(sr.refusals, before);
	sr.ahead_ns += 3 * UINT64_C(1000000000);
	SR_UNTIL(sr.refusals > before);
	assert_int_equal(sr.plan.spaces, 0);
}

static uint64_t trace_of(const sr_options_t *options, uint32_t *p_records)
{
	sr_close();
	assert_int_equal(sr_open(options), KVC_OK);
	sr_wait_ready();
	sr.trace = 0;
	sr.traced = 0;
	assert_int_equal(sr_use(&a, "a", 1, 80, 80), 0);
	assert_int_equal(sr_use(&b, "b", 2, 80, 88), 80);
	assert_int_equal(sr_use(&c, "c", 3, 80, 168), 80);
	assert_int_equal(sr_use(&d, "d", 3, 80, 168), 160);
	assert_int_equal(sr_stats().gpu_tokens + sr_stats().gpu_blocks, 0);
	assert_int_equal(kvc_space_reset(sr.space[KVX_HOST_MEM]), KVC_OK);
	*p_records = sr.traced;

	return sr.trace;
}

/* The daemon has no GPU memory: each message has the bytes it has if none was asked for. */
SR_CASE(p7_a_device_that_never_opens_changes_no_message, refused)
{
	static const sr_options_t none;
	uint32_t records = 0, records_without = 0;
	const uint64_t with = trace_of(&refused, &records), without = trace_of(&none, &records_without);

	assert_true(records >= 8);
	assert_int_equal(records, records_without);
	assert_true(with == without);
}

SR_CASE(p7_own_keys_have_one_space, own_keys)
{
	assert_int_equal(kvx_scheduler_set_device(sr.scheduler, "fake-0"), KVC_ERR_UNSUPPORTED);
}

SR_CASE(p7_the_device_is_set_once, there)
{
	assert_int_equal(kvx_scheduler_set_device(sr.scheduler, "fake-1"), KVC_ERR_ARG);
	assert_int_equal(kvx_scheduler_set_device(sr.scheduler, ""), KVC_ERR_ARG);
	assert_int_equal(kvx_scheduler_set_device(sr.scheduler, NULL), KVC_ERR_ARG);
}

/* Prompts that share prefixes, and a device that forgets now and then: every loaded byte is right. */
SR_CASE(p1_loads_of_two_parts_are_right_in_a_random_order, there)
{
	uint64_t state = kv_test_seed();
	static char id[16];

	for (uint32_t i = 0; i < 200; i++) {
		const uint32_t seed = 1u + below(&state, 5), n = 16u + 8u * below(&state, 30);

		if (below(&state, 20) == 0) {
			assert_int_equal(kvc_space_reset(sr.space[KVX_OWN_MEM]), KVC_OK);
		}
		sr.miss_device_leases = below(&state, 10) == 0;
		(void)snprintf(id, sizeof id, "r%u", i);
		(void)sr_use(&a, id, seed, 8u * below(&state, 12), n);
	}
	sr.miss_device_leases = 0;
	assert_true(sr_stats().gpu_tokens > 0);
	assert_int_equal(sr_stats().loads_failed, 0);
}

/* ---- two GPUs --------------------------------------------------------------------------------- */

/* What another engine has saved in memory of its own GPU is loaded from there when it is the longest prefix, and when
 * every rank has said that it can. */
#define OTHER (KVX_OWN_MEM + 1u)

static const sr_options_t first = {.device = SR_DEVICE_THERE, .own = "fake-1", .other = "fake-0"},
			  second = {.device = SR_DEVICE_THERE, .own = "fake-0", .other = "fake-1"},
			  first_window = {.device = SR_DEVICE_THERE, .groups = 2, .own = "fake-1", .other = "fake-0"},
			  second_window = {.device = SR_DEVICE_THERE, .groups = 2, .own = "fake-0", .other = "fake-1"};

static void say_reached(void)
{
	kvx_report_reached_t *record = sr_begin_report(KVX_RECORD_REACHED, sizeof *record);

	assert_non_null(record);
	record->mem = OTHER;
	sr_give_report();
}

/* Another engine has used the first `n` tokens twice, on its own GPU. */
static void store_there(uint32_t n)
{
	assert_int_equal(sr_use(&a, "a", 1, n, n), 0);
	assert_int_equal(sr_use(&b, "b", 2, n, n + 8u), n);
	assert_int_equal(sr_stats().gpu_blocks, n / SR_UNIT * sr.groups);
	assert_int_equal(sr_stats().other_gpu_tokens, 0);
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
	assert_int_equal(sr.hit.gpu_tokens, 80);
	assert_int_equal(sr_stats().leases_open, 1);
	assert_int_equal(sr_run(&c, 100), 80); /* and all bytes are right */
	sr_end(&c);
	assert_int_equal(sr_stats().other_gpu_tokens, 80);
	assert_int_equal(sr_count_stored(KVX_OWN_MEM, &c), 10);
	assert_int_equal(sr_use(&a, "a2", 4, 80, 88), 80);
	assert_int_equal(sr_stats().gpu_tokens, 160);
	assert_int_equal(sr_stats().other_gpu_tokens, 80);
}

/* Its memory may be out of reach for a rank, or its spaces not open yet: then the host serves. */
SR_CASE(p7_a_gpu_that_no_rank_has_reached_is_not_counted_on, first)
{
	store_there(80);
	sr_close();
	assert_int_equal(sr_open(&second), KVC_OK);
	sr_wait_ready();
	assert_int_equal(sr_use(&c, "c", 3, 80, 88), 80);
	assert_int_equal(sr.hit.gpu_tokens, 0);
	assert_int_equal(sr_stats().loads_failed, 0);
	say_reached();
	assert_int_equal(kvc_space_reset(sr.space[KVX_OWN_MEM]), KVC_OK);
	assert_int_equal(sr_use(&b, "b2", 4, 80, 88), 80);
	assert_int_equal(sr_stats().other_gpu_tokens, 80);
}

/* The engine's own GPU is faster than the other one, and the other one than the host. */
SR_CASE(p1_the_own_gpu_is_preferred_unless_it_has_much_less, first)
{
	static const struct {
		uint32_t own, device, other; /* tokens */
	} row[] = {{72, 72, 0}, {64, 64, 0}, {56, 80, 80}, {0, 80, 80}};

	store_there(80);
	for (uint32_t i = 0; i < KV_COUNT_OF(row); i++) {
		const uint64_t before = sr_stats().other_gpu_tokens;
		char id[16];

		if (i == 0) {
			become_second(&second);
		} else {
			assert_int_equal(kvc_space_reset(sr.space[KVX_OWN_MEM]), KVC_OK);
			SR_UNTIL(sr.scheduler->spaces[0].mems[KVX_OWN_MEM].open);
		}
		if (row[i].own > 0) {
			sr.scheduler->mems[OTHER].ranks = 0; /* as if it were out of reach */
			(void)snprintf(id, sizeof id, "fill%u", i);
			(void)sr_use(&b, id, 10u + i, row[i].own, row[i].own + 8u);
			sr.scheduler->mems[OTHER].ranks = 1;
		}
		(void)snprintf(id, sizeof id, "look%u", i);
		sr_request(&c, id, 3, 80, 88);
		assert_int_equal(sr_match(&c), 80);
		assert_int_equal(sr.hit.gpu_tokens, row[i].device);
		assert_int_equal(sr_run(&c, 100), 80);
		sr_end(&c);
		assert_int_equal(sr_stats().other_gpu_tokens - before, row[i].other);
		assert_int_equal(sr_stats().loads_failed, 0);
	}
}

/* Evicted there between match and lease. */
SR_CASE(p6_a_lost_lease_on_another_gpu_is_the_host_s, first)
{
	store_there(80);
	become_second(&second);
	must_come_from_the_host(80);
}

/* A rank cannot load from there after all. */
SR_CASE(p7_another_gpu_that_fails_is_left_alone_for_a_while, first)
{
	store_there(80);
	become_second(&second);
	sr.fail_device = KVC_ERR_TIER_OFF;
	assert_int_equal(sr_use(&c, "c", 3, 80, 88), 80); /* it computes all of it */
	assert_int_equal(sr_stats().loads_failed, 1);
	assert_int_equal(kvc_space_reset(sr.space[KVX_OWN_MEM]), KVC_OK);
	sr.fail_device = KVC_OK;
	assert_int_equal(sr_use(&b, "b2", 4, 80, 88), 80);
	assert_int_equal(sr.hit.gpu_tokens, 0);
	assert_int_equal(sr_stats().loads_failed, 1);
}

/* No space has a block of the old ones, also not those that other engines have saved. */
SR_CASE(p1_new_weights_find_nothing_on_other_gpus, first)
{
	store_there(80);
	become_second(&second);
	sr_name_weights("w2");
	SR_UNTIL(sr.scheduler->spaces[sr.scheduler->base].mems[OTHER].open);
	assert_int_equal(sr_use(&c, "c", 3, 80, 88), 0);
}

/* Several groups are loaded from one mem. */
SR_CASE(p1_several_groups_come_from_the_other_gpu, first_window)
{
	store_there(80);
	become_second(&second_window);
	assert_int_equal(sr_use(&c, "c", 3, 80, 88), 80);
	assert_int_equal(sr.hit.gpu_tokens, 80);
	assert_int_equal(sr_stats().other_gpu_tokens, 80);
}

SR_CASE(p10_a_report_of_a_place_that_is_none_is_refused, there)
{
	static const uint32_t wrong[] = {KVX_HOST_MEM, KVX_OWN_MEM, KVX_MEMS, UINT32_MAX};

	for (uint32_t i = 0; i < KV_COUNT_OF(wrong); i++) {
		kvx_report_reached_t *record = sr_begin_report(KVX_RECORD_REACHED, sizeof *record);

		record->mem = wrong[i];
		sr_give_report();
		assert_int_equal(sr_stats().bad_reports, i + 1u);
	}
}

SR_MAIN
