/* transfer/tls-*, transfer/ucx-* -- a prefix that comes from the daemon of another node, both daemons on this
 * machine. GB/s, from kvc_handover_fetch() until every block is visible here, its digests checked.
 *
 * tls-256k, tls-2m: over TLS, as ucx-* below, against 1 / (1 / tcp + 1 / cipher) of the same bytes in the same round
 * (transfer_link.h). The parts go to standard error, with OpenSSL alone (transfer_tls.c) and UCX over TCP with
 * ucx_perftest. Goal: ratio >= 0.9.
 *
 * ucx-256k, ucx-2m: a prefix of 256 MiB (--quick: 64) that was never here before, in blocks of that size, out of and
 * into pools of 1 GiB, which are walked through. Against ucx_perftest of the same library, transport and device, one
 * message of the size that the net process sends (4 MiB): the best of tag_bw, ucp_am_bw and ucp_put_bw, whose buffers
 * stay hot and whose processes spin. UCX takes other settings from the environment, for both. Goal: ratio >= 0.9.
 *
 * ucx-host: the same in blocks of 2 MiB against the same tests with messages of 256 MiB, so that their buffers are as
 * cold as ours. Two daemons of one host go over TCP as well (docs/decisions/046). Goal: ratio >= 0.85.
 *
 * tls-64k-in-order, tls-64k-scattered: 8,192 blocks of 64 KiB (--quick: 2,048), which the owner's pool has side by
 * side or never two of them, against the same bytes in blocks of 4 MiB, which are a message each. How many messages
 * bring them goes to standard error. Goal in order: ratio >= 0.9.
 *
 * Five threads work at a time, so it wants six processors. */
#include "bench.h"
#include "rig.h"
#include "transfer_link.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define UNIT_TOKENS 16u
#define MAX_BLOCKS  8192u
#define MESSAGE     (4u << 20)
#define COLD        (256u << 20) /* a message that is in no cache */
#define PIECE       (32u << 20)
#define WAIT_MS     60000u
#define MAX_ROUNDS  16u
#define REPORTS_US  1200000u /* two reports of the net process */
#define POOL_PREFIX 3u       /* prefixes that a pool holds, and room for one more */

/* A prefix in blocks of one size, and the space that it is in, at both daemons. */
typedef struct shape {
	rig_t at[2]; /* the daemon that has the blocks; that wants them */
	uint32_t blocks, block_bytes;
	uint32_t seed; /* of its tokens */
} shape_t;

static struct {
	const char *name;
	shape_t main;
	shape_t large;    /* of the rows of small blocks; in the daemons of `main` */
	uint32_t message; /* of the reference */
	uint8_t *memory;  /* of one prefix */
	uint32_t tokens[MAX_BLOCKS * UNIT_TOKENS];
	kvc_key_t keys[MAX_BLOCKS], other_keys[MAX_BLOCKS];
	const void *data[MAX_BLOCKS];
	double best[2];           /* tcp, cipher */
	double alone[MAX_ROUNDS]; /* OpenSSL's rate in each round, of what its parts give */
	uint32_t rounds;
	int put_is_slow; /* ucp_put_bw is none of the best here (UCX 1.13 over TCP) */
} work;

/* ---- two daemons ----------------------------------------------------------------------------- */

static bench_outcome_t start_daemons(const char *transports)
{
	const shape_t *shape = &work.main;
	const uint64_t pool = (POOL_PREFIX + 1) * (uint64_t)shape->blocks * shape->block_bytes;
	char addresses[2][32], options[128];
	bench_outcome_t outcome;

	for (uint32_t i = 0; i < 2; i++) {
		snprintf(addresses[i], sizeof addresses[i], "127.0.0.1:%u", rig_free_port());
	}
	snprintf(options, sizeof options, "--cpu.size=%llu --cpu.slab_size=64MiB --cpu.ahead=all --peers.transports=%s",
		 (unsigned long long)pool, transports);
	outcome = rig_start_peers(work.main.at, addresses, options);
	for (uint32_t i = 0; i < 2 && outcome == BENCH_DONE; i++) {
		if (rig_attach(&work.main.at[i], "bench", shape->block_bytes) != 0) {
			outcome = bench_fail("no space for the blocks");
		}
	}

	return outcome;
}

/* ---- a prefix -------------------------------------------------------------------------------- */

static kvc_prompt_t prompt_of(const shape_t *shape, uint32_t seed)
{
	const uint32_t n = shape->blocks * UNIT_TOKENS;

	for (uint32_t i = 0; i < n; i++) {
		work.tokens[i] = seed * (MAX_BLOCKS * UNIT_TOKENS) + i;
	}

	return (kvc_prompt_t){.struct_size = sizeof(kvc_prompt_t), .tokens = work.tokens, .n_tokens = n};
}

