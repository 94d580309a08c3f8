/* events/subscriber.h -- a ZeroMQ SUB socket (ZMTP 3.0, rfc.zeromq.org/spec/23, without encryption) on the proxy's
 * loop. It takes messages of three frames: topic, number, payload.
 *
 *   DOWN --connect--> CONNECTING --send greeting and READY--> GREETING --READY has come, send subscription--> OPEN
 *     ^---------------- refused, late, closed, more bytes than a message may have, no ZMTP --------------------'
 *
 * Why not libzmq: docs/decisions/026-limits-per-tenant.md. A publisher decides neither how many bytes are kept here nor
 * whether the process goes on.
 */
#ifndef KVP_EVENTS_SUBSCRIBER_H
#define KVP_EVENTS_SUBSCRIBER_H

#include "loop.h"

#include <stddef.h>
#include <sys/socket.h>

#define KVP_MESSAGE_MAX ((size_t)2 << 20) /* bytes of a message on the wire, all frames */

/* A message. The payload is borrowed for the call. */
typedef void (*kvp_message_fn)(void *ctx, uint64_t seq, const uint8_t *payload, size_t len);

/* What has come of a connection's bytes. All zero is a good start. */
typedef struct kvp_zmtp {
	uint8_t *bytes;
	size_t len, cap;
	int is_greeted, is_ready; /* greeting and READY have come */
} kvp_zmtp_t;

/* Take n more bytes, and tell of the messages that are whole. KV_ERR_PROTO: no ZMTP 3, or no message of ours: the
 * connection must be closed. KV_ERR_NOMEM. */
kv_status_t kvp_zmtp_feed(kvp_zmtp_t *zmtp, const uint8_t *data, size_t n, kvp_message_fn message, void *ctx);
void kvp_zmtp_reset(kvp_zmtp_t *zmtp);

typedef enum kvp_subscriber_state {
	KVP_SUBSCRIBER_DOWN,
	KVP_SUBSCRIBER_CONNECTING,
	KVP_SUBSCRIBER_GREETING,
	KVP_SUBSCRIBER_OPEN
} kvp_subscriber_state_t;

typedef struct kvp_subscriber {
	const char *endpoint; /* borrowed */
	kvp_loop_t *loop;
	kvp_message_fn message;
	void (*lost)(void *ctx); /* the connection has ended: messages may be missed */
	void *ctx;
	kvp_subscriber_state_t state;
	int fd;          /* in the loop, as KVP_FD_EVENTS; -1: none */
	uint64_t due_ns; /* DOWN: next try; before OPEN: too late */
	kvp_zmtp_t zmtp;
	uint64_t malformed; /* connections closed for what has come */
} kvp_subscriber_t;

/* "tcp://10.0.0.3:5557", "tcp://[::1]:5557", "ipc:///run/engine.events"; no names of hosts. KV_ERR_CONFIG. */
kv_status_t kvp_endpoint_address(const char *endpoint, struct sockaddr_storage *address, socklen_t *p_len);

/* Connect, again and again; begins with the next tick. endpoint, loop, message, lost and ctx are set. */
void kvp_subscriber_init(kvp_subscriber_t *subscriber);
void kvp_subscriber_fini(kvp_subscriber_t *subscriber);
/* Close the connection, and try again with the next tick. */
void kvp_subscriber_reconnect(kvp_subscriber_t *subscriber);
void kvp_subscriber_tick(kvp_subscriber_t *subscriber, uint64_t now_ns);
/* The loop has named its descriptor. */
void kvp_subscriber_ready(kvp_subscriber_t *subscriber, uint64_t now_ns);

#endif
