/* request.h -- the life of a client's request.
 *
 *   begin -> (tokens asked for) -> route -> queue -> route ...
 *                                    |-> handed over: prefill leg and decode leg   (sequential: one after the other)
 *                                    `-> local: decode leg alone
 *   a leg fails, nothing sent to the client yet -> the engine is left out, both legs end, a new transfer id, route
 *   first bytes of a stream, or the whole of another answer -> the answer is settled: nothing is sent again
 *
 * What the client gets is the decode engine's answer, byte by byte. A request belongs to the server's exchange, which
 * is told by `wake` of anything new. All on the loop's thread.
 */
#ifndef KVP_REQUEST_H
#define KVP_REQUEST_H

#include "body.h"
#include "fleet.h"
#include "prefix.h"

typedef struct kvp_request kvp_request_t;
TAILQ_HEAD(kvp_request_list, kvp_request);

/* What all requests share. */
typedef struct kvp_requests {
	const kvp_options_t *options;
	kvp_metrics_t *metrics;
	kvp_calls_t *calls;
	kvp_fleet_t *fleet;
	kvp_prefix_t *prefix;                /* NULL: nothing is looked up */
	struct kvp_request_list live, queue; /* queue: by rank */
	uint32_t live_n, queue_n;
	double queue_ns;   /* work of those in the queue, by estimate */
	size_t held_bytes; /* of all bodies, unfinished ones too */
} kvp_requests_t;

typedef enum kvp_answer_kind {
	KVP_ANSWER_NONE,   /* not yet */
	KVP_ANSWER_WHOLE,  /* status, headers, text */
	KVP_ANSWER_STREAM, /* status, headers; kvp_request_read() has the rest */
} kvp_answer_kind_t;

typedef struct kvp_answer {
	kvp_answer_kind_t kind;
	unsigned status;
	int is_own;                 /* the proxy's, in JSON */
	int is_events;              /* a stream of events, in which an error can be said */
	struct curl_slist *headers; /* of the engine */
	char *text;
	size_t len, cap;                 /* cap: of a text that counts in the calls' kept bytes */
	char length[KVP_LENGTH_MAX + 1]; /* Content-Length of an engine's answer; "": it has none */
} kvp_answer_t;

/* The request on one engine. */
typedef struct kvp_leg {
	kvp_call_t *call; /* NULL: none */
	kvp_engine_t *engine;
	double work_ns, expected_ns; /* in the engine's backlog; with what was before it */
	uint64_t deadline_ns;
} kvp_leg_t;

struct kvp_request {
	TAILQ_ENTRY(kvp_request) live_link, queue_link;
	kvp_requests_t *all;
	kvp_api_t api;
	kvp_body_t body;
	size_t held_bytes;
	char *method, *target;
	struct curl_slist *headers; /* of the client */
	void (*wake)(void *ctx);
	void *ctx;
	kvp_call_t *asking;            /* for tokens */
	uint32_t tokens, hit;          /* hit: of them in the daemon */
	uint32_t own[KVP_ENGINES_MAX]; /* in an engine's own cache */
	uint64_t came_ns, queued_ns;
	int is_queued, is_expired, is_broken, is_counted;
	int is_fresh;               /* its calls have connections of their own */
	int is_looking, has_looked; /* no decode engine is up: it waits for looks at them, once */
	double queue_work_ns, queue_rank;
	uint64_t excluded; /* engines that have failed it */
	uint32_t tries[2]; /* prefill, decode */
	kvp_leg_t prefill, decode;
	char transfer[KVP_TRANSFER_LEN + 1];
	kvp_answer_t answer;
	size_t text_taken;
};

typedef struct kvp_request_config {
	kvp_api_t api;
	kvp_span_t data;             /* the body, from malloc(): the request's from here on. It counts as held */
	const char *method, *target; /* as the client has written it, with its query; both copied */
	struct curl_slist *headers;  /* that pass; the request's from here on */
	void (*wake)(void *ctx);
	void *ctx;
} kvp_request_config_t;

/* Bytes of bodies: `from` of them become `to`. 0: limits.bodies forbids it, and nothing has changed. */
int kvp_requests_hold(kvp_requests_t *all, size_t from, size_t to);
/* Begin a request; its answer may be there at once. NULL: out of memory. */
kvp_request_t *kvp_request_begin(kvp_requests_t *all, const kvp_request_config_t *config);
/* Free it. What still runs on engines is ended: the client has gone, or has its answer. */
void kvp_request_end(kvp_request_t *request);
/* Bytes of a stream: how many, 0: none now, -1: all read, -2: cut short. */
int64_t kvp_request_read(kvp_request_t *request, char *out, size_t cap);

/* Send those on that the queue holds, as far as engines have room. */
void kvp_requests_serve(kvp_requests_t *all);
/* Deadlines of all requests, and engines that have gone down. */
void kvp_requests_tick(kvp_requests_t *all, uint64_t now_ns);

#endif
