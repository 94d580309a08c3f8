/* Loads and saves of libkvx against a real daemon, with every way in which they can fail, one at a time and at random.
 */
#include "connectors/inproc/knobs.h"
#include "connectors/inproc/pair.h"
#include "engine/check.h"
#include "kv_test.h"

#include "common/await.h"
#include "kv/env.h"
#include "kv/shm.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

#define JOBS_NS (PAIR_MS * UINT64_C(1000000))
#define RESULT                                                                                                         \
	{                                                                                                              \
		.struct_size = sizeof(kvx_load_result_t)                                                               \
	}
#define SAVED                                                                                                          \
	{                                                                                                              \
		.struct_size = sizeof(kvx_save_result_t)                                                               \
	}

/* ---- what a test has ------------------------------------------------------------------------- */

/* A test, and what it starts with: a daemon of its own (silence: rig_t), and this knob. */
typedef struct jobs_test {
	void (*run)(void);
	const char *silence;
	int no_space;
} jobs_test_t;

static side_t side; /* the connector of the test that runs */

/* Ten blocks of conversation 1 that are stored, and where they are read back to: blocks 30 on. */
static pair_prompt_t from, to;

static int begin_test(void **state)
{
	const jobs_test_t *test = *state;

	knobs_reset();
	knobs.no_space = test->no_space;
	(void)begin_rig(NULL);
	the_rig.silence = test->silence;
	rig_start(&the_rig);
	side_open(&side, the_rig.socket, (side_options_t){.attach_ms = test->no_space ? 200 : 0});

	return 0;
}

/* Fails the test when a lease or put is still open. */
static int end_test(void **state)
{
	knobs_reset();
	side_close(&side);

	return end_rig(state);
}

static void run(void **state)
{
	((const jobs_test_t *)*state)->run();
}

