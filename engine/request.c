/* The life of one request. */
#include "impl.h"

#include "kv/env.h"

#include <stdlib.h>
#include <string.h>

static uint64_t now_ns(void)
{
	return kv_now_ns(&kv_env_posix);
}

kve_job_t *kve_job_create(kve_engine_t *engine, const kve_ask_t *ask)
{
	const kve_config_t *model = &engine->config.model;
	const uint32_t room = ask->n_tokens + ask->max_new;
	kve_job_t *job = calloc(1, sizeof *job);

	if (!job) {
		return NULL;
	}
	job->request.tokens = calloc(room, sizeof(uint32_t));
	job->blocks = calloc(room / model->block_tokens + 1, sizeof(uint32_t));
	job->logits = calloc(model->vocab, sizeof(float));
	if (!job->request.tokens || !job->blocks || !job->logits) {
		kve_job_destroy(job);
		return NULL;
	}

	memcpy(job->request.tokens, ask->tokens, ask->n_tokens * sizeof(uint32_t));
	job->request.state = KVE_WAITING;
	job->request.id = ++engine->next_id;
	job->request.session = ask->session;
	job->request.turn = ask->turn;
	job->request.n_prompt = ask->n_tokens;
	job->request.n_tokens = ask->n_tokens;
	job->request.max_new = ask->max_new;
	job->request.submit_ns = now_ns();

	return job;
}

void kve_job_destroy(kve_job_t *job)
{
	free(job->logits);
	free(job->blocks);
	free(job->request.tokens);
	free(job);
}

/* The first n tokens and where they lie. */
static kvx_prefix_t prefix_of(const kve_job_t *job, uint32_t n)
{
	return (kvx_prefix_t){
		.struct_size = sizeof(kvx_prefix_t),
		.tokens = job->request.tokens,
		.n_tokens = n,
		.blocks = job->blocks,
	};
}

void kve_job_admit(kve_engine_t *engine, kve_job_t *job)
{
	kve_request_t *request = &job->request;
	const uint32_t block_tokens = engine->config.model.block_tokens;
	const uint32_t need = (request->n_prompt + request->max_new + block_tokens - 1) / block_tokens;

	if (engine->running >= engine->config.max_running ||
	    kve_cache_take(&engine->cache, need, job->blocks) != KV_OK) {
		return;
	}
	job->n_blocks = need;
	engine->running++;
	request->state = KVE_PREFILL;

	/* The last prompt token is always computed: its logits choose the first new one. */
	if (engine->kvx && request->n_prompt > block_tokens) {
		const kvx_prefix_t prefix = prefix_of(job, request->n_prompt - 1);

		if (kvx_load_prefix(engine->kvx, &prefix, &job->load, &request->load) == KVC_PENDING) {
			request->state = KVE_LOADING;
		}
	}
}

void kve_job_loaded(kve_engine_t *engine, kve_job_t *job)
{
	(void)engine;
	if (kvx_load_state(job->load, &job->request.load) == KVC_PENDING) {
		return;
	}

	kvx_load_end(job->load);
	job->load = NULL;
	job->request.n_computed = job->request.load.tokens;
	job->request.state = KVE_PREFILL;
}

/* Save the whole blocks of the first n tokens. Not stored is as good as stored: the engine goes on. */
static void start_save(kve_engine_t *engine, kve_job_t *job, uint32_t n)
{
	const kvx_prefix_t prefix = prefix_of(job, n);

	if (engine->kvx && n >= engine->config.model.block_tokens) {
		(void)kvx_save_prefix(engine->kvx, &prefix, &job->save);
	}
}

static void finish_job(kve_engine_t *engine, kve_job_t *job)
{
	const kve_request_t *r = &job->request;

	job->request.state = KVE_DONE;
	job->request.done_ns = now_ns();
	engine->running--;
	if (engine->kvx) {
		const kvx_request_t report = {
			.struct_size = sizeof report,
			.request = r->id,
			.session = r->session,
			.turn = r->turn,
			.prompt_tokens = r->n_prompt,
			.output_tokens = r->n_tokens - r->n_prompt,
			.load = &r->load,
		};

		kvx_record_request(engine->kvx, &report);
	}
}

void kve_job_computed(kve_engine_t *engine, kve_job_t *job, uint32_t n)
{
	kve_request_t *r = &job->request;

	r->n_computed += n;
	if (r->n_computed < r->n_tokens) {
		return;
	}

	if (r->state == KVE_PREFILL) {
		r->state = KVE_DECODE;
		r->first_token_ns = now_ns();
		start_save(engine, job, r->n_prompt);
	}
	r->tokens[r->n_tokens++] = kve_argmax(job->logits, engine->config.model.vocab);
	if (r->n_tokens == r->n_prompt + r->max_new) {
		finish_job(engine, job);
	}
}

static void give_blocks(kve_engine_t *engine, kve_job_t *job)
{
	kve_cache_give(&engine->cache, job->blocks, job->n_blocks);
	job->n_blocks = 0;
}

void kve_job_tend(kve_engine_t *engine, kve_job_t *job)
{
	kvx_save_result_t result = {.status = KVC_OK, .copied = 1};

	if (job->save && kvx_save_state(job->save, &result) != KVC_PENDING) {
		kvx_save_end(job->save);
		job->save = NULL;
	}
	if (job->request.state != KVE_DONE || job->closed) {
		return;
	}

	if (!job->last_save && !job->save) {
		job->last_save = 1;
		start_save(engine, job, job->request.n_computed);
		result.copied = !job->save;
	}
	if (job->last_save && result.copied && job->n_blocks > 0) {
		give_blocks(engine, job);
	}
	job->closed = job->last_save && !job->save;
}

void kve_job_abort(kve_engine_t *engine, kve_job_t *job)
{
	kvx_load_end(job->load);
	kvx_save_end(job->save);
	job->load = NULL;
	job->save = NULL;
	if (job->n_blocks > 0) {
		give_blocks(engine, job);
	}
	engine->running -= job->request.state != KVE_WAITING && job->request.state != KVE_DONE;
	job->request.state = KVE_DONE;
	job->closed = 1;
}
