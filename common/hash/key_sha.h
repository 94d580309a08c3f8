/* key_sha.h -- the two SHA-256 compression loops behind kv/key.h; private to common/ and its tests. */
#ifndef KV_KEY_SHA_H
#define KV_KEY_SHA_H

#include "kv/types.h"

typedef struct kv_sha_ops {
	const char *name;

	/* Compress whole 64-byte blocks. */
	void (*blocks)(uint32_t state[8], const uint8_t *data, size_t blocks);

	/* Compress `units` units of unit_blocks x 16 tokens and write the key after each. Stops before a unit that
	 * holds KV_TOKEN_REFUSED; returns the number of units done. Token ids are read in place: the chain is
	 * defined over their little-endian bytes and both our machines are little-endian. */
	uint32_t (*chain)(uint32_t state[8], const uint32_t *tokens, uint32_t unit_blocks, uint32_t units,
			  kv_key_t *keys);
} kv_sha_ops_t;

/* NULL where this CPU has no SHA instructions. */
const kv_sha_ops_t *kv_sha_native(void);

/* OpenSSL's SHA256_Transform: everywhere. */
const kv_sha_ops_t *kv_sha_openssl(void);

#endif
