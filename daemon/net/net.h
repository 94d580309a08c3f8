/* daemon/net/net.h -- the net process: everything it owns. One thread, but for the copiers; main.c polls, the others do
 * one step at a time.
 *
 *   main.c    the loop, reports to the daemon
 *   orders.c  what the daemon orders (answers.c: and what it is answered)
 *   links.c   links to and from peers: dialling, the breaker, names, who may speak (peer.c: one of them; keys.c)
 *   link.c    one control connection (tls.c, messages.c)
 *   way.c     how bytes go: stream.c or ucx/, and copiers.c: from where they land to where they stay
 *   prefix.c  namespaces, spaces and keys, by libkvc
 *   fetch.c   the consumer's side: blocks of a peer become blocks here, and chunks of a hand-over
 *   serve.c   the owner's side: a hand-over here, or a prefix, goes to a peer
 */
#ifndef KVD_NET_NET_H
#define KVD_NET_NET_H

#include "base/address.h"
#include "net/copiers.h"
#include "net/link.h"
#include "net/stream.h"
#include "net/ucx/ucx.h"
#include "net/wire.h"

#include "kvc.h"
#include "kv/log.h"

#include <poll.h>

#define KVD_NET_BATCH_BYTES (4u << 20) /* of one message, or one block */
#define KVD_NET_FETCHES_MAX 1024u
#define KVD_NET_SERVES_MAX  256u /* of one peer */
#define KVD_NET_PUSHES_MAX                                                                                             \
	4u /* to one peer: UCX sends all that it has at a time, and then all of it arrives at the end */

typedef struct kvd_net kvd_net_t;
typedef struct kvd_net_peer kvd_net_peer_t;
typedef struct kvd_fetch kvd_fetch_t;
typedef struct kvd_serve kvd_serve_t;
typedef struct kvd_tenant kvd_tenant_t;
typedef struct kvd_buffer kvd_buffer_t;

/* A connection from a peer, or from somebody who is not one yet. */
typedef struct kvd_inbound {
	struct kvd_inbound *next;
	kvd_link_t *link;
	kvd_net_peer_t *peer; /* NULL: no proof yet */
	int is_ready;         /* READY has come, and bytes go by: */
	kvd_ucx_ep_t *ep;     /* its UCX worker; or */
	kvd_stream_t *stream; /* NULL: it has not dialled it yet */
	uint8_t ticket[KVD_NET_TICKET];
	kvd_address_t from;
	int is_configured; /* that is the address of a peer */
	kvd_net_t *net;
} kvd_inbound_t;

struct kvd_net_peer {
	kvd_net_t *net;
	const kvd_peer_config_t *config;
	kvd_pair_key_t keys[KVD_PEER_KEYS_MAX];
	uint32_t key_count, dial_key; /* dial_key: what we try first */
	kvd_link_t *link;             /* that we have dialled; NULL: none */
	kvd_link_t *bytes_link;       /* for the stream; NULL: it is there, or none is needed */
	kvd_stream_t *stream;
	int is_old;               /* a kvd without TLS came from its address, and it has not been reached since */
	int has_opened, is_ready; /* READY has come: without a stream and a link for one bytes come over UCX */
	uint32_t failures;        /* in a row */
	uint64_t retry_ns;        /* no link: when to dial */
	kvd_inbound_t *inbound;
	kvd_buffer_t *buffers; /* landing windows */
	uint64_t landed_ns;    /* when something has begun or ceased to land, on the clock peer_ns */
	uint64_t buffer_bytes;
	uint64_t last_batch; /* of its OFFERs on this link */
	uint32_t fetching, serving;
	uint32_t
		pushes; /* under way, each under a lease: also those of transfers that it has finished, or of a link before */
	kvd_peer_counts_t counts;
	char error[160];
};

struct kvd_net {
	const kvd_net_config_t *config;
	int listen_fd;
	char listen_error[160];
	uint64_t listen_ns; /* when to try again */
	kvd_copiers_t *copiers;
	kvd_ucx_t *ucx;
	char ucx_why[200];
	int hears_all;   /* UCX: the kernel cannot keep strangers from its port */
	uint64_t ucx_ns; /* when to try again; UINT64_MAX: never */
	uint64_t now_ns;
	uint64_t peer_ns; /* the clock of what peers fail to do: it stands while this process does */
	int moved;        /* in this iteration: another one follows at once */
	uint64_t next_id;
	kvd_net_peer_t peers[KVD_PEERS_MAX];
	uint32_t peer_count;
	kvd_inbound_t *inbound;
	uint32_t strangers; /* inbound links without a proof */
	kvd_tenant_t *tenants;
	uint32_t tenant_count;
	kvd_fetch_t *fetches;
	uint32_t fetch_count;
	kvd_serve_t *serves;
	kvd_net_answer_t answers[KVD_NET_ASKED_MAX]; /* that the daemon has not got */
	uint32_t answer_count;
	uint64_t refused_frames, refused_proofs, refused_links, refused_old;
	uint64_t rekeyed_ns; /* when keys were read again */
};

