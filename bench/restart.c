/* restart -- from starting kvd on a disk tier of 1 M blocks, stopped cleanly or killed, to serving with all of them in
 * the index. ns. Goal: <= 1.5e9 after a clean stop. --with dir=PATH chooses where the 10 GB of slot files go (default:
 * a temporary directory). */
#include "bench.h"
#include "rig.h"

#include <stdio.h>
#include <stdlib.h>

#define PROMPT 8192u

typedef struct work {
	rig_t rig;
	uint32_t blocks;
	int hard;
	char path[160], size[64], index[64];
} work_t;

static bench_outcome_t restart(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	work_t *work = arg;
	uint64_t start;
	uint64_t found;

	rig_stop(&work->rig, work->hard);
	start = bench_now_ns();
	if (rig_start(&work->rig, 60000) != 0) {
		return bench_fail(run, "the daemon did not come back");
	}
	p_sample->value = (double)(bench_now_ns() - start);
	found = rig_metric(&work->rig, "kvd_disk_recovered_total");
	if (found != work->blocks) {
		return bench_fail(run, "%llu of %u blocks are in the index", (unsigned long long)found, work->blocks);
	}

	return BENCH_DONE;
}

/* Prompts of 8,192 blocks, each durable before the next. */
static int fill(work_t *work)
{
	kvc_key_t *keys = malloc(PROMPT * sizeof *keys);
	kvc_space_t *space;
	kvc_t *kvc;
	int failed = keys == NULL || rig_attach(&work->rig, "restart", 64, &kvc, &space) != 0;

	if (failed) {
		free(keys);
		return -1;
	}
	for (uint32_t done = 0; !failed && done < work->blocks; done += PROMPT) {
		rig_keys(space, 0, 0, done + 1, PROMPT, keys);
		failed = rig_put_durable(space, keys, 0, PROMPT);
	}
	kvc_detach(kvc);
	free(keys);

	return failed ? -1 : 0;
}

static bench_outcome_t measure(bench_run_t *run, work_t *work)
{
	bench_outcome_t outcome = bench_measure(run, &(bench_measurement_t){.name = "restart",
									    .unit = "ns",
									    .value_fn = restart,
									    .arg = work,
									    .rounds = 3,
									    .goal = BENCH_VALUE_AT_MOST,
									    .goal_value = 1.5e9});

	if (outcome != BENCH_DONE) {
		return outcome;
	}
	work->hard = 1;

	return bench_measure(
		run, &(bench_measurement_t){
			     .name = "restart/killed", .unit = "ns", .value_fn = restart, .arg = work, .rounds = 3});
}

static bench_outcome_t run_restart(bench_run_t *run)
{
	work_t *work = calloc(1, sizeof *work);
	bench_outcome_t outcome;

	if (!work) {
		return bench_fail(run, "no memory");
	}
	work->blocks = bench_quick(run) ? 8u * PROMPT : 122u * PROMPT; /* 999,424 */
	work->rig = (rig_t){.cpu = -1};
	snprintf(work->rig.dir, sizeof work->rig.dir, "%s/kvd-bench-XXXXXX", bench_param(run, "dir", "/var/tmp"));
	if (!mkdtemp(work->rig.dir)) {
		free(work);
		return bench_skip(run, "no temporary directory");
	}
	snprintf(work->path, sizeof work->path, "--nvme.path=%s/data", work->rig.dir);
	snprintf(work->size, sizeof work->size, "--nvme.size=%llu",
		 (unsigned long long)work->blocks * (8192u + 512u) + (1ull << 30));
	snprintf(work->index, sizeof work->index, "--index.max_blocks=%u", work->blocks + 131072u);
	work->rig.options[0] = work->path;
	work->rig.options[1] = work->size;
	work->rig.options[2] = work->index;
	work->rig.options[3] = "--cpu.max_blocks=32768";
	work->rig.options[4] = "--cpu.size=256MiB";
	work->rig.options[5] = "--events.enabled=off";
	if (rig_start(&work->rig, 20000) != 0 || fill(work) != 0) {
		outcome = bench_fail(run, "the disk tier could not be filled");
	} else {
		outcome = measure(run, work);
	}
	rig_remove(&work->rig);
	free(work);

	return outcome;
}

const bench_t bench_restart = {
	.name = "restart",
	.measures = "from start to serving with 1 M disk blocks in the index, after a clean stop (and after kill -9)",
	.reference = "",
	.goal = "<= 1.5e9 ns",
	.run = run_restart,
};
