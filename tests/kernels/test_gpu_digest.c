/* Digests of a device's memory are those of the CPU, whatever the sizes, in whichever batches, and whatever the driver
 * refuses. */
#include "gpu_rig.h"

#include "kvk/digest_range.h"
#include "kvk/gpu.h"

#define BYTES (UINT64_C(4) << 20)
#define MOST  2000u /* ranges */
#define FEW   3072u /* bytes of pinned memory: for batches of 64 pieces */

typedef struct memory {
	gpu_rig_t rig;
	kvk_gpu_t *gpu;
	kvk_cu_ptr_t at; /* BYTES of the device's, which are the host's, too */
	kvk_cu_stream_t stream;
	kvk_range_t ranges[MOST];
	uint32_t count;
	uint8_t digests[MOST][KVK_RANGE_DIGEST_BYTES], expected[MOST][KVK_RANGE_DIGEST_BYTES];
} memory_t;

static memory_t m; /* large */

static void start(kv_test_rng_t *rng, size_t pinned)
{
	m.count = 0;
	gpu_rig_init(&m.rig, &(fake_cuda_config_t){.seed = kv_test_rand(rng), .lazy = 1, .major = 8});
	m.gpu = gpu_rig_open(&m.rig);
	fake_cuda_limit_pinned(pinned);
	m.at = gpu_rig_alloc(BYTES);
	kv_test_fill(rng, (uint8_t *)(uintptr_t)m.at, BYTES);
	assert_int_equal(kvk_gpu_create_stream(m.gpu, 0, &m.stream), KV_OK);
}

static void stop(void)
{
	fake_cuda_fail_nth(0);
	gpu_rig_free(m.at);
	gpu_rig_fini(&m.rig); /* nothing is left */
}

static void add(uint64_t offset, uint64_t bytes)
{
	assert_true(m.count < MOST && offset + bytes <= BYTES);
	m.ranges[m.count++] = (kvk_range_t){m.at + offset, bytes};
}

/* By the twin, which test_digest.c of the connectors compares with libxxhash. */
static void expect(void)
{
	for (uint32_t i = 0; i < m.count; i++) {
		const uint8_t *bytes = (const uint8_t *)(uintptr_t)m.ranges[i].at;
		uint64_t pieces[BYTES / KVK_PIECE + 1];
		uint32_t n = 0;

		for (uint64_t at = 0; at < m.ranges[i].bytes; at += KVK_PIECE) {
			const uint64_t left = m.ranges[i].bytes - at;

			pieces[n++] = kvk_digest_piece(bytes + at, left < KVK_PIECE ? left : KVK_PIECE);
		}
		assert_int_equal(n, kvk_count_pieces(m.ranges[i].bytes));
		kvk_digest_range(pieces, m.ranges[i].bytes, m.expected[i]);
	}
}

static kv_status_t digest(void)
{
	memset(m.digests, 0, sizeof m.digests);

	return kvk_gpu_digest(m.gpu, m.ranges, m.count, m.stream, m.digests);
}

static void check(void)
{
	expect();
	assert_int_equal(digest(), KV_OK);
	assert_memory_equal(m.digests, m.expected, m.count * sizeof m.digests[0]);
}

static void draw(kv_test_rng_t *rng)
{
	static const uint64_t len[] = {0,    1,    63,   240,   241,   255,   256,   257,
				       4095, 4096, 4097, 16383, 16384, 16385, 32768, 100000};

	for (size_t i = 0; i < KV_COUNT_OF(len); i++) {
		add(kv_test_below(rng, BYTES - len[i]), len[i]);
	}
	add(BYTES, 0);
	for (int i = 0; i < 30; i++) {
		const uint64_t bytes = kv_test_below(rng, 200000);

		add(kv_test_below(rng, BYTES - bytes), bytes);
	}
	add(BYTES - 77, 77); /* the end of an allocation */
}

KV_TEST(p1_digests_are_those_of_the_cpu)
{
	kv_test_rng_t rng = {kv_test_seed()};

	start(&rng, 0);
	check(); /* none */
	add(5, 0);
	check();
	draw(&rng);
	check();
	assert_int_equal(fake_cuda_launches(), 1);
	stop();
}

