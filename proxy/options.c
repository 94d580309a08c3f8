/* The option table of kvd-pd-proxy and its command line. */
#include "options.h"

#include "events/subscriber.h"
#include "kv/system.h"
#include "kv/log.h"
#include "kv/units.h"
#include "metrics.h"

#include <stdarg.h>
#include <string.h>

extern char **environ;

#define ROW(name, type, fallback, min, max, choices, member, help)                                                     \
	{                                                                                                              \
		name, KV_OPTION_##type, fallback, min, max, choices, 0, offsetof(kvp_options_t, member), help          \
	}

/* clang-format off */
static const kv_option_t rows[] = {
	ROW("http.listen", STRING, "127.0.0.1:8080", NULL, NULL, NULL, http_listen, "host:port of the API, /health and /metrics"),
	ROW("http.allow_remote", BOOL, "off", NULL, NULL, NULL, http_allow_remote, "allow http.listen to be reached from other machines; the proxy asks for no key, and passes the client's on"),
	ROW("prefill", LIST, "", NULL, NULL, NULL, prefill, "base URLs of the prefill engines, as http://10.0.0.1:8000; none: the decode engines do all"),
	ROW("decode", LIST, "", NULL, NULL, NULL, decode, "base URLs of the decode engines; at least one"),
	ROW("sequential", BOOL, "off", NULL, NULL, NULL, sequential, "send to the decode engine when the prefill engine has answered, with the kv_transfer_params of its answer; off: send to both at once under one transfer id"),
	ROW("tokenize", BOOL, "on", NULL, NULL, NULL, tokenize, "ask an engine's /tokenize for the tokens of a text; off, or without an answer: 4 bytes are taken for a token"),
	ROW("skip.tokens", U64, "256", NULL, NULL, NULL, skip_tokens, "a prompt is not handed over when what is left to compute takes at most as long as a prompt of this number of tokens, and the decode engine would be done first, by estimate"),
	ROW("skip.wait", DURATION, "2s", NULL, "1h", NULL, skip_wait, "a prompt that would wait longer than this for a prefill engine, by estimate, is not handed over"),
	ROW("queue.max", U64, "256", NULL, "65536", NULL, queue_max, "requests that wait for a prefill engine; more are not handed over"),
	ROW("queue.deadline", DURATION, "10s", "1ms", "1h", NULL, queue_deadline, "a request that has waited so long for a prefill engine is not handed over"),
	ROW("engine.prefill_running", U64, "4", "1", "4096", NULL, prefill_running, "requests that a prefill engine has at a time"),
	ROW("engine.prefill_ahead", DURATION, "50ms", NULL, "1h", NULL, prefill_ahead, "a prefill engine gets another request while it has less work than this, by estimate; in the queue short prompts overtake long ones"),
	ROW("engine.prefill_timeout", DURATION, "60s", "10ms", "1h", NULL, prefill_timeout, "a prefill engine that has not answered by then has failed"),
	ROW("engine.decode_timeout", DURATION, "120s", "10ms", "1h", NULL, decode_timeout, "a decode engine that has sent nothing of a streamed answer by then has failed"),
	ROW("engine.decode_stall", DURATION, "60s", "10ms", "1h", NULL, decode_stall, "a stream that stands still for so long has ended, and the client is told"),
	ROW("engine.decode_whole", DURATION, "10m", "10ms", "24h", NULL, decode_whole, "a decode engine that has not sent the whole of an answer that is not streamed by then has failed"),
	ROW("engine.connect_timeout", DURATION, "1s", "10ms", "1m", NULL, connect_timeout, "time to connect to an engine"),
	ROW("engine.tokenize_timeout", DURATION, "1s", "1ms", "1m", NULL, tokenize_timeout, "time for an answer of /tokenize"),
	ROW("engine.attempts", U64, "3", "1", "16", NULL, attempts, "engines that a request is sent to in turn, as long as the client has got nothing"),
	ROW("health.interval", DURATION, "1s", "10ms", "1h", NULL, health_interval, "time between two looks at an engine's /health"),
	ROW("health.timeout", DURATION, "1s", "10ms", "1m", NULL, health_timeout, "time for an answer of /health"),
	ROW("health.failures", U64, "2", "1", "100", NULL, health_failures, "an engine gets no request after this number of failed looks in a row; what it had is sent to another one"),
	ROW("health.backoff", DURATION, "30s", "10ms", "1h", NULL, health_backoff, "looks at an engine that stays away become rarer, up to this, unless a request finds no engine up"),
	ROW("cost.fixed", DURATION, "13ms", NULL, "1m", NULL, cost_fixed, "a prefill takes this, whatever its length. Costs estimate queues (defaults: an 8B model on one H200); measured times correct them for each engine"),
	ROW("cost.tokens", DURATION, "20ms", NULL, "1m", NULL, cost_tokens, "and this for 1,000 tokens"),
	ROW("cost.attention", DURATION, "472us", NULL, "1m", NULL, cost_attention, "and this for the square of 1,000 tokens"),
	ROW("cost.handover", DURATION, "10ms", NULL, "1m", NULL, cost_handover, "a hand-over takes this, whatever its length"),
	ROW("cost.transfer", DURATION, "2600us", NULL, "1m", NULL, cost_transfer, "and this for 1,000 tokens"),
	ROW("cost.local", U64, "200", "1", "10000", NULL, cost_local, "a local prefill takes this many percent of the time of one on a prefill engine: its chunks are smaller"),
	ROW("cost.running", DURATION, "5ms", NULL, "1m", NULL, cost_running, "a request that decodes on an engine makes it this much less attractive for the next one"),
	ROW("kvd.socket", PATH, "", NULL, NULL, NULL, kvd_socket, "socket of the daemon that the engines of this node share: prompts are looked up in it, in spaces with kvd's own hashes only (option hash=own of the connector); others count as not there"),
	ROW("kvd.peers", LIST, "", NULL, NULL, NULL, kvd_peers, "nodes of the prefill engines, one for each engine and in the same order, where they are not all on the decode engines' node: peers.name of the daemon there. Not needed with `sequential`"),
	ROW("events.prefill", LIST, "", NULL, NULL, NULL, events_prefill, "ZeroMQ endpoints of the prefill engines' KV events, one for each engine and in the same order, as tcp://10.0.0.1:5557, no names (vLLM's --kv-events-config); they tell what an engine has in its own cache. None: it counts as empty"),
	ROW("events.decode", LIST, "", NULL, NULL, NULL, events_decode, "those of the decode engines"),
	ROW("events.blocks", U64, "262144", "1", "16777216", NULL, events_blocks, "blocks of an engine's own cache that are known at a time, up to 64 bytes each; more count as not there"),
	ROW("limits.body", SIZE, "16MiB", "1KiB", "1GiB", NULL, limits_body, "bytes of a request's body"),
	ROW("limits.bodies", SIZE, "512MiB", "1KiB", NULL, NULL, limits_bodies, "bytes of the bodies of all requests, unfinished ones too; what comes beyond them gets the status 503"),
	ROW("limits.tokens", U64, "1048576", "1", "268435456", NULL, limits_tokens, "token ids of a prompt; more get the status 413"),
	ROW("limits.headers", SIZE, "32KiB", "1KiB", "1MiB", NULL, limits_headers, "bytes of a request's headers"),
	ROW("limits.connections", U64, "1024", "8", "65536", NULL, limits_connections, "connections of clients; a new one beyond them ends the oldest that has no request running"),
	ROW("limits.requests", U64, "512", "1", "65536", NULL, limits_requests, "requests at a time; more get the status 503"),
	ROW("limits.answer", SIZE, "64MiB", "1KiB", "1GiB", NULL, limits_answer, "bytes of an answer that is not streamed, kept until it has ended, so that its request can be sent again. What is longer is passed on as it comes"),
	ROW("limits.answers", SIZE, "512MiB", "1KiB", NULL, NULL, limits_answers, "bytes of such answers of all requests. An answer that finds no room is passed on as it comes; one that the proxy reads counts as failed"),
	ROW("limits.stream", SIZE, "256KiB", "4KiB", "64MiB", NULL, limits_stream, "bytes of a stream that wait for a client; then its engine is not read until the client has read"),
	ROW("limits.receive_time", DURATION, "30s", "100ms", "1h", NULL, limits_receive_time, "a connection is closed when no whole request has come in this time since its first byte, or the client has taken nothing of its answer"),
	ROW("limits.idle_time", DURATION, "11m", "100ms", "24h", NULL, limits_idle_time, "a connection that waits for a request is closed after this. Keep it longer than that of a load balancer in front (60 s on AWS, 10 minutes on Google Cloud), which otherwise sends requests on ended connections"),
	ROW("log.level", ENUM, "info", NULL, NULL, "error,warn,info,debug", log_level, "lines above this level are dropped"),
};
/* clang-format on */

