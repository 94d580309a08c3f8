/* room.h -- slots and index entries for new blocks, and the evictions that make room for them. */
#ifndef KVD_CORE_ROOM_H
#define KVD_CORE_ROOM_H

#include "core/core.h"
#include "core/index/index.h"

/* What a new slot is for. */
typedef struct kvd_use {
	kvs_state_t state; /* PUT or FILLING */
	uint64_t owner;    /* put or lease id */
	const kvs_meta_t *meta;
} kvd_use_t;

/* A slot of the class in tier t, evicting as many as it takes. KV_ERR_BUSY: all that is left is pinned or referenced.
 * Else the tier's own error. */
kv_status_t kvd_slot_alloc(kvd_core_t *core, uint32_t slot_class, kvd_set_t t, const kvd_use_t *use, kvs_loc_t *p_loc);
/* Evict one block of the class. KV_MISS: nothing can go. */
kv_status_t kvd_make_room(kvd_core_t *core, uint32_t slot_class, kvd_set_t t);
/* Evict one block of a tier so that a block of namespace `ns` may come into the index. A block leaves the index with
 * its last tier, so one call may not be enough. KV_MISS: nothing can go. */
kv_status_t kvd_make_index_room(kvd_core_t *core, uint32_t ns);

#endif
