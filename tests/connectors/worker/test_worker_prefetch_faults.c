/* Loads that begin when their step is planned, where something goes wrong: the engine changes its stream, blocks are
 * bad or late, the daemon dies, the driver refuses. */
#include "connectors/worker/layers_rig.h"
#include "connectors/worker/wr_device.h"
#include "engine/check.h"
#include "kernels/fake_cuda.h"

#include <stdio.h>
#include <unistd.h>

#define ROUNDS 12u
#define ALL    (KVX_PREFETCH_COMPUTED | KVX_PREFETCH_LAYERS)

/* What came before the step on the stream it was planned on comes before it on the one it is computed on, also where
 * the driver refuses the n-th call of the plan. Whether the save was made. */
static int change_stream(wr_t *wr, kvk_cu_stream_t second, uint32_t key, uint64_t nth)
{
	kvx_worker_t *worker = wr->rank[0].worker;
	kvc_put_t *put = wr_put(wr, key, key + 4);
	uint32_t ids[WR_BLOCKS];
	kvc_lease_t *lease;
	kvc_status_t status;

	fake_cuda_hold(1);
	layers_be_late();
	wr_plan(wr);
	wr_plan_save(wr, put, 0, wr_eight, 4);
	wr_begin(wr);
	kvx_worker_end_step(worker);
	(void)kvx_worker_take_failed_blocks(worker, ids, WR_BLOCKS);
	kvx_worker_take_report(worker, &(const void *){NULL}, &(size_t){0});
	lease = wr_lease(wr, 0, 8);
	wr_plan(wr);
	wr_plan_fence(wr, wr_eight, 4);
	wr_plan_load(wr, lease, 0, 7, wr_other, 8);
	usleep(2000); /* for the save to be on the device */
	fake_cuda_fail_nth(nth);
	assert_int_equal(layers_early(wr, ALL), 1);
	fake_cuda_fail_nth(0);
	kvx_worker_set_stream(worker, second);
	wr_device_swap(second);
	layers_go_on(wr);
	kvx_worker_run_sync_loads(worker);
	for (uint32_t i = 0; i < 4; i++) {
		wr_fill_block(&wr->rank[0], wr_eight[i], 9, i);
	}
	kvx_worker_end_step(worker);
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
			wr_fill_block(&wr.rank[0], wr_eight[i], 1, wr_eight[i]);
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
		wr_plan_load(&wr, lease, 0, 8, wr_other, 4);
		wr_begin(&wr);
		kvx_worker_run_sync_loads(wr.rank[0].worker);
		for (uint32_t i = 0; i < 4; i++) {
			wr_look_block(&wr.rank[0], wr_other[i], 1, wr_eight[i], &wrong);
		}
		kvx_worker_end_step(wr.rank[0].worker);
		layers_hear_all(&wr);
		wr_device_sync();
		assert_int_equal(wrong, 0);
		kvc_release(&lease, 1);
	}
	assert_int_equal(layers_stats(&wr).loads_prefetched, ROUNDS);
	print_message("%u of %u saves were made\n", (key - 8) / 4, ROUNDS);
	assert_int_equal(cuda->stream_destroy(second), 0);
	layers_finish(&rig, &wr);
}

/* ---- verdicts -------------------------------------------------------------------------------- */

static void p1_a_bad_prefetched_block_is_named_by_its_step(void **state)
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
	layers_plan(&wr, lease);
	wr_plan_save(&wr, put, 0, wr_eight, 4);
	assert_int_equal(layers_early(&wr, ALL), 1);
	usleep(20000);
	layers_go_on(&wr);
	kvx_worker_run_sync_loads(wr.rank[0].worker);
	kvx_worker_end_step(wr.rank[0].worker);
	assert_int_equal(kvx_worker_take_failed_blocks(wr.rank[0].worker, ids, WR_BLOCKS), 1);
	assert_int_equal(ids[0], wr_other[5]);
	assert_int_equal(wr_put_wait(&wr, put), KVC_ERR_REVOKED);
	layers_hear_all(&wr);
	assert_int_equal(layers_stats(&wr).load_corrupt, 1);
	assert_int_equal(layers_stats(&wr).load_blocks, 7);
	kvc_release(&lease, 1);
	rig_check_quiet(&rig);
	layers_finish(&rig, &wr);
}

