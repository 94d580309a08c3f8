/* The connections of the clients. */
#include "server.h"

#include "exchange.h"
#include "http/chunks.h"
#include "kv/conn.h"
#include "kv/env.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define SPARE        16u /* connections beyond the limit, where requests of all run: for /health and /metrics */
#define BLOCK        ((size_t)16 * 1024) /* read at a time, and sent of a stream */
#define READS        16u                 /* at a time of a connection */
#define ACCEPTS      64u
#define LINE_SLACK   16u /* around a block: its size in hexadecimal, and the ends of lines */
#define NS_IN_MS     UINT64_C(1000000)
#define NS_IN_S      UINT64_C(1000000000)
#define CHECK_NS     (50 * NS_IN_MS) /* between looks at all deadlines */
#define LINGER_NS    (5 * NS_IN_S)   /* a client that is told of the end has sent nothing for so long */
#define LINGER_MOST  (30 * NS_IN_S)
#define CONTINUE     "HTTP/1.1 100 Continue\r\n\r\n"
#define FDS_AT_FIRST 64u

typedef enum conn_state { CONN_HEAD, CONN_BODY, CONN_RUN, CONN_ANSWER, CONN_LINGER } conn_state_t;

typedef struct conn {
	TAILQ_ENTRY(conn) link;       /* in `waiting` or `busy` */
	TAILQ_ENTRY(conn) ready_link; /* in `ready` */
	kvp_server_t *server;
	int fd;
	conn_state_t state;
	uint32_t events; /* watched for */
	int is_busy, is_ready;
	uint64_t deadline_ns; /* UINT64_MAX: none */
	uint64_t linger_ns;   /* the last one of LINGER */
	/* Received, and not consumed. */
	char *in;
	size_t in_len, in_cap, scanned;
	/* The body that comes: `left` bytes, or chunks. */
	int is_chunked;
	uint64_t left;
	kvp_chunks_t chunks;
	kvp_exchange_t *exchange;
	/* To be sent: `out`, then the exchange's answer. */
	char *out;
	size_t out_len, out_sent, answer_sent;
	int is_stream_ended;
} conn_t;
TAILQ_HEAD(conn_list, conn);

struct kvp_server {
	kvp_requests_t *requests;
	const kvp_options_t *options;
	kvp_metrics_t *metrics;
	kvp_loop_t *loop;
	int listen_fd, is_quiet;  /* is_quiet: it is not watched, for want of descriptors */
	struct conn_list waiting; /* for its client: the one that has waited longest first */
	struct conn_list busy;    /* a request runs */
	struct conn_list ready;   /* something to do without an event */
	conn_t **by_fd;
	size_t by_fd_n;
	uint32_t n;
	uint64_t check_ns;
};

static uint64_t clock_ns(void)
{
	return kv_now_ns(&kv_env_posix);
}

/* ---- connections ----------------------------------------------------------------------------- */

static void watch(conn_t *conn, uint32_t events)
{
	if (conn->events != events && kvp_loop_watch(conn->server->loop, KVP_FD_CLIENT, conn->fd, events) == KV_OK) {
		conn->events = events;
	}
}

static void mark_ready(conn_t *conn)
{
	if (!conn->is_ready) {
		conn->is_ready = 1;
		TAILQ_INSERT_TAIL(&conn->server->ready, conn, ready_link);
	}
}

static void wake(void *ctx)
{
	mark_ready(ctx);
}

/* A connection that waits for its client may be ended to make room, the one that has waited longest first. */
static void set_busy(conn_t *conn, int is_busy)
{
	kvp_server_t *server = conn->server;

	TAILQ_REMOVE(conn->is_busy ? &server->busy : &server->waiting, conn, link);
	TAILQ_INSERT_TAIL(is_busy ? &server->busy : &server->waiting, conn, link);
	conn->is_busy = is_busy;
}

