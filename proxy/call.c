/* HTTP calls to engines. */
#include "call.h"

#include "kv/env.h"
#include "options.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#define NS_IN_MS   UINT64_C(1000000)
#define IDLE_MAX_S 4L /* of a connection that gets another call; vLLM ends idle ones after 5 s */

/* ---- libcurl's side -------------------------------------------------------------------------- */

static void mark_changed(kvp_call_t *call)
{
	if (!call->is_changed) {
		call->is_changed = 1;
		TAILQ_INSERT_TAIL(&call->calls->changed, call, link);
	}
}

static int socket_changed(CURL *easy, curl_socket_t fd, int what, void *ctx, void *unused)
{
	kvp_calls_t *calls = ctx;
	uint32_t events = (what & CURL_POLL_IN ? EPOLLIN : 0u) | (what & CURL_POLL_OUT ? EPOLLOUT : 0u);

	(void)easy;
	(void)unused;
	if (what == CURL_POLL_REMOVE) {
		kvp_loop_forget(calls->loop, fd);
		return 0;
	}

	return kvp_loop_watch(calls->loop, KVP_FD_CALL, fd, events) == KV_OK ? 0 : -1;
}

static int timer_changed(CURLM *multi, long timeout_ms, void *ctx)
{
	kvp_calls_t *calls = ctx;

	(void)multi;
	calls->due_ns = timeout_ms < 0    ? UINT64_MAX
			: timeout_ms == 0 ? 0
					  : kv_now_ns(&kv_env_posix) + (uint64_t)timeout_ms * NS_IN_MS;

	return 0;
}

/* ---- what has come --------------------------------------------------------------------------- */

void kvp_calls_keep(kvp_calls_t *calls, size_t from, size_t to)
{
	calls->kept_bytes = calls->kept_bytes - from + to;
	kvp_metric_add(calls->metrics, KVP_M_ANSWER_BYTES, to - from);
}

static int resize(kvp_call_t *call, size_t cap)
{
	char *data = realloc(call->data, cap);

	if (data) {
		kvp_calls_keep(call->calls, call->cap, cap);
		call->data = data;
		call->cap = cap;
	}

	return data != NULL;
}

static void drop_taken(kvp_call_t *call)
{
	if (call->taken > 0) {
		memmove(call->data, call->data + call->taken, call->len - call->taken);
		call->len -= call->taken;
		call->taken = 0;
	}
}

/* A stream has room for what waits of it; other answers have what all calls leave. */
static int make_room(kvp_call_t *call, size_t n)
{
	const size_t others = call->calls->kept_bytes - call->cap;
	size_t need, most = call->pause_bytes + CURL_MAX_WRITE_SIZE;

	drop_taken(call);
	need = call->len + n;
	if (need <= call->cap) {
		return 1;
	}
	if (!call->pause_bytes) {
		most = call->calls->kept_most > others ? call->calls->kept_most - others : 0;
	}

	return need <= most && resize(call, 2 * need < most ? 2 * need : most);
}

static int count_headers(const kvp_call_t *call, const char *name)
{
	struct curl_header *header = NULL;

	return curl_easy_header(call->easy, name, 0, CURLH_HEADER, -1, &header) == CURLHE_OK ? (int)header->amount : 0;
}

/* RFC 9112, 6.3: one length, a number, or none. libcurl takes one of several, and another one for what is too large. */
static int has_right_length(const kvp_call_t *call)
{
	const int lengths = count_headers(call, "Content-Length");
	char length[KVP_LENGTH_MAX + 1];

	kvp_call_length(call, length);

	return lengths == 0 || (lengths == 1 && count_headers(call, "Transfer-Encoding") == 0 && length[0] &&
				strlen(length) < KVP_LENGTH_MAX && strspn(length, "0123456789") == strlen(length));
}