const kv_option_table_t kvp_option_table = {rows, sizeof rows / sizeof rows[0], "KVD_PD_PROXY_"};

static kv_status_t fail(kv_option_error_t *error, const char *format, ...) __attribute__((format(printf, 2, 3)));
static kv_status_t fail(kv_option_error_t *error, const char *format, ...)
{
	va_list args;

	memset(error, 0, sizeof *error);
	va_start(args, format);
	vsnprintf(error->text, sizeof error->text, format, args);
	va_end(args);

	return KV_ERR_CONFIG;
}

size_t kvp_options_word(const char *list, uint32_t n, char out[KVP_URL_MAX + 1])
{
	size_t len;

	for (; n > 0; n--) {
		list = strchr(list, ',');
		if (!list) {
			return 0;
		}
		list++;
	}
	len = strcspn(list, ",");
	while (len > 0 && list[len - 1] == '/') {
		len--;
	}
	snprintf(out, KVP_URL_MAX + 1, "%.*s", (int)len, list);

	return len;
}

static kv_status_t check_urls(const char *name, const char *list, uint32_t *p_count, kv_option_error_t *error)
{
	char url[KVP_URL_MAX + 1];
	size_t len;

	for (uint32_t i = 0; (len = kvp_options_word(list, i, url)) > 0; i++) {
		const char *host = strstr(url, "://");

		if (len > KVP_URL_MAX || !host || host[3] == '\0' || strpbrk(url, "?#@ \t\"\\") ||
		    (strncmp(url, "http://", 7) != 0 && strncmp(url, "https://", 8) != 0)) {
			return fail(error, "%s: \"%s\" is not a base URL such as http://10.0.0.1:8000", name, url);
		}
		(*p_count)++;
	}

	return KV_OK;
}

