/* What the three option files share: one parsed value, and a set of them that is applied whole or not at all. */
#ifndef KV_OPTION_INTERNAL_H
#define KV_OPTION_INTERNAL_H

#include "kv/option.h"
#include "kv/types.h"

#define KV_OPTION_NAME_MAX 128u

typedef struct kv_option_value {
	union {
		int number;    /* BOOL, ENUM */
		uint64_t wide; /* U64, SIZE, DURATION */
		char text[KV_OPTION_STRING_MAX];
	};
} kv_option_value_t;

/* One pending assignment. */
typedef struct kv_option_pending {
	int set;
	unsigned line;
	kv_option_value_t value;
} kv_option_pending_t;

/* Index in the table, or -1. */
int kv_option_find(const kv_option_table_t *table, const char *name);

/* Text to value. KV_ERR_CONFIG with a sentence (without the option's name) in `why`. */
kv_status_t kv_option_parse(const kv_option_t *option, const char *text, kv_option_value_t *value, char *why,
			    size_t cap);

void kv_option_store(const kv_option_t *option, const kv_option_value_t *value, void *values);

/* Store every pending value that is set. */
void kv_option_commit(const kv_option_table_t *table, const kv_option_pending_t *pending, kv_option_source_t source,
		      void *values, kv_option_source_t *sources);

/* Fill *error; returns KV_ERR_CONFIG. `name` of the file, or "". */
kv_status_t kv_option_fail(kv_option_error_t *error, const char *name, unsigned line, unsigned column,
			   const char *format, ...) __attribute__((format(printf, 5, 6)));

/* "unknown option `cpu.siez`; did you mean `cpu.size`?" */
void kv_option_unknown(const kv_option_table_t *table, const char *name, char *out, size_t cap);

/* "KVD_CPU_SIZE" */
char *kv_option_env_name(const kv_option_table_t *table, const kv_option_t *option, char *out, size_t cap);

/* Choice number `index` of "lru,fifo" as a slice; len 0 and NULL behind the last. */
kv_slice_t kv_option_choice(const char *choices, int index);

const char *kv_option_type_name(kv_option_type_t type);

#endif
