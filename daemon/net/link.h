/* daemon/net/link.h -- a control connection to a peer, or the beginning of one for bytes: TLS over TCP.
 *
 *   dial:   CONNECTING --connected--> SHAKING --the handshake is over, HELLO--> OPEN
 *   accept: SHAKING --the handshake is over--> GREETED --HELLO without a ticket--> OPEN
 *   any --malformed, wrong key, changed, too slow, silent, gone--> DEAD, with a status
 *   a HELLO with a ticket--> DEAD without one: its connection is somebody else's now
 *
 * Until OPEN a side takes KVD_TLS_EARLY_BYTES, and a HELLO, within KVD_LINK_HANDSHAKE_NS. Both sides send PING; a link
 * on which nothing is heard for `silence_ns` is dead. Nothing here blocks.
 */
#ifndef KVD_NET_LINK_H
#define KVD_NET_LINK_H

#include "net/tls.h"

#include "kv/env.h"

#include <sys/socket.h>

#define KVD_LINK_HANDSHAKE_NS UINT64_C(2000000000)
#define KVD_LINK_OUT_MAX      (64u << 20) /* bytes that wait to be sent */

typedef enum kvd_link_state {
	KVD_LINK_CONNECTING,
	KVD_LINK_SHAKING,
	KVD_LINK_GREETED,
	KVD_LINK_OPEN,
	KVD_LINK_DEAD
} kvd_link_state_t;

typedef struct kvd_link kvd_link_t;

typedef struct kvd_link_ops {
	/* It is OPEN. Another status than KV_OK ends the link with it. */
	kv_status_t (*opened)(void *ctx, kvd_link_t *link);
	/* A HELLO with a ticket has come, or was sent: kvd_link_take(), or another status, which ends it. */
	kv_status_t (*bytes)(void *ctx, kvd_link_t *link, const uint8_t ticket[KVD_NET_TICKET]);
	/* A message other than PING and PONG; what it borrows is valid during the call. As `opened`. */
	kv_status_t (*received)(void *ctx, kvd_link_t *link, uint32_t code, const kvd_net_message_t *message);
} kvd_link_ops_t;

typedef struct kvd_link_config {
	const kvd_link_ops_t *ops;
	void *ctx;
	uint64_t silence_ns;
	kvd_key_ring_t ring;       /* of who accepts */
	const kvd_pair_key_t *key; /* of who dials: copied */
	const uint8_t *ticket;     /* likewise; NULL: a control connection */
} kvd_link_config_t;

/* Connect to the peer at this address. NULL: out of memory or descriptors. */
kvd_link_t *kvd_link_dial(const kvd_link_config_t *config, const struct sockaddr *address, socklen_t address_len);
/* Be the dialled side of a connection that was accepted; fd is the link's. NULL: out of memory, fd is closed. */
kvd_link_t *kvd_link_accept(const kvd_link_config_t *config, int fd);
void kvd_link_free(kvd_link_t *link);

int kvd_link_fd(const kvd_link_t *link);
short kvd_link_events(const kvd_link_t *link); /* for poll() */
/* Take what has come, send what waits, look at the clock: the caller's, on which it is born in the first call. */
void kvd_link_progress(kvd_link_t *link, uint64_t now_ns);

/* Queue a message. KV_ERR_CLOSED: the link is not open; KV_ERR_BUSY: KVD_LINK_OUT_MAX bytes wait (not
 * of FINISH); KV_ERR_ARG, KV_ERR_TOO_BIG: the peer would refuse it. */
kv_status_t kvd_link_send(kvd_link_t *link, kvd_net_code_t code, const void *message);
/* End it. */
void kvd_link_fail(kvd_link_t *link, kv_status_t status, const char *why);
/* End it with KV_OK, and have its connection. */
kvd_tls_t *kvd_link_take(kvd_link_t *link, int *p_fd);

kvd_link_state_t kvd_link_state(const kvd_link_t *link);
kv_status_t kvd_link_status(const kvd_link_t *link); /* DEAD: why; BUSY: the dialled side closed it without a word */
const char *kvd_link_why(const kvd_link_t *link);
/* As kvd_tls_key(). */
const kvd_pair_key_t *kvd_link_key(const kvd_link_t *link);
/* DEAD: because the other side is a kvd without TLS. */
int kvd_link_is_old(const kvd_link_t *link);

#endif
