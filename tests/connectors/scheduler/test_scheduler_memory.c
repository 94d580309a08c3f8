/* Every allocation of the scheduling half fails in turn, and then all of them for a while: no load that was promised is
 * broken without the ranks being told, nothing wrong is loaded or saved, nothing leaks. Built with the part's sources,
 * on an allocator of the test's own. */
#include "connectors/scheduler/sched_rig.h"
#include "engine/check.h"
#include "kv_test.h"
#include "scheduler/load.h"
#include "scheduler/scheduler.h"

#undef realloc /* step/message.c calls plan_realloc() by that name */
void *realloc(void *p, size_t n);
void *plan_realloc(void *p, size_t n);

static kv_test_env_t t;
static int failing; /* all from now on */

void *plan_realloc(void *p, size_t n)
{
	return failing || kv_test_env_fails(&t) ? NULL : realloc(p, n);
}

static void *env_alloc(void *ctx, size_t n)
{
	return failing ? NULL : kv_test_env_alloc(ctx, n);
}

static void *env_resize(void *ctx, void *p, size_t old_n, size_t n)
{
	return failing ? NULL : kv_test_env_resize(ctx, p, old_n, n);
}

static uint64_t env_now(void *ctx)
{
	(void)ctx;

	return kv_now_ns(&kv_env_posix);
}

static kvc_status_t open_in(const kvx_scheduler_config_t *config, kvx_scheduler_t **p_scheduler)
{
	return kvx_scheduler_open_in(&t.env, config, p_scheduler);
}

static void env_begin(void)
{
	kv_test_env_init(&t);
	t.env.now_ns = env_now;
	t.env.alloc = env_alloc;
	t.env.resize = env_resize;
	failing = 0;
}

/* As sr_run(), but place() may say that there is no memory; a hit that was promised is loaded, or the ranks said that
 * it failed. */
static void live(sr_request_t *request, uint32_t base, int fail_after_match)
{
	const uint32_t full = request->n / SR_UNIT;
	kvx_block_table_t table = {.struct_size = sizeof table, .n = full, .ids = request->ids[0]};
	kvc_status_t placed;

	for (uint32_t i = 0; i < full; i++) {
		request->ids[0][i] = base + i;
	}
	(void)sr_look_up(request);
	failing = fail_after_match;
	placed = kvx_scheduler_append_blocks(sr.scheduler, &request->ask, &table);
	if (sr.hit.tokens) {
		assert_int_equal(placed, KVC_OK);
		sr_start_load(request);
	}
	sr_compute(request, sr.hit.tokens / SR_UNIT, full);
	sr_advance(request, request->n, request->n - sr.hit.tokens);
	(void)sr_step();
	failing = 0;
	assert_int_equal(sr.plan.fences, full);
	if (sr.hit.tokens) {
		assert_int_equal(sr.plan.loads, 1);
		assert_int_equal(sr.plan.loaded_blocks + sr.plan.failed_blocks, sr.hit.tokens / SR_UNIT);
		assert_true(sr.plan.failed_blocks || sr_is_right(request, 0, full));
	}
	sr_finish(request);
}

static void p5_lack_of_memory_breaks_no_promise(void **state)
{
	static sr_request_t request;
	const sr_options_t options = {.foreign = 1, .open = open_in, .mode = KVX_LOAD_SYNC};
	uint32_t dead = 0;

	(void)state;
	sr_start(&(sr_options_t){.foreign = 1});
	sr_close();
	env_begin();
	KV_TEST_EACH_FAILURE(&t, n)
	{
		if (sr_open(&options) != KVC_OK) {
			assert_int_equal(kv_test_env_live(&t), 0);
			continue;
		}
		sr_wait_ready();
		for (uint32_t i = 0; i < 4; i++) {
			char id[16];

			(void)snprintf(id, sizeof id, "m%u", i);
			sr_request(&request, id, i / 2u + (uint32_t)n * 10u, 40, 120);
			live(&request, i * 20u, 0);
		}
		sr_settle();
		for (uint32_t i = 0; i < 2; i++) { /* and none at all from the promise on */
			sr_request(&request, "last", 40, 40, 80);
			live(&request, 100, 1);
			dead += sr.plan.dead;
			sr_settle();
		}
		sr_close();
		assert_int_equal(kv_test_env_live(&t), 0);
	}
	assert_int_equal(dead, 0); /* what was promised needs no memory */
	rig_check_quiet(&sr.rig);
	rig_fini(&sr.rig);
}

