/* The scheduling half with a healthy daemon: what is saved is found and loaded, once, in the right space, and nothing
 * leaks. */
#include "connectors/scheduler/sched_rig.h"

#include <unistd.h>

static sr_request_t a, b, c;

static const sr_options_t plain,
	own_keys = {.own_keys = 1}, async_loads = {.mode = KVX_LOAD_ASYNC}, cost_model = {.cost_model = 1},
	window = {.groups = 2}, own_keys_window = {.own_keys = 1, .groups = 2},
	even_window = {.groups = 2, .even_window = 1}, one_table = {.groups = 2, .one_table = 1};

SR_CASE(p1_what_was_saved_is_loaded_into_other_blocks, plain)
{
	const int loads_all = sr.groups > 1 || sr.options.mode == KVX_LOAD_ASYNC;
	kvx_scheduler_stats_t stats;

	sr_request(&a, "a", 1, 160, 200);
	assert_int_equal(sr_run(&a, 0), 0);
	sr_end(&a);
	assert_int_equal(sr_stats().save_done, 25u * sr.groups);

	/* The same again, and one that shares 160 tokens. */
	sr_request(&b, "b", 1, 160, 200);
	b.ask.whole = 1;
	assert_int_equal(sr_run(&b, 100), loads_all ? 200 : 192);
	sr_request(&c, "c", 2, 160, 200);
	assert_int_equal(sr_run(&c, 200), 160);
	sr_finish(&b);
	sr_end(&c);
	stats = sr_stats();
	assert_int_equal(stats.loads, 2);
	assert_int_equal(stats.loads_done, 2);
	assert_int_equal(stats.requests, 0);
	assert_int_equal(stats.save_done, 30u * sr.groups); /* only what was not there */
	assert_int_equal(stats.save_lost + stats.bad_reports, 0);
}
SR_ALSO(p1_what_was_saved_is_loaded_into_other_blocks, own_keys, 0)
SR_ALSO(p1_what_was_saved_is_loaded_into_other_blocks, async_loads, 0)
SR_ALSO(p1_what_was_saved_is_loaded_into_other_blocks, cost_model, 0)
SR_ALSO(p1_what_was_saved_is_loaded_into_other_blocks, window, 0)
SR_ALSO(p1_what_was_saved_is_loaded_into_other_blocks, own_keys_window, 0)

/* Of a prompt that is loaded as a whole the engine computes the last token again. Its window may begin a block earlier:
 * then the load is a block shorter. */
SR_CASE(p1_a_window_of_whole_blocks_leaves_the_last_one_to_compute, window)
{
	sr_store(&a, "a", 1, 0, 160);
	sr_request(&b, "b", 1, 0, 160);
	b.ask.whole = 1;
	assert_int_equal(sr_run(&b, 100), sr.options.even_window ? 152 : 160);
}
SR_ALSO(p1_a_window_of_whole_blocks_leaves_the_last_one_to_compute, even_window, 0)

/* Layers with pages of two sizes in one group of the engine. */
SR_CASE(p1_two_groups_over_the_same_blocks_are_saved_and_found, one_table)
{
	sr_store(&a, "a", 1, 0, 160);
	sr_request(&b, "b", 1, 0, 160);
	assert_int_equal(sr_run(&b, 100), 152);
}

SR_CASE(p7_a_request_says_how_much_of_it_is_saved, plain)
{
	sr_request(&a, "a", 1, 0, 80);
	a.ask.save_tokens = 30;
	sr_place(&a, 0, 0);
	sr_compute(&a, 0, 10);
	assert_int_equal(sr_step_saves(&a, 72), 3);
	assert_int_equal(sr_step_saves(&a, 80), 0);
}

/* Chunks, then single tokens: a call that fills no block does nothing and next() names the one that does. */
SR_CASE(p7_only_steps_that_fill_a_block_save, plain)
{
	uint32_t asked = 1;

	sr_request(&a, "a", 1, 0, 80);
	sr_place(&a, 0, 0);
	sr_compute(&a, 0, 10);
	assert_int_equal(kvx_scheduler_next_save_at(sr.scheduler, "a", 1), 0);
	assert_int_equal(kvx_scheduler_next_save_at(sr.scheduler, "z", 1), UINT32_MAX);
	assert_int_equal(sr_step_saves(&a, 30), 3);
	assert_int_equal(sr.plan.fences, 10);
	for (uint32_t computed = 31; computed <= 80; computed++) {
		const uint32_t next = kvx_scheduler_next_save_at(sr.scheduler, "a", 1);

		assert_int_equal(next, (computed - 1u) / 8u * 8u + 8u);
		sr_advance(&a, computed, 0);
		asked += computed == next;
		assert_int_equal(sr_stats().saves, asked);
		(void)sr_step();
	}
	sr_end(&a);
	assert_int_equal(sr_stats().save_done, 10);
}

