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
	job->logits = ask->log_probabilities ? calloc(model->vocab, sizeof(float)) : NULL;
	job->request.log_probabilities = calloc(ask->max_new, sizeof(double));
	if (!job->request.tokens || !job->blocks || (ask->log_probabilities && !job->logits) ||
	    !job->request.log_probabilities) {
		kve_job_destroy(job);
		return NULL;
	}

	memcpy(job->request.tokens, ask->tokens, ask->n_tokens * sizeof(uint32_t));
	if (ask->transfer) {
		memcpy(job->transfer, ask->transfer, strlen(ask->transfer));
	}
	job->handover = engine->kvx ? ask->handover : KVE_KEEP;
	job->handover_ms = ask->handover_ms;
	job->request.state = KVE_WAITING;
	job->request.rank = engine->config.rank;
	job->request.id = ++engine->next_id;
	job->request.session = ask->session;
	job->request.turn = ask->turn;
	job->request.n_prompt = ask->n_tokens;
	job->request.n_tokens = ask->n_tokens;
	job->request.max_new = ask->max_new;
	job->request.submit_ns = now_ns();
	job->request.load.struct_size = sizeof job->request.load;
	job->request.send.struct_size = sizeof job->request.send;
	job->request.recv.struct_size = sizeof job->request.recv;

	return job;
}

