/* Loads that come layer by layer while the driver refuses calls: what no error names was right when the engine read it.
 */
#include "connectors/worker/wr.h"
#include "connectors/worker/wr_device.h"
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
	*p_layered += (uint32_t)wr_begin_layered(wr, lease);
	wr_compute_layers_each(&wr->rank[0], wrong);
	wr_end(wr);
	count = wr_take_failed(wr, ids);
	refused = (uint32_t)fake_cuda_failed();
	fake_cuda_fail_nth(0);
	wr_message(wr);
	wr_begin(wr);
	wr_device_sync();
	wr_check_named(ids, count, wrong);
	wr_drain(wr);
	kvc_release(&lease, 1);

	return (int)refused;
}

static void p1_a_refused_driver_call_costs_a_load_and_no_wrong_byte(void **state)
{
	wr_t *wr = *state;
	uint32_t refused = 0, layered = 0;

	for (uint32_t n = 1; n <= NTHS; n++) {
		refused += (uint32_t)one_step(wr, n, &layered);
	}
	print_message("%u calls refused, %u of %u loads came layer by layer, %u failed\n", refused, layered, NTHS,
		      (uint32_t)wr_stats(wr, 0).loads_failed);
	assert_true(refused > NTHS / 2);
	assert_true(layered > NTHS / 2);
	assert_int_equal(wr_stats(wr, 0).layers_skipped, 0);
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
	wr_message(wr);
	wr_add_load(wr, lease, 0, 7, wr_other, 4);
	wr_add_load(wr, rest, 0, 8, wr_other + 4, 4);
	wr_begin(wr);
	assert_int_equal(kvx_worker_run_layered_loads(wr->rank[0].worker), 1);
	fake_cuda_fail_nth(nth); /* of those the transfer thread asks with */
	until = wr_now_ms() + 50;
	while (!fake_cuda_failed() && wr_now_ms() < until) {
		usleep(500);
	}
	fake_cuda_fail_nth(0);
	wr_compute_layers_each(&wr->rank[0], wrong);
	wr_end(wr);
	fake_cuda_hold(0);
	count = wr_take_failed(wr, ids);
	wr_message(wr);
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
	wr_drain(wr);
	kvc_release(&lease, 1);
	kvc_release(&rest, 1);

	return failed > 0;
}

static void p1_a_copy_that_is_lost_does_not_hide_another(void **state)
{
	wr_t *wr = *state;
	uint32_t failed = 0;

	for (uint32_t n = 1; n <= LOSSES; n++) {
		failed += lose_one(wr, n);
	}
	print_message("%u of %u times a load was lost\n", failed, LOSSES);
	assert_true(failed > LOSSES / 4);
}

/* Orders alone, for good: the host waits instead. */
static void p1_without_orders_the_host_waits(void **state)
{
	wr_t *wr = *state;
	uint32_t wrong = 0;
	kvc_lease_t *lease = wr_lease(wr, 0, 8);

	assert_int_equal(wr_begin_layered(wr, lease), 1);
	fake_cuda_fail_always(offsetof(kvk_cuda_ops_t, stream_wait), 999);
	wr_compute_layers(&wr->rank[0], &wrong);
	wr_end(wr);
	fake_cuda_fail_always(0, 0);
	wr_message(wr);
	wr_begin(wr);
	wr_drain(wr);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	assert_int_equal(wr_stats(wr, 0).loads_failed, 0);
	assert_int_equal(wr_stats(wr, 0).layers_skipped, 0);
	kvc_release(&lease, 1);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		WR_TEST(p1_a_refused_driver_call_costs_a_load_and_no_wrong_byte, wr_layered),
		WR_TEST(p1_a_copy_that_is_lost_does_not_hide_another, wr_layered),
		WR_TEST(p1_without_orders_the_host_waits, wr_layered),
	};

	return wr_run_tests(argc, argv, tests, KV_COUNT_OF(tests));
}
