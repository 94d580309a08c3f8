/* kvctl.h -- what every sub-command gets and uses. A sub-command is one file and one line in the table of main.c. */
#ifndef KVCTL_H
#define KVCTL_H

#include "kvc.h"

#include "kv/status.h"

#include <json-c/json.h>
#include <stdint.h>

#define KVCTL_EXIT_UNHEALTHY 2

/* X(ID, name, value, command, help): every option, of all sub-commands. A value of NULL: a flag. A command of NULL: of
 * all; else those that take it, blanks between them. Options may stand anywhere on the command line. */
#define KVCTL_OPTION_LIST(X)                                                                                           \
	X(SOCKET, "socket", "PATH", NULL, "the daemon's socket (default: $KVD_SOCKET, else /run/kvd/default.sock)")    \
	X(JSON, "json", NULL, NULL, "one JSON document instead of text")                                               \
	X(COLOR, "color", "WHEN", NULL, "auto, always or never")                                                       \
	X(TIMEOUT, "timeout", "TIME", NULL, "give up after, e.g. 500ms (default: 5s)")                                 \
	X(VERSION, "version", NULL, NULL, "the same as `kvctl version`")                                               \
	X(HELP, "help", NULL, NULL, "the same as `kvctl help COMMAND`")                                                \
	X(DETAIL, "detail", "0|1|2", "status", "0: tiers; 1: with spaces and engines (default); 2: with sessions too") \
	X(TOKENS, "tokens", "LIST", "explain", "token ids: \"1,2,3\", @FILE, or - for standard input")                 \
	X(SPACE, "space", "ID", "explain reset",                                                                       \
	  "space by its number in `kvctl status` (explain's default: the only one)")                                   \
	X(IDENTITY, "identity", "TEXT", "explain reset",                                                               \
	  "space by its identity in `kvctl status --json`, the same after a restart: text, or @FILE")                  \
	X(SALT, "salt", "TEXT", "explain", "cache salt of the request")                                                \
	X(GROUP, "group", "NUMBER", "explain", "block group (default: the first)")                                     \
	X(DRY_RUN, "dry-run", NULL, "reset", "say what would be dropped, and drop nothing")                            \
	X(YES, "yes", NULL, "reset", "do not ask; needed where standard input is no terminal, and with --json")        \
	X(TRACE, "trace", "FILE", "replay",                                                                            \
	  "requests, one JSON object a line (Mooncake's format); - is standard input")                                 \
	X(BLOCKS, "blocks", "C", "replay", "start a private daemon of exactly C blocks; a request offers its first C") \
	X(LIVE, "live", NULL, "replay", "drive the daemon of --socket instead: its own blocks may be evicted")         \
	X(POLICY, "policy", "NAME", "replay", "eviction policy of the private daemon: lru (default), fifo")            \
	X(CLIENTS, "clients", "N", "replay", "client processes; request i goes to client i modulo N (default 1)")      \
	X(BLOCK_BYTES, "block-bytes", "N", "replay", "bytes of a block (default 4KiB)")                                \
	X(LIMIT, "limit", "N", "replay", "the first N requests only")

typedef enum kvctl_option {
#define KVCTL_OPTION_ENUM(ID, name, value, command, help) KVCTL_##ID,
	KVCTL_OPTION_LIST(KVCTL_OPTION_ENUM)
#undef KVCTL_OPTION_ENUM
		KVCTL_OPTIONS
} kvctl_option_t;

typedef struct kvctl_option_info {
	const char *name, *value, *command, *help;
} kvctl_option_info_t;
extern const kvctl_option_info_t kvctl_options[KVCTL_OPTIONS];

typedef struct kvctl {
	const char *given[KVCTL_OPTIONS]; /* value of an option, "" of a flag; NULL: not given */
	int argc;                         /* the sub-command and its arguments, options taken out */
	char **argv;
	const struct kvctl_command *commands;
	size_t command_count;
	const char *socket;  /* NULL: $KVD_SOCKET, else the default */
	uint32_t timeout_ms; /* 0: the default */
	int json;            /* one document on standard output, errors too */
	int color;
	int utf8;
} kvctl_t;

