/* The engines: which of them answer, what each one has to do, and has in its own cache. */
#include "fleet.h"

#include "kv/env.h"
#include "kv/log.h"

#include <string.h>
#include <zmq.h>

#define LOOK_BYTES     (64u << 10) /* of an answer of /health */
#define SLOWNESS_LEAST 0.25
#define SLOWNESS_MOST  8.0
#define SLOWNESS_SHARE 0.1 /* of the newest measurement */

/* ---- events ---------------------------------------------------------------------------------- */

static void take_message(void *ctx, uint64_t seq, const uint8_t *payload, size_t len)
{
	kvp_engine_t *engine = ctx;

	kvp_cache_take(engine->cache, seq, payload, len);
}

static void lost_connection(void *ctx)
{
	kvp_engine_t *engine = ctx;

	kvp_cache_forget(engine->cache);
}

static void events_ready(void *ctx, int fd, uint32_t events)
{
	kvp_fleet_t *fleet = ctx;

	(void)events;
	for (uint32_t i = 0; i < fleet->prefill_n + fleet->decode_n; i++) {
		if (fleet->engines[i].cache && kvp_subscriber_ready(&fleet->engines[i].subscriber, fd)) {
			return;
		}
	}
}

int kvp_fleet_serve(kvp_fleet_t *fleet, uint64_t now_ns)
{
	int is_pending = 0;

	for (uint32_t i = 0; i < fleet->prefill_n + fleet->decode_n; i++) {
		kvp_subscriber_t *subscriber = &fleet->engines[i].subscriber;

		if (subscriber->is_pending) {
			kvp_subscriber_serve(subscriber, now_ns);
		}
		is_pending |= subscriber->is_pending;
	}

	return is_pending;
}

static kv_status_t subscribe(kvp_engine_t *engine)
{
	kvp_fleet_t *fleet = engine->fleet;

	if (!fleet->zmq) {
		fleet->zmq = zmq_ctx_new();
	}
	engine->cache = kvp_cache_create((uint32_t)fleet->options->events_blocks);
	engine->subscriber = (kvp_subscriber_t){.endpoint = engine->endpoint,
						.context = fleet->zmq,
						.loop = fleet->calls->loop,
						.message = take_message,
						.lost = lost_connection,
						.ctx = engine};
	kvp_subscriber_init(&engine->subscriber);

	return fleet->zmq && engine->cache ? KV_OK : KV_ERR_NOMEM;
}

/* ---- begin and end --------------------------------------------------------------------------- */

static uint32_t add_engines(kvp_fleet_t *fleet, const char *list, const char *endpoints, int is_decode, uint32_t at)
{
	kvp_engine_t *engine = &fleet->engines[at];
	uint32_t n = 0;

	while (at + n < KVP_ENGINES_MAX && kvp_options_word(list, n, engine->url) > 0) {
		(void)kvp_options_word(endpoints, n, engine->endpoint);
		engine->fleet = fleet;
		engine->is_decode = is_decode;
		engine->up = 1;
		engine->slowness = 1;
		engine->pause_ns = fleet->options->health_interval;
		engine++;
		n++;
	}

	return n;
}

kv_status_t kvp_fleet_init(kvp_fleet_t *fleet, const kvp_options_t *options, kvp_calls_t *calls)
{
	kv_status_t status = KV_OK;

	memset(fleet, 0, sizeof *fleet);
	fleet->options = options;
	fleet->calls = calls;
	fleet->prefill_n = add_engines(fleet, options->prefill, options->events_prefill, 0, 0);
	fleet->decode_n = add_engines(fleet, options->decode, options->events_decode, 1, fleet->prefill_n);
	for (uint32_t i = 0; i < fleet->prefill_n; i++) {
		(void)kvp_options_word(options->kvd_peers, i, fleet->engines[i].peer);
	}
	calls->loop->handlers[KVP_FD_EVENTS].ready = events_ready;
	calls->loop->handlers[KVP_FD_EVENTS].ctx = fleet;
	for (uint32_t i = 0; status == KV_OK && i < fleet->prefill_n + fleet->decode_n; i++) {
		status = fleet->engines[i].endpoint[0] ? subscribe(&fleet->engines[i]) : KV_OK;
	}

	return status;
}

