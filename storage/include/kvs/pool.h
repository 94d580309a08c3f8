/* kvs/pool.h -- the CPU tier: slabs of slots in sealed memfds, and the ledger.
 *
 * A slab is one memfd (SHRINK|GROW sealed, huge pages when the kernel gives them) of one class, and beside it a digest
 * memfd (u64 leaf[slots][heads][leaves], then u64 root[slots][heads]; kv_slab_tail_t at its end) that only the daemon
 * may write. No slot is given to a client before a thread of the pool has touched its memory (decision 066). The ledger
 * memfd holds the state of every slot, and records of open leases and puts; only daemon and keeper map it. Nothing in
 * client-writable memory is trusted: slab bytes are touched only through kvs_sigbus_*().
 */
#ifndef KVS_POOL_H
#define KVS_POOL_H

#include "kv/env.h"
#include "kv/metric.h"
#include "kvs/tier.h"

typedef enum kvs_huge { KVS_HUGE_AUTO = 0, KVS_HUGE_ON = 1, KVS_HUGE_OFF = 2 } kvs_huge_t;

/* Hand a new fd to the keeper (which duplicates it). Names: "ledger", "slab.<id>", "digest.<id>". May be NULL. */
typedef void (*kvs_hold_fn)(void *ctx, const char *name, int fd);
/* That slab's fd is about to be closed: the keeper closes its duplicate. May be NULL. */
typedef void (*kvs_drop_fn)(void *ctx, const char *name);
/* The descriptor that an earlier daemon handed in under the name, the pool's from then on; -1: there is none. May be
 * NULL. */
typedef int (*kvs_claim_fn)(void *ctx, const char *name);

#define KVS_AHEAD_ALL UINT64_MAX

/* Data memory of slabs from elsewhere, a device's: a descriptor of slab_bytes zeroed bytes, which is the pool's from
 * then on. -1: none now. */
typedef int (*kvs_take_fn)(void *ctx);

/* Bytes of memory that can be had now: beyond them nobody gets an error, and the kernel ends somebody. Any thread. */
typedef uint64_t (*kvs_room_fn)(void *ctx);

typedef struct kvs_pool_config {
	uint64_t limit_bytes; /* slabs, digest tables and ledger together */
	uint64_t slab_bytes;  /* size of a slab; smaller when the limit leaves less, larger (and said) when over 2,047
				 would be needed */
	uint32_t max_slabs;   /* at a time; 0: as many as slots can name */
	/* NULL: the pool makes its data memory. Else every slab's data has slab_bytes, is never mapped here, and goes
	 * only when every client has let go of it: such slots have no kvs_mem(). limit_bytes is for data alone then;
	 * digest tables and ledger are host memory and come on top. */
	kvs_take_fn take;
	void *take_ctx;
	kv_slab_memory_t memory; /* what `take` gives */
	uint64_t max_blocks;     /* slots in all; 0: as many as fit. Exact, for replays */
	kvs_huge_t huge;
	int prefault; /* 1: a thread touches new slabs; 0: who carves a slab touches it there and then */
	kvs_room_fn
		room; /* asked before a slab is touched, if it is less the slab is not. NULL: no limit. Thread only */
	void *room_ctx;
	/* kvs_pool_carve_ahead() keeps so much carved and touched before it is needed; 0: nothing. KVS_AHEAD_ALL: the
	 * first class takes all there is. */
	uint64_t ahead_bytes;
	uint64_t incarnation;
	kvs_hold_fn hold;
	kvs_drop_fn drop;
	/* A pool with `take` adopts what an earlier daemon left in such memory: kvs_recover() says which blocks. */
	kvs_claim_fn claim;
	void *hold_ctx;
	kv_metrics_t *metrics; /* counters are added here; not NULL */
} kvs_pool_config_t;

/* The pool as a tier. KV_ERR_ARG: no incarnation, slab size or metrics, or a limit too small for the ledger.
 * KV_ERR_NOMEM. Only the kernel can refuse memory later, inside kvs_alloc (KV_ERR_FULL, logged, tried again after a
 * second).
 *
 * kvs_class_open() carves the first slab at once, so that it is touched before the first put; KV_ERR_LAYOUT: the
 * leaves do not tile the block. kvs_alloc() answers KV_ERR_BUSY while memory is on its way that has not been touched:
 * nothing need be evicted. A slot to be filled (FILLING) is given before: its memory is there when kvs_mem() no longer
 * answers KV_ERR_BUSY; KV_ERR_NOMEM: the kernel refuses it.
 * The next slab is begun when a quarter of the last is left. Freed slots are given out
 * again last in, first out, those of one slab together. kvs_store() and kvs_load() end inside the call; store wants PUT
 * or FILLING and leaves the state alone; load answers KV_ERR_ARG before the slot is READY or TRANSIT and KV_MISS in
 * quarantine. kvs_free() takes a slot from any state. */
kv_status_t kvs_pool_open(const kvs_pool_config_t *config, const kv_env_t *env, kvs_tier_t **p_tier);

