/* The side of the clients. */
#include "server.h"

#include "kv/conn.h"
#include "kv/env.h"

#include <errno.h>
#include <limits.h>
#include <microhttpd.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define SPARE      16u /* connections that are shut down and not closed yet */
#define READ_AHEAD 4u  /* times its limit a body is read, so that the answer is not lost with the connection */
#define TEXT_SLACK ((size_t)4096)
#define BLOCK      ((size_t)16 * 1024) /* of a stream */
#define NS_IN_S    UINT64_C(1000000000)

typedef struct exchange exchange_t;

/* A connection of a client. */
typedef struct client {
	kv_conn_t conn;       /* first: a conn is its client. Busy: a whole request has come, and is not answered */
	exchange_t *exchange; /* of that request */
} client_t;

struct kvp_server {
	kvp_requests_t *requests;
	const kvp_options_t *options;
	kvp_metrics_t *metrics;
	kvp_loop_t *loop;
	struct MHD_Daemon *daemon;
	kv_conns_t conns;
	int epoll_fd, listen_fd;
};

/* Why a body is not kept. What comes of it is read and dropped: the library takes no answer before its end. */
typedef enum body_fate {
	BODY_KEPT,
	BODY_TOO_LARGE, /* for a limit of its own */
	BODY_NO_ROOM,   /* beside those of the other requests */
	BODY_OUT_OF_MEMORY
} body_fate_t;

/* One request and its answer. */
struct exchange {
	kvp_server_t *server;
	client_t *client;
	struct MHD_Connection *connection;
	kvp_request_t *request;
	kvp_api_t api;
	char *method, *target;      /* as the client has written it */
	struct curl_slist *headers; /* of the request that pass */
	int is_own;                 /* /health or /metrics */
	unsigned status;            /* of what is refused for its headers; 0: it is not */
	const char *why;
	char *body;
	size_t len, cap;  /* cap counts against limits.bodies */
	body_fate_t fate; /* of what has come of the body */
	int has_headers, is_suspended, is_client_gone;
};

/* ---- connections ----------------------------------------------------------------------------- */

static void connection_changed(void *cls, struct MHD_Connection *connection, void **socket_context,
			       enum MHD_ConnectionNotificationCode change)
{
	const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
	kvp_server_t *server = cls;
	client_t *client = *socket_context;

	if (change == MHD_CONNECTION_NOTIFY_STARTED) {
		*socket_context = client = calloc(1, sizeof *client);
		if (!client) {
			shutdown(info->connect_fd, SHUT_RDWR);
			return;
		}
		kvp_metric_add(server->metrics, KVP_M_CONNECTIONS, 1);
		if (kv_conns_add(&server->conns, &client->conn, info->connect_fd, kv_now_ns(&kv_env_posix))) {
			kvp_metric_add(server->metrics, KVP_M_CONNECTIONS_ENDED, 1);
		}
	} else if (client) {
		kv_conns_remove(&server->conns, &client->conn);
		kvp_metric_sub(server->metrics, KVP_M_CONNECTIONS, 1);
		free(client);
		*socket_context = NULL;
	}
}

/* ---- suspension ------------------------------------------------------------------------------ */

static void suspend(exchange_t *exchange)
{
	exchange->is_suspended = 1;
	MHD_suspend_connection(exchange->connection);
}

static void wake(void *ctx)
{
	exchange_t *exchange = ctx;

	if (exchange->is_suspended) {
		exchange->is_suspended = 0;
		MHD_resume_connection(exchange->connection);
	}
}

static void end_client(kv_conn_t *conn)
{
	exchange_t *exchange = ((client_t *)conn)->exchange;

	exchange->is_client_gone = 1;
	wake(exchange);
}

