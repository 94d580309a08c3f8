/* Text into a bounded buffer. */
#include "kv/text.h"

#include "kv/utf8.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void kv_text_add(kv_text_t *text, const char *data, size_t len)
{
	if (text->len < text->cap) {
		size_t room = text->cap - text->len - 1;
		size_t n = len < room ? len : room;

		memcpy(text->out + text->len, data, n);
		text->out[text->len + n] = '\0';
	}
	text->len += len;
}

void kv_text_addf(kv_text_t *text, const char *format, ...)
{
	size_t room = text->len < text->cap ? text->cap - text->len : 0;
	va_list args;
	int n;

	va_start(args, format);
	n = vsnprintf(room ? text->out + text->len : NULL, room, format, args);
	va_end(args);

	if (n > 0) {
		text->len += (size_t)n;
	}
}

static void json_char(kv_text_t *text, const uint8_t *data, unsigned n, uint32_t code)
{
	if (code == '"' || code == '\\') {
		kv_text_addf(text, "\\%c", (int)code);
	} else if (code == '\n') {
		kv_text_add(text, "\\n", 2);
	} else if (code == '\t') {
		kv_text_add(text, "\\t", 2);
	} else if (code < 0x20 || (code >= 0x7f && code < 0xa0)) {
		kv_text_addf(text, "\\u%04x", (unsigned)code);
	} else {
		kv_text_add(text, (const char *)data, n);
	}
}

void kv_text_json_n(kv_text_t *text, const char *data, size_t len)
{
	const uint8_t *p = (const uint8_t *)data;
	size_t at = 0;

	kv_text_add(text, "\"", 1);
	while (at < len) {
		uint32_t code;
		unsigned n = kv_utf8_next(p + at, len - at, &code);

		if (n == 0) {
			kv_text_add(text, "\xef\xbf\xbd", 3);
			at++;
			continue;
		}
		json_char(text, p + at, n, code);
		at += n;
	}
	kv_text_add(text, "\"", 1);
}

void kv_text_json(kv_text_t *text, const char *string)
{
	kv_text_json_n(text, string, strlen(string));
}
