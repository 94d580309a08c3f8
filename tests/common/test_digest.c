/* Digests: libxxhash's, bit for bit, from every implementation this CPU runs, and copies that write the bytes they
 * hash and no others. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "hash/digest_ops.h"

#include <sys/mman.h>
#include <xxhash.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define ROOM   ((size_t)3 << 20)
#define CANARY 0xa7

static uint8_t *src;
static uint8_t *dst;

static int setup(void **state)
{
	kv_test_rng_t rng = {kv_test_seed()};

	(void)state;
	src = aligned_alloc(4096, ROOM);
	dst = aligned_alloc(4096, ROOM);
	if (!src || !dst) {
		return -1;
	}
	kv_test_fill(&rng, src, ROOM);

	return 0;
}

static int teardown(void **state)
{
	(void)state;
	free(src);
	free(dst);

	return 0;
}

#define EACH_BUILD(ops)                                                                                                \
	for (const kv_digest_ops_t *const *p_##ops = kv_digest_builds(), *ops; (ops = *p_##ops) != NULL; p_##ops++)    \
		if (kv_digest_runs_here(ops))

/* Copied whole, and not a byte around it. */
static void check_bytes(const kv_digest_ops_t *ops, const uint8_t *out, size_t from, size_t n)
{
	if (memcmp(out, src + from, n) != 0) {
		fail_msg("%s: copy of %zu bytes at %zu", ops->name, n, from);
	}
	for (size_t i = 0; i < 64; i++) {
		assert_int_equal(out[-1 - (ptrdiff_t)i], CANARY);
		assert_int_equal(out[n + i], CANARY);
	}
}

static void check_copy(const kv_digest_ops_t *ops, size_t to, size_t from, size_t n)
{
	const uint64_t expected = XXH3_64bits(src + from, n);
	uint8_t *out = dst + 64 + to;
	const kv_copy_run_t leaf = {out, src + from, n, n, n, 1};
	uint64_t digest;

	if (ops->digest(src + from, n) != expected) {
		fail_msg("%s: digest of %zu bytes at %zu", ops->name, n, from);
	}
	memset(out - 64, CANARY, n + 128);
	kv_copy_digest_leaves_by(ops, &leaf, &digest);
	if (digest != expected) {
		fail_msg("%s: fused digest of %zu bytes, %zu to %zu", ops->name, n, from, to);
	}
	check_bytes(ops, out, from, n);
	if (to % 64 == 0) {
		memset(out - 64, CANARY, n + 128);
		if (ops->copy(out, src + from, n, NULL, KV_STORE_STREAM) != expected) {
			fail_msg("%s: streamed digest of %zu bytes at %zu", ops->name, n, from);
		}
		check_bytes(ops, out, from, n);
	}
}

KV_TEST(p1_every_short_length_has_the_librarys_digest)
{
	EACH_BUILD(ops)
	{
		print_message("# %s%s\n", ops->name, strcmp(ops->name, kv_digest_variant()) == 0 ? " (chosen)" : "");
		for (size_t n = 0; n <= 4096; n++) {
			check_copy(ops, 0, n % 64, n);
			check_copy(ops, n % 63 + 1, n % 3, n);
		}
	}
}

KV_TEST(p1_every_alignment_has_the_librarys_digest)
{
	static const size_t lengths[] = {240, 241, 255, 256, 257, 1023, 1024, 1025, 1088, 2048, 2049, 8192};

	EACH_BUILD(ops)
	{
		for (size_t i = 0; i < KV_COUNT_OF(lengths); i++) {
			for (size_t to = 0; to < 64; to++) {
				check_copy(ops, to, 0, lengths[i]);
				check_copy(ops, 0, to, lengths[i]);
				check_copy(ops, to, 63 - to, lengths[i]);
			}
		}
	}
}

KV_TEST(p1_large_leaves_have_the_librarys_digest)
{
	static const size_t lengths[] = {65536, 262144, 1048576, 2097152, 2097152 + 1, 1048576 - 1, 1000000};

	EACH_BUILD(ops)
	{
		for (size_t i = 0; i < KV_COUNT_OF(lengths); i++) {
			check_copy(ops, 0, i, lengths[i]);
			check_copy(ops, i * 5, 0, lengths[i]);
		}
	}
}

KV_TEST(p1_leaves_of_a_block_are_those_of_single_calls)
{
	static const size_t leaves[] = {1, 100, 256, 300, 4096, 8192, 10000};
	uint64_t digests[16];

	for (size_t i = 0; i < KV_COUNT_OF(leaves); i++) {
		memset(dst, CANARY, leaves[i] * 16 + 1);
		kv_copy_digest_leaves(dst, src, leaves[i], 16, digests);
		assert_memory_equal(dst, src, leaves[i] * 16);
		assert_int_equal(dst[leaves[i] * 16], CANARY);
		for (size_t k = 0; k < 16; k++) {
			assert_int_equal(digests[k], XXH3_64bits(src + k * leaves[i], leaves[i]));
			assert_int_equal(kv_copy_digest_part(dst, src + k * leaves[i], leaves[i]), digests[k]);
			kv_copy_fence();
			assert_memory_equal(dst, src + k * leaves[i], leaves[i]);
		}
	}
	assert_int_equal(kv_digest_root(digests, 16), XXH3_64bits(digests, sizeof digests));
}

