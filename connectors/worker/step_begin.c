/* A step message, in its order: saves of complete blocks, fences, loads; the other saves wait for the end of the step.
 *
 * Saves come before fences, because a fence reads what they mark; fences before loads, because a load may write a block
 * that a save still has to read. */
#include "worker/step_begin.h"
#include "worker/completion.h"
#include "worker/cuda/device.h"
#include "worker/cuda/step.h"
#include "worker/cuda/timers.h"
#include "worker/failures.h"
#include "worker/jobs/fence.h"
#include "worker/jobs/load.h"
#include "worker/jobs/save.h"
#include "worker/prefault.h"
#include "worker/report.h"
#include "worker/submit.h"
#include "worker/timing.h"
#include "worker/transfer/spaces.h"

#include <stdlib.h>
#include <string.h>

#define ADAPTER_TEXT_MAX 4096u /* bytes */

/* ---- saves ----------------------------------------------------------------------------------- */

static void begin_save(kvx_worker_t *worker, const kvx_msg_save_t *record)
{
	kvx_wsave_t *save = kvx_wsave_create(worker, record);
	const kvx_wgpu_t *gpu = worker->gpu;

	if (!save) {
		kvx_report_add_dropped(worker, record->put.id);
	} else if (record->flags & KVX_MSG_COMPLETE) {
		/* after what the engine has enqueued */
		atomic_store(&save->dropped, gpu && !kvx_gpu_order_streams(worker, gpu->compute, gpu->save_stream));
		kvx_save_submit(worker, save);
	} else {
		kvx_wjob_append(&worker->deferred_end, &save->job);
	}
}

/* ---- loads ----------------------------------------------------------------------------------- */

static void begin_load(kvx_worker_t *worker, const kvx_msg_load_t *record)
{
	kvx_wload_t *load = kvx_wload_create(worker, record);
	kvc_status_t refused = KVC_OK;

	kvx_stat_add(&worker->stats.loads, 1);
	if (!load) {
		kvx_failures_add_record(worker, record);
		return;
	}
	kvx_stat_add(&worker->stats.loads_open, 1);
	kvx_wjob_append(&worker->loads_end, &load->job);
	if (!(load->flags & KVX_MSG_ASYNC)) {
		load->next_sync = worker->sync;
		worker->sync = load;
	}

	if (record->flags & KVX_MSG_NO_LEASE) {
		refused = KVC_MISS;
	} else if (atomic_load(&worker->self_test_status) != KVC_OK) {
		refused = KVC_ERR_UNREACHABLE;
	}
	if (refused == KVC_OK) {
		kvx_wjob_submit(worker, &load->job);
	} else {
		kvx_wload_close(worker, load, refused);
		kvx_wjob_complete(worker, &load->job);
	}
}

static void drop_load(kvx_worker_t *worker, uint64_t id)
{
	for (kvx_wjob_t *job = worker->loads; job; job = job->next) {
		kvx_wload_t *load = (kvx_wload_t *)job;

		if (load->id == id) {
			load->named = 1;
			atomic_store(&load->cancel, 1u);
			kvx_transfer_wake(worker);
		}
	}
}

/* Synchronous loads that the engine never ran: their step is gone. */
static void cancel_sync_loads(kvx_worker_t *worker)
{
	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		atomic_store(&load->cancel, 1u);
	}
	worker->sync = NULL;
}

/* ---- messages ----------------------------------------------------------------------------------- */

static void add_adapter(kvx_worker_t *worker, const kvx_msg_space_t *record)
{
	kvx_wadapter_t *adapter = NULL;

	if (record->number < KVX_WORKER_SPACES && record->text_len <= ADAPTER_TEXT_MAX) {
		adapter = calloc(1, sizeof *adapter + record->text_len + 1u);
	}
	if (!adapter) {
		kvx_stat_add(&worker->stats.bad_messages, 1);
		return;
	}
	adapter->job.kind = KVX_WJOB_ADAPTER;
	adapter->number = record->number;
	memcpy(adapter->text, kvx_msg_space_text(record), record->text_len);
	kvx_wjob_submit(worker, &adapter->job);
}

/* Each record is complete and lies inside the message. */
static int message_is_sound(const void *message, size_t len)
{
	kvx_msg_reader_t cursor;

	if (!kvx_msg_open(&cursor, KVX_MSG_MAGIC, message, len)) {
		return 0;
	}
	while (kvx_msg_next(&cursor)) {
	}

	return !cursor.bad;
}

