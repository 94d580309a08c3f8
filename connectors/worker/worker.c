/* The worker: what it is given is checked and copied; open, close, counters. */
#include "worker/cuda/device.h"
#include "worker/cuda/pool_memory.h"
#include "worker/jobs/load.h"
#include "worker/jobs/save.h"
#include "worker/jobs/report.h"
#include "worker/base/submit.h"
#include "worker/transfer/thread.h"

#include "kvx_digest.h"

#include "kv/digest.h"
#include "kv/log.h"
#include "kv/struct.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define THREADS_MAX 4u /* more do not make memory faster */

static _Thread_local const char *why_text = "no call has failed";

const char *kvx_worker_last_error(void)
{
	return why_text;
}

static kvc_status_t reject_config(const char *why)
{
	why_text = why;

	return KVC_ERR_ARG;
}

/* ---- checking -------------------------------------------------------------------------------- */

static int range_fits(uint32_t first, uint32_t count, uint32_t total)
{
	return count > 0 && first < total && count <= total - first;
}

/* NULL, or what is wrong. */
static const char *check_group(const kvx_worker_group_t *group)
{
	const kvk_paged_t *paged = group->paged;
	const char *why = "a group's layout and paged are required";

	if (!paged || !group->layout || kvk_layout_check(group->layout, &why) != KV_OK ||
	    kvk_paged_check(paged, group->layout, &why) != KV_OK) {
		return why;
	}
	if (group->save_layers > 0 &&
	    (group->save_layer_first < paged->first_layer ||
	     !range_fits(group->save_layer_first - paged->first_layer, group->save_layers, paged->layers))) {
		return "the layers of a group that the rank saves are not those that it holds";
	}

	return NULL;
}

static const char *check_groups(const kvx_worker_config_t *config)
{
	if (!config->groups || config->group_count == 0 || config->group_count > KVX_MAX_GROUPS) {
		return "there are no groups, or too many";
	}
	for (uint32_t i = 0; i < config->group_count; i++) {
		const char *why = check_group(&config->groups[i]);

		for (uint32_t j = 0; j < i && !why; j++) {
			why = config->groups[j].group == config->groups[i].group ? "two groups have the same number"
										 : NULL;
		}
		if (why) {
			return why;
		}
	}

	return NULL;
}

static const char *check_config(const kvx_worker_config_t *config)
{
	if (!config || config->struct_size < sizeof *config) {
		return "struct_size is not that of kvx_worker_config_t";
	}
	if (!config->identity) {
		return "identity is required";
	}
	if (config->identity->struct_size < sizeof *config->identity) {
		return "struct_size is not that of kvc_identity_t";
	}
	if (config->memory != KVX_MEMORY_HOST && config->memory != KVX_MEMORY_CUDA) {
		return "the kind of memory is not known";
	}
	if (config->threads > KVX_WORKER_THREADS) {
		return "more threads than are of use";
	}

	return check_groups(config);
}

/* ---- keeping --------------------------------------------------------------------------------- */

static size_t text_size(const char *text)
{
	return text ? strlen(text) + 1 : 0;
}

/* Move *p_text to `at`; returns the first byte after it. */
static char *move_text(char *at, const char **p_text)
{
	const size_t size = text_size(*p_text);

	if (size > 0) {
		memcpy(at, *p_text, size);
		*p_text = at;
	}

	return at + size;
}

static kvc_status_t copy_identity(kvx_worker_t *worker, const kvx_worker_config_t *config)
{
	kvc_identity_t *id = &worker->identity;
	const char **const texts[] = {&id->model, &id->weights, &id->dtype,  &id->quantization, &id->rope,
				      &id->lora,  &id->hash,    &id->groups, &id->page_format,  &id->extra};
	kvk_layout_t layouts[KVX_MAX_GROUPS];
	size_t size = 0;
	char *at;

	for (uint32_t i = 0; i < config->group_count; i++) {
		layouts[i] = *config->groups[i].layout;
	}
	if (kvk_layouts_format(layouts, config->group_count, worker->layout_text, sizeof worker->layout_text) !=
	    KV_OK) {
		return reject_config("the groups' layouts differ so much that their text is too long");
	}
	*id = *config->identity;
	id->struct_size = sizeof *id;
	id->layout = worker->layout_text;
	for (size_t i = 0; i < KV_COUNT_OF(texts); i++) {
		size += text_size(*texts[i]);
	}
	at = kvx_worker_alloc(worker, 1, size);
	for (size_t i = 0; i < KV_COUNT_OF(texts) && at; i++) {
		at = move_text(at, texts[i]);
	}

	return KVC_OK;
}

