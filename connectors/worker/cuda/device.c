/* The device behind a worker: open, close, the order of its streams, timers on them, and its jobs in flight with the
 * load or saves they copy for. A timer that the driver refuses leaves its step or load untimed. */
#include "worker/cuda/device.h"
#include "worker/base/submit.h"

#include "kv/log.h"

#include <stdio.h>

#define LAYER_WAIT_US 1000u
#define SAVE_SMS      2u
#define LEAVES_BYTES  (UINT64_C(8) << 20)
#define TIMER_NS      UINT64_C(200000)     /* for the end mark of a load that has ended */
#define QUIT_NS       UINT64_C(3000000000) /* closing: wait for the copies of the device */

/* ---- open and close -------------------------------------------------------------------------- */

static kvc_status_t refuse(const char *what, const char *why, const char **p_why)
{
	static _Thread_local char text[320];

	(void)snprintf(text, sizeof text, "%s: %s", what, why);
	*p_why = text;

	return KVC_ERR_ARG;
}

/* Blocks a job of `bytes` bytes. */
static uint32_t blocks_a_batch(const kvx_worker_t *worker, uint64_t bytes, uint32_t most)
{
	const uint64_t blocks = bytes / worker->block_bytes;

	return blocks < 1 ? 1u : blocks > most ? most : (uint32_t)blocks;
}

/* Blocks a job of a synchronous load: as many as the expected leaves of fit in the table, which a rank with some of the
 * layers fills one by one. The last kernel of a job runs alone after its last copy, so few jobs are better than many.
 */
static uint32_t blocks_a_sync_batch(const kvx_worker_t *worker)
{
	const uint32_t least = blocks_a_batch(worker, KVX_GPU_SYNC_BYTES, KVX_GPU_MOVES);
	const uint64_t blocks = LEAVES_BYTES / (worker->words * sizeof(uint64_t));

	return blocks < least ? least : blocks > KVX_GPU_SYNC_MOVES ? KVX_GPU_SYNC_MOVES : (uint32_t)blocks;
}

static void make_tables(kvx_worker_t *worker, kvx_wgpu_t *gpu, const kvx_worker_config_t *config)
{
	gpu->sync_batch = blocks_a_sync_batch(worker);
	gpu->save_sms = config->save_sms ? config->save_sms : SAVE_SMS;
	gpu->promote_rate = config->promote_rate ? config->promote_rate : KVX_GPU_PROMOTE_RATE;
	gpu->layers.least_bytes = config->layer_bytes;
	gpu->layers.wait_ns = (config->layer_wait_us ? config->layer_wait_us : LAYER_WAIT_US) * UINT64_C(1000);
	gpu->async_batch = blocks_a_batch(worker, KVX_GPU_ASYNC_BYTES, KVX_GPU_MOVES);
	gpu->large_batch = blocks_a_batch(worker, KVX_GPU_LARGE_BYTES, KVX_GPU_MOVES);
	gpu->large_load = KVX_GPU_LARGE_LOAD;
	gpu->save_batch = blocks_a_batch(worker, KVX_GPU_SAVE_BYTES, KVX_WORKER_MOVES);
	gpu->expected = kvx_worker_alloc(worker, (size_t)gpu->sync_batch * worker->words, sizeof *gpu->expected);
	gpu->layers.named = kvx_worker_alloc(worker, worker->groups[0].paged.layers, sizeof *gpu->layers.named);
	for (uint32_t i = KVX_GPU_LOADS; i < KVX_GPU_BATCHES; i++) {
		gpu->batches[i].leaves = kvx_worker_alloc(worker, (size_t)gpu->save_batch * worker->words,
							  sizeof *gpu->batches[i].leaves);
	}
}

