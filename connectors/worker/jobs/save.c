/* Saves: creation, the state of each block, and the copy of one block. A block goes from WAITING to TAKEN by one
 * thread, and from there to DONE or DROPPED; a fence finds it by worker->save_marks until then. */
#include "worker/jobs/save.h"
#include "worker/cuda/state.h"
#include "worker/jobs/report.h"
#include "worker/base/submit.h"

#include <stdlib.h>
#include <string.h>

/* ---- making one (engine's thread) ------------------------------------------------------------ */

static int is_sound(const kvx_wgroup_t *group, const kvx_msg_save_t *record)
{
	const uint32_t *ids = kvx_msg_save_ids(record);

	if (!group || record->n == 0 || record->put.n < record->n) {
		return 0;
	}
	for (uint32_t i = 0; i < record->n; i++) {
		if (ids[i] >= group->paged.blocks && ids[i] != KVX_NO_BLOCK) {
			return 0;
		}
	}

	return 1;
}

kvx_wsave_t *kvx_wsave_create(kvx_worker_t *worker, const kvx_msg_save_t *record)
{
	const kvx_wgroup_t *group = kvx_worker_find_group(worker, record->group);
	const uint32_t *ids = kvx_msg_save_ids(record);
	kvx_wsave_t *save;

	if (!is_sound(group, record)) {
		kvx_stat_add(&worker->stats.bad_messages, 1);
		return NULL;
	}
	save = calloc(1, sizeof *save + record->n * (sizeof *save->state + sizeof *ids) + sizeof *ids);
	if (!save) {
		return NULL;
	}
	save->job.kind = KVX_WJOB_SAVE;
	save->group = group;
	save->handle = record->put;
	save->space = record->space;
	save->mem = record->flags & KVX_MSG_GPU_MEM ? KVX_OWN_MEM : KVX_HOST_MEM;
	save->urgent = (record->flags & KVX_MSG_URGENT) != 0;
	save->step = record->step;
	save->n = record->n;
	save->begin_ns = kvx_worker_now_ns();
	save->ids = (uint32_t *)(void *)((uint8_t *)save->state + ((size_t)record->n + 3u) / 4u * 4u);
	memcpy(save->ids, ids, record->n * sizeof *ids);
	atomic_store(&save->imported, KVC_PENDING);
	for (uint32_t i = 0; i < save->n; i++) {
		atomic_store_explicit(&save->state[i], ids[i] == KVX_NO_BLOCK ? KVX_MARK_DONE : KVX_MARK_WAITING,
				      memory_order_relaxed);
	}

	return save;
}

/* ---- one block (any thread) ------------------------------------------------------------------ */

/* A taken block was read, or never will be. */
static void release_block(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t i, kvx_mark_t end)
{
	if (end == KVX_MARK_DROPPED) {
		atomic_store(&save->dropped, 1u);
	}
	atomic_fetch_sub_explicit(&worker->save_marks[save->ids[i]], 1, memory_order_release);
	atomic_fetch_sub_explicit(&worker->stats.marked, 1u, memory_order_relaxed);
	atomic_store(&save->state[i], (uint8_t)end);
}

static int take_block(kvx_wsave_t *save, uint32_t i)
{
	uint8_t waiting = KVX_MARK_WAITING;

	return atomic_compare_exchange_strong(&save->state[i], &waiting, KVX_MARK_TAKEN);
}

/* The daemon must answer first: waiting loses nothing. */
int kvx_wsave_must_wait(kvc_status_t status)
{
	return status == KVX_ERR_FAULT || status == KVC_ERR_BUSY;
}

kvc_status_t kvx_wsave_begin_block(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t i, void **p_data)
{
	kvc_status_t status = kvc_put_block(save->put, i, p_data);

	/* Without staging for its digests it would be copied in vain, again and again. */
	status = status == KVC_OK ? kvc_put_digests(save->put, i, NULL) : status;
	if (status == KVC_OK && worker->gpu &&
	    !kvk_gpu_is_registered(worker->gpu->gpu, *p_data, save->group->geometry.block_bytes)) {
		status = KVX_ERR_FAULT;
	}
	if (kvx_wsave_must_wait(status)) {
		return status;
	}
	if (!take_block(save, i)) {
		return KVC_ALREADY;
	}
	if (status != KVC_OK) {
		release_block(worker, save, i, status == KVC_ALREADY ? KVX_MARK_DONE : KVX_MARK_DROPPED);
		return status;
	}
	atomic_fetch_add(&save->active, 1u);

	return KVC_OK;
}

