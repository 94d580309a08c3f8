/* Options: one value at a time, defaults, assignments and the environment. Files: option_file.c. Help:
 * option_print.c. */
#include "option_internal.h"

#include "kv/env.h"
#include "kv/text.h"
#include "kv/units.h"
#include "kv/utf8.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

int kv_option_find(const kv_option_table_t *table, const char *name)
{
	for (size_t i = 0; i < table->count; i++) {
		if (strcmp(table->options[i].name, name) == 0) {
			return (int)i;
		}
	}

	return -1;
}

const char *kv_option_type_name(kv_option_type_t type)
{
	static const char *const names[] = {"yes/no", "number", "size", "duration", "choice", "text", "path", "list"};

	return (unsigned)type < KV_COUNT_OF(names) ? names[type] : "unknown";
}

kv_slice_t kv_option_choice(const char *choices, int index)
{
	for (; choices && *choices; index--) {
		size_t len = strcspn(choices, ",");

		if (index == 0) {
			return (kv_slice_t){(const uint8_t *)choices, (uint32_t)len};
		}
		choices += len + (choices[len] == ',');
	}

	return (kv_slice_t){NULL, 0};
}

kv_status_t kv_option_fail(kv_option_error_t *error, const char *name, unsigned line, unsigned column,
			   const char *format, ...)
{
	va_list args;

	memset(error, 0, sizeof *error);
	snprintf(error->file, sizeof error->file, "%s", name);
	error->line = line;
	error->column = column;
	va_start(args, format);
	vsnprintf(error->text, sizeof error->text, format, args);
	va_end(args);

	return KV_ERR_CONFIG;
}

/* ---- one value ------------------------------------------------------------------------------- */

static kv_status_t parse_bool(const char *text, int *p_value, kv_text_t *why)
{
	static const char *const words[] = {"no", "yes", "false", "true", "off", "on"};

	for (unsigned i = 0; i < KV_COUNT_OF(words); i++) {
		if (strcmp(text, words[i]) == 0) {
			*p_value = (int)(i & 1u);
			return KV_OK;
		}
	}
	kv_text_addf(why, "`%s` is neither yes nor no", text);

	return KV_ERR_CONFIG;
}

static kv_status_t parse_enum(const kv_option_t *option, const char *text, int *p_value, kv_text_t *why)
{
	char copy[16][64];
	const char *names[16];
	const char *near;
	int count = 0;

	for (; count < 16; count++) {
		kv_slice_t choice = kv_option_choice(option->choices, count);

		if (!choice.data) {
			break;
		}
		snprintf(copy[count], sizeof copy[count], "%.*s", (int)choice.len, (const char *)choice.data);
		names[count] = copy[count];
		if (strcmp(copy[count], text) == 0) {
			*p_value = count;
			return KV_OK;
		}
	}

	near = kv_nearest(text, names, (size_t)count);
	kv_text_addf(why, "`%s` is not one of %s", text, option->choices);
	if (near) {
		kv_text_addf(why, "; did you mean `%s`?", near);
	}

	return KV_ERR_CONFIG;
}

static kv_status_t parse_wide(kv_option_type_t type, const char *text, uint64_t *p_value)
{
	switch (type) {
	case KV_OPTION_SIZE:
		return kv_parse_size(text, p_value);
	case KV_OPTION_DURATION:
		return kv_parse_duration(text, p_value);
	default:
		return kv_parse_u64(text, p_value);
	}
}

static kv_status_t parse_number(const kv_option_t *option, const char *text, uint64_t *p_value, kv_text_t *why)
{
	static const char *const wanted[] = {"a whole number", "a size (64MiB, 1.5GiB, 4096)",
					     "a duration (250us, 20ms, 1.5s, 10m)"};
	uint64_t value, bound;

	if (parse_wide(option->type, text, &value) != KV_OK) {
		kv_text_addf(why, "`%s` is not %s", text, wanted[option->type - KV_OPTION_U64]);
		return KV_ERR_CONFIG;
	}
	if (option->min && parse_wide(option->type, option->min, &bound) == KV_OK && value < bound) {
		kv_text_addf(why, "%s is below the minimum, %s", text, option->min);
		return KV_ERR_CONFIG;
	}
	if (option->max && parse_wide(option->type, option->max, &bound) == KV_OK && value > bound) {
		kv_text_addf(why, "%s is above the maximum, %s", text, option->max);
		return KV_ERR_CONFIG;
	}
	*p_value = value;

	return KV_OK;
}

