/* The reference engine with libkvx: random conversations on the tiny model, whose answers do not depend on who computes
 * which part. With a healthy daemon, without one, and under one that dies, stops or serves damaged memory: the same
 * tokens, in time, and nothing left behind. */
#include "connectors/rig.h"
#include "engine/check.h"
#include "kv_cmocka.h"
#include "kv_test.h"

#include "kve/engine.h"
#include "kv/env.h"

#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define TURNS         3u
#define USERS         4u
#define CHAT_MAX      800u
#define ENGINE_BLOCKS 256u
#define MS            UINT64_C(1000000)

static uint32_t advance(kve_engine_t *engine)
{
	uint32_t unfinished = 0;

	assert_int_equal(kve_engine_step(engine, &unfinished), KV_OK);

	return unfinished;
}

static uint64_t now_ns(void)
{
	return kv_now_ns(&kv_env_posix);
}

/* ---- engines --------------------------------------------------------------------------------- */

/* Blocks of a prompt are loaded however busy the machine is. NULL: it computes everything itself. */
static kve_engine_t *make_engine_of(const char *socket, uint32_t blocks, uint32_t running, uint32_t ranks)
{
	const kve_engine_config_t config = {
		.model = kve_config_tiny,
		.cache_blocks = blocks,
		.max_running = running,
		.store = socket != NULL,
		.socket = socket,
		.program = "test",
		.load_ms = 120000,
		.ranks = ranks,
	};
	kve_engine_t *engine = NULL;

	assert_int_equal(kve_engine_create(&config, &engine), KV_OK);

	return engine;
}

static kve_engine_t *make_engine(const char *socket, uint32_t blocks, uint32_t running)
{
	return make_engine_of(socket, blocks, running, 0);
}

static kve_engine_t *chat_engine(const char *socket)
{
	return make_engine(socket, ENGINE_BLOCKS, USERS);
}

static kvx_stats_t stats_of(kve_engine_t *engine)
{
	kvx_stats_t stats = {.struct_size = sizeof stats};

	kvx_get_stats(kve_engine_store(engine), &stats);

	return stats;
}

/* The engine finds a daemon without help. */
static void await_attached(kve_engine_t *engine, uint64_t attaches)
{
	kvx_t *kvx = kve_engine_store(engine);

	for (int i = 0; i < 6000 && (stats_of(engine).attaches < attaches || !kvx_is_ready(kvx)); i++) {
		(void)kvx_poll(kvx, 10);
	}
	assert_true(kvx_is_ready(kvx));
	assert_int_equal(stats_of(engine).attaches, attaches);
}

/* What it saves is saved, and all blocks are free. */
static void flush(kve_engine_t *engine)
{
	assert_int_equal(kve_engine_flush(engine, 15000), 0);
	assert_int_equal(kve_engine_free_blocks(engine), ENGINE_BLOCKS);
}

static void append_random(uint32_t *tokens, uint32_t *n, uint64_t seed, uint32_t more)
{
	for (uint32_t i = 0; i < more; i++) {
		tokens[(*n)++] = below(&seed, kve_config_tiny.vocab);
	}
}

/* ---- conversations --------------------------------------------------------------------------- */

typedef struct totals {
	uint64_t answers; /* hash of all tokens generated */
	uint64_t prompt_tokens, cpu_tokens, disk_tokens;
	uint64_t longest_ns; /* slowest request */
} totals_t;

/* What happens between steps; the chat goes on whatever it does. */
typedef struct trouble {
	void (*happen)(struct trouble *trouble, kve_engine_t *engine);
	uint64_t seed;
	uint32_t every;        /* steps between events, on average */
	uint32_t down;         /* steps until the daemon is back; 0: it is up */
	uint32_t events, most; /* seen, and when it is enough */
} trouble_t;

typedef struct talk {
	uint32_t tokens[CHAT_MAX];
	uint32_t n;
} talk_t;

