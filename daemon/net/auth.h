/* daemon/net/auth.h -- keys of peers: read from files, proved in the handshake, and the MAC of every later frame.
 *
 * Both daemons of a pair have the same key. A proof is HMAC-SHA256 under that key over a role, both names and both
 * nonces, so that it is good for one handshake, one direction and this pair only. The two session keys are made in the
 * same way.
 */
#ifndef KVD_NET_AUTH_H
#define KVD_NET_AUTH_H

#include "net/messages.h"

/* What a handshake is about. */
typedef struct kvd_handshake {
	char from[KVD_NET_NAME_MAX + 1], to[KVD_NET_NAME_MAX + 1]; /* dialler, dialled */
	uint8_t from_nonce[KVD_NET_NONCE], to_nonce[KVD_NET_NONCE];
} kvd_handshake_t;

typedef enum kvd_proof {
	KVD_PROOF_DIALLED,  /* that the dialled side has the key */
	KVD_PROOF_DIALLER,  /* that the dialler has it */
	KVD_KEY_TO_DIALLED, /* session key of frames to the dialled side */
	KVD_KEY_TO_DIALLER,
} kvd_proof_t;

void kvd_auth_derive(kv_slice_t key, kvd_proof_t what, const kvd_handshake_t *handshake, uint8_t out[KVD_NET_MAC]);
/* MAC of a frame. */
void kvd_auth_mac(const uint8_t key[KVD_NET_MAC], const void *frame, size_t len, uint8_t out[KVD_NET_MAC]);
/* In a time that does not depend on the bytes. */
int kvd_auth_equal(const void *a, const void *b, size_t len);

#endif
