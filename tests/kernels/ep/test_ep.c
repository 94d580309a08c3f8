/* Dispatch and combine of the twin over each kind of link, against a reference that sees all tokens and has no transport.
 * Ranks are threads. Under the seeded scheduler one of them runs at a time, and stores arrive in any order that releases
 * allow. */
#include "ep_case.h"

#include "kv/types.h"

#include <pthread.h>

#define MOST_RANKS  4u
#define MOST_TOKENS 6u
#define MOST_HIDDEN 24u
#define MOST_TOP_K  4u
#define NUMBERS     4u
#define ALL         UINT32_MAX

typedef struct store {
	uint32_t from, to, n, release;
	size_t offset;
	uint8_t bytes[2u * MOST_TOKENS * MOST_HIDDEN * 2u]; /* the parts of two groups */
} store_t;

typedef struct end {
	uint32_t rank;
	kvk_ep_rank_t *ep;
	pthread_t thread;
	uint32_t calls_left; /* halves after which it ends, as if it had died */
	int over;
	kv_status_t status;
	uint64_t put, fetched; /* bytes of rows, notes and parts */
	kvk_bf16_t outputs[MOST_RANKS * MOST_TOKENS * MOST_TOP_K * MOST_HIDDEN];
} end_t;

static struct {
	kvk_ep_plan_t plan;
	kv_test_rng_t rng;
	kv_test_env_t env;
	end_t ends[MOST_RANKS];
	ep_batch_t batches[NUMBERS + 1][MOST_RANKS];
	uint32_t most[NUMBERS + 1]; /* tokens of a rank, in a dispatch */
	uint8_t *heaps[MOST_RANKS];
	kvk_ep_link_kind_t kind;
	/* of the seeded scheduler */
	int scheduled;
	pthread_mutex_t mutex;
	pthread_cond_t changed[MOST_RANKS + 1];
	uint32_t turn; /* the rank that runs; ranks: the test itself */
	store_t *stores;
	uint32_t count, room, idle;
} w;

/* ---- stores that arrive in any order --------------------------------------------------------- */

static void add_store(uint32_t from, uint32_t to, size_t offset, const void *bytes, size_t n)
{
	store_t *store;

	if (w.count == w.room) {
		w.room = w.room * 2u + 64u;
		w.stores = realloc(w.stores, w.room * sizeof *w.stores);
		assert_non_null(w.stores);
	}
	store = &w.stores[w.count++];
	assert_true(n <= sizeof store->bytes);
	*store = (store_t){.from = from, .to = to, .n = (uint32_t)n, .offset = offset};
	memcpy(store->bytes, bytes, n);
	w.idle = 0;
}

/* Of the link of the kind: the same calls, counted, and stores that arrive later under the scheduler. */
static void put_store(void *ctx, uint32_t rank, size_t offset, const void *bytes, size_t n)
{
	end_t *end = ctx;

	assert_int_not_equal(rank, end->rank); /* its own rows stay where they are */
	end->put += n > sizeof(uint32_t) ? n : 0;
	if (w.scheduled) {
		add_store(end->rank, rank, offset, bytes, n);
	} else {
		kvk_ep_link_of(w.kind, (void *const *)w.heaps).put((void *)w.heaps, rank, offset, bytes, n);
	}
}

static void fetch_bytes(void *ctx, uint32_t rank, size_t offset, void *to, size_t n)
{
	end_t *end = ctx;

	assert_int_equal(rank, end->rank);
	end->fetched += n > sizeof(uint32_t) ? n : 0;
	kvk_ep_link_of(w.kind, (void *const *)w.heaps).fetch((void *)w.heaps, rank, offset, to, n);
}

static void release_store(void *ctx, uint32_t rank, size_t offset, uint64_t value)
{
	if (!w.scheduled) {
		kvk_ep_link_of(w.kind, (void *const *)w.heaps).release((void *)w.heaps, rank, offset, value);
		return;
	}
	add_store(((end_t *)ctx)->rank, rank, offset, &value, sizeof value);
	w.stores[w.count - 1].release = 1;
}

static void deliver_one(void)
{
	const uint32_t at = (uint32_t)kv_test_below(&w.rng, w.count);
	const store_t *store = &w.stores[at];

	for (uint32_t i = 0; store->release && i < at; i++) {
		if (w.stores[i].from == store->from && w.stores[i].to == store->to) {
			return;
		}
	}
	memcpy(w.heaps[store->to] + store->offset, store->bytes, store->n);
	memmove(&w.stores[at], &w.stores[at + 1], (--w.count - at) * sizeof *w.stores);
	w.idle = 0;
}