static void run_turn(kve_engine_t *engine, talk_t *talks, uint32_t turn, trouble_t *trouble, totals_t *totals)
{
	kve_request_t *requests[USERS];

	for (uint32_t u = 0; u < USERS; u++) {
		const kve_ask_t ask = {.tokens = talks[u].tokens,
				       .n_tokens = talks[u].n,
				       .max_new = 20 + u,
				       .session = u + 1,
				       .turn = turn + 1};

		assert_int_equal(kve_engine_submit(engine, &ask, &requests[u]), KV_OK);
	}
	while (advance(engine) > 0) {
		if (trouble) {
			trouble->happen(trouble, engine);
		}
	}
	for (uint32_t u = 0; u < USERS; u++) {
		const kve_request_t *r = requests[u];
		const uint32_t n_new = r->n_tokens - r->n_prompt;
		const uint64_t ns = r->done_ns - r->submit_ns;

		totals->answers = hash_bytes(totals->answers, r->tokens + r->n_prompt, n_new * sizeof(uint32_t));
		totals->prompt_tokens += r->n_prompt;
		totals->cpu_tokens += r->load.cpu_tokens;
		totals->disk_tokens += r->load.disk_tokens;
		totals->longest_ns = ns > totals->longest_ns ? ns : totals->longest_ns;
		memcpy(talks[u].tokens + talks[u].n, r->tokens + r->n_prompt, n_new * sizeof(uint32_t));
		talks[u].n += n_new;
		kve_engine_release(engine, requests[u]);
	}
}

/* All users together, TURNS turns each: shared starts, growing histories. */
static totals_t chat(kve_engine_t *engine, uint64_t seed, trouble_t *trouble)
{
	static talk_t talks[USERS];
	totals_t totals = {.answers = HASH_START};

	memset(talks, 0, sizeof talks);
	for (uint32_t u = 0; u < USERS; u++) {
		append_random(talks[u].tokens, &talks[u].n, seed * 1000 + u % 2, 150);
	}
	for (uint32_t t = 0; t < TURNS; t++) {
		for (uint32_t u = 0; u < USERS; u++) {
			append_random(talks[u].tokens, &talks[u].n, seed * 1000 + 10 * u + t + 100, 20 + 7 * u);
		}
		run_turn(engine, talks, t, trouble, &totals);
	}

	return totals;
}

/* The chat, whose answers are those of an engine without a store. */
static totals_t check_chat(kve_engine_t *engine, uint64_t seed, trouble_t *trouble)
{
	static uint64_t known, answers;
	const totals_t totals = chat(engine, seed, trouble);

	if (seed != known) {
		kve_engine_t *alone = chat_engine(NULL);

		answers = chat(alone, seed, NULL).answers;
		known = seed;
		kve_engine_destroy(alone);
	}
	assert_true(totals.answers == answers);

	return totals;
}

/* ---- a healthy daemon ------------------------------------------------------------------------ */

KV_TEST(p1_tokens_are_equal_with_and_without_the_cache)
{
	rig_start(&the_rig);
	for (uint64_t seed = 1; seed <= 4; seed++) {
		for (int warm = 0; warm < 2; warm++) {
			kve_engine_t *engine = chat_engine(the_rig.socket); /* its cache is empty */
			const totals_t totals = check_chat(engine, seed, NULL);
			kvx_stats_t stats;

			assert_true(!warm || totals.cpu_tokens + totals.disk_tokens > totals.prompt_tokens * 9 / 10);
			flush(engine);
			stats = stats_of(engine);
			assert_int_equal(stats.load_corrupt + stats.save_lost + stats.save_busy, 0);
			assert_int_equal(stats.self_test_failures, 0);
			kve_engine_destroy(engine);
		}
	}
}

/* An engine starts before the daemon, and finds the next one, too. */
KV_TEST(p7_hits_come_from_disk_after_the_daemon_was_killed)
{
	kve_engine_t *engine = chat_engine(the_rig.socket);
	totals_t totals;

	assert_false(kvx_is_ready(kve_engine_store(engine)));
	rig_start(&the_rig);
	await_attached(engine, 1);
	totals = chat(engine, 9, NULL);
	assert_true(totals.cpu_tokens > 0);
	flush(engine);
	rig_wait_written(&the_rig);
	rig_kill(&the_rig);
	rig_start(&the_rig);
	await_attached(engine, 2);
	totals = check_chat(engine, 9, NULL);
	print_message("prompt tokens %lu, from disk %lu, from memory then %lu\n", (unsigned long)totals.prompt_tokens,
		      (unsigned long)totals.disk_tokens, (unsigned long)totals.cpu_tokens);
	assert_true(totals.disk_tokens > 0 && totals.disk_tokens + totals.cpu_tokens > totals.prompt_tokens * 9 / 10);
	kve_engine_destroy(engine);
}

