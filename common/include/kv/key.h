/* kv/key.h -- block keys: a SHA-256 chain over the prefix (golden vectors: tests/common).
 *
 * header block  root digest (32 bytes), u32 tokens a unit, u32 key version 1, u64 epoch, 16 zero bytes: one
 *               compression from SHA-256's IV
 * each unit     only if it has extra keys: u32 0xFFFFFFFF, u32 byte length, their canonical bytes, zeros to a
 *               multiple of 64;
 *               then the token ids as u32, zeros to a multiple of 64. No closing length.
 * key           bytes 0..15 of the state as SHA-256 serialises it (big-endian words)
 */
#ifndef KV_KEY_H
#define KV_KEY_H

#include "kv/status.h"
#include "kv/types.h"

#define KV_KEY_VERSION     1u
#define KV_TOKEN_REFUSED   UINT32_MAX /* never a token id: it marks extra keys */
#define KV_MAX_UNIT_TOKENS 4096u
#define KV_MAX_EXTRA_BYTES 65536u

/* The running state. Plain value: copy it to continue a chain later or to branch. */
typedef struct kv_chain {
	uint32_t h[8];
	uint32_t unit_tokens;
} kv_chain_t;

/* Start a chain at a space's root. KV_ERR_ARG: unit_tokens is 0 or over KV_MAX_UNIT_TOKENS. */
kv_status_t kv_chain_init(kv_chain_t *chain, const uint8_t root[32], uint32_t unit_tokens, uint64_t epoch);

/* Hash `units` consecutive units of chain->unit_tokens tokens without extra keys; keys[i] is the key after unit i.
 * KV_ERR_ARG: a token is KV_TOKEN_REFUSED; chain and keys are then unchanged up to the bad unit, *p_done units are done
 * (p_done may be NULL). */
kv_status_t kv_chain_tokens(kv_chain_t *chain, const uint32_t *tokens, uint32_t units, kv_key_t *keys,
			    uint32_t *p_done);

/* Hash one unit that has extra keys (cache salt, LoRA id, multimodal hashes: canonical bytes, at most
 * KV_MAX_EXTRA_BYTES). */
kv_status_t kv_chain_unit(kv_chain_t *chain, const void *extra, uint32_t extra_len, const uint32_t *tokens,
			  kv_key_t *key);

/* Bind an engine's own hash (16 to 60 bytes, cryptographic) to the space: one compression from the header's state over
 * (hash, zeros to 60 bytes, u32 length). `header` is a chain just initialised. KV_ERR_ARG: length out of range. */
kv_status_t kv_key_bind(const kv_chain_t *header, const void *hash, uint32_t len, kv_key_t *key);

/* Compress whole 64-byte blocks into a SHA-256 state. The fastest this CPU has: SHA instructions, else OpenSSL. */
void kv_sha256_blocks(uint32_t state[8], const uint8_t *data, size_t blocks);

/* SHA-256 of a short text (identity), closed as usual. */
void kv_sha256(const void *data, size_t len, uint8_t out[32]);

/* 32 lower-case hex digits and a NUL. */
void kv_key_format(const kv_key_t *key, char out[33]);

#endif