/* Nor can be remembered what was given back before the engine came to load it: the ranks are told all the same. */
static void p5_a_lost_load_without_memory_is_reported_as_failed(void **state)
{
	static sr_request_t request;
	const sr_options_t options = {.foreign = 1, .open = open_in, .mode = KVX_LOAD_SYNC};

	(void)state;
	env_begin();
	sr_start(&options);
	sr_find(&request, 160);
	kvx_lease_cache_give_back(sr.scheduler, kvx_requests_find(&sr.scheduler->requests, "second", 6)->cached);
	failing = 1;
	sr_start_load(&request);
	(void)sr_step();
	failing = 0;
	assert_int_equal(sr.plan.dead, 1);
	assert_int_equal(sr.plan.failed_blocks, 10);
	assert_null(sr.scheduler->loads);
	assert_int_equal(sr_stats().loads_failed, 1);
	sr_stop();
	assert_int_equal(kv_test_env_live(&t), 0);
}

/* What several matches have found may be loaded in one plan, later: each has kept what telling the ranks takes. */
static void p5_loads_found_in_earlier_steps_need_no_memory(void **state)
{
	enum { LOADS = 8, BLOCKS = 120 }; /* more than fit beside each other in a plan of one of them */
	static sr_request_t request[LOADS];
	const sr_options_t options = {.foreign = 1, .open = open_in, .mode = KVX_LOAD_SYNC};
	size_t reserved;

	(void)state;
	env_begin();
	sr_start(&options);
	reserved = sr.scheduler->reserved_bytes;
	sr_store(&request[0], "first", 0, BLOCKS * SR_UNIT, BLOCKS * SR_UNIT);
	for (uint32_t i = 0; i < LOADS; i++) {
		char id[16];

		(void)snprintf(id, sizeof id, "later %u", i);
		sr_request(&request[i], id, i + 1u, BLOCKS * SR_UNIT, (BLOCKS + 2) * SR_UNIT);
		assert_int_equal(sr_match(&request[i]), BLOCKS * SR_UNIT);
		sr_place(&request[i], 0, UINT32_MAX); /* the same bytes into the same blocks */
		(void)sr_step();
	}
	failing = 1;
	for (uint32_t i = 0; i < LOADS; i++) {
		sr_start_load(&request[i]); /* equal hits */
	}
	assert_true(sr_step() > 4096);
	failing = 0;
	assert_int_equal(sr.plan.loads, LOADS);
	assert_int_equal(sr.plan.loaded_blocks, LOADS * BLOCKS);
	for (uint32_t i = 0; i < LOADS; i++) {
		assert_true(sr_is_right(&request[i], 0, BLOCKS));
		sr_finish(&request[i]);
	}
	assert_int_equal(sr.scheduler->reserved_bytes, reserved);
	sr_stop();
	assert_int_equal(kv_test_env_live(&t), 0);
}

/* Last, since it is for good: a plan that does not fit fences all blocks, the daemon is left, and the engine goes on
 * with misses. */
static void p7_a_broken_message_detaches_the_engine_and_fences_all(void **state)
{
	static sr_request_t request;
	const kvx_record_header_t *record;
	const void *bytes = NULL;
	kvx_msg_reader_t cursor;
	size_t len = 0;

	(void)state;
	failing = 0;
	sr_start(&(sr_options_t){.foreign = 1});
	sr_find(&request, 100);
	sr.scheduler->message.failed = 1;
	kvx_scheduler_build_message(sr.scheduler, &bytes, &len);
	assert_true(kvx_msg_open(&cursor, KVX_MSG_MAGIC, bytes, len));
	record = kvx_msg_next(&cursor);
	assert_non_null(record);
	assert_int_equal(record->type, KVX_RECORD_FENCE);
	assert_int_equal(((const kvx_msg_fence_t *)(const void *)record)->n, 0);
	assert_null(kvx_msg_next(&cursor));
	assert_false(cursor.bad);
	assert_int_equal(sr_stats().broken_invariants, 1);
	assert_int_equal(kvc_fd(sr.scheduler->kvc), -1);
	for (uint32_t i = 0; i < 3; i++) {
		assert_int_equal(sr_look_up(&request), 0);
		sr_advance(&request, 100, 100);
		(void)sr_step();
		assert_int_equal(sr.plan.saves + sr.plan.loads, 0);
		assert_false(kvx_scheduler_has_pending(sr.scheduler));
	}
	sr_finish(&request);
	sr_abandon();
}

SR_MAIN(cmocka_unit_test(p5_lack_of_memory_breaks_no_promise),
	cmocka_unit_test(p5_a_lost_load_without_memory_is_reported_as_failed),
	cmocka_unit_test(p5_loads_found_in_earlier_steps_need_no_memory),
	cmocka_unit_test(p7_a_broken_message_detaches_the_engine_and_fences_all))
