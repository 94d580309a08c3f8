/* Canonical identity text: written, parsed back strictly, hashed, and its groups read. */
#include "kv/identity.h"

#include "kv/key.h"

typedef struct field {
	const char *name;
	int required;
	size_t offset;
} field_t;

static const field_t fields[] = {
#define FIELD_ROW(name, required, help) {#name, required, offsetof(kv_identity_t, name)},
	KV_IDENTITY_FIELDS(FIELD_ROW)
#undef FIELD_ROW
};

#define FIELD_COUNT KV_COUNT_OF(fields)
#define ROOT_PREFIX "kvd identity 1\nnamespace="

static const char *field_get(const kv_identity_t *identity, const field_t *field)
{
	const char *value;

	memcpy(&value, (const char *)identity + field->offset, sizeof value);

	return value;
}

static void field_set(kv_identity_t *identity, const field_t *field, const char *value)
{
	memcpy((char *)identity + field->offset, &value, sizeof value);
}

/* ---- writing --------------------------------------------------------------------------------- */

/* A cursor that never leaves its buffer; `at` goes on counting past the end, so an overflow shows afterwards. */
typedef struct writer {
	char *out;
	size_t cap;
	size_t at;
} writer_t;

static void write_char(writer_t *w, char c)
{
	if (w->at < w->cap) {
		w->out[w->at] = c;
	}
	w->at++;
}

static void write_plain(writer_t *w, const char *text)
{
	for (; *text; text++) {
		write_char(w, *text);
	}
}

static int must_encode(unsigned char c)
{
	return c < 0x20 || c == 0x7f || c == '%' || c == '=';
}

static void write_encoded(writer_t *w, const char *value)
{
	static const char digits[] = "0123456789ABCDEF";

	for (; *value; value++) {
		const unsigned char c = (unsigned char)*value;

		if (must_encode(c)) {
			write_char(w, '%');
			write_char(w, digits[c >> 4]);
			write_char(w, digits[c & 15]);
		} else {
			write_char(w, *value);
		}
	}
}

static void name_field(const char **p_field, const char *name)
{
	if (p_field) {
		*p_field = name;
	}
}

kv_status_t kv_identity_text(const kv_identity_t *identity, char *out, size_t cap, const char **p_field)
{
	writer_t w = {out, cap, 0};

	for (size_t i = 0; i < FIELD_COUNT; i++) {
		const char *value = field_get(identity, &fields[i]);

		if (!value || !*value) {
			if (fields[i].required) {
				name_field(p_field, fields[i].name);
				return KV_ERR_IDENTITY;
			}
			continue;
		}
		if (strlen(value) > KV_IDENTITY_MAX_VALUE) {
			name_field(p_field, fields[i].name);
			return KV_ERR_TOO_BIG;
		}
		write_plain(&w, fields[i].name);
		write_char(&w, '=');
		write_encoded(&w, value);
		write_char(&w, '\n');
		if (w.at > KV_IDENTITY_MAX_TEXT || w.at >= cap) {
			name_field(p_field, fields[i].name);
			return KV_ERR_TOO_BIG;
		}
	}
	write_char(&w, '\0');

	return KV_OK;
}

/* ---- parsing --------------------------------------------------------------------------------- */

static int upper_hex(char c)
{
	if (c >= '0' && c <= '9') {
		return c - '0';
	}
	if (c >= 'A' && c <= 'F') {
		return c - 'A' + 10;
	}

	return -1;
}

/* Decode one value up to its newline into out; returns the bytes of text used, 0 when it is not what
 * write_encoded() writes. */
static size_t decode_value(const char *text, size_t len, char *out, size_t cap)
{
	size_t at = 0;
	size_t n = 0;

	while (at < len && text[at] != '\n') {
		unsigned char c = (unsigned char)text[at++];

		if (c == '%') {
			const int high = at + 2 <= len ? upper_hex(text[at]) : -1;
			const int low = high < 0 ? -1 : upper_hex(text[at + 1]);

			if (low < 0 || !must_encode((unsigned char)(high << 4 | low)) || (high | low) == 0) {
				return 0;
			}
			c = (unsigned char)(high << 4 | low);
			at += 2;
		} else if (must_encode(c)) {
			return 0;
		}
		if (n + 1 >= cap || n >= KV_IDENTITY_MAX_VALUE) {
			return 0;
		}
		out[n++] = (char)c;
	}
	if (at == len || n == 0) {
		return 0;
	}
	out[n] = '\0';

	return at + 1;
}

