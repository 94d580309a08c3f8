/* digest/copy -- the fused copy-and-digest over cold memory on one core: blocks of 2 MiB, leaf by leaf, a call a block,
 * against copies of as many bytes a call by kv_copy_stream(), non-temporal. GB/s. Goal: ratio >= 0.85. Parameter
 * memory=SIZE: bytes on each side (default 1GiB, --quick 256MiB). */
#include "bench.h"

#include "kv/digest.h"

#include <stdio.h>
#include <stdlib.h>

/* A sample moves this much and goes on where the last one stopped, so that nothing it touches is in a cache. */
#define SAMPLE_BYTES ((size_t)64 << 20)
#define BLOCK_BYTES  ((size_t)2 << 20) /* leaves of a block are moved in one call */

typedef struct copy_work {
	uint8_t *dst, *src;
	size_t bytes, leaf, at;
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

static bench_outcome_t copy(void *arg, bench_sample_t *p_sample)
{
	copy_work_t *w = arg;
	const size_t from = next_area(w);
	const bench_clock_t start = bench_start();

	for (size_t at = from; at < from + SAMPLE_BYTES; at += BLOCK_BYTES) {
		if (p_sample->is_reference) {
			kv_copy_stream(w->dst + at, w->src + at, BLOCK_BYTES);
		} else {
			kv_copy_digest_leaves(w->dst + at, w->src + at, w->leaf, BLOCK_BYTES / w->leaf, w->digests);
		}
	}
	bench_use(w->digests[0]);

	return bench_rate(start, SAMPLE_BYTES, (double)SAMPLE_BYTES / (double)w->leaf, p_sample);
}

bench_outcome_t run_copy(int variant)
{
	const uint64_t wanted = bench_param_size("memory", (uint64_t)(bench_quick() ? 256 : 1024) << 20);
	copy_work_t w = {.bytes = wanted < 2 * SAMPLE_BYTES ? 2 * SAMPLE_BYTES : wanted / SAMPLE_BYTES * SAMPLE_BYTES};
	bench_outcome_t outcome = BENCH_DONE;
	char name[64];

	(void)variant;
	w.src = bench_memory(w.bytes);
	w.dst = bench_memory(w.bytes);
	bench_pin(0);
	if (w.src && w.dst) {
		bench_fill(w.src, w.bytes, 1);
	} else {
		outcome = bench_fail("no memory for twice %zu bytes", w.bytes);
	}
	for (w.leaf = 4096; w.leaf <= 262144 && outcome == BENCH_DONE; w.leaf *= w.leaf < 16384 ? 2 : 4) {
		snprintf(name, sizeof name, "digest/copy-%zuk", w.leaf >> 10);
		outcome = bench_measure(&w, &(bench_measurement_t){name, "GB/s", "non-temporal copy", copy, copy, 0,
								   BENCH_RATIO_AT_LEAST, 0.85});
	}
	free(w.src);
	free(w.dst);

	return outcome;
}
