/* Loads that come layer by layer while the driver refuses calls: what no error names was right when the engine read it.
 */
#include "connectors/worker/layers_rig.h"
#include "connectors/worker/wr_device.h"
#include "engine/check.h"
#include "kernels/fake_cuda.h"

#include <stdio.h>
#include <unistd.h>

#define NTHS   60u
#define LOSSES 40u

/* What no error names is right, in the step for what was named, and after it. Whether a call was refused. */
static int one_step(wr_t *wr, uint64_t nth, uint32_t *p_layered)
{
	uint32_t ids[WR_BLOCKS], wrong[8] = {0}, count, refused;
	kvc_lease_t *lease = wr_lease(wr, 0, 8);

	wr_device_sync();
	fake_cuda_fail_nth(nth);
	*p_layered += (uint32_t)layers_begin(wr, lease);
	for (uint32_t l = 0; l < WR_LAYERS; l++) {
		kvx_worker_await_layer(wr->rank[0].worker, l);
		for (uint32_t i = 0; i < 8; i++) {
			wr_look_layer(&wr->rank[0], wr_other[i], l, wr_eight[i], &wrong[i]);
		}
	}
	kvx_worker_end_step(wr->rank[0].worker);
	count = kvx_worker_take_failed_blocks(wr->rank[0].worker, ids, WR_BLOCKS);
	refused = (uint32_t)fake_cuda_failed();
	fake_cuda_fail_nth(0);
	wr_plan(wr);
	wr_begin(wr);
	wr_device_sync();
	for (uint32_t i = 0; i < 8; i++) {
		int failed = 0;

		for (uint32_t e = 0; e < count; e++) {
			failed = failed || ids[e] == wr_other[i];
		}
		assert_true(failed || wrong[i] == 0);
	}
	layers_hear_all(wr);
	kvc_release(&lease, 1);

	return (int)refused;
}

static void p1_a_refused_driver_call_costs_a_load_and_no_wrong_byte(void **state)
{
	uint32_t refused = 0, layered = 0;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	for (uint32_t n = 1; n <= NTHS; n++) {
		refused += (uint32_t)one_step(&wr, n, &layered);
	}
	print_message("%u calls refused, %u of %u loads came layer by layer, %u failed\n", refused, layered, NTHS,
		      (uint32_t)layers_stats(&wr).loads_failed);
	assert_true(refused > NTHS / 2);
	assert_true(layered > NTHS / 2);
	assert_int_equal(layers_stats(&wr).layers_skipped, 0);
	rig_check_quiet(&rig);
	layers_finish(&rig, &wr);
}

/* One copy of two loads: nobody knows when it ends, and it was the last of its range. The wr_other load is as good as
 * ever. */
static uint32_t lose_one(wr_t *wr, uint64_t nth)
{
	uint32_t ids[WR_BLOCKS], wrong[8] = {0}, count, failed = 0;
	kvc_lease_t *lease = wr_lease(wr, 0, 8), *rest = wr_lease(wr, 4, 8);
	uint64_t until;

	for (uint32_t i = 0; i < 8; i++) {
		wr_fill_block(&wr->rank[0], wr_other[i], 5, i);
	}
	wr_device_sync();
	fake_cuda_hold(1);
	wr_plan(wr);
	wr_plan_load(wr, lease, 0, 7, wr_other, 4);
	wr_plan_load(wr, rest, 0, 8, wr_other + 4, 4);
	wr_begin(wr);
	assert_int_equal(kvx_worker_run_layered_loads(wr->rank[0].worker), 1);
	fake_cuda_fail_nth(nth); /* of those the transfer thread asks with */
	until = wr_now_ms() + 50;
	while (!fake_cuda_failed() && wr_now_ms() < until) {
		usleep(500);
	}
	fake_cuda_fail_nth(0);
	for (uint32_t l = 0; l < WR_LAYERS; l++) {
		kvx_worker_await_layer(wr->rank[0].worker, l);
		for (uint32_t i = 0; i < 8; i++) {
			wr_look_layer(&wr->rank[0], wr_other[i], l, wr_eight[i], &wrong[i]);
		}
	}
	kvx_worker_end_step(wr->rank[0].worker);
	fake_cuda_hold(0);
	count = kvx_worker_take_failed_blocks(wr->rank[0].worker, ids, WR_BLOCKS);
	wr_plan(wr);
	wr_begin(wr);
	wr_device_sync();
	for (uint32_t i = 0; i < 8; i++) {
		int named = 0;

		for (uint32_t e = 0; e < count; e++) {
			named = named || ids[e] == wr_other[i];
		}
		assert_true(named || wrong[i] == 0);
		failed += (uint32_t)named;
	}
	layers_hear_all(wr);
	kvc_release(&lease, 1);
	kvc_release(&rest, 1);

	return failed > 0;
}

static void p1_a_copy_that_is_lost_does_not_hide_another(void **state)
{
	uint32_t failed = 0;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	for (uint32_t n = 1; n <= LOSSES; n++) {
		failed += lose_one(&wr, n);
	}
	print_message("%u of %u times a load was lost\n", failed, LOSSES);
	assert_true(failed > LOSSES / 4);
	layers_finish(&rig, &wr);
}

/* Orders alone, for good: the host waits instead. */
static void p1_without_orders_the_host_waits(void **state)
{
	uint32_t wrong = 0;
	kvc_lease_t *lease;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	lease = wr_lease(&wr, 0, 8);
	assert_int_equal(layers_begin(&wr, lease), 1);
	fake_cuda_fail_always(offsetof(kvk_cuda_ops_t, stream_wait), 999);
	layers_compute(&wr.rank[0], &wrong);
	kvx_worker_end_step(wr.rank[0].worker);
	fake_cuda_fail_always(0, 0);
	wr_plan(&wr);
	wr_begin(&wr);
	layers_hear_all(&wr);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	assert_int_equal(layers_stats(&wr).loads_failed, 0);
	assert_int_equal(layers_stats(&wr).layers_skipped, 0);
	kvc_release(&lease, 1);
	layers_finish(&rig, &wr);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p1_a_refused_driver_call_costs_a_load_and_no_wrong_byte),
		cmocka_unit_test(p1_a_copy_that_is_lost_does_not_hide_another),
		cmocka_unit_test(p1_without_orders_the_host_waits),
	};

	if (argc < 2) {
		fprintf(stderr, "usage: %s KVD\n", argv[0]);
		return 64;
	}
	layers_program = argv[1];

	return cmocka_run_group_tests_name("kvx.worker-layer-faults", tests, NULL, NULL);
}
