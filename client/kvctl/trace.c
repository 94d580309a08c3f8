/* Request traces: a bounded JSONL reader. */
#include "trace.h"

#include <errno.h>
#include <json-c/json.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_LINE (4u << 20)

typedef struct reader {
	trace_t *trace;
	uint32_t request_cap;
	uint64_t id_cap;
} reader_t;

static int grow_array(void **p, uint64_t needed, uint64_t *cap, size_t item)
{
	uint64_t want = *cap ? *cap : 1024;
	void *bigger;

	if (needed <= *cap) {
		return 1;
	}
	while (want < needed) {
		want *= 2;
	}
	bigger = realloc(*p, want * item);
	if (!bigger) {
		return 0;
	}
	*p = bigger;
	*cap = want;

	return 1;
}

/* An integer member in [0, max]. */
static int read_number(json_object *object, const char *name, uint64_t max, uint64_t *p_value)
{
	json_object *value;

	if (!json_object_object_get_ex(object, name, &value) || !json_object_is_type(value, json_type_int)) {
		return 0;
	}
	if (json_object_get_int64(value) < 0 || json_object_get_uint64(value) > max) {
		return 0;
	}
	*p_value = json_object_get_uint64(value);

	return 1;
}

static kv_status_t add_ids(reader_t *reader, json_object *ids, trace_request_t *request)
{
	trace_t *trace = reader->trace;
	size_t n = json_object_array_length(ids);

	if (n > TRACE_MAX_BLOCKS || trace->id_count + n > UINT32_MAX) {
		return KV_ERR_TOO_BIG;
	}
	if (!grow_array((void **)&trace->ids, trace->id_count + n, &reader->id_cap, sizeof *trace->ids)) {
		return KV_ERR_NOMEM;
	}

	request->first = (uint32_t)trace->id_count;
	request->count = (uint32_t)n;
	for (size_t i = 0; i < n; i++) {
		json_object *id = json_object_array_get_idx(ids, i);

		if (!json_object_is_type(id, json_type_int)) {
			return KV_ERR_PROTO;
		}
		trace->ids[trace->id_count + i] = json_object_get_uint64(id);
	}
	trace->id_count += n;

	return KV_OK;
}

static kv_status_t add_request(reader_t *reader, json_object *object)
{
	trace_t *trace = reader->trace;
	trace_request_t request = {0};
	uint64_t input;
	uint64_t output;
	uint64_t cap = reader->request_cap;
	json_object *ids;
	kv_status_t status;

	if (!json_object_is_type(object, json_type_object) ||
	    !read_number(object, "timestamp", UINT64_MAX, &request.timestamp_ms) ||
	    !read_number(object, "input_length", UINT32_MAX, &input) ||
	    !read_number(object, "output_length", UINT32_MAX, &output) ||
	    !json_object_object_get_ex(object, "hash_ids", &ids) || !json_object_is_type(ids, json_type_array)) {
		return KV_ERR_PROTO;
	}
	request.input_tokens = (uint32_t)input;
	request.output_tokens = (uint32_t)output;

	status = add_ids(reader, ids, &request);
	if (status != KV_OK) {
		return status;
	}
	if (!grow_array((void **)&trace->requests, trace->count + 1u, &cap, sizeof *trace->requests)) {
		return KV_ERR_NOMEM;
	}
	reader->request_cap = (uint32_t)cap;
	trace->requests[trace->count++] = request;
	trace->input_tokens += input;
	if (request.count > trace->longest) {
		trace->longest = request.count;
	}

	return KV_OK;
}

/* A line with its end, or as much of it as shows that it is too long; a trace of one endless line costs no more memory.
 * 0: there is none. */
static size_t read_line(FILE *file, char line[MAX_LINE + 2u])
{
	size_t len = 0;
	int c = 0;

	while (len <= MAX_LINE && c != '\n' && (c = getc_unlocked(file)) != EOF) {
		line[len++] = (char)c;
	}
	line[len] = '\0';

	return len;
}

static kv_status_t read_lines(reader_t *reader, FILE *file, uint32_t limit, uint32_t *p_line)
{
	json_tokener *tokener = json_tokener_new_ex(8);
	char *line = malloc(MAX_LINE + 2u);
	size_t len;
	kv_status_t status = tokener && line ? KV_OK : KV_ERR_NOMEM;

	if (tokener) {
		json_tokener_set_flags(tokener, JSON_TOKENER_STRICT);
	}
	while (status == KV_OK && (limit == 0 || reader->trace->count < limit) && (len = read_line(file, line)) > 0) {
		json_object *object;

		(*p_line)++;
		if (strspn(line, " \t\r\n") == len) {
			continue;
		}
		if (len > MAX_LINE) {
			status = KV_ERR_TOO_BIG;
			break;
		}
		json_tokener_reset(tokener);
		object = json_tokener_parse_ex(tokener, line, (int)len + 1);
		status = object ? add_request(reader, object) : KV_ERR_PROTO;
		json_object_put(object);
	}
	free(line);
	if (tokener) {
		json_tokener_free(tokener);
	}

	return status;
}

kv_status_t trace_read(const char *path, uint32_t limit, trace_t *trace, char *detail, size_t cap)
{
	reader_t reader = {.trace = trace};
	FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "re");
	uint32_t line = 0;
	kv_status_t status;

	memset(trace, 0, sizeof *trace);
	if (!file) {
		snprintf(detail, cap, "%s: %s", path, strerror(errno));
		return KV_ERR_ARG;
	}

	status = read_lines(&reader, file, limit, &line);
	if (status == KV_OK && ferror(file)) {
		snprintf(detail, cap, "%s: cannot be read", path);
		status = KV_ERR_ARG;
	} else if (status == KV_OK && trace->count == 0) {
		snprintf(detail, cap, "%s: no request in it", path);
		status = KV_ERR_PROTO;
	} else if (status != KV_OK) {
		snprintf(detail, cap, "%s:%u: %s", path, line,
			 status == KV_ERR_PROTO
				 ? "not an object with timestamp, input_length, output_length and hash_ids"
				 : kv_status_text(status));
	}
	if (file != stdin) {
		fclose(file);
	}
	if (status != KV_OK) {
		trace_free(trace);
	}

	return status;
}

void trace_free(trace_t *trace)
{
	free(trace->requests);
	free(trace->ids);
	memset(trace, 0, sizeof *trace);
}

uint64_t trace_tokens(const trace_request_t *request, uint32_t n)
{
	uint64_t tokens = (uint64_t)n * TRACE_BLOCK_TOKENS;

	return n >= request->count && tokens > request->input_tokens ? request->input_tokens : tokens;
}
