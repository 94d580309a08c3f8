/* Loads that come layer by layer: what the engine enqueues for a layer it has named finds that layer, whatever order
 * the device takes its streams in; what it enqueues for one it has not named may not, and then nothing that was
 * computed from it counts. */
#include "connectors/worker/layers_rig.h"
#include "connectors/worker/wr_device.h"
#include "engine/check.h"
#include "kernels/fake_cuda.h"

#include <stdio.h>
#include <unistd.h>

#define QUICK_MS 1000u
#define ROUNDS   12u

/* ---- order ----------------------------------------------------------------------------------- */

static void check_order(uint32_t ranks)
{
	uint32_t wrong = 0;
	kvc_lease_t *lease;
	wr_end_t end;
	rig_t rig;
	wr_t wr;

	layers_start(&rig, &wr, ranks);
	for (uint32_t round = 0; round < ROUNDS; round++) {
		lease = wr_lease(&wr, 0, 8);
		fake_cuda_hold(round % 2 != 0);
		assert_int_equal(layers_begin(&wr, lease), ranks);
		for (uint32_t r = 0; r < ranks; r++) {
			layers_compute(&wr.rank[r], &wrong);
			kvx_worker_end_step(wr.rank[r].worker);
		}
		for (uint32_t i = 0; i < 8; i++) { /* the next step's */
			wr_look_block(&wr.rank[0], wr_other[i], 1, wr_eight[i], &wrong);
		}
		fake_cuda_hold(0);
		for (uint32_t r = 0; r < ranks; r++) {
			wr_wait_load(&wr.rank[r], 7, 0, &end);
			assert_int_equal(end.loaded.status, KVC_OK);
			assert_int_equal(end.loaded.blocks, 8);
			assert_int_equal(end.loaded.bytes, 8u * wr.rank[r].layers * WR_PAGE);
			assert_int_equal(end.error_count, 0);
		}
		wr_device_sync();
		assert_int_equal(wrong, 0);
		kvc_release(&lease, 1);
	}
	assert_int_equal(layers_stats(&wr).layered, ROUNDS);
	assert_int_equal(layers_stats(&wr).layers_skipped, 0);
	assert_int_equal(layers_stats(&wr).load_blocks, ROUNDS * 8u);
	rig_check_quiet(&rig);
	layers_finish(&rig, &wr);
}

static void p1_a_layer_that_was_named_is_there(void **state)
{
	(void)state;
	check_order(1);
}

/* Each has some of the block's layers. */
static void p1_loads_are_right_on_each_of_several_ranks(void **state)
{
	(void)state;
	check_order(2);
}

/* The last one first: then everything comes before it. */
static void p1_layers_may_be_named_in_any_order(void **state)
{
	static const uint32_t order[2 * WR_LAYERS + 1] = {4, 0, 5, 5, 1, 3, 2, 0, 99, 1, 2, 3, 4};
	uint32_t wrong = 0;
	kvc_lease_t *lease;
	wr_end_t end;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	for (uint32_t round = 0; round < ROUNDS; round++) {
		lease = wr_lease(&wr, 0, 8);
		assert_int_equal(layers_begin(&wr, lease), 1);
		for (uint32_t i = round % 7; i < round % 7 + 7; i++) {
			kvx_worker_await_layer(wr.rank[0].worker, order[i]);
			layers_look(&wr.rank[0], order[i] < WR_LAYERS ? order[i] : 3, &wrong);
		}
		for (uint32_t l = 0; l < WR_LAYERS; l++) {
			kvx_worker_await_layer(wr.rank[0].worker, l);
		}
		kvx_worker_end_step(wr.rank[0].worker);
		wr_wait_load(&wr.rank[0], 7, 0, &end);
		assert_int_equal(end.loaded.status, KVC_OK);
		wr_device_sync();
		assert_int_equal(wrong, 0);
		kvc_release(&lease, 1);
	}
	layers_finish(&rig, &wr);
}

