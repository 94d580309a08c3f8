/* kve-chat -- a seeded chat of several users on the reference engine, with or without kvd behind it. */
#include "report.h"
#include "workload.h"

#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#define EXIT_DIFFERENT 1
#define EXIT_USAGE     64
#define EXIT_SETUP     70
#define EXIT_WRITE     74
#define FLUSH_MS       10000u

typedef struct options {
	workload_options_t workload;
	const char *socket;
	const char *phase;
	const char *log;
	const char *reference;
	const char *write_reference;
	const kve_config_t *model;
	uint32_t expert_ranks;
	int no_cache;
	int json;
	int header;
} options_t;

static const char usage_text[] =
	"usage: kve-chat [options]\n"
	"A seeded chat of several users on a small transformer (CPU, fp32, bit-identical on every machine).\n"
	"  --socket PATH            kvd's socket (default $KVD_SOCKET, else /run/kvd/default.sock)\n"
	"  --no-cache               compute everything, without kvd\n"
	"  --model dense|moe        a dense model (the default), or one of experts\n"
	"  --expert-ranks N         ranks that have the experts between them: 1, 2 or 4 (default 1)\n"
	"  --seed N --users N --branches N --turns N --systems N --system-tokens N --message-tokens N --new-tokens N\n"
	"  --phase TEXT             name of this run in what is printed, at most 64 bytes\n"
	"  --log FILE               append a JSON object a request\n"
	"  --write-reference FILE   write a hash of every answer\n"
	"  --reference FILE         compare with them; exit 1 when an answer differs\n"
	"  --header                 print the table's header first\n"
	"  --json                   a JSON object instead of a row\n";

enum {
	OPT_SOCKET = 1,
	OPT_NO_CACHE,
	OPT_MODEL,
	OPT_EXPERT_RANKS,
	OPT_SEED,
	OPT_USERS,
	OPT_BRANCHES,
	OPT_TURNS,
	OPT_SYSTEMS,
	OPT_SYSTEM_TOKENS,
	OPT_MESSAGE_TOKENS,
	OPT_NEW_TOKENS,
	OPT_PHASE,
	OPT_LOG,
	OPT_WRITE_REFERENCE,
	OPT_REFERENCE,
	OPT_HEADER,
	OPT_JSON,
	OPT_HELP
};

static const struct option long_options[] = {
	{"socket", required_argument, NULL, OPT_SOCKET},
	{"no-cache", no_argument, NULL, OPT_NO_CACHE},
	{"model", required_argument, NULL, OPT_MODEL},
	{"expert-ranks", required_argument, NULL, OPT_EXPERT_RANKS},
	{"seed", required_argument, NULL, OPT_SEED},
	{"users", required_argument, NULL, OPT_USERS},
	{"branches", required_argument, NULL, OPT_BRANCHES},
	{"turns", required_argument, NULL, OPT_TURNS},
	{"systems", required_argument, NULL, OPT_SYSTEMS},
	{"system-tokens", required_argument, NULL, OPT_SYSTEM_TOKENS},
	{"message-tokens", required_argument, NULL, OPT_MESSAGE_TOKENS},
	{"new-tokens", required_argument, NULL, OPT_NEW_TOKENS},
	{"phase", required_argument, NULL, OPT_PHASE},
	{"log", required_argument, NULL, OPT_LOG},
	{"write-reference", required_argument, NULL, OPT_WRITE_REFERENCE},
	{"reference", required_argument, NULL, OPT_REFERENCE},
	{"header", no_argument, NULL, OPT_HEADER},
	{"json", no_argument, NULL, OPT_JSON},
	{"help", no_argument, NULL, OPT_HELP},
	{NULL, 0, NULL, 0},
};

/* A decimal number up to 65,535; -1: it is none. */
static int parse_number(const char *text, uint32_t *p_value)
{
	char *end = NULL;
	const unsigned long value = strtoul(text, &end, 10);

	if (end == text || *end || value > 65535) {
		fprintf(stderr, "kve-chat: \"%s\" is not a number from 0 to 65535\n", text);
		return -1;
	}
	*p_value = (uint32_t)value;

	return 0;
}

