/* kve -- what the engine does with a step: planned, measured, and checked. */
#include "command.h"

#include "kv/system.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define MAX_OPTIONS 32u

static const command_t *const commands[] = {&command_schedule, &command_bench, &command_check};

static void print_help(FILE *out)
{
	for (size_t c = 0; c < KV_COUNT_OF(commands); c++) {
		const command_t *command = commands[c];

		fprintf(out, "%skve %s: %s\n\nusage: kve %s %s\n\n", c ? "\n" : "", command->name, command->about,
			command->name, command->usage);
		for (size_t i = 0; i < command->table.count; i++) {
			fprintf(out, "  --%-18s %s\n", command->table.options[i].name, command->table.options[i].help);
		}
	}
}

/* ---- options --------------------------------------------------------------------------------- */

/* "--name=value" or "--name" "value"; *p_i: the last argument that was taken. */
static int set_option(const command_t *command, char **argv, int *p_i, void *values, kv_option_source_t *sources)
{
	const char *arg = argv[*p_i], *value = strchr(arg, '=');
	kv_option_error_t error;
	char name[64];
	const size_t len = value ? (size_t)(value - arg) : strlen(arg);

	if (len < 3 || strncmp(arg, "--", 2) != 0 || len - 2 >= sizeof name) {
		return fail("\"%.100s\" is not an option; `kve --help` lists them", arg);
	}
	snprintf(name, sizeof name, "%.*s", (int)len - 2, arg + 2);
	if (!value && argv[*p_i + 1]) {
		value = argv[++*p_i];
	} else if (value) {
		value++;
	} else {
		return fail("--%s needs a value", name);
	}

	return kv_options_set(&command->table, name, value, values, sources, &error) == KV_OK ? 0
											      : fail("%s", error.text);
}

static int find_missing(const command_t *command, const kv_option_source_t *sources)
{
	for (const char *const *name = command->required; *name; name++) {
		for (size_t o = 0; o < command->table.count; o++) {
			if (strcmp(command->table.options[o].name, *name) == 0 && sources[o] == KV_SOURCE_DEFAULT) {
				return fail("--%s is missing; `kve --help` says what it means", *name);
			}
		}
	}

	return 0;
}

static int parse_options(const command_t *command, char **argv, void *values)
{
	kv_option_source_t sources[MAX_OPTIONS];
	int rc = 0;

	kv_options_default(&command->table, values, sources);
	for (int i = 2; argv[i] && rc == 0; i++) {
		rc = set_option(command, argv, &i, values, sources);
	}

	return rc ? rc : find_missing(command, sources);
}

static const command_t *find_command(const char *name)
{
	for (size_t c = 0; c < KV_COUNT_OF(commands); c++) {
		if (strcmp(commands[c]->name, name) == 0) {
			return commands[c];
		}
	}

	return NULL;
}

int main(int argc, char **argv)
{
	const command_t *command = argc > 1 ? find_command(argv[1]) : NULL;
	_Alignas(max_align_t) char values[COMMAND_VALUES];
	int rc;

	if (kv_version_asked(argc, argv, "kve")) {
		return 0;
	}
	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "--help") == 0) {
			print_help(stdout);
			return 0;
		}
	}
	if (!command) {
		return fail(
			"the command is \"schedule\", \"bench\" or \"check\", not \"%.100s\"; `kve --help` says more",
			argc < 2 ? "" : argv[1]);
	}

	rc = parse_options(command, argv, values);
	if (rc == 0) {
		rc = command->run(values);
	}
	if (fflush(stdout) != 0 && rc == 0) {
		fprintf(stderr, "kve: standard output: %s\n", strerror(errno));
		rc = EXIT_WRITE;
	}

	return rc;
}
