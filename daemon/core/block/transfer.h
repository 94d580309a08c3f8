/* transfer.h -- bytes on their way between the CPU tier and the disk tier.
 *
 *   FILL     disk -> CPU for a lease.           QUEUED -> FLIGHT -> done: READY (or TRANSIT), or the block is bad
 *   WRITE    CPU -> disk, write-behind.         FLIGHT -> done: in the disk set, or WRITTEN until its parent is
 *   THROUGH  CPU -> disk, of a put whose parent is only on disk. FLIGHT -> done: visible as DISK
 *
 * A transfer knows both slots by itself. While it is in flight they belong to it: if its block goes away meanwhile the
 * transfer is an orphan and gives both slots back at its end. A FILL holds its block, a WRITE its block and the parent,
 * against eviction.
 */
#ifndef KVD_CORE_TRANSFER_H
#define KVD_CORE_TRANSFER_H

#include "core/core.h"
#include "core/index/index.h"

typedef enum kvd_io_kind { KVD_IO_FILL = 1, KVD_IO_WRITE = 2, KVD_IO_THROUGH = 3 } kvd_io_kind_t;
typedef enum kvd_io_state { KVD_IO_QUEUED = 1, KVD_IO_FLIGHT = 2 } kvd_io_state_t;

typedef struct kvd_io {
	kvd_core_t *core;
	uint32_t self;
	uint32_t kind;
	uint32_t state;
	uint32_t block;     /* KVD_NONE: orphan, or THROUGH */
	uint32_t held;      /* WRITE: the parent; KVD_NONE: none */
	kvd_link_t queue;   /* of fills */
	kvd_list_t waiters; /* FILL: leases whose next block this is */
	kvs_loc_t cpu, disk;
	uint64_t stamp;
	uint64_t put;   /* THROUGH */
	uint32_t index; /* THROUGH: entry of the put */
} kvd_io_t;

/* Every callback of a tier begins here: 1 when the core has been destroyed meanwhile, and nothing of it may be
 * touched. */
int kvd_transfer_ended(kvd_core_t *core);

kvd_io_t *kvd_io_at(kvd_core_t *core, uint32_t id);

/* Begin to read a disk block into a CPU slot: reserves the slot now (KV_ERR_BUSY when there is none), reads as
 * read_depth allows. */
kv_status_t kvd_fill_start(kvd_core_t *core, uint32_t block, uint64_t lease, uint64_t stamp);
/* Write a finished put's block straight to disk. KV_ERR_NOT_ADMITTED: disk has no room for it. */
kv_status_t kvd_through_start(kvd_core_t *core, uint32_t slot_class, const kvs_meta_t *meta, kvs_loc_t cpu,
			      uint64_t put, uint32_t index);
/* The block goes away: its transfer, if any, is on its own from now on. */
void kvd_io_orphan(kvd_core_t *core, uint32_t block);
/* The leases that needed this fill are gone: a queued one is cancelled, one in flight ends in peace. */
void kvd_fill_unwanted(kvd_core_t *core, uint32_t block);

/* Begin to write a CPU block to disk. KV_ERR_BUSY: no room there. */
kv_status_t kvd_write_start(kvd_core_t *core, uint32_t block);

/* Submit what the depths allow. Returns 1 when something was started. */
int kvd_fills_run(kvd_core_t *core);
int kvd_writes_run(kvd_core_t *core);
/* A block has joined the CPU set and is not on disk: its run waits for write-behind. */
void kvd_write_behind(kvd_core_t *core, uint32_t block);
/* A write has failed: what is queued stays queued, and is tried again after a while that grows from failure to
 * failure. */
void kvd_writes_pause(kvd_core_t *core);
int kvd_writes_paused(const kvd_core_t *core);
/* Will the block be on disk soon without anybody's doing? Not while writes fail. */
int kvd_write_expected(kvd_core_t *core, uint32_t block);

/* Start a flush when something was stored since the last one and a put waits for that; `seq` of a store is durable once
 * flushed >= seq. */
void kvd_flush_run(kvd_core_t *core);

#endif
