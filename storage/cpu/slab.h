/* storage/cpu/slab.h -- one slab: slots of one class in a sealed memfd, their digest table in another, and the thread
 * that pre-faults them. */
#ifndef KVS_CPU_SLAB_H
#define KVS_CPU_SLAB_H

#include "shm.h"

#include "kv/env.h"
#include "kvs/tier.h"

#include <stdatomic.h>

#define KVS_HUGE_PAGE (2u << 20)

typedef struct kvs_slab {
	kvs_geometry_t geometry;
	uint32_t number;
	uint32_t slots;
	uint32_t stride;
	kvs_shm_t data;
	kvs_shm_t digest;
	_Atomic uint64_t ready_bytes; /* [0, ready_bytes) of data have been pre-faulted */
	uint32_t *next;               /* [slots]: the slot below in the stack of free slots */
	int huge;                     /* on huge pages of the pool reserved for them */
	int foreign;                  /* its data is memory from elsewhere, and not mapped */
	uint32_t region;              /* of kvs_mem_t */
	uint64_t ticket;              /* the pre-fault thread's; 0: never added */
	uint64_t id;                  /* no other slab's, of any daemon: its descriptors are held under it */
} kvs_slab_t;

/* Bytes of a slab's parts for this many slots; `page` is 4096 or KVS_HUGE_PAGE and rounds the data. */
uint64_t kvs_slab_data_bytes(const kvs_geometry_t *geometry, uint64_t slots, uint64_t page);
uint64_t kvs_slab_digest_bytes(const kvs_geometry_t *geometry, uint64_t slots);

/* Fill `slab` (zeroed; geometry, number, slots and huge set by the caller; of a foreign one also `data`, which stays
 * the caller's on failure). 0 or -errno; nothing is left behind on failure. The data is sealed against resizing; the
 * digest table is writable through the daemon's mapping only. */
int kvs_slab_create(kvs_slab_t *slab, const kvs_sys_t *sys, const kv_env_t *env);
void kvs_slab_destroy(kvs_slab_t *slab, const kv_env_t *env);

static inline uint8_t *kvs_slab_slot(const kvs_slab_t *slab, uint32_t index)
{
	return slab->data.base + (uint64_t)index * slab->stride;
}
static inline uint64_t *kvs_slab_leaves(const kvs_slab_t *slab, uint32_t index)
{
	return (uint64_t *)slab->digest.base + (uint64_t)index * slab->geometry.heads * slab->geometry.leaves;
}
static inline uint64_t *kvs_slab_roots(const kvs_slab_t *slab, uint32_t index)
{
	return kvs_slab_leaves(slab, slab->slots) + (uint64_t)index * slab->geometry.heads;
}
/* Has the slot's memory been touched already? */
static inline int kvs_slab_ready(const kvs_slab_t *slab, uint32_t index)
{
	return ((uint64_t)index + 1u) * slab->stride <= atomic_load_explicit(&slab->ready_bytes, memory_order_acquire);
}

/* 1 when transparent huge pages work for shared memory on this machine; `detail` gets the kernel's setting. */
int kvs_thp_works(char *detail, size_t cap);

/* The pre-fault thread. Slabs are added and dropped from one thread. */
typedef struct kvs_prefault kvs_prefault_t;
/* huge: on huge pages where the kernel makes them when asked. */
kv_status_t kvs_prefault_start(uint32_t max_slabs, const kvs_sys_t *sys, int huge, const kv_env_t *env,
			       kvs_prefault_t **p_prefault);
/* 1: it has made one. */
int kvs_prefault_huge(const kvs_prefault_t *prefault);
/* While 1, no slab is touched any further: others want the memory's bandwidth and the locks, and there is enough for
 * them. Any thread. */
void kvs_prefault_pause(kvs_prefault_t *prefault, int paused);
void kvs_prefault_add(kvs_prefault_t *prefault, kvs_slab_t *slab);
/* 1: the thread is not in the slab and will not be, it may be destroyed. 0: it is, and has been told to leave it after
 * one step; ask again. `prefault` may be NULL. */
int kvs_prefault_drop(kvs_prefault_t *prefault, const kvs_slab_t *slab);
/* Ends the thread within one step (256 KiB, or one huge page) and frees everything. NULL is fine. */
void kvs_prefault_stop(kvs_prefault_t *prefault);

#endif