/* A client's socket has ended. The event may be of one that was closed since, whose number has a new owner: look. */
static void client_ended(void *ctx, int fd, uint32_t events)
{
	kvp_server_t *server = ctx;
	struct pollfd poll_fd = {.fd = fd, .events = POLLRDHUP};
	kv_conn_t *conn;

	(void)events;
	if (poll(&poll_fd, 1, 0) <= 0 || !(poll_fd.revents & (POLLRDHUP | POLLHUP | POLLERR))) {
		return;
	}
	TAILQ_FOREACH(conn, &server->conns.busy, link)
	{
		if (conn->fd == fd) {
			kvp_loop_forget(server->loop, fd);
			end_client(conn);
			return;
		}
	}
}

/* ---- answers --------------------------------------------------------------------------------- */

static enum MHD_Result queue_response(struct MHD_Connection *connection, unsigned status,
				      const struct curl_slist *headers, struct MHD_Response *response)
{
	enum MHD_Result result = MHD_NO;
	char name[256];

	if (!response) {
		return MHD_NO;
	}
	for (; headers; headers = headers->next) {
		const size_t len = strcspn(headers->data, ":;");

		if (len < sizeof name && headers->data[len] == ':') {
			snprintf(name, sizeof name, "%.*s", (int)len, headers->data);
			(void)MHD_add_response_header(response, name, headers->data + len + 2);
		}
	}
	result = MHD_queue_response(connection, status, response);
	MHD_destroy_response(response);

	return result;
}

/* An answer of the proxy itself. */
static enum MHD_Result answer(struct MHD_Connection *connection, unsigned status, const char *type, const char *text)
{
	struct MHD_Response *response =
		MHD_create_response_from_buffer(strlen(text), (void *)(uintptr_t)text, MHD_RESPMEM_MUST_COPY);

	if (response) {
		MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
	}
	if (response && status == MHD_HTTP_SERVICE_UNAVAILABLE) {
		MHD_add_response_header(response, MHD_HTTP_HEADER_RETRY_AFTER, "1");
	}
	if (response && status == MHD_HTTP_METHOD_NOT_ALLOWED) {
		MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
	}
	if (response && status == MHD_HTTP_UNSUPPORTED_MEDIA_TYPE) {
		MHD_add_response_header(response, MHD_HTTP_HEADER_ACCEPT_ENCODING, "identity");
	}

	return queue_response(connection, status, NULL, response);
}

static enum MHD_Result answer_error(struct MHD_Connection *connection, unsigned status, const char *message)
{
	char *text = kvp_error_text(message, status);
	enum MHD_Result result = text ? answer(connection, status, "application/json", text) : MHD_NO;

	free(text);

	return result;
}

static enum MHD_Result answer_metrics(const kvp_server_t *server, struct MHD_Connection *connection)
{
	const kvp_fleet_t *fleet = server->requests->fleet;
	kvp_engine_metrics_t engines[KVP_ENGINES_MAX];
	const uint32_t n = fleet->prefill_n + fleet->decode_n;
	enum MHD_Result result = MHD_NO;
	size_t cap, len;
	char *text;

	kvp_fleet_metrics(fleet, engines);
	cap = kvp_metrics_prometheus(server->metrics, engines, n, NULL, 0) + TEXT_SLACK;
	text = malloc(cap);
	if (text) {
		len = kvp_metrics_prometheus(server->metrics, engines, n, text, cap);
		result = len < cap ? answer(connection, MHD_HTTP_OK, "text/plain; version=0.0.4; charset=utf-8", text)
				   : MHD_NO;
	}
	free(text);

	return result;
}

static enum MHD_Result answer_get(const kvp_server_t *server, struct MHD_Connection *connection, const char *url)
{
	if (strcmp(url, "/metrics") == 0) {
		return answer_metrics(server, connection);
	}

	if (!kvp_fleet_has(server->requests->fleet, 1, 0)) {
		kvp_fleet_look(server->requests->fleet, 1); /* the next answer knows of an engine that is back */
	}

	return kvp_fleet_has(server->requests->fleet, 1, 0)
		       ? answer(connection, MHD_HTTP_OK, "text/plain", "ok\n")
		       : answer_error(connection, MHD_HTTP_SERVICE_UNAVAILABLE, "no decode engine is up");
}

