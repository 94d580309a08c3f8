/* Loads that begin when their step is planned: what the engine does between a plan and begin(), the link to the device
 * would be idle for.
 *
 * The plan is begun as begin() would, so all that comes before its loads does: fences, early saves, and on the device
 * whatever the engine has enqueued. What load() has to decide is left to it: whether the engine waits for each layer or
 * for everything, and what was not there yet. A begin() with other bytes finds a step that is gone.
 */
#include "worker/cuda/impl.h"

#include <stdlib.h>
#include <string.h>

/* Synchronous loads of the plan; 0 as well: it makes no sense. */
static uint32_t loads_of(const void *plan, size_t len)
{
	const kvx_record_header_t *record;
	kvx_cursor_t cursor;
	uint32_t loads = 0;

	if (!kvx_cursor_open(&cursor, KVX_PLAN_MAGIC, plan, len)) {
		return 0;
	}
	while ((record = kvx_cursor_next(&cursor)) != NULL) {
		if (record->type == KVX_RECORD_LOAD) {
			const kvx_plan_load_t *load = (const kvx_plan_load_t *)(const void *)record;

			loads += !(load->flags & (KVX_PLAN_ASYNC | KVX_PLAN_DEAD));
		}
	}

	return cursor.bad ? 0 : loads;
}

static int keep(kvx_wearly_t *early, const void *plan, size_t len)
{
	if (len > early->cap) {
		uint8_t *more = realloc(early->plan, len);

		if (!more) {
			return 0;
		}
		early->plan = more;
		early->cap = len;
	}
	memcpy(early->plan, plan, len);
	early->len = len;

	return 1;
}

/* The step before is over, in all the engine asks about it. */
static int is_between(const kvx_worker_t *worker, uint32_t flags)
{
	const uint32_t had = KVX_HAD_ERRORS | KVX_HAD_REPORT | (flags & KVX_EARLY_COMPUTED ? KVX_HAD_END : 0u);

	return (worker->had & had) == had && !worker->sync && !worker->gpu->ended;
}

int kvx_worker_early(kvx_worker_t *worker, const void *plan, size_t len, uint32_t flags)
{
	uint32_t loads;
	uint64_t start;

	if (!worker->gpu || !is_between(worker, flags)) {
		return 0;
	}
	loads = loads_of(plan, len);
	if (loads == 0 || !keep(&worker->early, plan, len)) {
		return 0;
	}

	kvx_worker_begin_plan(worker, plan, len);
	worker->early.begun = 1;
	worker->early.stream = worker->gpu->compute;
	start = kvx_worker_now();
	if (worker->sync) {
		kvx_gpu_load_early(worker, flags & KVX_EARLY_LAYERS ? 1 : 0);
	}
	kvx_worker_start(worker); /* what gives way to these is behind them from the start */
	kvx_wcount(&worker->stats.loads_early, loads);
	kvx_wcount(&worker->stats.load_wait_ns, kvx_worker_now() - start);

	return 1;
}

/* The engine goes on on another stream: what was put before this step on the old one has to come before it there, too.
 */
static void follow_stream(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;

	if (worker->early.stream != gpu->compute && !kvx_gpu_order(worker, worker->early.stream, gpu->compute)) {
		atomic_store(&gpu->loose, 1u);
		kvx_fence_all(worker);
	}
}

int kvx_early_came(kvx_worker_t *worker, const void *plan, size_t len)
{
	kvx_wearly_t *early = &worker->early;

	if (!early->begun) {
		return 0;
	}
	early->begun = 0;
	if (len != early->len || memcmp(plan, early->plan, len) != 0) {
		return 0;
	}
	follow_stream(worker);
	kvx_prefault_after(worker, KVX_PREFAULT_STEP_NS);

	return 1;
}