/* Put keys[from, n) of the shape at the owner; a pool that is new, or has blocks of another size, makes room first. */
static int put_blocks(const shape_t *shape, const kvc_key_t *keys, uint32_t from, uint32_t n)
{
	const kvc_put_options_t options = {.struct_size = sizeof options, .blocks = work.data};
	const uint64_t end = bench_now_ns() + WAIT_MS * UINT64_C(1000000);
	uint32_t visible = 0;
	kvc_status_t status;

	for (uint32_t i = from; i < n; i++) {
		work.data[i - from] = work.memory + (size_t)i * shape->block_bytes;
	}
	for (;; usleep(10000)) {
		status = kvc_put(shape->at[0].space, keys, from, n, &options, &visible);
		if (status == KVC_OK && visible == n - from) {
			return 0;
		}
		if ((status != KVC_OK && status != KVC_ERR_BUSY) || bench_now_ns() > end || bench_late()) {
			return -1;
		}
	}
}

/* The keys of a prefix that neither daemon has had before. */
static int new_prefix(shape_t *shape, kvc_key_t *keys)
{
	const kvc_prompt_t prompt = prompt_of(shape, ++shape->seed);
	uint32_t n = 0;

	return kvc_keys_of(shape->at[0].space, &prompt, keys, shape->blocks, &n) == KVC_OK ? 0 : -1;
}

/* In pieces: unfinished bytes have a limit. */
static int put_prefix(shape_t *shape)
{
	const uint32_t piece = PIECE / shape->block_bytes;
	int result = new_prefix(shape, work.keys);

	for (uint32_t i = 0; i < shape->blocks && result == 0; i += piece) {
		result = put_blocks(shape, work.keys, i, i + piece);
	}

	return result;
}

/* Block by block in turn with another prefix, so that those of neither are neighbours in the pool. */
static int put_scattered(shape_t *shape)
{
	int result = new_prefix(shape, work.other_keys) == 0 ? new_prefix(shape, work.keys) : -1;

	for (uint32_t i = 0; i < shape->blocks && result == 0; i++) {
		result =
			put_blocks(shape, work.keys, i, i + 1) == 0 ? put_blocks(shape, work.other_keys, i, i + 1) : -1;
	}

	return result;
}

/* The prefix that was put last comes to the other daemon. */
static kvc_status_t fetch_prefix(const shape_t *shape, bench_sample_t *p_sample)
{
	const kvc_prompt_t prompt = prompt_of(shape, shape->seed);
	const kvc_fetch_t fetch = {.struct_size = sizeof fetch, .peer = "n0", .prompt = &prompt};
	kvc_handover_info_t info = {.struct_size = sizeof info};
	kvc_handover_t *handover = NULL;
	const bench_clock_t start = bench_start();
	kvc_status_t status = kvc_handover_fetch(shape->at[1].space, &fetch, &handover);

	if (status == KVC_OK) {
		status = kvc_handover_wait(handover, 0, WAIT_MS);
	}
	(void)bench_rate(start, (double)shape->blocks * shape->block_bytes, shape->blocks, p_sample);
	kvc_handover_get_info(handover, &info);
	kvc_handover_done(handover, 0);

	return status == KVC_OK && info.n < shape->blocks ? KVC_MISS : status;
}

static bench_outcome_t outcome_of(kvc_status_t status)
{
	return status == KVC_OK ? BENCH_DONE : bench_fail("the prefix does not come: %s", kvc_status_text(status));
}

/* ---- rounds ---------------------------------------------------------------------------------- */

static bench_outcome_t measure_new(void *arg, bench_sample_t *p_sample)
{
	if (put_prefix(arg) != 0) {
		return bench_fail("the prefix cannot be put: %s", kvc_last_error());
	}

	return outcome_of(fetch_prefix(arg, p_sample));
}

/* The owner has it; the other daemon forgets it first. */
static bench_outcome_t measure_again(void *arg, bench_sample_t *p_sample)
{
	const shape_t *shape = p_sample->is_reference ? &work.large : &work.main;
	kvc_status_t status = KVC_OK;

	(void)arg;
	if (kvc_space_reset(shape->at[1].space) != KVC_OK) {
		return bench_fail("the prefix is not forgotten: %s", kvc_last_error());
	}

	for (uint32_t i = 0; i < 3 && (i == 0 || status == KVC_ERR_STALE_EPOCH); i++) {
		status = fetch_prefix(shape, p_sample); /* the net process hears of the reset by the first one */
	}

	return outcome_of(status);
}

/* ---- the reference --------------------------------------------------------------------------- */

/* A line is: iterations, percentile, average and overall latency, average and overall MiB/s, ...; another one:
 * `before`. */
