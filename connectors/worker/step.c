/* What a plan asks for, in its order: early saves, fences, loads; the other saves at the end of the step. */
#include "worker/cuda/impl.h"

#include <stdlib.h>
#include <string.h>

/* ---- lists of the engine's thread
 * -------------------------------------------------------------------------------------------- */

static void append(kvx_wjob_t ***p_end, kvx_wjob_t *job)
{
	job->next = NULL;
	**p_end = job;
	*p_end = &job->next;
}

/* ---- saves
 * -------------------------------------------------------------------------------------------------------------------
 */

/* A synchronous load of the plan that computes these blocks, or of the one before, has failed: they may be garbage. */
static int step_failed(const kvx_worker_t *worker, uint32_t step)
{
	const uint32_t n = worker->failed_steps < KVX_WORKER_STEPS ? worker->failed_steps : KVX_WORKER_STEPS;

	for (uint32_t i = 0; i < n; i++) {
		if (worker->failed_step[i] == step || worker->failed_step[i] + 1 == step) {
			return 1;
		}
	}

	return 0;
}

/* To the transfer thread; one that is to be dropped as well, which says to the daemon that nobody writes there. */
static void hand_save(kvx_worker_t *worker, kvx_wsave_t *save)
{
	const int off = atomic_load(&worker->proved) != KVC_OK;

	kvx_wsave_mark(worker, save);
	kvx_wcount(&worker->stats.saves_open, 1);
	append(&worker->saves_end, &save->job);
	if (off || atomic_load(&save->dropped) || step_failed(worker, save->step)) {
		kvx_wsave_drop(worker, save);
	}
	if (!kvx_worker_hand(worker, &save->job)) {
		kvx_wsave_drop(worker, save);
		kvx_worker_over(worker, &save->job);
	}
}

static void begin_save(kvx_worker_t *worker, const kvx_plan_save_t *record)
{
	kvx_wsave_t *save = kvx_wsave_create(worker, record);

	if (!save) {
		kvx_worker_dropped(worker, record->put.id);
	} else if (record->flags & KVX_PLAN_EARLY) {
		atomic_store(&save->dropped, worker->gpu && !kvx_gpu_early(worker));
		hand_save(worker, save);
	} else {
		append(&worker->later_end, &save->job);
	}
}

void kvx_worker_hand_later(kvx_worker_t *worker, int drop)
{
	kvx_wjob_t *next;

	for (kvx_wjob_t *job = worker->later; job; job = next) {
		next = job->next;
		atomic_store(&((kvx_wsave_t *)job)->dropped, (uint32_t)drop);
		hand_save(worker, (kvx_wsave_t *)job);
	}
	worker->later = NULL;
	worker->later_end = &worker->later;
}

/* ---- loads
 * -------------------------------------------------------------------------------------------------------------------
 */

static void begin_load(kvx_worker_t *worker, const kvx_plan_load_t *record)
{
	kvx_wload_t *load = kvx_wload_create(worker, record);
	kvc_status_t refused = KVC_OK;

	kvx_wcount(&worker->stats.loads, 1);
	if (!load) {
		kvx_worker_fail_record(worker, record);
		return;
	}
	kvx_wcount(&worker->stats.loads_open, 1);
	append(&worker->loads_end, &load->job);
	if (!(load->flags & KVX_PLAN_ASYNC)) {
		load->next_sync = worker->sync;
		worker->sync = load;
	}

	if (record->flags & KVX_PLAN_DEAD) {
		refused = KVC_MISS;
	} else if (atomic_load(&worker->proved) != KVC_OK) {
		refused = KVC_ERR_UNREACHABLE;
	} else if (!kvx_worker_hand(worker, &load->job)) {
		refused = KVC_ERR_BUSY;
	}
	if (refused != KVC_OK) {
		kvx_wload_close(worker, load, refused);
		kvx_worker_over(worker, &load->job);
	}
}

