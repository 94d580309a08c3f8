#include "connectors/inproc/chat.h"
#include "engine/check.h"

#include <string.h>

kve_engine_t *chat_engine(const char *socket)
{
	const kve_engine_config_t config = {
		.model = kve_config_tiny,
		.cache_blocks = 256,
		.max_running = CHAT_USERS,
		.store = socket != NULL,
		.socket = socket,
		.program = "test",
		.load_ms = 120000, /* what is there is loaded, however busy the machine is */
	};
	kve_engine_t *engine = NULL;

	assert_int_equal(kve_engine_create(&config, &engine), KV_OK);

	return engine;
}

typedef struct talk {
	uint32_t tokens[CHAT_MAX];
	uint32_t n;
} talk_t;

static void append_random(talk_t *talk, uint64_t seed, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		talk->tokens[talk->n++] = below(&seed, kve_config_tiny.vocab);
	}
}

static void run_turn(kve_engine_t *engine, talk_t *talks, uint32_t turn, chat_hook_fn hook, void *ctx,
		     chat_totals_t *totals)
{
	kve_request_t *requests[CHAT_USERS];

	for (uint32_t u = 0; u < CHAT_USERS; u++) {
		const kve_ask_t ask = {.tokens = talks[u].tokens,
				       .n_tokens = talks[u].n,
				       .max_new = 20 + u,
				       .session = u + 1,
				       .turn = turn + 1};

		assert_int_equal(kve_engine_submit(engine, &ask, &requests[u]), KV_OK);
	}
	while (kve_engine_step(engine) > 0) {
		if (hook) {
			hook(ctx, engine);
		}
	}
	for (uint32_t u = 0; u < CHAT_USERS; u++) {
		const kve_request_t *r = requests[u];
		const uint32_t n_new = r->n_tokens - r->n_prompt;

		totals->answers = hash_bytes(totals->answers, r->tokens + r->n_prompt, n_new * sizeof(uint32_t));
		totals->prompt_tokens += r->n_prompt;
		totals->cpu_tokens += r->load.cpu_tokens;
		totals->disk_tokens += r->load.disk_tokens;
		if (r->done_ns - r->submit_ns > totals->longest_ns) {
			totals->longest_ns = r->done_ns - r->submit_ns;
		}
		memcpy(talks[u].tokens + talks[u].n, r->tokens + r->n_prompt, n_new * sizeof(uint32_t));
		talks[u].n += n_new;
		kve_engine_release(engine, requests[u]);
	}
}

void chat_run(kve_engine_t *engine, uint64_t seed, chat_hook_fn hook, void *ctx, chat_totals_t *totals)
{
	static talk_t talks[CHAT_USERS];

	*totals = (chat_totals_t){.answers = HASH_START};
	memset(talks, 0, sizeof talks);
	for (uint32_t u = 0; u < CHAT_USERS; u++) {
		append_random(&talks[u], seed * 1000 + u % 2, 150);
	}
	for (uint32_t t = 0; t < CHAT_TURNS; t++) {
		for (uint32_t u = 0; u < CHAT_USERS; u++) {
			append_random(&talks[u], seed * 1000 + 10 * u + t + 100, 20 + 7 * u);
		}
		run_turn(engine, talks, t, hook, ctx, totals);
	}
}
