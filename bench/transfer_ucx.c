/* transfer/ucx-256k, -2m -- a prefix that comes from the daemon of another node, both daemons on this machine, UCX over
 * TCP on loopback.
 *
 * From kvc_handover_fetch() until every block is visible here, its digests checked: a prefix of 256 MiB (--quick: 64)
 * that was never here before, in blocks of 256 KiB or 2 MiB. Against ucx_perftest of the same library, transport and
 * device, one message of the size that the net process sends (4 MiB): the best of tag_bw, ucp_am_bw and ucp_put_bw,
 * whose buffers stay hot and whose processes spin. UCX takes other settings from the environment, for both: perftest's
 * endpoints choose put for large messages, those of the net process, which hear of a peer's end, active messages; with
 * UCX_RNDV_SCHEME=am both choose the latter. Five threads work at a time, so it wants six processors.
 * GB/s. Goal: ratio >= 0.9. */
#include "bench.h"
#include "rig.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define UNIT_TOKENS 16u
#define MAX_BLOCKS  4096u
#define MESSAGE     (4u << 20)
#define WAIT_MS     60000u
#define POOL_PREFIX 3u /* prefixes that a pool holds */

extern char **environ;

static struct {
	rig_t rig[2]; /* that has the blocks; that wants them */
	uint16_t port[2];
	uint32_t blocks, block_bytes;
	uint32_t seed;
	uint8_t *memory; /* of one prefix */
	uint32_t tokens[MAX_BLOCKS * UNIT_TOKENS];
	kvc_key_t keys[MAX_BLOCKS];
	int put_is_slow; /* ucp_put_bw is none of the best here (UCX 1.13 over TCP) */
} work;

/* ---- two daemons ----------------------------------------------------------------------------- */

static uint16_t free_port(void)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof address;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (bind(fd, (struct sockaddr *)&address, len) != 0 ||
	    getsockname(fd, (struct sockaddr *)&address, &len) != 0) {
		address.sin_port = 0;
	}
	close(fd);

	return ntohs(address.sin_port);
}

static bench_outcome_t start_daemons(void)
{
	const uint64_t pool = (POOL_PREFIX + 1) * (uint64_t)work.blocks * work.block_bytes;
	char key[64];
	int up;

	if (rig_write_key(key) != 0) {
		return bench_fail("no key file in /tmp");
	}
	work.port[0] = free_port();
	work.port[1] = free_port();
	for (uint32_t i = 0; i < 2; i++) {
		if (rig_start(&work.rig[i],
			      "--cpu.size=%llu --cpu.slab_size=64MiB --cpu.ahead=all --peers.name=n%u "
			      "--peers.listen=127.0.0.1:%u --peers.addresses=n%u=127.0.0.1:%u --peers.keys=n%u=%s",
			      (unsigned long long)pool, i, work.port[i], 1 - i, work.port[1 - i], 1 - i, key) != 0 ||
		    rig_attach(&work.rig[i], "bench", work.block_bytes) != 0) {
			return bench_fail("kvd does not start");
		}
	}
	up = rig_await_peers(work.rig, UINT64_C(10000000000));
	unlink(key);

	return up ? BENCH_DONE : bench_skip("the peers do not connect");
}

/* ---- a round --------------------------------------------------------------------------------- */

/* A prefix that neither has had before is put at the owner. */
static int put_prefix(void)
{
	const void **blocks = malloc(work.blocks * sizeof *blocks);
	kvc_prompt_t prompt = {
		.struct_size = sizeof prompt, .tokens = work.tokens, .n_tokens = work.blocks * UNIT_TOKENS};
	kvc_put_options_t options = {.struct_size = sizeof options, .blocks = blocks};
	uint32_t n = 0, visible = 0;
	kvc_status_t status;

	work.seed++;
	for (uint32_t i = 0; i < work.blocks * UNIT_TOKENS; i++) {
		work.tokens[i] = work.seed * 65536u + i;
	}
	for (uint32_t i = 0; blocks && i < work.blocks; i++) {
		blocks[i] = work.memory + (size_t)i * work.block_bytes;
	}
	status = blocks ? kvc_keys_of(work.rig[0].space, &prompt, work.keys, work.blocks, &n) : KVC_ERR_NOMEM;
	if (status == KVC_OK) {
		status = kvc_put(work.rig[0].space, work.keys, 0, n, &options, &visible);
	}
	free(blocks);

	return status == KVC_OK && visible == work.blocks ? 0 : -1;
}

static bench_outcome_t fetch_prefix(void *arg, bench_sample_t *p_sample)
{
	const kvc_prompt_t prompt = {
		.struct_size = sizeof prompt, .tokens = work.tokens, .n_tokens = work.blocks * UNIT_TOKENS};
	const kvc_fetch_t fetch = {.struct_size = sizeof fetch, .peer = "n0", .prompt = &prompt};
	kvc_handover_info_t info = {.struct_size = sizeof info};
	kvc_handover_t *handover = NULL;
	bench_clock_t start;
	kvc_status_t status;

	(void)arg;
	if (put_prefix() != 0) {
		return bench_fail("the prefix cannot be put: %s", kvc_last_error());
	}
	start = bench_start();
	status = kvc_handover_fetch(work.rig[1].space, &fetch, &handover);
	if (status == KVC_OK) {
		status = kvc_handover_wait(handover, 0, WAIT_MS);
	}
	(void)bench_rate(start, (double)work.blocks * work.block_bytes, work.blocks, p_sample);
	if (status != KVC_OK) {
		kvc_handover_done(handover, 0);
		return bench_fail("the prefix does not come: %s", kvc_status_text(status));
	}
	kvc_handover_get_info(handover, &info);
	kvc_handover_done(handover, 0);

	return info.n == work.blocks ? BENCH_DONE : bench_fail("only %u blocks came", info.n);
}