static ssize_t read_stream(void *ctx, uint64_t at, char *out, size_t cap)
{
	exchange_t *exchange = ctx;
	int64_t n;

	(void)at;
	if (exchange->is_client_gone) {
		return MHD_CONTENT_READER_END_WITH_ERROR;
	}
	n = kvp_request_read(exchange->request, out, cap);
	if (n == 0) {
		suspend(exchange);
	}

	return n > -1 ? (ssize_t)n : n == -1 ? MHD_CONTENT_READER_END_OF_STREAM : MHD_CONTENT_READER_END_WITH_ERROR;
}

static enum MHD_Result answer_request(exchange_t *exchange)
{
	const kvp_answer_t *found = &exchange->request->answer;
	struct MHD_Response *response;

	if (exchange->is_client_gone) {
		return MHD_NO;
	}
	if (found->kind == KVP_ANSWER_NONE) {
		suspend(exchange);
		return MHD_YES;
	}
	if (found->is_own) {
		return answer(exchange->connection, found->status, "application/json", found->text ? found->text : "");
	}
	response = found->kind == KVP_ANSWER_WHOLE
			   ? MHD_create_response_from_buffer(found->len, found->text, MHD_RESPMEM_MUST_COPY)
			   : MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, BLOCK, read_stream, exchange, NULL);
	if (response && found->kind == KVP_ANSWER_STREAM && !kvp_headers_find(found->headers, "Cache-Control")) {
		MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-cache");
	}

	return queue_response(exchange->connection, found->status, found->headers, response);
}

/* ---- requests -------------------------------------------------------------------------------- */

static void drop_body(exchange_t *exchange)
{
	kvp_requests_hold(exchange->server->requests, exchange->cap, 0);
	free(exchange->body);
	exchange->body = NULL;
	exchange->len = exchange->cap = 0;
}

/* Room for `need` bytes: twice of it, but no more than a body may have. */
static body_fate_t grow_body(exchange_t *exchange, size_t need)
{
	const kvp_options_t *options = exchange->server->options;
	const size_t most =
		options->limits_body < options->limits_bodies ? options->limits_body : options->limits_bodies;
	const size_t cap = 2 * need < most ? 2 * need : most;
	char *grown;

	if (need > most) {
		return BODY_TOO_LARGE;
	}
	if (!kvp_requests_hold(exchange->server->requests, exchange->cap, cap)) {
		return BODY_NO_ROOM;
	}
	grown = realloc(exchange->body, cap);
	if (!grown) {
		kvp_requests_hold(exchange->server->requests, cap, exchange->cap);
		return BODY_OUT_OF_MEMORY;
	}
	exchange->body = grown;
	exchange->cap = cap;

	return BODY_KEPT;
}

static void keep_body(exchange_t *exchange, const char *data, size_t len)
{
	if (exchange->fate == BODY_KEPT && exchange->len + len > exchange->cap) {
		exchange->fate = grow_body(exchange, exchange->len + len);
	}
	if (exchange->fate != BODY_KEPT) {
		drop_body(exchange);
		return;
	}
	memcpy(exchange->body + exchange->len, data, len);
	exchange->len += len;
}

static enum MHD_Result refuse_body(const exchange_t *exchange)
{
	kvp_metric_add(exchange->server->metrics, KVP_M_OVERLOADED, 1);

	return exchange->fate == BODY_TOO_LARGE ? answer_error(exchange->connection, MHD_HTTP_CONTENT_TOO_LARGE,
							       "the body is larger than limits.body or limits.bodies")
	       : exchange->fate == BODY_NO_ROOM
		       ? answer_error(exchange->connection, MHD_HTTP_SERVICE_UNAVAILABLE,
				      "the bodies of all requests have reached limits.bodies; please try again")
		       : answer_error(exchange->connection, MHD_HTTP_SERVICE_UNAVAILABLE,
				      "the proxy has no memory for this request");
}

/* The body as a request has it: as large as it is. */
static kvp_span_t hand_body(exchange_t *exchange)
{
	kvp_span_t body = {exchange->body, exchange->len};
	char *less = exchange->len > 0 ? realloc(exchange->body, exchange->len) : NULL;

	if (less) {
		body.data = less;
	}
	kvp_requests_hold(exchange->server->requests, exchange->cap, exchange->len);
	exchange->body = NULL;
	exchange->cap = 0;

	return body;
}

