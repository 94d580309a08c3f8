/* libkvx in one process: attach, poll, and looking in. */
#include "inproc/buffer.h"
#include "inproc/error.h"
#include "inproc/job.h"

#include "kv/env.h"
#include "kv/shm.h"
#include "kv/struct.h"
#include "kv/system.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SLICE_US 1000u             /* longest single wait: either half may have news */
#define BRIEF_NS UINT64_C(2000000) /* wait for loads just begun: a hit in memory is copied in less time than a step */

/* ---- configuration ---------------------------------------------------------------------------- */

/* What the halves do not check, or would take for something else: a rank may hold a part of a block, and the weights
 * may be named later. */
static kvc_status_t check_config(const kvx_config_t *config)
{
	if (!config || config->struct_size < offsetof(kvx_config_t, buffer_bytes)) {
		return kvx_refuse("struct_size is not that of kvx_config_t");
	}
	if (config->roles == 0 || config->roles > KVX_BOTH) {
		return kvx_refuse("roles is neither KVX_PRODUCER nor KVX_CONSUMER nor both");
	}
	if (!config->identity || !config->layout || !config->paged) {
		return kvx_refuse("identity, layout and paged are required");
	}
	if (config->identity->struct_size < sizeof *config->identity || !config->identity->weights) {
		return kvx_refuse("struct_size is not that of kvc_identity_t, or the weights have no name");
	}

	return KVC_OK;
}

/* The name and the secret of the instance are made here: this process has all its members. */
static kvc_status_t open_halves(kvx_t *kvx, const kvx_config_t *config)
{
	kvc_identity_t identity = *config->identity;
	char layout[KVK_LAYOUT_TEXT_MAX], instance[32];
	uint8_t secret[32];
	uint64_t number;
	const kvx_worker_config_t worker = {
		.struct_size = sizeof worker,
		.socket = config->socket,
		.instance = instance,
		.secret = secret,
		.secret_len = sizeof secret,
		.program = config->program,
		.identity = &identity,
		.threads = 1, /* all loads are asynchronous: the transfer thread copies them */
	};
	const kvx_scheduler_config_t scheduler = {
		.struct_size = sizeof scheduler,
		.socket = config->socket,
		.instance = instance,
		.secret = secret,
		.secret_len = sizeof secret,
		.program = config->program,
		.identity = &identity,
		.layouts = config->layout,
		.writers = kvx->ranks.saved,
		.writer_count = kvx->ranks.count,
		.max_blocks = config->paged->blocks,
		.mode = KVX_LOAD_ASYNC,
		.load_ms = kvx->load_ms,
		.saves_all = 1, /* its caller waits for each */
	};
	kvc_status_t status;

	if (kvk_layout_format(config->layout, layout, sizeof layout) != KV_OK) {
		return kvx_refuse("the layout has no canonical text");
	}
	if (kv_random_check(&kv_env_posix) != KV_OK) {
		return KVC_ERR_REFUSED;
	}
	identity.struct_size = sizeof identity;
	identity.hash_tokens = config->layout->block_tokens;
	identity.groups = NULL;
	identity.layout = layout;
	kv_random(&kv_env_posix, &number, sizeof number);
	kv_random(&kv_env_posix, secret, sizeof secret);
	(void)snprintf(instance, sizeof instance, "kvx-%016" PRIx64, number);
	status = kvx_ranks_open(&kvx->ranks, config, &worker);
	if (status != KVC_OK) {
		return status;
	}
	status = kvx_scheduler_open(&scheduler, &kvx->scheduler);

	return status == KVC_ERR_ARG ? kvx_refuse("%s", kvx_scheduler_last_error()) : status;
}

/* ---- attach and detach ----------------------------------------------------------------------- */

static uint32_t or_default(uint32_t value, uint32_t instead)
{
	return value ? value : instead;
}

static kvc_status_t init_kvx(kvx_t *kvx, const kvx_config_t *config)
{
	kvk_geometry_t geometry;
	kvc_status_t status;

	kvx->roles = config->roles;
	kvx->load_ms = or_default(config->load_ms, KVX_LOAD_MS);
	kvx->save_ms = or_default(config->save_ms, KVX_SAVE_MS);
	kvx->block_tokens = config->layout->block_tokens;
	kvx->max_blocks = config->paged->blocks;
	kvx->max_buffered_bytes = config->buffer_bytes ? config->buffer_bytes : KVX_BUFFER_BYTES;
	kvx->failed = calloc(kvx->max_blocks / 64u + 1u, sizeof *kvx->failed);
	if (!kvx->failed) {
		return KVC_ERR_NOMEM;
	}
	status = kvx_ranks_divide(&kvx->ranks, config);

	status = status == KVC_OK ? open_halves(kvx, config) : status;
	if (status == KVC_OK) {
		kvk_layout_geometry(config->layout, &geometry);
		kvx->block_bytes = geometry.block_bytes;
	}

	return status;
}

