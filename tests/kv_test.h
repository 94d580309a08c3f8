/* kv_test.h -- what tests of every part share: a deterministic environment, a seeded generator, an allocator whose n-th
 * call fails, temporary directories, and skipping with a reason. A header alone: include it, link nothing.
 *
 *     kv_test_env_t t;
 *     kv_test_env_init(&t);
 *     ... code under test takes &t.env ...
 *     assert_int_equal(kv_test_env_live(&t), 0);
 *
 * The seed is KVD_TEST_SEED from the environment, else a fixed one; it is printed, so that a failure can be run again.
 */
#ifndef KV_TEST_H
#define KV_TEST_H

#include "kv/env.h"
#include "kv/system.h"

#include <dirent.h>
#include <ftw.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#define KV_TEST_SEED    UINT64_C(0x6b76642d74657374)
#define KV_TEST_SKIPPED 77

/* ---- descriptors ----------------------------------------------------------------------------- */

/* Before main(), in every test: code of the daemon has the descriptors that the daemon gives itself. */
__attribute__((constructor)) static inline void kv_test_raise_files(void)
{
	kv_rlimit_raise_files();
}

/* ---- programs under test --------------------------------------------------------------------- */

/* A program of the build, by the path it was built at; in a bundle that is run elsewhere, the one of that name in
 * $KV_TEST_BIN. */
static inline const char *kv_test_program(const char *built)
{
	static char path[2][256];
	static unsigned turn;
	const char *folder = getenv("KV_TEST_BIN"), *name = strrchr(built, '/');

	if (!folder || !name) {
		return built;
	}
	turn ^= 1u;
	snprintf(path[turn], sizeof path[turn], "%s%s", folder, name);

	return path[turn];
}

/* ---- tables ---------------------------------------------------------------------------------- */

/* Short rows of a table: clang-format puts as many into a line as there is room for. */
#define KV_ROWS(...) __VA_ARGS__

/* ---- random numbers (splitmix64) ------------------------------------------------------------- */

typedef struct kv_test_rng {
	uint64_t state;
} kv_test_rng_t;

static inline uint64_t kv_test_rand(kv_test_rng_t *rng)
{
	uint64_t z = rng->state += UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);

	return z ^ (z >> 31);
}

/* 0 <= value < n; n > 0. */
static inline uint64_t kv_test_below(kv_test_rng_t *rng, uint64_t n)
{
	return kv_test_rand(rng) % n;
}

static inline void kv_test_fill(kv_test_rng_t *rng, void *out, size_t n)
{
	uint8_t *p = out;

	for (size_t i = 0; i < n; i++) {
		p[i] = (uint8_t)kv_test_rand(rng);
	}
}

/* The seed of this run; printed at the first call. */
static inline uint64_t kv_test_seed(void)
{
	static uint64_t seed;
	const char *text;

	if (seed == 0) {
		text = getenv("KVD_TEST_SEED");
		seed = text ? strtoull(text, NULL, 0) : KV_TEST_SEED;
		seed = seed ? seed : KV_TEST_SEED;
		printf("# seed: KVD_TEST_SEED=0x%" PRIx64 "\n", seed);
		fflush(stdout);
	}

	return seed;
}

/* ---- environment ----------------------------------------------------------------------------- */

/* Memory and log may be used from several threads; clock and generator belong to one. Do not move it after init. */
typedef struct kv_test_env {
	kv_env_t env;
	kv_test_rng_t rng;
	_Atomic uint64_t now_ns;
	_Atomic uint64_t calls;   /* alloc and resize so far */
	_Atomic uint64_t fail_at; /* this call (1 is the next after kv_test_fail_nth) answers NULL; 0: none */
	_Atomic uint64_t failed;  /* how many calls were made to fail */
	_Atomic int64_t live;     /* blocks not freed yet */
	_Atomic int64_t live_bytes;
	_Atomic uint64_t lines[4]; /* log lines by level */
	char last_line[1024];      /* the last line logged (one thread) */
	int echo;                  /* 1: print log lines; KVD_TEST_LOG in the environment sets it */
} kv_test_env_t;

