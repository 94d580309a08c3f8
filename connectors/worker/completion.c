/* What is over: the engine's thread counts it, tells the scheduler in a report, the engine by ids and block ids, and
 * frees it. */
#include "worker/cuda/impl.h"

#include <stdlib.h>
#include <string.h>

#define REPORT_MAX (1u << 20) /* bytes; nobody fetches reports: begin again */

/* ---- blocks that did not come
 * ------------------------------------------------------------------------------------------------ */

void kvx_worker_fail_block(kvx_worker_t *worker, uint32_t id)
{
	uint64_t bit;

	if (id >= worker->max_blocks) {
		return;
	}
	bit = UINT64_C(1) << id % 64u;
	worker->failed_count += !(worker->failed[id / 64u] & bit);
	worker->failed[id / 64u] |= bit;
}

void kvx_worker_fail_load(kvx_worker_t *worker, kvx_wload_t *load)
{
	if (load->failed || load->gone || (atomic_load(&load->cause) == KVC_OK && !load->skipped)) {
		return;
	}
	load->failed = 1;
	for (uint32_t p = 0; p < load->parts; p++) {
		const kvx_wpart_t *part = &load->part[p];

		for (uint32_t i = 0; i < part->n; i++) {
			if (part->ends[i] != KVX_BLOCK_GOOD || load->skipped) {
				kvx_worker_fail_block(worker, part->ids[i]);
			}
		}
	}
}

/* ---- the report
 * -------------------------------------------------------------------------------------------------------------- */

/* Taken at the start: a report that could not grow would be none at all, and its loads and saves would stay open until
 * the scheduler gives them up. */
kvc_status_t kvx_worker_reserve_reports(kvx_worker_t *worker)
{
	for (uint32_t i = 0; i < 2; i++) {
		if (!kvx_bytes_reserve(&worker->report[i], REPORT_MAX + sizeof(kvx_report_loaded_t))) {
			return KVC_ERR_NOMEM;
		}
	}

	return KVC_OK;
}

static kvx_bytes_t *open_report(kvx_worker_t *worker)
{
	kvx_bytes_t *report = &worker->report[worker->report_at];

	if (report->len == 0 || report->len > REPORT_MAX) {
		kvx_bytes_reset(report, KVX_REPORT_MAGIC);
	}

	return report;
}

static void report_loaded(kvx_worker_t *worker, uint64_t id, const kvx_report_loaded_t *what)
{
	kvx_report_loaded_t *record = kvx_bytes_record(open_report(worker), KVX_RECORD_LOADED, sizeof *record);

	if (record) {
		record->load = id;
		record->status = what->status;
		record->blocks = what->blocks;
		record->bytes = what->bytes;
		record->ns = what->ns;
	}
}

void kvx_worker_stepped(kvx_worker_t *worker, uint32_t step, uint64_t ns)
{
	kvx_report_step_t *record = kvx_bytes_record(open_report(worker), KVX_RECORD_STEP, sizeof *record);

	if (record) {
		record->step = step;
		record->ns = ns;
	}
}

void kvx_worker_dropped(kvx_worker_t *worker, uint64_t put)
{
	kvx_report_dropped_t *record = kvx_bytes_record(open_report(worker), KVX_RECORD_DROPPED, sizeof *record);

	kvx_wcount(&worker->stats.save_dropped, 1);
	if (record) {
		record->put = put;
	}
}