/* The prompt's blocks are saved while the request goes on. */
KV_TEST(a_flush_waits_for_the_saves_of_running_requests_too)
{
	uint32_t tokens[600], n = 0;
	const kve_ask_t ask = {.tokens = tokens, .n_tokens = 600, .max_new = 100};
	kve_request_t *request;
	kve_engine_t *engine;

	rig_start(&the_rig);
	engine = chat_engine(the_rig.socket);
	append_random(tokens, &n, 51, 600);
	assert_int_equal(kve_engine_submit(engine, &ask, &request), KV_OK);
	while (request->state != KVE_DECODE) {
		(void)advance(engine);
	}
	assert_int_equal(kve_engine_flush(engine, 5000), 0);
	assert_int_equal(stats_of(engine).saves, 1);
	assert_int_equal(stats_of(engine).save_done, 1);
	assert_int_equal(request->state, KVE_DECODE);
	kve_engine_destroy(engine);
}

/* A shared beginning, so that there is something to load. */
static void abort_one(trouble_t *trouble, kve_engine_t *engine)
{
	uint32_t tokens[200];
	const kve_ask_t ask = {.tokens = tokens, .n_tokens = 100 + below(&trouble->seed, 100), .max_new = 3};
	kve_request_t *request;

	for (uint32_t i = 0; i < ask.n_tokens; i++) {
		tokens[i] = (i * 37 + 5) % kve_config_tiny.vocab;
	}
	if (below(&trouble->seed, trouble->every) || kve_engine_submit(engine, &ask, &request) != KV_OK) {
		return;
	}
	for (uint32_t steps = below(&trouble->seed, 12); steps > 0 && request->state != KVE_DONE; steps--) {
		(void)advance(engine);
	}
	kve_engine_release(engine, request);
}

KV_TEST(p4_aborts_at_random_moments_leave_no_lease_and_no_put)
{
	trouble_t trouble = {.happen = abort_one, .seed = 41, .every = 3};
	kve_engine_t *engine;

	rig_start(&the_rig);
	engine = chat_engine(the_rig.socket);
	(void)check_chat(engine, 5, &trouble);
	flush(engine);

	/* A request that was aborted before its answer came is given back when the answer comes. */
	for (int i = 0; i < 50; i++) {
		(void)kvx_poll(kve_engine_store(engine), 2);
	}
	rig_check_quiet(&the_rig);
	kve_engine_destroy(engine);
}

/* ---- faults ---------------------------------------------------------------------------------- */

static void kill_and_start(trouble_t *trouble, kve_engine_t *engine)
{
	(void)engine;
	if (trouble->down > 0) {
		if (--trouble->down == 0) {
			rig_start(&the_rig);
		}
	} else if (trouble->events < trouble->most && below(&trouble->seed, trouble->every) == 0) {
		rig_kill(&the_rig);
		trouble->events++;
		trouble->down = 1 + below(&trouble->seed, 8);
	}
}

KV_TEST(p7_a_daemon_killed_amid_loads_and_saves_changes_no_token)
{
	uint32_t events = 0;

	for (uint64_t seed = 61; seed < 64; seed++) {
		trouble_t trouble = {.happen = kill_and_start, .seed = seed, .every = 12, .most = 8};
		kve_engine_t *engine;

		rig_start(&the_rig);
		engine = chat_engine(the_rig.socket);
		(void)check_chat(engine, seed, &trouble);
		if (the_rig.pid == 0) {
			rig_start(&the_rig);
		}
		(void)kve_engine_flush(engine, 15000);
		assert_int_equal(kve_engine_free_blocks(engine), ENGINE_BLOCKS);
		kve_engine_destroy(engine);
		rig_check_quiet(&the_rig);
		rig_kill(&the_rig);
		events += trouble.events;
	}
	assert_true(events > 3);
}

static void stop_and_go(trouble_t *trouble, kve_engine_t *engine)
{
	(void)engine;
	if (trouble->down > 0) {
		if (--trouble->down == 0) {
			rig_signal(&the_rig, SIGCONT);
		}
	} else if (trouble->events < trouble->most && below(&trouble->seed, trouble->every) == 0) {
		rig_signal(&the_rig, SIGSTOP);
		trouble->events++;
		trouble->down = 30;
	}
}