/* ---- one rank at a time ---------------------------------------------------------------------- */

/* The mutex is held. */
static void run_another(uint32_t me)
{
	uint32_t alive[MOST_RANKS + 1] = {w.plan.shape.ranks}, n = 0;

	for (uint32_t r = 0; r < w.plan.shape.ranks; r++) {
		if (!w.ends[r].over) {
			alive[n++] = r;
		}
	}
	w.turn = alive[n ? kv_test_below(&w.rng, n) : 0];
	pthread_cond_signal(&w.changed[w.turn]);
	while (w.turn != me && (me == w.plan.shape.ranks || !w.ends[me].over)) {
		pthread_cond_wait(&w.changed[me], &w.mutex);
	}
}

/* A deadline is longer than all that ranks and stores do: the clock moves when nothing else has for long. */
static void pause_rank(void *ctx)
{
	if (!w.scheduled) {
		kvk_ep_link_of(w.kind, (void *const *)w.heaps).pause(ctx);
		return;
	}
	pthread_mutex_lock(&w.mutex);
	for (uint64_t i = kv_test_below(&w.rng, 4); i > 0 && w.count > 0; i--) {
		deliver_one();
	}
	if (w.count == 0 && ++w.idle > 64u * MOST_RANKS) {
		atomic_fetch_add(&w.env.now_ns, 1);
	}
	run_another(((end_t *)ctx)->rank);
	pthread_mutex_unlock(&w.mutex);
}

/* ---- what ranks do --------------------------------------------------------------------------- */

/* Every row is the one that its record names, and each is there once. */
static void check_rows(const kvk_ep_rows_t *rows, uint32_t rank, uint64_t number)
{
	const kvk_ep_shape_t *s = &w.plan.shape;
	uint32_t expected = 0, row = 0;

	for (uint32_t e = 0; e < w.plan.rank_experts; e++) {
		const uint32_t expert = rank * w.plan.rank_experts + e;

		assert_int_equal(rows->first[e], row);
		for (uint32_t i = 0; i < s->ranks * s->max_tokens * s->top_k; i++) {
			const uint32_t source = i / (s->max_tokens * s->top_k), t = i / s->top_k % s->max_tokens;
			const ep_batch_t *batch = &w.batches[number][source];
			const kvk_bf16_t *x;

			if (t >= batch->tokens.n || batch->experts[t * s->top_k + i % s->top_k] != expert) {
				continue;
			}
			expected++;
			x = kvk_ep_row(&w.plan, rows, row);
			assert_int_equal(rows->record[row++] / s->max_tokens, source);
			assert_memory_equal(x, batch->rows + t * s->hidden, w.plan.row_bytes);
			assert_true((source == rank) == (x == batch->rows + t * s->hidden));
		}
	}
	assert_int_equal(rows->n, expected);
	assert_int_equal(rows->first[w.plan.rank_experts], expected);
}

/* A half of a number; the next one in this order: with two in flight as DBO has them. */
enum { SEND, RECV, SEND_BACK, RECV_BACK };
static kv_status_t call_half(end_t *end, int half, uint64_t number)
{
	const uint64_t deadline = atomic_load(&w.env.now_ns) + (w.scheduled ? 8u : UINT64_C(1) << 62);
	ep_batch_t *batch = &w.batches[number][end->rank];
	kvk_ep_rows_t rows;
	uint64_t given = 0;
	kv_status_t status;

	if (end->calls_left == 0) {
		return KV_ERR_CLOSED;
	}
	end->calls_left -= end->calls_left != ALL;
	switch (half) {
	case SEND:
		status = kvk_ep_dispatch_send(end->ep, &batch->tokens, &given);
		assert_true(status != KV_OK || given == number);
		return status;
	case RECV:
		status = kvk_ep_dispatch_recv(end->ep, number, deadline, &rows);
		if (status == KV_OK) {
			check_rows(&rows, end->rank, number);
			ep_run_experts(&w.plan, end->rank, &rows, end->outputs);
		}
		return status;
	case SEND_BACK:
		return kvk_ep_combine_send(end->ep, number, end->outputs);
	default:
		return kvk_ep_combine_recv(end->ep, number, deadline, batch->out);
	}
}

