/* Loads that begin when their step is planned: they are on their way before the engine begins the step, in their place among all that the device does, and
 * whatever comes instead of that step finds blocks that nobody writes any more. */
#include "connectors/layers_rig.h"
#include "connectors/wr_device.h"
#include "engine/check.h"
#include "kernels/fake_cuda.h"

#include <stdio.h>
#include <unistd.h>

#define ROUNDS   12u
#define LATE     400u /* kernels */
#define QUICK_MS 1000u
#define ALL      (KVX_EARLY_COMPUTED | KVX_EARLY_LAYERS)

static int early(wr_t *wr, uint32_t flags)
{
	kvx_bytes_finish(&wr->plan, wr->step);

	return kvx_worker_early(wr->rank[0].worker, wr->plan.data, wr->plan.len, flags);
}

/* begin() and start() of the plan at hand. */
static void begin(wr_t *wr)
{
	kvx_worker_begin(wr->rank[0].worker, wr->plan.data, wr->plan.len);
	kvx_worker_start(wr->rank[0].worker);
}

static void nothing(void *args)
{
	(void)args;
}

static void be_late(void)
{
	for (uint32_t i = 0; i < LATE; i++) {
		wr_device_call(nothing, NULL);
	}
}

/* A kernel of the step before writes the blocks, late; then a plan that loads them. */
static void plan_load(wr_t *wr, const kvc_lease_t *lease)
{
	be_late();
	for (uint32_t i = 0; i < 8; i++) {
		wr_fill_block(&wr->rank[0], layers_other[i], 5, i);
	}
	wr_plan(wr);
	wr_plan_fence(wr, layers_other, 8);
	wr_plan_load(wr, lease, 0, 7, layers_other, 8);
}

static void look(wr_t *wr, uint32_t seed, uint32_t *p_wrong)
{
	for (uint32_t i = 0; i < 8; i++) {
		wr_look_block(&wr->rank[0], layers_other[i], seed, layers_eight[i], p_wrong);
	}
}

static void write_other(wr_t *wr, uint32_t seed)
{
	for (uint32_t i = 0; i < 8; i++) {
		wr_fill_block(&wr->rank[0], layers_other[i], seed, layers_eight[i]);
	}
}

/* A step in which nothing is done. */
static void empty_step(wr_t *wr)
{
	uint32_t ids[WR_BLOCKS];
	const void *bytes;
	size_t len;

	wr_plan(wr);
	wr_begin(wr);
	kvx_worker_end(wr->rank[0].worker);
	assert_int_equal(kvx_worker_errors(wr->rank[0].worker, ids, WR_BLOCKS), 0);
	kvx_worker_report(wr->rank[0].worker, &bytes, &len);
}

/* Until the blocks have come, while no hook is called. */
static void wait_copied(wr_t *wr)
{
	const uint64_t until = wr_now_ms() + WR_PATIENCE;
	uint32_t wrong;

	do {
		wrong = 0;
		look(wr, 1, &wrong);
		wr_device_sync();
		assert_true(wr_now_ms() < until);
	} while (wrong > 0);
}

/* ---- a step as planned ------------------------------------------------------------------------------------------------------- */

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
		plan_load(&wr, lease);
		assert_int_equal(early(&wr, KVX_EARLY_COMPUTED | order), 1);
		if (round % 2 == 0) {
			wait_copied(&wr);
		}
		begin(&wr);
		assert_int_equal(layers ? kvx_worker_load_layers(wr.rank[0].worker) : 0, layers && order);
		if (!layers) {
			kvx_worker_load(wr.rank[0].worker);
		}
		if (layers && order) {
			layers_compute(&wr.rank[0], &wrong);
		}
		look(&wr, 1, &wrong);
		kvx_worker_end(wr.rank[0].worker);
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
	assert_int_equal(layers_stats(&wr).loads_early, ROUNDS);
	assert_int_equal(layers_stats(&wr).layered, layers && order ? ROUNDS : 0);
	assert_int_equal(layers_stats(&wr).layer_skips, 0);
	rig_check_quiet(&rig);
	layers_finish(&rig, &wr);
}