/* Plain words between commas; an empty list is fine, an empty word is not. */
static int list_is_clean(const char *text)
{
	while (*text) {
		size_t len = strcspn(text, ",");

		if (len == 0 || memchr(text, ' ', len) || (text[len] == ',' && text[len + 1] == '\0')) {
			return 0;
		}
		text += len + (text[len] == ',');
	}

	return 1;
}

static kv_status_t parse_text(const kv_option_t *option, const char *text, char *out, kv_text_t *why)
{
	size_t len = strlen(text);

	if (len >= KV_OPTION_STRING_MAX) {
		kv_text_addf(why, "the value is longer than %u bytes", KV_OPTION_STRING_MAX - 1);
		return KV_ERR_CONFIG;
	}
	if (!kv_utf8_clean((const uint8_t *)text, len, 0)) {
		kv_text_addf(why, "the value has control characters or is not UTF-8");
		return KV_ERR_CONFIG;
	}
	if (option->type == KV_OPTION_LIST && !list_is_clean(text)) {
		kv_text_addf(why, "`%s` is not a list of words (no spaces, no empty word)", text);
		return KV_ERR_CONFIG;
	}
	memcpy(out, text, len + 1);

	return KV_OK;
}

kv_status_t kv_option_parse(const kv_option_t *option, const char *text, kv_option_value_t *value, char *why,
			    size_t cap)
{
	kv_text_t sentence = kv_text(why, cap);

	switch (option->type) {
	case KV_OPTION_BOOL:
		return parse_bool(text, &value->number, &sentence);
	case KV_OPTION_ENUM:
		return parse_enum(option, text, &value->number, &sentence);
	case KV_OPTION_U64:
	case KV_OPTION_SIZE:
	case KV_OPTION_DURATION:
		return parse_number(option, text, &value->wide, &sentence);
	default:
		return parse_text(option, text, value->text, &sentence);
	}
}

void kv_option_store(const kv_option_t *option, const kv_option_value_t *value, void *values)
{
	uint8_t *at = (uint8_t *)values + option->offset;

	switch (option->type) {
	case KV_OPTION_BOOL:
	case KV_OPTION_ENUM:
		memcpy(at, &value->number, sizeof value->number);
		break;
	case KV_OPTION_U64:
	case KV_OPTION_SIZE:
	case KV_OPTION_DURATION:
		memcpy(at, &value->wide, sizeof value->wide);
		break;
	default:
		memcpy(at, value->text, strlen(value->text) + 1);
		break;
	}
}

void kv_option_commit(const kv_option_table_t *table, const kv_option_pending_t *pending, kv_option_source_t source,
		      void *values, kv_option_source_t *sources)
{
	for (size_t i = 0; i < table->count; i++) {
		if (!pending[i].set) {
			continue;
		}
		kv_option_store(&table->options[i], &pending[i].value, values);
		if (sources) {
			sources[i] = source;
		}
	}
}

