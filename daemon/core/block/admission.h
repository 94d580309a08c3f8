/* admission.h -- which new blocks a class takes while its pool thrashes (docs/decisions/101).
 *
 * A pool thrashes when the blocks that leave it were hardly ever hit: what is saved is evicted before it is asked for
 * again. Each save then costs a copy, and the place of another block, for nothing. A new block is then wanted only if
 * it was asked for after the block that would have to go for it.
 *
 *   all are taken --of a pool's worth of blocks lost, fewer than 1 in 16 had been hit--> by second use
 *   by second use --of a window of blocks offered, 1 in 8 would have been hits, or none was refused--> all are taken
 *
 * "Would have been hits": offered before, and fewer new blocks ago than the pool has. Both windows are counted in
 * blocks, not in time: the same requests give the same answers.
 */
#ifndef KVD_CORE_ADMISSION_H
#define KVD_CORE_ADMISSION_H

#include "core/base/core_impl.h"

/* What was last heard of a key that is in no tier. */
typedef enum kvd_ghost_kind {
	KVD_GHOST_NONE = 0,
	KVD_GHOST_OFFERED = 1,
	KVD_GHOST_EVICTED = 2,
	KVD_GHOST_REFUSED = 3
} kvd_ghost_kind_t;

/* A small table of fingerprints: it may forget. */
kvd_ghost_kind_t kvd_ghost_find(const kvd_core_t *core, const kv_key_t *key);

/* Does admission apply to the class's blocks? Not to those in the memory of a GPU, which yield by other rules. */
int kvd_admission_applies(const kvd_core_t *core, uint32_t slot_class);
/* 1: all of that many new blocks are wanted: the pool does not thrash, or none would have to go for them. */
int kvd_admission_wants_all(kvd_core_t *core, uint32_t slot_class, uint32_t blocks);
/* 1: else, a block with this key is wanted. */
int kvd_admission_wants(kvd_core_t *core, uint32_t slot_class, const kv_key_t *key);
/* A new block of the class was offered: it has a slot (OFFERED), or was REFUSED. */
void kvd_admission_add_offer(kvd_core_t *core, uint32_t slot_class, const kv_key_t *key, kvd_ghost_kind_t kind);
/* A block of the class has left its last tier; it was asked for at `stamp` last. */
void kvd_admission_add_lost(kvd_core_t *core, uint32_t slot_class, const kvd_block_t *block, int hit, uint64_t stamp);

/* Does the pool of one of the namespace's classes thrash? */
int kvd_admission_thrashes(const kvd_core_t *core, uint32_t ns);

#endif