void kvx_worker_fail_record(kvx_worker_t *worker, const kvx_plan_load_t *record)
{
	const kvx_report_loaded_t what = {.status = KVC_ERR_NOMEM};
	const kvx_plan_part_t *part = kvx_plan_part_first(record);

	kvx_wcount(&worker->stats.loads_failed, 1);
	report_loaded(worker, record->load, &what);
	for (uint32_t p = 0; p < record->parts; p++) {
		const uint32_t *ids = kvx_plan_part_ids(part);

		for (uint32_t i = 0; i < part->n; i++) {
			kvx_worker_fail_block(worker, ids[i]);
		}
		part = kvx_plan_part_next(part);
	}
	if (!(record->flags & KVX_PLAN_ASYNC)) {
		worker->failed_step[worker->failed_steps++ % KVX_WORKER_STEPS] = worker->step;
	} else if (worker->lost_count < KVX_WORKER_LOST) {
		kvx_lost_t *lost = &worker->lost[worker->lost_count++];

		lost->len = record->id_len;
		memcpy(lost->id, kvx_plan_load_id(record), record->id_len);
	}
}

/* ---- what is over
 * ------------------------------------------------------------------------------------------------------------ */

static uint32_t count_bad(const kvx_wload_t *load)
{
	uint32_t bad = 0;

	for (uint32_t p = 0; p < load->parts; p++) {
		for (uint32_t i = 0; i < load->part[p].n; i++) {
			bad += load->part[p].ends[i] == KVX_BLOCK_BAD;
		}
	}

	return bad;
}

static void load_over(kvx_worker_t *worker, kvx_wload_t *load)
{
	const kvc_status_t cause = (kvc_status_t)atomic_load(&load->cause);
	const kvx_report_loaded_t what = {.status = cause == KVC_OK && load->skipped ? (kvc_status_t)KV_ERR_UNSUPPORTED
										     : cause,
					  .blocks = atomic_load(&load->good),
					  .bytes = atomic_load(&load->bytes),
					  .ns = kvx_clock_took(worker, load)};
	kvx_wstats_t *stats = &worker->stats;
	const int lost = cause < 0 && cause != KVC_ERR_TIMEOUT && cause != KVC_ERR_CORRUPT;

	kvx_worker_fail_load(worker, load);
	report_loaded(worker, load->id, &what);
	kvx_wcount(&stats->load_blocks, what.blocks);
	kvx_wcount(&stats->load_bytes, what.bytes);
	kvx_wcount(&stats->load_ns, what.ns);
	kvx_wcount(&stats->loads_failed, what.status != KVC_OK);
	kvx_wcount(&stats->load_timeouts, what.status == KVC_ERR_TIMEOUT);
	kvx_wcount(&stats->load_lost, (uint64_t)lost);
	if (worker->gpu && what.status == KVC_OK) {
		kvx_layers_learn(worker, what.bytes, what.ns);
	}
	if (what.status == KVC_ERR_CORRUPT) {
		kvx_wcount(&stats->load_corrupt, count_bad(load));
	}
	atomic_fetch_sub(&stats->loads_open, 1u);
}

/* Synchronous loads go at once, asynchronous ones when they have been named. */
static void reap_loads(kvx_worker_t *worker)
{
	kvx_wjob_t **link = &worker->loads;

	while (*link) {
		kvx_wload_t *load = (kvx_wload_t *)*link;

		if (!load->reported && atomic_load(&load->job.over)) {
			load_over(worker, load);
			load->reported = 1;
			worker->untold += load->flags & KVX_PLAN_ASYNC ? 1u : 0u;
			if (!(load->flags & KVX_PLAN_ASYNC)) {
				*link = load->job.next;
				kvx_wload_free(load);
				continue;
			}
		}
		link = &load->job.next;
	}
	worker->loads_end = link;
}

static void reap_saves(kvx_worker_t *worker)
{
	kvx_wjob_t **link = &worker->saves;

	while (*link) {
		kvx_wsave_t *save = (kvx_wsave_t *)*link;

		if (!atomic_load(&save->job.over)) {
			link = &save->job.next;
			continue;
		}
		if (atomic_load(&save->dropped)) {
			kvx_worker_dropped(worker, save->handle.id);
		}
		*link = save->job.next;
		kvx_wsave_free(save);
		atomic_fetch_sub(&worker->stats.saves_open, 1u);
	}
	worker->saves_end = link;
}