void kve_job_destroy(kve_job_t *job)
{
	free(job->request.log_probabilities);
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

static const char *transfer_of(const kve_job_t *job)
{
	return job->transfer[0] ? job->transfer : NULL;
}

/* PENDING: what is stored, or sent, is on its way into the blocks. */
static kvc_status_t start_load(kve_engine_t *engine, kve_job_t *job)
{
	kve_request_t *request = &job->request;
	kvx_prefix_t prefix = prefix_of(job, request->n_prompt);
	kvc_status_t status = KVC_MISS;

	if (job->handover == KVE_RECV) {
		prefix.deadline_ms = job->handover_ms;
		prefix.peer = engine->config.peer;
		status = kvx_recv(engine->kvx, transfer_of(job), &prefix, &job->recv, &request->recv);
	} else if (request->n_prompt > engine->config.model.block_tokens) {
		prefix.n_tokens--; /* the last prompt token is always computed: its logits choose the first new one */
		status = kvx_load_prefix(engine->kvx, &prefix, &job->load, &request->load);
	}

	return status;
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
	request->state = engine->kvx && start_load(engine, job) == KVC_PENDING ? KVE_LOADING : KVE_PREFILL;
}

/* What travels with a prompt: the token that follows it. */
typedef struct tail {
	uint32_t token;
	uint32_t n_prompt;
	double log_probability;
} tail_t;

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

/* The next token of the sequence. */
static void add_token(kve_engine_t *engine, kve_job_t *job, uint32_t token, double log_probability)
{
	kve_request_t *r = &job->request;

	if (r->n_tokens == r->n_prompt) {
		r->state = KVE_DECODE;
		r->first_token_ns = now_ns();
	}
	r->log_probabilities[r->n_tokens - r->n_prompt] = log_probability;
	r->tokens[r->n_tokens++] = token;
	if (r->n_tokens == r->n_prompt + r->max_new) {
		finish_job(engine, job);
	}
}

/* With all of the prompt comes the first token. A tail that does not fit is none: what it would say is computed. */
static void end_receive(kve_engine_t *engine, kve_job_t *job)
{
	kve_request_t *r = &job->request;
	tail_t tail = {.n_prompt = 0};

	if (r->recv.tail && r->recv.tail_len == sizeof tail) {
		memcpy(&tail, r->recv.tail, sizeof tail);
	}
	kvx_recv_end(job->recv);
	job->recv = NULL;
	r->recv.tail = NULL;
	r->state = KVE_PREFILL;
	r->n_computed = r->recv.tokens;
	if (r->n_computed < r->n_prompt) {
		return;
	}
	if (tail.n_prompt == r->n_prompt && tail.token < engine->config.model.vocab) {
		add_token(engine, job, tail.token, tail.log_probability);
	} else {
		r->n_computed = r->n_prompt - 1;
	}
}

void kve_job_loaded(kve_engine_t *engine, kve_job_t *job)
{
	if (job->recv) {
		if (kvx_recv_state(job->recv, &job->request.recv) != KVC_PENDING) {
			end_receive(engine, job);
		}
		return;
	}
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

/* The prompt as far as it is computed; `tail` NULL: more follows. What cannot be sent is saved at least. */
static void send_chunk(kve_engine_t *engine, kve_job_t *job, const tail_t *tail)
{
	const kve_request_t *r = &job->request;
	const kvx_chunk_t chunk = {
		.struct_size = sizeof chunk,
		.transfer = transfer_of(job),
		.tokens = r->tokens,
		.n_tokens = r->n_prompt,
		.computed = r->n_computed,
		.blocks = job->blocks,
		.last = tail != NULL,
		.tail = tail,
		.tail_len = tail ? (uint32_t)sizeof *tail : 0,
		.deadline_ms = job->handover_ms,
	};

	if (kvx_send(engine->kvx, &chunk, &job->send) != KVC_PENDING) {
		job->handover = KVE_KEEP;
		if (tail) {
			start_save(engine, job, r->n_prompt);
		}
	}
}

/* The prompt is in the cache, and the token that follows it is known. */
static void end_prefill(kve_engine_t *engine, kve_job_t *job, uint32_t token, double log_probability)
{
	const tail_t tail = {token, job->request.n_prompt, log_probability};

	if (job->handover == KVE_SEND || job->handover == KVE_SEND_WHOLE) {
		send_chunk(engine, job, &tail);
	} else {
		start_save(engine, job, job->request.n_prompt);
	}
}

void kve_job_computed(kve_engine_t *engine, kve_job_t *job, uint32_t n)
{
	kve_request_t *r = &job->request;
	double log_probability = 0.0;

	r->n_computed += n;
	r->prompt_computed += r->state == KVE_PREFILL ? n : 0;
	if (r->n_computed < r->n_tokens) {
		if (job->handover == KVE_SEND) {
			send_chunk(engine, job, NULL);
		}
		return;
	}

	if (job->logits) {
		log_probability = kve_log_probability(job->logits, engine->config.model.vocab, job->chosen);
	}
	if (r->state == KVE_PREFILL) {
		end_prefill(engine, job, job->chosen, log_probability);
	}
	add_token(engine, job, job->chosen, log_probability);
}

static void give_blocks(kve_engine_t *engine, kve_job_t *job)
{
	kve_cache_give(&engine->cache, job->blocks, job->n_blocks);
	job->n_blocks = 0;
}

void kve_job_tend(kve_engine_t *engine, kve_job_t *job)
{
	kvx_save_result_t result = {.struct_size = sizeof result, .status = KVC_OK, .copied = 1};

	if (job->send && kvx_send_state(job->send, &job->request.send) != KVC_PENDING) {
		kvx_send_end(job->send);
		job->send = NULL;
	}
	if (job->save && kvx_save_state(job->save, &result) != KVC_PENDING) {
		kvx_save_end(job->save);
		job->save = NULL;
	}
	if (job->request.state != KVE_DONE || job->closed) {
		return;
	}

	if (!job->last_save && !job->save && !job->send) {
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
	kvx_recv_end(job->recv);
	kvx_save_end(job->save);
	kvx_send_end(job->send);
	job->load = NULL;
	job->recv = NULL;
	job->save = NULL;
	job->send = NULL;
	if (job->n_blocks > 0) {
		give_blocks(engine, job);
	}
	engine->running -= job->request.state != KVE_WAITING && job->request.state != KVE_DONE;
	job->request.state = KVE_DONE;
	job->closed = 1;
}
