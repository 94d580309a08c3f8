/* Memory runs out at every allocation of a worker once: open() says so and leaves nothing, a plan's loads and saves
 * fail like any others. */
#include "connectors/worker/worker_rig.h"
#include "connectors/worker/wr_device.h"
#include "engine/check.h"
#include "worker/cuda/pool_memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- allocations of the sources under test (--wrap) ------------------------------------------ */

#define EACH UINT32_MAX

static _Thread_local uint32_t fail_at; /* 1: the next one; 0: none */

static int fails(void)
{
	return fail_at == EACH || (fail_at > 0 && --fail_at == 0);
}

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t size);
/* visible: sanitizers' libraries look for them */
__attribute__((visibility("default"))) void *__wrap_malloc(size_t size);
__attribute__((visibility("default"))) void *__wrap_calloc(size_t n, size_t size);
__attribute__((visibility("default"))) void *__wrap_realloc(void *p, size_t size);

void *__wrap_malloc(size_t size)
{
	return fails() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t n, size_t size)
{
	return fails() ? NULL : __real_calloc(n, size);
}

void *__wrap_realloc(void *p, size_t size)
{
	return fails() ? NULL : __real_realloc(p, size);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void p5_open_without_memory_says_so_and_leaves_nothing(void **state)
{
	rig_t rig = {.socket = "/nonexistent/kvd.sock"};
	wr_t wr = {0};
	kvc_status_t status = KVC_ERR_NOMEM;
	uint32_t failed = 0;

	(void)state;
	wr_init_with(&wr, &rig, 1, 0);
	kvx_worker_close(wr.rank[0].worker);
	for (uint32_t n = 1; status == KVC_ERR_NOMEM; n++) {
		const kvx_worker_group_t group = {0, &wr.rank[0].paged};
		kvx_worker_config_t config = {.struct_size = sizeof config,
					      .socket = rig.socket,
					      .instance = "worker-test",
					      .secret = (const uint8_t *)"0123456789abcdef",
					      .secret_len = 16,
					      .identity = &wr.identity,
					      .layout = &wr.layout,
					      .range = wr.writers[0],
					      .groups = &group,
					      .group_count = 1,
					      .threads = 3};

		wr_device_config(&config);
		fail_at = n;
		status = kvx_worker_open(&config, &wr.rank[0].worker);
		failed += status == KVC_ERR_NOMEM;
	}
	fail_at = 0;
	assert_int_equal(status, KVC_OK);
	assert_true(failed > 8);
	wr_fini(&wr);
}

/* A plan with one of each; the n-th allocation of begin() and of what follows fails. */
static void run_plan(wr_t *wr, uint32_t n)
{
	const kvc_handle_t put = {.incarnation = 5, .id = 9, .offset = 4096, .kind = 2, .n = 8};
	const kvx_msg_part_t part = {.n = 4};
	kvx_worker_t *worker = wr->rank[0].worker;
	uint32_t ids[WR_BLOCKS], errors;
	kvx_msg_save_t *save;
	kvx_msg_load_t *load;
	const void *bytes;
	char id[16];
	size_t len;
	int failed = 0;

	wr_plan(wr);
	wr_plan_space(wr, 3, "adapter");
	save = kvx_msg_add_record(&wr->plan, KVX_RECORD_SAVE, sizeof *save);
	save->n = 8;
	save->flags = KVX_MSG_COMPLETE;
	save->put = put;
	kvx_msg_append(&wr->plan, wr_eight, sizeof wr_eight);
	for (uint32_t i = 0; i < 2; i++) {
		load = kvx_msg_add_record(&wr->plan, KVX_RECORD_LOAD, sizeof *load);
		load->load = i + 1;
		load->flags = i ? KVX_MSG_ASYNC : 0;
		load->parts = 1;
		load->id_len = 1;
		kvx_msg_append(&wr->plan, i ? "b" : "a", 1);
		kvx_msg_append(&wr->plan, &part, sizeof part);
		kvx_msg_append(&wr->plan, wr_eight + 4 * i, 4 * sizeof *wr_eight);
	}
	kvx_msg_finish(&wr->plan, wr->step);

	fail_at = n;
	kvx_worker_begin_step(worker, wr->plan.data, wr->plan.len);
	kvx_worker_start_async_loads(worker);
	kvx_worker_run_sync_loads(worker);
	kvx_worker_end_step(worker);
	errors = kvx_worker_take_failed_blocks(worker, ids, WR_BLOCKS);
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
	rig_t rig = {.socket = "/nonexistent/kvd.sock"};
	wr_t wr = {0};

	(void)state;
	for (uint32_t n = 0; n < 16; n++) {
		wr_init_with(&wr, &rig, 1, 0);
		run_plan(&wr, n);
		run_plan(&wr, 0);
		wr_fini(&wr);
		wr = (wr_t){0};
	}
}

static void plan_loads(wr_t *wr, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) { /* as many as a scheduler has at a time */
		kvx_msg_load_t *load = kvx_msg_add_record(&wr->plan, KVX_RECORD_LOAD, sizeof *load);

		assert_non_null(load);
		load->load = i + 1;
		load->flags = KVX_MSG_ASYNC;
		load->id_len = sizeof i;
		kvx_msg_append(&wr->plan, &i, sizeof i);
	}
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
	static uint8_t named[1024];
	rig_t rig = {.socket = "/nonexistent/kvd.sock"};
	wr_t wr = {0};
	char id[16];
	int failed = 0;

	(void)state;
	wr_init_with(&wr, &rig, 1, 0);
	wr_plan(&wr);
	plan_loads(&wr, 1024);
	fail_at = EACH;
	wr_begin(&wr);
	kvx_worker_start_async_loads(wr.rank[0].worker);
	kvx_worker_end_step(wr.rank[0].worker);
	fail_at = 0;
	for (uint32_t n = 0; n < 1024; n++) {
		uint32_t i = UINT32_MAX;

		assert_int_equal(kvx_worker_take_finished(wr.rank[0].worker, id, sizeof id, &failed), sizeof i);
		memcpy(&i, id, sizeof i);
		assert_true(failed && i < 1024 && !named[i]);
		named[i] = 1;
	}
	assert_int_equal(kvx_worker_take_finished(wr.rank[0].worker, id, sizeof id, &failed), 0);
	wr_fini(&wr);
}

