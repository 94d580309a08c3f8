/* What the transfer thread does for a save: import the put, copy block after block out of the engine's cache, hand in
 * what is done, free the put.
 *
 * A block that is about to be reused is copied by the engine's thread (worker/jobs/fence.c), so blocks may be done in
 * any order; they are handed in from the first on. All blocks behind one that was given up are given up too: a block
 * whose parent is missing cannot become visible.
 */
#include "worker/transfer/save.h"
#include "worker/cuda/save.h"
#include "worker/jobs/save.h"
#include "worker/submit.h"
#include "worker/transfer/spaces.h"

#define HAND_IN   (4u << 20) /* bytes copied before they are handed in: the daemon works while the rest is copied */
#define STUCK_NS  UINT64_C(1000000000) /* for staging, or a slab this process has not mapped yet */
#define IMPORT_MS 2000u                /* for the space to be opened */

/* A block without a source must have no slot either: else the old bytes of the slot would be handed in as its own. */
static kvc_status_t check_sources(kvx_worker_t *worker, const kvx_wsave_t *save)
{
	for (uint32_t i = 0; i < save->n; i++) {
		if (save->ids[i] == KVX_NO_BLOCK && kvc_put_block(save->put, i, NULL) == KVC_OK) {
			kvx_stat_add(&worker->stats.bad_messages, 1);
			return KVC_ERR_ARG;
		}
	}

	return KVC_OK;
}

/* BUSY: the space is not open yet, or there is no staging now. */
static kvc_status_t import_put(kvx_worker_t *worker, kvx_wsave_t *save, uint64_t now)
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

/* Hand in the blocks that are done, from the first one on. */
static kvc_status_t end_blocks(const kvx_worker_t *worker, kvx_wsave_t *save, int all)
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

/* No thread copies into the put: free it. 0: the device still copies. */
static int release_put(kvx_worker_t *worker, kvx_wsave_t *save)
{
	atomic_store(&save->closed, 1u);
	if (atomic_load(&save->dropped)) {
		kvx_wsave_drop(worker, save);
	}
	if (worker->gpu && atomic_load(&save->active) > 0) {
		worker->polls_soon = 1;
		return 0;
	}
	while (atomic_load(&save->active) > 0) {
		kvx_cpu_relax();
	}
	kvc_put_free(save->put);
	save->put = NULL;
	kvx_transfer_count_unacked(worker);
	kvx_wjob_complete(worker, &save->job);

	return 1;
}

/* In host memory: copy up to a batch; a fence may save blocks meanwhile. */
static kvc_status_t copy_batch(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t *p_moved)
{
	kvc_status_t status = KVC_OK;
	uint32_t moved = 0;

	for (uint32_t i = save->at; i < save->n && moved < worker->batch && status == KVC_OK; i++) {
		if (atomic_load(&save->state[i]) == KVX_MARK_WAITING) {
			status = kvx_wsave_copy_block(worker, save, i, &worker->transfer_scratch);
			moved += status == KVC_OK;
		}
	}
	*p_moved = moved;

	return status;
}

/* Skip blocks that are done. REVOKED: a block was given up. */
static kvc_status_t skip_done(kvx_wsave_t *save)
{
	while (save->at < save->n) {
		const uint8_t state = atomic_load(&save->state[save->at]);

		if (state != KVX_MARK_DONE) {
			return state == KVX_MARK_DROPPED ? KVC_ERR_REVOKED : KVC_OK;
		}
		save->at++;
	}

	return KVC_OK;
}

/* 0: it has waited for too long. */
static int may_wait(kvx_worker_t *worker, kvx_wsave_t *save, uint64_t now)
{
	save->stuck_ns = save->stuck_ns ? save->stuck_ns : now;
	worker->polls_soon = 1;

	return now - save->stuck_ns < STUCK_NS;
}

/* Copy a batch and hand in. OK: continue. */
static kvc_status_t advance_save(kvx_worker_t *worker, kvx_wsave_t *save, uint64_t now, uint32_t *p_moved)
{
	const uint32_t at = save->at, ended = save->ended;
	kvc_status_t status =
		worker->gpu ? kvx_gpu_send_save(worker, save, p_moved) : copy_batch(worker, save, p_moved);
	kvc_status_t passed = skip_done(save), handed;

	status = passed == KVC_OK ? status : passed;
	handed = end_blocks(worker, save, save->at == save->n || status != KVC_OK);
	if (save->at > at || save->ended > ended) {
		save->stuck_ns = 0;
	}
	if (handed != KVC_OK && !kvx_wsave_must_wait(handed)) {
		return handed;
	}
	if ((kvx_wsave_must_wait(status) || kvx_wsave_must_wait(handed)) && !may_wait(worker, save, now)) {
		return KVC_ERR_TIMEOUT;
	}

	return kvx_wsave_must_wait(status) ? KVC_OK : status;
}

int kvx_save_transfer_step(kvx_worker_t *worker, kvx_wsave_t *save, uint64_t now, uint32_t *p_moved)
{
	kvc_status_t status = (kvc_status_t)atomic_load(&save->imported);

	if (atomic_load(&worker->stop)) {
		atomic_store(&save->dropped, 1u);
	}
	if (status == KVC_PENDING || status == KVC_ERR_BUSY) {
		status = import_put(worker, save, now);
		if (status == KVC_ERR_BUSY && !atomic_load(&worker->stop)) {
			worker->polls_soon = 1;
			return 0;
		}
	}
	if (status == KVC_OK && !atomic_load(&save->dropped)) {
		if (!p_moved) {
			return 0;
		}
		status = advance_save(worker, save, now, p_moved);
	}
	if (status != KVC_OK) {
		atomic_store(&save->dropped, 1u);
	}
	if (atomic_load(&save->dropped) || save->ended == save->n) {
		return release_put(worker, save);
	}

	return 0;
}
