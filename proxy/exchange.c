/* One request of a client and its answer. */
#include "exchange.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#define TEXT_SLACK ((size_t)4096)

/* ---- answers of the proxy itself ------------------------------------------------------------- */

/* `text` is the exchange's from here on; NULL: out of memory, and the answer is empty. */
static void answer(kvp_exchange_t *exchange, unsigned status, const char *type, char *text)
{
	exchange->state = KVP_EXCHANGE_ANSWERS;
	exchange->status = status;
	exchange->type = type;
	exchange->text = text;
	exchange->answer = (kvp_span_t){text, text ? strlen(text) : 0};
	exchange->is_kept &= !exchange->has_body;
}

static void answer_error(kvp_exchange_t *exchange, unsigned status, const char *message)
{
	answer(exchange, status, "application/json", kvp_error_text(message, status));
}

static void drop_body(kvp_exchange_t *exchange)
{
	kvp_requests_hold(exchange->requests, exchange->cap, 0);
	free(exchange->body);
	exchange->body = NULL;
	exchange->len = exchange->cap = 0;
}

/* At a limit. */
static void answer_overloaded(kvp_exchange_t *exchange, unsigned status, const char *message)
{
	kvp_metric_add(exchange->requests->metrics, KVP_M_OVERLOADED, 1);
	drop_body(exchange);
	answer_error(exchange, status, message);
}

void kvp_exchange_refuse(kvp_exchange_t *exchange, unsigned status, const char *why)
{
	kvp_metric_add(exchange->requests->metrics, KVP_M_MALFORMED, 1);
	drop_body(exchange);
	exchange->is_kept = 0;
	answer_error(exchange, status, why);
}

static void answer_metrics(kvp_exchange_t *exchange)
{
	const kvp_fleet_t *fleet = exchange->requests->fleet;
	kvp_engine_metrics_t engines[KVP_ENGINES_MAX];
	const uint32_t n = fleet->prefill_n + fleet->decode_n;
	size_t cap;
	char *text;

	kvp_fleet_metrics(fleet, engines);
	cap = kvp_metrics_prometheus(exchange->requests->metrics, engines, n, NULL, 0) + TEXT_SLACK;
	text = malloc(cap);
	if (text) {
		kvp_metrics_prometheus(exchange->requests->metrics, engines, n, text, cap);
	}
	answer(exchange, text ? 200 : 503, "text/plain; version=0.0.4; charset=utf-8", text);
}

static void answer_health(kvp_exchange_t *exchange)
{
	kvp_fleet_t *fleet = exchange->requests->fleet;

	if (kvp_fleet_has(fleet, 1, 0)) {
		answer(exchange, 200, "text/plain", strdup("ok\n"));
		return;
	}
	kvp_fleet_look(fleet, 1); /* the next answer knows of an engine that is back */
	answer_error(exchange, 503, "no decode engine is up");
}

/* ---- headers --------------------------------------------------------------------------------- */

static int hex_of(char c)
{
	return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
}

/* The path of a target, with its escapes decoded; "": it is none. */
static char *decode_path(const char *target)
{
	char *path = malloc(strlen(target) + 1), *out = path;

	if (!path) {
		return NULL;
	}
	for (; *target && *target != '?'; target++) {
		*out = *target;
		if (*target == '%') {
			const int high = hex_of(target[1]), low = high >= 0 ? hex_of(target[2]) : -1;

			if (low < 0 || (high | low) == 0) {
				out = path;
				break;
			}
			*out = (char)(high << 4 | low);
			target += 2;
		}
		out++;
	}
	*out = '\0';

	return path;
}

/* Calls that are not for clients, or for each engine alone, are outside of /v1/, but for these two. */
static int is_passed(const char *path)
{
	return strncmp(path, "/v1/", 4) == 0 && !strstr(path, "/..") && strcmp(path, "/v1/load_lora_adapter") != 0 &&
	       strcmp(path, "/v1/unload_lora_adapter") != 0;
}

