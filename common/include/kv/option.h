/* kv/option.h -- options from a table: file (YAML), command line and KVD_* environment, with help and errors that point
 * at the place.
 *
 * A file is one YAML document. Groups nest (`cpu:` then `size: 1GiB`) or are written out (`cpu.size: 1GiB`). Refused,
 * each with its line and column: unknown names (with the nearest one), repeated keys, anchors, aliases, tags, further
 * documents.
 *
 * A program has one table of kv_option_t and one struct that holds the values. Order: default < file < environment <
 * command line.
 */
#ifndef KV_OPTION_H
#define KV_OPTION_H

#include "kv/status.h"
#include "kv/types.h"

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef enum kv_option_type {
	KV_OPTION_BOOL,     /* int: 0 or 1; "yes/no/true/false/on/off" */
	KV_OPTION_U64,      /* uint64_t */
	KV_OPTION_SIZE,     /* uint64_t bytes */
	KV_OPTION_DURATION, /* uint64_t nanoseconds */
	KV_OPTION_ENUM,     /* int: index into choices */
	KV_OPTION_STRING,   /* char[KV_OPTION_STRING_MAX] */
	KV_OPTION_PATH,     /* char[KV_OPTION_STRING_MAX] */
	KV_OPTION_LIST, /* char[KV_OPTION_STRING_MAX]: a YAML list of plain words (or one comma-separated word), kept
			   comma-separated */
} kv_option_type_t;

#define KV_OPTION_STRING_MAX 512u

typedef enum kv_option_source {
	KV_SOURCE_DEFAULT,
	KV_SOURCE_FILE,
	KV_SOURCE_ENV,
	KV_SOURCE_COMMAND
} kv_option_source_t;

typedef struct kv_option {
	const char *name; /* "cpu.size": YAML path, --cpu.size=, KVD_CPU_SIZE */
	kv_option_type_t type;
	const char *fallback; /* default, as text */
	const char *min;      /* as text; NULL: none (U64, SIZE, DURATION) */
	const char *max;
	const char *choices; /* ENUM: "lru,fifo" */
	int live;            /* 1: may change while running */
	size_t offset;       /* of the value in the values struct */
	const char *help;    /* one sentence */
} kv_option_t;

typedef struct kv_option_table {
	const kv_option_t *options;
	size_t count;
	const char *env_prefix; /* "KVD_" */
} kv_option_table_t;

typedef struct kv_option_error {
	char file[256];
	unsigned line, column; /* 1-based; 0: not from a file */
	char text[512];        /* whole sentence, nearest name included */
} kv_option_error_t;

/* Set every value to its default; sources (one per option, may be NULL) to DEFAULT. */
void kv_options_default(const kv_option_table_t *table, void *values, kv_option_source_t *sources);

/* Read a YAML file. On KV_ERR_CONFIG (unknown or repeated key, bad value, bad YAML) or KV_ERR_IO nothing has changed
 * and *error says where. */
kv_status_t kv_options_file(const kv_option_table_t *table, const char *path, void *values, kv_option_source_t *sources,
			    kv_option_error_t *error);

/* The text of such a file, to be freed by the caller; not parsed yet. KV_ERR_IO: it cannot be read, is no regular file
 * or is too large; *error says why. */
kv_status_t kv_option_file_read(const char *path, char **p_text, size_t *p_len, kv_option_error_t *error);

/* The same for a text in memory. `name` is used in errors. */
kv_status_t kv_options_text(const kv_option_table_t *table, const char *name, kv_slice_t text, void *values,
			    kv_option_source_t *sources, kv_option_error_t *error);

/* One assignment from the command line or a running command, "cpu.size" = "1GiB"; its source becomes
 * KV_SOURCE_COMMAND. */
kv_status_t kv_options_set(const kv_option_table_t *table, const char *name, const char *value, void *values,
			   kv_option_source_t *sources, kv_option_error_t *error);

/* Gets one sentence, valid during the call only. */
typedef void (*kv_option_warn_t)(const char *sentence);

/* Every variable that starts with env_prefix. One that the table does not know belongs to another program, or is
 * misspelt: `warn` (or NULL) gets a sentence with the nearest name, and the others count. env_prefix followed by TEST_
 * is left to tests. On KV_ERR_CONFIG (a bad value) or KV_ERR_NOMEM nothing has changed. */
kv_status_t kv_options_env(const kv_option_table_t *table, char **environ_p, void *values, kv_option_source_t *sources,
			   kv_option_warn_t warn, kv_option_error_t *error);

/* The value of one option as text, as kv_options_set() would take it back. */
char *kv_option_text(const kv_option_t *option, const void *values, char *out, size_t cap);

/* What --describe-options prints (one block an option), and a commented YAML file with every default
 * (conf/kvd.conf). */
void kv_options_describe(const kv_option_table_t *table, FILE *out);
/* The lists of docs/options.md, one a group of names. */
void kv_options_page(const kv_option_table_t *table, FILE *out);
void kv_options_sample(const kv_option_table_t *table, FILE *out);

/* JSON object: name to {value, text, source, default, live, help}; sizes in bytes and durations in ns, `text` as people
 * write them. Returns bytes needed without the NUL, like snprintf. */
size_t kv_options_json(const kv_option_table_t *table, const void *values, const kv_option_source_t *sources, char *out,
		       size_t cap);

#endif
