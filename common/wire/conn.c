/* Connections of a server whose sockets a library has. */
#include "kv/conn.h"

#include "kv/system.h"

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

/* Is it the system that refuses, and not the address that is wrong? A port that needs a privilege is EACCES of bind. */
static int is_refusal(const char *call, int error)
{
	return kv_refused_status(error) == KV_ERR_REFUSED
		       ? error != EACCES || strcmp(call, "bind") != 0
		       : error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

/* 0, or errno of *p_call. */
static int listen_at(const struct addrinfo *address, int *p_fd, const char **p_call)
{
	const int on = 1, fd = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	int error;

	*p_call = "socket";
	if (fd < 0) {
		return errno;
	}
	*p_call = "setsockopt";
	if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0) {
		*p_call = "bind";
		if (bind(fd, address->ai_addr, address->ai_addrlen) == 0) {
			*p_call = "listen";
			if (listen(fd, BACKLOG) == 0) {
				*p_fd = fd;
				return 0;
			}
		}
	}
	error = errno;
	close(fd);

	return error;
}

kv_status_t kv_listen(const char *option, const char *where, int *p_fd, char *detail, size_t cap)
{
	const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
	const char *colon = strrchr(where, ':');
	struct addrinfo *found = NULL;
	const char *call;
	char host[256], why[KV_REFUSED_TEXT];
	int error;

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
	error = listen_at(found, p_fd, &call);
	freeaddrinfo(found);
	if (error == 0) {
		return KV_OK;
	}
	if (error == EADDRINUSE) {
		snprintf(detail, cap, "%s: %s is in use by another program; choose another port", option, where);
		return KV_ERR_BUSY;
	}
	snprintf(detail, cap, "%s: cannot listen on %s: %s", option, where,
		 is_refusal(call, error) ? kv_refused_text(call, error, why, sizeof why) : strerror(error));

	return is_refusal(call, error) ? kv_refused_status(error) : KV_ERR_CONFIG;
}
