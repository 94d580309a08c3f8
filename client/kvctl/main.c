/* kvctl: look into a running kvd. The table of sub-commands, and nothing else. */
#include "kvctl.h"

#include "kv/units.h"

#include <limits.h>
#include <locale.h>
#include <stdio.h>
#include <string.h>

static const kvctl_command_t commands[] = {
	{"status", kvctl_status, "", 0,
	 "health, tiers, hit rates, spaces and engines on one screen; exit 2 when not healthy"},
	{"explain", kvctl_explain, "--tokens LIST|@FILE|-", 0,
	 "where the blocks of a prompt are, and why the first missing one is missing"},
	{"transfers", kvctl_transfers, "", 0,
	 "hand-overs between engines: who waits for whom, and what is kept for them"},
	{"peers", kvctl_peers, "", 0, "the daemons of other nodes: who is connected, what was moved, what failed last"},
	{"peer-key", kvctl_peer_key, "FILE", 1,
	 "make the key that two daemons share, in a new file; one that is there is not overwritten"},
	{"check", kvctl_check, "", 0, "verify the daemon's invariants; exit 2 when one does not hold"},
	{"config", kvctl_config, "[NAME...]", INT_MAX, "the options in force and where each comes from"},
	{"stats", kvctl_stats, "[NAME...]", INT_MAX, "every metric, or those whose name contains NAME"},
	{"version", kvctl_version, "", 0, "versions of kvctl, libkvc and the daemon"},
	{"reset", kvctl_reset, "--space ID|--identity TEXT", 0,
	 "drop all blocks of a space for all engines; exit 1 when the answer is no"},
	{"replay", kvctl_replay, "--trace FILE --blocks C|--live", 0,
	 "drive a daemon with a request trace, every byte checked; exit 2 when one was wrong"},
	{"help", kvctl_help, "[COMMAND | requests]", 1, "this text, one command's, or the table of requests"},
};
#define COMMANDS (sizeof commands / sizeof commands[0])

static const kvctl_command_t *command_find(const char *name)
{
	for (size_t i = 0; i < COMMANDS; i++) {
		if (strcmp(commands[i].name, name) == 0) {
			return &commands[i];
		}
	}

	return NULL;
}

static int unknown_command(const kvctl_t *ctl, const char *name)
{
	const char *names[32];
	const char *near;

	for (size_t i = 0; i < COMMANDS; i++) {
		names[i] = commands[i].name;
	}
	near = kv_nearest(name, names, COMMANDS);

	return kvctl_error(ctl, KV_ERR_ARG, "no such command: %s%s%s%s", name,
			   near ? "; did you mean " : "; `kvctl help` lists them", near ? near : "", near ? "?" : "");
}

/* Does the sub-command take what it is given? 0, or the exit code after printing why not. */
static int check_line(const kvctl_t *ctl, const kvctl_command_t *command)
{
	for (unsigned i = 0; i < KVCTL_OPTIONS; i++) {
		const kvctl_option_info_t *option = &kvctl_options[i];

		if (ctl->given[i] && option->command && !kvctl_takes(command->name, option)) {
			return kvctl_error(ctl, KV_ERR_ARG, "%s takes no --%s", command->name, option->name);
		}
	}
	if (ctl->argc - 1 > command->most) {
		return kvctl_error(ctl, KV_ERR_ARG, "%s takes no argument: %s", command->name,
				   ctl->argv[command->most + 1]);
	}

	return 0;
}

static int run(kvctl_t *ctl)
{
	static char *help[] = {"help", NULL, NULL};
	const kvctl_command_t *command;
	int code;

	if (ctl->given[KVCTL_VERSION]) {
		return kvctl_version(ctl);
	}
	if (ctl->argc == 0 && !ctl->given[KVCTL_HELP]) {
		return kvctl_error(ctl, KV_ERR_ARG, "no command given; `kvctl help` lists them");
	}
	if (ctl->given[KVCTL_HELP] && (ctl->argc == 0 || command_find(ctl->argv[0]))) {
		help[1] = ctl->argc > 0 ? ctl->argv[0] : NULL;
		ctl->argc = ctl->argc > 0 ? 2 : 1;
		ctl->argv = help;
		return kvctl_help(ctl);
	}
	command = command_find(ctl->argv[0]);
	if (!command) {
		return unknown_command(ctl, ctl->argv[0]);
	}
	code = check_line(ctl, command);

	return code ? code : command->run(ctl);
}

int main(int argc, char **argv)
{
	kvctl_t ctl = {.commands = commands, .command_count = COMMANDS};
	int code;

	setlocale(LC_CTYPE, "");
	code = kvctl_take_options(&ctl, argc, argv);
	if (code == 0) {
		code = run(&ctl);
	}

	/* What could not be written was not said; stdio forgets a buffer whose write has failed, so that the last flush
	 * may find nothing to do. */
	if ((fflush(stdout) != 0 || ferror(stdout)) && code == 0) {
		code = kv_status_exit_code(KV_ERR_IO);
	}

	return code;
}