/* ---- the reference --------------------------------------------------------------------------- */

/* Run ucx_perftest; its output into `out`, or none when it is NULL. -1: there is no such program. */
static pid_t spawn_perftest(char *const argv[], int out)
{
	posix_spawn_file_actions_t files;
	pid_t pid;
	int result;

	posix_spawn_file_actions_init(&files);
	posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
	if (out >= 0) {
		posix_spawn_file_actions_adddup2(&files, out, 1);
	} else {
		posix_spawn_file_actions_addopen(&files, 1, "/dev/null", O_WRONLY, 0);
	}
	posix_spawn_file_actions_addopen(&files, 2, "/dev/null", O_WRONLY, 0);
	result = posix_spawnp(&pid, "ucx_perftest", &files, NULL, argv, environ);
	posix_spawn_file_actions_destroy(&files);

	return result == 0 ? pid : -1;
}

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

/* GB/s of one test; 0: it did not run. */
static double run_perftest(const char *test, const char *iterations)
{
	char port[8], size[16], line[256];
	char *const server[] = {"ucx_perftest", "-p", port, NULL};
	char *const client[] = {"ucx_perftest",
				"127.0.0.1",
				"-p",
				port,
				"-t",
				(char *)(uintptr_t)test,
				"-s",
				size,
				"-n",
				(char *)(uintptr_t)iterations,
				"-w",
				"8",
				"-f",
				"-v",
				NULL};
	int pipe_fds[2];
	double rate = 0;
	pid_t pids[2];
	FILE *output;

	snprintf(port, sizeof port, "%u", free_port());
	snprintf(size, sizeof size, "%u", MESSAGE);
	if (pipe2(pipe_fds, O_CLOEXEC) != 0) {
		return 0;
	}
	pids[0] = spawn_perftest(server, -1);
	usleep(300000);
	pids[1] = pids[0] > 0 ? spawn_perftest(client, pipe_fds[1]) : -1;
	close(pipe_fds[1]);
	output = fdopen(pipe_fds[0], "r");
	while (output && fgets(line, sizeof line, output)) {
		rate = parse_rate(line, rate);
	}
	if (output) {
		fclose(output);
	}
	if (pids[1] > 0) {
		(void)waitpid(pids[1], NULL, 0);
	}
	if (pids[0] > 0) {
		kill(pids[0], SIGTERM);
		(void)waitpid(pids[0], NULL, 0);
	}

	return rate;
}

static bench_outcome_t measure_perftest(void *arg, bench_sample_t *p_sample)
{
	const double tag = run_perftest("tag_bw", "128"), am = run_perftest("ucp_am_bw", "128");
	const double put = work.put_is_slow ? 0 : run_perftest("ucp_put_bw", "128");

	(void)arg;
	p_sample->value = tag > am ? tag : am;
	p_sample->value = put > p_sample->value ? put : p_sample->value;

	return p_sample->value > 0 ? BENCH_DONE : bench_fail("ucx_perftest does not run");
}

/* ---- the bench ------------------------------------------------------------------------------- */

static bench_outcome_t measure(const char *name)
{
	const bench_measurement_t m = {.name = name,
				       .unit = "GB/s",
				       .reference = "ucx_perftest",
				       .value_fn = fetch_prefix,
				       .reference_fn = measure_perftest,
				       .rounds = 5,
				       .goal = BENCH_RATIO_AT_LEAST,
				       .goal_value = 0.9};
	bench_outcome_t outcome = start_daemons();

	return outcome == BENCH_DONE ? bench_measure(NULL, &m) : outcome;
}

bench_run_t run_transfer_ucx;
bench_outcome_t run_transfer_ucx(int variant)
{
	const size_t bytes = bench_quick() ? (size_t)64 << 20 : (size_t)256 << 20;
	bench_outcome_t outcome;
	double tag;

	/* For ucx_perftest: what the net process chooses. */
	setenv("UCX_TLS", "tcp", 1);
	setenv("UCX_NET_DEVICES", "lo", 1);
	setenv("UCX_WARN_UNUSED_ENV_VARS", "n", 1);
	tag = run_perftest("tag_bw", "32");
	if (tag == 0) {
		return bench_skip("ucx_perftest does not run here (package ucx-utils)");
	}
	memset(&work, 0, sizeof work);
	work.put_is_slow = run_perftest("ucp_put_bw", "32") < tag / 2;
	work.block_bytes = (uint32_t)variant;
	work.blocks = (uint32_t)(bytes / work.block_bytes);
	work.memory = bench_memory(bytes);
	if (!work.memory) {
		return bench_fail("no memory");
	}
	bench_fill(work.memory, bytes, 1);
	outcome = measure(variant == 256 << 10 ? "transfer/ucx-256k" : "transfer/ucx-2m");
	rig_remove(&work.rig[0]);
	rig_remove(&work.rig[1]);
	free(work.memory);

	return outcome;
}