/* Less than a unit, nothing beyond what the engine has, too few tokens: no hit. At least one token is left to compute.
 */
SR_CASE(p7_small_and_local_hits_are_left_to_the_engine, plain)
{
	sr_store(&a, "a", 1, 0, 80);
	sr_request(&b, "b", 1, 0, 80);
	b.ask.local = 72;
	assert_int_equal(sr_match(&b), 0);
	b.ask.whole = 1;
	assert_int_equal(sr_match(&b), 0); /* synchronous: one token must be left */
	assert_int_equal(sr.hit.stored, 80);
	b.ask.local = 64;
	assert_int_equal(sr_match(&b), 8);
	b.ask.local = 0;
	b.ask.tokens = 7;
	assert_int_equal(sr_match(&b), 0);
}

/* A caller of an older version has shorter structs: nothing is written behind them, and a load needs no more. */
SR_CASE(p10_answers_are_no_longer_than_the_caller_says, plain)
{
	struct {
		kvx_hit_t hit;
		kvx_outcome_t outcome;
	} old, untouched;

	memset(&untouched, 0x5a, sizeof untouched);
	old = untouched;
	old.hit.struct_size = offsetof(kvx_hit_t, stored);
	old.outcome.struct_size = offsetof(kvx_outcome_t, refused);
	sr_store(&a, "a", 1, 0, 80);
	sr_request(&b, "b", 1, 0, 81);
	assert_int_equal(sr_match(&b), 80);
	kvx_scheduler_match(sr.scheduler, &b.ask, &old.hit);
	assert_int_equal(old.hit.tokens, 80);
	assert_int_equal(old.hit.disk_tokens, 0);
	assert_memory_equal(&old.hit.stored, &untouched.hit.stored, sizeof old.hit - offsetof(kvx_hit_t, stored));
	sr_place(&b, 20, 0);
	kvx_scheduler_start_load(sr.scheduler, &b.ask, &old.hit);
	assert_int_equal(sr_stats().load_tokens, 80);
	kvx_scheduler_get_outcome(sr.scheduler, &b.ask, &old.outcome);
	assert_int_equal(old.outcome.load, KVC_PENDING);
	assert_memory_equal(&old.outcome.refused, &untouched.outcome.refused,
			    sizeof old.outcome - offsetof(kvx_outcome_t, refused));
}

/* Others would wait for a load in the step: without any measurement it is done beside it. */
SR_CASE(p7_a_load_that_would_hold_up_others_is_asynchronous, plain)
{
	sr_store(&a, "a", 1, 0, 80);
	sr_request(&b, "b", 1, 0, 200);
	assert_int_equal(sr_match(&b), 80);
	assert_false(sr.hit.async);
	b.ask.busy = 3;
	assert_int_equal(sr_match(&b), 80);
	assert_true(sr.hit.async);
}

/* Equal tokens, another adapter: another space, found under its own name only. */
SR_CASE(p8_adapters_do_not_share_blocks, plain)
{
	sr_store(&a, "a", 1, 0, 80);
	sr_request(&b, "b", 1, 0, 81);
	b.ask.lora = "adapter-1:0123";
	for (uint32_t i = 0; i < 50 || sr.hit.why == KV_WHY_NO_DAEMON; i++) { /* the space is being opened */
		assert_int_equal(sr_match(&b), 0);
		(void)sr_step();
		assert_int_equal(sr.plan.spaces, i == 0);
		usleep(1000);
	}
	assert_int_equal(sr.hit.why, KV_WHY_ABSENT);
	b.ask.lora = NULL;
	assert_int_equal(sr_match(&b), 80);
}

/* Its load has failed: it is computed, it does not ask again, and what was lost is saved again. */
SR_CASE(p7_a_request_whose_load_failed_is_not_matched_again, plain)
{
	sr_store(&a, "a", 1, 0, 80);
	sr_request(&b, "b", 1, 0, 120);
	sr.fail_loads = 1;
	assert_int_equal(sr_run(&b, 100), 80);
	sr.fail_loads = 0;
	assert_int_equal(sr_stats().loads_failed, 1);
	assert_int_equal(sr_stats().leases_open, 0);
	assert_int_equal(sr_match(&b), 0);
	sr_wait_saved(&b, 15);
}

