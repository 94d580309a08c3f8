/* The device behind a worker: open and close, streams, what comes after what, and the verdicts a step's saves wait for.
 */
#include "worker/cuda/impl.h"

#include "kv/log.h"

#include <stdio.h>
#include <stdlib.h>

#define NAP_NS        UINT64_C(100000)
#define LAYER_WAIT_US 1000u
#define SAVE_SMS      2u
#define LEAVES_BYTES  (UINT64_C(8) << 20)
#define SPINS         2000u
#define QUIT_NS       UINT64_C(3000000000) /* closing: for the device to let go of what it still copies */
#define GRACE_NS      UINT64_C(20000000)   /* past its deadline the engine ends a load itself */
#define CROWD         16u /* tokens of a request that a step computes: its kernels are of many waves of all SMs */

/* ---- open and close
 * ---------------------------------------------------------------------------------------------------------- */

static kvc_status_t refuse(const char *what, const char *why)
{
	static _Thread_local char text[320];

	(void)snprintf(text, sizeof text, "%s: %s", what, why);

	return kvx_worker_refuse(text);
}

/* Blocks a job of so many bytes. */
static uint32_t batch_of(const kvx_worker_t *worker, uint64_t bytes, uint32_t most)
{
	const uint64_t blocks = bytes / worker->geometry.block_bytes;

	return blocks < 1 ? 1u : blocks > most ? most : (uint32_t)blocks;
}

/* Blocks a job that a step needs: as many as there is room for leaves of, which are expected one by one where a rank
 * has some of the layers only. After the last copy of a job its last kernel runs alone, so few jobs are better than
 * many. */
static uint32_t batch_of_step(const kvx_worker_t *worker)
{
	const uint32_t least = batch_of(worker, KVX_GPU_SYNC_BYTES, KVX_GPU_MOVES);
	const uint64_t blocks = LEAVES_BYTES / (worker->words * sizeof(uint64_t));

	return blocks < least ? least : blocks > KVX_GPU_SYNC_MOVES ? KVX_GPU_SYNC_MOVES : (uint32_t)blocks;
}

static kvc_status_t make_room(kvx_worker_t *worker, kvx_wgpu_t *gpu, const kvx_worker_config_t *config)
{
	const uint32_t first_save = KVX_GPU_LOADS;

	gpu->sync_batch = batch_of_step(worker);
	gpu->save_sms = config->save_sms ? config->save_sms : SAVE_SMS;
	gpu->layers.least_bytes = config->layer_bytes;
	gpu->layers.wait_ns = (config->layer_wait_us ? config->layer_wait_us : LAYER_WAIT_US) * UINT64_C(1000);
	gpu->beside_batch = batch_of(worker, KVX_GPU_BESIDE_BYTES, KVX_GPU_MOVES);
	gpu->save_batch = batch_of(worker, KVX_GPU_SAVE_BYTES, KVX_WORKER_MOVES);
	gpu->expected = calloc((size_t)gpu->sync_batch * worker->words, sizeof *gpu->expected);
	gpu->padded = calloc(worker->words, sizeof *gpu->padded);
	gpu->layers.named = calloc(worker->groups[0].paged.layers, sizeof *gpu->layers.named);
	if (!gpu->expected || !gpu->padded || !gpu->layers.named) {
		return KVC_ERR_NOMEM;
	}
	for (uint32_t i = first_save; i < KVX_GPU_FLIGHTS; i++) {
		gpu->flights[i].leaves =
			calloc((size_t)gpu->save_batch * worker->words, sizeof *gpu->flights[i].leaves);
		if (!gpu->flights[i].leaves) {
			return KVC_ERR_NOMEM;
		}
	}

	return KVC_OK;
}

