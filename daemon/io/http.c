/* HTTP for machines that watch. */
#include "io/http.h"

#include <errno.h>
#include <microhttpd.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define TIMEOUT_S  5u
#define STALE_NS   UINT64_C(1000000000) /* a loop that has not turned for so long is not healthy */
#define TEXT_SLACK ((size_t)64 * 1024)  /* numbers grow between two looks at them */
#define BACKLOG    16
#define BODY_MAX                                                                                                       \
	((size_t)64 *                                                                                                  \
	 1024) /* of a request that will be refused; read, so that the answer is not lost with the connection */

typedef struct client {
	struct client *newer, *older;
	int fd;   /* the library's */
	int open; /* in the list */
} client_t;

/* What belongs to the thread of the library. */
struct kvd_http {
	struct MHD_Daemon *daemon;
	kv_metrics_t *metrics;
	const kvd_health_t *health;
	client_t *newest, *oldest;
	uint32_t clients, most;
};

/* ---- connections: when there are too many, the oldest makes room ----------------------------- */

static void unlink_client(kvd_http_t *http, client_t *client)
{
	if (!client->open) {
		return;
	}
	*(client->newer ? &client->newer->older : &http->newest) = client->older;
	*(client->older ? &client->older->newer : &http->oldest) = client->newer;
	client->open = 0;
	http->clients--;
}

/* Who is slow to ask or to read keeps nobody out: a probe is answered long before it is the oldest. The library closes
 * what is shut down. */
static void connection_began(kvd_http_t *http, struct MHD_Connection *connection, client_t **p_client)
{
	const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
	client_t *client = calloc(1, sizeof *client);

	if (http->clients == http->most) {
		kv_metric_add(http->metrics, KV_M_HTTP_ENDED, 1);
		shutdown(http->oldest->fd, SHUT_RDWR);
		unlink_client(http, http->oldest);
	}
	*p_client = client;
	if (!client) {
		shutdown(info->connect_fd, SHUT_RDWR);
		return;
	}
	*client = (client_t){.older = http->newest, .fd = info->connect_fd, .open = 1};
	*(client->older ? &client->older->newer : &http->oldest) = client;
	http->newest = client;
	http->clients++;
}

static void connection_changed(void *cls, struct MHD_Connection *connection, void **socket_context,
			       enum MHD_ConnectionNotificationCode change)
{
	client_t **p_client = (client_t **)socket_context;

	if (change == MHD_CONNECTION_NOTIFY_STARTED) {
		connection_began(cls, connection, p_client);
	} else if (*p_client) {
		unlink_client(cls, *p_client);
		free(*p_client);
		*p_client = NULL;
	}
}

/* ---- answers --------------------------------------------------------------------------------- */

static enum MHD_Result answer(struct MHD_Connection *connection, unsigned code, const char *type, const char *text)
{
	struct MHD_Response *response =
		MHD_create_response_from_buffer(strlen(text), (void *)(uintptr_t)text, MHD_RESPMEM_MUST_COPY);
	enum MHD_Result result = MHD_NO;

	if (response) {
		MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
		if (code == MHD_HTTP_METHOD_NOT_ALLOWED) {
			MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
		}
		result = MHD_queue_response(connection, code, response);
		MHD_destroy_response(response);
	}

	return result;
}

static enum MHD_Result answer_metrics(const kvd_http_t *http, struct MHD_Connection *connection)
{
	const size_t cap = kv_metrics_prometheus(http->metrics, NULL, 0) + TEXT_SLACK;
	char *text = malloc(cap);
	enum MHD_Result result = MHD_NO;

	if (text && kv_metrics_prometheus(http->metrics, text, cap) < cap) {
		result = answer(connection, MHD_HTTP_OK, "text/plain; version=0.0.4; charset=utf-8", text);
	}
	free(text);

	return result;
}

static int loop_turns(const kvd_health_t *health)
{
	uint64_t turn = atomic_load_explicit(&health->iteration_ns, memory_order_relaxed);
	uint64_t now = kv_now_ns(&kv_env_posix);

	return now < turn + STALE_NS;
}