static kvc_status_t open_device(kvx_wgpu_t *gpu, const kvx_worker_config_t *config, const char **p_why)
{
	const char *why = NULL;
	const kvk_gpu_config_t device = {.device = config->device,
					 .cuda = config->cuda ? config->cuda : kvk_cuda_load(&why),
					 .sms = config->sms,
					 .jobs = KVX_GPU_JOBS,
					 .image = config->image};
	kv_status_t status;

	if (!device.cuda) {
		return refuse("no GPU", why ? why : "there is no driver", p_why);
	}
	status = kvk_gpu_open(&device, &gpu->gpu);
	if (status != KV_OK) {
		return status == KV_ERR_NOMEM ? KVC_ERR_NOMEM
					      : refuse("the GPU cannot be used", kvk_gpu_last_error(), p_why);
	}
	status = kvk_gpu_create_stream(gpu->gpu, 1, &gpu->load_sync_stream);
	status = status == KV_OK ? kvk_gpu_create_stream(gpu->gpu, 1, &gpu->load_async_stream) : status;
	for (uint32_t i = 0; i < KV_COUNT_OF(gpu->saves) && status == KV_OK; i++) {
		status = kvk_gpu_create_stream(gpu->gpu, 0, &gpu->saves[i].stream);
	}
	status = status == KV_OK ? kvk_gpu_clock_open(gpu->gpu, &gpu->prefill_end) : status;
	for (uint32_t i = 0; i < KVX_GPU_POINTS && status == KV_OK; i++) {
		status = kvk_gpu_clock_open(gpu->gpu, &gpu->point[i]);
	}

	if (status == KV_ERR_NOMEM) {
		return KVC_ERR_NOMEM;
	}

	return status == KV_OK ? KVC_OK
			       : refuse("the GPU has no stream or event for copies", kvk_gpu_last_error(), p_why);
}

static kvc_status_t check_caches(kvx_worker_t *worker, const char **p_why)
{
	kv_status_t status = KV_OK;

	for (uint32_t i = 0; i < worker->group_count && status == KV_OK; i++) {
		status = kvk_gpu_check_paged(worker->gpu->gpu, &worker->groups[i].paged);
	}

	return status == KV_OK ? KVC_OK : refuse("the GPU cannot copy this cache", kvk_gpu_last_error(), p_why);
}

/* If measuring fails, a rule chooses the way of copying. */
static void measure_copies(kvx_worker_t *worker)
{
	for (uint32_t i = 0; i < worker->group_count; i++) {
		if (kvk_gpu_measure(worker->gpu->gpu, &worker->groups[i].layout, &worker->groups[i].paged) != KV_OK) {
			kv_log(KV_LOG_INFO, "kvx", "ways of copying group %u are not measured: %s",
			       worker->groups[i].group, kvk_gpu_last_error());
		}
	}
}

static void open_timers(kvx_wgpu_t *gpu)
{
	for (uint32_t i = 0; i < KVX_GPU_TIMERS; i++) {
		(void)kvk_gpu_clock_open(gpu->gpu, &gpu->timers[i].clock);
	}
}

static void close_clocks(kvx_wgpu_t *gpu)
{
	kvk_gpu_clock_close(gpu->prefill_end);
	for (uint32_t i = 0; i < KVX_GPU_POINTS; i++) {
		kvk_gpu_clock_close(gpu->point[i]);
	}
	for (uint32_t i = 0; i < KVX_GPU_TIMERS; i++) {
		kvk_gpu_clock_close(gpu->timers[i].clock);
	}
}

kvc_status_t kvx_gpu_open(kvx_worker_t *worker, const kvx_worker_config_t *config, const char **p_why)
{
	kvx_wgpu_t *gpu = kvx_worker_alloc(worker, 1, sizeof *gpu);
	kvc_status_t status;

	if (!gpu) {
		return KVC_ERR_NOMEM;
	}
	(void)pthread_mutex_init(&gpu->lock, NULL);
	worker->gpu = gpu;
	make_tables(worker, gpu, config);
	status = worker->no_memory ? KVC_ERR_NOMEM : open_device(gpu, config, p_why);
	status = status == KVC_OK ? check_caches(worker, p_why) : status;
	if (status == KVC_OK) {
		open_timers(gpu);
		if (config->measure) {
			measure_copies(worker);
		}
		kv_log(KV_LOG_INFO, "kvx", "rank %u copies with %s", worker->rank, kvk_gpu_describe(gpu->gpu));
	}

	return status;
}

void kvx_gpu_close(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;

	if (!gpu) {
		return;
	}
	close_clocks(gpu);
	kvk_gpu_close(gpu->gpu);
	(void)pthread_mutex_destroy(&gpu->lock);
	worker->gpu = NULL;
}

void kvx_gpu_begin_shutdown(kvx_worker_t *worker)
{
	atomic_store(&worker->gpu->shutdown_ns, kvx_worker_now_ns() + QUIT_NS);
}

