/* match -- longest-prefix match of 8,192 keys, 90 % of them resident, 1 M blocks in the index, from another process
 * than the daemon. Prompts are taken in turn, and all of a table larger than the caches is read between two samples: a
 * match finds its keys in the cache, where hashing has just left them, and the mirror's lines in memory; `warm` is the
 * same without that. p50 ns a match; the reference is what a binary search costs at least: log2(8,192) dependent
 * cache-line loads from a table as large as the mirror. Goal: p50 <= 2,000 ns, no system call.
 * match/groups -- the same prompts in a space of three groups, full, window and state, whose last state lies 3 blocks
 * before the last block; the reference is the match in a space of one group. Goal: ratio <= 2. */
#include "bench.h"
#include "rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROMPT      8192u
#define RESIDENT    7373u
#define SAMPLES     48u
#define MAX_PROMPTS 64u
#define LAST_STATE  (RESIDENT - 3u) /* steps of four blocks */
#define SCRUB_BYTES ((size_t)64 << 20)
#define LINES       (SCRUB_BYTES / 64)

typedef struct work {
	rig_t rig;
	uint32_t prompts, next;
	int warm;
	kvc_space_t *groups; /* three; NULL: not opened */
	uint64_t *chain;     /* the reference's table */
	kvc_key_t keys[MAX_PROMPTS][PROMPT], hot[PROMPT], branch[2 * PROMPT];
	double ns[SAMPLES];
} work_t;

/* Push the mirror, the keys and the reference's lines out of the caches. */
static void scrub(const work_t *work)
{
	uint64_t sum = 0;

	for (size_t i = 0; !work->warm && i < LINES; i++) {
		sum += work->chain[i * 8];
	}
	bench_use(sum);
}

static bench_outcome_t match_in(work_t *work, kvc_space_t *space, bench_sample_t *p_sample)
{
	const uint32_t wanted = space == work->groups ? LAST_STATE : RESIDENT;

	for (uint32_t i = 0; i < SAMPLES; i++) {
		kvc_match_t match = {.struct_size = sizeof match};
		uint64_t start;

		scrub(work);
		if (space == work->groups) {
			memcpy(work->hot, work->branch, sizeof work->hot);
		} else {
			memcpy(work->hot, work->keys[work->next++ % work->prompts], sizeof work->hot);
		}
		start = bench_now_ns();
		kvc_match(space, work->hot, PROMPT, &match);
		work->ns[i] = (double)(bench_now_ns() - start);
		if (match.n != wanted || match.n_cpu != wanted) {
			return bench_fail("match found %u of %u blocks (reason %u)", match.n, wanted, match.why);
		}
	}
	p_sample->value = bench_quantile(work->ns, SAMPLES, 0.5);
	p_sample->ops = SAMPLES;

	return BENCH_DONE;
}

static bench_outcome_t match_p50(void *arg, bench_sample_t *p_sample)
{
	work_t *work = arg;

	return match_in(work, work->rig.space, p_sample);
}

static bench_outcome_t match_groups_p50(void *arg, bench_sample_t *p_sample)
{
	work_t *work = arg;

	return match_in(work, work->groups, p_sample);
}

