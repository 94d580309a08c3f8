/* Blocks and steps whose load has failed. */
#include "worker/failures.h"
#include "worker/cuda/state.h"
#include "worker/report.h"

#define NAP_NS     UINT64_C(500000)
#define RELEASE_NS UINT64_C(50000000) /* for the transfer thread to report a corrupt block */

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

static void add_step(kvx_worker_t *worker)
{
	worker->failed_step[worker->failed_steps++ % KVX_WORKER_STEPS] = worker->step;
}

void kvx_failures_add_load(kvx_worker_t *worker, kvx_wload_t *load)
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
			if (part->results[i] != KVX_BLOCK_GOOD || load->layer_skipped) {
				add_block(worker, part->ids[i]);
			}
		}
	}
	if (worker->gpu) {
		(void)pthread_mutex_unlock(&worker->gpu->lock);
	}
}

void kvx_failures_add_record(kvx_worker_t *worker, const kvx_msg_load_t *record)
{
	const kvx_report_loaded_t what = {.status = KVC_ERR_NOMEM};
	const kvx_msg_part_t *part = kvx_msg_part_first(record);

	kvx_stat_add(&worker->stats.loads_failed, 1);
	kvx_report_add_loaded(worker, record->load, &what);
	for (uint32_t p = 0; p < record->parts; p++) {
		const uint32_t *ids = kvx_msg_part_ids(part);

		for (uint32_t i = 0; i < part->n; i++) {
			add_block(worker, ids[i]);
		}
		part = kvx_msg_part_next(part);
	}
	if (record->flags & KVX_MSG_ASYNC) {
		(void)kvx_report_add_finished(worker, kvx_msg_load_id(record), record->id_len, 1);
	} else {
		add_step(worker);
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
		kvx_failures_add_load(worker, load);
	}
	if (failed) {
		add_step(worker);
	}
	worker->sync = NULL;
}