/* Batches end between ranges, in them, and where ranges are of nothing. */
KV_TEST(p1_batches_join_to_the_same_digests)
{
	kv_test_rng_t rng = {kv_test_seed()};

	start(&rng, FEW);
	while (m.count + 100 < MOST) {
		const uint64_t bytes =
			kv_test_below(&rng, 50) == 0 ? kv_test_below(&rng, 5 * KVK_PIECE) : kv_test_below(&rng, 3);

		add(kv_test_below(&rng, BYTES - bytes), bytes);
	}
	add(0, BYTES);
	add(3, BYTES - 3);
	check();
	assert_true(fake_cuda_launches() > 10);
	fake_cuda_limit_pinned(FEW - 1);
	assert_int_equal(digest(), KV_ERR_NOMEM);
	stop();
}

static void write_bytes(void *args)
{
	memcpy((void *)(uintptr_t)m.at, args, 100);
}

/* What the stream has still to do is in the digest. */
KV_TEST(p1_digests_come_behind_what_the_stream_has)
{
	kv_test_rng_t rng = {kv_test_seed()};
	uint8_t *bytes = malloc(100);

	assert_non_null(bytes);
	start(&rng, 0);
	kv_test_fill(&rng, bytes, 100);
	fake_cuda_call(m.stream, write_bytes, bytes);
	add(0, 1000);
	assert_int_equal(digest(), KV_OK);
	expect();
	assert_memory_equal(m.digests, m.expected, sizeof m.digests[0]);
	stop();
}

KV_TEST(p10_what_cannot_be_digested_is_refused)
{
	kv_test_rng_t rng = {kv_test_seed()};
	const kvk_range_t wrong[] = {{0, 1}, {UINT64_MAX, 2}, {0, UINT64_MAX}, {(uint64_t)(uintptr_t)&rng, 8}};

	start(&rng, 0);
	for (size_t i = 0; i < KV_COUNT_OF(wrong); i++) {
		assert_int_equal(kvk_gpu_digest(m.gpu, &wrong[i], 1, m.stream, m.digests), KV_ERR_ARG);
	}
	add(BYTES - 10, 10);
	m.ranges[0].bytes++; /* beyond the allocation */
	assert_int_equal(digest(), KV_ERR_ARG);
	m.ranges[0].bytes--;
	fake_cuda_capture(m.stream, 0);
	assert_int_equal(digest(), KV_ERR_UNSUPPORTED);
	assert_true(fake_cuda_captured(m.stream));
	check();
	stop();

	gpu_rig_init(&m.rig, NULL);
	m.rig.config.image = "no image";
	m.gpu = gpu_rig_open(&m.rig);
	assert_int_equal(digest(), KV_ERR_UNSUPPORTED);
	assert_true(strlen(kvk_gpu_last_error()) > 10);
	gpu_rig_fini(&m.rig);
}

/* Each call of the driver, once and for ever after: an error or the right digests, nothing stays, and the next is
 * right. */
KV_TEST(p6_any_call_of_the_driver_may_fail)
{
	static const uint64_t run[] = {1, UINT64_C(1) << 40};
	kv_test_rng_t rng = {kv_test_seed()};

	for (size_t r = 0; r < KV_COUNT_OF(run); r++) {
		int failed = 1;

		for (uint64_t n = 1; failed; n++) {
			const uint64_t seed = kv_test_rand(&rng);
			fake_cuda_live_t before, after;
			kv_status_t status;

			start(&(kv_test_rng_t){seed}, FEW);
			add(1, 100);
			add(0, 150 * KVK_PIECE); /* three batches */
			add(0, 0);
			expect();
			before = fake_cuda_live();
			fake_cuda_fail_run(n, run[r]);
			status = digest();
			failed = fake_cuda_failed();
			fake_cuda_fail_nth(0);
			after = fake_cuda_live();
			assert_int_equal(after.pinned, before.pinned);
			assert_int_equal(after.events, before.events);
			assert_true(status == KV_OK || status == KV_ERR_IO || status == KV_ERR_ARG);
			assert_true(failed || status == KV_OK);
			if (status == KV_OK) {
				assert_memory_equal(m.digests, m.expected, m.count * sizeof m.digests[0]);
			} else {
				assert_true(strlen(kvk_gpu_last_error()) > 10);
			}
			check();
			stop();
		}
	}
}
