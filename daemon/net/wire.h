/* daemon/net/wire.h -- between the daemon and its net process: a pair of SOCK_SEQPACKET sockets, one structure a
 * message. Both ends are of one build (the daemon keeps the program open from its start), so the structures are raw;
 * version and size are in each message.
 *
 *   daemon --> net   CONFIG first, and again when keys may have changed; FETCH: with a memfd that holds tokens, or
 *                    hashes and then tokens
 *   net --> daemon   STATE, at least each KVD_NET_REPORT_NS, and with each change of how many peers are connected;
 *                    BEGUN: one answer to each FETCH
 */
#ifndef KVD_NET_WIRE_H
#define KVD_NET_WIRE_H

#include "net/messages.h"
#include "options/peers.h"

#define KVD_NET_FD        3 /* of the net process */
#define KVD_NET_WIRE      5u
#define KVD_NET_REPORT_NS UINT64_C(500000000)
#define KVD_NET_ASKED_MAX 1024u /* FETCHes that are not answered */
#define KVD_NET_BEGUN_MAX 64u   /* answers in one message */

typedef enum kvd_net_verb {
	KVD_NET_VERB_CONFIG = 1,
	KVD_NET_VERB_FETCH = 2,
	KVD_NET_VERB_STATE = 3,
	KVD_NET_VERB_BEGUN = 4
} kvd_net_verb_t;

typedef struct kvd_net_config {
	uint32_t version, verb;
	int32_t log_level;
	char run_dir[KV_OPTION_STRING_MAX];
	char namespaces[KV_OPTION_STRING_MAX];
	char transports[KV_OPTION_STRING_MAX];
	uint64_t in_flight;  /* bytes of one peer that are on their way to us */
	uint64_t timeout_ns; /* silence, or bytes that do not come or are not read, for so long end a link */
	kvd_peers_config_t peers;
} kvd_net_config_t;

/* A consumer here wants what a peer has. */
typedef struct kvd_net_fetch {
	uint32_t version, verb;
	uint64_t order; /* named by its answer */
	char ns[65];
	char peer[KVD_PEER_NAME_MAX + 1];
	char transfer[129];
	uint32_t flags;      /* KVD_NET_PREFIX */
	uint32_t hash_bytes; /* as in ASK */
	uint32_t timeout_ms;
	uint32_t identity_len, salt_len, names_len, rest_len; /* names and rest: of the memfd */
	char identity[4096];
	char salt[1024];
} kvd_net_fetch_t;

/* What has become of a FETCH. */
typedef struct kvd_net_answer {
	uint64_t order;
	int32_t status; /* OK: its hand-over here has begun, and tells what follows; else why there is none */
} kvd_net_answer_t;

typedef struct kvd_net_begun {
	uint32_t version, verb;
	uint32_t count;
	kvd_net_answer_t answers[KVD_NET_BEGUN_MAX];
} kvd_net_begun_t;

typedef enum kvd_peer_state { KVD_PEER_DOWN, KVD_PEER_DIALLING, KVD_PEER_UP } kvd_peer_state_t;

/* What happened between us and a peer since this net process began. */
typedef struct kvd_peer_counts {
	uint64_t bytes_in, bytes_out;   /* payload that arrived and was verified; that was pushed */
	uint64_t messages_out;          /* that they were pushed in */
	uint64_t fetched, fetch_failed; /* transfers that we asked for */
	uint64_t served, serve_failed;  /* that it asked for */
	uint64_t links, breaks;         /* links to it that opened; that ended afterwards */
	uint64_t corrupt;               /* blocks whose bytes did not match their digests */
} kvd_peer_counts_t;

typedef struct kvd_peer_report {
	char name[KVD_PEER_NAME_MAX + 1];
	uint8_t asks;    /* it has a link to us */
	uint8_t has_ucx; /* UP: its bytes come over UCX */
	uint8_t reserved[1];
	uint32_t key;      /* number of the key of our link; 0: there is none */
	uint32_t state;    /* kvd_peer_state_t of our link to it */
	uint32_t retry_ms; /* DOWN: until it is dialled again */
	uint32_t fetching, serving;
	uint64_t in_flight; /* bytes on their way to us */
	kvd_peer_counts_t counts;
	char error[160]; /* the last one; "": none */
} kvd_peer_report_t;

typedef struct kvd_net_state {
	uint32_t version, verb;
	uint32_t count;
	int32_t ucx;                                            /* 1: there is one */
	char ucx_version[32];                                   /* or "" */
	char why[200];                                          /* ucx 0: why there is none */
	char listen_error[160];                                 /* "": it listens */
	uint64_t refused_frames, refused_proofs, refused_links; /* malformed; wrong key, or changed; a name that is
								   taken, too many, too slow */
	uint64_t refused_old;                                   /* a kvd without TLS */
	kvd_peer_report_t peers[KVD_PEERS_MAX];
} kvd_net_state_t;

#endif