static void close_conn(conn_t *conn)
{
	kvp_server_t *server = conn->server;

	kvp_exchange_end(conn->exchange);
	if (conn->is_ready) {
		TAILQ_REMOVE(&server->ready, conn, ready_link);
	}
	TAILQ_REMOVE(conn->is_busy ? &server->busy : &server->waiting, conn, link);
	server->by_fd[conn->fd] = NULL;
	server->n--;
	kvp_metric_sub(server->metrics, KVP_M_CONNECTIONS, 1);
	kvp_loop_forget(server->loop, conn->fd);
	close(conn->fd);
	free(conn->in);
	free(conn->out);
	free(conn);
}

static void close_late(conn_t *conn)
{
	kvp_metric_add(conn->server->metrics, KVP_M_CONNECTIONS_ENDED, 1);
	close_conn(conn);
}

static void linger(conn_t *conn)
{
	const uint64_t now_ns = clock_ns();

	shutdown(conn->fd, SHUT_WR);
	conn->state = CONN_LINGER;
	conn->in_len = 0;
	conn->linger_ns = now_ns + LINGER_MOST;
	conn->deadline_ns = now_ns + LINGER_NS;
	watch(conn, EPOLLIN);
}

/* ---- sending --------------------------------------------------------------------------------- */

/* Send what there is. 1: all of it; 0: the rest has to wait; -1: the client has gone. */
static int send_some(conn_t *conn)
{
	const kvp_span_t answer = conn->exchange->answer;

	while (conn->out_sent < conn->out_len || conn->answer_sent < answer.len) {
		const size_t left = answer.len - conn->answer_sent;
		struct iovec parts[2] = {{conn->out + conn->out_sent, conn->out_len - conn->out_sent},
					 {left ? (void *)(uintptr_t)(answer.data + conn->answer_sent) : NULL, left}};
		const struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
		const ssize_t n = sendmsg(conn->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
		const size_t sent = n > 0 ? (size_t)n : 0;
		const size_t of_out = sent < parts[0].iov_len ? sent : parts[0].iov_len;

		if (n < 0) {
			return errno == EAGAIN || errno == EINTR ? 0 : -1;
		}
		conn->out_sent += of_out;
		conn->answer_sent += sent - of_out;
		conn->deadline_ns = clock_ns() + conn->server->options->limits_receive_time;
	}

	return 1;
}

/* The next block of a stream in `out`. 1: there is one; 0: none yet, or the end has been sent; -1: it is cut short. */
static int fill_block(conn_t *conn)
{
	const int is_chunked = conn->exchange->is_chunked;
	char *block = conn->out + LINE_SLACK;
	char size[LINE_SLACK];
	int64_t n;
	int len;

	if (conn->is_stream_ended) {
		return 0;
	}
	n = kvp_request_read(conn->exchange->request, block, BLOCK);
	if (n < -1) {
		return -1;
	}
	conn->is_stream_ended = n == -1;
	conn->out_sent = LINE_SLACK;
	conn->out_len = LINE_SLACK + (n > 0 ? (size_t)n : 0);
	if (is_chunked && n > 0) {
		len = snprintf(size, sizeof size, "%zx\r\n", (size_t)n);
		conn->out_sent -= (size_t)len;
		memcpy(conn->out + conn->out_sent, size, (size_t)len);
		memcpy(conn->out + conn->out_len, "\r\n", 2);
		conn->out_len += 2;
	} else if (is_chunked && n == -1) {
		conn->out_len += (size_t)snprintf(block, LINE_SLACK, "0\r\n\r\n");
	}

	return conn->out_len > conn->out_sent;
}

static void end_exchange(conn_t *conn)
{
	const int is_kept = conn->exchange->is_kept && conn->server->listen_fd >= 0;
	const kvp_options_t *options = conn->server->options;

	kvp_exchange_end(conn->exchange);
	conn->exchange = NULL;
	free(conn->out);
	conn->out = NULL;
	set_busy(conn, 0);
	if (!is_kept) {
		linger(conn);
		return;
	}
	conn->state = CONN_HEAD;
	conn->deadline_ns = clock_ns() + (conn->in_len > 0 ? options->limits_receive_time : options->limits_idle_time);
	if (conn->in_len > 0) {
		mark_ready(conn); /* the next request, after those of other clients */
	}
	watch(conn, EPOLLIN);
}

/* As much of the answer as there is and the client takes. 0: the connection is closed. */
static int send_answer(conn_t *conn)
{
	const int is_stream = conn->exchange->is_stream;
	int sent, more = 1;

	while ((sent = send_some(conn)) > 0 && is_stream && (more = fill_block(conn)) > 0) {
	}
	if (sent < 0) {
		close_conn(conn);
		return 0;
	}
	if (sent == 0) {
		if (conn->deadline_ns == UINT64_MAX) {
			conn->deadline_ns = clock_ns() + conn->server->options->limits_receive_time;
		}
		watch(conn, EPOLLOUT | (is_stream ? EPOLLRDHUP : 0u));
	} else if (more < 0) {
		conn->exchange->is_kept = 0; /* its missing end tells the client */
		end_exchange(conn);
	} else if (is_stream && !conn->is_stream_ended) {
		conn->deadline_ns = UINT64_MAX; /* its engine has deadlines */
		watch(conn, EPOLLRDHUP);
	} else {
		end_exchange(conn);
	}

	return 1;
}

/* 0: the connection is closed. */
static int begin_answer(conn_t *conn)
{
	kvp_exchange_t *exchange = conn->exchange;
	char *block;

	exchange->is_kept &= conn->server->listen_fd >= 0;
	conn->out = kvp_exchange_head(exchange, &conn->out_len);
	conn->out_sent = conn->answer_sent = 0;
	conn->is_stream_ended = 0;
	if (conn->out && exchange->is_stream) {
		block = realloc(conn->out, conn->out_len + BLOCK + 2 * (size_t)LINE_SLACK);
		if (!block) {
			close_conn(conn);
			return 0;
		}
		conn->out = block;
	}
	if (!conn->out) {
		close_conn(conn);
		return 0;
	}
	conn->state = CONN_ANSWER;
	conn->deadline_ns = clock_ns() + conn->server->options->limits_receive_time;

	return send_answer(conn);
}

/* ---- requests -------------------------------------------------------------------------------- */

static void consume(conn_t *conn, size_t n)
{
	conn->in_len -= n;
	memmove(conn->in, conn->in + n, conn->in_len);
	conn->scanned = 0;
}

/* A request has begun. 0: the connection is closed. */
static int begin_exchange(conn_t *conn, const kvp_head_t *head, unsigned fault)
{
	conn->exchange = kvp_exchange_begin(conn->server->requests, head, fault, wake, conn);
	if (!conn->exchange) {
		close_conn(conn);
		return 0;
	}
	conn->state = CONN_BODY;
	conn->is_chunked = head->is_chunked;
	conn->left = head->length;
	conn->chunks = (kvp_chunks_t){.spare = conn->server->options->limits_headers};

	return 1;
}

static int refuse(conn_t *conn, unsigned status, const char *why)
{
	const kvp_head_t none = {.minor = 1, .refuse = why};

	return begin_exchange(conn, &none, status);
}

/* What asks for the body. It is little, and the first on a connection that has been read: it fits, or the client does
 * not read. */
static void send_continue(const conn_t *conn)
{
	(void)send(conn->fd, CONTINUE, sizeof CONTINUE - 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static size_t skip_empty_lines(const conn_t *conn)
{
	size_t at = 0;

	while (at + 1 < conn->in_len && conn->in[at] == '\r' && conn->in[at + 1] == '\n') {
		at += 2;
	}

	return at;
}

/* 1: a head was there, and the request has begun. 0: more has to come. -1: the connection is closed. */
static int take_head(conn_t *conn)
{
	const size_t most = conn->server->options->limits_headers, empty = skip_empty_lines(conn);
	kvp_head_t head;
	unsigned status;
	long len;

	if (empty > 0) {
		consume(conn, empty);
	}
	if (conn->in_len == 0 || (conn->in_len == 1 && conn->in[0] == '\r')) {
		return 0;
	}
	len = kvp_head_scan(conn->in, conn->in_len, &conn->scanned);
	if (len < 0) {
		return refuse(conn, 400, "the request has a control character, or an end of line that is not CR LF")
			       ? 1
			       : -1;
	}
	if ((len == 0 && conn->in_len > most) || (size_t)len > most) {
		return (memchr(conn->in, '\n', most) ? refuse(conn, 431, "the headers are larger than limits.headers")
						     : refuse(conn, 414, "the target is larger than limits.headers"))
			       ? 1
			       : -1;
	}
	if (len == 0) {
		return 0;
	}
	status = kvp_head_parse(conn->in, (size_t)len, &head);
	if (!begin_exchange(conn, &head, status)) {
		return -1;
	}
	consume(conn, (size_t)len);
	if (conn->exchange->state == KVP_EXCHANGE_BODY && head.expects && conn->exchange->has_body &&
	    conn->in_len == 0) {
		send_continue(conn);
	}

	return 1;
}

/* 1: the body has ended, or is refused. 0: more has to come. */
static int take_chunks(conn_t *conn)
{
	kvp_exchange_t *exchange = conn->exchange;
	const char *at = conn->in, *end = conn->in + conn->in_len, *data;
	kvp_chunks_result_t result = KVP_CHUNKS_MORE;
	size_t len;

	while (exchange->state == KVP_EXCHANGE_BODY &&
	       (result = kvp_chunks_read(&conn->chunks, &at, end, &data, &len)) == KVP_CHUNKS_DATA) {
		kvp_exchange_take(exchange, data, len);
	}
	consume(conn, (size_t)(at - conn->in));
	if (result == KVP_CHUNKS_MORE && exchange->state == KVP_EXCHANGE_BODY) {
		kvp_exchange_announce(exchange, conn->chunks.left);
	}
	if (result == KVP_CHUNKS_BAD && exchange->state == KVP_EXCHANGE_BODY) {
		kvp_exchange_refuse(exchange, 400, "the body's chunks are malformed, or say more than limits.headers");
	}

	return result == KVP_CHUNKS_END || exchange->state != KVP_EXCHANGE_BODY;
}

/* Likewise. */
static int take_body(conn_t *conn)
{
	size_t n;

	if (conn->is_chunked) {
		return take_chunks(conn);
	}
	n = conn->left < conn->in_len ? (size_t)conn->left : conn->in_len;
	if (n > 0) {
		kvp_exchange_take(conn->exchange, conn->in, n);
		consume(conn, n);
		conn->left -= n;
	}

	return conn->left == 0 || conn->exchange->state != KVP_EXCHANGE_BODY;
}

/* All of a request has come, or its answer is there already. 0: the connection is closed. */
static int run_request(conn_t *conn)
{
	if (conn->exchange->state == KVP_EXCHANGE_BODY) {
		kvp_exchange_run(conn->exchange);
	}
	if (kvp_exchange_is_answered(conn->exchange)) {
		return begin_answer(conn);
	}
	conn->state = CONN_RUN;
	conn->deadline_ns = UINT64_MAX;
	set_busy(conn, 1);
	watch(conn, EPOLLRDHUP);

	return 1;
}

/* Go on with what has been received. 0: the connection is closed. */
static int take_input(conn_t *conn)
{
	int taken;

	if (conn->state == CONN_HEAD) {
		taken = take_head(conn);
		if (taken <= 0) {
			return taken == 0;
		}
	}
	if (conn->state == CONN_LINGER) {
		conn->in_len = 0;
		return 1;
	}
	if (conn->exchange->state == KVP_EXCHANGE_BODY && !take_body(conn)) {
		return 1;
	}

	return run_request(conn);
}

/* ---- events ---------------------------------------------------------------------------------- */

static int make_room(conn_t *conn)
{
	char *grown;

	if (conn->in_cap - conn->in_len >= BLOCK) {
		return 1;
	}
	grown = realloc(conn->in, conn->in_len + 2 * BLOCK);
	if (grown) {
		conn->in = grown;
		conn->in_cap = conn->in_len + 2 * BLOCK;
	}

	return grown != NULL;
}

/* The first byte of a request, and any of a client that is told to end, set a deadline. */
static void set_deadline(conn_t *conn, int is_first)
{
	const uint64_t now_ns = clock_ns();

	if (conn->state == CONN_LINGER) {
		conn->deadline_ns = now_ns + LINGER_NS < conn->linger_ns ? now_ns + LINGER_NS : conn->linger_ns;
	} else if (is_first) {
		conn->deadline_ns = now_ns + conn->server->options->limits_receive_time;
	}
}

static void receive(conn_t *conn)
{
	for (unsigned i = 0;
	     i < READS && (conn->state == CONN_HEAD || conn->state == CONN_BODY || conn->state == CONN_LINGER); i++) {
		ssize_t n;

		if (!make_room(conn)) {
			close_late(conn);
			return;
		}
		n = recv(conn->fd, conn->in + conn->in_len, BLOCK, MSG_DONTWAIT);
		if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
			close_conn(conn);
			return;
		}
		if (n < 0) {
			break;
		}
		set_deadline(conn, conn->state == CONN_HEAD && conn->in_len == 0);
		conn->in_len += (size_t)n;
		if (!take_input(conn)) {
			return;
		}
	}
	if (conn->in_len == 0) {
		free(conn->in);
		conn->in = NULL;
		conn->in_cap = 0;
	}
}

static int has_ended(int fd)
{
	struct pollfd poll_fd = {.fd = fd, .events = POLLRDHUP};

	return poll(&poll_fd, 1, 0) > 0 && (poll_fd.revents & (POLLRDHUP | POLLHUP | POLLERR));
}

/* The event may be of a socket that was closed since, whose number has a new owner: nothing is taken from it. */
static void client_ready(void *ctx, int fd, uint32_t events)
{
	kvp_server_t *server = ctx;
	conn_t *conn = (size_t)fd < server->by_fd_n ? server->by_fd[fd] : NULL;
	const int awaits_end = conn && (conn->events & EPOLLRDHUP);

	(void)events;
	if (!conn) {
		return;
	}
	if (awaits_end && has_ended(fd)) {
		close_conn(conn);
	} else if (conn->state == CONN_ANSWER && (conn->events & EPOLLOUT)) {
		send_answer(conn);
	} else {
		receive(conn);
	}
}

static void serve_ready(kvp_server_t *server)
{
	const conn_t *last = TAILQ_LAST(&server->ready, conn_list); /* what becomes ready meanwhile comes next time */
	conn_t *conn = NULL;

	while (conn != last && (conn = TAILQ_FIRST(&server->ready))) {
		TAILQ_REMOVE(&server->ready, conn, ready_link);
		conn->is_ready = 0;
		if (conn->state == CONN_RUN && kvp_exchange_is_answered(conn->exchange)) {
			begin_answer(conn);
		} else if (conn->state == CONN_ANSWER) {
			send_answer(conn);
		} else if (conn->state == CONN_HEAD) {
			take_input(conn);
		}
	}
}

/* ---- new connections ------------------------------------------------------------------------- */

static int has_room_for(kvp_server_t *server, int fd)
{
	size_t n = server->by_fd_n ? server->by_fd_n : FDS_AT_FIRST;
	conn_t **grown;

	while (n <= (size_t)fd) {
		n *= 2;
	}
	if (n == server->by_fd_n) {
		return 1;
	}
	grown = realloc(server->by_fd, n * sizeof(conn_t *));
	if (!grown) {
		return 0;
	}
	memset(grown + server->by_fd_n, 0, (n - server->by_fd_n) * sizeof(conn_t *));
	server->by_fd = grown;
	server->by_fd_n = n;

	return 1;
}

static void add_conn(kvp_server_t *server, int fd)
{
	const int on = 1;
	conn_t *conn;

	if (server->n >= server->options->limits_connections && !TAILQ_EMPTY(&server->waiting)) {
		close_late(TAILQ_FIRST(&server->waiting));
	}
	conn = server->n < server->options->limits_connections + SPARE && has_room_for(server, fd)
		       ? calloc(1, sizeof *conn)
		       : NULL;
	if (!conn) {
		kvp_metric_add(server->metrics, KVP_M_CONNECTIONS_ENDED, 1);
		close(fd);
		return;
	}
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	conn->server = server;
	conn->fd = fd;
	conn->deadline_ns = clock_ns() + server->options->limits_idle_time;
	server->by_fd[fd] = conn;
	server->n++;
	TAILQ_INSERT_TAIL(&server->waiting, conn, link);
	kvp_metric_add(server->metrics, KVP_M_CONNECTIONS, 1);
	watch(conn, EPOLLIN);
	if (!conn->events) {
		close_late(conn);
	}
}

static void listener_ready(void *ctx, int fd, uint32_t events)
{
	kvp_server_t *server = ctx;

	(void)events;
	for (unsigned i = 0; i < ACCEPTS && fd == server->listen_fd; i++) {
		const int client = accept4(fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);

		if (client >= 0) {
			add_conn(server, client);
		} else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
			if (!TAILQ_EMPTY(&server->waiting)) {
				close_late(TAILQ_FIRST(&server->waiting));
				continue;
			}
			kvp_loop_forget(server->loop, fd); /* until the next look at the deadlines */
			server->is_quiet = 1;
			return;
		} else if (errno == EAGAIN) {
			return;
		}
	}
}

static void close_overdue(kvp_server_t *server, struct conn_list *list, uint64_t now_ns)
{
	conn_t *conn, *next;

	for (conn = TAILQ_FIRST(list); conn; conn = next) {
		next = TAILQ_NEXT(conn, link);
		if (conn->deadline_ns <= now_ns) {
			const int is_idle =
				conn->state == CONN_LINGER || (conn->state == CONN_HEAD && conn->in_len == 0);

			kvp_metric_add(server->metrics, KVP_M_CONNECTIONS_ENDED, !is_idle);
			close_conn(conn);
		}
	}
}

/* ---- open, run, close ------------------------------------------------------------------------ */

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
	TAILQ_INIT(&server->waiting);
	TAILQ_INIT(&server->busy);
	TAILQ_INIT(&server->ready);
	loop->handlers[KVP_FD_SERVER].ready = listener_ready;
	loop->handlers[KVP_FD_SERVER].ctx = server;
	loop->handlers[KVP_FD_CLIENT].ready = client_ready;
	loop->handlers[KVP_FD_CLIENT].ctx = server;
	status = kv_listen("http.listen", server->options->http_listen, &server->listen_fd, detail, cap);
	if (status == KV_OK) {
		status = kvp_loop_watch(loop, KVP_FD_SERVER, server->listen_fd, EPOLLIN);
	}
	if (status != KV_OK) {
		kvp_server_close(server);
		return status;
	}
	*p_server = server;

	return KV_OK;
}

