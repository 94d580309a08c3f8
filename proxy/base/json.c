/* JSON where it lies. */
#include "json.h"

#include "kv/utf8.h"

#include <string.h>

/* ---- checks: each returns what is behind, or NULL -------------------------------------------- */

static const char *skip_blanks(const char *at, const char *end)
{
	while (at < end && (*at == ' ' || *at == '\t' || *at == '\r' || *at == '\n')) {
		at++;
	}

	return at;
}

static int is_digit(const char *at, const char *end)
{
	return at < end && *at >= '0' && *at <= '9';
}

/* The value of four hexadecimal digits; -1: they are none. */
static int32_t hex4(const char *at, const char *end)
{
	int32_t value = 0;

	for (int i = 0; i < 4; i++, at++) {
		const char *digit = at < end && *at ? strchr("0123456789abcdef0123456789ABCDEF", *at) : NULL;

		if (!digit) {
			return -1;
		}
		value = value << 4 | (int32_t)((digit - "0123456789abcdef0123456789ABCDEF") & 15);
	}

	return value;
}

static const char *skip_escape(const char *at, const char *end)
{
	if (end - at < 2) {
		return NULL;
	}
	if (at[1] == 'u') {
		return hex4(at + 2, end) >= 0 ? at + 6 : NULL;
	}

	return at[1] && strchr("\"\\/bfnrt", at[1]) ? at + 2 : NULL;
}

static const char *skip_string(const char *at, const char *end)
{
	if (at == end || *at != '"') {
		return NULL;
	}
	for (at++; at && at < end && *at != '"';) {
		const unsigned char c = (unsigned char)*at;

		if (c == '\\') {
			at = skip_escape(at, end);
		} else if (c < 0x80) {
			at = c >= ' ' ? at + 1 : NULL;
		} else {
			unsigned n = kv_utf8_next((const uint8_t *)at, (size_t)(end - at), NULL);

			at = n ? at + n : NULL;
		}
	}

	return at && at < end ? at + 1 : NULL;
}

static const char *skip_digits(const char *at, const char *end)
{
	if (!is_digit(at, end)) {
		return NULL;
	}
	while (is_digit(at, end)) {
		at++;
	}

	return at;
}

static const char *skip_number(const char *at, const char *end)
{
	at += *at == '-';
	at = at < end && *at == '0' ? at + 1 : skip_digits(at, end);
	if (at && at < end && *at == '.') {
		at = skip_digits(at + 1, end);
	}
	if (at && at < end && (*at == 'e' || *at == 'E')) {
		at++;
		at += at < end && (*at == '+' || *at == '-');
		at = skip_digits(at, end);
	}

	return at;
}

static const char *skip_scalar(const char *at, const char *end)
{
	static const char *const words[] = {"true", "false", "null"};

	if (*at == '"') {
		return skip_string(at, end);
	}
	for (size_t i = 0; *at >= 'f' && i < sizeof words / sizeof words[0]; i++) {
		const size_t len = strlen(words[i]);

		if ((size_t)(end - at) >= len && memcmp(at, words[i], len) == 0) {
			return at + len;
		}
	}

	return skip_number(at, end);
}

/* A member's name and its colon. */
static const char *skip_name(const char *at, const char *end)
{
	at = skip_string(at, end);
	at = at ? skip_blanks(at, end) : NULL;

	return at && at < end && *at == ':' ? skip_blanks(at + 1, end) : NULL;
}

static char closing(char bracket)
{
	return bracket == '{' ? '}' : ']';
}

/* One value, whatever is inside of it. */
static const char *skip_value(const char *at, const char *end)
{
	char open[KVP_JSON_DEPTH];
	unsigned depth = 0;

	for (;;) {
		if (at == end) {
			return NULL;
		}
		if (*at == '{' || *at == '[') {
			if (depth == KVP_JSON_DEPTH) {
				return NULL;
			}
			open[depth++] = *at;
			at = skip_blanks(at + 1, end);
			if (at == end || *at != closing(open[depth - 1])) {
				at = open[depth - 1] == '{' ? skip_name(at, end) : at;
				if (!at) {
					return NULL;
				}
				continue;
			}
			at++;
			depth--;
		} else if (!(at = skip_scalar(at, end))) {
			return NULL;
		}
		while (depth > 0 && (at = skip_blanks(at, end)) < end && *at == closing(open[depth - 1])) {
			at++;
			depth--;
		}
		if (depth == 0) {
			return at;
		}
		if (at == end || *at != ',') {
			return NULL;
		}
		at = skip_blanks(at + 1, end);
		at = open[depth - 1] == '{' ? skip_name(at, end) : at;
		if (!at) {
			return NULL;
		}
	}
}

