/* A prompt that lies in the disk tier alone.
 *
 * Three prompts are on disk, and the pool has room for one and a quarter: loaded in turn, each has left memory when it
 * is its turn again, which is asked of the daemon before each load. Memory stays the same, so it is known to the device
 * and touched, as in an engine that has run for a while. */
#include "gpu_load.h"

#include "kv/types.h"

#include <stdlib.h>
#include <sys/statvfs.h>

#define GOAL  0.9
#define DEPTH 64u /* requests of the raw reader in flight: as many as the tier has */
#define MIB   1048576.0

const char *load_disk_why(const char *base, uint64_t bytes)
{
	const uint64_t wanted = bytes * (LOAD_PROMPTS + 1) * 5 / 4 + (UINT64_C(512) << 20);
	struct statvfs fs;

	if (statvfs(base, &fs) != 0) {
		return "there is no such directory";
	}
	if (fs.f_bavail * fs.f_frsize < wanted) {
		return "the file system has no room for three prompts and a file";
	}

	return load_raw_why(base);
}

static int save_prompts(load_bench_t *b)
{
	for (uint32_t p = 0; p < LOAD_PROMPTS; p++) {
		load_write(b, p);
		if (!load_save(b, p, 1)) {
			return 0;
		}
	}

	return 1;
}

/* Every block is on disk, and none in memory. */
static int on_disk_only(const load_bench_t *b, uint32_t prompt)
{
	uint8_t *tiers = calloc(b->blocks, 1);
	uint32_t why, good = 0;

	if (tiers && kvc_explain(b->engine.space, b->keys[prompt], b->blocks, tiers, &why) == KVC_OK) {
		for (uint32_t i = 0; i < b->blocks; i++) {
			good += tiers[i] == KV_TIER_DISK;
		}
	}
	free(tiers);
	if (good < b->blocks) {
		printf("gpu_load: %u of %u blocks are not in the disk tier alone\n", b->blocks - good, b->blocks);
	}

	return good == b->blocks;
}

/* Each prompt once, and its bytes compared. */
static int check(load_bench_t *b)
{
	for (uint32_t p = 0; p < LOAD_PROMPTS; p++) {
		uint32_t wrong;

		load_spoil(b);
		if (!on_disk_only(b, p) || load_whole(b, p, NULL) <= 0) {
			return 0;
		}
		wrong = load_wrong(b, p);
		printf("gpu_load: prompt %u: %u blocks loaded from the disk tier, %u wrong\n", p, b->blocks, wrong);
		if (wrong > 0) {
			return 0;
		}
	}

	return 1;
}

static int measure(load_bench_t *b, load_raw_t *raw)
{
	const double gb = (double)(b->blocks * b->engine.block_bytes) / 1e9;
	char name[96], reference[96];
	load_row_t row = {name, "GB/s", reference, 1, GOAL, {0}, {0}, {0}, 0};

	if (load_raw_read(raw) <= 0) { /* the first time does not count */
		return 1;
	}
	for (uint32_t i = 0; i < b->rounds && !load_late(b); i++) {
		const uint32_t prompt = i % LOAD_PROMPTS;
		const double theirs = load_raw_read(raw);
		const double ours = theirs > 0 && on_disk_only(b, prompt) ? load_whole(b, prompt, NULL) : 0;

		if (ours <= 0) {
			return 1;
		}
		load_row_add(&row, gb / ours, gb / theirs, theirs / ours);
	}
	if (row.rounds == 0) {
		printf("gpu_load: the disk tier: no time is left to measure (--seconds)\n");
		return 1;
	}
	snprintf(name, sizeof name, "acquire and load of %u blocks (%.2f GiB) from the disk tier", b->blocks,
		 gb * 1e9 / (double)(1u << 30));
	snprintf(reference, sizeof reference, "io_uring, O_DIRECT, as many bytes, %u reads of %.3g MiB in flight",
		 DEPTH, (double)b->engine.block_bytes / MIB);
	load_row_print(b, &row);
	if (row.rounds < b->rounds) {
		printf("gpu_load: there was time for %u of %u rounds\n", row.rounds, b->rounds);
	}

	return 0;
}

int load_disk_row(load_bench_t *b)
{
	const size_t block = b->engine.block_bytes;
	load_raw_t *raw = save_prompts(b) ? load_raw_open(b, b->blocks * block, block, DEPTH) : NULL;
	int status = 1;

	if (raw && check(b)) {
		status = measure(b, raw);
	}
	load_raw_close(raw);

	return status;
}