static void drop_load(kvx_worker_t *worker, uint64_t id)
{
	for (kvx_wjob_t *job = worker->loads; job; job = job->next) {
		kvx_wload_t *load = (kvx_wload_t *)job;

		if (load->id == id) {
			load->gone = 1;
			atomic_store(&load->cancel, 1u);
			kvx_worker_wake(worker);
		}
	}
}

/* Synchronous loads that nobody has waited for: their step is gone. */
static void cancel_left(kvx_worker_t *worker)
{
	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		atomic_store(&load->cancel, 1u);
	}
	worker->sync = NULL;
}

/* ---- plans
 * -------------------------------------------------------------------------------------------------------------------
 */

/* The scheduler says once only what an adapter's number is: where the queue is full, it goes with a later plan. */
static void hand_adapters(kvx_worker_t *worker)
{
	while (worker->untold_adapters) {
		kvx_wjob_t *job = worker->untold_adapters;

		if (!kvx_worker_hand(worker, job)) {
			return;
		}
		worker->untold_adapters = job->next;
		append(&worker->adapters_end, job);
	}
	worker->untold_adapters_end = &worker->untold_adapters;
}

static void take_adapter(kvx_worker_t *worker, const kvx_plan_space_t *record)
{
	kvx_wadapter_t *adapter = NULL;

	if (record->number < KVX_WORKER_SPACES && record->text_len <= KVX_WORKER_TEXT) {
		adapter = calloc(1, sizeof *adapter + record->text_len + 1u);
	}
	if (!adapter) {
		kvx_wcount(&worker->stats.bad_plans, 1);
		return;
	}
	adapter->job.kind = KVX_WJOB_SPACE;
	adapter->number = record->number;
	memcpy(adapter->text, kvx_plan_space_text(record), record->text_len);
	append(&worker->untold_adapters_end, &adapter->job);
	hand_adapters(worker);
}

/* Each record is whole and lies within the plan. */
static int is_plan(const void *plan, size_t len)
{
	kvx_cursor_t cursor;

	if (!kvx_cursor_open(&cursor, KVX_PLAN_MAGIC, plan, len)) {
		return 0;
	}
	while (kvx_cursor_next(&cursor)) {
	}

	return !cursor.bad;
}

/* What the step computes: where no record says so, little. */
static void take_work(kvx_worker_t *worker, kvx_cursor_t cursor)
{
	static const kvx_plan_work_t little;
	const kvx_plan_work_t *work = &little;
	const kvx_record_header_t *record;

	while ((record = kvx_cursor_next(&cursor)) != NULL) {
		if (record->type == KVX_RECORD_WORK) {
			work = (const kvx_plan_work_t *)(const void *)record;
		}
	}
	if (worker->gpu) {
		kvx_gpu_work(worker, work);
	}
}

/* Adapters and early saves, which the fences may concern. */
static void first_pass(kvx_worker_t *worker, kvx_cursor_t cursor)
{
	const kvx_record_header_t *record;

	while ((record = kvx_cursor_next(&cursor)) != NULL) {
		if (record->type == KVX_RECORD_SPACE) {
			take_adapter(worker, (const kvx_plan_space_t *)(const void *)record);
		} else if (record->type == KVX_RECORD_SAVE) {
			begin_save(worker, (const kvx_plan_save_t *)(const void *)record);
		}
	}
}

static void fences(kvx_worker_t *worker, kvx_cursor_t cursor)
{
	const kvx_record_header_t *record;
	int all = 0;

	kvx_fence_begin(worker);
	while ((record = kvx_cursor_next(&cursor)) != NULL) {
		if (record->type == KVX_RECORD_FENCE) {
			const kvx_plan_fence_t *fence = (const kvx_plan_fence_t *)(const void *)record;

			kvx_fence_add(worker, kvx_plan_fence_ids(fence), fence->n);
			all |= fence->n == 0;
		}
	}
	kvx_fence_end(worker);
	if (all) {
		kvx_fence_all(worker);
	}
}

