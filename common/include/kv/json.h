/* kv/json.h -- one JSON document into a buffer that may be too small: it is counted on, like snprintf.
 *
 *   open('{') -> members -> close('}');   open('[') -> elements (name NULL) -> close(']')
 */
#ifndef KV_JSON_H
#define KV_JSON_H

#include "kv/text.h"

typedef struct kv_json {
	kv_text_t text; /* kv_text_fits() tells whether all of it is there */
	int comma;      /* the next element needs one before it */
} kv_json_t;

static inline kv_json_t kv_json(char *out, size_t cap)
{
	return (kv_json_t){kv_text(out, cap), 0};
}

void kv_json_open(kv_json_t *json, const char *name, char bracket);
void kv_json_close(kv_json_t *json, char bracket);
/* As kv_text_json(); NULL: null. */
void kv_json_text(kv_json_t *json, const char *name, const char *value);
void kv_json_u64(kv_json_t *json, const char *name, uint64_t value);
/* Some of them: kv_json_numbers(&json, {"slots", 8}, {"free_slots", n}). */
#define kv_json_numbers(json, ...) kv_json_put_numbers(json, (const kv_json_number_t[]){__VA_ARGS__, {NULL, 0}})
typedef struct kv_json_number {
	const char *name;
	uint64_t value;
} kv_json_number_t;
void kv_json_put_numbers(kv_json_t *json, const kv_json_number_t *numbers);
void kv_json_bool(kv_json_t *json, const char *name, int value);
/* A value that is JSON already: "null", digits. */
void kv_json_raw(kv_json_t *json, const char *name, const char *value);

#endif
