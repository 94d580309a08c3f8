/* Saves on their way to the transfer thread. */
#include "worker/jobs/deferred_saves.h"
#include "worker/failures.h"
#include "worker/jobs/save.h"
#include "worker/submit.h"

#include <stddef.h>

void kvx_save_submit(kvx_worker_t *worker, kvx_wsave_t *save)
{
	const int off = atomic_load(&worker->self_test_status) != KVC_OK;

	kvx_wsave_mark_blocks(worker, save);
	kvx_stat_add(&worker->stats.saves_open, 1);
	kvx_wjob_append(&worker->saves_end, &save->job);
	if (off || atomic_load(&save->dropped) || kvx_failures_taint_step(worker, save->step)) {
		kvx_wsave_drop(worker, save);
	}
	kvx_wjob_submit(worker, &save->job);
}

void kvx_save_defer(kvx_worker_t *worker, kvx_wsave_t *save)
{
	kvx_wjob_append(&worker->deferred_end, &save->job);
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
