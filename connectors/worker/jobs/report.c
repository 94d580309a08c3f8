/* What a rank reports: loads and saves that have ended, blocks whose load has failed, and what steps and loads take.
 * The engine's thread counts completed jobs, reports them to the scheduler half, names them to the engine, and frees
 * them.
 *
 * Time is measured by the clock of what does the work: the host's, or the device's, which an engine that runs ahead of
 * it cannot see. A step runs from the end of begin_step(), or of run_sync_loads() where the engine waits for all loads
 * of the step, to end_step(). A load into a device's cache runs from where its copies may begin, which is after all
 * that the engine had enqueued, to the end of its last copy (worker/cuda/device.c).
 *
 * Loads that come together wait for each other. That is no part of what a load takes, or a burst of hits would make
 * memory look slower than computing (docs/decisions/015). A load whose blocks were all ready counts its own time only:
 * without the loads before it, or its share of a layered group.
 */
#include "worker/jobs/report.h"
#include "worker/cuda/device.h"
#include "worker/jobs/gpu_load.h"
#include "worker/jobs/save.h"
#include "worker/base/submit.h"

#include <stdlib.h>
#include <string.h>

#define REPORT_MAX (1u << 20) /* bytes; a report that is never fetched starts again */
#define NAP_NS     UINT64_C(500000)
#define RELEASE_NS UINT64_C(50000000) /* for the transfer thread to report a corrupt block */

/* ---- records ---------------------------------------------------------------------------------- */

/* Reserved at open: without memory for its report a load or save would stay open until the scheduler half gives it up.
 */
kvc_status_t kvx_report_reserve(kvx_worker_t *worker)
{
	for (uint32_t i = 0; i < 2; i++) {
		if (!kvx_msg_reserve(&worker->report[i], REPORT_MAX + sizeof(kvx_report_loaded_t))) {
			return KVC_ERR_NOMEM;
		}
	}

	return KVC_OK;
}

static kvx_msg_buf_t *open_report(kvx_worker_t *worker)
{
	kvx_msg_buf_t *report = &worker->report[worker->report_at];

	if (report->len == 0 || report->len > REPORT_MAX) {
		kvx_msg_reset(report, KVX_REPORT_MAGIC);
	}

	return report;
}

/* `what` without its header. */
static void add_loaded(kvx_worker_t *worker, kvx_report_loaded_t what)
{
	kvx_report_loaded_t *record = kvx_msg_add_record(open_report(worker), KVX_RECORD_LOADED, sizeof *record);

	if (record) {
		what.h = record->h;
		*record = what;
	}
}

/* An asynchronous load has finished: kvx_worker_take_finished() names it. 0: not now, too many are not named yet. */
static int add_finished(kvx_worker_t *worker, const char *id, uint32_t len, int failed)
{
	kvx_finished_t *finished = &worker->finished[worker->finished_added % KVX_WORKER_NAMES];

	if (worker->finished_added - worker->finished_taken == KVX_WORKER_NAMES) {
		return 0;
	}
	*finished = (kvx_finished_t){.failed = failed, .len = len};
	memcpy(finished->id, id, len);
	worker->finished_added++;

	return 1;
}

static void add_step_time(kvx_worker_t *worker, uint32_t step, uint64_t ns)
{
	kvx_report_step_t *record = kvx_msg_add_record(open_report(worker), KVX_RECORD_STEP, sizeof *record);

	if (record) {
		record->step = step;
		record->ns = ns;
	}
}

void kvx_report_add_dropped(kvx_worker_t *worker, uint64_t put)
{
	kvx_report_dropped_t *record = kvx_msg_add_record(open_report(worker), KVX_RECORD_DROPPED, sizeof *record);

	kvx_stat_add(&worker->stats.save_dropped, 1);
	if (record) {
		record->put = put;
	}
}

/* ---- time -------------------------------------------------------------------------------------- */