static kv_status_t run_rank(end_t *end)
{
	kv_status_t status = KV_OK;

	for (uint64_t n = 1; n <= NUMBERS; n += w.plan.shape.in_flight) {
		static const struct {
			int half, second;
		} order[] = {{SEND, 0}, {SEND, 1},      {RECV, 0},      {SEND_BACK, 0},
			     {RECV, 1}, {RECV_BACK, 0}, {SEND_BACK, 1}, {RECV_BACK, 1}};

		for (size_t i = 0; i < KV_COUNT_OF(order) && status == KV_OK; i++) {
			if (!order[i].second || w.plan.shape.in_flight == 2) {
				status = call_half(end, order[i].half, n + (uint64_t)order[i].second);
			}
		}
	}

	return status;
}

static void *rank_main(void *ctx)
{
	end_t *end = ctx;

	if (!w.scheduled) {
		end->status = run_rank(end);
		return NULL;
	}
	pthread_mutex_lock(&w.mutex);
	while (w.turn != end->rank) {
		pthread_cond_wait(&w.changed[end->rank], &w.mutex);
	}
	pthread_mutex_unlock(&w.mutex);
	end->status = run_rank(end);
	pthread_mutex_lock(&w.mutex);
	end->over = 1;
	run_another(end->rank);
	pthread_mutex_unlock(&w.mutex);

	return NULL;
}

/* ---- a case ---------------------------------------------------------------------------------- */

static uint32_t pick(uint32_t from, uint32_t to)
{
	return from + (uint32_t)kv_test_below(&w.rng, to - from + 1u);
}

static kvk_ep_shape_t draw_shape(void)
{
	const uint32_t ranks = 1u << pick(0, 2), groups = ranks * pick(1, 2), experts = groups * pick(1, 3);

	return (kvk_ep_shape_t){.ranks = ranks,
				.experts = experts,
				.groups = groups,
				.top_k = pick(1, experts < MOST_TOP_K ? experts : MOST_TOP_K),
				.hidden = 8u * pick(1, 3),
				.max_tokens = pick(1, MOST_TOKENS),
				.in_flight = pick(1, 2)};
}

static void open_ranks(void)
{
	const kvk_ep_shape_t *s = &w.plan.shape;

	for (uint32_t r = 0; r < s->ranks; r++) {
		w.heaps[r] = ep_alloc(w.plan.heap_bytes);
		pthread_cond_init(&w.changed[r], NULL);
	}
	pthread_cond_init(&w.changed[s->ranks], NULL);
	pthread_mutex_init(&w.mutex, NULL);
	for (uint32_t r = 0; r < s->ranks; r++) {
		kvk_ep_link_t link = kvk_ep_link_of(w.kind, (void *const *)w.heaps);

		link.ctx = &w.ends[r];
		link.put = put_store;
		link.release = release_store;
		link.pause = pause_rank;
		link.fetch = link.fetch ? fetch_bytes : NULL;
		w.ends[r] = (end_t){.rank = r, .calls_left = ALL};
		assert_int_equal(kvk_ep_open(&w.env.env, &w.plan, r, w.heaps[r], &link, &w.ends[r].ep), KV_OK);
	}
}

static void start(const kvk_ep_shape_t *shape, int scheduled)
{
	const char *why;

	kv_test_env_init(&w.env);
	w.scheduled = scheduled;
	w.kind = (kvk_ep_link_kind_t)pick(KVK_EP_PEER, KVK_EP_HOST_KERNELS);
	if (kvk_ep_plan(shape, &w.plan, &why) != KV_OK) {
		fail_msg("%s", why);
	}
	for (uint32_t n = 1; n <= NUMBERS; n++) {
		const uint32_t most = ep_draw_most(&w.plan, &w.rng);

		w.most[n] = most ? most : shape->max_tokens;
		for (uint32_t r = 0; r < shape->ranks; r++) {
			ep_batch_open(&w.batches[n][r], &w.plan);
			ep_batch_draw(&w.batches[n][r], &w.plan, &w.rng, r, (ep_routing_t)pick(0, EP_ROUTINGS - 1u));
			ep_batch_bound(&w.batches[n][r], most);
		}
	}
	open_ranks();
}

