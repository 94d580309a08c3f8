/* Devices that fail and ranks that stop: each call of a device in turn. A step says so and ends, nothing is left behind,
 * and the others name the rank. */
#include "engine/bf16/shape.h"
#include "engine/check.h"

#include "bf16/device.h"
#include "kve/parallel.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#define BLOCKS     16u
#define ROWS       64u
#define PROMPT     40u
#define MOST       4u /* ranks */
#define MOST_CALLS 2000u

/* The twins' calls, and what is done to them. */
static struct {
	const kve_device_ops_t *real;
	kve_device_ops_t ops;
	const kve_device_t *victim; /* its calls are counted */
	uint64_t calls, fail_at;    /* 0: none fails */
	kv_status_t answer;         /* of the call that has failed; KV_OK: none has */
	_Atomic int64_t live;       /* pieces of memory, and ends of the transport */
	uint32_t patience_ms;       /* of the transport */
	int end_fails;              /* of a step: the victim's sync, and nothing else */
	int sync_fails;             /* now */
	int late_fails;             /* a device that has waited in vain for a rank says that it has failed itself */
	int together;               /* all ranks that live have sent a dispatch before one waits */
	pthread_barrier_t have_sent;
} w;

/* The status that this call answers without being made; KV_OK: it is made. */
static kv_status_t find_failure(const kve_device_t *device, kv_status_t status)
{
	if (device != w.victim || ++w.calls != w.fail_at) {
		return KV_OK;
	}
	w.answer = status;

	return status;
}

static kv_status_t fail_alloc(kve_device_t *device, size_t bytes, void **p_at)
{
	const kv_status_t status = find_failure(device, KV_ERR_NOMEM);

	w.live += status == KV_OK;

	return status == KV_OK ? w.real->alloc(device, bytes, p_at) : status;
}

static kv_status_t fail_alloc_host(kve_device_t *device, size_t bytes, void **p_at)
{
	const kv_status_t status = find_failure(device, KV_ERR_NOMEM);

	w.live += status == KV_OK;

	return status == KV_OK ? w.real->alloc_host(device, bytes, p_at) : status;
}

static void count_free(kve_device_t *device, void *at)
{
	w.live -= at != NULL;
	w.real->free(device, at);
}

static void count_free_host(kve_device_t *device, void *at)
{
	w.live -= at != NULL;
	w.real->free_host(device, at);
}

#define FAIL_CALL(member, parameters, ...)                                                                             \
	static kv_status_t fail_##member parameters                                                                    \
	{                                                                                                              \
		const kv_status_t status = find_failure(device, KV_ERR_IO);                                            \
                                                                                                                       \
		return status == KV_OK ? w.real->member(__VA_ARGS__) : status;                                         \
	}

FAIL_CALL(copy, (kve_device_t * device, void *to, const void *from, size_t bytes), device, to, from, bytes)
FAIL_CALL(record, (kve_device_t * device, uint32_t event, kve_stream_t stream), device, event, stream)
FAIL_CALL(wait, (kve_device_t * device, uint32_t event, kve_stream_t stream), device, event, stream)
FAIL_CALL(reserve_marks, (kve_device_t * device, uint32_t n), device, n)
FAIL_CALL(mark, (kve_device_t * device, uint32_t number, kve_stream_t stream), device, number, stream)
FAIL_CALL(elapsed, (kve_device_t * device, uint32_t from, uint32_t to, uint64_t *p_ns), device, from, to, p_ns)
FAIL_CALL(dispatch_send, (kve_device_t * device, const kvk_ep_tokens_t *tokens, uint64_t *p_number), device, tokens,
	  p_number)
FAIL_CALL(reduce, (kve_device_t * device, uint64_t number, const kvk_bf16_t *outputs), device, number, outputs)
FAIL_CALL(combine_send, (kve_device_t * device, uint64_t number), device, number)
FAIL_CALL(combine_recv, (kve_device_t * device, uint64_t number, kvk_bf16_t *out), device, number, out)

static kv_status_t fail_sync(kve_device_t *device)
{
	const kv_status_t status = find_failure(device, KV_ERR_IO);

	return w.sync_fails && device == w.victim ? KV_ERR_IO : status == KV_OK ? w.real->sync(device) : status;
}

