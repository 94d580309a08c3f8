/* Plans a worker should never get, and time in which it gets none: nothing wrong is saved, and waiting costs nothing.
 */
#include "connectors/worker/worker_rig.h"
#include "engine/check.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define IDLE_MS 300u
/* percent of a CPU: more than it needs, far less than a thread that spins */
#ifdef KVD_SANITIZE /* each of its looks takes twice as long */
#define IDLE_PC 20u
#else
#define IDLE_PC 10u
#endif

static const char *kvd_program;

static kvx_worker_stats_t stats_of(const wr_rank_t *rank)
{
	kvx_worker_stats_t stats = {.struct_size = sizeof stats};

	kvx_worker_get_stats(rank->worker, &stats);

	return stats;
}

static void start(rig_t *rig, wr_t *wr)
{
	*wr = (wr_t){0};
	rig_init(rig, kvd_program);
	rig_start(rig);
	wr_init(wr, rig, 1);
	wr_fill(wr, 1);
}

static void finish(rig_t *rig, wr_t *wr)
{
	wr_fini(wr);
	rig_fini(rig);
}

/* Eight saves that wait for the space of an adapter, which a stopped daemon does not open; their step has ended. */
static kvc_put_t *save_into_unopened_space(rig_t *rig, wr_t *wr)
{
	kvx_msg_save_t *save;
	kvc_put_t *put = wr_put(wr, 0, 8);

	rig_signal(rig, SIGSTOP);
	wr_plan(wr);
	wr_plan_space(wr, 1, "somebody");
	wr_plan_save(wr, put, 0, wr_eight, 8);
	save = (kvx_msg_save_t *)(void *)(wr->plan.data + wr->plan.record);
	save->space = 1;
	wr_begin(wr);
	kvx_worker_end_step(wr->rank[0].worker);
	assert_int_equal(stats_of(&wr->rank[0]).marked, 8);

	return put;
}

/* No block is read from now on: the saves are given up. */
static void check_all_fenced(rig_t *rig, wr_t *wr, kvc_put_t *put)
{
	assert_int_equal(stats_of(&wr->rank[0]).marked, 0);
	rig_signal(rig, SIGCONT);
	assert_true(wr_wait_dropped(&wr->rank[0]) != 0);
	kvc_put_free(put);
	rig_check_quiet(rig);
	finish(rig, wr);
}

/* Which blocks the engine is about to write is not known. */
static void p1_an_unsound_message_is_a_fence_of_all_blocks(void **state)
{
	static const uint64_t nonsense[8];
	kvc_put_t *put;
	rig_t rig;
	wr_t wr;

	(void)state;
	start(&rig, &wr);
	put = save_into_unopened_space(&rig, &wr);
	kvx_worker_begin_step(wr.rank[0].worker, nonsense, sizeof nonsense);
	check_all_fenced(&rig, &wr, put);
}

/* What a scheduler sends whose list of reused blocks did not fit. */
static void p1_a_fence_of_no_block_is_one_of_all_blocks(void **state)
{
	kvc_put_t *put;
	rig_t rig;
	wr_t wr;

	(void)state;
	start(&rig, &wr);
	put = save_into_unopened_space(&rig, &wr);
	wr_plan(&wr);
	wr_plan_fence(&wr, NULL, 0);
	wr_begin(&wr);
	check_all_fenced(&rig, &wr, put);
}

/* The engine was interrupted: what the step should have computed is not in its blocks. */
static void p1_saves_of_a_step_that_did_not_end_are_dropped(void **state)
{
	kvc_put_t *put;
	rig_t rig;
	wr_t wr;

	(void)state;
	start(&rig, &wr);
	put = wr_put(&wr, 0, 8);
	wr_plan(&wr);
	wr_plan_save(&wr, put, 0, wr_eight, 8);
	wr_begin(&wr);
	wr_plan(&wr);
	wr_begin(&wr);
	assert_true(wr_wait_dropped(&wr.rank[0]) != 0);
	assert_int_equal(wr_put_wait(&wr, put), KVC_ERR_REVOKED);
	rig_check_quiet(&rig);
	finish(&rig, &wr);
}

