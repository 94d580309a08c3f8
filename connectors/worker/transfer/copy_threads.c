/* Copying the synchronous loads of a step: by the engine's thread, which waits for them anyway, the transfer thread,
 * and copy threads. */
#include "worker/transfer/copy_threads.h"
#include "worker/jobs/report.h"
#include "worker/jobs/load.h"
#include "worker/base/submit.h"

#include <sys/prctl.h>

#define NAP_NS  UINT64_C(500000)
#define IDLE_NS UINT64_C(1000000000)

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

void *kvx_copy_thread_run(void *copy_thread)
{
	kvx_copy_thread_t *helper = copy_thread;
	kvx_worker_t *worker = helper->worker;
	uint32_t spins = 0;

	(void)prctl(PR_SET_NAME, "kvx-helper", 0, 0, 0);
	kvx_cpus_bind_thread(&worker->cpus);
	while (!atomic_load(&worker->stop)) {
		const uint32_t seen = kvx_gate_read(&worker->work);
		kvx_wload_t *loads;
		uint32_t copied;

		atomic_fetch_add(&worker->copy_threads_inside, 1u);
		loads = atomic_load(&worker->shared_loads);
		copied = copy_loads(worker, loads, &helper->scratch);
		atomic_fetch_sub(&worker->copy_threads_inside, 1u);
		if (copied == 0 && loads) {
			kvx_gate_pause(&worker->work, seen, &spins, NAP_NS);
			continue;
		}
		spins = 0;
		if (!loads) {
			kvx_gate_wait(&worker->work, seen, IDLE_NS);
		}
	}

	return NULL;
}

void kvx_copy_threads_run_loads(kvx_worker_t *worker)
{
	kvx_wload_t *loads = worker->sync;
	uint32_t spins = 0;

	for (kvx_wload_t *load = loads; load; load = load->next_sync) {
		atomic_store(&load->may_copy, 1u);
	}
	kvx_transfer_wake(worker);
	if (worker->copy_thread_count > 0) {
		atomic_store(&worker->shared_loads, loads);
		kvx_gate_open(&worker->work);
	}
	while (!kvx_sync_loads_settled(worker)) {
		const uint32_t seen = kvx_gate_read(&worker->progress);

		if (copy_loads(worker, loads, &worker->scratch) > 0) {
			spins = 0;
		} else if (!kvx_sync_loads_settled(worker)) {
			(void)kvx_sync_loads_pause(worker, seen, &spins);
		}
	}
	atomic_store(&worker->shared_loads, NULL);
	while (atomic_load(&worker->copy_threads_inside) > 0) {
		kvx_cpu_relax();
	}
	kvx_sync_loads_close(worker);
}
