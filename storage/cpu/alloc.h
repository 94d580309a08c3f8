/* storage/cpu/alloc.h -- classes and slots as an earlier daemon had them. */
#ifndef KVS_CPU_ALLOC_H
#define KVS_CPU_ALLOC_H

#include "pool.h"

/* kvs_class_open() without a slab for a new class. */
kv_status_t kvs_pool_find_class(kvs_pool_t *pool, const char *ns, const kvs_geometry_t *geometry, uint32_t *p_class);
/* The next fresh slot of the slab is what it was in an earlier daemon's ledger, but FREE, READY or QUARANTINED. */
void kvs_pool_copy_slot(kvs_pool_t *pool, kvs_pool_slab_t *p, const kvs_ledger_slot_t *from, kvs_state_t state);

#endif