static size_t data_came(char *data, size_t size, size_t n, void *ctx)
{
	kvp_call_t *call = ctx;
	const size_t len = size * n;

	if (call->pause_bytes && call->len - call->taken >= call->pause_bytes) {
		call->paused = 1;
		return CURL_WRITEFUNC_PAUSE;
	}
	if (call->received == 0 && !has_right_length(call)) {
		return 0; /* ends the transfer with an error */
	}
	curl_easy_getinfo(call->easy, CURLINFO_RESPONSE_CODE, &call->status);
	if ((call->max_bytes && call->received + len > call->max_bytes) || !make_room(call, len)) {
		if (call->is_passed) {
			call->is_full = call->paused = 1;
			mark_changed(call);
			return CURL_WRITEFUNC_PAUSE;
		}
		call->too_big = 1;
		return 0;
	}
	call->received += len;
	memcpy(call->data + call->len, data, len);
	call->len += len;
	call->last_ns = kv_now_ns(&kv_env_posix);
	mark_changed(call);

	return len;
}

static size_t body_wanted(char *out, size_t size, size_t n, void *ctx)
{
	kvp_call_t *call = ctx;
	size_t len = 0;

	while (call->piece < call->body.n && len < size * n) {
		const kvp_span_t *piece = &call->body.at[call->piece];
		const size_t left = piece->len - call->piece_sent, room = size * n - len;
		const size_t some = left < room ? left : room;

		memcpy(out + len, piece->data + call->piece_sent, some);
		len += some;
		call->piece_sent += some;
		if (call->piece_sent == piece->len) {
			call->piece++;
			call->piece_sent = 0;
		}
	}

	return len;
}

static void collect_ended(kvp_calls_t *calls)
{
	CURLMsg *message;
	int left;

	while ((message = curl_multi_info_read(calls->multi, &left))) {
		kvp_call_t *call = NULL;

		if (message->msg == CURLMSG_DONE) {
			CURLcode result = message->data.result;

			curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &call);
			curl_easy_getinfo(message->easy_handle, CURLINFO_RESPONSE_CODE, &call->status);
			call->ended = 1;
			call->result =
				result == CURLE_OK && !has_right_length(call) ? CURLE_WEIRD_SERVER_REPLY : result;
			mark_changed(call);
		}
	}
}

static void socket_ready(void *ctx, int fd, uint32_t events)
{
	kvp_calls_t *calls = ctx;
	int running, what = (events & EPOLLIN ? CURL_CSELECT_IN : 0) | (events & EPOLLOUT ? CURL_CSELECT_OUT : 0) |
			    (events & (EPOLLERR | EPOLLHUP) ? CURL_CSELECT_ERR : 0);

	curl_multi_socket_action(calls->multi, fd, what, &running);
}

/* ---- all calls ------------------------------------------------------------------------------- */

kv_status_t kvp_calls_open(kvp_calls_t *calls, kvp_loop_t *loop, uint32_t connections)
{
	calls->loop = loop;
	calls->due_ns = UINT64_MAX;
	TAILQ_INIT(&calls->changed);
	loop->handlers[KVP_FD_CALL].ready = socket_ready;
	loop->handlers[KVP_FD_CALL].ctx = calls;
	calls->multi = curl_multi_init();
	if (!calls->multi) {
		return KV_ERR_NOMEM;
	}
	curl_multi_setopt(calls->multi, CURLMOPT_SOCKETFUNCTION, socket_changed);
	curl_multi_setopt(calls->multi, CURLMOPT_SOCKETDATA, calls);
	curl_multi_setopt(calls->multi, CURLMOPT_TIMERFUNCTION, timer_changed);
	curl_multi_setopt(calls->multi, CURLMOPT_TIMERDATA, calls);
	curl_multi_setopt(calls->multi, CURLMOPT_MAXCONNECTS, (long)connections);

	return KV_OK;
}

void kvp_calls_close(kvp_calls_t *calls)
{
	if (calls->multi) {
		curl_multi_cleanup(calls->multi);
		calls->multi = NULL;
	}
}

void kvp_calls_dispatch(kvp_calls_t *calls, uint64_t now_ns)
{
	kvp_call_t *call;
	int running;

	if (calls->due_ns <= now_ns) {
		calls->due_ns = UINT64_MAX;
		curl_multi_socket_action(calls->multi, CURL_SOCKET_TIMEOUT, 0, &running);
	}
	collect_ended(calls);
	while ((call = TAILQ_FIRST(&calls->changed))) {
		TAILQ_REMOVE(&calls->changed, call, link);
		call->is_changed = 0;
		call->notify(call->ctx, call);
	}
}

/* ---- one call -------------------------------------------------------------------------------- */