kvc_status_t kvx_attach(const kvx_config_t *given, kvx_t **p_kvx)
{
	const uint64_t start = kvx_now_ns();
	kvc_status_t status = check_config(given);
	kvx_config_t config;
	uint64_t wait_ns;
	kvx_t *kvx;

	if (status != KVC_OK) {
		return status;
	}
	kv_struct_read(&config, given, sizeof config);
	kvx = calloc(1, sizeof *kvx);
	if (!kvx) {
		return KVC_ERR_NOMEM;
	}
	status = init_kvx(kvx, &config);
	if (status != KVC_OK) {
		kvx_detach(kvx);
		return status;
	}

	wait_ns = config.attach_ms == UINT32_MAX ? 0 : or_default(config.attach_ms, KVX_ATTACH_MS) * UINT64_C(1000000);
	do {
		(void)kvx_poll(kvx, 1);
	} while (!kvx_is_ready(kvx) && kvx_scheduler_wait(kvx->scheduler, 0) && kvx_now_ns() - start < wait_ns);
	*p_kvx = kvx;

	return KVC_OK;
}

static void free_jobs(kvx_job_t *job)
{
	while (job) {
		kvx_job_t *next = job->next;

		free(job);
		job = next;
	}
}

void kvx_detach(kvx_t *kvx)
{
	if (!kvx) {
		return;
	}

	kvx_buffer_free(kvx);
	kvx_ranks_close(&kvx->ranks); /* no block is touched from here on */
	kvx_scheduler_close(kvx->scheduler);
	kvx_recvs_free(kvx);
	kvx_sends_free(kvx);
	free_jobs(kvx->loads);
	free_jobs(kvx->sends);
	free_jobs(kvx->saves);
	free(kvx->failed);
	free(kvx);
}

/* ---- poll ------------------------------------------------------------------------------------ */

/* One step of both halves. */
static void run_step(kvx_t *kvx)
{
	uint64_t now;

	if (kvx->handovers > 0) { /* what came while the engine was busy is not late */
		(void)kvx_scheduler_wait(kvx->scheduler, 0);
	}
	now = kvx_now_ns();
	kvx_recvs_advance(kvx, now);
	kvx_loads_advance(kvx, now);
	kvx_saves_advance(kvx, now);
	kvx_buffer_poll(kvx);
	kvx_sends_advance(kvx, now);
	kvx_run_message(kvx);
	kvx_loads_collect(kvx);
}

/* Loads are copied by the worker half; everything else waits for the daemon, which the scheduler half hears. */
static void wait_for_news(kvx_t *kvx, uint64_t ns)
{
	const uint32_t us = ns / 1000u < SLICE_US ? (uint32_t)(ns / 1000u) : SLICE_US;

	if (kvx->copying > 0) {
		kvx_ranks_wait(&kvx->ranks, us);
	} else {
		(void)kvx_scheduler_wait(kvx->scheduler, us);
	}
}

uint32_t kvx_poll(kvx_t *kvx, uint32_t timeout_ms)
{
	const uint64_t start = kvx_now_ns();
	uint64_t until = start + timeout_ms * UINT64_C(1000000), now;
	uint32_t before;
	int begun;

	run_step(kvx);
	before = kvx->pending;
	begun = kvx->begun;
	kvx->begun = 0;
	if (begun && until < start + BRIEF_NS) {
		until = start + BRIEF_NS;
	}
	for (now = start; now < until && (begun ? kvx->copying > 0 : kvx->pending >= before); now = kvx_now_ns()) {
		wait_for_news(kvx, until - now);
		run_step(kvx);
	}

	return kvx->pending;
}

/* ---- looking in ------------------------------------------------------------------------------ */

void kvx_record_request(kvx_t *kvx, const kvx_request_t *request)
{
	kvx_load_result_t load = {.why = KV_WHY_NO_DAEMON};
	kvc_report_t report;

	if (request->struct_size < sizeof *request) {
		return;
	}
	if (request->load && kv_struct_is_set(request->load)) {
		kv_struct_read(&load, request->load, sizeof load);
	}
	report = (kvc_report_t){
		.struct_size = sizeof report,
		.request = request->request,
		.session = request->session,
		.query_tokens = request->prompt_tokens,
		.hit_cpu_tokens = load.cpu_tokens,
		.hit_disk_tokens = load.disk_tokens,
		.hit_engine_tokens = request->engine_tokens,
		.output_tokens = request->output_tokens,
		.why = load.why,
		.turn = request->turn,
		.first_missing = load.first_missing,
		.match_ns = load.match_ns,
		.load_ns = load.load_ns,
	};
	kvx_scheduler_record(kvx->scheduler, NULL, &report);
}

kvc_status_t kvx_get_stats(const kvx_t *kvx, kvx_stats_t *stats)
{
	kvx_scheduler_stats_t scheduler = {.struct_size = sizeof scheduler};
	kvx_worker_stats_t worker;
	kvx_stats_t all = kvx->stats;

	kvx_scheduler_get_stats(kvx->scheduler, &scheduler);
	kvx_ranks_get_stats(&kvx->ranks, &worker);
	all.bytes_loaded = worker.load_bytes;
	all.blocks_saved = scheduler.save_done;
	all.bytes_saved = worker.save_bytes;
	all.self_tests = worker.self_tests;
	all.self_test_failures = worker.self_test_failures;
	all.attaches = scheduler.attaches;

	return kv_struct_fill(stats, &all, sizeof all) ? KVC_OK : kvx_refuse("kvx_get_stats: struct_size is not set");
}
