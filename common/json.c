/* Members and elements of a JSON document. */
#include "kv/json.h"

#include <inttypes.h>
#include <string.h>

static void begin_element(kv_json_t *json, const char *name)
{
	if (json->comma) {
		kv_text_add(&json->text, ",", 1);
	}
	json->comma = 1;
	if (name) {
		kv_text_json(&json->text, name);
		kv_text_add(&json->text, ":", 1);
	}
}

void kv_json_open(kv_json_t *json, const char *name, char bracket)
{
	begin_element(json, name);
	kv_text_add(&json->text, &bracket, 1);
	json->comma = 0;
}

void kv_json_close(kv_json_t *json, char bracket)
{
	kv_text_add(&json->text, &bracket, 1);
	json->comma = 1;
}

void kv_json_text(kv_json_t *json, const char *name, const char *value)
{
	if (!value) {
		kv_json_raw(json, name, "null");
		return;
	}
	begin_element(json, name);
	kv_text_json(&json->text, value);
}

void kv_json_u64(kv_json_t *json, const char *name, uint64_t value)
{
	begin_element(json, name);
	kv_text_addf(&json->text, "%" PRIu64, value);
}

void kv_json_put_numbers(kv_json_t *json, const kv_json_number_t *numbers)
{
	for (; numbers->name; numbers++) {
		kv_json_u64(json, numbers->name, numbers->value);
	}
}

void kv_json_bool(kv_json_t *json, const char *name, int value)
{
	kv_json_raw(json, name, value ? "true" : "false");
}

void kv_json_raw(kv_json_t *json, const char *name, const char *value)
{
	begin_element(json, name);
	kv_text_add(&json->text, value, strlen(value));
}