static kv_status_t fail_ep_open(kve_device_t *device, const kvk_ep_plan_t *plan, uint32_t rank)
{
	const kv_status_t status = find_failure(device, KV_ERR_IO);

	w.live += status == KV_OK;

	return status == KV_OK ? w.real->ep_open(device, plan, rank) : status;
}

/* Of a rank that has opened its end; another one's is closed all the same. */
static void count_ep_close(kve_device_t *device)
{
	kvk_ep_stats_t stats = {.dispatch_bytes = UINT64_MAX};

	(void)w.real->ep_check(device, NULL, &stats);
	w.live -= stats.dispatch_bytes != UINT64_MAX;
	w.real->ep_close(device);
}

static kv_status_t fail_dispatch_recv(kve_device_t *device, uint64_t number, kvk_ep_rows_t *p_rows)
{
	kv_status_t status = find_failure(device, KV_ERR_IO);

	if (w.together && number == 1) {
		(void)pthread_barrier_wait(&w.have_sent);
	}

	status = status == KV_OK ? w.real->dispatch_recv(device, number, p_rows) : status;

	return w.late_fails && status == KV_ERR_TIMEOUT ? KV_ERR_IO : status;
}

/* That of a pass alone fails: others ask for ranks and bytes, and are told what is known. */
static kv_status_t fail_ep_check(kve_device_t *device, uint32_t *p_lost, kvk_ep_stats_t *stats)
{
	const kv_status_t status = p_lost || stats ? KV_OK : find_failure(device, KV_ERR_IO);

	return status == KV_OK ? w.real->ep_check(device, p_lost, stats) : status;
}

/* Twins whose rank `victim` fails at its call `fail_at`. */
static kve_devices_t *open_devices(uint32_t ranks, uint32_t victim, uint64_t fail_at)
{
	const kve_devices_config_t config = {.ranks = ranks, .timeout_ms = w.patience_ms};
	kve_devices_t *devices;

	assert_int_equal(kve_devices_open_twins(&config, &devices), KV_OK);
	w.real = devices->of[0]->ops;
	w.ops = *w.real;
	w.ops.alloc = fail_alloc;
	w.ops.free = count_free;
	w.ops.alloc_host = fail_alloc_host;
	w.ops.free_host = count_free_host;
	w.ops.copy = fail_copy;
	w.ops.record = fail_record;
	w.ops.wait = fail_wait;
	w.ops.sync = fail_sync;
	w.ops.reserve_marks = fail_reserve_marks;
	w.ops.mark = fail_mark;
	w.ops.elapsed = fail_elapsed;
	w.ops.ep_open = fail_ep_open;
	w.ops.ep_close = count_ep_close;
	w.ops.dispatch_send = fail_dispatch_send;
	w.ops.dispatch_recv = fail_dispatch_recv;
	w.ops.reduce = fail_reduce;
	w.ops.combine_send = fail_combine_send;
	w.ops.combine_recv = fail_combine_recv;
	w.ops.ep_check = fail_ep_check;
	for (uint32_t r = 0; r < ranks; r++) {
		devices->of[r]->ops = &w.ops;
	}
	w.victim = devices->of[victim];
	w.calls = 0;
	w.fail_at = fail_at;
	w.answer = KV_OK;

	return devices;
}

/* What follows fails at its call n, counted from here. */
static void fail_from_here(uint64_t n)
{
	w.calls = 0;
	w.fail_at = n;
}

static void close_devices(kve_devices_t *devices)
{
	assert_int_equal(w.live, 0);
	kve_devices_close(devices);
}

static uint32_t prompt[PROMPT];
static kve_config_t model; /* two layers: each has the event of the one before */

/* Whatever a test that has failed has left. */
static int set_up(void **state)
{
	uint64_t seed = 7;

	(void)state;
	w.live = 0;
	w.together = w.end_fails = w.sync_fails = w.late_fails = 0;
	w.patience_ms = 1;
	model = shape;
	model.layers = 2;
	for (uint32_t i = 0; i < PROMPT; i++) {
		prompt[i] = below(&seed, model.vocab);
	}

	return 0;
}

static const kve_ask_t ask = {.tokens = prompt, .n_tokens = PROMPT, .max_new = 2};

