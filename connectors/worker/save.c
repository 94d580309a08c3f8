/* Saves: the transfer thread imports the put and copies block after block out of the engine's cache, hands in what is
 * done, and lets go.
 *
 * A block that is about to be reused is copied by the engine's thread (worker/fence.c), so a save's blocks may be done
 * in any order; they are handed in from the first on. Where one had to be given up, everything behind it is too: a
 * block whose parent is missing cannot become visible.
 */
#include "worker/cuda/impl.h"

#include <stdlib.h>
#include <string.h>

#define HAND_IN   (4u << 20) /* bytes copied before they are handed in: the daemon works while the rest is copied */
#define STUCK_NS  UINT64_C(1000000000) /* for staging, or a slab this process has not heard of yet */
#define IMPORT_MS 2000u                /* for the space to be opened */

/* ---- making one (engine's thread)
 * -------------------------------------------------------------------------------------------- */

static int is_sound(const kvx_wgroup_t *group, const kvx_plan_save_t *record)
{
	const uint32_t *ids = kvx_plan_save_ids(record);

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

kvx_wsave_t *kvx_wsave_create(kvx_worker_t *worker, const kvx_plan_save_t *record)
{
	const kvx_wgroup_t *group = kvx_worker_group(worker, record->group);
	const uint32_t *ids = kvx_plan_save_ids(record);
	kvx_wsave_t *save;

	if (!is_sound(group, record)) {
		kvx_wcount(&worker->stats.bad_plans, 1);
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
	save->step = record->step;
	save->n = record->n;
	save->begin_ns = kvx_worker_now();
	save->ids = (uint32_t *)(void *)((uint8_t *)save->state + ((size_t)record->n + 3u) / 4u * 4u);
	memcpy(save->ids, ids, record->n * sizeof *ids);
	atomic_store(&save->imported, KVC_PENDING);
	for (uint32_t i = 0; i < save->n; i++) {
		atomic_store_explicit(&save->state[i], ids[i] == KVX_NO_BLOCK ? KVX_MARK_DONE : KVX_MARK_WAITING,
				      memory_order_relaxed);
	}

	return save;
}

void kvx_wsave_free(kvx_wsave_t *save)
{
	free(save);
}

void kvx_wsave_mark(kvx_worker_t *worker, kvx_wsave_t *save)
{
	uint32_t marked = 0;

	for (uint32_t i = 0; i < save->n; i++) {
		if (save->ids[i] != KVX_NO_BLOCK) {
			atomic_fetch_add_explicit(&worker->marks[save->ids[i]], 1, memory_order_relaxed);
			marked++;
		}
	}
	kvx_wcount(&worker->stats.saves, 1);
	kvx_wcount(&worker->stats.save_blocks, marked);
	kvx_wcount(&worker->stats.marked, marked);
}

/* ---- one block (any thread)
 * -------------------------------------------------------------------------------------------------- */

void kvx_wsave_unmark(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t i, kvx_mark_t end)
{
	if (end == KVX_MARK_DROPPED) {
		atomic_store(&save->dropped, 1u);
	}
	atomic_fetch_sub_explicit(&worker->marks[save->ids[i]], 1, memory_order_release);
	atomic_fetch_sub_explicit(&worker->stats.marked, 1u, memory_order_relaxed);
	atomic_store(&save->state[i], (uint8_t)end);
}

int kvx_wsave_claim(kvx_wsave_t *save, uint32_t i)
{
	uint8_t waiting = KVX_MARK_WAITING;

	return atomic_compare_exchange_strong(&save->state[i], &waiting, KVX_MARK_TAKEN);
}

static kvc_status_t copy_block(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t i, kvx_scratch_t *scratch)
{
	void *data = NULL;
	kvc_status_t status = kvc_put_block(save->put, i, &data);

	/* Without room for its digests it would be copied for nothing, again and again. */
	status = status == KVC_OK ? kvc_put_digests(save->put, i, NULL) : status;
	if (status == KVC_OK) {
		status = kvx_move_out(worker, save->group, save->layout, save->ids[i], data, scratch);
		status = status == KVC_OK ? kvc_put_digests(save->put, i, scratch->leaves) : status;
		kvx_wcount(&worker->stats.save_bytes, (uint64_t)save->group->paged.heads * save->group->paged.layers *
							      worker->geometry.page_bytes);
	}

	return status == KVC_ALREADY ? KVC_OK : status;
}

/* The daemon has to say something first: nothing is lost by waiting for it. */
static int is_stuck(kvc_status_t status)
{
	return status == KVX_ERR_FAULT || status == KVC_ERR_BUSY;
}

/* What is stuck stays as it was. */
static kvc_status_t copy_claimed(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t i, kvx_scratch_t *scratch)
{
	const uint64_t start = kvx_worker_now();
	const kvc_status_t status = copy_block(worker, save, i, scratch);

	if (is_stuck(status)) {
		atomic_store(&save->state[i], KVX_MARK_WAITING);
	} else {
		kvx_wsave_unmark(worker, save, i, status == KVC_OK ? KVX_MARK_DONE : KVX_MARK_DROPPED);
	}
	kvx_wcount(&worker->stats.save_ns, kvx_worker_now() - start);

	return status;
}

int kvx_wsave_copy(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t i, kvx_scratch_t *scratch)
{
	int done = 0;

	atomic_fetch_add(&save->active, 1u);
	if (!atomic_load(&save->closed) && atomic_load(&save->imported) == KVC_OK && kvx_wsave_claim(save, i)) {
		done = copy_claimed(worker, save, i, scratch) == KVC_OK;
	}
	atomic_fetch_sub(&save->active, 1u);

	return done;
}

void kvx_wsave_drop_block(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t i)
{
	if (kvx_wsave_claim(save, i)) {
		kvx_wsave_unmark(worker, save, i, KVX_MARK_DROPPED);
	}
}

void kvx_wsave_drop(kvx_worker_t *worker, kvx_wsave_t *save)
{
	atomic_store(&save->dropped, 1u);
	for (uint32_t i = 0; i < save->n; i++) {
		kvx_wsave_drop_block(worker, save, i);
	}
}

/* ---- the transfer thread
 * ----------------------------------------------------------------------------------------------------- */

/* A block without a source must be one that has no slot: else what lies there would be handed in as its bytes. */
static kvc_status_t check_sources(kvx_worker_t *worker, const kvx_wsave_t *save)
{
	for (uint32_t i = 0; i < save->n; i++) {
		if (save->ids[i] == KVX_NO_BLOCK && kvc_put_block(save->put, i, NULL) == KVC_OK) {
			kvx_wcount(&worker->stats.bad_plans, 1);
			return KVC_ERR_ARG;
		}
	}

	return KVC_OK;
}

/* BUSY: the space is not open yet, or there is no staging now. */
static kvc_status_t import(kvx_worker_t *worker, kvx_wsave_t *save, uint64_t now)
{
	const kvx_wspace_t *space = NULL;
	kvc_status_t status = kvx_wspace_get(worker, save->space, now, &space);

	if (status == KVC_OK) {
		save->layout = &space->layout;
		status = kvc_put_import(space->space, &save->handle, &worker->range, &save->put);
	}
	if (status == KVC_OK) {
		status = check_sources(worker, save);
	}
	if (status == KVC_PENDING || status == KVC_ERR_BUSY) {
		status = now - save->begin_ns > IMPORT_MS * KVX_NS_A_MS ? KVC_ERR_TIMEOUT : KVC_ERR_BUSY;
	}
	atomic_store(&save->imported, status);
	kvx_gate_open(&worker->progress);

	return status;
}

/* Hand in what is done from the first block on. */
static kvc_status_t hand_in(const kvx_worker_t *worker, kvx_wsave_t *save, int all)
{
	const uint64_t bytes = (uint64_t)(save->at - save->ended) * worker->geometry.block_bytes;
	kvc_status_t status;

	if (save->at == save->ended || (!all && bytes < HAND_IN)) {
		return KVC_OK;
	}
	status = kvc_put_end(save->put, save->ended, save->at - save->ended);
	if (status == KVC_OK) {
		save->ended = save->at;
	}

	return status;
}

/* Nobody copies into the put any more, and it is given back. 0: a device still does. */
static int let_go(kvx_worker_t *worker, kvx_wsave_t *save)
{
	atomic_store(&save->closed, 1u);
	if (atomic_load(&save->dropped)) {
		kvx_wsave_drop(worker, save);
	}
	if (worker->gpu && atomic_load(&save->active) > 0) {
		worker->waiting = 1;
		return 0;
	}
	while (atomic_load(&save->active) > 0) {
		kvx_pause();
	}
	kvc_put_free(save->put);
	save->put = NULL;
	kvx_worker_acknowledged(worker);
	kvx_worker_over(worker, &save->job);

	return 1;
}

/* Copy up to a batch, skip what the fences have done. */
static kvc_status_t copy_some(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t *p_moved)
{
	kvc_status_t status = KVC_OK;
	uint32_t moved = 0;

	while (save->at < save->n && moved < worker->batch && status == KVC_OK) {
		const uint8_t state = atomic_load(&save->state[save->at]);

		if (state == KVX_MARK_WAITING && kvx_wsave_claim(save, save->at)) {
			status = copy_claimed(worker, save, save->at, &worker->transfer_scratch);
			moved += status == KVC_OK;
		} else if (state == KVX_MARK_DONE) {
			save->at++;
		} else if (state == KVX_MARK_DROPPED) {
			status = KVC_ERR_REVOKED;
		} else {
			break; /* the engine is copying it */
		}
	}
	*p_moved = moved;

	return status;
}

/* 1: wait on; 0: for too long now. */
static int wait_on(kvx_worker_t *worker, kvx_wsave_t *save, uint64_t now)
{
	save->stuck_ns = save->stuck_ns ? save->stuck_ns : now;
	worker->waiting = 1;

	return now - save->stuck_ns < STUCK_NS;
}

/* Copy a batch and hand in. OK: going on. */
static kvc_status_t go_on(kvx_worker_t *worker, kvx_wsave_t *save, uint64_t now, uint32_t *p_moved)
{
	const uint32_t at = save->at, ended = save->ended;
	kvc_status_t status = worker->gpu ? kvx_gpu_save(worker, save, p_moved) : copy_some(worker, save, p_moved);
	kvc_status_t handed = hand_in(worker, save, save->at == save->n || status != KVC_OK);

	if (save->at > at || save->ended > ended) {
		save->stuck_ns = 0;
	}
	if (handed != KVC_OK && !is_stuck(handed)) {
		return handed;
	}
	if ((is_stuck(status) || is_stuck(handed)) && !wait_on(worker, save, now)) {
		return KVC_ERR_TIMEOUT;
	}

	return is_stuck(status) ? KVC_OK : status;
}

int kvx_wsave_step(kvx_worker_t *worker, kvx_wsave_t *save, uint64_t now, uint32_t *p_moved)
{
	kvc_status_t status = (kvc_status_t)atomic_load(&save->imported);

	if (atomic_load(&worker->stop)) {
		atomic_store(&save->dropped, 1u);
	}
	if (status == KVC_PENDING || status == KVC_ERR_BUSY) {
		status = import(worker, save, now);
		if (status == KVC_ERR_BUSY && !atomic_load(&worker->stop)) {
			worker->waiting = 1;
			return 0;
		}
	}
	if (status == KVC_OK && !atomic_load(&save->dropped)) {
		if (!p_moved) {
			return 0;
		}
		status = go_on(worker, save, now, p_moved);
	}
	if (status != KVC_OK) {
		atomic_store(&save->dropped, 1u);
	}
	if (atomic_load(&save->dropped) || save->ended == save->n) {
		return let_go(worker, save);
	}

	return 0;
}
