/* kernels/cpu/range_state.h -- the digest of a range while the digests of its pieces come in. */
#ifndef KVK_CPU_RANGE_STATE_H
#define KVK_CPU_RANGE_STATE_H

#include "kvk/digest_range.h"

#define XXH_STATIC_LINKING_ONLY /* the state on the stack */
#include <xxhash.h>

typedef struct kvk_range_state {
	XXH3_state_t xxh3;
} kvk_range_state_t;

void kvk_range_state_init(kvk_range_state_t *state);
void kvk_range_state_add(kvk_range_state_t *state, const uint64_t *pieces, uint64_t count);
void kvk_range_state_end(kvk_range_state_t *state, uint64_t bytes, uint8_t digest[KVK_RANGE_DIGEST_BYTES]);

#endif