/* ---- objects and lists ----------------------------------------------------------------------- */

int kvp_json_open(kvp_json_iter_t *iter, kvp_span_t text, char bracket)
{
	const char *end = text.data ? text.data + text.len : NULL;
	const char *at = text.data ? skip_blanks(text.data, end) : NULL;

	*iter = (kvp_json_iter_t){.close = closing(bracket), .at = at, .end = end};
	if (at == end || *at != bracket) {
		return 0;
	}
	iter->at++;

	return 1;
}

int kvp_json_next(kvp_json_iter_t *iter, kvp_span_t *name, kvp_span_t *value)
{
	const char *end = iter->end, *at = skip_blanks(iter->at, end), *begin;

	if (iter->is_whole || at == end) {
		return 0;
	}
	if (*at == iter->close) {
		iter->is_whole = 1;
		iter->at = at + 1;
		return 0;
	}
	if (iter->n > 0) {
		if (*at != ',') {
			return 0;
		}
		at = skip_blanks(at + 1, end);
	}
	begin = at;
	if (iter->close == '}') {
		at = skip_name(at, end);
		if (!at) {
			return 0;
		}
		if (name) {
			*name = (kvp_span_t){begin, (size_t)(skip_string(begin, end) - begin)};
		}
		begin = at;
	}
	at = skip_value(at, end);
	if (!at) {
		return 0;
	}
	*value = (kvp_span_t){begin, (size_t)(at - begin)};
	iter->at = at;
	iter->n++;

	return 1;
}

int kvp_json_is_end(const kvp_json_iter_t *iter)
{
	return iter->is_whole && skip_blanks(iter->at, iter->end) == iter->end;
}

/* ---- texts ----------------------------------------------------------------------------------- */

/* The character of an escape, and the bytes of the text that it takes; -1: half a surrogate pair. */
static int32_t unescape(const char *at, const char *end, size_t *p_len)
{
	static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
	int32_t high, low;

	*p_len = 2;
	if (at[1] != 'u') {
		return to[strchr(from, at[1]) - from];
	}
	*p_len = 6;
	high = hex4(at + 2, end);
	if (high < 0xd800 || high > 0xdfff) {
		return high;
	}
	low = end - at >= 12 && at[6] == '\\' && at[7] == 'u' ? hex4(at + 8, end) : -1;
	if (high > 0xdbff || low < 0xdc00 || low > 0xdfff) {
		return -1;
	}
	*p_len = 12;

	return 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
}

static size_t utf8_bytes(int32_t code)
{
	return code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
}

static void put_utf8(char *out, int32_t code)
{
	static const int first[] = {0, 0, 0xc0, 0xe0, 0xf0};
	const size_t n = utf8_bytes(code);

	for (size_t i = n - 1; i > 0; i--) {
		out[i] = (char)(0x80 | (code & 0x3f));
		code >>= 6;
	}
	out[0] = (char)(first[n] | code);
}

int kvp_json_text(kvp_span_t string, char *out, size_t cap)
{
	const char *at = string.data + 1, *end = string.data + string.len - 1;
	size_t len = 0;

	while (at < end) {
		int32_t code = (unsigned char)*at;
		size_t taken = 1, n = 1;

		if (*at == '\\') {
			code = unescape(at, end, &taken);
			n = utf8_bytes(code);
		}
		if (code <= 0 || len + n >= cap) {
			return -1;
		}
		if (*at == '\\') {
			put_utf8(out + len, code);
		} else {
			out[len] = *at;
		}
		len += n;
		at += taken;
	}
	out[len] = '\0';

	return (int)len;
}

size_t kvp_json_length(kvp_span_t json)
{
	const char *at = json.data, *end = json.data + json.len;
	size_t len = 0;

	while (at < end) {
		const char *escape = memchr(at, '\\', (size_t)(end - at));
		size_t taken;
		int32_t code;

		if (!escape) {
			return len + (size_t)(end - at);
		}
		code = unescape(escape, end, &taken);
		len += (size_t)(escape - at) + (code < 0 ? 3 : utf8_bytes(code));
		at = escape + taken;
	}

	return len;
}
