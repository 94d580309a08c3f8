/* Loads that come layer by layer: what the engine enqueues for a layer it has named finds that layer, whatever order
 * the device takes its streams in; what it enqueues for one it has not named may not, and then nothing that was
 * computed from it counts. */
#include "connectors/worker/wr.h"
#include "connectors/worker/wr_device.h"
#include "kernels/fake_cuda.h"

#include <stdio.h>
#include <unistd.h>

#define ROUNDS 12u

static const wr_t layered_ranks = {.rank_count = 2, .layer_bytes = 1, .layer_wait_us = WR_PATIENCE * 1000u};

/* ---- order ----------------------------------------------------------------------------------- */

static void p1_a_layer_that_was_named_is_there(void **state)
{
	wr_t *wr = *state;
	uint32_t wrong = 0;
	kvc_lease_t *lease;
	wr_end_t end;

	for (uint32_t round = 0; round < ROUNDS; round++) {
		lease = wr_lease(wr, 0, 8);
		fake_cuda_hold(round % 2 != 0);
		assert_int_equal(wr_begin_layered(wr, lease), wr->rank_count);
		for (uint32_t r = 0; r < wr->rank_count; r++) {
			wr_compute_layers(&wr->rank[r], &wrong);
			kvx_worker_end_step(wr->rank[r].worker);
		}
		wr_compare_other(wr, 1, &wrong); /* the next step's */
		fake_cuda_hold(0);
		for (uint32_t r = 0; r < wr->rank_count; r++) {
			wr_wait_load(&wr->rank[r], 7, 0, &end);
			assert_int_equal(end.loaded.status, KVC_OK);
			assert_int_equal(end.loaded.blocks, 8);
			assert_int_equal(end.loaded.bytes, 8u * wr->rank[r].layers * WR_PAGE);
			assert_int_equal(end.error_count, 0);
		}
		wr_device_sync();
		assert_int_equal(wrong, 0);
		kvc_release(&lease, 1);
	}
	assert_int_equal(wr_stats(wr, 0).layered, ROUNDS);
	assert_int_equal(wr_stats(wr, 0).layers_skipped, 0);
	assert_int_equal(wr_stats(wr, 0).load_blocks, ROUNDS * 8u);
}

static void p5_a_step_does_not_wait_for_its_layers(void **state)
{
	wr_t *wr = *state;
	uint32_t wrong = 0;
	uint64_t begin;
	wr_end_t end;
	kvc_lease_t *lease = wr_lease(wr, 0, 8);

	wr->timeout_ms = 20000;
	fake_cuda_hold(1);
	begin = wr_now_ms();
	assert_int_equal(wr_begin_layered(wr, lease), 1);
	wr_compute_layers(&wr->rank[0], &wrong);
	wr_end(wr);
	assert_true(wr_now_ms() - begin < WR_QUICK_MS);
	fake_cuda_hold(0);
	wr_wait_load(&wr->rank[0], 7, 0, &end);
	assert_int_equal(end.loaded.status, KVC_OK);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	kvc_release(&lease, 1);
}

/* ---- engines that do not do as they said ----------------------------------------------------- */

/* All but one layer named; or none at all, as under a graph of the whole step. */
static void check_skip(wr_t *wr, uint32_t named)
{
	uint32_t wrong = 0;
	kvc_lease_t *lease;
	kvc_put_t *put;

	lease = wr_lease(wr, 0, 8);
	put = wr_put(wr, 8, 12);
	fake_cuda_hold(1);
	wr_message(wr);
	wr_add_load(wr, lease, 0, 7, wr_other, 8);
	wr_add_save(wr, put, 0, wr_eight, 4);
	wr_begin(wr);
	assert_int_equal(kvx_worker_run_layered_loads(wr->rank[0].worker), 1);
	for (uint32_t l = 0; l < named; l++) {
		kvx_worker_await_layer(wr->rank[0].worker, l);
	}
	wr_end(wr);
	wr_compare_other(wr, 1, &wrong); /* they do come, and before what follows the step */
	fake_cuda_hold(0);
	assert_int_equal(wr_count_failed(wr), 8);
	assert_int_equal(wr_put_wait(put), KVC_ERR_REVOKED);
	wr_drain(wr);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	assert_int_equal(wr_stats(wr, 0).layers_skipped, 1);
	assert_int_equal(wr_stats(wr, 0).loads_failed, 1);
	assert_int_equal(wr_stats(wr, 0).load_lost, 0);

	assert_int_equal(wr_begin_layered(wr, lease), 0); /* whole from now on */
	for (uint32_t l = 0; l < WR_LAYERS; l++) {
		wr_compare_other_layer(&wr->rank[0], l, &wrong);
	}
	wr_end(wr);
	assert_int_equal(wr_count_failed(wr), 0);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	wr_drain(wr);
	kvc_release(&lease, 1);
}

static void p1_blocks_computed_without_awaiting_a_layer_are_dropped(void **state)
{
	check_skip(*state, 0);
	wr_reopen(*state); /* loads come whole from then on */
	check_skip(*state, WR_LAYERS - 1);
}

/* ---- verdicts -------------------------------------------------------------------------------- */

