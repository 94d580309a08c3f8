/* A worker when things go wrong: every failure is an id in errors(), said once and in time; nothing waits, nothing
 * leaks. */
#include "connectors/worker/worker_rig.h"
#include "engine/check.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define QUICK_MS 10000u /* far less than a load's deadline here, far more than a busy machine needs */
#define SLOW_MS  60000u

static const char *kvd_program;
static const uint32_t nine[9] = {20, 21, 22, 23, 24, 25, 26, 27, 28};

static kvx_worker_stats_t stats_of(const wr_rank_t *rank)
{
	kvx_worker_stats_t stats = {.struct_size = sizeof stats};

	kvx_worker_get_stats(rank->worker, &stats);

	return stats;
}

static void start_silent(rig_t *rig, wr_t *wr, uint32_t ranks, const char *silence)
{
	rig_init(rig, kvd_program);
	rig->silence = silence;
	rig_start(rig);
	wr_init(wr, rig, ranks);
	wr_fill(wr, 1);
	wr_store(wr, wr_eight, 8);
}

static void start(rig_t *rig, wr_t *wr, uint32_t ranks)
{
	start_silent(rig, wr, ranks, RIG_SILENCE);
}

static void finish(rig_t *rig, wr_t *wr)
{
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		const kvx_worker_stats_t stats = stats_of(&wr->rank[r]);

		assert_int_equal(stats.loads_open + stats.saves_open + stats.marked, 0);
		wr_check_silent(&wr->rank[r]);
	}
	wr_fini(wr);
	rig_fini(rig);
}

/* begin(), start() and, of a synchronous load, load(). */
static void run_load(wr_t *wr, const kvc_lease_t *lease, uint32_t flags, const uint32_t *ids, uint32_t n)
{
	wr_plan(wr);
	wr_plan_fence(wr, ids, n);
	wr_plan_load(wr, lease, flags, 7, ids, n);
	wr_begin(wr);
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		kvx_worker_start_async_loads(wr->rank[r].worker);
		kvx_worker_run_sync_loads(wr->rank[r].worker);
	}
}

static int names(const wr_end_t *end, uint32_t id)
{
	for (uint32_t i = 0; i < end->error_count; i++) {
		if (end->errors[i] == id) {
			return 1;
		}
	}

	return 0;
}

/* Take whatever the worker has to say. */
static void hear(wr_rank_t *rank)
{
	uint32_t ids[WR_BLOCKS];
	const void *bytes;
	char id[16];
	size_t len;

	while (kvx_worker_take_finished(rank->worker, id, sizeof id, NULL) > 0) {
	}
	(void)kvx_worker_take_failed_blocks(rank->worker, ids, WR_BLOCKS);
	kvx_worker_take_report(rank->worker, &bytes, &len);
}

static void corrupt_blocks_are_errors(uint32_t flags)
{
	kvc_lease_t *lease;
	const void *data;
	uint8_t *byte;
	wr_end_t end;
	rig_t rig;
	wr_t wr;

	start(&rig, &wr, 1);
	lease = wr_lease(&wr, 0, 8);
	assert_int_equal(kvc_lease_block(lease, 5, &data, NULL), KVC_OK);
	byte = (uint8_t *)(uintptr_t)data + 3 * WR_PAGE + 17000;
	*byte ^= 1;
	run_load(&wr, lease, flags, wr_other, 8);
	wr_wait_load(&wr.rank[0], 7, flags & KVX_MSG_ASYNC, &end);
	assert_int_equal(end.loaded.status, KVC_ERR_CORRUPT);
	assert_true(names(&end, wr_other[5]));
	assert_int_equal(end.error_count, 8 - end.loaded.blocks);
	for (uint32_t i = 0; i < 5; i++) {
		assert_false(names(&end, wr_other[i]));
		assert_true(wr_block_is(&wr.rank[0], wr_other[i], 1, wr_eight[i]));
	}
	assert_int_equal(stats_of(&wr.rank[0]).load_corrupt, 1);

	/* The daemon is told, by the lease that it still knows. */
	for (uint32_t i = 0; i < 3000 && rig_counter(&rig, "kvd_bad_blocks_total") != 1; i++) {
		usleep(10000);
	}
	assert_int_equal(rig_counter(&rig, "kvd_bad_blocks_total"), 1);
	kvc_release(&lease, 1);
	rig_check_quiet(&rig);
	finish(&rig, &wr);
}

