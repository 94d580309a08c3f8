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
	TAILQ_INIT(&conns->list);
	conns->n = 0;
	conns->most = most;
}

void kv_conns_remove(kv_conns_t *conns, kv_conn_t *conn)
{
	if (conn->is_in) {
		TAILQ_REMOVE(&conns->list, conn, link);
		conn->is_in = 0;
		conns->n--;
	}
}

int kv_conns_insert(kv_conns_t *conns, kv_conn_t *conn, int fd)
{
	const int is_full = conns->n >= conns->most;

	if (is_full) {
		kv_conn_t *oldest = TAILQ_FIRST(&conns->list);

		shutdown(oldest->fd, SHUT_RDWR);
		kv_conns_remove(conns, oldest);
	}
	conn->is_in = 1;
	conn->fd = fd;
	TAILQ_INSERT_TAIL(&conns->list, conn, link);
	conns->n++;

	return is_full;
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
