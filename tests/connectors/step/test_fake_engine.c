/* Both halves of a connector in an engine that does all an engine does, as fast as it can: whatever is loaded is what
 * would have been computed. Each row is a universe that follows from the seed. */
#include "connectors/step/fake_engine.h"
#include "kv_cmocka.h"

static const char *program;
static fe_t fe;

typedef struct universe {
	const char *name;
	uint64_t requests;                         /* 0: 150 */
	uint32_t loads, async_loads, failed_loads; /* at least */
	fe_options_t options;
} universe_t;

static const universe_t universes[] = {
	{.name = "p1_every_loaded_byte_is_what_computing_would_have_left", .loads = 50, .options = {.step_us = 100}},
	{.name = "p1_with_two_ranks_shared_blocks_and_own_keys_too",
	 .loads = 50,
	 .options = {.ranks = 2, .own_keys = 1, .sharing = 1}},
	{.name = "p1_asynchronous_loads_are_right_too",
	 .async_loads = 50,
	 .options = {.ranks = 2, .mode = KVX_LOAD_ASYNC, .sharing = 1}},
	{.name = "p1_with_a_window_group_too", .async_loads = 20, .options = {.groups = 2, .step_us = 100}},
	/* More than memory holds: evictions, loads from disk. */
	{.name = "p1_from_a_store_that_is_too_small_too",
	 .options = {.page_bytes = 16384, .cost_model = 1, .conversations = 40, .step_us = 500}},
	{.name = "p1_after_loads_and_saves_that_fail_too",
	 .loads = 50,
	 .failed_loads = 10,
	 .options = {.ranks = 2, .sharing = 1, .conversations = 10, .step_us = 100, .fail = 8}},
	{.name = "p1_after_failures_with_a_window_group_too",
	 .async_loads = 20,
	 .failed_loads = 10,
	 .options = {.groups = 2, .conversations = 10, .step_us = 100, .fail = 8}},
	{.name = "p7_a_daemon_killed_or_stopped_at_any_time_harms_nothing",
	 .options = {.ranks = 2, .conversations = 10, .step_us = 500, .faults = 300}},
	{.name = "p7_and_nothing_with_a_window_group",
	 .requests = 120,
	 .options = {.groups = 2, .conversations = 10, .step_us = 500, .faults = 300}},
	{.name = "p4_faults_and_failures_and_late_answers_leak_nothing",
	 .requests = 120,
	 .options = {.conversations = 10, .wait_us = 500, .fail = 8, .faults = 300}},
	/* The harness sees what is wrong. */
	{.name = "a_load_into_the_wrong_blocks_is_caught",
	 .requests = 60,
	 .options = {.swap = 1, .conversations = 5, .step_us = 200}},
};

static void print_totals(void)
{
	kvx_scheduler_stats_t s = {.struct_size = sizeof s};

	kvx_scheduler_get_stats(fe.scheduler, &s);
	printf("# %" PRIu64 " steps, %" PRIu64 " requests, %" PRIu64 " aborted, %" PRIu64 " preempted, loads %" PRIu64
	       " in %" PRIu64 " asynchronously, %" PRIu64 " failed (made to: %" PRIu64 " loads, %" PRIu64
	       " saves), %" PRIu64 " tokens hit, %" PRIu64 " computed; saved %" PRIu64 " blocks, lost %" PRIu64
	       ", busy %" PRIu64 ", late %" PRIu64 "\n",
	       fe.steps, fe.finished, fe.aborted, fe.preempted, fe.sync_loads, fe.async_loads, fe.failed_loads,
	       fe.spoilt_loads, fe.spoilt_saves, fe.hit_tokens, fe.computed_tokens, s.save_done, s.save_lost,
	       s.save_busy, s.late_answers);
}

/* Nothing may be wrong, and nothing left behind. */
static void run_universe(void **state)
{
	const universe_t *universe = *state;
	rig_t rig;

	rig_init(&rig, program);
	rig.silence = universe->options.faults ? "50ms" : rig.silence;
	rig_start(&rig);
	fe_open(&fe, &rig, &universe->options);
	fe_run(&fe, universe->requests ? universe->requests : 150);
	print_totals();
	assert_int_equal(fe.wrong_bytes > 0, universe->options.swap);
	assert_true(fe.checked_tokens > 0 && fe.aborted > 0);
	assert_true(fe.sync_loads + fe.async_loads >= universe->loads && fe.async_loads >= universe->async_loads);
	assert_true(fe.failed_loads >= universe->failed_loads);
	rig_check_quiet(&rig);
	fe_close(&fe);
	rig_fini(&rig);
}

int main(int argc, char **argv)
{
	if (argc != 2) {
		return 64;
	}
	program = argv[1];
	for (int i = 0; i < (int)KV_COUNT_OF(universes); i++) {
		kv_test_add((struct CMUnitTest){.name = universes[i].name,
						.test_func = run_universe,
						.initial_state = (void *)(uintptr_t)&universes[i]},
			    __FILE__, i);
	}

	return kv_test_run(NULL, NULL);
}
