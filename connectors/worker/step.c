/* A step as the engine calls it: its message is executed up to its loads, these are run, and after its end its saves go
 * to the transfer thread. Before and after it come the orders of a device's streams.
 *
 * A step may begin when it is planned (docs/decisions/016): the link to the device would be idle while the engine
 * prepares its inputs. It begins as begin_step() would begin it, so everything that must come before its loads does:
 * fences, saves of complete blocks, and on the device what the engine has enqueued. The decisions of run_sync_loads()
 * stay with it: whether the engine waits for each layer or for everything, and blocks that were not ready yet. If
 * begin_step() comes with other bytes, the prefetched step is given up. */
#include "worker/cuda/device.h"
#include "worker/jobs/gpu_load.h"
#include "worker/transfer/copy_threads.h"
#include "worker/jobs/fence.h"
#include "worker/jobs/load.h"
#include "worker/jobs/save.h"
#include "worker/transfer/prefault.h"
#include "worker/jobs/report.h"
#include "worker/base/submit.h"
#include "worker/transfer/spaces.h"

#include "kv/digest.h"

#include <stdlib.h>
#include <string.h>

#define NAME_MAX_BYTES 4096u
#define PREFILL_TOKENS 16u /* of a request that a step computes: its kernels are of many waves of all SMs */

/* ---- on a device ------------------------------------------------------------------------------ */

/* Untracked copies come before what the engine does next. */
static void begin_on_device(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;

	if (atomic_exchange(&gpu->untracked_copies, 0u) &&
	    !(kvx_gpu_order_streams(worker, gpu->load_sync_stream, gpu->compute) &&
	      kvx_gpu_order_streams(worker, gpu->load_async_stream, gpu->compute))) {
		atomic_store(&gpu->untracked_copies, 1u);
	}
}

/* Until all are settled, or closed late: then their copies are ordered before the engine's next kernels on the device.
 */
static void wait_settled(kvx_worker_t *worker)
{
	uint32_t spins = 0;
	int late = 0;

	while (!late && !kvx_sync_loads_settled(worker)) {
		const uint32_t seen = kvx_gate_read(&worker->progress);

		late = kvx_gpu_complete_batches(worker) == 0 && kvx_sync_loads_pause(worker, seen, &spins);
	}
}

/* Wait for the synchronous loads of the step (at most until their deadline), then submit the saves that waited for
 * them. */
static void settle_step(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;
	const uint64_t start = kvx_worker_now_ns();

	kvx_gpu_cancel_prefetch(worker);
	kvx_layers_close(worker);
	if (worker->sync && atomic_load(&worker->sync->may_copy)) {
		wait_settled(worker);
		kvx_sync_loads_close(worker);
		kvx_stat_add(&worker->stats.load_wait_ns, kvx_worker_now_ns() - start);
	}
	if (gpu->ended) {
		gpu->ended = 0;
		kvx_saves_submit_deferred(worker, 0);
	}
}

/* All synchronous loads are submitted and come before what the engine enqueues from now on. 1: layer by layer. */
static int load_on_device(kvx_worker_t *worker, int layers)
{
	kvx_wgpu_t *gpu = worker->gpu;

	if (kvx_gpu_send_sync_loads(worker, layers)) {
		return 1;
	}
	if (!kvx_gpu_order_streams(worker, gpu->load_sync_stream, gpu->compute)) {
		atomic_store(&gpu->untracked_copies, 1u);
		settle_step(worker); /* then the host waits */
	}

	return 0;
}

/* Saves of this step come after it, and are submitted when its synchronous loads have succeeded. */
static void end_on_device(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;

	kvx_gpu_cancel_prefetch(worker);
	kvx_layers_close(worker);
	kvx_gpu_mark_prefill(gpu);
	if (worker->deferred && !kvx_gpu_set_save_point(worker)) {
		kvx_saves_submit_deferred(worker, 1);
	}
	gpu->ended = 1;
	if (worker->sync) {
		(void)kvx_gpu_complete_batches(worker);
	}
	if (kvx_sync_loads_settled(worker)) {
		settle_step(worker);
	}
}

