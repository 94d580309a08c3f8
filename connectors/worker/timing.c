/* What steps and loads take, by the clock of who does them: the host's, or the device's, which an engine that runs
 * ahead of it cannot see.
 *
 * A step runs from the end of begin(), or of load() where the engine waits for all that the step loads, to end(). A
 * load of a device's cache runs from where its copies may begin, which is after all that the engine had enqueued, to
 * the end of the last one. Clocks are started and read by the engine's thread; a load's is stopped by whoever submits
 * its copies, under the lock.
 *
 * Loads that come together wait for each other. That is no part of what a load takes, or a burst of hits would make
 * memory look slower than computing: of a load whose blocks were all there, only its own time counts: from where those
 * before it have come, or its part of what comes together, layer by layer.
 */
#include "worker/cuda/impl.h"

#define END_NS UINT64_C(200000)

/* ---- steps
 * -------------------------------------------------------------------------------------------------------------------
 */

void kvx_clock_ask(kvx_worker_t *worker)
{
	worker->timing = KVX_TIMING_ASKED;
}

void kvx_clock_begin(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;

	if (worker->timing != KVX_TIMING_ASKED) {
		return;
	}
	worker->timing = KVX_TIMING_RUNS;
	worker->timed_ns = kvx_worker_now();
	if (gpu) {
		kvx_wclock_t *clock = &gpu->steps[gpu->step_at];

		if (!clock->clock || clock->state != KVX_CLOCK_FREE ||
		    kvk_gpu_clock_mark(clock->clock, 0, gpu->compute) != KV_OK) {
			kvx_clock_drop(worker);
		}
	}
}

void kvx_clock_drop(kvx_worker_t *worker)
{
	worker->timing = KVX_TIMING_NONE;
}

void kvx_clock_end(kvx_worker_t *worker)
{
	const int runs = worker->timing == KVX_TIMING_RUNS;
	kvx_wgpu_t *gpu = worker->gpu;

	kvx_clock_drop(worker);
	if (!runs) {
		return;
	}
	if (!gpu) {
		kvx_worker_stepped(worker, worker->step, kvx_worker_now() - worker->timed_ns);
		return;
	}
	if (kvk_gpu_clock_mark(gpu->steps[gpu->step_at].clock, 1, gpu->compute) == KV_OK) {
		gpu->steps[gpu->step_at].state = KVX_CLOCK_RUNS;
		gpu->steps[gpu->step_at].step = worker->step;
		gpu->step_at = (gpu->step_at + 1u) % KVX_GPU_STEPS;
	}
}

void kvx_clock_look(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;

	for (uint32_t i = 0; gpu && i < KVX_GPU_STEPS; i++) {
		kvx_wclock_t *clock = &gpu->steps[i];
		uint64_t ns = 0;
		kv_status_t status;

		if (clock->state != KVX_CLOCK_RUNS) {
			continue;
		}
		status = kvk_gpu_clock_read(clock->clock, &ns);
		if (status == KV_PENDING) {
			continue;
		}
		clock->state = KVX_CLOCK_FREE;
		if (status == KV_OK) {
			kvx_worker_stepped(worker, clock->step, ns);
		}
	}
}

/* ---- loads
 * -------------------------------------------------------------------------------------------------------------------
 */

void kvx_clock_load(kvx_worker_t *worker, kvx_wload_t *load, kvk_cu_stream_t stream)
{
	kvx_wgpu_t *gpu = worker->gpu;

	for (uint32_t i = 0; i < KVX_GPU_CLOCKS && !load->clock; i++) {
		kvx_wclock_t *clock = &gpu->clocks[i];

		if (clock->clock && clock->state == KVX_CLOCK_FREE &&
		    kvk_gpu_clock_mark(clock->clock, 0, stream) == KV_OK) {
			clock->state = KVX_CLOCK_RUNS;
			load->clock = i + 1u;
		}
	}
}

int kvx_clock_begun(const kvx_wgpu_t *gpu, const kvx_wload_t *load)
{
	return load->clock && kvk_gpu_clock_begun(gpu->clocks[load->clock - 1u].clock);
}

void kvx_clock_turn(kvx_wgpu_t *gpu, const kvx_wload_t *load, kvk_cu_stream_t stream)
{
	if (load->clock && !load->sent && !load->of && atomic_load(&load->there)) {
		(void)kvk_gpu_clock_mark(gpu->clocks[load->clock - 1u].clock, 0, stream);
	}
}

void kvx_clock_sent(kvx_wgpu_t *gpu, const kvx_wload_t *load, kvk_cu_stream_t stream)
{
	if (load->clock) {
		(void)kvk_gpu_clock_mark(gpu->clocks[load->clock - 1u].clock, 1, stream);
	}
}

/* By the device's clock; 0: it has none for this load. */
static uint64_t device_took(kvx_worker_t *worker, kvx_wload_t *load)
{
	const uint64_t wall = load->end_ns - load->begin_ns, until = kvx_worker_now() + END_NS;
	kvx_wclock_t *clock;
	uint64_t ns = 0;
	kv_status_t status;

	if (!load->clock) {
		return atomic_load(&load->there) ? 0 : wall;
	}
	clock = &worker->gpu->clocks[load->clock - 1u];
	/* Its end is what the stream has next after the last job, which is over. */
	do {
		status = kvk_gpu_clock_read(clock->clock, &ns);
	} while (status == KV_PENDING && kvx_worker_now() < until);
	clock->state = KVX_CLOCK_FREE;
	load->clock = 0;

	return status == KV_OK && ns < wall ? ns : wall;
}

/* Of a load that waited for no block: without what others before it took. */
static uint64_t host_took(kvx_worker_t *worker, const kvx_wload_t *load)
{
	const uint64_t wall = load->end_ns - load->begin_ns, others = worker->served_ns - load->served_ns;
	const uint64_t ns = wall > others ? wall - others : 0;

	worker->served_ns += ns;

	return ns;
}

uint64_t kvx_clock_took(kvx_worker_t *worker, kvx_wload_t *load)
{
	if (worker->gpu) {
		const uint64_t ns = device_took(worker, load);

		return load->of ? ns * load->wanted / load->of : ns;
	}

	return atomic_load(&load->there) ? host_took(worker, load) : load->end_ns - load->begin_ns;
}

/* ---- open and close
 * ---------------------------------------------------------------------------------------------------------- */

/* What cannot be had is not timed. */
void kvx_clocks_open(kvx_wgpu_t *gpu)
{
	for (uint32_t i = 0; i < KVX_GPU_STEPS; i++) {
		(void)kvk_gpu_clock_open(gpu->gpu, &gpu->steps[i].clock);
	}
	for (uint32_t i = 0; i < KVX_GPU_CLOCKS; i++) {
		(void)kvk_gpu_clock_open(gpu->gpu, &gpu->clocks[i].clock);
	}
}

void kvx_clocks_close(kvx_wgpu_t *gpu)
{
	for (uint32_t i = 0; i < KVX_GPU_STEPS; i++) {
		kvk_gpu_clock_close(gpu->steps[i].clock);
	}
	for (uint32_t i = 0; i < KVX_GPU_CLOCKS; i++) {
		kvk_gpu_clock_close(gpu->clocks[i].clock);
	}
}
