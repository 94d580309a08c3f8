/* daemon/io/events/zmtp.h -- a ZeroMQ PUB endpoint on a UNIX socket (ZMTP 3.0, rfc.zeromq.org/spec/23) that counts
 * every byte it holds (decision 026).
 *
 *   accept --greeting--> GREETED
 *       --READY--> OPEN          any frame over 512 bytes, other protocol, late handshake--> closed
 *
 * An endpoint has one topic, so all subscribers get the same bytes. These lie once, in a log of fixed size; a
 * subscriber is a position in it. One that falls a whole log behind misses the oldest messages: whole ones, and it sees
 * the gap in their numbers. So neither the number of subscribers nor how slowly they read decides how much memory an
 * endpoint takes. A subscription is a counter, whatever its length.
 *
 * All calls from one thread. Nothing blocks.
 */
#ifndef KVD_IO_EVENTS_ZMTP_H
#define KVD_IO_EVENTS_ZMTP_H

#include "kv/metric.h"
#include "options/sockets.h"

#include <stdint.h>

#define KVD_ZMTP_MESSAGE_MAX 65536u /* bytes of a message on the wire, all frames */
#define KVD_ZMTP_HEAD_MAX    512u   /* of them at most: topic, number and headers */

typedef struct kvd_zmtp kvd_zmtp_t;

typedef struct kvd_zmtp_config {
	const char *path; /* socket */
	kvd_access_t access;
	const char *topic;  /* at most 255 bytes */
	uint64_t log_bytes; /* rounded down to a power of two, at least 256 KiB */
	uint32_t max_subscribers;
	int epoll_fd; /* gets the endpoint's descriptors; data.ptr is for kvd_zmtp_ready() */
	kv_metrics_t *metrics;
} kvd_zmtp_config_t;

/* Listen. As kv_sock_listen(): `why` says why not; or KV_ERR_NOMEM. Paths and topic are copied. */
kv_status_t kvd_zmtp_open(const kvd_zmtp_config_t *config, kvd_zmtp_t **p_zmtp, char *why, size_t cap);
/* Close all connections and remove the socket. NULL is fine. */
void kvd_zmtp_close(kvd_zmtp_t *zmtp);

/* Append a message to the log: topic, number, payload; `len` is at most KVD_ZMTP_MESSAGE_MAX - KVD_ZMTP_HEAD_MAX. The
 * oldest ones give way. */
void kvd_zmtp_put(kvd_zmtp_t *zmtp, uint64_t seq, const uint8_t *payload, size_t len);
/* Send each subscriber what its socket takes, in turns. 1: there is more that can be sent now. */
int kvd_zmtp_flush(kvd_zmtp_t *zmtp);
/* Does a subscriber wait for bytes, sent as soon as it reads? */
int kvd_zmtp_waiting(const kvd_zmtp_t *zmtp);

/* epoll has named one of an endpoint's descriptors. */
void kvd_zmtp_ready(void *source, uint32_t events);
/* About once a second: close late handshakes, accept again, give memory back that has not been used since the last
 * call. */
void kvd_zmtp_tick(kvd_zmtp_t *zmtp);

#endif
