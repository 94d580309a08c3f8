/* A worker when things go wrong: every failure is an id in take_failed_blocks(), named once and in time; nothing waits,
 * nothing leaks. */
#include "connectors/worker/wr.h"

#include <signal.h>
#include <unistd.h>

#define SLOW_MS 60000u

static const wr_t strict = {.strict = 1};
static const wr_t strict_alone = {.strict = 1, .no_daemon = 1};
static const wr_t strict_quick = {.strict = 1, .silence = "50ms"};
static const uint32_t nine[9] = {20, 21, 22, 23, 24, 25, 26, 27, 28};
static const uint32_t both_kinds[2] = {0, KVX_MSG_ASYNC};

/* A load into these blocks, begun and, if it is synchronous, run. */
static void run_load(wr_t *wr, const kvc_lease_t *lease, uint32_t flags, const uint32_t *ids, uint32_t n)
{
	wr_message(wr);
	wr_add_fence(wr, ids, n);
	wr_add_load(wr, lease, flags, 7, ids, n);
	wr_begin(wr);
	wr_run_loads(wr);
}

/* The load of wr_other brings the first `good` blocks and names the others. */
static void load_fails(wr_t *wr, const kvc_lease_t *lease, uint32_t flags, kvc_status_t why, uint32_t good)
{
	const uint64_t start = wr_now_ms();
	wr_end_t end;

	run_load(wr, lease, flags, wr_other, 8);
	wr_wait_load(&wr->rank[0], 7, flags, &end);
	assert_int_equal(end.loaded.status, why);
	assert_int_equal(end.loaded.blocks, good);
	assert_int_equal(end.error_count, 8 - good);
	for (uint32_t i = 0; i < 8; i++) {
		assert_int_equal(wr_names(&end, wr_other[i]), i >= good);
	}
	assert_true(wr_now_ms() - start < WR_QUICK_MS);
}

static void check_corrupt(wr_t *wr, uint32_t flags, long reported)
{
	kvc_lease_t *lease = wr_lease(wr, 0, 8);
	wr_end_t end;

	wr_flip_byte(lease, 5);
	run_load(wr, lease, flags, wr_other, 8);
	wr_wait_load(&wr->rank[0], 7, flags, &end);
	assert_int_equal(end.loaded.status, KVC_ERR_CORRUPT);
	assert_true(wr_names(&end, wr_other[5]));
	assert_int_equal(end.error_count, 8 - end.loaded.blocks);
	for (uint32_t i = 0; i < 5; i++) {
		assert_false(wr_names(&end, wr_other[i]));
		assert_true(wr_block_is(&wr->rank[0], wr_other[i], 1, wr_eight[i]));
	}
	assert_int_equal(wr_stats(wr, 0).load_corrupt, reported);

	/* The daemon is told, by the lease that it still knows. */
	for (uint32_t i = 0; i < 3000 && rig_counter(&wr->rig, "kvd_bad_blocks_total") != reported; i++) {
		usleep(10000);
	}
	assert_int_equal(rig_counter(&wr->rig, "kvd_bad_blocks_total"), reported);
	kvc_release(&lease, 1);
	rig_check_quiet(&wr->rig);
}

static void p1_a_corrupt_block_is_reported_and_an_error(void **state)
{
	wr_t *wr = *state;

	check_corrupt(wr, KVX_MSG_ASYNC, 1);
	assert_int_equal(kvc_space_reset(wr->space), KVC_OK);
	wr_store(wr, wr_eight, 8);
	check_corrupt(wr, 0, 2);
}

static void p7_a_load_without_lease_or_blocks_names_all_that_lack(void **state)
{
	wr_t *wr = *state;
	kvc_lease_t *lease = wr_lease(wr, 0, 4);

	wr->timeout_ms = SLOW_MS;
	for (uint32_t i = 0; i < 2; i++) {
		load_fails(wr, NULL, both_kinds[i], KVC_MISS, 0);
		load_fails(wr, lease, both_kinds[i], KVC_MISS, 4);
	}
	kvc_release(&lease, 1);
}

