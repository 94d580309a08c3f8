/* The engine with a healthy daemon: the same tokens, less work, in every cache layout, and nothing left behind. */
#include "connectors/inproc/chat.h"
#include "connectors/rig.h"
#include "engine/check.h"

#include "kv/env.h"

#include <stdlib.h>
#include <string.h>

static const char *kvd_program;

static uint64_t answers_alone(uint64_t seed)
{
	kve_engine_t *engine = chat_engine(NULL);
	chat_totals_t totals;

	chat_run(engine, seed, NULL, NULL, &totals);
	kve_engine_destroy(engine);

	return totals.answers;
}

/* One run of the chat on a new engine, whose cache is empty. */
static void run_once(const rig_t *rig, uint64_t seed, chat_totals_t *totals)
{
	kvx_stats_t stats = {.struct_size = sizeof stats};
	kve_engine_t *engine = chat_engine(rig->socket);

	chat_run(engine, seed, NULL, NULL, totals);
	assert_int_equal(kve_engine_flush(engine, 5000), 0);
	assert_int_equal(kve_engine_free_blocks(engine), 256);
	kvx_get_stats(kve_engine_store(engine), &stats);
	assert_int_equal(stats.load_corrupt + stats.save_lost + stats.save_busy + stats.self_test_failures, 0);
	kve_engine_destroy(engine);
}

static void p1_tokens_are_equal_with_and_without_the_cache(void **state)
{
	chat_totals_t cold, warm;
	rig_t rig;

	(void)state;
	rig_init(&rig, kvd_program);
	rig_start(&rig);
	for (uint64_t seed = 1; seed <= 4; seed++) {
		const uint64_t alone = answers_alone(seed);

		run_once(&rig, seed, &cold);
		assert_true(cold.answers == alone);
		run_once(&rig, seed, &warm);
		assert_true(warm.answers == alone);
		assert_true(warm.cpu_tokens + warm.disk_tokens > warm.prompt_tokens * 9 / 10);
	}
	rig_check_quiet(&rig);
	rig_fini(&rig);
}

static uint64_t attaches(kve_engine_t *engine)
{
	kvx_stats_t stats = {.struct_size = sizeof stats};

	kvx_get_stats(kve_engine_store(engine), &stats);

	return stats.attaches;
}

static void p7_hits_come_from_disk_after_the_daemon_was_killed(void **state)
{
	const uint64_t alone = answers_alone(9);
	chat_totals_t totals;
	kve_engine_t *engine;
	rig_t rig;

	(void)state;
	rig_init(&rig, kvd_program);
	rig_start(&rig);
	engine = chat_engine(rig.socket);
	chat_run(engine, 9, NULL, NULL, &totals);
	assert_int_equal(kve_engine_flush(engine, 5000), 0);
	rig_wait_written(&rig);
	rig_kill(&rig);
	rig_start(&rig);

	/* The same engine finds the new daemon without help. */
	for (int i = 0; i < 500 && (attaches(engine) < 2 || !kvx_is_ready(kve_engine_store(engine))); i++) {
		(void)kvx_poll(kve_engine_store(engine), 10);
	}
	assert_int_equal(attaches(engine), 2);
	chat_run(engine, 9, NULL, NULL, &totals);
	assert_true(totals.answers == alone);
	print_message("prompt tokens %lu, from disk %lu, from memory then %lu\n", (unsigned long)totals.prompt_tokens,
		      (unsigned long)totals.disk_tokens, (unsigned long)totals.cpu_tokens);
	assert_true(totals.disk_tokens > 0 && totals.disk_tokens + totals.cpu_tokens > totals.prompt_tokens * 9 / 10);
	kve_engine_destroy(engine);
	rig_check_quiet(&rig);
	rig_fini(&rig);
}

/* The prompt's blocks are saved while the request goes on. */
static void a_flush_waits_for_the_saves_of_running_requests_too(void **state)
{
	uint32_t tokens[600];
	const kve_ask_t ask = {.tokens = tokens, .n_tokens = 600, .max_new = 100};
	kvx_stats_t stats = {.struct_size = sizeof stats};
	kve_request_t *request;
	kve_engine_t *engine;
	uint64_t seed = 51;
	rig_t rig;

	(void)state;
	rig_init(&rig, kvd_program);
	rig_start(&rig);
	engine = chat_engine(rig.socket);
	for (uint32_t i = 0; i < 600; i++) {
		tokens[i] = below(&seed, kve_config_tiny.vocab);
	}
	assert_int_equal(kve_engine_submit(engine, &ask, &request), KV_OK);
	while (request->state != KVE_DECODE) {
		(void)kve_engine_step(engine);
	}
	assert_int_equal(kve_engine_flush(engine, 5000), 0);
	kvx_get_stats(kve_engine_store(engine), &stats);
	assert_int_equal(stats.saves, 1);
	assert_int_equal(stats.save_done, 1);
	assert_int_equal(request->state, KVE_DECODE);
	kve_engine_destroy(engine);
	rig_check_quiet(&rig);
	rig_fini(&rig);
}