static void p1_a_corrupt_block_is_reported_and_an_error(void **state)
{
	(void)state;
	corrupt_blocks_are_errors(0);
	corrupt_blocks_are_errors(KVX_MSG_ASYNC);
}

static void load_fails(wr_t *wr, const kvc_lease_t *lease, uint32_t flags, kvc_status_t why, uint32_t good)
{
	const uint64_t start = wr_now_ms();
	wr_end_t end;

	run_load(wr, lease, flags, wr_other, 8);
	wr_wait_load(&wr->rank[0], 7, flags & KVX_MSG_ASYNC, &end);
	assert_int_equal(end.loaded.status, why);
	assert_int_equal(end.loaded.blocks, good);
	assert_int_equal(end.error_count, 8 - good);
	for (uint32_t i = 0; i < 8; i++) {
		assert_int_equal(names(&end, wr_other[i]), i >= good);
	}
	assert_true(wr_now_ms() - start < QUICK_MS);
}

static void p7_a_load_without_lease_or_blocks_names_all_that_lack(void **state)
{
	kvc_lease_t *lease;
	rig_t rig;
	wr_t wr;

	(void)state;
	start(&rig, &wr, 1);
	wr.timeout_ms = SLOW_MS;
	load_fails(&wr, NULL, 0, KVC_MISS, 0);
	load_fails(&wr, NULL, KVX_MSG_ASYNC, KVC_MISS, 0);
	lease = wr_lease(&wr, 0, 4);
	load_fails(&wr, lease, 0, KVC_MISS, 4);
	load_fails(&wr, lease, KVX_MSG_ASYNC, KVC_MISS, 4);
	kvc_release(&lease, 1);
	finish(&rig, &wr);
}

static void p7_a_released_lease_is_a_failed_load(void **state)
{
	kvc_lease_t *lease;
	wr_end_t end;
	rig_t rig;
	wr_t wr;

	(void)state;
	start(&rig, &wr, 1);
	wr.timeout_ms = SLOW_MS;
	for (uint32_t round = 0; round < 2; round++) {
		lease = wr_lease(&wr, 0, 8);
		wr_plan(&wr);
		wr_plan_load(&wr, lease, round ? KVX_MSG_ASYNC : 0, 7, wr_other, 8);
		kvc_release(&lease, 1);
		(void)kvc_poll(wr.kvc, 50);
		usleep(50000);
		wr_begin(&wr);
		kvx_worker_start_async_loads(wr.rank[0].worker);
		kvx_worker_run_sync_loads(wr.rank[0].worker);
		wr_wait_load(&wr.rank[0], 7, (int)round, &end);
		assert_int_equal(end.loaded.status, KVC_ERR_REVOKED);
		assert_int_equal(end.error_count, 8);
	}
	finish(&rig, &wr);
}

/* The lease is said to have 16 blocks; 8 of them will never come. */
static void p7_a_lease_cut_short_fails_a_load_long_before_its_deadline(void **state)
{
	kvc_lease_t *lease;
	uint64_t begin;
	wr_end_t end;
	rig_t rig;
	wr_t wr;

	(void)state;
	start(&rig, &wr, 1);
	wr.timeout_ms = SLOW_MS;
	wr.forge_n = 16;
	lease = wr_lease(&wr, 0, 8);
	for (uint32_t round = 0; round < 2; round++) {
		begin = wr_now_ms();
		run_load(&wr, lease, round ? KVX_MSG_ASYNC : 0, nine, 9);
		wr_wait_load(&wr.rank[0], 7, (int)round, &end);
		assert_true(wr_now_ms() - begin < QUICK_MS);
		assert_true(end.loaded.status < 0);
		assert_int_equal(end.loaded.blocks + end.error_count, 9);
		assert_true(names(&end, nine[8]));
	}
	kvc_release(&lease, 1);
	finish(&rig, &wr);
}

