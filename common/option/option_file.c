/* Options from YAML: libyaml's events, whose marks give every key and value its place. Only what an options file needs
 * is taken:
 * one document, mappings, scalars, lists of scalars. Anchors, aliases, tags and further documents are refused. */
#include "option_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <yaml.h>

#define FILE_MAX_BYTES (1u << 20)
#define MAX_DEPTH      8u

typedef struct reader {
	const kv_option_table_t *table;
	const char *file;
	yaml_parser_t parser;
	yaml_event_t event; /* the current one; owned */
	kv_option_pending_t *pending;
	kv_option_error_t *error;
} reader_t;

/* ---- events ---------------------------------------------------------------------------------- */

static kv_status_t fail_at(reader_t *r, const yaml_mark_t *mark, const char *sentence)
{
	return kv_option_fail(r->error, r->file, (unsigned)mark->line + 1, (unsigned)mark->column + 1, "%s", sentence);
}

static kv_status_t yaml_failure(reader_t *r)
{
	const char *problem = r->parser.problem ? r->parser.problem : "not valid YAML";
	char text[256];

	if (r->parser.error == YAML_MEMORY_ERROR) {
		kv_option_fail(r->error, r->file, 0, 0, "out of memory");
		return KV_ERR_NOMEM;
	}
	snprintf(text, sizeof text, "YAML: %s", problem);
	if (r->parser.error == YAML_READER_ERROR) {
		return kv_option_fail(r->error, r->file, (unsigned)r->parser.mark.line + 1, 0, "%s", text);
	}

	return fail_at(r, &r->parser.problem_mark, text);
}

/* The anchor and tag of an event that can have them. */
static int is_decorated(const yaml_event_t *event)
{
	switch (event->type) {
	case YAML_ALIAS_EVENT:
		return 1;
	case YAML_SCALAR_EVENT:
		return event->data.scalar.anchor || event->data.scalar.tag;
	case YAML_SEQUENCE_START_EVENT:
		return event->data.sequence_start.anchor || event->data.sequence_start.tag;
	case YAML_MAPPING_START_EVENT:
		return event->data.mapping_start.anchor || event->data.mapping_start.tag;
	default:
		return 0;
	}
}

static kv_status_t next_event(reader_t *r)
{
	yaml_event_delete(&r->event);
	memset(&r->event, 0, sizeof r->event);
	if (!yaml_parser_parse(&r->parser, &r->event)) {
		return yaml_failure(r);
	}
	if (is_decorated(&r->event)) {
		return fail_at(r, &r->event.start_mark, "anchors, aliases and tags are not allowed here");
	}

	return KV_OK;
}

static const char *scalar_text(const reader_t *r)
{
	return (const char *)r->event.data.scalar.value;
}

static int scalar_has_nul(const reader_t *r)
{
	return strlen(scalar_text(r)) != r->event.data.scalar.length;
}

/* A key with nothing behind it. */
static int scalar_is_missing(const reader_t *r)
{
	return r->event.data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
	       (r->event.data.scalar.length == 0 || strcmp(scalar_text(r), "~") == 0 ||
		strcmp(scalar_text(r), "null") == 0);
}

/* ---- values ---------------------------------------------------------------------------------- */

static kv_status_t assign(reader_t *r, int option, const char *text, const yaml_mark_t *mark)
{
	const kv_option_t *row = &r->table->options[option];
	kv_option_pending_t *pending = &r->pending[option];
	char why[400], sentence[512];

	if (kv_option_parse(row, text, &pending->value, why, sizeof why) != KV_OK) {
		snprintf(sentence, sizeof sentence, "%s: %s", row->name, why);
		return fail_at(r, mark, sentence);
	}
	pending->set = 1;
	pending->line = (unsigned)mark->line + 1;

	return KV_OK;
}

/* The current event is the start of a sequence: collect its words, comma-separated. */
static kv_status_t take_list(reader_t *r, int option)
{
	const kv_option_t *row = &r->table->options[option];
	yaml_mark_t start = r->event.start_mark;
	char words[KV_OPTION_STRING_MAX] = "", sentence[256];
	size_t len = 0;

	if (row->type != KV_OPTION_LIST) {
		snprintf(sentence, sizeof sentence, "%s takes one value, not a list", row->name);
		return fail_at(r, &start, sentence);
	}
	for (;;) {
		kv_status_t status = next_event(r);
		int n;

		if (status != KV_OK) {
			return status;
		}
		if (r->event.type == YAML_SEQUENCE_END_EVENT) {
			return assign(r, option, words, &start);
		}
		if (r->event.type != YAML_SCALAR_EVENT || scalar_has_nul(r) || r->event.data.scalar.length == 0 ||
		    strchr(scalar_text(r), ',')) {
			return fail_at(r, &r->event.start_mark, "a list holds plain words");
		}
		n = snprintf(words + len, sizeof words - len, "%s%s", len ? "," : "", scalar_text(r));
		if (n < 0 || (size_t)n >= sizeof words - len) {
			return fail_at(r, &r->event.start_mark, "the list is too long");
		}
		len += (size_t)n;
	}
}

