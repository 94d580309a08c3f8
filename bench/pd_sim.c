/* Prefill and decode engines that serve a request trace, in virtual time. */
#include "pd_sim.h"

#include "bench.h"

#include <stdlib.h>
#include <string.h>

#define MAX_ENGINES  16u
#define MAX_BATCH    256u /* requests that decode on one engine at a time */
#define MAX_RUNNING  4u   /* as the proxy's engine.prefill_running and engine.prefill_ahead */
#define AHEAD_NS     50e6
#define RUNNING_NS   5e6 /* cost.running */
#define LOCAL_FACTOR 2   /* cost.local */
#define NONE         UINT32_MAX

typedef enum event_kind {
	ARRIVED,      /* a request, at the proxy */
	PROMPT_READY, /* a request's prompt can be computed: its hits are loaded */
	HANDED_OVER,  /* a request's KV is at its decode engine */
	STEP_ENDED,   /* of an engine */
} event_kind_t;

typedef struct event {
	double at;
	event_kind_t kind;
	uint32_t index;
} event_t;

typedef struct request {
	uint32_t tokens, outputs, computed, produced;
	uint32_t chunk;           /* tokens in the step under way */
	uint32_t prefill, decode; /* engines; prefill NONE: the decode engine computes the prompt */
	uint32_t next;            /* in its engine's prompts, those waiting, or the proxy's queue */
	double arrived, queued, first, ended, work_ns, rank;
	int is_handed_over;
} request_t;

typedef struct engine {
	uint32_t first_prompt, last_prompt;
	uint32_t batch[MAX_BATCH], batch_n;
	uint32_t first_waiting, last_waiting; /* to decode, without a place in the batch */
	uint64_t context;                     /* tokens of the batch */
	uint32_t running;
	double backlog_ns;
	int is_busy;
} engine_t;

/* A block of the pool, in the order of use. */
typedef struct block {
	uint32_t newer, older;
	int is_there;
} block_t;

typedef struct sim {
	const trace_t *trace;
	const pd_model_t *model;
	const pd_setup_t *setup;
	event_t *heap;
	uint32_t heap_n;
	request_t *requests;
	engine_t engines[MAX_ENGINES]; /* prefill engines first */
	uint32_t queue_first;
	double queue_ns, now;
	block_t *blocks; /* by id; the last one is the list's head */
	uint32_t block_ids, block_n;
} sim_t;

kvp_costs_t pd_costs(const pd_model_t *model)
{
	return (kvp_costs_t){.fixed_ns = model->step_ns + model->request_ns,
			     .token_ns = model->token_ns,
			     .pair_ns = model->pair_ns,
			     .handover_ns = model->handover_ns,
			     .transfer_ns = model->transfer_ns,
			     .local_factor = LOCAL_FACTOR,
			     .running_ns = RUNNING_NS};
}

/* ---- events ---------------------------------------------------------------------------------- */

static void push_event(sim_t *sim, double at, event_kind_t kind, uint32_t index)
{
	uint32_t i = sim->heap_n++;

	while (i > 0 && sim->heap[(i - 1) / 2].at > at) {
		sim->heap[i] = sim->heap[(i - 1) / 2];
		i = (i - 1) / 2;
	}
	sim->heap[i] = (event_t){at, kind, index};
}

static event_t pop_event(sim_t *sim)
{
	const event_t top = sim->heap[0], last = sim->heap[--sim->heap_n];
	uint32_t i = 0;

	for (;;) {
		uint32_t child = 2 * i + 1;

		child += child + 1 < sim->heap_n && sim->heap[child + 1].at < sim->heap[child].at;
		if (child >= sim->heap_n || sim->heap[child].at >= last.at) {
			break;
		}
		sim->heap[i] = sim->heap[child];
		i = child;
	}
	sim->heap[i] = last;

	return top;
}

/* ---- the pool -------------------------------------------------------------------------------- */

static void unlink_block(sim_t *sim, uint32_t id)
{
	block_t *block = &sim->blocks[id];

	sim->blocks[block->newer].older = block->older;
	sim->blocks[block->older].newer = block->newer;
}