/* deadline_ms: of their agreement. */
static kv_status_t create_ranks(kve_devices_t *devices, uint32_t ranks, uint32_t deadline_ms, kve_parallel_t **p_ranks)
{
	const kve_parallel_config_t config = {
		.engine = {.model = model,
			   .cache_blocks = BLOCKS,
			   .max_running = 4,
			   .devices = devices,
			   .max_rows = ROWS},
		.ranks = ranks,
		.deadline_ms = deadline_ms,
		.dbo = {.enabled = ranks > 1, .decode_threshold = 2, .prefill_threshold = 2},
	};

	return kve_parallel_create(&config, p_ranks);
}

static void submit_each(kve_parallel_t *ranks, kve_request_t **requests)
{
	for (uint32_t r = 0; r < kve_parallel_ranks(ranks); r++) {
		assert_int_equal(kve_parallel_submit(ranks, &ask, &requests[r]), KV_OK);
	}
}

/* ---- devices that fail ----------------------------------------------------------------------- */

KV_TEST(p6_ranks_that_a_device_refuses_are_not_created_and_leave_nothing)
{
	for (uint32_t victim = 0; victim < 2; victim++) {
		kv_status_t status = KV_ERR_IO;
		uint64_t n = 0;

		while (status != KV_OK && ++n < MOST_CALLS) {
			kve_devices_t *devices = open_devices(2, victim, n);
			kve_parallel_t *ranks = NULL;

			status = create_ranks(devices, 2, 0, &ranks);
			assert_int_equal(status, w.answer);
			kve_parallel_destroy(ranks);
			close_devices(devices);
		}
		assert_in_range(n, 8, MOST_CALLS - 1);
	}
}

KV_TEST(p6_a_step_on_a_device_that_fails_is_the_last_and_its_requests_stay)
{
	const kve_engine_config_t config = {.model = model, .cache_blocks = BLOCKS, .max_running = 4, .max_rows = ROWS};
	uint64_t n = 0;

	do {
		kve_engine_config_t own = config;
		kve_request_t *request;
		kve_engine_t *engine;
		kv_status_t status;

		own.devices = open_devices(1, 0, 0);
		assert_int_equal(kve_engine_create(&own, &engine), KV_OK);
		assert_int_equal(kve_engine_submit(engine, &ask, &request), KV_OK);
		fail_from_here(++n);
		status = kve_engine_step(engine, NULL);
		assert_int_equal(status, w.answer);
		assert_true(status == KV_OK || status == KV_ERR_IO);
		assert_int_equal(request->n_computed, status == KV_OK ? PROMPT : 0);
		assert_int_equal(request->n_tokens, PROMPT + (status == KV_OK));
		if (status != KV_OK) {
			assert_int_equal(kve_engine_step(engine, NULL), KV_ERR_TIMEOUT);
			assert_int_equal(kve_engine_lost(engine), 1);
			assert_int_equal(request->n_computed, 0);
		}
		kve_engine_destroy(engine);
		close_devices(own.devices);
	} while (w.answer != KV_OK && n < MOST_CALLS);
	assert_in_range(n, 8 * model.layers, MOST_CALLS - 1);
}

static kv_status_t trace_pass(kve_rank_t *rank, kve_cache_t *cache, const kve_span_t *span)
{
	kve_clock_interval_t *intervals;
	kv_status_t status = kve_rank_set_trace(rank, KVE_TRACE_APART);
	uint32_t n;

	(void)kve_rank_items(rank, KVE_OVERLAP_SEQ, &n);
	intervals = calloc(n, sizeof *intervals);
	assert_non_null(intervals);
	if (status == KV_OK) {
		status = kve_rank_forward(rank, cache, span, 1, NULL);
	}
	if (status == KV_OK) {
		status = kve_rank_read_trace(rank, intervals);
	}
	for (uint32_t i = 0; i < n && status == KV_OK; i++) {
		assert_true(intervals[i].start <= intervals[i].end);
		assert_true(i == 0 || intervals[i - 1].end <= intervals[i].start); /* each alone */
	}
	free(intervals);

	return status;
}