/* The whole body has come. */
static enum MHD_Result begin_request(exchange_t *exchange)
{
	kvp_request_config_t config = {.api = exchange->api,
				       .method = exchange->method,
				       .target = exchange->target,
				       .headers = exchange->headers,
				       .wake = wake,
				       .ctx = exchange};

	if (exchange->fate == BODY_KEPT) {
		config.data = hand_body(exchange);
		exchange->headers = NULL;
		exchange->request = kvp_request_begin(exchange->server->requests, &config);
		exchange->fate = exchange->request ? BODY_KEPT : BODY_OUT_OF_MEMORY;
	}
	if (exchange->fate != BODY_KEPT) {
		return refuse_body(exchange);
	}
	exchange->client->exchange = exchange;
	kv_conns_begin(&exchange->server->conns, &exchange->client->conn);
	(void)kvp_loop_watch(exchange->server->loop, KVP_FD_CLIENT, exchange->client->conn.fd, EPOLLRDHUP);

	return answer_request(exchange);
}

/* The request line has come. */
static void *begin_exchange(void *cls, const char *uri, struct MHD_Connection *connection)
{
	const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
	exchange_t *exchange = calloc(1, sizeof *exchange);

	if (exchange) {
		exchange->server = cls;
		exchange->connection = connection;
		exchange->client = info ? info->socket_context : NULL;
		exchange->target = strdup(uri);
	}

	return exchange;
}

static enum MHD_Result keep_header(void *cls, enum MHD_ValueKind kind, const char *name, const char *value)
{
	exchange_t *exchange = cls;
	const char *connection =
		MHD_lookup_connection_value(exchange->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_CONNECTION);

	(void)kind;
	if (!kvp_headers_add(&exchange->headers, name, value ? value : "", connection)) {
		exchange->fate = BODY_OUT_OF_MEMORY;
	}

	return MHD_YES;
}

/* Calls that are not for clients, or for each engine alone, are outside of /v1/, but for these two. */
static int is_passed(const char *url)
{
	return strncmp(url, "/v1/", 4) == 0 && !strstr(url, "/..") && strcmp(url, "/v1/load_lora_adapter") != 0 &&
	       strcmp(url, "/v1/unload_lora_adapter") != 0;
}

static int is_too_large(const exchange_t *exchange, int is_expected)
{
	const char *length =
		MHD_lookup_connection_value(exchange->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_CONTENT_LENGTH);

	return length &&
	       strtoull(length, NULL, 10) / (is_expected ? 1 : READ_AHEAD) > exchange->server->options->limits_body;
}

/* The status of a request that is refused before its body comes; 0: it is not. */
static unsigned check_headers(const exchange_t *exchange, const char *url, const char **p_why)
{
	const char *expect = MHD_lookup_connection_value(exchange->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_EXPECT);
	const char *coding = kvp_headers_find(exchange->headers, MHD_HTTP_HEADER_CONTENT_ENCODING);

	if (!is_passed(url)) {
		*p_why = "there are /v1/..., GET /health and GET /metrics";
		return MHD_HTTP_NOT_FOUND;
	}
	for (const char *at = exchange->target; *at; at++) {
		if (*at <= ' ' || *at > '~' || *at == '#') {
			*p_why = "the target is no path with a query";
			return MHD_HTTP_BAD_REQUEST;
		}
	}
	if (strcmp(exchange->method, "CONNECT") == 0 || strcmp(exchange->method, "TRACE") == 0) {
		*p_why = "this method is not served";
		return MHD_HTTP_NOT_IMPLEMENTED;
	}
	if (expect && strcasecmp(expect, "100-continue") != 0) {
		*p_why = "nothing but 100-continue can be expected";
		return MHD_HTTP_EXPECTATION_FAILED;
	}
	if (exchange->api != KVP_OTHER && coding && strcasecmp(coding, "identity") != 0) {
		*p_why = "the proxy reads this body: it has to come without Content-Encoding";
		return MHD_HTTP_UNSUPPORTED_MEDIA_TYPE;
	}
	*p_why = "the body is larger than limits.body";

	return is_too_large(exchange, expect != NULL) ? MHD_HTTP_CONTENT_TOO_LARGE : 0;
}

