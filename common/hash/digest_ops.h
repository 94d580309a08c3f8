/* digest_ops.h -- one implementation of kv/digest.h per instruction set; private to common/ and its tests. */
#ifndef KV_DIGEST_OPS_H
#define KV_DIGEST_OPS_H

#include "kv/digest.h"

/* How bytes go out: around the caches (every destination address must be a multiple of 64), or as ordinary stores. */
typedef enum kv_store { KV_STORE_STREAM, KV_STORE_PLAIN } kv_store_t;

/* The arguments of kv_copy_digest_runs(). */
typedef struct kv_copy_desc {
	const kv_copy_run_t *runs;
	size_t count;
	kv_run_order_t order;
	const uint8_t *next;
} kv_copy_desc_t;

typedef struct kv_digest_ops {
	const char *name;

	/* XXH3-64, seed 0. */
	uint64_t (*digest)(const void *data, size_t n);

	/* Copy and digest one contiguous leaf. `next` as in kv_copy_digest_runs(); NULL: what follows src.
	 * KV_STORE_STREAM needs dst % 64 == 0. Does not fence. */
	uint64_t (*copy)(void *dst, const void *src, size_t n, const uint8_t *next, kv_store_t store);

	/* Copy and digest a leaf of several runs. Does not fence. KV_STORE_STREAM needs every piece at a multiple
	 * of 64 in dst. Each run has at least one piece of at least one byte; interleaved runs have the same
	 * number of pieces. */
	uint64_t (*copy_runs)(const kv_copy_desc_t *desc, kv_store_t store);

	/* Copy only, around the caches; dst % 64 == 0 and n % 64 == 0. Does not fence. */
	void (*stream)(void *dst, const void *src, size_t n);

	/* Order streamed bytes before every later store. */
	void (*fence)(void);
} kv_digest_ops_t;

/* What this build has, widest first, NULL at the end; each may only be called where kv_digest_runs_here() says so. */
const kv_digest_ops_t *const *kv_digest_builds(void);
int kv_digest_runs_here(const kv_digest_ops_t *ops);

/* The public calls on a given implementation: alignment rules, short leaves and fences included. */
void kv_copy_digest_leaves_by(const kv_digest_ops_t *ops, const kv_copy_run_t *leaves, uint64_t *digests);
uint64_t kv_copy_digest_runs_by(const kv_digest_ops_t *ops, const kv_copy_desc_t *desc);
void kv_copy_stream_by(const kv_digest_ops_t *ops, void *dst, const void *src, size_t n);

extern const kv_digest_ops_t kv_digest_avx512;
extern const kv_digest_ops_t kv_digest_avx2;
extern const kv_digest_ops_t kv_digest_sse2;
extern const kv_digest_ops_t kv_digest_portable;

#endif
