/* The life of a client's request. */
#include "request.h"

#include "kv/env.h"
#include "kv/log.h"
#include "kv/text.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BYTES_A_TOKEN  4u          /* where tokens are not known */
#define PREFILL_ANSWER (16u << 20) /* bytes: params may name every block */
#define TOKENIZE_BYTES 16u         /* of an answer, for each token */

static void route(kvp_request_t *request, int is_head);
static void decode_changed(void *ctx, kvp_call_t *call);

static uint64_t clock_ns(void)
{
	return kv_now_ns(&kv_env_posix);
}

/* ---- bodies ---------------------------------------------------------------------- */

int kvp_requests_hold(kvp_requests_t *all, size_t from, size_t to)
{
	if (to > from && all->held_bytes - from + to > all->options->limits_bodies) {
		return 0;
	}
	all->held_bytes = all->held_bytes - from + to;
	kvp_metric_add(all->metrics, KVP_M_BODY_BYTES, to - from);

	return 1;
}

/* ---- answers --------------------------------------------------------------------------------- */

static void count_outcome(kvp_request_t *request, kvp_metric_t outcome)
{
	if (!request->is_counted) {
		request->is_counted = 1;
		kvp_metric_add(request->all->metrics, outcome, 1);
	}
}

/* Nothing is sent again: the body is not needed, once the calls have all of it. */
static void release_body(kvp_request_t *request)
{
	const kvp_call_t *calls[] = {request->prefill.call, request->decode.call};

	for (size_t i = 0; i < KV_COUNT_OF(calls); i++) {
		if (calls[i] && !kvp_call_has_sent(calls[i])) {
			return;
		}
	}
	kvp_body_drop(&request->body);
	kvp_requests_hold(request->all, request->held_bytes, 0);
	request->held_bytes = 0;
}

/* `call`: whose answer it is; NULL: the proxy's own. */
static void settle_answer(kvp_request_t *request, kvp_answer_kind_t kind, unsigned status, const kvp_call_t *call)
{
	request->answer.kind = kind;
	request->answer.status = status;
	release_body(request);
	request->answer.is_own = !call;
	request->answer.headers = call ? kvp_call_headers(call) : NULL;
	if (call) {
		kvp_call_length(call, request->answer.length);
	}
	kvp_metric_observe_ns(request->all->metrics, KVP_M_FIRST_TIME, clock_ns() - request->came_ns);
	request->wake(request->ctx);
}

static void refuse(kvp_request_t *request, kvp_metric_t outcome, unsigned status, const char *message)
{
	count_outcome(request, outcome);
	request->answer.text = kvp_error_text(message, status);
	request->answer.len = request->answer.text ? strlen(request->answer.text) : 0;
	settle_answer(request, KVP_ANSWER_WHOLE, status, NULL);
}

/* ---- legs ------------------------------------------------------------------------------------ */

static void release_work(kvp_leg_t *leg)
{
	leg->engine->backlog_ns -= leg->work_ns < leg->engine->backlog_ns ? leg->work_ns : leg->engine->backlog_ns;
	leg->work_ns = 0;
}

static void end_leg(kvp_leg_t *leg)
{
	if (leg->call) {
		kvp_call_end(leg->call);
		kvp_engine_finish(leg->engine, leg->work_ns);
		memset(leg, 0, sizeof *leg);
	}
}

typedef struct leg_start {
	kvp_engine_t *engine;
	kvp_pieces_t body;
	int has_body; /* 0: out of memory */
	double work_ns;
	uint64_t timeout_ns;
	size_t max_bytes;
	int is_passed;
	void (*notify)(void *ctx, kvp_call_t *call);
} leg_start_t;

/* Has a request of this method a body, though it may be empty? */
static int takes_body(const char *method)
{
	return strcmp(method, "POST") == 0 || strcmp(method, "PUT") == 0 || strcmp(method, "PATCH") == 0;
}