void kvx_timing_request(kvx_worker_t *worker)
{
	worker->timing = KVX_TIMING_REQUESTED;
}

void kvx_timing_start(kvx_worker_t *worker)
{
	if (worker->timing != KVX_TIMING_REQUESTED) {
		return;
	}
	worker->timing = KVX_TIMING_RUNNING;
	worker->timed_ns = kvx_worker_now_ns();
	if (worker->gpu && !kvx_timers_start_step(worker->gpu)) {
		kvx_timing_cancel(worker);
	}
}

void kvx_timing_cancel(kvx_worker_t *worker)
{
	worker->timing = KVX_TIMING_NONE;
}

void kvx_timing_stop(kvx_worker_t *worker)
{
	const int runs = worker->timing == KVX_TIMING_RUNNING;

	kvx_timing_cancel(worker);
	if (runs && worker->gpu) {
		kvx_timers_stop_step(worker->gpu, worker->step);
	} else if (runs) {
		add_step_time(worker, worker->step, kvx_worker_now_ns() - worker->timed_ns);
	}
}

/* Report the steps whose time the device has measured since. */
static void poll_step_times(kvx_worker_t *worker)
{
	uint32_t step;
	uint64_t ns;

	while (worker->gpu && kvx_timers_poll_step(worker->gpu, &step, &ns)) {
		add_step_time(worker, step, ns);
	}
}

/* Once for each mem. */
static void report_reached(kvx_worker_t *worker)
{
	const uint32_t fresh = atomic_load(&worker->reached) & ~worker->reached_reported;
	kvx_report_reached_t *record;

	for (uint32_t mem = 0; fresh >> mem != 0; mem++) {
		record = fresh >> mem & 1u ? kvx_msg_add_record(open_report(worker), KVX_RECORD_REACHED, sizeof *record)
					   : NULL;
		if (record) {
			record->mem = mem;
			worker->reached_reported |= 1u << mem;
		}
	}
}

/* Of a load that had all its blocks at the start: without what others before it took. */
static uint64_t host_load_ns(kvx_worker_t *worker, const kvx_wload_t *load)
{
	const uint64_t wall = load->end_ns - load->begin_ns, others = worker->copied_ns - load->copied_ns;
	const uint64_t ns = wall > others ? wall - others : 0;

	worker->copied_ns += ns;

	return ns;
}

/* How long a completed load took. */
static uint64_t measure_load(kvx_worker_t *worker, kvx_wload_t *load)
{
	if (worker->gpu) {
		const uint64_t ns = kvx_timers_load_ns(worker, load);

		return load->batch_total_blocks ? ns * load->wanted / load->batch_total_blocks : ns;
	}

	return atomic_load(&load->all_ready) ? host_load_ns(worker, load) : load->end_ns - load->begin_ns;
}

/* ---- blocks and steps whose load has failed ---------------------------------------------------- */

static void add_block(kvx_worker_t *worker, uint32_t id)
{
	uint64_t bit;

	if (id >= worker->max_blocks) {
		return;
	}
	bit = UINT64_C(1) << id % 64u;
	worker->failed_count += !(worker->failed[id / 64u] & bit);
	worker->failed[id / 64u] |= bit;
}

static void remember_failed_step(kvx_worker_t *worker)
{
	worker->failed_step[worker->failed_steps++ % KVX_WORKER_STEPS] = worker->step;
}

/* kvx_worker_take_failed_blocks() names the blocks of the load that were not verified. Once; not of a dropped load. */
static void add_failed_blocks(kvx_worker_t *worker, kvx_wload_t *load)
{
	if (load->named || (atomic_load(&load->cause) == KVC_OK && !load->layer_skipped)) {
		return;
	}
	load->named = 1;
	if (worker->gpu) {
		/* A load given up at its deadline may be in flight: no batch completes meanwhile. */
		(void)pthread_mutex_lock(&worker->gpu->lock);
	}
	for (uint32_t p = 0; p < load->parts; p++) {
		const kvx_wpart_t *part = &load->part[p];

		for (uint32_t i = 0; i < part->n; i++) {
			if (!kvx_wblock_is_loaded(load, &part->blocks[i]) || load->layer_skipped) {
				add_block(worker, part->blocks[i].id);
			}
		}
	}
	if (worker->gpu) {
		(void)pthread_mutex_unlock(&worker->gpu->lock);
	}
}