/* Nobody calls start(). */
static void p5_a_load_ends_at_its_deadline(void **state)
{
	kvc_lease_t *lease;
	uint64_t begin;
	wr_end_t end;
	rig_t rig;
	wr_t wr;

	(void)state;
	start(&rig, &wr, 1);
	wr.timeout_ms = 300;
	lease = wr_lease(&wr, 0, 8);
	begin = wr_now_ms();
	wr_plan(&wr);
	wr_plan_load(&wr, lease, KVX_MSG_ASYNC, 7, wr_other, 8);
	wr_begin(&wr);
	wr_wait_load(&wr.rank[0], 7, 1, &end);
	assert_true(wr_now_ms() - begin >= 299 && wr_now_ms() - begin < 300 + QUICK_MS);
	assert_int_equal(end.loaded.status, KVC_ERR_TIMEOUT);
	assert_int_equal(end.loaded.blocks, 0);
	assert_int_equal(end.error_count, 8);
	assert_int_equal(stats_of(&wr.rank[0]).load_timeouts, 1);
	kvc_release(&lease, 1);
	finish(&rig, &wr);
}

/* What is in memory still comes; what has to be asked for does not. */
static void p5_a_stopped_daemon_fails_a_load_long_before_its_deadline(void **state)
{
	kvc_lease_t *lease;
	uint64_t begin;
	wr_end_t end;
	rig_t rig;
	wr_t wr;

	(void)state;
	start_silent(&rig, &wr, 1, "50ms");
	wr.timeout_ms = SLOW_MS;
	lease = wr_lease(&wr, 0, 8);
	rig_signal(&rig, SIGSTOP);
	for (uint32_t round = 0; round < 2; round++) {
		begin = wr_now_ms();
		wr.number = round + 1;
		wr_plan(&wr);
		wr_plan_space(&wr, round + 1, round ? "adapter-b" : "adapter-a");
		wr_plan_load(&wr, lease, round ? KVX_MSG_ASYNC : 0, 7, wr_other, 8);
		wr_begin(&wr);
		kvx_worker_start_async_loads(wr.rank[0].worker);
		kvx_worker_run_sync_loads(wr.rank[0].worker);
		wr_wait_load(&wr.rank[0], 7, (int)round, &end);
		assert_true(wr_now_ms() - begin < QUICK_MS);
		assert_int_equal(end.loaded.status, KVC_ERR_DAEMON_STALE);
		assert_int_equal(end.error_count, 8);
	}
	wr.number = 0;
	run_load(&wr, lease, 0, wr_other, 8);
	wr_wait_load(&wr.rank[0], 7, 0, &end);
	rig_signal(&rig, SIGCONT);
	assert_int_equal(end.loaded.status, KVC_OK);
	kvc_release(&lease, 1);
	rig_check_quiet(&rig);
	finish(&rig, &wr);
}

/* Aborted before it has begun to copy. */
static void p4_a_dropped_load_ends_early_and_is_named_once(void **state)
{
	kvc_lease_t *lease;
	uint64_t begin;
	wr_end_t end;
	rig_t rig;
	wr_t wr;

	(void)state;
	start(&rig, &wr, 1);
	wr.timeout_ms = SLOW_MS;
	lease = wr_lease(&wr, 0, 8);
	begin = wr_now_ms();
	wr_plan(&wr);
	wr_plan_load(&wr, lease, KVX_MSG_ASYNC, 7, wr_other, 8);
	wr_begin(&wr);
	usleep(20000);
	wr_plan(&wr);
	wr_plan_drop(&wr, 7);
	wr_begin(&wr);
	wr_wait_load(&wr.rank[0], 7, 1, &end);
	assert_true(wr_now_ms() - begin < QUICK_MS);
	assert_int_equal(end.failed, 1);
	assert_int_equal(end.error_count, 0); /* they belong to no request */
	kvc_release(&lease, 1);
	rig_check_quiet(&rig);
	finish(&rig, &wr);
}