static void p5_a_step_does_not_wait_for_its_layers(void **state)
{
	kvc_lease_t *lease;
	uint32_t wrong = 0;
	uint64_t begin;
	wr_end_t end;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	lease = wr_lease(&wr, 0, 8);
	wr.timeout_ms = 20000;
	fake_cuda_hold(1);
	begin = wr_now_ms();
	assert_int_equal(layers_begin(&wr, lease), 1);
	layers_compute(&wr.rank[0], &wrong);
	kvx_worker_end_step(wr.rank[0].worker);
	assert_true(wr_now_ms() - begin < QUICK_MS);
	fake_cuda_hold(0);
	wr_wait_load(&wr.rank[0], 7, 0, &end);
	assert_int_equal(end.loaded.status, KVC_OK);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	kvc_release(&lease, 1);
	layers_finish(&rig, &wr);
}

/* ---- engines that do not do as they said ----------------------------------------------------- */

/* What the tests above would find: a layer read before its range has come, though the one before it was waited for. */
static void control_a_layer_read_too_early_is_wrong(void **state)
{
	uint32_t wrong = 0, fine = 0;
	kvc_lease_t *lease;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	for (uint32_t round = 0; round < 4 * ROUNDS; round++) {
		lease = wr_lease(&wr, 0, 8);
		fake_cuda_hold(1);
		assert_int_equal(layers_begin(&wr, lease), 1);
		kvx_worker_await_layer(wr.rank[0].worker, 0);
		layers_look(&wr.rank[0], 0, &fine);
		layers_look(&wr.rank[0], WR_LAYERS - 1, &wrong);
		for (uint32_t l = 0; l < WR_LAYERS; l++) {
			kvx_worker_await_layer(wr.rank[0].worker, l);
		}
		kvx_worker_end_step(wr.rank[0].worker);
		fake_cuda_hold(0);
		layers_hear_all(&wr);
		wr_device_sync();
		kvc_release(&lease, 1);
	}
	print_message("%u of %u blocks were wrong\n", wrong, 4 * ROUNDS * 8);
	assert_int_equal(fine, 0);
	assert_true(wrong > 0);
	layers_finish(&rig, &wr);
}

/* All but one layer named; or none at all, as under a graph of the whole step. */
static void check_skip(uint32_t named, int end_it)
{
	uint32_t wrong = 0, ids[WR_BLOCKS];
	kvc_lease_t *lease;
	kvc_put_t *put;
	rig_t rig;
	wr_t wr;

	layers_start(&rig, &wr, 1);
	lease = wr_lease(&wr, 0, 8);
	put = wr_put(&wr, 8, 12);
	fake_cuda_hold(1);
	wr_plan(&wr);
	wr_plan_load(&wr, lease, 0, 7, wr_other, 8);
	wr_plan_save(&wr, put, 0, wr_eight, 4);
	wr_begin(&wr);
	assert_int_equal(kvx_worker_run_layered_loads(wr.rank[0].worker), 1);
	for (uint32_t l = 0; l < named; l++) {
		kvx_worker_await_layer(wr.rank[0].worker, l);
	}
	if (end_it) {
		kvx_worker_end_step(wr.rank[0].worker);
		for (uint32_t i = 0; i < 8; i++) { /* they do come, and before what follows the step */
			wr_look_block(&wr.rank[0], wr_other[i], 1, wr_eight[i], &wrong);
		}
	}
	fake_cuda_hold(0);
	assert_int_equal(kvx_worker_take_failed_blocks(wr.rank[0].worker, ids, WR_BLOCKS), 8);
	if (!end_it) {
		wr_plan(&wr);
		wr_begin(&wr);
	}
	assert_int_equal(wr_put_wait(&wr, put), KVC_ERR_REVOKED);
	layers_hear_all(&wr);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	assert_int_equal(layers_stats(&wr).layers_skipped, 1);
	assert_int_equal(layers_stats(&wr).loads_failed, 1);
	assert_int_equal(layers_stats(&wr).load_lost, 0);

	assert_int_equal(layers_begin(&wr, lease), 0); /* whole from now on */
	for (uint32_t l = 0; l < WR_LAYERS; l++) {
		layers_look(&wr.rank[0], l, &wrong);
	}
	kvx_worker_end_step(wr.rank[0].worker);
	assert_int_equal(kvx_worker_take_failed_blocks(wr.rank[0].worker, ids, WR_BLOCKS), 0);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	layers_hear_all(&wr);
	kvc_release(&lease, 1);
	layers_finish(&rig, &wr);
}