int kvx_gpu_shutdown_timed_out(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;
	const uint64_t quit = atomic_load(&gpu->shutdown_ns);

	if (quit && kvx_worker_now_ns() >= quit && atomic_load(&gpu->in_flight) > 0) {
		atomic_store(&gpu->device_lost, 1u);
	}

	return (int)atomic_load(&gpu->device_lost);
}

int kvx_gpu_leak_until_exit(kvx_worker_t *worker)
{
	static _Atomic(kvx_worker_t *) all;

	if (!atomic_load(&worker->gpu->device_lost)) {
		return 0;
	}
	kv_log(KV_LOG_ERROR, "kvx", "the GPU still copies after %u s: memory it may use stays until the process ends",
	       (unsigned)(QUIT_NS / UINT64_C(1000000000)));
	worker->gpu->next_leaked = atomic_exchange(&all, worker);

	return 1;
}

void kvx_worker_set_stream(kvx_worker_t *worker, void *stream)
{
	if (worker->gpu) {
		worker->gpu->compute = stream;
	}
}

kvc_status_t kvx_gpu_decline(kvx_worker_t *worker, kvc_status_t status)
{
	const char *advice = status == KVC_ERR_LIMIT ? "; raise the limit on locked memory (ulimit -l)" : "";

	kv_log(KV_LOG_ERROR, "kvx", "the GPU cannot be used, nothing is loaded or saved: %s%s", kvk_gpu_last_error(),
	       advice);
	atomic_store(&worker->self_test_status, status);

	return status;
}

/* ---- timers ----------------------------------------------------------------------------------- */

int kvx_timers_start_step(kvx_wgpu_t *gpu)
{
	const kvx_gpu_timer_t *timer = &gpu->timers[gpu->step_at];

	return timer->clock && !timer->running && kvk_gpu_clock_mark(timer->clock, 0, gpu->compute) == KV_OK;
}

void kvx_timers_stop_step(kvx_wgpu_t *gpu, uint32_t step)
{
	kvx_gpu_timer_t *timer = &gpu->timers[gpu->step_at];

	if (kvk_gpu_clock_mark(timer->clock, 1, gpu->compute) == KV_OK) {
		timer->running = 1;
		timer->step = step;
		gpu->step_at = (gpu->step_at + 1u) % KVX_GPU_STEP_TIMERS;
	}
}

int kvx_timers_poll_step(kvx_wgpu_t *gpu, uint32_t *p_step, uint64_t *p_ns)
{
	for (uint32_t i = 0; i < KVX_GPU_STEP_TIMERS; i++) {
		kvx_gpu_timer_t *timer = &gpu->timers[i];
		kv_status_t status;

		if (!timer->running) {
			continue;
		}
		status = kvk_gpu_clock_read(timer->clock, p_ns);
		if (status == KV_PENDING) {
			continue;
		}
		timer->running = 0;
		if (status == KV_OK) {
			*p_step = timer->step;
			return 1;
		}
	}

	return 0;
}

void kvx_timers_start_load(kvx_worker_t *worker, kvx_wload_t *load, kvk_cu_stream_t stream)
{
	kvx_wgpu_t *gpu = worker->gpu;

	for (uint32_t i = KVX_GPU_STEP_TIMERS; i < KVX_GPU_TIMERS && !load->timer; i++) {
		kvx_gpu_timer_t *timer = &gpu->timers[i];

		if (timer->clock && !timer->running && kvk_gpu_clock_mark(timer->clock, 0, stream) == KV_OK) {
			timer->running = 1;
			load->timer = i;
		}
	}
}

int kvx_timers_load_has_begun(const kvx_wgpu_t *gpu, const kvx_wload_t *load)
{
	return load->timer && kvk_gpu_clock_begun(gpu->timers[load->timer].clock);
}

void kvx_timers_restart_load(kvx_wgpu_t *gpu, const kvx_wload_t *load, kvk_cu_stream_t stream)
{
	if (load->timer && !load->submitted && !load->batch_total_blocks && atomic_load(&load->all_ready)) {
		(void)kvk_gpu_clock_mark(gpu->timers[load->timer].clock, 0, stream);
	}
}

