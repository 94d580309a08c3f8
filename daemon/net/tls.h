/* daemon/net/tls.h -- a connection between two daemons: TLS 1.3 with the key that they share, by OpenSSL. Nothing here
 * blocks.
 *
 * The key is an external PSK, always with an ephemeral key exchange (psk_dhe_ke): no certificates, tickets, 0-RTT,
 * other versions or ciphers. The PSK's identity names dialler, dialled and the number of the key. The dialled side
 * compares it with those that its configuration has, and reads nothing out of it.
 */
#ifndef KVD_NET_TLS_H
#define KVD_NET_TLS_H

#include "net/messages.h"

#define KVD_TLS_EARLY_BYTES 4096u      /* that one side reads before the handshake is over */
#define KVD_TLS_RECORDS     (1u << 22) /* under one key; AES-GCM is good for 2^24.5 */
#define KVD_PSK_BYTES       32u
#define KVD_PSK_IDENTITY    (2u * KVD_NET_NAME_MAX + 32u)

typedef struct kvd_tls kvd_tls_t;

/* A key shared with a peer. */
typedef struct kvd_pair_key {
	char peer[KVD_NET_NAME_MAX + 1];
	char to_peer[KVD_PSK_IDENTITY], from_peer[KVD_PSK_IDENTITY]; /* identities: we dial; it dials */
	uint32_t number;                                             /* follows from the key */
	uint8_t psk[KVD_PSK_BYTES];
} kvd_pair_key_t;

/* The keys of all peers: the one at this index; NULL: there are no more. */
typedef struct kvd_key_ring {
	const kvd_pair_key_t *(*at)(void *ctx, uint32_t index);
	void *ctx;
} kvd_key_ring_t;

/* `secret`: what the key file has. */
void kvd_pair_key_init(kvd_pair_key_t *key, const char *own_name, const char *peer, kv_slice_t secret);
/* In a time that does not depend on the bytes. */
int kvd_tls_equal(const void *a, const void *b, size_t len);

/* Over a connected socket, which stays the caller's. NULL: out of memory. */
kvd_tls_t *kvd_tls_dial(int fd, const kvd_pair_key_t *key);
kvd_tls_t *kvd_tls_accept(int fd, kvd_key_ring_t ring);
void kvd_tls_free(kvd_tls_t *tls);
/* After the handshake: a buffer between OpenSSL and the socket, for what is sent or for what is received, so that one
 * call moves eight records. Once. KV_ERR_NOMEM. */
kv_status_t kvd_tls_buffer(kvd_tls_t *tls, int is_sender);
/* What is written stays in that buffer until it is full, or until this. KV_PENDING: no room now; KV_ERR_CLOSED. */
kv_status_t kvd_tls_flush(kvd_tls_t *tls);

/* KV_OK: it is over; KV_PENDING: go on when the socket is ready. KV_ERR_SECRET: no common key; KV_ERR_NOT_FOUND: the
 * dialler names no key of ours; KV_ERR_VERSION: another version; KV_ERR_PROTO: no TLS; KV_ERR_TOO_BIG;
 * KV_ERR_CLOSED. */
kv_status_t kvd_tls_handshake(kvd_tls_t *tls);
/* At most a record. KV_PENDING: nothing now. KV_ERR_SECRET: a record was changed; KV_ERR_PROTO; KV_ERR_CLOSED. */
kv_status_t kvd_tls_read(kvd_tls_t *tls, void *out, size_t cap, size_t *p_n);
/* At most a record. KV_PENDING: no room now; go on with the same bytes. */
kv_status_t kvd_tls_write(kvd_tls_t *tls, const void *data, size_t len, size_t *p_n);
uint64_t kvd_tls_sent(const kvd_tls_t *tls); /* bytes that went out of that buffer */
/* The socket must be writable before the call that was PENDING goes on, or before more of the buffer goes. */
int kvd_tls_wants_write(const kvd_tls_t *tls);

/* The key that the other side has proved, or at least named in a hello that was made with it; NULL: not yet. */
const kvd_pair_key_t *kvd_tls_key(const kvd_tls_t *tls);
/* It speaks the handshake of kvd before TLS. */
int kvd_tls_is_old(const kvd_tls_t *tls);
/* Renew the key for what we send after that many records, not KVD_TLS_RECORDS; and how often it was renewed. */
void kvd_tls_set_records(kvd_tls_t *tls, uint32_t records);
uint64_t kvd_tls_renewals(const kvd_tls_t *tls);

#endif
