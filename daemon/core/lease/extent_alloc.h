/* extent_alloc.h -- room for lease headers and slot arrays inside an instance's lease area.
 *
 * The area is shared with clients, so nothing of the allocator lies in it: extents are records of the core's own.
 * Units of 64 bytes; an extent is free or taken, neighbours know each other, free ones hang in a list by size class
 * (power of two). Taking and giving back cost O(1).
 *
 *   FREE --take: split--> TAKEN --give: join with free neighbours--> FREE
 */
#ifndef KVD_CORE_EXTENT_ALLOC_H
#define KVD_CORE_EXTENT_ALLOC_H

#include "core/base/list.h"

#include "kv/shm.h"

#define KVD_EXTENT_UNIT    64u
#define KVD_EXTENT_CLASSES 32u

typedef struct kvd_extent {
	uint32_t first; /* unit */
	uint32_t units;
	uint32_t left, right; /* neighbours in the area */
	kvd_link_t of_class;  /* while it is free */
	uint32_t taken;
} kvd_extent_t;

typedef struct kvd_extent_alloc {
	kvd_obj_pool_t *extents; /* shared by all areas */
	uint8_t *base;
	uint32_t units;
	uint32_t units_free;
	uint32_t first;   /* leftmost extent */
	uint32_t classes; /* bit c: free[c] is not empty */
	kvd_list_t free[KVD_EXTENT_CLASSES];
} kvd_extent_alloc_t;

/* `skip` bytes at the start stay untouched (the area's header). KV_ERR_ARG: too small; KV_ERR_NOMEM, KV_ERR_LIMIT. */
kv_status_t kvd_extent_alloc_init(kvd_extent_alloc_t *alloc, kvd_obj_pool_t *extents, void *base, uint64_t bytes,
				  uint32_t skip);
void kvd_extent_alloc_fini(kvd_extent_alloc_t *alloc);

/* For kvd_busy(). */
#define KVD_LEASE_AREA_IS_FULL                                                                                         \
	"instance.lease_area, the memory for slots of an instance's leases and puts, is full; end some, or raise it"

/* KV_ERR_BUSY: no room. *p_extent names the room, *p_offset says where it starts. */
kv_status_t kvd_extent_take(kvd_extent_alloc_t *alloc, uint64_t bytes, uint32_t *p_extent, uint64_t *p_offset);
void kvd_extent_give(kvd_extent_alloc_t *alloc, uint32_t extent);

/* Extents tile the area, no two free ones touch, sums agree: 1, else 0. */
int kvd_extent_alloc_check(const kvd_extent_alloc_t *alloc);

#endif
