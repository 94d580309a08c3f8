/* Plans a worker should never get, and time in which it gets none: nothing wrong is saved, and waiting costs nothing.
 */
#include "connectors/worker/wr.h"

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

static const wr_t unstored = {.empty = 1};

/* Eight saves that wait for the space of an adapter, which a stopped daemon does not open; their step has ended. */
static kvc_put_t *save_into_unopened_space(wr_t *wr)
{
	kvc_put_t *put = wr_put(wr, 0, 8);

	rig_signal(&wr->rig, SIGSTOP);
	wr_message(wr);
	wr_add_space(wr, 1, "somebody");
	wr->number = 1;
	wr_add_save(wr, put, 0, wr_eight, 8);
	wr_begin(wr);
	wr_end(wr);
	assert_int_equal(wr_stats(wr, 0).marked, 8);

	return put;
}

/* No block is read from now on: the saves are given up. */
static void check_all_fenced(wr_t *wr, kvc_put_t *put)
{
	assert_int_equal(wr_stats(wr, 0).marked, 0);
	rig_signal(&wr->rig, SIGCONT);
	assert_true(wr_wait_dropped(&wr->rank[0]) != 0);
	kvc_put_free(put);
}

/* Which blocks the engine is about to write is not known. */
static void p1_an_unsound_message_is_a_fence_of_all_blocks(void **state)
{
	wr_t *wr = *state;
	static const uint64_t nonsense[8];
	kvc_put_t *put = save_into_unopened_space(wr);

	kvx_worker_begin_step(wr->rank[0].worker, nonsense, sizeof nonsense);
	check_all_fenced(wr, put);
}

/* Its blocks belong to no request: the engine is told that the load is over, not that they have failed. */
static void p4_a_load_dropped_in_its_own_message_names_no_blocks(void **state)
{
	wr_t *wr = *state;
	wr_end_t end;

	wr_message(wr);
	wr_add_load(wr, NULL, KVX_MSG_ASYNC, 7, wr_eight, 8);
	wr_add_drop(wr, 7);
	wr_begin(wr);
	kvx_worker_start_async_loads(wr->rank[0].worker);
	wr_wait_load(&wr->rank[0], 7, 1, &end);
	assert_int_equal(end.loaded.status, KVC_MISS);
	assert_int_equal(end.failed, 1);
	assert_int_equal(end.error_count, 0);
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
	wr_t *wr = *state;
	kvc_put_t *put = wr_put(wr, 0, 8);

	usleep(IDLE_MS * 1000u);
	check_idle("idle");
	rig_signal(&wr->rig, SIGSTOP);
	check_idle("daemon stopped");
	wr_message(wr);
	wr_add_space(wr, 1, "somebody");
	wr->number = 1;
	wr_add_save(wr, put, 0, wr_eight, 8);
	wr_begin(wr);
	wr_end(wr);
	check_idle("daemon stopped, a save waits");
	rig_signal(&wr->rig, SIGCONT);
	kvc_put_free(put);
	rig_kill(&wr->rig);
	usleep(IDLE_MS * 1000u);
	check_idle("no daemon");
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		WR_TEST(p1_an_unsound_message_is_a_fence_of_all_blocks, unstored),
		WR_TEST(p4_a_load_dropped_in_its_own_message_names_no_blocks, unstored),
		WR_TEST(p5_a_worker_that_waits_burns_no_cpu, unstored),
	};

	return wr_run_tests(argc, argv, tests, KV_COUNT_OF(tests));
}
