/* HTTP for machines that watch. */
#include "io/http.h"

#include "kv/system.h"
#include "kv/conn.h"

#include <errno.h>
#include <microhttpd.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define TIMEOUT_S  5u
#define STALE_NS   UINT64_C(1000000000) /* a loop that has not turned for so long is not healthy */
#define TEXT_SLACK ((size_t)64 * 1024)  /* numbers grow between two looks at them */
#define SPARE      16u                  /* connections that are shut down and not closed yet */
#define BODY_MAX                                                                                                       \
	((size_t)64 *                                                                                                  \
	 1024) /* of a request that will be refused; read, so that the answer is not lost with the connection */

/* What belongs to the thread of the library. */
struct kvd_http {
	struct MHD_Daemon *daemon;
	kv_metrics_t *metrics;
	const kvd_health_t *health;
	kv_conns_t conns; /* a probe is answered long before it is the oldest */
};

/* ---- connections ----------------------------------------------------------------------------- */

static void connection_changed(void *cls, struct MHD_Connection *connection, void **socket_context,
			       enum MHD_ConnectionNotificationCode change)
{
	const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
	kvd_http_t *http = cls;
	kv_conn_t *conn = *socket_context;

	if (change == MHD_CONNECTION_NOTIFY_STARTED) {
		*socket_context = conn = calloc(1, sizeof *conn);
		if (!conn) {
			shutdown(info->connect_fd, SHUT_RDWR);
		} else if (kv_conns_insert(&http->conns, conn, info->connect_fd)) {
			kv_metric_add(http->metrics, KV_M_HTTP_ENDED, 1);
		}
	} else if (conn) {
		kv_conns_remove(&http->conns, conn);
		free(conn);
		*socket_context = NULL;
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

kv_status_t kvd_http_open(const kvd_options_t *options, kv_metrics_t *metrics, const kvd_health_t *health,
			  kvd_http_t **p_http, char *detail, size_t cap)
{
	kvd_http_t *http;
	int fd = -1;
	kv_status_t status = kv_listen("http.listen", options->http_listen, &fd, detail, cap);

	if (status == KV_ERR_BUSY && strstr(detail, "in use")) {
		const size_t len = strlen(detail);

		snprintf(detail + len, cap - len, ", or http.listen=off");
	}
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
	kv_conns_init(&http->conns, (uint32_t)options->http_connections);
	http->daemon = MHD_start_daemon(MHD_USE_EPOLL_INTERNAL_THREAD, 0, NULL, NULL, handle, http,
					MHD_OPTION_LISTEN_SOCKET, (MHD_socket)fd, MHD_OPTION_CONNECTION_LIMIT,
					http->conns.most + SPARE, MHD_OPTION_CONNECTION_TIMEOUT, TIMEOUT_S,
					MHD_OPTION_NOTIFY_CONNECTION, connection_changed, http, MHD_OPTION_END);
	if (!http->daemon) {
		status = kv_refused(&kv_env_posix, "http", "pthread_create", errno);
		close(fd);
		free(http);
		return status;
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
