/* storage/nvme/format/slothdr.h -- the header in front of every block on disk: whole pages, little-endian, closed by
 * XXH3-64 over all of them.
 *
 * It has the last word on what a slot holds: key, generation and place are compared at each load, and lost metadata is
 * rebuilt from it. After the fixed part come the leaf digests, u64 [heads][leaves], then zeros to the end of the page.
 */
#ifndef KVS_NVME_FORMAT_SLOTHDR_H
#define KVS_NVME_FORMAT_SLOTHDR_H

#include "kvs/tier.h"

#define KVS_PAGE                    4096u
#define KVS_SLOTHDR_VERSION         1u
#define KVS_SLOTHDR_MAX             65536u /* bytes; about 8,000 leaves */
#define KVS_SLOTHDR_MAX_WITHDRAWALS ((1u << 24) - 1u)

typedef struct kvs_slothdr {
	kvs_meta_t meta;
	uint64_t incarnation; /* the daemon that wrote it */
	uint64_t digest;      /* of the block: XXH3-64 of its roots */
	uint32_t slot_class;
	kv_slot_t slot;
	uint32_t gen;
	uint32_t length; /* payload bytes */
} kvs_slothdr_t;

static inline uint64_t kvs_page_up(uint64_t n)
{
	return (n + KVS_PAGE - 1u) & ~(uint64_t)(KVS_PAGE - 1u);
}

/* Bytes of the header for this geometry, a multiple of KVS_PAGE; 0: it would be over KVS_SLOTHDR_MAX. */
uint32_t kvs_slothdr_bytes(const kvs_geometry_t *geometry);

/* Fill `out`, kvs_slothdr_bytes(geometry) long, whole. */
void kvs_slothdr_encode(void *out, const kvs_geometry_t *geometry, const kvs_slothdr_t *header, const uint64_t *leaves);

/* Check n bytes read from a slot. KV_MISS: never written. KV_ERR_VERSION: made by another version. KV_ERR_CORRUPT:
 * anything else that is not a whole header of this geometry. *p_leaves (may be NULL) points into `in`, which is
 * 8-aligned and the caller's alone: the check field is cleared in it for a moment. */
kv_status_t kvs_slothdr_decode(void *in, size_t n, const kvs_geometry_t *geometry, kvs_slothdr_t *p_header,
			       const uint64_t **p_leaves);

#endif
