/* kvctl replay: what would this cache have done with my requests? Real bytes, every one of them checked. */
#include "kvctl.h"
#include "replay.h"

#include "kv/units.h"

#include <json-c/json.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_CLIENTS        64u
#define DEFAULT_TIMEOUT_MS 30000u

typedef struct options {
	const char *trace;
	const char *policy; /* of a private daemon; NULL: lru */
	uint64_t blocks;
	uint64_t clients;
	uint64_t block_bytes;
	uint64_t limit;
	int live; /* drive the daemon of --socket; else a private one */
} options_t;

/* Shared between the client processes. */
typedef struct board {
	replay_result_t result[MAX_CLIENTS];
	uint64_t samples[];
} board_t;

typedef struct percentiles {
	uint64_t count, p50, p90, p99, max;
} percentiles_t;

static int compare_u64(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a;
	uint64_t y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

/* Sorts the samples; zeros are requests without such a step. */
static percentiles_t percentiles(uint64_t *samples, uint32_t n)
{
	percentiles_t out = {0};
	uint32_t zeros = 0;

	qsort(samples, n, sizeof *samples, compare_u64);
	while (zeros < n && samples[zeros] == 0) {
		zeros++;
	}
	out.count = n - zeros;
	if (out.count > 0) {
		const uint64_t *first = samples + zeros;

		out.p50 = first[(out.count - 1) * 50 / 100];
		out.p90 = first[(out.count - 1) * 90 / 100];
		out.p99 = first[(out.count - 1) * 99 / 100];
		out.max = first[out.count - 1];
	}

	return out;
}

static replay_samples_t samples_of(board_t *board, uint32_t requests)
{
	return (replay_samples_t){board->samples, board->samples + requests, board->samples + 2u * (size_t)requests};
}

static void add_result(replay_result_t *sum, const replay_result_t *one)
{
	sum->requests += one->requests;
	sum->input_tokens += one->input_tokens;
	sum->hit_tokens += one->hit_tokens;
	sum->hit_cpu_tokens += one->hit_cpu_tokens;
	sum->hit_blocks += one->hit_blocks;
	sum->put_blocks += one->put_blocks;
	sum->put_failed_blocks += one->put_failed_blocks;
	sum->wrong_bytes += one->wrong_bytes;
	sum->corrupt_blocks += one->corrupt_blocks;
	sum->bytes_read += one->bytes_read;
	sum->bytes_written += one->bytes_written;
	sum->failures += one->failures;
	if (sum->status == KVC_OK) {
		sum->status = one->status;
	}
}

/* One process a client, so that nothing is shared but the daemon. */
static replay_result_t run_clients(replay_job_t job, board_t *board)
{
	replay_samples_t samples = samples_of(board, job.trace->count);
	replay_result_t sum = {0};
	pid_t pids[MAX_CLIENTS];

	fflush(NULL);
	for (uint32_t i = 0; i < job.clients; i++) {
		board->result[i].status = KVC_ERR_CLOSED;
		pids[i] = fork();
		if (pids[i] == 0) {
			job.client = i;
			board->result[i].status = KVC_OK;
			replay_client(&job, samples, &board->result[i]);
			_exit(0);
		}
	}
	for (uint32_t i = 0; i < job.clients; i++) {
		int code = 0;

		if (pids[i] < 0 || waitpid(pids[i], &code, 0) < 0 || !WIFEXITED(code)) {
			board->result[i].status = KVC_ERR_CLOSED;
		}
		add_result(&sum, &board->result[i]);
	}

	return sum;
}

/* Blocks the daemon has evicted, 0 when it does not say. The status of attaching to it. */
static kvc_status_t evictions(const char *socket, uint64_t *p_count)
{
	kvc_config_t config = {.struct_size = sizeof config, .socket = socket, .observe = 1, .program = "kvctl replay"};
	json_object *root = NULL;
	json_object *value;
	char *json = NULL;
	kvc_t *kvc;
	kvc_status_t status = kvc_attach(&config, &kvc);

	*p_count = 0;
	if (status != KVC_OK) {
		return status;
	}
	if (kvc_document(kvc, KVC_DOC_STATS, 0, &json, NULL) == KVC_OK) {
		root = json_tokener_parse(json);
	}
	if (root && json_object_object_get_ex(root, "kvd_evicted_total{tier=cpu}", &value)) {
		*p_count = json_object_get_uint64(value);
	}
	json_object_put(root);
	kvc_free(json);
	kvc_detach(kvc);

	return KVC_OK;
}

static void add_percentiles(json_object *root, const char *name, percentiles_t p)
{
	json_object *object = json_object_new_object();

	json_object_object_add(object, "count", json_object_new_uint64(p.count));
	json_object_object_add(object, "p50_ns", json_object_new_uint64(p.p50));
	json_object_object_add(object, "p90_ns", json_object_new_uint64(p.p90));
	json_object_object_add(object, "p99_ns", json_object_new_uint64(p.p99));
	json_object_object_add(object, "max_ns", json_object_new_uint64(p.max));
	json_object_object_add(root, name, object);
}

static double percent(uint64_t part, uint64_t whole)
{
	return whole ? 100.0 * (double)part / (double)whole : 0.0;
}

static void print_json(const options_t *options, const replay_result_t *r, uint64_t evicted, const percentiles_t p[3])
{
	json_object *root = json_object_new_object();

	json_object_object_add(root, "trace", json_object_new_string(options->trace));
	json_object_object_add(root, "policy", options->policy ? json_object_new_string(options->policy) : NULL);
	json_object_object_add(root, "blocks", json_object_new_uint64(options->blocks));
	json_object_object_add(root, "clients", json_object_new_uint64(options->clients));
	json_object_object_add(root, "block_bytes", json_object_new_uint64(options->block_bytes));
	json_object_object_add(root, "requests", json_object_new_uint64(r->requests));
	json_object_object_add(root, "input_tokens", json_object_new_uint64(r->input_tokens));
	json_object_object_add(root, "hit_tokens", json_object_new_uint64(r->hit_tokens));
	json_object_object_add(root, "hit_cpu_tokens", json_object_new_uint64(r->hit_cpu_tokens));
	json_object_object_add(root, "token_hit_percent",
			       json_object_new_double(percent(r->hit_tokens, r->input_tokens)));
	json_object_object_add(root, "wrong_bytes", json_object_new_uint64(r->wrong_bytes));
	json_object_object_add(root, "corrupt_blocks", json_object_new_uint64(r->corrupt_blocks));
	json_object_object_add(root, "hit_blocks", json_object_new_uint64(r->hit_blocks));
	json_object_object_add(root, "put_blocks", json_object_new_uint64(r->put_blocks));
	json_object_object_add(root, "put_failed_blocks", json_object_new_uint64(r->put_failed_blocks));
	json_object_object_add(root, "bytes_read", json_object_new_uint64(r->bytes_read));
	json_object_object_add(root, "bytes_written", json_object_new_uint64(r->bytes_written));
	json_object_object_add(root, "evictions", json_object_new_uint64(evicted));
	json_object_object_add(root, "failures", json_object_new_uint64(r->failures));
	add_percentiles(root, "match", p[0]);
	add_percentiles(root, "acquire_and_read", p[1]);
	add_percentiles(root, "put", p[2]);
	puts(json_object_to_json_string_ext(root, JSON_C_TO_STRING_PLAIN));
	json_object_put(root);
}

static void print_times(const char *name, percentiles_t p)
{
	char text[4][32];

	printf("  %-18s p50 %-10s p90 %-10s p99 %-10s max %s\n", name,
	       kv_format_duration(p.p50, text[0], sizeof text[0]), kv_format_duration(p.p90, text[1], sizeof text[1]),
	       kv_format_duration(p.p99, text[2], sizeof text[2]), kv_format_duration(p.max, text[3], sizeof text[3]));
}

static void print_human(const options_t *options, const replay_result_t *r, uint64_t evicted, const percentiles_t p[3])
{
	char read[32];
	char written[32];

	printf("%s: %llu requests, %llu prompt tokens, %llu client%s\n", options->trace,
	       (unsigned long long)r->requests, (unsigned long long)r->input_tokens,
	       (unsigned long long)options->clients, options->clients == 1 ? "" : "s");
	printf("  hit tokens         %llu (%.2f %%), %llu of them in CPU memory\n", (unsigned long long)r->hit_tokens,
	       percent(r->hit_tokens, r->input_tokens), (unsigned long long)r->hit_cpu_tokens);
	printf("  wrong bytes        %llu, blocks refused by their digest %llu\n", (unsigned long long)r->wrong_bytes,
	       (unsigned long long)r->corrupt_blocks);
	printf("  moved              %s read, %s written\n", kv_format_size(r->bytes_read, read, sizeof read),
	       kv_format_size(r->bytes_written, written, sizeof written));
	printf("  blocks             %llu hit, %llu put, %llu not put, %llu evicted\n",
	       (unsigned long long)r->hit_blocks, (unsigned long long)r->put_blocks,
	       (unsigned long long)r->put_failed_blocks, (unsigned long long)evicted);
	print_times("match", p[0]);
	print_times("acquire and read", p[1]);
	print_times("put", p[2]);
	if (r->failures) {
		printf("  failed calls       %llu\n", (unsigned long long)r->failures);
	}
}

/* The value of an option, if it is given. */
static int take_number(const kvctl_t *ctl, kvctl_option_t option, uint64_t min, uint64_t max, uint64_t *p_value)
{
	const char *text = ctl->given[option];

	if (text &&
	    ((option == KVCTL_BLOCK_BYTES ? kv_parse_size(text, p_value) : kv_parse_u64(text, p_value)) != KV_OK ||
	     *p_value < min || *p_value > max)) {
		(void)kvctl_error(ctl, KV_ERR_ARG, "replay: --%s takes a number from %llu to %llu, not '%s'",
				  kvctl_options[option].name, (unsigned long long)min, (unsigned long long)max, text);
		return 0;
	}

	return 1;
}

/* A replay stores its own blocks and evicts others: into a daemon that serves engines only by --live. */
static int choose_daemon(const kvctl_t *ctl, const options_t *o)
{
	const char *wrong = NULL;

	if (!o->live && ctl->socket) {
		wrong = "--socket names a daemon in use: --live drives it, and evicts what it holds";
	} else if (!o->live && !o->blocks) {
		wrong = "--blocks C starts a private daemon of C blocks, --live drives the daemon of --socket";
	} else if (o->live && o->policy) {
		wrong = "--policy is for a private daemon, not for --live";
	}
	if (wrong) {
		(void)kvctl_error(ctl, KV_ERR_ARG, "replay: %s", wrong);
	}

	return !wrong;
}

static int take_options(const kvctl_t *ctl, options_t *o)
{
	*o = (options_t){.trace = ctl->given[KVCTL_TRACE],
			 .policy = ctl->given[KVCTL_POLICY],
			 .clients = 1,
			 .block_bytes = 4096,
			 .live = ctl->given[KVCTL_LIVE] != NULL};
	if (!take_number(ctl, KVCTL_BLOCKS, 1, 1u << 30, &o->blocks) ||
	    !take_number(ctl, KVCTL_CLIENTS, 1, MAX_CLIENTS, &o->clients) ||
	    !take_number(ctl, KVCTL_BLOCK_BYTES, 8, 64u << 20, &o->block_bytes) ||
	    !take_number(ctl, KVCTL_LIMIT, 1, UINT32_MAX, &o->limit)) {
		return 0;
	}
	if (!o->trace) {
		(void)kvctl_error(ctl, KV_ERR_ARG, "replay: --trace FILE is needed");
		return 0;
	}

	return choose_daemon(ctl, o);
}

static size_t board_bytes(uint32_t requests)
{
	return sizeof(board_t) + 3u * (size_t)requests * sizeof(uint64_t);
}

static board_t *map_board(uint32_t requests)
{
	void *board = mmap(NULL, board_bytes(requests), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	return board == MAP_FAILED ? NULL : board;
}

static int run(const kvctl_t *ctl, const options_t *options, const trace_t *trace, const char *socket)
{
	replay_job_t job = {
		.trace = trace,
		.socket = socket,
		.name = options->trace,
		.clients = (uint32_t)options->clients,
		.blocks = (uint32_t)options->blocks,
		.block_bytes = (uint32_t)options->block_bytes,
		.timeout_ms = ctl->timeout_ms ? ctl->timeout_ms : DEFAULT_TIMEOUT_MS,
	};
	board_t *board = map_board(trace->count);
	uint64_t before, after;
	percentiles_t times[3];
	replay_samples_t samples;
	replay_result_t result;
	uint64_t evicted;
	kvc_status_t status;

	if (!board) {
		return kvctl_error(ctl, KV_ERR_NOMEM, "out of memory");
	}
	status = evictions(socket, &before);
	if (status != KVC_OK) {
		munmap(board, board_bytes(trace->count));
		return kvctl_failed(ctl, status);
	}
	result = run_clients(job, board);
	(void)evictions(socket, &after);
	evicted = after < before ? after : after - before; /* less: another daemon's, or none answers */
	samples = samples_of(board, trace->count);
	times[0] = percentiles(samples.match_ns, trace->count);
	times[1] = percentiles(samples.acquire_ns, trace->count);
	times[2] = percentiles(samples.put_ns, trace->count);
	if (ctl->json) {
		print_json(options, &result, evicted, times);
	} else {
		print_human(options, &result, evicted, times);
	}
	munmap(board, board_bytes(trace->count));
	if (result.wrong_bytes) {
		return 2;
	}

	return result.status == KVC_OK ? 0 : kv_status_exit_code((kv_status_t)result.status);
}

int kvctl_replay(const kvctl_t *ctl)
{
	private_daemon_t daemon = {0};
	options_t options;
	trace_t trace;
	char detail[512];
	kv_status_t status;
	int code;

	if (!take_options(ctl, &options)) {
		return kv_status_exit_code(KV_ERR_ARG);
	}
	status = trace_read(options.trace, (uint32_t)options.limit, &trace, detail, sizeof detail);
	if (status == KV_OK && !options.live) {
		status = private_daemon_start(&daemon, (uint32_t)options.blocks, (uint32_t)options.block_bytes,
					      options.policy ? options.policy : "lru", detail, sizeof detail);
		if (status != KV_OK) {
			trace_free(&trace);
		}
	}
	if (status != KV_OK) {
		return kvctl_error(ctl, status, "%s", detail);
	}

	code = run(ctl, &options, &trace, options.live ? ctl->socket : daemon.socket);
	private_daemon_stop(&daemon);
	trace_free(&trace);

	return code;
}