static int add_header(kvp_call_t *call, const char *line)
{
	struct curl_slist *longer = curl_slist_append(call->headers, line);

	call->headers = longer ? longer : call->headers;

	return longer != NULL;
}

static int add_headers(kvp_call_t *call, const kvp_call_config_t *config)
{
	const int has_type = !config->is_json && kvp_headers_find(config->headers, "Content-Type");
	const int has_id = !config->id || kvp_headers_find(config->headers, "X-Request-Id");
	char id[128];
	int added = 1;

	for (const struct curl_slist *at = config->headers; at; at = at->next) {
		if (!(config->is_json && kvp_header_is(at->data, "Content-Type")) &&
		    !(config->is_read && kvp_header_is(at->data, "Accept-Encoding"))) {
			added &= add_header(call, at->data);
		}
	}
	if (!has_type) { /* libcurl would write another one */
		added &= add_header(call, config->is_json ? "Content-Type: application/json" : "Content-Type:");
	}
	if (!has_id) {
		snprintf(id, sizeof id, "X-Request-Id: %s", config->id);
		added &= add_header(call, id);
	}

	return added && add_header(call, "Expect:");
}

static void set_up(kvp_call_t *call, const kvp_call_config_t *config, const char *url)
{
	CURL *easy = call->easy;

	curl_easy_setopt(easy, CURLOPT_URL, url);
	curl_easy_setopt(easy, CURLOPT_PATH_AS_IS, 1L);
	curl_easy_setopt(easy, CURLOPT_PRIVATE, call);
	curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
	curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
	curl_easy_setopt(easy, CURLOPT_PROXY, "");
	curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
	curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, call->error);
	curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, data_came);
	curl_easy_setopt(easy, CURLOPT_WRITEDATA, call);
	curl_easy_setopt(easy, CURLOPT_HTTPHEADER, call->headers);
	curl_easy_setopt(easy, CURLOPT_MAXAGE_CONN, IDLE_MAX_S);
	curl_easy_setopt(easy, CURLOPT_FRESH_CONNECT, (long)config->is_fresh);
	curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, (long)(config->connect_timeout_ns / NS_IN_MS));
	curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, (long)(config->timeout_ns / NS_IN_MS));
	if (config->body) {
		curl_off_t len = 0;

		for (uint32_t i = 0; i < call->body.n; i++) {
			len += (curl_off_t)call->body.at[i].len;
		}
		/* On a connection that was used before, libcurl repeats what got no answer, but for a body that it
		 * cannot rewind: so no engine computes a request twice. */
		curl_easy_setopt(easy, CURLOPT_POST, 1L);
		curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, len);
		curl_easy_setopt(easy, CURLOPT_READFUNCTION, body_wanted);
		curl_easy_setopt(easy, CURLOPT_READDATA, call);
	}
	if (config->method && strcmp(config->method, "HEAD") == 0) {
		curl_easy_setopt(easy, CURLOPT_NOBODY, 1L);
	} else if (config->method) {
		curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, config->method);
	}
}

kvp_call_t *kvp_call_start(kvp_calls_t *calls, const kvp_call_config_t *config)
{
	kvp_call_t *call = calloc(1, sizeof *call);
	char *url = NULL;

	if (!call) {
		free(config->body ? config->body->tail : NULL);
		return NULL;
	}
	call->calls = calls;
	if (config->body) {
		call->body = *config->body;
	}
	call->max_bytes = config->max_bytes;
	call->is_passed = config->is_passed;
	call->notify = config->notify;
	call->ctx = config->ctx;
	call->started_ns = call->last_ns = kv_now_ns(&kv_env_posix);
	call->easy = curl_easy_init();
	if (call->easy && add_headers(call, config) && asprintf(&url, "%s%s", config->url, config->path) >= 0) {
		set_up(call, config, url);
		free(url);
		if (curl_multi_add_handle(calls->multi, call->easy) == CURLM_OK) {
			return call;
		}
	}
	kvp_call_end(call);

	return NULL;
}

