/* Digests of whole files and of memory: every byte counts, however many threads read; threads that read files yield to
 * all others. */
#include "kv_cmocka.h"
#include "kv_test.h"
#include "kvx_digest.h"

#include "kv/types.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <xxhash.h>

#define CHUNK KVX_DIGEST_CHUNK
#define LARGE (2 * CHUNK + 12345)

typedef struct watch {
	int fd;
	uint64_t cut;          /* the file is cut to this many bytes when it is asked first; 0: not */
	_Atomic uint32_t asks; /* so often, */
	uint32_t most;         /* then it is cancelled; 0: never */
	_Atomic int hasty;     /* somebody asks who does not give way */
} watch_t;

static uint8_t *memory; /* of the large file */

static int make_file(const uint8_t *bytes, uint64_t len)
{
	char path[] = "/tmp/kvx-digest-XXXXXX";
	const int fd = mkstemp(path);

	assert_true(fd >= 0);
	(void)unlink(path);
	for (uint64_t at = 0; at < len;) {
		const ssize_t n = pwrite(fd, bytes + at, (size_t)(len - at), (off_t)at);

		assert_true(n > 0);
		at += (uint64_t)n;
	}

	return fd;
}

/* As the header says it is made. */
static void expect(const uint8_t *bytes, uint64_t len, uint8_t digest[KVX_DIGEST_BYTES])
{
	uint8_t all[3 * sizeof(XXH128_canonical_t) + 8];
	XXH128_canonical_t canonical;
	size_t used = 0;

	for (uint64_t at = 0; at < len; at += CHUNK) {
		XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes + at, len - at < CHUNK ? len - at : CHUNK));
		memcpy(all + used, canonical.digest, sizeof canonical.digest);
		used += sizeof canonical.digest;
	}
	memcpy(all + used, &len, sizeof len);
	XXH128_canonicalFromHash(&canonical, XXH3_128bits(all, used + sizeof len));
	memcpy(digest, canonical.digest, KVX_DIGEST_BYTES);
}

static void digest_of(int fd, uint32_t threads, uint8_t digest[KVX_DIGEST_BYTES])
{
	const kvx_digest_config_t config = {.struct_size = sizeof config, .fd = fd, .threads = threads};

	assert_int_equal(kvx_digest_file(&config, digest), KVC_OK);
}

KV_TEST(p1_a_digest_is_of_all_bytes_whatever_reads_them)
{
	static const uint64_t len[] = {0, 1, 4095, (UINT64_C(256) << 10) + 1, CHUNK - 1, CHUNK, CHUNK + 1, LARGE};
	uint8_t expected[KVX_DIGEST_BYTES], digest[KVX_DIGEST_BYTES];

	for (size_t i = 0; i < sizeof len / sizeof len[0]; i++) {
		const int fd = make_file(memory, len[i]);

		expect(memory, len[i], expected);
		for (uint32_t threads = 0; threads < 4; threads++) {
			digest_of(fd, threads, digest);
			assert_memory_equal(digest, expected, sizeof digest);
		}
		(void)close(fd);
	}
}

static int ask_cancelled(void *ctx)
{
	watch_t *watch = ctx;
	const uint32_t asks = atomic_fetch_add(&watch->asks, 1) + 1;

	if (sched_getscheduler(0) != SCHED_IDLE || syscall(SYS_ioprio_get, 1, 0) != 3 << 13) {
		atomic_store(&watch->hasty, 1);
	}
	if (watch->cut && asks == 1) {
		assert_int_equal(ftruncate(watch->fd, (off_t)watch->cut), 0);
	}

	return watch->most && asks >= watch->most;
}

static kvc_status_t watched(int fd, watch_t *watch)
{
	const kvx_digest_config_t config = {
		.struct_size = sizeof config, .fd = fd, .threads = 2, .cancelled = ask_cancelled, .ctx = watch};
	uint8_t digest[KVX_DIGEST_BYTES];

	watch->fd = fd;

	return kvx_digest_file(&config, digest);
}

KV_TEST(p7_digest_threads_yield_to_all_others)
{
	const int fd = make_file(memory, LARGE);
	watch_t watch = {0}, cancelled = {.most = 5};

	assert_int_equal(watched(fd, &watch), KVC_OK);
	assert_true(atomic_load(&watch.asks) > 1);
	assert_int_equal(atomic_load(&watch.hasty), 0);
	assert_int_not_equal(sched_getscheduler(0), SCHED_IDLE); /* the caller stays as it was */

	/* One that is cancelled ends at the next piece; the other thread may be asking at that moment. */
	assert_int_equal(watched(fd, &cancelled), KVC_ERR_CLOSED);
	assert_true(atomic_load(&cancelled.asks) <= 6);
	(void)close(fd);
}

