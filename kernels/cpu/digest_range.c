/* Digests of ranges of memory. */
#include "range_state.h"

#include "kv/digest.h"

#include <string.h>

uint64_t kvk_count_pieces(uint64_t bytes)
{
	return bytes / KVK_PIECE + (bytes % KVK_PIECE != 0);
}

uint64_t kvk_digest_piece(const void *data, size_t bytes)
{
	const size_t padded = (bytes + KVK_PIECE_PAD - 1) / KVK_PIECE_PAD * KVK_PIECE_PAD;
	uint8_t copy[KVK_PIECE];

	if (padded == bytes) {
		return kv_digest(data, bytes);
	}
	memcpy(copy, data, bytes);
	memset(copy + bytes, 0, padded - bytes);

	return kv_digest(copy, padded);
}

void kvk_range_state_init(kvk_range_state_t *state)
{
	(void)XXH3_128bits_reset(&state->xxh3);
}

void kvk_range_state_add(kvk_range_state_t *state, const uint64_t *pieces, uint64_t count)
{
	(void)XXH3_128bits_update(&state->xxh3, pieces, (size_t)count * sizeof *pieces);
}

void kvk_range_state_end(kvk_range_state_t *state, uint64_t bytes, uint8_t digest[KVK_RANGE_DIGEST_BYTES])
{
	XXH128_canonical_t canonical;

	kvk_range_state_add(state, &bytes, 1);
	XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state->xxh3));
	memcpy(digest, canonical.digest, KVK_RANGE_DIGEST_BYTES);
}

void kvk_digest_range(const uint64_t *pieces, uint64_t bytes, uint8_t digest[KVK_RANGE_DIGEST_BYTES])
{
	kvk_range_state_t state;

	kvk_range_state_init(&state);
	kvk_range_state_add(&state, pieces, kvk_count_pieces(bytes));
	kvk_range_state_end(&state, bytes, digest);
}