static int is_get(const kvp_head_t *head)
{
	return strcmp(head->method, "GET") == 0 || strcmp(head->method, "HEAD") == 0;
}

/* Answer what needs no engine and no body, or is refused for its headers. */
static void check_head(kvp_exchange_t *exchange, const kvp_head_t *head, const char *path)
{
	const char *expect = kvp_head_find(head, "Expect"), *coding = kvp_head_find(head, "Content-Encoding");
	const int is_post = strcmp(head->method, "POST") == 0;
	const int is_metrics = strcmp(path, "/metrics") == 0;

	exchange->api = is_post && strcmp(path, "/v1/chat/completions") == 0 ? KVP_CHAT
			: is_post && strcmp(path, "/v1/completions") == 0    ? KVP_COMPLETIONS
									     : KVP_OTHER;
	if (strcmp(head->method, "CONNECT") == 0 || strcmp(head->method, "TRACE") == 0) {
		answer_error(exchange, 501, "this method is not served");
	} else if (is_metrics || strcmp(path, "/health") == 0) {
		if (!is_get(head)) {
			answer_error(exchange, 405, "this wants another method");
		} else if (is_metrics) {
			answer_metrics(exchange);
		} else {
			answer_health(exchange);
		}
	} else if (!*path) {
		answer_error(exchange, 400, "the target has an escape that is none");
	} else if (!is_passed(path)) {
		answer_error(exchange, 404, "there are /v1/..., GET /health and GET /metrics");
	} else if (expect && strcasecmp(expect, "100-continue") != 0) {
		answer_error(exchange, 417, "nothing but 100-continue can be expected");
	} else if (exchange->api != KVP_OTHER && coding && strcasecmp(coding, "identity") != 0) {
		answer_error(exchange, 415, "the proxy reads this body: it has to come without Content-Encoding");
	} else {
		kvp_exchange_announce(exchange, head->length);
	}
}

static int keep_headers(kvp_exchange_t *exchange, const kvp_head_t *head)
{
	const char *field = *head->fields ? head->fields : NULL;
	char *connection = NULL, via[64];
	int is_kept = 1;

	for (const char *at = field; at; at = kvp_head_next(at)) {
		if (strcasecmp(at, "Connection") == 0) {
			is_kept &= kvp_headers_join(&connection, kvp_head_value(at));
		}
	}
	for (; field; field = kvp_head_next(field)) {
		is_kept &= kvp_headers_add(&exchange->headers, field, kvp_head_value(field), connection);
	}
	free(connection);
	snprintf(via, sizeof via, "1.%d kvd-pd-proxy", head->minor);

	return is_kept && kvp_headers_add(&exchange->headers, "Via", via, NULL);
}

kvp_exchange_t *kvp_exchange_begin(kvp_requests_t *requests, const kvp_head_t *head, unsigned fault,
				   void (*wake)(void *ctx), void *ctx)
{
	kvp_exchange_t *exchange = calloc(1, sizeof *exchange);
	char *path;

	if (!exchange) {
		return NULL;
	}
	exchange->requests = requests;
	exchange->wake = wake;
	exchange->ctx = ctx;
	exchange->minor = head->minor;
	if (fault) {
		kvp_exchange_refuse(exchange, fault, head->refuse);
		return exchange;
	}
	exchange->is_kept = head->is_kept;
	exchange->has_body = head->is_chunked || head->length > 0;
	exchange->method = strdup(head->method);
	exchange->target = strdup(head->target);
	path = decode_path(head->target);
	if (!path || !exchange->method || !exchange->target || !keep_headers(exchange, head)) {
		free(path);
		kvp_exchange_end(exchange);
		return NULL;
	}
	check_head(exchange, head, path);
	free(path);

	return exchange;
}

/* ---- bodies ---------------------------------------------------------------------------------- */