static void p5_a_device_that_hangs_between_layers_costs_the_deadline(void **state)
{
	static uint32_t wrong; /* comparisons that the device still holds may run when the worker is closed */
	wr_t *wr = *state;
	uint64_t begin;
	kvc_lease_t *lease = wr_lease(wr, 0, 8);

	wr->timeout_ms = 100;
	fake_cuda_hold(1);
	begin = wr_now_ms();
	if (wr_begin_layered(wr, lease)) { /* else it was not there before its deadline */
		wr_compute_layers(&wr->rank[0], &wrong);
	}
	wr_end(wr);
	assert_int_equal(wr_count_failed(wr), 8);
	assert_true(wr_now_ms() - begin < 100 + WR_QUICK_MS);
	fake_cuda_hold(0);
	wr_drain(wr);
	assert_int_equal(wr_stats(wr, 0).load_timeouts, 1);
	kvc_release(&lease, 1);
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
	const kvx_worker_stats_t before = wr_stats(wr, 0);
	kvx_worker_stats_t after;

	for (uint32_t i = 0; i < 12; i++) { /* a kernel of before */
		if (to[i] != KVX_NO_BLOCK) {
			wr_fill_block(&wr->rank[0], to[i], 5, i);
		}
	}
	wr_message(wr);
	wr_add_work(wr, 10, us);
	wr_add_load(wr, lease, 0, 7, to, 8);
	wr_add_load(wr, lease, 0, 8, to + 8, 4);
	wr_begin(wr);
	assert_int_equal(kvx_worker_run_layered_loads(wr->rank[0].worker), 1);
	for (uint32_t l = 0; l < WR_LAYERS; l++) {
		kvx_worker_await_layer(wr->rank[0].worker, l);
		for (uint32_t i = 0; i < 12; i++) {
			if (to[i] != KVX_NO_BLOCK) {
				wr_compare_layer(&wr->rank[0], to[i], l, wr_eight[i % 8], p_wrong);
			}
		}
	}
	wr_end(wr);
	fake_cuda_hold(0);
	wr_drain(wr);
	wr_device_sync();
	after = wr_stats(wr, 0);
	assert_int_equal(after.load_blocks - before.load_blocks, 10);
	assert_int_equal(after.load_bytes - before.load_bytes, 10u * WR_LAYERS * WR_PAGE);
	assert_int_equal(after.loads_failed + after.layers_skipped, 0);

	return jobs_of(&after) - jobs_of(&before);
}

/* However long the step computes, which says how many blocks come by layers: all, some, hardly any. */
static void p1_a_layer_of_whole_blocks_is_ready_too(void **state)
{
	wr_t *wr = *state;
	uint64_t all_by_layers, jobs, more = 0;
	uint32_t wrong = 0;
	kvc_lease_t *lease;

	fake_cuda_costs(1, 1); /* so that loads take the device some time */
	lease = wr_lease(wr, 0, 8);
	all_by_layers = load_beside(wr, lease, 0, &wrong); /* not known */
	assert_int_equal(load_beside(wr, lease, UINT32_MAX, &wrong), all_by_layers);
	for (uint32_t us = 1; us < 1u << 20; us *= 6) {
		fake_cuda_hold(us % 5 < 3);
		jobs = load_beside(wr, lease, us, &wrong);
		more += jobs != all_by_layers;
		assert_in_range(jobs, 2, all_by_layers + 2);
	}
	assert_int_equal(wrong, 0);
	assert_true(more > 0);
	kvc_release(&lease, 1);
}

/* ---- what comes whole ------------------------------------------------------------------------ */

/* The lease covers n blocks of wr_eight: the others will never be there. */
static void check_whole(wr_t *wr, uint32_t covered)
{
	kvc_lease_t *lease = wr_lease(wr, 0, covered);
	uint32_t wrong = 0;

	assert_int_equal(wr_begin_layered(wr, lease), 0);
	for (uint32_t l = 0; l < WR_LAYERS && covered == 8; l++) {
		wr_compare_other_layer(&wr->rank[0], l, &wrong);
	}
	kvx_worker_await_layer(wr->rank[0].worker, 2);
	wr_end(wr);
	assert_int_equal(wr_count_failed(wr), 8 - covered);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	wr_drain(wr);
	assert_int_equal(wr_stats(wr, 0).layered + wr_stats(wr, 0).layers_skipped, 0);
	kvc_release(&lease, 1);
}

static void short_loads_and_slow_ones_come_whole(void **state)
{
	wr_t *wr = *state;

	wr->layer_wait_us = 2000;
	wr_reopen(wr);
	check_whole(wr, 6);
	wr->layer_bytes = 8u * WR_LAYERS * WR_PAGE + 1;
	wr_reopen(wr);
	check_whole(wr, 8);
	wr->layer_bytes = 0;
	wr_reopen(wr);
	check_whole(wr, 8);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		WR_TEST(p1_a_layer_that_was_named_is_there, wr_layered),
		WR_TEST(p1_a_layer_that_was_named_is_there, layered_ranks),
		WR_TEST(p5_a_step_does_not_wait_for_its_layers, wr_layered),
		WR_TEST(p1_blocks_computed_without_awaiting_a_layer_are_dropped, wr_layered),
		WR_TEST(p5_a_device_that_hangs_between_layers_costs_the_deadline, wr_layered),
		WR_TEST(p1_a_layer_of_whole_blocks_is_ready_too, wr_layered),
		WR_TEST(short_loads_and_slow_ones_come_whole, wr_layered),
	};

	return wr_run_tests(argc, argv, tests, KV_COUNT_OF(tests));
}