static void p4_a_load_is_on_its_way_before_the_engine_begins_its_step(void **state)
{
	(void)state;
	check_step(KVX_EARLY_LAYERS, 1);
}

static void p4_so_it_is_where_the_step_waits_for_all_of_it(void **state)
{
	(void)state;
	check_step(KVX_EARLY_LAYERS, 0);
	check_step(0, 0);
	check_step(0, 1);
}

static void p5_a_plan_does_not_wait_for_the_device(void **state)
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
	plan_load(&wr, lease);
	from = wr_now_ms();
	assert_int_equal(early(&wr, ALL), 1);
	begin(&wr);
	kvx_worker_load(wr.rank[0].worker);
	look(&wr, 1, &wrong);
	kvx_worker_end(wr.rank[0].worker);
	assert_true(wr_now_ms() - from < QUICK_MS);
	fake_cuda_hold(0);
	assert_int_equal(kvx_worker_errors(wr.rank[0].worker, ids, WR_BLOCKS), 0);
	layers_hear_all(&wr);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	kvc_release(&lease, 1);
	layers_finish(&rig, &wr);
}

/* The blocks loaded into are still to be read for a save: what is stored is what they had. */
static void p1_what_is_still_to_be_saved_is_read_before_a_load_begun_early(void **state)
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

		write_other(&wr, 1 + round);
		put = wr_put(&wr, key, key + 8);
		fake_cuda_hold(1);
		wr_plan(&wr);
		wr_plan_save(&wr, put, 0, layers_other, 8);
		wr_begin(&wr);
		kvx_worker_end(wr.rank[0].worker);
		(void)kvx_worker_errors(wr.rank[0].worker, ids, WR_BLOCKS);
		kvx_worker_report(wr.rank[0].worker, &(const void *){NULL}, &(size_t){0});
		lease = wr_lease(&wr, 0, 8);
		wr_plan(&wr);
		wr_plan_fence(&wr, layers_other, 8);
		wr_plan_load(&wr, lease, 0, 7, layers_other, 8);
		assert_int_equal(early(&wr, ALL), 1);
		fake_cuda_hold(0);
		begin(&wr);
		kvx_worker_load(wr.rank[0].worker);
		look(&wr, 1, &wrong);
		kvx_worker_end(wr.rank[0].worker);
		assert_int_equal(wr_put_wait(&wr, put), KVC_OK);
		layers_hear_all(&wr);
		kvc_release(&lease, 1);

		lease = wr_lease(&wr, key, key + 8); /* what has been stored */
		wr_plan(&wr);
		wr_plan_load(&wr, lease, 0, 8, layers_other, 8);
		wr_begin(&wr);
		kvx_worker_load(wr.rank[0].worker);
		look(&wr, 1 + round, &wrong);
		kvx_worker_end(wr.rank[0].worker);
		layers_hear_all(&wr);
		kvc_release(&lease, 1);
	}
	wr_device_sync();
	assert_int_equal(wrong, 0);
	assert_true(layers_stats(&wr).fences > 0);
	layers_finish(&rig, &wr);
}

/* ---- something else comes ---------------------------------------------------------------------------------------------------- */

typedef enum other_plan { ANOTHER, NONE, GARBAGE, OTHERS } other_plan_t;

static void begin_other(wr_t *wr, other_plan_t which)
{
	kvx_worker_t *worker = wr->rank[0].worker;

	if (which == NONE) {
		kvx_worker_begin(worker, NULL, 0);
	} else if (which == GARBAGE) {
		kvx_worker_begin(worker, "", 1);
	} else {
		wr_plan(wr);
		wr_plan_fence(wr, layers_other, 8);
		wr_begin(wr);
	}
}