void kvp_call_end(kvp_call_t *call)
{
	if (!call) {
		return;
	}
	if (call->is_changed) {
		TAILQ_REMOVE(&call->calls->changed, call, link);
	}
	if (call->easy) {
		curl_multi_remove_handle(call->calls->multi, call->easy);
		curl_easy_cleanup(call->easy);
	}
	curl_slist_free_all(call->headers);
	free(call->body.tail);
	kvp_calls_keep(call->calls, call->cap, 0);
	free(call->data);
	free(call);
}

int kvp_call_has_sent(const kvp_call_t *call)
{
	return call->ended || call->piece == call->body.n;
}

int kvp_call_is_answered(const kvp_call_t *call)
{
	return call->ended && call->result == CURLE_OK && call->status >= 200; /* 101: another protocol, unasked */
}

int kvp_call_is_refused(const kvp_call_t *call)
{
	long error = 0;

	curl_easy_getinfo(call->easy, CURLINFO_OS_ERRNO, &error);

	return call->ended && call->result == CURLE_COULDNT_CONNECT && error != EADDRNOTAVAIL && error != EMFILE &&
	       error != ENFILE && error != ENOBUFS && error != ENOMEM; /* those are faults of this machine */
}

int kvp_call_is_stale(const kvp_call_t *call)
{
	const CURLcode result = call->result;
	long connects = 0;

	curl_easy_getinfo(call->easy, CURLINFO_NUM_CONNECTS, &connects);

	/* The rewind: libcurl has opened another connection to repeat the call there, and must not (set_up()). */
	return call->ended && call->status == 0 &&
	       (result == CURLE_SEND_FAIL_REWIND ||
		(connects == 0 &&
		 (result == CURLE_GOT_NOTHING || result == CURLE_SEND_ERROR || result == CURLE_RECV_ERROR)));
}

const char *kvp_call_type(const kvp_call_t *call)
{
	const char *type = NULL;

	curl_easy_getinfo(call->easy, CURLINFO_CONTENT_TYPE, &type);

	return type ? type : "";
}

struct curl_slist *kvp_call_headers(const kvp_call_t *call)
{
	struct curl_slist *lines = NULL;
	struct curl_header *header = NULL;
	char *connection = NULL;

	for (size_t i = 0; curl_easy_header(call->easy, "Connection", i, CURLH_HEADER, -1, &header) == CURLHE_OK; i++) {
		(void)kvp_headers_join(&connection, header->value);
	}
	for (header = NULL; (header = curl_easy_nextheader(call->easy, CURLH_HEADER, -1, header));) {
		(void)kvp_headers_add(&lines, header->name, header->value, connection);
	}
	free(connection);

	return lines;
}

void kvp_call_length(const kvp_call_t *call, char out[KVP_LENGTH_MAX + 1])
{
	struct curl_header *header = NULL;
	const int is_there = curl_easy_header(call->easy, "Content-Length", 0, CURLH_HEADER, -1, &header) == CURLHE_OK;

	snprintf(out, KVP_LENGTH_MAX + 1, "%s", is_there ? header->value : "");
}

void kvp_call_stream(kvp_call_t *call, size_t pause_bytes)
{
	call->max_bytes = 0;
	call->pause_bytes = pause_bytes;
}

size_t kvp_call_take(kvp_call_t *call, char *out, size_t cap)
{
	size_t n = call->len - call->taken < cap ? call->len - call->taken : cap;

	if (n > 0) {
		memcpy(out, call->data + call->taken, n);
		call->taken += n;
	}
	if (call->paused && call->len - call->taken <= call->pause_bytes / 2) {
		drop_taken(call);
		if (call->cap > call->pause_bytes + CURL_MAX_WRITE_SIZE) { /* it was kept whole */
			(void)resize(call, call->pause_bytes + CURL_MAX_WRITE_SIZE);
		}
		call->paused = 0;
		call->last_ns = kv_now_ns(&kv_env_posix);
		curl_easy_pause(call->easy, CURLPAUSE_CONT); /* data_came() may run within */
	}

	return n;
}

const char *kvp_call_why(const kvp_call_t *call)
{
	if (call->too_big) {
		return "its answer is too large";
	}

	if (call->ended && (call->result == CURLE_WEIRD_SERVER_REPLY || call->result == CURLE_WRITE_ERROR)) {
		return "its answer is malformed";
	}

	return call->error[0] ? call->error : curl_easy_strerror(call->result);
}