void kvx_timers_mark_load_end(kvx_wgpu_t *gpu, const kvx_wload_t *load, kvk_cu_stream_t stream)
{
	if (load->timer) {
		(void)kvk_gpu_clock_mark(gpu->timers[load->timer].clock, 1, stream);
	}
}

uint64_t kvx_timers_load_ns(kvx_worker_t *worker, kvx_wload_t *load)
{
	const uint64_t wall = load->end_ns - load->begin_ns, until = kvx_worker_now_ns() + TIMER_NS;
	kvx_gpu_timer_t *timer;
	uint64_t ns = 0;
	kv_status_t status;

	if (!load->timer) {
		return atomic_load(&load->all_ready) ? 0 : wall;
	}
	timer = &worker->gpu->timers[load->timer];
	/* The end mark is next on the stream after the last job, which has ended. */
	do {
		status = kvk_gpu_clock_read(timer->clock, &ns);
	} while (status == KV_PENDING && kvx_worker_now_ns() < until);
	timer->running = 0;
	load->timer = 0;

	return status == KV_OK && ns < wall ? ns : wall;
}

/* ---- batches in flight ----------------------------------------------------------------------- */

kvx_gpu_batch_t *kvx_gpu_batch_find(kvx_wgpu_t *gpu, kvx_lane_t lane)
{
	/* Batches of its kind, and how many of them must stay free for the other lane of that kind. */
	static const struct {
		uint32_t first, count, keep;
	} lanes[KVX_LANES] = {
		[KVX_LANE_SYNC] = {0, KVX_GPU_LOADS, 0},
		[KVX_LANE_ASYNC] = {0, KVX_GPU_LOADS, KVX_GPU_LOADS - KVX_GPU_ASYNC_LOADS},
		[KVX_LANE_SAVE] = {KVX_GPU_LOADS, KVX_GPU_SAVES, KVX_GPU_SAVES - KVX_GPU_SAVES_AHEAD},
		[KVX_LANE_NEAR_SAVE] = {KVX_GPU_LOADS + KVX_GPU_SAVES, KVX_GPU_NEAR_SAVES, 0},
		[KVX_LANE_FENCE] = {KVX_GPU_LOADS, KVX_GPU_SAVES, 0},
	};
	kvx_gpu_batch_t *batches = gpu->batches + lanes[lane].first, *found = NULL;
	uint32_t free = 0;

	for (uint32_t i = 0; i < lanes[lane].count; i++) {
		if (!batches[i].job) {
			found = found ? found : &batches[i];
			free++;
		}
	}
	if (free <= lanes[lane].keep) {
		return NULL;
	}
	found->lane = lane;

	return found;
}

/* The driver has refused a job for its size: from now on jobs have at most `most` blocks. */
static void shrink_batches(kvx_wgpu_t *gpu, uint32_t most)
{
	gpu->sync_batch = gpu->sync_batch < most ? gpu->sync_batch : most;
	gpu->async_batch = gpu->async_batch < most ? gpu->async_batch : most;
	gpu->large_batch = gpu->large_batch < most ? gpu->large_batch : most;
	gpu->save_batch = gpu->save_batch < most ? gpu->save_batch : most;
}

/* Append it to its lane. */
static void append_to_lane(kvx_wgpu_t *gpu, kvx_gpu_batch_t *batch)
{
	batch->next = NULL;
	if (gpu->first[batch->lane]) {
		gpu->last[batch->lane]->next = batch;
	} else {
		gpu->first[batch->lane] = batch;
	}
	gpu->last[batch->lane] = batch;
}

kvc_status_t kvx_gpu_batch_submit(kvx_worker_t *worker, kvx_gpu_batch_t *batch, const kvk_gpu_copy_t *copy)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvk_gpu_job_t *job = NULL;
	kvc_status_t status = (kvc_status_t)kvk_gpu_submit(gpu->gpu, copy, &job);

	if (status == KVC_OK) {
		batch->job = job;
		batch->begin_ns = kvx_worker_now_ns();
		batch->poisoned = 0;
		batch->serial = ++gpu->serial;
		append_to_lane(gpu, batch);
		atomic_fetch_add(&gpu->in_flight, 1u);
		atomic_fetch_add(&gpu->loads_in_flight, batch->of.load ? 1u : 0u);
		gpu->async_blocks_in_flight += batch->lane == KVX_LANE_ASYNC ? batch->of.count : 0u;
		if (batch->of.load) {
			kvx_timers_mark_load_end(gpu, batch->of.load, copy->stream);
		}
	} else if (status == KVC_ERR_LIMIT && copy->count > 1) {
		shrink_batches(gpu, copy->count / 2);
		status = KVC_ERR_BUSY;
	}

	return status;
}