/* A piece of that request's load, and not the last one. */
static int is_more_of(const kvx_wjob_t *job, const char *id, uint32_t len)
{
	const kvx_wload_t *load = (const kvx_wload_t *)job;

	return load->more && load->id_len == len && memcmp(load->request, id, len) == 0;
}

/* No memory for the load. Where pieces of it are in progress, the newest of them names the request. */
static void name_failed_record(kvx_worker_t *worker, const kvx_msg_load_t *record)
{
	kvx_wload_t *newest = NULL;

	for (kvx_wjob_t *job = worker->loads; job; job = job->next) {
		newest = is_more_of(job, kvx_msg_load_id(record), record->id_len) ? (kvx_wload_t *)job : newest;
	}
	if (newest) {
		newest->more = 0;
	} else {
		(void)add_finished(worker, kvx_msg_load_id(record), record->id_len, 1);
	}
}

void kvx_report_add_failed(kvx_worker_t *worker, const kvx_msg_load_t *record)
{
	const kvx_report_loaded_t what = {.load = record->load, .status = KVC_ERR_NOMEM};
	const kvx_msg_part_t *part = kvx_msg_part_first(record);

	kvx_stat_add(&worker->stats.loads_failed, 1);
	add_loaded(worker, what);
	for (uint32_t p = 0; p < record->parts; p++) {
		const uint32_t *ids = kvx_msg_part_ids(part);

		for (uint32_t i = 0; i < part->n; i++) {
			add_block(worker, ids[i]);
		}
		part = kvx_msg_part_next(part);
	}
	if (!(record->flags & KVX_MSG_ASYNC)) {
		remember_failed_step(worker);
	} else if (!(record->flags & KVX_MSG_MORE)) {
		name_failed_record(worker, record);
	}
}

int kvx_failures_taint_step(const kvx_worker_t *worker, uint32_t step)
{
	const uint32_t n = worker->failed_steps < KVX_WORKER_STEPS ? worker->failed_steps : KVX_WORKER_STEPS;

	for (uint32_t i = 0; i < n; i++) {
		if (worker->failed_step[i] == step || worker->failed_step[i] + 1 == step) {
			return 1;
		}
	}

	return 0;
}

/* The daemon learns of a corrupt block before the engine does, if the transfer thread gets to it in time. */
static void await_release(kvx_worker_t *worker, kvx_wload_t *load)
{
	const uint64_t until = kvx_worker_now_ns() + RELEASE_NS;
	uint32_t spins = 0;

	for (;;) {
		const uint32_t seen = kvx_gate_read(&worker->progress);

		if (atomic_load(&load->job.completed) || kvx_worker_now_ns() >= until) {
			return;
		}
		kvx_gate_pause(&worker->progress, seen, &spins, NAP_NS);
	}
}

void kvx_sync_loads_close(kvx_worker_t *worker)
{
	int failed = 0;

	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		const kvc_status_t cause = (kvc_status_t)atomic_load(&load->cause);

		if (cause == KVC_ERR_CORRUPT) {
			await_release(worker, load);
		}
		failed |= cause != KVC_OK || load->layer_skipped;
		add_failed_blocks(worker, load);
	}
	if (failed) {
		remember_failed_step(worker);
	}
	worker->sync = NULL;
}

/* ---- completed jobs --------------------------------------------------------------------------- */