static kv_status_t check_endpoints(const char *name, const char *list, uint32_t engines, kv_option_error_t *error)
{
	char endpoint[KVP_URL_MAX + 1];
	uint32_t n = 0;

	for (size_t len; (len = kvp_options_word(list, n, endpoint)) > 0; n++) {
		if (len > KVP_URL_MAX || kvp_endpoint_check(endpoint) != KV_OK) {
			return fail(error, "%s: \"%s\" is not an endpoint such as tcp://10.0.0.1:5557", name, endpoint);
		}
	}

	return n == 0 || n == engines
		       ? KV_OK
		       : fail(error, "%s: %u endpoints for %u engines; give one for each, or none", name, n, engines);
}

static kv_status_t check_peers(const char *list, uint32_t engines, kv_option_error_t *error)
{
	static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
	char peer[KVP_URL_MAX + 1];
	uint32_t n = 0;

	for (size_t len; (len = kvp_options_word(list, n, peer)) > 0; n++) {
		if (len > KVP_PEER_MAX || peer[strspn(peer, letters)] != '\0') {
			return fail(error, "kvd.peers: \"%s\" is not a name of letters, digits, '-', '_' and '.'",
				    peer);
		}
	}

	return n == 0 || n == engines
		       ? KV_OK
		       : fail(error, "kvd.peers: %u names for %u prefill engines; give one for each, or none", n,
			      engines);
}

static int is_loopback(const char *listen)
{
	return strncmp(listen, "127.", 4) == 0 || strncmp(listen, "localhost:", 10) == 0 ||
	       strncmp(listen, "[::1]:", 6) == 0;
}

static kv_status_t check(const kvp_options_t *options, kv_option_error_t *error)
{
	const char *colon = strrchr(options->http_listen, ':');
	uint32_t prefills = 0, decodes = 0;
	uint64_t port = 0;
	kv_status_t status;

	if (!colon || kv_parse_u64(colon + 1, &port) != KV_OK || port > 65535) {
		return fail(error, "http.listen: \"%s\" is not host:port", options->http_listen);
	}
	if (!options->http_allow_remote && !is_loopback(options->http_listen)) {
		return fail(error,
			    "http.listen: \"%s\" can be reached from other machines; use 127.0.0.1, or set "
			    "http.allow_remote",
			    options->http_listen);
	}
	status = check_urls("prefill", options->prefill, &prefills, error);
	if (status == KV_OK) {
		status = check_urls("decode", options->decode, &decodes, error);
	}
	if (status == KV_OK && decodes == 0) {
		status = fail(error, "decode: at least one engine is needed, as --decode=http://10.0.0.1:8000");
	}
	if (status == KV_OK && prefills + decodes > KVP_ENGINES_MAX) {
		status = fail(error, "prefill and decode: at most %u engines together", KVP_ENGINES_MAX);
	}
	if (status == KV_OK) {
		status = check_endpoints("events.prefill", options->events_prefill, prefills, error);
	}
	if (status == KV_OK) {
		status = check_endpoints("events.decode", options->events_decode, decodes, error);
	}
	if (status == KV_OK) {
		status = check_peers(options->kvd_peers, prefills, error);
	}

	return status;
}