static void abort_some(void *ctx, kve_engine_t *engine)
{
	uint64_t *seed = ctx;
	uint32_t tokens[200];
	kve_request_t *request;
	const kve_ask_t ask = {.tokens = tokens, .n_tokens = 100 + below(seed, 100), .max_new = 3};

	/* A shared beginning, so that there is something to load. */
	for (uint32_t i = 0; i < ask.n_tokens; i++) {
		tokens[i] = (i * 37 + 5) % kve_config_tiny.vocab;
	}
	if (below(seed, 3) || kve_engine_submit(engine, &ask, &request) != KV_OK) {
		return;
	}
	for (uint32_t steps = below(seed, 12); steps > 0 && request->state != KVE_DONE; steps--) {
		(void)kve_engine_step(engine);
	}
	kve_engine_release(engine, request);
}

static void p4_aborts_at_random_moments_leave_no_lease_and_no_put(void **state)
{
	uint64_t seed = 41;
	chat_totals_t totals;
	kve_engine_t *engine;
	rig_t rig;

	(void)state;
	rig_init(&rig, kvd_program);
	rig_start(&rig);
	engine = chat_engine(rig.socket);
	chat_run(engine, 5, abort_some, &seed, &totals);
	assert_true(totals.answers == answers_alone(5));
	assert_int_equal(kve_engine_flush(engine, 5000), 0);
	assert_int_equal(kve_engine_free_blocks(engine), 256);

	/* A request that was aborted before its answer came is given back when the answer comes. */
	for (int i = 0; i < 50; i++) {
		(void)kvx_poll(kve_engine_store(engine), 2);
	}
	rig_check_quiet(&rig);
	kve_engine_destroy(engine);
	rig_check_quiet(&rig);
	rig_fini(&rig);
}

/* ---- other cache layouts than the reference engine's ----------------------------------------- */

typedef struct shape {
	const char *name;
	kvk_layout_t layout;
	kvk_paged_t paged;
} shape_t;

#define SHAPE_BLOCKS 12u
#define SHAPE_LAYERS 3u

static const shape_t shapes[] = {
	{"nhd",
	 {.heads = 2, .layers = SHAPE_LAYERS, .block_tokens = 16, .k_dim = 64, .v_dim = 64, .dtype = KVK_DTYPE_BF16},
	 {.kind = KVK_PAGED_KV_TOKEN_HEAD,
	  .heads = 2,
	  .block_tokens = 16,
	  .k_dim = 64,
	  .v_dim = 64,
	  .dtype = KVK_DTYPE_BF16}},
	{"hnd",
	 {.heads = 4,
	  .layers = SHAPE_LAYERS,
	  .block_tokens = 32,
	  .k_dim = 64,
	  .v_dim = 64,
	  .dtype = KVK_DTYPE_F16,
	  .inner = KVK_INNER_PACKED},
	 {.kind = KVK_PAGED_HEAD_TOKEN_KV,
	  .heads = 4,
	  .block_tokens = 32,
	  .k_dim = 64,
	  .v_dim = 64,
	  .dtype = KVK_DTYPE_F16}},
	{"opaque",
	 {.heads = 1,
	  .layers = SHAPE_LAYERS,
	  .block_tokens = 16,
	  .dtype = KVK_DTYPE_BYTE,
	  .inner = KVK_INNER_OPAQUE,
	  .page_bytes = 20000},
	 {.kind = KVK_PAGED_OPAQUE,
	  .heads = 1,
	  .block_tokens = 16,
	  .dtype = KVK_DTYPE_BYTE,
	  .page_bytes = 20000,
	  .block_stride = 20480}},
};

static void wait_idle(kvx_t *kvx)
{
	for (int i = 0; i < 500 && kvx_poll(kvx, 10) > 0; i++) {
	}
}

/* A paged cache of one of the shapes; blocks `from` hold random bytes. */
typedef struct cache {
	kvk_paged_t paged;
	void *base[SHAPE_LAYERS];
	uint8_t *memory;
	size_t stride, payload;
} cache_t;

static const uint32_t from[5] = {7, 2, 9, 0, 4}, to[5] = {1, 11, 3, 10, 5};

