/* daemon/net/link.h -- one authenticated control connection to a peer, over TCP.
 *
 *   dial:   CONNECTING --connected, HELLO--> HELLO_SENT --CHALLENGE is right, PROOF--> OPEN
 *   accept: ACCEPTED --HELLO of a known name, CHALLENGE--> CHALLENGED --PROOF is right--> OPEN
 *   any --malformed, wrong proof or MAC, out of order, too slow, silent, gone--> DEAD, with a status
 *
 * Until OPEN a frame has at most KVD_NET_EARLY_BODY bytes and the whole handshake KVD_LINK_HANDSHAKE_NS. From OPEN on
 * each frame has a MAC under a key of this connection and direction, and its number: one that is replayed, reordered,
 * left out or changed ends the link. Both sides send PING; a link on which nothing is heard for `silence_ns` is dead.
 * Nothing here blocks.
 */
#ifndef KVD_NET_LINK_H
#define KVD_NET_LINK_H

#include "net/auth.h"

#include "kv/env.h"

#include <sys/socket.h>

#define KVD_LINK_HANDSHAKE_NS UINT64_C(2000000000)
#define KVD_LINK_OUT_MAX      (64u << 20) /* bytes that wait to be sent */

typedef enum kvd_link_state {
	KVD_LINK_CONNECTING,
	KVD_LINK_HELLO_SENT,
	KVD_LINK_ACCEPTED,
	KVD_LINK_CHALLENGED,
	KVD_LINK_OPEN,
	KVD_LINK_DEAD
} kvd_link_state_t;

typedef struct kvd_link kvd_link_t;

typedef struct kvd_link_ops {
	/* The key shared with this peer; an empty slice: no such peer. */
	kv_slice_t (*find_key)(void *ctx, const char *name);
	/* The handshake is over. Another status than KV_OK ends the link with it. */
	kv_status_t (*opened)(void *ctx, kvd_link_t *link);
	/* A message other than PING and PONG; what it borrows is valid during the call. Likewise. */
	kv_status_t (*received)(void *ctx, kvd_link_t *link, uint32_t code, const kvd_net_message_t *message);
} kvd_link_ops_t;

typedef struct kvd_link_config {
	const char *name; /* our own */
	const kvd_link_ops_t *ops;
	void *ctx;
	uint64_t silence_ns;
} kvd_link_config_t;

/* Connect to the peer at this address. NULL: out of memory or descriptors. */
kvd_link_t *kvd_link_dial(const kvd_link_config_t *config, const char *peer, const struct sockaddr *address,
			  socklen_t address_len);
/* Be the dialled side of a connection that was accepted; fd is the link's. NULL: out of memory, fd is closed. */
kvd_link_t *kvd_link_accept(const kvd_link_config_t *config, int fd);
void kvd_link_free(kvd_link_t *link);

int kvd_link_fd(const kvd_link_t *link);
short kvd_link_events(const kvd_link_t *link); /* for poll() */
/* Take what has come, send what waits, look at the clock. */
void kvd_link_progress(kvd_link_t *link, uint64_t now_ns);

/* Queue a message. KV_ERR_CLOSED: the link is not open; KV_ERR_BUSY: KVD_LINK_OUT_MAX bytes wait (not
 * of FINISH); KV_ERR_ARG, KV_ERR_TOO_BIG: the peer would refuse it. */
kv_status_t kvd_link_send(kvd_link_t *link, kvd_net_code_t code, const void *message);
/* End it. */
void kvd_link_fail(kvd_link_t *link, kv_status_t status, const char *why);

kvd_link_state_t kvd_link_state(const kvd_link_t *link);
kv_status_t kvd_link_status(const kvd_link_t *link); /* DEAD: why; BUSY: the dialled side closed it before CHALLENGE */
const char *kvd_link_why(const kvd_link_t *link);
const char *kvd_link_peer(const kvd_link_t *link); /* name; "": not known yet. Proved once the link is open */
int kvd_link_is_dialler(const kvd_link_t *link);
uint64_t kvd_link_heard_ns(const kvd_link_t *link);

#endif
