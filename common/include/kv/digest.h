/* kv/digest.h -- XXH3-64 digests, alone and fused with a copy.
 *
 * A leaf is XXH3-64 (seed 0) of its bytes; the root of a head is XXH3-64 of the head's leaf digests as u64 little-
 * endian in leaf order; the digest of a block is XXH3-64 of its head roots likewise. The fused loops read each
 * byte once: hash it and stream it out. Values are those of libxxhash, bit for bit (tests/common proves it for
 * every length and alignment).
 */
#ifndef KV_DIGEST_H
#define KV_DIGEST_H

#include "kv/status.h"
#include "kv/types.h"

/* XXH3-64 of n bytes, by the widest instructions this CPU has. */
uint64_t kv_digest(const void *data, size_t n);

/* Copy n bytes from src to dst (no overlap) and return XXH3-64 of what was read. From 4 KiB on, to a multiple of 64,
 * the stores go around the caches. For many leaves see kv_copy_digest_leaves(): it fences once. */
uint64_t kv_copy_digest(void *dst, const void *src, size_t n);

/* One run of a leaf: `pieces` pieces of `piece` bytes, `src_stride` and `dst_stride` bytes apart. None is 0. */
typedef struct kv_copy_run {
	void *dst;
	const void *src;
	size_t dst_stride;
	size_t src_stride;
	size_t piece;
	size_t pieces;
} kv_copy_run_t;

typedef enum kv_run_order {
	KV_RUNS_SEQUENTIAL,  /* all pieces of the first run, then those of the next                        */
	KV_RUNS_INTERLEAVED, /* the first piece of each run, then the second of each; `pieces` all the same */
} kv_run_order_t;

/* Copy a leaf that is made of several runs and return the digest of the pieces, concatenated in `order`. `next`
 * (may be NULL) is memory that will be read soon, as many bytes as the leaf has: it is prefetched on the way. Made
 * for many leaves in a row, so it does not fence: call kv_copy_fence() before another thread learns of the bytes. */
uint64_t kv_copy_digest_runs(const kv_copy_run_t *runs, size_t count, kv_run_order_t order, const void *next);

/* kv_copy_digest() of one leaf of many that are copied in a row: does not fence, see kv_copy_fence(). */
uint64_t kv_copy_digest_part(void *dst, const void *src, size_t n);

/* kv_copy_digest() of `count` leaves of `leaf` bytes, one behind the other on both sides, with one fence at the end. */
void kv_copy_digest_leaves(void *dst, const void *src, size_t leaf, size_t count, uint64_t *digests);

/* Order streamed bytes before every later store of this thread. The other calls of this header do it themselves. (What
 * was not streamed is ordered as ordinary stores are.) */
void kv_copy_fence(void);

/* Root of a head, or digest of a block: XXH3-64 of n u64 values. */
uint64_t kv_digest_root(const uint64_t *values, size_t n);

/* n bytes with non-temporal stores, for reference and for copies without a digest. */
void kv_copy_stream(void *dst, const void *src, size_t n);

/* Which code runs: "avx512", "avx2", "sse2" or "portable". The environment does not change it. */
const char *kv_digest_variant(void);

#endif
