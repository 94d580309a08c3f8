/* A worker whose cache is a device's: what it does when the device hangs or cannot be used, and the choices that are
 * counted, not seen in any byte. */
#include "connectors/worker/wr.h"
#include "connectors/worker/wr_device.h"
#include "kernels/fake_cuda.h"
#include "worker/cuda/state.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define PUTS   16u
#define ROUNDS 12u
#define LOSSES 40u

static void begin_load(wr_t *wr, const kvc_lease_t *lease, uint32_t flags)
{
	wr_message_load(wr, lease, flags);
	wr_begin(wr);
	wr_run_loads(wr);
}

/* ---- a device that hangs --------------------------------------------------------------------- */

/* Also between layers. The lease is not given back meanwhile: the device may still read there. */
WR_CASE(p5_a_device_that_hangs_costs_a_load_its_deadline, wr_layered)
{
	wr->timeout_ms = 100;
	for (int layers = 0; layers < 2; layers++) {
		const uint64_t begin = wr_now_ms();
		kvc_lease_t *lease = wr_lease(wr, 0, 8);

		fake_cuda_hold(1);
		if (!layers) {
			begin_load(wr, lease, 0);
		} else if (wr_begin_layered(wr, lease)) { /* else it was not there before its deadline */
			wr_await_layers(&wr->rank[0]);
		}
		wr_end(wr);
		assert_int_equal(wr_count_failed(wr), 8);
		assert_true(wr_now_ms() - begin < 100 + WR_QUICK_MS);
		assert_int_equal(wr_stats(wr, 0).loads_open, 1);
		fake_cuda_hold(0);
		wr_drain(wr);
		assert_int_equal(wr_stats(wr, 0).load_timeouts, layers + 1);
		kvc_release(&lease, 1);
	}
}

/* It is left to the end of the process: nothing is unmapped under the device. */
WR_CASE(p5_a_device_that_hangs_does_not_hold_the_end, wr_one)
{
	uint64_t begin;
	kvc_lease_t *lease = wr_lease(wr, 0, 8);

	fake_cuda_hold(1);
	begin_load(wr, lease, KVX_MSG_ASYNC);
	usleep(20000);
	begin = wr_now_ms();
	kvx_worker_close(wr->rank[0].worker);
	assert_true(wr_now_ms() - begin < 3000 + WR_QUICK_MS);
	wr->rank[0].worker = NULL;
	kvc_release(&lease, 1);
	fake_cuda_hold(0);
	wr_device_sync();
	assert_int_equal(fake_cuda_faults(), 0);
	wr_device_leave();
	rig_kill(&wr->rig); /* it would wait for what the device may still read */
}

/* ---- a driver that refuses ------------------------------------------------------------------- */

static kvc_status_t try_open(wr_t *wr, uint32_t memory, int device)
{
	kvx_worker_group_t groups[2];
	kvx_worker_config_t config = wr_config(wr, 0, groups);
	kvx_worker_t *worker = NULL;
	kvc_status_t status;

	config.memory = memory;
	config.device = device;
	status = kvx_worker_open(&config, &worker);
	assert_true((status == KVC_OK) == (worker != NULL));
	kvx_worker_close(worker);

	return status;
}

/* Each call of the driver fails once: open says why and leaves nothing. */
WR_CASE(p10_a_device_that_cannot_be_opened_is_refused_with_a_reason, wr_alone)
{
	uint32_t refused = 0;

	assert_int_equal(try_open(wr, 7, 0), KVC_ERR_ARG);
	assert_non_null(strstr(kvx_worker_last_error(), "kind of memory"));
	assert_int_equal(try_open(wr, KVX_MEMORY_CUDA, 5), KVC_ERR_ARG);
	assert_non_null(strstr(kvx_worker_last_error(), "no device 5"));
	fake_cuda_fail_always(offsetof(kvk_cuda_ops_t, capture_mode), 999);
	assert_int_equal(try_open(wr, KVX_MEMORY_CUDA, 0), KVC_ERR_ARG);
	assert_non_null(strstr(kvx_worker_last_error(), "CaptureMode"));
	fake_cuda_fail_always(0, 0);
	for (uint32_t n = 1;; n++) {
		kvc_status_t status;

		fake_cuda_fail_nth(n);
		status = try_open(wr, KVX_MEMORY_CUDA, 0);
		if (!fake_cuda_failed()) {
			break;
		}
		assert_true(status == KVC_OK || status == KVC_ERR_ARG || status == KVC_ERR_NOMEM);
		refused += status != KVC_OK;
		assert_true(status != KVC_ERR_ARG || strstr(kvx_worker_last_error(), "GPU"));
	}
	fake_cuda_fail_nth(0);
	assert_true(refused > 10);
}

