/* Memory runs out at every allocation of a worker once: open() says so and leaves nothing, a plan's loads and saves
 * fail like any others. */
#include "connectors/worker/fail_alloc.h"
#include "connectors/worker/wr.h"
#include "worker/cuda/pool_memory.h"

#include <string.h>

static void p5_open_without_memory_says_so_and_leaves_nothing(void **state)
{
	wr_t *wr = *state;
	kvc_status_t status = KVC_ERR_NOMEM;
	uint32_t failed = 0;

	kvx_worker_close(wr->rank[0].worker);
	for (uint32_t n = 1; status == KVC_ERR_NOMEM; n++) {
		kvx_worker_group_t groups[2];
		const kvx_worker_config_t config = wr_config(wr, 0, groups);

		fail_at = n;
		status = kvx_worker_open(&config, &wr->rank[0].worker);
		failed += status == KVC_ERR_NOMEM;
	}
	fail_at = 0;
	assert_int_equal(status, KVC_OK);
	assert_true(failed > 8);
}

/* A lease that has no block, of no daemon: the first load is "a", the next one "b". */
static void add_load(wr_t *wr, uint32_t flags, const char *id, const uint32_t *ids)
{
	const kvx_msg_part_t part = {.n = 4};
	kvx_msg_load_t *load = kvx_msg_add_record(&wr->message, KVX_RECORD_LOAD, sizeof *load);

	assert_non_null(load);
	load->load = (uint64_t)id[0];
	load->flags = flags;
	load->parts = 1;
	load->id_len = 1;
	kvx_msg_append(&wr->message, id, 1);
	kvx_msg_append(&wr->message, &part, sizeof part);
	kvx_msg_append(&wr->message, ids, 4 * sizeof *ids);
}

/* A message with one of each; the n-th allocation of begin_step() and of what follows fails. */
static void run_message(wr_t *wr, uint32_t n)
{
	kvx_worker_t *worker = wr->rank[0].worker;
	const void *bytes;
	uint32_t errors;
	char id[16];
	size_t len;
	int failed = 0;

	wr_message(wr);
	wr_add_space(wr, 3, "adapter");
	wr_add_save(wr, NULL, KVX_MSG_COMPLETE, wr_eight, 8);
	add_load(wr, 0, "a", wr_eight);
	add_load(wr, KVX_MSG_ASYNC, "b", wr_eight + 4);
	kvx_msg_finish(&wr->message, wr->step);

	fail_at = n;
	kvx_worker_begin_step(worker, wr->message.data, wr->message.len);
	wr_run_loads(wr);
	wr_end(wr);
	errors = wr_count_failed(wr);
	assert_int_equal(errors, 8);
	assert_int_equal(kvx_worker_take_finished(worker, id, sizeof id, &failed), 1);
	assert_true(id[0] == 'b' && failed);
	assert_int_equal(kvx_worker_take_finished(worker, id, sizeof id, &failed), 0);
	assert_int_equal(kvx_worker_flush(worker, WR_PATIENCE), KVC_OK);
	kvx_worker_take_report(worker, &bytes, &len);
	fail_at = 0;
}

static void p7_a_message_without_memory_fails_like_any_other(void **state)
{
	(void)state;
	for (uint32_t n = 0; n < 16; n++) {
		wr_t wr = wr_alone;

		wr_open(&wr);
		run_message(&wr, n);
		run_message(&wr, 0);
		wr_close(&wr);
	}
}

/* As many as a scheduler has at a time, while there is no memory. */
static void begin_loads_without_memory(wr_t *wr, int save)
{
	wr_message(wr);
	for (uint32_t i = 0; i < 1024; i++) {
		kvx_msg_load_t *load = kvx_msg_add_record(&wr->message, KVX_RECORD_LOAD, sizeof *load);

		assert_non_null(load);
		load->load = i + 1;
		load->flags = KVX_MSG_ASYNC;
		load->id_len = sizeof i;
		kvx_msg_append(&wr->message, &i, sizeof i);
	}
	if (save) {
		wr_add_save(wr, NULL, KVX_MSG_COMPLETE, wr_eight, 8);
	}
	fail_at = FAIL_EACH;
	wr_begin(wr);
	kvx_worker_start_async_loads(wr->rank[0].worker);
	wr_end(wr);
}

/* Else its blocks would never be there, and nothing would say why. No thread: the call is the transfer thread's. */
static void p5_a_worker_that_cannot_list_a_slab_declines(void **state)
{
	static kvx_wgpu_t gpu;
	static kvx_worker_t worker = {.gpu = &gpu};
	const kvc_memory_t memory = {.base = &gpu, .bytes = 1 << 20, .slot_bytes = 4096};

	(void)state;
	fail_at = 1;
	kvx_pool_memory_changed(&worker, &memory, 1);
	fail_at = 0;
	assert_int_equal(kvx_worker_self_test_status(&worker), KVC_ERR_NOMEM);
}

/* An engine waits for as long as it is not told. */
static void p7_every_load_there_was_no_memory_for_is_named(void **state)
{
	wr_t *wr = *state;
	static uint8_t named[1024];
	char id[16];
	int failed = 0;

	begin_loads_without_memory(wr, 0);
	fail_at = 0;
	for (uint32_t n = 0; n < 1024; n++) {
		uint32_t i = UINT32_MAX;

		assert_int_equal(kvx_worker_take_finished(wr->rank[0].worker, id, sizeof id, &failed), sizeof i);
		memcpy(&i, id, sizeof i);
		assert_true(failed && i < 1024 && !named[i]);
		named[i] = 1;
	}
	assert_int_equal(kvx_worker_take_finished(wr->rank[0].worker, id, sizeof id, &failed), 0);
}

/* A scheduler keeps leases and slots for as long as it is not told. */
static void p7_completed_loads_are_reported_without_memory(void **state)
{
	wr_t *wr = *state;
	const kvx_record_header_t *record;
	uint32_t loaded = 0, dropped = 0;
	kvx_msg_reader_t cursor;
	const void *bytes;
	size_t len;

	begin_loads_without_memory(wr, 1);
	kvx_worker_take_report(wr->rank[0].worker, &bytes, &len);
	fail_at = 0;
	assert_true(kvx_msg_open(&cursor, KVX_REPORT_MAGIC, bytes, len));
	while ((record = kvx_msg_next(&cursor)) != NULL) {
		loaded += record->type == KVX_RECORD_LOADED;
		dropped += record->type == KVX_RECORD_DROPPED;
	}
	assert_false(cursor.bad);
	assert_int_equal(loaded, 1024);
	assert_int_equal(dropped, 1);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		WR_TEST(p5_open_without_memory_says_so_and_leaves_nothing, wr_alone),
		cmocka_unit_test(p7_a_message_without_memory_fails_like_any_other),
		cmocka_unit_test(p5_a_worker_that_cannot_list_a_slab_declines),
		WR_TEST(p7_every_load_there_was_no_memory_for_is_named, wr_alone),
		WR_TEST(p7_completed_loads_are_reported_without_memory, wr_alone),
	};

	return wr_run_tests(argc, argv, tests, KV_COUNT_OF(tests));
}
