/* kve-chat -- a seeded chat of several users on the reference engine, with or without kvd behind it. */
#include "report.h"
#include "workload.h"

#include "kv/system.h"
#include "kve/parallel.h"
#include "kvk/gpu.h"

#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#define EXIT_DIFFERENT 1
#define EXIT_USAGE     64
#define EXIT_SETUP     70
#define EXIT_WRITE     74
#define FLUSH_MS       10000u

typedef enum device { DEVICE_NONE, DEVICE_CPU, DEVICE_GPU } device_t;

typedef struct options {
	workload_options_t workload;
	const char *socket;
	const char *phase;
	const char *log;
	const char *reference;
	const char *write_reference;
	const kve_config_t *model;
	kve_config_t file; /* of --config */
	kve_dbo_config_t parallel;
	kve_devices_config_t devices;
	device_t device;
	int no_cache;
	int json;
	int header;
} options_t;

static const char usage_text[] =
	"usage: kve-chat [options]\n"
	"A seeded chat of several users on a small transformer (on the CPU in fp32: bit-identical on every machine).\n"
	"  --socket PATH            kvd's socket (default $KVD_SOCKET, else /run/kvd/default.sock)\n"
	"  --no-cache               compute everything, without kvd\n"
	"  --model dense|moe        a dense model (the default), or one of experts\n"
	"  --config FILE            a model of this shape: a config.json of Qwen3 or Qwen3-MoE; weights come from its \"seed\"\n"
	"  --data-parallel-size N   ranks with requests and caches of their own (default 1); conversations take turns\n"
	"  --bf16 cpu|gpu           compute in BF16, on GPUs or by the twins of their kernels; with --model moe or a file\n"
	"  --gpus N                 GPUs; rank r has number r % N (default 1)\n"
	"  --link peer|host|host-kernels  how rows get to other ranks with --bf16 (default peer)\n"
	"  --enable-expert-parallel  ranks have the experts between them; without it N is 1\n"
	"  --enable-dbo             dual batch overlap: a step of two microbatches, one computes while the other's rows travel\n"
	"  --dbo-decode-token-threshold N, --dbo-prefill-token-threshold N\n"
	"                           least tokens of each rank for it, in steps that only decode (default 32), in others (512)\n"
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
	OPT_CONFIG,
	OPT_DATA_PARALLEL_SIZE,
	OPT_BF16,
	OPT_GPUS,
	OPT_LINK,
	OPT_EXPERT_PARALLEL,
	OPT_DBO,
	OPT_DBO_DECODE,
	OPT_DBO_PREFILL,
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
	{"config", required_argument, NULL, OPT_CONFIG},
	{"data-parallel-size", required_argument, NULL, OPT_DATA_PARALLEL_SIZE},
	{"bf16", required_argument, NULL, OPT_BF16},
	{"gpus", required_argument, NULL, OPT_GPUS},
	{"link", required_argument, NULL, OPT_LINK},
	{"enable-expert-parallel", no_argument, NULL, OPT_EXPERT_PARALLEL},
	{"enable-dbo", no_argument, NULL, OPT_DBO},
	{"dbo-decode-token-threshold", required_argument, NULL, OPT_DBO_DECODE},
	{"dbo-prefill-token-threshold", required_argument, NULL, OPT_DBO_PREFILL},
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

static int read_config(options_t *o, const char *path)
{
	char why[KVE_CONFIG_WHY_MAX];

	if (kve_config_read(path, &o->file, why) != KV_OK) {
		fprintf(stderr, "kve-chat: %s: %s\n", path, why);
		return -1;
	}
	o->model = &o->file;

	return 0;
}

/* The number of a word in a list that ends with NULL; -1: it is not there. */
static int find_word(const char *const *words, const char *word)
{
	for (int i = 0; words[i]; i++) {
		if (strcmp(words[i], word) == 0) {
			return i;
		}
	}

	return -1;
}

