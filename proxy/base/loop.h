/* loop.h -- one epoll for all descriptors of the proxy, on one thread. What is ready is told by descriptor and kind,
 * never by pointer: a handler may end what another event of the same round belongs to. */
#ifndef KVP_LOOP_H
#define KVP_LOOP_H

#include "kv/status.h"

#include <stdint.h>

typedef enum kvp_fd_kind {
	KVP_FD_SIGNAL, /* a signalfd: the loop has an end */
	KVP_FD_SERVER, /* the socket that listens for clients */
	KVP_FD_CALL,   /* a socket of libcurl */
	KVP_FD_EVENTS, /* a socket of libzmq */
	KVP_FD_CLIENT, /* a client's socket */
	KVP_FD_KINDS
} kvp_fd_kind_t;

typedef struct kvp_loop {
	int epoll_fd;
	struct {
		void (*ready)(void *ctx, int fd, uint32_t events);
		void *ctx;
	} handlers[KVP_FD_KINDS];
} kvp_loop_t;

/* KV_ERR_LIMIT: no descriptors. */
kv_status_t kvp_loop_open(kvp_loop_t *loop);
void kvp_loop_close(kvp_loop_t *loop);
/* Watch for `events` (EPOLLIN ...), or change what is watched for. KV_ERR_LIMIT: the system refuses. */
kv_status_t kvp_loop_watch(kvp_loop_t *loop, kvp_fd_kind_t kind, int fd, uint32_t events);
void kvp_loop_forget(kvp_loop_t *loop, int fd);
/* Wait for events, at most timeout_ms, and hand them to the handlers of their kinds. */
void kvp_loop_wait(kvp_loop_t *loop, int timeout_ms);

#endif