static void copy_group(kvx_worker_t *worker, const kvx_worker_config_t *config, uint32_t i)
{
	kvx_wgroup_t *group = &worker->groups[i];
	const kvk_paged_t *paged = config->groups[i].paged;
	void **base = kvx_worker_alloc(worker, paged->layers, sizeof *base);
	uint32_t batch;

	group->group = config->groups[i].group;
	group->index = i;
	group->layout = *config->groups[i].layout;
	kvk_layout_geometry(&group->layout, &group->geometry);
	group->paged = group->saved = *paged;
	if (config->groups[i].save_layers > 0) {
		group->saved.first_layer = config->groups[i].save_layer_first;
		group->saved.layers = config->groups[i].save_layers;
	}
	group->block_bytes = (uint64_t)paged->heads * paged->layers * group->geometry.page_bytes;
	group->saved_bytes = (uint64_t)paged->heads * group->saved.layers * group->geometry.page_bytes;
	group->words = paged->heads * paged->layers * group->geometry.pieces;
	if (base) {
		memcpy(base, paged->base, paged->layers * sizeof *base);
		group->saved.base = base + (group->saved.first_layer - paged->first_layer);
	}
	group->paged.base = base;
	batch = group->geometry.block_bytes ? KVX_WORKER_BATCH / group->geometry.block_bytes : 0;
	batch = batch < 1 ? 1 : batch;
	group->batch = batch > KVX_WORKER_MOVES ? KVX_WORKER_MOVES : batch;
	worker->batch = worker->batch < group->batch ? group->batch : worker->batch;
	worker->words = worker->words < group->words ? group->words : worker->words;
	if (worker->block_bytes < group->geometry.block_bytes) {
		worker->block_bytes = group->geometry.block_bytes;
	}
	if (worker->max_blocks < paged->blocks) {
		worker->max_blocks = paged->blocks;
	}
}

static void copy_groups(kvx_worker_t *worker, const kvx_worker_config_t *config)
{
	worker->groups = kvx_worker_alloc(worker, config->group_count, sizeof *worker->groups);
	worker->group_count = worker->groups ? config->group_count : 0;
	for (uint32_t i = 0; i < worker->group_count; i++) {
		copy_group(worker, config, i);
	}
}

static void make_scratch(kvx_worker_t *worker, kvx_scratch_t *scratch)
{
	scratch->leaves = kvx_worker_alloc(worker, (size_t)worker->batch * worker->words, sizeof *scratch->leaves);
}

static void make_tables(kvx_worker_t *worker)
{
	const size_t words = (worker->max_blocks + 63u) / 64u;

	worker->save_marks = kvx_worker_alloc(worker, worker->max_blocks, sizeof *worker->save_marks);
	worker->failed = kvx_worker_alloc(worker, words, sizeof *worker->failed);
	worker->fence = kvx_worker_alloc(worker, words, sizeof *worker->fence);
	worker->finished = kvx_worker_alloc(worker, KVX_WORKER_NAMES, sizeof *worker->finished);
	make_scratch(worker, &worker->scratch);
	make_scratch(worker, &worker->transfer_scratch);
	for (uint32_t i = 0; i + 2 < worker->threads; i++) {
		worker->copy_threads[i].worker = worker;
		make_scratch(worker, &worker->copy_threads[i].scratch);
	}
}

static kvc_status_t apply_config(kvx_worker_t *worker, const kvx_worker_config_t *config)
{
	const uint32_t cpus = kvx_cpus_count(&worker->cpus);
	const uint32_t chosen = cpus > THREADS_MAX ? THREADS_MAX : cpus;
	kvc_status_t status;

	worker->threads = config->threads ? config->threads : chosen;
	if (config->memory == KVX_MEMORY_CUDA) {
		worker->threads = 1; /* the device copies */
	}
	worker->prefault = config->prefault;
	worker->rank = config->rank;

	status = copy_identity(worker, config);
	copy_groups(worker, config);
	make_tables(worker);

	return worker->no_memory ? KVC_ERR_NOMEM : status;
}

