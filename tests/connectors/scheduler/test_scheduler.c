/* The scheduling half with a healthy daemon: what is saved is found and loaded, once, in the right space, and nothing
 * leaks. */
#include "connectors/scheduler/sched_rig.h"
#include "engine/check.h"

#include "kv/env.h"

#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static sr_request_t a, b, c;

static void comes_back(const sr_options_t *options)
{
	kvx_scheduler_stats_t stats;

	sr_start(options);
	sr_request(&a, "a", 1, 160, 200);
	assert_int_equal(sr_run(&a, 0), 0);
	sr_finish(&a);
	sr_settle();
	assert_int_equal(sr_stats().save_done, 25u * (uint32_t)sr.groups);

	/* The same again, and one that shares 160 tokens. */
	sr_request(&b, "b", 1, 160, 200);
	b.ask.whole = 1;
	assert_int_equal(sr_run(&b, 100), sr.groups > 1 || options->mode == KVX_LOAD_ASYNC ? 200 : 192);
	sr_request(&c, "c", 2, 160, 200);
	assert_int_equal(sr_run(&c, 200), 160);
	sr_finish(&b);
	sr_finish(&c);
	sr_settle();
	stats = sr_stats();
	assert_int_equal(stats.loads, 2);
	assert_int_equal(stats.loads_done, 2);
	assert_int_equal(stats.requests, 0);
	/* Only what was not there was saved. */
	assert_int_equal(stats.save_done, 30u * (uint32_t)sr.groups);
	assert_int_equal(stats.save_lost + stats.bad_reports, 0);
	sr_stop();
}

static void p1_what_was_saved_is_loaded_into_other_blocks(void **state)
{
	(void)state;
	comes_back(&(sr_options_t){.foreign = 1});
	comes_back(&(sr_options_t){.foreign = 0});
	comes_back(&(sr_options_t){.foreign = 1, .mode = KVX_LOAD_ASYNC});
	comes_back(&(sr_options_t){.foreign = 1, .cost_model = 1});
}

static void p1_two_groups_are_loaded_asynchronously(void **state)
{
	(void)state;
	comes_back(&(sr_options_t){.foreign = 1, .groups = 2});
	comes_back(&(sr_options_t){.foreign = 0, .groups = 2});
}

/* Of a prompt that is loaded as a whole the engine computes the last token again. Its window may begin a block earlier:
 * then the load is a block shorter. */
static void p1_a_window_of_whole_blocks_leaves_the_last_one_to_compute(void **state)
{
	(void)state;
	for (int even = 0; even < 2; even++) {
		sr_start(&(sr_options_t){.groups = 2, .foreign = 1, .even_window = even});
		sr_store(&a, "a", 1, 0, 160);
		sr_request(&b, "b", 1, 0, 160);
		b.ask.whole = 1;
		assert_int_equal(sr_run(&b, 100), even ? 152 : 160);
		sr_stop();
	}
}

/* Chunks, then single tokens: a call that fills no block does nothing and next() names the one that does. */
static void p7_only_steps_that_fill_a_block_save(void **state)
{
	uint32_t next, asked = 1;

	(void)state;
	sr_start(&(sr_options_t){.foreign = 1});
	sr_request(&a, "a", 1, 0, 80);
	sr_place(&a, 0, 0);
	sr_compute(&a, 0, 10);
	assert_int_equal(kvx_scheduler_next_save_at(sr.scheduler, "a", 1), 0);
	assert_int_equal(kvx_scheduler_next_save_at(sr.scheduler, "z", 1), UINT32_MAX);
	sr_advance(&a, 30, 30);
	(void)sr_step();
	assert_int_equal(sr.plan.save_blocks, 3);
	assert_int_equal(sr.plan.fences, 10);
	for (uint32_t computed = 31; computed <= 80; computed++) {
		next = kvx_scheduler_next_save_at(sr.scheduler, "a", 1);
		assert_int_equal(next, (computed - 1u) / 8u * 8u + 8u);
		sr_advance(&a, computed, 0);
		assert_int_equal(sr_stats().saves, asked + (computed == next));
		asked += computed == next;
		(void)sr_step();
	}
	sr_finish(&a);
	sr_settle();
	assert_int_equal(sr_stats().save_done, 10);
	sr_stop();
}

/* Less than a unit, nothing beyond what the engine has, too few tokens: no hit. At least one token is left to compute.
 */
