/* The weights have been changed in place: the scheduling half forgets what is stored, and saves nothing of before. */
#include "connectors/scheduler/sched_rig.h"
#include "engine/check.h"

#include <stdio.h>
#include <unistd.h>

static sr_request_t a, b, c;

/* Nothing of before is found, and what the living had computed is not saved under the new weights. */
static void p1_after_a_reset_nothing_old_is_found_or_saved(void **state)
{
	kvx_hit_t hit;
	rig_t rig;
	sr_t sr;

	(void)state;
	sr_start(&sr, &rig, &(sr_options_t){.foreign = 1});
	sr_store(&sr, &a, "a", 1, 0, 120);
	assert_int_equal(kvx_scheduler_reset(sr.scheduler), KVC_OK);
	kvx_scheduler_advance(sr.scheduler, &a.ask, 120, 0);
	(void)sr_step(&sr);
	assert_int_equal(sr.saves, 0);
	sr_request(&sr, &b, "b", 1, 0, 120);
	sr_match(&sr, &b, &hit);
	assert_int_equal(hit.stored, 0);
	kvc_space_close(sr.space);
	sr.space = NULL;
	sr_wait_ready(&sr);
	assert_int_equal(sr_run(&sr, &b, 100), 0);
	sr_settle(&sr);
	sr_request(&sr, &c, "c", 1, 0, 121);
	assert_int_equal(sr_run(&sr, &c, 200), 120);
	kvx_scheduler_finish(sr.scheduler, &a.ask);
	kvx_scheduler_finish(sr.scheduler, &b.ask);
	kvx_scheduler_finish(sr.scheduler, &c.ask);
	sr_stop(&sr, &rig);
}

#define ADAPTER "adapter-1:0123"

/* Somebody else has stored the request's first ten blocks for the adapter. */
static void store_for_adapter(const sr_t *sr, const rig_t *rig, const sr_request_t *request)
{
	const kvc_config_t config = {.struct_size = sizeof config, .socket = rig->socket, .role = KVC_ROLE_BOTH};
	kvc_identity_t identity = sr->identity;
	const void *blocks[10];
	kvc_key_t keys[10];
	kvc_space_t *space;
	uint32_t visible;
	kvc_t *kvc;

	identity.lora = ADAPTER;
	assert_int_equal(kvc_attach(&config, &kvc), KVC_OK);
	assert_int_equal(kvc_space_open(kvc, &identity, &space), KVC_OK);
	for (uint32_t i = 0; i < 10; i++) {
		blocks[i] = sr->cache;
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
	kvx_hit_t hit;
	rig_t rig;
	sr_t sr;

	(void)state;
	sr_start(&sr, &rig, &(sr_options_t){.foreign = 1});
	for (int reset = 0; reset < 2; reset++) {
		sr_request(&sr, &a, "a", 1, 0, 81);
		store_for_adapter(&sr, &rig, &a);
		a.ask.lora = ADAPTER;
		sr_place(&sr, &a, 0, 0);
		if (reset) {
			assert_int_equal(kvx_scheduler_reset(sr.scheduler), KVC_OK);
		}
		do {
			kvx_scheduler_match(sr.scheduler, &a.ask, &hit);
			(void)sr_step(&sr);
			usleep(1000);
		} while (hit.why == KV_WHY_NO_DAEMON);
		assert_int_equal(hit.stored, reset ? 0 : 80);
		a.ask.lora = NULL;
		kvx_scheduler_finish(sr.scheduler, &a.ask);
		sr_close(&sr);
		assert_int_equal(sr_open(&sr, &rig, &(sr_options_t){.foreign = 1}), KVC_OK);
		sr_wait_ready(&sr);
	}
	sr_stop(&sr, &rig);
}

/* Blocks from before a reset that are used after it, by a load that was under way or as a hit of the engine's own
 * cache: they are not saved. Those that the request is given afterwards are, whether the engine first says that it was
 * preempted (`told`) or has given them in the same step. */
static void saved_after_a_reset(int told)
{
	kvx_hit_t hit;
	rig_t rig;
	sr_t sr;

	sr_start(&sr, &rig, &(sr_options_t){.foreign = 1, .mode = KVX_LOAD_ASYNC});
	sr_store(&sr, &a, "a", 1, 0, 80);
	sr_request(&sr, &b, "b", 1, 0, 81);
	sr_match(&sr, &b, &hit);
	assert_int_equal(hit.tokens, 80);
	sr_place(&sr, &b, 100, 0);
	kvx_scheduler_start_load(sr.scheduler, &b.ask, &hit);
	for (int i = 0; i < 1000 && sr.loads == 0; i++) {
		(void)sr_step(&sr);
		usleep(1000);
	}
	assert_int_equal(sr.loaded_blocks, 10);

	assert_int_equal(kvx_scheduler_reset(sr.scheduler), KVC_OK);
	kvc_space_close(sr.space);
	sr.space = NULL;
	sr_wait_ready(&sr);
	kvx_scheduler_advance(sr.scheduler, &b.ask, 81, 1);
	(void)sr_step(&sr);
	assert_int_equal(sr.saves, 0);

	sr_request(&sr, &c, "c", 1, 0, 120);
	sr_place(&sr, &c, 0, 10);
	kvx_scheduler_advance(sr.scheduler, &c.ask, 120, 40);
	(void)sr_step(&sr);
	assert_int_equal(sr.saves, 0);
	if (told) {
		kvx_scheduler_preempt(sr.scheduler, &c.ask);
	}
	sr_place(&sr, &c, 200, 0);
	sr_compute(&sr, &c, 0, 15);
	kvx_scheduler_advance(sr.scheduler, &c.ask, 120, 120);
	(void)sr_step(&sr);
	assert_int_equal(sr.save_blocks, 15);
	kvx_scheduler_finish(sr.scheduler, &a.ask);
	kvx_scheduler_finish(sr.scheduler, &b.ask);
	kvx_scheduler_finish(sr.scheduler, &c.ask);
	sr_stop(&sr, &rig);
}

static void p1_what_lay_in_the_engine_before_a_reset_is_not_saved(void **state)
{
	(void)state;
	saved_after_a_reset(1);
}

static void p1_preempted_and_resumed_in_one_step_it_is_saved_again(void **state)
{
	(void)state;
	saved_after_a_reset(0);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p1_after_a_reset_nothing_old_is_found_or_saved),
		cmocka_unit_test(p1_preempted_and_resumed_in_one_step_it_is_saved_again),
		cmocka_unit_test(p1_an_adapter_that_is_being_opened_is_reset_too),
		cmocka_unit_test(p1_what_lay_in_the_engine_before_a_reset_is_not_saved),
	};

	if (argc < 2) {
		(void)fprintf(stderr, "usage: %s <kvd>\n", argv[0]);
		return 2;
	}
	sr_program = argv[1];

	return cmocka_run_group_tests(tests, NULL, NULL);
}