static void reap_adapters(kvx_worker_t *worker)
{
	kvx_wjob_t **link = &worker->adapters;

	while (*link) {
		kvx_wjob_t *job = *link;

		if (atomic_load(&job->over)) {
			*link = job->next;
			free(job);
		} else {
			link = &job->next;
		}
	}
	worker->adapters_end = link;
}

void kvx_worker_reap(kvx_worker_t *worker)
{
	const uint32_t overs = atomic_load(&worker->overs);

	if (overs == worker->overs_seen) {
		return;
	}
	worker->overs_seen = overs;
	/* A synchronous load of the step at hand may be over before load() has looked at it. */
	if (!worker->sync) {
		reap_loads(worker);
	} else {
		worker->overs_seen = overs - 1;
	}
	reap_saves(worker);
	reap_adapters(worker);
}

/* ---- asked by the engine
 * ----------------------------------------------------------------------------------------------------- */

static uint32_t give_id(char *id, uint32_t cap, const char *from, uint32_t len)
{
	memcpy(id, from, len < cap ? len : cap);

	return len;
}

static uint32_t name_lost(kvx_worker_t *worker, char *id, uint32_t cap)
{
	const kvx_lost_t *lost = &worker->lost[--worker->lost_count];

	return give_id(id, cap, lost->id, lost->len);
}

static uint32_t name_over(kvx_worker_t *worker, char *id, uint32_t cap, int *p_failed)
{
	kvx_wjob_t **link = &worker->loads;
	kvx_wload_t *load = (kvx_wload_t *)*link;
	uint32_t len;

	while (load && !load->reported) {
		link = &load->job.next;
		load = (kvx_wload_t *)*link;
	}
	if (!load) {
		return 0;
	}
	len = give_id(id, cap, load->request, load->id_len);
	*p_failed = atomic_load(&load->cause) != KVC_OK;
	*link = load->job.next;
	if (!*link) {
		worker->loads_end = link;
	}
	kvx_wload_free(load);
	worker->untold--;

	return len;
}

uint32_t kvx_worker_finished(kvx_worker_t *worker, char *id, uint32_t cap, int *p_failed)
{
	int unused;
	int *failed = p_failed ? p_failed : &unused;

	kvx_worker_reap(worker);
	if (worker->lost_count > 0) {
		*failed = 1;
		return name_lost(worker, id, cap);
	}

	return worker->untold > 0 ? name_over(worker, id, cap, failed) : 0;
}

uint32_t kvx_worker_errors(kvx_worker_t *worker, uint32_t *ids, uint32_t cap)
{
	uint32_t n = 0;

	if (worker->early.begun) {
		return 0; /* the step before has said all; what fails of the next is said when it is computed */
	}
	worker->had |= KVX_HAD_ERRORS;
	if (worker->gpu) {
		kvx_gpu_settle(worker);
	}
	kvx_worker_reap(worker);
	for (uint32_t w = 0; worker->failed_count > 0 && n < cap; w++) {
		while (worker->failed[w] && n < cap) {
			ids[n++] = w * 64u + (uint32_t)__builtin_ctzll(worker->failed[w]);
			worker->failed[w] &= worker->failed[w] - 1;
			worker->failed_count--;
		}
	}

	return n;
}

void kvx_worker_report(kvx_worker_t *worker, const void **p_bytes, size_t *p_len)
{
	kvx_bytes_t *report;

	worker->had |= worker->early.begun ? 0u : KVX_HAD_REPORT;
	kvx_worker_reap(worker);
	kvx_clock_look(worker);
	report = &worker->report[worker->report_at];
	*p_bytes = NULL;
	*p_len = 0;
	if (report->len == 0) {
		return;
	}
	kvx_bytes_finish(report, worker->step);
	*p_bytes = report->len ? report->data : NULL;
	*p_len = report->len;
	worker->report_at ^= 1u;
	worker->report[worker->report_at].len = 0;
}