/* Room for `need` bytes: twice of it, but no more than a body may have. 0: the exchange has its answer. */
static int grow_body(kvp_exchange_t *exchange, size_t need)
{
	const kvp_options_t *options = exchange->requests->options;
	const size_t most =
		options->limits_body < options->limits_bodies ? options->limits_body : options->limits_bodies;
	const size_t cap = 2 * need < most ? 2 * need : most;
	char *grown;

	if (need > most) {
		answer_overloaded(exchange, 413, "the body is larger than limits.body or limits.bodies");
		return 0;
	}
	if (!kvp_requests_hold(exchange->requests, exchange->cap, cap)) {
		answer_overloaded(exchange, 503,
				  "the bodies of all requests have reached limits.bodies; please try again");
		return 0;
	}
	grown = realloc(exchange->body, cap);
	if (!grown) {
		kvp_requests_hold(exchange->requests, cap, exchange->cap);
		answer_overloaded(exchange, 503, "the proxy has no memory for this request");
		return 0;
	}
	exchange->body = grown;
	exchange->cap = cap;

	return 1;
}

void kvp_exchange_take(kvp_exchange_t *exchange, const char *data, size_t len)
{
	if (exchange->len + len > exchange->cap && !grow_body(exchange, exchange->len + len)) {
		return;
	}
	memcpy(exchange->body + exchange->len, data, len);
	exchange->len += len;
}

void kvp_exchange_announce(kvp_exchange_t *exchange, uint64_t more)
{
	if (more > exchange->requests->options->limits_body) {
		answer_overloaded(exchange, 413, "the body is larger than limits.body");
	}
}

/* The body as a request has it: as large as it is. */
static kvp_span_t hand_body(kvp_exchange_t *exchange)
{
	kvp_span_t body = {exchange->body, exchange->len};
	char *less = exchange->len > 0 ? realloc(exchange->body, exchange->len) : NULL;

	if (less) {
		body.data = less;
	}
	kvp_requests_hold(exchange->requests, exchange->cap, exchange->len);
	exchange->body = NULL;
	exchange->cap = 0;

	return body;
}

void kvp_exchange_run(kvp_exchange_t *exchange)
{
	const kvp_request_config_t config = {.api = exchange->api,
					     .data = hand_body(exchange),
					     .method = exchange->method,
					     .target = exchange->target,
					     .headers = exchange->headers,
					     .wake = exchange->wake,
					     .ctx = exchange->ctx};

	exchange->has_body = 0;
	exchange->headers = NULL;
	exchange->state = KVP_EXCHANGE_WAITS;
	exchange->request = kvp_request_begin(exchange->requests, &config);
	if (!exchange->request) {
		answer_overloaded(exchange, 503, "the proxy has no memory for this request");
	}
}

/* ---- what the client gets -------------------------------------------------------------------- */

int kvp_exchange_is_answered(kvp_exchange_t *exchange)
{
	const kvp_answer_t *found = exchange->request ? &exchange->request->answer : NULL;

	if (exchange->state == KVP_EXCHANGE_WAITS && found && found->kind != KVP_ANSWER_NONE) {
		exchange->state = KVP_EXCHANGE_ANSWERS;
		exchange->status = found->status;
		exchange->type = found->is_own ? "application/json" : NULL;
		exchange->is_stream = found->kind == KVP_ANSWER_STREAM;
		if (!exchange->is_stream) {
			exchange->answer = (kvp_span_t){found->text, found->len};
		}
	}

	return exchange->state == KVP_EXCHANGE_ANSWERS;
}

static const char *reason_of(unsigned status)
{
	static const struct {
		unsigned status;
		const char *reason;
	} reasons[] = {{200, "OK"},
		       {400, "Bad Request"},
		       {404, "Not Found"},
		       {405, "Method Not Allowed"},
		       {413, "Content Too Large"},
		       {414, "URI Too Long"},
		       {415, "Unsupported Media Type"},
		       {417, "Expectation Failed"},
		       {431, "Request Header Fields Too Large"},
		       {501, "Not Implemented"},
		       {502, "Bad Gateway"},
		       {503, "Service Unavailable"},
		       {505, "HTTP Version Not Supported"}};

	for (size_t i = 0; i < sizeof reasons / sizeof reasons[0]; i++) {
		if (reasons[i].status == status) {
			return reasons[i].reason;
		}
	}

	return "";
}

