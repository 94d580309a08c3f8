/* Fences: blocks that the engine is about to write and that a save still has to read (docs/decisions/009). The engine's
 * thread copies them; it waits only for a block that the transfer thread is copying. If a block cannot be copied
 * without the daemon, its save is given up: the step is never held for it. */
#include "worker/jobs/fence.h"
#include "worker/cuda/save.h"
#include "worker/jobs/save.h"
#include "worker/submit.h"

#include <string.h>

#define IMPORT_NS UINT64_C(20000000) /* longest wait for the transfer thread to import new puts */
#define RETRY_NS  UINT64_C(2000000)  /* for a slab announced by the daemon and not mapped yet */

void kvx_fence_begin(kvx_worker_t *worker)
{
	worker->fence_count = 0;
}

void kvx_fence_add(kvx_worker_t *worker, const uint32_t *ids, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		const uint32_t id = ids[i];

		if (id >= worker->max_blocks ||
		    atomic_load_explicit(&worker->save_marks[id], memory_order_acquire) == 0) {
			continue;
		}
		worker->fence[id / 64u] |= UINT64_C(1) << id % 64u;
		worker->fence_count++;
	}
}

void kvx_fence_save_all(kvx_worker_t *worker)
{
	kvx_fence_begin(worker);
	for (uint32_t id = 0; id < worker->max_blocks; id++) {
		kvx_fence_add(worker, &id, 1);
	}
	kvx_fence_save(worker);
}

/* Block i is read, or given up, when this returns. */
static void save_fenced_block(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t i)
{
	if (atomic_load(&save->state[i]) >= KVX_MARK_DONE) {
		return;
	}
	if (kvx_wsave_await_import(worker, save)) {
		kvx_wsave_copy_block(worker, save, i, &worker->scratch);
	}
	while (atomic_load(&save->state[i]) < KVX_MARK_DONE && !atomic_load(&save->closed) &&
	       kvx_worker_now_ns() < worker->fence_retry) {
		kvx_transfer_wake(worker);
		kvx_wsave_copy_block(worker, save, i, &worker->scratch);
	}
	/* The transfer thread may return a block it could not copy: then it is given up here. */
	while (atomic_load(&save->state[i]) < KVX_MARK_DONE) {
		kvx_wsave_drop_block(worker, save, i);
		kvx_cpu_relax();
	}
}

static void save_fenced(kvx_worker_t *worker, kvx_wsave_t *save)
{
	for (uint32_t i = 0; i < save->n; i++) {
		const uint32_t id = save->ids[i];

		if (id != KVX_NO_BLOCK && worker->fence[id / 64u] >> id % 64u & 1u) {
			save_fenced_block(worker, save, i);
		}
	}
}

void kvx_fence_save(kvx_worker_t *worker)
{
	const uint64_t start = kvx_worker_now_ns();

	if (worker->fence_count == 0) {
		return;
	}

	worker->fence_until = start + IMPORT_NS;
	worker->fence_retry = start + RETRY_NS;
	if (worker->gpu) {
		kvx_gpu_save_fenced(worker);
	}
	for (kvx_wjob_t *job = worker->saves; job && !worker->gpu; job = job->next) {
		if (!atomic_load(&job->completed)) {
			save_fenced(worker, (kvx_wsave_t *)job);
		}
	}
	memset(worker->fence, 0, (worker->max_blocks + 63u) / 64u * sizeof *worker->fence);
	kvx_stat_add(&worker->stats.fences, worker->fence_count);
	kvx_stat_add(&worker->stats.fence_ns, kvx_worker_now_ns() - start);
	kvx_transfer_wake(worker);
}