static enum MHD_Result handle(void *cls, struct MHD_Connection *connection, const char *url, const char *method,
			      const char *version, const char *upload, size_t *upload_size, void **state)
{
	const kvd_http_t *http = cls;
	uintptr_t body = (uintptr_t)*state; /* bytes of it, and 1 */

	(void)version;
	(void)upload;
	if (body == 0 || *upload_size > 0) { /* headers, or a piece of the body: the answer comes with the last call */
		body += body == 0 ? 1 : *upload_size;
		*upload_size = 0;
		*state = (void *)body; /* NOLINT(performance-no-int-to-ptr): a number of ours */
		return body <= BODY_MAX ? MHD_YES : MHD_NO;
	}
	if (strcmp(method, "GET") != 0 && strcmp(method, "HEAD") != 0) {
		return answer(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "text/plain", "only GET\n");
	}
	if (strcmp(url, "/metrics") == 0) {
		return answer_metrics(http, connection);
	}
	if (strcmp(url, "/healthz") == 0) {
		return loop_turns(http->health) ? answer(connection, MHD_HTTP_OK, "text/plain", "ok\n")
						: answer(connection, MHD_HTTP_SERVICE_UNAVAILABLE, "text/plain",
							 "the core loop stands still\n");
	}
	if (strcmp(url, "/readyz") == 0) {
		int ready = atomic_load(&http->health->ready) && !atomic_load(&http->health->stopping);
		return ready ? answer(connection, MHD_HTTP_OK, "text/plain", "ready\n")
			     : answer(connection, MHD_HTTP_SERVICE_UNAVAILABLE, "text/plain", "starting or stopping\n");
	}

	return answer(connection, MHD_HTTP_NOT_FOUND, "text/plain", "there are /metrics, /healthz and /readyz\n");
}

/* "host:port", "[v6]:port" -> a bound, listening socket. */
static kv_status_t listen_at(const char *where, int *p_fd, char *detail, size_t cap)
{
	const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
	const char *colon = strrchr(where, ':');
	struct addrinfo *found = NULL;
	const int on = 1;
	char host[256];
	int fd, error;

	snprintf(host, sizeof host, "%.*s", (int)(colon - where), where);
	if (host[0] == '[' && colon[-1] == ']') {
		memmove(host, host + 1, strlen(host));
		host[strlen(host) - 1] = '\0';
	}
	error = getaddrinfo(host, colon + 1, &hints, &found);
	if (error != 0) {
		snprintf(detail, cap, "http.listen: \"%s\" is not an address: %s", where, gai_strerror(error));
		return KV_ERR_CONFIG;
	}
	fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	error = fd < 0;
	if (!error) {
		setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
		error = bind(fd, found->ai_addr, found->ai_addrlen) != 0 || listen(fd, BACKLOG) != 0;
	}
	error = error ? errno : 0;
	freeaddrinfo(found);
	if (error == 0) {
		*p_fd = fd;
		return KV_OK;
	}
	if (fd >= 0) {
		close(fd);
	}
	if (error == EADDRINUSE) {
		snprintf(detail, cap,
			 "http.listen: %s is in use by another program; choose another port, or http.listen=off",
			 where);
		return KV_ERR_BUSY;
	}
	snprintf(detail, cap, "http.listen: cannot listen on %s: %s", where, strerror(error));

	return KV_ERR_CONFIG;
}

kv_status_t kvd_http_open(const kvd_options_t *options, kv_metrics_t *metrics, const kvd_health_t *health,
			  kvd_http_t **p_http, char *detail, size_t cap)
{
	kvd_http_t *http;
	int fd = -1;
	kv_status_t status = listen_at(options->http_listen, &fd, detail, cap);

	if (status != KV_OK) {
		return status;
	}
	http = calloc(1, sizeof *http);
	if (!http) {
		close(fd);
		return KV_ERR_NOMEM;
	}
	http->metrics = metrics;
	http->health = health;
	http->most = (uint32_t)options->http_connections;
	/* Room for those that are shut down and not closed yet. */
	http->daemon = MHD_start_daemon(MHD_USE_EPOLL_INTERNAL_THREAD, 0, NULL, NULL, handle, http,
					MHD_OPTION_LISTEN_SOCKET, (MHD_socket)fd, MHD_OPTION_CONNECTION_LIMIT,
					(unsigned)(http->most + BACKLOG), MHD_OPTION_CONNECTION_TIMEOUT, TIMEOUT_S,
					MHD_OPTION_NOTIFY_CONNECTION, connection_changed, http, MHD_OPTION_END);
	if (!http->daemon) {
		snprintf(detail, cap, "cannot start the HTTP thread");
		close(fd);
		free(http);
		return KV_ERR_LIMIT;
	}
	*p_http = http;

	return KV_OK;
}

void kvd_http_close(kvd_http_t *http)
{
	if (http) {
		MHD_stop_daemon(http->daemon);
		free(http);
	}
}
