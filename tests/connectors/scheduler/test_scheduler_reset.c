/* The weights have been changed in place: the scheduling half forgets what is stored, and saves nothing of before. */
#include "connectors/scheduler/sched_rig.h"
#include "engine/check.h"

#include <stdio.h>
#include <unistd.h>

static sr_request_t a, b, c;

/* The stand-in opens the space again, too. */
static void reset(void)
{
	assert_int_equal(kvx_scheduler_reset(sr.scheduler), KVC_OK);
	kvc_space_close(sr.space);
	sr.space = NULL;
	sr_wait_ready();
}

/* Nothing of before is found, and what the living had computed is not saved under the new weights. */
static void p1_after_a_reset_nothing_old_is_found_or_saved(void **state)
{
	(void)state;
	sr_start(&(sr_options_t){.foreign = 1});
	sr_store(&a, "a", 1, 0, 120);
	reset();
	sr_advance(&a, 120, 0);
	(void)sr_step();
	assert_int_equal(sr.plan.saves, 0);
	sr_request(&b, "b", 1, 0, 120);
	(void)sr_match(&b);
	assert_int_equal(sr.hit.stored, 0);
	assert_int_equal(sr_run(&b, 100), 0);
	sr_settle();
	sr_request(&c, "c", 1, 0, 121);
	assert_int_equal(sr_run(&c, 200), 120);
	sr_stop();
}

#define ADAPTER "adapter-1:0123"

/* Somebody else has stored the request's first ten blocks for the adapter. */
static void store_for_adapter(const sr_request_t *request)
{
	const kvc_config_t config = {.struct_size = sizeof config, .socket = sr.rig.socket, .role = KVC_ROLE_BOTH};
	kvc_identity_t identity = sr.identity;
	const void *blocks[10];
	kvc_key_t keys[10];
	kvc_space_t *space;
	uint32_t visible;
	kvc_t *kvc;

	identity.lora = ADAPTER;
	assert_int_equal(kvc_attach(&config, &kvc), KVC_OK);
	assert_int_equal(kvc_space_open(kvc, &identity, &space), KVC_OK);
	for (uint32_t i = 0; i < 10; i++) {
		blocks[i] = sr.cache;
		assert_int_equal(kvc_key_bind(space, request->hash[i], 32, &keys[i]), KVC_OK);
	}
	assert_int_equal(kvc_put(space, keys, 0, 10,
				 &(kvc_put_options_t){.struct_size = sizeof(kvc_put_options_t), .blocks = blocks},
				 &visible),
			 KVC_OK);
	assert_int_equal(visible, 10);
	kvc_detach(kvc);
}

/* The daemon has not answered yet which space the adapter's is. */
static void p1_an_adapter_that_is_being_opened_is_reset_too(void **state)
{
	(void)state;
	sr_start(&(sr_options_t){.foreign = 1});
	for (int reset = 0; reset < 2; reset++) {
		sr_request(&a, "a", 1, 0, 81);
		store_for_adapter(&a);
		a.ask.lora = ADAPTER;
		sr_place(&a, 0, 0);
		if (reset) {
			assert_int_equal(kvx_scheduler_reset(sr.scheduler), KVC_OK);
		}
		do {
			(void)sr_look_up(&a);
			(void)sr_step();
			usleep(1000);
		} while (sr.hit.why == KV_WHY_NO_DAEMON);
		assert_int_equal(sr.hit.stored, reset ? 0 : 80);
		a.ask.lora = NULL;
		sr_finish(&a);
		sr_close();
		assert_int_equal(sr_open(&(sr_options_t){.foreign = 1}), KVC_OK);
		sr_wait_ready();
	}
	sr_stop();
}

/* Blocks from before a reset that are used after it, by a load that was under way or as a hit of the engine's own
 * cache: they are not saved. Those that the request is given afterwards are, whether the engine first says that it was
 * preempted (`told`) or has given them in the same step. */