/* What a client needs to map a slab. fds stay the pool's. */
typedef struct kvs_slab_info {
	uint32_t slab;
	uint32_t slots;
	uint64_t serial; /* never 0, and no other slab's: numbers come back, serials do not */
	int retired;     /* 1: clients must unmap it; nothing names its slots */
	uint32_t slot_class;
	uint32_t slot_bytes; /* stride */
	kvs_geometry_t geometry;
	uint64_t bytes;
	uint64_t digest_bytes;
	int data_fd;
	int digest_fd;
	int huge; /* 1: the data lies on reserved huge pages */
	const char *ns;
	kv_slab_memory_t memory;
	void *base; /* the daemon's own mapping of the data; touched through kvs_guard_*() and direct I/O only. NULL:
		       memory from elsewhere */
	uint64_t ready_bytes; /* [0, ready_bytes) have been touched */
} kvs_slab_info_t;

/* KV_MISS: no slab has this number now. Numbers are below kvs_pool_slab_count(), a number is free while its slab's
 * memory is gone. */
kv_status_t kvs_pool_slab(kvs_tier_t *pool, uint32_t slab, kvs_slab_info_t *p_info);
uint32_t kvs_pool_slab_count(kvs_tier_t *pool);
/* Changes whenever a slab has come or has been retired. */
uint64_t kvs_pool_version(const kvs_tier_t *pool);
/* Slabs whose descriptors are open. */
uint32_t kvs_pool_slabs_held(const kvs_tier_t *pool);
/* For idle moments, again and again: carve one slab more for the class that was opened, or took fresh memory, last,
 * when what is ahead of it has been touched and is less than ahead_bytes; less than half of it while somebody is busy
 * with blocks, whom the touching would take memory bandwidth and locks from. */
void kvs_pool_carve_ahead(kvs_tier_t *pool, int busy);

/* A retired slab's memory goes back, and the class it was retired for gets a slab of it at once. Its pages are taken
 * away, under those too that still map it (they read zeros; pages pinned by them stay theirs). `unmapped`: by every
 * client; else its number and digests stay taken until a second call says so. KV_ERR_BUSY: the pre-fault thread is
 * still in it, or it is memory from elsewhere and not unmapped; ask again. KV_MISS: no such slab, or not retired. */
kv_status_t kvs_pool_release(kvs_tier_t *pool, uint32_t slab, int unmapped);

/* Slabs and slots of each class, for people. KV_MISS past the last class. */
typedef struct kvs_class_info {
	const char *ns;
	uint32_t block_bytes;
	uint32_t slabs;
	uint64_t slots, free_slots;
	uint64_t bytes, ready_bytes; /* of slabs; of them touched */
} kvs_class_info_t;
kv_status_t kvs_pool_class(kvs_tier_t *pool, uint32_t slot_class, kvs_class_info_t *p_look);
/* 1: a class has just got its first slab, and its first 16 MiB (all, of reserved huge pages) are being touched. Not for
 * longer than 100 ms. */
int kvs_pool_is_warming(kvs_tier_t *pool);

/* Why the system did not let the pool have its next slab, and what to change; "": it did. */
const char *kvs_pool_refusal(kvs_tier_t *pool);

/* Which registered region (kvs_nvme_register) a slab's memory is from now on: kvs_mem() says so for all its slots. A
 * slab that does not exist is ignored. */
void kvs_pool_set_region(kvs_tier_t *pool, uint32_t slab, uint32_t region);

/* Leases and puts in the ledger, so that a later daemon knows what old members may still touch. KV_ERR_LIMIT: the table
 * is full. */
typedef struct kvs_record {
	uint64_t id; /* lease or put id, never 0 */
	uint64_t instance;
	uint64_t expiry_ns; /* CLOCK_MONOTONIC; 0: never (puts) */
	uint32_t space;
	uint32_t n;
	uint32_t skip;
	uint32_t kind;     /* kv_lease_kind_t */
	kvs_loc_t deepest; /* slot of the deepest block */
	kv_key_t deepest_key;
	uint8_t group;
} kvs_record_t;
kv_status_t kvs_pool_add_record(kvs_tier_t *pool, const kvs_record_t *record);
void kvs_pool_remove_record(kvs_tier_t *pool, uint64_t id);

/* Slots that an earlier daemon left unfinished are QUARANTINED. The writers that the keeper knew are quiet now: the
 * slots are free, unless there were others (decision 073). Returns how many there were. */
uint64_t kvs_pool_free_before(kvs_tier_t *pool);
/* `n` members may write that the keeper has not heard of: the ledger says it to a later daemon. */
void kvs_pool_set_unknown_writers(kvs_tier_t *pool, uint32_t n);
/* How many there were when an earlier daemon died. No later daemon learns of their end. */
uint32_t kvs_pool_unknown_before(kvs_tier_t *pool);

/* Leaf digests of a put: heads [head, head + heads) x leaves [leaf, leaf + count) of a slot; values[heads][count].
 * KV_MISS: stale; KV_ERR_ARG: the range leaves the block, or the slot is not being filled. */
kv_status_t kvs_pool_set_leaves(kvs_tier_t *pool, kvs_loc_t loc, const kvs_leaf_span_t *span, const uint64_t *values);
/* All leaves are in: compute the roots. */
kv_status_t kvs_pool_compute_roots(kvs_tier_t *pool, kvs_loc_t loc);

#endif
