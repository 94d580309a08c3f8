/* Block keys: what is hashed, in which order. How it is hashed: key_shani.c, key_openssl.c. */
#include "kv/key.h"

#include "key_sha.h"

#include <stdatomic.h>

/* Token ids and header fields are hashed as they lie in memory. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "keys are defined over little-endian integers");

#define SHA_BLOCK         64u
#define UNIT_BLOCK_TOKENS (SHA_BLOCK / (uint32_t)sizeof(uint32_t))
#define FOREIGN_HASH_MIN  16u
#define FOREIGN_HASH_MAX  60u

static const uint32_t sha256_iv[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
				      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static const kv_sha_ops_t *sha(void)
{
	static _Atomic(const kv_sha_ops_t *) chosen;
	const kv_sha_ops_t *ops = atomic_load_explicit(&chosen, memory_order_relaxed);

	if (!ops) {
		ops = kv_sha_native() ? kv_sha_native() : kv_sha_openssl();
		atomic_store_explicit(&chosen, ops, memory_order_relaxed);
	}

	return ops;
}

static void state_bytes(const uint32_t state[8], uint8_t *out, size_t words)
{
	for (size_t i = 0; i < words; i++) {
		uint32_t word = __builtin_bswap32(state[i]);

		memcpy(out + 4 * i, &word, sizeof word);
	}
}

void kv_sha256_blocks(uint32_t state[8], const uint8_t *data, size_t blocks)
{
	sha()->blocks(state, data, blocks);
}

void kv_sha256(const void *data, size_t len, uint8_t out[32])
{
	uint8_t tail[2 * SHA_BLOCK] = {0};
	uint32_t state[8];
	const size_t whole = len / SHA_BLOCK;
	const size_t rest = len % SHA_BLOCK;
	const size_t tail_blocks = rest + 9 <= SHA_BLOCK ? 1 : 2;
	const uint64_t bits = __builtin_bswap64((uint64_t)len * 8);

	memcpy(state, sha256_iv, sizeof state);
	kv_sha256_blocks(state, data, whole);

	if (rest > 0) {
		memcpy(tail, (const uint8_t *)data + whole * SHA_BLOCK, rest);
	}
	tail[rest] = 0x80;
	memcpy(tail + tail_blocks * SHA_BLOCK - sizeof bits, &bits, sizeof bits);
	kv_sha256_blocks(state, tail, tail_blocks);

	state_bytes(state, out, 8);
}

kv_status_t kv_chain_init(kv_chain_t *chain, const uint8_t root[32], uint32_t unit_tokens, uint64_t epoch)
{
	const uint32_t version = KV_KEY_VERSION;
	uint8_t header[SHA_BLOCK] = {0};

	if (unit_tokens == 0 || unit_tokens > KV_MAX_UNIT_TOKENS) {
		return KV_ERR_ARG;
	}

	memcpy(header, root, 32);
	memcpy(header + 32, &unit_tokens, sizeof unit_tokens);
	memcpy(header + 36, &version, sizeof version);
	memcpy(header + 40, &epoch, sizeof epoch);
	memcpy(chain->h, sha256_iv, sizeof chain->h);
	kv_sha256_blocks(chain->h, header, 1);
	chain->unit_tokens = unit_tokens;

	return KV_OK;
}

/* One unit of any length: whole blocks in place, the rest padded with zeros. A refused token changes nothing. */
static kv_status_t unit_tokens_into(uint32_t state[8], const uint32_t *tokens, uint32_t count)
{
	const uint32_t whole = count / UNIT_BLOCK_TOKENS;
	const uint32_t rest = count % UNIT_BLOCK_TOKENS;

	/* The marker of extra keys as a token would give two prompts one key. */
	for (uint32_t i = 0; i < count; i++) {
		if (tokens[i] == KV_TOKEN_REFUSED) {
			return KV_ERR_ARG;
		}
	}

	kv_sha256_blocks(state, (const uint8_t *)tokens, whole);
	if (rest > 0) {
		uint8_t last[SHA_BLOCK] = {0};

		memcpy(last, tokens + (size_t)whole * UNIT_BLOCK_TOKENS, rest * sizeof *tokens);
		kv_sha256_blocks(state, last, 1);
	}

	return KV_OK;
}

