/* gpu_load: acquire and load of a long prefix through kvx_worker_t, from kvd's CPU pool or its disk tier into GPU
 * memory. Lines of a table and of JSON, as gpu_copy's, each with its reference, taken in turn in the same run.
 *
 * Starts a kvd (beside this program) and saves prompts of 640 blocks of 2 MiB (10,240 tokens of an 8B shape). Bytes are
 * compared before times are taken.
 *   memory  lease + load + verdict of all digests, against one plain copy of as many pinned bytes, on the host's
 *           clock; eight asynchronous ones at a time; and how long a load that comes layer by layer takes until its
 * first layer may be read, against that layer's bytes at the rate of the plain copy disk    lease + load + verdict of a
 * prompt that lies in the disk tier alone, against reading as many bytes with io_uring and O_DIRECT from a file beside
 * it
 *
 *     kvd-gpu-load [--only memory|disk] [--rounds N] [--blocks N] [--json FILE] [--host 1] [--small 0] [--dir DIR]
 *     [--seconds N] [--sms N]
 *     --host 1: a cache in host memory, and blocks of 32 KiB unless --small 0
 *     exit 0: measured; 1: wrong bytes, or it could not; 77: no device, or no disk to measure in DIR (TMPDIR, or
 *     /tmp), which is said
 */
#include "gpu_load.h"

#include <stdlib.h>
#include <string.h>

#define GOAL       0.9
#define GOAL_FIRST 1.5
#define TRIES      4u /* to have the first load come layer by layer */
#define TOGETHER   8u /* asynchronous loads at a time */
#define WARM_UP    2u /* rounds that do not count: memory is made known to the device */

static uint32_t check_layers(load_bench_t *b)
{
	uint32_t wrong, early = 0;
	int layered = 0;

	for (uint32_t i = 0; i < TRIES && !layered; i++) {
		load_spoil(b);
		if (load_first(b, 0, &layered, &early) <= 0) {
			return 1;
		}
	}
	wrong = early + load_wrong(b, 0);
	printf("gpu_load: %u blocks loaded %s, %u wrong\n", b->blocks,
	       layered ? "layer by layer" : "whole where layers were asked for", wrong);

	return wrong;
}

/* Saved, loaded whole and layer by layer, and looked at: wrong blocks, or 1 after a sentence. */
static uint32_t check(load_bench_t *b, int layers)
{
	uint32_t wrong;

	load_write(b, 0);
	if (!load_save(b, 0, 0)) {
		return 1;
	}
	load_spoil(b);
	if (load_whole(b, 0, NULL) <= 0) {
		return 1;
	}
	wrong = load_wrong(b, 0);
	printf("gpu_load: %u blocks saved and loaded, %u wrong\n", b->blocks, wrong);

	return layers ? wrong + check_layers(b) : wrong;
}

