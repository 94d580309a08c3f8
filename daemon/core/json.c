#include "core/json.h"

#include <stdio.h>

static void put_char(kvd_json_t *json, char c)
{
	if (json->len + 1 < json->cap) {
		json->out[json->len] = c;
		json->out[json->len + 1] = '\0';
	}
	json->len++;
}

static void put_string(kvd_json_t *json, const char *text)
{
	put_char(json, '"');
	for (; *text; text++) {
		unsigned char c = (unsigned char)*text;

		if (c == '"' || c == '\\') {
			put_char(json, '\\');
			put_char(json, (char)c);
		} else if (c < 0x20) {
			char escape[8];

			snprintf(escape, sizeof escape, "\\u%04x", c);
			for (const char *e = escape; *e; e++) {
				put_char(json, *e);
			}
		} else {
			put_char(json, (char)c);
		}
	}
	put_char(json, '"');
}

static void begin_element(kvd_json_t *json, const char *name)
{
	if (json->comma) {
		put_char(json, ',');
	}
	json->comma = 1;
	if (name) {
		put_string(json, name);
		put_char(json, ':');
	}
}

void kvd_json_open(kvd_json_t *json, const char *name, char bracket)
{
	begin_element(json, name);
	put_char(json, bracket);
	json->comma = 0;
}

void kvd_json_close(kvd_json_t *json, char bracket)
{
	put_char(json, bracket);
	json->comma = 1;
}

void kvd_json_text(kvd_json_t *json, const char *name, const char *value)
{
	begin_element(json, name);
	put_string(json, value);
}

void kvd_json_u64(kvd_json_t *json, const char *name, uint64_t value)
{
	char digits[24];

	begin_element(json, name);
	snprintf(digits, sizeof digits, "%llu", (unsigned long long)value);
	for (const char *d = digits; *d; d++) {
		put_char(json, *d);
	}
}

void kvd_json_bool(kvd_json_t *json, const char *name, int value)
{
	begin_element(json, name);
	for (const char *c = value ? "true" : "false"; *c; c++) {
		put_char(json, *c);
	}
}
