/* kve-pd -- prefill and decode on two reference engines, or on one: the same seeded requests, handed from the first
 * engine to the second. Each request is a line on standard output as soon as it has ended. */
#include "kve/engine.h"

#include "kv/env.h"
#include "kv/system.h"

#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXIT_USAGE   64
#define EXIT_SETUP   70
#define EXIT_WRITE   74
#define FLUSH_MS     10000u
#define ATTACH_MS    30000u /* what is asked or sent before kvd is ready is lost; a busy machine takes seconds */
#define MAX_TOGETHER 16u

typedef struct options {
	const char *role;
	const char *socket, *peer;
	uint32_t requests, seed, ranks, prompt_tokens, new_tokens, together, whole, wait_ms, stop_at;
} options_t;

static const char usage_text[] =
	"usage: kve-pd alone|prefill|decode [options]\n"
	"Seeded requests on a small transformer (CPU, fp32). `prefill` computes the prompts and hands them to "
	"`decode`,\n"
	"which generates; `alone` does both, without kvd.\n"
	"  --socket PATH       kvd's socket (default $KVD_SOCKET, else /run/kvd/default.sock)\n"
	"  --peer NAME         of `decode`: `prefill` is at the daemon's peer of this name\n"
	"  --requests N --prompt-tokens N --new-tokens N\n"
	"  --seed N            of the prompts; both sides must have the same\n"
	"  --ranks N           tensor parallel ranks: 1, 2, 4 or 8\n"
	"  --together N        requests at one time\n"
	"  --whole 1           hand a prompt over when it is computed, not chunk by chunk\n"
	"  --wait-ms N         longest wait for the other side\n"
	"  --stop-at N         stop (SIGSTOP) when N requests have ended, in the middle of others\n"
	"A line a request: its number, a hash of the tokens and log-probabilities that were generated, tokens of the\n"
	"prompt, of these received and computed, why less than all was received, and ms until the first token. At the\n"
	"end: bytes put into the pool and taken out of it.\n";

/* ---- options --------------------------------------------------------------------------------- */

/* A decimal number up to 1,000,000. */
static int set_number(uint32_t *p_value, const char *text)
{
	char *end = NULL;
	const unsigned long value = strtoul(text, &end, 10);

	if (end == text || *end || value > 1000000) {
		fprintf(stderr, "kve-pd: \"%s\" is not a number from 0 to 1000000\n", text);
		return -1;
	}
	*p_value = (uint32_t)value;

	return 0;
}

/* 0: go on; else the exit code plus one. */
static int parse_options(int argc, char **argv, options_t *o)
{
	static const struct option names[] = {{"socket", required_argument, NULL, 0},
					      {"peer", required_argument, NULL, 0},
					      {"requests", required_argument, NULL, 0},
					      {"seed", required_argument, NULL, 0},
					      {"ranks", required_argument, NULL, 0},
					      {"prompt-tokens", required_argument, NULL, 0},
					      {"new-tokens", required_argument, NULL, 0},
					      {"together", required_argument, NULL, 0},
					      {"whole", required_argument, NULL, 0},
					      {"wait-ms", required_argument, NULL, 0},
					      {"stop-at", required_argument, NULL, 0},
					      {"help", no_argument, NULL, 'h'},
					      {0}};
	uint32_t *const numbers[] = {
		NULL,           NULL,         &o->requests, &o->seed,    &o->ranks,  &o->prompt_tokens,
		&o->new_tokens, &o->together, &o->whole,    &o->wait_ms, &o->stop_at};
	int code, index = 0, bad = 0;

	while ((code = getopt_long(argc, argv, "", names, &index)) != -1) {
		if (code == 'h') {
			(void)fputs(usage_text, stdout);
			return 1;
		}
		if (code == 0 && !numbers[index]) {
			*(index == 0 ? &o->socket : &o->peer) = optarg;
		} else {
			bad |= code != 0 || set_number(numbers[index], optarg) != 0;
		}
	}
	o->role = optind + 1 == argc ? argv[optind] : "";
	bad |= strcmp(o->role, "alone") != 0 && strcmp(o->role, "prefill") != 0 && strcmp(o->role, "decode") != 0;
	if (bad || o->together == 0 || o->together > MAX_TOGETHER || o->requests == 0) {
		(void)fputs(usage_text, stderr);
		return EXIT_USAGE + 1;
	}

	return 0;
}

/* ---- requests -------------------------------------------------------------------------------- */

/* splitmix64 */
static uint32_t draw(uint64_t *state, uint32_t below)
{
	uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);

	return (uint32_t)((z ^ (z >> 31)) % below);
}