/* What was computed on garbage is not saved, and the next step's is not either, as it may rest on it. */
static void p1_saves_of_a_step_whose_load_failed_are_dropped(void **state)
{
	kvx_worker_t *worker;
	kvc_put_result_t result = {.struct_size = sizeof result};
	kvc_put_t *put;
	wr_end_t end;
	rig_t rig;
	wr_t wr;

	(void)state;
	start(&rig, &wr, 1);
	worker = wr.rank[0].worker;
	for (uint32_t later = 0; later < 3; later++) {
		const uint64_t marked = stats_of(&wr.rank[0]).save_dropped;

		put = wr_put(&wr, 8, 12);
		wr_plan(&wr);
		wr_plan_load(&wr, NULL, 0, 7, wr_other, 8);
		if (later == 0) {
			wr_plan_save(&wr, put, 0, wr_eight, 4);
		}
		wr_begin(&wr);
		kvx_worker_start_async_loads(worker);
		kvx_worker_run_sync_loads(worker);
		kvx_worker_end_step(worker);
		for (uint32_t step = 1; step <= later; step++) {
			wr_plan(&wr);
			if (step == later) {
				wr_plan_save(&wr, put, 0, wr_eight, 4);
			}
			wr_begin(&wr);
			kvx_worker_end_step(worker);
		}
		assert_int_equal(kvx_worker_flush(worker, WR_PATIENCE), KVC_OK);
		assert_int_equal(stats_of(&wr.rank[0]).save_dropped - marked, later < 2);
		assert_int_equal(kvx_worker_take_failed_blocks(worker, end.errors, WR_BLOCKS), 8);
		if (later == 2) {
			assert_int_equal(kvc_put_wait(put, 0, WR_PATIENCE), KVC_OK);
		} else {
			kvc_put_get_result(put, &result);
			assert_int_not_equal(result.status, KVC_OK);
		}
		kvc_put_free(put);
		hear(&wr.rank[0]);
	}
	rig_check_quiet(&rig);
	finish(&rig, &wr);
}

static void p7_without_a_daemon_everything_fails_at_once(void **state)
{
	const kvc_handle_t nobody = {.incarnation = 5, .id = 9, .offset = 4096, .kind = 2, .n = 8};
	kvx_msg_save_t *save;
	uint64_t begin;
	rig_t rig;
	wr_t wr = {0};

	(void)state;
	rig_init(&rig, kvd_program);
	wr_init_with(&wr, &rig, 1, 0);
	begin = wr_now_ms();
	for (uint32_t round = 0; round < 50; round++) {
		wr_plan(&wr);
		save = kvx_msg_add_record(&wr.plan, KVX_RECORD_SAVE, sizeof *save);
		assert_non_null(save);
		save->n = 8;
		save->flags = KVX_MSG_COMPLETE;
		save->put = nobody;
		kvx_msg_append(&wr.plan, wr_eight, sizeof wr_eight);
		wr_plan_fence(&wr, wr_eight, 8);
		wr_begin(&wr);
		kvx_worker_end_step(wr.rank[0].worker);
		assert_true(wr_wait_dropped(&wr.rank[0]) == 9);
	}
	assert_true(wr_now_ms() - begin < QUICK_MS);
	assert_int_equal(kvx_worker_self_test_status(wr.rank[0].worker), KVC_PENDING);
	load_fails(&wr, NULL, 0, KVC_MISS, 0);
	load_fails(&wr, NULL, KVX_MSG_ASYNC, KVC_MISS, 0);
	finish(&rig, &wr);
}

