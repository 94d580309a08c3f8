/* kv/env.h -- clock, randomness, memory and log, behind one small ops struct.
 *
 * The core and the storage code reach the outside world through this struct (and, for bytes, through kvs_tier_t), so
 * that tests can run the same code in a deterministic universe: a virtual clock, a seeded generator, an allocator whose
 * n-th call fails.
 */
#ifndef KV_ENV_H
#define KV_ENV_H

#include <stddef.h>
#include <stdint.h>

typedef enum kv_log_level { KV_LOG_ERROR, KV_LOG_WARN, KV_LOG_INFO, KV_LOG_DEBUG } kv_log_level_t;

typedef struct kv_env {
	void *ctx;
	/* CLOCK_MONOTONIC in nanoseconds. Never goes back. */
	uint64_t (*now_ns)(void *ctx);
	/* Fill n bytes with randomness fit for ids and secrets. */
	void (*random)(void *ctx, void *out, size_t n);
	/* n zeroed bytes, or NULL. */
	void *(*alloc)(void *ctx, size_t n);
	/* Grow or shrink; like realloc, new bytes are not zeroed. NULL leaves the old block untouched. */
	void *(*resize)(void *ctx, void *p, size_t old_n, size_t n);
	void (*free)(void *ctx, void *p);
	/* One line: level, component ("core", "nvme", ...), sentence with "key value" pairs. Must not block for
	 * long. */
	void (*log)(void *ctx, kv_log_level_t level, const char *component, const char *line);
} kv_env_t;

/* The real world: clock_gettime, getrandom or /dev/urandom, calloc, kv_log. */
extern const kv_env_t kv_env_posix;

static inline uint64_t kv_now_ns(const kv_env_t *env)
{
	return env->now_ns(env->ctx);
}
static inline void kv_random(const kv_env_t *env, void *out, size_t n)
{
	env->random(env->ctx, out, n);
}
static inline void *kv_alloc(const kv_env_t *env, size_t n)
{
	return env->alloc(env->ctx, n);
}
static inline void *kv_resize(const kv_env_t *env, void *p, size_t old_n, size_t n)
{
	return env->resize(env->ctx, p, old_n, n);
}
static inline void kv_free(const kv_env_t *env, void *p)
{
	if (p) {
		env->free(env->ctx, p);
	}
}

/* 0: the process gets random bytes, also later, when descriptors have run out. Else why it gets none, and the posix
 * environment would wait for ever: every program and library asks before its first kv_random(). */
int kv_random_error(void);
#define KV_RANDOM_REFUSED "the system refuses getrandom, and /dev/urandom is not there"

/* Format (at most 1,023 bytes are kept) and log one line through env. */
void kv_logf(const kv_env_t *env, kv_log_level_t level, const char *component, const char *format, ...)
	__attribute__((format(printf, 4, 5)));

/* An invariant of our own code is broken: say which and where on standard error and abort, in release builds too. Never
 * for input from a client, a peer, a file or a disk. */
#define kv_assert(condition) ((condition) ? (void)0 : kv_assert_failed(#condition, __FILE__, __LINE__))
_Noreturn void kv_assert_failed(const char *condition, const char *file, int line);

/* The same in code that runs inside an engine, which no mistake of ours may end: 1, or 0 when it is broken. The caller
 * then gives its work up; this counts, and logs the first. libkvc and libkvx detach when the count is not 0
 * (kvc_abandon()). */
#define kv_holds(condition) ((condition) ? 1 : (kv_invariant_broken(#condition, __FILE__, __LINE__), 0))
void kv_invariant_broken(const char *condition, const char *file, int line);
/* How many have been broken in this process; each library that has this code counts its own. Any thread. */
uint64_t kv_broken_count(void);

#endif
