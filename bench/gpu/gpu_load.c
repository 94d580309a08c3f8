/* gpu_load: acquire and load of a long prefix from kvd's CPU pool into GPU memory, through kvx_worker_t, against one plain copy of as many bytes.
 *
 * Starts a kvd (beside this program), saves a prompt of 640 blocks of 2 MiB (10,240 tokens of an 8B shape), and then, in turn: one cudaMemcpyAsync of as many
 * pinned bytes, and lease + load + verdict of all digests, on the host's clock. Bytes are compared once. A line of a table and a JSON line, as gpu_copy's.
 *
 *     gpu_load [--rounds N] [--blocks N] [--json FILE] [--host 1]     exit 0: measured; 1: wrong bytes, or it could not; 77: no device
 */
#include "gpu_engine.h"

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_ROUNDS  64u
#define WAIT_MS     60000u
#define BOUNCE      (64u << 20)
#define GOAL        0.9
#define SAVE_BLOCKS 64u /* of one put: an instance may leave half of the pool unfinished, not all of it */

typedef struct bench {
	engine_t engine;
	char dir[64], socket[96];
	pid_t daemon;
	uint8_t *bounce;
	size_t bounce_bytes;
	kvc_key_t *keys;
	uint32_t *ids, *bad;
	uint32_t blocks, rounds;
} bench_t;

/* ---- the daemon -------------------------------------------------------------------------------------------------------- */

_Noreturn static void become_daemon(const bench_t *b)
{
	char self[PATH_MAX] = "", program[PATH_MAX + 8], run_dir[96], log[96], size[48];
	const ssize_t len = readlink("/proc/self/exe", self, sizeof self - 1);
	const char *slash = len > 0 ? strrchr(self, '/') : NULL;
	int fd;

	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	snprintf(program, sizeof program, "%.*s/kvd", slash ? (int)(slash - self) : 0, self);
	snprintf(run_dir, sizeof run_dir, "--run_dir=%s/run", b->dir);
	snprintf(log, sizeof log, "%s/log", b->dir);
	snprintf(size, sizeof size, "--cpu.size=%zuMiB",
		 (b->blocks * b->engine.block_bytes >> 20) * 5 / 4 + (b->engine.small ? 8 : 256));
	fd = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
	if (fd >= 0) {
		(void)dup2(fd, STDOUT_FILENO);
		(void)dup2(fd, STDERR_FILENO);
	}
	execl(program, program, run_dir, size, b->engine.small ? "--cpu.slab_size=2MiB" : "--cpu.slab_size=128MiB",
	      "--keeper=off", "--http.listen=off", (char *)NULL);
	_exit(127);
}

static int start_daemon(bench_t *b)
{
	const kvc_config_t config = {.struct_size = sizeof config, .socket = b->socket, .observe = 1};

	b->daemon = fork();
	if (b->daemon == 0) {
		become_daemon(b);
	}
	for (int i = 0; i < 2000; i++) {
		kvc_t *kvc = NULL;

		if (kvc_attach(&config, &kvc) == KVC_OK) {
			kvc_detach(kvc);
			return 1;
		}
		usleep(5000);
	}
	printf("gpu_load: the daemon does not start: see %s/log\n", b->dir);

	return 0;
}

/* ---- bytes ------------------------------------------------------------------------------------------------------------- */

static void fill(uint8_t *out, size_t bytes, uint64_t seed)
{
	uint64_t x = seed * UINT64_C(0x9e3779b97f4a7c15) | 1;

	for (size_t i = 0; i < bytes / 8; i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		memcpy(out + 8 * i, &x, 8);
	}
}

static uint8_t *piece_of(const bench_t *b, uint32_t block, uint32_t layer)
{
	return (uint8_t *)b->engine.base[layer] + (size_t)b->ids[block] * b->engine.piece;
}

/* The blocks get bytes of their own, of a block at a time; `seed` 0: others. */
static void write_cache(bench_t *b, uint64_t seed)
{
	const engine_t *e = &b->engine;

	for (uint32_t i = 0; i < b->blocks; i++) {
		fill(b->bounce, e->block_bytes, seed ? seed + i : 1);
		for (uint32_t l = 0; l < e->layout.layers; l++) {
			memory_write(piece_of(b, i, l), b->bounce + l * e->piece, e->piece);
		}
		memory_settle();
	}
}