KV_TEST(p6_a_pass_that_cannot_be_traced_is_an_error)
{
	uint64_t n = 0;

	do {
		kve_devices_t *devices = open_devices(1, 0, 0);
		const kve_group_config_t config = {.model = &model, .devices = devices, .max_rows = ROWS};
		float logits[512];
		uint32_t blocks[BLOCKS];
		const kve_span_t span = {prompt, PROMPT, 0, blocks, logits, NULL};
		kve_group_t *group;
		kve_rank_t *rank;
		kve_cache_t cache;
		kv_status_t status;

		assert_int_equal(kve_group_create(&config, &group), KV_OK);
		assert_int_equal(kve_rank_create(group, 0, &rank), KV_OK);
		assert_int_equal(kve_rank_open_cache(rank, BLOCKS, 1, &cache), KV_OK);
		assert_int_equal(kve_cache_take(&cache, BLOCKS, blocks), KV_OK);
		fail_from_here(++n);
		status = trace_pass(rank, &cache, &span);
		assert_int_equal(status, w.answer);
		kve_rank_close_cache(rank, &cache);
		kve_rank_destroy(rank);
		kve_group_destroy(group);
		close_devices(devices);
	} while (w.answer != KV_OK && n < MOST_CALLS);
	assert_in_range(n, 8 * model.layers, MOST_CALLS - 1);
}

/* In two microbatches. Which of the two errors it is depends on who comes first to say it; that all threads end does
 * not. */
KV_TEST(p6_ranks_end_when_the_device_of_one_fails)
{
	for (uint64_t n = 1; n < 120; n += 7) {
		kve_request_t *requests[2];
		kve_devices_t *devices = open_devices(2, n % 2, 0);
		kve_parallel_t *ranks;
		kv_status_t status;

		assert_int_equal(create_ranks(devices, 2, 1000, &ranks), KV_OK);
		submit_each(ranks, requests);
		fail_from_here(n);
		status = kve_parallel_run(ranks);
		assert_true(w.answer == KV_OK || status == KV_ERR_IO || status == KV_ERR_TIMEOUT);
		kve_parallel_destroy(ranks);
		close_devices(devices);
	}
}

/* ---- ranks that stop ------------------------------------------------------------------------- */

KV_TEST(p5_a_rank_that_takes_no_step_is_named_by_the_deadline)
{
	kve_devices_t *devices = open_devices(2, 0, 0);
	kve_request_t *requests[2];
	kve_parallel_t *ranks;

	assert_int_equal(create_ranks(devices, 2, 1, &ranks), KV_OK);
	submit_each(ranks, requests);
	assert_int_equal(kve_engine_step(kve_parallel_engine(ranks, 0), NULL), KV_ERR_TIMEOUT);
	assert_int_equal(kve_engine_lost(kve_parallel_engine(ranks, 0)), 1u << 1);
	assert_int_equal(requests[0]->n_computed, 0);
	kve_parallel_destroy(ranks);
	close_devices(devices);
}

KV_TEST(p5_nobody_waits_for_a_rank_that_has_left)
{
	kve_devices_t *devices = open_devices(MOST, 0, 0);
	kve_request_t *requests[MOST];
	kve_parallel_t *ranks;

	assert_int_equal(create_ranks(devices, MOST, 600000, &ranks), KV_OK);
	submit_each(ranks, requests);
	kve_engine_abandon(kve_parallel_engine(ranks, 2));
	assert_int_equal(kve_parallel_run(ranks), KV_ERR_TIMEOUT);
	for (uint32_t r = 0; r < MOST; r++) {
		assert_int_equal(kve_engine_lost(kve_parallel_engine(ranks, r)), 1u << 2);
	}
	kve_parallel_destroy(ranks);
	close_devices(devices);
}

typedef struct driver {
	kve_rank_t *rank;
	kve_cache_t cache;
	int stops; /* once all have agreed */
	kv_status_t status;
	pthread_t thread;
} driver_t;

static void *take_step(void *arg)
{
	static const kve_step_count_t own = {.count = {.tokens = PROMPT, .prefill = 1}, .unfinished = 1};
	driver_t *d = arg;
	uint32_t blocks[BLOCKS];
	const kve_span_t span = {prompt, PROMPT, 0, blocks, NULL, NULL};
	kve_step_t step;

	d->status = kve_cache_take(&d->cache, BLOCKS, blocks);
	if (d->status == KV_OK) {
		d->status = kve_rank_agree(d->rank, &own, &step);
	}
	if (d->status == KV_OK && !d->stops) {
		d->status = kve_rank_forward(d->rank, &d->cache, &span, 1, NULL);
	}

	return NULL;
}

