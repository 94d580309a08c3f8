/* A worker with a healthy daemon: blocks reused at once were saved first; what it cannot do it says when it is opened.
 */
#include "connectors/worker/wr.h"

#include <string.h>

static uint64_t count_dropped(const wr_t *wr)
{
	return wr_stats(wr, 0).save_dropped + wr_stats(wr, 1).save_dropped;
}

static uint64_t count_fences(const wr_t *wr)
{
	return wr_stats(wr, 0).fences + wr_stats(wr, 1).fences;
}

/* A rank that gives a save up tells the scheduler, and nobody ends the put for it: until it is visible, or given up. */
static int is_saved(wr_t *wr, kvc_put_t *put, uint64_t dropped_before)
{
	const uint64_t until = wr_now_ms() + WR_PATIENCE;
	kvc_status_t status;

	do {
		status = kvc_put_wait(put, 0, 20);
	} while (status == KVC_ERR_TIMEOUT && wr_now_ms() < until && count_dropped(wr) == dropped_before);
	kvc_put_free(put);

	return status == KVC_OK;
}

/* Save blocks, complete or computed by this step, and free them: the next step's first hook is the fence. */
static kvc_put_t *save_and_reuse(wr_t *wr, int complete)
{
	kvc_put_t *put = wr_put(wr, 0, 8);

	wr_message(wr);
	wr_add_save(wr, put, complete ? KVX_MSG_COMPLETE : 0, wr_eight, 8);
	if (!complete) {
		wr_begin(wr);
		wr_end(wr);
		wr_message(wr);
	}
	wr_add_fence(wr, wr_eight, 8);
	wr_begin(wr);
	wr_fill(wr, 2); /* the engine's next step */

	return put;
}

static void check_stored(wr_t *wr)
{
	kvc_lease_t *lease = wr_lease(wr, 0, 8);

	wr_message_load(wr, lease, 0);
	wr_begin(wr);
	wr_run_loads(wr);
	for (uint32_t i = 0; i < 16; i++) {
		assert_true(wr_block_is(&wr->rank[i / 8], wr_other[i % 8], 1, wr_eight[i % 8]));
	}
	kvc_release(&lease, 1);
}

/* The engine frees a block, gets it again in the next step and writes it: what was to be saved is saved before. A
 * transfer thread that gets no CPU for 20 ms gives its save up, and says so: then once more; one that is always the
 * first leaves nothing to fence. */
static void p1_a_block_reused_at_once_was_saved_before(void **state)
{
	wr_t *wr = *state;
	uint32_t saved = 0, rounds = 0;

	for (; rounds < 20 || ((saved < 10 || count_fences(wr) == 0) && rounds < 400); rounds++) {
		const uint64_t before = count_dropped(wr);
		kvc_put_t *put;

		wr_fill(wr, 1);
		put = save_and_reuse(wr, rounds % 2);
		if (is_saved(wr, put, before)) {
			check_stored(wr);
			saved++;
		}
		assert_int_equal(kvc_space_reset(wr->space), KVC_OK);
	}
	/* The last one may have been given up by one rank while the other still copied. */
	for (uint32_t r = 0; r < 2; r++) {
		assert_int_equal(kvx_worker_flush(wr->rank[r].worker, WR_PATIENCE), KVC_OK);
	}
	assert_true(saved >= 10);
	assert_true(saved == rounds || count_dropped(wr) > 0);
	assert_true(count_fences(wr) > 0);
	assert_int_equal(wr_stats(wr, 0).marked + wr_stats(wr, 1).marked, 0);
}

/* Also of a group with fewer layers. */
static void p1_a_roundtrip_brings_a_block_back(void **state)
{
	wr_t *wr = *state;
	wr_rank_t *rank = &wr->rank[0];

	assert_int_equal(kvx_worker_roundtrip_test(rank->worker, 0, 5, 9), KVC_OK);
	assert_true(wr_block_is(rank, 9, 1, 5));
	assert_int_equal(kvx_worker_roundtrip_test(rank->worker, 1, 7, 9), KVC_OK);
	assert_false(wr_block_is(rank, 9, 1, 7)); /* two of the layers are not the group's */
	rank->layers = 4;
	assert_true(wr_block_is(rank, 9, 1, 7));
	assert_int_equal(kvx_worker_roundtrip_test(rank->worker, 2, 5, 9), KVC_ERR_ARG);
	assert_int_equal(kvx_worker_roundtrip_test(rank->worker, 0, WR_BLOCKS, 9), KVC_ERR_ARG);
	assert_int_equal(kvx_worker_roundtrip_test(rank->worker, 0, 5, WR_BLOCKS), KVC_ERR_ARG);
}

#define REFUSED(change, words)                                                                                         \
	do {                                                                                                           \
		kvx_worker_config_t config = good;                                                                     \
		kvk_paged_t cache = wr->rank[0].paged;                                                                 \
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
	wr_t *wr = *state;
	kvx_worker_group_t two[2];
	const kvx_worker_config_t good = wr_config(wr, 0, two);

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
}

int main(int argc, char **argv)
{
	static const wr_t unstored = {.rank_count = 2, .empty = 1};
	static const wr_t padded = {.no_daemon = 1, .groups = "0:full:32,1:window:32:511", .layers = 4};
	const struct CMUnitTest tests[] = {
		WR_TEST(p1_a_block_reused_at_once_was_saved_before, unstored),
		WR_TEST(p1_a_roundtrip_brings_a_block_back, padded),
		WR_TEST(p10_a_configuration_that_contradicts_itself_is_refused, wr_alone),
	};

	return wr_run_tests(argc, argv, tests, KV_COUNT_OF(tests));
}
