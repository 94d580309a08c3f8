/* Prefill on one reference engine and decode on another, of the same and of other tensor parallel degrees: tokens and
 * log-probabilities are those of one engine that does both, to the last bit. */
#include "connectors/rig.h"
#include "engine/check.h"
#include "kv_case.h"
#include "kv_test.h"

#include "kve/engine.h"

#include <stdlib.h>

#define REQUESTS   500u
#define TOGETHER   10u
#define BLOCKS     512u
#define PROMPT_MAX 150u
#define NEW_MAX    6u

static const char *program;
static rig_t rig;

/* A request, and what came of it. */
typedef struct story {
	uint32_t tokens[PROMPT_MAX];
	uint32_t n_tokens, n_new;
	char transfer[32];
	uint64_t hash; /* of the tokens and log-probabilities that were generated */
} story_t;

static kve_engine_t *make_engine(const char *socket, uint32_t ranks)
{
	const kve_engine_config_t config = {.model = kve_config_tiny,
					    .cache_blocks = BLOCKS,
					    .max_running = TOGETHER,
					    .store = socket != NULL,
					    .socket = socket,
					    .program = "test",
					    .load_ms = 120000,
					    .ranks = ranks};
	kve_engine_t *engine = NULL;

	assert_int_equal(kve_engine_create(&config, &engine), KV_OK);

	return engine;
}

static void make_story(story_t *story, uint64_t *seed, uint32_t number)
{
	uint64_t shared = 7 + number % 5;

	*story = (story_t){.n_tokens = 5 + below(seed, PROMPT_MAX - 5), .n_new = 2 + below(seed, NEW_MAX - 1)};
	for (uint32_t i = 0; i < story->n_tokens; i++) { /* some begin alike */
		story->tokens[i] = below(i < 40 ? &shared : seed, kve_config_tiny.vocab);
	}
	(void)snprintf(story->transfer, sizeof story->transfer, "request-%u", number);
}

static kve_request_t *submit(kve_engine_t *engine, const story_t *story, kve_handover_t handover, uint32_t n_new)
{
	const kve_ask_t ask = {.tokens = story->tokens,
			       .n_tokens = story->n_tokens,
			       .max_new = n_new,
			       .handover = handover,
			       .transfer = story->transfer,
			       .handover_ms = 60000};
	kve_request_t *request = NULL;

	assert_int_equal(kve_engine_submit(engine, &ask, &request), KV_OK);

	return request;
}

static uint64_t hash_of(const kve_request_t *r)
{
	const uint32_t n = r->n_tokens - r->n_prompt;
	const uint64_t hash = hash_bytes(HASH_START, r->tokens + r->n_prompt, n * sizeof *r->tokens);

	return hash_bytes(hash, r->log_probabilities, n * sizeof *r->log_probabilities);
}

/* One engine does both. */
static void tell_alone(story_t *stories, uint32_t n)
{
	kve_engine_t *engine = make_engine(NULL, 1);

	for (uint32_t i = 0; i < n; i++) {
		kve_request_t *request = submit(engine, &stories[i], KVE_KEEP, stories[i].n_new);

		while (kve_engine_step(engine) > 0) {
		}
		stories[i].hash = hash_of(request);
		kve_engine_release(engine, request);
	}
	kve_engine_destroy(engine);
}

/* The consumer asks first: it waits until the producer has begun. */
static void hand_over(kve_engine_t *producer, kve_engine_t *consumer, const story_t *stories, kve_handover_t how)
{
	kve_request_t *sent[TOGETHER], *received[TOGETHER];

	for (uint32_t i = 0; i < TOGETHER; i++) {
		received[i] = submit(consumer, &stories[i], KVE_RECV, stories[i].n_new);
		sent[i] = submit(producer, &stories[i], how, 1);
	}
	while (kve_engine_step(producer) + kve_engine_step(consumer) > 0) {
	}
	for (uint32_t i = 0; i < TOGETHER; i++) {
		assert_true(hash_of(received[i]) == stories[i].hash);
		assert_int_equal(received[i]->recv.cause, KVC_OK);
		assert_int_equal(received[i]->recv.tokens, stories[i].n_tokens);
		assert_int_equal(received[i]->prompt_computed, 0);
		assert_int_equal(received[i]->tokens[stories[i].n_tokens], sent[i]->tokens[stories[i].n_tokens]);
		kve_engine_release(consumer, received[i]);
		kve_engine_release(producer, sent[i]);
	}
}

