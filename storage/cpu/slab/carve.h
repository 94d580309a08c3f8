/* storage/cpu/slab/carve.h -- new slabs within the limit, and which of their slots may be given out. */
#ifndef KVS_CPU_CARVE_H
#define KVS_CPU_CARVE_H

#include "cpu/pool.h"

/* A new slab for the class. KV_ERR_FULL: none fits under the limit, or the kernel refuses the memory. */
kv_status_t kvs_pool_carve(kvs_pool_t *pool, uint32_t slot_class);
/* Bytes of data, digests and records; records count as far as the ledger has not charged them yet. */
uint64_t kvs_pool_slab_cost(const kvs_pool_t *pool, const kvs_geometry_t *geometry, uint64_t slots, uint64_t page);
/* The most slots the next slab of the class could have, if `instead` (may be NULL) had gone. */
uint32_t kvs_pool_fit_slots(const kvs_pool_t *pool, uint32_t slot_class, uint64_t page, const kvs_pool_slab_t *instead);

/* The number the next slab gets; KVS_NONE: all are taken. */
uint32_t kvs_pool_next_number(const kvs_pool_t *pool);
/* Touch what a slab that has been created needs before it is linked. 0 or -errno. */
int kvs_pool_touch_first(kvs_pool_t *pool, kvs_slab_t *slab);
/* Into the ledger and the sums, all its slots free, and where its class finds it. */
void kvs_pool_link_slab(kvs_pool_t *pool, kvs_pool_slab_t *p);
/* A hidden slab whose huge pages were refused, and which the pre-fault thread has left: it goes, another one comes. */
void kvs_pool_replace_slab(kvs_pool_t *pool, kvs_pool_slab_t *p);
/* The name that a descriptor of a slab is held under: `what` is "slab" or "digest". */
#define KVS_HOLD_NAME 32u
void kvs_pool_name(char out[KVS_HOLD_NAME], const char *what, uint64_t id);
/* Hand its descriptors to the keeper, or have the keeper drop those of the slab with this id. */
void kvs_pool_hold_slab(const kvs_pool_t *pool, const kvs_slab_t *slab);
void kvs_pool_drop_slab(const kvs_pool_t *pool, uint64_t id);

/* ---- ready.c: which slots may be given out: those whose memory has been touched (decision 066) ---- */

/* Somebody uses the slab: what is not touched of it is next, whatever else the machine does. */
void kvs_pool_hurry(kvs_pool_t *pool, const kvs_pool_slab_t *p);
/* The same of the first slab of a class, which kvs_pool_is_warming() tells of. */
void kvs_pool_warm(kvs_pool_t *pool, const kvs_pool_slab_t *p);
/* May the slot be given out in this state? KV_ERR_BUSY: its memory is on its way, and is hurried; KV_ERR_FULL: the
 * kernel refuses it now. */
kv_status_t kvs_pool_check_slot(kvs_pool_t *pool, kvs_pool_slab_t *p, uint32_t index, kvs_state_t state);
/* The slab whose next fresh slot may be given out, once one has been carved. KV_ERR_BUSY, KV_ERR_FULL: as above. */
kv_status_t kvs_pool_find_fresh(kvs_pool_t *pool, uint32_t slot_class, kvs_state_t state, kvs_pool_slab_t **p_slab);

#endif