/* Until both members have found the daemon that has come after `before`. */
static void await_settled(wr_t *wr, uint64_t before)
{
	const uint64_t until = wr_now_ms() + WR_PATIENCE;
	uint64_t now = before;

	while (now == before || now == 0 || kvc_space_state(wr->space) != KVC_OK ||
	       stats_of(&wr->rank[0]).attaches < 2) {
		assert_true(wr_now_ms() < until);
		(void)kvc_poll(wr->kvc, 10);
		now = kvc_incarnation(wr->kvc);
	}
	assert_int_equal(stats_of(&wr->rank[0]).attaches, 2);
	usleep(100000); /* the worker's spaces are opened again with its session */
}

/* Loads and saves begin, the daemon is killed a little later, and the engine goes on to write what is still marked. */
static void kill_amid_jobs(rig_t *rig, wr_t *wr, uint32_t round)
{
	kvc_lease_t *lease = wr_lease(wr, 0, 8);
	kvc_put_t *put = wr_put(wr, 8, 32);
	uint32_t ids[24];

	for (uint32_t i = 0; i < 24; i++) {
		ids[i] = 32 + i;
	}
	wr->timeout_ms = SLOW_MS;
	wr->forge_n = round % 2 ? 9 : 0;
	wr_plan(wr);
	wr_plan_load(wr, lease, KVX_MSG_ASYNC, 7, nine, 8 + round % 2);
	wr_plan_save(wr, put, 0, ids, 24);
	wr_begin(wr);
	kvx_worker_start_async_loads(wr->rank[0].worker);
	kvx_worker_end_step(wr->rank[0].worker);
	usleep(round * 150);
	rig_kill(rig);
	wr_plan(wr);
	wr_plan_fence(wr, ids, 24);
	wr_begin(wr);
	wr_fill(wr, 2);
	kvc_put_free(put);
	kvc_release(&lease, 1);
	wr->forge_n = 0;
}

/* At many moments; with a new daemon everything works again. */
static void p7_a_daemon_killed_under_jobs_costs_these_jobs_only(void **state)
{
	kvc_lease_t *lease;
	uint64_t before, begin;
	rig_t rig;
	wr_t wr;

	(void)state;
	for (uint32_t round = 0; round < 6; round++) {
		start(&rig, &wr, 1);
		before = kvc_incarnation(wr.kvc);
		begin = wr_now_ms();
		kill_amid_jobs(&rig, &wr, round);
		for (uint32_t i = 0; i < WR_PATIENCE; i++) {
			hear(&wr.rank[0]);
			if (stats_of(&wr.rank[0]).loads_open + stats_of(&wr.rank[0]).saves_open == 0) {
				break;
			}
			usleep(1000);
		}
		hear(&wr.rank[0]);
		assert_int_equal(stats_of(&wr.rank[0]).marked, 0);
		assert_true(wr_now_ms() - begin < SLOW_MS);

		rig_start(&rig);
		await_settled(&wr, before);
		wr_fill(&wr, 3);
		assert_int_equal(kvc_space_reset(wr.space), KVC_OK);
		wr_store(&wr, wr_eight, 8);
		lease = wr_lease(&wr, 0, 8);
		load_fails(&wr, lease, 0, KVC_OK, 8);
		assert_true(wr_block_is(&wr.rank[0], wr_other[7], 3, wr_eight[7]));
		kvc_release(&lease, 1);
		rig_check_quiet(&rig);
		finish(&rig, &wr);
	}
}