KV_CASE(p1_prefill_and_decode_on_two_engines_equal_one)
{
	static const uint32_t degrees[][2] = {{1, 1}, {4, 2}, {2, 4}, {4, 1}, {1, 2}};
	static story_t stories[REQUESTS];
	const uint32_t each = REQUESTS / KV_COUNT_OF(degrees);
	uint64_t seed = 71;

	for (uint32_t i = 0; i < REQUESTS; i++) {
		make_story(&stories[i], &seed, i);
	}
	tell_alone(stories, REQUESTS);
	rig_start(&rig);
	for (size_t d = 0; d < KV_COUNT_OF(degrees); d++) {
		kve_engine_t *producer = make_engine(rig.socket, degrees[d][0]);
		kve_engine_t *consumer = make_engine(rig.socket, degrees[d][1]);

		for (uint32_t i = 0; i < each; i += TOGETHER) {
			hand_over(producer, consumer, &stories[d * each + i],
				  i / TOGETHER % 2 ? KVE_SEND_WHOLE : KVE_SEND);
		}
		assert_int_equal(kve_engine_flush(producer, 15000) + kve_engine_flush(consumer, 15000), 0);
		assert_int_equal(kve_engine_free_blocks(producer), BLOCKS);
		assert_int_equal(kve_engine_free_blocks(consumer), BLOCKS);
		kve_engine_destroy(producer);
		kve_engine_destroy(consumer);
	}
	rig_check_quiet(&rig);
}

/* A producer that ends in the middle of a prompt, and one that never comes. */
KV_CASE(p7_a_lost_producer_changes_no_token)
{
	kve_engine_t *producer, *consumer;
	kve_request_t *half, *never, *sent;
	story_t stories[2];
	uint64_t seed = 72;
	kve_ask_t ask;

	make_story(&stories[0], &seed, 0);
	make_story(&stories[1], &seed, 1);
	stories[0].n_tokens = PROMPT_MAX;
	for (uint32_t i = 0; i < PROMPT_MAX; i++) {
		stories[0].tokens[i] = below(&seed, kve_config_tiny.vocab);
	}
	tell_alone(stories, 2);
	rig_start(&rig);
	producer = make_engine(rig.socket, 2);
	consumer = make_engine(rig.socket, 4);
	half = submit(consumer, &stories[0], KVE_RECV, stories[0].n_new);
	ask = (kve_ask_t){.tokens = stories[1].tokens,
			  .n_tokens = stories[1].n_tokens,
			  .max_new = stories[1].n_new,
			  .handover = KVE_RECV,
			  .transfer = "nobody sends it",
			  .handover_ms = 300};
	assert_int_equal(kve_engine_submit(consumer, &ask, &never), KV_OK);
	sent = submit(producer, &stories[0], KVE_SEND, 1);
	while (half->recv.blocks == 0) {
		(void)kve_engine_step(consumer);
		if (sent->n_computed == 0) {
			(void)kve_engine_step(producer); /* one chunk, which is not all */
		}
		(void)kvx_poll(kve_engine_store(producer), 1);
	}
	assert_true(half->state == KVE_LOADING && half->recv.tokens < PROMPT_MAX);
	kve_engine_destroy(producer);
	while (kve_engine_step(consumer) > 0) {
	}
	assert_true(hash_of(half) == stories[0].hash && hash_of(never) == stories[1].hash);
	assert_int_equal(half->recv.cause, KVC_ERR_ABORTED);
	assert_true(half->recv.tokens >= 64 && half->prompt_computed == PROMPT_MAX - half->recv.tokens);
	assert_int_equal(never->recv.cause, KVC_ERR_TIMEOUT);
	assert_int_equal(kve_engine_flush(consumer, 15000), 0);
	kve_engine_release(consumer, half);
	kve_engine_release(consumer, never);
	kve_engine_destroy(consumer);
}

/* ---- running them ---------------------------------------------------------------------------- */

static int begin_test(void **state)
{
	(void)state;
	rig_init(&rig, program);

	return 0;
}

static int end_test(void **state)
{
	(void)state;
	rig_check_quiet(&rig);
	rig_fini(&rig);

	return 0;
}

KV_CASES_MAIN_OF(program, begin_test, end_test)
