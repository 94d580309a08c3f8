/* hash -- keys of 16-token units through kv_chain_tokens(), against a bare chain of the library's SHA-256
 * compressions over the same bytes (no keys written, no tokens checked). ns a unit. Goal: ratio <= 1.2. */
#define OPENSSL_SUPPRESS_DEPRECATED
#include "bench.h"

#include "kv/key.h"

#include <openssl/sha.h>
#include <stdlib.h>

#define UNITS       8192u
#define UNIT_TOKENS 16u
#define PASSES      8u

typedef struct work {
	uint32_t tokens[UNITS * UNIT_TOKENS];
	kv_key_t keys[UNITS];
} work_t;

static bench_outcome_t our_keys(void *arg, bench_sample_t *p_sample)
{
	static const uint8_t root[32] = {1};
	work_t *work = arg;
	kv_chain_t chain;
	uint64_t start;

	kv_chain_init(&chain, root, UNIT_TOKENS, 0);
	start = bench_now_ns();
	for (unsigned i = 0; i < PASSES; i++) {
		if (kv_chain_tokens(&chain, work->tokens, UNITS, work->keys, NULL) != KV_OK) {
			return bench_fail("a token was refused");
		}
	}
	p_sample->ops = UNITS * PASSES;
	p_sample->value = (double)(bench_now_ns() - start) / p_sample->ops;
	bench_use(work->keys[UNITS - 1].b[0]);

	return BENCH_DONE;
}

static bench_outcome_t library_chain(void *arg, bench_sample_t *p_sample)
{
	const work_t *work = arg;
	SHA256_CTX ctx;
	uint64_t start;

	SHA256_Init(&ctx);
	start = bench_now_ns();
	for (unsigned i = 0; i < PASSES; i++) {
		for (size_t u = 0; u < UNITS; u++) {
			SHA256_Transform(&ctx, (const uint8_t *)&work->tokens[u * UNIT_TOKENS]);
		}
	}
	p_sample->ops = UNITS * PASSES;
	p_sample->value = (double)(bench_now_ns() - start) / p_sample->ops;
	bench_use(ctx.h[0]);

	return BENCH_DONE;
}

bench_outcome_t run_hash(int variant)
{
	work_t *work = bench_memory(sizeof *work);
	bench_outcome_t outcome;

	(void)variant;
	if (!work) {
		return bench_fail("no memory");
	}
	for (size_t i = 0; i < (size_t)UNITS * UNIT_TOKENS; i++) {
		work->tokens[i] = (uint32_t)(i * 2654435761u) % 151936u;
	}
	outcome = bench_measure(work, &(bench_measurement_t){"hash", "ns", "bare SHA-256 compressions of libcrypto",
							     our_keys, library_chain, 41, BENCH_RATIO_AT_MOST, 1.2});
	free(work);

	return outcome;
}