static void run_ranks(void)
{
	const uint32_t ranks = w.plan.shape.ranks;

	w.turn = MOST_RANKS + 1u;
	for (uint32_t r = 0; r < ranks; r++) {
		assert_int_equal(pthread_create(&w.ends[r].thread, NULL, rank_main, &w.ends[r]), 0);
	}
	if (w.scheduled) {
		pthread_mutex_lock(&w.mutex);
		run_another(ranks);
		pthread_mutex_unlock(&w.mutex);
	}
	for (uint32_t r = 0; r < ranks; r++) {
		assert_int_equal(pthread_join(w.ends[r].thread, NULL), 0);
	}
	while (w.count > 0) {
		deliver_one();
	}
}

static void stop(void)
{
	for (uint32_t r = 0; r < w.plan.shape.ranks; r++) {
		kvk_ep_close(w.ends[r].ep);
		free(w.heaps[r]);
		for (uint32_t n = 1; n <= NUMBERS; n++) {
			ep_batch_close(&w.batches[n][r]);
		}
	}
	free(w.stores);
	assert_int_equal(kv_test_env_live(&w.env), 0);
	w.stores = NULL;
	w.count = w.room = w.idle = 0;
}

/* ---- the reference --------------------------------------------------------------------------- */

/* As kvk/ep.h states it. */
static void reference(const ep_batch_t *batch, uint32_t token, kvk_bf16_t *out)
{
	const kvk_ep_shape_t *s = &w.plan.shape;

	for (uint32_t h = 0; h < s->hidden; h++) {
		float sum = 0.0f;

		for (uint32_t g = 0; g < s->groups; g++) {
			float part = 0.0f;
			int found = 0;

			for (uint32_t k = 0; k < s->top_k; k++) {
				const uint32_t expert = batch->experts[token * s->top_k + k];

				if (expert != KVK_EP_NO_EXPERT && expert / w.plan.group_experts == g) {
					const float y =
						kvk_bf16_to_float(ep_apply(expert, batch->rows[token * s->hidden + h]));
					const float term = batch->weights[token * s->top_k + k] * y;

					part = part + term;
					found = 1;
				}
			}
			sum = found ? sum + kvk_bf16_to_float(kvk_bf16_round(part)) : sum;
		}
		out[h] = kvk_bf16_round(sum);
	}
}

/* What a token costs on the way there (of: ranks) or back (of: groups), and what stays on its own rank. */
static uint64_t count_remote(const ep_batch_t *batch, uint32_t rank, uint32_t experts_each)
{
	const kvk_ep_shape_t *s = &w.plan.shape;
	uint64_t found = 0;

	for (uint32_t t = 0; t < batch->tokens.n; t++) {
		uint64_t seen = 0;

		for (uint32_t k = 0; k < s->top_k; k++) {
			const uint32_t expert = batch->experts[t * s->top_k + k];

			if (expert != KVK_EP_NO_EXPERT && expert / w.plan.rank_experts != rank) {
				seen |= UINT64_C(1) << expert / experts_each;
			}
		}
		found += (uint64_t)__builtin_popcountll(seen);
	}

	return found;
}

static void check_answers(void)
{
	const kvk_ep_shape_t *s = &w.plan.shape;
	const int is_padded = w.kind == KVK_EP_HOST_COPIES && s->ranks > 1;
	uint64_t there = 0, back = 0, put = 0, fetched = 0, most = 0; /* most: tokens of all copies, one a pair */
	kvk_ep_stats_t sum = {0};

	for (uint32_t r = 0; r < s->ranks; r++) {
		const kvk_ep_stats_t stats = kvk_ep_get_stats(w.ends[r].ep);

		assert_int_equal(w.ends[r].status, KV_OK);
		sum.dispatch_bytes += stats.dispatch_bytes;
		sum.combine_bytes += stats.combine_bytes;
		sum.dispatch_padding += stats.dispatch_padding;
		sum.combine_padding += stats.combine_padding;
		put += w.ends[r].put;
		fetched += w.ends[r].fetched;
		for (uint32_t n = 1; n <= NUMBERS; n++) {
			const ep_batch_t *batch = &w.batches[n][r];

			there += count_remote(batch, r, w.plan.rank_experts);
			back += count_remote(batch, r, w.plan.group_experts);
			for (uint32_t t = 0; t < batch->tokens.n; t++) {
				kvk_bf16_t expected[MOST_HIDDEN];

				reference(batch, t, expected);
				assert_memory_equal(batch->out + t * s->hidden, expected, w.plan.row_bytes);
			}
		}
	}
	assert_int_equal(sum.dispatch_bytes, there * w.plan.record_bytes);
	assert_int_equal(sum.combine_bytes, back * w.plan.row_bytes);
	/* Copies of the most tokens of their dispatch: all else that they move is padding, and no link moves more. */
	for (uint32_t n = 1; n <= NUMBERS; n++) {
		most += (uint64_t)w.most[n] * s->ranks * (s->ranks - 1u);
	}
	assert_int_equal(sum.dispatch_padding, is_padded ? most * w.plan.record_bytes - sum.dispatch_bytes : 0);
	assert_int_equal(sum.combine_padding,
			 is_padded ? most * (s->groups / s->ranks) * w.plan.row_bytes - sum.combine_bytes : 0);
	assert_int_equal(put, sum.dispatch_bytes + sum.combine_bytes + sum.dispatch_padding + sum.combine_padding);
	assert_int_equal(fetched, w.kind == KVK_EP_PEER ? 0 : put);
}

