/* storage/sigbus.h -- guarded work on whole blocks, for the tiers. The rest of the guard is in kvs/pool.h. */
#ifndef KVS_SIGBUS_H
#define KVS_SIGBUS_H

#include "kvs/pool.h"

/* Digest a block leaf by leaf, copying it to dst in the same pass when dst is not NULL; compare with `expected` and
 * fill p_leaves, each when not NULL (they may not lie in client memory). KV_ERR_CORRUPT: stopped at the first leaf that
 * differs. KV_ERR_FAULT. dst is undefined then. */
kv_status_t kvs_sigbus_copy_block(const kvs_geometry_t *geometry, void *dst, const void *src, const uint64_t *expected,
				  uint64_t *p_leaves);

/* Roots of all heads from the leaves of a block. */
void kvs_compute_roots(const kvs_geometry_t *geometry, const uint64_t *leaves, uint64_t *p_roots);

/* Fault the pages of [p, p + n) in for writing without changing a byte. KV_ERR_FAULT: no memory behind one of them. */
kv_status_t kvs_sigbus_touch_pages(void *p, size_t n);

#endif
