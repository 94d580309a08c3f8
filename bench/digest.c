/* digest/copy -- the fused copy-and-digest over cold memory on one core: blocks of 2 MiB, leaf by leaf, a call a
 * block ("copy"), and a call a leaf ("single"), each against copies of as many bytes a call: (a) kv_copy_stream(),
 * non-temporal, goal ratio >= 0.85, and (b) libc's memcpy, goal ratio >= 1 ("never below").
 *
 * digest/gather -- blocks of a 32-layer model between a paged cache and canonical blocks; [K|V][token][head][dim] is
 * the order that needs pieces of 256 bytes; against a non-temporal copy of as many bytes; for information, no goal.
 *
 * GB/s (1e9). Parameter memory=SIZE: bytes on each side (default 1GiB, --quick 256MiB).
 */
#include "bench.h"

#include "kv/digest.h"
#include "kvk/move.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A sample moves this much and goes on where the last one stopped, so that nothing it touches is in a cache. */
#define SAMPLE_BYTES ((size_t)64 << 20)
#define BLOCK_BYTES  ((size_t)2 << 20) /* leaves of a block are moved in one call */

typedef struct copy_work {
	uint8_t *dst;
	const uint8_t *src;
	size_t bytes;
	size_t leaf;
	size_t call; /* bytes of one call of a reference */
	size_t at;
	uint64_t digests[BLOCK_BYTES / 4096];
} copy_work_t;

/* The next area, with nothing dirty left in the caches that this sample would have to pay for: memcpy leaves its
 * last megabytes to be written back during the next measurement. */
static size_t next_area(copy_work_t *w)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < SAMPLE_BYTES; i += 64) {
		sum += w->src[w->at + i];
	}
	bench_use(sum);
	w->at = w->at + 2 * SAMPLE_BYTES <= w->bytes ? w->at + SAMPLE_BYTES : 0;

	return w->at;
}

/* What is timed; the settling before it is not. */
typedef struct stopwatch {
	uint64_t wall;
	uint64_t cpu;
} stopwatch_t;

static stopwatch_t begin(void)
{
	return (stopwatch_t){.cpu = bench_thread_cpu_ns(), .wall = bench_now_ns()};
}

static void finish(bench_sample_t *sample, stopwatch_t start, size_t bytes, size_t ops)
{
	sample->value = (double)bytes / (double)(bench_now_ns() - start.wall);
	sample->cpu_ns = (double)(bench_thread_cpu_ns() - start.cpu);
	sample->ops = (double)ops;
}

static bench_outcome_t fused(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	copy_work_t *w = arg;
	const size_t from = next_area(w);
	const stopwatch_t start = begin();
	uint64_t sum = 0;

	(void)run;
	for (size_t at = from; at < from + SAMPLE_BYTES; at += w->leaf) {
		sum += kv_copy_digest(w->dst + at, w->src + at, w->leaf);
	}
	finish(p_sample, start, SAMPLE_BYTES, SAMPLE_BYTES / w->leaf);
	bench_use(sum);

	return BENCH_DONE;
}

static bench_outcome_t fused_blocks(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	copy_work_t *w = arg;
	const size_t from = next_area(w);
	const size_t leaves = BLOCK_BYTES / w->leaf;
	const stopwatch_t start = begin();

	(void)run;
	for (size_t at = from; at < from + SAMPLE_BYTES; at += BLOCK_BYTES) {
		kv_copy_digest_leaves(w->dst + at, w->src + at, w->leaf, leaves, w->digests);
	}
	finish(p_sample, start, SAMPLE_BYTES, SAMPLE_BYTES / w->leaf);
	bench_use(w->digests[0]);

	return BENCH_DONE;
}

/* Both references copy what the value copies in one call. */
static bench_outcome_t stream(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	copy_work_t *w = arg;
	const size_t from = next_area(w);
	const stopwatch_t start = begin();

	(void)run;
	for (size_t at = from; at < from + SAMPLE_BYTES; at += w->call) {
		kv_copy_stream(w->dst + at, w->src + at, w->call);
	}
	finish(p_sample, start, SAMPLE_BYTES, SAMPLE_BYTES / w->leaf);

	return BENCH_DONE;
}

static bench_outcome_t libc(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	copy_work_t *w = arg;
	const size_t from = next_area(w);
	const stopwatch_t start = begin();

	(void)run;
	for (size_t at = from; at < from + SAMPLE_BYTES; at += w->call) {
		memcpy(w->dst + at, w->src + at, w->call);
		bench_use(w->dst[at]);
	}
	finish(p_sample, start, SAMPLE_BYTES, SAMPLE_BYTES / w->leaf);

	return BENCH_DONE;
}