static void p7_a_released_lease_is_a_failed_load(void **state)
{
	wr_t *wr = *state;
	wr_end_t end;

	wr->timeout_ms = SLOW_MS;
	for (uint32_t i = 0; i < 2; i++) {
		kvc_lease_t *lease = wr_lease(wr, 0, 8);

		wr_message(wr);
		wr_add_load(wr, lease, both_kinds[i], 7, wr_other, 8);
		wr_revoke(wr, lease);
		wr_begin(wr);
		wr_run_loads(wr);
		wr_wait_load(&wr->rank[0], 7, both_kinds[i], &end);
		assert_int_equal(end.loaded.status, KVC_ERR_REVOKED);
		assert_int_equal(end.error_count, 8);
	}
}

/* The lease is said to have 16 blocks; 8 of them will never come. */
static void p7_a_lease_cut_short_fails_a_load_long_before_its_deadline(void **state)
{
	wr_t *wr = *state;
	kvc_lease_t *lease = wr_lease(wr, 0, 8);
	wr_end_t end;

	wr->timeout_ms = SLOW_MS;
	wr->forge_n = 16;
	for (uint32_t i = 0; i < 2; i++) {
		const uint64_t begin = wr_now_ms();

		run_load(wr, lease, both_kinds[i], nine, 9);
		wr_wait_load(&wr->rank[0], 7, both_kinds[i], &end);
		assert_true(wr_now_ms() - begin < WR_QUICK_MS);
		assert_true(end.loaded.status < 0);
		assert_int_equal(end.loaded.blocks + end.error_count, 9);
		assert_true(wr_names(&end, nine[8]));
	}
	kvc_release(&lease, 1);
}

/* Nobody calls start_async_loads(). */
static void p5_a_load_ends_at_its_deadline(void **state)
{
	wr_t *wr = *state;
	kvc_lease_t *lease = wr_lease(wr, 0, 8);
	const uint64_t begin = wr_now_ms();
	wr_end_t end;

	wr->timeout_ms = 300;
	wr_message(wr);
	wr_add_load(wr, lease, KVX_MSG_ASYNC, 7, wr_other, 8);
	wr_begin(wr);
	wr_wait_load(&wr->rank[0], 7, KVX_MSG_ASYNC, &end);
	assert_true(wr_now_ms() - begin >= 299 && wr_now_ms() - begin < 300 + WR_QUICK_MS);
	assert_int_equal(end.loaded.status, KVC_ERR_TIMEOUT);
	assert_int_equal(end.loaded.blocks, 0);
	assert_int_equal(end.error_count, 8);
	assert_int_equal(wr_stats(wr, 0).load_timeouts, 1);
	kvc_release(&lease, 1);
}

/* What is in memory still comes; what has to be asked for does not. */
static void p5_a_stopped_daemon_fails_a_load_long_before_its_deadline(void **state)
{
	wr_t *wr = *state;
	kvc_lease_t *lease = wr_lease(wr, 0, 8);
	wr_end_t end;

	wr->timeout_ms = SLOW_MS;
	rig_signal(&wr->rig, SIGSTOP);
	for (uint32_t i = 0; i < 2; i++) {
		const uint64_t begin = wr_now_ms();

		wr->number = i + 1;
		wr_message(wr);
		wr_add_space(wr, i + 1, i ? "adapter-b" : "adapter-a");
		wr_add_load(wr, lease, both_kinds[i], 7, wr_other, 8);
		wr_begin(wr);
		wr_run_loads(wr);
		wr_wait_load(&wr->rank[0], 7, both_kinds[i], &end);
		assert_true(wr_now_ms() - begin < WR_QUICK_MS);
		assert_int_equal(end.loaded.status, KVC_ERR_DAEMON_STALE);
		assert_int_equal(end.error_count, 8);
	}
	wr->number = 0;
	run_load(wr, lease, 0, wr_other, 8);
	wr_wait_load(&wr->rank[0], 7, 0, &end);
	rig_signal(&wr->rig, SIGCONT);
	assert_int_equal(end.loaded.status, KVC_OK);
	kvc_release(&lease, 1);
}

/* Aborted before it has begun to copy. */
static void p4_a_dropped_load_ends_early_and_is_named_once(void **state)
{
	wr_t *wr = *state;
	kvc_lease_t *lease = wr_lease(wr, 0, 8);
	const uint64_t begin = wr_now_ms();
	wr_end_t end;

	wr->timeout_ms = SLOW_MS;
	wr_message(wr);
	wr_add_load(wr, lease, KVX_MSG_ASYNC, 7, wr_other, 8);
	wr_begin(wr);
	usleep(20000);
	wr_message(wr);
	wr_add_drop(wr, 7);
	wr_begin(wr);
	wr_wait_load(&wr->rank[0], 7, KVX_MSG_ASYNC, &end);
	assert_true(wr_now_ms() - begin < WR_QUICK_MS);
	assert_int_equal(end.failed, 1);
	assert_int_equal(end.error_count, 0); /* they belong to no request */
	kvc_release(&lease, 1);
}