/* ---- tests ----------------------------------------------------------------------------------- */

KV_TEST(p1_ranks_and_stores_in_any_order_give_the_bits_of_the_reference)
{
	w.rng.state = kv_test_seed();
	for (uint32_t i = 0; i < 1000; i++) {
		const kvk_ep_shape_t shape = draw_shape();

		start(&shape, 1);
		run_ranks();
		check_answers();
		stop();
	}
}

KV_TEST(p5_p10_a_rank_that_dies_is_named_by_all_others)
{
	w.rng.state = kv_test_seed();
	for (uint32_t i = 0; i < 200; i++) {
		kvk_ep_shape_t shape = draw_shape();
		uint32_t dead;

		shape.ranks = shape.ranks == 1 ? 2 : shape.ranks;
		shape.groups = shape.ranks;
		shape.experts = shape.ranks * 4u;
		start(&shape, 1);
		dead = pick(0, shape.ranks - 1u);
		w.ends[dead].calls_left = pick(0, 4u * NUMBERS - 2u); /* nobody waits for its last call */
		run_ranks();
		for (uint32_t r = 0; r < shape.ranks; r++) {
			assert_int_equal(w.ends[r].status, r == dead ? KV_ERR_CLOSED : KV_ERR_TIMEOUT);
			if (r != dead) {
				uint64_t number;

				assert_int_equal(kvk_ep_lost_ranks(w.ends[r].ep), 1u << dead);
				assert_int_equal(kvk_ep_dispatch_send(w.ends[r].ep, &w.batches[1][r].tokens, &number),
						 KV_ERR_TIMEOUT);
			}
		}
		stop();
	}
}

#define DEADLINE 5u

static uint32_t looks;

/* The clock of a rank that stands still at its second look: meanwhile the other one sends, and the deadline comes. */
static uint64_t stand_still(void *ctx)
{
	uint64_t number;

	(void)ctx;
	if (++looks < 2) {
		return 0;
	}
	assert_int_equal(kvk_ep_dispatch_send(w.ends[1].ep, &w.batches[1][1].tokens, &number), KV_OK);

	return DEADLINE;
}

KV_TEST(p5_a_rank_that_stood_still_names_nobody_who_has_come_since)
{
	const kvk_ep_shape_t shape = {
		.ranks = 2, .experts = 4, .groups = 2, .top_k = 2, .hidden = 8, .max_tokens = 2, .in_flight = 1};
	kvk_ep_rows_t rows;
	kvk_ep_link_t link;
	uint64_t number;
	kv_env_t env;

	looks = 0;
	w.rng.state = kv_test_seed();
	start(&shape, 0);
	kvk_ep_close(w.ends[0].ep);
	link = kvk_ep_link_of(w.kind, (void *const *)w.heaps);
	env = w.env.env;
	env.now_ns = stand_still;
	assert_int_equal(kvk_ep_open(&env, &w.plan, 0, w.heaps[0], &link, &w.ends[0].ep), KV_OK);
	assert_int_equal(kvk_ep_dispatch_send(w.ends[0].ep, &w.batches[1][0].tokens, &number), KV_OK);
	assert_int_equal(kvk_ep_dispatch_recv(w.ends[0].ep, number, DEADLINE, &rows), KV_OK);
	assert_int_equal(kvk_ep_lost_ranks(w.ends[0].ep), 0);
	stop();
}

