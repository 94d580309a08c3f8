/* Loads that begin when their step is planned: they are on their way before the engine begins the step, in their place
 * among all that the device does, and whatever comes instead of that step finds blocks that are no longer written. */
#include "connectors/worker/layers_rig.h"
#include "connectors/worker/wr_device.h"
#include "engine/check.h"
#include "kernels/fake_cuda.h"

#include <stdio.h>
#include <unistd.h>

#define ROUNDS   12u
#define QUICK_MS 1000u
#define ALL      (KVX_PREFETCH_COMPUTED | KVX_PREFETCH_LAYERS)

/* Until the blocks have come, while no hook is called. */
static void wait_copied(wr_t *wr)
{
	const uint64_t until = wr_now_ms() + WR_PATIENCE;
	uint32_t wrong;

	do {
		wrong = 0;
		layers_look_all(wr, 1, &wrong);
		wr_device_sync();
		assert_true(wr_now_ms() < until);
	} while (wrong > 0);
}

/* ---- a step as planned ----------------------------------------------------------------------- */

/* `layers`: what the engine does in the end; `order`: what it might. */
static void check_step(uint32_t order, int layers)
{
	uint32_t wrong = 0;
	kvc_lease_t *lease;
	wr_end_t end;
	rig_t rig;
	wr_t wr;

	layers_start(&rig, &wr, 1);
	for (uint32_t round = 0; round < ROUNDS; round++) {
		const uint64_t before = layers_stats(&wr).gpu_bytes;

		lease = wr_lease(&wr, 0, 8);
		fake_cuda_hold(round % 2 != 0);
		layers_plan(&wr, lease);
		assert_int_equal(layers_early(&wr, KVX_PREFETCH_COMPUTED | order), 1);
		if (round % 2 == 0) {
			wait_copied(&wr);
		}
		layers_go_on(&wr);
		assert_int_equal(layers ? kvx_worker_run_layered_loads(wr.rank[0].worker) : 0, layers && order);
		if (!layers) {
			kvx_worker_run_sync_loads(wr.rank[0].worker);
		}
		if (layers && order) {
			layers_compute(&wr.rank[0], &wrong);
		}
		layers_look_all(&wr, 1, &wrong);
		kvx_worker_end_step(wr.rank[0].worker);
		fake_cuda_hold(0);
		wr_wait_load(&wr.rank[0], 7, 0, &end);
		assert_int_equal(end.loaded.status, KVC_OK);
		assert_int_equal(end.loaded.blocks, 8);
		assert_int_equal(end.loaded.bytes, 8u * WR_LAYERS * WR_PAGE);
		assert_int_equal(end.error_count, 0);
		wr_device_sync();
		assert_int_equal(wrong, 0);
		assert_int_equal(layers_stats(&wr).gpu_bytes - before, 8u * WR_LAYERS * WR_PAGE);
		kvc_release(&lease, 1);
	}
	assert_int_equal(layers_stats(&wr).loads, ROUNDS);
	assert_int_equal(layers_stats(&wr).loads_prefetched, ROUNDS);
	assert_int_equal(layers_stats(&wr).layered, layers && order ? ROUNDS : 0);
	assert_int_equal(layers_stats(&wr).layers_skipped, 0);
	rig_check_quiet(&rig);
	layers_finish(&rig, &wr);
}

static void p1_a_prefetched_load_is_complete_and_right(void **state)
{
	(void)state;
	check_step(KVX_PREFETCH_LAYERS, 1);
}

static void p1_a_bad_block_of_a_whole_load_is_named_too(void **state)
{
	(void)state;
	check_step(KVX_PREFETCH_LAYERS, 0);
	check_step(0, 0);
	check_step(0, 1);
}