static int set_text(options_t *o, int code, const char *value)
{
	switch (code) {
	case OPT_MODEL:
		o->model = strcmp(value, "moe") == 0 ? &kve_config_moe : &kve_config_demo;
		return strcmp(value, "moe") == 0 || strcmp(value, "dense") == 0 ? 0 : -1;
	case OPT_SOCKET:
		o->socket = value;
		return 0;
	case OPT_PHASE:
		o->phase = value;
		return strlen(value) <= REPORT_MAX_PHASE ? 0 : -1;
	case OPT_LOG:
		o->log = value;
		return 0;
	case OPT_WRITE_REFERENCE:
		o->write_reference = value;
		return 0;
	case OPT_REFERENCE:
		o->reference = value;
		return 0;
	case OPT_NO_CACHE:
		o->no_cache = 1;
		return 0;
	case OPT_HEADER:
		o->header = 1;
		return 0;
	case OPT_JSON:
		o->json = 1;
		return 0;
	default:
		return -1;
	}
}

static int set_option(options_t *o, int code, const char *value)
{
	uint32_t seed = 0;

	switch (code) {
	case OPT_SEED:
		if (parse_number(value, &seed) != 0) {
			return -1;
		}
		o->workload.seed = seed;
		return 0;
	case OPT_EXPERT_RANKS:
		return parse_number(value, &o->expert_ranks);
	case OPT_USERS:
		return parse_number(value, &o->workload.users);
	case OPT_BRANCHES:
		return parse_number(value, &o->workload.branches);
	case OPT_TURNS:
		return parse_number(value, &o->workload.turns);
	case OPT_SYSTEMS:
		return parse_number(value, &o->workload.systems);
	case OPT_SYSTEM_TOKENS:
		return parse_number(value, &o->workload.system_tokens);
	case OPT_MESSAGE_TOKENS:
		return parse_number(value, &o->workload.message_tokens);
	case OPT_NEW_TOKENS:
		return parse_number(value, &o->workload.new_tokens);
	default:
		return set_text(o, code, value);
	}
}

