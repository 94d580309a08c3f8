/* Loads and saves of libkvx against a real daemon, with every way in which they can fail, one at a time and at random.
 */
#include "connectors/inproc/knobs.h"
#include "connectors/rig.h"
#include "engine/check.h"
#include "kv_cmocka.h"
#include "kvx_handover.h"

#include "common/await.h"
#include "kv/env.h"
#include "kv/shm.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BLOCKS  64u
#define LAYERS  3u
#define MAX_JOB 20u
#define JOBS_MS 20000u /* what attaching, loads and saves may take where a prompt does not say less */
#define JOBS_NS (JOBS_MS * UINT64_C(1000000))

/* ---- what a test has ------------------------------------------------------------------------- */

/* A paged cache, and the pool block that it is copied to. */
typedef struct shape {
	const char *name;
	kvk_paged_kind_t kind;
	kvk_inner_t inner;
	kvk_dtype_t dtype;
	uint32_t heads, tokens, dim, page_bytes;
	uint32_t payload, stride; /* bytes of a layer's block, and from one to the next */
} shape_t;

static const shape_t shapes[] = {
	{"f32", KVK_PAGED_KV_TOKEN_HEAD, KVK_INNER_SPLIT, KVK_DTYPE_F32, 2, 16, 16, 0, 4096, 4096},
	{"nhd", KVK_PAGED_KV_TOKEN_HEAD, KVK_INNER_SPLIT, KVK_DTYPE_BF16, 2, 16, 64, 0, 8192, 8192},
	{"hnd", KVK_PAGED_HEAD_TOKEN_KV, KVK_INNER_PACKED, KVK_DTYPE_F16, 4, 32, 64, 0, 32768, 32768},
	{"opaque", KVK_PAGED_OPAQUE, KVK_INNER_OPAQUE, KVK_DTYPE_BYTE, 1, 16, 0, 20000, 20000, 20480},
};

#define TOKENS 16u /* of a block of the first shape */

/* A test, and what it starts with: a daemon of its own (silence: rig_t), and these knobs. */
typedef struct jobs_test {
	void (*run)(void);
	const char *silence;
	int wrong, no_space;
} jobs_test_t;

typedef struct prompt {
	uint32_t tokens[MAX_JOB * 32u];
	uint32_t blocks[MAX_JOB];
	kvx_prefix_t prefix;
} prompt_t;

static const char *program;

/* The connector of the test that runs. */
static struct jobs {
	rig_t rig;
	const shape_t *shape;
	kvc_identity_t identity;
	kvk_layout_t layout;
	kvk_paged_t paged;
	void *base[LAYERS];
	kvx_t *kvx;
} jobs;

/* Ten blocks of conversation 1 that are stored, and where they are read back to: blocks 30 on. */
static prompt_t from, to;

/* ---- the connector --------------------------------------------------------------------------- */

static void await_ready(void)
{
	for (uint32_t i = 0; i < JOBS_MS / 10u && !kvx_is_ready(jobs.kvx); i++) {
		(void)kvx_poll(jobs.kvx, 10);
	}
	assert_true(kvx_is_ready(jobs.kvx));
}

static void open_connector(const shape_t *shape)
{
	const kvx_config_t config = {.struct_size = sizeof config,
				     .roles = KVX_BOTH,
				     .socket = jobs.rig.socket,
				     .identity = &jobs.identity,
				     .layout = &jobs.layout,
				     .paged = &jobs.paged,
				     .load_ms = JOBS_MS,
				     .save_ms = JOBS_MS,
				     .attach_ms = knobs.no_space || knobs.wrong ? 200 : JOBS_MS};

	jobs.shape = shape;
	jobs.identity = (kvc_identity_t){
		.struct_size = sizeof jobs.identity, .model = shape->name, .weights = "w", .dtype = "x", .rope = "r"};
	for (uint32_t l = 0; l < LAYERS; l++) {
		jobs.base[l] = calloc(BLOCKS, shape->stride);
		assert_non_null(jobs.base[l]);
	}
	jobs.layout = (kvk_layout_t){.heads = shape->heads,
				     .layers = LAYERS,
				     .block_tokens = shape->tokens,
				     .k_dim = shape->dim,
				     .v_dim = shape->dim,
				     .dtype = shape->dtype,
				     .inner = shape->inner,
				     .page_bytes = shape->page_bytes};
	jobs.paged = (kvk_paged_t){.kind = shape->kind,
				   .blocks = BLOCKS,
				   .layers = LAYERS,
				   .heads = shape->heads,
				   .block_tokens = shape->tokens,
				   .k_dim = shape->dim,
				   .v_dim = shape->dim,
				   .dtype = shape->dtype,
				   .page_bytes = shape->page_bytes,
				   .block_stride = shape->stride,
				   .base = jobs.base};
	assert_int_equal(kvx_attach(&config, &jobs.kvx), KVC_OK);
}

