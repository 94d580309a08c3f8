/* kvctl.h -- what every sub-command gets and uses. A sub-command is one file and one line in the table of main.c. */
#ifndef KVCTL_H
#define KVCTL_H

#include "kvc.h"

#include "kv/status.h"

#include <json-c/json.h>
#include <stdint.h>

#define KVCTL_EXIT_UNHEALTHY 2

/* The global options; they may stand anywhere on the command line. */
typedef struct kvctl {
	const char *socket;  /* NULL: $KVD_SOCKET, else the default */
	uint32_t timeout_ms; /* 0: the default */
	int json;            /* one document on standard output, errors too */
	int color;
	int utf8;
} kvctl_t;

/* argv[0] is the sub-command's name; global options have been taken out. Returns the exit code. */
typedef int (*kvctl_command_fn)(const kvctl_t *ctl, int argc, char **argv);

typedef struct kvctl_command {
	const char *name;
	kvctl_command_fn run;
	const char *arguments;
	const char *help; /* one sentence */
	const char *more; /* options, one a line; "" */
} kvctl_command_t;
extern const kvctl_command_t kvctl_commands[];
extern const unsigned kvctl_command_count;

int kvctl_status(const kvctl_t *ctl, int argc, char **argv);
int kvctl_explain(const kvctl_t *ctl, int argc, char **argv);
int kvctl_check(const kvctl_t *ctl, int argc, char **argv);
int kvctl_config(const kvctl_t *ctl, int argc, char **argv);
int kvctl_stats(const kvctl_t *ctl, int argc, char **argv);
int kvctl_replay(const kvctl_t *ctl, int argc, char **argv);
int kvctl_version(const kvctl_t *ctl, int argc, char **argv);
int kvctl_help(const kvctl_t *ctl, int argc, char **argv);

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