/* ---- runs ------------------------------------------------------------------------------------ */

/* What kv_copy_digest_runs() is to do, piece by piece; room for the concatenation in `row`. */
static uint64_t reference_runs(const kv_copy_run_t *runs, size_t count, kv_run_order_t order, uint8_t *row)
{
	const size_t outer = order == KV_RUNS_SEQUENTIAL ? count : runs[0].pieces;
	size_t n = 0;

	for (size_t a = 0; a < outer; a++) {
		const size_t inner = order == KV_RUNS_SEQUENTIAL ? runs[a].pieces : count;

		for (size_t b = 0; b < inner; b++) {
			const kv_copy_run_t *run = &runs[order == KV_RUNS_SEQUENTIAL ? a : b];
			const size_t piece = order == KV_RUNS_SEQUENTIAL ? b : a;

			memcpy((uint8_t *)run->dst + piece * run->dst_stride,
			       (const uint8_t *)run->src + piece * run->src_stride, run->piece);
			memcpy(row + n, (const uint8_t *)run->src + piece * run->src_stride, run->piece);
			n += run->piece;
		}
	}

	return XXH3_64bits(row, n);
}

static size_t random_piece(kv_test_rng_t *rng)
{
	switch (kv_test_below(rng, 4)) {
	case 0:
		return kv_test_below(rng, 300) + 1;
	case 1:
		return 64 * (kv_test_below(rng, 40) + 1);
	default:
		return 64 * (kv_test_below(rng, 4) + 1);
	}
}

KV_TEST(p1_leaves_of_many_pieces_are_digests_of_the_concatenation)
{
	kv_test_rng_t rng = {kv_test_seed()};
	uint8_t *row = malloc(ROOM);
	uint8_t *expected = malloc(ROOM);

	assert_non_null(row);
	assert_non_null(expected);
	for (int round = 0; round < 1500; round++) {
		const kv_run_order_t order = round % 2 ? KV_RUNS_SEQUENTIAL : KV_RUNS_INTERLEAVED;
		const size_t count = kv_test_below(&rng, 3) + 1;
		const size_t pieces = kv_test_below(&rng, 20) + 1;
		const size_t slack = round % 3 ? 0 : kv_test_below(&rng, 64);
		kv_copy_run_t runs[3];
		kv_copy_run_t shadow[3];
		size_t used = 0;

		for (size_t i = 0; i < count; i++) {
			kv_copy_run_t *run = &runs[i];

			run->piece = random_piece(&rng);
			run->pieces = order == KV_RUNS_SEQUENTIAL ? kv_test_below(&rng, 20) + 1 : pieces;
			run->dst_stride = run->piece + (round % 5 ? 0 : 64 * kv_test_below(&rng, 3));
			run->src_stride = run->piece + kv_test_below(&rng, 300);
			run->dst = dst + used + slack;
			run->src = src + kv_test_below(&rng, 4096);
			shadow[i] = *run;
			shadow[i].dst = expected + used + slack;
			used += (run->dst_stride * run->pieces + 127) / 64 * 64;
		}
		EACH_BUILD(ops)
		{
			const kv_copy_desc_t desc = {runs, count, order, round % 4 ? NULL : src};
			uint64_t digest;

			memset(expected, CANARY, used + 64);
			memset(dst, CANARY, used + 64);
			digest = reference_runs(shadow, count, order, row);
			if (kv_copy_digest_runs_by(ops, &desc) != digest || memcmp(dst, expected, used + 64) != 0) {
				fail_msg("%s: round %d", ops->name, round);
			}
		}
	}
	free(row);
	free(expected);
}

KV_TEST(a_streamed_copy_is_a_copy)
{
	EACH_BUILD(ops)
	{
		for (size_t n = 0; n < 1000; n += 7) {
			for (size_t to = 0; to < 65; to += 13) {
				memset(dst, CANARY, n + 200);
				kv_copy_stream_by(ops, dst + to, src + 5, n);
				assert_memory_equal(dst + to, src + 5, n);
				assert_int_equal(dst[to + n], CANARY);
			}
		}
	}
}

/* ---- nothing is touched outside -------------------------------------------------------------- */

#define FENCED ((size_t)16 * 4096)