/* Lies before each block; keeps 16-byte alignment. */
typedef struct kv_test_block {
	_Alignas(16) size_t bytes;
	uint64_t magic;
} kv_test_block_t;

#define KV_TEST_MAGIC UINT64_C(0x616c697665616c69)

static inline uint64_t kv_test_env_now(void *ctx)
{
	return atomic_load(&((kv_test_env_t *)ctx)->now_ns);
}

static inline void kv_test_env_random(void *ctx, void *out, size_t n)
{
	kv_test_fill(&((kv_test_env_t *)ctx)->rng, out, n);
}

static inline int kv_test_env_fails(kv_test_env_t *t)
{
	uint64_t call = atomic_fetch_add(&t->calls, 1) + 1;

	if (call != atomic_load(&t->fail_at)) {
		return 0;
	}
	atomic_fetch_add(&t->failed, 1);

	return 1;
}

static inline void *kv_test_env_alloc(void *ctx, size_t n)
{
	kv_test_env_t *t = ctx;
	kv_test_block_t *block;

	if (kv_test_env_fails(t) || n > SIZE_MAX - sizeof *block) {
		return NULL;
	}
	block = calloc(1, sizeof *block + n);
	if (!block) {
		return NULL;
	}
	block->bytes = n;
	block->magic = KV_TEST_MAGIC;
	atomic_fetch_add(&t->live, 1);
	atomic_fetch_add(&t->live_bytes, (int64_t)n);

	return block + 1;
}

static inline void kv_test_env_free(void *ctx, void *p)
{
	kv_test_env_t *t = ctx;
	kv_test_block_t *block = p;

	if (!p) {
		return;
	}
	block--;
	kv_assert(block->magic == KV_TEST_MAGIC); /* freed twice, or not from this environment */
	block->magic = 0;
	atomic_fetch_sub(&t->live, 1);
	atomic_fetch_sub(&t->live_bytes, (int64_t)block->bytes);
	free(block);
}

/* Always moves, fills what is new with 0xa5 and checks the caller's old_n: mistakes show. */
static inline void *kv_test_env_resize(void *ctx, void *p, size_t old_n, size_t n)
{
	const kv_test_block_t *old = p;
	uint8_t *fresh = kv_test_env_alloc(ctx, n);
	size_t kept = old_n < n ? old_n : n;

	if (!fresh) {
		return NULL;
	}
	memset(fresh, 0xa5, n);
	if (p) {
		kv_assert(old[-1].bytes == old_n);
		memcpy(fresh, p, kept);
		kv_test_env_free(ctx, p);
	}

	return fresh;
}

static inline void kv_test_env_log(void *ctx, kv_log_level_t level, const char *component, const char *line)
{
	kv_test_env_t *t = ctx;

	atomic_fetch_add(&t->lines[level], 1);
	snprintf(t->last_line, sizeof t->last_line, "%s", line);
	if (t->echo) {
		printf("# log %u %s: %s\n", (unsigned)level, component, line);
	}
}

/* A clock that starts at 1 s and stands still, a generator with this run's seed, an allocator that counts. */
static inline void kv_test_env_init(kv_test_env_t *t)
{
	memset(t, 0, sizeof *t);
	t->rng.state = kv_test_seed();
	atomic_store(&t->now_ns, UINT64_C(1000000000));
	t->echo = getenv("KVD_TEST_LOG") != NULL;
	t->env = (kv_env_t){
		.ctx = t,
		.now_ns = kv_test_env_now,
		.random = kv_test_env_random,
		.alloc = kv_test_env_alloc,
		.resize = kv_test_env_resize,
		.free = kv_test_env_free,
		.log = kv_test_env_log,
	};
}

static inline void kv_test_advance(kv_test_env_t *t, uint64_t ns)
{
	atomic_fetch_add(&t->now_ns, ns);
}

static inline int64_t kv_test_env_live(const kv_test_env_t *t)
{
	return atomic_load(&t->live);
}

