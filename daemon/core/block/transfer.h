/* transfer.h -- bytes on their way between the CPU tier and the disk tier.
 *
 *   read:  created --> queued --the depth allows it--> in flight --> done() --> gone
 *                      queued --cancel--> gone
 *   write: created --submit--> in flight --> done() --> gone
 *
 * `done` says what the end of a transfer means: lease/fill.c reads for leases, block/write_behind.c
 * writes behind, put/publish.c writes through. A transfer knows both slots. While it is in flight they belong to it: if
 * its block goes away meanwhile, it is detached (block.h) and gives both slots back at its end.
 */
#ifndef KVD_CORE_TRANSFER_H
#define KVD_CORE_TRANSFER_H

#include "core/base/core_impl.h"

typedef struct kvd_io kvd_io_t;
/* The transfer has ended. It is destroyed after the call. */
typedef void (*kvd_io_done_fn)(kvd_core_t *core, kvd_io_t *io, kv_status_t status);

struct kvd_io {
	kvd_core_t *core;
	kvd_io_done_fn done; /* NULL: detached */
	uint32_t self;
	uint32_t queued;
	uint32_t block;     /* whose slots are read or written; KVD_NONE: a put's */
	uint32_t parent;    /* of write-behind: the block above, referenced meanwhile; KVD_NONE: none */
	kvd_link_t queue;   /* of reads */
	kvd_list_t waiters; /* leases whose next block this reads */
	kvs_loc_t cpu, disk;
	uint64_t stamp;
	uint64_t put;   /* of write-through */
	uint32_t index; /* of write-through: entry of the put */
};

static inline kvd_io_t *kvd_io_at(const kvd_core_t *core, uint32_t id)
{
	return kvd_obj_at(&core->ios, id);
}

/* A record without slots. KV_ERR_LIMIT, KV_ERR_NOMEM. */
kv_status_t kvd_io_create(kvd_core_t *core, uint32_t block, kvd_io_done_fn done, kvd_io_t **p_io);
/* One that is neither queued nor in flight. */
void kvd_io_destroy(kvd_core_t *core, kvd_io_t *io);

void kvd_io_queue_read(kvd_core_t *core, kvd_io_t *io);
void kvd_io_cancel_read(kvd_core_t *core, kvd_io_t *io);
/* As many of the queued reads as the depth allows. */
void kvd_io_submit_reads(kvd_core_t *core);
/* KV_OK: done() will run. Else it will not, and the disk slot is free again. */
kv_status_t kvd_io_submit_write(kvd_core_t *core, kvd_io_t *io);

#endif