kv_status_t kv_chain_tokens(kv_chain_t *chain, const uint32_t *tokens, uint32_t units, kv_key_t *keys, uint32_t *p_done)
{
	uint32_t done = 0;

	/* Without padding the tokens are the message: the loop of the CPU's instructions hashes all units in one call.
	 */
	if (chain->unit_tokens % UNIT_BLOCK_TOKENS == 0) {
		done = sha()->chain(chain->h, tokens, chain->unit_tokens / UNIT_BLOCK_TOKENS, units, keys);
	} else {
		while (done < units && unit_tokens_into(chain->h, tokens + (size_t)done * chain->unit_tokens,
							chain->unit_tokens) == KV_OK) {
			state_bytes(chain->h, keys[done].b, 4);
			done++;
		}
	}
	if (p_done) {
		*p_done = done;
	}

	return done == units ? KV_OK : KV_ERR_ARG;
}

/* Marker, length, bytes, zeros to a whole block. */
static void extra_into(uint32_t state[8], const uint8_t *extra, uint32_t len)
{
	const uint32_t marker = KV_TOKEN_REFUSED;
	const uint32_t head = 8;
	uint32_t at = len < SHA_BLOCK - head ? len : SHA_BLOCK - head;
	uint8_t block[SHA_BLOCK] = {0};

	memcpy(block, &marker, sizeof marker);
	memcpy(block + 4, &len, sizeof len);
	memcpy(block + head, extra, at);
	kv_sha256_blocks(state, block, 1);

	kv_sha256_blocks(state, extra + at, (len - at) / SHA_BLOCK);
	at += (len - at) / SHA_BLOCK * SHA_BLOCK;
	if (at < len) {
		memset(block, 0, sizeof block);
		memcpy(block, extra + at, len - at);
		kv_sha256_blocks(state, block, 1);
	}
}

kv_status_t kv_chain_unit(kv_chain_t *chain, const void *extra, uint32_t extra_len, const uint32_t *tokens,
			  kv_key_t *key)
{
	uint32_t state[8];

	if (extra_len > KV_MAX_EXTRA_BYTES) {
		return KV_ERR_ARG;
	}

	/* A copy: a token that is refused leaves the chain as it was. */
	memcpy(state, chain->h, sizeof state);
	if (extra_len > 0) {
		extra_into(state, extra, extra_len);
	}
	if (unit_tokens_into(state, tokens, chain->unit_tokens) != KV_OK) {
		return KV_ERR_ARG;
	}
	memcpy(chain->h, state, sizeof state);
	state_bytes(chain->h, key->b, 4);

	return KV_OK;
}

kv_status_t kv_key_bind(const kv_chain_t *header, const void *hash, uint32_t len, kv_key_t *key)
{
	uint8_t block[SHA_BLOCK] = {0};
	uint32_t state[8];

	if (len < FOREIGN_HASH_MIN || len > FOREIGN_HASH_MAX) {
		return KV_ERR_ARG;
	}

	/* The length is hashed too: a hash and the same hash with zeros behind it have different keys. */
	memcpy(block, hash, len);
	memcpy(block + FOREIGN_HASH_MAX, &len, sizeof len);
	memcpy(state, header->h, sizeof state);
	kv_sha256_blocks(state, block, 1);
	state_bytes(state, key->b, 4);

	return KV_OK;
}

void kv_key_format(const kv_key_t *key, char out[33])
{
	static const char digits[] = "0123456789abcdef";

	for (size_t i = 0; i < KV_KEY_BYTES; i++) {
		out[2 * i] = digits[key->b[i] >> 4];
		out[2 * i + 1] = digits[key->b[i] & 15];
	}
	out[32] = '\0';
}
