/* Loads that begin when their step is planned, where something goes wrong: the engine changes its stream, blocks are
 * bad or late, the daemon dies, the driver refuses. */
#include "connectors/worker/wr.h"
#include "connectors/worker/wr_device.h"
#include "kernels/fake_cuda.h"

#include <stdio.h>
#include <unistd.h>

#define ROUNDS 12u

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
	wr_be_late();
	wr_message(wr);
	wr_add_save(wr, put, 0, wr_eight, 4);
	wr_begin(wr);
	kvx_worker_end_step(worker);
	(void)kvx_worker_take_failed_blocks(worker, ids, WR_BLOCKS);
	kvx_worker_take_report(worker, &(const void *){NULL}, &(size_t){0});
	lease = wr_lease(wr, 0, 8);
	wr_message(wr);
	wr_add_fence(wr, wr_eight, 4);
	wr_add_load(wr, lease, 0, 7, wr_other, 8);
	usleep(2000); /* for the save to be on the device */
	fake_cuda_fail_nth(nth);
	assert_int_equal(wr_prefetch(wr, WR_PREFETCH), 1);
	fake_cuda_fail_nth(0);
	kvx_worker_set_stream(worker, second);
	wr_device_swap(second);
	wr_begin_prefetched(wr);
	kvx_worker_run_sync_loads(worker);
	for (uint32_t i = 0; i < 4; i++) {
		wr_fill_block(&wr->rank[0], wr_eight[i], 9, i);
	}
	kvx_worker_end_step(worker);
	fake_cuda_hold(0);
	status = wr_put_wait(put);
	wr_drain(wr);
	kvc_release(&lease, 1);

	return status == KVC_OK;
}

static void p1_the_engine_may_change_its_stream(void **state)
{
	wr_t *wr = *state;
	const kvk_cuda_ops_t *cuda = fake_cuda_ops();
	kvk_cu_stream_t second = NULL;
	uint32_t wrong = 0, key = 8;
	kvc_lease_t *lease;

	assert_int_equal(cuda->stream_create(&second, 1, 0), 0);
	for (uint64_t nth = 0; nth < ROUNDS; nth++) {
		const int saved = change_stream(wr, second, key, nth);

		for (uint32_t i = 0; i < 4; i++) {
			wr_fill_block(&wr->rank[0], wr_eight[i], 1, wr_eight[i]);
		}
		wr_device_sync();
		wr_device_swap(NULL);
		wr_device_stream(wr->rank[0].worker);
		if (!saved) {
			continue;
		}

		lease = wr_lease(wr, key, key + 4); /* what has been stored was read before it was written */
		key += 4;
		wr_message(wr);
		wr_add_load(wr, lease, 0, 8, wr_other, 4);
		wr_begin(wr);
		kvx_worker_run_sync_loads(wr->rank[0].worker);
		for (uint32_t i = 0; i < 4; i++) {
			wr_compare_block(&wr->rank[0], wr_other[i], 1, wr_eight[i], &wrong);
		}
		wr_end(wr);
		wr_drain(wr);
		wr_device_sync();
		assert_int_equal(wrong, 0);
		kvc_release(&lease, 1);
	}
	assert_int_equal(wr_stats(wr, 0).loads_prefetched, ROUNDS);
	print_message("%u of %u saves were made\n", (key - 8) / 4, ROUNDS);
	assert_int_equal(cuda->stream_destroy(second), 0);
}

/* ---- verdicts -------------------------------------------------------------------------------- */

static void p1_a_bad_prefetched_block_is_named_by_its_step(void **state)
{
	wr_t *wr = *state;
	uint32_t ids[WR_BLOCKS];
	const void *data;
	kvc_lease_t *lease = wr_lease(wr, 0, 8);
	kvc_put_t *put = wr_put(wr, 8, 12);

	assert_int_equal(kvc_lease_block(lease, 5, &data, NULL), KVC_OK);
	((uint8_t *)(uintptr_t)data)[3 * WR_PAGE + 17000] ^= 1;
	wr_message_late_load(wr, lease);
	wr_add_save(wr, put, 0, wr_eight, 4);
	assert_int_equal(wr_prefetch(wr, WR_PREFETCH), 1);
	usleep(20000);
	wr_begin_prefetched(wr);
	kvx_worker_run_sync_loads(wr->rank[0].worker);
	wr_end(wr);
	assert_int_equal(wr_take_failed(wr, ids), 1);
	assert_int_equal(ids[0], wr_other[5]);
	assert_int_equal(wr_put_wait(put), KVC_ERR_REVOKED);
	wr_drain(wr);
	assert_int_equal(wr_stats(wr, 0).load_corrupt, 1);
	assert_int_equal(wr_stats(wr, 0).load_blocks, 7);
	kvc_release(&lease, 1);
}

