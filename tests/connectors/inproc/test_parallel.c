/* Data parallel ranks with libkvx: each is an engine of its own to the daemon, and loads what another has saved. */
#include "connectors/rig.h"
#include "engine/check.h"

#include "kve/parallel.h"

#define PROMPTS 5u /* odd: prompts that are asked again on two ranks come to the other one */
#define LENGTH  90u
#define NEW     6u

static uint32_t prompts[PROMPTS][LENGTH];
static kve_devices_t *devices; /* of the ranks there are; NULL: they compute in fp32 */

static void draw_prompts(void)
{
	uint64_t seed = 61;

	for (uint32_t i = 0; i < PROMPTS * LENGTH; i++) {
		prompts[i / LENGTH][i % LENGTH] = below(&seed, kve_config_moe.vocab);
	}
}

static kve_parallel_t *create_ranks(uint32_t ranks, int store, int dbo)
{
	const kve_parallel_config_t config = {.engine = {.model = kve_config_moe,
							 .cache_blocks = 32,
							 .max_running = 4,
							 .devices = devices,
							 .store = store,
							 .socket = the_rig.socket,
							 .program = "test",
							 .load_ms = 120000,
							 .attach_ms = 60000},
					      .ranks = ranks,
					      .dbo = {.enabled = dbo, .decode_threshold = 1, .prefill_threshold = 2}};
	kve_parallel_t *p = NULL;

	assert_int_equal(kve_parallel_create(&config, &p), KV_OK);

	return p;
}

/* Ask all prompts. Returns a hash of the answers; *p_loaded: tokens that came from the daemon. */
static uint64_t ask_all(kve_parallel_t *p, uint32_t *p_loaded, uint32_t *p_ranks)
{
	kve_request_t *requests[PROMPTS];
	uint64_t hash = HASH_START;

	*p_loaded = *p_ranks = 0;
	for (uint32_t i = 0; i < PROMPTS; i++) {
		const kve_ask_t ask = {.tokens = prompts[i], .n_tokens = LENGTH - i, .max_new = NEW};

		assert_int_equal(kve_parallel_submit(p, &ask, &requests[i]), KV_OK);
		*p_ranks = *p_ranks * 10 + requests[i]->rank;
	}
	assert_int_equal(kve_parallel_run(p), KV_OK);
	for (uint32_t i = 0; i < PROMPTS; i++) {
		const kve_request_t *r = requests[i];

		hash = hash_bytes(hash, r->tokens, r->n_tokens * sizeof(uint32_t));
		hash = hash_bytes(hash, r->log_probabilities, NEW * sizeof(double));
		*p_loaded += r->load.cpu_tokens + r->load.disk_tokens;
		kve_parallel_release(p, requests[i]);
	}
	for (uint32_t r = 0; r < kve_parallel_ranks(p); r++) {
		assert_int_equal(kve_engine_flush(kve_parallel_engine(p, r), 60000), 0);
	}

	return hash;
}

KV_TEST(p1_what_one_data_parallel_rank_has_saved_another_loads)
{
	const uint32_t whole = PROMPTS * (LENGTH / 16 * 16); /* of each prompt the blocks before its last token */
	uint32_t loaded, first, second;
	uint64_t answers;
	kve_parallel_t *p;

	draw_prompts();
	p = create_ranks(1, 0, 0);
	answers = ask_all(p, &loaded, &first);
	kve_parallel_destroy(p);

	rig_start(&the_rig);
	p = create_ranks(2, 1, 0);
	assert_true(ask_all(p, &loaded, &first) == answers);
	assert_int_equal(loaded, 0);
	assert_true(ask_all(p, &loaded, &second) == answers);
	assert_int_equal(loaded, whole);
	assert_int_equal(first, 1010); /* 0, 1, 0, 1, 0 */
	assert_int_equal(second, 10101);
	kve_parallel_destroy(p);

	rig_wait_written(&the_rig);
	rig_kill(&the_rig);
	rig_start(&the_rig);
	p = create_ranks(4, 1, 1);
	assert_true(ask_all(p, &loaded, &first) == answers);
	assert_int_equal(loaded, whole);
	kve_parallel_destroy(p);
}

/* ---- in BF16 --------------------------------------------------------------------------------- */

/* New ranks, all prompts: a hash of the answers. *p_loaded: tokens that came from the daemon. */
static uint64_t ask_new_ranks(uint32_t ranks, int bf16, int store, int dbo, uint32_t *p_loaded)
{
	const kve_devices_config_t config = {.ranks = ranks, .timeout_ms = 600000};
	uint32_t order;
	uint64_t answers;
	kve_parallel_t *p;

	devices = NULL;
	if (bf16) {
		assert_int_equal(kve_devices_open_twins(&config, &devices), KV_OK);
	}
	p = create_ranks(ranks, store, dbo);
	answers = ask_all(p, p_loaded, &order);
	kve_parallel_destroy(p);
	kve_devices_close(devices);
	devices = NULL;

	return answers;
}

/* The prompts are the same, the blocks are not: neither loads what the other has saved. */
KV_TEST(p1_ranks_in_bf16_load_what_ranks_in_bf16_have_saved_and_no_other)
{
	const uint32_t whole = PROMPTS * (LENGTH / 16 * 16);
	uint32_t loaded;
	uint64_t answers, of_fp32;

	draw_prompts();
	answers = ask_new_ranks(1, 1, 0, 0, &loaded);
	of_fp32 = ask_new_ranks(1, 0, 0, 0, &loaded);
	assert_true(answers != of_fp32);

	rig_start(&the_rig);
	assert_true(ask_new_ranks(2, 0, 1, 0, &loaded) == of_fp32);
	assert_int_equal(loaded, 0);
	assert_true(ask_new_ranks(2, 1, 1, 0, &loaded) == answers);
	assert_int_equal(loaded, 0);
	assert_true(ask_new_ranks(2, 1, 1, 1, &loaded) == answers);
	assert_int_equal(loaded, whole);

	rig_wait_written(&the_rig);
	rig_kill(&the_rig);
	rig_start(&the_rig);
	assert_true(ask_new_ranks(4, 1, 1, 1, &loaded) == answers);
	assert_int_equal(loaded, whole);
	assert_true(ask_new_ranks(2, 0, 1, 0, &loaded) == of_fp32);
	assert_int_equal(loaded, whole);
}

KV_TEST_MAIN_OF(the_program, begin_rig, end_rig)