/* The blocks that came; returns how many had a wrong digest. */
static uint32_t count_blocks(const kvx_wload_t *load, kvx_report_loaded_t *what)
{
	uint32_t bad = 0;

	for (uint32_t p = 0; p < load->parts; p++) {
		const kvx_wpart_t *part = &load->part[p];
		uint32_t loaded = 0;

		for (uint32_t i = 0; i < part->n; i++) {
			loaded += kvx_wblock_is_loaded(load, &part->blocks[i]) ? 1u : 0u;
			bad += part->blocks[i].ranges_done == KVX_BLOCK_BAD;
		}
		what->blocks += loaded;
		what->bytes += loaded * part->group->block_bytes;
	}

	return bad;
}

/* Its bytes did not all cross the link to the host. */
static int is_from_device(const kvx_wload_t *load)
{
	return load->parts > 0 && load->part[0].mem != KVX_HOST_MEM;
}

static void complete_load(kvx_worker_t *worker, kvx_wload_t *load)
{
	const kvc_status_t cause = (kvc_status_t)atomic_load(&load->cause);
	kvx_report_loaded_t what = {.load = load->id,
				    .status = cause == KVC_OK && load->layer_skipped ? (kvc_status_t)KV_ERR_UNSUPPORTED
										     : cause,
				    .ns = measure_load(worker, load)};
	kvx_wstats_t *stats = &worker->stats;
	const int lost = cause < 0 && cause != KVC_ERR_TIMEOUT && cause != KVC_ERR_CORRUPT;

	kvx_stat_add(&stats->load_corrupt, count_blocks(load, &what));
	add_failed_blocks(worker, load);
	add_loaded(worker, what);
	kvx_stat_add(&stats->load_blocks, what.blocks);
	kvx_stat_add(&stats->load_bytes, what.bytes);
	kvx_stat_add(&stats->load_ns, what.ns);
	kvx_stat_add(&stats->loads_failed, what.status != KVC_OK);
	kvx_stat_add(&stats->load_timeouts, what.status == KVC_ERR_TIMEOUT);
	kvx_stat_add(&stats->load_lost, (uint64_t)lost);
	if (worker->gpu && what.status == KVC_OK && !is_from_device(load)) {
		kvx_layers_add_rate_sample(worker, what.bytes, what.ns);
	}
	atomic_fetch_sub(&stats->loads_open, 1u);
}

/* A piece of the same request, sent before this one, has not ended. */
static int awaits_earlier_piece(const kvx_worker_t *worker, const kvx_wload_t *load)
{
	const kvx_wjob_t *job = worker->loads;

	while (job != &load->job && !is_more_of(job, load->request, load->id_len)) {
		job = job->next;
	}

	return job != &load->job;
}

/* Name the request of a completed load, if it is asynchronous and no piece of it is missing. 0: not now. */
static int name_load(kvx_worker_t *worker, const kvx_wload_t *load)
{
	if (!(load->flags & KVX_MSG_ASYNC) || load->more) {
		return 1;
	}

	return !awaits_earlier_piece(worker, load) &&
	       add_finished(worker, load->request, load->id_len, atomic_load(&load->cause) != KVC_OK);
}

/* Remove the completed loads. 0: some stay, because they cannot be named yet. */
static int reap_loads(kvx_worker_t *worker)
{
	kvx_wjob_t **link = &worker->loads;
	int all = 1;

	while (*link) {
		kvx_wload_t *load = (kvx_wload_t *)*link;
		const int completed = (int)atomic_load(&load->job.completed),
			  removed = completed && name_load(worker, load);

		all = all && removed == completed;
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

void kvx_worker_take_report(kvx_worker_t *worker, const void **p_bytes, size_t *p_len)
{
	kvx_msg_buf_t *report;

	worker->calls_seen |= worker->prefetch.begun ? 0u : KVX_CALLED_REPORT;
	if (worker->gpu) {
		atomic_store(&worker->gpu->busy_until_ns, kvx_worker_now_ns() + KVX_GPU_IDLE_NS);
	}
	kvx_completions_reap(worker);
	poll_step_times(worker);
	report_reached(worker);
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
