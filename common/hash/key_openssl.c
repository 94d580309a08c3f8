/* SHA-256 compression by OpenSSL: for CPUs without x86's SHA instructions (on others it has assembly of its own).
 * The one-block interface is deprecated, yet the closed one cannot continue a chain without its final padding. */
#define OPENSSL_SUPPRESS_DEPRECATED
#include "key_sha.h"

#include "kv/key.h"

#include <openssl/sha.h>

static void openssl_blocks(uint32_t state[8], const uint8_t *data, size_t blocks)
{
	SHA256_CTX ctx = {0};

	memcpy(ctx.h, state, sizeof ctx.h);
	for (size_t i = 0; i < blocks; i++) {
		SHA256_Transform(&ctx, data + 64 * i);
	}
	memcpy(state, ctx.h, sizeof ctx.h);
}

static int has_refused_token(const uint32_t *tokens, size_t count)
{
	int bad = 0;

	for (size_t i = 0; i < count; i++) {
		bad |= tokens[i] == KV_TOKEN_REFUSED;
	}

	return bad;
}

static uint32_t openssl_chain(uint32_t state[8], const uint32_t *tokens, uint32_t unit_blocks, uint32_t units,
			      kv_key_t *keys)
{
	const size_t unit_tokens = (size_t)16 * unit_blocks;
	SHA256_CTX ctx = {0};
	uint32_t done;

	memcpy(ctx.h, state, sizeof ctx.h);
	for (done = 0; done < units && !has_refused_token(tokens, unit_tokens); done++) {
		for (uint32_t i = 0; i < unit_blocks; i++) {
			SHA256_Transform(&ctx, (const uint8_t *)tokens + (size_t)64 * i);
		}
		for (size_t i = 0; i < 4; i++) {
			uint32_t word = __builtin_bswap32(ctx.h[i]);

			memcpy(keys[done].b + 4 * i, &word, sizeof word);
		}
		tokens += unit_tokens;
	}
	memcpy(state, ctx.h, sizeof ctx.h);

	return done;
}

const kv_sha_ops_t *kv_sha_openssl(void)
{
	static const kv_sha_ops_t ops = {"openssl", openssl_blocks, openssl_chain};

	return &ops;
}
