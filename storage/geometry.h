/* storage/geometry.h -- what a geometry says, checked once. */
#ifndef KVS_GEOMETRY_H
#define KVS_GEOMETRY_H

#include "kvs/tier.h"

/* The leaves tile the block: every byte lies in exactly one. KV_ERR_ARG otherwise, and for blocks over 1 GiB. */
kv_status_t kvs_geometry_check(const kvs_geometry_t *geometry);

int kvs_geometry_equal(const kvs_geometry_t *a, const kvs_geometry_t *b);

/* block_bytes rounded up to 4096: the distance of two slots. */
uint32_t kvs_geometry_stride(const kvs_geometry_t *geometry);

/* Bytes of digest table a slot needs: its leaves and its roots. */
static inline uint64_t kvs_geometry_digest_bytes(const kvs_geometry_t *geometry)
{
	return 8u * (uint64_t)geometry->heads * ((uint64_t)geometry->leaves + 1u);
}

/* Roots of all heads from the leaves of a block. */
void kvs_compute_roots(const kvs_geometry_t *geometry, const uint64_t *leaves, uint64_t *p_roots);

#endif
