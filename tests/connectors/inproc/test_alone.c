/* Without a daemon everything is a miss, at once, and bad configurations are refused with a sentence. */
#include "engine/check.h"
#include "kv_test.h"

#include "kve/engine.h"
#include "kv/env.h"

#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define NOWHERE "/tmp/kvd-test-kvx-no-such-directory/default.sock"

typedef struct parts {
	kve_cache_t cache;
	kvk_layout_t layout;
	kvc_identity_t identity;
	kvx_config_t config;
} parts_t;

static void parts_init(parts_t *p)
{
	assert_int_equal(kve_cache_init(&p->cache, &kve_config_tiny, 16), KV_OK);
	kve_config_layout(&kve_config_tiny, &p->layout);
	p->identity = (kvc_identity_t){
		.struct_size = sizeof p->identity, .model = "m", .weights = "w", .dtype = "f32", .rope = "none"};
	p->config = (kvx_config_t){
		.struct_size = sizeof p->config,
		.roles = KVX_BOTH,
		.socket = NOWHERE,
		.identity = &p->identity,
		.layout = &p->layout,
		.paged = &p->cache.paged,
	};
}

static uint64_t now_ns(void)
{
	return kv_now_ns(&kv_env_posix);
}

static void p7_without_a_daemon_everything_is_a_quick_miss(void **state)
{
	uint32_t tokens[64] = {0}, blocks[4] = {0, 1, 2, 3};
	const kvx_prefix_t prefix = {.struct_size = sizeof prefix, .tokens = tokens, .n_tokens = 64, .blocks = blocks};
	kvx_stats_t stats = {.struct_size = sizeof stats};
	const uint64_t start = now_ns();
	kvx_load_result_t result;
	kvx_load_t *load;
	kvx_save_t *save;
	parts_t p;
	kvx_t *kvx;

	(void)state;
	parts_init(&p);
	assert_int_equal(kvx_attach(&p.config, &kvx), KVC_OK);
	for (int i = 0; i < 100; i++) {
		assert_int_equal(kvx_load_prefix(kvx, &prefix, &load, &result), KVC_MISS);
		assert_null(load);
		assert_int_equal(result.tokens, 0);
		assert_int_equal(result.why, 4); /* NO_DAEMON */
		assert_int_equal(kvx_save_prefix(kvx, &prefix, &save), KVC_MISS);
		assert_null(save);
		assert_int_equal(kvx_poll(kvx, 0), 0);
	}
	kvx_get_stats(kvx, &stats);
	assert_int_equal(stats.loads, 100);
	assert_int_equal(stats.load_refused, 100);
	assert_int_equal(stats.save_refused, 100);
	assert_false(kvx_is_ready(kvx));
	kvx_detach(kvx);
	kvx_detach(NULL);
	kve_cache_fini(&p.cache);
	assert_true(now_ns() - start < UINT64_C(20000000000)); /* 100 ms a round */
}

/* Somebody listens and says nothing: a daemon that has been stopped. */
static int mute_listen(const char *path)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
	assert_int_equal(bind(fd, (const struct sockaddr *)&address, sizeof address), 0);
	assert_int_equal(listen(fd, 4), 0);

	return fd;
}

static void p7_a_daemon_that_only_listens_costs_attach_ms_once(void **state)
{
	char dir[64], path[96];
	uint64_t start, longest = 0;
	parts_t p;
	kvx_t *kvx;
	int fd;

	(void)state;
	kv_test_dir_make(dir, sizeof dir);
	snprintf(path, sizeof path, "%s/s", dir);
	fd = mute_listen(path);
	parts_init(&p);
	p.config.socket = path;
	p.config.attach_ms = UINT32_MAX;
	start = now_ns();
	assert_int_equal(kvx_attach(&p.config, &kvx), KVC_OK);
	assert_in_range(now_ns() - start, 0, 900000000); /* who waits does so for a second */
	start = now_ns();
	while (now_ns() - start < UINT64_C(1500000000)) { /* beyond the deadline of its first question */
		const uint64_t begin = now_ns();

		assert_int_equal(kvx_poll(kvx, 5), 0);
		longest = now_ns() - begin > longest ? now_ns() - begin : longest;
	}
	assert_in_range(longest, 0, 900000000);
	kvx_detach(kvx);

	p.config.attach_ms = 100;
	start = now_ns();
	assert_int_equal(kvx_attach(&p.config, &kvx), KVC_OK);
	assert_in_range(now_ns() - start, 90000000, 900000000);
	kvx_detach(kvx);
	close(fd);
	kve_cache_fini(&p.cache);
	kv_test_dir_remove(dir);
}

static void p7_the_engine_computes_everything_itself(void **state)
{
	const kve_engine_config_t with = {
		.model = kve_config_tiny, .cache_blocks = 16, .max_running = 2, .store = 1, .socket = NOWHERE};
	kve_engine_config_t without = with;
	uint32_t tokens[100];
	uint32_t answers[2][10];
	uint64_t seed = 31;

	(void)state;
	without.store = 0;
	for (uint32_t i = 0; i < 100; i++) {
		tokens[i] = below(&seed, kve_config_tiny.vocab);
	}
	for (int i = 0; i < 2; i++) {
		const kve_ask_t ask = {.tokens = tokens, .n_tokens = 100, .max_new = 10};
		kve_request_t *request;
		kve_engine_t *engine;

		assert_int_equal(kve_engine_create(i ? &with : &without, &engine), KV_OK);
		assert_int_equal(kve_engine_submit(engine, &ask, &request), KV_OK);
		while (kve_engine_step(engine) > 0) {
		}
		memcpy(answers[i], request->tokens + 100, sizeof answers[i]);
		kve_engine_release(engine, request);
		assert_int_equal(kve_engine_flush(engine, 1000), 0);
		assert_int_equal(kve_engine_free_blocks(engine), 16);
		kve_engine_destroy(engine);
	}
	assert_memory_equal(answers[0], answers[1], sizeof answers[0]);
}