/* Its blocks are the engine's again: what it writes stays, and their loads have failed. */
static void p1_blocks_of_a_step_that_never_comes_are_written_by_nobody(void **state)
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
		plan_load(&wr, lease);
		wr_plan_save(&wr, put, 0, layers_eight, 4);
		assert_int_equal(early(&wr, round % 2 ? ALL : KVX_EARLY_COMPUTED), 1);
		begin_other(&wr, (other_plan_t)(round % OTHERS));
		kvx_worker_start(wr.rank[0].worker);
		kvx_worker_load(wr.rank[0].worker);
		write_other(&wr, 9);
		look(&wr, 9, &wrong);
		kvx_worker_end(wr.rank[0].worker);
		assert_int_equal(kvx_worker_errors(wr.rank[0].worker, ids, WR_BLOCKS), 8);
		assert_int_equal(wr_put_wait(&wr, put), KVC_ERR_REVOKED);
		layers_hear_all(&wr);
		look(&wr, 9, &wrong);
		wr_device_sync();
		assert_int_equal(wrong, 0);
		assert_int_equal(layers_stats(&wr).loads_failed, ++failed);
		kvc_release(&lease, 1);
		empty_step(&wr);
	}
	rig_check_quiet(&rig);
	layers_finish(&rig, &wr);
}

static void p1_a_worker_that_closes_ends_what_it_has_begun_early(void **state)
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
		plan_load(&wr, lease);
		assert_int_equal(early(&wr, round % 2 ? ALL : KVX_EARLY_COMPUTED), 1);
		kvx_worker_close(wr.rank[0].worker);
		write_other(&wr, 9);
		look(&wr, 9, &wrong);
		wr_open_rank(&wr, 0, 1);
		look(&wr, 9, &wrong);
		wr_device_sync();
		assert_int_equal(wrong, 0);
		kvc_release(&lease, 1);
		rig_check_quiet(&rig);
		empty_step(&wr);
	}
	lease = wr_lease(&wr, 0, 8);
	plan_load(&wr, lease);
	assert_int_equal(early(&wr, ALL), 1);
	begin(&wr);
	kvx_worker_load(wr.rank[0].worker);
	kvx_worker_end(wr.rank[0].worker);
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
	plan_load(&wr, lease);
	wr_plan_save(&wr, put, 0, layers_eight, 4);
	assert_int_equal(early(&wr, ALL), 1);
	kvx_worker_layer(wr.rank[0].worker, 0);
	kvx_worker_end(wr.rank[0].worker);
	assert_int_equal(kvx_worker_errors(wr.rank[0].worker, ids, WR_BLOCKS), 0);
	kvx_worker_report(wr.rank[0].worker, &(const void *){NULL}, &(size_t){0});
	assert_int_equal(layers_stats(&wr).saves_open, 0); /* they wait for the end of their own step */
	assert_int_equal(early(&wr, ALL), 0);
	begin(&wr);
	assert_int_equal(kvx_worker_load_layers(wr.rank[0].worker), 1);
	layers_compute(&wr.rank[0], &wrong);
	kvx_worker_end(wr.rank[0].worker);
	assert_int_equal(kvx_worker_errors(wr.rank[0].worker, ids, WR_BLOCKS), 0);
	assert_int_equal(wr_put_wait(&wr, put), KVC_OK);
	layers_hear_all(&wr);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	assert_int_equal(layers_stats(&wr).loads_failed, 0);
	kvc_release(&lease, 1);
	layers_finish(&rig, &wr);
}