#define JOBS_CASE(function, ...)                                                                                       \
	static void function(void);                                                                                    \
	static jobs_test_t function##_case = {.run = function, .silence = __VA_ARGS__};                                \
	KV_TEST_ADD(function, .name = #function, .test_func = run, .initial_state = &function##_case)                  \
	static void function(void)

/* ---- what it does ---------------------------------------------------------------------------- */

/* n blocks of conversation c, lying from block `first` on. */
static void prompt_init(pair_prompt_t *p, uint32_t c, uint32_t n, uint32_t first)
{
	pair_prompt_init(p, c, n * side.shape.tokens, first);
}

/* The same, computed. */
static void prompt_compute(pair_prompt_t *p, uint32_t c, uint32_t n, uint32_t first)
{
	prompt_init(p, c, n, first);
	side_compute(&side, p, 0, p->n_tokens);
}

/* Its first n blocks are in the cache. */
static int holds(const pair_prompt_t *p, uint32_t n)
{
	return side_holds(&side, p, n * side.shape.tokens);
}

static void await_load(kvx_load_t *load, kvx_load_result_t *result)
{
	while (kvx_load_state(load, result) == KVC_PENDING) {
		(void)kvx_poll(side.kvx, 1);
	}
	kvx_load_end(load);
}

static void await_save(kvx_save_t *save, kvx_save_result_t *result)
{
	while (kvx_save_state(save, result) == KVC_PENDING) {
		(void)kvx_poll(side.kvx, 1);
	}
	kvx_save_end(save);
}

static kvx_load_t *start_load(const pair_prompt_t *p)
{
	kvx_load_t *load;

	assert_int_equal(kvx_load_prefix(side.kvx, &p->prefix, &load, NULL), KVC_PENDING);

	return load;
}

static kvx_save_t *start_save(const pair_prompt_t *p)
{
	kvx_save_t *save;

	assert_int_equal(kvx_save_prefix(side.kvx, &p->prefix, &save), KVC_PENDING);

	return save;
}

/* Start, poll to the end, free. */
static kvc_status_t save_now(const pair_prompt_t *p, kvx_save_result_t *result)
{
	kvx_save_t *save;
	const kvc_status_t status = kvx_save_prefix(side.kvx, &p->prefix, &save);

	if (status != KVC_PENDING) {
		return status;
	}
	await_save(save, result);

	return result->status;
}

static kvc_status_t load_now(const pair_prompt_t *p, kvx_load_result_t *result)
{
	kvx_load_t *load;

	if (kvx_load_prefix(side.kvx, &p->prefix, &load, result) != KVC_MISS) {
		await_load(load, result);
	}

	return result->status;
}

static kvx_stats_t stats(void)
{
	return side_stats(&side);
}

static void store_ten(uint32_t c, const char *salt)
{
	kvx_save_result_t saved = SAVED;

	side_await_ready(&side);
	prompt_compute(&from, c, 10, 0);
	prompt_init(&to, c, 10, 30);
	from.prefix.salt = to.prefix.salt = salt;
	assert_int_equal(save_now(&from, &saved), KVC_OK);
	assert_int_equal(saved.blocks, 10);
	assert_true(saved.copied);
}

static void keys_of(const kvc_prompt_t *prompt, kvc_key_t *keys)
{
	const kvc_config_t config = {.struct_size = sizeof config, .socket = the_rig.socket};
	const kvc_identity_t identity = side_identity(&side);
	kvc_space_t *space;
	uint32_t n;
	kvc_t *kvc;

	assert_int_equal(kvc_attach(&config, &kvc), KVC_OK);
	assert_int_equal(kvc_space_open(kvc, &identity, &space), KVC_OK);
	assert_int_equal(kvc_keys_of(space, prompt, keys, PAIR_PROMPT, &n), KVC_OK);
	assert_int_equal(n, prompt->n_tokens / PAIR_TOKENS);
	kvc_detach(kvc);
}

/* ---- loads ----------------------------------------------------------------------------------- */

/* The first of five blocks is skipped and not touched; another salt finds nothing. */
JOBS_CASE(p1_every_cache_layout_passes_its_self_test_and_a_round_trip, RIG_SILENCE)
{
	static const side_shape_t shapes[] = {
		{KVK_PAGED_KV_TOKEN_HEAD, KVK_INNER_SPLIT, KVK_DTYPE_BF16, 2, 16, 64, 0, 8192, 8192},
		{KVK_PAGED_HEAD_TOKEN_KV, KVK_INNER_PACKED, KVK_DTYPE_F16, 4, 32, 64, 0, 32768, 32768},
		{KVK_PAGED_OPAQUE, KVK_INNER_OPAQUE, KVK_DTYPE_BYTE, 1, 16, 0, 20000, 20000, 20480},
	};

	for (size_t i = 0; i < KV_COUNT_OF(shapes); i++) {
		kvx_load_result_t result = RESULT;
		kvx_save_result_t saved = SAVED;

		side_close(&side);
		side_open(&side, the_rig.socket, (side_options_t){.shape = &shapes[i]});
		prompt_compute(&from, 1, 5, 0);
		prompt_init(&to, 1, 5, 30);
		assert_int_equal(save_now(&from, &saved), KVC_OK);
		assert_int_equal(saved.blocks, 5);
		assert_int_equal(save_now(&from, &saved), KVC_ALREADY);
		to.prefix.skip = 1;
		assert_int_equal(load_now(&to, &result), KVC_OK);
		assert_int_equal(result.blocks, 5);
		assert_int_equal(result.cpu_tokens, 4 * shapes[i].tokens);
		assert_false(holds(&to, 1));
		prompt_compute(&from, 1, 1, 30); /* the first of them; the others are there */
		assert_true(holds(&to, 5));
		to.prefix.salt = "another tenant's salt";
		assert_int_equal(load_now(&to, &result), KVC_MISS);
	}
}

/* A load of a prompt whose first ten blocks are stored, and how it ends. 0, where nothing is said: no such fault, or
 * nothing counted. */
typedef struct load_case {
	const char *name;
	const char *stored, *salt; /* whose blocks are stored, and who asks */
	uint32_t more;             /* blocks, than are stored */
	uint32_t damaged;          /* block */
	uint32_t ready, revoke_on; /* knobs */
	int rest, lease, stuck;    /* stuck: no block becomes ready */
	uint32_t deadline_ms;
	kvc_status_t cause;
	uint32_t blocks, why;
	uint32_t hits, lost, timeouts, corrupt, bad; /* counted */
} load_case_t;

#define US   "a tenant's salt"
#define THEM "another tenant's salt"

static const load_case_t load_cases[] = {
	{"all of it", .stored = US, .salt = US, .blocks = 10, .hits = 1},
	{"more than is stored", .stored = US, .salt = US, .more = 4, .cause = KVC_MISS, .blocks = 10,
	 .why = KV_WHY_ABSENT, .hits = 1},
	{"p1_a_salt_keeps_callers_apart", .stored = US, .salt = THEM, .cause = KVC_MISS, .why = KV_WHY_ABSENT},
	{"no salt is one, too", .salt = THEM, .cause = KVC_MISS, .why = KV_WHY_ABSENT},
	{"p1_a_block_copied_while_its_lease_ends_does_not_count", .revoke_on = 30, .cause = KVC_ERR_REVOKED,
	 .why = KV_WHY_NO_DAEMON, .lost = 1},
	{"p1_a_damaged_block_ends_the_load_before_it_and_is_reported", .damaged = 6, .cause = KVC_ERR_CORRUPT,
	 .blocks = 6, .why = KV_WHY_CORRUPT, .hits = 1, .corrupt = 1, .bad = 1},
	{"a load that stands still", .stuck = 1, .deadline_ms = 200, .cause = KVC_ERR_TIMEOUT, .why = KV_WHY_TIMEOUT,
	 .timeouts = 1},
	{"no more blocks become ready", .ready = 4, .rest = KVC_ERR_CORRUPT, .cause = KVC_ERR_CORRUPT, .blocks = 4,
	 .why = KV_WHY_CORRUPT, .hits = 1, .corrupt = 1},
	{"there is no lease", .lease = KVC_ERR_BUSY, .cause = KVC_MISS, .why = KV_WHY_TIMEOUT},
};

static void check_load(const load_case_t *row, const kvx_load_result_t *result, const kvx_stats_t *before)
{
	const kvx_stats_t after = stats();
	kvx_request_t request = {.struct_size = sizeof request, .request = 1, .prompt_tokens = 100, .load = result};

	assert_int_equal(result->cause, row->cause);
	assert_int_equal(result->blocks, row->blocks);
	assert_int_equal(result->tokens, row->blocks * PAIR_TOKENS);
	assert_int_equal(result->cpu_tokens, row->blocks * PAIR_TOKENS);
	assert_int_equal(result->why, row->why);
	assert_true(result->load_ns >= row->deadline_ms * UINT64_C(950000) && result->load_ns < JOBS_NS);
	assert_int_equal(after.load_hits - before->load_hits, row->hits);
	assert_int_equal(after.load_lost - before->load_lost, row->lost);
	assert_int_equal(after.load_timeouts - before->load_timeouts, row->timeouts);
	assert_int_equal(after.load_corrupt - before->load_corrupt, row->corrupt);
	assert_int_equal(knobs.bad, row->bad);
	kvx_record_request(side.kvx, &request);
	assert_int_equal(knobs.reports, 1);
	assert_int_equal(knobs.report_why, row->why);
}

JOBS_CASE(loads_end_as_what_befell_them_and_say_why, RIG_SILENCE)
{
	const kvc_identity_t identity = side_identity(&side);
	kvx_load_result_t result = RESULT;
	kvc_key_t keys[PAIR_PROMPT];

	for (uint32_t i = 0; i < KV_COUNT_OF(load_cases); i++) {
		const load_case_t *row = &load_cases[i];
		kvc_prompt_t prompt;
		kvx_stats_t before;

		print_message("# %s\n", row->name);
		store_ten(i, row->stored);
		prompt_init(&to, i, 10 + row->more, 30);
		to.prefix.salt = row->salt;
		to.prefix.deadline_ms = row->deadline_ms;
		prompt = (kvc_prompt_t){sizeof prompt, to.tokens, to.n_tokens, row->salt};
		keys_of(&prompt, keys);
		if (row->damaged) {
			rig_flip(&the_rig, &identity, &prompt, row->damaged);
		}
		before = stats();
		knobs.ready = row->ready || row->stuck ? row->ready : NONE;
		knobs.revoke_on = row->revoke_on ? row->revoke_on : NONE;
		knobs.rest = row->rest;
		knobs.lease = row->lease;
		assert_int_equal(load_now(&to, &result), row->blocks ? KVC_OK : KVC_MISS);
		check_load(row, &result, &before);
		if (row->blocks < 10 + row->more) {
			assert_memory_equal(&result.first_missing, &keys[row->blocks], sizeof keys[0]);
		}
		assert_true(holds(&to, row->blocks));
		knobs_reset();
	}
}

JOBS_CASE(p5_a_poll_returns_in_time_whatever_a_load_waits_for, RIG_SILENCE)
{
	kvx_load_t *load;

	store_ten(1, NULL);
	knobs.ready = 0;
	load = start_load(&to);
	for (uint32_t i = 0; i < 20; i++) {
		const uint64_t start = kv_now_ns(&kv_env_posix);

		assert_int_equal(kvx_poll(side.kvx, i % 5u), 1);
		assert_true(kv_now_ns(&kv_env_posix) - start < UINT64_C(2000000000)); /* of a busy machine */
	}
	assert_int_equal(kvx_load_state(load, NULL), KVC_PENDING);
	kvx_load_end(load);
	assert_true(side_is_untouched(&side, &to, 0));
}

/* ---- a daemon that stops or dies ------------------------------------------------------------- */

/* The second time it dies. */
JOBS_CASE(p7_a_daemon_that_falls_silent_or_dies_amid_a_load_is_a_miss, "500ms")
{
	for (int death = 0; death < 2; death++) {
		kvx_load_result_t result = RESULT;
		kvx_load_t *load;

		store_ten(1 + (uint32_t)death, NULL);
		rig_wait_written(&the_rig);
		side_await_ready(&side);
		knobs.ready = 0;
		load = start_load(&to);
		assert_int_equal(kvx_poll(side.kvx, 50), 1); /* the ranks have it */
		if (death) {
			rig_kill(&the_rig);
		} else {
			rig_signal(&the_rig, SIGSTOP);
		}
		await_load(load, &result);
		assert_int_equal(result.status, KVC_MISS);
		assert_true(result.cause == KVC_ERR_DAEMON_STALE ||
			    result.cause == KVC_ERR_REVOKED); /* or its session had just ended */
		assert_true(result.load_ns < JOBS_NS);
		assert_int_equal(stats().load_lost, 1 + death);

		knobs.ready = NONE;
		if (death) {
			rig_start(&the_rig);
		} else {
			rig_signal(&the_rig, SIGCONT);
		}
		side_await_ready(&side);
		assert_int_equal(load_now(&to, &result), KVC_OK);
	}
}

/* Whether their space is open yet or not. */
JOBS_CASE(p7_a_load_bears_a_silence_of_200_ms, RIG_SILENCE)
{
	static const struct {
		int silent;
		uint64_t ms;
		int too_long;
	} looks[] = {{0, 5, 0}, {1, 5, 0}, {1, 205, 0}, {1, 206, 1}, {0, 305, 0}, {1, 405, 0}, {1, 605, 0}};
	uint64_t since = 0;

	for (uint32_t i = 0; i < KV_COUNT_OF(looks); i++) {
		assert_int_equal(kvx_silent_too_long(&since, looks[i].silent, looks[i].ms * UINT64_C(1000000)),
				 looks[i].too_long);
	}
}

/* A miss costs more than the rest of a stall. */
JOBS_CASE(p7_a_lookup_waits_for_a_daemon_that_stalls, "500ms")
{
	kvx_load_result_t result = RESULT;
	kvx_load_t *load;

	store_ten(1, NULL);
	knobs.stalled = the_rig.pid;
	rig_signal(&the_rig, SIGSTOP);
	usleep(700000);
	knobs.stall = 3;
	load = start_load(&to);
	assert_int_equal(knobs.stall, 0);
	kvx_load_end(load);

	rig_signal(&the_rig, SIGSTOP);
	usleep(700000);
	assert_int_equal(load_now(&to, &result), KVC_MISS);
	assert_int_equal(result.why, KV_WHY_DAEMON_STALE);
	rig_signal(&the_rig, SIGCONT);
	side_await_ready(&side);
}

/* ---- saves ----------------------------------------------------------------------------------- */

/* A save of ten blocks, and how it ends. */
typedef struct save_case {
	const char *name;
	uint32_t grant; /* knobs */
	int put, put_times, put_end, put_done;
	kvc_status_t status;
	uint32_t starts;           /* puts asked for; 0: some */
	uint32_t done, busy, lost; /* counted */
} save_case_t;

static const save_case_t save_cases[] = {
	{"it takes what is granted and comes back for the rest", .grant = 4, .starts = 3, .done = 1},
	{"there is no room", .put = KVC_ERR_BUSY, .put_times = 100, .status = KVC_ERR_BUSY, .busy = 1},
	{"the rank gives its part up", .put_end = KVC_ERR_CLOSED, .status = KVC_ERR_REVOKED, .lost = 1},
	{"the daemon ends the put", .put_done = KVC_ERR_REVOKED, .status = KVC_ERR_REVOKED, .lost = 1},
};

JOBS_CASE(p7_a_save_that_cannot_be_is_given_up_and_counted, RIG_SILENCE)
{
	kvx_load_result_t result = RESULT;
	kvx_save_result_t saved = SAVED;

	knobs_reset();
	for (uint32_t i = 0; i < KV_COUNT_OF(save_cases); i++) {
		const save_case_t *row = &save_cases[i];
		const kvx_stats_t before = stats();

		print_message("# %s\n", row->name);
		prompt_compute(&from, i, 10, 10);
		knobs.grant = row->grant ? row->grant : NONE;
		knobs.put = row->put;
		knobs.put_times = row->put_times;
		knobs.put_end = row->put_end;
		knobs.put_done = row->put_done;
		assert_int_equal(save_now(&from, &saved), row->status);
		assert_true(saved.copied);
		assert_true(row->starts == 0 || knobs.put_starts == row->starts);
		assert_int_equal(stats().save_done - before.save_done, row->done);
		assert_int_equal(stats().save_busy - before.save_busy, row->busy);
		assert_int_equal(stats().save_lost - before.save_lost, row->lost);
		knobs_reset();
		prompt_init(&to, i, 10, 40);
		if (row->status == KVC_OK) {
			assert_int_equal(load_now(&to, &result), KVC_OK);
			assert_int_equal(result.blocks, 10);
			assert_true(holds(&to, 10));
		}
	}
}

JOBS_CASE(a_save_whose_parent_is_gone_offers_the_whole_prefix, RIG_SILENCE)
{
	static const int32_t refusals[] = {KVC_ERR_NO_PARENT, KV_ERR_PARENT_LOST, KV_ERR_PARENT_UNREADABLE};
	kvx_save_result_t saved = SAVED;
	kvx_save_t *save;

	for (uint32_t r = 0; r < KV_COUNT_OF(refusals); r++) {
		store_ten(r, NULL);
		rig_wait_written(&the_rig); /* a daemon that loses its CPU while it writes them down hides a block */
		prompt_compute(&from, r, 15, 0);
		knobs.put_times = 1;
		save = start_save(&from);
		assert_int_equal(knobs.put_from, 10);
		knobs.put = refusals[r];
		await_save(save, &saved);
		assert_int_equal(saved.status, KVC_OK);
		assert_int_equal(knobs.put_from, 0);
		assert_int_equal(saved.blocks, 15);
		knobs_reset();
		assert_int_equal(save_now(&from, &saved), KVC_ALREADY);
	}
}

JOBS_CASE(p7_a_save_ends_in_time_though_the_daemon_is_stopped, RIG_SILENCE)
{
	kvx_save_result_t saved = SAVED;

	prompt_init(&from, 4, 6, 0);
	from.prefix.deadline_ms = 200;
	rig_signal(&the_rig, SIGSTOP);
	assert_int_equal(save_now(&from, &saved), KVC_ERR_TIMEOUT);
	assert_true(saved.copied);
	assert_int_equal(stats().save_timeouts, 1);
	rig_kill(&the_rig);
	while (kvx_is_ready(side.kvx)) {
		(void)kvx_poll(side.kvx, 1);
	}
	assert_int_equal(save_now(&from, &saved), KVC_MISS);
}

/* What was aborted half way reads and writes no block of the engine's any longer. */
JOBS_CASE(p1_blocks_are_the_engines_again_once_a_job_was_ended, RIG_SILENCE)
{
	kvx_load_result_t result = RESULT;

	store_ten(1, NULL);
	for (uint32_t c = 100; c < 160; c++) {
		pair_prompt_t p, other;
		kvx_load_t *load;
		kvx_save_t *save;

		prompt_compute(&p, c, 15, 40);
		save = start_save(&p);
		load = start_load(&to);
		for (uint32_t polls = c % 4u; polls > 0; polls--) {
			(void)kvx_poll(side.kvx, 0);
		}
		kvx_load_end(load);
		kvx_save_end(save);
		prompt_compute(&p, 8, 15, 45);
		prompt_compute(&other, 7, 15, 30);
		for (uint32_t i = 0; i < 10; i++) {
			(void)kvx_poll(side.kvx, 1);
			assert_true(holds(&other, 15));
		}
		prompt_init(&p, c, 15, 0);
		(void)load_now(&p, &result);
		assert_true(holds(&p, result.blocks));
	}
	assert_true(stats().save_aborted + stats().load_aborted > 0);
}

/* What the daemon refused of a save that has ended is not asked for later: the blocks may be others' by then. */
JOBS_CASE(p1_nothing_is_asked_for_after_the_end_of_a_save, RIG_SILENCE)
{
	kvx_load_result_t result = RESULT;
	kvx_save_result_t saved = SAVED;
	pair_prompt_t p, other;
	kvx_save_t *save;

	for (uint32_t c = 200; c < 212; c++) {
		prompt_compute(&p, c, 10, 20);
		if (c % 2u) {
			knobs.put_end = KVC_ERR_CLOSED;
		} else {
			knobs.put = KVC_ERR_BUSY;
			knobs.put_times = 100;
		}
		save = start_save(&p);
		for (uint32_t polls = c / 2u % 3u * 40u; polls > 0 && kvx_save_state(save, &saved) == KVC_PENDING;
		     polls--) {
			(void)kvx_poll(side.kvx, 1);
		}
		if (c >= 206) {
			knobs_reset(); /* there is room at its end, or soon after */
		}
		kvx_save_end(save);
		knobs_reset();
		prompt_compute(&other, 7, 10, 20);
		for (uint32_t i = 0; i < 20; i++) {
			(void)kvx_poll(side.kvx, 10);
		}
		prompt_init(&p, c, 10, 40);
		(void)load_now(&p, &result);
		assert_true(holds(&p, result.blocks));
	}
}

/* ---- attaching, and what is refused ---------------------------------------------------------- */

JOBS_CASE(p7_what_fails_at_attach_is_tried_again_in_poll, RIG_SILENCE, .no_space = 1)
{
	assert_false(kvx_is_ready(side.kvx));
	knobs.no_space = 0;
	side_await_ready(&side);
}

JOBS_CASE(p5_jobs_are_limited_and_bad_prefixes_refused, RIG_SILENCE)
{
	static const uint32_t beyond[] = {30, 31, 32, PAIR_BLOCKS, 34, 35, 36, 37, 38, 39};
	kvx_prefix_t bad[6];
	kvx_load_t *load;
	kvx_save_t *save;

	store_ten(1, NULL);
	for (uint32_t i = 0; i < KV_COUNT_OF(bad); i++) {
		bad[i] = to.prefix;
	}
	bad[0].blocks = beyond;
	bad[1].blocks = NULL;
	bad[2].tokens = NULL;
	bad[3].n_tokens = PAIR_TOKENS - 1;
	bad[4].struct_size = 4;
	bad[5].skip = 11; /* ignored by saves */
	for (uint32_t i = 0; i < KV_COUNT_OF(bad); i++) {
		assert_int_equal(kvx_load_prefix(side.kvx, &bad[i], &load, NULL), KVC_MISS);
		assert_int_equal(stats().load_refused, i + 1);
		assert_true(i == 5 || kvx_save_prefix(side.kvx, &bad[i], &save) == KVC_MISS);
	}
	prompt_init(&to, 1, 1, 30);
	for (uint32_t i = 0; i < KVX_JOBS; i++) {
		(void)start_load(&to);
	}
	assert_int_equal(kvx_load_prefix(side.kvx, &to.prefix, &load, NULL), KVC_MISS);
	assert_int_equal(stats().load_refused, KV_COUNT_OF(bad) + 1); /* the end of the test ends them all */
}

/* ---- at random ------------------------------------------------------------------------------- */

static void random_knobs(uint64_t *seed)
{
	knobs.ready = below(seed, 4) ? NONE : below(seed, 10);
	knobs.rest = below(seed, 4) ? 0 : KVC_ERR_CORRUPT;
	knobs.lease = below(seed, 8) ? 0 : KVC_ERR_BUSY;
	knobs.revoke_on = below(seed, 4) ? NONE : below(seed, PAIR_BLOCKS);
	knobs.revoked = 0;
	knobs.grant = below(seed, 2) ? NONE : 1 + below(seed, 6);
	knobs.put_done = below(seed, 6) ? 0 : KVC_ERR_REVOKED;
	knobs.put_end = below(seed, 8) ? 0 : KVC_ERR_CLOSED;
}

/* One load or save of a random conversation; aborted at times. What a load reports is there, to the last float. */
static void random_job(uint64_t *seed)
{
	const uint32_t c = below(seed, 12), n = 1 + below(seed, PAIR_PROMPT),
		       abort_at = below(seed, 4) ? 60 : below(seed, 6), first = below(seed, PAIR_BLOCKS);
	kvx_load_result_t result = RESULT;
	kvx_load_t *load = NULL;
	kvx_save_t *save = NULL;
	pair_prompt_t p;

	prompt_init(&p, c, n, first);
	if (below(seed, 2)) {
		prompt_compute(&p, c, n, first);
		p.prefix.deadline_ms = 100;
		(void)kvx_save_prefix(side.kvx, &p.prefix, &save);
	} else {
		p.prefix.deadline_ms = 20;
		(void)kvx_load_prefix(side.kvx, &p.prefix, &load, &result);
	}
	for (uint32_t i = 0; i < abort_at && kvx_poll(side.kvx, 1) > 0; i++) {
		if (load && kvx_load_state(load, &result) != KVC_PENDING) {
			break;
		}
	}
	if (load) {
		(void)kvx_load_state(load, &result);
	}
	assert_true(result.status != KVC_OK || holds(&p, result.blocks));
	kvx_load_end(load);
	kvx_save_end(save);
}

/* A hand-over of a random conversation in random chunks, by an id or by its tokens; either side is aborted at times.
 * What a receive reports is there, to the last float. */
static void random_handover(uint64_t *seed)
{
	const uint32_t c = below(seed, 12), n = 1 + below(seed, PAIR_PROMPT / 2u),
		       stop = below(seed, 4) ? 60 : below(seed, 6), first = below(seed, PAIR_BLOCKS),
		       steps = 1 + below(seed, 3), by_tokens = below(seed, 3) == 0;
	kvx_recv_result_t result = {.struct_size = sizeof result};
	kvx_send_t *send = NULL;
	kvx_recv_t *recv = NULL;
	pair_prompt_t p, q;

	prompt_init(&q, c, n, first + PAIR_PROMPT);
	prompt_compute(&p, c, n, first);
	q.prefix.deadline_ms = 50;
	if (by_tokens) {
		const kvx_insert_t insert = {.struct_size = sizeof insert,
					     .tokens = p.tokens,
					     .n_tokens = p.n_tokens,
					     .blocks = p.blocks,
					     .deadline_ms = 100,
					     .ttl_ms = 100};
		const kvx_select_t select = {.struct_size = sizeof select,
					     .tokens = q.tokens,
					     .n_tokens = q.n_tokens,
					     .blocks = q.blocks,
					     .n_blocks = n,
					     .deadline_ms = 50};

		(void)kvx_drop_select(side.kvx, &select, &recv, &result);
		(void)kvx_insert(side.kvx, &insert, &send);
	} else {
		(void)kvx_recv(side.kvx, "at random", &q.prefix, &recv, &result);
	}
	for (uint32_t i = 0; i < stop; i++) {
		kvx_chunk_t chunk = pair_chunk(&p, "at random", p.n_tokens * (i + 1u) / steps, i + 1u == steps);

		chunk.deadline_ms = chunk.ttl_ms = 100;
		if (!by_tokens && i < steps) {
			(void)kvx_send(side.kvx, &chunk, &send);
		}
		(void)kvx_poll(side.kvx, 1);
		if (recv && kvx_recv_state(recv, &result) != KVC_PENDING) {
			break;
		}
	}
	assert_true(result.status != KVC_OK || holds(&q, result.blocks));
	kvx_recv_end(recv);
	kvx_send_end(send);
}

/* A daemon that does not run for a moment, here in the middle of a bucket, costs no block that it was handed. */
JOBS_CASE(p7_a_hand_over_is_looked_up_until_the_daemon_has_run, RIG_SILENCE)
{
	kvx_recv_result_t result = {.struct_size = sizeof result};
	kvx_send_result_t sent = {.struct_size = sizeof sent};
	kvx_send_t *send = NULL;
	kvx_recv_t *recv = NULL;
	kvx_chunk_t chunk;

	prompt_compute(&from, 7, 10, 0);
	prompt_init(&to, 7, 10, 30);
	chunk = pair_chunk(&from, "busy", from.n_tokens, 1);
	assert_int_equal(kvx_send(side.kvx, &chunk, &send), KVC_PENDING);
	pair_await_send(&side, NULL, send, &sent);
	assert_int_equal(sent.status, KVC_OK);
	knobs.contended = 300; /* one lookup waits for a third of them */
	assert_int_equal(kvx_recv(side.kvx, "busy", &to.prefix, &recv, &result), KVC_PENDING);
	pair_await_recv(&side, NULL, recv, &result);
	assert_int_equal(result.cause, KVC_OK);
	assert_true(holds(&to, 10));
	kvx_recv_end(recv);
	kvx_send_end(send);
}

JOBS_CASE(p1_p4_p7_under_any_fault_loads_are_right_and_nothing_leaks, RIG_SILENCE)
{
	uint64_t seed = 101;
	kvx_stats_t s;

	for (int round = 0; round < 600; round++) {
		random_knobs(&seed);
		if (below(&seed, 3)) {
			random_job(&seed);
		} else {
			random_handover(&seed);
		}
	}
	s = stats();
	print_message("load hits %lu lost %lu, save done %lu lost %lu\n", (unsigned long)s.load_hits,
		      (unsigned long)s.load_lost, (unsigned long)s.save_done, (unsigned long)s.save_lost);
	print_message("sends done %lu failed %lu, receives done %lu failed %lu\n", (unsigned long)s.sends_done,
		      (unsigned long)s.sends_failed, (unsigned long)s.recvs_done, (unsigned long)s.recvs_failed);
	assert_true(s.sends_done > 5 && s.recvs_done > 5 && s.recvs_failed > 5);
	assert_true(s.load_hits > 20 && s.load_lost > 5 && s.save_done > 20 && s.save_lost > 5);
}

KV_TEST_MAIN_OF(the_program, begin_test, end_test)
