/* exchange.h -- one request of a client and its answer: what is passed on, what is refused, what the proxy answers
 * itself. Knows no socket: server.c feeds it, and sends what it says.
 *
 *   begin -> (BODY: body ...) -> run -> WAITS -> ANSWERS: head, then the whole body or read()
 *        `------ refused, or answered by the proxy itself ---^
 */
#ifndef KVP_EXCHANGE_H
#define KVP_EXCHANGE_H

#include "http/head.h"
#include "request.h"

typedef enum kvp_exchange_state { KVP_EXCHANGE_BODY, KVP_EXCHANGE_WAITS, KVP_EXCHANGE_ANSWERS } kvp_exchange_state_t;

typedef struct kvp_exchange {
	kvp_requests_t *requests;
	kvp_request_t *request; /* NULL: engines know nothing of it */
	kvp_exchange_state_t state;
	void (*wake)(void *ctx);
	void *ctx;
	/* What the client has sent. */
	kvp_api_t api;
	char *method, *target;
	struct curl_slist *headers; /* that pass */
	int minor, is_kept;         /* is_kept: the connection may serve another request */
	int has_body;               /* that has not been read */
	char *body;
	size_t len, cap; /* cap counts against limits.bodies */
	/* What it gets. */
	unsigned status;
	const char *type; /* of an answer of the proxy itself */
	char *text;       /* likewise; freed */
	kvp_span_t answer;
	int is_stream, is_chunked; /* is_chunked: the stream is */
} kvp_exchange_t;

/* The headers have come. `fault`: the status that they are refused with; 0: they are right. Its state is BODY where
 * there is one, otherwise run() is next, unless it ANSWERS already. NULL: out of memory. */
kvp_exchange_t *kvp_exchange_begin(kvp_requests_t *requests, const kvp_head_t *head, unsigned fault,
				   void (*wake)(void *ctx), void *ctx);
/* A piece of the body. It may be refused: then it ANSWERS. */
void kvp_exchange_take(kvp_exchange_t *exchange, const char *data, size_t len);
/* So much more will come at least, as a chunk says: likewise. */
void kvp_exchange_announce(kvp_exchange_t *exchange, uint64_t more);
/* All has come. */
void kvp_exchange_run(kvp_exchange_t *exchange);
/* Refuse what has come, and the connection's rest with it. */
void kvp_exchange_refuse(kvp_exchange_t *exchange, unsigned status, const char *why);
/* WAITS until now: has it an answer? wake() tells when to look. */
int kvp_exchange_is_answered(kvp_exchange_t *exchange);
/* Status line and headers of the answer, from malloc(); NULL: out of memory. */
char *kvp_exchange_head(kvp_exchange_t *exchange, size_t *len);
void kvp_exchange_end(kvp_exchange_t *exchange);

#endif