static void saved_after_a_reset(int told)
{
	sr_start(&(sr_options_t){.foreign = 1, .mode = KVX_LOAD_ASYNC});
	sr_store(&a, "a", 1, 0, 80);
	sr_request(&b, "b", 1, 0, 81);
	assert_int_equal(sr_match(&b), 80);
	sr_place(&b, 100, 0);
	sr_start_load(&b);
	SR_UNTIL(sr.plan.loads > 0)
	assert_int_equal(sr.plan.loaded_blocks, 10);
	reset();
	sr_advance(&b, 81, 1);
	(void)sr_step();
	assert_int_equal(sr.plan.saves, 0);

	sr_request(&c, "c", 1, 0, 120);
	sr_place(&c, 0, 10);
	sr_advance(&c, 120, 40);
	(void)sr_step();
	assert_int_equal(sr.plan.saves, 0);
	if (told) {
		kvx_scheduler_preempt(sr.scheduler, &c.ask);
	}
	sr_place(&c, 200, 0);
	sr_compute(&c, 0, 15);
	sr_advance(&c, 120, 120);
	(void)sr_step();
	assert_int_equal(sr.plan.save_blocks, 15);
	sr_stop();
}

static void p1_what_lay_in_the_engine_before_a_reset_is_not_saved(void **state)
{
	(void)state;
	saved_after_a_reset(1);
}

/* The caller no longer knows whose the blocks are: what is reserved is given up, and the request is saved again only
 * with blocks that it is given after a preemption. */
static void p1_after_saves_are_revoked_only_a_new_table_is_saved(void **state)
{
	(void)state;
	sr_start(&(sr_options_t){.foreign = 1});
	sr_request(&a, "a", 1, 0, 160);
	sr_place(&a, 0, 0);
	sr_advance(&a, 80, 80);
	assert_int_equal(sr_stats().puts_open, 1);
	kvx_scheduler_revoke_saves(sr.scheduler);
	assert_int_equal(sr_stats().puts_open, 0);
	sr_advance(&a, 160, 80);
	(void)sr_step();
	assert_int_equal(sr.plan.saves, 0);
	kvx_scheduler_preempt(sr.scheduler, &a.ask);
	(void)sr_run(&a, 100);
	assert_int_equal(sr.plan.save_blocks, 20);
	sr_stop();
}

/* A load that was under way fails after the reset, and its request computes its blocks again, after others of before:
 * neither it nor one that shares them is saved. */
static void p1_computing_again_after_a_reset_makes_no_block_valid(void **state)
{
	const kvx_block_table_t shared = {.struct_size = sizeof shared, .n = 15, .fresh = 10, .ids = c.ids[0]};

	(void)state;
	sr_start(&(sr_options_t){.foreign = 1, .mode = KVX_LOAD_SYNC});
	sr_find(&b, 88);
	sr_start_load(&b);
	sr_plan();
	reset();
	sr_report_loaded(sr.scheduler->load_number, 9);
	sr_advance(&b, 88, 88);
	(void)sr_step();
	assert_int_equal(sr.plan.saves, 0);
	sr_request(&c, "c", 1, 0, 120);
	for (uint32_t i = 0; i < 15; i++) {
		c.ids[0][i] = i < 10 ? b.ids[0][i] : 200 + i;
	}
	assert_int_equal(kvx_scheduler_append_blocks(sr.scheduler, &c.ask, &shared), KVC_OK);
	sr_advance(&c, 120, 40);
	(void)sr_step();
	assert_int_equal(sr.plan.saves, 0);
	sr_stop();
}

static void p1_preempted_and_resumed_in_one_step_it_is_saved_again(void **state)
{
	(void)state;
	saved_after_a_reset(0);
}

SR_MAIN(cmocka_unit_test(p1_after_saves_are_revoked_only_a_new_table_is_saved),
	cmocka_unit_test(p1_computing_again_after_a_reset_makes_no_block_valid),
	cmocka_unit_test(p1_after_a_reset_nothing_old_is_found_or_saved),
	cmocka_unit_test(p1_preempted_and_resumed_in_one_step_it_is_saved_again),
	cmocka_unit_test(p1_an_adapter_that_is_being_opened_is_reset_too),
	cmocka_unit_test(p1_what_lay_in_the_engine_before_a_reset_is_not_saved))
