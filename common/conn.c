/* Connections of a server whose sockets a library has. */
#include "kv/conn.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define BACKLOG 128

void kv_conns_init(kv_conns_t *conns, uint32_t most)
{
	TAILQ_INIT(&conns->idle);
	TAILQ_INIT(&conns->busy);
	conns->n = 0;
	conns->most = most;
}

void kv_conns_remove(kv_conns_t *conns, kv_conn_t *conn)
{
	if (conn->state != KV_CONN_OUT) {
		TAILQ_REMOVE(conn->state == KV_CONN_BUSY ? &conns->busy : &conns->idle, conn, link);
		conn->state = KV_CONN_OUT;
		conns->n--;
	}
}

static void shut_down(kv_conns_t *conns, kv_conn_t *conn)
{
	shutdown(conn->fd, SHUT_RDWR);
	kv_conns_remove(conns, conn);
}

int kv_conns_insert(kv_conns_t *conns, kv_conn_t *conn, int fd)
{
	return kv_conns_add(conns, conn, fd, 0);
}

int kv_conns_add(kv_conns_t *conns, kv_conn_t *conn, int fd, uint64_t now_ns)
{
	kv_conn_t *oldest = TAILQ_FIRST(&conns->idle);
	const int is_full = conns->n >= conns->most && oldest;

	if (is_full) {
		shut_down(conns, oldest);
	}
	conn->state = KV_CONN_IDLE;
	conn->fd = fd;
	conn->since_ns = now_ns;
	TAILQ_INSERT_TAIL(&conns->idle, conn, link);
	conns->n++;

	return is_full;
}

void kv_conns_begin(kv_conns_t *conns, kv_conn_t *conn)
{
	if (conn->state == KV_CONN_IDLE) {
		TAILQ_REMOVE(&conns->idle, conn, link);
		TAILQ_INSERT_TAIL(&conns->busy, conn, link);
		conn->state = KV_CONN_BUSY;
	}
}

void kv_conns_end(kv_conns_t *conns, kv_conn_t *conn, uint64_t now_ns)
{
	if (conn->state == KV_CONN_BUSY) {
		TAILQ_REMOVE(&conns->busy, conn, link);
		TAILQ_INSERT_TAIL(&conns->idle, conn, link);
		conn->state = KV_CONN_IDLE;
		conn->since_ns = now_ns;
	}
}

uint32_t kv_conns_shut_late(kv_conns_t *conns, uint64_t patience_ns, uint64_t now_ns)
{
	uint32_t n = 0;
	kv_conn_t *conn;

	for (; (conn = TAILQ_FIRST(&conns->idle)) && conn->since_ns + patience_ns <= now_ns; n++) {
		shut_down(conns, conn);
	}

	return n;
}

kv_status_t kv_listen(const char *option, const char *where, int *p_fd, char *detail, size_t cap)
{
	const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
	const char *colon = strrchr(where, ':');
	struct addrinfo *found = NULL;
	const int on = 1;
	char host[256];
	int fd, error;

	if (!colon) {
		snprintf(detail, cap, "%s: \"%s\" is not an address: there is no port", option, where);
		return KV_ERR_CONFIG;
	}
	snprintf(host, sizeof host, "%.*s", (int)(colon - where), where);
	if (host[0] == '[' && colon[-1] == ']') {
		memmove(host, host + 1, strlen(host));
		host[strlen(host) - 1] = '\0';
	}
	error = getaddrinfo(host, colon + 1, &hints, &found);
	if (error != 0) {
		snprintf(detail, cap, "%s: \"%s\" is not an address: %s", option, where, gai_strerror(error));
		return KV_ERR_CONFIG;
	}
	fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
	    bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0) {
		freeaddrinfo(found);
		*p_fd = fd;
		return KV_OK;
	}
	error = errno;
	freeaddrinfo(found);
	if (fd >= 0) {
		close(fd);
	}
	if (error == EADDRINUSE) {
		snprintf(detail, cap, "%s: %s is in use by another program; choose another port", option, where);
		return KV_ERR_BUSY;
	}
	snprintf(detail, cap, "%s: cannot listen on %s: %s", option, where, strerror(error));

	return KV_ERR_CONFIG;
}