static void use_block(sim_t *sim, uint32_t id)
{
	const uint32_t head = sim->block_ids;
	block_t *block = &sim->blocks[id];

	if (block->is_there) {
		unlink_block(sim, id);
	} else if (sim->block_n == sim->model->pool_blocks) {
		uint32_t oldest = sim->blocks[head].newer;

		unlink_block(sim, oldest);
		sim->blocks[oldest].is_there = 0;
	} else {
		sim->block_n++;
	}
	block->is_there = 1;
	block->newer = head;
	block->older = sim->blocks[head].older;
	sim->blocks[block->older].newer = id;
	sim->blocks[head].older = id;
}

static uint32_t find_hit(sim_t *sim, uint32_t index)
{
	const trace_request_t *request = &sim->trace->requests[index];
	uint32_t n = 0;
	uint64_t tokens;

	while (n < request->count && sim->blocks[sim->trace->ids[request->first + n]].is_there) {
		n++;
	}
	tokens = trace_tokens(request, n);

	return tokens >= request->input_tokens ? request->input_tokens - 1 : (uint32_t)tokens; /* one is computed */
}

static void keep_blocks(sim_t *sim, uint32_t index)
{
	const trace_request_t *request = &sim->trace->requests[index];

	for (uint32_t i = request->count; i-- > 0;) { /* a parent is used after its children */
		use_block(sim, (uint32_t)sim->trace->ids[request->first + i]);
	}
}

/* ---- steps ----------------------------------------------------------------------------------- */

static int is_prefill(const sim_t *sim, const engine_t *engine)
{
	return (uint32_t)(engine - sim->engines) < sim->setup->prefill_n;
}

static void start_step(sim_t *sim, engine_t *engine)
{
	const pd_model_t *model = sim->model;
	uint32_t budget = is_prefill(sim, engine)     ? model->prefill_chunk
			  : sim->setup->prefill_n > 0 ? model->decode_chunk
						      : model->chunk,
		 tokens = engine->batch_n;
	double attention = 0;

	if (engine->is_busy || (engine->batch_n == 0 && engine->first_prompt == NONE)) {
		return;
	}
	for (uint32_t i = engine->first_prompt; i != NONE && budget > 0; i = sim->requests[i].next) {
		request_t *request = &sim->requests[i];
		double before = request->computed, after;

		request->chunk = request->tokens - request->computed;
		request->chunk = request->chunk < budget ? request->chunk : budget;
		budget -= request->chunk;
		tokens += request->chunk;
		after = before + request->chunk;
		attention += model->pair_ns * (after * after - before * before);
	}
	engine->is_busy = 1;
	push_event(
		sim,
		sim->now + model->step_ns + attention + model->kv_ns * (double)engine->context +
			(model->token_ns * tokens > model->weights_ns ? model->token_ns * tokens : model->weights_ns),
		STEP_ENDED, (uint32_t)(engine - sim->engines));
}

static void append(sim_t *sim, uint32_t *p_first, uint32_t *p_last, uint32_t index)
{
	sim->requests[index].next = NONE;
	*(*p_first == NONE ? p_first : &sim->requests[*p_last].next) = index;
	*p_last = index;
}

static void join_batch(sim_t *sim, engine_t *engine, uint32_t index)
{
	if (engine->batch_n == MAX_BATCH) {
		append(sim, &engine->first_waiting, &engine->last_waiting, index);
		return;
	}
	engine->batch[engine->batch_n++] = index;
	engine->context += sim->requests[index].tokens + sim->requests[index].produced;
}

/* One token more of a request. 1: it was the last one. */
static int produce_token(sim_t *sim, engine_t *engine, request_t *request)
{
	if (request->produced++ == 0) {
		request->first = sim->now;
	}
	if (request->produced < request->outputs) {
		return 0;
	}
	request->ended = sim->now;
	engine->running--;

	return 1;
}

static void end_decodes(sim_t *sim, engine_t *engine)
{
	uint32_t kept = 0;

	for (uint32_t i = 0; i < engine->batch_n; i++) {
		request_t *request = &sim->requests[engine->batch[i]];

		engine->context++;
		if (produce_token(sim, engine, request)) {
			engine->context -= request->tokens + request->produced;
		} else {
			engine->batch[kept++] = engine->batch[i];
		}
	}
	engine->batch_n = kept;
	while (engine->first_waiting != NONE && engine->batch_n < MAX_BATCH) {
		uint32_t index = engine->first_waiting;

		engine->first_waiting = sim->requests[index].next;
		join_batch(sim, engine, index);
	}
}

