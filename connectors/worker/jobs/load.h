/* worker/jobs/load.h -- a load: the leased blocks of one request, and how far each part of them is. */
#ifndef KVX_JOB_LOAD_H
#define KVX_JOB_LOAD_H

#include "worker/base/state.h"

/* A block in the pool. */
typedef struct kvx_source {
	const void *data;
	const uint64_t *leaves; /* of the whole block */
} kvx_source_t;

#define KVX_BLOCK_BAD UINT8_MAX /* kvx_wblock_t.ranges_done: its digest was wrong */

typedef struct kvx_wblock {
	uint32_t id;         /* in the engine's cache; KVX_NO_BLOCK: it has no destination */
	uint8_t ranges_done; /* layer ranges that are loaded and verified; written by the copying thread */
	kvx_source_t source; /* known up to `limit` of its part */
} kvx_wblock_t;

/* Blocks of one group, in one mem. */
typedef struct kvx_wpart {
	const kvx_wgroup_t *group;
	kvc_handle_t handle;
	const kvk_layout_t *layout; /* of the blocks in the pool */
	uint32_t mem;
	uint32_t n, first;
	kvx_wblock_t *blocks;   /* [n] */
	uint32_t whole_blocks;  /* blocks before this one come with all layers in one copy */
	kvc_lease_t *lease;     /* the transfer thread's; copying threads read its state */
	uint32_t leased_blocks; /* that the lease covers */
	_Atomic uint32_t next;  /* blocks before it are taken */
	_Atomic uint32_t limit; /* blocks before it may be taken */
} kvx_wpart_t;

typedef struct kvx_wload {
	kvx_wjob_t job;
	uint64_t id;
	uint32_t space, flags, parts, id_len;
	int imported;
	int lacks_blocks;            /* a block with a destination lies beyond the leases */
	int named;                   /* its failed blocks were named, or never will be: the request is gone (DROP) */
	int more;                    /* another piece of the request's load follows; the engine's thread */
	int layer_skipped;           /* the engine did not await each layer: what it computed may be garbage */
	uint32_t ranges;             /* layer ranges it is loaded in: above 1 only for synchronous loads of a GPU */
	uint32_t timer;              /* the device timer it uses; 0: none */
	uint32_t wanted;             /* blocks with a destination */
	uint32_t batch_total_blocks; /* `wanted` of all loads it is layered with; 0: it is loaded whole */
	int submitted;               /* a copy of it was submitted; under the lock */
	uint64_t begin_ns, deadline_ns, end_ns;
	uint64_t copied_ns;         /* the worker's when it began */
	uint64_t silent_ns;         /* since when the daemon has been silent; 0: it is not */
	_Atomic uint32_t all_ready; /* all blocks were ready at the start */
	_Atomic uint32_t may_copy;  /* copying may begin */
	_Atomic uint32_t cancel;    /* end it early */
	_Atomic int32_t cause;      /* PENDING: open; OK: all blocks are loaded; else why not */
	_Atomic uint32_t active;    /* threads and device copies that use it */
	_Atomic uint32_t remaining; /* blocks within the leases not verified yet, times ranges */
	char *request;              /* [id_len] */
	struct kvx_wload *next_sync;
	kvx_wpart_t part[];
} kvx_wload_t;

/* What one copy brings of a load: some blocks of a part, all their layers or one range of them. */
typedef struct kvx_wbatch {
	kvx_wload_t *load;
	kvx_wpart_t *part;
	uint32_t first, count;
	uint32_t layer, layers; /* of the group; layers 0: all */
	uint32_t ranges;        /* layer ranges of the load that these are */
} kvx_wbatch_t;

/* All its layers are loaded and verified. */
static inline int kvx_wblock_is_loaded(const kvx_wload_t *load, const kvx_wblock_t *block)
{
	return block->ranges_done == load->ranges;
}

/* Of a LOAD record, to be freed with free(); NULL: out of memory, or the record is not sound. Engine's thread. */
kvx_wload_t *kvx_wload_create(kvx_worker_t *worker, const kvx_msg_load_t *record);
/* The first cause stays. */
void kvx_wload_close(kvx_worker_t *worker, kvx_wload_t *load, kvc_status_t cause);
/* These blocks, times ranges, are verified or have no bytes: after the last ones the load is closed. */
void kvx_wload_count_done(kvx_worker_t *worker, kvx_wload_t *load, uint32_t blocks);
/* Closed, and no copy uses it. */
int kvx_wload_is_settled(kvx_wload_t *load);
/* The part with the largest blocks of those that have any to copy, or NULL. The smallest come last, so that all threads
 * end at about the same time. Any thread. */
kvx_wpart_t *kvx_wload_find_part(kvx_wload_t *load);
/* Take up to `most` blocks before `end`: *p_first and how many. Any thread. */
uint32_t kvx_wpart_take(kvx_wpart_t *part, uint32_t end, uint32_t most, uint32_t *p_first);
/* Fill a move but for its block: the expected leaves of this group's layers are in place, or copied to leaves[words].
 */
void kvx_move_prepare(const kvx_wgroup_t *group, const kvx_source_t *source, kvk_move_t *move, uint64_t *leaves);
/* Fill in the moves of the batch's blocks with a destination: how many. leaves: [count][words]. */
uint32_t kvx_wbatch_prepare(const kvx_worker_t *worker, const kvx_wbatch_t *batch, kvk_move_t *moves, uint64_t *leaves);
/* The copy of the batch's first `moves` moves has ended with this status. CORRUPT: the device's job tells which blocks
 * are bad; without a job it is the last of the moves. */
void kvx_wbatch_complete(kvx_worker_t *worker, const kvx_wbatch_t *batch, kvc_status_t status, const kvk_gpu_job_t *job,
			 uint32_t moves);
/* Copy one batch if there is one: how many blocks. Any thread. */
uint32_t kvx_wload_copy(kvx_worker_t *worker, kvx_wload_t *load, kvx_scratch_t *scratch);

/* The synchronous loads of the step are settled. Engine's thread. */
int kvx_sync_loads_settled(const kvx_worker_t *worker);
/* One round of waiting for them; past their deadline they are closed. 1: all of them are settled, or were closed late,
 * and copies of them may be in flight. */
int kvx_sync_loads_pause(kvx_worker_t *worker, uint32_t seen, uint32_t *p_spins);

#endif