/* 0: out of memory or descriptors; the request has its answer then. */
static int start_leg(kvp_request_t *request, kvp_leg_t *leg, leg_start_t *start)
{
	const int is_other = request->api == KVP_OTHER;
	const kvp_call_config_t config = {
		.url = start->engine->url,
		.path = request->target,
		.method = is_other ? request->method : NULL,
		.body = is_other && start->body.n == 0 && !takes_body(request->method) ? NULL : &start->body,
		.headers = request->headers,
		.id = request->transfer,
		.is_read = leg == &request->prefill,
		.is_json = !is_other,
		.connect_timeout_ns = request->all->options->connect_timeout,
		.max_bytes = start->max_bytes,
		.is_passed = start->is_passed,
		.is_fresh = request->is_fresh,
		.notify = start->notify,
		.ctx = request};

	leg->call = start->has_body ? kvp_call_start(request->all->calls, &config) : NULL;
	if (!leg->call) {
		refuse(request, KVP_M_OVERLOADED, 503, "the proxy has no memory or descriptors for this request");
		return 0;
	}
	leg->engine = start->engine;
	leg->work_ns = start->work_ns;
	leg->expected_ns = start->work_ns + start->engine->backlog_ns;
	leg->deadline_ns = leg->call->started_ns + start->timeout_ns;
	kvp_engine_begin(leg->engine, leg->work_ns);

	return 1;
}

static int start_decode(kvp_request_t *request, kvp_engine_t *engine, const char *params, double work_ns)
{
	const kvp_options_t *options = request->all->options;
	leg_start_t start = {.engine = engine,
			     .work_ns = work_ns,
			     .timeout_ns = request->body.stream ? options->decode_timeout : options->decode_whole,
			     .max_bytes = options->limits_answer,
			     .is_passed = 1,
			     .notify = decode_changed};

	if (request->api == KVP_OTHER) {
		kvp_body_as_it_is(&request->body, &start.body);
		start.has_body = 1;
	} else {
		start.has_body = kvp_body_for_decode(&request->body, params, &start.body);
	}
	request->tries[1]++;

	return start_leg(request, &request->decode, &start);
}

/* ---- failures -------------------------------------------------------------------------------- */

/* Is an answer of this status a failure of its engine? */
static int is_failure(long status)
{
	return status >= 500 || status == 429;
}

static void leg_failed(kvp_request_t *request, kvp_leg_t *leg, const char *why)
{
	kvp_call_t *call = leg->call;

	kv_log(KV_LOG_WARN, "request", "%s engine %s failed request %s: %s",
	       leg == &request->decode ? "decode" : "prefill", leg->engine->url, request->transfer, why);
	kvp_metric_add(request->all->metrics, leg == &request->decode ? KVP_M_DECODE_FAILURES : KVP_M_PREFILL_FAILURES,
		       1);
	if (kvp_call_is_refused(call)) {
		kvp_engine_unreachable(leg->engine);
	}
	request->excluded |= kvp_engine_bit(leg->engine);
	if (kvp_call_is_stale(call) && !kvp_fleet_has(request->all->fleet, leg->engine->is_decode, request->excluded)) {
		request->excluded &= ~kvp_engine_bit(leg->engine); /* it may have ended an idle connection */
		request->is_fresh = 1;
	}
}

static void send_again(kvp_request_t *request)
{
	kvp_metric_add(request->all->metrics, KVP_M_RETRIES, 1);
	end_leg(&request->prefill);
	end_leg(&request->decode);
	route(request, 0);
}

/* The client has got nothing: another prefill engine, or none. */
static void prefill_failed(kvp_request_t *request, const char *why)
{
	leg_failed(request, &request->prefill, why);
	if (request->answer.kind == KVP_ANSWER_NONE) {
		send_again(request);
	} else {
		end_leg(&request->prefill);
	}
}

static void take_answer(kvp_request_t *request)
{
	kvp_call_t *call = request->decode.call;

	request->answer.len = call->len;
	request->answer.cap = call->cap;
	request->answer.text = call->data;
	call->data = NULL;
	call->len = call->cap = 0;
	count_outcome(request, call->status < 400 ? KVP_M_ANSWERED : KVP_M_REFUSED);
	settle_answer(request, KVP_ANSWER_WHOLE, (unsigned)call->status, call);
	end_leg(&request->decode);
}

static void decode_failed(kvp_request_t *request, const char *why)
{
	leg_failed(request, &request->decode, why);
	if (request->tries[1] < request->all->options->attempts &&
	    kvp_fleet_has(request->all->fleet, 1, request->excluded)) {
		send_again(request);
	} else if (kvp_call_is_answered(request->decode.call)) {
		take_answer(request); /* its error says more than ours */
	} else {
		refuse(request, KVP_M_FAILED, 502, "no decode engine has answered");
		end_leg(&request->decode);
	}
}