static double parse_rate(const char *line, double before)
{
	const char *field = line;
	char *end = NULL;
	double value = 0;

	for (uint32_t i = 0; i < 6; i++) {
		value = strtod(field, &end);
		if (end == field || *end != ',') {
			return before;
		}
		field = end + 1;
	}

	return value * 1048576.0 / 1e9;
}

/* GB/s of one test, which sends that many bytes in messages of that size; 0: it did not run. */
static double run_perftest(const char *test, uint32_t message, uint32_t bytes)
{
	const unsigned port = rig_free_port();
	char command[320], line[256];
	double rate = 0;
	FILE *output;

	snprintf(command, sizeof command,
		 "ucx_perftest -p %u >/dev/null 2>&1 & sleep 0.3; "
		 "ucx_perftest 127.0.0.1 -p %u -t %s -s %u -n %u -w %u -f -v 2>/dev/null; kill $! 2>/dev/null; wait",
		 port, port, test, message, bytes / message, message > MESSAGE ? 1u : 8u);
	fflush(NULL);
	output = popen(command, "r");
	while (output && fgets(line, sizeof line, output)) {
		rate = parse_rate(line, rate);
	}
	if (output) {
		(void)pclose(output);
	}

	return rate;
}

static bench_outcome_t measure_perftest(void *arg, bench_sample_t *p_sample)
{
	const uint32_t bytes = work.message > MESSAGE ? 4 * work.message : 128 * work.message;
	const double tag = run_perftest("tag_bw", work.message, bytes);
	const double am = run_perftest("ucp_am_bw", work.message, bytes);
	const double put = work.put_is_slow ? 0 : run_perftest("ucp_put_bw", work.message, bytes);

	(void)arg;
	p_sample->value = tag > am ? tag : am;
	p_sample->value = put > p_sample->value ? put : p_sample->value;

	return p_sample->value > 0 ? BENCH_DONE : bench_fail("ucx_perftest does not run");
}

static bench_outcome_t measure_parts(void *arg, bench_sample_t *p_sample)
{
	const size_t bytes = (size_t)work.main.blocks * work.main.block_bytes;
	const double rates[2] = {transfer_tcp_rate(work.memory, bytes), transfer_cipher_rate(work.memory, bytes)};

	(void)arg;
	if (rates[0] <= 0 || rates[1] <= 0) {
		return bench_fail("no TCP on loopback, or no cipher");
	}
	for (uint32_t i = 0; i < 2; i++) {
		work.best[i] = rates[i] > work.best[i] ? rates[i] : work.best[i];
	}
	p_sample->value = 1 / (1 / rates[0] + 1 / rates[1]);
	if (work.rounds < MAX_ROUNDS) {
		work.alone[work.rounds++] = transfer_tls_rate(work.memory, bytes) / p_sample->value;
	}

	return BENCH_DONE;
}

/* ---- the benches ----------------------------------------------------------------------------- */

/* What the net process chooses. */
static void choose_transport(void)
{
	setenv("UCX_TLS", "tcp", 1);
	setenv("UCX_NET_DEVICES", "lo", 1);
	setenv("UCX_WARN_UNUSED_ENV_VARS", "n", 1);
}

