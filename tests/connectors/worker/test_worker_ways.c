/* How saves leave the device during a step, with blocks that are large enough for either way: built with pages of their
 * own size (WR_PAGE). Which loads come first. */
#include "connectors/worker/wr.h"
#include "connectors/worker/wr_device.h"
#include "kernels/fake_cuda.h"
#include "worker/cuda/state.h"

#include <stddef.h>
#include <stdio.h>
#include <unistd.h>

#define SAVED 8u
#define SOON  400u /* ms; a load that has no more time does not give way */

typedef struct ways {
	uint64_t zero_copy, staged;
} ways_t;

/* What a step saves that computes these tokens of one request; 0: it does not say. */
static ways_t save_beside(wr_t *wr, uint32_t longest)
{
	const kvx_worker_stats_t before = wr_stats(wr, 0);
	kvc_put_t *put = wr_put(wr, 0, SAVED);
	kvx_worker_stats_t after;

	wr_message(wr);
	if (longest > 0) {
		wr_add_work(wr, longest, 0);
	}
	wr_add_save(wr, put, 0, wr_eight, SAVED);
	wr_begin(wr);
	wr_end(wr);
	assert_int_equal(wr_put_wait(put), KVC_OK);
	wr_drain(wr);
	after = wr_stats(wr, 0);
	assert_int_equal(after.gpu_copy_per_piece, before.gpu_copy_per_piece);

	return (ways_t){after.gpu_zero_copy - before.gpu_zero_copy, after.gpu_staged - before.gpu_staged};
}

/* A prompt's products are of many waves of all SMs, those of a step that generates of one or less: through the ring
 * during the first, by a kernel during the second. A step that says nothing computes no prompt. What is stored is the
 * same. */
WR_CASE(saves_use_the_copy_engine_in_prefill_steps_only, wr_layered)
{
	static const struct {
		uint32_t longest;
		int ring;
	} steps[] = {{4096, 1}, {1, 0}, {0, 0}, {16, 1}, {15, 0}, {0, 0}};

	for (size_t i = 0; i < KV_COUNT_OF(steps); i++) {
		kvc_lease_t *lease;
		ways_t ways;
		wr_end_t end;

		assert_int_equal(kvc_space_reset(wr->space), KVC_OK);
		wr_fill(wr, 1 + (uint32_t)i);
		ways = save_beside(wr, steps[i].longest);
		assert_true(steps[i].ring ? ways.staged > 0 : ways.zero_copy > 0);
		assert_int_equal(steps[i].ring ? ways.zero_copy : ways.staged, 0);
		lease = wr_lease(wr, 0, SAVED);
		wr_load(wr, lease, 0, &end);
		wr_check_other(wr, 1 + (uint32_t)i);
		kvc_release(&lease, 1);
	}
}

/* The engine plans the next step while the device still computes the prompt. */
WR_CASE(saves_use_the_copy_engine_until_the_device_has_computed_the_prompt, wr_layered)
{
	const kvx_worker_stats_t before = wr_stats(wr, 0);
	kvx_worker_stats_t after;
	kvc_put_t *put;

	assert_int_equal(kvc_space_reset(wr->space), KVC_OK);
	put = wr_put(wr, 0, SAVED);
	wr_device_stall(0, 1);
	wr_message(wr);
	wr_add_work(wr, 4096, 0);
	wr_begin(wr);
	wr_end(wr);
	wr_message(wr);
	wr_add_save(wr, put, KVX_MSG_COMPLETE, wr_eight, SAVED);
	wr_begin(wr);
	wr_end(wr);
	KV_AWAIT(atomic_load(&wr->rank[0].worker->gpu->in_flight) > 0);
	wr_device_stall(0, 0);
	assert_int_equal(wr_put_wait(put), KVC_OK);
	wr_drain(wr);
	after = wr_stats(wr, 0);
	assert_true(after.gpu_staged > before.gpu_staged);
	assert_int_equal(after.gpu_zero_copy, before.gpu_zero_copy);
}

/* Kernels and copies that the driver was asked for. */
static uint64_t asked(void)
{
	return fake_cuda_launches() + fake_cuda_calls(offsetof(kvk_cuda_ops_t, copy_async)) +
	       fake_cuda_calls(offsetof(kvk_cuda_ops_t, copy_batch));
}

/* The ring is faster, and what an engine copies in before it computes waits behind all that the copy engine has on its
 * way. */
WR_CASE(p7_a_small_asynchronous_load_leaves_the_copy_engine_alone, wr_layered)
{
	for (uint32_t flags = 0; flags <= KVX_MSG_ASYNC; flags += KVX_MSG_ASYNC) {
		const kvx_worker_stats_t before = wr_stats(wr, 0);
		kvc_lease_t *lease = wr_lease(wr, 0, SAVED);
		kvx_worker_stats_t after;
		wr_end_t end;

		wr_load(wr, lease, flags, &end);
		after = wr_stats(wr, 0);
		assert_int_equal(end.loaded.status, KVC_OK);
		assert_int_equal(after.gpu_staged - before.gpu_staged, flags == 0);
		assert_int_equal(after.gpu_zero_copy - before.gpu_zero_copy, flags != 0);
		kvc_release(&lease, 1);
	}
}