/* ---- what engines say ------------------------------------------------------------------------ */

static kvp_span_t answer_of(const kvp_call_t *call)
{
	return (kvp_span_t){call->data, call->len};
}

static void prefill_ended_well(kvp_request_t *request)
{
	kvp_leg_t *leg = &request->prefill;
	const uint64_t took = clock_ns() - leg->call->started_ns;
	char *params = NULL;

	if (request->all->options->sequential && kvp_answer_params(answer_of(leg->call), &params) != KV_OK) {
		prefill_failed(request, "its answer makes no sense");
		return;
	}
	kvp_metric_observe_ns(request->all->metrics, KVP_M_PREFILL_TIME, took);
	kvp_engine_measured(leg->engine, leg->expected_ns, (double)took);
	if (!request->all->options->sequential) { /* the decode engine is told with the next prompt */
		kvp_answer_device(answer_of(leg->call), leg->engine->device);
	}
	end_leg(leg);
	if (request->all->options->sequential) {
		kvp_engine_t *engine = request->decode.engine; /* chosen when the prefill was sent */

		if (engine->up) {
			start_decode(request, engine, params, 0);
		} else {
			route(request, 0);
		}
	}
	free(params);
}

static void prefill_changed(void *ctx, kvp_call_t *call)
{
	kvp_request_t *request = ctx;

	if (!call->ended) {
		return;
	}
	if (kvp_call_is_answered(call) && call->status >= 200 && call->status < 300) {
		prefill_ended_well(request);
	} else if (kvp_call_is_answered(call)) {
		char why[64];

		snprintf(why, sizeof why, "it has answered with status %ld", call->status);
		request->body.whole |= call->status < 500 && call->status != 429; /* others would say the same */
		prefill_failed(request, why);
	} else {
		prefill_failed(request, kvp_call_why(call));
	}
}

static void decode_ended(kvp_request_t *request, kvp_call_t *call)
{
	char why[64];

	if (!kvp_call_is_answered(call)) {
		decode_failed(request, kvp_call_why(call));
	} else if (is_failure(call->status)) {
		snprintf(why, sizeof why, "it has answered with status %ld", call->status);
		decode_failed(request, why);
	} else {
		take_answer(request);
	}
}

/* Nothing is sent again from here on. */
static void pass_on(kvp_request_t *request, kvp_call_t *call, int is_events)
{
	release_work(&request->decode);
	kvp_call_stream(call, request->all->options->limits_stream);
	request->answer.is_events = is_events;
	settle_answer(request, KVP_ANSWER_STREAM, (unsigned)call->status, call);
}

/* There is more of an answer than may be kept. */
static void answer_is_full(kvp_request_t *request, kvp_call_t *call)
{
	if (is_failure(call->status) && request->tries[1] < request->all->options->attempts &&
	    kvp_fleet_has(request->all->fleet, 1, request->excluded | kvp_engine_bit(request->decode.engine))) {
		decode_failed(request, "it has answered with a long error");
		return;
	}
	kvp_metric_add(request->all->metrics, KVP_M_PASSED_EARLY, 1);
	pass_on(request, call, 0);
}

/* A stream is passed on from its first byte. Anything else is passed on whole, so that what fails can be sent again. */
static void decode_changed(void *ctx, kvp_call_t *call)
{
	kvp_request_t *request = ctx;

	if (request->answer.kind == KVP_ANSWER_NONE && (call->len > 0 || call->is_full) && call->status >= 200 &&
	    call->status < 300 && strncmp(kvp_call_type(call), "text/event-stream", 17) == 0) {
		pass_on(request, call, 1);
	} else if (request->answer.kind == KVP_ANSWER_STREAM) {
		request->wake(request->ctx);
	} else if (call->is_full) {
		answer_is_full(request, call);
	} else if (call->ended) {
		decode_ended(request, call);
	}
}

/* ---- routes ---------------------------------------------------------------------------------- */

static void leave_queue(kvp_request_t *request)
{
	kvp_requests_t *all = request->all;

	if (request->is_queued) {
		TAILQ_REMOVE(&all->queue, request, queue_link);
		request->is_queued = 0;
		all->queue_n--;
		all->queue_ns = all->queue_n ? all->queue_ns - request->queue_work_ns : 0;
		kvp_metric_sub(all->metrics, KVP_M_QUEUED, 1);
		kvp_metric_observe_ns(all->metrics, KVP_M_QUEUE_TIME, clock_ns() - request->queued_ns);
	}
}

