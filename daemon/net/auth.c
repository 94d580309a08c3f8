/* Proofs and MACs: HMAC-SHA256 of libcrypto. */
#include "net/auth.h"

#include "kv/env.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <string.h>

void kvd_auth_mac(const uint8_t key[KVD_NET_MAC], const void *frame, size_t len, uint8_t out[KVD_NET_MAC])
{
	unsigned int n = KVD_NET_MAC;

	kv_assert(HMAC(EVP_sha256(), key, KVD_NET_MAC, frame, len, out, &n) && n == KVD_NET_MAC);
}

/* Fixed fields only: no two handshakes have one text. */
void kvd_auth_derive(kv_slice_t key, kvd_proof_t what, const kvd_handshake_t *handshake, uint8_t out[KVD_NET_MAC])
{
	struct {
		char label[16];
		uint32_t version, what;
		kvd_handshake_t handshake;
	} text;
	unsigned int n = KVD_NET_MAC;

	memset(&text, 0, sizeof text);
	memcpy(text.label, "kvd peers", 9);
	text.version = KVD_NET_VERSION;
	text.what = (uint32_t)what;
	text.handshake = *handshake; /* names are padded with zeros */
	kv_assert(HMAC(EVP_sha256(), key.data, (int)key.len, (const uint8_t *)&text, sizeof text, out, &n) &&
		  n == KVD_NET_MAC);
}

int kvd_auth_equal(const void *a, const void *b, size_t len)
{
	return CRYPTO_memcmp(a, b, len) == 0;
}