/* The engine computes without having asked for its loads: nothing of that counts. */
static void p1_a_step_that_never_asks_for_its_loads_has_lost_them(void **state)
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
		plan_load(&wr, lease);
		wr_plan_save(&wr, put, 0, layers_eight, 4);
		assert_int_equal(early(&wr, ALL), 1);
		begin(&wr);
		if (round == 0) {
			kvx_worker_end(wr.rank[0].worker);
		}
		assert_int_equal(kvx_worker_errors(wr.rank[0].worker, ids, WR_BLOCKS), 8);
		wr_plan(&wr);
		wr_begin(&wr);
		assert_int_equal(wr_put_wait(&wr, put), KVC_ERR_REVOKED);
		layers_hear_all(&wr);
		kvc_release(&lease, 1);
		empty_step(&wr);
	}
	assert_int_equal(layers_stats(&wr).layer_skips, 0); /* that is another fault */
	layers_finish(&rig, &wr);
}

/* What came before the step on the stream it was planned on comes before it on the one it is computed on, also where the driver refuses the n-th call of the
 * plan. Whether the save was made. */
static int change_stream(wr_t *wr, kvk_cu_stream_t second, uint32_t key, uint64_t nth)
{
	kvx_worker_t *worker = wr->rank[0].worker;
	kvc_put_t *put = wr_put(wr, key, key + 4);
	uint32_t ids[WR_BLOCKS];
	kvc_lease_t *lease;
	kvc_status_t status;

	fake_cuda_hold(1);
	be_late();
	wr_plan(wr);
	wr_plan_save(wr, put, 0, layers_eight, 4);
	wr_begin(wr);
	kvx_worker_end(worker);
	(void)kvx_worker_errors(worker, ids, WR_BLOCKS);
	kvx_worker_report(worker, &(const void *){NULL}, &(size_t){0});
	lease = wr_lease(wr, 0, 8);
	wr_plan(wr);
	wr_plan_fence(wr, layers_eight, 4);
	wr_plan_load(wr, lease, 0, 7, layers_other, 8);
	usleep(2000); /* for the save to be on the device */
	fake_cuda_fail_nth(nth);
	assert_int_equal(early(wr, ALL), 1);
	fake_cuda_fail_nth(0);
	kvx_worker_stream(worker, second);
	wr_device_swap(second);
	begin(wr);
	kvx_worker_load(worker);
	for (uint32_t i = 0; i < 4; i++) {
		wr_fill_block(&wr->rank[0], layers_eight[i], 9, i);
	}
	kvx_worker_end(worker);
	fake_cuda_hold(0);
	status = wr_put_wait(wr, put);
	layers_hear_all(wr);
	kvc_release(&lease, 1);

	return status == KVC_OK;
}

static void p1_the_engine_may_change_its_stream(void **state)
{
	const kvk_cuda_ops_t *cuda = fake_cuda_ops();
	kvk_cu_stream_t second = NULL;
	uint32_t wrong = 0, key = 8;
	kvc_lease_t *lease;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	assert_int_equal(cuda->stream_create(&second, 1, 0), 0);
	for (uint64_t nth = 0; nth < ROUNDS; nth++) {
		const int saved = change_stream(&wr, second, key, nth);

		for (uint32_t i = 0; i < 4; i++) {
			wr_fill_block(&wr.rank[0], layers_eight[i], 1, layers_eight[i]);
		}
		wr_device_sync();
		wr_device_swap(NULL);
		wr_device_stream(wr.rank[0].worker);
		if (!saved) {
			continue;
		}

		lease = wr_lease(&wr, key, key + 4); /* what has been stored was read before it was written */
		key += 4;
		wr_plan(&wr);
		wr_plan_load(&wr, lease, 0, 8, layers_other, 4);
		wr_begin(&wr);
		kvx_worker_load(wr.rank[0].worker);
		for (uint32_t i = 0; i < 4; i++) {
			wr_look_block(&wr.rank[0], layers_other[i], 1, layers_eight[i], &wrong);
		}
		kvx_worker_end(wr.rank[0].worker);
		layers_hear_all(&wr);
		wr_device_sync();
		assert_int_equal(wrong, 0);
		kvc_release(&lease, 1);
	}
	assert_int_equal(layers_stats(&wr).loads_early, ROUNDS);
	print_message("%u of %u saves were made\n", (key - 8) / 4, ROUNDS);
	assert_int_equal(cuda->stream_destroy(second), 0);
	layers_finish(&rig, &wr);
}

