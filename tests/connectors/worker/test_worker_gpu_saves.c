/* What a step saves of many requests goes in one copy, and each put ends for itself. */
#include "connectors/worker/wr.h"
#include "connectors/worker/wr_device.h"
#include "kernels/fake_cuda.h"

#include <stdio.h>
#include <unistd.h>

#define PUTS 16u

/* One put a request, a block each: how many copies that were. */
static uint64_t save_puts(wr_t *wr, uint32_t n)
{
	const kvx_worker_stats_t before = wr_stats(wr, 0);
	kvx_worker_stats_t after;
	kvc_put_t *put[PUTS];

	for (uint32_t i = 0; i < n; i++) {
		put[i] = wr_put(wr, i, i + 1);
	}
	wr_message(wr);
	for (uint32_t i = 0; i < n; i++) {
		const uint32_t id = 1 + i;

		wr_add_save(wr, put[i], 0, &id, 1);
	}
	wr_begin(wr);
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
	kvc_lease_t *lease;
	uint32_t ids[PUTS];

	for (uint32_t round = 0; round < 5; round++) {
		assert_int_equal(kvc_space_reset(wr->space), KVC_OK);
		wr_fill(wr, 1);
		copies = save_puts(wr, PUTS);
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
	wr_begin(wr);
	kvx_worker_run_sync_loads(wr->rank[0].worker);
	for (uint32_t i = 0; i < PUTS; i++) {
		assert_true(wr_block_is(&wr->rank[0], ids[i], 1, 1 + i));
	}
	wr_drain(wr);
	kvc_release(&lease, 1);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		WR_TEST(what_a_step_saves_of_many_requests_goes_together, wr_layered),
	};

	return wr_run_tests(argc, argv, tests, KV_COUNT_OF(tests));
}