static void join_queue(kvp_request_t *request, double work_ns)
{
	kvp_requests_t *all = request->all;
	kvp_request_t *behind;

	if (request->is_queued) {
		return;
	}
	request->is_queued = 1;
	request->queued_ns = clock_ns();
	request->queue_work_ns = work_ns;
	request->queue_rank = kvp_queue_rank((double)request->queued_ns, work_ns);
	TAILQ_FOREACH(behind, &all->queue, queue_link)
	{
		if (behind->queue_rank > request->queue_rank) {
			break;
		}
	}
	if (behind) {
		TAILQ_INSERT_BEFORE(behind, request, queue_link);
	} else {
		TAILQ_INSERT_TAIL(&all->queue, request, queue_link);
	}
	all->queue_n++;
	all->queue_ns += work_ns;
	kvp_metric_add(all->metrics, KVP_M_QUEUED, 1);
}

static void new_transfer(kvp_request_t *request)
{
	uint8_t random[KVP_TRANSFER_LEN / 2];

	kv_random(&kv_env_posix, random, sizeof random);
	for (size_t i = 0; i < sizeof random; i++) {
		snprintf(request->transfer + 2 * i, 3, "%02x", random[i]);
	}
}

static void send_local(kvp_request_t *request, kvp_engine_t *engine, double work_ns, kvp_metric_t reason)
{
	leave_queue(request);
	kvp_metric_add(request->all->metrics, reason, 1);
	new_transfer(request);
	start_decode(request, engine, NULL, work_ns);
}

static void hand_over(kvp_request_t *request, const kvp_choice_t *choice)
{
	kvp_requests_t *all = request->all;
	kvp_engine_t *decode = &all->fleet->engines[all->fleet->prefill_n + choice->decode];
	leg_start_t start = {.engine = &all->fleet->engines[choice->prefill],
			     .work_ns = choice->prefill_ns,
			     .timeout_ns = all->options->prefill_timeout,
			     .max_bytes = PREFILL_ANSWER,
			     .notify = prefill_changed};
	char params[KVP_PARAMS_MAX];

	leave_queue(request);
	kvp_metric_add(all->metrics, KVP_M_HANDOVERS, 1);
	new_transfer(request);
	start.has_body =
		kvp_body_for_prefill(&request->body, all->options->sequential ? NULL : request->transfer, &start.body);
	request->tries[0]++;
	if (!start_leg(request, &request->prefill, &start)) {
		return;
	}
	if (all->options->sequential) {
		request->decode.engine = decode;
		return;
	}
	kvp_params_of_transfer(request->transfer, &(kvp_origin_t){start.engine->peer, start.engine->device}, params);
	if (!start_decode(request, decode, params, 0)) {
		end_leg(&request->prefill);
	}
}

static kvp_costs_t costs_of(const kvp_options_t *options)
{
	return (kvp_costs_t){.fixed_ns = (double)options->cost_fixed,
			     .token_ns = (double)options->cost_tokens / 1e3,
			     .pair_ns = (double)options->cost_attention / 1e6,
			     .handover_ns = (double)options->cost_handover,
			     .transfer_ns = (double)options->cost_transfer / 1e3,
			     .local_factor = (double)options->cost_local / 100,
			     .running_ns = (double)options->cost_running};
}

static void decide(const kvp_request_t *request, int is_head, kvp_choice_t *choice)
{
	kvp_requests_t *all = request->all;
	const kvp_options_t *options = all->options;
	kvp_engine_load_t loads[KVP_ENGINES_MAX];
	const kvp_scene_t scene = {
		.costs = costs_of(options),
		.thresholds = {(uint32_t)(options->skip_tokens < UINT32_MAX ? options->skip_tokens : UINT32_MAX),
			       (double)options->skip_wait},
		.prefill = loads,
		.decode = loads + all->fleet->prefill_n,
		.prefill_n = request->tries[0] < options->attempts ? all->fleet->prefill_n : 0,
		.decode_n = all->fleet->decode_n,
		.max_running = (uint32_t)options->prefill_running,
		.ahead_ns = (double)options->prefill_ahead,
		.queue_ns = is_head ? 0 : all->queue_ns};
	const kvp_question_t question = {.tokens = request->tokens,
					 .whole = request->body.whole,
					 .waited_ns = request->is_expired  ? DBL_MAX
						      : request->is_queued ? (double)(clock_ns() - request->queued_ns)
									   : 0};

	kvp_fleet_loads(all->fleet, request->excluded, request->hit, request->own, loads);
	kvp_decide(&scene, &question, choice);
}

