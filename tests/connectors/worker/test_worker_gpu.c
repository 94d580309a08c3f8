/* A worker whose cache is a device's: what the host may not wait for, what may not be given back while the device is at
 * it, and what becomes of it all when the driver refuses. */
#include "connectors/worker/wr.h"
#include "connectors/worker/wr_device.h"
#include "kernels/fake_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NTHS 28u /* calls of the driver that fail, of those while there is a daemon */

static void begin_load(wr_t *wr, const kvc_lease_t *lease, uint32_t flags)
{
	wr_message_load(wr, lease, flags);
	wr_begin(wr);
	wr_run_loads(wr);
}

/* ---- who waits ------------------------------------------------------------------------------- */

static void p5_a_step_does_not_wait_for_the_bytes_it_loads(void **state)
{
	wr_t *wr = *state;
	uint32_t wrong = 0;
	uint64_t begin;
	wr_end_t end;
	kvx_worker_t *worker = wr->rank[0].worker;
	kvc_lease_t *lease = wr_lease(wr, 0, 8);

	wr->timeout_ms = 20000;
	fake_cuda_hold(1);
	begin = wr_now_ms();
	begin_load(wr, lease, 0);
	for (uint32_t i = 0; i < 8; i++) {
		wr_compare_block(&wr->rank[0], wr_other[i], 1, wr_eight[i], &wrong); /* the step's kernels */
	}
	kvx_worker_end_step(worker);
	assert_true(wr_now_ms() - begin < WR_QUICK_MS);
	fake_cuda_hold(0);
	wr_wait_load(&wr->rank[0], 7, 0, &end);
	assert_int_equal(end.loaded.status, KVC_OK);
	assert_int_equal(end.error_count, 0);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	kvc_release(&lease, 1);
}

/* What is about to be overwritten is read before that: by the device, in its own time. */
static void p5_a_fence_does_not_wait_for_the_device(void **state)
{
	wr_t *wr = *state;
	kvc_lease_t *lease;
	uint64_t begin;
	kvc_put_t *put;

	for (uint32_t round = 0; round < 4; round++) {
		assert_int_equal(kvc_space_reset(wr->space), KVC_OK);
		wr_fill(wr, 1);
		put = wr_put(wr, 0, 8);
		fake_cuda_hold(1);
		wr_message(wr);
		wr_add_save(wr, put, 0, wr_eight, 8);
		wr_begin(wr);
		wr_end(wr);
		usleep(round % 2 ? 0 : 20000); /* submitted by the fence, or before it */
		begin = wr_now_ms();
		wr_message(wr);
		wr_add_fence(wr, wr_eight, 8);
		wr_begin(wr);
		assert_true(wr_now_ms() - begin < WR_QUICK_MS);
		wr_fill(wr, 2);
		fake_cuda_hold(0);
		wr_drain(wr);
		if (wr_put_wait(put) == KVC_OK) {
			lease = wr_lease(wr, 0, 8);
			begin_load(wr, lease, 0);
			for (uint32_t i = 0; i < 8; i++) {
				assert_true(wr_block_is(&wr->rank[0], wr_other[i], 1, wr_eight[i]));
			}
			wr_drain(wr);
			kvc_release(&lease, 1);
		} else {
			assert_true(wr_stats(wr, 0).save_dropped > 0);
		}
	}
	assert_true(wr_stats(wr, 0).fences > 0);
}

static void p5_a_device_that_hangs_costs_a_load_its_deadline(void **state)
{
	wr_t *wr = *state;
	uint64_t begin;
	wr_end_t end;
	kvc_lease_t *lease = wr_lease(wr, 0, 8);

	wr->timeout_ms = 100;
	fake_cuda_hold(1);
	begin = wr_now_ms();
	begin_load(wr, lease, 0);
	wr_end(wr);
	end.error_count = kvx_worker_take_failed_blocks(wr->rank[0].worker, end.errors, WR_BLOCKS);
	assert_int_equal(end.error_count, 8);
	assert_true(wr_now_ms() - begin < 100 + WR_QUICK_MS);
	assert_int_equal(wr_stats(wr, 0).loads_open,
			 1); /* its lease is not given back: the device may still read there */
	fake_cuda_hold(0);
	wr_drain(wr);
	assert_int_equal(wr_stats(wr, 0).load_timeouts, 1);
	kvc_release(&lease, 1);
}

