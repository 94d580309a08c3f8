/* Fences: blocks that the engine is about to write and that a save still has to read (docs/decisions/009). The engine's
 * thread copies them; it waits only for a block that the transfer thread is copying. If a block cannot be copied
 * without the daemon, its save is given up: the step is never held for it. */
#include "worker/jobs/fence.h"
#include "worker/jobs/gpu_save.h"
#include "worker/jobs/save.h"
#include "worker/base/submit.h"

#include <string.h>

#define IMPORT_NS UINT64_C(20000000) /* longest wait for the transfer thread to import new puts */
#define RETRY_NS  UINT64_C(2000000)  /* for a slab announced by the daemon and not mapped yet */
#define NAP_NS    UINT64_C(200000)

void kvx_fence_add(kvx_worker_t *worker, const uint32_t *ids, uint32_t n)
{
	const uint32_t count = n ? n : worker->max_blocks;

	for (uint32_t i = 0; i < count; i++) {
		const uint32_t id = n ? ids[i] : i;

		if (id >= worker->max_blocks ||
		    atomic_load_explicit(&worker->save_marks[id], memory_order_acquire) == 0) {
			continue;
		}
		worker->fence[id / 64u] |= UINT64_C(1) << id % 64u;
		worker->fence_count++;
	}
}

static void await_import(kvx_worker_t *worker, const kvx_wsave_t *save, uint64_t until)
{
	uint32_t spins = 0;

	for (;;) {
		const uint32_t seen = kvx_gate_read(&worker->progress);

		if (atomic_load(&save->imported) != KVC_PENDING || kvx_worker_now_ns() >= until) {
			return;
		}
		kvx_gate_pause(&worker->progress, seen, &spins, NAP_NS);
	}
}

/* A block of the fence still waits. */
static int has_waiting(const kvx_worker_t *worker, const kvx_wsave_t *save)
{
	for (uint32_t i = 0; i < save->n; i++) {
		if (kvx_wsave_is_fenced(worker, save, i) && atomic_load(&save->state[i]) == KVX_MARK_WAITING) {
			return 1;
		}
	}

	return 0;
}

/* In host memory: how many blocks of the fence were copied. */
static uint32_t copy_fenced(kvx_worker_t *worker, kvx_wsave_t *save)
{
	uint32_t copied = 0;

	for (uint32_t i = 0; i < save->n; i++) {
		if (kvx_wsave_is_fenced(worker, save, i) && atomic_load(&save->state[i]) == KVX_MARK_WAITING) {
			copied += kvx_wsave_copy_block(worker, save, i, &worker->scratch) == KVC_OK;
		}
	}

	return copied;
}

/* Copy blocks of the fence, or send them to the device: how many. 0: none can be copied now. */
static uint32_t copy_some(kvx_worker_t *worker, kvx_wsave_t *save)
{
	uint32_t copied = 0;

	atomic_fetch_add(&save->active, 1u);
	if (!atomic_load(&save->closed) && atomic_load(&save->imported) == KVC_OK) {
		copied = worker->gpu ? kvx_gpu_send_fenced(worker, save) : copy_fenced(worker, save);
	}
	atomic_fetch_sub(&save->active, 1u);

	return copied;
}

/* `start`: when the fence began. */
static void save_waiting(kvx_worker_t *worker, kvx_wsave_t *save, uint64_t start)
{
	if (!has_waiting(worker, save)) {
		return;
	}
	await_import(worker, save, start + IMPORT_NS);
	while (has_waiting(worker, save) && !atomic_load(&save->closed)) {
		if (copy_some(worker, save) > 0) {
			continue;
		}
		if (kvx_worker_now_ns() >= start + RETRY_NS) {
			return;
		}
		kvx_transfer_wake(worker);
		kvx_cpu_relax();
	}
}

/* What still waits is given up. In host memory another thread may be copying a block: soon it is done. */
static void finish_fenced(kvx_worker_t *worker, kvx_wsave_t *save)
{
	for (uint32_t i = 0; i < save->n; i++) {
		if (!kvx_wsave_is_fenced(worker, save, i)) {
			continue;
		}
		kvx_wsave_drop_block(worker, save, i);
		while (!worker->gpu && atomic_load(&save->state[i]) < KVX_MARK_DONE) {
			kvx_cpu_relax();
		}
	}
}

void kvx_fence_save(kvx_worker_t *worker)
{
	const uint64_t start = kvx_worker_now_ns();

	if (worker->fence_count == 0) {
		return;
	}

	for (kvx_wjob_t *job = worker->saves; job; job = job->next) {
		if (!atomic_load(&job->completed)) {
			save_waiting(worker, (kvx_wsave_t *)job, start);
		}
	}
	if (worker->gpu) {
		/* so that no thread submits a block that is given up here */
		(void)pthread_mutex_lock(&worker->gpu->lock);
	}
	for (kvx_wjob_t *job = worker->saves; job; job = job->next) {
		if (!atomic_load(&job->completed)) {
			finish_fenced(worker, (kvx_wsave_t *)job);
		}
	}
	if (worker->gpu) {
		kvx_gpu_order_fenced(worker);
		(void)pthread_mutex_unlock(&worker->gpu->lock);
	}
	memset(worker->fence, 0, (worker->max_blocks + 63u) / 64u * sizeof *worker->fence);
	kvx_stat_add(&worker->stats.fences, worker->fence_count);
	worker->fence_count = 0;
	kvx_stat_add(&worker->stats.fence_ns, kvx_worker_now_ns() - start);
	kvx_transfer_wake(worker);
}

void kvx_fence_save_all(kvx_worker_t *worker)
{
	kvx_fence_add(worker, NULL, 0);
	kvx_fence_save(worker);
}