/* ---- orders.c -------------------------------------------------------------------------------- */

/* KV_ERR_CLOSED: the daemon has gone. */
kv_status_t kvd_net_take_orders(kvd_net_t *net);
/* ---- answers.c ------------------------------------------------------------------------------- */

/* The one answer to a FETCH. */
void kvd_net_answer(kvd_net_t *net, uint64_t order, kv_status_t status);
/* As many as the socket takes. */
void kvd_net_send_answers(kvd_net_t *net);

/* ---- links.c --------------------------------------------------------------------------------- */

extern const kvd_bytes_ops_t kvd_net_bytes_ops; /* for a kvd_net_t */
kv_status_t kvd_net_peers_open(kvd_net_t *net, char *why, size_t cap);
/* Dial, accept, send, receive, give up. */
void kvd_net_peers_step(kvd_net_t *net);
/* Descriptors to poll: added behind the first n; returns how many there are. */
uint32_t kvd_net_peers_fds(const kvd_net_t *net, struct pollfd *fds, uint32_t n, uint32_t cap);
/* UCX has started: it hears the addresses of peers, and every link begins anew, since READY has something to say. */
void kvd_net_peers_admit(kvd_net_t *net);
void kvd_net_peers_restart(kvd_net_t *net, const char *why);

/* ---- keys.c ---------------------------------------------------------------------------------- */

/* Read the keys of these peers, which are those of net->config, from their files. KV_ERR_CONFIG: nothing has
 * changed. */
kv_status_t kvd_net_keys_read(kvd_net_t *net, const kvd_peers_config_t *peers, char *why, size_t cap);
kvd_key_ring_t kvd_net_key_ring(kvd_net_t *net);
/* The key that a link was made with is one of the peer's. */
int kvd_net_key_is_known(const kvd_net_peer_t *peer, const kvd_link_t *link);

/* ---- way.c ----------------------------------------------------------------------------------- */

/* May a peer ask? */
int kvd_net_has_way(const kvd_inbound_t *to);
/* As kvd_ucx_push() and kvd_stream_push(). */
kv_status_t kvd_net_push(kvd_inbound_t *to, const kvd_envelope_t *envelope, const struct iovec *runs, uint32_t count,
			 void *object);

/* ---- peer.c ---------------------------------------------------------------------------------- */

kvd_net_peer_t *kvd_net_peer_find(kvd_net_t *net, const char *name);
kvd_peer_state_t kvd_net_peer_state(const kvd_net_peer_t *peer);
/* Our link to it; NULL: it is down. */
kvd_link_t *kvd_net_peer_link(kvd_net_peer_t *peer);
/* The time of this iteration of the loop, on both clocks. */
void kvd_net_set_time(kvd_net_t *net, uint64_t now_ns);
/* Until this deadline; 0: it has passed. */
uint32_t kvd_net_left_ms(const kvd_net_t *net, uint64_t deadline_ns);
/* It does not do what it should: the link ends, and so does everything that waits for it. */
void kvd_net_peer_break(kvd_net_peer_t *peer, kv_status_t status, const char *why);

/* ---- fetch.c --------------------------------------------------------------------------------- */

/* What the consumer's daemon has passed on. `names`: of the order, and then its rest. With KV_OK the fetch answers it,
 * else the caller does. */
kv_status_t kvd_fetch_begin(kvd_net_t *net, const kvd_net_fetch_t *order, const uint8_t *names);
void kvd_fetches_step(kvd_net_t *net);
/* From the peer that we asked. Another status than KV_OK ends the link. */
kv_status_t kvd_fetch_offer(kvd_net_peer_t *peer, const kvd_net_offer_t *offer);
kv_status_t kvd_fetch_end(kvd_net_peer_t *peer, const kvd_net_end_t *end);
/* The link is down. */
void kvd_fetches_lost(kvd_net_peer_t *peer);
void *kvd_fetch_land(kvd_net_t *net, const kvd_envelope_t *envelope, size_t bytes, void **p_object);
void kvd_fetch_landed(void *object, kv_status_t status);
/* Bytes of the landing window that wait for bytes of the peer, or may still be written to. */
uint64_t kvd_fetch_in_flight(const kvd_net_peer_t *peer);

/* ---- serve.c --------------------------------------------------------------------------------- */

kv_status_t kvd_serve_ask(kvd_inbound_t *from, const kvd_net_ask_t *ask);
kv_status_t kvd_serve_go(kvd_inbound_t *from, const kvd_net_go_t *go);
kv_status_t kvd_serve_finish(kvd_inbound_t *from, const kvd_net_finish_t *finish);
void kvd_serves_step(kvd_net_t *net);
void kvd_serves_lost(kvd_inbound_t *from);
void kvd_serve_pushed(void *object, kv_status_t status);

#endif