/* But a large one is given to it in jobs that are small, two at a time. */
WR_CASE(p7_a_large_asynchronous_load_keeps_little_before_the_copy_engine, wr_layered)
{
	const kvx_worker_stats_t before = wr_stats(wr, 0);
	kvx_wgpu_t *gpu = wr->rank[0].worker->gpu;
	kvc_lease_t *lease = wr_lease(wr, 0, SAVED);
	kvx_worker_stats_t after;
	wr_end_t end;

	wr_fill(wr, 9);
	wr_device_sync();
	gpu->large_load = SAVED * WR_LAYERS * WR_PAGE;
	gpu->large_batch = 2;
	fake_cuda_hold(1);
	wr_message_load(wr, lease, KVX_MSG_ASYNC);
	wr_step(wr);
	KV_AWAIT(atomic_load(&gpu->in_flight) == 2);
	usleep(20000);
	assert_int_equal(atomic_load(&gpu->in_flight), 2);
	fake_cuda_hold(0);
	wr_wait_load(wr, KVX_MSG_ASYNC, &end);
	after = wr_stats(wr, 0);
	assert_int_equal(end.loaded.status, KVC_OK);
	assert_int_equal(after.gpu_staged - before.gpu_staged, SAVED / 2);
	assert_int_equal(after.gpu_zero_copy, before.gpu_zero_copy);
	wr_check_other(wr, 1);
	gpu->large_load++;
	wr_load(wr, lease, KVX_MSG_ASYNC, &end);
	assert_int_equal(wr_stats(wr, 0).gpu_staged, after.gpu_staged);
	kvc_release(&lease, 1);
}

/* Has the asynchronous load failed? */
static int wait_named(wr_t *wr)
{
	int failed = 0;
	char id[16];

	(void)wr_count_failed(wr);
	KV_AWAIT(kvx_worker_take_finished(wr->rank[0].worker, id, sizeof id, &failed) > 0);

	return failed;
}

/* What is in flight besides a synchronous load: copies of the load that the device has begun, or that are behind a step
 * before. */
typedef struct giving {
	int begun, soon;
} giving_t;

/* A plan of a synchronous and of an asynchronous load has begun. */
static void begin_both(wr_t *wr, const kvc_lease_t *lease, giving_t giving, const uint32_t *beside)
{
	fake_cuda_drain();
	fake_cuda_hold(giving.begun ? 2 : 1);
	wr->timeout_ms = WR_PATIENCE;
	wr_message(wr);
	wr_add_fence(wr, wr_other, SAVED);
	wr_add_load(wr, lease, 0, 7, wr_other, SAVED);
	wr->timeout_ms = giving.soon ? SOON : WR_PATIENCE;
	wr_add_load(wr, lease, KVX_MSG_ASYNC, 8, beside, SAVED);
	assert_int_equal(wr_prefetch(wr, KVX_PREFETCH_COMPUTED), 1);
	wr_wait_prefetched(wr);
}

/* A step waits for its loads, and the link would be shared: asynchronous loads are sent when these have come, or
 * when their own time runs out; and as long as these cannot begin. */
WR_CASE(p7_asynchronous_loads_yield_to_synchronous_ones, wr_layered)
{
	static const uint32_t beside[SAVED] = {11, 32, 13, 42, 15, 52, 17, 61};
	static const giving_t givings[] = {{1, 0}, {1, 1}, {0, 0}, {1, 0}, {0, 1}};
	uint64_t of_step = 0;

	for (size_t round = 0; round < KV_COUNT_OF(givings); round++) {
		const int waits = givings[round].begun && !givings[round].soon;
		const uint64_t before = asked();
		kvc_lease_t *lease = wr_lease(wr, 0, SAVED);
		int failed;

		begin_both(wr, lease, givings[round], beside);
		if (waits) {
			of_step = asked() - before;
			usleep(50000);
			assert_int_equal(asked() - before, of_step);
		}
		KV_AWAIT(waits || asked() - before != of_step);
		wr_begin(wr);
		kvx_worker_start_async_loads(wr->rank[0].worker);
		kvx_worker_run_sync_loads(wr->rank[0].worker);
		wr_end(wr);
		fake_cuda_hold(0);
		failed = wait_named(wr);
		assert_true(!failed || givings[round].soon); /* it may come too late */
		wr_drain(wr);
		wr_check_other(wr, 1);
		for (uint32_t b = 0; b < SAVED; b++) {
			assert_true(failed || wr_block_is(&wr->rank[0], beside[b], 1, wr_eight[b]));
		}
		kvc_release(&lease, 1);
	}
}

WR_MAIN