static void end_prompt(sim_t *sim, engine_t *engine, uint32_t index)
{
	request_t *request = &sim->requests[index];

	engine->backlog_ns -= request->work_ns < engine->backlog_ns ? request->work_ns : engine->backlog_ns;
	keep_blocks(sim, index);
	if (request->prefill != NONE) {
		engine->running--;
		push_event(sim, sim->now + sim->model->handover_ns + sim->model->transfer_ns * request->tokens,
			   HANDED_OVER, index);
	} else if (!produce_token(sim, engine, request)) {
		join_batch(sim, engine, index);
	}
}

static void route(sim_t *sim, uint32_t index, int is_head);

/* The first one that waits goes where there is room. */
static void serve_queue(sim_t *sim)
{
	while (sim->queue_first != NONE) {
		uint32_t index = sim->queue_first;

		route(sim, index, 1);
		if (sim->queue_first == index) {
			break;
		}
	}
}

static void end_step(sim_t *sim, engine_t *engine)
{
	engine->is_busy = 0;
	end_decodes(sim, engine);
	for (uint32_t i = engine->first_prompt, next; i != NONE; i = next) {
		request_t *request = &sim->requests[i];

		next = request->next;
		request->computed += request->chunk;
		request->chunk = 0;
		if (request->computed < request->tokens) {
			break; /* the prompts are computed in order */
		}
		engine->first_prompt = next;
		end_prompt(sim, engine, i);
	}
	start_step(sim, engine);
	serve_queue(sim);
}

/* ---- the proxy ------------------------------------------------------------------------------- */

static void leave_queue(sim_t *sim, uint32_t index)
{
	request_t *request = &sim->requests[index];

	sim->queue_first = request->next;
	sim->queue_ns = sim->queue_first == NONE ? 0 : sim->queue_ns - request->work_ns;
}

static void join_queue(sim_t *sim, uint32_t index, double work_ns)
{
	request_t *request = &sim->requests[index];
	uint32_t *p_next = &sim->queue_first;

	request->work_ns = work_ns;
	sim->queue_ns += work_ns;
	request->rank = kvp_queue_rank(request->queued, work_ns);
	while (*p_next != NONE && sim->requests[*p_next].rank <= request->rank) {
		p_next = &sim->requests[*p_next].next;
	}
	request->next = *p_next;
	*p_next = index;
}

static void send_request(sim_t *sim, uint32_t index, const kvp_choice_t *choice)
{
	request_t *request = &sim->requests[index];
	const uint32_t decode = sim->setup->prefill_n + choice->decode;
	engine_t *engine;

	request->is_handed_over = choice->verdict == KVP_HANDOVER;
	request->prefill = request->is_handed_over ? choice->prefill : NONE;
	request->decode = decode;
	request->work_ns = choice->prefill_ns;
	engine = &sim->engines[request->is_handed_over ? choice->prefill : decode];
	engine->backlog_ns += choice->prefill_ns;
	engine->running++;
	sim->engines[decode].running += (uint32_t)request->is_handed_over;
	push_event(sim, sim->now + sim->model->request_ns + sim->model->transfer_ns * request->computed, PROMPT_READY,
		   index);
}

static void route(sim_t *sim, uint32_t index, int is_head)
{
	const pd_setup_t *setup = sim->setup;
	request_t *request = &sim->requests[index];
	kvp_engine_load_t loads[MAX_ENGINES];
	const kvp_scene_t scene = {.costs = pd_costs(sim->model),
				   .thresholds = setup->thresholds,
				   .prefill = loads,
				   .decode = loads + setup->prefill_n,
				   .prefill_n = setup->prefill_n,
				   .decode_n = setup->decode_n,
				   .max_running = MAX_RUNNING,
				   .ahead_ns = AHEAD_NS,
				   .queue_ns = is_head ? 0 : sim->queue_ns};
	kvp_choice_t choice;

	request->computed = find_hit(sim, index);
	for (uint32_t i = 0; i < setup->prefill_n + setup->decode_n; i++) {
		loads[i] = (kvp_engine_load_t){.usable = 1,
					       .running = sim->engines[i].running,
					       .hit = request->computed,
					       .backlog_ns = sim->engines[i].backlog_ns,
					       .slowness = 1};
	}
	kvp_decide(&scene,
		   &(kvp_question_t){.tokens = request->tokens, .waited_ns = is_head ? sim->now - request->queued : 0},
		   &choice);
	if (choice.verdict == KVP_QUEUE) {
		if (!is_head) {
			request->queued = sim->now;
			join_queue(sim, index, choice.prefill_ns);
		}
		return;
	}
	if (is_head) {
		leave_queue(sim, index);
	}
	send_request(sim, index, &choice);
}