static void p10_bad_requests_are_refused(void **state)
{
	const kve_engine_config_t config = {.model = kve_config_tiny, .cache_blocks = 8, .max_running = 2};
	const uint32_t good[4] = {1, 2, 3, 4}, bad[1] = {kve_config_tiny.vocab};
	const kve_ask_t asks[] = {
		{.tokens = good, .n_tokens = 0, .max_new = 1},
		{.tokens = good, .n_tokens = 4, .max_new = 0},
		{.tokens = bad, .n_tokens = 1, .max_new = 1},
		{.tokens = good, .n_tokens = 4, .max_new = kve_config_tiny.max_tokens},
		{.tokens = good, .n_tokens = 4, .max_new = 8 * 16},
		{.tokens = good, .n_tokens = UINT32_MAX, .max_new = 2},
	};
	kve_request_t *request = NULL;
	kve_engine_t *engine;

	(void)state;
	assert_int_equal(kve_engine_create(&config, &engine), KV_OK);
	for (size_t i = 0; i < KV_COUNT_OF(asks); i++) {
		assert_int_equal(kve_engine_submit(engine, &asks[i], &request), KV_ERR_ARG);
		assert_null(request);
	}
	kve_engine_destroy(engine);
}

static void p4_aborted_requests_give_their_blocks_back(void **state)
{
	const kve_engine_config_t config = {.model = kve_config_tiny, .cache_blocks = 32, .max_running = 3};
	uint32_t tokens[120] = {0};
	uint64_t seed = 32;
	kve_engine_t *engine;

	(void)state;
	assert_int_equal(kve_engine_create(&config, &engine), KV_OK);
	for (int round = 0; round < 40; round++) {
		kve_request_t *requests[5];

		for (int i = 0; i < 5; i++) {
			const kve_ask_t ask = {
				.tokens = tokens, .n_tokens = 1 + below(&seed, 120), .max_new = 1 + below(&seed, 5)};

			assert_int_equal(kve_engine_submit(engine, &ask, &requests[i]), KV_OK);
		}
		for (uint32_t steps = below(&seed, 6); steps > 0; steps--) {
			(void)kve_engine_step(engine);
		}
		for (int i = 0; i < 5; i++) {
			kve_engine_release(engine, requests[i]);
		}
		assert_int_equal(kve_engine_step(engine), 0);
		assert_int_equal(kve_engine_free_blocks(engine), 32);
	}
	kve_engine_destroy(engine);
}

/* It needs every block there is, and one-block requests keep coming. */
static void p5_a_long_request_is_not_overtaken_for_ever(void **state)
{
	enum { STEPS = 200 };
	const kve_engine_config_t config = {.model = kve_config_tiny, .cache_blocks = 8, .max_running = 8};
	uint32_t tokens[100] = {0}, served = 0;
	const kve_ask_t small = {.tokens = tokens, .n_tokens = 8, .max_new = 8};
	const kve_ask_t large = {.tokens = tokens, .n_tokens = 100, .max_new = 28};
	kve_request_t *requests[STEPS], *waits;
	kve_engine_t *engine;

	(void)state;
	assert_int_equal(kve_engine_create(&config, &engine), KV_OK);
	for (uint32_t step = 0; step < STEPS; step++) {
		assert_int_equal(kve_engine_submit(engine, &small, &requests[step]), KV_OK);
		if (step == 0) {
			assert_int_equal(kve_engine_submit(engine, &large, &waits), KV_OK);
		}
		(void)kve_engine_step(engine);
	}
	assert_int_equal(waits->state, KVE_DONE);
	while (kve_engine_step(engine) > 0) {
	}
	for (uint32_t step = 0; step < STEPS; step++) {
		served += requests[step]->state == KVE_DONE;
	}
	assert_int_equal(served, STEPS);
	kve_engine_destroy(engine);
}

static void p10_contradictory_configurations_are_refused_with_a_sentence(void **state)
{
	parts_t p;
	kvx_config_t bad[6];
	kvk_layout_t other;
	kvk_paged_t part;
	kvx_t *kvx = NULL;

	(void)state;
	parts_init(&p);
	assert_int_equal(kvx_attach(NULL, &kvx), KVC_ERR_ARG);
	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		bad[i] = p.config;
	}
	other = p.layout;
	other.block_tokens *= 2;
	part = p.cache.paged;
	part.layers -= 1;
	bad[0].struct_size = 8;
	bad[1].roles = 0;
	bad[2].identity = NULL;
	bad[3].layout = &other;
	bad[4].paged = &part;
	bad[5].roles = 4;
	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		assert_int_equal(kvx_attach(&bad[i], &kvx), KVC_ERR_ARG);
		assert_null(kvx);
		assert_true(strlen(kvx_last_error()) > 10);
	}
	kve_cache_fini(&p.cache);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p7_without_a_daemon_everything_is_a_quick_miss),
		cmocka_unit_test(p7_a_daemon_that_only_listens_costs_attach_ms_once),
		cmocka_unit_test(p7_the_engine_computes_everything_itself),
		cmocka_unit_test(p10_bad_requests_are_refused),
		cmocka_unit_test(p4_aborted_requests_give_their_blocks_back),
		cmocka_unit_test(p5_a_long_request_is_not_overtaken_for_ever),
		cmocka_unit_test(p10_contradictory_configurations_are_refused_with_a_sentence),
	};

	return cmocka_run_group_tests_name("kvx.alone", tests, NULL, NULL);
}