/* A scheduler keeps leases and slots for as long as it is not told. */
static void p7_completed_loads_are_reported_without_memory(void **state)
{
	rig_t rig = {.socket = "/nonexistent/kvd.sock"};
	const kvc_handle_t put = {.incarnation = 5, .id = 9, .offset = 4096, .kind = 2, .n = 8};
	const kvx_record_header_t *record;
	uint32_t loaded = 0, dropped = 0;
	kvx_msg_save_t *save;
	const void *bytes;
	wr_t wr = {0};
	kvx_msg_reader_t cursor;
	size_t len;

	(void)state;
	wr_init_with(&wr, &rig, 1, 0);
	wr_plan(&wr);
	plan_loads(&wr, 1024);
	save = kvx_msg_add_record(&wr.plan, KVX_RECORD_SAVE, sizeof *save);
	save->n = 8;
	save->flags = KVX_MSG_COMPLETE;
	save->put = put;
	kvx_msg_append(&wr.plan, wr_eight, sizeof wr_eight);
	fail_at = EACH;
	wr_begin(&wr);
	kvx_worker_start_async_loads(wr.rank[0].worker);
	kvx_worker_end_step(wr.rank[0].worker);
	kvx_worker_take_report(wr.rank[0].worker, &bytes, &len);
	fail_at = 0;
	assert_true(kvx_msg_open(&cursor, KVX_REPORT_MAGIC, bytes, len));
	while ((record = kvx_msg_next(&cursor)) != NULL) {
		loaded += record->type == KVX_RECORD_LOADED;
		dropped += record->type == KVX_RECORD_DROPPED;
	}
	assert_false(cursor.bad);
	assert_int_equal(loaded, 1024);
	assert_int_equal(dropped, 1);
	wr_fini(&wr);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p5_open_without_memory_says_so_and_leaves_nothing),
		cmocka_unit_test(p7_a_message_without_memory_fails_like_any_other),
		cmocka_unit_test(p5_a_worker_that_cannot_list_a_slab_declines),
		cmocka_unit_test(p7_every_load_there_was_no_memory_for_is_named),
		cmocka_unit_test(p7_completed_loads_are_reported_without_memory),
	};

	return cmocka_run_group_tests_name("kvx.worker-alloc", tests, NULL, NULL);
}
