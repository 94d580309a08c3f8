/* What an option table says about itself: help, a sample file, JSON. */
#include "option_internal.h"

#include "kv/json.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* ", 64MiB to 16TiB" */
static void print_range(const kv_option_t *option, FILE *out)
{
	if (option->min && option->max) {
		fprintf(out, ", %s to %s", option->min, option->max);
	} else if (option->min) {
		fprintf(out, ", at least %s", option->min);
	} else if (option->max) {
		fprintf(out, ", at most %s", option->max);
	}
}

/* "size, default 4GiB, 64MiB to 16TiB, needs a restart" */
static void print_facts(const kv_option_t *option, FILE *out)
{
	fprintf(out, "%s, default %s", kv_option_type_name(option->type),
		*option->fallback ? option->fallback : "empty");
	print_range(option, out);
	if (option->type == KV_OPTION_ENUM) {
		fprintf(out, ", one of %s", option->choices);
	}
	fprintf(out, ", %s", option->live ? "may change while running" : "needs a restart");
}

void kv_options_describe(const kv_option_table_t *table, FILE *out)
{
	char env[KV_OPTION_NAME_MAX];

	for (size_t i = 0; i < table->count; i++) {
		const kv_option_t *option = &table->options[i];

		fprintf(out, "%s%s\n    %s\n    ", i ? "\n" : "", option->name, option->help);
		print_facts(option, out);
		fprintf(out, "\n    --%s=VALUE, %s=VALUE\n", option->name,
			kv_option_env_name(table, option, env, sizeof env));
	}
}

/* Text: what Markdown would take for markup is escaped. */
static void print_text(const char *text, FILE *out)
{
	for (; *text; text++) {
		fprintf(out, *text == '<' ? "\\%c" : "%c", *text);
	}
}

/* "size, at least 4MiB", "`lru`, `fifo`" */
static void print_values(const kv_option_t *option, FILE *out)
{
	if (option->type == KV_OPTION_ENUM) {
		for (const char *at = option->choices; *at; at += strcspn(at, ",") + (strchr(at, ',') != NULL)) {
			fprintf(out, "%s`%.*s`", at == option->choices ? "" : ", ", (int)strcspn(at, ","), at);
		}
	} else {
		fprintf(out, "%s", kv_option_type_name(option->type));
	}
	print_range(option, out);
	fprintf(out, "%s", option->live ? "; live" : "");
}

static void print_row(const kv_option_t *option, FILE *out)
{
	fprintf(out, "- `%s` (", option->name);
	print_values(option, out);
	if (*option->fallback) {
		fprintf(out, "; `%s`", option->fallback);
	}
	fprintf(out, "): ");
	print_text(option->help, out);
	fprintf(out, "\n");
}

/* Length of the group's name, the part before the dot; 0: an option without one. */
static size_t group_len(const kv_option_t *option)
{
	const char *dot = strchr(option->name, '.');

	return dot ? (size_t)(dot - option->name) : 0;
}

static int same_group(const kv_option_t *a, const kv_option_t *b)
{
	return group_len(a) == group_len(b) && strncmp(a->name, b->name, group_len(a)) == 0;
}

static int begins_group(const kv_option_table_t *table, size_t index)
{
	size_t first = 0;

	while (!same_group(&table->options[first], &table->options[index])) {
		first++;
	}

	return first == index;
}

void kv_options_page(const kv_option_table_t *table, FILE *out)
{
	for (size_t i = 0; i < table->count; i++) {
		const kv_option_t *option = &table->options[i];
		const size_t len = group_len(option);

		if (!begins_group(table, i)) {
			continue;
		}
		fprintf(out, "\n## %.*s\n\n", len ? (int)len : 7, len ? option->name : "general");
		for (size_t k = i; k < table->count; k++) {
			if (same_group(option, &table->options[k])) {
				print_row(&table->options[k], out);
			}
		}
	}
}