KV_TEST(p10_what_cannot_be_read_whole_has_no_digest)
{
	const kvx_digest_config_t old = {.struct_size = 4};
	watch_t cut = {.cut = CHUNK / 2}, none = {0};
	uint8_t digest[KVX_DIGEST_BYTES];
	const int fd = make_file(memory, LARGE);
	int ends[2], others[2];
	char path[32];

	assert_int_equal(watched(fd, &cut), KVC_ERR_FAULT);
	assert_int_equal(errno, 0);
	(void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	others[0] = open(path, O_WRONLY);
	assert_int_equal(watched(others[0], &none), KVC_ERR_FAULT);
	assert_int_equal(errno, EBADF);
	(void)close(fd);
	assert_int_equal(watched(fd, &none), KVC_ERR_ARG); /* closed */

	others[1] = open("/tmp", O_RDONLY | O_DIRECTORY);
	assert_int_equal(watched(others[1], &none), KVC_ERR_ARG);
	assert_int_equal(pipe(ends), 0);
	assert_int_equal(watched(ends[0], &none), KVC_ERR_ARG);
	for (int i = 0; i < 2; i++) {
		(void)close(ends[i]);
		(void)close(others[i]);
	}
	assert_int_equal(kvx_digest_file(NULL, digest), KVC_ERR_ARG);
	assert_int_equal(kvx_digest_file(&old, digest), KVC_ERR_ARG);
}

/* ---- memory ---------------------------------------------------------------------------------- */

#define MAX_RANGES 40u

/* As kvk/digest_range.h says it is made. */
static void expect_range(kvk_range_t range, uint8_t digest[KVX_DIGEST_BYTES])
{
	const uint8_t *bytes = (const uint8_t *)(uintptr_t)range.at;
	XXH3_state_t *state = XXH3_createState();
	XXH128_canonical_t canonical;

	assert_non_null(state);
	(void)XXH3_128bits_reset(state);
	for (uint64_t at = 0; at < range.bytes; at += 16384) {
		const uint64_t n = range.bytes - at < 16384 ? range.bytes - at : 16384;
		uint8_t piece[16384] = {0};
		uint64_t one;

		memcpy(piece, bytes + at, n);
		one = XXH3_64bits(piece, (n + 255) / 256 * 256);
		(void)XXH3_128bits_update(state, &one, sizeof one);
	}
	(void)XXH3_128bits_update(state, &range.bytes, sizeof range.bytes);
	XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state));
	memcpy(digest, canonical.digest, KVX_DIGEST_BYTES);
	(void)XXH3_freeState(state);
}

/* Ranges of memory allocated for each, so that a sanitizer sees who reads beyond. */
KV_TEST(p1_a_digest_of_memory_is_of_each_range_whatever_reads_it)
{
	static const uint64_t len[] = {0,    1,    63,   240,   241,   255,   256,   257,     4095,
				       4096, 4097, 8192, 16383, 16384, 16385, 32768, 3000000, 5 << 20};
	uint8_t expected[MAX_RANGES][KVX_DIGEST_BYTES], digests[MAX_RANGES][KVX_DIGEST_BYTES];
	kv_test_rng_t rng = {.state = kv_test_seed()};
	kvk_range_t ranges[MAX_RANGES];
	void *own[MAX_RANGES];
	uint32_t count = 0;

	for (; count < MAX_RANGES; count++) {
		const uint64_t n = count < KV_COUNT_OF(len) ? len[count] : kv_test_below(&rng, 100000);
		const uint64_t shift = kv_test_below(&rng, 64);

		own[count] = malloc(shift + n + 1);
		assert_non_null(own[count]);
		ranges[count] = (kvk_range_t){(uint64_t)(uintptr_t)own[count] + shift, n};
		kv_test_fill(&rng, (uint8_t *)own[count] + shift, n);
		expect_range(ranges[count], expected[count]);
	}
	for (uint32_t threads = 0; threads < 4; threads++) {
		memset(digests, 0, sizeof digests);
		assert_int_equal(kvx_digest_memory(ranges, count, threads, digests), KVC_OK);
		assert_memory_equal(digests, expected, sizeof digests);
	}
	assert_int_equal(kvx_digest_memory(ranges, 0, 0, digests), KVC_OK);
	while (count > 0) {
		free(own[--count]);
	}
}

KV_TEST(p10_memory_that_cannot_be_is_refused)
{
	const kvk_range_t beyond = {UINT64_MAX - 5, 7};
	uint8_t digest[1][KVX_DIGEST_BYTES];

	assert_int_equal(kvx_digest_memory(&beyond, 1, 1, digest), KVC_ERR_ARG);
#ifndef KVD_SANITIZE /* whose allocator ends the process at such a size */
	assert_int_equal(kvx_digest_memory(&(kvk_range_t){0, UINT64_MAX}, 1, 1, digest), KVC_ERR_NOMEM);
#endif
}

int main(void)
{
	kv_test_rng_t rng = {.state = kv_test_seed()};
	int failed;

	/* Threads of SCHED_IDLE share the processor with their session: one of its own has no other busy processes. */
	(void)setsid();
	memory = malloc(LARGE);
	if (memory) {
		kv_test_fill(&rng, memory, LARGE);
	}
	failed = !memory || kv_test_run(NULL, NULL);
	free(memory);

	return failed;
}