static void close_connector(void)
{
	kvx_detach(jobs.kvx);
	for (uint32_t l = 0; l < LAYERS; l++) {
		free(jobs.base[l]);
	}
}

static int begin_test(void **state)
{
	const jobs_test_t *test = *state;

	knobs_reset();
	atomic_store(&knobs.wrong, test->wrong);
	atomic_store(&knobs.no_space, test->no_space);
	rig_init(&jobs.rig, program);
	jobs.rig.silence = test->silence;
	rig_start(&jobs.rig);
	open_connector(&shapes[0]);

	return 0;
}

/* Fails the test when a lease or put is still open. */
static int end_test(void **state)
{
	(void)state;
	knobs_reset();
	close_connector();
	if (jobs.rig.pid) {
		rig_check_quiet(&jobs.rig);
	}
	rig_fini(&jobs.rig);

	return 0;
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

/* ---- prompts --------------------------------------------------------------------------------- */

/* What block i of conversation c holds in layer l: a function of all three. */
static void content(uint32_t c, uint32_t i, uint32_t l, uint8_t *out)
{
	uint64_t seed = (uint64_t)c << 32 | i << 8 | l;

	for (size_t at = 0; at < jobs.shape->payload; at += 8) {
		const uint64_t word = next_random(&seed);

		memcpy(out + at, &word, 8);
	}
}

static uint8_t *block_at(uint32_t layer, uint32_t block)
{
	return (uint8_t *)jobs.base[layer] + block * jobs.shape->stride;
}

static void fill(uint32_t block, uint32_t c, uint32_t i)
{
	for (uint32_t l = 0; l < LAYERS; l++) {
		content(c, i, l, block_at(l, block));
	}
}

static int holds(uint32_t block, uint32_t c, uint32_t i)
{
	static uint8_t expected[32768];

	for (uint32_t l = 0; l < LAYERS; l++) {
		content(c, i, l, expected);
		if (memcmp(expected, block_at(l, block), jobs.shape->payload) != 0) {
			return 0;
		}
	}

	return 1;
}

/* n blocks of conversation c, lying from block `first` on. */
static void prompt_init(prompt_t *p, uint32_t c, uint32_t n, uint32_t first)
{
	const uint32_t tokens = n * jobs.shape->tokens;

	for (uint32_t i = 0; i < tokens; i++) {
		p->tokens[i] = c * 100000 + i;
	}
	for (uint32_t i = 0; i < n; i++) {
		p->blocks[i] = (first + i) % BLOCKS;
	}
	p->prefix = (kvx_prefix_t){
		.struct_size = sizeof p->prefix, .tokens = p->tokens, .n_tokens = tokens, .blocks = p->blocks};
}

/* The same, computed. */
static void prompt_compute(prompt_t *p, uint32_t c, uint32_t n, uint32_t first)
{
	prompt_init(p, c, n, first);
	for (uint32_t i = 0; i < n; i++) {
		fill(p->blocks[i], c, i);
	}
}

static void await_load(kvx_load_t *load, kvx_load_result_t *result)
{
	while (kvx_load_state(load, result) == KVC_PENDING) {
		(void)kvx_poll(jobs.kvx, 1);
	}
	kvx_load_end(load);
}

static void await_save(kvx_save_t *save, kvx_save_result_t *result)
{
	while (kvx_save_state(save, result) == KVC_PENDING) {
		(void)kvx_poll(jobs.kvx, 1);
	}
	kvx_save_end(save);
}

/* Start, poll to the end, free. */
static kvc_status_t save_now(const prompt_t *p, kvx_save_result_t *result)
{
	kvx_save_t *save;
	const kvc_status_t status = kvx_save_prefix(jobs.kvx, &p->prefix, &save);

	if (status != KVC_PENDING) {
		return status;
	}
	await_save(save, result);

	return result->status;
}

static kvc_status_t load_now(const prompt_t *p, kvx_load_result_t *result)
{
	kvx_load_t *load;

	if (kvx_load_prefix(jobs.kvx, &p->prefix, &load, result) != KVC_MISS) {
		await_load(load, result);
	}

	return result->status;
}

static kvc_status_t start_load(const prompt_t *p, kvx_load_t **p_load)
{
	return kvx_load_prefix(jobs.kvx, &p->prefix, p_load, NULL);
}

static kvx_stats_t stats(void)
{
	kvx_stats_t stats = {.struct_size = sizeof stats};

	kvx_get_stats(jobs.kvx, &stats);

	return stats;
}

static void store_ten(uint32_t c, const char *salt)
{
	kvx_save_result_t saved = {.struct_size = sizeof saved};

	await_ready();
	prompt_compute(&from, c, 10, 0);
	prompt_init(&to, c, 10, 30);
	from.prefix.salt = to.prefix.salt = salt;
	assert_int_equal(save_now(&from, &saved), KVC_OK);
	assert_int_equal(saved.blocks, 10);
	assert_true(saved.copied);
}

/* The space's identity, for another client. */
static kvc_identity_t whole_identity(char text[KVK_LAYOUT_TEXT_MAX])
{
	kvc_identity_t same = jobs.identity;

	assert_int_equal(kvk_layout_format(&jobs.layout, text, KVK_LAYOUT_TEXT_MAX), KV_OK);
	same.hash_tokens = TOKENS;
	same.layout = text;

	return same;
}

static void keys_of(const kvc_identity_t *identity, const kvc_prompt_t *prompt, kvc_key_t *keys)
{
	const kvc_config_t config = {.struct_size = sizeof config, .socket = jobs.rig.socket};
	kvc_space_t *space;
	uint32_t n;
	kvc_t *kvc;

	assert_int_equal(kvc_attach(&config, &kvc), KVC_OK);
	assert_int_equal(kvc_space_open(kvc, identity, &space), KVC_OK);
	assert_int_equal(kvc_keys_of(space, prompt, keys, MAX_JOB, &n), KVC_OK);
	assert_int_equal(n, prompt->n_tokens / TOKENS);
	kvc_detach(kvc);
}

/* ---- loads ----------------------------------------------------------------------------------- */

/* The first of five blocks is skipped and not touched; another salt finds nothing. */
JOBS_CASE(p1_every_cache_layout_passes_its_self_test_and_a_round_trip, RIG_SILENCE)
{
	kvx_load_result_t result = {.struct_size = sizeof result};
	kvx_save_result_t saved = {.struct_size = sizeof saved};

	for (size_t i = 0; i < KV_COUNT_OF(shapes); i++) {
		close_connector();
		open_connector(&shapes[i]);
		assert_true(kvx_is_ready(jobs.kvx));
		prompt_compute(&from, 1, 5, 0);
		prompt_init(&to, 1, 5, 30);
		assert_int_equal(save_now(&from, &saved), KVC_OK);
		assert_int_equal(saved.blocks, 5);
		assert_int_equal(save_now(&from, &saved), KVC_ALREADY);
		to.prefix.skip = 1;
		assert_int_equal(load_now(&to, &result), KVC_OK);
		assert_int_equal(result.blocks, 5);
		assert_int_equal(result.cpu_tokens, 4 * shapes[i].tokens);
		assert_true(block_at(0, 30)[0] == 0 && block_at(LAYERS - 1u, 30)[shapes[i].payload - 1] == 0);
		for (uint32_t b = 1; b < 5; b++) {
			assert_true(holds(30 + b, 1, b));
		}
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
	assert_int_equal(result->tokens, row->blocks * TOKENS);
	assert_int_equal(result->cpu_tokens, row->blocks * TOKENS);
	assert_int_equal(result->why, row->why);
	assert_true(result->load_ns >= row->deadline_ms * UINT64_C(950000) && result->load_ns < JOBS_NS);
	assert_int_equal(after.load_hits - before->load_hits, row->hits);
	assert_int_equal(after.load_lost - before->load_lost, row->lost);
	assert_int_equal(after.load_timeouts - before->load_timeouts, row->timeouts);
	assert_int_equal(after.load_corrupt - before->load_corrupt, row->corrupt);
	assert_int_equal(atomic_load(&knobs.bad), row->bad);
	kvx_record_request(jobs.kvx, &request);
	assert_int_equal(atomic_load(&knobs.reports), 1);
	assert_int_equal(atomic_load(&knobs.report_why), row->why);
}

JOBS_CASE(loads_end_as_what_befell_them_and_say_why, RIG_SILENCE)
{
	kvx_load_result_t result = {.struct_size = sizeof result};
	char text[KVK_LAYOUT_TEXT_MAX];
	const kvc_identity_t identity = whole_identity(text);
	kvc_key_t keys[MAX_JOB];
	kvc_prompt_t prompt;

	for (uint32_t i = 0; i < KV_COUNT_OF(load_cases); i++) {
		const load_case_t *row = &load_cases[i];
		kvx_stats_t before;

		print_message("# %s\n", row->name);
		store_ten(i, row->stored);
		prompt_init(&to, i, 10 + row->more, 30);
		to.prefix.salt = row->salt;
		to.prefix.deadline_ms = row->deadline_ms;
		prompt = (kvc_prompt_t){sizeof prompt, to.tokens, to.prefix.n_tokens, row->salt};
		keys_of(&identity, &prompt, keys);
		if (row->damaged) {
			rig_flip(&jobs.rig, &identity, &prompt, row->damaged);
		}
		before = stats();
		atomic_store(&knobs.ready, row->ready || row->stuck ? row->ready : NONE);
		atomic_store(&knobs.revoke_on, row->revoke_on ? row->revoke_on : NONE);
		atomic_store(&knobs.rest, row->rest);
		atomic_store(&knobs.lease, row->lease);
		assert_int_equal(load_now(&to, &result), row->blocks ? KVC_OK : KVC_MISS);
		check_load(row, &result, &before);
		if (row->blocks < 10 + row->more) {
			assert_memory_equal(&result.first_missing, &keys[row->blocks], sizeof keys[0]);
		}
		for (uint32_t b = 0; b < row->blocks; b++) {
			assert_true(holds(30 + b, i, b));
		}
		knobs_reset();
	}
}

JOBS_CASE(p5_a_poll_returns_in_time_whatever_a_load_waits_for, RIG_SILENCE)
{
	kvx_load_t *load;

	store_ten(1, NULL);
	atomic_store(&knobs.ready, 0);
	assert_int_equal(start_load(&to, &load), KVC_PENDING);
	for (uint32_t i = 0; i < 20; i++) {
		const uint64_t start = kv_now_ns(&kv_env_posix);

		assert_int_equal(kvx_poll(jobs.kvx, i % 5u), 1);
		assert_true(kv_now_ns(&kv_env_posix) - start < UINT64_C(2000000000)); /* of a busy machine */
	}
	assert_int_equal(kvx_load_state(load, NULL), KVC_PENDING);
	kvx_load_end(load);
	for (uint32_t i = 0; i < 10; i++) {
		assert_false(holds(30 + i, 1, i));
	}
}

JOBS_CASE(jobs_that_share_the_transfer_thread_all_end_well, RIG_SILENCE)
{
	kvx_load_t *loads[4];
	kvx_save_t *saves[4];
	prompt_t p;

	store_ten(1, NULL);
	for (uint32_t i = 0; i < 4; i++) {
		prompt_init(&to, 1, 2 + i, 10 + 5 * i);
		assert_int_equal(start_load(&to, &loads[i]), KVC_PENDING);
		prompt_init(&p, 20 + i, 5 + i, 40);
		assert_int_equal(kvx_save_prefix(jobs.kvx, &p.prefix, &saves[i]), KVC_PENDING);
	}
	while (kvx_poll(jobs.kvx, 1) > 0) {
	}
	for (uint32_t i = 0; i < 4; i++) {
		assert_int_equal(kvx_load_state(loads[i], NULL), KVC_OK);
		assert_int_equal(kvx_save_state(saves[i], NULL), KVC_OK);
		kvx_load_end(loads[i]);
		kvx_save_end(saves[i]);
		for (uint32_t j = 0; j < 2 + i; j++) {
			assert_true(holds(10 + 5 * i + j, 1, j));
		}
	}
}

/* ---- a daemon that stops or dies ------------------------------------------------------------- */

static void lose_daemon_amid_a_load(int death)
{
	kvx_load_result_t result = {.struct_size = sizeof result};
	kvx_load_t *load;

	store_ten(1, NULL);
	rig_wait_written(&jobs.rig);
	await_ready();
	atomic_store(&knobs.ready, 0);
	assert_int_equal(start_load(&to, &load), KVC_PENDING);
	assert_int_equal(kvx_poll(jobs.kvx, 50), 1); /* the ranks have it */
	if (death) {
		rig_kill(&jobs.rig);
	} else {
		rig_signal(&jobs.rig, SIGSTOP);
	}
	await_load(load, &result);
	assert_int_equal(result.status, KVC_MISS);
	assert_true(result.cause == KVC_ERR_DAEMON_STALE ||
		    result.cause == KVC_ERR_REVOKED); /* or its session had just ended */
	assert_true(result.load_ns < JOBS_NS);
	assert_int_equal(stats().load_lost, 1);

	atomic_store(&knobs.ready, NONE);
	if (death) {
		rig_start(&jobs.rig);
	} else {
		rig_signal(&jobs.rig, SIGCONT);
	}
	await_ready();
	assert_int_equal(load_now(&to, &result), KVC_OK);
}

JOBS_CASE(p7_a_daemon_that_falls_silent_amid_a_load_is_a_miss, "500ms")
{
	lose_daemon_amid_a_load(0);
}

JOBS_CASE(p7_a_daemon_that_dies_amid_a_load_is_a_miss, "500ms")
{
	lose_daemon_amid_a_load(1);
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
	kvx_load_result_t result = {.struct_size = sizeof result};
	kvx_load_t *load;

	store_ten(1, NULL);
	knobs.stalled = jobs.rig.pid;
	rig_signal(&jobs.rig, SIGSTOP);
	usleep(700000);
	atomic_store(&knobs.stall, 3);
	assert_int_equal(start_load(&to, &load), KVC_PENDING);
	assert_int_equal(atomic_load(&knobs.stall), 0);
	kvx_load_end(load);

	rig_signal(&jobs.rig, SIGSTOP);
	usleep(700000);
	assert_int_equal(load_now(&to, &result), KVC_MISS);
	assert_int_equal(result.why, KV_WHY_DAEMON_STALE);
	rig_signal(&jobs.rig, SIGCONT);
	await_ready();
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
	kvx_load_result_t result = {.struct_size = sizeof result};
	kvx_save_result_t saved = {.struct_size = sizeof saved};

	await_ready();
	knobs_reset();
	for (uint32_t i = 0; i < KV_COUNT_OF(save_cases); i++) {
		const save_case_t *row = &save_cases[i];
		const kvx_stats_t before = stats();

		print_message("# %s\n", row->name);
		prompt_compute(&from, i, 10, 10);
		atomic_store(&knobs.grant, row->grant ? row->grant : NONE);
		atomic_store(&knobs.put, row->put);
		atomic_store(&knobs.put_times, row->put_times);
		atomic_store(&knobs.put_end, row->put_end);
		atomic_store(&knobs.put_done, row->put_done);
		assert_int_equal(save_now(&from, &saved), row->status);
		assert_true(saved.copied);
		assert_true(row->starts == 0 || atomic_load(&knobs.put_starts) == row->starts);
		assert_int_equal(stats().save_done - before.save_done, row->done);
		assert_int_equal(stats().save_busy - before.save_busy, row->busy);
		assert_int_equal(stats().save_lost - before.save_lost, row->lost);
		knobs_reset();
		prompt_init(&to, i, 10, 40);
		if (row->status == KVC_OK) {
			assert_int_equal(load_now(&to, &result), KVC_OK);
			assert_int_equal(result.blocks, 10);
		}
		for (uint32_t b = 0; row->status == KVC_OK && b < 10; b++) {
			assert_true(holds(40 + b, i, b));
		}
	}
}

JOBS_CASE(a_save_whose_parent_is_gone_offers_the_whole_prefix, RIG_SILENCE)
{
	static const int32_t refusals[] = {KVC_ERR_NO_PARENT, KV_ERR_PARENT_LOST, KV_ERR_PARENT_UNREADABLE};
	kvx_save_result_t saved = {.struct_size = sizeof saved};
	kvx_save_t *save;

	for (uint32_t r = 0; r < KV_COUNT_OF(refusals); r++) {
		store_ten(r, NULL);
		rig_wait_written(&jobs.rig); /* a daemon that loses its CPU while it writes them down hides a block */
		prompt_compute(&from, r, 15, 0);
		atomic_store(&knobs.put_times, 1);
		assert_int_equal(kvx_save_prefix(jobs.kvx, &from.prefix, &save), KVC_PENDING);
		assert_int_equal(atomic_load(&knobs.put_from), 10);
		atomic_store(&knobs.put, refusals[r]);
		await_save(save, &saved);
		assert_int_equal(saved.status, KVC_OK);
		assert_int_equal(atomic_load(&knobs.put_from), 0);
		assert_int_equal(saved.blocks, 15);
		knobs_reset();
		assert_int_equal(save_now(&from, &saved), KVC_ALREADY);
	}
}

JOBS_CASE(p7_a_save_ends_in_time_though_the_daemon_is_stopped, RIG_SILENCE)
{
	kvx_save_result_t saved = {.struct_size = sizeof saved};
	kvx_save_t *save;

	await_ready();
	prompt_init(&from, 4, 6, 0);
	from.prefix.deadline_ms = 200;
	rig_signal(&jobs.rig, SIGSTOP);
	assert_int_equal(save_now(&from, &saved), KVC_ERR_TIMEOUT);
	assert_true(saved.copied);
	assert_int_equal(stats().save_timeouts, 1);
	rig_kill(&jobs.rig);
	while (kvx_is_ready(jobs.kvx)) {
		(void)kvx_poll(jobs.kvx, 1);
	}
	assert_int_equal(kvx_save_prefix(jobs.kvx, &from.prefix, &save), KVC_MISS);
}

/* What was aborted half way reads and writes no block of the engine's any longer. */
JOBS_CASE(p1_blocks_are_the_engines_again_once_a_job_was_ended, RIG_SILENCE)
{
	kvx_load_result_t result = {.struct_size = sizeof result};
	kvx_load_t *load;
	kvx_save_t *save;

	store_ten(1, NULL);
	for (uint32_t c = 100; c < 160; c++) {
		prompt_t p;

		prompt_compute(&p, c, 15, 40);
		assert_int_equal(kvx_save_prefix(jobs.kvx, &p.prefix, &save), KVC_PENDING);
		assert_int_equal(start_load(&to, &load), KVC_PENDING);
		for (uint32_t polls = c % 4u; polls > 0; polls--) {
			(void)kvx_poll(jobs.kvx, 0);
		}
		kvx_load_end(load);
		kvx_save_end(save);
		for (uint32_t i = 0; i < 15; i++) {
			fill(30 + i, 7, i);
			fill(45 + i, 8, i);
		}
		for (uint32_t i = 0; i < 10; i++) {
			(void)kvx_poll(jobs.kvx, 1);
			assert_true(holds(30 + i, 7, i));
		}
		prompt_init(&p, c, 15, 0);
		(void)load_now(&p, &result);
		for (uint32_t i = 0; i < result.blocks; i++) {
			assert_true(holds(i, c, i));
		}
	}
	assert_true(stats().save_aborted + stats().load_aborted > 0);
}

/* ---- attaching, and what is refused ---------------------------------------------------------- */

JOBS_CASE(p7_a_connector_whose_self_test_reads_other_bytes_never_loads, RIG_SILENCE, .wrong = 1)
{
	kvx_load_result_t result = {.struct_size = sizeof result};
	kvx_save_result_t saved = {.struct_size = sizeof saved};

	for (uint32_t i = 0; i < JOBS_MS / 10u && stats().self_test_failures == 0; i++) {
		(void)kvx_poll(jobs.kvx, 10);
	}
	assert_false(kvx_is_ready(jobs.kvx));
	prompt_init(&from, 1, 4, 0);
	assert_int_equal(save_now(&from, &saved), KVC_MISS);
	atomic_store(&knobs.wrong, 0);
	for (int i = 0; i < 50; i++) {
		(void)kvx_poll(jobs.kvx, 1);
	}
	assert_false(kvx_is_ready(jobs.kvx));
	assert_int_equal(load_now(&from, &result), KVC_MISS);
	assert_int_equal(stats().self_test_failures, 1);
}

JOBS_CASE(p7_what_fails_at_attach_is_tried_again_in_poll, RIG_SILENCE, .no_space = 1)
{
	assert_false(kvx_is_ready(jobs.kvx));
	atomic_store(&knobs.no_space, 0);
	await_ready();
}

JOBS_CASE(p5_jobs_are_limited_and_bad_prefixes_refused, RIG_SILENCE)
{
	static const uint32_t beyond[] = {30, 31, 32, BLOCKS, 34, 35, 36, 37, 38, 39};
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
	bad[3].n_tokens = TOKENS - 1;
	bad[4].struct_size = 4;
	bad[5].skip = 11; /* ignored by saves */
	for (uint32_t i = 0; i < KV_COUNT_OF(bad); i++) {
		assert_int_equal(kvx_load_prefix(jobs.kvx, &bad[i], &load, NULL), KVC_MISS);
		assert_int_equal(stats().load_refused, i + 1);
		assert_true(i == 5 || kvx_save_prefix(jobs.kvx, &bad[i], &save) == KVC_MISS);
	}
	prompt_init(&to, 1, 1, 30);
	for (uint32_t i = 0; i < KVX_JOBS; i++) {
		assert_int_equal(start_load(&to, &load), KVC_PENDING);
	}
	assert_int_equal(start_load(&to, &load), KVC_MISS);
	assert_int_equal(stats().load_refused, KV_COUNT_OF(bad) + 1); /* the end of the test ends them all */
}

/* ---- at random ------------------------------------------------------------------------------- */

static void random_knobs(uint64_t *seed)
{
	atomic_store(&knobs.ready, below(seed, 4) ? NONE : below(seed, 10));
	atomic_store(&knobs.rest, below(seed, 4) ? 0 : KVC_ERR_CORRUPT);
	atomic_store(&knobs.lease, below(seed, 8) ? 0 : KVC_ERR_BUSY);
	atomic_store(&knobs.revoke_on, below(seed, 4) ? NONE : below(seed, BLOCKS));
	atomic_store(&knobs.revoked, 0);
	atomic_store(&knobs.grant, below(seed, 2) ? NONE : 1 + below(seed, 6));
	atomic_store(&knobs.put_done, below(seed, 6) ? 0 : KVC_ERR_REVOKED);
	atomic_store(&knobs.put_end, below(seed, 8) ? 0 : KVC_ERR_CLOSED);
}

/* One load or save of a random conversation; aborted at times. What a load reports is there, to the last float. */
static void random_job(uint64_t *seed)
{
	const uint32_t c = below(seed, 12), n = 1 + below(seed, MAX_JOB),
		       abort_at = below(seed, 4) ? 60 : below(seed, 6);
	const uint32_t first = below(seed, BLOCKS);
	kvx_load_result_t result = {.struct_size = sizeof result};
	kvx_load_t *load = NULL;
	kvx_save_t *save = NULL;
	prompt_t p;

	prompt_init(&p, c, n, first);
	if (below(seed, 2)) {
		prompt_compute(&p, c, n, first);
		p.prefix.deadline_ms = 100;
		(void)kvx_save_prefix(jobs.kvx, &p.prefix, &save);
	} else {
		p.prefix.deadline_ms = 20;
		(void)kvx_load_prefix(jobs.kvx, &p.prefix, &load, &result);
	}
	for (uint32_t i = 0; i < abort_at && kvx_poll(jobs.kvx, 1) > 0; i++) {
		if (load && kvx_load_state(load, &result) != KVC_PENDING) {
			break;
		}
	}
	if (load) {
		(void)kvx_load_state(load, &result);
	}
	for (uint32_t i = 0; result.status == KVC_OK && i < result.blocks; i++) {
		assert_true(holds(p.blocks[i], c, i));
	}
	kvx_load_end(load);
	kvx_save_end(save);
}

/* A hand-over of a random conversation in random chunks, by an id or by its tokens; either side is aborted at times.
 * What a receive reports is there, to the last float. */
static void random_handover(uint64_t *seed)
{
	const uint32_t c = below(seed, 12), n = 1 + below(seed, MAX_JOB / 2u),
		       stop = below(seed, 4) ? 60 : below(seed, 6);
	const uint32_t first = below(seed, BLOCKS), steps = 1 + below(seed, 3), by_tokens = below(seed, 3) == 0;
	kvx_recv_result_t result = {.struct_size = sizeof result};
	kvx_send_t *send = NULL;
	kvx_recv_t *recv = NULL;
	prompt_t p, q;

	prompt_init(&q, c, n, first + MAX_JOB);
	prompt_compute(&p, c, n, first);
	q.prefix.deadline_ms = 50;
	if (by_tokens) {
		const kvx_insert_t insert = {.struct_size = sizeof insert,
					     .tokens = p.tokens,
					     .n_tokens = p.prefix.n_tokens,
					     .blocks = p.blocks,
					     .deadline_ms = 100,
					     .ttl_ms = 100};
		const kvx_select_t select = {.struct_size = sizeof select,
					     .tokens = q.tokens,
					     .n_tokens = q.prefix.n_tokens,
					     .blocks = q.blocks,
					     .n_blocks = n,
					     .deadline_ms = 50};

		(void)kvx_drop_select(jobs.kvx, &select, &recv, &result);
		(void)kvx_insert(jobs.kvx, &insert, &send);
	} else {
		(void)kvx_recv(jobs.kvx, "at random", &q.prefix, &recv, &result);
	}
	for (uint32_t i = 0; i < stop; i++) {
		const kvx_chunk_t chunk = {.struct_size = sizeof chunk,
					   .transfer = "at random",
					   .tokens = p.tokens,
					   .n_tokens = p.prefix.n_tokens,
					   .computed = p.prefix.n_tokens * (i + 1u) / steps,
					   .blocks = p.blocks,
					   .last = i + 1u == steps,
					   .deadline_ms = 100,
					   .ttl_ms = 100};

		if (!by_tokens && i < steps) {
			(void)kvx_send(jobs.kvx, &chunk, &send);
		}
		(void)kvx_poll(jobs.kvx, 1);
		if (recv && kvx_recv_state(recv, &result) != KVC_PENDING) {
			break;
		}
	}
	for (uint32_t i = 0; result.status == KVC_OK && i < result.blocks; i++) {
		assert_true(holds(q.blocks[i], c, i));
	}
	kvx_recv_end(recv);
	kvx_send_end(send);
}

/* A daemon that does not run for a moment, here in the middle of a bucket, costs no block that it was handed. */
JOBS_CASE(p7_a_hand_over_is_looked_up_until_the_daemon_has_run, RIG_SILENCE)
{
	kvx_recv_result_t result = {.struct_size = sizeof result};
	kvx_send_t *send = NULL;
	kvx_recv_t *recv = NULL;

	prompt_compute(&from, 7, 10, 0);
	prompt_init(&to, 7, 10, 30);
	const kvx_chunk_t chunk = {.struct_size = sizeof chunk,
				   .transfer = "busy",
				   .tokens = from.tokens,
				   .n_tokens = from.prefix.n_tokens,
				   .computed = from.prefix.n_tokens,
				   .blocks = from.blocks,
				   .last = 1};
	assert_int_equal(kvx_send(jobs.kvx, &chunk, &send), KVC_PENDING);
	for (uint32_t i = 0; i < JOBS_MS && kvx_send_state(send, NULL) == KVC_PENDING; i++) {
		(void)kvx_poll(jobs.kvx, 1);
	}
	assert_int_equal(kvx_send_state(send, NULL), KVC_OK);
	atomic_store(&knobs.contended, 300); /* one lookup waits for a third of them */
	assert_int_equal(kvx_recv(jobs.kvx, "busy", &to.prefix, &recv, &result), KVC_PENDING);
	for (uint32_t i = 0; i < JOBS_MS && kvx_recv_state(recv, &result) == KVC_PENDING; i++) {
		(void)kvx_poll(jobs.kvx, 1);
	}
	assert_int_equal(result.cause, KVC_OK);
	for (uint32_t i = 0; i < 10; i++) {
		assert_true(holds(to.blocks[i], 7, i));
	}
	kvx_recv_end(recv);
	kvx_send_end(send);
}

JOBS_CASE(p1_p4_p7_under_any_fault_loads_are_right_and_nothing_leaks, RIG_SILENCE)
{
	uint64_t seed = 101;
	kvx_stats_t s;

	await_ready();
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

KV_TEST_MAIN_OF(program, begin_test, end_test)