/* A granted block without a source: what lies in its slot is anybody's. */
static void p1_a_granted_block_that_is_not_written_is_not_handed_in(void **state)
{
	uint32_t ids[8];
	kvc_put_t *put;
	rig_t rig;
	wr_t wr;

	(void)state;
	start(&rig, &wr);
	put = wr_put(&wr, 0, 8);
	memcpy(ids, wr_eight, sizeof ids);
	ids[3] = KVX_NO_BLOCK;
	wr_plan(&wr);
	wr_plan_save(&wr, put, 0, ids, 8);
	wr_begin(&wr);
	kvx_worker_end_step(wr.rank[0].worker);
	assert_int_equal(wr_put_wait(&wr, put), KVC_ERR_REVOKED);
	assert_true(wr_wait_dropped(&wr.rank[0]) != 0);
	assert_int_equal(stats_of(&wr.rank[0]).bad_messages, 1);
	rig_check_quiet(&rig);
	finish(&rig, &wr);
}

/* Its blocks belong to no request: the engine is told that the load is over, not that they have failed. */
static void p4_a_load_dropped_in_its_own_message_names_no_blocks(void **state)
{
	wr_end_t end;
	rig_t rig;
	wr_t wr;

	(void)state;
	start(&rig, &wr);
	wr_plan(&wr);
	wr_plan_load(&wr, NULL, KVX_MSG_ASYNC, 7, wr_eight, 8);
	wr_plan_drop(&wr, 7);
	wr_begin(&wr);
	kvx_worker_start_async_loads(wr.rank[0].worker);
	wr_wait_load(&wr.rank[0], 7, 1, &end);
	assert_int_equal(end.loaded.status, KVC_MISS);
	assert_int_equal(end.failed, 1);
	assert_int_equal(end.error_count, 0);
	finish(&rig, &wr);
}

static uint64_t cpu_ns(void)
{
	struct timespec time;

	(void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);

	return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void check_idle(const char *when)
{
	uint64_t before = cpu_ns(), used;

	usleep(IDLE_MS * 1000u);
	used = cpu_ns() - before;
	print_message("%s: %lu us of CPU in %u ms\n", when, (unsigned long)used / 1000u, IDLE_MS);
	assert_true(used < (uint64_t)IDLE_MS * 1000000u / 100u * IDLE_PC);
}

/* With a daemon, with one that hangs while a save waits for it, and without one. */
static void p5_a_worker_that_waits_burns_no_cpu(void **state)
{
	kvx_msg_save_t *save;
	kvc_put_t *put;
	rig_t rig;
	wr_t wr;

	(void)state;
	start(&rig, &wr);
	put = wr_put(&wr, 0, 8);
	usleep(IDLE_MS * 1000u);
	check_idle("idle");
	rig_signal(&rig, SIGSTOP);
	check_idle("daemon stopped");
	wr_plan(&wr);
	wr_plan_space(&wr, 1, "somebody");
	wr_plan_save(&wr, put, 0, wr_eight, 8);
	save = (kvx_msg_save_t *)(void *)(wr.plan.data + wr.plan.record);
	save->space = 1;
	wr_begin(&wr);
	kvx_worker_end_step(wr.rank[0].worker);
	check_idle("daemon stopped, a save waits");
	rig_signal(&rig, SIGCONT);
	kvc_put_free(put);
	rig_kill(&rig);
	usleep(IDLE_MS * 1000u);
	check_idle("no daemon");
	finish(&rig, &wr);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p1_an_unsound_message_is_a_fence_of_all_blocks),
		cmocka_unit_test(p1_a_fence_of_no_block_is_one_of_all_blocks),
		cmocka_unit_test(p1_saves_of_a_step_that_did_not_end_are_dropped),
		cmocka_unit_test(p1_a_granted_block_that_is_not_written_is_not_handed_in),
		cmocka_unit_test(p4_a_load_dropped_in_its_own_message_names_no_blocks),
		cmocka_unit_test(p5_a_worker_that_waits_burns_no_cpu),
	};

	if (argc < 2) {
		fprintf(stderr, "usage: %s KVD\n", argv[0]);
		return 64;
	}
	kvd_program = argv[1];

	return cmocka_run_group_tests_name("kvx.worker-messages", tests, NULL, NULL);
}