/* ---- open and close ---------------------------------------------------------------------------- */

static void free_jobs(kvx_wjob_t *job)
{
	kvx_wjob_t *next;

	for (; job; job = next) {
		next = job->next;
		free(job);
	}
}

static void free_owned(kvx_owned_t *owned)
{
	kvx_owned_t *next;

	for (; owned; owned = next) {
		next = owned->next;
		free(owned);
	}
}

/* kvc_config_t.map_device. A cache in host memory cannot be filled from there, and its engine does not ask for that. */
static kvc_status_t map_device(void *ctx, int fd, size_t bytes, void **p_base)
{
	kvx_worker_t *worker = ctx;
	const kvc_status_t status = worker->gpu ? kvx_pool_memory_map(worker, fd, bytes, p_base) : KVC_ERR_UNSUPPORTED;

	if (status != KVC_OK && worker->gpu && !worker->has_refused_device) {
		worker->has_refused_device = 1;
		kv_log(KV_LOG_WARN, "kvx", "a slab of %zu bytes in GPU memory cannot be mapped, loads from it fail: %s",
		       bytes, kvk_gpu_last_error());
	}

	return status;
}

static void unmap_device(void *ctx, void *base, size_t bytes)
{
	(void)bytes;
	kvx_pool_memory_unmap(ctx, base);
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
		.map_device = map_device,
		.unmap_device = unmap_device,
	};
	const kvc_status_t status = kvc_attach(&kvc, &worker->kvc);

	return status == KVC_OK || status == KVC_ERR_NOMEM ? status : reject_config(kvc_last_error());
}

kvc_status_t kvx_worker_open(const kvx_worker_config_t *config, kvx_worker_t **p_worker)
{
	const char *why = check_config(config);
	kvx_worker_t *worker;
	kvc_status_t status;

	if (why) {
		return reject_config(why);
	}
	worker = calloc(1, sizeof *worker);
	if (!worker) {
		return KVC_ERR_NOMEM;
	}
	worker->event_fd = -1;
	kvx_cpus_read_allowed(&worker->cpus);
	worker->loads_end = &worker->loads;
	worker->saves_end = &worker->saves;
	worker->deferred_end = &worker->deferred;
	worker->run_end = &worker->run;
	worker->space_top = 1;
	atomic_store(&worker->self_test_status, KVC_PENDING);

	status = apply_config(worker, config);
	status = status == KVC_OK ? kvx_report_reserve(worker) : status;
	if (status == KVC_OK && config->memory == KVX_MEMORY_CUDA) {
		status = kvx_gpu_open(worker, config, &why_text);
	}
	status = status == KVC_OK ? attach(worker, config) : status;
	status = status == KVC_OK ? kvx_transfer_start(worker) : status;
	if (status != KVC_OK) {
		kvx_worker_close(worker);
		return status;
	}
	*p_worker = worker;

	return KVC_OK;
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
	free_owned(worker->owned);
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

kvc_status_t kvx_worker_digest(kvx_worker_t *worker, const kvk_range_t *ranges, uint32_t count,
			       uint8_t (*digests)[KVK_RANGE_DIGEST_BYTES])
{
	kvc_status_t status;

	if (worker->gpu) {
		status = (kvc_status_t)kvk_gpu_digest(worker->gpu->gpu, ranges, count,
						      atomic_load(&worker->gpu->compute), digests);
		why_text = kvk_gpu_last_error();
	} else {
		status = kvx_digest_memory(ranges, count, 0, digests);
		why_text = status == KVC_ERR_NOMEM ? "out of memory" : "a range ends beyond all memory";
	}

	return status;
}

kvc_status_t kvx_worker_get_stats(const kvx_worker_t *worker, kvx_worker_stats_t *stats)
{
	kvx_worker_stats_t all = {0};

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

	return kv_struct_fill(stats, &all, sizeof all) ? KVC_OK : KVC_ERR_ARG;
}
