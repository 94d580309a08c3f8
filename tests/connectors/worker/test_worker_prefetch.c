/* Loads that begin when their step is planned: they are on their way before the engine begins the step, in their place
 * among all that the device does, and whatever comes instead of that step finds blocks that are no longer written. */
#include "connectors/worker/wr.h"
#include "connectors/worker/wr_device.h"
#include "kernels/fake_cuda.h"

#include <stdio.h>
#include <unistd.h>

#define ROUNDS 12u

/* Until the blocks have come, while no hook is called. */
static void wait_copied(wr_t *wr)
{
	const uint64_t until = wr_now_ms() + WR_PATIENCE;
	uint32_t wrong;

	do {
		wrong = 0;
		wr_compare_other(wr, 1, &wrong);
		wr_device_sync();
		assert_true(wr_now_ms() < until);
	} while (wrong > 0);
}

/* ---- a step as planned ----------------------------------------------------------------------- */

static void p1_a_prefetched_load_is_complete_and_right(void **state)
{
	wr_t *wr = *state;
	uint32_t wrong = 0;
	kvc_lease_t *lease;
	wr_end_t end;

	for (uint32_t round = 0; round < ROUNDS; round++) {
		const uint64_t before = wr_stats(wr, 0).gpu_bytes;

		lease = wr_lease(wr, 0, 8);
		fake_cuda_hold(round % 2 != 0);
		wr_message_late_load(wr, lease);
		assert_int_equal(wr_prefetch(wr, WR_PREFETCH), 1);
		if (round % 2 == 0) {
			wait_copied(wr);
		}
		wr_begin_prefetched(wr);
		assert_int_equal(kvx_worker_run_layered_loads(wr->rank[0].worker), 1);
		wr_compute_layers(&wr->rank[0], &wrong);
		wr_compare_other(wr, 1, &wrong);
		wr_end(wr);
		fake_cuda_hold(0);
		wr_wait_load(&wr->rank[0], 7, 0, &end);
		assert_int_equal(end.loaded.status, KVC_OK);
		assert_int_equal(end.loaded.blocks, 8);
		assert_int_equal(end.loaded.bytes, 8u * WR_LAYERS * WR_PAGE);
		assert_int_equal(end.error_count, 0);
		wr_device_sync();
		assert_int_equal(wrong, 0);
		assert_int_equal(wr_stats(wr, 0).gpu_bytes - before, 8u * WR_LAYERS * WR_PAGE);
		kvc_release(&lease, 1);
	}
	assert_int_equal(wr_stats(wr, 0).loads, ROUNDS);
	assert_int_equal(wr_stats(wr, 0).loads_prefetched, ROUNDS);
	assert_int_equal(wr_stats(wr, 0).layered, ROUNDS);
	assert_int_equal(wr_stats(wr, 0).layers_skipped, 0);
}

static void p5_a_message_does_not_wait_for_the_device(void **state)
{
	wr_t *wr = *state;
	uint32_t wrong = 0;
	uint64_t from;
	kvc_lease_t *lease = wr_lease(wr, 0, 8);

	fake_cuda_hold(1);
	wr_message_late_load(wr, lease);
	from = wr_now_ms();
	assert_int_equal(wr_prefetch(wr, WR_PREFETCH), 1);
	wr_begin_prefetched(wr);
	kvx_worker_run_sync_loads(wr->rank[0].worker);
	wr_compare_other(wr, 1, &wrong);
	wr_end(wr);
	assert_true(wr_now_ms() - from < WR_QUICK_MS);
	fake_cuda_hold(0);
	assert_int_equal(wr_count_failed(wr), 0);
	wr_drain(wr);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	kvc_release(&lease, 1);
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
		wr_message(wr);
		wr_add_fence(wr, wr_other, 8);
		wr_begin(wr);
	}
}

/* Its blocks are the engine's again: what it writes stays, and their loads have failed. */
static void p1_blocks_of_a_step_that_never_comes_are_not_written(void **state)
{
	wr_t *wr = *state;
	uint32_t wrong = 0, failed = 0;
	kvc_lease_t *lease;
	kvc_put_t *put;

	for (uint32_t round = 0; round < 2 * ROUNDS; round++) {
		lease = wr_lease(wr, 0, 8);
		put = wr_put(wr, 8, 12);
		wr_message_late_load(wr, lease);
		wr_add_save(wr, put, 0, wr_eight, 4);
		assert_int_equal(wr_prefetch(wr, round % 2 ? WR_PREFETCH : KVX_PREFETCH_COMPUTED), 1);
		begin_other(wr, (other_plan_t)(round % OTHERS));
		kvx_worker_start_async_loads(wr->rank[0].worker);
		kvx_worker_run_sync_loads(wr->rank[0].worker);
		wr_fill_other(wr, 9);
		wr_compare_other(wr, 9, &wrong);
		wr_end(wr);
		assert_int_equal(wr_count_failed(wr), 8);
		assert_int_equal(wr_put_wait(put), KVC_ERR_REVOKED);
		wr_drain(wr);
		wr_compare_other(wr, 9, &wrong);
		wr_device_sync();
		assert_int_equal(wrong, 0);
		assert_int_equal(wr_stats(wr, 0).loads_failed, ++failed);
		kvc_release(&lease, 1);
		wr_idle_step(wr);
	}
}