static void p7_small_and_local_hits_are_left_to_the_engine(void **state)
{
	(void)state;
	sr_start(&(sr_options_t){.foreign = 1});
	sr_store(&a, "a", 1, 0, 80);

	sr_request(&b, "b", 1, 0, 80);
	b.ask.local = 72;
	assert_int_equal(sr_match(&b), 0);
	b.ask.whole = 1;
	(void)sr_match(&b);
	assert_int_equal(sr.hit.stored, 80);
	assert_int_equal(sr.hit.tokens, 0); /* synchronous: one token must be left */
	b.ask.local = 64;
	assert_int_equal(sr_match(&b), 8);
	b.ask.local = 0;
	b.ask.tokens = 7;
	assert_int_equal(sr_match(&b), 0);
	sr_stop();
}

/* Others would wait for a load in the step: without any measurement it is done beside it. */
static void p7_a_load_that_would_hold_up_others_is_asynchronous(void **state)
{
	(void)state;
	sr_start(&(sr_options_t){.foreign = 1});
	sr_store(&a, "a", 1, 0, 80);
	sr_finish(&a);
	sr_request(&b, "b", 1, 0, 200);
	assert_int_equal(sr_match(&b), 80);
	assert_false(sr.hit.async);
	b.ask.busy = 3;
	assert_int_equal(sr_match(&b), 80);
	sr_stop();
}

/* Equal tokens, another adapter: another space, found under its own name only. */
static void p8_adapters_do_not_share_blocks(void **state)
{
	(void)state;
	sr_start(&(sr_options_t){.foreign = 1});
	sr_store(&a, "a", 1, 0, 80);
	sr_finish(&a);
	sr_request(&b, "b", 1, 0, 81);
	b.ask.lora = "adapter-1:0123";
	for (int i = 0; i < 50; i++) {
		assert_int_equal(sr_match(&b), 0);
		(void)sr_step();
		assert_int_equal(sr.plan.spaces, i == 0);
		usleep(1000);
	}
	assert_int_equal(sr.hit.why, KV_WHY_ABSENT);
	b.ask.lora = NULL;
	assert_int_equal(sr_match(&b), 80);
	sr_stop();
}

/* Its load has failed: it is computed, it does not ask again, and what was lost is saved again. */
static void p7_a_request_whose_load_failed_is_not_matched_again(void **state)
{
	(void)state;
	sr_start(&(sr_options_t){.foreign = 1});
	sr_store(&a, "a", 1, 0, 80);
	sr_request(&b, "b", 1, 0, 120);
	sr.fail_loads = 1;
	assert_int_equal(sr_run(&b, 100), 80);
	sr.fail_loads = 0;
	assert_int_equal(sr_stats().loads_failed, 1);
	assert_int_equal(sr_stats().leases_open, 0);
	assert_int_equal(sr_match(&b), 0);
	sr_wait_saved(&b, 15);
	sr_stop();
}

/* Ranks that give saves up: they are asked for again later, and come through. */
static void p7_saves_given_up_by_a_rank_are_made_again(void **state)
{
	(void)state;
	sr_start(&(sr_options_t){.foreign = 1});
	sr_request(&a, "a", 1, 0, 80);
	sr.drop_saves = 1;
	(void)sr_run(&a, 0);
	assert_int_equal(sr_stats().save_lost, 10);
	sr.drop_saves = 0;
	sr_wait_saved(&a, 10);
	sr_stop();
}

/* Preempted and resumed elsewhere: what it had saved is loaded, generated tokens too, and nothing is saved twice. */
static void p7_a_preempted_request_resumes_from_the_store(void **state)
{
	(void)state;
	sr_start(&(sr_options_t){.foreign = 1});
	sr_store(&a, "a", 1, 0, 160);
	kvx_scheduler_preempt(sr.scheduler, &a.ask);
	memset(sr.cache, 0, (size_t)SR_BLOCKS * sr.block_bytes);
	assert_int_equal(sr_run(&a, 300), 152);
	sr_settle();
	assert_int_equal(sr_stats().save_done, 20);
	sr_stop();
}

/* Aborted while it is being loaded: its leases live until the ranks have said so. */
static void p4_leases_of_an_aborted_request_live_until_reported(void **state)
{
	(void)state;
	sr_start(&(sr_options_t){.foreign = 1, .mode = KVX_LOAD_ASYNC});
	sr_find(&b, 81);
	assert_true(sr.hit.async);
	sr.scheduler->writer_count = 2;
	sr_start_load(&b);
	sr_plan();
	assert_true(sr.scheduler->loads->sent);
	sr_finish(&b);
	assert_int_equal(sr_stats().leases_open, 1);
	assert_true(kvx_scheduler_has_pending(sr.scheduler));
	(void)sr_step();
	assert_int_equal(sr.plan.drops, 1);
	assert_int_equal(sr_stats().leases_open, 1);

	sr_report_loaded(1, 10); /* of one rank, and of the other */
	assert_int_equal(sr_stats().leases_open, 1);
	sr_report_loaded(1, 10);
	assert_int_equal(sr_stats().leases_open, 0);
	sr_stop();
}