KV_TEST(p7_a_stopped_daemon_is_a_quick_miss)
{
	trouble_t trouble = {.happen = stop_and_go, .seed = 72, .every = 10, .most = 6};
	kve_engine_t *engine;

	the_rig.silence = "50ms";
	rig_start(&the_rig);
	engine = chat_engine(the_rig.socket);
	(void)chat(engine, 71, NULL);
	(void)kve_engine_flush(engine, 5000);

	/* Stopped from the beginning: no request waits for it. */
	rig_signal(&the_rig, SIGSTOP);
	assert_true(check_chat(engine, 71, NULL).longest_ns < 60000u * MS);
	rig_signal(&the_rig, SIGCONT);

	/* Stopping and going on meanwhile. */
	(void)check_chat(engine, 71, &trouble);
	rig_signal(&the_rig, SIGCONT);
	assert_true(trouble.events > 1);
	(void)kve_engine_flush(engine, 15000);
	assert_int_equal(kve_engine_free_blocks(engine), ENGINE_BLOCKS);
	kve_engine_destroy(engine);
}

/* ---- without a daemon ------------------------------------------------------------------------ */

typedef struct parts {
	kve_cache_t cache;
	kvk_layout_t layout;
	kvc_identity_t identity;
	kvx_config_t config;
} parts_t;

static void parts_init(parts_t *p)
{
	assert_int_equal(kve_cache_init(&p->cache, &kve_config_tiny, 16), KV_OK);
	kve_config_layout(&kve_config_tiny, &p->layout);
	p->identity = (kvc_identity_t){
		.struct_size = sizeof p->identity, .model = "m", .weights = "w", .dtype = "f32", .rope = "none"};
	p->config = (kvx_config_t){
		.struct_size = sizeof p->config,
		.roles = KVX_BOTH,
		.socket = the_rig.socket,
		.identity = &p->identity,
		.layout = &p->layout,
		.paged = p->cache.paged,
	};
}

KV_TEST(p7_without_a_daemon_everything_is_a_quick_miss)
{
	uint32_t tokens[64] = {0}, blocks[4] = {0, 1, 2, 3};
	const kvx_prefix_t prefix = {.struct_size = sizeof prefix, .tokens = tokens, .n_tokens = 64, .blocks = blocks};
	kvx_stats_t stats = {.struct_size = sizeof stats};
	const uint64_t start = now_ns();
	kvx_load_result_t result = {.struct_size = sizeof result};
	kvx_load_t *load;
	kvx_save_t *save;
	parts_t p;
	kvx_t *kvx;

	parts_init(&p);
	assert_int_equal(kvx_attach(&p.config, &kvx), KVC_OK);
	for (int i = 0; i < 100; i++) {
		assert_int_equal(kvx_load_prefix(kvx, &prefix, &load, &result), KVC_MISS);
		assert_null(load);
		assert_int_equal(result.tokens, 0);
		assert_int_equal(result.why, 4); /* NO_DAEMON */
		assert_int_equal(kvx_save_prefix(kvx, &prefix, &save), KVC_MISS);
		assert_null(save);
		assert_int_equal(kvx_poll(kvx, 0), 0);
	}
	kvx_get_stats(kvx, &stats);
	assert_int_equal(stats.loads, 100);
	assert_int_equal(stats.load_refused, 100);
	assert_int_equal(stats.save_refused, 100);
	assert_false(kvx_is_ready(kvx));
	kvx_detach(kvx);
	kvx_detach(NULL);
	kve_cache_fini(&p.cache);
	assert_true(now_ns() - start < 20000u * MS); /* 100 ms a round */
}

/* Somebody listens and says nothing: a daemon that has been stopped. */
static int mute_listen(const char *path)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	(void)snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
	assert_int_equal(bind(fd, (const struct sockaddr *)&address, sizeof address), 0);
	assert_int_equal(listen(fd, 64), 0);

	return fd;
}

#define QUICK_NS (20000u * MS) /* a third of what one waits for the answer */

