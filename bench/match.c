/* match -- longest-prefix match of 8,192 keys, 90 % of them resident, 1 M blocks in the index, from another process
 * than the daemon. Prompts are taken in turn, and all of a table larger than the caches is read between two samples: a
 * match finds its keys in the cache, where hashing has just left them, and the mirror's lines in memory; `warm` is the
 * same without that. p50 ns a match; the reference is what a binary search costs at least: log2(8,192) dependent
 * cache-line loads from a table as large as the mirror. Goal: p50 <= 2,000 ns, no system call. */
#include "bench.h"
#include "rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROMPT      8192u
#define RESIDENT    7373u
#define SAMPLES     48u
#define SCRUB_BYTES ((size_t)64 << 20)

typedef struct work {
	rig_t rig;
	kvc_t *kvc;
	kvc_space_t *space;
	kvc_key_t *keys; /* [prompts][PROMPT] */
	uint32_t prompts;
	uint32_t next;
	uint64_t *chain; /* the reference's table */
	size_t chain_lines;
	int warm;
	kvc_key_t hot[PROMPT];
	double ns[SAMPLES];
} work_t;

/* Push the mirror, the keys and the reference's lines out of the caches. */
static void scrub(const work_t *work)
{
	uint64_t sum = 0;

	for (size_t i = 0; !work->warm && i < work->chain_lines; i++) {
		sum += work->chain[i * 8];
	}
	bench_use(sum);
}

static const kvc_key_t *prompt(const work_t *work, uint32_t i)
{
	return work->keys + (size_t)(i % work->prompts) * PROMPT;
}

static bench_outcome_t match_p50(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	work_t *work = arg;

	for (uint32_t i = 0; i < SAMPLES; i++) {
		kvc_match_t match = {.struct_size = sizeof match};
		uint64_t start;

		scrub(work);
		memcpy(work->hot, prompt(work, work->next++), sizeof work->hot);
		start = bench_now_ns();
		kvc_match(work->space, work->hot, PROMPT, &match);
		work->ns[i] = (double)(bench_now_ns() - start);
		if (match.n != RESIDENT || match.n_cpu != RESIDENT) {
			return bench_fail(run, "match found %u of %u blocks (reason %u)", match.n, RESIDENT, match.why);
		}
	}
	p_sample->value = bench_quantile(work->ns, SAMPLES, 0.5);
	p_sample->ops = SAMPLES;

	return BENCH_DONE;
}

/* Each line holds the number of the next: nothing can be loaded ahead. */
static bench_outcome_t chase_p50(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	work_t *work = arg;
	uint64_t at = work->next;

	(void)run;
	for (uint32_t i = 0; i < SAMPLES; i++) {
		uint64_t start;

		scrub(work);
		start = bench_now_ns();
		at = (at * 2654435761u) % work->chain_lines;
		for (uint32_t probes = 1; probes < PROMPT; probes *= 2) {
			at = work->chain[at * 8];
		}
		bench_use(at);
		work->ns[i] = (double)(bench_now_ns() - start);
	}
	p_sample->value = bench_quantile(work->ns, SAMPLES, 0.5);
	p_sample->ops = SAMPLES;

	return BENCH_DONE;
}

/* One random cycle through all lines (Sattolo's shuffle). */
static int make_chain(work_t *work, size_t bytes)
{
	uint64_t seed = 1;

	work->chain_lines = bytes / 64;
	work->chain = bench_memory(bytes);
	if (!work->chain) {
		return -1;
	}
	for (size_t i = 0; i < work->chain_lines; i++) {
		work->chain[i * 8] = i;
	}
	for (size_t i = work->chain_lines - 1; i > 0; i--) {
		seed = seed * 6364136223846793005u + 1442695040888963407u;
		size_t j = (size_t)(seed >> 33) % i;
		uint64_t swap = work->chain[i * 8];

		work->chain[i * 8] = work->chain[j * 8];
		work->chain[j * 8] = swap;
	}

	return 0;
}

static int open_rig(work_t *work, uint32_t blocks)
{
	static char max_blocks[64];
	static char index[64];

	snprintf(max_blocks, sizeof max_blocks, "--cpu.max_blocks=%u", blocks + 65536u);
	snprintf(index, sizeof index, "--index.max_blocks=%u", blocks + 131072u);
	work->rig = (rig_t){.cpu = -1,
			    .options = {max_blocks, index, "--cpu.size=8GiB", "--cpu.prefault=off",
					"--nvme.path=", "--events.enabled=off", "--instance.max_unfinished=8GiB"}};
	if (rig_start(&work->rig, 20000) != 0 || rig_attach(&work->rig, "match", 64, &work->kvc, &work->space) != 0) {
		return -1;
	}

	return 0;
}

static void close_rig(work_t *work)
{
	kvc_detach(work->kvc);
	rig_remove(&work->rig);
	bench_memory_free(work->chain, work->chain_lines * 64);
	free(work->keys);
	free(work);
}

/* Prompts next to each other: no branch but at the root. */
static int fill_unbranched(work_t *work, uint32_t blocks)
{
	for (uint32_t i = 0; i < work->prompts; i++) {
		rig_keys(work->space, 0, 0, i + 1, PROMPT, work->keys + (size_t)i * PROMPT);
		if (rig_put_index(work->space, prompt(work, i), 0, RESIDENT) != 0) {
			return -1;
		}
	}
	for (uint32_t done = work->prompts * RESIDENT; done < blocks; done += PROMPT) {
		kvc_key_t *filler = malloc(PROMPT * sizeof *filler);
		int failed = filler == NULL;

		if (filler) {
			rig_keys(work->space, 0, 0, 1000000u + done, PROMPT, filler);
			failed = rig_put_index(work->space, filler, 0, PROMPT);
		}
		free(filler);
		if (failed) {
			return -1;
		}
	}

	return 0;
}