static int memory_rows(load_bench_t *b)
{
	const double gb = (double)(b->blocks * b->engine.block_bytes) / 1e9;
	const uint32_t layers = b->engine.layout.layers;
	const int by_layers = memory_cuda() != NULL;
	char name[96], name_beside[96], name_first[96];
	load_row_t all = {name, "GB/s", "cudaMemcpyAsync of as many bytes", 1, GOAL, {0}, {0}, {0}, 0};
	load_row_t beside = {name_beside, "GB/s", "cudaMemcpyAsync of as many bytes", 1, GOAL, {0}, {0}, {0}, 0};
	load_row_t first = {name_first, "ms", "its bytes at the rate of that copy", 0, GOAL_FIRST, {0}, {0}, {0}, 0};
	load_parts_t parts = {0};
	uint32_t whole = 0;

	if (check(b, by_layers) > 0) {
		return 1;
	}
	for (uint32_t i = 0; i < b->rounds + WARM_UP && !load_late(b); i++) {
		const double link = load_plain(b), seconds = load_whole(b, 0, &parts);
		const double eight = load_beside(b, 0, TOGETHER) / TOGETHER;
		int layered = 1;
		const double until = by_layers ? load_first(b, 0, &layered, NULL) : 1;

		if (seconds <= 0 || eight <= 0 || until <= 0) {
			return 1;
		}
		if (i >= WARM_UP) {
			load_row_add(&all, gb / seconds, gb / link, link / seconds);
			load_row_add(&beside, gb / eight, gb / link, link / eight);
			load_row_add(&first, until * 1e3, link / layers * 1e3, until * layers / link);
			whole += !layered;
		}
	}
	if (all.rounds == 0) {
		printf("gpu_load: no time is left to measure (--seconds)\n");
		return 1;
	}
	snprintf(name, sizeof name, "acquire and load of %u blocks (%.2f GiB) through kvx", b->blocks,
		 gb * 1e9 / (double)(1u << 30));
	snprintf(name_beside, sizeof name_beside, "%u of these loads at a time, asynchronous", TOGETHER);
	snprintf(name_first, sizeof name_first, "first of %u layers (%.1f MiB) of that load is ready", layers,
		 gb * 1e9 / layers / (double)(1u << 20));
	load_row_print(b, &all);
	load_row_print(b, &beside);
	printf("    of the last single one: lease %.3f ms, until all was enqueued %.3f, until its verdict %.3f\n",
	       parts.lease * 1e3, parts.sent * 1e3, parts.verdict * 1e3);
	if (!by_layers) {
		printf("gpu_load: the first layer: skipped: loads come layer by layer in GPU memory only\n");
		return 0;
	}
	load_row_print(b, &first);
	if (whole > 0) {
		printf("gpu_load: in %u of %u rounds the load came whole, not layer by layer\n", whole, all.rounds);
	}

	return 0;
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

/* Blocks of 32 KiB, not of 2 MiB: where the CPU moves them. */
#ifdef ENGINE_FAKE
#define IS_SMALL(host) 1
#define LAYER_WAIT_US  1000000u /* the machine may be busy */
#else
#define IS_SMALL(host) (host)
#define LAYER_WAIT_US  0u
#endif

static int run(load_bench_t *b)
{
	const char *why = b->base ? load_disk_why(b->base, b->blocks * b->engine.block_bytes) : NULL;
	int status;

	if (why) {
		printf("gpu_load: the disk tier: skipped: %s: %s\n", b->base, why);
		return 77;
	}
	status = !load_open(b) ? 1 : b->base ? load_disk_row(b) : memory_rows(b);
	load_close(b);

	return status;
}

int main(int argc, char **argv)
{
	const char *only = option(argc, argv, "--only", "memory"), *json = option(argc, argv, "--json", NULL);
	const char *temporary = getenv("TMPDIR");
	const int host = strcmp(option(argc, argv, "--host", "0"), "0") != 0;
	const int small = strcmp(option(argc, argv, "--small", IS_SMALL(host) ? "1" : "0"), "0") != 0;
	const int disk = strcmp(only, "disk") == 0;
	load_bench_t b = {.rounds = (uint32_t)strtoul(option(argc, argv, "--rounds", "7"), NULL, 0),
			  .blocks = (uint32_t)strtoul(option(argc, argv, "--blocks", small ? "97" : "640"), NULL, 0)};
	int status;

	if (!disk && strcmp(only, "memory") != 0) {
		printf("gpu_load: --only memory or --only disk\n");
		return 64;
	}
	status = memory_open(host);
	if (status != 0) {
		return status;
	}
	load_catch();
	b.rounds = b.rounds < 1 ? 1 : b.rounds < LOAD_ROUNDS_MAX ? b.rounds : LOAD_ROUNDS_MAX;
	b.blocks = b.blocks < 1 || b.blocks % 7919u == 0 ? 1 : b.blocks;
	b.until_ns = engine_now_ns() + strtoull(option(argc, argv, "--seconds", "300"), NULL, 0) * 1000000000u;
	b.base = disk ? option(argc, argv, "--dir", temporary && temporary[0] ? temporary : "/tmp") : NULL;
	b.engine = (engine_t){.program = "gpu_load",
			      .host = host,
			      .small = small,
			      .blocks = b.blocks,
			      .length = b.blocks,
			      .load_ms = disk ? 20000 : 0,
			      .sms = (uint32_t)strtoul(option(argc, argv, "--sms", "0"), NULL, 0),
			      .layer_bytes = 1,
			      .layer_wait_us = LAYER_WAIT_US,
			      .block_bytes = small ? 32u << 10 : 2u << 20};
	b.json = json ? fopen(json, "w") : NULL;
	if (json && !b.json) {
		perror("gpu_load: --json");
		status = 1;
	}
	status = status == 0 ? run(&b) : status;
	if (b.json) {
		fclose(b.json);
	}
	memory_close();

	return status;
}