KV_TEST(p1_threads_that_run_at_once_give_the_bits_of_the_reference)
{
	w.rng.state = kv_test_seed();
	for (uint32_t i = 0; i < 100; i++) {
		kvk_ep_shape_t shape = draw_shape();

		shape.ranks = shape.groups = 4;
		shape.experts = 8;
		start(&shape, 0);
		run_ranks();
		check_answers();
		stop();
	}
}

KV_TEST(p10_calls_out_of_order_and_bad_tokens_send_nothing)
{
	const kvk_ep_shape_t shape = {
		.ranks = 1, .experts = 4, .groups = 2, .top_k = 2, .hidden = 8, .max_tokens = 2, .in_flight = 1};
	kvk_ep_tokens_t tokens;
	kvk_ep_rank_t *ep;
	kvk_ep_rows_t rows;
	uint64_t n;

	w.rng.state = kv_test_seed();
	start(&shape, 0);
	ep = w.ends[0].ep;
	tokens = w.batches[1][0].tokens;
	for (uint32_t i = 0; i < 3; i++) { /* more than the plan's, more than the most, and a most above the plan's */
		tokens.n = i == 0 ? 3 : 2;
		tokens.most = i == 0 ? 0 : i == 1 ? 1 : 3;
		assert_int_equal(kvk_ep_dispatch_send(ep, &tokens, &n), KV_ERR_ARG);
	}
	tokens.most = 2;
	w.batches[1][0].experts[3] = 4;
	assert_int_equal(kvk_ep_dispatch_send(ep, &tokens, &n), KV_ERR_ARG);
	w.batches[1][0].experts[2] = w.batches[1][0].experts[3] = 1;
	assert_int_equal(kvk_ep_dispatch_send(ep, &tokens, &n), KV_ERR_ARG);
	w.batches[1][0].experts[3] = KVK_EP_NO_EXPERT;
	assert_int_equal(kvk_ep_dispatch_recv(ep, 1, 0, &rows), KV_ERR_ARG); /* not sent */
	assert_int_equal(kvk_ep_dispatch_send(ep, &tokens, &n), KV_OK);
	assert_int_equal(kvk_ep_dispatch_send(ep, &tokens, &n), KV_ERR_BUSY);
	assert_int_equal(kvk_ep_combine_send(ep, 1, w.ends[0].outputs), KV_ERR_ARG); /* not received */
	assert_int_equal(kvk_ep_dispatch_recv(ep, 2, 0, &rows), KV_ERR_ARG);
	assert_int_equal(kvk_ep_dispatch_recv(ep, 1, 0, &rows), KV_OK);
	assert_int_equal(kvk_ep_dispatch_recv(ep, 1, 0, &rows), KV_ERR_ARG);
	assert_int_equal(kvk_ep_combine_recv(ep, 1, 0, w.batches[1][0].out), KV_ERR_ARG);
	assert_int_equal(kvk_ep_combine_send(ep, 1, w.ends[0].outputs), KV_OK);
	assert_int_equal(kvk_ep_combine_recv(ep, 1, 0, w.batches[1][0].out), KV_OK);
	assert_int_equal(kvk_ep_lost_ranks(ep), 0);
	assert_int_equal(kvk_ep_open(&w.env.env, &w.plan, 1, w.heaps[0], &(kvk_ep_link_t){0}, &ep), KV_ERR_ARG);
	KV_TEST_EACH_FAILURE(&w.env, i)
	{
		const kvk_ep_link_t link = kvk_ep_link_of(KVK_EP_HOST_COPIES, (void *const *)w.heaps);
		const kv_status_t status = kvk_ep_open(&w.env.env, &w.plan, 0, w.heaps[0], &link, &ep);

		assert_int_equal(status, kv_test_failed(&w.env) ? KV_ERR_NOMEM : KV_OK);
		kvk_ep_close(status == KV_OK ? ep : NULL);
	}
	kvk_ep_close(NULL);
	stop();
}

