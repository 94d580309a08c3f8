/* The crew that copies the synchronous loads of a step: the engine's thread, which waits for them anyway, the transfer
 * thread, and helpers. */
#include "worker/cuda/impl.h"

#define SPINS     4000u
#define NAP_NS    UINT64_C(500000)
#define IDLE_NS   UINT64_C(1000000000)
#define GRACE_NS  UINT64_C(20000000) /* past its deadline the engine ends a load itself */
#define LET_GO_NS UINT64_C(50000000) /* for the transfer thread to report a corrupt block */

/* Copy batches of any of these loads until there is none: how many blocks. */
static uint32_t copy_all(kvx_worker_t *worker, kvx_wload_t *loads, kvx_scratch_t *scratch)
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

void kvx_crew_help(kvx_helper_t *helper)
{
	kvx_worker_t *worker = helper->worker;
	uint32_t spins = 0;

	while (!atomic_load(&worker->stop)) {
		const uint32_t seen = kvx_gate_seen(&worker->work);
		kvx_wload_t *loads;
		uint32_t copied;

		atomic_fetch_add(&worker->crew_inside, 1u);
		loads = atomic_load(&worker->crew_loads);
		copied = copy_all(worker, loads, &helper->scratch);
		atomic_fetch_sub(&worker->crew_inside, 1u);
		if (copied > 0 || (loads && spins++ < SPINS)) {
			kvx_pause();
			continue;
		}
		spins = 0;
		kvx_gate_wait(&worker->work, seen, loads ? NAP_NS : IDLE_NS);
	}
}

static int all_settled(kvx_wload_t *loads)
{
	for (kvx_wload_t *load = loads; load; load = load->next_sync) {
		if (!kvx_wload_settled(load)) {
			return 0;
		}
	}

	return 1;
}

/* The transfer thread watches deadlines; should it hang in a system call, the engine does not. */
static void end_overdue(kvx_worker_t *worker, kvx_wload_t *loads)
{
	const uint64_t now = kvx_worker_now();

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
		const uint32_t seen = kvx_gate_seen(&worker->progress);

		if (copy_all(worker, loads, &worker->scratch) > 0) {
			spins = 0;
		} else if (spins++ < SPINS) {
			kvx_pause();
		} else if (!all_settled(loads)) {
			kvx_gate_wait(&worker->progress, seen, NAP_NS);
			end_overdue(worker, loads);
		}
	}
}

/* A bad block is reported to the daemon before the engine hears of it, as far as the transfer thread can. */
static void wait_let_go(kvx_worker_t *worker, kvx_wload_t *load)
{
	const uint64_t until = kvx_worker_now() + LET_GO_NS;

	while (!atomic_load(&load->job.over) && kvx_worker_now() < until) {
		const uint32_t seen = kvx_gate_seen(&worker->progress);

		if (!atomic_load(&load->job.over)) {
			kvx_gate_wait(&worker->progress, seen, NAP_NS);
		}
	}
}

/* One given up at its deadline may still be in flight: its blocks are looked at with nothing landing. */
static void fail_load(kvx_worker_t *worker, kvx_wload_t *load)
{
	if (worker->gpu) {
		(void)pthread_mutex_lock(&worker->gpu->lock);
		kvx_worker_fail_load(worker, load);
		(void)pthread_mutex_unlock(&worker->gpu->lock);
	} else {
		kvx_worker_fail_load(worker, load);
	}
}

void kvx_crew_close(kvx_worker_t *worker)
{
	int failed = 0;

	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		const kvc_status_t cause = (kvc_status_t)atomic_load(&load->cause);

		if (cause == KVC_ERR_CORRUPT) {
			wait_let_go(worker, load);
		}
		failed |= cause != KVC_OK || load->skipped;
		fail_load(worker, load);
	}
	if (failed) {
		worker->failed_step[worker->failed_steps++ % KVX_WORKER_STEPS] = worker->step;
	}
	worker->sync = NULL;
}

void kvx_crew_load(kvx_worker_t *worker)
{
	kvx_wload_t *loads = worker->sync;

	for (kvx_wload_t *load = loads; load; load = load->next_sync) {
		atomic_store(&load->go, 1u);
	}
	kvx_worker_wake(worker);
	if (worker->helper_count > 0) {
		atomic_store(&worker->crew_loads, loads);
		kvx_gate_open(&worker->work);
	}
	copy_until_settled(worker, loads);
	atomic_store(&worker->crew_loads, NULL);
	while (atomic_load(&worker->crew_inside) > 0) {
		kvx_pause();
	}
	kvx_crew_close(worker);
}