/* The limit on locked memory: nothing is promised that a copy could not keep. */
WR_CASE(p10_a_pool_the_device_cannot_be_given_is_declined, wr_one)
{
	kvc_lease_t *lease;
	wr_end_t end;

	kvx_worker_close(wr->rank[0].worker);
	fake_cuda_fail_always(offsetof(kvk_cuda_ops_t, host_register), 2);
	wr_open_rank(wr, 0, 0);
	assert_int_equal(wr_await_self_test(wr), KVC_ERR_LIMIT);
	assert_int_equal(wr_stats(wr, 0).registered_bytes, 0);
	lease = wr_lease(wr, 0, 8);
	wr_load(wr, lease, 0, &end);
	assert_int_equal(end.error_count, 8);
	kvc_release(&lease, 1);
	fake_cuda_fail_always(0, 0);
}

/* What came before a step on the stream that it was planned on comes before it on the one it is computed on, also where
 * the driver refuses the n-th call of the plan: a save, which the step overwrites. `given_up`: the loads of the plan
 * cannot be made, and another step comes instead. Whether it was made. */
static int change_stream(wr_t *wr, uint32_t key, uint64_t nth, int given_up)
{
	kvx_worker_t *worker = wr->rank[0].worker;
	kvc_lease_t *lease = wr_lease(wr, 0, 8);
	kvc_put_t *put = wr_put(wr, key, key + 4);
	uint32_t ids[8];
	kvc_status_t status;

	memcpy(ids, wr_other, sizeof ids);
	ids[7] = given_up ? WR_BLOCKS : ids[7]; /* there is no such block */
	fake_cuda_hold(1);
	wr_be_late();
	wr_save(wr, put, wr_eight, 4);
	(void)wr_take_steps(wr, NULL, 0); /* the step has ended */
	wr_message(wr);
	wr_add_fence(wr, wr_eight, 4);
	wr_add_load(wr, lease, 0, 7, ids, 8);
	usleep(2000); /* for the save to be on the device */
	fake_cuda_fail_nth(nth);
	assert_int_equal(wr_prefetch(wr, WR_PREFETCH), 1);
	wr_wait_prefetched(wr);
	fake_cuda_fail_nth(0);
	wr_device_set_stream(worker, 1);
	if (given_up) {
		kvx_worker_begin_step(worker, NULL, 0);
	} else {
		wr_begin(wr);
		wr_run_loads(wr);
	}
	for (uint32_t i = 0; i < 4; i++) {
		wr_fill_block(&wr->rank[0], wr_eight[i], 9, i);
	}
	wr_end(wr);
	fake_cuda_hold(0);
	status = wr_put_wait(put);
	wr_drain(wr);
	kvc_release(&lease, 1);

	return status == KVC_OK;
}

static void change_streams(wr_t *wr, int given_up)
{
	uint32_t key = 8;

	for (uint64_t nth = 0; nth < ROUNDS; nth++) {
		const int saved = change_stream(wr, key, nth, given_up);
		kvc_lease_t *lease;

		for (uint32_t i = 0; i < 4; i++) {
			wr_fill_block(&wr->rank[0], wr_eight[i], 1, wr_eight[i]);
		}
		wr_device_sync();
		wr_device_set_stream(wr->rank[0].worker, 0);
		wr_message(wr);
		wr_step(wr); /* the step after one whose loads have failed stores nothing */
		if (!saved) {
			continue;
		}

		lease = wr_lease(wr, key, key + 4); /* what has been stored was read before it was written */
		key += 4;
		wr_message(wr);
		wr_add_load(wr, lease, 0, 8, wr_other, 4);
		wr_step(wr);
		for (uint32_t i = 0; i < 4; i++) {
			assert_true(wr_block_is(&wr->rank[0], wr_other[i], 1, wr_eight[i]));
		}
		wr_drain(wr);
		kvc_release(&lease, 1);
	}
	assert_int_equal(wr_stats(wr, 0).loads_prefetched, ROUNDS);
	print_message("%u of %u saves were made\n", (key - 8) / 4, ROUNDS);
}

WR_CASE(p1_the_engine_may_change_its_stream, wr_layered)
{
	change_streams(wr, 0);
}

WR_CASE(p1_the_engine_may_change_its_stream_and_its_plan, wr_layered)
{
	change_streams(wr, 1);
}