/* 0: go on; else the exit code plus one. */
static int parse_options(int argc, char **argv, options_t *o)
{
	int code;

	*o = (options_t){.workload = workload_default, .phase = "chat", .model = &kve_config_demo};
	while ((code = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
		if (code == OPT_HELP) {
			(void)fputs(usage_text, stdout);
			return 1;
		}
		if (set_option(o, code, optarg) != 0) {
			(void)fputs(usage_text, stderr);
			return EXIT_USAGE + 1;
		}
	}
	if (optind != argc) {
		(void)fputs(usage_text, stderr);
		return EXIT_USAGE + 1;
	}
	if (o->expert_ranks > 1 && (!o->model->experts || o->model->groups % o->expert_ranks != 0)) {
		(void)fputs("kve-chat: --expert-ranks: 1, 2 or 4, with --model moe\n", stderr);
		return EXIT_USAGE + 1;
	}
	o->workload.vocab = o->model->vocab;
	o->workload.max_tokens = o->model->max_tokens;

	return 0;
}

/* One turn of one conversation, from prompt to last token. */
static int run_turn(kve_engine_t *engine, workload_t *workload, uint32_t c, uint32_t t, report_t *report)
{
	conversation_t *talk = &workload->conversations[c];
	kve_request_t *request;

	workload_ask(workload, c, t);

	const kve_ask_t ask = {
		.tokens = talk->tokens,
		.n_tokens = talk->n,
		.max_new = workload->options.new_tokens,
		.session = c + 1,
		.turn = t + 1,
	};
	if (kve_engine_submit(engine, &ask, &request) != KV_OK) {
		return -1;
	}
	while (request->state != KVE_DONE) {
		(void)kve_engine_step(engine);
	}

	report_request(report, request);
	workload_answer(workload, c, t, request->tokens + request->n_prompt, request->n_tokens - request->n_prompt);
	kve_engine_release(engine, request);

	return 0;
}

/* All conversations, turn by turn, as if their users took turns. */
static int run_chat(kve_engine_t *engine, const workload_options_t *options, report_t *report)
{
	workload_t workload;
	int rc = 0;

	if (workload_init(&workload, options) != 0) {
		fprintf(stderr,
			"kve-chat: these numbers do not fit each other (a conversation has at most %u tokens, %u "
			"turns)\n",
			options->max_tokens, WORKLOAD_MAX_TURNS);
		return -1;
	}
	for (uint32_t t = 0; t < options->turns && rc == 0; t++) {
		for (uint32_t c = 0; c < workload.count && rc == 0; c++) {
			if (workload_has(&workload, c, t)) {
				rc = run_turn(engine, &workload, c, t, report);
			}
		}
	}
	workload_fini(&workload);

	return rc;
}

static int open_file(const char *path, const char *mode, FILE **p_file)
{
	if (!path) {
		return 0;
	}
	*p_file = fopen(path, mode);
	if (!*p_file) {
		perror(path);
	}

	return *p_file ? 0 : -1;
}

/* 0 when all that was written to it is there; stdio forgets a buffer whose write has failed, so the last flush may find
 * nothing to do. */
static int close_file(FILE *file, const char *path)
{
	if (!file) {
		return 0;
	}

	const int failed = ferror(file);

	if (fclose(file) == 0 && !failed) {
		return 0;
	}
	fprintf(stderr, "%s: not everything could be written\n", path);

	return -1;
}

static void print_report(const options_t *o, report_t *report, kve_engine_t *engine)
{
	kvx_stats_t stats = {.struct_size = sizeof stats};

	if (kve_engine_store(engine)) {
		kvx_get_stats(kve_engine_store(engine), &stats);
	}
	if (o->header && !o->json) {
		report_header(stdout);
	}
	if (o->json) {
		report_json(report, &stats, stdout);
	} else {
		report_row(report, stdout);
	}
}

static int run(const options_t *o, report_t *report)
{
	const kve_engine_config_t config = {
		.model = *o->model,
		.expert_ranks = o->expert_ranks,
		.cache_blocks = 512,
		.max_running = 8,
		.store = !o->no_cache,
		.socket = o->socket,
		.program = "kve-chat",
	};
	kve_engine_t *engine;

	if (kve_engine_create(&config, &engine) != KV_OK) {
		(void)fputs("kve-chat: the engine cannot be created\n", stderr);
		return EXIT_SETUP;
	}
	if (run_chat(engine, &o->workload, report) != 0) {
		kve_engine_destroy(engine);
		return EXIT_USAGE;
	}
	if (kve_engine_flush(engine, FLUSH_MS) > 0) {
		(void)fputs("kve-chat: some blocks could not be saved in time\n", stderr);
	}
	report_end(report);
	print_report(o, report, engine);
	kve_engine_destroy(engine);

	return report->different ? EXIT_DIFFERENT : 0;
}

int main(int argc, char **argv)
{
	static report_t report;
	options_t options;
	int rc = parse_options(argc, argv, &options);

	if (rc != 0) {
		return rc - 1;
	}

	report_begin(&report, options.phase);
	rc = EXIT_USAGE;
	if (open_file(options.log, "a", &report.log) == 0 &&
	    open_file(options.write_reference, "w", &report.reference_out) == 0 &&
	    open_file(options.reference, "r", &report.reference) == 0) {
		rc = run(&options, &report);
	}
	if (report.reference) {
		(void)fclose(report.reference);
	}

	const int lost = close_file(report.reference_out, options.write_reference) +
			 close_file(report.log, options.log) + close_file(stdout, "standard output");

	return lost != 0 && rc == 0 ? EXIT_WRITE : rc;
}