/* Prompts have half to all of --prompt-tokens. */
static kve_request_t *submit(kve_engine_t *engine, const options_t *o, uint32_t number, uint32_t *tokens)
{
	uint64_t state = (uint64_t)o->seed << 32 | number;
	const uint32_t half = o->prompt_tokens / 2;
	const int prefill = strcmp(o->role, "prefill") == 0, decode = strcmp(o->role, "decode") == 0;
	char transfer[64];
	kve_ask_t ask = {
		.tokens = tokens,
		.n_tokens = half + draw(&state, half + 1),
		.max_new = prefill ? 1 : o->new_tokens,
		.session = number + 1,
		.turn = 1,
		.log_probabilities = 1,
		.handover = decode     ? KVE_RECV
			    : !prefill ? KVE_KEEP
			    : o->whole ? KVE_SEND_WHOLE
				       : KVE_SEND,
		.transfer = transfer,
		.handover_ms = o->wait_ms,
	};
	kve_request_t *request = NULL;

	for (uint32_t i = 0; i < ask.n_tokens; i++) {
		tokens[i] = draw(&state, kve_config_demo.vocab);
	}
	(void)snprintf(transfer, sizeof transfer, "seed %u request %u", o->seed, number);

	return kve_engine_submit(engine, &ask, &request) == KV_OK ? request : NULL;
}

static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		hash = (hash ^ ((const uint8_t *)bytes)[i]) * UINT64_C(0x100000001b3);
	}

	return hash;
}

static void print_request(const kve_request_t *r)
{
	const uint32_t n = r->n_tokens - r->n_prompt;
	uint64_t hash = UINT64_C(0xcbf29ce484222325);

	hash = hash_bytes(hash, r->tokens + r->n_prompt, n * sizeof *r->tokens);
	hash = hash_bytes(hash, r->log_probabilities, n * sizeof *r->log_probabilities);
	printf("%" PRIu64 "\t%016" PRIx64 "\t%u\t%u\t%u\t%s\t%.1f\n", r->session - 1, hash, r->n_prompt, r->recv.tokens,
	       r->prompt_computed, kvc_status_name(r->recv.cause), (double)(r->first_token_ns - r->submit_ns) / 1e6);
	(void)fflush(stdout);
}

/* --together at a time, in order of their numbers. Returns 0, or -1: a request was refused. */
static int run_requests(kve_engine_t *engine, const options_t *o, uint32_t *tokens)
{
	kve_request_t *running[MAX_TOGETHER] = {NULL};
	uint32_t next = 0, ended = 0;

	while (ended < o->requests) {
		for (uint32_t i = 0; i < o->together; i++) {
			if (running[i] && running[i]->state == KVE_DONE) {
				print_request(running[i]);
				kve_engine_release(engine, running[i]);
				running[i] = NULL;
				if (++ended == o->stop_at) {
					(void)raise(SIGSTOP);
				}
			}
			if (!running[i] && next < o->requests) {
				running[i] = submit(engine, o, next++, tokens);
				if (!running[i]) {
					return -1;
				}
			}
		}
		(void)kve_engine_step(engine, NULL);
	}

	return 0;
}

static int run(const options_t *o)
{
	const kve_engine_config_t config = {
		.model = kve_config_demo,
		.cache_blocks = 2048,
		.max_running = MAX_TOGETHER,
		.store = strcmp(o->role, "alone") != 0,
		.socket = o->socket,
		.peer = o->peer,
		.program = o->role,
		.attach_ms = ATTACH_MS,
		.ranks = o->ranks,
	};
	kvx_stats_t stats = {.struct_size = sizeof stats};
	uint32_t *tokens = calloc(o->prompt_tokens + 1u, sizeof *tokens);
	kve_engine_t *engine = NULL;
	int rc = EXIT_SETUP;

	if (!tokens || kve_engine_create(&config, &engine) != KV_OK) {
		(void)fputs("kve-pd: the engine cannot be created; --ranks must divide its heads\n", stderr);
	} else if (run_requests(engine, o, tokens) != 0) {
		(void)fputs("kve-pd: a request was refused: too many tokens\n", stderr);
		rc = EXIT_USAGE;
	} else {
		if (kve_engine_flush(engine, FLUSH_MS) > 0) {
			(void)fputs("kve-pd: some blocks could not be handed over in time\n", stderr);
		}
		if (kve_engine_store(engine)) {
			kvx_get_stats(kve_engine_store(engine), &stats);
		}
		printf("#\t%" PRIu64 "\t%" PRIu64 "\n", stats.bytes_saved, stats.bytes_loaded);
		rc = 0;
	}
	kve_engine_destroy(engine);
	free(tokens);

	return rc;
}

int main(int argc, char **argv)
{
	options_t options = {.requests = 24,
			     .seed = 1,
			     .ranks = 1,
			     .prompt_tokens = 768,
			     .new_tokens = 16,
			     .together = 4,
			     .wait_ms = 5000};
	int rc;

	if (kv_version_asked(argc, argv, "kve-pd")) {
		return 0;
	}
	rc = parse_options(argc, argv, &options);
	if (rc != 0) {
		return rc - 1;
	}
	rc = run(&options);
	if (fflush(stdout) != 0 || ferror(stdout)) {
		(void)fputs("kve-pd: not everything could be written\n", stderr);
		rc = rc ? rc : EXIT_WRITE;
	}

	return rc;
}