/* None is up, as far as the last looks know: an engine that is back counts from now on. */
static void await_decode(kvp_request_t *request)
{
	if (!request->has_looked) {
		kvp_fleet_look(request->all->fleet, 1);
	}
	request->is_looking = !request->has_looked && kvp_fleet_is_looking(request->all->fleet);
	request->has_looked = 1;
	if (!request->is_looking) {
		refuse(request, KVP_M_FAILED, 503, "no decode engine is up");
	}
}

/* Send the request to where it is computed best now, or let it wait. is_head: it is the first in the queue. */
static void route(kvp_request_t *request, int is_head)
{
	kvp_requests_t *all = request->all;
	kvp_choice_t choice;
	kvp_engine_t *decode;

	decide(request, is_head, &choice);
	decode = &all->fleet->engines[all->fleet->prefill_n + choice.decode];
	switch (choice.verdict) {
	case KVP_HANDOVER:
		hand_over(request, &choice);
		break;
	case KVP_QUEUE:
		if (request->is_queued || all->queue_n < all->options->queue_max) {
			join_queue(request, choice.prefill_ns);
		} else {
			send_local(request, decode, choice.prefill_ns, KVP_M_LOCAL_WAIT);
		}
		break;
	case KVP_LOCAL_SHORT:
		send_local(request, decode, choice.prefill_ns, KVP_M_LOCAL_SHORT);
		break;
	case KVP_LOCAL_WAIT:
		send_local(request, decode, choice.prefill_ns, KVP_M_LOCAL_WAIT);
		break;
	case KVP_LOCAL_NO_PREFILL:
		kvp_fleet_look(all->fleet, 0);
		send_local(request, decode, choice.prefill_ns,
			   request->tries[0] > 0 ? KVP_M_LOCAL_FAILED : KVP_M_LOCAL_NO_PREFILL);
		break;
	case KVP_LOCAL_WHOLE:
		send_local(request, decode, choice.prefill_ns,
			   request->tries[0] > 0       ? KVP_M_LOCAL_FAILED
			   : request->api == KVP_OTHER ? KVP_M_LOCAL_OTHER
						       : KVP_M_LOCAL_WHOLE);
		break;
	case KVP_NO_DECODE:
		leave_queue(request);
		await_decode(request);
		break;
	}
}

/* ---- tokens ---------------------------------------------------------------------------------- */

static void look_up(kvp_request_t *request, const uint32_t *tokens, uint32_t n)
{
	kvp_requests_t *all = request->all;
	const kvp_prefix_question_t question = {request->body.model, request->body.salt, tokens, n};
	int64_t hit = -1;

	if (!request->body.opaque) {
		kvp_metric_add(all->metrics, KVP_M_OWN_HIT_TOKENS,
			       kvp_fleet_own_hits(all->fleet, &question, request->own));
	}
	if (!all->prefix) {
		return;
	}
	if (!request->body.opaque) {
		hit = kvp_prefix_hit(all->prefix, &question);
	}
	kvp_metric_add(all->metrics,
		       hit > 0    ? KVP_M_LOOKUP_HITS
		       : hit == 0 ? KVP_M_LOOKUP_MISSES
				  : KVP_M_LOOKUP_UNKNOWN,
		       1);
	request->hit = hit > 0 ? (uint32_t)hit : 0;
	kvp_metric_add(all->metrics, KVP_M_HIT_TOKENS, request->hit);
}

static void route_first(kvp_request_t *request)
{
	kvp_metric_add(request->all->metrics, KVP_M_PROMPT_TOKENS, request->tokens);
	route(request, 0);
}

static uint32_t most_tokens(const kvp_options_t *options)
{
	return (uint32_t)options->limits_tokens;
}

