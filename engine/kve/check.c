/* kve check: one answer, however steps are cut, shared out among ranks and sent. */
#include "setup.h"

#include "kve/parallel.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NEW     4u
#define LONGEST 160u

typedef struct values {
	setup_options_t setup; /* first; ranks and link are those of the ways */
	uint64_t requests, seed;
} values_t;

#define AT(field) offsetof(values_t, field)
static const kv_option_t rows[] = {
	SETUP_OPTIONS,
	{"requests", KV_OPTION_U64, "12", "1", "1000", NULL, 0, AT(requests), "Prompts of 1 to 160 tokens."},
	{"seed", KV_OPTION_U64, "1", "0", "1000000000", NULL, 0, AT(seed), "Of their tokens."},
};
#undef AT

/* How a run computes. */
typedef struct way {
	uint32_t ranks, max_rows, max_running;
	kvk_ep_link_kind_t link;
	int dbo, alone;
} way_t;

static const way_t ways[] = {
	{1, 1024, 32, KVK_EP_PEER, 0, 0},
	{1, 64, 8, KVK_EP_PEER, 0, 0},
	{1, 7, 2, KVK_EP_PEER, 0, 0},
	{1, 1024, 1, KVK_EP_PEER, 0, 1},
	{2, 1024, 32, KVK_EP_PEER, 0, 0},
	{2, 256, 32, KVK_EP_PEER, 1, 0},
	{2, 1024, 32, KVK_EP_HOST_COPIES, 0, 0},
	{2, 64, 8, KVK_EP_HOST_COPIES, 1, 0},
	{2, 33, 8, KVK_EP_HOST_KERNELS, 1, 0},
	{4, 512, 16, KVK_EP_PEER, 1, 0},
};

typedef struct answer {
	uint32_t tokens[NEW];
	double log_probabilities[NEW]; /* of all logits: one that differs by a bit shows */
} answer_t;

typedef struct prompts {
	uint32_t n;
	uint32_t *lengths;
	uint32_t (*tokens)[LONGEST];
} prompts_t;

static uint64_t next_random(uint64_t *state)
{
	uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);

	return z ^ (z >> 31);
}

static int draw_prompts(prompts_t *prompts, uint64_t seed, uint32_t vocab)
{
	prompts->lengths = calloc(prompts->n, sizeof *prompts->lengths);
	prompts->tokens = calloc(prompts->n, sizeof *prompts->tokens);
	if (!prompts->lengths || !prompts->tokens) {
		return -1;
	}
	for (uint32_t i = 0; i < prompts->n; i++) {
		prompts->lengths[i] = 1 + (uint32_t)(next_random(&seed) % LONGEST);
		for (uint32_t t = 0; t < prompts->lengths[i]; t++) {
			prompts->tokens[i][t] = (uint32_t)(next_random(&seed) % vocab);
		}
	}

	return 0;
}

static kv_status_t submit(kve_parallel_t *parallel, const prompts_t *prompts, uint32_t i, kve_request_t **p_request)
{
	const kve_ask_t ask = {
		.tokens = prompts->tokens[i], .n_tokens = prompts->lengths[i], .max_new = NEW, .log_probabilities = 1};

	return kve_parallel_submit(parallel, &ask, p_request);
}

static void take_answer(kve_parallel_t *parallel, kve_request_t *request, answer_t *answer)
{
	memcpy(answer->tokens, request->tokens + request->n_prompt, sizeof answer->tokens);
	memcpy(answer->log_probabilities, request->log_probabilities, sizeof answer->log_probabilities);
	kve_parallel_release(parallel, request);
}

typedef struct held {
	kve_request_t *request;
} held_t;

/* All together, or one after another. */
static kv_status_t answer_all(kve_parallel_t *parallel, const prompts_t *prompts, int alone, answer_t *answers)
{
	held_t *requests = calloc(prompts->n, sizeof *requests);
	kv_status_t status = requests ? KV_OK : KV_ERR_NOMEM;

	for (uint32_t i = 0; i < prompts->n && status == KV_OK; i++) {
		status = submit(parallel, prompts, i, &requests[i].request);
		if (status == KV_OK && alone) {
			status = kve_parallel_run(parallel);
		}
	}
	if (status == KV_OK && !alone) {
		status = kve_parallel_run(parallel);
	}
	for (uint32_t i = 0; i < prompts->n && status == KV_OK; i++) {
		take_answer(parallel, requests[i].request, &answers[i]);
	}
	free(requests);

	return status;
}

