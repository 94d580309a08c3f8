/* A worker with a healthy daemon: what was saved comes back, synchronously and asynchronously, on one rank and on two;
 * blocks reused at once were saved first. */
#include "connectors/worker/worker_rig.h"
#include "engine/check.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *kvd_program;

static void check_moved(wr_t *wr, const uint32_t *from, const uint32_t *to, uint32_t n)
{
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		for (uint32_t i = 0; i < n; i++) {
			assert_true(wr_block_is(&wr->rank[r], to[i], 1, from[i]));
		}
	}
}

static kvx_worker_stats_t stats_of(const wr_rank_t *rank)
{
	kvx_worker_stats_t stats = {.struct_size = sizeof stats};

	kvx_worker_get_stats(rank->worker, &stats);

	return stats;
}

static void load_sync(wr_t *wr, kvc_lease_t *lease, const uint32_t *ids, uint32_t n)
{
	wr_plan(wr);
	wr_plan_fence(wr, ids, n);
	wr_plan_load(wr, lease, 0, 7, ids, n);
	wr_begin(wr);
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		kvx_worker_start_async_loads(wr->rank[r].worker);
		kvx_worker_run_sync_loads(wr->rank[r].worker);
	}
}

static void stored_blocks_come_back(uint32_t ranks, uint32_t flags)
{
	kvc_lease_t *lease;
	wr_end_t end;
	rig_t rig;
	wr_t wr;

	wr_start(&wr, &rig, kvd_program, ranks);
	lease = wr_lease(&wr, 0, 8);
	if (flags & KVX_MSG_ASYNC) {
		wr_plan(&wr);
		wr_plan_load(&wr, lease, flags, 7, wr_other, 8);
		wr_begin(&wr);
		for (uint32_t r = 0; r < ranks; r++) {
			kvx_worker_start_async_loads(wr.rank[r].worker);
		}
	} else {
		load_sync(&wr, lease, wr_other, 8);
		check_moved(&wr, wr_eight, wr_other, 8);
	}
	for (uint32_t r = 0; r < ranks; r++) {
		wr_wait_load(&wr.rank[r], 7, flags & KVX_MSG_ASYNC, &end);
		assert_int_equal(end.loaded.status, KVC_OK);
		assert_int_equal(end.loaded.blocks, 8);
		assert_int_equal(end.loaded.bytes, 8u * WR_PAGE * WR_LAYERS / ranks);
		assert_int_equal(end.error_count + (uint32_t)end.failed, 0);
		wr_check_silent(&wr.rank[r]);
	}
	check_moved(&wr, wr_eight, wr_other, 8);
	kvc_release(&lease, 1);
	wr_finish(&wr, &rig);
}

static void p1_synchronously_loaded_blocks_are_those_saved(void **state)
{
	(void)state;
	stored_blocks_come_back(1, 0);
	stored_blocks_come_back(2, 0);
}

static void p1_asynchronously_loaded_blocks_are_those_saved(void **state)
{
	(void)state;
	stored_blocks_come_back(1, KVX_MSG_ASYNC);
	stored_blocks_come_back(2, KVX_MSG_ASYNC);
}

static uint64_t given_up(const wr_t *wr)
{
	return stats_of(&wr->rank[0]).save_dropped + stats_of(&wr->rank[1]).save_dropped;
}

/* A rank that gives a save up tells the scheduler, and nobody ends the put for it: until it is visible, or given up. */
static int is_saved(wr_t *wr, kvc_put_t *put, uint64_t given_up_before)
{
	const uint64_t until = wr_now_ms() + WR_PATIENCE;
	kvc_status_t status;

	do {
		status = kvc_put_wait(put, 0, 20);
	} while (status == KVC_ERR_TIMEOUT && wr_now_ms() < until && given_up(wr) == given_up_before);
	kvc_put_free(put);

	return status == KVC_OK;
}

static uint64_t fences(const wr_t *wr)
{
	return stats_of(&wr->rank[0]).fences + stats_of(&wr->rank[1]).fences;
}

/* The engine frees a block, gets it again in the next step and writes it: what was to be saved is saved before. */
static void p1_a_block_reused_at_once_was_saved_before(void **state)
{
	kvc_lease_t *lease;
	kvc_put_t *put;
	uint32_t saved = 0, rounds = 0;
	uint64_t before;
	rig_t rig;
	wr_t wr;

	(void)state;
	rig_init(&rig, kvd_program);
	rig_start(&rig);
	wr_init(&wr, &rig, 2);
	/* A transfer thread that gets no CPU for 20 ms gives its save up, and says so: then once more; one that is
	 * always the first leaves nothing to fence. */
	for (uint32_t round = 0; round < 20 || ((saved < 10 || fences(&wr) == 0) && round < 400); round++) {
		wr_fill(&wr, 1);
		before = given_up(&wr);
		put = wr_put(&wr, 0, 8);
		wr_plan(&wr);
		wr_plan_save(&wr, put, round % 2 ? KVX_MSG_COMPLETE : 0, wr_eight, 8);
		if (round % 2) {
			wr_plan_fence(&wr, wr_eight, 8);
		}
		wr_begin(&wr);
		for (uint32_t r = 0; r < 2 && round % 2 == 0; r++) {
			kvx_worker_end_step(wr.rank[r].worker);
		}
		if (round % 2 == 0) {
			wr_plan(&wr);
			wr_plan_fence(&wr, wr_eight, 8);
			wr_begin(&wr);
		}
		wr_fill(&wr, 2); /* the engine's next step */
		if (is_saved(&wr, put, before)) {
			lease = wr_lease(&wr, 0, 8);
			load_sync(&wr, lease, wr_other, 8);
			check_moved(&wr, wr_eight, wr_other, 8);
			kvc_release(&lease, 1);
			saved++;
		}
		rounds++;
		assert_int_equal(kvc_space_reset(wr.space), KVC_OK);
	}
	/* The last one may have been given up by one rank while the other still copied. */
	for (uint32_t r = 0; r < 2; r++) {
		assert_int_equal(kvx_worker_flush(wr.rank[r].worker, WR_PATIENCE), KVC_OK);
	}
	assert_true(saved >= 10);
	assert_true(saved == rounds || given_up(&wr) > 0);
	assert_true(fences(&wr) > 0);
	assert_int_equal(stats_of(&wr.rank[0]).marked + stats_of(&wr.rank[1]).marked, 0);
	wr_fini(&wr);
	rig_fini(&rig);
}