static void tokens_came(void *ctx, kvp_call_t *call)
{
	kvp_request_t *request = ctx;
	uint32_t *tokens = NULL, n = 0;

	if (!call->ended) {
		return;
	}
	if (kvp_call_is_answered(call) && call->status == 200 &&
	    kvp_answer_tokens(answer_of(call), most_tokens(request->all->options), &tokens, &n) == KV_OK) {
		request->tokens = n;
		look_up(request, tokens, n);
	} else {
		kvp_metric_add(request->all->metrics, KVP_M_TOKENIZE_FAILURES, 1);
	}
	free(tokens);
	kvp_call_end(call);
	request->asking = NULL;
	route_first(request);
}

/* Ask the decode engine that it would go to now. 0: nobody can be asked. */
static int ask_tokens(kvp_request_t *request)
{
	kvp_requests_t *all = request->all;
	kvp_pieces_t pieces;
	kvp_call_config_t config = {.path = "/tokenize",
				    .body = &pieces,
				    .headers = request->headers,
				    .is_read = 1,
				    .is_json = 1,
				    .connect_timeout_ns = all->options->connect_timeout,
				    .timeout_ns = all->options->tokenize_timeout,
				    .max_bytes = PREFILL_ANSWER + (size_t)TOKENIZE_BYTES * all->options->limits_tokens,
				    .notify = tokens_came,
				    .ctx = request};
	kvp_choice_t choice;

	decide(request, 0, &choice);
	if (!all->options->tokenize || all->fleet->prefill_n == 0 || choice.verdict == KVP_NO_DECODE ||
	    request->body.whole || request->body.text_bytes <= all->options->skip_tokens) {
		return 0;
	}
	config.url = all->fleet->engines[all->fleet->prefill_n + choice.decode].url;
	request->asking = kvp_body_for_tokenize(&request->body, &pieces) ? kvp_call_start(all->calls, &config) : NULL;

	return request->asking != NULL;
}

/* ---- begin, read, end ------------------------------------------------------------------------ */

static void find_tokens(kvp_request_t *request)
{
	const kvp_body_t *body = &request->body;

	if (request->api == KVP_OTHER) {
		route(request, 0);
		return;
	}
	if (body->tokens) {
		request->tokens = body->n_tokens;
		look_up(request, body->tokens, body->n_tokens);
		free(request->body.tokens);
		request->body.tokens = NULL;
	} else {
		request->tokens = (uint32_t)(body->text_bytes / BYTES_A_TOKEN) + 1;
		if (ask_tokens(request)) {
			return;
		}
	}
	route_first(request);
}

kvp_request_t *kvp_request_begin(kvp_requests_t *all, const kvp_request_config_t *config)
{
	kvp_request_t *request = calloc(1, sizeof *request);
	char why[128] = "";
	kv_status_t status;

	if (!request) {
		kvp_requests_hold(all, config->data.len, 0);
		free((void *)(uintptr_t)config->data.data);
		curl_slist_free_all(config->headers);
		return NULL;
	}
	request->all = all;
	request->held_bytes = config->data.len;
	request->api = config->api;
	request->wake = config->wake;
	request->ctx = config->ctx;
	request->came_ns = clock_ns();
	request->headers = config->headers;
	request->method = strdup(config->method);
	request->target = strdup(config->target);
	TAILQ_INSERT_TAIL(&all->live, request, live_link);
	all->live_n++;
	kvp_metric_add(all->metrics, KVP_M_REQUESTS, 1);
	status = kvp_body_parse(config->api, config->data, most_tokens(all->options), &request->body, why);
	if (all->live_n > all->options->limits_requests) {
		refuse(request, KVP_M_OVERLOADED, 503, "too many requests; please try again");
	} else if (status == KV_ERR_LIMIT) {
		refuse(request, KVP_M_OVERLOADED, 413, why);
	} else if (status == KV_ERR_NOMEM || !request->method || !request->target) {
		refuse(request, KVP_M_OVERLOADED, 503, "the proxy has no memory for this request");
	} else if (status != KV_OK) {
		refuse(request, KVP_M_MALFORMED, 400, why);
	} else {
		find_tokens(request);
	}

	return request;
}

void kvp_request_end(kvp_request_t *request)
{
	kvp_requests_t *all = request->all;

	count_outcome(request, KVP_M_ABORTED);
	leave_queue(request);
	end_leg(&request->prefill);
	end_leg(&request->decode);
	kvp_call_end(request->asking);
	TAILQ_REMOVE(&all->live, request, live_link);
	all->live_n--;
	kvp_requests_hold(all, request->held_bytes, 0);
	kvp_metric_sub(all->metrics, KVP_M_REQUESTS, 1);
	kvp_body_free(&request->body);
	free(request->method);
	free(request->target);
	curl_slist_free_all(request->headers);
	curl_slist_free_all(request->answer.headers);
	kvp_calls_keep(all->calls, request->answer.cap, 0);
	free(request->answer.text);
	free(request);
}

