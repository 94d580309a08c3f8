/* kv/types.h -- the few plain types every part shares. */
#ifndef KV_TYPES_H
#define KV_TYPES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* 128 bits of a SHA-256 chain: names one block and the whole prefix before it (kv/key.h). */
typedef struct kv_key {
	uint8_t b[16];
} kv_key_t;

#define KV_KEY_BYTES 16u

static inline int kv_key_equal(const kv_key_t *a, const kv_key_t *b)
{
	return memcmp(a->b, b->b, KV_KEY_BYTES) == 0;
}

/* The all-zero key is never produced by the chain in practice and stands for "none" (a root's parent). */
static inline int kv_key_is_zero(const kv_key_t *key)
{
	static const kv_key_t zero = {{0}};
	return kv_key_equal(key, &zero);
}

/* A key is uniformly distributed already; its first eight bytes are its hash. */
static inline uint64_t kv_key_hash(const kv_key_t *key)
{
	uint64_t h;
	memcpy(&h, key->b, sizeof h);
	return h;
}

/* A slot of a tier: slab (or file) number in the upper 12 bits, index in it in the lower 20. */
typedef uint32_t kv_slot_t;

#define KV_SLOT_NONE       UINT32_MAX
#define KV_SLOT_INDEX_BITS 20u
#define KV_SLOT_MAX_INDEX  ((1u << KV_SLOT_INDEX_BITS) - 1u)
#define KV_SLOT_MAX_SLAB   4094u

/* What the descriptor of a slab's data is. */
typedef enum kv_slab_memory {
	KV_SLAB_MEMFD = 0, /* host memory, mapped with mmap() */
	KV_SLAB_CUDA = 1,  /* memory of a GPU, exported by the CUDA driver and imported with it */
} kv_slab_memory_t;

static inline kv_slot_t kv_slot_make(uint32_t slab, uint32_t index)
{
	return slab << KV_SLOT_INDEX_BITS | index;
}
static inline uint32_t kv_slot_slab(kv_slot_t slot)
{
	return slot >> KV_SLOT_INDEX_BITS;
}
static inline uint32_t kv_slot_index(kv_slot_t slot)
{
	return slot & KV_SLOT_MAX_INDEX;
}

/* Where a block can be resident. The values are bits of the mirror's tier mask. */
typedef enum kv_tier {
	KV_TIER_CPU = 1,
	KV_TIER_DISK = 2,
	KV_TIER_GPU = 4,
	KV_TIER_REMOTE = 8,
	KV_TIER_UNREADABLE =
		32, /* no tier: the device cannot read the block, or one above it, now; being there is no hit */
} kv_tier_t;

/* What a match at n needs of a block group. Blocks of a full group are each other's parents; those of the others stand
 * alone. */
typedef enum kv_group_rule {
	KV_RULE_FULL = 0,   /* prefix-closed: a parent is there whenever its child is     */
	KV_RULE_WINDOW = 1, /* the last ceil(window / block_tokens) blocks before n         */
	KV_RULE_STATE = 2,  /* one snapshot exactly at n                                    */
} kv_group_rule_t;

#define KV_MAX_GROUPS 16u /* of one space */

/* Where a hand-over is. */
typedef enum kv_handover_state {
	KV_HANDOVER_AWAITED = 1, /* its consumer has asked, its producer has not begun */
	KV_HANDOVER_SENDING = 2,
	KV_HANDOVER_COMPLETE = 3,
	KV_HANDOVER_FAILED = 4, /* nothing follows; what is there stays until its consumer is done */
	KV_HANDOVER_ENDED = 5,
} kv_handover_state_t;

/* Borrowed bytes; valid as long as their owner says. */
typedef struct kv_slice {
	const uint8_t *data;
	uint32_t len;
} kv_slice_t;

#ifndef __cplusplus /* engines in C++ include this by way of kvx.h and need no slices */
static inline kv_slice_t kv_slice_str(const char *text)
{
	kv_slice_t slice = {(const uint8_t *)text, (uint32_t)strlen(text)};

	return slice;
}
#endif

#define KV_COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

#endif