/* The store is full of other things, and its blocks are larger in number than memory: saving goes on, old ones make
 * room, nothing leaks. */
static void p5_a_full_store_costs_old_blocks_only(void **state)
{
	char id[16];

	(void)state;
	sr_start(&(sr_options_t){.foreign = 1});
	for (uint32_t i = 0; i < 3000 && sr_stats().save_done < 20000; i++) {
		(void)snprintf(id, sizeof id, "r%u", i);
		sr_request(&a, id, i + 10u, 0, 1600);
		(void)sr_run(&a, i % 2u * 200u);
		sr_finish(&a);
	}
	sr_settle();
	assert_true(sr_stats().save_done > 16384); /* index.max_blocks of the rig's daemon */
	sr_stop();
}

/* `to` has the first ten blocks of `from`, found in the engine's own cache, and its own after them. */
static void place_shared(sr_request_t *to, const sr_request_t *from, uint32_t base)
{
	const kvx_block_table_t table = {.struct_size = sizeof table, .n = 15, .fresh = 10, .ids = to->ids[0]};

	for (uint32_t i = 0; i < 15; i++) {
		to->ids[0][i] = i < 10 ? from->ids[0][i] : base + i;
	}
	assert_int_equal(kvx_scheduler_append_blocks(sr.scheduler, &to->ask, &table), KVC_OK);
	sr_advance(to, 120, 40);
}

/* The engine's cache names the blocks of a synchronous load at once. It fails, and until the request has computed
 * them, piece by piece, what others compute after them is garbage. */
static void after_a_failed_load(int lost)
{
	static sr_request_t d, e;
	uint64_t before;

	sr_start(&(sr_options_t){.foreign = 1, .mode = KVX_LOAD_SYNC});
	sr_store(&a, "a", 1, 80, 80);
	sr_finish(&a);
	sr_request(&b, "b", 2, 80, 88);
	sr_request(&c, "c", 3, 80, 120);
	sr_request(&d, "d", 4, 80, 120);
	sr_request(&e, "e", 5, 80, 120);
	assert_int_equal(sr_match(&b), 80);
	SR_UNTIL(sr_stats().leases_open == !lost)
	sr_place(&b, 100, 0);
	sr_start_load(&b);
	place_shared(&c, &b, 200);
	sr.fail_loads = 1;
	(void)sr_step();
	assert_int_equal(sr.plan.failed_blocks, 10);
	sr.fail_loads = 0;

	/* Half of them are there again. One that came with the load, and one that comes now. */
	sr_advance(&b, 40, 40);
	place_shared(&d, &b, 250);
	for (int i = 0; i < 20; i++) {
		usleep(5000);
		sr_advance(&c, 120, 1);
		sr_advance(&d, 120, 1);
		(void)sr_step();
		assert_int_equal(sr.plan.saves, 0);
	}
	/* And all of them. */
	before = sr_stats().save_blocks;
	sr_advance(&b, 88, 48);
	sr_compute(&b, 0, 11);
	place_shared(&e, &b, 300);
	sr_compute(&e, 10, 15);
	(void)sr_step();
	assert_int_equal(sr_stats().save_blocks - before, 6);
	sr_stop();
}

/* The ranks report it, or what was leased was given back before they are told. */
static void p1_blocks_computed_after_a_failed_load_are_not_saved(void **state)
{
	(void)state;
	after_a_failed_load(0);
	after_a_failed_load(1);
}

SR_MAIN(cmocka_unit_test(p1_what_was_saved_is_loaded_into_other_blocks),
	cmocka_unit_test(p1_two_groups_are_loaded_asynchronously),
	cmocka_unit_test(p1_a_window_of_whole_blocks_leaves_the_last_one_to_compute),
	cmocka_unit_test(p7_only_steps_that_fill_a_block_save),
	cmocka_unit_test(p7_small_and_local_hits_are_left_to_the_engine),
	cmocka_unit_test(p7_a_load_that_would_hold_up_others_is_asynchronous),
	cmocka_unit_test(p8_adapters_do_not_share_blocks),
	cmocka_unit_test(p7_a_request_whose_load_failed_is_not_matched_again),
	cmocka_unit_test(p7_saves_given_up_by_a_rank_are_made_again),
	cmocka_unit_test(p7_a_preempted_request_resumes_from_the_store),
	cmocka_unit_test(p4_leases_of_an_aborted_request_live_until_reported),
	cmocka_unit_test(p5_a_full_store_costs_old_blocks_only),
	cmocka_unit_test(p1_blocks_computed_after_a_failed_load_are_not_saved))