void kvp_fleet_fini(kvp_fleet_t *fleet)
{
	for (uint32_t i = 0; i < fleet->prefill_n + fleet->decode_n; i++) {
		kvp_engine_t *engine = &fleet->engines[i];

		kvp_call_end(engine->look);
		engine->look = NULL;
		if (engine->cache) {
			kvp_subscriber_fini(&engine->subscriber);
			kvp_cache_destroy(engine->cache);
			engine->cache = NULL;
		}
	}
	if (fleet->zmq) {
		(void)zmq_ctx_term(fleet->zmq);
		fleet->zmq = NULL;
	}
}

/* ---- health ---------------------------------------------------------------------------------- */

static void set_up(kvp_engine_t *engine, int up, const char *why)
{
	if (engine->up != up) {
		kv_log(up ? KV_LOG_INFO : KV_LOG_WARN, "fleet", "%s engine %s %s: %s",
		       engine->is_decode ? "decode" : "prefill", engine->url, up ? "is up" : "is down", why);
		engine->up = up;
		if (!up && engine->cache) {
			kvp_subscriber_reconnect(&engine->subscriber); /* nothing else tells that its host is gone */
		}
	}
}

static void look_failed(kvp_engine_t *engine, const char *why)
{
	const kvp_options_t *options = engine->fleet->options;

	engine->failures++;
	if (engine->failures < options->health_failures) {
		return;
	}
	if (!engine->up) {
		engine->pause_ns =
			engine->pause_ns < options->health_backoff / 2 ? 2 * engine->pause_ns : options->health_backoff;
	}
	set_up(engine, 0, why);
}

static void look_changed(void *ctx, kvp_call_t *call)
{
	kvp_engine_t *engine = ctx;

	if (!call->ended) {
		return;
	}
	if (kvp_call_is_answered(call) && call->status == 200) {
		engine->failures = 0;
		engine->pause_ns = engine->fleet->options->health_interval;
		set_up(engine, 1, "/health answers");
	} else {
		look_failed(engine, kvp_call_is_answered(call) ? "/health says so" : kvp_call_why(call));
	}
	engine->next_look_ns = kv_now_ns(&kv_env_posix) + engine->pause_ns;
	kvp_call_end(call);
	engine->look = NULL;
}

static void begin_look(kvp_engine_t *engine, uint64_t now_ns)
{
	const kvp_options_t *options = engine->fleet->options;
	const kvp_call_config_t config = {.url = engine->url,
					  .path = "/health",
					  .connect_timeout_ns = options->health_timeout,
					  .timeout_ns = options->health_timeout,
					  .max_bytes = LOOK_BYTES,
					  .notify = look_changed,
					  .ctx = engine};

	engine->look = kvp_call_start(engine->fleet->calls, &config);
	engine->next_look_ns = now_ns + engine->pause_ns;
}

void kvp_fleet_tick(kvp_fleet_t *fleet, uint64_t now_ns)
{
	for (uint32_t i = 0; i < fleet->prefill_n + fleet->decode_n; i++) {
		kvp_engine_t *engine = &fleet->engines[i];

		if (!engine->look && engine->next_look_ns <= now_ns) {
			begin_look(engine, now_ns);
		}
		if (engine->cache) {
			kvp_subscriber_tick(&engine->subscriber, now_ns);
		}
	}
}

void kvp_fleet_look(kvp_fleet_t *fleet, int is_decode)
{
	for (uint32_t i = 0; i < fleet->prefill_n + fleet->decode_n; i++) {
		kvp_engine_t *engine = &fleet->engines[i];

		if (engine->is_decode == is_decode && !engine->up && !engine->look) {
			begin_look(engine, kv_now_ns(&kv_env_posix));
		}
	}
}

int kvp_fleet_is_looking(const kvp_fleet_t *fleet)
{
	for (uint32_t i = fleet->prefill_n; i < fleet->prefill_n + fleet->decode_n; i++) {
		if (!fleet->engines[i].up && fleet->engines[i].look) {
			return 1;
		}
	}

	return 0;
}

