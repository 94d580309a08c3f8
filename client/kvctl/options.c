/* Options of the command line: the table, and getopt_long() driven by it. */
#include "kvctl.h"

#include "kv/units.h"

#include <getopt.h>
#include <langinfo.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FIRST_OPTION 256 /* of what getopt_long() returns: above every character */

const kvctl_option_info_t kvctl_options[KVCTL_OPTIONS] = {
#define OPTION_ROW(ID, name, value, command, help) {name, value, command, help},
	KVCTL_OPTION_LIST(OPTION_ROW)
#undef OPTION_ROW
};

int kvctl_takes(const char *command, const kvctl_option_info_t *option)
{
	const size_t len = strlen(command);

	for (const char *at = option->command; at && *at; at += strcspn(at, " "), at += strspn(at, " ")) {
		if (strncmp(at, command, len) == 0 && (at[len] == ' ' || at[len] == '\0')) {
			return 1;
		}
	}

	return 0;
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

int kvctl_take_options(kvctl_t *ctl, int argc, char **argv)
{
	static const struct option names[] = {
#define OPTION_NAME(ID, name, value, command, help)                                                                    \
	{name, (value) != NULL ? required_argument : no_argument, NULL, FIRST_OPTION + KVCTL_##ID},
		KVCTL_OPTION_LIST(OPTION_NAME)
#undef OPTION_NAME
			{NULL, 0, NULL, 0},
	};
	int c, code = 0;

	opterr = 0;
	while (code == 0 && (c = getopt_long(argc, argv, ":h", names, NULL)) != -1) {
		if (c >= FIRST_OPTION) {
			ctl->given[c - FIRST_OPTION] = optarg ? optarg : "";
		} else if (c == 'h') {
			ctl->given[KVCTL_HELP] = "";
		} else {
			ctl->json = ctl->given[KVCTL_JSON] != NULL;
			code = kvctl_error(ctl, KV_ERR_ARG,
					   c == ':' ? "%s needs a value"
						    : "no such option: %s; `kvctl help` lists them",
					   argv[optind - 1]);
		}
	}
	ctl->json = ctl->given[KVCTL_JSON] != NULL;
	ctl->socket = ctl->given[KVCTL_SOCKET];
	ctl->argc = argc - optind;
	ctl->argv = argv + optind;
	if (code == 0 && ctl->given[KVCTL_TIMEOUT]) {
		code = take_timeout(ctl, ctl->given[KVCTL_TIMEOUT]);
	}

	return code ? code : take_color(ctl, ctl->given[KVCTL_COLOR]);
}