/* All ranks take a step; the one that stops, if there is one, only agrees to it. */
static kve_group_t *take_steps(kve_devices_t *devices, uint32_t ranks, uint32_t stops, driver_t *drivers)
{
	const kve_group_config_t config = {.model = &model, .ranks = ranks, .devices = devices, .max_rows = ROWS};
	kve_group_t *group;

	assert_int_equal(kve_group_create(&config, &group), KV_OK);
	for (uint32_t r = 0; r < ranks; r++) {
		driver_t *d = &drivers[r];

		*d = (driver_t){.stops = r == stops};
		assert_int_equal(kve_rank_create(group, r, &d->rank), KV_OK);
		assert_int_equal(kve_rank_open_cache(d->rank, BLOCKS, 1, &d->cache), KV_OK);
	}
	w.sync_fails = w.end_fails;
	for (uint32_t r = 0; r < ranks; r++) {
		assert_int_equal(pthread_create(&drivers[r].thread, NULL, take_step, &drivers[r]), 0);
	}
	for (uint32_t r = 0; r < ranks; r++) {
		assert_int_equal(pthread_join(drivers[r].thread, NULL), 0);
	}
	w.sync_fails = 0;

	return group;
}

static void destroy_ranks(kve_group_t *group, uint32_t ranks, driver_t *drivers)
{
	for (uint32_t r = 0; r < ranks; r++) {
		kve_rank_close_cache(drivers[r].rank, &drivers[r].cache);
		kve_rank_destroy(drivers[r].rank);
	}
	kve_group_destroy(group);
}

/* All that live have sent before one of them waits: no load of the machine makes another rank late. The lost one may hear
 * of its loss before it comes back from the agreement. */
static void lose_rank(kve_devices_t *devices, uint32_t lost)
{
	driver_t drivers[MOST];
	kve_group_t *group = take_steps(devices, MOST, lost, drivers);

	for (uint32_t r = 0; r < MOST; r++) {
		assert_true(drivers[r].status == KV_ERR_TIMEOUT || (r == lost && drivers[r].status == KV_OK));
		assert_int_equal(kve_rank_lost(drivers[r].rank), 1u << lost);
	}
	destroy_ranks(group, MOST, drivers);
}

KV_TEST(p5_a_rank_that_stops_amid_a_step_is_named_by_all_others)
{
	w.together = 1;
	for (uint32_t lost = 0; lost < MOST; lost++) {
		kve_devices_t *devices = open_devices(MOST, 0, 0);

		assert_int_equal(pthread_barrier_init(&w.have_sent, NULL, MOST - 1), 0);
		lose_rank(devices, lost);
		(void)pthread_barrier_destroy(&w.have_sent);
		close_devices(devices);
	}
}

KV_TEST(p5_a_lost_rank_is_named_although_the_device_that_missed_it_fails)
{
	kve_devices_t *devices = open_devices(MOST, 0, 0);

	w.together = 1;
	w.late_fails = 1;
	assert_int_equal(pthread_barrier_init(&w.have_sent, NULL, MOST - 1), 0);
	lose_rank(devices, 2);
	(void)pthread_barrier_destroy(&w.have_sent);
	close_devices(devices);
}

/* When all have sent what it takes part in: the others would wait for it at the next step. */
KV_TEST(p5_nobody_waits_for_a_rank_whose_device_has_failed_at_the_end_of_a_step)
{
	static const kve_step_count_t own = {.count = {.tokens = 1}, .unfinished = 1};
	kve_devices_t *devices;
	driver_t drivers[2];
	kve_group_t *group;
	kve_step_t step;

	w.patience_ms = 600000;
	w.end_fails = 1;
	devices = open_devices(2, 1, 0);
	group = take_steps(devices, 2, MOST, drivers);
	assert_int_equal(drivers[0].status, KV_OK);
	assert_int_equal(drivers[1].status, KV_ERR_IO);
	assert_int_equal(kve_rank_lost(drivers[0].rank), 1u << 1);
	assert_int_equal(kve_rank_agree(drivers[0].rank, &own, &step), KV_ERR_TIMEOUT);
	destroy_ranks(group, 2, drivers);
	close_devices(devices);
}

KV_TEST_MAIN_EACH(set_up, NULL)
