/* Jobs between the engine's thread and the transfer thread, and the wakeups. */
#include "worker/submit.h"

#include <unistd.h>

void kvx_transfer_wake(kvx_worker_t *worker)
{
	const uint64_t one = 1;

	atomic_fetch_add(&worker->pokes, 1u);
	if (atomic_exchange(&worker->asleep, 0u)) {
		(void)!write(worker->event_fd, &one, sizeof one);
	}
}

void kvx_wjob_submit(kvx_worker_t *worker, kvx_wjob_t *job)
{
	job->next_run = atomic_load(&worker->submitted);
	while (!atomic_compare_exchange_weak(&worker->submitted, &job->next_run, job)) {
	}
	kvx_transfer_wake(worker);
}

kvx_wjob_t *kvx_wjobs_take(kvx_worker_t *worker)
{
	kvx_wjob_t *newest = atomic_exchange(&worker->submitted, NULL), *oldest = NULL;

	while (newest) {
		kvx_wjob_t *older = newest->next_run;

		newest->next_run = oldest;
		oldest = newest;
		newest = older;
	}

	return oldest;
}

void kvx_wjob_append(kvx_wjob_t ***p_end, kvx_wjob_t *job)
{
	job->next = NULL;
	**p_end = job;
	*p_end = &job->next;
}

void kvx_wjob_complete(kvx_worker_t *worker, kvx_wjob_t *job)
{
	atomic_store(&job->completed, 1u);
	atomic_fetch_add(&worker->completions, 1u);
	kvx_gate_open(&worker->progress);
}

void kvx_transfer_count_unacked(kvx_worker_t *worker)
{
	kvc_stats_t stats = {.struct_size = sizeof stats};

	kvc_get_stats(worker->kvc, &stats);
	atomic_store(&worker->unacked, (uint32_t)stats.puts_open);
}