/* Whenever it is given up, the transfer thread does nothing more for it, and the next step's loads are that step's. */
WR_CASE(p1_a_prefetch_may_be_given_up_at_any_time, wr_layered)
{
	kvx_worker_t *worker = wr->rank[0].worker;

	for (uint32_t round = 0; round < 200; round++) {
		kvc_lease_t *lease = wr_lease(wr, 0, 8);
		wr_end_t end;

		wr_message_load(wr, lease, 0);
		assert_int_equal(wr_prefetch(wr, WR_PREFETCH), 1);
		usleep(round % 4 * 50);
		kvx_worker_begin_step(worker, NULL, 0);
		assert_int_equal(atomic_load(&worker->gpu->presend), KVX_PRESEND_NONE);
		wr_end(wr);
		wr_drain(wr);
		wr_load(wr, lease, 0, &end);
		assert_int_equal(end.loaded.status, KVC_OK);
		wr_check_other(wr, 1);
		kvc_release(&lease, 1);
	}
	assert_int_equal(wr_stats(wr, 0).loads_prefetched, 200);
}

/* One of two loads is lost that come in the same layers: nobody knows when its copy ends, and it was the last of its
 * range. The other load is as good as the engine was told when it read it. Whether one was lost. */
static int lose_one(wr_t *wr, uint64_t nth)
{
	wr_rank_t *rank = &wr->rank[0];
	uint32_t ids[WR_BLOCKS], wrong[8] = {0}, count;
	kvc_lease_t *leases[2] = {wr_lease(wr, 0, 8), wr_lease(wr, 4, 8)};

	for (uint32_t i = 0; i < 8; i++) {
		wr_fill_block(rank, wr_other[i], 5, i);
	}
	wr_device_sync();
	fake_cuda_hold(1);
	wr_message(wr);
	wr_add_load(wr, leases[0], 0, 7, wr_other, 4);
	wr_add_load(wr, leases[1], 0, 8, wr_other + 4, 4);
	wr_begin(wr);
	assert_int_equal(kvx_worker_run_layered_loads(rank->worker), 1);
	fake_cuda_fail_run(nth, 3); /* of those that the transfer thread asks with: one alone is repeated */
	for (uint32_t i = 0; i < 100 && !fake_cuda_failed(); i++) {
		usleep(500);
	}
	fake_cuda_fail_nth(0);
	for (uint32_t i = 0; i < 8 * WR_LAYERS; i++) {
		const uint32_t l = i / 8, b = i % 8;

		kvx_worker_await_layer(rank->worker, l);
		wr_compare(rank, (wr_content_t){wr_other[b], 1, wr_eight[b], l, l + 1}, &wrong[b]);
	}
	wr_end(wr);
	fake_cuda_hold(0);
	count = kvx_worker_take_failed_blocks(rank->worker, ids, WR_BLOCKS);
	wr_message(wr);
	wr_begin(wr);
	wr_device_sync();
	for (uint32_t i = 0; i < 8; i++) {
		int named = 0;

		for (uint32_t e = 0; e < count; e++) {
			named |= ids[e] == wr_other[i];
		}
		assert_true(named || wrong[i] == 0);
	}
	wr_drain(wr);
	kvc_release(leases, 2);

	return count > 0;
}

WR_CASE(p1_a_copy_that_is_lost_does_not_hide_another, wr_layered)
{
	uint32_t lost = 0;

	for (uint32_t nth = 1; nth <= LOSSES; nth++) {
		lost += lose_one(wr, nth) ? 1u : 0u;
	}
	print_message("%u of %u times a load was lost\n", lost, LOSSES);
	assert_true(lost > LOSSES / 4);
}

/* ---- what comes whole ------------------------------------------------------------------------ */

