/* Chooses an implementation once, and keeps the rules that all of them share: alignment, empty leaves, fences. */
#include "kv/digest.h"

#include "digest_ops.h"

#include <stdatomic.h>

#define LINE        64u
#define STREAM_FROM 4096u /* less in one call: a fence costs more than the copy gains; measured */

static const kv_digest_ops_t *const builds[] = {
#if defined(__x86_64__)
	&kv_digest_avx512,   &kv_digest_avx2,
	&kv_digest_sse2,
#endif
	&kv_digest_portable, NULL,
};

const kv_digest_ops_t *const *kv_digest_builds(void)
{
	return builds;
}

int kv_digest_runs_here(const kv_digest_ops_t *ops)
{
#if defined(__x86_64__)
	if (ops == &kv_digest_avx512) {
		return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
	}
	if (ops == &kv_digest_avx2) {
		return __builtin_cpu_supports("avx2") != 0;
	}
#endif

	return ops != NULL;
}

static const kv_digest_ops_t *best(void)
{
	static _Atomic(const kv_digest_ops_t *) chosen;
	const kv_digest_ops_t *ops = atomic_load_explicit(&chosen, memory_order_relaxed);

	for (size_t i = 0; !ops; i++) {
		if (kv_digest_runs_here(builds[i])) {
			ops = builds[i];
			atomic_store_explicit(&chosen, ops, memory_order_relaxed);
		}
	}

	return ops;
}

static int aligned(const void *p)
{
	return (uintptr_t)p % LINE == 0;
}

static kv_store_t run_store(const kv_copy_run_t *run)
{
	return aligned(run->dst) && (run->dst_stride % LINE == 0 || run->pieces == 1) ? KV_STORE_STREAM
										      : KV_STORE_PLAIN;
}

static kv_store_t leaf_store(const void *dst)
{
	return aligned(dst) ? KV_STORE_STREAM : KV_STORE_PLAIN;
}

void kv_copy_digest_leaves_by(const kv_digest_ops_t *ops, const kv_copy_run_t *leaves, uint64_t *digests)
{
	const size_t leaf = leaves->piece;
	const int large = leaf * leaves->pieces >= STREAM_FROM;

	for (size_t i = 0; i < leaves->pieces; i++) {
		uint8_t *to = (uint8_t *)leaves->dst + i * leaves->dst_stride;
		const uint8_t *from = (const uint8_t *)leaves->src + i * leaves->src_stride;

		digests[i] = ops->copy(to, from, leaf, NULL, large ? leaf_store(to) : KV_STORE_PLAIN);
	}
	if (large) {
		ops->fence();
	}
}

uint64_t kv_copy_digest_runs_by(const kv_digest_ops_t *ops, const kv_copy_desc_t *desc)
{
	const kv_copy_run_t *runs = desc->runs;
	kv_store_t store = KV_STORE_STREAM;

	if (desc->count == 1 && runs->pieces == 1) {
		return ops->copy(runs->dst, runs->src, runs->piece, desc->next, leaf_store(runs->dst));
	}
	for (size_t i = 0; i < desc->count; i++) {
		if (run_store(&runs[i]) == KV_STORE_PLAIN) {
			store = KV_STORE_PLAIN;
		}
	}

	return ops->copy_runs(desc, store);
}

void kv_copy_stream_by(const kv_digest_ops_t *ops, void *dst, const void *src, size_t n)
{
	const size_t bulk = aligned(dst) ? n / LINE * LINE : 0;

	ops->stream(dst, src, bulk);
	memcpy((uint8_t *)dst + bulk, (const uint8_t *)src + bulk, n - bulk);
	ops->fence();
}

uint64_t kv_digest(const void *data, size_t n)
{
	return best()->digest(data, n);
}

uint64_t kv_digest_root(const uint64_t *values, size_t n)
{
	return kv_digest(values, n * sizeof *values);
}

uint64_t kv_copy_digest(void *dst, const void *src, size_t n)
{
	uint64_t digest;

	kv_copy_digest_leaves(dst, src, n, 1, &digest);

	return digest;
}

uint64_t kv_copy_digest_part(void *dst, const void *src, size_t n)
{
	return best()->copy(dst, src, n, NULL, leaf_store(dst));
}

uint64_t kv_copy_digest_runs(const kv_copy_run_t *runs, size_t count, kv_run_order_t order, const void *next)
{
	const kv_copy_desc_t desc = {runs, count, order, next};

	return kv_copy_digest_runs_by(best(), &desc);
}

void kv_copy_digest_leaves(void *dst, const void *src, size_t leaf, size_t count, uint64_t *digests)
{
	const kv_copy_run_t leaves = {dst, src, leaf, leaf, leaf, count};

	kv_copy_digest_leaves_by(best(), &leaves, digests);
}

void kv_copy_stream(void *dst, const void *src, size_t n)
{
	kv_copy_stream_by(best(), dst, src, n);
}

void kv_copy_fence(void)
{
	best()->fence();
}

const char *kv_digest_variant(void)
{
	return best()->name;
}
