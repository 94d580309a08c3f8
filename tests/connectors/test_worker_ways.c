/* How saves leave the device beside a step, with blocks that are large enough for either way: built with pages of their own size (WR_PAGE). */
#include "connectors/layers_rig.h"
#include "engine/check.h"

#include <stdio.h>

#define SAVED 8u

typedef struct ways {
	uint64_t zero_copy, staged;
} ways_t;

/* What a step saves that computes so many tokens of one request; 0: it does not say. */
static ways_t save_beside(wr_t *wr, uint32_t longest)
{
	const kvx_worker_stats_t before = layers_stats(wr);
	kvc_put_t *put = wr_put(wr, 0, SAVED);
	kvx_worker_stats_t after;

	wr_plan(wr);
	if (longest > 0) {
		kvx_plan_work_t *work = kvx_bytes_record(&wr->plan, KVX_RECORD_WORK, sizeof *work);

		work->longest = longest;
	}
	wr_plan_save(wr, put, 0, wr_eight, SAVED);
	wr_begin(wr);
	kvx_worker_end(wr->rank[0].worker);
	assert_int_equal(wr_put_wait(wr, put), KVC_OK);
	layers_hear_all(wr);
	after = layers_stats(wr);
	assert_int_equal(after.gpu_each, before.gpu_each);

	return (ways_t){after.gpu_zero_copy - before.gpu_zero_copy, after.gpu_staged - before.gpu_staged};
}

/* A prompt's products are of many waves of all SMs, those of a step that generates of one or less: through the ring beside the first, by a kernel beside the
 * second. A step that says nothing computes no prompt. What is stored is the same. */
static void saves_go_through_the_ring_beside_prompts_only(void **state)
{
	static const struct {
		uint32_t longest;
		int ring;
	} steps[] = {{4096, 1}, {1, 0}, {0, 0}, {16, 1}, {15, 0}, {0, 0}};
	rig_t rig;
	wr_t wr;

	(void)state;
	layers_start(&rig, &wr, 1);
	for (size_t i = 0; i < KV_COUNT_OF(steps); i++) {
		kvc_lease_t *lease;
		ways_t ways;

		assert_int_equal(kvc_space_reset(wr.space), KVC_OK);
		wr_fill(&wr, 1 + (uint32_t)i);
		ways = save_beside(&wr, steps[i].longest);
		assert_true(steps[i].ring ? ways.staged > 0 : ways.zero_copy > 0);
		assert_int_equal(steps[i].ring ? ways.zero_copy : ways.staged, 0);
		lease = wr_lease(&wr, 0, SAVED);
		wr_plan(&wr);
		wr_plan_load(&wr, lease, 0, 1 + i, wr_other, SAVED);
		wr_begin(&wr);
		kvx_worker_load(wr.rank[0].worker);
		kvx_worker_end(wr.rank[0].worker);
		for (uint32_t b = 0; b < SAVED; b++) {
			assert_true(wr_block_is(&wr.rank[0], wr_other[b], 1 + (uint32_t)i, wr_eight[b]));
		}
		layers_hear_all(&wr);
		kvc_release(&lease, 1);
	}
	rig_check_quiet(&rig);
	layers_finish(&rig, &wr);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(saves_go_through_the_ring_beside_prompts_only),
	};

	if (argc != 2) {
		printf("usage: %s KVD\n", argv[0]);
		return 2;
	}
	layers_program = argv[1];

	return cmocka_run_group_tests(tests, NULL, NULL);
}