static void p4_a_worker_that_closes_ends_its_prefetch(void **state)
{
	wr_t *wr = *state;
	uint32_t wrong = 0;
	kvc_lease_t *lease;
	wr_end_t end;

	for (uint32_t round = 0; round < 4; round++) {
		lease = wr_lease(wr, 0, 8);
		wr_message_late_load(wr, lease);
		assert_int_equal(wr_prefetch(wr, round % 2 ? WR_PREFETCH : KVX_PREFETCH_COMPUTED), 1);
		kvx_worker_close(wr->rank[0].worker);
		wr_fill_other(wr, 9);
		wr_compare_other(wr, 9, &wrong);
		wr_open_rank(wr, 0, 1);
		wr_compare_other(wr, 9, &wrong);
		wr_device_sync();
		assert_int_equal(wrong, 0);
		kvc_release(&lease, 1);
		wr_idle_step(wr);
	}
	lease = wr_lease(wr, 0, 8);
	wr_message_late_load(wr, lease);
	assert_int_equal(wr_prefetch(wr, WR_PREFETCH), 1);
	wr_begin_prefetched(wr);
	kvx_worker_run_sync_loads(wr->rank[0].worker);
	wr_end(wr);
	wr_wait_load(&wr->rank[0], 7, 0, &end);
	assert_int_equal(end.loaded.status, KVC_OK);
	kvc_release(&lease, 1);
}

/* Hooks of the step before, after all: they end, fail and name nothing of what was begun. */
static void p1_late_hooks_of_the_step_before_do_not_touch_it(void **state)
{
	wr_t *wr = *state;
	uint32_t wrong = 0;
	kvc_lease_t *lease = wr_lease(wr, 0, 8);
	kvc_put_t *put = wr_put(wr, 8, 12);

	wr_message_late_load(wr, lease);
	wr_add_save(wr, put, 0, wr_eight, 4);
	assert_int_equal(wr_prefetch(wr, WR_PREFETCH), 1);
	kvx_worker_await_layer(wr->rank[0].worker, 0);
	wr_end(wr);
	assert_int_equal(wr_count_failed(wr), 0);
	wr_skip_report(wr);
	assert_int_equal(wr_stats(wr, 0).saves_open, 0); /* they wait for the end of their own step */
	assert_int_equal(wr_prefetch(wr, WR_PREFETCH), 0);
	wr_begin_prefetched(wr);
	assert_int_equal(kvx_worker_run_layered_loads(wr->rank[0].worker), 1);
	wr_compute_layers(&wr->rank[0], &wrong);
	wr_end(wr);
	assert_int_equal(wr_count_failed(wr), 0);
	assert_int_equal(wr_put_wait(put), KVC_OK);
	wr_drain(wr);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	assert_int_equal(wr_stats(wr, 0).loads_failed, 0);
	kvc_release(&lease, 1);
}

/* The engine computes without having asked for its loads: nothing of that counts. */
static void p1_a_step_that_never_runs_its_prefetched_loads_loses_them(void **state)
{
	wr_t *wr = *state;
	kvc_lease_t *lease;
	kvc_put_t *put;

	for (uint32_t round = 0; round < 2; round++) {
		lease = wr_lease(wr, 0, 8);
		put = wr_put(wr, 8, 12);
		wr_message_late_load(wr, lease);
		wr_add_save(wr, put, 0, wr_eight, 4);
		assert_int_equal(wr_prefetch(wr, WR_PREFETCH), 1);
		wr_begin_prefetched(wr);
		if (round == 0) {
			wr_end(wr);
		}
		assert_int_equal(wr_count_failed(wr), 8);
		wr_message(wr);
		wr_begin(wr);
		assert_int_equal(wr_put_wait(put), KVC_ERR_REVOKED);
		wr_drain(wr);
		kvc_release(&lease, 1);
		wr_idle_step(wr);
	}
	assert_int_equal(wr_stats(wr, 0).layers_skipped, 0); /* that is another fault */
}

/* ---- when it is not done --------------------------------------------------------------------- */

/* All hooks of a step but those left out. */
static void part_of_step(wr_t *wr, int end, int errors, int report)
{

	wr_message(wr);
	wr_begin(wr);
	if (end) {
		wr_end(wr);
	}
	if (errors) {
		(void)wr_count_failed(wr);
	}
	if (report) {
		wr_skip_report(wr);
	}
}

