/* kv/conn.h -- connections of a server whose sockets a library has: a limit for their number and for their patience,
 * and the socket that listens.
 *
 *   (added) -> IDLE, waits for its client --begin--> BUSY, a request runs --end--> IDLE
 *               `-- the oldest, where there are too many, or late: shut down -----> OUT (the library closes it)
 *
 * So a client that is slow to ask keeps nobody out, and none whose request runs is ended. One thread.
 */
#ifndef KV_CONN_H
#define KV_CONN_H

#include "kv/status.h"

#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

typedef enum kv_conn_state { KV_CONN_OUT, KV_CONN_IDLE, KV_CONN_BUSY } kv_conn_state_t;

/* Part of the owner's record of a connection. All zero is a good start. */
typedef struct kv_conn {
	TAILQ_ENTRY(kv_conn) link;
	kv_conn_state_t state;
	int fd;            /* the library's */
	uint64_t since_ns; /* it has waited for its client */
} kv_conn_t;
TAILQ_HEAD(kv_conn_list, kv_conn);

typedef struct kv_conns {
	struct kv_conn_list idle, busy; /* idle: the oldest first */
	uint32_t n, most;               /* n: of both */
} kv_conns_t;

void kv_conns_init(kv_conns_t *conns, uint32_t most);
/* A connection was accepted. 1: there were `most`, and the one that had waited longest was shut down. Where requests of
 * all run, one more is there. */
int kv_conns_add(kv_conns_t *conns, kv_conn_t *conn, int fd, uint64_t now_ns);
/* The same where no connection is late. */
int kv_conns_insert(kv_conns_t *conns, kv_conn_t *conn, int fd);
/* It was closed. */
void kv_conns_remove(kv_conns_t *conns, kv_conn_t *conn);
/* A whole request has come; its answer has gone. Nothing happens to one that was shut down. */
void kv_conns_begin(kv_conns_t *conns, kv_conn_t *conn);
void kv_conns_end(kv_conns_t *conns, kv_conn_t *conn, uint64_t now_ns);
/* Shut down those that have waited for patience_ns or longer. Returns how many. */
uint32_t kv_conns_shut_late(kv_conns_t *conns, uint64_t patience_ns, uint64_t now_ns);

/* Listen on "host:port" or "[v6]:port", not blocking. KV_ERR_CONFIG: no address, or none of this machine. KV_ERR_BUSY:
 * another program does. `detail` says why, and begins with the option's name. */
kv_status_t kv_listen(const char *option, const char *where, int *p_fd, char *detail, size_t cap);

#endif