static void p1_blocks_computed_without_awaiting_a_layer_are_dropped(void **state)
{
	(void)state;
	check_skip(0, 1);
	check_skip(WR_LAYERS - 1, 1);
}

static void p1_a_prefetch_does_not_overtake_a_step_without_an_end(void **state)
{
	(void)state;
	check_skip(2, 0);
}

/* ---- verdicts -------------------------------------------------------------------------------- */

/* In a range in the middle: the block is bad, the others are not. */
static void p1_a_block_with_a_bad_layer_is_bad(void **state)
{
	uint32_t wrong = 0, ids[WR_BLOCKS];
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
	fake_cuda_hold(1);
	wr_plan(&wr);
	wr_plan_load(&wr, lease, 0, 7, wr_other, 8);
	wr_plan_save(&wr, put, 0, wr_eight, 4);
	wr_begin(&wr);
	assert_int_equal(kvx_worker_run_layered_loads(wr.rank[0].worker), 1);
	layers_compute(&wr.rank[0], &wrong);
	kvx_worker_end_step(wr.rank[0].worker);
	usleep(20000);
	assert_int_equal(layers_stats(&wr).saves_open, 0);
	fake_cuda_hold(0);
	assert_int_equal(kvx_worker_take_failed_blocks(wr.rank[0].worker, ids, WR_BLOCKS), 1);
	assert_int_equal(ids[0], wr_other[5]);
	wr_device_sync();
	assert_int_equal(wrong, 1);
	assert_int_equal(wr_put_wait(&wr, put), KVC_ERR_REVOKED);
	layers_hear_all(&wr);
	assert_int_equal(layers_stats(&wr).load_corrupt, 1);
	assert_int_equal(layers_stats(&wr).load_blocks, 7);
	kvc_release(&lease, 1);
	rig_check_quiet(&rig);
	layers_finish(&rig, &wr);
}

static void p1_a_lease_lost_between_layers_is_a_failed_load(void **state)
{
	uint32_t wrong = 0;
	kvc_lease_t *lease;
	wr_end_t end;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	lease = wr_lease(&wr, 0, 8);
	fake_cuda_hold(1);
	assert_int_equal(layers_begin(&wr, lease), 1);
	layers_compute(&wr.rank[0], &wrong);
	kvx_worker_end_step(wr.rank[0].worker);
	kvc_release(&lease, 1);
	(void)kvc_poll(wr.kvc, 50);
	usleep(50000);
	assert_int_equal(layers_stats(&wr).loads_open, 1);
	fake_cuda_hold(0);
	wr_wait_load(&wr.rank[0], 7, 0, &end);
	assert_int_equal(end.loaded.status, KVC_ERR_REVOKED);
	assert_int_equal(end.error_count, 8);
	rig_check_quiet(&rig);
	layers_finish(&rig, &wr);
}

static void p5_a_device_that_hangs_between_layers_costs_the_deadline(void **state)
{
	uint32_t wrong = 0, ids[WR_BLOCKS];
	kvc_lease_t *lease;
	uint64_t begin;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	lease = wr_lease(&wr, 0, 8);
	wr.timeout_ms = 100;
	fake_cuda_hold(1);
	begin = wr_now_ms();
	if (layers_begin(&wr, lease)) { /* else it was not there before its deadline */
		layers_compute(&wr.rank[0], &wrong);
	}
	kvx_worker_end_step(wr.rank[0].worker);
	assert_int_equal(kvx_worker_take_failed_blocks(wr.rank[0].worker, ids, WR_BLOCKS), 8);
	assert_true(wr_now_ms() - begin < 100 + QUICK_MS);
	fake_cuda_hold(0);
	layers_hear_all(&wr);
	assert_int_equal(layers_stats(&wr).load_timeouts, 1);
	kvc_release(&lease, 1);
	rig_check_quiet(&rig);
	layers_finish(&rig, &wr);
}