static void p5_a_message_does_not_wait_for_the_device(void **state)
{
	uint32_t wrong = 0, ids[WR_BLOCKS];
	kvc_lease_t *lease;
	uint64_t from;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	lease = wr_lease(&wr, 0, 8);
	fake_cuda_hold(1);
	layers_plan(&wr, lease);
	from = wr_now_ms();
	assert_int_equal(layers_early(&wr, ALL), 1);
	layers_go_on(&wr);
	kvx_worker_run_sync_loads(wr.rank[0].worker);
	layers_look_all(&wr, 1, &wrong);
	kvx_worker_end_step(wr.rank[0].worker);
	assert_true(wr_now_ms() - from < QUICK_MS);
	fake_cuda_hold(0);
	assert_int_equal(kvx_worker_take_failed_blocks(wr.rank[0].worker, ids, WR_BLOCKS), 0);
	layers_hear_all(&wr);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	kvc_release(&lease, 1);
	layers_finish(&rig, &wr);
}

/* The blocks loaded into are still to be read for a save: what is stored is what they had. */
static void p1_blocks_to_save_are_read_before_a_prefetched_load(void **state)
{
	uint32_t wrong = 0, ids[WR_BLOCKS];
	kvc_lease_t *lease;
	kvc_put_t *put;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	for (uint32_t round = 0; round < 4; round++) {
		const uint32_t key = 8 + 8 * round;

		layers_write(&wr, 1 + round);
		put = wr_put(&wr, key, key + 8);
		fake_cuda_hold(1);
		wr_plan(&wr);
		wr_plan_save(&wr, put, 0, wr_other, 8);
		wr_begin(&wr);
		kvx_worker_end_step(wr.rank[0].worker);
		(void)kvx_worker_take_failed_blocks(wr.rank[0].worker, ids, WR_BLOCKS);
		kvx_worker_take_report(wr.rank[0].worker, &(const void *){NULL}, &(size_t){0});
		lease = wr_lease(&wr, 0, 8);
		wr_plan(&wr);
		wr_plan_fence(&wr, wr_other, 8);
		wr_plan_load(&wr, lease, 0, 7, wr_other, 8);
		assert_int_equal(layers_early(&wr, ALL), 1);
		fake_cuda_hold(0);
		layers_go_on(&wr);
		kvx_worker_run_sync_loads(wr.rank[0].worker);
		layers_look_all(&wr, 1, &wrong);
		kvx_worker_end_step(wr.rank[0].worker);
		assert_int_equal(wr_put_wait(&wr, put), KVC_OK);
		layers_hear_all(&wr);
		kvc_release(&lease, 1);

		lease = wr_lease(&wr, key, key + 8); /* what has been stored */
		wr_plan(&wr);
		wr_plan_load(&wr, lease, 0, 8, wr_other, 8);
		wr_begin(&wr);
		kvx_worker_run_sync_loads(wr.rank[0].worker);
		layers_look_all(&wr, 1 + round, &wrong);
		kvx_worker_end_step(wr.rank[0].worker);
		layers_hear_all(&wr);
		kvc_release(&lease, 1);
	}
	wr_device_sync();
	assert_int_equal(wrong, 0);
	assert_true(layers_stats(&wr).fences > 0);
	layers_finish(&rig, &wr);
}

/* ---- something else comes -------------------------------------------------------------------- */

typedef enum other_plan { ANOTHER, NONE, GARBAGE, OTHERS } other_plan_t;

static void begin_other(wr_t *wr, other_plan_t which)
{
	kvx_worker_t *worker = wr->rank[0].worker;

	if (which == NONE) {
		kvx_worker_begin_step(worker, NULL, 0);
	} else if (which == GARBAGE) {
		kvx_worker_begin_step(worker, "", 1);
	} else {
		wr_plan(wr);
		wr_plan_fence(wr, wr_other, 8);
		wr_begin(wr);
	}
}