KV_TEST(p10_more_tokens_than_the_most_send_nothing)
{
	const kvk_ep_shape_t shape = {
		.ranks = 2, .experts = 4, .groups = 2, .top_k = 2, .hidden = 8, .max_tokens = 4, .in_flight = 1};

	w.rng.state = kv_test_seed();
	for (uint32_t i = 0; i < 20; i++) {
		kvk_ep_tokens_t tokens;
		kvk_ep_stats_t stats;
		uint64_t number = 0;

		start(&shape, 0);
		tokens = w.batches[1][0].tokens;
		tokens.n = pick(2, 4);
		tokens.most = tokens.n - 1u;
		assert_int_equal(kvk_ep_dispatch_send(w.ends[0].ep, &tokens, &number), KV_ERR_ARG);
		stats = kvk_ep_get_stats(w.ends[0].ep);
		assert_true(w.ends[0].put == 0 && stats.dispatch_bytes == 0 && stats.dispatch_padding == 0);
		for (size_t at = 0; at < w.plan.heap_bytes; at++) {
			assert_int_equal(w.heaps[1][at], 0);
		}
		tokens.most = tokens.n;
		assert_int_equal(kvk_ep_dispatch_send(w.ends[0].ep, &tokens, &number), KV_OK);
		assert_int_equal(number, 1);
		stop();
	}
}

KV_TEST(p10_a_shape_that_cannot_be_is_refused_with_a_sentence)
{
	const kvk_ep_shape_t good = {.ranks = 2,
				     .experts = 128,
				     .groups = 2,
				     .top_k = 8,
				     .hidden = 2048,
				     .max_tokens = 4096,
				     .in_flight = 2};
	const struct {
		size_t at;
		uint32_t value;
		const char *why;
	} bad[] = {
		{offsetof(kvk_ep_shape_t, ranks), 0, "ranks"},
		{offsetof(kvk_ep_shape_t, ranks), 9, "ranks"},
		{offsetof(kvk_ep_shape_t, groups), 3, "groups"},
		{offsetof(kvk_ep_shape_t, groups), 0, "groups"},
		{offsetof(kvk_ep_shape_t, experts), 127, "experts"},
		{offsetof(kvk_ep_shape_t, experts), 8192, "experts"},
		{offsetof(kvk_ep_shape_t, top_k), 17, "a token"},
		{offsetof(kvk_ep_shape_t, top_k), 0, "a token"},
		{offsetof(kvk_ep_shape_t, hidden), 2047, "multiple of 8"},
		{offsetof(kvk_ep_shape_t, max_tokens), 0, "tokens"},
		{offsetof(kvk_ep_shape_t, in_flight), 5, "in flight"},
	};
	const char *why;
	kvk_ep_plan_t plan;

	assert_int_equal(kvk_ep_plan(&good, &plan, &why), KV_OK);
	assert_null(why);
	/* Two slots of 2 x 4,096 records (4,096 + 80 bytes) and as many parts; flags, reports and counts. */
	assert_int_equal(plan.record_bytes, 4096 + 80);
	assert_int_equal(plan.heap_bytes, 2u * 2u * 4096u * (4176u + 4096u) + 3u * 256u);
	assert_int_equal(plan.index_bytes, 2u * 4u * (65u + 2u * 2u * 4096u * 8u));
	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		kvk_ep_shape_t shape = good;

		memcpy((uint8_t *)&shape + bad[i].at, &bad[i].value, sizeof bad[i].value);
		assert_int_equal(kvk_ep_plan(&shape, &plan, &why), KV_ERR_ARG);
		assert_non_null(strstr(why, bad[i].why));
		assert_int_equal(kvk_ep_plan(&shape, &plan, NULL), KV_ERR_ARG);
	}
}

KV_TEST(p1_bf16_rounds_to_the_nearest_and_ties_to_even)
{
	const struct {
		uint32_t bits;
		kvk_bf16_t expected;
	} cases[] = {{0x3f800000, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f818000, 0x3f82}, {0x3f808001, 0x3f81},
		     {0x7f7fffff, 0x7f80}, {0x7f800000, 0x7f80}, {0xff800000, 0xff80}, {0x7f800001, 0x7fff},
		     {0xffc00000, 0x7fff}, {0x80000000, 0x8000}, {0x00008001, 0x0001}};

	for (size_t i = 0; i < KV_COUNT_OF(cases); i++) {
		float value;

		memcpy(&value, &cases[i].bits, sizeof value);
		assert_int_equal(kvk_bf16_round(value), cases[i].expected);
	}
	assert_true(kvk_bf16_to_float(0xc040) == -3.0f);
}
