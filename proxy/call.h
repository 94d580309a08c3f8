/* call.h -- HTTP calls to engines, over libcurl's multi interface, on the loop's thread.
 *
 * libcurl's callbacks only keep what has come. kvp_calls_dispatch() then tells the owners, who may end any call from
 * there. Nothing here knows what a call is for.
 */
#ifndef KVP_CALL_H
#define KVP_CALL_H

#include "base/headers.h"
#include "base/loop.h"
#include "base/pieces.h"
#include "metrics.h"

#include <curl/curl.h>
#include <stddef.h>
#include <sys/queue.h>

#define KVP_LENGTH_MAX 19u /* digits of a Content-Length */

typedef struct kvp_call kvp_call_t;
TAILQ_HEAD(kvp_call_list, kvp_call);

typedef struct kvp_calls {
	kvp_loop_t *loop;
	CURLM *multi;
	struct kvp_call_list changed; /* their owners have not been told */
	uint64_t due_ns;              /* libcurl's next time-out; UINT64_MAX: none */
	kvp_metrics_t *metrics;
	size_t kept_bytes, kept_most; /* of what was received and not taken; streams count, and are not refused */
} kvp_calls_t;

typedef struct kvp_call_config {
	const char *url, *path;
	kvp_pieces_t
		*body; /* of a POST; its tail is the call's from here on, also when it does not start. NULL: a GET */
	const char *method;               /* NULL: GET, or POST with a body */
	const struct curl_slist *headers; /* of the client, copied; NULL: none */
	const char *id;                   /* X-Request-Id where the client has none; NULL: none either */
	int is_read;                      /* the proxy reads the answer: it has to come without a coding */
	int is_json;                      /* the body is JSON, whatever the client's Content-Type */
	uint64_t connect_timeout_ns;
	uint64_t timeout_ns; /* of the whole call; 0: its owner has the clock */
	size_t max_bytes;    /* of an answer; more is a failure, or: */
	int is_passed;       /* an answer that is larger, or finds no room, is not read on: is_full tells its owner */
	int is_fresh;        /* a connection that no call had before */
	void (*notify)(void *ctx, kvp_call_t *call);
	void *ctx;
} kvp_call_config_t;

struct kvp_call {
	TAILQ_ENTRY(kvp_call) link; /* in `changed` */
	kvp_calls_t *calls;
	CURL *easy;
	struct curl_slist *headers;
	kvp_pieces_t body;
	uint32_t piece;    /* the first one that libcurl has not got whole */
	size_t piece_sent; /* bytes of it that libcurl has got */
	char *data;        /* received, and not taken */
	size_t taken, len, cap;
	size_t max_bytes, received;
	size_t pause_bytes; /* of a stream: with this much not taken the engine is not read; 0: it is none */
	long status;        /* of HTTP; 0: none yet */
	int is_changed, paused, too_big, ended;
	int is_passed, is_full;
	CURLcode result;              /* once it has ended */
	uint64_t started_ns, last_ns; /* last: something has come */
	char error[CURL_ERROR_SIZE];
	void (*notify)(void *ctx, kvp_call_t *call);
	void *ctx;
};

/* `connections`: how many are kept, with those in use. `metrics` and `kept_most` are set by the owner. */
kv_status_t kvp_calls_open(kvp_calls_t *calls, kvp_loop_t *loop, uint32_t connections);
/* Bytes that are kept: `from` of them become `to`. */
void kvp_calls_keep(kvp_calls_t *calls, size_t from, size_t to);
/* Every call has been ended by its owner. */
void kvp_calls_close(kvp_calls_t *calls);
/* Run libcurl's time-outs that are due, and tell the owners of what has changed. */
void kvp_calls_dispatch(kvp_calls_t *calls, uint64_t now_ns);

/* NULL: out of memory or descriptors; the body's tail is freed. The owner is never told from within. */
kvp_call_t *kvp_call_start(kvp_calls_t *calls, const kvp_call_config_t *config);
/* Cancel it where it runs, and free it. The owner hears no more of it. NULL is fine. */
void kvp_call_end(kvp_call_t *call);
/* Does it read no more of its body? */
int kvp_call_has_sent(const kvp_call_t *call);
/* Has it ended with an answer, whatever its status? */
int kvp_call_is_answered(const kvp_call_t *call);
/* Has it failed since the engine cannot be connected to? */
int kvp_call_is_refused(const kvp_call_t *call);
/* Has it failed without a byte of an answer, on a connection that another call had before? The engine may have ended
 * that while it was idle. */
int kvp_call_is_stale(const kvp_call_t *call);
/* "text/event-stream; charset=utf-8"; "" before the headers. */
const char *kvp_call_type(const kvp_call_t *call);
/* Header lines of the answer that pass to the client, to be freed by curl_slist_free_all(). */
struct curl_slist *kvp_call_headers(const kvp_call_t *call);
/* Read it as a stream from here on: with pause_bytes not taken its engine waits. */
void kvp_call_stream(kvp_call_t *call, size_t pause_bytes);
/* Its Content-Length; "": it has none. */
void kvp_call_length(const kvp_call_t *call, char out[KVP_LENGTH_MAX + 1]);
/* Take up to cap bytes of what has come; an engine that waited goes on. */
size_t kvp_call_take(kvp_call_t *call, char *out, size_t cap);
/* Why it failed, as a sentence. */
const char *kvp_call_why(const kvp_call_t *call);

#endif
