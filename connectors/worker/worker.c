/* The worker: open, close, counters. */
#include "worker/completion.h"
#include "worker/config.h"
#include "worker/cuda/device.h"
#include "worker/cuda/pool_memory.h"
#include "worker/cuda/step.h"
#include "worker/jobs/load.h"
#include "worker/jobs/save.h"
#include "worker/report.h"
#include "worker/transfer/thread.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define THREADS_MAX 4u /* more do not make memory faster */

static uint32_t default_threads(const kvx_worker_t *worker)
{
	const uint32_t cpus = kvx_cpus_count(&worker->cpus);

	return cpus > THREADS_MAX ? THREADS_MAX : cpus;
}

static void free_jobs(kvx_wjob_t *job)
{
	kvx_wjob_t *next;

	for (; job; job = next) {
		next = job->next;
		free(job);
	}
}

static kvc_status_t attach(kvx_worker_t *worker, const kvx_worker_config_t *config)
{
	const kvc_config_t kvc = {
		.struct_size = sizeof kvc,
		.socket = config->socket,
		.instance = config->instance,
		.secret = config->secret,
		.secret_len = config->secret_len,
		.role = KVC_ROLE_WORKER,
		.rank = config->rank,
		.program = config->program,
		.lazy = 2,
		.on_memory = worker->gpu ? kvx_pool_memory_changed : NULL,
		.memory_ctx = worker,
	};
	const kvc_status_t status = kvc_attach(&kvc, &worker->kvc);

	return status == KVC_OK || status == KVC_ERR_NOMEM ? status : kvx_worker_reject_config(kvc_last_error());
}

kvc_status_t kvx_worker_open(const kvx_worker_config_t *config, kvx_worker_t **p_worker)
{
	kvc_status_t status = kvx_worker_check_config(config);
	kvx_worker_t *worker;

	if (status != KVC_OK) {
		return status;
	}
	worker = calloc(1, sizeof *worker);
	if (!worker) {
		return KVC_ERR_NOMEM;
	}
	worker->event_fd = -1;
	kvx_cpus_read_allowed(&worker->cpus);
	worker->threads = config->threads ? config->threads : default_threads(worker);
	if (config->memory == KVX_MEMORY_CUDA) {
		worker->threads = 1; /* the device copies */
	}
	worker->prefault = config->prefault;
	worker->loads_end = &worker->loads;
	worker->saves_end = &worker->saves;
	worker->deferred_end = &worker->deferred;
	worker->run_end = &worker->run;
	worker->space_top = 1;
	atomic_store(&worker->self_test_status, KVC_PENDING);

	status = kvx_worker_apply_config(worker, config);
	status = status == KVC_OK ? kvx_report_reserve(worker) : status;
	if (status == KVC_OK && config->memory == KVX_MEMORY_CUDA) {
		status = kvx_gpu_open(worker, config);
	}
	status = status == KVC_OK ? attach(worker, config) : status;
	status = status == KVC_OK ? kvx_transfer_start(worker) : status;
	if (status != KVC_OK) {
		goto err_worker;
	}
	*p_worker = worker;

	return KVC_OK;

err_worker:
	kvx_worker_close(worker);
	return status;
}

void kvx_worker_close(kvx_worker_t *worker)
{
	if (!worker) {
		return;
	}

	if (worker->started) {
		kvx_saves_submit_deferred(worker, 1);
	}
	kvx_transfer_stop(worker);
	if (worker->gpu && kvx_gpu_leak_until_exit(worker)) {
		return;
	}
	kvc_detach(worker->kvc);
	kvx_gpu_close(worker);
	free_jobs(worker->loads);
	free_jobs(worker->saves);
	free_jobs(worker->deferred);
	kvx_msg_free(&worker->report[0]);
	kvx_msg_free(&worker->report[1]);
	kvx_scratch_fini(&worker->scratch);
	kvx_scratch_fini(&worker->transfer_scratch);
	for (uint32_t i = 0; i < KVX_WORKER_THREADS; i++) {
		kvx_scratch_fini(&worker->copy_threads[i].scratch);
	}
	for (uint32_t i = 0; i < worker->group_count; i++) {
		free(worker->groups[i].base);
	}
	free(worker->groups);
	free(worker->finished);
	free(worker->fence);
	free(worker->failed);
	free(worker->save_marks);
	free(worker->zero_leaves);
	free(worker->identity_text);
	free(worker->weights);
	free(worker->prefetch.message);
	free(worker);
}

kvc_status_t kvx_worker_self_test_status(const kvx_worker_t *worker)
{
	return (kvc_status_t)atomic_load(&worker->self_test_status);
}

int kvx_worker_is_ready(const kvx_worker_t *worker)
{
	return atomic_load(&worker->incarnation) != 0 && atomic_load(&worker->self_test_status) == KVC_OK;
}

/* One batch of the oldest load that has one. */
static uint32_t copy_batch(kvx_worker_t *worker)
{
	uint32_t copied = 0;

	for (kvx_wjob_t *job = worker->loads; job && copied == 0 && !worker->gpu; job = job->next) {
		copied = kvx_wload_copy(worker, (kvx_wload_t *)job, &worker->scratch);
	}

	return copied;
}

void kvx_worker_wait(kvx_worker_t *worker, uint32_t timeout_us)
{
	const uint64_t until = kvx_worker_now_ns() + timeout_us * UINT64_C(1000);
	uint64_t now = kvx_worker_now_ns();

	while (now < until) {
		const uint32_t seen = kvx_gate_read(&worker->progress);

		if (atomic_load(&worker->completions) != worker->completions_seen) {
			return;
		}
		if (copy_batch(worker) == 0) {
			kvx_gate_wait(&worker->progress, seen, until - now);
		}
		now = kvx_worker_now_ns();
	}
}

int kvx_worker_has_unsaved(const kvx_worker_t *worker, const uint32_t *ids, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		if (ids[i] < worker->max_blocks && atomic_load(&worker->save_marks[ids[i]]) > 0) {
			return 1;
		}
	}

	return 0;
}

kvc_status_t kvx_worker_flush(kvx_worker_t *worker, uint32_t timeout_ms)
{
	const uint64_t until = kvx_worker_now_ns() + timeout_ms * KVX_NS_A_MS;

	for (;;) {
		const uint32_t seen = kvx_gate_read(&worker->progress);

		if (worker->gpu && !worker->prefetch.begun) {
			kvx_gpu_step_settle(worker);
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

void kvx_worker_get_stats(const kvx_worker_t *worker, kvx_worker_stats_t *stats)
{
	kvx_worker_stats_t all = {.struct_size = sizeof all};
	const size_t size = stats->struct_size < sizeof all ? stats->struct_size : sizeof all;

#define COPY_STAT(name, help) all.name = atomic_load_explicit(&worker->stats.name, memory_order_relaxed);
	KVX_WORKER_STATS(COPY_STAT)
#undef COPY_STAT
	all.broken_invariants = kv_broken_count();
	all.loads_open = atomic_load_explicit(&worker->stats.loads_open, memory_order_relaxed);
	all.saves_open = atomic_load_explicit(&worker->stats.saves_open, memory_order_relaxed);
	all.marked = atomic_load_explicit(&worker->stats.marked, memory_order_relaxed);
	if (worker->gpu) {
		kvx_gpu_fill_stats(worker, &all);
	}
	if (size >= sizeof size) {
		all.struct_size = size;
		memcpy(stats, &all, size);
	}
}