kv_status_t kv_identity_parse(const char *text, size_t len, kv_identity_t *identity, char *storage, size_t cap,
			      const char **p_field)
{
	kv_identity_t parsed = {0};
	size_t at = 0;
	size_t used = 0;

	if (len > KV_IDENTITY_MAX_TEXT) {
		name_field(p_field, "text");
		return KV_ERR_TOO_BIG;
	}
	if (cap < len + FIELD_COUNT) {
		name_field(p_field, "storage");
		return KV_ERR_ARG;
	}

	for (size_t i = 0; i < FIELD_COUNT; i++) {
		const size_t name_len = strlen(fields[i].name);
		size_t value_len;

		field_set(&parsed, &fields[i], "");
		if (len - at <= name_len || memcmp(text + at, fields[i].name, name_len) != 0 ||
		    text[at + name_len] != '=') {
			if (fields[i].required) {
				name_field(p_field, fields[i].name);
				return KV_ERR_IDENTITY;
			}
			continue;
		}
		at += name_len + 1;
		value_len = decode_value(text + at, len - at, storage + used, cap - used);
		if (value_len == 0) {
			name_field(p_field, fields[i].name);
			return KV_ERR_IDENTITY;
		}
		field_set(&parsed, &fields[i], storage + used);
		used += strlen(storage + used) + 1;
		at += value_len;
	}
	if (at != len) {
		name_field(p_field, "text");
		return KV_ERR_IDENTITY;
	}
	*identity = parsed;

	return KV_OK;
}

/* ---- root digest ----------------------------------------------------------------------------- */

kv_status_t kv_identity_root(const char *ns, const char *text, size_t len, uint8_t root[32])
{
	char buffer[sizeof ROOT_PREFIX + (size_t)3 * KV_IDENTITY_MAX_VALUE + 1 + KV_IDENTITY_MAX_TEXT];
	writer_t w = {buffer, sizeof buffer, 0};

	if (!ns || !*ns) {
		return KV_ERR_ARG;
	}
	if (strlen(ns) > KV_IDENTITY_MAX_VALUE || len > KV_IDENTITY_MAX_TEXT) {
		return KV_ERR_TOO_BIG;
	}

	write_plain(&w, ROOT_PREFIX);
	write_encoded(&w, ns);
	write_char(&w, '\n');
	memcpy(buffer + w.at, text, len);
	kv_sha256(buffer, w.at + len, root);

	return KV_OK;
}

/* ---- groups ---------------------------------------------------------------------------------- */

/* A decimal number written the one way (no sign, no leading zero), at most max. Moves *p_text behind it. */
static int read_number(const char **p_text, uint32_t max, uint32_t *p_value)
{
	const char *p = *p_text;
	uint64_t value = 0;

	if (*p < '0' || *p > '9' || (*p == '0' && p[1] >= '0' && p[1] <= '9')) {
		return 0;
	}
	for (; *p >= '0' && *p <= '9'; p++) {
		value = value * 10 + (uint64_t)(*p - '0');
		if (value > max) {
			return 0;
		}
	}
	*p_text = p;
	*p_value = (uint32_t)value;

	return 1;
}

static int read_word(const char **p_text, const char *word)
{
	const size_t n = strlen(word);

	if (strncmp(*p_text, word, n) != 0) {
		return 0;
	}
	*p_text += n;

	return 1;
}

/* "<id>:full:<tokens>", "<id>:window:<tokens>:<window tokens>" or "<id>:state:<tokens>". */
static int read_group(const char **p_text, uint32_t hash_tokens, kv_group_t *group)
{
	uint32_t id;

	*group = (kv_group_t){0};
	if (!read_number(p_text, UINT8_MAX, &id)) {
		return 0;
	}
	group->id = (uint8_t)id;

	if (read_word(p_text, ":full:")) {
		group->rule = KV_RULE_FULL;
	} else if (read_word(p_text, ":window:")) {
		group->rule = KV_RULE_WINDOW;
	} else if (read_word(p_text, ":state:")) {
		group->rule = KV_RULE_STATE;
	} else {
		return 0;
	}
	if (!read_number(p_text, KV_MAX_UNIT_TOKENS, &group->block_tokens) || group->block_tokens == 0 ||
	    group->block_tokens % hash_tokens != 0) {
		return 0;
	}
	if (group->rule != KV_RULE_WINDOW) {
		return 1;
	}

	return read_word(p_text, ":") && read_number(p_text, UINT32_MAX - 1, &group->window) && group->window > 0;
}

kv_status_t kv_identity_groups(const kv_identity_t *identity, uint32_t *p_hash_tokens, kv_group_t *groups, uint32_t cap,
			       uint32_t *p_count)
{
	const char *number = identity->hash_tokens ? identity->hash_tokens : "";
	const char *list = identity->groups ? identity->groups : "";
	uint32_t hash_tokens;
	uint32_t count = 0;

	if (!read_number(&number, KV_MAX_UNIT_TOKENS, &hash_tokens) || hash_tokens == 0 || *number) {
		return KV_ERR_IDENTITY;
	}

	do {
		kv_group_t group;

		if (!read_group(&list, hash_tokens, &group) || (count > 0 && group.id <= groups[count - 1].id)) {
			return KV_ERR_IDENTITY;
		}
		if (count == cap) {
			return KV_ERR_TOO_BIG;
		}
		groups[count++] = group;
	} while (read_word(&list, ","));
	if (*list) {
		return KV_ERR_IDENTITY;
	}
	*p_hash_tokens = hash_tokens;
	*p_count = count;

	return KV_OK;
}
