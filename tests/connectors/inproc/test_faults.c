/* The engine under a daemon that dies, stops, or serves damaged memory: the same tokens, in time. */
#include "connectors/inproc/chat.h"
#include "connectors/rig.h"
#include "engine/check.h"

#include "kv/env.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *kvd_program;

static uint64_t answers_alone(uint64_t seed)
{
	kve_engine_t *engine = chat_engine(NULL);
	chat_totals_t totals;

	chat_run(engine, seed, NULL, NULL, &totals);
	kve_engine_destroy(engine);

	return totals.answers;
}

/* Does something to the daemon at random steps. */
typedef struct trouble {
	rig_t *rig;
	uint64_t seed;
	uint32_t every; /* steps between events, on average */
	int down;       /* steps until the daemon is back; 0: it is up */
	uint32_t events;
} trouble_t;

static void kill_and_start(void *ctx, kve_engine_t *engine)
{
	trouble_t *t = ctx;

	(void)engine;
	if (t->down > 0) {
		if (--t->down == 0) {
			rig_start(t->rig);
		}
	} else if (t->events < 8 && below(&t->seed, t->every) == 0) {
		rig_kill(t->rig);
		t->events++;
		t->down = 1 + (int)below(&t->seed, 8);
	}
}

static void p7_a_daemon_killed_amid_loads_and_saves_changes_no_token(void **state)
{
	uint32_t events = 0;
	rig_t rig;

	(void)state;
	rig_init(&rig, kvd_program);
	for (uint64_t seed = 61; seed < 64; seed++) {
		trouble_t trouble = {.rig = &rig, .seed = seed, .every = 12};
		kve_engine_t *engine;
		chat_totals_t totals;

		rig_start(&rig);
		engine = chat_engine(rig.socket);
		chat_run(engine, seed, kill_and_start, &trouble, &totals);
		assert_true(totals.answers == answers_alone(seed));
		if (rig.pid == 0) {
			rig_start(&rig);
		}
		(void)kve_engine_flush(engine, 15000);
		assert_int_equal(kve_engine_free_blocks(engine), 256);
		kve_engine_destroy(engine);
		rig_check_quiet(&rig);
		rig_kill(&rig);
		events += trouble.events;
	}
	assert_true(events > 3);
	rig_fini(&rig);
}

static void stop_and_go(void *ctx, kve_engine_t *engine)
{
	trouble_t *t = ctx;

	(void)engine;
	if (t->down > 0) {
		if (--t->down == 0) {
			rig_signal(t->rig, SIGCONT);
		}
	} else if (t->events < 6 && below(&t->seed, t->every) == 0) {
		rig_signal(t->rig, SIGSTOP);
		t->events++;
		t->down = 30;
	}
}

static void p7_a_stopped_daemon_is_a_quick_miss(void **state)
{
	trouble_t trouble;
	chat_totals_t totals;
	kve_engine_t *engine;
	rig_t rig;

	(void)state;
	rig_init(&rig, kvd_program);
	rig.silence = "50ms";
	rig_start(&rig);
	engine = chat_engine(rig.socket);
	chat_run(engine, 71, NULL, NULL, &totals);
	(void)kve_engine_flush(engine, 5000);

	/* Stopped from the beginning: no request waits for it. */
	rig_signal(&rig, SIGSTOP);
	chat_run(engine, 71, NULL, NULL, &totals);
	assert_true(totals.answers == answers_alone(71));
	assert_true(totals.longest_ns < UINT64_C(60000000000));
	rig_signal(&rig, SIGCONT);

	/* Stopping and going on meanwhile. */
	trouble = (trouble_t){.rig = &rig, .seed = 72, .every = 10};
	chat_run(engine, 71, stop_and_go, &trouble, &totals);
	rig_signal(&rig, SIGCONT);
	assert_true(totals.answers == answers_alone(71));
	assert_true(trouble.events > 1);
	(void)kve_engine_flush(engine, 15000);
	assert_int_equal(kve_engine_free_blocks(engine), 256);
	kve_engine_destroy(engine);
	rig_check_quiet(&rig);
	rig_fini(&rig);
}

static void p7_an_engine_may_start_before_the_daemon(void **state)
{
	chat_totals_t totals;
	kve_engine_t *engine;
	rig_t rig;

	(void)state;
	rig_init(&rig, kvd_program);
	engine = chat_engine(rig.socket);
	assert_false(kvx_is_ready(kve_engine_store(engine)));
	rig_start(&rig);
	for (int i = 0; i < 500 && !kvx_is_ready(kve_engine_store(engine)); i++) {
		(void)kvx_poll(kve_engine_store(engine), 10);
	}
	assert_true(kvx_is_ready(kve_engine_store(engine)));
	chat_run(engine, 81, NULL, NULL, &totals);
	assert_true(totals.cpu_tokens > 0);
	kve_engine_destroy(engine);
	rig_fini(&rig);
}