static size_t memory_size(bench_run_t *run)
{
	const uint64_t fallback = (uint64_t)(bench_quick(run) ? 256 : 1024) << 20;
	const uint64_t bytes = bench_param_size(run, "memory", fallback) / SAMPLE_BYTES * SAMPLE_BYTES;

	return bytes < 2 * SAMPLE_BYTES ? 2 * SAMPLE_BYTES : (size_t)bytes;
}

/* One leaf size and way of calling, against both references. */
static bench_outcome_t copy_case(bench_run_t *run, copy_work_t *w, const char *what, bench_sample_fn value_fn)
{
	bench_measurement_t m = {.unit = "GB/s", .value_fn = value_fn, .arg = w, .goal = BENCH_RATIO_AT_LEAST};
	char name[64];
	bench_outcome_t outcome;

	m.name = name;
	m.reference = "non-temporal copy";
	m.reference_fn = stream;
	m.goal_value = 0.85;
	snprintf(name, sizeof name, "digest/%s-%zuk", what, w->leaf >> 10);
	outcome = bench_measure(run, &m);
	if (outcome != BENCH_DONE) {
		return outcome;
	}
	m.reference = "libc memcpy";
	m.reference_fn = libc;
	m.goal_value = 1;
	snprintf(name, sizeof name, "digest/%s-%zuk-libc", what, w->leaf >> 10);

	return bench_measure(run, &m);
}

static bench_outcome_t copy_cases(bench_run_t *run, copy_work_t *w)
{
	static const size_t leaves[] = {4096, 8192, 16384, 65536, 262144};
	bench_outcome_t outcome = BENCH_DONE;

	for (size_t i = 0; i < sizeof leaves / sizeof leaves[0] && outcome == BENCH_DONE; i++) {
		w->leaf = leaves[i];
		w->call = BLOCK_BYTES;
		outcome = copy_case(run, w, "copy", fused_blocks);
		if (outcome == BENCH_DONE) {
			w->call = w->leaf;
			outcome = copy_case(run, w, "single", fused);
		}
	}

	return outcome;
}

static bench_outcome_t run_copy(bench_run_t *run)
{
	const size_t bytes = memory_size(run);
	uint8_t *src = bench_memory(bytes);
	uint8_t *dst = bench_memory(bytes);
	copy_work_t work = {.dst = dst, .src = src, .bytes = bytes};
	bench_outcome_t outcome = BENCH_FAILED;

	bench_pin(0);
	if (src && dst) {
		bench_fill(src, bytes, 1);
		outcome = copy_cases(run, &work);
	} else {
		outcome = bench_fail(run, "no memory for twice %zu bytes", bytes);
	}
	bench_memory_free(src, bytes);
	bench_memory_free(dst, bytes);

	return outcome;
}

const bench_t bench_digest_copy = {
	.name = "digest/copy",
	.measures = "fused copy and XXH3-64 of leaves over cold memory, one core (--with memory=SIZE)",
	.reference = "one core's non-temporal copy; libc's memcpy",
	.goal = "ratio >= 0.85; >= 1",
	.run = run_copy,
};

/* ---- gather ---------------------------------------------------------------------------------- */

#define GATHER_BLOCKS 64u
#define GATHER_LAYERS 32u
#define GATHER_HEADS  8u
#define GATHER_LEAVES (GATHER_HEADS * GATHER_LAYERS)

typedef struct gather_work {
	kvk_layout_t layout;
	kvk_paged_t paged;
	kvk_geometry_t geometry;
	void *base[GATHER_LAYERS];
	uint8_t *cache;
	uint8_t *blocks;
	size_t bytes;
	uint64_t leaves[GATHER_BLOCKS][GATHER_LEAVES];
} gather_work_t;

static bench_outcome_t gather(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	gather_work_t *w = arg;
	kvk_move_t moves[GATHER_BLOCKS];
	stopwatch_t start;

	for (uint32_t i = 0; i < GATHER_BLOCKS; i++) {
		moves[i] = (kvk_move_t){.block = (i * 37) % GATHER_BLOCKS,
					.data = w->blocks + (size_t)i * w->geometry.block_bytes,
					.leaves = w->leaves[i]};
	}
	start = begin();
	if (kvk_gather(&w->layout, &w->paged, moves, GATHER_BLOCKS) != KV_OK) {
		return bench_fail(run, "gather refused its blocks");
	}
	finish(p_sample, start, w->bytes, GATHER_BLOCKS);

	return BENCH_DONE;
}