/* ---- a run ----------------------------------------------------------------------------------- */

static void handle_event(sim_t *sim, const event_t *event)
{
	request_t *request = &sim->requests[event->index]; /* of all kinds but STEP_ENDED */
	engine_t *engine;

	switch (event->kind) {
	case ARRIVED:
		route(sim, event->index, 0);
		break;
	case PROMPT_READY:
		engine = &sim->engines[request->prefill != NONE ? request->prefill : request->decode];
		append(sim, &engine->first_prompt, &engine->last_prompt, event->index);
		start_step(sim, engine);
		break;
	case HANDED_OVER:
		join_batch(sim, &sim->engines[request->decode], event->index);
		start_step(sim, &sim->engines[request->decode]);
		break;
	case STEP_ENDED:
		end_step(sim, &sim->engines[event->index]);
		break;
	}
}

static void summarize(const sim_t *sim, uint32_t from, uint32_t end, double *values, pd_result_t *result)
{
	for (int tpot = 0; tpot < 2; tpot++) {
		uint32_t n = 0;
		double sum = 0;

		for (uint32_t i = from; i < end; i++) {
			const request_t *request = &sim->requests[i];

			if (tpot && request->outputs < 2) {
				continue;
			}
			values[n] = tpot ? (request->ended - request->first) / (request->outputs - 1)
					 : request->first - request->arrived;
			sum += values[n++];
		}
		result->ns[tpot ? PD_TPOT_MEAN : PD_TTFT_MEAN] = n ? sum / n : 0;
		result->ns[tpot ? PD_TPOT_P99 : PD_TTFT_P99] = n ? bench_quantile(values, n, 0.99) : 0;
	}
	result->requests = end - from;
	result->handed_over = 0;
	for (uint32_t i = from; i < end; i++) {
		result->handed_over += (uint32_t)sim->requests[i].is_handed_over;
	}
}

static int prepare(sim_t *sim, uint32_t end)
{
	const trace_t *trace = sim->trace;

	for (uint64_t i = 0; i < trace->id_count; i++) {
		sim->block_ids = trace->ids[i] >= sim->block_ids ? (uint32_t)trace->ids[i] + 1 : sim->block_ids;
	}
	sim->queue_first = NONE;
	sim->heap = malloc((2 * (size_t)end + MAX_ENGINES) * sizeof *sim->heap);
	sim->requests = calloc(end, sizeof *sim->requests);
	sim->blocks = calloc((size_t)sim->block_ids + 1, sizeof *sim->blocks);
	if (!sim->heap || !sim->requests || !sim->blocks) {
		return 0;
	}
	sim->blocks[sim->block_ids] = (block_t){.newer = sim->block_ids, .older = sim->block_ids};
	for (uint32_t i = 0; i < MAX_ENGINES; i++) {
		sim->engines[i].first_prompt = sim->engines[i].first_waiting = NONE;
	}
	for (uint32_t i = 0; i < end; i++) {
		const trace_request_t *from = &trace->requests[i];
		request_t *request = &sim->requests[i];

		request->tokens = from->input_tokens ? from->input_tokens : 1;
		request->outputs = from->output_tokens ? from->output_tokens : 1;
		request->arrived = (double)from->timestamp_ms * 1e6 / sim->model->rate;
		push_event(sim, request->arrived, ARRIVED, i);
	}

	return 1;
}

int pd_simulate(const trace_t *trace, const pd_model_t *model, const pd_setup_t *setup, uint32_t from, uint32_t end,
		pd_result_t *result)
{
	sim_t *sim = calloc(1, sizeof *sim);
	double *values = malloc(end * sizeof *values);
	int done = 0;

	if (sim && values) {
		sim->trace = trace;
		sim->model = model;
		sim->setup = setup;
		done = prepare(sim, end);
		while (done && sim->heap_n > 0) {
			event_t event = pop_event(sim);

			sim->now = event.at;
			handle_event(sim, &event);
		}
		if (done) {
			summarize(sim, from, end, values, result);
		}
		free(sim->heap);
		free(sim->requests);
		free(sim->blocks);
	}
	free(sim);
	free(values);

	return done;
}
