/* storage/cpu/slab/slab.h -- one slab: slots of one class in a sealed memfd, their digest table in another, and the
 * thread that touches them before anybody is lent a slot. */
#ifndef KVS_CPU_SLAB_H
#define KVS_CPU_SLAB_H

#include "shm.h"

#include "kv/env.h"
#include "kv/shm.h"
#include "kvs/pool.h"

#include <stdatomic.h>

#define KVS_HUGE_PAGE (2u << 20)

typedef struct kvs_slab {
	kvs_geometry_t geometry;
	uint32_t number;
	uint32_t slots;
	uint32_t stride;
	kvs_shm_t data;
	kvs_shm_t digest;
	kvs_shm_t records;            /* its part of the ledger, not its own */
	_Atomic uint64_t ready_bytes; /* [0, ready_bytes) of data have been touched, and everything beside them */
	atomic_int opened;            /* digests and records have been touched */
	atomic_int error;             /* why touching has ended early; 0: it has not */
	uint32_t *next;               /* [slots]: the slot below in the stack of free slots */
	int huge;                     /* on huge pages of the pool reserved for them */
	int foreign;                  /* its data is memory from elsewhere, and not mapped */
	uint32_t region;              /* of kvs_mem_t */
	uint64_t ticket;              /* the pre-fault thread's, of the last time; 0: never added */
	uint64_t id;                  /* no other slab's, of any daemon: its descriptors are held under it */
} kvs_slab_t;

/* Bytes of a slab's parts for this many slots; `page` is 4096 or KVS_HUGE_PAGE and rounds the data. */
uint64_t kvs_slab_data_bytes(const kvs_geometry_t *geometry, uint64_t slots, uint64_t page);
uint64_t kvs_slab_digest_bytes(const kvs_geometry_t *geometry, uint64_t slots);

/* Fill `slab` (zeroed; geometry, number, slots and huge set by the caller; of a foreign one also `data`, which stays
 * the caller's on failure). 0 or -errno; nothing is left behind on failure. The data is sealed against resizing; the
 * digest table is writable through the daemon's mapping only. */
int kvs_slab_create(kvs_slab_t *slab, const kvs_sys_t *sys, const kv_env_t *env);
/* Touch digests and records. 0 or -errno. Any thread, several at once too. */
int kvs_slab_open(kvs_slab_t *slab, const kvs_sys_t *sys);
/* All of it, at once. */
int kvs_slab_touch(kvs_slab_t *slab, const kvs_sys_t *sys);
/* Say that so much of the data has been touched, to clients as well. */
void kvs_slab_set_ready(kvs_slab_t *slab, uint64_t bytes);
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
static inline kv_slab_tail_t *kvs_slab_tail(const kvs_slab_t *slab)
{
	return (kv_slab_tail_t *)(slab->digest.base + slab->digest.bytes) - 1;
}
/* Has the slot's memory been touched already? */
static inline int kvs_slab_ready(const kvs_slab_t *slab, uint32_t index)
{
	return ((uint64_t)index + 1u) * slab->stride <= atomic_load_explicit(&slab->ready_bytes, memory_order_acquire);
}
static inline int kvs_slab_whole(const kvs_slab_t *slab)
{
	return atomic_load_explicit(&slab->ready_bytes, memory_order_acquire) >= slab->data.bytes;
}

/* 1 when transparent huge pages work for shared memory on this machine; `detail` gets the kernel's setting. */
int kvs_thp_works(char *detail, size_t cap);

/* The pre-fault thread. Slabs are added and dropped from one thread. */
typedef struct kvs_prefault kvs_prefault_t;
typedef struct kvs_prefault_config {
	uint32_t max_slabs;
	int huge; /* on huge pages where the kernel makes them when asked */
	const kvs_sys_t *sys;
	kvs_room_fn room; /* NULL: nothing is asked before memory is touched */
	void *room_ctx;
} kvs_prefault_config_t;
kv_status_t kvs_prefault_start(const kvs_prefault_config_t *config, const kv_env_t *env, kvs_prefault_t **p_prefault);
/* 1: it has made one. */
int kvs_prefault_huge(const kvs_prefault_t *prefault);
/* While 1, no slab is touched any further: others want the memory's bandwidth and the locks, and there is enough for
 * them. Any thread. */
void kvs_prefault_pause(kvs_prefault_t *prefault, int paused);
/* Touch the slab, from ready_bytes on. What has ended with an error may be added again. */
void kvs_prefault_add(kvs_prefault_t *prefault, kvs_slab_t *slab);
/* Somebody waits for memory of this slab: it, and what was added before it, are touched without waiting for idle
 * time. */
void kvs_prefault_hurry(kvs_prefault_t *prefault, const kvs_slab_t *slab);
/* 1: the thread is not in the slab, and has done what it was told. `prefault` may be NULL. */
int kvs_prefault_is_done(const kvs_prefault_t *prefault, const kvs_slab_t *slab);
/* 1: the thread is not in the slab and will not be, it may be destroyed. 0: it is, and has been told to leave it after
 * one step; ask again. `prefault` may be NULL. */
int kvs_prefault_drop(kvs_prefault_t *prefault, const kvs_slab_t *slab);
/* Ends the thread within one step (256 KiB, or one huge page) and frees everything. NULL is fine. */
void kvs_prefault_stop(kvs_prefault_t *prefault);

#endif
