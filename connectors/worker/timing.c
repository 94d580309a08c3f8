/* What steps and loads take, by the clock of what does them: the host's, or the device's, which an engine that runs
 * ahead of it cannot see.
 *
 * A step runs from the end of begin_step(), or of run_sync_loads() where the engine waits for all loads of the step, to
 * end_step(). A load into a device's cache runs from where its copies may begin, which is after all that the engine had
 * enqueued, to the end of its last copy (worker/cuda/timers.h).
 *
 * Loads that come together wait for each other. That is no part of what a load takes, or a burst of hits would make
 * memory look slower than computing (docs/decisions/015). A load whose blocks were all ready counts its own time only:
 * without the loads before it, or its share of a layered group.
 */
#include "worker/timing.h"
#include "worker/cuda/timers.h"
#include "worker/report.h"

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
		kvx_report_add_step(worker, worker->step, kvx_worker_now_ns() - worker->timed_ns);
	}
}

void kvx_timing_poll(kvx_worker_t *worker)
{
	uint32_t step;
	uint64_t ns;

	while (worker->gpu && kvx_timers_poll_step(worker->gpu, &step, &ns)) {
		kvx_report_add_step(worker, step, ns);
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

uint64_t kvx_timing_load_ns(kvx_worker_t *worker, kvx_wload_t *load)
{
	if (worker->gpu) {
		const uint64_t ns = kvx_timers_load_ns(worker, load);

		return load->batch_total_blocks ? ns * load->wanted / load->batch_total_blocks : ns;
	}

	return atomic_load(&load->all_ready) ? host_load_ns(worker, load) : load->end_ns - load->begin_ns;
}