/* FENCED bytes between two pages that nobody may touch. */
static uint8_t *fenced_new(void)
{
	uint8_t *p = mmap(NULL, FENCED + 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	assert_true(p != MAP_FAILED);
	assert_int_equal(mprotect(p + 4096, FENCED, PROT_READ | PROT_WRITE), 0);

	return p + 4096;
}

static void fenced_free(uint8_t *p)
{
	assert_int_equal(munmap(p - 4096, FENCED + 8192), 0);
}

static void check_fenced(const kv_digest_ops_t *ops, uint8_t *to, const uint8_t *from, size_t n)
{
	const uint64_t expected = XXH3_64bits(from, n);
	const kv_copy_run_t leaf = {to, from, n, n, n, 1};
	uint64_t digest;

	assert_true(ops->digest(from, n) == expected);
	kv_copy_digest_leaves_by(ops, &leaf, &digest);
	assert_true(digest == expected);
	assert_memory_equal(to, from, n);
	assert_true(ops->copy(to, from, n, NULL, KV_STORE_PLAIN) == expected);
	if ((uintptr_t)to % 64 == 0) {
		assert_true(ops->copy(to, from, n, NULL, KV_STORE_STREAM) == expected);
	}
	kv_copy_stream_by(ops, to, from, n);
	assert_memory_equal(to, from, n);
}

/* K and V of `pieces` tokens that end where the fence begins, in one order and the other. */
static void check_fenced_runs(const kv_digest_ops_t *ops, uint8_t *to, const uint8_t *from, size_t piece)
{
	const size_t pieces = FENCED / (2 * piece);
	const size_t half = pieces * piece;
	const uint8_t *last = from + FENCED - 2 * half;
	uint8_t *out = to + FENCED - 2 * half;
	const kv_copy_run_t turn[2] = {{out, last, piece, piece, piece, pieces},
				       {out + half, last + half, piece, piece, piece, pieces}};
	const kv_copy_run_t mixed[2] = {{out, last, 2 * piece, 2 * piece, piece, pieces},
					{out + piece, last + piece, 2 * piece, 2 * piece, piece, pieces}};
	const kv_copy_desc_t in_turn = {turn, 2, KV_RUNS_SEQUENTIAL, NULL};
	const kv_copy_desc_t interleaved = {mixed, 2, KV_RUNS_INTERLEAVED, NULL};
	const uint64_t expected = XXH3_64bits(last, 2 * half);

	assert_true(kv_copy_digest_runs_by(ops, &in_turn) == expected);
	assert_memory_equal(out, last, 2 * half);
	assert_true(kv_copy_digest_runs_by(ops, &interleaved) == expected);
	assert_memory_equal(out, last, 2 * half);
}

/* A leaf may be the last thing before memory that is not there, or the first thing behind it. */
KV_TEST(p6_nothing_outside_source_and_destination_is_touched)
{
	static const size_t pieces[] = {1, 3, 63, 64, 65, 128, 192, 256, 1000, 1024, 2048, 4096, 16384};
	uint8_t *from = fenced_new();
	uint8_t *to = fenced_new();

	memcpy(from, src, FENCED);
	EACH_BUILD(ops)
	{
		for (size_t n = 0; n <= FENCED; n += n < 2304 ? 1 : 61) {
			check_fenced(ops, to + FENCED - n, from + FENCED - n, n);
			check_fenced(ops, to, from + FENCED - n, n);
			check_fenced(ops, to + FENCED - n, from, n);
		}
		for (size_t i = 0; i < KV_COUNT_OF(pieces); i++) {
			check_fenced_runs(ops, to, from, pieces[i]);
		}
	}
	fenced_free(from);
	fenced_free(to);
}

/* ---- the vector unit ------------------------------------------------------------------------- */

#if defined(__x86_64__)
/* 1 while upper halves of vector registers are in use, 0 when they are not, -1 where the CPU does not say. */
__attribute__((target("xsave"))) static int upper_halves_in_use(void)
{
	unsigned a;
	unsigned b;
	unsigned c;
	unsigned d;
	uint64_t in_use;

	if (!__get_cpuid_count(0xd, 1, &a, &b, &c, &d) || !(a & 4) || !__builtin_cpu_supports("avx")) {
		return -1;
	}
	in_use = (uint64_t)_xgetbv(1);

	return (in_use & 4) != 0;
}

/* What is left dirty makes all SSE code of the thread several times slower. */
KV_TEST(others_are_not_slowed_down)
{
	static const size_t lengths[] = {8, 200, 1000, 4096, 65536};

	EACH_BUILD(ops)
	{
		for (size_t i = 0; i < KV_COUNT_OF(lengths); i++) {
			const kv_copy_run_t run = {dst, src, 256, 300, 256, lengths[i] / 256 + 1};
			const kv_copy_desc_t desc = {&run, 1, KV_RUNS_SEQUENTIAL, NULL};
			uint64_t sum = ops->digest(src, lengths[i]);

			assert_true(upper_halves_in_use() <= 0);
			sum += ops->copy(dst, src, lengths[i], NULL, KV_STORE_STREAM);
			assert_true(upper_halves_in_use() <= 0);
			sum += ops->copy(dst, src, lengths[i], NULL, KV_STORE_PLAIN);
			assert_true(upper_halves_in_use() <= 0);
			sum += ops->copy_runs(&desc, KV_STORE_STREAM);
			assert_true(upper_halves_in_use() <= 0);
			ops->stream(dst, src, lengths[i] / 64 * 64);
			assert_true(upper_halves_in_use() <= 0);
			assert_true(sum != 1);
		}
	}
}
#endif

KV_TEST_MAIN(setup, teardown)
