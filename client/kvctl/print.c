/* How things look on a terminal. */
#include "kvctl.h"

#include <stdio.h>
#include <string.h>

const char *kvctl_tone(const kvctl_t *ctl, kvctl_tone_t tone)
{
	static const char *const escapes[] = {"", "\033[32m", "\033[31m", "\033[2m", "\033[1m"};

	return ctl->color ? escapes[tone] : "";
}

const char *kvctl_tone_end(const kvctl_t *ctl)
{
	return ctl->color ? "\033[0m" : "";
}

char *kvctl_bar(const kvctl_t *ctl, double fraction, unsigned cells, char *out, size_t cap)
{
	const char *full = ctl->utf8 ? "\u2588" : "#";
	const char *empty = ctl->utf8 ? "\u2591" : ".";
	double share = fraction < 0 ? 0 : fraction > 1 ? 1 : fraction;
	unsigned filled = (unsigned)(share * cells + 0.5);
	size_t at = 0;

	out[0] = '\0';
	for (unsigned i = 0; i < cells; i++) {
		const char *cell = i < filled ? full : empty;
		size_t len = strlen(cell);

		if (at + len >= cap) {
			break;
		}
		memcpy(out + at, cell, len + 1);
		at += len;
	}

	return out;
}

void kvctl_print_text(const char *text)
{
	for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
		if (*p < 0x20 || *p == 0x7f) {
			printf("\\x%02x", *p);
		} else {
			putchar(*p);
		}
	}
}

void kvctl_print_json(struct json_object *json)
{
	printf("%s\n", json_object_to_json_string_ext(json, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE));
}

struct json_object *kvctl_member(struct json_object *object, const char *name)
{
	struct json_object *member = NULL;

	if (json_object_is_type(object, json_type_object)) {
		json_object_object_get_ex(object, name, &member);
	}

	return member;
}

uint64_t kvctl_u64(struct json_object *object, const char *name)
{
	return json_object_get_uint64(kvctl_member(object, name));
}

const char *kvctl_str(struct json_object *object, const char *name)
{
	struct json_object *member = kvctl_member(object, name);

	return json_object_is_type(member, json_type_string) ? json_object_get_string(member) : "";
}

int kvctl_bool(struct json_object *object, const char *name, int otherwise)
{
	struct json_object *member = kvctl_member(object, name);

	return json_object_is_type(member, json_type_boolean) ? json_object_get_boolean(member) : otherwise;
}