static uint32_t wrong_blocks(bench_t *b, uint64_t seed)
{
	const engine_t *e = &b->engine;
	uint8_t *expected = malloc(e->block_bytes);
	uint32_t wrong = expected ? 0 : b->blocks;

	for (uint32_t i = 0; i < b->blocks && expected; i++) {
		for (uint32_t l = 0; l < e->layout.layers; l++) {
			memory_read(b->bounce + l * e->piece, piece_of(b, i, l), e->piece);
		}
		memory_settle();
		fill(expected, e->block_bytes, seed + i);
		wrong += memcmp(expected, b->bounce, e->block_bytes) != 0;
	}
	free(expected);

	return wrong;
}

/* ---- steps ------------------------------------------------------------------------------------------------------------- */

static kvc_status_t save_part(bench_t *b, uint32_t from, uint32_t n)
{
	engine_t *e = &b->engine;
	const kvc_put_options_t options = {.struct_size = sizeof options, .writers = &e->writer, .writer_count = 1};
	kvc_put_t *put = NULL;
	kvc_status_t status = kvc_put_start(e->space, b->keys, from, from + n, &options, &put);

	status = status == KVC_OK ? kvc_put_ready(put, WAIT_MS) : status;
	if (status == KVC_OK && kvc_put_n(put) == n && engine_save(e, put, b->ids + from, n)) {
		status = kvc_put_wait(put, 0, WAIT_MS);
	} else {
		status = status == KVC_OK ? KVC_ERR_FULL : status;
	}
	if (put) {
		kvc_put_free(put);
	}

	return status;
}

static int save(bench_t *b)
{
	kvc_status_t status = engine_keys(&b->engine, 1, b->keys);

	for (uint32_t from = 0; from < b->blocks && status == KVC_OK; from += SAVE_BLOCKS) {
		const uint32_t left = b->blocks - from;

		status = save_part(b, from, left < SAVE_BLOCKS ? left : SAVE_BLOCKS);
	}
	if (status != KVC_OK) {
		printf("gpu_load: %u blocks cannot be saved: %s\n", b->blocks, kvc_status_name(status));
	}

	return status == KVC_OK;
}

/* Seconds from the question to the verdict; 0: it failed. */
static double load(bench_t *b)
{
	engine_t *e = &b->engine;
	const uint64_t start = engine_now_ns();
	kvc_lease_t *lease = NULL;
	kvc_status_t status = kvc_acquire(e->space, b->keys, b->blocks, 0, WAIT_MS, &lease);
	uint32_t bad = b->blocks;
	uint64_t end;

	if (status == KVC_OK && kvc_lease_n(lease) == b->blocks && engine_load(e, lease, b->ids, b->blocks)) {
		bad = kvx_worker_errors(e->worker, b->bad, b->blocks);
	}
	end = engine_now_ns();
	if (lease) {
		kvc_release(&lease, 1);
	}
	if (bad > 0) {
		printf("gpu_load: a load failed: %s, %u blocks\n", kvc_status_name(status), bad);
		return 0;
	}

	return (double)(end - start) / 1e9;
}

/* One plain copy of as many bytes, in pieces of the engine's pinned memory. */
static double plain(bench_t *b)
{
	const size_t bytes = b->blocks * b->engine.block_bytes;
	const uint64_t start = engine_now_ns();

	for (size_t at = 0; at < bytes; at += b->bounce_bytes) {
		const size_t n = bytes - at < b->bounce_bytes ? bytes - at : b->bounce_bytes;

		memory_write(b->engine.cache + at, b->bounce, n);
	}
	memory_settle();

	return (double)(engine_now_ns() - start) / 1e9;
}

/* ---- all of it --------------------------------------------------------------------------------------------------------- */