static uint64_t attach_ns(const kvx_config_t *config, kvx_t **p_kvx)
{
	const uint64_t start = now_ns();

	assert_int_equal(kvx_attach(config, p_kvx), KVC_OK);
	assert_in_range(now_ns() - start, 0, QUICK_NS);

	return now_ns() - start;
}

KV_TEST(p7_a_daemon_that_only_listens_costs_attach_ms_once)
{
	uint64_t start;
	char path[96];
	parts_t p;
	kvx_t *kvx;
	int fd;

	(void)snprintf(path, sizeof path, "%s/s", the_rig.dir);
	fd = mute_listen(path);
	parts_init(&p);
	p.config.socket = path;
	p.config.attach_ms = UINT32_MAX;
	p.config.load_ms = 60000; /* so long is the answer waited for */
	(void)attach_ns(&p.config, &kvx);
	start = now_ns();
	for (int i = 0; i < 20; i++) {
		assert_int_equal(kvx_poll(kvx, 5), 0);
	}
	assert_in_range(now_ns() - start, 0, QUICK_NS);
	kvx_detach(kvx);

	p.config.load_ms = 1000;
	(void)attach_ns(&p.config, &kvx);
	start = now_ns();
	while (now_ns() - start < 1500u * MS) { /* beyond the deadline of its first question */
		assert_int_equal(kvx_poll(kvx, 5), 0);
	}
	kvx_detach(kvx);

	p.config.load_ms = 60000;
	p.config.attach_ms = 100;
	assert_true(attach_ns(&p.config, &kvx) >= 90u * MS);
	kvx_detach(kvx);
	(void)close(fd);
	kve_cache_fini(&p.cache);
}

static void *continue_late(void *arg)
{
	usleep(1500000); /* beyond the deadline of the first question */
	rig_signal(&the_rig, SIGCONT);

	return arg;
}

KV_TEST(p7_attach_ms_outlasts_a_question_without_an_answer)
{
	pthread_t thread;
	parts_t p;
	kvx_t *kvx;

	rig_start(&the_rig);
	parts_init(&p);
	p.config.attach_ms = 120000;
	p.config.load_ms = 1000;
	rig_signal(&the_rig, SIGSTOP);
	assert_int_equal(pthread_create(&thread, NULL, continue_late, NULL), 0);
	assert_int_equal(kvx_attach(&p.config, &kvx), KVC_OK);
	assert_int_equal(pthread_join(thread, NULL), 0);
	assert_true(kvx_is_ready(kvx));
	kvx_detach(kvx);
	kve_cache_fini(&p.cache);
}

/* With a store that has no daemon the engine computes everything itself. */
KV_TEST(p7_the_engine_computes_everything_itself)
{
	kve_engine_t *engine = chat_engine(the_rig.socket);

	(void)check_chat(engine, 31, NULL);
	flush(engine);
	kve_engine_destroy(engine);
}

/* Results too: nothing of them is filled then. */
KV_TEST(p10_a_result_without_its_size_is_an_error)
{
	kvx_load_result_t result = {.struct_size = sizeof result};
	kvx_stats_t stats = {.struct_size = sizeof stats};
	const uint32_t tokens[32] = {1}, blocks[2] = {0, 1};
	kvx_prefix_t prefix = {.struct_size = sizeof prefix, .tokens = tokens, .n_tokens = 32, .blocks = blocks};
	kvx_load_t *load = NULL;
	kvx_t *kvx = NULL;
	parts_t p;

	parts_init(&p);
	assert_int_equal(kvx_attach(&p.config, &kvx), KVC_OK);
	assert_int_equal(kvx_get_stats(kvx, &stats), KVC_OK);
	stats = (kvx_stats_t){0};
	assert_int_equal(kvx_get_stats(kvx, &stats), KVC_ERR_ARG);
	assert_non_null(strstr(kvx_last_error(), "kvx_get_stats: struct_size is not set"));
	assert_int_equal(kvx_load_prefix(kvx, &prefix, &load, &result), KVC_MISS);
	result = (kvx_load_result_t){0};
	assert_int_equal(kvx_load_prefix(kvx, &prefix, &load, &result), KVC_MISS);
	assert_non_null(strstr(kvx_last_error(), "kvx_load_prefix: struct_size is not set"));
	assert_null(load);
	kvx_detach(kvx);
	kve_cache_fini(&p.cache);
}