void kvx_wsave_end_block(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t i, const uint64_t *leaves)
{
	const int good = leaves && kvc_put_digests(save->put, i, leaves) == KVC_OK;

	kvx_stat_add(&worker->stats.save_bytes, good ? save->group->saved_bytes : 0);
	release_block(worker, save, i, good ? KVX_MARK_DONE : KVX_MARK_DROPPED);
	atomic_fetch_sub(&save->active, 1u); /* the save may be freed now */
}

void kvx_wsave_return_block(kvx_wsave_t *save, uint32_t i)
{
	atomic_store(&save->state[i], KVX_MARK_WAITING);
	atomic_fetch_sub(&save->active, 1u);
}

kvc_status_t kvx_wsave_copy_block(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t i, kvx_scratch_t *scratch)
{
	const uint64_t start = kvx_worker_now_ns();
	kvk_move_t move = {.block = save->ids[i], .leaves = scratch->leaves};
	kvc_status_t status = kvx_wsave_begin_block(worker, save, i, &move.data);

	if (status == KVC_OK) {
		status = (kvc_status_t)kvk_gather(save->layout, &save->group->saved, &move, 1);
		kvx_wsave_end_block(worker, save, i, status == KVC_OK ? move.leaves : NULL);
		kvx_stat_add(&worker->stats.save_ns, kvx_worker_now_ns() - start);
	}

	return status == KVC_ALREADY ? KVC_OK : status;
}

void kvx_wsave_drop_block(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t i)
{
	if (take_block(save, i)) {
		release_block(worker, save, i, KVX_MARK_DROPPED);
	}
}

void kvx_wsave_drop(kvx_worker_t *worker, kvx_wsave_t *save)
{
	atomic_store(&save->dropped, 1u);
	for (uint32_t i = 0; i < save->n; i++) {
		kvx_wsave_drop_block(worker, save, i);
	}
}

/* ---- to the transfer thread (engine's thread) -------------------------------------------------- */

/* From now on a fence finds its blocks. */
static void mark_blocks(kvx_worker_t *worker, kvx_wsave_t *save)
{
	uint32_t marked = 0;

	for (uint32_t i = 0; i < save->n; i++) {
		if (save->ids[i] != KVX_NO_BLOCK) {
			atomic_fetch_add_explicit(&worker->save_marks[save->ids[i]], 1, memory_order_relaxed);
			marked++;
		}
	}
	kvx_stat_add(&worker->stats.saves, 1);
	kvx_stat_add(&worker->stats.save_blocks, marked);
	kvx_stat_add(&worker->stats.marked, marked);
}

void kvx_save_submit(kvx_worker_t *worker, kvx_wsave_t *save)
{
	const int off = atomic_load(&worker->self_test_status) != KVC_OK;

	save->point = worker->gpu ? worker->gpu->points : 0;
	mark_blocks(worker, save);
	kvx_stat_add(&worker->stats.saves_open, 1);
	kvx_wjob_append(&worker->saves_end, &save->job);
	if (off || atomic_load(&save->dropped) || kvx_failures_taint_step(worker, save->step)) {
		kvx_wsave_drop(worker, save);
	}
	kvx_wjob_submit(worker, &save->job);
}

void kvx_saves_submit_deferred(kvx_worker_t *worker, int drop)
{
	kvx_wjob_t *next;

	for (kvx_wjob_t *job = worker->deferred; job; job = next) {
		next = job->next;
		atomic_store(&((kvx_wsave_t *)job)->dropped, (uint32_t)drop);
		kvx_save_submit(worker, (kvx_wsave_t *)job);
	}
	worker->deferred = NULL;
	worker->deferred_end = &worker->deferred;
}
