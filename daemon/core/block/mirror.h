/* mirror.h -- the writing side of a namespace's mirror (format: kv/shm.h).
 *
 * An entry is there while its block is in some tier's set. The caller keeps the order: parents appear before children
 * and go after them.
 *
 *   empty --set(tiers)--> there --set(other tiers)--> there --set(0)--> empty
 */
#ifndef KVD_CORE_MIRROR_H
#define KVD_CORE_MIRROR_H

#include "kv/shm.h"
#include "kv/status.h"

typedef struct kvd_mirror {
	kv_mirror_header_t *header;
	_Atomic uint64_t *epochs;
	kv_mirror_bucket_t *buckets;
	uint64_t mask;
	uint64_t entries;
} kvd_mirror_t;

/* Bytes of a mirror for this many blocks, header and epochs included. */
uint64_t kvd_mirror_size(uint64_t blocks);

/* `memory` is zeroed and kvd_mirror_size(blocks) long. */
void kvd_mirror_init(kvd_mirror_t *mirror, void *memory, uint64_t blocks, uint64_t incarnation);

/* Say in which tiers the block is; 0: nowhere. KV_ERR_FULL: no free entry within reach, the block is left out. */
kv_status_t kvd_mirror_set(kvd_mirror_t *mirror, const kv_key_t *key, uint8_t group, uint8_t tiers);

void kvd_mirror_set_heartbeat(kvd_mirror_t *mirror, uint64_t now_ns);
/* Which tiers (kv_tier_t bits) cannot be read now. */
void kvd_mirror_set_unreadable(kvd_mirror_t *mirror, uint64_t tiers);
void kvd_mirror_set_epoch(kvd_mirror_t *mirror, uint32_t space, uint64_t epoch);

#endif