static int set_device(options_t *o, int code, const char *value)
{
	static const char *const devices[] = {"cpu", "gpu", NULL}, *const links[] = {"peer", "host", "host-kernels",
										     NULL};
	const int word = find_word(code == OPT_BF16 ? devices : links, value);

	if (code == OPT_GPUS) {
		return parse_number(value, &o->devices.gpus);
	}
	if (code == OPT_BF16) {
		o->device = word == 0 ? DEVICE_CPU : DEVICE_GPU;
	} else {
		o->devices.link = (kvk_ep_link_kind_t)word;
	}

	return word < 0 ? -1 : 0;
}

static int set_text(options_t *o, int code, const char *value)
{
	switch (code) {
	case OPT_BF16:
	case OPT_GPUS:
	case OPT_LINK:
		return set_device(o, code, value);
	case OPT_CONFIG:
		return read_config(o, value);
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
	case OPT_EXPERT_PARALLEL:
		o->parallel.expert_parallel = 1;
		return 0;
	case OPT_DBO:
		o->parallel.enabled = 1;
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
	case OPT_DATA_PARALLEL_SIZE:
		return parse_number(value, &o->parallel.data_parallel);
	case OPT_DBO_DECODE:
		return parse_number(value, &o->parallel.decode_threshold);
	case OPT_DBO_PREFILL:
		return parse_number(value, &o->parallel.prefill_threshold);
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

/* NULL: these ranks can share this model. */
static const char *find_fault_of_ranks(const options_t *o)
{
	const kve_dbo_config_t *p = &o->parallel;

	if (p->data_parallel == 0 || p->data_parallel > KVK_EP_MAX_RANKS) {
		return "--data-parallel-size: 1 to 8";
	}
	if (p->data_parallel > 1 && !p->expert_parallel) {
		return "--data-parallel-size above 1 needs --enable-expert-parallel";
	}
	if (p->expert_parallel && !o->model->experts) {
		return "--enable-expert-parallel needs a model of experts: --model moe";
	}
	if (p->expert_parallel && o->model->groups % p->data_parallel != 0) {
		return "--data-parallel-size does not divide the model's groups of experts";
	}

	return kve_dbo_check(p);
}

/* 0: go on; else the exit code plus one. */
static int parse_options(int argc, char **argv, options_t *o)
{
	const char *fault;
	int code;

	*o = (options_t){.workload = workload_default,
			 .phase = "chat",
			 .model = &kve_config_demo,
			 .parallel = {.data_parallel = 1,
				      .decode_threshold = KVE_DBO_DECODE_THRESHOLD,
				      .prefill_threshold = KVE_DBO_PREFILL_THRESHOLD}};
	while ((code = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
		if (code == OPT_HELP) {
			(void)fputs(usage_text, stdout);
			return 1;
		}
		if (set_option(o, code, optarg) != 0) {
			(void)fputs(code == OPT_CONFIG ? "" : usage_text, stderr); /* that is said already */
			return EXIT_USAGE + 1;
		}
	}
	if (optind != argc) {
		(void)fputs(usage_text, stderr);
		return EXIT_USAGE + 1;
	}
	fault = find_fault_of_ranks(o);
	if (fault) {
		fprintf(stderr, "kve-chat: %s\n", fault);
		return EXIT_USAGE + 1;
	}
	fault = o->device ? kve_devices_fault_of_shape(o->model) : NULL;
	if (fault) {
		fprintf(stderr, "kve-chat: --bf16 does not serve this model: %s\n", fault);
		return EXIT_USAGE + 1;
	}
	o->workload.vocab = o->model->vocab;
	o->workload.max_tokens = o->model->max_tokens;

	return 0;
}

/* A turn of conversation c. NULL: refused. */
static kve_request_t *submit_turn(kve_parallel_t *ranks, workload_t *workload, uint32_t c, uint32_t t)
{
	conversation_t *talk = &workload->conversations[c];
	kve_request_t *request = NULL;

	workload_ask(workload, c, t);

	const kve_ask_t ask = {
		.tokens = talk->tokens,
		.n_tokens = talk->n,
		.max_new = workload->options.new_tokens,
		.session = c + 1,
		.turn = t + 1,
	};

	return kve_parallel_submit(ranks, &ask, &request) == KV_OK ? request : NULL;
}

/* Run what was submitted of a turn, and take the answers. */
static int run_requests(kve_parallel_t *ranks, workload_t *workload, uint32_t t, kve_request_t **requests,
			report_t *report)
{
	const kv_status_t status = kve_parallel_run(ranks);

	if (status != KV_OK) {
		fprintf(stderr, "kve-chat: %s (ranks, a bit each: %#x)\n", kv_status_text(status),
			kve_engine_lost(kve_parallel_engine(ranks, 0)));
		return -1;
	}
	for (uint32_t c = 0; c < workload->count; c++) {
		kve_request_t *r = requests[c];

		if (r) {
			report_request(report, r);
			workload_answer(workload, c, t, r->tokens + r->n_prompt, r->n_tokens - r->n_prompt);
			kve_parallel_release(ranks, r);
			requests[c] = NULL;
		}
	}

	return 0;
}

/* All conversations, turn by turn: on one rank as if their users took turns, on several together. */
static int run_turns(kve_parallel_t *ranks, workload_t *workload, kve_request_t **requests, report_t *report)
{
	const int together = kve_parallel_ranks(ranks) > 1;

	for (uint32_t t = 0; t < workload->options.turns; t++) {
		for (uint32_t c = 0; c < workload->count; c++) {
			if (!workload_has(workload, c, t)) {
				continue;
			}
			requests[c] = submit_turn(ranks, workload, c, t);
			if (!requests[c] || (!together && run_requests(ranks, workload, t, requests, report) != 0)) {
				return -1;
			}
		}
		if (together && run_requests(ranks, workload, t, requests, report) != 0) {
			return -1;
		}
	}

	return 0;
}

static int run_chat(kve_parallel_t *ranks, const workload_options_t *options, report_t *report)
{
	kve_request_t **requests = NULL;
	workload_t workload;
	int rc = -1;

	if (workload_init(&workload, options) != 0) {
		fprintf(stderr,
			"kve-chat: these numbers do not fit each other (a conversation has at most %u tokens, %u "
			"turns)\n",
			options->max_tokens, WORKLOAD_MAX_TURNS);
		return -1;
	}
	requests = calloc(workload.count, sizeof(void *));
	if (requests) {
		rc = run_turns(ranks, &workload, requests, report);
	}
	free(requests);
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

static kvx_stats_t sum_stats(kve_parallel_t *ranks)
{
	enum { COUNTS = (sizeof(kvx_stats_t) - offsetof(kvx_stats_t, loads)) / sizeof(uint64_t) };
	kvx_stats_t sum = {.struct_size = sizeof sum};

	for (uint32_t r = 0; r < kve_parallel_ranks(ranks); r++) {
		const kvx_t *store = kve_engine_store(kve_parallel_engine(ranks, r));
		kvx_stats_t own = {.struct_size = sizeof own};
		uint64_t *total = &sum.loads, *count = &own.loads;

		if (store) {
			kvx_get_stats(store, &own);
		}
		for (size_t i = 0; i < COUNTS; i++) {
			total[i] += count[i];
		}
	}

	return sum;
}

/* Bytes of all ranks; all take the same steps. */
static kve_rank_stats_t sum_rank_stats(kve_parallel_t *ranks)
{
	kve_rank_stats_t sum = kve_engine_rank_stats(kve_parallel_engine(ranks, 0));

	for (uint32_t r = 1; r < kve_parallel_ranks(ranks); r++) {
		const kvk_ep_stats_t sent = kve_engine_rank_stats(kve_parallel_engine(ranks, r)).sent;

		sum.sent.dispatch_bytes += sent.dispatch_bytes;
		sum.sent.combine_bytes += sent.combine_bytes;
	}

	return sum;
}

static void print_report(const options_t *o, report_t *report, kve_parallel_t *ranks)
{
	const kvx_stats_t stats = sum_stats(ranks);
	const kve_rank_stats_t rank_stats = sum_rank_stats(ranks);

	if (o->header && !o->json) {
		report_header(stdout);
	}
	if (o->json) {
		report_json(report, &stats, &rank_stats, stdout);
	} else {
		report_row(report, stdout);
	}
}

static void complain_of_memory(const kve_parallel_config_t *config)
{
	const kve_config_t *model = &config->engine.model;
	const double bytes = config->engine.devices ? sizeof(kvk_bf16_t) : sizeof(float); /* of a value */
	const double gib = bytes / (double)((size_t)1 << 30);
	const double cache = (double)kve_cache_page(model) * model->layers * config->engine.cache_blocks;

	(void)fprintf(stderr, "kve-chat: no memory for the model: %.1f GiB of weights, and %.1f GiB of cache a rank\n",
		      gib * (double)kve_weights_count(model), gib * cache);
}

/* Returns 0, or the exit status. */
static int open_devices(const options_t *o, kve_devices_t **p_devices)
{
	kve_devices_config_t config = o->devices;
	kv_status_t status = KV_OK;

	config.ranks = o->parallel.data_parallel;
	*p_devices = NULL;
	if (o->device) {
		status = o->device == DEVICE_GPU ? kve_devices_open_gpus(&config, p_devices)
						 : kve_devices_open_twins(&config, p_devices);
	}
	if (status != KV_OK) {
		fprintf(stderr, "kve-chat: --bf16: %s\n",
			o->device == DEVICE_GPU ? kvk_gpu_last_error() : kv_status_text(status));
		return EXIT_SETUP;
	}

	return 0;
}

static int talk(const options_t *o, report_t *report, kve_parallel_t *ranks)
{
	uint32_t unsaved = 0;

	if (run_chat(ranks, &o->workload, report) != 0) {
		return EXIT_USAGE;
	}
	for (uint32_t r = 0; r < kve_parallel_ranks(ranks); r++) {
		unsaved += kve_engine_flush(kve_parallel_engine(ranks, r), FLUSH_MS);
	}
	if (unsaved > 0) {
		(void)fputs("kve-chat: some blocks could not be saved in time\n", stderr);
	}
	report_end(report);
	print_report(o, report, ranks);

	return report->different ? EXIT_DIFFERENT : 0;
}

static int run(const options_t *o, report_t *report)
{
	kve_devices_t *devices;
	int rc = open_devices(o, &devices);
	const kve_parallel_config_t config = {
		.engine = {.model = *o->model,
			   .cache_blocks = o->device == DEVICE_GPU ? 4096 : 512,
			   .max_running = 8,
			   .devices = devices,
			   .store = !o->no_cache,
			   .socket = o->socket,
			   .program = "kve-chat"},
		.ranks = o->parallel.data_parallel,
		.dbo = o->parallel,
	};
	kve_parallel_t *ranks;
	kv_status_t status;

	if (rc != 0) {
		return rc;
	}
	status = kve_parallel_create(&config, &ranks);
	if (status == KV_OK) {
		rc = talk(o, report, ranks);
		kve_parallel_destroy(ranks);
	} else {
		rc = EXIT_SETUP;
		if (status == KV_ERR_NOMEM) {
			complain_of_memory(&config);
		} else {
			(void)fputs("kve-chat: the engine cannot be created\n", stderr);
		}
	}
	kve_devices_close(devices);

	return rc;
}

int main(int argc, char **argv)
{
	static report_t report;
	options_t options;
	int rc;

	if (kv_version_asked(argc, argv, "kve-chat")) {
		return 0;
	}
	rc = parse_options(argc, argv, &options);
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