static kvc_status_t open_device(kvx_wgpu_t *gpu, const kvx_worker_config_t *config)
{
	const char *why = NULL;
	const kvk_gpu_config_t device = {.device = config->device,
					 .cuda = config->cuda ? config->cuda : kvk_cuda_load(&why),
					 .sms = config->sms,
					 .jobs = KVX_GPU_JOBS,
					 .image = config->image};
	kv_status_t status;

	if (!device.cuda) {
		return refuse("no GPU", why ? why : "there is no driver");
	}
	status = kvk_gpu_open(&device, &gpu->gpu);
	if (status != KV_OK) {
		return status == KV_ERR_NOMEM ? KVC_ERR_NOMEM : refuse("the GPU cannot be used", kvk_gpu_why());
	}
	status = kvk_gpu_stream(gpu->gpu, 1, &gpu->urgent);
	status = status == KV_OK ? kvk_gpu_stream(gpu->gpu, 1, &gpu->beside) : status;
	status = status == KV_OK ? kvk_gpu_stream(gpu->gpu, 0, &gpu->low) : status;

	return status == KV_OK ? KVC_OK : refuse("the GPU has no stream for copies", kvk_gpu_why());
}

/* Not being able to is no failure: then a rule chooses. */
static void measure(kvx_worker_t *worker)
{
	for (uint32_t i = 0; i < worker->group_count; i++) {
		if (kvk_gpu_measure(worker->gpu->gpu, &worker->layout, &worker->groups[i].paged) != KV_OK) {
			kv_log(KV_LOG_INFO, "kvx", "ways of copying group %u are not measured: %s",
			       worker->groups[i].group, kvk_gpu_why());
		}
	}
}

kvc_status_t kvx_gpu_open(kvx_worker_t *worker, const kvx_worker_config_t *config)
{
	kvx_wgpu_t *gpu = calloc(1, sizeof *gpu);
	kvc_status_t status;

	if (!gpu) {
		return KVC_ERR_NOMEM;
	}
	(void)pthread_mutex_init(&gpu->lock, NULL);
	worker->gpu = gpu;
	status = make_room(worker, gpu, config);
	status = status == KVC_OK ? open_device(gpu, config) : status;
	if (status == KVC_OK) {
		kvx_clocks_open(gpu);
		if (config->measure) {
			measure(worker);
		}
		kv_log(KV_LOG_INFO, "kvx", "rank %u copies with %s", worker->range.rank, kvk_gpu_describe(gpu->gpu));
	}

	return status;
}

void kvx_gpu_close(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;

	if (!gpu) {
		return;
	}
	kvx_clocks_close(gpu);
	kvk_gpu_close(gpu->gpu);
	for (uint32_t i = 0; i < KVX_GPU_FLIGHTS; i++) {
		free(gpu->flights[i].leaves);
	}
	free(gpu->expected);
	free(gpu->padded);
	free(gpu->layers.named);
	(void)pthread_mutex_destroy(&gpu->lock);
	free(gpu);
	worker->gpu = NULL;
}

void kvx_gpu_quit(kvx_worker_t *worker)
{
	atomic_store(&worker->gpu->quit_ns, kvx_worker_now() + QUIT_NS);
}

int kvx_gpu_hangs(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;
	const uint64_t quit = atomic_load(&gpu->quit_ns);

	if (quit && kvx_worker_now() >= quit && atomic_load(&gpu->airborne) > 0) {
		atomic_store(&gpu->lost, 1u);
	}

	return (int)atomic_load(&gpu->lost);
}

int kvx_gpu_leave(kvx_worker_t *worker)
{
	static _Atomic(kvx_worker_t *) all;

	if (!atomic_load(&worker->gpu->lost)) {
		return 0;
	}
	kv_log(KV_LOG_ERROR, "kvx", "the GPU still copies after %u s: memory it may use stays until the process ends",
	       (unsigned)(QUIT_NS / UINT64_C(1000000000)));
	worker->gpu->left = atomic_exchange(&all, worker);

	return 1;
}

void kvx_worker_stream(kvx_worker_t *worker, void *stream)
{
	if (worker->gpu) {
		worker->gpu->compute = stream;
	}
}

kvc_status_t kvx_gpu_decline(kvx_worker_t *worker, kvc_status_t status)
{
	const char *advice = status == KVC_ERR_LIMIT ? "; raise the limit on locked memory (ulimit -l)" : "";

	kv_log(KV_LOG_ERROR, "kvx", "the GPU cannot be used, nothing is loaded or saved: %s%s", kvk_gpu_why(), advice);
	kvx_wtest_decline(worker, status);

	return status;
}