/* The largest unit that holds the value without a fraction: reading it back gives the same value. */
static void exact_quantity(uint64_t value, int is_size, char *out, size_t cap)
{
	static const struct {
		const char *name;
		uint64_t factor;
	} units[2][7] = {
		{{"d", UINT64_C(86400000000000)},
		 {"h", UINT64_C(3600000000000)},
		 {"m", UINT64_C(60000000000)},
		 {"s", 1000000000},
		 {"ms", 1000000},
		 {"us", 1000},
		 {"ns", 1}},
		{{"PiB", UINT64_C(1) << 50},
		 {"TiB", UINT64_C(1) << 40},
		 {"GiB", 1u << 30},
		 {"MiB", 1u << 20},
		 {"KiB", 1u << 10},
		 {"B", 1},
		 {"B", 1}},
	};
	unsigned i = 0;

	if (value == 0) {
		snprintf(out, cap, is_size ? "0B" : "0s");
		return;
	}
	while (value % units[is_size][i].factor != 0) {
		i++;
	}
	snprintf(out, cap, "%llu%s", (unsigned long long)(value / units[is_size][i].factor), units[is_size][i].name);
}

char *kv_option_text(const kv_option_t *option, const void *values, char *out, size_t cap)
{
	const uint8_t *at = (const uint8_t *)values + option->offset;
	kv_slice_t choice;
	uint64_t wide;
	int number;

	switch (option->type) {
	case KV_OPTION_BOOL:
		memcpy(&number, at, sizeof number);
		snprintf(out, cap, "%s", number ? "yes" : "no");
		break;
	case KV_OPTION_ENUM:
		memcpy(&number, at, sizeof number);
		choice = kv_option_choice(option->choices, number);
		snprintf(out, cap, "%.*s", (int)choice.len, choice.data ? (const char *)choice.data : "");
		break;
	case KV_OPTION_U64:
		memcpy(&wide, at, sizeof wide);
		snprintf(out, cap, "%llu", (unsigned long long)wide);
		break;
	case KV_OPTION_SIZE:
	case KV_OPTION_DURATION:
		memcpy(&wide, at, sizeof wide);
		exact_quantity(wide, option->type == KV_OPTION_SIZE, out, cap);
		break;
	default:
		snprintf(out, cap, "%s", (const char *)at);
		break;
	}

	return out;
}

/* ---- defaults and assignments ---------------------------------------------------------------- */

void kv_options_default(const kv_option_table_t *table, void *values, kv_option_source_t *sources)
{
	for (size_t i = 0; i < table->count; i++) {
		kv_option_value_t value;
		char why[128];

		kv_assert(kv_option_parse(&table->options[i], table->options[i].fallback, &value, why, sizeof why) ==
			  KV_OK);
		kv_option_store(&table->options[i], &value, values);
		if (sources) {
			sources[i] = KV_SOURCE_DEFAULT;
		}
	}
}

#define NAMES_MAX 256u

/* Option names first; then, so that a misspelt group is recognised too, every group ("cpu"). */
void kv_option_unknown(const kv_option_table_t *table, const char *name, char *out, size_t cap)
{
	char groups[NAMES_MAX / 2][64];
	const char *names[NAMES_MAX];
	kv_text_t text = kv_text(out, cap);
	size_t count = 0, group_count = 0;
	const char *near;

	for (size_t i = 0; i < table->count && count < NAMES_MAX / 2; i++) {
		names[count++] = table->options[i].name;
	}
	for (size_t i = 0; i < table->count && group_count < NAMES_MAX / 2; i++) {
		const char *dot = strchr(table->options[i].name, '.');

		if (dot) {
			snprintf(groups[group_count], sizeof groups[0], "%.*s", (int)(dot - table->options[i].name),
				 table->options[i].name);
			names[count++] = groups[group_count++];
		}
	}

	near = kv_nearest(name, names, count);
	kv_text_addf(&text, "unknown option `%s`", name);
	if (near) {
		kv_text_addf(&text, "; did you mean `%s`?", near);
	}
}

kv_status_t kv_options_set(const kv_option_table_t *table, const char *name, const char *value, void *values,
			   kv_option_source_t *sources, kv_option_error_t *error)
{
	int i = kv_option_find(table, name);
	kv_option_value_t parsed;
	char why[400];

	if (i < 0) {
		kv_option_unknown(table, name, why, sizeof why);
		return kv_option_fail(error, "", 0, 0, "%s", why);
	}
	if (kv_option_parse(&table->options[i], value, &parsed, why, sizeof why) != KV_OK) {
		return kv_option_fail(error, "", 0, 0, "%s: %s", name, why);
	}
	kv_option_store(&table->options[i], &parsed, values);
	if (sources) {
		sources[i] = KV_SOURCE_COMMAND;
	}

	return KV_OK;
}