/* ---- verdicts ---------------------------------------------------------------------------------------------------------------- */

static void p1_a_bad_block_begun_early_is_named_by_its_step(void **state)
{
	uint32_t ids[WR_BLOCKS];
	const void *data;
	kvc_lease_t *lease;
	kvc_put_t *put;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	lease = wr_lease(&wr, 0, 8);
	put = wr_put(&wr, 8, 12);
	assert_int_equal(kvc_lease_block(lease, 5, &data, NULL), KVC_OK);
	((uint8_t *)(uintptr_t)data)[3 * WR_PAGE + 17000] ^= 1;
	plan_load(&wr, lease);
	wr_plan_save(&wr, put, 0, layers_eight, 4);
	assert_int_equal(early(&wr, ALL), 1);
	usleep(20000);
	begin(&wr);
	kvx_worker_load(wr.rank[0].worker);
	kvx_worker_end(wr.rank[0].worker);
	assert_int_equal(kvx_worker_errors(wr.rank[0].worker, ids, WR_BLOCKS), 1);
	assert_int_equal(ids[0], layers_other[5]);
	assert_int_equal(wr_put_wait(&wr, put), KVC_ERR_REVOKED);
	layers_hear_all(&wr);
	assert_int_equal(layers_stats(&wr).load_corrupt, 1);
	assert_int_equal(layers_stats(&wr).load_blocks, 7);
	kvc_release(&lease, 1);
	rig_check_quiet(&rig);
	layers_finish(&rig, &wr);
}

/* The lease has six of the blocks: what is there goes early, the others have failed when the step has asked. */
static void p4_what_is_not_there_is_left_to_the_step(void **state)
{
	uint32_t wrong = 0, ids[WR_BLOCKS];
	kvc_lease_t *lease;
	uint64_t before;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	wr.layer_wait_us = 2000;
	kvx_worker_close(wr.rank[0].worker);
	wr_open_rank(&wr, 0, 1);
	empty_step(&wr);
	lease = wr_lease(&wr, 0, 6);
	before = layers_stats(&wr).gpu_bytes;
	plan_load(&wr, lease);
	assert_int_equal(early(&wr, ALL), 1);
	begin(&wr);
	assert_int_equal(kvx_worker_load_layers(wr.rank[0].worker), 0);
	for (uint32_t i = 0; i < 6; i++) {
		wr_look_block(&wr.rank[0], layers_other[i], 1, layers_eight[i], &wrong);
	}
	kvx_worker_end(wr.rank[0].worker);
	assert_int_equal(kvx_worker_errors(wr.rank[0].worker, ids, WR_BLOCKS), 2);
	layers_hear_all(&wr);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	assert_int_equal(layers_stats(&wr).gpu_bytes - before, 6u * WR_LAYERS * WR_PAGE);
	kvc_release(&lease, 1);
	layers_finish(&rig, &wr);
}

/* Killed between the plan and the step: what no error names was there when the step read it, and nothing computed from the rest is stored. */
static void p7_a_daemon_that_dies_after_a_plan_costs_its_loads(void **state)
{
	uint32_t wrong[8], ids[WR_BLOCKS], count, losses = 0;
	kvc_lease_t *lease;
	rig_t rig;
	wr_t wr;

	(void)state;
	for (uint32_t round = 0; round < 4; round++) {
		layers_start(&rig, &wr, 1);
		lease = wr_lease(&wr, 0, 8);
		fake_cuda_hold(round % 2 != 0);
		plan_load(&wr, lease);
		assert_int_equal(early(&wr, ALL), 1);
		rig_kill(&rig);
		usleep(round < 2 ? 0 : 100000);
		begin(&wr);
		kvx_worker_load(wr.rank[0].worker);
		for (uint32_t i = 0; i < 8; i++) {
			wrong[i] = 0;
			wr_look_block(&wr.rank[0], layers_other[i], 1, layers_eight[i], &wrong[i]);
		}
		kvx_worker_end(wr.rank[0].worker);
		fake_cuda_hold(0);
		count = kvx_worker_errors(wr.rank[0].worker, ids, WR_BLOCKS);
		wr_device_sync();
		for (uint32_t i = 0; i < 8; i++) {
			int failed = 0;

			for (uint32_t e = 0; e < count; e++) {
				failed = failed || ids[e] == layers_other[i];
			}
			assert_true(failed || wrong[i] == 0);
		}
		losses += count > 0;
		layers_hear_all(&wr);
		kvc_release(&lease, 1);
		layers_finish(&rig, &wr);
	}
	print_message("%u of 4 loads were lost\n", losses);
}