/* Headers that say how long the answer is, and what comes of the connection. */
static void write_framing(kvp_exchange_t *exchange, FILE *out)
{
	const int is_head = exchange->method && strcmp(exchange->method, "HEAD") == 0;
	const int is_empty = exchange->status == 204 || exchange->status == 304; /* without a length, too */
	const char *length = exchange->request ? exchange->request->answer.length : "";

	if (is_head && exchange->request && !exchange->request->answer.is_own) {
		exchange->is_stream = 0;
		if (*length && !is_empty) {
			fprintf(out, "Content-Length: %s\r\n", length); /* of what GET would get */
		}
	} else if (exchange->is_stream && *length) {
		fprintf(out, "Content-Length: %s\r\n", length);
	} else if (exchange->is_stream && exchange->minor > 0) {
		exchange->is_chunked = 1;
		fprintf(out, "Transfer-Encoding: chunked\r\n");
	} else if (exchange->is_stream) {
		exchange->is_kept = 0; /* its end is the answer's */
	} else if (!is_empty) {
		fprintf(out, "Content-Length: %zu\r\n", exchange->answer.len);
	}
	if (is_head || is_empty) {
		exchange->answer.len = 0;
	}
	if (!exchange->is_kept) {
		fprintf(out, "Connection: close\r\n");
	} else if (exchange->minor == 0) {
		fprintf(out, "Connection: keep-alive\r\n");
	}
}

static void write_own(const kvp_exchange_t *exchange, FILE *out)
{
	fprintf(out, "Content-Type: %s\r\n", exchange->type);
	if (exchange->status == 503) {
		fprintf(out, "Retry-After: 1\r\n");
	} else if (exchange->status == 405) {
		fprintf(out, "Allow: GET, HEAD\r\n");
	} else if (exchange->status == 415) {
		fprintf(out, "Accept-Encoding: identity\r\n");
	}
}

char *kvp_exchange_head(kvp_exchange_t *exchange, size_t *len)
{
	const struct curl_slist *headers = exchange->request ? exchange->request->answer.headers : NULL;
	const time_t now = time(NULL);
	struct tm tm;
	char *text = NULL, date[40];
	FILE *out = open_memstream(&text, len);

	if (!out) {
		return NULL;
	}
	fprintf(out, "HTTP/1.1 %u %s\r\n", exchange->status, reason_of(exchange->status));
	if (!kvp_headers_find(headers, "Date") && gmtime_r(&now, &tm)) {
		strftime(date, sizeof date, "%a, %d %b %Y %H:%M:%S GMT", &tm);
		fprintf(out, "Date: %s\r\n", date);
	}
	if (exchange->type) {
		write_own(exchange, out);
	} else if (exchange->is_stream && !kvp_headers_find(headers, "Cache-Control")) {
		fprintf(out, "Cache-Control: no-cache\r\n");
	}
	for (; headers; headers = headers->next) {
		const size_t name = strcspn(headers->data, ":;");

		fprintf(out, "%.*s:%s\r\n", (int)name, headers->data, headers->data + name + 1);
	}
	write_framing(exchange, out);
	fprintf(out, "\r\n");
	if (fclose(out) != 0) {
		free(text);
		return NULL;
	}

	return text;
}

void kvp_exchange_end(kvp_exchange_t *exchange)
{
	if (!exchange) {
		return;
	}
	if (exchange->request) {
		kvp_request_end(exchange->request);
	}
	drop_body(exchange);
	curl_slist_free_all(exchange->headers);
	free(exchange->method);
	free(exchange->target);
	free(exchange->text);
	free(exchange);
}