/* The client is told by an event of the stream, and by its missing end. */
static void cut_stream(kvp_request_t *request, const char *why)
{
	char *error = kvp_error_text("the decode engine has ended the stream early", 502), *text = NULL;

	leg_failed(request, &request->decode, why);
	count_outcome(request, KVP_M_CUT);
	request->is_broken = 1;
	if (request->answer.is_events && !request->answer.length[0] &&
	    !kvp_headers_find(request->answer.headers, "Content-Encoding") && error &&
	    asprintf(&text, "\n\ndata: %s\n\n", error) >= 0) {
		request->answer.text = text;
		request->answer.len = strlen(text);
	}
	free(error);
	request->wake(request->ctx);
}

int64_t kvp_request_read(kvp_request_t *request, char *out, size_t cap)
{
	kvp_call_t *call = request->decode.call;
	size_t n = kvp_call_take(call, out, cap);

	if (n > 0 || !(call->ended || request->is_broken)) {
		return (int64_t)n;
	}
	if (!request->is_broken && call->result == CURLE_OK) {
		count_outcome(request, request->answer.status < 400 ? KVP_M_ANSWERED : KVP_M_REFUSED);
		return -1;
	}
	if (!request->is_broken) {
		cut_stream(request, kvp_call_why(call));
	}
	n = request->answer.len - request->text_taken < cap ? request->answer.len - request->text_taken : cap;
	if (n > 0) {
		memcpy(out, request->answer.text + request->text_taken, n);
		request->text_taken += n;
	}

	return n > 0 ? (int64_t)n : -2;
}

/* ---- time ------------------------------------------------------------------------------------ */

static void check_decode(kvp_request_t *request, uint64_t now_ns)
{
	kvp_leg_t *leg = &request->decode;
	kvp_call_t *call = leg->call;

	if (!call || call->ended) {
		return;
	}
	if (leg->work_ns > 0 && (double)(now_ns - call->started_ns) > leg->expected_ns * leg->engine->slowness) {
		release_work(leg); /* of an answer that is not streamed nothing else tells that its prefill has ended */
	}
	if (request->answer.kind == KVP_ANSWER_STREAM) {
		if (!request->is_broken && !call->paused &&
		    now_ns > call->last_ns + request->all->options->decode_stall) {
			cut_stream(request, "its stream stands still");
		}
	} else if (now_ns > leg->deadline_ns) {
		decode_failed(request, "it has not answered in time");
	} else if (!leg->engine->up) {
		decode_failed(request, "it went down");
	}
}

static void check_deadlines(kvp_request_t *request, uint64_t now_ns)
{
	kvp_call_t *call = request->prefill.call;

	if (call && !call->ended && now_ns > request->prefill.deadline_ns) {
		prefill_failed(request, "it has not answered in time");
	} else if (call && !call->ended && !request->prefill.engine->up) {
		prefill_failed(request, "it went down");
	}
	if (request->is_queued && now_ns >= request->queued_ns + request->all->options->queue_deadline) {
		kvp_metric_add(request->all->metrics, KVP_M_QUEUE_EXPIRED, 1);
		request->is_expired = 1;
		route(request, 1);
	}
	if (request->is_looking &&
	    (kvp_fleet_has(request->all->fleet, 1, request->excluded) || !kvp_fleet_is_looking(request->all->fleet))) {
		request->is_looking = 0;
		route(request, 0);
	}
	check_decode(request, now_ns);
	if (request->answer.kind != KVP_ANSWER_NONE && request->held_bytes > 0) {
		release_body(request); /* a call may have read the rest of it since */
	}
}

void kvp_requests_serve(kvp_requests_t *all)
{
	kvp_request_t *request;

	while ((request = TAILQ_FIRST(&all->queue))) {
		route(request, 1);
		if (request->is_queued) {
			break;
		}
	}
}

void kvp_requests_tick(kvp_requests_t *all, uint64_t now_ns)
{
	kvp_request_t *request;

	TAILQ_FOREACH(request, &all->live, live_link)
	{
		check_deadlines(request, now_ns);
	}
}
