/* Memory runs out at every allocation of a worker's open() once, which says so and leaves nothing; and while as many
 * loads begin as a scheduler has at a time. */
#include "connectors/worker/fail_alloc.h"
#include "connectors/worker/wr.h"
#include "worker/cuda/pool_memory.h"

#include <stdio.h>
#include <string.h>

WR_CASE(p5_open_without_memory_says_so_and_leaves_nothing, wr_alone)
{
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

/* Else its blocks would never be there, and nothing would say why. No thread: the call is the transfer thread's. */
KV_TEST(p5_a_worker_that_cannot_list_a_slab_declines)
{
	static kvx_wgpu_t gpu;
	static kvx_worker_t worker = {.gpu = &gpu};
	const kvc_memory_t memory = {.base = &gpu, .bytes = 1 << 20, .slot_bytes = 4096};

	fail_at = 1;
	kvx_pool_memory_changed(&worker, &memory, 1);
	fail_at = 0;
	assert_int_equal(kvx_worker_self_test_status(&worker), KVC_ERR_NOMEM);
}

/* As many as a scheduler has at a time, while there is no memory. It keeps leases and slots, and an engine waits, for
 * as long as they are not told. */
WR_CASE(p7_every_load_there_was_no_memory_for_is_named, wr_alone)
{
	const uint32_t all = 1024;
	uint32_t loaded = 0, dropped = 0, finished = 0;
	const kvx_record_header_t *record;
	kvx_msg_reader_t cursor;
	const void *bytes;
	char id[16];
	size_t len;
	int failed;

	wr_message(wr);
	for (uint32_t i = 0; i < all; i++) {
		wr_add_load(wr, NULL, KVX_MSG_ASYNC, i + 1, wr_eight, 8);
	}
	wr_add_save(wr, NULL, KVX_MSG_COMPLETE, wr_eight, 8);
	kvx_msg_finish(&wr->message, wr->step);
	fail_at = FAIL_EACH;
	kvx_worker_begin_step(wr->rank[0].worker, wr->message.data, wr->message.len);
	kvx_worker_start_async_loads(wr->rank[0].worker);
	wr_end(wr);
	kvx_worker_take_report(wr->rank[0].worker, &bytes, &len);
	fail_at = 0;

	assert_true(kvx_msg_open(&cursor, KVX_REPORT_MAGIC, bytes, len));
	while ((record = kvx_msg_next(&cursor)) != NULL) {
		loaded += record->type == KVX_RECORD_LOADED;
		dropped += record->type == KVX_RECORD_DROPPED;
	}
	assert_false(cursor.bad);
	assert_int_equal(loaded, all);
	assert_int_equal(dropped, 1);
	while (kvx_worker_take_finished(wr->rank[0].worker, id, sizeof id, &failed) > 0) {
		char expected[16];

		(void)snprintf(expected, sizeof expected, "request-%u", ++finished);
		assert_memory_equal(id, expected, strlen(expected));
		assert_true(failed);
	}
	assert_int_equal(finished, all);
	assert_int_equal(wr_count_failed(wr), 8);
}

WR_MAIN