#define REFUSED(change, words)                                                                                         \
	p.config = good;                                                                                               \
	memcpy(parts, whole, sizeof parts);                                                                            \
	other = p.layout;                                                                                              \
	identity = *good.identity;                                                                                     \
	change;                                                                                                        \
	assert_int_equal(kvx_attach(&p.config, &kvx), KVC_ERR_ARG);                                                    \
	assert_null(kvx);                                                                                              \
	assert_true(strlen(kvx_last_error()) > 10);                                                                    \
	assert_non_null(strstr(kvx_last_error(), words))

/* With a sentence. Parts of a cache have each head once, or in copies. */
KV_TEST(p10_contradictory_configurations_are_refused_with_a_sentence)
{
	kvk_paged_t whole[2], parts[2];
	kvc_identity_t identity;
	kvk_layout_t other;
	kvx_config_t good;
	kvx_t *kvx = NULL;
	parts_t p;

	parts_init(&p);
	assert_int_equal(kvx_attach(NULL, &kvx), KVC_ERR_ARG);
	kve_cache_fini(&p.cache);
	assert_int_equal(kve_cache_init_ranks(&p.cache, &kve_config_tiny, 16, 2), KV_OK);
	memcpy(whole, p.cache.paged, sizeof whole);
	good = p.config;
	good.paged = parts;
	good.parts = 2;

	REFUSED(p.config.struct_size = 8, "");
	REFUSED(p.config.roles = 0, "");
	REFUSED(p.config.roles = 4, "");
	REFUSED(p.config.identity = NULL, "");
	REFUSED((identity.model = NULL, p.config.identity = &identity), "identity's model is missing");
	REFUSED((identity.dtype = "", p.config.identity = &identity), "identity's dtype is missing");
	REFUSED((identity.rope = NULL, p.config.identity = &identity), "identity's rope is missing");
	REFUSED((other.block_tokens *= 2, p.config.layout = &other), "");
	REFUSED((parts[0].layers--, parts[1].layers--), "");
	REFUSED(p.config.parts = KVX_MAX_PARTS + 1, "more than 16 parts");
	REFUSED(p.config.parts = 1, "do not have all heads");
	REFUSED(parts[1].first_head = 0, "do not have all heads");
	REFUSED(parts[0].heads = 2, "in common");
	REFUSED(parts[1].blocks--, "numbers of blocks");
	REFUSED(parts[1].layers--, "all layers");
	kve_cache_fini(&p.cache);
}

/* ---- prefill on one engine, decode on another -------------------------------------------------- */

/* Of the same and of other tensor parallel degrees: tokens and log-probabilities are those of one engine that does both,
 * to the last bit. */
#define REQUESTS   500u
#define TOGETHER   10u
#define BLOCKS     512u
#define PROMPT_MAX 150u
#define NEW_MAX    6u

static kve_engine_t *make_ranks(const char *socket, uint32_t ranks)
{
	return make_engine_of(socket, BLOCKS, TOGETHER, ranks);
}