/* *p_split: steps in two microbatches. */
static kv_status_t run_way(const way_t *way, const setup_t *setup, const prompts_t *prompts, answer_t *answers,
			   uint64_t *p_split)
{
	const kve_parallel_config_t config = {
		.engine = {.model = setup->model,
			   .cache_blocks = way->max_running * (LONGEST + NEW + setup->model.block_tokens) /
					   setup->model.block_tokens,
			   .max_running = way->max_running < way->max_rows / 2 ? way->max_running : way->max_rows / 2,
			   .devices = setup->devices,
			   .max_rows = way->max_rows},
		.ranks = way->ranks,
		.dbo = {.enabled = way->dbo, .decode_threshold = 2, .prefill_threshold = 2},
	};
	kve_parallel_t *parallel;
	kv_status_t status = kve_parallel_create(&config, &parallel);

	if (status != KV_OK) {
		return status;
	}
	status = answer_all(parallel, prompts, way->alone, answers);
	*p_split = kve_engine_rank_stats(kve_parallel_engine(parallel, 0)).steps[KVE_OVERLAP_DBO];
	kve_parallel_destroy(parallel);

	return status;
}

static void print_way(const way_t *way, uint32_t wrong, uint32_t n, uint64_t split)
{
	static const char *const links[] = {"peer", "host", "host-kernels"};

	printf("%u rank%s, %s, steps of up to %u tokens, %s%s: %u of %u answers are the first way's", way->ranks,
	       way->ranks > 1 ? "s" : "", links[way->link], way->max_rows,
	       way->alone ? "one request at a time" : "batched", way->dbo ? ", two microbatches" : "", n - wrong, n);
	if (way->dbo) {
		printf(" (%" PRIu64 " steps split)", split);
	}
	printf("\n");
}

static int is_equal(const answer_t *a, const answer_t *b)
{
	int equal = memcmp(a->tokens, b->tokens, sizeof a->tokens) == 0;

	for (uint32_t i = 0; i < NEW; i++) {
		equal &= a->log_probabilities[i] == b->log_probabilities[i]; /* no zeros, no NaN */
	}

	return equal;
}

/* Returns the exit status. */
static int check_way(const way_t *way, const values_t *values, const prompts_t *prompts, answer_t *answers)
{
	setup_options_t options = values->setup;
	setup_t setup;
	uint64_t split = 0;
	uint32_t wrong = 0;
	kv_status_t status;
	int rc;

	options.ranks = way->ranks;
	options.link = (int)way->link;
	rc = setup_open(&setup, &options);
	status = rc == 0 ? run_way(way, &setup, prompts, answers + (way == ways ? 0 : prompts->n), &split) : KV_OK;
	setup_close(&setup);
	if (status != KV_OK) {
		return setup_fail("check", &options, status);
	}
	for (uint32_t i = 0; way != ways && i < prompts->n; i++) {
		wrong += !is_equal(&answers[i], &answers[prompts->n + i]);
	}
	if (rc != 0) {
		return rc;
	}
	print_way(way, wrong, prompts->n, split);
	if (way->dbo && split == 0) {
		(void)fputs("kve: check: too few --requests for a step in two microbatches\n", stderr);
		return EXIT_WRONG;
	}

	return wrong ? EXIT_WRONG : 0;
}

static int run_check(const void *given)
{
	const values_t *values = given;
	prompts_t prompts = {.n = (uint32_t)values->requests};
	answer_t *answers = calloc((size_t)2 * prompts.n, sizeof *answers);
	setup_options_t options = values->setup;
	setup_t setup;
	int rc = EXIT_MEMORY;

	options.ranks = 1;
	if (answers) {
		rc = setup_open(&setup, &options);
		setup_close(&setup);
	}
	if (rc == 0 && draw_prompts(&prompts, values->seed, setup.model.vocab) != 0) {
		rc = EXIT_MEMORY;
	}
	for (size_t i = 0; i < KV_COUNT_OF(ways) && rc == 0; i++) {
		if (ways[i].ranks == 1 || (setup.model.experts && setup.model.groups % ways[i].ranks == 0)) {
			rc = check_way(&ways[i], values, &prompts, answers);
		}
	}
	free(prompts.lengths);
	free(prompts.tokens);
	free(answers);

	return rc;
}

static const char *const required[] = {NULL};

const command_t command_check = {
	.name = "check",
	.about = "one answer, bit for bit, on any number of ranks, links, in chunks and in microbatches",
	.usage = "[--config FILE] [--device cpu|gpu] [--requests N] ...",
	.table = {rows, KV_COUNT_OF(rows), "KVE_"},
	.required = required,
	.value_bytes = sizeof(values_t),
	.run = run_check,
};