/* Any call of the driver refused, from the plan to the end of the step. */
static void p1_a_call_the_driver_refuses_costs_a_load_begun_early_and_no_wrong_byte(void **state)
{
	uint32_t refused = 0, lost = 0;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	for (uint32_t nth = 1; nth <= 60; nth++) {
		uint32_t ids[WR_BLOCKS], wrong[8] = {0}, count;
		kvc_lease_t *lease = wr_lease(&wr, 0, 8);
		int begun;

		plan_load(&wr, lease);
		wr_device_sync();
		fake_cuda_fail_nth(nth);
		begun = early(&wr, ALL);
		begin(&wr);
		if (nth % 2) {
			(void)kvx_worker_load_layers(wr.rank[0].worker);
		} else {
			kvx_worker_load(wr.rank[0].worker);
		}
		for (uint32_t l = 0; l < WR_LAYERS; l++) {
			kvx_worker_layer(wr.rank[0].worker, l);
			for (uint32_t i = 0; i < 8; i++) {
				wr_look_layer(&wr.rank[0], layers_other[i], l, layers_eight[i], &wrong[i]);
			}
		}
		kvx_worker_end(wr.rank[0].worker);
		count = kvx_worker_errors(wr.rank[0].worker, ids, WR_BLOCKS);
		refused += (uint32_t)fake_cuda_failed();
		fake_cuda_fail_nth(0);
		assert_int_equal(begun, 1);
		empty_step(&wr);
		wr_device_sync();
		for (uint32_t i = 0; i < 8; i++) {
			int failed = 0;

			for (uint32_t e = 0; e < count; e++) {
				failed = failed || ids[e] == layers_other[i];
			}
			assert_true(failed || wrong[i] == 0);
		}
		lost += count > 0;
		layers_hear_all(&wr);
		kvc_release(&lease, 1);
	}
	print_message("%u of 60 calls refused, %u loads lost\n", refused, lost);
	assert_true(refused > 20);
	layers_finish(&rig, &wr);
}

/* ---- when it is not done ----------------------------------------------------------------------------------------------------- */

/* All hooks of a step but those left out. */
static void part_of_step(wr_t *wr, int end, int errors, int report)
{
	uint32_t ids[WR_BLOCKS];

	wr_plan(wr);
	wr_begin(wr);
	if (end) {
		kvx_worker_end(wr->rank[0].worker);
	}
	if (errors) {
		(void)kvx_worker_errors(wr->rank[0].worker, ids, WR_BLOCKS);
	}
	if (report) {
		kvx_worker_report(wr->rank[0].worker, &(const void *){NULL}, &(size_t){0});
	}
}