/* Its blocks are the engine's again: what it writes stays, and their loads have failed. */
static void p1_blocks_of_a_step_that_never_comes_are_not_written(void **state)
{
	uint32_t wrong = 0, ids[WR_BLOCKS], failed = 0;
	kvc_lease_t *lease;
	kvc_put_t *put;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	for (uint32_t round = 0; round < 2 * ROUNDS; round++) {
		lease = wr_lease(&wr, 0, 8);
		put = wr_put(&wr, 8, 12);
		layers_plan(&wr, lease);
		wr_plan_save(&wr, put, 0, wr_eight, 4);
		assert_int_equal(layers_early(&wr, round % 2 ? ALL : KVX_PREFETCH_COMPUTED), 1);
		begin_other(&wr, (other_plan_t)(round % OTHERS));
		kvx_worker_start_async_loads(wr.rank[0].worker);
		kvx_worker_run_sync_loads(wr.rank[0].worker);
		layers_write(&wr, 9);
		layers_look_all(&wr, 9, &wrong);
		kvx_worker_end_step(wr.rank[0].worker);
		assert_int_equal(kvx_worker_take_failed_blocks(wr.rank[0].worker, ids, WR_BLOCKS), 8);
		assert_int_equal(wr_put_wait(&wr, put), KVC_ERR_REVOKED);
		layers_hear_all(&wr);
		layers_look_all(&wr, 9, &wrong);
		wr_device_sync();
		assert_int_equal(wrong, 0);
		assert_int_equal(layers_stats(&wr).loads_failed, ++failed);
		kvc_release(&lease, 1);
		layers_idle_step(&wr);
	}
	rig_check_quiet(&rig);
	layers_finish(&rig, &wr);
}

static void p4_a_worker_that_closes_ends_its_prefetch(void **state)
{
	uint32_t wrong = 0;
	kvc_lease_t *lease;
	wr_end_t end;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	for (uint32_t round = 0; round < 4; round++) {
		lease = wr_lease(&wr, 0, 8);
		layers_plan(&wr, lease);
		assert_int_equal(layers_early(&wr, round % 2 ? ALL : KVX_PREFETCH_COMPUTED), 1);
		kvx_worker_close(wr.rank[0].worker);
		layers_write(&wr, 9);
		layers_look_all(&wr, 9, &wrong);
		wr_open_rank(&wr, 0, 1);
		layers_look_all(&wr, 9, &wrong);
		wr_device_sync();
		assert_int_equal(wrong, 0);
		kvc_release(&lease, 1);
		rig_check_quiet(&rig);
		layers_idle_step(&wr);
	}
	lease = wr_lease(&wr, 0, 8);
	layers_plan(&wr, lease);
	assert_int_equal(layers_early(&wr, ALL), 1);
	layers_go_on(&wr);
	kvx_worker_run_sync_loads(wr.rank[0].worker);
	kvx_worker_end_step(wr.rank[0].worker);
	wr_wait_load(&wr.rank[0], 7, 0, &end);
	assert_int_equal(end.loaded.status, KVC_OK);
	kvc_release(&lease, 1);
	layers_finish(&rig, &wr);
}

/* Hooks of the step before, after all: they end, fail and name nothing of what was begun. */
static void p1_late_hooks_of_the_step_before_do_not_touch_it(void **state)
{
	uint32_t wrong = 0, ids[WR_BLOCKS];
	kvc_lease_t *lease;
	kvc_put_t *put;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	lease = wr_lease(&wr, 0, 8);
	put = wr_put(&wr, 8, 12);
	layers_plan(&wr, lease);
	wr_plan_save(&wr, put, 0, wr_eight, 4);
	assert_int_equal(layers_early(&wr, ALL), 1);
	kvx_worker_await_layer(wr.rank[0].worker, 0);
	kvx_worker_end_step(wr.rank[0].worker);
	assert_int_equal(kvx_worker_take_failed_blocks(wr.rank[0].worker, ids, WR_BLOCKS), 0);
	kvx_worker_take_report(wr.rank[0].worker, &(const void *){NULL}, &(size_t){0});
	assert_int_equal(layers_stats(&wr).saves_open, 0); /* they wait for the end of their own step */
	assert_int_equal(layers_early(&wr, ALL), 0);
	layers_go_on(&wr);
	assert_int_equal(kvx_worker_run_layered_loads(wr.rank[0].worker), 1);
	layers_compute(&wr.rank[0], &wrong);
	kvx_worker_end_step(wr.rank[0].worker);
	assert_int_equal(kvx_worker_take_failed_blocks(wr.rank[0].worker, ids, WR_BLOCKS), 0);
	assert_int_equal(wr_put_wait(&wr, put), KVC_OK);
	layers_hear_all(&wr);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	assert_int_equal(layers_stats(&wr).loads_failed, 0);
	kvc_release(&lease, 1);
	layers_finish(&rig, &wr);
}