/* What was computed on garbage is not saved, and the next step's is not either, as it may rest on it. */
static void p1_saves_of_a_step_whose_load_failed_are_dropped(void **state)
{
	wr_t *wr = *state;

	for (uint32_t later = 0; later < 3; later++) {
		const uint64_t dropped = wr_stats(wr, 0).save_dropped;
		kvc_put_result_t result = {.struct_size = sizeof result};
		kvc_put_t *put = wr_put(wr, 8, 12);

		for (uint32_t step = 0; step <= later; step++) {
			wr_message(wr);
			if (step == 0) {
				wr_add_load(wr, NULL, 0, 7, wr_other, 8);
			}
			if (step == later) {
				wr_add_save(wr, put, 0, wr_eight, 4);
			}
			wr_step(wr);
		}
		assert_int_equal(kvx_worker_flush(wr->rank[0].worker, WR_PATIENCE), KVC_OK);
		assert_int_equal(wr_stats(wr, 0).save_dropped - dropped, later < 2);
		assert_int_equal(wr_count_failed(wr), 8);
		if (later == 2) {
			assert_int_equal(kvc_put_wait(put, 0, WR_PATIENCE), KVC_OK);
		} else {
			kvc_put_get_result(put, &result);
			assert_int_not_equal(result.status, KVC_OK);
		}
		kvc_put_free(put);
		wr_drain(wr);
	}
}

static void p7_without_a_daemon_everything_fails_at_once(void **state)
{
	wr_t *wr = *state;
	const uint64_t begin = wr_now_ms();

	for (uint32_t round = 0; round < 50; round++) {
		wr_message(wr);
		wr_add_save(wr, NULL, KVX_MSG_COMPLETE, wr_eight, 8);
		wr_add_fence(wr, wr_eight, 8);
		wr_begin(wr);
		wr_end(wr);
		assert_true(wr_wait_dropped(&wr->rank[0]) == 9);
	}
	assert_true(wr_now_ms() - begin < WR_QUICK_MS);
	assert_int_equal(kvx_worker_self_test_status(wr->rank[0].worker), KVC_PENDING);
	load_fails(wr, NULL, 0, KVC_MISS, 0);
	load_fails(wr, NULL, KVX_MSG_ASYNC, KVC_MISS, 0);
}

/* Loads and saves begin, the daemon is killed a little later, and the engine goes on to write what is still marked. */
static void kill_amid_jobs(wr_t *wr, uint32_t round)
{
	kvc_lease_t *lease = wr_lease(wr, 0, 8);
	kvc_put_t *put = wr_put(wr, 8, 32);
	uint32_t ids[24];

	for (uint32_t i = 0; i < 24; i++) {
		ids[i] = 32 + i;
	}
	wr->timeout_ms = SLOW_MS;
	wr->forge_n = round % 2 ? 9 : 0;
	wr_message(wr);
	wr_add_load(wr, lease, KVX_MSG_ASYNC, 7, nine, 8 + round % 2);
	wr_add_save(wr, put, 0, ids, 24);
	wr_begin(wr);
	kvx_worker_start_async_loads(wr->rank[0].worker);
	wr_end(wr);
	usleep(round * 150);
	rig_kill(&wr->rig);
	wr_message(wr);
	wr_add_fence(wr, ids, 24);
	wr_begin(wr);
	wr_fill(wr, 2);
	kvc_put_free(put);
	kvc_release(&lease, 1);
	wr->forge_n = 0;
}

