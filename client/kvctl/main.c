/* kvctl: look into a running kvd. The table of sub-commands, the global options, and nothing else. */
#include "kvctl.h"

#include "kv/units.h"

#include <langinfo.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const kvctl_command_t kvctl_commands[] = {
	{"status", kvctl_status, "", "health, tiers, hits and sessions on one screen; exit 2 when not healthy",
	 "  --detail 0|1|2    1: with spaces (default), 2: with sessions too\n"},
	{"explain", kvctl_explain, "--tokens LIST|@FILE|-",
	 "where the blocks of a prompt are, and why the first missing one is missing",
	 "  --tokens LIST     token ids: \"1,2,3\", @FILE, or - for standard input\n"
	 "  --space ID        space by its number in `kvctl status` (default: the only one)\n"
	 "  --identity TEXT   space by its canonical identity, as `kvctl status --json` shows it: text, or @FILE\n"
	 "  --salt TEXT       cache salt of the request\n"
	 "  --group NUMBER    block group (default: the first)\n"},
	{"check", kvctl_check, "", "verify the daemon's invariants; exit 2 when one does not hold", ""},
	{"config", kvctl_config, "[NAME...]", "the options in force and where each comes from", ""},
	{"stats", kvctl_stats, "[NAME...]", "every metric, or those whose name contains NAME", ""},
	{"version", kvctl_version, "", "versions of kvctl, libkvc and the daemon", ""},
	{"replay", kvctl_replay, "--trace FILE --blocks C|--live",
	 "drive a daemon with a request trace, every byte checked; exit 2 when one was wrong",
	 "  --trace FILE      requests, one JSON object a line (Mooncake's format); - is standard input\n"
	 "  --blocks C        start a private daemon of exactly C blocks, no disk; a request offers\n"
	 "                    its first C blocks\n"
	 "  --live            drive the daemon of --socket instead: its own blocks may be evicted\n"
	 "  --policy NAME     eviction policy of the private daemon: lru (default), fifo\n"
	 "  --clients N       client processes; request i goes to client i modulo N (default 1)\n"
	 "  --block-bytes N   bytes of a block (default 4KiB)\n"
	 "  --limit N         the first N requests only\n"},
	{"help", kvctl_help, "[COMMAND | requests]", "this text, one command's, or the table of requests", ""},
};
const unsigned kvctl_command_count = sizeof kvctl_commands / sizeof kvctl_commands[0];

typedef struct line {
	char **rest; /* what is no global option */
	int count;
	const char *color;
	int help;
} line_t;

/* The value of option `name` at argv[*at]: "--name=value" or "--name value". NULL: another option. */
static const char *value_of(const char *name, int argc, char **argv, int *at, int *p_missing)
{
	size_t len = strlen(name);

	if (!argv[*at] || strncmp(argv[*at], name, len) != 0) {
		return NULL;
	}
	if (argv[*at][len] == '=') {
		return argv[*at] + len + 1;
	}
	if (argv[*at][len] != '\0') {
		return NULL;
	}
	if (*at + 1 >= argc) {
		*p_missing = 1;
		return NULL;
	}
	*at += 1;

	return argv[*at];
}

static int take_timeout(kvctl_t *ctl, const char *text)
{
	uint64_t ns = 0;

	if (kv_parse_duration(text, &ns) != KV_OK || ns < 1000000u || ns / 1000000u > UINT32_MAX) {
		return kvctl_error(ctl, KV_ERR_ARG,
				   "--timeout %s: not a duration of at least 1ms (such as 500ms or 5s)", text);
	}
	ctl->timeout_ms = (uint32_t)(ns / 1000000u);

	return 0;
}