static int by_size(const void *a, const void *b)
{
	const double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

static double median(double *values, uint32_t n)
{
	qsort(values, n, sizeof *values, by_size);

	return values[n / 2];
}

static int measure(bench_t *b, const char *json)
{
	const double gb = (double)(b->blocks * b->engine.block_bytes) / 1e9;
	double ours[MAX_ROUNDS], theirs[MAX_ROUNDS], ratios[MAX_ROUNDS];
	char name[96];
	FILE *file;

	for (uint32_t i = 0; i < b->rounds + 2; i++) { /* two warm up: memory is made known to the device */
		const uint32_t at = i < 2 ? 0 : i - 2;
		const double link = plain(b), seconds = load(b);

		if (seconds <= 0) {
			return 1;
		}
		theirs[at] = gb / link;
		ours[at] = gb / seconds;
		ratios[at] = link / seconds;
	}

	const double value = median(ours, b->rounds), reference = median(theirs, b->rounds);
	const double ratio = median(ratios, b->rounds);

	snprintf(name, sizeof name, "acquire and load of %u blocks (%.2f GiB) through kvx", b->blocks,
		 gb * 1e9 / (double)(1u << 30));
	printf("%-58s %8.2f GB/s %8.2f %6.3f  cudaMemcpyAsync of as many bytes  goal >= %.3f: %s\n", name, value,
	       reference, ratio, GOAL, ratio >= GOAL ? "met" : "MISSED");
	file = json ? fopen(json, "w") : NULL;
	if (file) {
		fprintf(file,
			"{\"name\":\"%s\",\"value\":%.4g,\"unit\":\"GB/s\",\"reference\":\"cudaMemcpyAsync of as many "
			"bytes\","
			"\"reference_value\":%.4g,\"ratio\":%.4f,\"rounds\":%u,\"goal\":\"ratio >= "
			"%g\",\"goal_met\":%s}\n",
			name, value, reference, ratio, b->rounds, GOAL, ratio >= GOAL ? "true" : "false");
		fclose(file);
	}

	return 0;
}

static int run(bench_t *b, const char *json)
{
	uint32_t wrong;
	int status = 1;

	if (!engine_open(&b->engine)) {
		return 1;
	}
	b->bounce_bytes = BOUNCE > b->engine.block_bytes ? BOUNCE : b->engine.block_bytes;
	b->bounce = memory_bounce(b->bounce_bytes);
	b->keys = calloc(b->blocks, sizeof *b->keys);
	b->ids = calloc(b->blocks, sizeof *b->ids);
	b->bad = calloc(b->blocks, sizeof *b->bad);
	if (b->bounce && b->keys && b->ids && b->bad) {
		for (uint32_t i = 0; i < b->blocks; i++) { /* in no order of the pool's */
			b->ids[i] = (uint32_t)((uint64_t)i * 7919u % b->blocks);
		}
		write_cache(b, 1000);
		status = save(b) ? 0 : 1;
	}
	if (status == 0) {
		write_cache(b, 0);
		status = load(b) > 0 ? 0 : 1;
	}
	if (status == 0) {
		wrong = wrong_blocks(b, 1000);
		printf("gpu_load: %u blocks saved and loaded, %u wrong\n", b->blocks, wrong);
		status = wrong > 0 ? 1 : measure(b, json);
	}
	engine_close(&b->engine);
	free(b->keys);
	free(b->ids);
	free(b->bad);

	return status;
}

static const char *option(int argc, char **argv, const char *name, const char *otherwise)
{
	for (int i = 1; i + 1 < argc; i++) {
		if (strcmp(argv[i], name) == 0) {
			return argv[i + 1];
		}
	}

	return otherwise;
}

int main(int argc, char **argv)
{
	const int host = strcmp(option(argc, argv, "--host", "0"), "0") != 0;
	bench_t b = {.rounds = (uint32_t)strtoul(option(argc, argv, "--rounds", "7"), NULL, 0),
		     .blocks = (uint32_t)strtoul(option(argc, argv, "--blocks", host ? "97" : "640"), NULL, 0)};
	char command[96];
	int status = memory_open(host);

	if (status != 0) {
		return status;
	}
	b.rounds = b.rounds < 1 ? 1 : b.rounds < MAX_ROUNDS ? b.rounds : MAX_ROUNDS;
	b.blocks = b.blocks < 1 || b.blocks % 7919u == 0 ? 1 : b.blocks;
	snprintf(b.dir, sizeof b.dir, "/tmp/kvd-gpu-load.XXXXXX");
	if (!mkdtemp(b.dir)) {
		perror("gpu_load: mkdtemp");
		return 1;
	}
	snprintf(b.socket, sizeof b.socket, "%s/run/default.sock", b.dir);
	b.engine = (engine_t){.program = "gpu_load",
			      .socket = b.socket,
			      .host = host,
			      .small = host,
			      .blocks = b.blocks,
			      .length = b.blocks};
	b.engine.block_bytes = host ? 32u << 10 : 2u << 20;
	status = start_daemon(&b) ? run(&b, option(argc, argv, "--json", NULL)) : 1;
	kill(b.daemon, SIGTERM);
	waitpid(b.daemon, NULL, 0);
	memory_close();
	snprintf(command, sizeof command, "rm -rf -- '%s'", b.dir);
	if (system(command) != 0) {
		printf("gpu_load: %s is left behind\n", b.dir);
	}

	return status;
}