/* It is left to the end of the process: nothing is unmapped under the device. */
static void p5_a_device_that_hangs_does_not_hold_the_end(void **state)
{
	wr_t *wr = *state;
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

/* ---- verdicts that come late ----------------------------------------------------------------- */

/* Whether the load was right is known when the step is over; until then nothing it has computed is stored. */
static void p1_what_a_step_computed_from_a_bad_block_is_not_stored(void **state)
{
	wr_t *wr = *state;
	const void *data;
	wr_end_t end;
	kvc_lease_t *lease = wr_lease(wr, 0, 8);
	kvc_put_t *put = wr_put(wr, 8, 12);

	assert_int_equal(kvc_lease_block(lease, 5, &data, NULL), KVC_OK);
	((uint8_t *)(uintptr_t)data)[3 * WR_PAGE + 17000] ^= 1;
	fake_cuda_hold(1);
	wr_message(wr);
	wr_add_load(wr, lease, 0, 7, wr_other, 8);
	wr_add_save(wr, put, 0, wr_eight, 4);
	wr_step(wr);
	usleep(20000);
	assert_int_equal(wr_stats(wr, 0).saves_open, 0); /* not even handed over */
	fake_cuda_hold(0);
	end.error_count = kvx_worker_take_failed_blocks(wr->rank[0].worker, end.errors, WR_BLOCKS);
	assert_int_equal(end.error_count, 1);
	assert_int_equal(end.errors[0], wr_other[5]);
	assert_int_equal(wr_put_wait(put), KVC_ERR_REVOKED);
	wr_drain(wr);
	assert_int_equal(wr_stats(wr, 0).save_dropped, 1);
	kvc_release(&lease, 1);
}

/* The lease goes while the device copies: what has come may be anybody's, and is not given back before the device has
 * let go. */
static void p1_a_lease_lost_under_a_copy_is_a_failed_load(void **state)
{
	wr_t *wr = *state;
	kvc_lease_t *lease;
	char id[16];
	wr_end_t end;

	for (uint32_t flags = 0; flags <= KVX_MSG_ASYNC; flags += KVX_MSG_ASYNC) {
		lease = wr_lease(wr, 0, 8);
		fake_cuda_hold(1);
		begin_load(wr, lease, flags);
		wr_end(wr);
		usleep(20000);
		kvc_release(&lease, 1);
		(void)kvc_poll(wr->kvc, 50);
		usleep(50000);
		assert_int_equal(kvx_worker_take_finished(wr->rank[0].worker, id, sizeof id, NULL), 0);
		assert_int_equal(wr_stats(wr, 0).loads_open, 1);
		fake_cuda_hold(0);
		wr_wait_load(&wr->rank[0], 7, flags != 0, &end);
		assert_int_equal(end.loaded.status, KVC_ERR_REVOKED);
		assert_int_equal(end.error_count, 8);
	}
}

static void p7_a_daemon_killed_under_copies_costs_these_copies_only(void **state)
{
	wr_t *wr = *state;
	uint64_t before = kvc_incarnation(wr->kvc);
	kvc_lease_t *lease = wr_lease(wr, 0, 8);
	kvc_put_t *put = wr_put(wr, 8, 16);

	fake_cuda_hold(1);
	wr_message(wr);
	wr_add_load(wr, lease, KVX_MSG_ASYNC, 7, wr_other, 8);
	wr_add_save(wr, put, 0, wr_eight, 8);
	wr_begin(wr);
	kvx_worker_start_async_loads(wr->rank[0].worker);
	wr_end(wr);
	usleep(20000);
	rig_kill(&wr->rig);
	usleep(100000);
	assert_int_equal(wr_stats(wr, 0).loads_open + wr_stats(wr, 0).saves_open, 2);
	fake_cuda_hold(0);
	wr_drain(wr);
	kvc_put_free(put);
	kvc_release(&lease, 1);

	rig_start(&wr->rig);
	wr_await_restart(wr, before);
	wr_fill(wr, 3);
	assert_int_equal(kvc_space_reset(wr->space), KVC_OK);
	wr_store(wr, wr_eight, 8);
	lease = wr_lease(wr, 0, 8);
	begin_load(wr, lease, 0);
	for (uint32_t i = 0; i < 8; i++) {
		assert_true(wr_block_is(&wr->rank[0], wr_other[i], 3, wr_eight[i]));
	}
	wr_drain(wr);
	kvc_release(&lease, 1);
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
static void p10_a_device_that_cannot_be_opened_is_refused_with_a_reason(void **state)
{
	wr_t *wr = *state;
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
static void p10_a_pool_the_device_cannot_be_given_is_declined(void **state)
{
	wr_t *wr = *state;
	kvc_lease_t *lease;
	wr_end_t end;

	kvx_worker_close(wr->rank[0].worker);
	fake_cuda_fail_always(offsetof(kvk_cuda_ops_t, host_register), 2);
	wr_open_rank(wr, 0, 0);
	assert_int_equal(wr_await_self_test(wr), KVC_ERR_LIMIT);
	assert_int_equal(wr_stats(wr, 0).registered_bytes, 0);
	lease = wr_lease(wr, 0, 8);
	begin_load(wr, lease, 0);
	wr_end(wr);
	wr_wait_load(&wr->rank[0], 7, 0, &end);
	assert_int_equal(end.error_count, 8);
	kvc_release(&lease, 1);
	fake_cuda_fail_always(0, 0);
}

/* A save and a load, synchronous or asynchronous: what no error names is right. Whether a call was refused. */
static int save_and_load(wr_t *wr, uint32_t flags)
{
	int refused;

	uint32_t ids[WR_BLOCKS], count, wrong = 0;
	int failed[WR_BLOCKS] = {0};
	kvc_lease_t *lease = wr_lease(wr, 0, 8);
	kvc_put_t *put = wr_put(wr, 8, 16);
	uint64_t until = wr_now_ms() + WR_PATIENCE;
	char id[16];
	uint32_t named = !flags;

	wr_message_load(wr, lease, flags);
	wr_add_save(wr, put, 0, wr_eight, 8);
	wr_step(wr);
	do {
		named += kvx_worker_take_finished(wr->rank[0].worker, id, sizeof id, NULL) > 0;
		count = wr_take_failed(wr, ids);
		for (uint32_t i = 0; i < count; i++) {
			failed[ids[i]] = 1;
		}
		assert_true(wr_now_ms() < until);
	} while (!named);
	wr_message(wr);
	wr_add_fence(wr, wr_eight, 8);
	wr_begin(wr);
	for (uint32_t i = 0; i < 8; i++) { /* what has failed is computed again */
		if (failed[wr_other[i]]) {
			wr_fill_block(&wr->rank[0], wr_other[i], 1, wr_eight[i]);
		}
	}
	for (uint32_t i = 0; i < 8; i++) {
		wr_compare_block(&wr->rank[0], wr_other[i], 1, wr_eight[i], &wrong);
		wr_fill_block(&wr->rank[0], wr_eight[i], 9, wr_eight[i]);
	}
	refused = fake_cuda_failed();
	fake_cuda_fail_nth(0);
	wr_drain(wr);
	wr_device_sync();
	assert_int_equal(wrong, 0);
	kvc_put_free(put);
	kvc_release(&lease, 1);

	return refused;
}

/* What was stored of the blocks 8 .. 15, if it was, is what these were. */
static void check_stored(wr_t *wr)
{
	kvc_match_t match = {.struct_size = sizeof match};
	kvc_lease_t *lease;

	kvc_match(wr->space, wr->keys, 16, &match);
	if (match.n <= 8) {
		return;
	}
	lease = wr_lease(wr, 8, match.n);
	wr_message(wr);
	wr_add_load(wr, lease, 0, 7, wr_other, match.n - 8);
	wr_step(wr);
	for (uint32_t i = 0; i < match.n - 8; i++) {
		assert_true(wr_block_is(&wr->rank[0], wr_other[i], 1, wr_eight[i]));
	}
	wr_drain(wr);
	kvc_release(&lease, 1);
}

static void p1_a_refused_driver_call_costs_a_copy_and_no_wrong_byte(void **state)
{
	wr_t *wr = *state;
	uint32_t failures = 0;
	uint64_t seed = WR_SEED;

	for (uint32_t round = 0; round < NTHS; round++) {
		wr_fill(wr, 1);
		assert_int_equal(kvc_space_reset(wr->space), KVC_OK);
		wr_store(wr, wr_eight, 8);
		wr_device_sync();
		fake_cuda_fail_nth(1 + (round < NTHS / 2 ? round : below(&seed, 200)));
		failures += save_and_load(wr, round % 2 ? KVX_MSG_ASYNC : 0) ? 1u : 0u;
		check_stored(wr);
	}
	print_message("%u calls failed, %u of %u loads, %u saves dropped\n", failures,
		      (uint32_t)wr_stats(wr, 0).loads_failed, (uint32_t)wr_stats(wr, 0).loads,
		      (uint32_t)wr_stats(wr, 0).save_dropped);
	assert_true(failures > NTHS / 4);
	assert_int_equal(kvx_worker_self_test_status(wr->rank[0].worker), KVC_OK);
}

/* ---- counters -------------------------------------------------------------------------------- */

static void what_the_device_did_is_counted(void **state)
{
	wr_t *wr = *state;
	kvx_worker_stats_t stats = wr_stats(wr, 0);

	assert_true(stats.gpu_bytes >= 8u * WR_LAYERS * WR_PAGE);
	assert_int_equal(stats.save_bytes, 8u * WR_LAYERS * WR_PAGE);
	assert_true(stats.gpu_zero_copy + stats.gpu_staged + stats.gpu_copy_per_piece >= 3);
	assert_int_equal(stats.gpu_failures + stats.gpu_refused, 0);
	assert_true(stats.registered_bytes >= 1u << 20);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		WR_TEST(p5_a_step_does_not_wait_for_the_bytes_it_loads, wr_one),
		WR_TEST(p5_a_fence_does_not_wait_for_the_device, wr_one),
		WR_TEST(p5_a_device_that_hangs_costs_a_load_its_deadline, wr_one),
		WR_TEST(p5_a_device_that_hangs_does_not_hold_the_end, wr_one),
		WR_TEST(p1_what_a_step_computed_from_a_bad_block_is_not_stored, wr_one),
		WR_TEST(p1_a_lease_lost_under_a_copy_is_a_failed_load, wr_one),
		WR_TEST(p7_a_daemon_killed_under_copies_costs_these_copies_only, wr_one),
		WR_TEST(p10_a_device_that_cannot_be_opened_is_refused_with_a_reason, wr_alone),
		WR_TEST(p10_a_pool_the_device_cannot_be_given_is_declined, wr_one),
		WR_TEST(p1_a_refused_driver_call_costs_a_copy_and_no_wrong_byte, wr_one),
		WR_TEST(what_the_device_did_is_counted, wr_one),
	};

	return wr_run_tests(argc, argv, tests, KV_COUNT_OF(tests));
}
