/* kv/conn.h -- connections of a server whose sockets a library has: a limit for their number, so that one that is slow
 * keeps nobody out, and the socket that listens. One thread. */
#ifndef KV_CONN_H
#define KV_CONN_H

#include "kv/status.h"

#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

/* Part of the owner's record of a connection. All zero is a good start. */
typedef struct kv_conn {
	TAILQ_ENTRY(kv_conn) link;
	int fd;    /* the library's */
	int is_in; /* 0: shut down, and the library has still to close it */
} kv_conn_t;
TAILQ_HEAD(kv_conn_list, kv_conn);

typedef struct kv_conns {
	struct kv_conn_list list; /* the oldest first */
	uint32_t n, most;
} kv_conns_t;

/* most: at least 1. */
void kv_conns_init(kv_conns_t *conns, uint32_t most);
/* A connection was accepted. 1: there were `most`, and the oldest was shut down. */
int kv_conns_insert(kv_conns_t *conns, kv_conn_t *conn, int fd);
/* It was closed. */
void kv_conns_remove(kv_conns_t *conns, kv_conn_t *conn);

/* Listen on "host:port" or "[v6]:port", not blocking. KV_ERR_CONFIG: no address, or none of this machine. KV_ERR_BUSY:
 * another program does. Or as kv_refused_status(). `detail` says why, and begins with the option's name. */
kv_status_t kv_listen(const char *option, const char *where, int *p_fd, char *detail, size_t cap);

#endif