/* The engine computes without having asked for its loads: nothing of that counts. */
static void p1_a_step_that_never_runs_its_prefetched_loads_loses_them(void **state)
{
	uint32_t ids[WR_BLOCKS];
	kvc_lease_t *lease;
	kvc_put_t *put;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	for (uint32_t round = 0; round < 2; round++) {
		lease = wr_lease(&wr, 0, 8);
		put = wr_put(&wr, 8, 12);
		layers_plan(&wr, lease);
		wr_plan_save(&wr, put, 0, wr_eight, 4);
		assert_int_equal(layers_early(&wr, ALL), 1);
		layers_go_on(&wr);
		if (round == 0) {
			kvx_worker_end_step(wr.rank[0].worker);
		}
		assert_int_equal(kvx_worker_take_failed_blocks(wr.rank[0].worker, ids, WR_BLOCKS), 8);
		wr_plan(&wr);
		wr_begin(&wr);
		assert_int_equal(wr_put_wait(&wr, put), KVC_ERR_REVOKED);
		layers_hear_all(&wr);
		kvc_release(&lease, 1);
		layers_idle_step(&wr);
	}
	assert_int_equal(layers_stats(&wr).layers_skipped, 0); /* that is another fault */
	layers_finish(&rig, &wr);
}

/* ---- when it is not done --------------------------------------------------------------------- */

/* All hooks of a step but those left out. */
static void part_of_step(wr_t *wr, int end, int errors, int report)
{
	uint32_t ids[WR_BLOCKS];

	wr_plan(wr);
	wr_begin(wr);
	if (end) {
		kvx_worker_end_step(wr->rank[0].worker);
	}
	if (errors) {
		(void)kvx_worker_take_failed_blocks(wr->rank[0].worker, ids, WR_BLOCKS);
	}
	if (report) {
		kvx_worker_take_report(wr->rank[0].worker, &(const void *){NULL}, &(size_t){0});
	}
}

static void p1_a_step_that_has_not_ended_is_not_overtaken(void **state)
{
	kvc_lease_t *lease;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	lease = wr_lease(&wr, 0, 8);
	for (uint32_t round = 0; round < 8; round++) {
		const int end = round & 1, errors = round >> 1 & 1, report = round >> 2 & 1;

		for (uint32_t computed = 0; computed < 2; computed++) {
			part_of_step(&wr, end, errors, report);
			layers_plan(&wr, lease);
			assert_int_equal(layers_early(&wr, computed ? ALL : KVX_PREFETCH_LAYERS),
					 errors && report && (end || !computed));
			kvx_worker_begin_step(wr.rank[0].worker, NULL, 0);
			layers_hear_all(&wr);
		}
	}
	kvc_release(&lease, 1);
	lease = wr_lease(&wr, 0, 8);
	part_of_step(&wr, 1, 1, 1);
	layers_plan(&wr, lease);
	wr_begin(&wr);
	kvx_worker_run_sync_loads(wr.rank[0].worker);
	assert_int_equal(layers_early(&wr, ALL), 0);
	kvx_worker_take_report(wr.rank[0].worker, &(const void *){NULL}, &(size_t){0});
	assert_int_equal(layers_early(&wr, KVX_PREFETCH_LAYERS), 0);
	kvx_worker_end_step(wr.rank[0].worker);
	layers_hear_all(&wr);
	kvc_release(&lease, 1);
	layers_finish(&rig, &wr);
}