/* The request goes while its layers come; two requests in a step, with blocks that nobody wants. */
static void p4_loads_of_a_step_end_each_for_itself(void **state)
{
	static const uint32_t some[4] = {21, KVX_NO_BLOCK, 23, 40}, more[4] = {25, 50, KVX_NO_BLOCK, 63};
	static const uint32_t none[4] = {KVX_NO_BLOCK, KVX_NO_BLOCK, KVX_NO_BLOCK, KVX_NO_BLOCK};
	uint32_t wrong = 0, ids[WR_BLOCKS];
	kvc_lease_t *lease;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	lease = wr_lease(&wr, 0, 8);
	wr_plan(&wr);
	wr_plan_load(&wr, lease, 0, 7, some, 4);
	wr_plan_load(&wr, lease, 0, 8, more, 4);
	wr_plan_load(&wr, lease, 0, 9, none, 4);
	wr_begin(&wr);
	assert_int_equal(kvx_worker_run_layered_loads(wr.rank[0].worker), 1);
	for (uint32_t l = 0; l < WR_LAYERS; l++) {
		kvx_worker_await_layer(wr.rank[0].worker, l);
		for (uint32_t i = 0; i < 4; i++) {
			if (some[i] != KVX_NO_BLOCK) {
				wr_look_layer(&wr.rank[0], some[i], l, wr_eight[i], &wrong);
			}
			if (more[i] != KVX_NO_BLOCK) {
				wr_look_layer(&wr.rank[0], more[i], l, wr_eight[i], &wrong);
			}
		}
	}
	kvx_worker_end_step(wr.rank[0].worker);
	assert_int_equal(kvx_worker_take_failed_blocks(wr.rank[0].worker, ids, WR_BLOCKS), 0);
	layers_hear_all(&wr);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	assert_int_equal(layers_stats(&wr).layered, 3);
	assert_int_equal(layers_stats(&wr).load_blocks, 6);
	assert_int_equal(layers_stats(&wr).loads_failed, 0);

	fake_cuda_hold(1);
	assert_int_equal(layers_begin(&wr, lease), 1);
	layers_compute(&wr.rank[0], &wrong);
	kvx_worker_end_step(wr.rank[0].worker);
	fake_cuda_hold(0);
	wr_plan(&wr);
	wr_plan_drop(&wr, 7);
	wr_begin(&wr);
	layers_hear_all(&wr);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	kvc_release(&lease, 1);
	rig_check_quiet(&rig);
	layers_finish(&rig, &wr);
}

/* ---- some blocks whole, the others by layers ------------------------------------------------- */

static uint64_t jobs_of(const kvx_worker_stats_t *stats)
{
	return stats->gpu_zero_copy + stats->gpu_staged + stats->gpu_copy_per_piece;
}

/* A step that computes so long, and two loads in it, with blocks nobody wants. How many jobs that took. */
static uint64_t load_beside(wr_t *wr, const kvc_lease_t *lease, uint32_t us, uint32_t *p_wrong)
{
	static const uint32_t to[12] = {21, 22, 23, KVX_NO_BLOCK, 24, 26, 27, 28, 25, 50, KVX_NO_BLOCK, 63};
	const kvx_worker_stats_t before = layers_stats(wr);
	kvx_worker_stats_t after;
	kvx_msg_work_t *work;

	for (uint32_t i = 0; i < 12; i++) { /* a kernel of before */
		if (to[i] != KVX_NO_BLOCK) {
			wr_fill_block(&wr->rank[0], to[i], 5, i);
		}
	}
	wr_plan(wr);
	work = kvx_msg_add_record(&wr->plan, KVX_RECORD_WORK, sizeof *work);
	work->longest = 10;
	work->us = us;
	wr_plan_load(wr, lease, 0, 7, to, 8);
	wr_plan_load(wr, lease, 0, 8, to + 8, 4);
	wr_begin(wr);
	assert_int_equal(kvx_worker_run_layered_loads(wr->rank[0].worker), 1);
	for (uint32_t l = 0; l < WR_LAYERS; l++) {
		kvx_worker_await_layer(wr->rank[0].worker, l);
		for (uint32_t i = 0; i < 12; i++) {
			if (to[i] != KVX_NO_BLOCK) {
				wr_look_layer(&wr->rank[0], to[i], l, wr_eight[i % 8], p_wrong);
			}
		}
	}
	kvx_worker_end_step(wr->rank[0].worker);
	fake_cuda_hold(0);
	layers_hear_all(wr);
	wr_device_sync();
	after = layers_stats(wr);
	assert_int_equal(after.load_blocks - before.load_blocks, 10);
	assert_int_equal(after.load_bytes - before.load_bytes, 10u * WR_LAYERS * WR_PAGE);
	assert_int_equal(after.loads_failed + after.layers_skipped, 0);

	return jobs_of(&after) - jobs_of(&before);
}

