/* The engine: one list of requests, one step at a time. */
#include "impl.h"

#include "kv/env.h"

#include <stdlib.h>
#include <string.h>

/* Its place among the ranks; one that is alone makes a group of its own. */
static kv_status_t create_rank(kve_engine_t *engine)
{
	const kve_group_config_t alone = {
		.model = &engine->config.model, .devices = engine->config.devices, .max_rows = engine->config.max_rows};
	kve_group_t *group = engine->config.group;

	if (!group) {
		const kv_status_t status = kve_group_create(&alone, &engine->own_group);

		if (status != KV_OK) {
			return status;
		}
		group = engine->own_group;
		engine->config.rank = 0;
	}
	engine->config.model = *kve_group_model(group);
	engine->max_rows = kve_group_max_rows(group);
	if (engine->config.max_running > engine->max_rows / 2) {
		return KV_ERR_ARG;
	}

	return kve_rank_create(group, engine->config.rank, &engine->rank);
}

kv_status_t kve_engine_create(const kve_engine_config_t *config, kve_engine_t **p_engine)
{
	kve_engine_t *engine;
	kv_status_t status;

	if (config->max_running == 0 || config->max_running > KVE_MAX_SPANS) {
		return KV_ERR_ARG;
	}
	engine = calloc(1, sizeof *engine);
	if (!engine) {
		return KV_ERR_NOMEM;
	}

	engine->config = *config;
	status = create_rank(engine);
	if (status == KV_OK) {
		status = kve_rank_open_cache(engine->rank, config->cache_blocks, config->ranks ? config->ranks : 1,
					     &engine->cache);
	}
	if (status == KV_OK && config->store) {
		status = kve_store_attach(engine);
	}
	if (status != KV_OK) {
		goto err_engine;
	}
	*p_engine = engine;

	return KV_OK;

err_engine:
	kve_engine_destroy(engine);
	return status;
}

void kve_engine_destroy(kve_engine_t *engine)
{
	if (!engine) {
		return;
	}

	while (engine->jobs) {
		kve_job_t *job = engine->jobs;

		engine->jobs = job->next;
		kve_job_abort(engine, job);
		kve_job_destroy(job);
	}
	kvx_detach(engine->kvx);
	kve_rank_close_cache(engine->rank, &engine->cache);
	kve_rank_destroy(engine->rank);
	kve_group_destroy(engine->own_group);
	free(engine);
}

static int ask_is_sound(const kve_engine_t *engine, const kve_ask_t *ask)
{
	const kve_config_t *model = &engine->config.model;

	if (ask->n_tokens == 0 || ask->max_new == 0 || ask->n_tokens > model->max_tokens ||
	    ask->max_new > model->max_tokens - ask->n_tokens) {
		return 0;
	}
	if ((uint64_t)ask->n_tokens + ask->max_new > (uint64_t)engine->cache.paged[0].blocks * model->block_tokens) {
		return 0;
	}
	if (ask->handover > KVE_RECV || (ask->transfer && strlen(ask->transfer) > KVC_MAX_TRANSFER)) {
		return 0;
	}
	for (uint32_t i = 0; i < ask->n_tokens; i++) {
		if (ask->tokens[i] >= model->vocab) {
			return 0;
		}
	}

	return 1;
}

kv_status_t kve_engine_submit(kve_engine_t *engine, const kve_ask_t *ask, kve_request_t **p_request)
{
	kve_job_t **link = &engine->jobs;
	kve_job_t *job;

	if (!ask_is_sound(engine, ask)) {
		return KV_ERR_ARG;
	}
	job = kve_job_create(engine, ask);
	if (!job) {
		return KV_ERR_NOMEM;
	}

	while (*link) {
		link = &(*link)->next;
	}
	*link = job;
	*p_request = &job->request;

	return KV_OK;
}

void kve_engine_release(kve_engine_t *engine, kve_request_t *request)
{
	kve_job_t *job = (kve_job_t *)request;

	job->released = 1;
	if (request->state != KVE_DONE) {
		kve_job_abort(engine, job);
	}
}

/* ---- one step -------------------------------------------------------------------------------- */

typedef struct batch {
	kve_span_t spans[KVE_MAX_SPANS];
	kve_job_t *jobs[KVE_MAX_SPANS];
	uint32_t n;
	uint32_t rows, max_rows;
	int prefill; /* the prompt of a request is among them */
} batch_t;

/* As many tokens of a request as there are rows left. */
static void add_to_batch(batch_t *batch, kve_job_t *job)
{
	const kve_request_t *r = &job->request;
	const uint32_t left = r->n_tokens - r->n_computed;
	const uint32_t room = batch->n < KVE_MAX_SPANS ? batch->max_rows - batch->rows : 0;
	const uint32_t n = left < room ? left : room;

	if (n == 0) {
		return;
	}
	batch->spans[batch->n] = (kve_span_t){
		.tokens = r->tokens + r->n_computed,
		.n = n,
		.start = r->n_computed,
		.blocks = job->blocks,
		.logits = n == left ? job->logits : NULL,
		.chosen = n == left ? &job->chosen : NULL,
	};
	batch->prefill |= r->state == KVE_PREFILL;
	batch->jobs[batch->n++] = job;
	batch->rows += n;
}