/* Also of a group with fewer layers. */
static void p1_a_roundtrip_brings_a_block_back(void **state)
{
	rig_t rig;
	wr_t wr = {.groups = "0:full:32,1:window:32:511", .layers = 4};
	wr_rank_t *rank = &wr.rank[0];

	(void)state;
	rig_init(&rig, kvd_program);
	wr_init_with(&wr, &rig, 1, 0);
	wr_fill(&wr, 1);
	assert_int_equal(kvx_worker_roundtrip_test(rank->worker, 0, 5, 9), KVC_OK);
	assert_true(wr_block_is(rank, 9, 1, 5));
	assert_int_equal(kvx_worker_roundtrip_test(rank->worker, 1, 7, 9), KVC_OK);
	assert_false(wr_block_is(rank, 9, 1, 7)); /* two of the layers are not the group's */
	rank->layers = 4;
	assert_true(wr_block_is(rank, 9, 1, 7));
	assert_int_equal(kvx_worker_roundtrip_test(rank->worker, 2, 5, 9), KVC_ERR_ARG);
	assert_int_equal(kvx_worker_roundtrip_test(rank->worker, 0, WR_BLOCKS, 9), KVC_ERR_ARG);
	assert_int_equal(kvx_worker_roundtrip_test(rank->worker, 0, 5, WR_BLOCKS), KVC_ERR_ARG);
	wr_fini(&wr);
	rig_fini(&rig);
}

#define REFUSED(change, words)                                                                                         \
	do {                                                                                                           \
		kvx_worker_config_t config = good;                                                                     \
		kvk_paged_t cache = wr.rank[0].paged;                                                                  \
		kvx_worker_group_t groups[2] = {{0, &cache}, {1, &cache}};                                             \
		kvx_worker_t *worker = NULL;                                                                           \
		config.groups = groups;                                                                                \
		change;                                                                                                \
		assert_int_equal(kvx_worker_open(&config, &worker), KVC_ERR_ARG);                                      \
		assert_non_null(strstr(kvx_worker_last_error(), words));                                               \
		assert_null(worker);                                                                                   \
	} while (0)

static void p10_a_configuration_that_contradicts_itself_is_refused(void **state)
{
	rig_t rig;
	wr_t wr = {0};

	(void)state;
	rig_init(&rig, kvd_program);
	wr_init_with(&wr, &rig, 1, 0);

	const kvx_worker_config_t good = {.struct_size = sizeof good,
					  .socket = rig.socket,
					  .instance = "i",
					  .secret = (const uint8_t *)"0123456789abcdef",
					  .secret_len = 16,
					  .identity = &wr.identity,
					  .layout = &wr.layout,
					  .range = wr.writers[0],
					  .group_count = 1};

	REFUSED(config.struct_size = 8, "struct_size");
	REFUSED(config.identity = NULL, "required");
	REFUSED(config.range.rank = 3, "rank");
	REFUSED(config.range.layer_count = WR_LAYERS + 1, "within the layout");
	REFUSED(config.range.layer_count = WR_LAYERS - 1, "within the rank's range");
	REFUSED(config.range.head_count = 0, "within the layout");
	REFUSED(config.group_count = 0, "no groups");
	REFUSED(config.threads = 1000, "threads");
	REFUSED(cache.page_bytes++, "page size");
	REFUSED((config.group_count = 2, groups[1].group = 0), "same number");
	REFUSED(config.secret_len = 3, "secret");
	wr_fini(&wr);
	rig_fini(&rig);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p1_synchronously_loaded_blocks_are_those_saved),
		cmocka_unit_test(p1_asynchronously_loaded_blocks_are_those_saved),
		cmocka_unit_test(p1_a_block_reused_at_once_was_saved_before),
		cmocka_unit_test(p1_a_roundtrip_brings_a_block_back),
		cmocka_unit_test(p10_a_configuration_that_contradicts_itself_is_refused),
	};

	if (argc < 2) {
		fprintf(stderr, "usage: %s KVD\n", argv[0]);
		return 64;
	}
	kvd_program = argv[1];

	return cmocka_run_group_tests_name("kvx.worker", tests, NULL, NULL);
}