static const char help[] =
	"kvd-pd-proxy: sends requests of the OpenAI API to prefill and decode engines that share KV through kvd\n\n"
	"usage: kvd-pd-proxy [--config FILE] --decode=URL,... [--prefill=URL,...] [--NAME=VALUE ...]\n"
	"  --check-config       read the configuration, say what is wrong, start nothing\n"
	"  --describe-options   every option with its default and meaning\n"
	"  --options-page       options and metrics as Markdown (docs/pd-proxy.md)\n"
	"  --version            print the version\n"
	"  --help               print this\n\n"
	"Order: default < file < environment (KVD_PD_PROXY_SKIP_TOKENS) < command line (--skip.tokens=256). A switch\n"
	"without a value is on (--sequential).\n";

static void print_page(void)
{
	printf("# kvd-pd-proxy: options and metrics\n\n"
	       "<!-- Made by `kvd-pd-proxy --options-page` from proxy/options.c and proxy/metric_list.h. Change that, "
	       "then `make docs`. -->\n\n"
	       "Each option with its values and its default. `skip.tokens` is `tokens` in the group `skip` of the file, "
	       "`KVD_PD_PROXY_SKIP_TOKENS` in the\n"
	       "environment and `--skip.tokens=256` on the command line; the later source wins. Sizes have a unit "
	       "(`64KiB`, `1.5GiB`) or are bytes;\n"
	       "durations have one (`250us`, `20ms`, `1.5s`, `10m`). A list is words separated by commas, 511 bytes at "
	       "most.\n");
	kv_options_page(&kvp_option_table, stdout);
	kvp_metrics_page(stdout);
}

static int show(const char *arg)
{
	if (strcmp(arg, "--version") == 0) {
		kv_version_print("kvd-pd-proxy", "");
	} else if (strcmp(arg, "--help") == 0) {
		printf("%s", help);
	} else if (strcmp(arg, "--describe-options") == 0) {
		kv_options_describe(&kvp_option_table, stdout);
	} else if (strcmp(arg, "--options-page") == 0) {
		print_page();
	} else {
		return 0;
	}

	return 1;
}

/* "--name=value", or "--name" of a switch. */
static kv_status_t assign(const char *arg, kvp_options_t *options, kv_option_error_t *error)
{
	const char *equals = strchr(arg, '=');
	size_t len = equals ? (size_t)(equals - arg) : strlen(arg);
	char name[64];

	if (len < 3 || strncmp(arg, "--", 2) != 0 || len - 2 >= sizeof name) {
		return fail(error, "\"%.100s\" is not an option; options are --name=value (see --help)", arg);
	}
	snprintf(name, sizeof name, "%.*s", (int)len - 2, arg + 2);
	for (size_t i = 0; !equals && i < kvp_option_table.count; i++) {
		if (strcmp(rows[i].name, name) == 0 && rows[i].type != KV_OPTION_BOOL) {
			return fail(error, "--%s has no value; write --%s=VALUE", name, name);
		}
	}

	return kv_options_set(&kvp_option_table, name, equals ? equals + 1 : "on", options, NULL, error);
}

static void warn(const char *sentence)
{
	kv_log(KV_LOG_WARN, "options", "%s", sentence);
}

kv_status_t kvp_options_read(int argc, char **argv, kvp_options_t *options, kvp_action_t *action,
			     kv_option_error_t *error)
{
	kv_status_t status = KV_OK;

	*action = KVP_RUN;
	kv_options_default(&kvp_option_table, options, NULL);
	for (int i = 1; i < argc && status == KV_OK; i++) {
		if (show(argv[i])) {
			*action = KVP_SHOW;
			return KV_OK;
		}
		if (strcmp(argv[i], "--config") == 0 && i + 1 < argc) {
			status = kv_options_file(&kvp_option_table, argv[++i], options, NULL, error);
		} else if (strncmp(argv[i], "--config=", 9) == 0) {
			status = kv_options_file(&kvp_option_table, argv[i] + 9, options, NULL, error);
		}
	}
	if (status == KV_OK) {
		status = kv_options_env(&kvp_option_table, environ, options, NULL, warn, error);
	}
	for (int i = 1; i < argc && status == KV_OK; i++) {
		if (strcmp(argv[i], "--config") == 0) {
			i++;
		} else if (strcmp(argv[i], "--check-config") == 0) {
			*action = KVP_CHECK_CONFIG;
		} else if (strncmp(argv[i], "--config=", 9) != 0) {
			status = assign(argv[i], options, error);
		}
	}

	return status == KV_OK ? check(options, error) : status;
}