/* An answer before the request's end is its connection's last: only where a body would come in vain. */
static enum MHD_Result answer_now(exchange_t *exchange, const char *url)
{
	if (exchange->status == MHD_HTTP_CONTENT_TOO_LARGE) {
		kvp_metric_add(exchange->server->metrics, KVP_M_OVERLOADED, 1);
	}

	return exchange->status ? answer_error(exchange->connection, exchange->status, exchange->why)
				: answer_get(exchange->server, exchange->connection, url);
}

/* The headers have come. */
static enum MHD_Result take_headers(exchange_t *exchange, const char *url, const char *method)
{
	struct MHD_Connection *connection = exchange->connection;
	const int is_post = strcmp(method, "POST") == 0;
	const char *length = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_CONTENT_LENGTH);

	exchange->api = is_post && strcmp(url, "/v1/chat/completions") == 0 ? KVP_CHAT
			: is_post && strcmp(url, "/v1/completions") == 0    ? KVP_COMPLETIONS
									    : KVP_OTHER;
	exchange->is_own = strcmp(url, "/health") == 0 || strcmp(url, "/metrics") == 0;
	exchange->method = strdup(method);
	if (!exchange->method) {
		return MHD_NO;
	}
	if (!exchange->is_own) {
		MHD_get_connection_values(connection, MHD_HEADER_KIND, keep_header, exchange);
		exchange->status = check_headers(exchange, url, &exchange->why);
	} else if (strcmp(method, "GET") != 0 && strcmp(method, "HEAD") != 0) {
		exchange->status = MHD_HTTP_METHOD_NOT_ALLOWED;
		exchange->why = "this wants another method";
	}

	return exchange->status && ((length && strcmp(length, "0") != 0) ||
				    MHD_lookup_connection_value(connection, MHD_HEADER_KIND,
								MHD_HTTP_HEADER_TRANSFER_ENCODING))
		       ? answer_now(exchange, url)
		       : MHD_YES;
}

static enum MHD_Result handle(void *cls, struct MHD_Connection *connection, const char *url, const char *method,
			      const char *version, const char *upload, size_t *upload_size, void **state)
{
	exchange_t *exchange = *state;

	(void)cls;
	(void)connection;
	(void)version;
	if (!exchange || !exchange->client || !exchange->target) {
		return MHD_NO;
	}
	if (!exchange->has_headers) {
		exchange->has_headers = 1;
		return take_headers(exchange, url, method);
	}
	if (*upload_size > 0) {
		if (!exchange->is_own) {
			keep_body(exchange, upload, *upload_size);
		}
		*upload_size = 0;
		return MHD_YES;
	}
	if (exchange->is_own || exchange->status) {
		return answer_now(exchange, url);
	}

	return exchange->request ? answer_request(exchange) : begin_request(exchange);
}

static void completed(void *cls, struct MHD_Connection *connection, void **state, enum MHD_RequestTerminationCode how)
{
	kvp_server_t *server = cls;
	exchange_t *exchange = *state;
	client_t *client = exchange ? exchange->client : NULL;

	(void)connection;
	(void)how;
	if (!exchange) {
		return;
	}
	if (client && client->exchange) {
		client->exchange = NULL;
		kvp_loop_forget(server->loop, client->conn.fd);
		kv_conns_end(&server->conns, &client->conn, kv_now_ns(&kv_env_posix));
	}
	if (exchange->request) {
		kvp_request_end(exchange->request);
	}
	drop_body(exchange);
	curl_slist_free_all(exchange->headers);
	free(exchange->method);
	free(exchange->target);
	free(exchange);
	*state = NULL;
}

/* ---- open, run, close ------------------------------------------------------------------------ */