/* At many moments; with a new daemon everything works again. */
static void p7_a_daemon_killed_under_jobs_costs_these_jobs_only(void **state)
{
	(void)state;
	for (uint32_t round = 0; round < 6; round++) {
		void *opened = (void *)(uintptr_t)&strict;
		kvc_lease_t *lease;
		uint64_t before, begin;
		wr_t *wr;

		assert_int_equal(wr_setup(&opened), 0);
		wr = opened;
		before = kvc_incarnation(wr->kvc);
		begin = wr_now_ms();
		kill_amid_jobs(wr, round);
		wr_drain(wr);
		assert_true(wr_now_ms() - begin < SLOW_MS);

		rig_start(&wr->rig);
		wr_await_restart(wr, before);
		wr_fill(wr, 3);
		assert_int_equal(kvc_space_reset(wr->space), KVC_OK);
		wr_store(wr, wr_eight, 8);
		lease = wr_lease(wr, 0, 8);
		load_fails(wr, lease, 0, KVC_OK, 8);
		assert_true(wr_block_is(&wr->rank[0], wr_other[7], 3, wr_eight[7]));
		kvc_release(&lease, 1);
		assert_int_equal(wr_teardown(&opened), 0);
	}
}

/* Whatever is under way when the engine ends is given up, and nothing of it stays. */
static void p4_a_worker_closed_amid_loads_and_saves_leaves_nothing(void **state)
{
	wr_t *wr = *state;

	for (uint32_t round = 0; round < 10; round++) {
		kvc_lease_t *lease = wr_lease(wr, 0, 8);
		kvc_put_t *put = wr_put(wr, 8, 16);

		wr_message(wr);
		wr_add_load(wr, lease, both_kinds[round % 2], 7, wr_other, 8);
		wr_add_save(wr, put, round % 3 ? KVX_MSG_COMPLETE : 0, wr_eight, 8);
		wr_begin(wr);
		kvx_worker_start_async_loads(wr->rank[0].worker);
		if (round % 4 == 0) {
			wr_end(wr);
		}
		usleep(round * 100);
		kvx_worker_close(wr->rank[0].worker);
		kvc_put_free(put);
		kvc_release(&lease, 1);
		wr_open_rank(wr, 0, 1);
		assert_int_equal(kvc_space_reset(wr->space), KVC_OK);
		wr_store(wr, wr_eight, 8);
	}
}

static void p10_an_unsound_message_is_counted_and_harmless(void **state)
{
	wr_t *wr = *state;
	static const uint32_t beyond[8] = {20, 21, 22, 23, 24, 25, 26, WR_BLOCKS};
	const uint64_t words[8] = {0};
	kvc_lease_t *lease;
	wr_end_t end;

	kvx_worker_begin_step(wr->rank[0].worker, words, sizeof words);
	kvx_worker_begin_step(wr->rank[0].worker, (const uint8_t *)words + 1, 24);
	kvx_worker_begin_step(wr->rank[0].worker, words, 3);
	assert_int_equal(wr_stats(wr, 0).bad_messages, 3);

	lease = wr_lease(wr, 0, 8);
	wr->group = 5;
	load_fails(wr, lease, 0, KVC_ERR_NOMEM, 0);
	load_fails(wr, lease, KVX_MSG_ASYNC, KVC_ERR_NOMEM, 0);
	wr->group = 0;
	run_load(wr, lease, KVX_MSG_ASYNC, beyond, 8);
	wr_wait_load(&wr->rank[0], 7, KVX_MSG_ASYNC, &end);
	assert_int_equal(end.error_count, 7);
	assert_int_equal(wr_stats(wr, 0).bad_messages, 6);
	kvc_release(&lease, 1);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		WR_TEST(p1_a_corrupt_block_is_reported_and_an_error, strict),
		WR_TEST(p7_a_load_without_lease_or_blocks_names_all_that_lack, strict),
		WR_TEST(p7_a_released_lease_is_a_failed_load, strict),
		WR_TEST(p7_a_lease_cut_short_fails_a_load_long_before_its_deadline, strict),
		WR_TEST(p5_a_load_ends_at_its_deadline, strict),
		WR_TEST(p5_a_stopped_daemon_fails_a_load_long_before_its_deadline, strict_quick),
		WR_TEST(p4_a_dropped_load_ends_early_and_is_named_once, strict),
		WR_TEST(p1_saves_of_a_step_whose_load_failed_are_dropped, strict),
		WR_TEST(p7_without_a_daemon_everything_fails_at_once, strict_alone),
		cmocka_unit_test(p7_a_daemon_killed_under_jobs_costs_these_jobs_only),
		WR_TEST(p4_a_worker_closed_amid_loads_and_saves_leaves_nothing, strict),
		WR_TEST(p10_an_unsound_message_is_counted_and_harmless, strict),
	};

	return wr_run_tests(argc, argv, tests, KV_COUNT_OF(tests));
}
