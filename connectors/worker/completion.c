/* Completed jobs: the engine's thread counts them, reports them to the scheduler half, names them to the engine, and
 * frees them. */
#include "worker/completion.h"
#include "worker/cuda/layers.h"
#include "worker/cuda/step.h"
#include "worker/failures.h"
#include "worker/jobs/load.h"
#include "worker/jobs/save.h"
#include "worker/report.h"
#include "worker/timing.h"

#include <stdlib.h>
#include <string.h>

/* ---- completed jobs --------------------------------------------------------------------------- */

static uint32_t count_bad(const kvx_wload_t *load)
{
	uint32_t bad = 0;

	for (uint32_t p = 0; p < load->parts; p++) {
		for (uint32_t i = 0; i < load->part[p].n; i++) {
			bad += load->part[p].results[i] == KVX_BLOCK_BAD;
		}
	}

	return bad;
}

static void complete_load(kvx_worker_t *worker, kvx_wload_t *load)
{
	const kvc_status_t cause = (kvc_status_t)atomic_load(&load->cause);
	const kvx_report_loaded_t what = {
		.status = cause == KVC_OK && load->layer_skipped ? (kvc_status_t)KV_ERR_UNSUPPORTED : cause,
		.blocks = atomic_load(&load->verified),
		.bytes = atomic_load(&load->bytes),
		.ns = kvx_timing_load_ns(worker, load)};
	kvx_wstats_t *stats = &worker->stats;
	const int lost = cause < 0 && cause != KVC_ERR_TIMEOUT && cause != KVC_ERR_CORRUPT;

	kvx_failures_add_load(worker, load);
	kvx_report_add_loaded(worker, load->id, &what);
	kvx_stat_add(&stats->load_blocks, what.blocks);
	kvx_stat_add(&stats->load_bytes, what.bytes);
	kvx_stat_add(&stats->load_ns, what.ns);
	kvx_stat_add(&stats->loads_failed, what.status != KVC_OK);
	kvx_stat_add(&stats->load_timeouts, what.status == KVC_ERR_TIMEOUT);
	kvx_stat_add(&stats->load_lost, (uint64_t)lost);
	if (worker->gpu && what.status == KVC_OK) {
		kvx_layers_add_rate_sample(worker, what.bytes, what.ns);
	}
	if (what.status == KVC_ERR_CORRUPT) {
		kvx_stat_add(&stats->load_corrupt, count_bad(load));
	}
	atomic_fetch_sub(&stats->loads_open, 1u);
}

/* Remove the completed loads. 0: some stay, because too many asynchronous ones are not named yet. */
static int reap_loads(kvx_worker_t *worker)
{
	kvx_wjob_t **link = &worker->loads;
	int all = 1;

	while (*link) {
		kvx_wload_t *load = (kvx_wload_t *)*link;
		int removed = (int)atomic_load(&load->job.completed);

		if (removed && load->flags & KVX_MSG_ASYNC) {
			removed = kvx_report_add_finished(worker, load->request, load->id_len,
							  atomic_load(&load->cause) != KVC_OK);
			all = all && removed;
		}
		if (!removed) {
			link = &load->job.next;
			continue;
		}
		complete_load(worker, load);
		*link = load->job.next;
		free(load);
	}
	worker->loads_end = link;

	return all;
}

static void reap_saves(kvx_worker_t *worker)
{
	kvx_wjob_t **link = &worker->saves;

	while (*link) {
		kvx_wsave_t *save = (kvx_wsave_t *)*link;

		if (!atomic_load(&save->job.completed)) {
			link = &save->job.next;
			continue;
		}
		if (atomic_load(&save->dropped)) {
			kvx_report_add_dropped(worker, save->handle.id);
		}
		*link = save->job.next;
		free(save);
		atomic_fetch_sub(&worker->stats.saves_open, 1u);
	}
	worker->saves_end = link;
}

void kvx_completions_reap(kvx_worker_t *worker)
{
	const uint32_t completions = atomic_load(&worker->completions);

	if (completions == worker->completions_seen) {
		return;
	}
	/* A synchronous load of this step may be completed before run_sync_loads() has seen it: it stays in the list.
	 */
	worker->completions_seen = !worker->sync && reap_loads(worker) ? completions : completions - 1;
	reap_saves(worker);
}

/* ---- asked by the engine --------------------------------------------------------------------- */

uint32_t kvx_worker_take_finished(kvx_worker_t *worker, char *id, uint32_t cap, int *p_failed)
{
	const kvx_finished_t *finished;

	kvx_completions_reap(worker);
	if (worker->finished_taken == worker->finished_added) {
		return 0;
	}
	finished = &worker->finished[worker->finished_taken++ % KVX_WORKER_NAMES];
	memcpy(id, finished->id, finished->len < cap ? finished->len : cap);
	if (p_failed) {
		*p_failed = finished->failed;
	}

	return finished->len;
}

uint32_t kvx_worker_take_failed_blocks(kvx_worker_t *worker, uint32_t *ids, uint32_t cap)
{
	uint32_t n = 0;

	if (worker->prefetch.begun) {
		return 0; /* the step before has named all its failed blocks; those of a prefetched step are named in
			     that step */
	}
	worker->calls_seen |= KVX_CALLED_FAILED_BLOCKS;
	if (worker->gpu) {
		kvx_gpu_step_settle(worker);
	}
	kvx_completions_reap(worker);
	for (uint32_t w = 0; worker->failed_count > 0 && n < cap; w++) {
		while (worker->failed[w] && n < cap) {
			ids[n++] = w * 64u + (uint32_t)__builtin_ctzll(worker->failed[w]);
			worker->failed[w] &= worker->failed[w] - 1;
			worker->failed_count--;
		}
	}

	return n;
}

void kvx_worker_take_report(kvx_worker_t *worker, const void **p_bytes, size_t *p_len)
{
	kvx_msg_buf_t *report;

	worker->calls_seen |= worker->prefetch.begun ? 0u : KVX_CALLED_REPORT;
	kvx_completions_reap(worker);
	kvx_timing_poll(worker);
	report = &worker->report[worker->report_at];
	*p_bytes = NULL;
	*p_len = 0;
	if (report->len == 0) {
		return;
	}
	kvx_msg_finish(report, worker->step);
	*p_bytes = report->len ? report->data : NULL;
	*p_len = report->len;
	worker->report_at ^= 1u;
	worker->report[worker->report_at].len = 0;
}