static void complete_batch(kvx_worker_t *worker, kvx_gpu_batch_t *batch, kvc_status_t status)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvk_gpu_job_t *job = batch->job;
	const uint32_t loading = batch->of.load ? 1u : 0u;

	/* done() may drop the last reference to the load or save: neither is used after it. */
	if (batch->of.load && status != KVC_OK && status != KVC_ERR_CORRUPT) {
		atomic_store(&gpu->untracked_copies, 1u);
	}
	batch->done(worker, batch, status);
	kvk_gpu_release_job(job);
	batch->job = NULL;
	batch->of.load = NULL;
	atomic_fetch_sub(&gpu->loads_in_flight, loading);
	gpu->async_blocks_in_flight -= batch->lane == KVX_LANE_ASYNC ? batch->of.count : 0u;
	atomic_fetch_sub(&gpu->in_flight, 1u);
}

/* Jobs of a lane end in order, so the driver is asked about its first job only: every call to it delays the engine's
 * own launches. */
static uint32_t complete_lane(kvx_worker_t *worker, kvx_lane_t lane)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvx_gpu_batch_t *batch;
	uint32_t landed = 0;

	while ((batch = gpu->first[lane]) != NULL) {
		const kvc_status_t status = (kvc_status_t)kvk_gpu_poll(batch->job);

		if (status == KVC_PENDING) {
			break;
		}
		gpu->first[lane] = batch->next;
		complete_batch(worker, batch, status);
		landed++;
	}

	return landed;
}

uint32_t kvx_gpu_complete_batches(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;
	uint32_t landed = 0;

	if (atomic_load(&gpu->in_flight) == 0) {
		return 0;
	}
	(void)pthread_mutex_lock(&gpu->lock);
	for (uint32_t lane = 0; lane < KVX_LANES; lane++) {
		landed += complete_lane(worker, (kvx_lane_t)lane);
	}
	(void)pthread_mutex_unlock(&gpu->lock);
	if (landed > 0) {
		kvx_gate_open(&worker->progress);
	}

	return landed;
}

/* ---- order ----------------------------------------------------------------------------------- */

int kvx_gpu_set_save_point(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;
	const uint32_t next = gpu->points + 1;

	if (kvk_gpu_clock_mark(gpu->point[next % KVX_GPU_POINTS], 0, gpu->compute) != KV_OK) {
		return 0;
	}
	gpu->points = next;

	return 1;
}

void kvx_gpu_mark_prefill(kvx_wgpu_t *gpu)
{
	if (atomic_load(&gpu->is_prefill_step)) {
		atomic_store(&gpu->prefill_marked, kvk_gpu_clock_mark(gpu->prefill_end, 0, gpu->compute) == KV_OK);
	}
}

int kvx_gpu_computes_prompts(const kvx_wgpu_t *gpu)
{
	return atomic_load(&gpu->is_prefill_step) ||
	       (atomic_load(&gpu->prefill_marked) && !kvk_gpu_clock_begun(gpu->prefill_end));
}

int kvx_gpu_order_streams(kvx_worker_t *worker, kvk_cu_stream_t earlier, kvk_cu_stream_t later)
{
	return kvk_gpu_order_streams(worker->gpu->gpu, earlier, later) == KV_OK;
}

/* ---- counters -------------------------------------------------------------------------------- */

void kvx_gpu_fill_stats(const kvx_worker_t *worker, kvx_worker_stats_t *stats)
{
	kvk_gpu_stats_t gpu;

	kvk_gpu_get_stats(worker->gpu->gpu, &gpu);
	stats->gpu_bytes = gpu.bytes;
	stats->gpu_zero_copy = gpu.zero_copy;
	stats->gpu_staged = gpu.staged;
	stats->gpu_copy_per_piece = gpu.copy_per_piece;
	stats->gpu_failures = gpu.failures;
	stats->registered_bytes = gpu.registered_bytes;
}