/* Returns the exit code. */
typedef int (*kvctl_command_fn)(const kvctl_t *ctl);

typedef struct kvctl_command {
	const char *name;
	kvctl_command_fn run;
	const char *arguments; /* of the usage line */
	int most;              /* arguments that are no options, at most */
	const char *help;      /* one sentence */
} kvctl_command_t;

int kvctl_status(const kvctl_t *ctl);
int kvctl_explain(const kvctl_t *ctl);
int kvctl_transfers(const kvctl_t *ctl);
int kvctl_peers(const kvctl_t *ctl);
int kvctl_peer_key(const kvctl_t *ctl);
int kvctl_check(const kvctl_t *ctl);
int kvctl_config(const kvctl_t *ctl);
int kvctl_stats(const kvctl_t *ctl);
int kvctl_reset(const kvctl_t *ctl);
int kvctl_replay(const kvctl_t *ctl);
int kvctl_version(const kvctl_t *ctl);
int kvctl_help(const kvctl_t *ctl);

/* ---- options.c: the command line ------------------------------------------------------------- */

/* Fill *ctl from the command line. 0, or the exit code after printing what is wrong. */
int kvctl_take_options(kvctl_t *ctl, int argc, char **argv);
/* Is it an option of this sub-command, and not of all? */
int kvctl_takes(const char *command, const kvctl_option_info_t *option);

/* ---- session.c: the daemon ------------------------------------------------------------------- */

/* Attach as an observer. On failure the error has been printed and the exit code is returned; 0: attached. */
int kvctl_attach(const kvctl_t *ctl, kvc_t **p_kvc);
/* Fetch and parse a document (KVC_DOC_*). 0, or the exit code after printing why. The caller puts *p_json. */
int kvctl_document(const kvctl_t *ctl, int what, uint32_t detail, struct json_object **p_json, uint32_t *p_value);
/* Say what libkvc said last; returns the exit code of `status`. */
int kvctl_failed(const kvctl_t *ctl, kvc_status_t status);
/* Say what is wrong with the command line or a file: "kvctl: ..." and, with --json, a document. Returns the exit code
 * of `status`. */
int kvctl_error(const kvctl_t *ctl, kv_status_t status, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* ---- space.c: the space that is asked for ---------------------------------------------------- */

/* The text itself, of a file ("@name") or of standard input ("-"). NULL after printing why; the caller frees it. */
char *kvctl_text_of(const kvctl_t *ctl, const char *argument);
/* The space of --space and --identity, or the only one, as STATUS shows it: spaces of this namespace. 0, or the exit
 * code after printing why. The caller puts *p_space. */
int kvctl_find_space(const kvctl_t *ctl, struct json_object **p_space);
/* Open it by its identity. 0, or the exit code after printing why. */
int kvctl_open_space(const kvctl_t *ctl, kvc_t *kvc, const char *identity, kvc_space_t **p_space);

/* ---- print.c: the terminal ------------------------------------------------------------------- */

typedef enum kvctl_tone { KVCTL_PLAIN, KVCTL_GOOD, KVCTL_BAD, KVCTL_DIM, KVCTL_BOLD } kvctl_tone_t;

/* Escape sequences of a tone, or "" without color. */
const char *kvctl_tone(const kvctl_t *ctl, kvctl_tone_t tone);
const char *kvctl_tone_end(const kvctl_t *ctl);
/* A bar of `cells` cells, filled in proportion. `out` takes 3 bytes a cell and a NUL. */
char *kvctl_bar(const kvctl_t *ctl, double fraction, unsigned cells, char *out, size_t cap);
/* Print text with control characters made visible: it came from the daemon. */
void kvctl_print_text(const char *text);
void kvctl_print_json(struct json_object *json);

/* Members of an object, with a default when absent or of another kind. */
uint64_t kvctl_u64(struct json_object *object, const char *name);
const char *kvctl_str(struct json_object *object, const char *name);
int kvctl_bool(struct json_object *object, const char *name, int otherwise);
struct json_object *kvctl_member(struct json_object *object, const char *name);

#endif