static int compare_rates(const void *a, const void *b)
{
	const double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static bench_outcome_t run_against_parts(void)
{
	const bench_measurement_t m = {.name = work.name,
				       .unit = "GB/s",
				       .reference = "1/(1/tcp+1/cipher)",
				       .value_fn = measure_new,
				       .reference_fn = measure_parts,
				       .rounds = 5,
				       .goal = BENCH_RATIO_AT_LEAST,
				       .goal_value = 0.9};
	const bench_outcome_t outcome = bench_measure(&work.main, &m);

	qsort(work.alone, work.rounds, sizeof *work.alone, compare_rates);
	choose_transport();
	fprintf(stderr,
		"%s: best tcp %.2f GB/s, AES-128-GCM %.2f GB/s; OpenSSL alone, without daemons, has %.2f (%.2f to %.2f) of "
		"what they give; UCX over TCP (tag_bw, 4 MiB) %.2f GB/s; %llu puts were "
		"refused for want of memory that is touched, and asked for again\n",
		work.name, work.best[0], work.best[1], work.alone[work.rounds / 2], work.alone[0],
		work.alone[work.rounds ? work.rounds - 1 : 0], run_perftest("tag_bw", MESSAGE, 64 * MESSAGE),
		(unsigned long long)rig_metric(&work.main.at[1], "kvd_put_busy_total"));

	return outcome;
}

static bench_outcome_t run_against_perftest(double goal)
{
	const bench_measurement_t m = {.name = work.name,
				       .unit = "GB/s",
				       .reference = "ucx_perftest",
				       .value_fn = measure_new,
				       .reference_fn = measure_perftest,
				       .rounds = 5,
				       .goal = BENCH_RATIO_AT_LEAST,
				       .goal_value = goal};
	double tag;

	choose_transport();
	tag = run_perftest("tag_bw", MESSAGE, 32 * MESSAGE);
	if (tag == 0) {
		return bench_skip("ucx_perftest does not run here (package ucx-utils)");
	}
	work.put_is_slow = run_perftest("ucp_put_bw", MESSAGE, 32 * MESSAGE) < tag / 2;

	return bench_measure(&work.main, &m);
}

/* Attach to the daemons of `main` for the space of another block size. */
static int attach_large(void)
{
	work.large.block_bytes = MESSAGE;
	work.large.blocks = (uint32_t)((uint64_t)work.main.blocks * work.main.block_bytes / MESSAGE);
	for (uint32_t i = 0; i < 2; i++) {
		memcpy(work.large.at[i].socket, work.main.at[i].socket, sizeof work.large.at[i].socket);
		if (rig_attach(&work.large.at[i], "large", work.large.block_bytes) != 0) {
			return -1;
		}
	}

	return put_prefix(&work.large);
}

static void print_messages(void)
{
	static const char metric[] = "kvd_peer_messages_total";
	bench_sample_t sample = {0};
	uint64_t before;

	usleep(REPORTS_US);
	before = rig_metric(&work.main.at[0], metric);
	if (measure_again(NULL, &sample) == BENCH_DONE) {
		usleep(REPORTS_US);
		fprintf(stderr, "%s: %llu messages bring %u blocks\n", work.name,
			(unsigned long long)(rig_metric(&work.main.at[0], metric) - before), work.main.blocks);
	}
}

static bench_outcome_t run_against_large(int scattered)
{
	const bench_measurement_t m = {.name = work.name,
				       .unit = "GB/s",
				       .reference = "4 MiB blocks",
				       .value_fn = measure_again,
				       .reference_fn = measure_again,
				       .rounds = 5,
				       .goal = scattered ? BENCH_NO_GOAL : BENCH_RATIO_AT_LEAST,
				       .goal_value = 0.9};
	bench_outcome_t outcome;

	if (attach_large() != 0 || (scattered ? put_scattered : put_prefix)(&work.main) != 0) {
		return bench_fail("the prefixes cannot be put: %s", kvc_last_error());
	}
	outcome = bench_measure(NULL, &m);
	if (outcome == BENCH_DONE) {
		print_messages();
	}

	return outcome;
}

bench_outcome_t run_transfer(int variant)
{
	static const struct {
		const char *name;
		uint32_t block_bytes, bytes, message;
		double goal;
		int scattered;
		const char *transports;
	} rows[] = {{"transfer/tls-256k", 256u << 10, 256u << 20, 0, 0, 0, "tls"},
		    {"transfer/tls-2m", 2u << 20, 256u << 20, 0, 0, 0, "tls"},
		    {"transfer/tls-64k-in-order", 64u << 10, 512u << 20, 0, 0, 0, "tls"},
		    {"transfer/tls-64k-scattered", 64u << 10, 512u << 20, 0, 0, 1, "tls"},
		    {"transfer/ucx-256k", 256u << 10, 256u << 20, MESSAGE, 0.9, 0, "tcp"},
		    {"transfer/ucx-2m", 2u << 20, 256u << 20, MESSAGE, 0.9, 0, "tcp"},
		    {"transfer/ucx-host", 2u << 20, 256u << 20, COLD, 0.85, 0, "tcp"}};
	const size_t bytes = bench_quick() ? rows[variant].bytes / 4 : rows[variant].bytes;
	bench_outcome_t outcome;

	memset(&work, 0, sizeof work);
	work.name = rows[variant].name;
	work.message = rows[variant].message;
	work.main.block_bytes = rows[variant].block_bytes;
	work.main.blocks = (uint32_t)(bytes / work.main.block_bytes);
	work.memory = bench_memory(bytes);
	if (!work.memory) {
		return bench_fail("no memory");
	}
	bench_fill(work.memory, bytes, 1);
	outcome = start_daemons(rows[variant].transports);
	if (outcome == BENCH_DONE) {
		outcome = work.message > 0                     ? run_against_perftest(rows[variant].goal)
			  : work.main.block_bytes < 256u << 10 ? run_against_large(rows[variant].scattered)
							       : run_against_parts();
	}
	for (uint32_t i = 0; i < 2; i++) {
		rig_remove(&work.large.at[i]);
		rig_remove(&work.main.at[i]);
	}
	free(work.memory);

	return outcome;
}
