/* Loads that begin when their step is planned (docs/decisions/016): the link to the device would be idle while the
 * engine prepares its inputs.
 *
 * The step begins as begin_step() would begin it, so everything that must come before its loads does: fences, saves of
 * complete blocks, and on the device what the engine has enqueued. The decisions of run_sync_loads() stay with it:
 * whether the engine waits for each layer or for everything, and blocks that were not ready yet. If begin_step() comes
 * with other bytes, the prefetched step is given up. */
#include "worker/cuda/prefetch.h"
#include "worker/cuda/device.h"
#include "worker/cuda/load.h"
#include "worker/jobs/fence.h"
#include "worker/prefault.h"
#include "worker/step_begin.h"

#include <stdlib.h>
#include <string.h>

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

static int copy_message(kvx_prefetch_t *prefetch, const void *message, size_t len)
{
	if (len > prefetch->cap) {
		uint8_t *more = realloc(prefetch->message, len);

		if (!more) {
			return 0;
		}
		prefetch->message = more;
		prefetch->cap = len;
	}
	memcpy(prefetch->message, message, len);
	prefetch->len = len;

	return 1;
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
	if (loads == 0 || !copy_message(&worker->prefetch, message, len)) {
		return 0;
	}

	kvx_step_begin(worker, message, len);
	worker->prefetch.begun = 1;
	worker->prefetch.stream = worker->gpu->compute;
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

int kvx_prefetch_matches(kvx_worker_t *worker, const void *message, size_t len)
{
	kvx_prefetch_t *prefetch = &worker->prefetch;

	if (!prefetch->begun) {
		return 0;
	}
	prefetch->begun = 0;
	if (len != prefetch->len || memcmp(message, prefetch->message, len) != 0) {
		return 0;
	}
	follow_stream(worker);
	kvx_prefault_defer(worker, KVX_PREFAULT_STEP_NS);

	return 1;
}