/* Let the n-th allocation from now on fail (once); 0: none. */
static inline void kv_test_fail_nth(kv_test_env_t *t, uint64_t n)
{
	atomic_store(&t->failed, 0);
	atomic_store(&t->fail_at, n ? atomic_load(&t->calls) + n : 0);
}

/* Run the body once with each allocation failing in turn, until a run in which none had to fail:
 *
 *     KV_TEST_EACH_FAILURE(&t, n) {
 *         status = thing_create(&t.env, &thing);
 *         if (kv_test_failed(&t)) { assert_int_equal(status, KV_ERR_NOMEM); } else { thing_destroy(thing); }
 *         assert_int_equal(kv_test_env_live(&t), 0);
 *     }
 */
#define KV_TEST_EACH_FAILURE(t, n) for (uint64_t n = 1; kv_test_each(t, n); n++)

static inline int kv_test_failed(const kv_test_env_t *t)
{
	return atomic_load(&t->failed) != 0;
}

static inline int kv_test_each(kv_test_env_t *t, uint64_t n)
{
	if (n > 1 && !kv_test_failed(t)) {
		kv_test_fail_nth(t, 0);
		return 0;
	}
	kv_test_fail_nth(t, n);

	return 1;
}

/* ---- temporary directories ------------------------------------------------------------------- */

/* Make an empty directory (mode 0700) and write its path; ends the test program when that fails. Short enough for a
 * socket in it. */
static inline const char *kv_test_dir_make(char *out, size_t cap)
{
	const char *base = getenv("TMPDIR");
	int n = snprintf(out, cap, "%s/kvd-test-XXXXXX", base && *base && strlen(base) < 48 ? base : "/tmp");

	if (n < 0 || (size_t)n >= cap || !mkdtemp(out)) {
		perror("kv_test_dir_make");
		exit(1);
	}

	return out;
}

static inline int kv_test_remove_one(const char *path, const struct stat *st, int type, struct FTW *where)
{
	(void)st;
	(void)type;
	(void)where;

	return remove(path);
}

/* Remove the directory with all that is in it; follows no link and leaves no mount. */
static inline void kv_test_dir_remove(const char *path)
{
	nftw(path, kv_test_remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
}

/* ---- files and descriptors ------------------------------------------------------------------- */

/* A file of this text, in place of what was there. */
static inline void kv_test_write(const char *path, const char *text)
{
	FILE *file = fopen(path, "we");

	kv_assert(file && fputs(text, file) >= 0);
	kv_assert(fclose(file) == 0);
}

/* What is in a file, as far as it has room, as a string: its length. "": there is none. */
static inline size_t kv_test_read(const char *path, char *out, size_t cap)
{
	FILE *file = fopen(path, "re");
	size_t len = file ? fread(out, 1, cap - 1, file) : 0;

	out[len] = '\0';
	if (file) {
		fclose(file);
	}

	return len;
}

/* Descriptors of the process whose target's name has this in it; "": all. */
static inline uint32_t kv_test_count_fds(pid_t pid, const char *of)
{
	char path[64], target[128];
	const struct dirent *entry;
	uint32_t n = 0;
	DIR *dir;

	snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
	dir = opendir(path);
	while (dir && (entry = readdir(dir))) {
		const ssize_t len = readlinkat(dirfd(dir), entry->d_name, target, sizeof target - 1);

		target[len > 0 ? len : 0] = '\0';
		n += len > 0 && strstr(target, of) != NULL;
	}
	if (dir) {
		closedir(dir);
	}

	return n;
}

/* ---- skipping -------------------------------------------------------------------------------- */

/* The whole program cannot run here: say why and end with 77, which ctest counts as skipped. */
static inline void __attribute__((format(printf, 1, 2), noreturn)) kv_test_skip(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	printf("# SKIP: ");
	vprintf(format, args);
	printf("\n");
	va_end(args);
	fflush(stdout);
	_exit(KV_TEST_SKIPPED);
}

#endif