static void p4_a_step_that_is_not_over_is_not_overtaken(void **state)
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
			plan_load(&wr, lease);
			assert_int_equal(early(&wr, computed ? ALL : KVX_EARLY_LAYERS),
					 errors && report && (end || !computed));
			kvx_worker_begin(wr.rank[0].worker, NULL, 0);
			layers_hear_all(&wr);
		}
	}
	kvc_release(&lease, 1);
	lease = wr_lease(&wr, 0, 8);
	part_of_step(&wr, 1, 1, 1);
	plan_load(&wr, lease);
	wr_begin(&wr);
	kvx_worker_load(wr.rank[0].worker);
	assert_int_equal(early(&wr, ALL), 0);
	kvx_worker_report(wr.rank[0].worker, &(const void *){NULL}, &(size_t){0});
	assert_int_equal(early(&wr, KVX_EARLY_LAYERS), 0);
	kvx_worker_end(wr.rank[0].worker);
	layers_hear_all(&wr);
	kvc_release(&lease, 1);
	layers_finish(&rig, &wr);
}

static void only_plans_with_loads_of_their_step_are_begun_early(void **state)
{
	const uint64_t nonsense[4] = {1, 2, 3, 4};
	kvc_lease_t *lease;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	lease = wr_lease(&wr, 0, 8);
	wr_plan(&wr);
	wr_plan_fence(&wr, layers_other, 8);
	assert_int_equal(early(&wr, ALL), 0);
	wr_plan(&wr);
	wr_plan_load(&wr, lease, KVX_PLAN_ASYNC, 7, layers_other, 8);
	assert_int_equal(early(&wr, ALL), 0);
	wr_plan(&wr);
	wr_plan_load(&wr, NULL, 0, 7, layers_other, 8);
	assert_int_equal(early(&wr, ALL), 0);
	plan_load(&wr, lease);
	(void)kvx_bytes_record(&wr.plan, KVX_RECORD_TIME, sizeof(kvx_plan_time_t));
	assert_int_equal(early(&wr, ALL), 0);
	assert_int_equal(kvx_worker_early(wr.rank[0].worker, nonsense, sizeof nonsense, ALL), 0);
	assert_int_equal(kvx_worker_early(wr.rank[0].worker, NULL, 0, ALL), 0);
	plan_load(&wr, lease);
	kvx_bytes_finish(&wr.plan, wr.step);
	assert_int_equal(kvx_worker_early(wr.rank[0].worker, wr.plan.data, wr.plan.len - 8, ALL), 0);
	assert_int_equal(layers_stats(&wr).loads, 0);
	assert_int_equal(layers_stats(&wr).bad_plans, 0);
	kvc_release(&lease, 1);
	layers_finish(&rig, &wr);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p4_a_load_is_on_its_way_before_the_engine_begins_its_step),
		cmocka_unit_test(p4_so_it_is_where_the_step_waits_for_all_of_it),
		cmocka_unit_test(p5_a_plan_does_not_wait_for_the_device),
		cmocka_unit_test(p1_what_is_still_to_be_saved_is_read_before_a_load_begun_early),
		cmocka_unit_test(p1_blocks_of_a_step_that_never_comes_are_written_by_nobody),
		cmocka_unit_test(p1_a_worker_that_closes_ends_what_it_has_begun_early),
		cmocka_unit_test(p1_late_hooks_of_the_step_before_do_not_touch_it),
		cmocka_unit_test(p1_a_step_that_never_asks_for_its_loads_has_lost_them),
		cmocka_unit_test(p1_the_engine_may_change_its_stream),
		cmocka_unit_test(p1_a_bad_block_begun_early_is_named_by_its_step),
		cmocka_unit_test(p4_what_is_not_there_is_left_to_the_step),
		cmocka_unit_test(p7_a_daemon_that_dies_after_a_plan_costs_its_loads),
		cmocka_unit_test(p1_a_call_the_driver_refuses_costs_a_load_begun_early_and_no_wrong_byte),
		cmocka_unit_test(p4_a_step_that_is_not_over_is_not_overtaken),
		cmocka_unit_test(only_plans_with_loads_of_their_step_are_begun_early),
	};

	if (argc < 2) {
		fprintf(stderr, "usage: %s KVD\n", argv[0]);
		return 64;
	}
	layers_program = argv[1];

	return cmocka_run_group_tests_name("kvx.worker-early", tests, NULL, NULL);
}