/* Whatever is under way when the engine ends is given up, and nothing of it stays. */
static void p4_a_worker_closed_amid_loads_and_saves_leaves_nothing(void **state)
{
	kvc_lease_t *lease;
	kvc_put_t *put;
	rig_t rig;
	wr_t wr;

	(void)state;
	start(&rig, &wr, 1);
	for (uint32_t round = 0; round < 10; round++) {
		lease = wr_lease(&wr, 0, 8);
		put = wr_put(&wr, 8, 16);
		wr_plan(&wr);
		wr_plan_load(&wr, lease, round % 2 ? KVX_MSG_ASYNC : 0, 7, wr_other, 8);
		wr_plan_save(&wr, put, round % 3 ? KVX_MSG_COMPLETE : 0, wr_eight, 8);
		wr_begin(&wr);
		kvx_worker_start_async_loads(wr.rank[0].worker);
		if (round % 4 == 0) {
			kvx_worker_end_step(wr.rank[0].worker);
		}
		usleep(round * 100);
		kvx_worker_close(wr.rank[0].worker);
		kvc_put_free(put);
		kvc_release(&lease, 1);
		wr_open_rank(&wr, 0, 1);
		assert_int_equal(kvc_space_reset(wr.space), KVC_OK);
		wr_store(&wr, wr_eight, 8);
	}
	rig_check_quiet(&rig);
	finish(&rig, &wr);
}

static void p10_an_unsound_message_is_counted_and_harmless(void **state)
{
	uint64_t bad, words[8] = {0};
	kvc_lease_t *lease;
	wr_end_t end;
	rig_t rig;
	wr_t wr;

	(void)state;
	start(&rig, &wr, 1);
	kvx_worker_begin_step(wr.rank[0].worker, words, sizeof words);
	kvx_worker_begin_step(wr.rank[0].worker, (const uint8_t *)words + 1, 24);
	kvx_worker_begin_step(wr.rank[0].worker, words, 3);
	bad = stats_of(&wr.rank[0]).bad_messages;
	assert_int_equal(bad, 3);

	lease = wr_lease(&wr, 0, 8);
	wr.group = 5;
	load_fails(&wr, lease, 0, KVC_ERR_NOMEM, 0);
	load_fails(&wr, lease, KVX_MSG_ASYNC, KVC_ERR_NOMEM, 0);
	wr.group = 0;
	run_load(&wr, lease, KVX_MSG_ASYNC, (const uint32_t[8]){20, 21, 22, 23, 24, 25, 26, WR_BLOCKS}, 8);
	wr_wait_load(&wr.rank[0], 7, 1, &end);
	assert_int_equal(end.error_count, 7);
	assert_int_equal(stats_of(&wr.rank[0]).bad_messages, bad + 3);
	kvc_release(&lease, 1);
	finish(&rig, &wr);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p1_a_corrupt_block_is_reported_and_an_error),
		cmocka_unit_test(p7_a_load_without_lease_or_blocks_names_all_that_lack),
		cmocka_unit_test(p7_a_released_lease_is_a_failed_load),
		cmocka_unit_test(p7_a_lease_cut_short_fails_a_load_long_before_its_deadline),
		cmocka_unit_test(p5_a_load_ends_at_its_deadline),
		cmocka_unit_test(p5_a_stopped_daemon_fails_a_load_long_before_its_deadline),
		cmocka_unit_test(p4_a_dropped_load_ends_early_and_is_named_once),
		cmocka_unit_test(p1_saves_of_a_step_whose_load_failed_are_dropped),
		cmocka_unit_test(p7_without_a_daemon_everything_fails_at_once),
		cmocka_unit_test(p7_a_daemon_killed_under_jobs_costs_these_jobs_only),
		cmocka_unit_test(p4_a_worker_closed_amid_loads_and_saves_leaves_nothing),
		cmocka_unit_test(p10_an_unsound_message_is_counted_and_harmless),
	};

	if (argc < 2) {
		fprintf(stderr, "usage: %s KVD\n", argv[0]);
		return 64;
	}
	kvd_program = argv[1];

	return cmocka_run_group_tests_name("kvx.worker-faults", tests, NULL, NULL);
}
