/* Both halves of a connector in an engine that does all an engine does, as fast as it can: whatever is loaded is what
 * would have been computed. */
#include "connectors/step/fake_engine.h"
#include "engine/check.h"

#include <stdio.h>

static const char *kvd_program;

static void show(const fe_t *fe, const char *what)
{
	kvx_scheduler_stats_t s = {.struct_size = sizeof s};

	kvx_scheduler_get_stats(fe->scheduler, &s);
	printf("# %s: %" PRIu64 " steps, %" PRIu64 " requests, %" PRIu64 " aborted, %" PRIu64
	       " preempted, loads %" PRIu64 " in %" PRIu64 " asynchronously, %" PRIu64 " failed, %" PRIu64
	       " tokens hit, %" PRIu64 " computed; saved %" PRIu64 " blocks, lost %" PRIu64 ", busy %" PRIu64
	       ", late %" PRIu64 "\n",
	       what, fe->steps, fe->finished, fe->aborted, fe->preempted, fe->sync_loads, fe->async_loads,
	       fe->failed_loads, fe->hit_tokens, fe->computed_tokens, s.save_done, s.save_lost, s.save_busy,
	       s.late_answers);
}

static fe_t fe;

/* Run; nothing may be wrong, and nothing left behind. */
static void run(const char *what, const fe_options_t *options, uint64_t requests)
{
	rig_t rig;

	rig_init(&rig, kvd_program);
	rig.silence = options->faults ? "50ms" : rig.silence;
	rig_start(&rig);
	fe_open(&fe, &rig, options);
	fe_run(&fe, requests);
	show(&fe, what);
	assert_int_equal(fe.wrong_bytes, 0);
	assert_true(fe.checked_tokens > 0);
	rig_check_quiet(&rig);
	fe_close(&fe);
	rig_fini(&rig);
}

static void p1_every_loaded_byte_is_what_computing_would_have_left(void **state)
{
	(void)state;
	run("one rank",
	    &(fe_options_t){
		    .ranks = 1, .groups = 1, .page_bytes = 1024, .foreign = 1, .conversations = 20, .step_us = 100},
	    200);
	assert_true(fe.sync_loads + fe.async_loads > 50 && fe.preempted > 0 && fe.aborted > 0);
	run("two ranks, shared blocks, own keys",
	    &(fe_options_t){.ranks = 2, .groups = 1, .page_bytes = 1024, .sharing = 1, .conversations = 20}, 200);
	assert_true(fe.sync_loads + fe.async_loads > 50);
}

static void p1_asynchronous_loads_are_right_too(void **state)
{
	(void)state;
	run("asynchronous",
	    &(fe_options_t){.ranks = 2,
			    .groups = 1,
			    .page_bytes = 1024,
			    .foreign = 1,
			    .mode = KVX_LOAD_ASYNC,
			    .sharing = 1,
			    .conversations = 20},
	    200);
	assert_true(fe.async_loads > 50);
}

static void p1_with_a_window_group_too(void **state)
{
	(void)state;
	run("two groups",
	    &(fe_options_t){
		    .ranks = 1, .groups = 2, .page_bytes = 1024, .foreign = 1, .conversations = 20, .step_us = 100},
	    200);
	assert_true(fe.async_loads > 20);
}

/* More than memory holds: evictions, loads from disk. */
static void p1_from_a_store_that_is_too_small_too(void **state)
{
	(void)state;
	run("small store",
	    &(fe_options_t){.ranks = 1,
			    .groups = 1,
			    .page_bytes = 16384,
			    .foreign = 1,
			    .cost_model = 1,
			    .conversations = 40,
			    .step_us = 500},
	    200);
}

static void p7_a_daemon_killed_or_stopped_at_any_time_harms_nothing(void **state)
{
	(void)state;
	run("faults",
	    &(fe_options_t){.ranks = 2,
			    .groups = 1,
			    .page_bytes = 1024,
			    .foreign = 1,
			    .conversations = 10,
			    .step_us = 500,
			    .faults = 300},
	    200);
	run("faults, two groups",
	    &(fe_options_t){.ranks = 1,
			    .groups = 2,
			    .page_bytes = 1024,
			    .foreign = 1,
			    .conversations = 10,
			    .step_us = 500,
			    .faults = 300},
	    120);
}

/* The harness sees what is wrong: two blocks of each load change places. */
static void a_load_into_the_wrong_blocks_is_caught(void **state)
{
	rig_t rig;

	(void)state;
	rig_init(&rig, kvd_program);
	rig_start(&rig);
	fe_open(&fe, &rig,
		&(fe_options_t){.ranks = 1,
				.groups = 1,
				.page_bytes = 1024,
				.foreign = 1,
				.swap = 1,
				.conversations = 5,
				.step_us = 200});
	fe_run(&fe, 60);
	show(&fe, "negative control");
	assert_true(fe.wrong_bytes > 0);
	fe_close(&fe);
	rig_fini(&rig);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p1_every_loaded_byte_is_what_computing_would_have_left),
		cmocka_unit_test(p1_asynchronous_loads_are_right_too),
		cmocka_unit_test(p1_with_a_window_group_too),
		cmocka_unit_test(p1_from_a_store_that_is_too_small_too),
		cmocka_unit_test(p7_a_daemon_killed_or_stopped_at_any_time_harms_nothing),
		cmocka_unit_test(a_load_into_the_wrong_blocks_is_caught),
	};

	if (argc < 2) {
		(void)fprintf(stderr, "usage: %s <kvd>\n", argv[0]);
		return 2;
	}
	kvd_program = argv[1];

	return cmocka_run_group_tests(tests, NULL, NULL);
}