static void p1_a_step_that_has_not_ended_is_not_overtaken(void **state)
{
	wr_t *wr = *state;
	kvc_lease_t *lease = wr_lease(wr, 0, 8);

	for (uint32_t round = 0; round < 8; round++) {
		const int end = round & 1, errors = round >> 1 & 1, report = round >> 2 & 1;

		for (uint32_t computed = 0; computed < 2; computed++) {
			part_of_step(wr, end, errors, report);
			wr_message_late_load(wr, lease);
			assert_int_equal(wr_prefetch(wr, computed ? WR_PREFETCH : KVX_PREFETCH_LAYERS),
					 errors && report && (end || !computed));
			kvx_worker_begin_step(wr->rank[0].worker, NULL, 0);
			wr_drain(wr);
		}
	}
	kvc_release(&lease, 1);
	lease = wr_lease(wr, 0, 8);
	part_of_step(wr, 1, 1, 1);
	wr_message_late_load(wr, lease);
	wr_begin(wr);
	kvx_worker_run_sync_loads(wr->rank[0].worker);
	assert_int_equal(wr_prefetch(wr, WR_PREFETCH), 0);
	wr_skip_report(wr);
	assert_int_equal(wr_prefetch(wr, KVX_PREFETCH_LAYERS), 0);
	wr_end(wr);
	wr_drain(wr);
	kvc_release(&lease, 1);
}

/* By layers it computes while it loads: what took how long cannot be told. */
static void p7_a_prefetched_step_is_timed_after_its_loads(void **state)
{
	wr_t *wr = *state;
	kvx_report_step_t steps[2];
	uint32_t wrong = 0;
	kvc_lease_t *lease;

	for (int layers = 0; layers < 2; layers++) {
		lease = wr_lease(wr, 0, 8);
		wr_message_late_load(wr, lease);
		(void)kvx_msg_add_record(&wr->message, KVX_RECORD_TIME, sizeof(kvx_msg_time_t));
		assert_int_equal(wr_prefetch(wr, WR_PREFETCH), 1);
		wr_begin_prefetched(wr);
		if (layers) {
			assert_int_equal(kvx_worker_run_layered_loads(wr->rank[0].worker), 1);
			wr_compute_layers(&wr->rank[0], &wrong);
		} else {
			kvx_worker_run_sync_loads(wr->rank[0].worker);
		}
		wr_end(wr);
		wr_device_sync();
		assert_int_equal(wr_take_steps(wr, steps, 2), !layers);
		assert_true(layers || steps[0].step == wr->step);
		kvc_release(&lease, 1);
	}
	assert_int_equal(wrong, 0);
	assert_int_equal(wr_stats(wr, 0).loads_prefetched, 2);
}

static void only_messages_with_synchronous_loads_are_prefetched(void **state)
{
	wr_t *wr = *state;
	const uint64_t nonsense[4] = {1, 2, 3, 4};
	kvc_lease_t *lease = wr_lease(wr, 0, 8);

	wr_message(wr);
	wr_add_fence(wr, wr_other, 8);
	assert_int_equal(wr_prefetch(wr, WR_PREFETCH), 0);
	wr_message(wr);
	wr_add_load(wr, lease, KVX_MSG_ASYNC, 7, wr_other, 8);
	assert_int_equal(wr_prefetch(wr, WR_PREFETCH), 0);
	wr_message(wr);
	wr_add_load(wr, NULL, 0, 7, wr_other, 8);
	assert_int_equal(wr_prefetch(wr, WR_PREFETCH), 0);
	assert_int_equal(kvx_worker_prefetch_step(wr->rank[0].worker, nonsense, sizeof nonsense, WR_PREFETCH), 0);
	assert_int_equal(kvx_worker_prefetch_step(wr->rank[0].worker, NULL, 0, WR_PREFETCH), 0);
	wr_message_late_load(wr, lease);
	kvx_msg_finish(&wr->message, wr->step);
	assert_int_equal(
		kvx_worker_prefetch_step(wr->rank[0].worker, wr->message.data, wr->message.len - 8, WR_PREFETCH), 0);
	assert_int_equal(wr_stats(wr, 0).loads, 0);
	assert_int_equal(wr_stats(wr, 0).bad_messages, 0);
	kvc_release(&lease, 1);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		WR_TEST(p1_a_prefetched_load_is_complete_and_right, wr_layered),
		WR_TEST(p5_a_message_does_not_wait_for_the_device, wr_layered),
		WR_TEST(p1_blocks_of_a_step_that_never_comes_are_not_written, wr_layered),
		WR_TEST(p4_a_worker_that_closes_ends_its_prefetch, wr_layered),
		WR_TEST(p1_late_hooks_of_the_step_before_do_not_touch_it, wr_layered),
		WR_TEST(p1_a_step_that_never_runs_its_prefetched_loads_loses_them, wr_layered),
		WR_TEST(p1_a_step_that_has_not_ended_is_not_overtaken, wr_layered),
		WR_TEST(p7_a_prefetched_step_is_timed_after_its_loads, wr_layered),
		WR_TEST(only_messages_with_synchronous_loads_are_prefetched, wr_layered),
	};

	return wr_run_tests(argc, argv, tests, KV_COUNT_OF(tests));
}