/* ---- environment ----------------------------------------------------------------------------- */

char *kv_option_env_name(const kv_option_table_t *table, const kv_option_t *option, char *out, size_t cap)
{
	kv_text_t text = kv_text(out, cap);

	kv_text_addf(&text, "%s", table->env_prefix);
	for (const char *at = option->name; *at; at++) {
		char c = *at == '.' || *at == '-' ? '_' : *at;

		c = c >= 'a' && c <= 'z' ? (char)(c - 'a' + 'A') : c;
		kv_text_add(&text, &c, 1);
	}

	return out;
}

static int find_env(const kv_option_table_t *table, const char *name)
{
	char wanted[KV_OPTION_NAME_MAX];

	for (size_t i = 0; i < table->count; i++) {
		if (strcmp(kv_option_env_name(table, &table->options[i], wanted, sizeof wanted), name) == 0) {
			return (int)i;
		}
	}

	return -1;
}

static void warn_unknown_env(const kv_option_table_t *table, const char *name, kv_option_warn_t warn)
{
	char(*storage)[KV_OPTION_NAME_MAX] = calloc(table->count + 1, sizeof *storage);
	const char **names = calloc(table->count + 1, sizeof *names);
	const char *near = NULL;
	char sentence[400];

	if (storage && names) {
		for (size_t i = 0; i < table->count; i++) {
			names[i] = kv_option_env_name(table, &table->options[i], storage[i], sizeof storage[i]);
		}
		near = kv_nearest(name, names, table->count);
	}
	snprintf(sentence, sizeof sentence, "unknown environment variable %s is ignored%s%s%s", name,
		 near ? "; did you mean `" : "", near ? near : "", near ? "`?" : "");
	warn(sentence);
	free(names);
	free(storage);
}

static kv_status_t take_env(const kv_option_table_t *table, const char *entry, kv_option_pending_t *pending,
			    kv_option_warn_t warn, kv_option_error_t *error)
{
	size_t len = strcspn(entry, "=");
	char name[KV_OPTION_NAME_MAX], why[400];
	int i = -1;

	snprintf(name, sizeof name, "%.*s", (int)(len < 1000 ? len : 1000), entry);
	if (len < sizeof name && entry[len] == '=') {
		i = find_env(table, name);
	}
	if (i < 0) {
		if (warn) {
			warn_unknown_env(table, name, warn);
		}
		return KV_OK;
	}
	if (kv_option_parse(&table->options[i], entry + len + 1, &pending[i].value, why, sizeof why) != KV_OK) {
		return kv_option_fail(error, "", 0, 0, "%s: %s", name, why);
	}
	pending[i].set = 1;

	return KV_OK;
}

kv_status_t kv_options_env(const kv_option_table_t *table, char **environ_p, void *values, kv_option_source_t *sources,
			   kv_option_warn_t warn, kv_option_error_t *error)
{
	size_t prefix = strlen(table->env_prefix);
	kv_option_pending_t *pending = calloc(table->count, sizeof *pending);
	kv_status_t status = KV_OK;

	if (!pending) {
		kv_option_fail(error, "", 0, 0, "out of memory");
		return KV_ERR_NOMEM;
	}

	for (; *environ_p && status == KV_OK; environ_p++) {
		if (strncmp(*environ_p, table->env_prefix, prefix) != 0 ||
		    strncmp(*environ_p + prefix, "TEST_", 5) == 0) {
			continue;
		}
		status = take_env(table, *environ_p, pending, warn, error);
	}
	if (status == KV_OK) {
		kv_option_commit(table, pending, KV_SOURCE_ENV, values, sources);
	}
	free(pending);

	return status;
}
