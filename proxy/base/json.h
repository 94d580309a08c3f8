/* json.h -- reads JSON where it lies: values are spans of the text, checked in one pass, without memory of their own.
 *
 * Strict RFC 8259: UTF-8, no NaN, no comma at an end, KVP_JSON_DEPTH values inside each other at most. The first
 * character of a value tells its type: { [ " t f n, or one of a number.
 */
#ifndef KVP_JSON_H
#define KVP_JSON_H

#include "pieces.h"

#define KVP_JSON_DEPTH 128 /* tools describe their arguments by nested schemas */

/* The members of an object, or the elements of a list, in their order. */
typedef struct kvp_json_iter {
	const char *at, *end;
	uint64_t n;
	char close;
	int is_whole; /* the end of the object or list has been reached, and all of it is right */
} kvp_json_iter_t;

/* `bracket`: '{' or '['. 0: the text begins with something else. */
int kvp_json_open(kvp_json_iter_t *iter, kvp_span_t text, char bracket);
/* 0: no more, or no JSON: see is_whole. `name` (with its quotes) may be NULL. */
int kvp_json_next(kvp_json_iter_t *iter, kvp_span_t *name, kvp_span_t *value);
/* Is there nothing but blanks behind what was read? */
int kvp_json_is_end(const kvp_json_iter_t *iter);

/* Decode a string of checked JSON. Returns its length; -1: it does not fit, or has a NUL or half a surrogate pair. */
int kvp_json_text(kvp_span_t string, char *out, size_t cap);
/* Bytes of checked JSON with its escapes decoded. */
size_t kvp_json_length(kvp_span_t json);

#endif