/* A plain YAML word needs no quotes. */
static int is_plain(const char *text)
{
	if (!isalnum((unsigned char)*text) && *text != '/') {
		return 0;
	}
	for (; *text; text++) {
		if (!isalnum((unsigned char)*text) && !strchr("_./-", *text)) {
			return 0;
		}
	}

	return 1;
}

static void print_yaml_value(const kv_option_t *option, FILE *out)
{
	char quoted[2 * KV_OPTION_STRING_MAX];
	kv_text_t text = kv_text(quoted, sizeof quoted);

	if (option->type == KV_OPTION_LIST) {
		fprintf(out, "[");
		for (const char *at = option->fallback; *at; at++) {
			fprintf(out, *at == ',' ? ", " : "%c", *at);
		}
		fprintf(out, "]");
	} else if (is_plain(option->fallback) && strcmp(option->fallback, "null") != 0) {
		fprintf(out, "%s", option->fallback);
	} else {
		kv_text_json(&text, option->fallback);
		fprintf(out, "%s", quoted);
	}
}

void kv_options_sample(const kv_option_table_t *table, FILE *out)
{
	fprintf(out,
		"# Every option with its default. Remove the `#` before a name to set it; groups may also be nested:\n"
		"#     cpu:\n#       size: 4GiB\n"
		"# Later wins: default, this file, environment (%s...), command line.\n",
		table->env_prefix);
	for (size_t i = 0; i < table->count; i++) {
		const kv_option_t *option = &table->options[i];

		fprintf(out, "\n# %s\n# (", option->help);
		print_facts(option, out);
		fprintf(out, ")\n#%s: ", option->name);
		print_yaml_value(option, out);
		fprintf(out, "\n");
	}
}

static void add_json_list(kv_json_t *json, const char *words)
{
	char word[KV_OPTION_STRING_MAX];

	kv_json_open(json, "value", '[');
	while (*words) {
		int len = (int)strcspn(words, ",");

		snprintf(word, sizeof word, "%.*s", len, words);
		kv_json_text(json, NULL, word);
		words += len + (words[len] == ',');
	}
	kv_json_close(json, ']');
}

static void add_json_value(kv_json_t *json, const kv_option_t *option, const void *values)
{
	const uint8_t *at = (const uint8_t *)values + option->offset;
	char word[KV_OPTION_STRING_MAX];
	uint64_t wide;
	int number;

	switch (option->type) {
	case KV_OPTION_BOOL:
		memcpy(&number, at, sizeof number);
		kv_json_bool(json, "value", number);
		break;
	case KV_OPTION_U64:
	case KV_OPTION_SIZE:
	case KV_OPTION_DURATION:
		memcpy(&wide, at, sizeof wide);
		kv_json_u64(json, "value", wide);
		break;
	case KV_OPTION_LIST:
		add_json_list(json, kv_option_text(option, values, word, sizeof word));
		break;
	default:
		kv_json_text(json, "value", kv_option_text(option, values, word, sizeof word));
		break;
	}
}

size_t kv_options_json(const kv_option_table_t *table, const void *values, const kv_option_source_t *sources, char *out,
		       size_t cap)
{
	static const char *const source_names[] = {"default", "file", "environment", "command line"};
	kv_json_t json = kv_json(out, cap);
	char word[KV_OPTION_STRING_MAX];

	kv_json_open(&json, NULL, '{');
	for (size_t i = 0; i < table->count; i++) {
		const kv_option_t *option = &table->options[i];

		kv_json_open(&json, option->name, '{');
		add_json_value(&json, option, values);
		kv_json_text(&json, "text", kv_option_text(option, values, word, sizeof word));
		kv_json_text(&json, "source", source_names[sources ? sources[i] : KV_SOURCE_DEFAULT]);
		kv_json_text(&json, "default", option->fallback);
		kv_json_bool(&json, "live", option->live);
		kv_json_text(&json, "help", option->help);
		kv_json_close(&json, '}');
	}
	kv_json_close(&json, '}');

	return json.text.len;
}