/* ---- order
 * -------------------------------------------------------------------------------------------------------------------
 */

int kvx_gpu_order(kvx_worker_t *worker, kvk_cu_stream_t earlier, kvk_cu_stream_t later)
{
	return kvk_gpu_after(worker->gpu->gpu, earlier, later) == KV_OK;
}

void kvx_gpu_begin(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;

	if (atomic_exchange(&gpu->loose, 0u) &&
	    !(kvx_gpu_order(worker, gpu->urgent, gpu->compute) && kvx_gpu_order(worker, gpu->beside, gpu->compute))) {
		atomic_store(&gpu->loose, 1u);
	}
	gpu->ended = 0;
	gpu->unordered = 0;
}

void kvx_gpu_work(kvx_worker_t *worker, const kvx_plan_work_t *work)
{
	worker->gpu->layers.work_us = work->us;
	atomic_store(&worker->gpu->crowded, work->longest >= CROWD);
}

int kvx_gpu_early(kvx_worker_t *worker)
{
	return kvx_gpu_order(worker, worker->gpu->compute, worker->gpu->low);
}

int kvx_gpu_start(kvx_worker_t *worker)
{
	return kvx_gpu_order(worker, worker->gpu->compute, worker->gpu->beside);
}

/* ---- the end of a step
 * ------------------------------------------------------------------------------------------------------- */

static int all_settled(const kvx_worker_t *worker)
{
	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		if (!kvx_wload_settled(load)) {
			return 0;
		}
	}

	return 1;
}

/* Loads whose deadline is over are; their copies come before the engine's next ones on the device. 0: there are others.
 */
static int all_overdue(kvx_worker_t *worker)
{
	const uint64_t now = kvx_worker_now();
	int all = 1;

	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		if (kvx_wload_settled(load)) {
			continue;
		}
		if (now >= load->deadline_ns + GRACE_NS) {
			kvx_wload_close(worker, load, KVC_ERR_TIMEOUT);
		} else {
			all = 0;
		}
	}

	return all;
}

static void wait_settled(kvx_worker_t *worker)
{
	uint32_t spins = 0;

	while (!all_settled(worker)) {
		const uint32_t seen = kvx_gate_seen(&worker->progress);

		if (kvx_flight_land(worker) > 0) {
			continue;
		}
		if (spins++ < SPINS) {
			kvx_pause();
			continue;
		}
		if (all_overdue(worker)) {
			return;
		}
		kvx_gate_wait(&worker->progress, seen, NAP_NS);
	}
}

void kvx_gpu_settle(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;
	const uint64_t start = kvx_worker_now();

	kvx_gpu_load_cancel(worker);
	kvx_layers_close(worker);
	if (worker->sync && atomic_load(&worker->sync->go)) {
		wait_settled(worker);
		kvx_crew_close(worker);
		kvx_wcount(&worker->stats.load_wait_ns, kvx_worker_now() - start);
	}
	if (gpu->ended) {
		gpu->ended = 0;
		kvx_worker_hand_later(worker, gpu->unordered);
	}
}

void kvx_gpu_end(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;

	kvx_gpu_load_cancel(worker);
	kvx_layers_close(worker);
	if (worker->later) {
		gpu->unordered = !kvx_gpu_order(worker, gpu->compute, gpu->low);
	}
	gpu->ended = 1;
	if (worker->sync) {
		(void)kvx_flight_land(worker);
	}
	if (all_settled(worker)) {
		kvx_gpu_settle(worker);
	}
}

/* ---- counters
 * ---------------------------------------------------------------------------------------------------------------- */

void kvx_gpu_stats(const kvx_worker_t *worker, kvx_worker_stats_t *stats)
{
	kvk_gpu_stats_t gpu;

	kvk_gpu_get_stats(worker->gpu->gpu, &gpu);
	stats->gpu_bytes = gpu.bytes;
	stats->gpu_zero_copy = gpu.zero_copy;
	stats->gpu_staged = gpu.staged;
	stats->gpu_each = gpu.each;
	stats->gpu_failures = gpu.failures;
	stats->gpu_refused = atomic_load(&worker->gpu->refused);
	stats->registered_bytes = gpu.registered_bytes;
}