/* ---- saves ----------------------------------------------------------------------------------- */

/* One for all records of the step: the engine enqueues nothing between them. */
static int has_begin_point(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;

	gpu->begin_point = gpu->begin_point || kvx_gpu_set_save_point(worker);

	return gpu->begin_point;
}

static void begin_save(kvx_worker_t *worker, const kvx_msg_save_t *record)
{
	kvx_wsave_t *save = kvx_wsave_create(worker, record);
	const kvx_wgpu_t *gpu = worker->gpu;

	if (!save) {
		kvx_report_add_dropped(worker, record->put.id);
	} else if (record->flags & KVX_MSG_COMPLETE) {
		/* after what the engine has enqueued */
		atomic_store(&save->dropped, gpu && !has_begin_point(worker));
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
		kvx_report_add_failed(worker, record);
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

/* The texts of a job, one after the other; NULL: none. */
static kvx_wname_t *create_name(kvx_worker_t *worker, kvx_wspace_ref_t ref, uint32_t first_len, uint32_t second_len)
{
	kvx_wname_t *name = NULL;

	if (ref.number < KVX_WORKER_SPACES && first_len <= NAME_MAX_BYTES && second_len <= NAME_MAX_BYTES) {
		name = calloc(1, sizeof *name + first_len + second_len + 2u);
	}
	if (!name) {
		kvx_stat_add(&worker->stats.bad_messages, 1);
		return NULL;
	}
	name->job.kind = KVX_WJOB_NAME;
	name->ref = ref;
	name->adapter = first_len + 1u;

	return name;
}

static void add_space(kvx_worker_t *worker, const kvx_msg_space_t *space)
{
	kvx_wname_t *name = create_name(worker, (kvx_wspace_ref_t){space->number, KVX_HOST_MEM}, space->weights_len,
					space->adapter_len);

	if (name) {
		memcpy(name->text, kvx_msg_space_weights(space), space->weights_len);
		memcpy(name->text + name->adapter, kvx_msg_space_adapter(space), space->adapter_len);
		kvx_wjob_submit(worker, &name->job);
	}
}

static void add_device(kvx_worker_t *worker, const kvx_msg_gpu_mem_t *device)
{
	kvx_wname_t *name = create_name(worker, (kvx_wspace_ref_t){0, device->mem}, device->text_len, 0);

	if (name) {
		memcpy(name->text, kvx_msg_gpu_mem_text(device), device->text_len);
		kvx_wjob_submit(worker, &name->job);
	}
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
		worker->gpu->layers.work_us = work->us;
		atomic_store(&worker->gpu->is_prefill_step, work->longest >= PREFILL_TOKENS);
	}
}

static void run_record(kvx_worker_t *worker, const kvx_record_header_t *record)
{
	const void *bytes = record;

	switch ((kvx_record_t)record->type) {
	case KVX_RECORD_SPACE:
		add_space(worker, bytes);
		break;
	case KVX_RECORD_GPU_MEM:
		add_device(worker, bytes);
		break;
	case KVX_RECORD_SAVE:
		begin_save(worker, bytes);
		break;
	case KVX_RECORD_FENCE:
		kvx_fence_add(worker, kvx_msg_fence_ids(bytes), ((const kvx_msg_fence_t *)bytes)->n);
		break;
	case KVX_RECORD_LOAD:
		begin_load(worker, bytes);
		break;
	case KVX_RECORD_DROP:
		drop_load(worker, ((const kvx_msg_drop_t *)bytes)->load);
		break;
	case KVX_RECORD_TIME:
		kvx_timing_request(worker);
		break;
	default:
		break;
	}
}

/* Run the records of these types, in their order. */
static void run_records(kvx_worker_t *worker, kvx_msg_reader_t cursor, uint32_t types)
{
	const kvx_record_header_t *record;

	while ((record = kvx_msg_next(&cursor)) != NULL) {
		if (types >> record->type & 1u) {
			run_record(worker, record);
		}
	}
}

static void begin_step(kvx_worker_t *worker, const void *message, size_t len)
{
	kvx_msg_reader_t cursor = {0};

	worker->calls_seen = 0;
	kvx_prefault_defer(worker, KVX_PREFAULT_STEP_NS);
	if (worker->gpu) {
		worker->gpu->begin_point = 0;
		atomic_store(&worker->gpu->busy_until_ns, UINT64_MAX);
		settle_step(worker);
		begin_on_device(worker);
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
		kvx_fence_save_all(worker); /* the engine may be about to write any block */
		return;
	}
	worker->step = ((const kvx_msg_header_t *)message)->step;
	(void)kvx_msg_open(&cursor, KVX_MSG_MAGIC, message, len);
	read_work(worker, cursor);
	/* fences may name their blocks */
	run_records(worker, cursor, 1u << KVX_RECORD_SPACE | 1u << KVX_RECORD_GPU_MEM | 1u << KVX_RECORD_SAVE);
	run_records(worker, cursor, 1u << KVX_RECORD_FENCE);
	kvx_fence_save(worker);
	/* in their order: a request may be gone in the very step that begins to load for it */
	run_records(worker, cursor, 1u << KVX_RECORD_LOAD | 1u << KVX_RECORD_DROP | 1u << KVX_RECORD_TIME);
}

void kvx_worker_finish_saves(kvx_worker_t *worker)
{
	kvx_saves_submit_deferred(worker, 1);
	kvx_fence_save_all(worker);
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

/* ---- a step that begins when it is planned ---------------------------------------------------- */

/* Synchronous loads of the message; 0 also if it is not sound. */
static uint32_t count_sync_loads(const void *message, size_t len)
{
	const kvx_record_header_t *record;
	kvx_msg_reader_t cursor;
	uint32_t loads = 0;

	if (!kvx_msg_open(&cursor, KVX_MSG_MAGIC, message, len)) {
		return 0;
	}
	while ((record = kvx_msg_next(&cursor)) != NULL) {
		if (record->type == KVX_RECORD_LOAD) {
			const kvx_msg_load_t *load = (const kvx_msg_load_t *)(const void *)record;

			loads += !(load->flags & (KVX_MSG_ASYNC | KVX_MSG_NO_LEASE));
		}
	}

	return cursor.bad ? 0 : loads;
}

/* The engine has made all calls of the step before. */
static int step_is_done(const kvx_worker_t *worker, uint32_t flags)
{
	const uint32_t had =
		KVX_CALLED_FAILED_BLOCKS | KVX_CALLED_REPORT | (flags & KVX_PREFETCH_COMPUTED ? KVX_CALLED_END : 0u);

	return (worker->calls_seen & had) == had && !worker->sync && !worker->gpu->ended;
}

int kvx_worker_prefetch_step(kvx_worker_t *worker, const void *message, size_t len, uint32_t flags)
{
	uint32_t loads;
	uint64_t start;

	if (!worker->gpu || !step_is_done(worker, flags)) {
		return 0;
	}
	loads = count_sync_loads(message, len);
	if (loads == 0) {
		return 0;
	}

	begin_step(worker, message, len);
	worker->prefetch = (kvx_prefetch_t){
		.begun = 1, .len = len, .digest = kv_digest(message, len), .stream = worker->gpu->compute};
	start = kvx_worker_now_ns();
	if (worker->sync) {
		kvx_gpu_prefetch_loads(worker, flags & KVX_PREFETCH_LAYERS ? 1 : 0);
	}
	/* asynchronous loads, which yield to these, come behind them from the start */
	kvx_worker_start_async_loads(worker);
	kvx_stat_add(&worker->stats.loads_prefetched, loads);
	kvx_stat_add(&worker->stats.load_wait_ns, kvx_worker_now_ns() - start);

	return 1;
}

/* The engine has changed its stream: what was ordered before this step on the old stream must come before it on the new
 * one too. */
static void follow_stream(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;

	if (worker->prefetch.stream != gpu->compute &&
	    !kvx_gpu_order_streams(worker, worker->prefetch.stream, gpu->compute)) {
		atomic_store(&gpu->untracked_copies, 1u);
		kvx_fence_save_all(worker);
	}
}

/* 1: the message is the one that was prefetched, so the step has begun. 0: it is not; a prefetched step is given up. */
static int matches_prefetched(kvx_worker_t *worker, const void *message, size_t len)
{
	kvx_prefetch_t *prefetch = &worker->prefetch;

	if (!prefetch->begun) {
		return 0;
	}
	prefetch->begun = 0;
	follow_stream(worker); /* its fences hold also if it is given up */
	if (len != prefetch->len || kv_digest(message, len) != prefetch->digest) {
		return 0;
	}
	kvx_prefault_defer(worker, KVX_PREFAULT_STEP_NS);

	return 1;
}

/* ---- the calls of each step ------------------------------------------------------------------- */

void kvx_worker_begin_step(kvx_worker_t *worker, const void *message, size_t len)
{
	if (!matches_prefetched(worker, message, len)) {
		begin_step(worker, message, len);
	}
	if (!worker->sync) {
		kvx_timing_start(worker);
	}
}

static int run_sync_loads(kvx_worker_t *worker, int layers)
{
	int layered = 0;
	uint64_t start;

	if (!worker->sync) {
		return 0;
	}
	start = kvx_worker_now_ns();
	if (worker->gpu) {
		layered = load_on_device(worker, layers);
	} else {
		kvx_copy_threads_run_loads(worker);
	}
	kvx_stat_add(&worker->stats.load_wait_ns, kvx_worker_now_ns() - start);
	if (layered) {
		kvx_timing_cancel(worker);
	} else {
		kvx_timing_start(worker);
	}

	return layered;
}

void kvx_worker_run_sync_loads(kvx_worker_t *worker)
{
	(void)run_sync_loads(worker, 0);
}

int kvx_worker_run_layered_loads(kvx_worker_t *worker)
{
	return run_sync_loads(worker, 1);
}

void kvx_worker_await_layer(kvx_worker_t *worker, uint32_t layer)
{
	if (worker->gpu && !kvx_layers_await(worker, layer)) {
		settle_step(worker);
	}
}

void kvx_worker_end_step(kvx_worker_t *worker)
{
	if (worker->prefetch.begun) {
		return; /* a prefetch has begun the next step, and has given up what waited for this one */
	}
	worker->calls_seen |= KVX_CALLED_END;
	kvx_timing_stop(worker);
	if (worker->gpu) {
		end_on_device(worker);
	} else {
		kvx_saves_submit_deferred(worker, 0);
	}
	kvx_prefault_defer(worker, KVX_PREFAULT_PAUSE_NS);
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
		settle_step(worker);
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

kvc_status_t kvx_worker_flush(kvx_worker_t *worker, uint32_t timeout_ms)
{
	const uint64_t until = kvx_worker_now_ns() + timeout_ms * KVX_NS_A_MS;

	for (;;) {
		const uint32_t seen = kvx_gate_read(&worker->progress);

		if (worker->gpu && !worker->prefetch.begun) {
			settle_step(worker);
		}
		kvx_completions_reap(worker);
		if (!worker->saves && atomic_load(&worker->unacked) == 0) {
			return KVC_OK;
		}
		if (kvx_worker_now_ns() >= until) {
			return KVC_ERR_TIMEOUT;
		}
		kvx_gate_wait(&worker->progress, seen, KVX_NS_A_MS);
	}
}