void kvp_server_quiesce(kvp_server_t *server)
{
	if (server->listen_fd >= 0) {
		kvp_loop_forget(server->loop, server->listen_fd);
		close(server->listen_fd);
		server->listen_fd = -1;
	}
}

void kvp_server_close(kvp_server_t *server)
{
	if (!server) {
		return;
	}
	kvp_server_quiesce(server);
	while (!TAILQ_EMPTY(&server->busy)) {
		close_conn(TAILQ_FIRST(&server->busy));
	}
	while (!TAILQ_EMPTY(&server->waiting)) {
		close_conn(TAILQ_FIRST(&server->waiting));
	}
	free(server->by_fd);
	free(server);
}

void kvp_server_run(kvp_server_t *server, uint64_t now_ns)
{
	serve_ready(server);
	if (now_ns < server->check_ns) {
		return;
	}
	server->check_ns = now_ns + CHECK_NS;
	close_overdue(server, &server->waiting, now_ns);
	close_overdue(server, &server->busy, now_ns);
	if (server->is_quiet && server->listen_fd >= 0) {
		server->is_quiet = kvp_loop_watch(server->loop, KVP_FD_SERVER, server->listen_fd, EPOLLIN) != KV_OK;
	}
}

int kvp_server_timeout_ms(kvp_server_t *server, int most)
{
	return TAILQ_EMPTY(&server->ready) ? most : 0;
}