/* Decodes go first, a token each; the rows that are left go to prefill, in order of arrival. */
static void fill_batch(const kve_engine_t *engine, batch_t *batch)
{
	static const kve_state_t order[] = {KVE_DECODE, KVE_PREFILL};

	batch->n = batch->rows = 0;
	batch->max_rows = engine->max_rows;
	batch->prefill = 0;
	for (size_t i = 0; i < KV_COUNT_OF(order); i++) {
		for (kve_job_t *job = engine->jobs; job; job = job->next) {
			if (job->request.state == order[i]) {
				add_to_batch(batch, job);
			}
		}
	}
}

static kv_status_t compute(kve_engine_t *engine, const batch_t *batch, const kve_dbo_step_t *dbo)
{
	const kv_status_t status = kve_rank_forward(engine->rank, &engine->cache, batch->spans, batch->n, dbo);

	kv_assert(status == KV_OK || status == KV_ERR_TIMEOUT || status == KV_ERR_IO);
	for (uint32_t i = 0; i < batch->n && status == KV_OK; i++) {
		kve_job_computed(engine, batch->jobs[i], batch->spans[i].n);
	}

	return status;
}

/* Everything but computing. Returns requests that could compute now. */
static uint32_t advance_jobs(kve_engine_t *engine)
{
	uint32_t computable = 0;
	int full = 0;

	for (kve_job_t *job = engine->jobs; job; job = job->next) {
		/* No request overtakes one that waits for room: small ones could do so for ever. */
		if (job->request.state == KVE_WAITING && !full) {
			kve_job_admit(engine, job);
			full = job->request.state == KVE_WAITING;
		}
		if (job->request.state == KVE_LOADING) {
			kve_job_loaded(engine, job);
		}
		kve_job_tend(engine, job);
		computable += job->request.state == KVE_PREFILL || job->request.state == KVE_DECODE;
	}

	return computable;
}

static uint32_t sweep_jobs(kve_engine_t *engine)
{
	kve_job_t **link = &engine->jobs;
	uint32_t unfinished = 0;

	while (*link) {
		kve_job_t *job = *link;

		unfinished += job->request.state != KVE_DONE;
		if (job->released && job->closed) {
			*link = job->next;
			kve_job_destroy(job);
		} else {
			link = &job->next;
		}
	}

	return unfinished;
}

/* Loads, saves and admission: what comes before a step. Returns requests that are not DONE. */
static uint32_t prepare_step(kve_engine_t *engine)
{
	const uint32_t computable = advance_jobs(engine);
	uint32_t unfinished = 0;

	if (engine->kvx) {
		(void)kvx_poll(engine->kvx, computable || engine->is_computing ? 0 : 1);
		(void)advance_jobs(engine);
	}
	for (const kve_job_t *job = engine->jobs; job; job = job->next) {
		unfinished += job->request.state != KVE_DONE;
	}

	return unfinished;
}

kv_status_t kve_engine_step(kve_engine_t *engine, uint32_t *p_unfinished)
{
	kve_step_count_t own = {.unfinished = prepare_step(engine)};
	uint32_t unfinished;
	kv_status_t status;
	kve_step_t step;
	batch_t batch;

	fill_batch(engine, &batch);
	own.count = (kve_dbo_count_t){.tokens = batch.rows, .prefill = batch.prefill};
	status = kve_rank_agree(engine->rank, &own, &step);
	if (status != KV_OK) {
		return status;
	}
	if (step.tokens > 0) {
		status = compute(engine, &batch, &step.dbo);
	}
	engine->is_computing = step.tokens > 0;
	unfinished = sweep_jobs(engine);
	if (p_unfinished) {
		*p_unfinished = engine->own_group ? unfinished : step.unfinished;
	}

	return status;
}

void kve_engine_abandon(kve_engine_t *engine)
{
	kve_rank_abandon(engine->rank);
}

uint32_t kve_engine_lost(const kve_engine_t *engine)
{
	return kve_rank_lost(engine->rank);
}

kve_rank_stats_t kve_engine_rank_stats(const kve_engine_t *engine)
{
	return kve_rank_stats(engine->rank);
}

uint32_t kve_engine_flush(kve_engine_t *engine, uint32_t timeout_ms)
{
	const uint64_t deadline = kv_now_ns(&kv_env_posix) + (uint64_t)timeout_ms * 1000000u;
	uint32_t open;

	do {
		if (engine->kvx) {
			(void)kvx_poll(engine->kvx, 1);
		}
		(void)advance_jobs(engine);
		open = 0;
		for (const kve_job_t *job = engine->jobs; job; job = job->next) {
			open += job->save || job->send || (job->request.state == KVE_DONE && !job->closed);
		}
		(void)sweep_jobs(engine);
	} while (open > 0 && kv_now_ns(&kv_env_posix) < deadline);

	return open;
}

kvx_t *kve_engine_store(kve_engine_t *engine)
{
	return engine->kvx;
}

uint32_t kve_engine_free_blocks(const kve_engine_t *engine)
{
	return engine->cache.free_count;
}