/* However long the step computes, which says how many blocks come by layers: all, some, hardly any. */
static void p1_a_layer_of_whole_blocks_is_ready_too(void **state)
{
	uint64_t all_by_layers, jobs, more = 0;
	uint32_t wrong = 0;
	kvc_lease_t *lease;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	fake_cuda_costs(1, 1); /* so that loads take the device some time */
	lease = wr_lease(&wr, 0, 8);
	all_by_layers = load_beside(&wr, lease, 0, &wrong); /* not known */
	assert_int_equal(load_beside(&wr, lease, UINT32_MAX, &wrong), all_by_layers);
	for (uint32_t us = 1; us < 1u << 20; us *= 6) {
		fake_cuda_hold(us % 5 < 3);
		jobs = load_beside(&wr, lease, us, &wrong);
		more += jobs != all_by_layers;
		assert_in_range(jobs, 2, all_by_layers + 2);
	}
	assert_int_equal(wrong, 0);
	assert_true(more > 0);
	kvc_release(&lease, 1);
	rig_check_quiet(&rig);
	layers_finish(&rig, &wr);
}

/* ---- what comes whole ------------------------------------------------------------------------ */

/* The lease covers n blocks of wr_eight: the others will never be there. */
static void check_whole(wr_t *wr, uint32_t covered)
{
	kvc_lease_t *lease = wr_lease(wr, 0, covered);
	uint32_t wrong = 0, ids[WR_BLOCKS];

	assert_int_equal(layers_begin(wr, lease), 0);
	for (uint32_t l = 0; l < WR_LAYERS && covered == 8; l++) {
		layers_look(&wr->rank[0], l, &wrong);
	}
	kvx_worker_await_layer(wr->rank[0].worker, 2);
	kvx_worker_end_step(wr->rank[0].worker);
	assert_int_equal(kvx_worker_take_failed_blocks(wr->rank[0].worker, ids, WR_BLOCKS), 8 - covered);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	layers_hear_all(wr);
	assert_int_equal(layers_stats(wr).layered + layers_stats(wr).layers_skipped, 0);
	kvc_release(&lease, 1);
}

static void short_loads_and_slow_ones_come_whole(void **state)
{
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	wr.layer_wait_us = 2000;
	kvx_worker_close(wr.rank[0].worker);
	wr_open_rank(&wr, 0, 1);
	check_whole(&wr, 6);
	wr.layer_bytes = 8u * WR_LAYERS * WR_PAGE + 1;
	kvx_worker_close(wr.rank[0].worker);
	wr_open_rank(&wr, 0, 1);
	check_whole(&wr, 8);
	wr.layer_bytes = 0;
	kvx_worker_close(wr.rank[0].worker);
	wr_open_rank(&wr, 0, 1);
	check_whole(&wr, 8);
	layers_finish(&rig, &wr);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p1_a_layer_that_was_named_is_there),
		cmocka_unit_test(p1_loads_are_right_on_each_of_several_ranks),
		cmocka_unit_test(p1_layers_may_be_named_in_any_order),
		cmocka_unit_test(p5_a_step_does_not_wait_for_its_layers),
		cmocka_unit_test(control_a_layer_read_too_early_is_wrong),
		cmocka_unit_test(p1_blocks_computed_without_awaiting_a_layer_are_dropped),
		cmocka_unit_test(p1_a_prefetch_does_not_overtake_a_step_without_an_end),
		cmocka_unit_test(p1_a_block_with_a_bad_layer_is_bad),
		cmocka_unit_test(p1_a_lease_lost_between_layers_is_a_failed_load),
		cmocka_unit_test(p5_a_device_that_hangs_between_layers_costs_the_deadline),
		cmocka_unit_test(p4_loads_of_a_step_end_each_for_itself),
		cmocka_unit_test(p1_a_layer_of_whole_blocks_is_ready_too),
		cmocka_unit_test(short_loads_and_slow_ones_come_whole),
	};

	if (argc < 2) {
		fprintf(stderr, "usage: %s KVD\n", argv[0]);
		return 64;
	}
	layers_program = argv[1];

	return cmocka_run_group_tests_name("kvx.worker-layers", tests, NULL, NULL);
}