static kv_status_t take_scalar(reader_t *r, int option)
{
	yaml_mark_t mark = r->event.start_mark;
	char sentence[256];

	if (scalar_is_missing(r)) {
		snprintf(sentence, sizeof sentence, "%s has no value (an empty one is written \"\")",
			 r->table->options[option].name);
		return fail_at(r, &mark, sentence);
	}
	if (scalar_has_nul(r)) {
		return fail_at(r, &mark, "the value holds a NUL byte");
	}

	return assign(r, option, scalar_text(r), &mark);
}

/* ---- keys ------------------------------------------------------------------------------------ */

/* How many options lie below "cpu."; *p_line: where one of them has been set already, 0: none. */
static unsigned below_group(const reader_t *r, const char *group, unsigned *p_line)
{
	size_t len = strlen(group);
	unsigned count = 0;

	*p_line = 0;
	for (size_t i = 0; i < r->table->count; i++) {
		const char *name = r->table->options[i].name;

		if (strncmp(name, group, len) == 0 && name[len] == '.') {
			count++;
			*p_line = r->pending[i].set ? r->pending[i].line : *p_line;
		}
	}

	return count;
}

/* A key's dotted name that is no option and no group. */
static kv_status_t fail_unknown(reader_t *r, const yaml_mark_t *mark, const char *name)
{
	char sentence[400];

	kv_option_unknown(r->table, name, sentence, sizeof sentence);

	return fail_at(r, mark, sentence);
}

static kv_status_t check_key(reader_t *r, const char *name, const yaml_mark_t *mark)
{
	int option = kv_option_find(r->table, name);
	char sentence[300];
	unsigned line;

	if (option < 0) {
		return below_group(r, name, &line) > 0 ? KV_OK : fail_unknown(r, mark, name);
	}
	if (r->pending[option].set) {
		snprintf(sentence, sizeof sentence, "%s is set twice (first in line %u)", name,
			 r->pending[option].line);
		return fail_at(r, mark, sentence);
	}

	return KV_OK;
}

/* A mapping below `name`. */
static kv_status_t check_group(reader_t *r, const char *name)
{
	char sentence[300];
	unsigned line;

	if (below_group(r, name, &line) == 0) {
		snprintf(sentence, sizeof sentence, "%s takes one value, not a mapping", name);
		return fail_at(r, &r->event.start_mark, sentence);
	}
	if (line > 0) {
		snprintf(sentence, sizeof sentence, "%s is given twice (first in line %u)", name, line);
		return fail_at(r, &r->event.start_mark, sentence);
	}

	return KV_OK;
}

/* The value of the key `name` is the current event. *p_deeper: it is a mapping that starts here. */
static kv_status_t take_value(reader_t *r, const char *name, int *p_deeper)
{
	int option = kv_option_find(r->table, name);
	char sentence[300];

	*p_deeper = r->event.type == YAML_MAPPING_START_EVENT;
	if (*p_deeper) {
		return check_group(r, name);
	}
	if (option < 0) {
		snprintf(sentence, sizeof sentence, "%s is a group of options, not an option", name);
		return fail_at(r, &r->event.start_mark, sentence);
	}

	return r->event.type == YAML_SEQUENCE_START_EVENT ? take_list(r, option) : take_scalar(r, option);
}

/* Append ".key" (or "key" at the top) to the name of `len` bytes. */
static kv_status_t append_key(reader_t *r, char *name, size_t len)
{
	int n;

	if (r->event.type != YAML_SCALAR_EVENT || scalar_has_nul(r)) {
		return fail_at(r, &r->event.start_mark, "a key is a plain word");
	}
	n = snprintf(name + len, KV_OPTION_NAME_MAX - len, "%s%s", len ? "." : "", scalar_text(r));
	if (n < 0 || (size_t)n >= KV_OPTION_NAME_MAX - len) {
		return fail_at(r, &r->event.start_mark, "the name of the option is too long");
	}

	return KV_OK;
}

/* The mapping that has just started, with all mappings in it. */
static kv_status_t take_mapping(reader_t *r)
{
	char name[KV_OPTION_NAME_MAX] = "";
	size_t lens[MAX_DEPTH + 1] = {0};
	unsigned depth = 0;

	for (;;) {
		kv_status_t status = next_event(r);
		yaml_mark_t mark = r->event.start_mark;
		int deeper;

		if (status != KV_OK) {
			return status;
		}
		if (r->event.type == YAML_MAPPING_END_EVENT) {
			if (depth == 0) {
				return KV_OK;
			}
			depth--;
			continue;
		}
		status = append_key(r, name, lens[depth]);
		status = status == KV_OK ? check_key(r, name, &mark) : status;
		status = status == KV_OK ? next_event(r) : status;
		status = status == KV_OK ? take_value(r, name, &deeper) : status;
		if (status != KV_OK) {
			return status;
		}
		if (deeper && depth == MAX_DEPTH) {
			return fail_at(r, &r->event.start_mark, "nested too deeply");
		}
		if (deeper) {
			lens[++depth] = strlen(name);
		}
	}
}