/* By layers it computes while it loads: what took how long cannot be told. */
static void p7_a_prefetched_step_is_timed_after_its_loads(void **state)
{
	kvx_report_step_t steps[2];
	uint32_t wrong = 0;
	kvc_lease_t *lease;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	for (int layers = 0; layers < 2; layers++) {
		lease = wr_lease(&wr, 0, 8);
		layers_plan(&wr, lease);
		(void)kvx_msg_add_record(&wr.plan, KVX_RECORD_TIME, sizeof(kvx_msg_time_t));
		assert_int_equal(layers_early(&wr, ALL), 1);
		layers_go_on(&wr);
		if (layers) {
			assert_int_equal(kvx_worker_run_layered_loads(wr.rank[0].worker), 1);
			layers_compute(&wr.rank[0], &wrong);
		} else {
			kvx_worker_run_sync_loads(wr.rank[0].worker);
		}
		kvx_worker_end_step(wr.rank[0].worker);
		wr_device_sync();
		assert_int_equal(wr_hear_steps(&wr, steps, 2), !layers);
		assert_true(layers || steps[0].step == wr.step);
		kvc_release(&lease, 1);
	}
	assert_int_equal(wrong, 0);
	assert_int_equal(layers_stats(&wr).loads_prefetched, 2);
	layers_finish(&rig, &wr);
}

static void only_messages_with_synchronous_loads_are_prefetched(void **state)
{
	const uint64_t nonsense[4] = {1, 2, 3, 4};
	kvc_lease_t *lease;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	lease = wr_lease(&wr, 0, 8);
	wr_plan(&wr);
	wr_plan_fence(&wr, wr_other, 8);
	assert_int_equal(layers_early(&wr, ALL), 0);
	wr_plan(&wr);
	wr_plan_load(&wr, lease, KVX_MSG_ASYNC, 7, wr_other, 8);
	assert_int_equal(layers_early(&wr, ALL), 0);
	wr_plan(&wr);
	wr_plan_load(&wr, NULL, 0, 7, wr_other, 8);
	assert_int_equal(layers_early(&wr, ALL), 0);
	assert_int_equal(kvx_worker_prefetch_step(wr.rank[0].worker, nonsense, sizeof nonsense, ALL), 0);
	assert_int_equal(kvx_worker_prefetch_step(wr.rank[0].worker, NULL, 0, ALL), 0);
	layers_plan(&wr, lease);
	kvx_msg_finish(&wr.plan, wr.step);
	assert_int_equal(kvx_worker_prefetch_step(wr.rank[0].worker, wr.plan.data, wr.plan.len - 8, ALL), 0);
	assert_int_equal(layers_stats(&wr).loads, 0);
	assert_int_equal(layers_stats(&wr).bad_messages, 0);
	kvc_release(&lease, 1);
	layers_finish(&rig, &wr);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p1_a_prefetched_load_is_complete_and_right),
		cmocka_unit_test(p1_a_bad_block_of_a_whole_load_is_named_too),
		cmocka_unit_test(p5_a_message_does_not_wait_for_the_device),
		cmocka_unit_test(p1_blocks_to_save_are_read_before_a_prefetched_load),
		cmocka_unit_test(p1_blocks_of_a_step_that_never_comes_are_not_written),
		cmocka_unit_test(p4_a_worker_that_closes_ends_its_prefetch),
		cmocka_unit_test(p1_late_hooks_of_the_step_before_do_not_touch_it),
		cmocka_unit_test(p1_a_step_that_never_runs_its_prefetched_loads_loses_them),
		cmocka_unit_test(p1_a_step_that_has_not_ended_is_not_overtaken),
		cmocka_unit_test(p7_a_prefetched_step_is_timed_after_its_loads),
		cmocka_unit_test(only_messages_with_synchronous_loads_are_prefetched),
	};

	if (argc < 2) {
		fprintf(stderr, "usage: %s KVD\n", argv[0]);
		return 64;
	}
	layers_program = argv[1];

	return cmocka_run_group_tests_name("kvx.worker-prefetch", tests, NULL, NULL);
}