/* Scribble over the stored blocks of a prefix, as a client with a wild pointer could. */
static void scribble(const rig_t *rig, const uint32_t *tokens, uint32_t n_tokens, uint32_t block)
{
	const kvc_config_t config = {.struct_size = sizeof config, .socket = rig->socket};
	char weights[KVE_FINGERPRINT_MAX], text[KVK_LAYOUT_TEXT_MAX];
	kvk_layout_t layout;
	kvc_key_t keys[64];
	kvc_space_t *space;
	kvc_lease_t *lease;
	const void *data;
	uint32_t n;
	kvc_t *kvc;

	kve_weights_fingerprint(&kve_config_tiny, weights);
	kve_config_layout(&kve_config_tiny, &layout);
	assert_int_equal(kvk_layout_format(&layout, text, sizeof text), KV_OK);

	const kvc_identity_t identity = {.struct_size = sizeof identity,
					 .model = "kve-reference",
					 .weights = weights,
					 .dtype = "f32",
					 .rope = "theta 10000",
					 .hash_tokens = layout.block_tokens,
					 .layout = text};
	assert_int_equal(kvc_attach(&config, &kvc), KVC_OK);
	assert_int_equal(kvc_space_open(kvc, &identity, &space), KVC_OK);
	assert_int_equal(
		kvc_keys_of(space, &(kvc_prompt_t){sizeof(kvc_prompt_t), tokens, n_tokens, NULL}, keys, 64, &n),
		KVC_OK);
	assert_int_equal(kvc_acquire(space, keys, n, 0, 0, &lease), KVC_OK);
	assert_true(kvc_lease_n(lease) > block);
	assert_int_equal(kvc_lease_wait(lease, block + 1, 5000), KVC_OK);
	assert_int_equal(kvc_lease_block(lease, block, &data, NULL), KVC_OK);
	((uint8_t *)(uintptr_t)data)[1234] ^= 0x10;
	kvc_release(&lease, 1);
	kvc_detach(kvc);
}

static void answer(kve_engine_t *engine, const uint32_t *tokens, uint32_t n, uint32_t *out, kvx_load_result_t *load)
{
	const kve_ask_t ask = {.tokens = tokens, .n_tokens = n, .max_new = 8};
	kve_request_t *request;

	assert_int_equal(kve_engine_submit(engine, &ask, &request), KV_OK);
	while (kve_engine_step(engine) > 0) {
	}
	memcpy(out, request->tokens + n, 8 * sizeof *out);
	*load = request->load;
	kve_engine_release(engine, request);
	assert_int_equal(kve_engine_flush(engine, 5000), 0);
}

static void p1_a_damaged_block_is_computed_again_not_served(void **state)
{
	kvx_stats_t stats = {.struct_size = sizeof stats};
	uint32_t tokens[300], first[8], second[8], third[8];
	uint64_t seed = 91;
	kvx_load_result_t load;
	kve_engine_t *engine;
	rig_t rig;

	(void)state;
	for (uint32_t i = 0; i < 300; i++) {
		tokens[i] = below(&seed, kve_config_tiny.vocab);
	}
	rig_init(&rig, kvd_program);
	rig_start(&rig);
	engine = chat_engine(rig.socket);
	answer(engine, tokens, 300, first, &load);
	assert_int_equal(load.tokens, 0);

	scribble(&rig, tokens, 300, 5);
	answer(engine, tokens, 300, second, &load);
	assert_memory_equal(first, second, sizeof first);
	assert_int_equal(load.blocks, 5);
	assert_int_equal(load.cause, KVC_ERR_CORRUPT);
	kvx_get_stats(kve_engine_store(engine), &stats);
	assert_int_equal(stats.load_corrupt, 1);

	/* The save behind the recomputation has put a good one in its place, or the disk has it. */
	answer(engine, tokens, 300, third, &load);
	assert_memory_equal(first, third, sizeof first);
	assert_true(load.blocks >= 5);
	kve_engine_destroy(engine);
	rig_fini(&rig);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p7_an_engine_may_start_before_the_daemon),
		cmocka_unit_test(p1_a_damaged_block_is_computed_again_not_served),
		cmocka_unit_test(p7_a_stopped_daemon_is_a_quick_miss),
		cmocka_unit_test(p7_a_daemon_killed_amid_loads_and_saves_changes_no_token),
	};

	if (argc != 2) {
		return 64;
	}
	kvd_program = argv[1];

	return cmocka_run_group_tests_name("kvx.faults", tests, NULL, NULL);
}