static kv_status_t take_document(reader_t *r)
{
	kv_status_t status = next_event(r);

	if (status != KV_OK) {
		return status;
	}
	if (r->event.type == YAML_MAPPING_START_EVENT) {
		status = take_mapping(r);
	} else if (r->event.type != YAML_SCALAR_EVENT || !scalar_is_missing(r)) {
		status = fail_at(r, &r->event.start_mark, "options are written as `name: value`");
	}

	return status == KV_OK ? next_event(r) : status; /* the end of the document */
}

/* Stream start, at most one document, stream end. */
static kv_status_t take_stream(reader_t *r)
{
	unsigned documents = 0;
	kv_status_t status = next_event(r);

	while (status == KV_OK) {
		status = next_event(r);
		if (status != KV_OK || r->event.type == YAML_STREAM_END_EVENT) {
			return status;
		}
		if (++documents > 1) {
			return fail_at(r, &r->event.start_mark, "a second document is not allowed here");
		}
		status = take_document(r);
	}

	return status;
}

kv_status_t kv_options_text(const kv_option_table_t *table, const char *name, kv_slice_t text, void *values,
			    kv_option_source_t *sources, kv_option_error_t *error)
{
	reader_t r = {.table = table, .file = name, .error = error};
	kv_status_t status = KV_ERR_NOMEM;

	r.pending = calloc(table->count, sizeof *r.pending);
	if (!r.pending || !yaml_parser_initialize(&r.parser)) {
		kv_option_fail(error, name, 0, 0, "out of memory");
		goto err_pending;
	}
	yaml_parser_set_encoding(&r.parser, YAML_UTF8_ENCODING);
	yaml_parser_set_input_string(&r.parser, text.data, text.len);

	status = take_stream(&r);
	if (status == KV_OK) {
		kv_option_commit(table, r.pending, KV_SOURCE_FILE, values, sources);
	}
	yaml_event_delete(&r.event);
	yaml_parser_delete(&r.parser);
err_pending:
	free(r.pending);

	return status;
}

/* ---- file ------------------------------------------------------------------------------------ */

static kv_status_t fail_file(kv_option_error_t *error, const char *path, const char *why)
{
	kv_option_fail(error, path, 0, 0, "cannot read the file: %s", why);

	return KV_ERR_IO;
}

/* All of fd, at most cap bytes; -1 on an error. */
static ssize_t read_all(int fd, char *out, size_t cap)
{
	size_t len = 0;

	while (len < cap) {
		ssize_t n = read(fd, out + len, cap - len);

		if (n < 0 && errno == EINTR) {
			continue;
		}
		if (n < 0) {
			return -1;
		}
		if (n == 0) {
			break;
		}
		len += (size_t)n;
	}

	return (ssize_t)len;
}

kv_status_t kv_option_file_read(const char *path, char **p_text, size_t *p_len, kv_option_error_t *error)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	char *text = NULL;
	kv_status_t status = KV_OK;
	struct stat st;
	ssize_t len;

	if (fd < 0 || fstat(fd, &st) != 0) {
		status = fail_file(error, path, strerror(errno));
		goto done;
	}
	if (!S_ISREG(st.st_mode)) {
		status = fail_file(error, path, "it is not a regular file");
		goto done;
	}
	text = malloc(FILE_MAX_BYTES + 1);
	len = text ? read_all(fd, text, FILE_MAX_BYTES + 1) : -1;
	if (len < 0) {
		status = fail_file(error, path, strerror(errno));
		goto done;
	}
	if (len > (ssize_t)FILE_MAX_BYTES) {
		status = fail_file(error, path, "it is larger than 1MiB");
		goto done;
	}
	*p_text = text;
	*p_len = (size_t)len;
	text = NULL;
done:
	free(text);
	if (fd >= 0) {
		close(fd);
	}

	return status;
}

kv_status_t kv_options_file(const kv_option_table_t *table, const char *path, void *values, kv_option_source_t *sources,
			    kv_option_error_t *error)
{
	char *text;
	size_t len;
	kv_status_t status = kv_option_file_read(path, &text, &len, error);

	if (status == KV_OK) {
		status = kv_options_text(table, path, (kv_slice_t){(const uint8_t *)text, (uint32_t)len}, values,
					 sources, error);
		free(text);
	}

	return status;
}