/* A branch of its own at every block of every prompt. */
static int fill_branched(work_t *work, uint32_t blocks)
{
	uint32_t length = blocks / (work->prompts * RESIDENT);
	kvc_key_t *branch = malloc((PROMPT + (size_t)length) * sizeof *branch);
	int failed = branch == NULL;

	for (uint32_t i = 0; !failed && i < work->prompts; i++) {
		rig_keys(work->space, 0, 0, i + 1, PROMPT, work->keys + (size_t)i * PROMPT);
		failed = rig_put_index(work->space, prompt(work, i), 0, RESIDENT);
		memcpy(branch, prompt(work, i), PROMPT * sizeof *branch);
		for (uint32_t at = 0; !failed && length > 1 && at < RESIDENT; at++) {
			/* Replace what follows block `at` by a branch; put the original back afterwards. */
			rig_keys(work->space, 0, 0, 1000000u + (uint64_t)i * PROMPT + at, at + length, branch);
			memcpy(branch, prompt(work, i), at * sizeof *branch);
			failed = rig_put_index(work->space, branch, at, at + length - 1);
		}
	}
	free(branch);

	return failed ? -1 : 0;
}

typedef struct syscall_work {
	const work_t *work;
	rig_t rig;
	kvc_t *kvc;
	kvc_space_t *space;
} syscall_work_t;

static void attach_again(void *arg)
{
	syscall_work_t *s = arg;
	kvc_match_t match = {.struct_size = sizeof match};

	if (rig_attach(&s->rig, "match", 64, &s->kvc, &s->space) != 0) {
		return;
	}
	kvc_match(s->space, s->work->keys, PROMPT, &match);
}

static void match_often(void *arg)
{
	const syscall_work_t *s = arg;
	kvc_match_t match = {.struct_size = sizeof match};

	for (uint32_t i = 0; i < 1000; i++) {
		kvc_match(s->space, prompt(s->work, i), PROMPT, &match);
	}
}

static bench_outcome_t count_syscalls(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	const work_t *work = arg;
	syscall_work_t s = {.work = work, .rig = work->rig};
	long count = rig_count_syscalls(attach_again, match_often, &s);

	p_sample->value = (double)count;
	p_sample->ops = 1000;

	return count < 0 ? bench_skip(run, "the kernel does not permit tracing here") : BENCH_DONE;
}

static bench_outcome_t measure_time(bench_run_t *run, const char *name, work_t *work, int warm)
{
	work->warm = warm;

	return bench_measure(run, &(bench_measurement_t){.name = name,
							 .unit = "ns",
							 .reference = "13 dependent cache-line loads",
							 .value_fn = match_p50,
							 .reference_fn = chase_p50,
							 .arg = work,
							 .rounds = 11,
							 .goal = BENCH_VALUE_AT_MOST,
							 .goal_value = 2000});
}

static bench_outcome_t measure(bench_run_t *run, const char *name, work_t *work)
{
	char more[64];
	bench_outcome_t outcome = measure_time(run, name, work, 0);

	snprintf(more, sizeof more, "%s/warm", name);
	if (outcome == BENCH_DONE) {
		outcome = measure_time(run, more, work, 1);
	}
	if (outcome != BENCH_DONE) {
		return outcome;
	}
	snprintf(more, sizeof more, "%s/syscalls", name);

	return bench_measure(run, &(bench_measurement_t){.name = more,
							 .unit = "count",
							 .value_fn = count_syscalls,
							 .arg = work,
							 .rounds = 1,
							 .goal = BENCH_VALUE_AT_MOST,
							 .goal_value = 0});
}

static bench_outcome_t run_match(bench_run_t *run, const char *name, uint32_t prompts, int (*fill)(work_t *, uint32_t))
{
	uint32_t blocks = bench_quick(run) ? 100000u : 1000000u;
	work_t *work = calloc(1, sizeof *work);
	bench_outcome_t outcome;

	if (!work) {
		return bench_fail(run, "no memory");
	}
	work->prompts = bench_quick(run) ? 4 : prompts;
	work->keys = calloc((size_t)work->prompts * PROMPT, sizeof *work->keys);
	if (!work->keys || make_chain(work, SCRUB_BYTES) != 0) {
		outcome = bench_fail(run, "no memory");
	} else if (open_rig(work, blocks) != 0 || fill(work, blocks) != 0) {
		outcome = bench_fail(run, "the index could not be filled");
	} else {
		outcome = measure(run, name, work);
	}
	close_rig(work);

	return outcome;
}

static bench_outcome_t run_unbranched(bench_run_t *run)
{
	return run_match(run, "match/unbranched", 64, fill_unbranched);
}

static bench_outcome_t run_branched(bench_run_t *run)
{
	return run_match(run, "match/branched", 8, fill_branched);
}

const bench_t bench_match_unbranched = {
	.name = "match/unbranched",
	.measures = "longest match of 8,192 keys, 90 % resident, 1 M blocks in the index, prompts side by side",
	.reference = "13 dependent cache-line loads from a table as large as the mirror",
	.goal = "p50 <= 2,000 ns, no system call",
	.run = run_unbranched,
};

const bench_t bench_match_branched = {
	.name = "match/branched",
	.measures = "the same with a branch at every block of every prompt",
	.reference = "13 dependent cache-line loads from a table as large as the mirror",
	.goal = "p50 <= 2,000 ns, no system call",
	.run = run_branched,
};