/* A request, and what came of it. */
typedef struct story {
	uint32_t tokens[PROMPT_MAX];
	uint32_t n_tokens, n_new;
	char transfer[32];
	uint64_t hash; /* of the tokens and log-probabilities that were generated */
} story_t;

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
	kve_engine_t *engine = make_ranks(NULL, 1);

	for (uint32_t i = 0; i < n; i++) {
		kve_request_t *request = submit(engine, &stories[i], KVE_KEEP, stories[i].n_new);

		while (advance(engine) > 0) {
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
	while (advance(producer) + advance(consumer) > 0) {
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

KV_TEST(p1_prefill_and_decode_on_two_engines_equal_one)
{
	static const uint32_t degrees[][2] = {{1, 1}, {4, 2}, {2, 4}, {4, 1}, {1, 2}};
	static story_t stories[REQUESTS];
	const uint32_t each = REQUESTS / KV_COUNT_OF(degrees);
	uint64_t seed = 71;

	for (uint32_t i = 0; i < REQUESTS; i++) {
		make_story(&stories[i], &seed, i);
	}
	tell_alone(stories, REQUESTS);
	rig_start(&the_rig);
	for (size_t d = 0; d < KV_COUNT_OF(degrees); d++) {
		kve_engine_t *producer = make_ranks(the_rig.socket, degrees[d][0]);
		kve_engine_t *consumer = make_ranks(the_rig.socket, degrees[d][1]);

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
}

/* A producer that ends in the middle of a prompt, and one that never comes. */
KV_TEST(p7_a_lost_producer_changes_no_token)
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
	rig_start(&the_rig);
	producer = make_ranks(the_rig.socket, 2);
	consumer = make_ranks(the_rig.socket, 4);
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
		(void)advance(consumer);
		if (sent->n_computed == 0) {
			(void)advance(producer); /* one chunk, which is not all */
		}
		(void)kvx_poll(kve_engine_store(producer), 1);
	}
	assert_true(half->state == KVE_LOADING && half->recv.tokens < PROMPT_MAX);
	kve_engine_destroy(producer);
	while (advance(consumer) > 0) {
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

/* ---- the engine ------------------------------------------------------------------------------ */

KV_TEST(p10_bad_requests_are_refused)
{
	const uint32_t good[4] = {1, 2, 3, 4}, bad[1] = {kve_config_tiny.vocab};
	const kve_ask_t asks[] = {
		{.tokens = good, .n_tokens = 0, .max_new = 1},
		{.tokens = good, .n_tokens = 4, .max_new = 0},
		{.tokens = bad, .n_tokens = 1, .max_new = 1},
		{.tokens = good, .n_tokens = 4, .max_new = kve_config_tiny.max_tokens},
		{.tokens = good, .n_tokens = 4, .max_new = 8 * 16},
		{.tokens = good, .n_tokens = UINT32_MAX, .max_new = 2},
	};
	kve_engine_t *engine = make_engine(NULL, 8, 2);
	kve_request_t *request = NULL;

	for (size_t i = 0; i < KV_COUNT_OF(asks); i++) {
		assert_int_equal(kve_engine_submit(engine, &asks[i], &request), KV_ERR_ARG);
		assert_null(request);
	}
	kve_engine_destroy(engine);
}

KV_TEST(p4_aborted_requests_give_their_blocks_back)
{
	kve_engine_t *engine = make_engine(NULL, 32, 3);
	uint32_t tokens[120] = {0};
	uint64_t seed = 32;

	for (int round = 0; round < 40; round++) {
		kve_request_t *requests[5];

		for (int i = 0; i < 5; i++) {
			const kve_ask_t ask = {
				.tokens = tokens, .n_tokens = 1 + below(&seed, 120), .max_new = 1 + below(&seed, 5)};

			assert_int_equal(kve_engine_submit(engine, &ask, &requests[i]), KV_OK);
		}
		for (uint32_t steps = below(&seed, 6); steps > 0; steps--) {
			(void)advance(engine);
		}
		for (int i = 0; i < 5; i++) {
			kve_engine_release(engine, requests[i]);
		}
		assert_int_equal(advance(engine), 0);
		assert_int_equal(kve_engine_free_blocks(engine), 32);
	}
	kve_engine_destroy(engine);
}

/* It needs every block there is, and one-block requests keep coming. */
KV_TEST(p5_a_long_request_is_not_overtaken_for_ever)
{
	enum { STEPS = 200 };
	uint32_t tokens[100] = {0};
	const kve_ask_t small = {.tokens = tokens, .n_tokens = 8, .max_new = 8};
	const kve_ask_t large = {.tokens = tokens, .n_tokens = 100, .max_new = 28};
	kve_engine_t *engine = make_engine(NULL, 8, 8);
	kve_request_t *requests[STEPS], *waits;

	for (uint32_t step = 0; step < STEPS; step++) {
		assert_int_equal(kve_engine_submit(engine, &small, &requests[step]), KV_OK);
		if (step == 0) {
			assert_int_equal(kve_engine_submit(engine, &large, &waits), KV_OK);
		}
		(void)advance(engine);
	}
	assert_int_equal(waits->state, KVE_DONE);
	while (advance(engine) > 0) {
	}
	for (uint32_t step = 0; step < STEPS; step++) {
		assert_int_equal(requests[step]->state, KVE_DONE);
	}
	kve_engine_destroy(engine);
}

KV_TEST_MAIN_OF(the_program, begin_rig, end_rig)