/* The lease has six of the blocks: what is there goes early, the others have failed when the step has asked. */
static void p7_blocks_not_ready_are_left_to_the_step(void **state)
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
	layers_idle_step(&wr);
	lease = wr_lease(&wr, 0, 6);
	before = layers_stats(&wr).gpu_bytes;
	layers_plan(&wr, lease);
	assert_int_equal(layers_early(&wr, ALL), 1);
	layers_go_on(&wr);
	assert_int_equal(kvx_worker_run_layered_loads(wr.rank[0].worker), 0);
	for (uint32_t i = 0; i < 6; i++) {
		wr_look_block(&wr.rank[0], wr_other[i], 1, wr_eight[i], &wrong);
	}
	kvx_worker_end_step(wr.rank[0].worker);
	assert_int_equal(kvx_worker_take_failed_blocks(wr.rank[0].worker, ids, WR_BLOCKS), 2);
	layers_hear_all(&wr);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	assert_int_equal(layers_stats(&wr).gpu_bytes - before, 6u * WR_LAYERS * WR_PAGE);
	kvc_release(&lease, 1);
	layers_finish(&rig, &wr);
}

/* Killed between the plan and the step: what no error names was there when the step read it, and nothing computed from
 * the rest is stored. */
static void p7_a_daemon_that_dies_after_a_message_costs_its_loads(void **state)
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
		layers_plan(&wr, lease);
		assert_int_equal(layers_early(&wr, ALL), 1);
		rig_kill(&rig);
		usleep(round < 2 ? 0 : 100000);
		layers_go_on(&wr);
		kvx_worker_run_sync_loads(wr.rank[0].worker);
		for (uint32_t i = 0; i < 8; i++) {
			wrong[i] = 0;
			wr_look_block(&wr.rank[0], wr_other[i], 1, wr_eight[i], &wrong[i]);
		}
		kvx_worker_end_step(wr.rank[0].worker);
		fake_cuda_hold(0);
		count = kvx_worker_take_failed_blocks(wr.rank[0].worker, ids, WR_BLOCKS);
		wr_device_sync();
		for (uint32_t i = 0; i < 8; i++) {
			int failed = 0;

			for (uint32_t e = 0; e < count; e++) {
				failed = failed || ids[e] == wr_other[i];
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
static void p1_a_refused_driver_call_costs_a_prefetched_load_and_no_byte(void **state)
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

		layers_plan(&wr, lease);
		wr_device_sync();
		fake_cuda_fail_nth(nth);
		begun = layers_early(&wr, ALL);
		layers_go_on(&wr);
		if (nth % 2) {
			(void)kvx_worker_run_layered_loads(wr.rank[0].worker);
		} else {
			kvx_worker_run_sync_loads(wr.rank[0].worker);
		}
		for (uint32_t l = 0; l < WR_LAYERS; l++) {
			kvx_worker_await_layer(wr.rank[0].worker, l);
			for (uint32_t i = 0; i < 8; i++) {
				wr_look_layer(&wr.rank[0], wr_other[i], l, wr_eight[i], &wrong[i]);
			}
		}
		kvx_worker_end_step(wr.rank[0].worker);
		count = kvx_worker_take_failed_blocks(wr.rank[0].worker, ids, WR_BLOCKS);
		refused += (uint32_t)fake_cuda_failed();
		fake_cuda_fail_nth(0);
		assert_int_equal(begun, 1);
		layers_idle_step(&wr);
		wr_device_sync();
		for (uint32_t i = 0; i < 8; i++) {
			int failed = 0;

			for (uint32_t e = 0; e < count; e++) {
				failed = failed || ids[e] == wr_other[i];
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

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p1_the_engine_may_change_its_stream),
		cmocka_unit_test(p1_a_bad_prefetched_block_is_named_by_its_step),
		cmocka_unit_test(p7_blocks_not_ready_are_left_to_the_step),
		cmocka_unit_test(p7_a_daemon_that_dies_after_a_message_costs_its_loads),
		cmocka_unit_test(p1_a_refused_driver_call_costs_a_prefetched_load_and_no_byte),
	};

	if (argc < 2) {
		fprintf(stderr, "usage: %s KVD\n", argv[0]);
		return 64;
	}
	layers_program = argv[1];

	return cmocka_run_group_tests_name("kvx.worker-prefetch-faults", tests, NULL, NULL);
}