void kvp_engine_unreachable(kvp_engine_t *engine)
{
	engine->failures = (uint32_t)engine->fleet->options->health_failures;
	set_up(engine, 0, "it cannot be connected to");
}

/* ---- loads ----------------------------------------------------------------------------------- */

void kvp_engine_begin(kvp_engine_t *engine, double work_ns)
{
	engine->running++;
	engine->backlog_ns += work_ns;
}

void kvp_engine_finish(kvp_engine_t *engine, double work_ns)
{
	engine->running--;
	engine->backlog_ns -= work_ns;
	if (engine->running == 0 || engine->backlog_ns < 0) {
		engine->backlog_ns = 0; /* what rounding has left */
	}
}

void kvp_engine_measured(kvp_engine_t *engine, double expected_ns, double measured_ns)
{
	double ratio = expected_ns > 0 ? measured_ns / expected_ns : 1;

	ratio = ratio < SLOWNESS_LEAST ? SLOWNESS_LEAST : ratio > SLOWNESS_MOST ? SLOWNESS_MOST : ratio;
	engine->slowness += SLOWNESS_SHARE * (ratio - engine->slowness);
}

uint32_t kvp_fleet_own_hits(const kvp_fleet_t *fleet, const kvp_prefix_question_t *question, uint32_t *own)
{
	uint32_t most = 0;

	for (uint32_t i = 0; i < fleet->prefill_n + fleet->decode_n; i++) {
		const kvp_engine_t *engine = &fleet->engines[i];

		own[i] = engine->cache ? kvp_cache_hit(engine->cache, question) : 0;
		most = engine->is_decode && own[i] > most ? own[i] : most;
	}

	return most;
}

void kvp_fleet_loads(const kvp_fleet_t *fleet, uint64_t excluded, uint32_t hit, const uint32_t *own,
		     kvp_engine_load_t *loads)
{
	for (uint32_t i = 0; i < fleet->prefill_n + fleet->decode_n; i++) {
		const kvp_engine_t *engine = &fleet->engines[i];

		loads[i] = (kvp_engine_load_t){.usable = engine->up && !(excluded & kvp_engine_bit(engine)),
					       .running = engine->running,
					       .hit = own[i] > hit ? own[i] : hit,
					       .own = own[i],
					       .backlog_ns = engine->backlog_ns,
					       .slowness = engine->slowness};
	}
}

int kvp_fleet_has(const kvp_fleet_t *fleet, int is_decode, uint64_t excluded)
{
	for (uint32_t i = 0; i < fleet->prefill_n + fleet->decode_n; i++) {
		const kvp_engine_t *engine = &fleet->engines[i];

		if (engine->is_decode == is_decode && engine->up && !(excluded & kvp_engine_bit(engine))) {
			return 1;
		}
	}

	return 0;
}

void kvp_fleet_metrics(const kvp_fleet_t *fleet, kvp_engine_metrics_t out[KVP_ENGINES_MAX])
{
	for (uint32_t i = 0; i < fleet->prefill_n + fleet->decode_n; i++) {
		const kvp_engine_t *engine = &fleet->engines[i];
		kvp_cache_stats_t cache = {0};

		out[i].url = engine->url;
		out[i].role = engine->is_decode ? "decode" : "prefill";
		out[i].value[KVP_EM_UP] = (uint64_t)engine->up;
		out[i].value[KVP_EM_RUNNING] = engine->running;
		out[i].value[KVP_EM_BACKLOG] = (uint64_t)(engine->backlog_ns / 1000);
		out[i].value[KVP_EM_SLOWNESS] = (uint64_t)(engine->slowness * 100);
		if (engine->cache) {
			kvp_cache_stats(engine->cache, &cache);
		}
		out[i].value[KVP_EM_CACHED] = cache.blocks;
		out[i].value[KVP_EM_EVENTS] = cache.messages;
		out[i].value[KVP_EM_EVENT_GAPS] = cache.gaps;
		out[i].value[KVP_EM_EVENTS_MALFORMED] = cache.malformed + engine->subscriber.malformed;
		out[i].value[KVP_EM_LEFT_OUT] = cache.left_out;
	}
}