/* 1: argv[*at] was a global option. */
static int take_global(kvctl_t *ctl, line_t *line, int argc, char **argv, int *at, int *p_code)
{
	const char *option = argv[*at];
	const char *value;
	int missing = 0;

	if (strcmp(option, "--json") == 0) {
		ctl->json = 1;
		return 1;
	}
	if (strcmp(option, "--help") == 0 || strcmp(option, "-h") == 0) {
		line->help = 1;
		return 1;
	}
	value = value_of("--socket", argc, argv, at, &missing);
	if (value) {
		ctl->socket = value;
		return 1;
	}
	value = value_of("--color", argc, argv, at, &missing);
	if (value) {
		line->color = value;
		return 1;
	}
	value = value_of("--timeout", argc, argv, at, &missing);
	if (value) {
		*p_code = take_timeout(ctl, value);
		return 1;
	}
	if (missing) {
		*p_code = kvctl_error(ctl, KV_ERR_ARG, "%s needs a value", option);
	}

	return missing;
}

static int take_color(kvctl_t *ctl, const char *when)
{
	const char *off = getenv("NO_COLOR");
	const char *term = getenv("TERM");

	ctl->utf8 = strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
	if (!when || strcmp(when, "auto") == 0) {
		ctl->color = isatty(STDOUT_FILENO) && !(off && *off) && term && strcmp(term, "dumb") != 0;
	} else if (strcmp(when, "always") == 0 || strcmp(when, "never") == 0) {
		ctl->color = when[0] == 'a';
	} else {
		return kvctl_error(ctl, KV_ERR_ARG, "--color %s: auto, always or never", when);
	}

	return 0;
}

static const kvctl_command_t *command_find(const char *name)
{
	for (unsigned i = 0; i < kvctl_command_count; i++) {
		if (strcmp(kvctl_commands[i].name, name) == 0) {
			return &kvctl_commands[i];
		}
	}

	return NULL;
}

static int unknown_command(const kvctl_t *ctl, const char *name)
{
	const char *names[32];
	const char *near;

	for (unsigned i = 0; i < kvctl_command_count; i++) {
		names[i] = kvctl_commands[i].name;
	}
	if (name[0] == '-') {
		return kvctl_error(ctl, KV_ERR_ARG, "no such option: %s; `kvctl help` lists them", name);
	}
	near = kv_nearest(name, names, kvctl_command_count);

	return kvctl_error(ctl, KV_ERR_ARG, "no such command: %s%s%s%s", name,
			   near ? "; did you mean " : "; `kvctl help` lists them", near ? near : "", near ? "?" : "");
}

static int run(kvctl_t *ctl, line_t *line)
{
	char *help[] = {"help", NULL, NULL};
	const kvctl_command_t *command;

	if (line->count == 0 && !line->help) {
		return kvctl_error(ctl, KV_ERR_ARG, "no command given; `kvctl help` lists them");
	}
	if (line->count == 0) {
		return kvctl_help(ctl, 1, help);
	}
	command = command_find(line->rest[0]);
	if (!command) {
		return unknown_command(ctl, line->rest[0]);
	}
	if (line->help) {
		help[1] = line->rest[0];
		return kvctl_help(ctl, 2, help);
	}

	return command->run(ctl, line->count, line->rest);
}

int main(int argc, char **argv)
{
	kvctl_t ctl = {0};
	line_t line = {.rest = calloc((size_t)argc + 1u, sizeof *line.rest)};
	int code = 0;

	if (!line.rest) {
		return kv_status_exit_code(KV_ERR_NOMEM);
	}
	setlocale(LC_CTYPE, "");
	for (int i = 1; i < argc && code == 0; i++) {
		if (strcmp(argv[i], "--version") == 0) {
			line.rest[line.count++] = "version";
		} else if (!take_global(&ctl, &line, argc, argv, &i, &code)) {
			line.rest[line.count++] = argv[i];
		}
	}
	if (code == 0) {
		code = take_color(&ctl, line.color);
	}
	if (code == 0) {
		code = run(&ctl, &line);
	}
	free(line.rest);

	/* What could not be written was not said; stdio forgets a buffer whose write has failed, so that the last flush
	 * may find nothing to do. */
	if ((fflush(stdout) != 0 || ferror(stdout)) && code == 0) {
		code = kv_status_exit_code(KV_ERR_IO);
	}

	return code;
}
