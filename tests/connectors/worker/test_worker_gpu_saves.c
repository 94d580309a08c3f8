/* What a step saves of many requests goes in one copy, and each put ends for itself. */
#include "connectors/worker/wr.h"
#include "connectors/worker/wr_device.h"
#include "kernels/fake_cuda.h"

#include <stdio.h>
#include <unistd.h>

#define PUTS 16u

/* Begin a step that saves blocks 1 to n, one put a block. */
static void begin_puts(wr_t *wr, kvc_put_t **put, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		put[i] = wr_put(wr, i, i + 1);
	}
	wr_message(wr);
	for (uint32_t i = 0; i < n; i++) {
		const uint32_t id = 1 + i;

		wr_add_save(wr, put[i], 0, &id, 1);
	}
	wr_begin(wr);
}

/* The first n are stored as they were when the step had computed them. */
static void check_stored(wr_t *wr, uint32_t n)
{
	kvc_lease_t *lease;
	uint32_t ids[PUTS];

	if (n == 0) {
		return;
	}
	lease = wr_lease(wr, 0, n);
	wr_message(wr);
	for (uint32_t i = 0; i < n; i++) {
		ids[i] = 40 + i;
	}
	wr_add_load(wr, lease, 0, 7, ids, n);
	wr_begin(wr);
	kvx_worker_run_sync_loads(wr->rank[0].worker);
	wr_end(wr);
	for (uint32_t i = 0; i < n; i++) {
		assert_true(wr_block_is(&wr->rank[0], ids[i], 1, 1 + i));
	}
	wr_drain(wr);
	kvc_release(&lease, 1);
}

/* One put a request, a block each: how many copies that were. */
static uint64_t save_puts(wr_t *wr, uint32_t n)
{
	const kvx_worker_stats_t before = wr_stats(wr, 0);
	kvx_worker_stats_t after;
	kvc_put_t *put[PUTS];

	begin_puts(wr, put, n);
	wr_end(wr);
	for (uint32_t i = 0; i < n; i++) {
		assert_int_equal(wr_put_wait(put[i]), KVC_OK);
	}
	wr_drain(wr);
	after = wr_stats(wr, 0);
	assert_int_equal(after.save_bytes - before.save_bytes, n * WR_LAYERS * WR_PAGE);

	return after.gpu_zero_copy + after.gpu_staged + after.gpu_copy_per_piece - before.gpu_zero_copy -
	       before.gpu_staged - before.gpu_copy_per_piece;
}

/* And each put has its own block's bytes and digests. The first one may go alone, before the others are handed over. */
static void what_a_step_saves_of_many_requests_goes_together(void **state)
{
	wr_t *wr = *state;
	uint64_t least = PUTS, copies;

	for (uint32_t round = 0; round < 5; round++) {
		assert_int_equal(kvc_space_reset(wr->space), KVC_OK);
		wr_fill(wr, 1);
		copies = save_puts(wr, PUTS);
		least = copies < least ? copies : least;
	}
	print_message("%u puts in %u copies\n", PUTS, (uint32_t)least);
	assert_true(least <= PUTS / 4);
	check_stored(wr, PUTS);
}

/* Some blocks of the batch are about to be reused, and in some rounds the driver refuses to order them: each save ends
 * for itself.
 */
static void p1_saves_that_go_together_end_each_for_itself(void **state)
{
	static const uint32_t some[3] = {2, 5, 9};
	wr_t *wr = *state;
	kvc_match_t match = {.struct_size = sizeof match};
	kvc_put_t *put[PUTS];
	uint32_t stored = 0;

	for (uint32_t round = 0; round < 6; round++) {
		assert_int_equal(kvc_space_reset(wr->space), KVC_OK);
		wr_fill(wr, 1);
		fake_cuda_hold(1);
		begin_puts(wr, put, PUTS);
		wr_end(wr);
		usleep(round % 2 ? 0 : 10000);
		if (round % 3 == 2) {
			fake_cuda_fail_always(offsetof(kvk_cuda_ops_t, stream_wait), 999);
		}
		wr_message(wr);
		wr_add_fence(wr, some, 3);
		wr_begin(wr);
		fake_cuda_fail_always(0, 0);
		for (uint32_t i = 0; i < 3; i++) {
			wr_fill_block(&wr->rank[0], some[i], 2, some[i]);
		}
		fake_cuda_hold(0);
		wr_drain(wr);
		for (uint32_t i = 0; i < PUTS; i++) {
			stored += wr_put_wait(put[i]) == KVC_OK;
		}
		kvc_match(wr->space, wr->keys, PUTS, &match);
		check_stored(wr, match.n);
	}
	print_message("%u of %u puts were stored\n", stored, 6 * PUTS);
	assert_true(stored >= 3 * PUTS);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		WR_TEST(what_a_step_saves_of_many_requests_goes_together, wr_layered),
		WR_TEST(p1_saves_that_go_together_end_each_for_itself, wr_layered),
	};

	return wr_run_tests(argc, argv, tests, KV_COUNT_OF(tests));
}