/* The lease covers n blocks of wr_eight: the others will never be there. */
static void check_whole(wr_t *wr, uint32_t covered)
{
	kvc_lease_t *lease = wr_lease(wr, 0, covered);
	uint32_t wrong = 0;

	assert_int_equal(wr_begin_layered(wr, lease), 0);
	for (uint32_t i = 0; i < covered; i++) {
		wr_compare(&wr->rank[0], (wr_content_t){wr_other[i], 1, wr_eight[i], 0, WR_LAYERS}, &wrong);
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

WR_CASE(short_loads_and_slow_ones_come_whole, wr_layered)
{
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

/* ---- what goes together ---------------------------------------------------------------------- */

static uint64_t count_copies(const kvx_worker_stats_t *stats)
{
	return stats->gpu_zero_copy + stats->gpu_staged + stats->gpu_copy_per_piece;
}

/* One put a request, a block each: how many copies that were. */
static uint64_t save_puts(wr_t *wr)
{
	const kvx_worker_stats_t before = wr_stats(wr, 0);
	kvx_worker_stats_t after;
	kvc_put_t *put[PUTS];

	for (uint32_t i = 0; i < PUTS; i++) {
		put[i] = wr_put(wr, i, i + 1);
	}
	wr_message(wr);
	for (uint32_t i = 0; i < PUTS; i++) {
		wr_add_save(wr, put[i], 0, &(uint32_t){1 + i}, 1);
	}
	wr_begin(wr);
	wr_end(wr);
	for (uint32_t i = 0; i < PUTS; i++) {
		assert_int_equal(wr_put_wait(put[i]), KVC_OK);
	}
	wr_drain(wr);
	after = wr_stats(wr, 0);
	assert_int_equal(after.save_bytes - before.save_bytes, PUTS * WR_LAYERS * WR_PAGE);
	assert_true(after.gpu_bytes - before.gpu_bytes >= PUTS * WR_LAYERS * WR_PAGE);

	return count_copies(&after) - count_copies(&before);
}

/* And each put has its own block's bytes and digests. The first one may go alone, before the others are handed over. */
WR_CASE(what_a_step_saves_of_many_requests_goes_together, wr_one)
{
	uint64_t least = PUTS, copies;
	uint32_t ids[PUTS];
	kvc_lease_t *lease;

	for (uint32_t round = 0; round < 5; round++) {
		assert_int_equal(kvc_space_reset(wr->space), KVC_OK);
		copies = save_puts(wr);
		least = copies < least ? copies : least;
	}
	print_message("%u puts in %u copies\n", PUTS, (uint32_t)least);
	assert_true(least <= PUTS / 4);
	lease = wr_lease(wr, 0, PUTS);
	wr_message(wr);
	for (uint32_t i = 0; i < PUTS; i++) {
		ids[i] = 40 + i;
	}
	wr_add_load(wr, lease, 0, 7, ids, PUTS);
	wr_step(wr);
	for (uint32_t i = 0; i < PUTS; i++) {
		assert_true(wr_block_is(&wr->rank[0], ids[i], 1, 1 + i));
	}
	assert_int_equal(wr_stats(wr, 0).gpu_failures + wr_stats(wr, 0).gpu_refused, 0);
	kvc_release(&lease, 1);
}

/* Saves step i of the blocks at 8 + i, and waits until the copy is enqueued, unless as many are as may be. */
static kvc_put_t *save_one(wr_t *wr, uint32_t i)
{
	const uint64_t deadline = wr_now_ms() + WR_PATIENCE;
	kvx_worker_stats_t stats = wr_stats(wr, 0);
	const uint64_t copies = count_copies(&stats) + (i < KVX_GPU_SAVES_AHEAD);
	kvc_put_t *put = wr_put(wr, 8 + i, 9 + i);

	wr_save(wr, put, &wr_eight[i % 8], 1);
	do {
		stats = wr_stats(wr, 0);
	} while (count_copies(&stats) < copies && wr_now_ms() < deadline);

	return put;
}

/* The engine is ahead of the device: what a step saves is copied when that step ends, also if the copies are enqueued
 * later than steps that come after it. */
WR_CASE(p7_a_save_does_not_wait_for_later_steps, wr_one)
{
	kvc_put_t *puts[KVX_GPU_SAVES_AHEAD + 2];

	wr_device_stall(0, 1);
	wr_device_stall(1, 1);
	for (uint32_t i = 0; i <= KVX_GPU_SAVES_AHEAD; i++) {
		puts[i] = save_one(wr, i);
	}
	wr_device_await_second(); /* a step that takes long */
	puts[KVX_GPU_SAVES_AHEAD + 1] = save_one(wr, KVX_GPU_SAVES_AHEAD + 1);
	wr_device_stall(0, 0);
	for (uint32_t i = 0; i <= KVX_GPU_SAVES_AHEAD; i++) {
		assert_int_equal(wr_put_wait(puts[i]), KVC_OK);
	}
	assert_int_not_equal(kvc_put_wait(puts[KVX_GPU_SAVES_AHEAD + 1], 0, 1), KVC_OK);
	wr_device_stall(1, 0);
	assert_int_equal(wr_put_wait(puts[KVX_GPU_SAVES_AHEAD + 1]), KVC_OK);
	wr_drain(wr);
}

WR_MAIN