/* What the step computes; without a WORK record, single tokens. */
static void read_work(kvx_worker_t *worker, kvx_msg_reader_t cursor)
{
	static const kvx_msg_work_t little;
	const kvx_msg_work_t *work = &little;
	const kvx_record_header_t *record;

	while ((record = kvx_msg_next(&cursor)) != NULL) {
		if (record->type == KVX_RECORD_WORK) {
			work = (const kvx_msg_work_t *)(const void *)record;
		}
	}
	if (worker->gpu) {
		kvx_gpu_set_work(worker, work);
	}
}

/* Adapters, and saves, whose blocks the fences may name. */
static void read_spaces_and_saves(kvx_worker_t *worker, kvx_msg_reader_t cursor)
{
	const kvx_record_header_t *record;

	while ((record = kvx_msg_next(&cursor)) != NULL) {
		if (record->type == KVX_RECORD_SPACE) {
			add_adapter(worker, (const kvx_msg_space_t *)(const void *)record);
		} else if (record->type == KVX_RECORD_SAVE) {
			begin_save(worker, (const kvx_msg_save_t *)(const void *)record);
		}
	}
}

static void run_fences(kvx_worker_t *worker, kvx_msg_reader_t cursor)
{
	const kvx_record_header_t *record;
	int all = 0;

	kvx_fence_begin(worker);
	while ((record = kvx_msg_next(&cursor)) != NULL) {
		if (record->type == KVX_RECORD_FENCE) {
			const kvx_msg_fence_t *fence = (const kvx_msg_fence_t *)(const void *)record;

			kvx_fence_add(worker, kvx_msg_fence_ids(fence), fence->n);
			all |= fence->n == 0;
		}
	}
	kvx_fence_save(worker);
	if (all) {
		kvx_fence_save_all(worker);
	}
}

/* In their order: a request may be gone in the very step that begins to load for it. */
static void begin_loads(kvx_worker_t *worker, kvx_msg_reader_t cursor)
{
	const kvx_record_header_t *record;

	while ((record = kvx_msg_next(&cursor)) != NULL) {
		if (record->type == KVX_RECORD_LOAD) {
			begin_load(worker, (const kvx_msg_load_t *)(const void *)record);
		} else if (record->type == KVX_RECORD_DROP) {
			drop_load(worker, ((const kvx_msg_drop_t *)(const void *)record)->load);
		} else if (record->type == KVX_RECORD_TIME) {
			kvx_timing_request(worker);
		}
	}
}

void kvx_step_begin(kvx_worker_t *worker, const void *message, size_t len)
{
	kvx_msg_reader_t cursor = {0};

	worker->calls_seen = 0;
	kvx_prefault_defer(worker, KVX_PREFAULT_STEP_NS);
	if (worker->gpu) {
		kvx_gpu_step_settle(worker);
		kvx_gpu_step_begin(worker);
	}
	kvx_completions_reap(worker);
	cancel_sync_loads(worker);
	kvx_saves_submit_deferred(worker, 1); /* their step has not ended */
	kvx_timing_cancel(worker);
	if (len == 0) {
		read_work(worker, cursor);
		return;
	}
	if (!message_is_sound(message, len)) {
		kvx_stat_add(&worker->stats.bad_messages, 1);
		kvx_fence_save_all(
			worker); /* it is unknown which blocks the engine is about to write, so all are saved first */
		return;
	}
	worker->step = ((const kvx_msg_header_t *)message)->step;
	(void)kvx_msg_open(&cursor, KVX_MSG_MAGIC, message, len);
	read_work(worker, cursor);
	read_spaces_and_saves(worker, cursor);
	run_fences(worker, cursor);
	begin_loads(worker, cursor);
}

void kvx_worker_start_async_loads(kvx_worker_t *worker)
{
	const kvx_wgpu_t *gpu = worker->gpu;
	uint32_t started = 0;
	int ordered = 0;

	for (kvx_wjob_t *job = worker->loads; job; job = job->next) {
		kvx_wload_t *load = (kvx_wload_t *)job;

		if (load->flags & KVX_MSG_ASYNC && !atomic_load_explicit(&load->may_copy, memory_order_relaxed)) {
			/* after what the engine has enqueued */
			ordered =
				ordered || !gpu || kvx_gpu_order_streams(worker, gpu->compute, gpu->load_async_stream);
			if (!ordered) {
				kvx_wload_close(worker, load, (kvc_status_t)KV_ERR_IO);
			} else if (gpu) {
				kvx_timers_start_load(worker, load, gpu->load_async_stream);
			}
			atomic_store(&load->may_copy, 1u);
			started++;
		}
	}
	if (started > 0) {
		kvx_transfer_wake(worker);
	}
}
