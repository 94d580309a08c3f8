/* restart -- from starting kvd on a disk tier of 1 M blocks, stopped cleanly or killed, to serving with all of them in
 * the index. ns. Goal: <= 1.5e9 after a clean stop. --with dir=PATH chooses where the 10 GB of slot files go (default:
 * a temporary directory). */
#include "bench.h"
#include "rig.h"

#include <stdio.h>
#include <stdlib.h>

#define PROMPT 8192u

static struct {
	rig_t rig;
	uint32_t blocks;
	int hard;
	kvc_key_t keys[PROMPT];
} work;

static bench_outcome_t restart(void *arg, bench_sample_t *p_sample)
{
	uint64_t start, found;

	(void)arg;
	rig_stop(&work.rig, work.hard);
	start = bench_now_ns();
	if (rig_run(&work.rig) != 0) {
		return bench_fail("the daemon did not come back");
	}
	p_sample->value = (double)(bench_now_ns() - start);
	found = rig_metric(&work.rig, "kvd_disk_recovered_total");

	return found == work.blocks
		       ? BENCH_DONE
		       : bench_fail("%llu of %u blocks are in the index", (unsigned long long)found, work.blocks);
}

/* Prompts of 8,192 blocks, each durable before the next. */
static int fill(void)
{
	int failed = rig_attach(&work.rig, "restart", 64);

	for (uint32_t done = 0; !failed && done < work.blocks; done += PROMPT) {
		rig_keys(work.rig.space, done + 1, PROMPT, work.keys);
		failed = rig_put(work.rig.space, work.keys, 0, PROMPT, 1);
	}
	kvc_detach(work.rig.kvc);
	work.rig.kvc = NULL;

	return failed;
}

static const bench_measurement_t rows[] = {
	{"restart", "ns", NULL, restart, NULL, 3, BENCH_VALUE_AT_MOST, 1.5e9},
	{"restart/killed", "ns", NULL, restart, NULL, 3, BENCH_NO_GOAL, 0},
};

static bench_outcome_t measure(void)
{
	bench_outcome_t outcome = BENCH_DONE;

	if (rig_start(&work.rig,
		      " --limits.silence=10s --nvme.path='%s/data' --nvme.size=%llu --index.max_blocks=%u"
		      " --cpu.max_blocks=32768 --cpu.size=256MiB --events.enabled=off",
		      work.rig.dir, (unsigned long long)work.blocks * (8192u + 512u) + (1ull << 30),
		      work.blocks + 131072u) != 0 ||
	    fill() != 0) {
		return bench_fail("the disk tier could not be filled");
	}
	for (work.hard = 0; work.hard < 2 && outcome == BENCH_DONE; work.hard++) {
		outcome = bench_measure(NULL, &rows[work.hard]);
	}

	return outcome;
}

bench_outcome_t run_restart(int variant)
{
	bench_outcome_t outcome;

	(void)variant;
	work.blocks = bench_quick() ? 8u * PROMPT : 122u * PROMPT; /* 999,424 */
	snprintf(work.rig.dir, sizeof work.rig.dir, "%s/kvd-bench-XXXXXX", bench_param("dir", "/var/tmp"));
	if (!mkdtemp(work.rig.dir)) {
		work.rig.dir[0] = '\0';
		return bench_skip("no temporary directory");
	}
	outcome = measure();
	rig_remove(&work.rig);

	return outcome;
}