/* Ranks that give saves up: they are asked for again later, and come through. */
SR_CASE(p7_saves_given_up_by_a_rank_are_made_again, plain)
{
	sr_request(&a, "a", 1, 0, 80);
	sr.drop_saves = 1;
	(void)sr_run(&a, 0);
	assert_int_equal(sr_stats().save_lost, 10);
	sr.drop_saves = 0;
	sr_wait_saved(&a, 10);
}

/* Preempted and resumed elsewhere: what it had saved is loaded, generated tokens too, and nothing is saved twice. */
SR_CASE(p7_a_preempted_request_resumes_from_the_store, plain)
{
	sr_store(&a, "a", 1, 0, 160);
	kvx_scheduler_preempt(sr.scheduler, &a.ask);
	memset(sr.cache, 0, (size_t)SR_BLOCKS * sr.block_bytes);
	assert_int_equal(sr_run(&a, 300), 152);
	sr_settle();
	assert_int_equal(sr_stats().save_done, 20);
}

/* Aborted while it is being loaded: its leases live until the ranks have said so. */
SR_CASE(p4_leases_of_an_aborted_request_live_until_reported, async_loads)
{
	sr_find(&b, 81);
	assert_true(sr.hit.async);
	sr.scheduler->writer_count = 2;
	sr_start_load(&b);
	sr_plan();
	sr_finish(&b);
	assert_int_equal(sr_stats().leases_open, 1);
	assert_true(kvx_scheduler_has_pending(sr.scheduler));
	(void)sr_step();
	assert_int_equal(sr.plan.drops, 1);
	for (uint64_t ranks = 2; ranks > 0; ranks--) {
		assert_int_equal(sr_stats().leases_open, 1);
		sr_report_loaded(sr.load, 10);
	}
	assert_int_equal(sr_stats().leases_open, 0);
}

/* A pool that thrashes refuses what is new: that costs a request one question, and no step after it. */
SR_CASE(p7_a_request_that_is_not_wanted_asks_once, plain)
{
	sr.thrashes = 1;
	sr_request(&a, "a", 1, 0, 400);
	sr_place(&a, 0, 0);
	sr_compute(&a, 0, 50);
	sr_advance(&a, 80, 0);
	SR_UNTIL(sr_stats().save_not_admitted > 0);
	assert_int_equal(sr_stats().save_not_admitted, 10);
	assert_int_equal(sr_outcome(&a).refused, KVC_ERR_NOT_ADMITTED);
	assert_int_equal(kvx_scheduler_next_save_at(sr.scheduler, "a", 1), UINT32_MAX);
	sr.thrashes = 0;
	for (uint32_t computed = 81; computed <= 400; computed++) {
		sr.ahead_ns += 100000000u; /* nor when time has passed */
		sr_advance(&a, computed, 0);
		assert_int_equal(sr_step(), 0);
	}
	assert_int_equal(sr.optional_puts, sr_stats().saves);
	assert_int_equal(sr_stats().saves, 1);
	sr_end(&a);
	assert_int_equal(sr_stats().save_busy + sr_stats().save_lost + sr_stats().save_done, 0);
	/* The next request asks again. */
	sr_store(&b, "b", 1, 0, 80);
	assert_int_equal(sr_stats().save_done, 10);
}

/* The store is full of other things, and its blocks are larger in number than memory: saving goes on, old ones make
 * room, nothing leaks. */
SR_CASE(p5_a_full_store_costs_old_blocks_only, plain)
{
	uint32_t count = 0;
	char id[24];

	for (; count < 3000 && sr_stats().save_done < 20000; count++) {
		(void)snprintf(id, sizeof id, "r%u", count);
		sr_request(&a, id, count + 10u, 0, 1600);
		(void)sr_run(&a, count % 2u * 200u);
		sr_finish(&a);
	}
	sr_settle();
	assert_true(sr_stats().save_done > 16384); /* index.max_blocks of the rig's daemon */
	/* What made room is missed as evicted, also where the daemon's table forgets some. */
	for (uint32_t i = 0; i < count; i++) { /* how many it remembers depends on the saves that were given up */
		const kvx_ended_t ended = {.struct_size = sizeof ended, .prompt_tokens = 1600};

		(void)snprintf(id, sizeof id, "again %u", i);
		sr_request(&b, id, i + 10u, 0, 1600);
		if (sr_match(&b) == 0) {
			kvx_scheduler_record_ended(sr.scheduler, &b.ask, &ended);
		}
		sr_finish(&b);
	}
	KV_AWAIT(rig_counter(&sr.rig, "kvd_prefix_miss_tokens_total{reason=evicted}") > 0);
}

SR_MAIN
