/* events/subscriber.h -- a ZeroMQ SUB socket (libzmq, without encryption) on the proxy's loop. It takes messages of
 * three frames: topic, number, payload.
 *
 *   DOWN --connect--> CONNECTING --handshake, or a first message--> OPEN
 *     ^------ refused, late, closed, too large a frame, no message of ours ------'
 *
 * Each connection has a socket of its own: libzmq does not connect again after what it calls a protocol error, and its
 * monitor tells when messages may be missed. docs/decisions/048-pd-proxy.md
 */
#ifndef KVP_EVENTS_SUBSCRIBER_H
#define KVP_EVENTS_SUBSCRIBER_H

#include "base/loop.h"

#include <stddef.h>

#define KVP_FRAME_MAX     ((size_t)2 << 20) /* bytes of a frame */
#define KVP_MESSAGES_KEPT 16                /* that libzmq keeps of an engine; more wait with the engine */

/* A message. The payload is borrowed for the call. */
typedef void (*kvp_message_fn)(void *ctx, uint64_t seq, const uint8_t *payload, size_t len);

typedef enum kvp_subscriber_state {
	KVP_SUBSCRIBER_DOWN,
	KVP_SUBSCRIBER_CONNECTING,
	KVP_SUBSCRIBER_OPEN
} kvp_subscriber_state_t;

typedef struct kvp_subscriber {
	const char *endpoint; /* borrowed */
	void *context;        /* libzmq's; borrowed */
	kvp_loop_t *loop;
	kvp_message_fn message;
	void (*lost)(void *ctx); /* the connection has ended: messages may be missed */
	void *ctx;
	kvp_subscriber_state_t state;
	void *socket, *monitor; /* libzmq's; NULL: DOWN */
	int fd, monitor_fd;     /* in the loop, as KVP_FD_EVENTS; -1: none */
	int is_pending;         /* kvp_subscriber_serve() has something to do */
	uint64_t due_ns;        /* DOWN: next try; CONNECTING: too late */
	uint64_t malformed;     /* connections closed for what has come */
} kvp_subscriber_t;

/* "tcp://10.0.0.3:5557", "tcp://[::1]:5557", "ipc:///run/engine.events"; no names of hosts. KV_ERR_CONFIG. */
kv_status_t kvp_endpoint_check(const char *endpoint);

/* Connect, again and again; begins with the next tick. All from endpoint to ctx is set. */
void kvp_subscriber_init(kvp_subscriber_t *subscriber);
void kvp_subscriber_fini(kvp_subscriber_t *subscriber);
/* Close the connection, and try again with the next tick. */
void kvp_subscriber_reconnect(kvp_subscriber_t *subscriber);
void kvp_subscriber_tick(kvp_subscriber_t *subscriber, uint64_t now_ns);
/* The loop has named a descriptor: is it the subscriber's? Then it is pending. */
int kvp_subscriber_ready(kvp_subscriber_t *subscriber, int fd);
/* Take what has come; it stays pending while more is there than is taken at a time. */
void kvp_subscriber_serve(kvp_subscriber_t *subscriber, uint64_t now_ns);

#endif