/* The lease has six of the blocks: what is there goes early, the others have failed when the step has asked. */
static void p7_blocks_not_ready_are_left_to_the_step(void **state)
{
	wr_t *wr = *state;
	uint32_t wrong = 0;
	kvc_lease_t *lease;
	uint64_t before;

	wr->layer_wait_us = 2000;
	kvx_worker_close(wr->rank[0].worker);
	wr_open_rank(wr, 0, 1);
	wr_idle_step(wr);
	lease = wr_lease(wr, 0, 6);
	before = wr_stats(wr, 0).gpu_bytes;
	wr_message_late_load(wr, lease);
	assert_int_equal(wr_prefetch(wr, WR_PREFETCH), 1);
	wr_begin_prefetched(wr);
	assert_int_equal(kvx_worker_run_layered_loads(wr->rank[0].worker), 0);
	for (uint32_t i = 0; i < 6; i++) {
		wr_compare_block(&wr->rank[0], wr_other[i], 1, wr_eight[i], &wrong);
	}
	wr_end(wr);
	assert_int_equal(wr_count_failed(wr), 2);
	wr_drain(wr);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	assert_int_equal(wr_stats(wr, 0).gpu_bytes - before, 6u * WR_LAYERS * WR_PAGE);
	kvc_release(&lease, 1);
}

/* Killed between the plan and the step: what no error names was there when the step read it, and nothing computed from
 * the rest is stored. */
static void p7_a_daemon_that_dies_after_a_message_costs_its_loads(void **state)
{
	uint32_t losses = 0;

	(void)state;
	for (uint32_t round = 0; round < 4; round++) {
		uint32_t wrong[8] = {0}, ids[WR_BLOCKS], count;
		void *opened = (void *)(uintptr_t)&wr_layered;
		kvc_lease_t *lease;
		wr_t *wr;

		assert_int_equal(wr_setup(&opened), 0);
		wr = opened;
		lease = wr_lease(wr, 0, 8);
		fake_cuda_hold(round % 2 != 0);
		wr_message_late_load(wr, lease);
		assert_int_equal(wr_prefetch(wr, WR_PREFETCH), 1);
		rig_kill(&wr->rig);
		usleep(round < 2 ? 0 : 100000);
		wr_begin_prefetched(wr);
		kvx_worker_run_sync_loads(wr->rank[0].worker);
		wr_compare_each(&wr->rank[0], wrong);
		wr_end(wr);
		fake_cuda_hold(0);
		count = wr_take_failed(wr, ids);
		wr_device_sync();
		wr_check_named(ids, count, wrong);
		losses += count > 0;
		kvc_release(&lease, 1);
		assert_int_equal(wr_teardown(&opened), 0);
	}
	print_message("%u of 4 loads were lost\n", losses);
}

/* Any call of the driver refused, from the plan to the end of the step. */
static void p1_a_refused_driver_call_costs_a_prefetched_load_and_no_byte(void **state)
{
	wr_t *wr = *state;
	uint32_t refused = 0, lost = 0;

	for (uint32_t nth = 1; nth <= 60; nth++) {
		uint32_t ids[WR_BLOCKS], wrong[8] = {0}, count;
		kvc_lease_t *lease = wr_lease(wr, 0, 8);
		int begun;

		wr_message_late_load(wr, lease);
		wr_device_sync();
		fake_cuda_fail_nth(nth);
		begun = wr_prefetch(wr, WR_PREFETCH);
		wr_begin_prefetched(wr);
		if (nth % 2) {
			(void)kvx_worker_run_layered_loads(wr->rank[0].worker);
		} else {
			kvx_worker_run_sync_loads(wr->rank[0].worker);
		}
		wr_compute_layers_each(&wr->rank[0], wrong);
		wr_end(wr);
		count = wr_take_failed(wr, ids);
		refused += (uint32_t)fake_cuda_failed();
		fake_cuda_fail_nth(0);
		assert_int_equal(begun, 1);
		wr_idle_step(wr);
		wr_device_sync();
		wr_check_named(ids, count, wrong);
		lost += count > 0;
		wr_drain(wr);
		kvc_release(&lease, 1);
	}
	print_message("%u of 60 calls refused, %u loads lost\n", refused, lost);
	assert_true(refused > 20);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		WR_TEST(p1_the_engine_may_change_its_stream, wr_layered),
		WR_TEST(p1_a_bad_prefetched_block_is_named_by_its_step, wr_layered),
		WR_TEST(p7_blocks_not_ready_are_left_to_the_step, wr_layered),
		cmocka_unit_test(p7_a_daemon_that_dies_after_a_message_costs_its_loads),
		WR_TEST(p1_a_refused_driver_call_costs_a_prefetched_load_and_no_byte, wr_layered),
	};

	return wr_run_tests(argc, argv, tests, KV_COUNT_OF(tests));
}