static void server_ready(void *ctx, int fd, uint32_t events)
{
	(void)ctx;
	(void)fd;
	(void)events; /* kvp_server_run() follows every wait */
}

static kv_status_t start_daemon(kvp_server_t *server)
{
	const kvp_options_t *options = server->options;
	const union MHD_DaemonInfo *info;

	server->daemon = MHD_start_daemon(
		MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME, 0, NULL, NULL, handle, server, MHD_OPTION_LISTEN_SOCKET,
		(MHD_socket)server->listen_fd, MHD_OPTION_CONNECTION_LIMIT,
		(unsigned)options->limits_connections + SPARE, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
		(size_t)options->limits_headers + BLOCK, MHD_OPTION_CONNECTION_TIMEOUT,
		(unsigned)((options->limits_receive_time + NS_IN_S - 1) / NS_IN_S), MHD_OPTION_NOTIFY_CONNECTION,
		connection_changed, server, MHD_OPTION_NOTIFY_COMPLETED, completed, server, MHD_OPTION_URI_LOG_CALLBACK,
		begin_exchange, server, MHD_OPTION_END);
	if (!server->daemon) {
		return KV_ERR_LIMIT;
	}
	info = MHD_get_daemon_info(server->daemon, MHD_DAEMON_INFO_EPOLL_FD);
	server->epoll_fd = info->epoll_fd;
	server->loop->handlers[KVP_FD_SERVER].ready = server_ready;
	server->loop->handlers[KVP_FD_CLIENT].ready = client_ended;
	server->loop->handlers[KVP_FD_CLIENT].ctx = server;

	return kvp_loop_watch(server->loop, KVP_FD_SERVER, server->epoll_fd, EPOLLIN);
}

kv_status_t kvp_server_open(kvp_requests_t *requests, kvp_loop_t *loop, kvp_server_t **p_server, char *detail,
			    size_t cap)
{
	kvp_server_t *server = calloc(1, sizeof *server);
	kv_status_t status;

	if (!server) {
		return KV_ERR_NOMEM;
	}
	server->requests = requests;
	server->options = requests->options;
	server->metrics = requests->metrics;
	server->loop = loop;
	server->listen_fd = -1;
	kv_conns_init(&server->conns, (uint32_t)server->options->limits_connections);
	status = kv_listen("http.listen", server->options->http_listen, &server->listen_fd, detail, cap);
	if (status == KV_OK) {
		status = start_daemon(server);
		if (status != KV_OK) {
			snprintf(detail, cap, "cannot start the HTTP server: %s", strerror(errno));
		}
	}
	if (status != KV_OK) {
		if (!server->daemon && server->listen_fd >= 0) {
			close(server->listen_fd);
		}
		kvp_server_close(server);
		return status;
	}
	*p_server = server;

	return KV_OK;
}

void kvp_server_quiesce(kvp_server_t *server)
{
	MHD_socket fd = MHD_quiesce_daemon(server->daemon);

	if (fd != MHD_INVALID_SOCKET) {
		close(fd);
	}
}

void kvp_server_close(kvp_server_t *server)
{
	kv_conn_t *conn;

	if (!server) {
		return;
	}
	if (server->daemon) {
		TAILQ_FOREACH(conn, &server->conns.busy, link)
		{
			end_client(conn); /* the library stops with no connection suspended */
		}
		MHD_run(server->daemon);
		MHD_stop_daemon(server->daemon);
	}
	free(server);
}

void kvp_server_run(kvp_server_t *server, uint64_t now_ns)
{
	MHD_run(server->daemon);
	kvp_metric_add(server->metrics, KVP_M_CONNECTIONS_ENDED,
		       kv_conns_shut_late(&server->conns, server->options->limits_receive_time, now_ns));
}

int kvp_server_timeout_ms(kvp_server_t *server, int most)
{
	MHD_UNSIGNED_LONG_LONG ms;

	if (MHD_get_timeout(server->daemon, &ms) != MHD_YES || ms > (MHD_UNSIGNED_LONG_LONG)most) {
		return most;
	}

	return (int)ms;
}
