/* kv_cmocka.h -- cmocka with the headers it wants, in the order it wants; and tests that list themselves.
 *
 *     KV_FIXTURE(set_up)
 *     {
 *         ...
 *     }
 *
 *     KV_TEST(p1_a_hit_is_right, set_up, tear_down)
 *     {
 *         ...
 *     }
 *
 *     KV_TEST_MAIN(NULL, NULL)
 *
 * KV_TEST_ONLY in the environment names the tests that run, by a part of their names.
 * A test runs in its place in the file, between the fixtures behind its name, if there are any. KV_TEST_MAIN() is the program; its
 * fixtures stand before the first test and behind the last one.
 */
#ifndef KV_CMOCKA_H
#define KV_CMOCKA_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define KV_TEST(...) KV_TEST_CASE(__VA_ARGS__, NULL, NULL, )
#define KV_TEST_CASE(name_, setup_, teardown_, ...)                                                                    \
	static void name_(void **);                                                                                    \
	static kv_test_case_t name_##_case_ = {.test = {#name_, name_, setup_, teardown_, NULL}, .line = __LINE__};    \
	__attribute__((constructor)) static void name_##_add_(void)                                                    \
	{                                                                                                              \
		kv_test_add(&name_##_case_);                                                                           \
	}                                                                                                              \
	static void name_(void **state_ __attribute__((unused)))

#define KV_FIXTURE(name_)                                                                                              \
	static void name_##_body_(void);                                                                               \
	static int name_(void **state_ __attribute__((unused)))                                                        \
	{                                                                                                              \
		name_##_body_();                                                                                       \
		return 0;                                                                                              \
	}                                                                                                              \
	static void name_##_body_(void)

#define KV_TEST_MAIN(setup_, teardown_)                                                                                \
	int main(void)                                                                                                 \
	{                                                                                                              \
		return KV_TEST_RUN(setup_, teardown_);                                                                 \
	}

/* Where main() has something else to do as well. */
#define KV_TEST_RUN(setup_, teardown_)                                                                                 \
	_cmocka_run_group_tests("tests", kv_test_list_, kv_test_sort(), (setup_), (teardown_))

/* Wait until it is so: a minute at least, in which it is looked at every millisecond. */
#define KV_AWAIT(condition_)                                                                                           \
	do {                                                                                                           \
		uint32_t looks_ = 0;                                                                                   \
		while (!(condition_)) {                                                                                \
			if (++looks_ > 60000u) {                                                                       \
				fail_msg("never: %s", #condition_);                                                    \
			}                                                                                              \
			(void)usleep(1000);                                                                            \
		}                                                                                                      \
	} while (0)

typedef struct kv_test_case {
	struct CMUnitTest test;
	int line;
	struct kv_test_case *next;
} kv_test_case_t;

static kv_test_case_t *kv_test_cases_;
static struct CMUnitTest kv_test_list_[64];

/* In the order of the file: that of constructors is the compiler's. */
static inline void kv_test_add(kv_test_case_t *added)
{
	kv_test_case_t **at = &kv_test_cases_;

	while (*at && (*at)->line < added->line) {
		at = &(*at)->next;
	}
	added->next = *at;
	*at = added;
}

static inline size_t kv_test_sort(void)
{
	const char *only = getenv("KV_TEST_ONLY");
	size_t n = 0;

	for (const kv_test_case_t *c = kv_test_cases_; c; c = c->next) {
		if (!only || strstr(c->test.name, only)) {
			kv_test_list_[n++] = c->test;
		}
	}

	return n;
}

#endif