/* In their order: a request may be gone in the very plan that begins to load for it. */
static void loads(kvx_worker_t *worker, kvx_cursor_t cursor)
{
	const kvx_record_header_t *record;

	while ((record = kvx_cursor_next(&cursor)) != NULL) {
		if (record->type == KVX_RECORD_LOAD) {
			begin_load(worker, (const kvx_plan_load_t *)(const void *)record);
		} else if (record->type == KVX_RECORD_DROP) {
			drop_load(worker, ((const kvx_plan_drop_t *)(const void *)record)->load);
		} else if (record->type == KVX_RECORD_TIME) {
			kvx_clock_ask(worker);
		}
	}
}

void kvx_worker_begin_plan(kvx_worker_t *worker, const void *plan, size_t len)
{
	kvx_cursor_t cursor = {0};

	worker->had = 0;
	kvx_prefault_after(worker, KVX_PREFAULT_STEP_NS);
	if (worker->gpu) {
		kvx_gpu_settle(worker);
		kvx_gpu_begin(worker);
	}
	kvx_worker_reap(worker);
	cancel_left(worker);
	kvx_worker_hand_later(worker, 1); /* their step has not come to its end */
	kvx_clock_drop(worker);
	hand_adapters(worker);
	if (len == 0) {
		take_work(worker, cursor);
		return;
	}
	if (!is_plan(plan, len)) {
		kvx_wcount(&worker->stats.bad_plans, 1);
		kvx_fence_all(worker); /* which blocks are about to be written is not known */
		return;
	}
	worker->step = ((const kvx_plan_header_t *)plan)->step;
	(void)kvx_cursor_open(&cursor, KVX_PLAN_MAGIC, plan, len);
	take_work(worker, cursor);
	first_pass(worker, cursor);
	fences(worker, cursor);
	loads(worker, cursor);
}

void kvx_worker_begin(kvx_worker_t *worker, const void *plan, size_t len)
{
	if (!kvx_early_came(worker, plan, len)) {
		kvx_worker_begin_plan(worker, plan, len);
	}
	if (!worker->sync) {
		kvx_clock_begin(worker);
	}
}

void kvx_worker_start(kvx_worker_t *worker)
{
	uint32_t started = 0;
	int ordered = 0;

	for (kvx_wjob_t *job = worker->loads; job; job = job->next) {
		kvx_wload_t *load = (kvx_wload_t *)job;

		if (load->flags & KVX_PLAN_ASYNC && !atomic_load_explicit(&load->go, memory_order_relaxed)) {
			ordered = ordered || !worker->gpu || kvx_gpu_start(worker);
			if (!ordered) {
				kvx_wload_close(worker, load, (kvc_status_t)KV_ERR_IO);
			} else if (worker->gpu) {
				kvx_clock_load(worker, load, worker->gpu->beside);
			}
			atomic_store(&load->go, 1u);
			started++;
		}
	}
	if (started > 0) {
		kvx_worker_wake(worker);
	}
}

static int load_sync(kvx_worker_t *worker, int layers)
{
	int layered = 0;
	uint64_t start;

	if (!worker->sync) {
		return 0;
	}
	start = kvx_worker_now();
	if (worker->gpu) {
		layered = kvx_gpu_load(worker, layers);
	} else {
		kvx_crew_load(worker);
	}
	kvx_wcount(&worker->stats.load_wait_ns, kvx_worker_now() - start);
	if (layered) {
		kvx_clock_drop(worker);
	} else {
		kvx_clock_begin(worker);
	}

	return layered;
}

void kvx_worker_load(kvx_worker_t *worker)
{
	(void)load_sync(worker, 0);
}

int kvx_worker_load_layers(kvx_worker_t *worker)
{
	return load_sync(worker, 1);
}

void kvx_worker_end(kvx_worker_t *worker)
{
	if (worker->early.begun) {
		return; /* of a step that is gone: what waited for it was given up when the next was begun */
	}
	worker->had |= KVX_HAD_END;
	kvx_clock_end(worker);
	if (worker->gpu) {
		kvx_gpu_end(worker);
	} else {
		kvx_worker_hand_later(worker, 0);
	}
	kvx_prefault_after(worker, KVX_PREFAULT_PAUSE_NS);
}