/* Each line holds the number of the next: nothing can be loaded ahead. */
static bench_outcome_t chase_p50(void *arg, bench_sample_t *p_sample)
{
	work_t *work = arg;
	uint64_t at = work->next;

	for (uint32_t i = 0; i < SAMPLES; i++) {
		uint64_t start;

		scrub(work);
		start = bench_now_ns();
		at = (at * 2654435761u) % LINES;
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
static void make_chain(work_t *work)
{
	uint64_t seed = 1;

	for (size_t i = 0; i < LINES; i++) {
		work->chain[i * 8] = i;
	}
	for (size_t i = LINES - 1; i > 0; i--) {
		const size_t j = (size_t)(bench_random(&seed) % i);
		const uint64_t swap = work->chain[i * 8];

		work->chain[i * 8] = work->chain[j * 8];
		work->chain[j * 8] = swap;
	}
}

/* Prompts next to each other: no branch but at the root. */
static int fill_unbranched(work_t *work, uint32_t blocks)
{
	int failed = 0;

	for (uint32_t i = 0; !failed && i < work->prompts; i++) {
		failed = rig_put(work->rig.space, work->keys[i], 0, RESIDENT, 0);
	}
	for (uint32_t done = work->prompts * RESIDENT; !failed && done < blocks; done += PROMPT) {
		rig_keys(work->rig.space, 1000000u + done, PROMPT, work->branch);
		failed = rig_put(work->rig.space, work->branch, 0, PROMPT, 0);
	}

	return failed;
}

/* A branch of its own at every block of every prompt. */
static int fill_branched(work_t *work, uint32_t blocks)
{
	const uint32_t length = work->prompts > 0 ? blocks / (work->prompts * RESIDENT) : 0;
	int failed = 0;

	for (uint32_t i = 0; !failed && i < work->prompts; i++) {
		failed = rig_put(work->rig.space, work->keys[i], 0, RESIDENT, 0);
		for (uint32_t at = 0; !failed && length > 1 && at < RESIDENT; at++) {
			rig_keys(work->rig.space, 1000000u + (uint64_t)i * PROMPT + at, at + length, work->branch);
			memcpy(work->branch, work->keys[i], at * sizeof *work->branch);
			failed = rig_put(work->rig.space, work->branch, at, at + length - 1, 0);
		}
	}

	return failed;
}

/* The child attaches with a rig of its own: the parent's stays as it is. */
static void attach_again(void *arg)
{
	work_t *work = arg;
	kvc_match_t match = {.struct_size = sizeof match};

	if (rig_attach(&work->rig, "match", 64) == 0) {
		kvc_match(work->rig.space, work->keys[0], PROMPT, &match);
	}
}

static void match_often(void *arg)
{
	const work_t *work = arg;
	kvc_match_t match = {.struct_size = sizeof match};

	for (uint32_t i = 0; i < 1000; i++) {
		kvc_match(work->rig.space, work->keys[i % work->prompts], PROMPT, &match);
	}
}

static bench_outcome_t count_syscalls(void *arg, bench_sample_t *p_sample)
{
	const long count = rig_count_syscalls(attach_again, match_often, arg);

	p_sample->value = (double)count;
	p_sample->ops = 1000;

	return count < 0 ? bench_skip("the kernel does not permit tracing here") : BENCH_DONE;
}

static int put_group(kvc_space_t *space, uint32_t group, const kvc_key_t *keys, uint32_t n)
{
	static const uint8_t bytes[64];
	const void *blocks[256];
	const kvc_put_options_t options = {.struct_size = sizeof options, .blocks = blocks, .group = group};
	uint32_t visible = 0;

	for (uint32_t i = 0; i < n; i++) {
		blocks[i] = bytes;
	}

	return kvc_put(space, keys, 0, n, &options, &visible) == KVC_OK && visible == n;
}

/* One prompt: all of its full group, a window, the state. */
static int fill_groups(work_t *work)
{
	const kvc_identity_t identity = {.struct_size = sizeof identity,
					 .model = "groups",
					 .weights = "bench",
					 .dtype = "byte",
					 .rope = "none",
					 .hash_tokens = 16,
					 .layout = kvc_space_layout(work->rig.space),
					 .groups = "0:full:16,1:window:16:1024,2:state:16",
					 .page_format = "bench"};

	if (kvc_space_open(work->rig.kvc, &identity, &work->groups) != KVC_OK) {
		return -1;
	}
	rig_keys(work->groups, 1, PROMPT, work->branch);

	return rig_put(work->groups, work->branch, 0, RESIDENT, 0) == 0 &&
			       put_group(work->groups, 1, work->branch + RESIDENT - 128, 128) &&
			       put_group(work->groups, 2, work->branch + LAST_STATE - 1, 1)
		       ? 0
		       : -1;
}

static bench_outcome_t measure(const char *name, work_t *work, int (*fill)(work_t *, uint32_t))
{
	const uint32_t blocks = bench_quick() ? 100000u : 1000000u;
	char row[64];
	bench_measurement_t m = {
		row, "ns", "13 dependent cache-line loads", match_p50, chase_p50, 11, BENCH_VALUE_AT_MOST, 2000};
	bench_outcome_t outcome = BENCH_DONE;

	if (rig_start(
		    &work->rig,
		    " --limits.silence=10s --cpu.max_blocks=%u --index.max_blocks=%u --cpu.size=8GiB --cpu.prefault=off"
		    " --nvme.path= --events.enabled=off --instance.max_unfinished=8GiB",
		    blocks + 65536u, blocks + 131072u) != 0 ||
	    rig_attach(&work->rig, "match", 64) != 0) {
		return bench_fail("the daemon could not be started");
	}
	for (uint32_t i = 0; i < work->prompts; i++) {
		rig_keys(work->rig.space, i + 1, PROMPT, work->keys[i]);
	}
	if (fill(work, blocks) != 0) {
		return bench_fail("the index could not be filled");
	}
	for (work->warm = 0; work->warm < 2 && outcome == BENCH_DONE; work->warm++) {
		snprintf(row, sizeof row, "%s%s", name, work->warm ? "/warm" : "");
		outcome = bench_measure(work, &m);
	}
	if (outcome == BENCH_DONE && fill == fill_unbranched) {
		if (fill_groups(work) != 0) {
			return bench_fail("the space of three groups could not be filled: %s", kvc_last_error());
		}
		work->prompts = 1; /* both the same one */
		for (work->warm = 0; work->warm < 2 && outcome == BENCH_DONE; work->warm++) {
			snprintf(row, sizeof row, "match/groups%s", work->warm ? "/warm" : "");
			outcome = bench_measure(work, &(bench_measurement_t){row, "ns", "one group", match_groups_p50,
									     match_p50, 11, BENCH_RATIO_AT_MOST, 2});
		}
	}
	snprintf(row, sizeof row, "%s/syscalls", name);
	if (outcome == BENCH_DONE) {
		outcome = bench_measure(work, &(bench_measurement_t){row, "count", NULL, count_syscalls, NULL, 1,
								     BENCH_VALUE_AT_MOST, 0});
	}

	return outcome;
}

bench_outcome_t run_match(int branched)
{
	work_t *work = calloc(1, sizeof *work);
	bench_outcome_t outcome;

	if (!work || !(work->chain = bench_memory(SCRUB_BYTES))) {
		free(work);
		return bench_fail("no memory");
	}
	make_chain(work);
	work->prompts = bench_quick() ? 4 : branched ? 8 : MAX_PROMPTS;
	outcome = branched ? measure("match/branched", work, fill_branched)
			   : measure("match/unbranched", work, fill_unbranched);
	rig_remove(&work->rig);
	free(work->chain);
	free(work);

	return outcome;
}
