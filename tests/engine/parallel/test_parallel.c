/* Ranks with requests of their own: a token's bits depend neither on how many ranks there are, nor on what the others
 * compute, nor on microbatches; and a rank that stops is named by all others. */
#include "engine/check.h"
#include "engine/reference.h"

#include "kve/parallel.h"
#include "rank.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define BLOCKS    32u
#define LENGTH    100u
#define SEQUENCES 5u
#define MOST      4u /* ranks */
#define DEADLINE  UINT64_C(1000000000)

/* One sequence a rank, or none. */
typedef struct driver {
	kve_rank_t *rank;
	kve_cache_t cache;
	uint32_t number, chunk;
	const uint32_t *tokens;
	uint32_t n, done;
	float *logits;
	kv_status_t status;
	uint64_t ended_ns;
	pthread_t thread;
} driver_t;

/* A clock that moves when all ranks that live wait, and not before one has stopped: no load makes a rank late. */
static struct {
	pthread_mutex_t mutex;
	pthread_cond_t changed;
	uint64_t now_ns;
	uint32_t living, waiting; /* a bit a rank */
	uint32_t stops;           /* this rank; MOST: none does */
	/* At this call of the clock, before this step, or before this release of a flag; 0: not there. */
	uint32_t at_call, at_step, at_release;
	int has_stopped;
} w = {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static _Thread_local uint32_t me, calls, releases;

/* The mutex is held. Until all others have ended. */
static void stop_rank(void)
{
	w.living &= ~(1u << me);
	w.has_stopped = 1;
	while (w.living) {
		pthread_cond_wait(&w.changed, &w.mutex);
	}
}

static uint64_t read_clock(void *ctx)
{
	uint64_t now_ns;

	(void)ctx;
	pthread_mutex_lock(&w.mutex);
	if (me == w.stops && ++calls == w.at_call) {
		stop_rank();
	}
	w.waiting |= 1u << me;
	if (w.has_stopped && (w.waiting & w.living) == w.living) {
		w.now_ns += DEADLINE / 100;
		w.waiting = 0;
	}
	now_ns = w.now_ns;
	pthread_mutex_unlock(&w.mutex);

	return now_ns;
}

/* Each rank has a flag at each other: some have heard of a half that others have not. */
static void release_flag(void *ctx, uint32_t rank, size_t offset, uint64_t value)
{
	if (me == w.stops && ++releases == w.at_release) {
		pthread_mutex_lock(&w.mutex);
		stop_rank();
		pthread_mutex_unlock(&w.mutex);
	}
	kvk_ep_memory_link(ctx).release(ctx, rank, offset, value);
}

static void end_rank(driver_t *d)
{
	pthread_mutex_lock(&w.mutex);
	d->ended_ns = w.now_ns;
	w.living &= ~(1u << me);
	pthread_cond_broadcast(&w.changed);
	pthread_mutex_unlock(&w.mutex);
}

static kv_status_t take_step(driver_t *d, kve_step_t *step, uint32_t *blocks)
{
	const uint32_t left = d->n - d->done, n = left < d->chunk ? left : d->chunk;
	const kve_step_count_t own = {.count = {.tokens = n, .prefill = 1}, .unfinished = left > 0};
	const kve_span_t span = {d->tokens + d->done, n, d->done, blocks, d->logits, NULL};
	kv_status_t status = kve_rank_agree(d->rank, &own, step);

	if (status == KV_OK && step->tokens > 0) {
		status = kve_rank_forward(d->rank, &d->cache, &span, n > 0, &step->dbo);
	}
	d->done += status == KV_OK ? n : 0;

	return status;
}

static void *drive(void *arg)
{
	driver_t *d = arg;
	kve_step_t step = {.unfinished = 1};
	uint32_t blocks[BLOCKS];

	me = d->number;
	calls = releases = 0;
	assert_int_equal(kve_cache_take(&d->cache, BLOCKS, blocks), KV_OK);
	for (uint32_t s = 1; d->status == KV_OK && step.unfinished > 0; s++) {
		if (me == w.stops && s == w.at_step) {
			pthread_mutex_lock(&w.mutex);
			stop_rank();
			pthread_mutex_unlock(&w.mutex);
		}
		d->status = take_step(d, &step, blocks);
	}
	end_rank(d);

	return NULL;
}

/* The sequences of the test, and what one rank makes of each alone. */
static uint32_t tokens[SEQUENCES][LENGTH];
static const uint32_t lengths[SEQUENCES] = {LENGTH, 37, 0, 64, 5};
static uint64_t expected[SEQUENCES];

/* On `ranks` ranks, rank r has sequence first + r. Returns what they have counted. */
static kve_rank_stats_t run_ranks(driver_t *drivers, uint32_t ranks, uint32_t first, uint32_t chunk, int dbo)
{
	kv_env_t env = kv_env_posix;
	const kve_group_config_t config = {.model = &kve_config_moe,
					   .ranks = ranks,
					   .deadline_ms = (uint32_t)(DEADLINE / 1000000),
					   .env = &env,
					   .dbo = {.enabled = dbo, .decode_threshold = 1, .prefill_threshold = 2}};
	kve_rank_stats_t sum = {.steps = {0}};
	kve_group_t *group;

	env.now_ns = read_clock;
	w.now_ns = w.waiting = 0;
	w.has_stopped = 0;
	w.living = (1u << ranks) - 1;
	assert_int_equal(kve_group_create(&config, &group), KV_OK);
	group->link.release = release_flag;
	for (uint32_t r = 0; r < ranks; r++) {
		driver_t *d = &drivers[r];
		const uint32_t s = (first + r) % SEQUENCES;

		*d = (driver_t){.number = r, .chunk = chunk, .tokens = tokens[s], .n = lengths[s]};
		d->logits = calloc(kve_config_moe.vocab, sizeof(float));
		assert_non_null(d->logits);
		assert_int_equal(kve_cache_init(&d->cache, &kve_config_moe, BLOCKS), KV_OK);
		assert_int_equal(kve_rank_create(group, r, &d->rank), KV_OK);
	}
	for (uint32_t r = 0; r < ranks; r++) {
		assert_int_equal(pthread_create(&drivers[r].thread, NULL, drive, &drivers[r]), 0);
	}
	for (uint32_t r = 0; r < ranks; r++) {
		assert_int_equal(pthread_join(drivers[r].thread, NULL), 0);
	}
	for (uint32_t r = 0; r < ranks; r++) {
		driver_t *d = &drivers[r];
		const kve_rank_stats_t own = kve_rank_stats(d->rank);

		sum.steps[0] += own.steps[0];
		sum.steps[1] += own.steps[1];
		sum.sent.dispatch_bytes += own.sent.dispatch_bytes;
		sum.sent.combine_bytes += own.sent.combine_bytes;
		if (w.stops < ranks) {
			assert_int_equal(d->status, KV_ERR_TIMEOUT);
			assert_int_equal(kve_rank_lost(d->rank), 1u << w.stops);
			assert_true(d->ended_ns <= DEADLINE * 3 / 2);
		} else {
			assert_int_equal(d->status, KV_OK);
			assert_int_equal(d->done, d->n);
		}
	}
	for (uint32_t r = 0; r < ranks; r++) {
		const uint32_t s = (first + r) % SEQUENCES;
		const uint64_t hash = hash_bytes(HASH_START, drivers[r].logits, kve_config_moe.vocab * sizeof(float));

		if (w.stops >= ranks) {
			expected[s] = expected[s] ? expected[s] : hash;
			assert_true(hash == expected[s]);
		}
		free(drivers[r].logits);
		kve_cache_fini(&drivers[r].cache);
		kve_rank_destroy(drivers[r].rank);
	}
	kve_group_destroy(group);

	return sum;
}

static int draw_sequences(void **state)
{
	uint64_t seed = 31;

	(void)state;
	w.stops = MOST;
	w.at_call = w.at_step = w.at_release = 0;
	memset(expected, 0, sizeof expected);
	for (uint32_t s = 0; s < SEQUENCES; s++) {
		for (uint32_t i = 0; i < LENGTH; i++) {
			tokens[s][i] = below(&seed, kve_config_moe.vocab);
		}
	}

	return 0;
}

/* Alone, in company of long, short and no sequences, in chunks, in one batch and in two microbatches. */
KV_TEST(any_number_of_ranks_gives_the_same_logits)
{
	static const struct {
		uint32_t ranks, first, chunk;
		int dbo;
	} cases[] = {{2, 0, 64, 0}, {2, 1, 7, 0}, {4, 0, 33, 0}, {4, 1, 64, 0},
		     {2, 0, 64, 1}, {2, 3, 5, 1}, {4, 3, 16, 1}};
	driver_t drivers[MOST];

	for (uint32_t s = 0; s < SEQUENCES; s++) {
		(void)run_ranks(drivers, 1, s, KVE_MAX_ROWS, 0);
	}
	for (size_t i = 0; i < KV_COUNT_OF(cases); i++) {
		const kve_rank_stats_t stats =
			run_ranks(drivers, cases[i].ranks, cases[i].first, cases[i].chunk, cases[i].dbo);

		/* A rank without tokens keeps all of them from two microbatches. */
		assert_int_equal(stats.steps[KVE_OVERLAP_DBO] > 0, cases[i].dbo && cases[i].ranks == 2);
	}
}

/* Bytes that sequence s sends between ranks: a row once to each other rank that has an expert of its, and back one for
 * each group there. */
static void count_bytes(const kvk_ep_plan_t *plan, uint32_t owner, uint32_t s, kvk_ep_stats_t *p_sum)
{
	reference_t *plain = reference_create(&kve_config_moe);

	for (uint32_t i = 0; i < lengths[s] * kve_config_moe.layers; i++) {
		const uint32_t layer = i % kve_config_moe.layers;
		uint32_t to_ranks = 0, to_groups = 0;

		if (layer == 0) {
			(void)reference_feed(plain, tokens[s][i / kve_config_moe.layers]);
		}
		for (uint32_t k = 0; k < kve_config_moe.top_k; k++) {
			const uint32_t expert = reference_experts(plain, layer)[k], to = expert / plan->rank_experts;

			if (to != owner) {
				to_ranks |= 1u << to;
				to_groups |= 1u << expert / plan->group_experts;
			}
		}
		p_sum->dispatch_bytes += (uint64_t)__builtin_popcount(to_ranks) * plan->record_bytes;
		p_sum->combine_bytes += (uint64_t)__builtin_popcount(to_groups) * plan->row_bytes;
	}
	reference_destroy(plain);
}

KV_TEST(bytes_between_ranks_are_those_of_the_routing)
{
	for (uint32_t ranks = 1; ranks <= MOST; ranks *= 2) {
		const kvk_ep_shape_t shape = {.ranks = ranks,
					      .experts = kve_config_moe.experts,
					      .top_k = kve_config_moe.top_k,
					      .hidden = kve_config_moe.hidden,
					      .max_tokens = KVE_MAX_ROWS,
					      .groups = kve_config_moe.groups,
					      .in_flight = 2};
		kvk_ep_stats_t sum = {0};
		driver_t drivers[MOST];
		kve_rank_stats_t stats;
		kvk_ep_plan_t plan;

		assert_int_equal(kvk_ep_plan(&shape, &plan, NULL), KV_OK);
		for (uint32_t r = 0; r < ranks; r++) {
			count_bytes(&plan, r, (3 + r) % SEQUENCES, &sum);
		}
		stats = run_ranks(drivers, ranks, 3, 16, ranks == 2);
		assert_int_equal(stats.sent.dispatch_bytes, sum.dispatch_bytes);
		assert_int_equal(stats.sent.combine_bytes, sum.combine_bytes);
		assert_int_equal(sum.dispatch_bytes > 0, ranks > 1);
	}
}

/* Wherever it stops: while it waits, before a step, or when a part of the others has heard of the end of one. */
KV_TEST(p5_a_rank_that_stops_is_named_by_all_others_by_the_deadline)
{
	static const uint32_t calls_of_clock[] = {1, 2, 3, 4, 7, 12, 19, 50};
	const uint32_t step = 2 * MOST * kve_config_moe.layers; /* releases of a rank */
	driver_t drivers[MOST];

	for (size_t i = 0; i < KV_COUNT_OF(calls_of_clock); i++) {
		w.stops = (uint32_t)i % MOST;
		w.at_call = calls_of_clock[i];
		(void)run_ranks(drivers, MOST, 3, 1 + (uint32_t)i % 2, i % 2);
	}
	w.at_call = 0;
	for (w.stops = 0; w.stops < MOST; w.stops++) {
		w.at_step = w.stops + 1;
		(void)run_ranks(drivers, MOST, 0, 8, 0);
	}
	w.at_step = 0;
	w.stops = 1;
	for (w.at_release = step - MOST; w.at_release <= step + MOST; w.at_release++) {
		(void)run_ranks(drivers, MOST, 0, 1, 0);
	}
}

KV_TEST(nobody_waits_for_a_rank_that_takes_no_step)
{
	const kve_group_config_t config = {.model = &kve_config_moe, .ranks = 2};
	const kve_step_count_t own = {.count = {.tokens = 1}};
	kve_rank_t *ranks[2];
	kve_group_t *group;
	kve_step_t step;

	assert_int_equal(kve_group_create(&config, &group), KV_OK);
	assert_int_equal(kve_rank_create(group, 0, &ranks[0]), KV_OK);
	assert_int_equal(kve_rank_create(group, 1, &ranks[1]), KV_OK);
	kve_rank_abandon(ranks[1]);
	assert_int_equal(kve_rank_agree(ranks[0], &own, &step), KV_ERR_TIMEOUT);
	assert_int_equal(kve_rank_lost(ranks[0]), 2);
	kve_rank_destroy(ranks[0]);
	kve_rank_destroy(ranks[1]);
	kve_group_destroy(group);
}

/* ---- requests -------------------------------------------------------------------------------- */

/* Tokens and probabilities of n requests, in order of their submission. */
static uint64_t run_requests(uint32_t ranks, uint32_t n, int dbo)
{
	const kve_parallel_config_t config = {
		.engine = {.model = kve_config_moe, .cache_blocks = BLOCKS, .max_running = 3},
		.ranks = ranks,
		.dbo = {.enabled = dbo, .decode_threshold = 1, .prefill_threshold = 2}};
	kve_request_t *requests[3 * SEQUENCES];
	uint64_t hash = HASH_START, dbo_steps = 0;
	kve_parallel_t *p;

	assert_int_equal(kve_parallel_create(&config, &p), KV_OK);
	for (uint32_t i = 0; i < n; i++) {
		const kve_ask_t ask = {.tokens = tokens[i % SEQUENCES],
				       .n_tokens = 11 + 5 * i,
				       .max_new = 4 + i % 3,
				       .log_probabilities = 1};

		assert_int_equal(kve_parallel_submit(p, &ask, &requests[i]), KV_OK);
		assert_int_equal(requests[i]->rank, i % ranks);
	}
	assert_int_equal(kve_parallel_run(p), KV_OK);
	for (uint32_t i = 0; i < n; i++) {
		const kve_request_t *r = requests[i];

		assert_int_equal(r->state, KVE_DONE);
		hash = hash_bytes(hash, r->tokens, r->n_tokens * sizeof(uint32_t));
		hash = hash_bytes(hash, r->log_probabilities, r->max_new * sizeof(double));
		kve_parallel_release(p, requests[i]);
	}
	assert_int_equal(kve_parallel_run(p), KV_OK);
	for (uint32_t r = 0; r < ranks; r++) {
		dbo_steps += kve_engine_rank_stats(kve_parallel_engine(p, r)).steps[KVE_OVERLAP_DBO];
		assert_int_equal(kve_engine_free_blocks(kve_parallel_engine(p, r)), BLOCKS);
	}
	assert_int_equal(dbo_steps > 0, dbo && n > 1);
	kve_parallel_destroy(p);

	return hash;
}

KV_TEST(p1_requests_divided_among_ranks_have_the_answers_of_one_rank)
{
	const uint64_t answers = run_requests(1, 12, 0), alone = run_requests(1, 1, 0);

	assert_true(run_requests(2, 12, 0) == answers);
	assert_true(run_requests(4, 12, 0) == answers);
	assert_true(run_requests(2, 12, 1) == answers);
	assert_true(run_requests(4, 12, 1) == answers);
	/* The others have none. */
	assert_true(run_requests(4, 1, 1) == alone);
}

KV_TEST_MAIN_EACH(draw_sequences, NULL)
