/* trace.h -- request traces in Mooncake's JSONL format.
 *
 * One object a line: timestamp (ms), input_length, output_length (tokens), hash_ids (chained ids of the prompt's
 * 512-token blocks: an equal id is an equal block after an equal prefix). Format: kvcache-ai/Mooncake,
 * FAST25-release/traces.
 */
#ifndef KVCTL_TRACE_H
#define KVCTL_TRACE_H

#include "kv/status.h"

#include <stddef.h>
#include <stdint.h>

#define TRACE_BLOCK_TOKENS 512u
#define TRACE_MAX_BLOCKS   65536u /* of one request */

typedef struct trace_request {
	uint64_t timestamp_ms;
	uint32_t input_tokens;
	uint32_t output_tokens;
	uint32_t first; /* index of its first id in trace_t.ids */
	uint32_t count; /* blocks; the last one may be partly filled */
} trace_request_t;

typedef struct trace {
	trace_request_t *requests;
	uint32_t count;
	uint64_t *ids;
	uint64_t id_count;
	uint64_t input_tokens; /* of all requests */
	uint32_t longest;      /* blocks of the longest request */
} trace_t;

/* Read at most `limit` requests (0: all) of the file; "-" is standard input. On an error `detail` gets file, line and
 * cause: KV_ERR_ARG (cannot be opened), KV_ERR_PROTO (a line is not such an object), KV_ERR_TOO_BIG, KV_ERR_NOMEM. Free
 * with trace_free(). */
kv_status_t trace_read(const char *path, uint32_t limit, trace_t *trace, char *detail, size_t cap);
void trace_free(trace_t *trace);

/* Tokens of the first n blocks of a request: 512 each, the last one of the request its true remainder. */
uint64_t trace_tokens(const trace_request_t *request, uint32_t n);

#endif
