/* What a step saves of many requests goes in one copy, and each put ends for itself. */
#include "connectors/worker/layers_rig.h"
#include "connectors/worker/wr_device.h"
#include "engine/check.h"
#include "kernels/fake_cuda.h"

#include <stdio.h>
#include <unistd.h>

#define PUTS 16u

/* One put a request, a block each: how many copies that were. */
static uint64_t save_puts(wr_t *wr, uint32_t n)
{
	const kvx_worker_stats_t before = layers_stats(wr);
	kvx_worker_stats_t after;
	kvc_put_t *put[PUTS];

	for (uint32_t i = 0; i < n; i++) {
		put[i] = wr_put(wr, i, i + 1);
	}
	wr_plan(wr);
	for (uint32_t i = 0; i < n; i++) {
		const uint32_t id = 1 + i;

		wr_plan_save(wr, put[i], 0, &id, 1);
	}
	wr_begin(wr);
	kvx_worker_end_step(wr->rank[0].worker);
	for (uint32_t i = 0; i < n; i++) {
		assert_int_equal(wr_put_wait(wr, put[i]), KVC_OK);
	}
	layers_hear_all(wr);
	after = layers_stats(wr);
	assert_int_equal(after.save_bytes - before.save_bytes, n * WR_LAYERS * WR_PAGE);

	return after.gpu_zero_copy + after.gpu_staged + after.gpu_copy_per_piece - before.gpu_zero_copy -
	       before.gpu_staged - before.gpu_copy_per_piece;
}

/* And each put has its own block's bytes and digests. The first one may go alone, before the others are handed over. */
static void what_a_step_saves_of_many_requests_goes_together(void **state)
{
	uint64_t least = PUTS, copies;
	kvc_lease_t *lease;
	uint32_t ids[PUTS];
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	for (uint32_t round = 0; round < 5; round++) {
		assert_int_equal(kvc_space_reset(wr.space), KVC_OK);
		wr_fill(&wr, 1);
		copies = save_puts(&wr, PUTS);
		least = copies < least ? copies : least;
	}
	print_message("%u puts in %u copies\n", PUTS, (uint32_t)least);
	assert_true(least <= PUTS / 4);
	lease = wr_lease(&wr, 0, PUTS);
	wr_plan(&wr);
	for (uint32_t i = 0; i < PUTS; i++) {
		ids[i] = 40 + i;
	}
	wr_plan_load(&wr, lease, 0, 7, ids, PUTS);
	wr_begin(&wr);
	kvx_worker_run_sync_loads(wr.rank[0].worker);
	for (uint32_t i = 0; i < PUTS; i++) {
		assert_true(wr_block_is(&wr.rank[0], ids[i], 1, 1 + i));
	}
	layers_hear_all(&wr);
	kvc_release(&lease, 1);
	rig_check_quiet(&rig);
	layers_finish(&rig, &wr);
}

/* What was stored of them is what they were when the step had computed them. */
static void check_these(wr_t *wr)
{
	kvc_match_t match = {.struct_size = sizeof match};
	kvc_lease_t *lease;
	uint32_t ids[PUTS];

	kvc_match(wr->space, wr->keys, PUTS, &match);
	if (match.n == 0) {
		return;
	}
	lease = wr_lease(wr, 0, match.n);
	wr_plan(wr);
	for (uint32_t i = 0; i < match.n; i++) {
		ids[i] = 40 + i;
	}
	wr_plan_load(wr, lease, 0, 7, ids, match.n);
	wr_begin(wr);
	kvx_worker_run_sync_loads(wr->rank[0].worker);
	kvx_worker_end_step(wr->rank[0].worker);
	for (uint32_t i = 0; i < match.n; i++) {
		assert_true(wr_block_is(&wr->rank[0], ids[i], 1, 1 + i));
	}
	layers_hear_all(wr);
	kvc_release(&lease, 1);
}

/* Some blocks of the flight are about to be reused, and one of its puts is revoked: each save ends for itself. */
static void p1_saves_that_go_together_end_each_for_itself(void **state)
{
	static const uint32_t some[3] = {2, 5, 9};
	kvc_put_t *put[PUTS];
	uint32_t stored = 0;
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	for (uint32_t round = 0; round < 6; round++) {
		assert_int_equal(kvc_space_reset(wr.space), KVC_OK);
		wr_fill(&wr, 1);
		for (uint32_t i = 0; i < PUTS; i++) {
			put[i] = wr_put(&wr, i, i + 1);
		}
		fake_cuda_hold(1);
		wr_plan(&wr);
		for (uint32_t i = 0; i < PUTS; i++) {
			const uint32_t id = 1 + i;

			wr_plan_save(&wr, put[i], 0, &id, 1);
		}
		wr_begin(&wr);
		kvx_worker_end_step(wr.rank[0].worker);
		usleep(round % 2 ? 0 : 10000);
		if (round % 3 == 2) {
			fake_cuda_fail_always(offsetof(kvk_cuda_ops_t, stream_wait), 999); /* no order: poisoned */
		}
		wr_plan(&wr);
		wr_plan_fence(&wr, some, 3);
		wr_begin(&wr);
		fake_cuda_fail_always(0, 0);
		for (uint32_t i = 0; i < 3; i++) {
			wr_fill_block(&wr.rank[0], some[i], 2, some[i]);
		}
		fake_cuda_hold(0);
		layers_hear_all(&wr);
		for (uint32_t i = 0; i < PUTS; i++) {
			stored += wr_put_wait(&wr, put[i]) == KVC_OK;
		}
		check_these(&wr);
	}
	print_message("%u of %u puts were stored\n", stored, 6 * PUTS);
	assert_true(stored >= 3 * PUTS);
	layers_finish(&rig, &wr);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_a_step_saves_of_many_requests_goes_together),
		cmocka_unit_test(p1_saves_that_go_together_end_each_for_itself),
	};

	if (argc < 2) {
		fprintf(stderr, "usage: %s KVD\n", argv[0]);
		return 64;
	}
	layers_program = argv[1];

	return cmocka_run_group_tests_name("kvx.worker-gpu-saves", tests, NULL, NULL);
}
