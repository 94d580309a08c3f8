/* command.h -- the commands of kve. */
#ifndef KVE_COMMAND_H
#define KVE_COMMAND_H

#include "kv/option.h"
#include "kv/types.h"

#define EXIT_USAGE  2
#define EXIT_WRONG  1
#define EXIT_DEVICE 69
#define EXIT_MEMORY 71
#define EXIT_WRITE  74

typedef struct command {
	const char *name, *about, *usage;
	kv_option_table_t table;
	const char *const *required; /* names of options without which it says what is missing; ends with NULL */
	size_t value_bytes;          /* of what the table fills; at most COMMAND_VALUES */
	/* Returns the exit status. */
	int (*run)(const void *values);
} command_t;

#define COMMAND_VALUES 4096u

extern const command_t command_schedule, command_bench, command_check;

/* Print "kve: " and the sentence to standard error. Returns EXIT_USAGE. */
int fail(const char *format, const char *text);

#endif
