/* The disk tier does what its header says: store, load, flush, free, states, order of callbacks. */
#include "nvme_test.h"

static found_t found;

static void p1_a_stored_block_comes_back_byte_for_byte(void **state)
{
	fixture_t f;
	kvs_loc_t loc[20];

	(void)state;
	fixture_init(&f, NULL);
	fixture_begin(&f, &found);
	for (uint32_t i = 0; i < 20; i++) {
		assert_int_equal(put_block(&f, &plain, 1, i + 1, &loc[i]), KV_OK);
	}
	for (uint32_t i = 0; i < 20; i++) {
		assert_int_equal(get_block(&f, &plain, 1, i + 1, loc[i]), KV_OK);
	}
	check_sums(&f);
	fixture_fini(&f);
}

static void p2_what_was_flushed_is_there_after_reopen_parents_first(void **state)
{
	fixture_t f;
	kvs_loc_t loc;

	(void)state;
	fixture_init(&f, NULL);
	fixture_begin(&f, &found);
	for (uint32_t i = 20; i > 0; i--) {
		assert_int_equal(put_block(&f, &plain, 1, i, &loc), KV_OK);
	}
	assert_int_equal(flush_wait(f.tier), KV_OK);
	check_sums(&f);
	fixture_close(&f);

	fixture_begin(&f, &found);
	assert_int_equal(found.count, 20);
	assert_int_equal(kv_metric_get(&f.metrics, KV_M_DISK_RECOVERED), 20);
	for (uint32_t i = 0; i < 20; i++) {
		assert_int_equal(get_block(&f, &plain, 1, found.meta[i].depth, found.loc[i]), KV_OK);
	}
	check_sums(&f);
	fixture_fini(&f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p1_a_stored_block_comes_back_byte_for_byte),
		cmocka_unit_test(p2_what_was_flushed_is_there_after_reopen_parents_first),
	};

	return cmocka_run_group_tests_name("storage.nvme", tests, NULL, NULL);
}
