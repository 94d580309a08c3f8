/* Copying the synchronous loads of a step: by the engine's thread, which waits for them anyway, the transfer thread,
 * and copy threads. */
#include "worker/host/copy_threads.h"
#include "worker/failures.h"
#include "worker/jobs/load.h"
#include "worker/submit.h"

#define SPINS    4000u
#define NAP_NS   UINT64_C(500000)
#define IDLE_NS  UINT64_C(1000000000)
#define GRACE_NS UINT64_C(20000000) /* past its deadline the engine ends a load itself */

/* Copy batches of these loads until there is none: how many blocks. */
static uint32_t copy_loads(kvx_worker_t *worker, kvx_wload_t *loads, kvx_scratch_t *scratch)
{
	uint32_t total = 0;

	for (kvx_wload_t *load = loads; load; load = load->next_sync) {
		uint32_t copied;

		do {
			copied = kvx_wload_copy(worker, load, scratch);
			total += copied;
		} while (copied > 0);
	}

	return total;
}

void kvx_copy_thread_run(kvx_copy_thread_t *helper)
{
	kvx_worker_t *worker = helper->worker;
	uint32_t spins = 0;

	while (!atomic_load(&worker->stop)) {
		const uint32_t seen = kvx_gate_read(&worker->work);
		kvx_wload_t *loads;
		uint32_t copied;

		atomic_fetch_add(&worker->copy_threads_inside, 1u);
		loads = atomic_load(&worker->shared_loads);
		copied = copy_loads(worker, loads, &helper->scratch);
		atomic_fetch_sub(&worker->copy_threads_inside, 1u);
		if (copied > 0 || (loads && spins++ < SPINS)) {
			kvx_cpu_relax();
			continue;
		}
		spins = 0;
		kvx_gate_wait(&worker->work, seen, loads ? NAP_NS : IDLE_NS);
	}
}

static int all_settled(kvx_wload_t *loads)
{
	for (kvx_wload_t *load = loads; load; load = load->next_sync) {
		if (!kvx_wload_is_settled(load)) {
			return 0;
		}
	}

	return 1;
}

/* The transfer thread watches deadlines; if it hangs in a system call, the engine's thread does not wait for it. */
static void close_overdue(kvx_worker_t *worker, kvx_wload_t *loads)
{
	const uint64_t now = kvx_worker_now_ns();

	for (kvx_wload_t *load = loads; load; load = load->next_sync) {
		if (now >= load->deadline_ns + GRACE_NS) {
			kvx_wload_close(worker, load, KVC_ERR_TIMEOUT);
		}
	}
}

static void copy_until_settled(kvx_worker_t *worker, kvx_wload_t *loads)
{
	uint32_t spins = 0;

	while (!all_settled(loads)) {
		const uint32_t seen = kvx_gate_read(&worker->progress);

		if (copy_loads(worker, loads, &worker->scratch) > 0) {
			spins = 0;
		} else if (spins++ < SPINS) {
			kvx_cpu_relax();
		} else if (!all_settled(loads)) {
			kvx_gate_wait(&worker->progress, seen, NAP_NS);
			close_overdue(worker, loads);
		}
	}
}

void kvx_copy_threads_run_loads(kvx_worker_t *worker)
{
	kvx_wload_t *loads = worker->sync;

	for (kvx_wload_t *load = loads; load; load = load->next_sync) {
		atomic_store(&load->may_copy, 1u);
	}
	kvx_transfer_wake(worker);
	if (worker->copy_thread_count > 0) {
		atomic_store(&worker->shared_loads, loads);
		kvx_gate_open(&worker->work);
	}
	copy_until_settled(worker, loads);
	atomic_store(&worker->shared_loads, NULL);
	while (atomic_load(&worker->copy_threads_inside) > 0) {
		kvx_cpu_relax();
	}
	kvx_sync_loads_close(worker);
}