static bench_outcome_t scatter(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	gather_work_t *w = arg;
	kvk_move_t moves[GATHER_BLOCKS];
	stopwatch_t start;

	for (uint32_t i = 0; i < GATHER_BLOCKS; i++) {
		moves[i] = (kvk_move_t){.block = (i * 37) % GATHER_BLOCKS,
					.data = w->blocks + (size_t)i * w->geometry.block_bytes,
					.leaves = w->leaves[i]};
	}
	start = begin();
	if (kvk_scatter(&w->layout, &w->paged, moves, GATHER_BLOCKS, NULL) != KV_OK) {
		return bench_fail(run, "a block that was just gathered is corrupt");
	}
	finish(p_sample, start, w->bytes, GATHER_BLOCKS);

	return BENCH_DONE;
}

/* Each way its own, so that the blocks a scatter verifies are those that were gathered. */
static bench_outcome_t copy_in(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	gather_work_t *w = arg;
	const stopwatch_t start = begin();

	(void)run;
	kv_copy_stream(w->blocks, w->cache, w->bytes);
	finish(p_sample, start, w->bytes, GATHER_BLOCKS);

	return BENCH_DONE;
}

static bench_outcome_t copy_out(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	gather_work_t *w = arg;
	const stopwatch_t start = begin();

	(void)run;
	kv_copy_stream(w->cache, w->blocks, w->bytes);
	finish(p_sample, start, w->bytes, GATHER_BLOCKS);

	return BENCH_DONE;
}

static bench_outcome_t gather_kind(bench_run_t *run, gather_work_t *w, kvk_paged_kind_t kind, const char *kind_name)
{
	bench_measurement_t m = {.unit = "GB/s", .reference = "non-temporal copy", .arg = w};
	char name[64];
	bench_outcome_t outcome;

	w->layout = (kvk_layout_t){.heads = GATHER_HEADS,
				   .layers = GATHER_LAYERS,
				   .block_tokens = 16,
				   .k_dim = 128,
				   .v_dim = 128,
				   .dtype = KVK_DTYPE_BF16,
				   .inner = kind == KVK_PAGED_HEAD_TOKEN_KV ? KVK_INNER_PACKED : KVK_INNER_SPLIT};
	w->paged = (kvk_paged_t){.kind = kind,
				 .blocks = GATHER_BLOCKS,
				 .layers = GATHER_LAYERS,
				 .heads = GATHER_HEADS,
				 .block_tokens = 16,
				 .k_dim = 128,
				 .v_dim = 128,
				 .dtype = KVK_DTYPE_BF16,
				 .base = w->base};
	kvk_layout_geometry(&w->layout, &w->geometry);
	m.name = name;
	m.value_fn = gather;
	m.reference_fn = copy_in;
	snprintf(name, sizeof name, "digest/gather-%s", kind_name);
	outcome = bench_measure(run, &m);
	if (outcome == BENCH_DONE) {
		m.value_fn = scatter;
		m.reference_fn = copy_out;
		snprintf(name, sizeof name, "digest/scatter-%s", kind_name);
		outcome = bench_measure(run, &m);
	}

	return outcome;
}

static bench_outcome_t run_gather(bench_run_t *run)
{
	const size_t page = (size_t)16 * 256 * 2;
	const size_t layer = page * GATHER_BLOCKS * GATHER_HEADS;
	gather_work_t *w = calloc(1, sizeof *w);
	bench_outcome_t outcome;

	if (!w) {
		return bench_fail(run, "no memory");
	}
	w->bytes = layer * GATHER_LAYERS;
	w->cache = bench_memory(w->bytes);
	w->blocks = bench_memory(w->bytes);
	if (w->cache && w->blocks) {
		for (uint32_t i = 0; i < GATHER_LAYERS; i++) {
			w->base[i] = w->cache + i * layer;
		}
		bench_pin(0);
		bench_fill(w->cache, w->bytes, 2);
		outcome = gather_kind(run, w, KVK_PAGED_KV_TOKEN_HEAD, "kv-token-head");
		if (outcome == BENCH_DONE) {
			outcome = gather_kind(run, w, KVK_PAGED_HEAD_TOKEN_KV, "head-token-kv");
		}
	} else {
		outcome = bench_fail(run, "no memory for twice %zu bytes", w->bytes);
	}
	bench_memory_free(w->cache, w->bytes);
	bench_memory_free(w->blocks, w->bytes);
	free(w);

	return outcome;
}

const bench_t bench_digest_gather = {
	.name = "digest/gather",
	.measures = "gather and verified scatter of 2 MiB blocks (32 layers, 8 heads, 16 tokens, bf16), one core",
	.reference = "one core's non-temporal copy of as many bytes",
	.goal = "none; for information",
	.run = run_gather,
};
