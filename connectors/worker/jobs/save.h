/* worker/jobs/save.h -- a save: blocks of one put, each of them waiting, taken, done or dropped. */
#ifndef KVX_JOB_SAVE_H
#define KVX_JOB_SAVE_H

#include "worker/base/state.h"

typedef enum kvx_mark { KVX_MARK_WAITING = 0, KVX_MARK_TAKEN = 1, KVX_MARK_DONE = 2, KVX_MARK_DROPPED = 3 } kvx_mark_t;

typedef struct kvx_wsave {
	kvx_wjob_t job;
	const kvx_wgroup_t *group;
	kvc_handle_t handle;
	uint32_t space, mem, n; /* mem: KVX_HOST_MEM or KVX_OWN_MEM */
	uint64_t begin_ns;
	kvc_put_t *put;           /* written by the transfer thread before `imported` is OK */
	_Atomic int32_t imported; /* PENDING: not tried; BUSY: waits for the daemon; OK; or why not */
	_Atomic uint32_t closed;  /* the put must not be used any longer */
	_Atomic uint32_t active;  /* threads and device copies that use it */
	_Atomic uint32_t dropped; /* not all will be saved */
	uint32_t step;            /* the step that computes its last block */
	uint32_t point;           /* of the compute stream, that its copies come after */
	uint32_t ended;           /* blocks [0, ended) are handed in */
	uint32_t at;              /* blocks [0, at) are done */
	uint64_t stuck_ns;        /* since when it waits for the daemon; 0: it does not */
	int urgent;               /* another engine waits for it, in memory of a GPU */
	const kvk_layout_t *layout;
	uint32_t *ids;           /* [n] */
	_Atomic uint8_t state[]; /* [n] kvx_mark_t */
} kvx_wsave_t;

/* The engine is about to write block i. */
static inline int kvx_wsave_is_fenced(const kvx_worker_t *worker, const kvx_wsave_t *save, uint32_t i)
{
	const uint32_t id = save->ids[i];

	return id != KVX_NO_BLOCK && worker->fence[id / 64u] >> id % 64u & 1u;
}

/* Of a SAVE record, to be freed with free(); NULL: out of memory, or the record is not sound. Engine's thread. */
kvx_wsave_t *kvx_wsave_create(kvx_worker_t *worker, const kvx_msg_save_t *record);
/* To the transfer thread; a dropped save goes there too, which tells the daemon that nothing is written. */
void kvx_save_submit(kvx_worker_t *worker, kvx_wsave_t *save);
/* Submit the saves that wait for the end of their step (worker->deferred), or drop them. */
void kvx_saves_submit_deferred(kvx_worker_t *worker, int drop);
int kvx_wsave_must_wait(kvc_status_t status);
/* OK: the caller reads block i into *p_data, and counts as active until it ends or returns the block. ALREADY: there
 * is nothing to read. Else the daemon must answer first (kvx_wsave_must_wait()), or the block was given up. Any thread.
 */
kvc_status_t kvx_wsave_begin_block(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t i, void **p_data);
/* Its digests; NULL: it could not be read, and is given up. */
void kvx_wsave_end_block(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t i, const uint64_t *leaves);
/* It waits again. */
void kvx_wsave_return_block(kvx_wsave_t *save, uint32_t i);
/* In host memory: begin, copy and end block i. */
kvc_status_t kvx_wsave_copy_block(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t i, kvx_scratch_t *scratch);
/* Give block i up if it waits. */
void kvx_wsave_drop_block(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t i);
/* Give up all of it that waits. */
void kvx_wsave_drop(kvx_worker_t *worker, kvx_wsave_t *save);
#endif