static void cache_init(cache_t *c, const shape_t *shape)
{
	const size_t packed = (size_t)2 * shape->layout.heads * shape->layout.block_tokens * 64 * 2;
	uint64_t seed = 51;

	c->stride = shape->paged.block_stride ? shape->paged.block_stride : packed;
	c->payload = shape->paged.kind == KVK_PAGED_OPAQUE ? shape->layout.page_bytes : c->stride;
	c->memory = calloc((size_t)SHAPE_LAYERS * SHAPE_BLOCKS, c->stride);
	assert_non_null(c->memory);
	for (uint32_t l = 0; l < SHAPE_LAYERS; l++) {
		c->base[l] = c->memory + l * SHAPE_BLOCKS * c->stride;
		for (size_t i = 0; i < 5 * c->payload; i++) {
			((uint8_t *)c->base[l])[from[i / c->payload] * c->stride + i % c->payload] =
				(uint8_t)next_random(&seed);
		}
	}
	c->paged = shape->paged;
	c->paged.layers = SHAPE_LAYERS;
	c->paged.blocks = SHAPE_BLOCKS;
	c->paged.base = c->base;
}

static void check_copies(const cache_t *c)
{
	for (uint32_t l = 0; l < SHAPE_LAYERS; l++) {
		const uint8_t *layer = c->base[l];

		/* the skipped one was not touched */
		assert_true(layer[to[0] * c->stride] == 0 && layer[to[0] * c->stride + c->payload - 1] == 0);
		for (uint32_t b = 1; b < 5; b++) {
			assert_memory_equal(layer + from[b] * c->stride, layer + to[b] * c->stride, c->payload);
		}
	}
}

/* Save five blocks, load four of them to other places. */
static void save_and_load(kvx_t *kvx, uint32_t block_tokens)
{
	uint32_t tokens[160];
	kvx_prefix_t prefix = {
		.struct_size = sizeof prefix, .tokens = tokens, .n_tokens = 5 * block_tokens, .blocks = from};
	kvx_load_result_t result;
	kvx_save_result_t saved;
	kvx_load_t *load;
	kvx_save_t *save;

	for (uint32_t i = 0; i < 160; i++) {
		tokens[i] = i;
	}
	assert_int_equal(kvx_save_prefix(kvx, &prefix, &save), KVC_PENDING);
	wait_idle(kvx);
	assert_int_equal(kvx_save_state(save, &saved), KVC_OK);
	assert_int_equal(saved.blocks, 5);
	assert_true(saved.copied);
	kvx_save_end(save);
	assert_int_equal(kvx_save_prefix(kvx, &prefix, &save), KVC_ALREADY);

	prefix.blocks = to;
	prefix.skip = 1;
	assert_int_equal(kvx_load_prefix(kvx, &prefix, &load, &result), KVC_PENDING);
	wait_idle(kvx);
	assert_int_equal(kvx_load_state(load, &result), KVC_OK);
	assert_int_equal(result.blocks, 5);
	assert_int_equal(result.cpu_tokens, 4 * block_tokens);
	kvx_load_end(load);

	prefix.salt = "another tenant's salt";
	assert_int_equal(kvx_load_prefix(kvx, &prefix, &load, &result), KVC_MISS);
}

static void round_trip(const rig_t *rig, const shape_t *shape)
{
	const kvc_identity_t identity = {
		.struct_size = sizeof identity, .model = shape->name, .weights = "w", .dtype = "x", .rope = "none"};
	cache_t cache;
	kvx_t *kvx;
	const kvx_config_t config = {.struct_size = sizeof config,
				     .roles = KVX_BOTH,
				     .socket = rig->socket,
				     .identity = &identity,
				     .layout = &shape->layout,
				     .paged = &cache.paged};

	cache_init(&cache, shape);
	assert_int_equal(kvx_attach(&config, &kvx), KVC_OK);
	assert_true(kvx_is_ready(kvx));
	save_and_load(kvx, shape->layout.block_tokens);
	check_copies(&cache);
	kvx_detach(kvx);
	free(cache.memory);
}

static void p1_every_cache_layout_passes_its_self_test_and_a_round_trip(void **state)
{
	rig_t rig;

	(void)state;
	rig_init(&rig, kvd_program);
	rig_start(&rig);
	for (size_t i = 0; i < KV_COUNT_OF(shapes); i++) {
		round_trip(&rig, &shapes[i]);
	}
	rig_check_quiet(&rig);
	rig_fini(&rig);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p1_tokens_are_equal_with_and_without_the_cache),
		cmocka_unit_test(p7_hits_come_from_disk_after_the_daemon_was_killed),
		cmocka_unit_test(a_flush_waits_for_the_saves_of_running_requests_too),
		cmocka_unit_test(p4_aborts_at_random_moments_leave_no_lease_and_no_put),
		cmocka_unit_test(p1_every_cache_layout_passes_its_self_test_and_a_round_trip),
	};

	if (argc != 2) {
		return 64;
	}
	kvd_program = argv[1];

	return cmocka_run_group_tests_name("kvx.daemon", tests, NULL, NULL);
}
