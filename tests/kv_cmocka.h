/* kv_cmocka.h -- cmocka with the headers it wants, in the order it wants; and tests that register themselves.
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
 * A test runs in its place in the file, between the fixtures behind its name, if there are any.
 * A program without a main() has that of kv_main.c. KV_TEST_MAIN() is one with fixtures before the first test and
 * behind the last one, KV_TEST_MAIN_EACH() one with fixtures around each. A main() with more to do calls
 * kv_test_run().
 * KV_TEST_ONLY in the environment names the tests that run, by a part of their names.
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

#define KV_TEST_MAX 512u

typedef struct kv_test_place {
	const char *file;
	int line;
} kv_test_place_t;

/* One of each in a program, however many files include this. */
__attribute__((weak)) struct CMUnitTest kv_test_table[KV_TEST_MAX];
__attribute__((weak)) kv_test_place_t kv_test_places[KV_TEST_MAX];
__attribute__((weak)) size_t kv_test_entries;

/* In the order of the file: that of its constructors is the compiler's. */
static inline void kv_test_add(struct CMUnitTest test, const char *file, int line)
{
	const char *only = getenv("KV_TEST_ONLY");
	size_t at = kv_test_entries;

	if (only && !strstr(test.name, only)) {
		return;
	}
	if (at == KV_TEST_MAX) {
		abort();
	}
	for (; at > 0 && kv_test_places[at - 1].line > line && strcmp(kv_test_places[at - 1].file, file) == 0; at--) {
		kv_test_table[at] = kv_test_table[at - 1];
		kv_test_places[at] = kv_test_places[at - 1];
	}
	kv_test_table[at] = test;
	kv_test_places[at] = (kv_test_place_t){file, line};
	kv_test_entries++;
}

/* All tests of the program between the set-up and the tear-down of all; NULL: none. The exit status. */
static inline int kv_test_run(CMFixtureFunction setup, CMFixtureFunction teardown)
{
	return _cmocka_run_group_tests("tests", kv_test_table, kv_test_entries, setup, teardown);
}

/* The same with fixtures around each test that has none of its own. */
static inline int kv_test_run_each(CMFixtureFunction setup, CMFixtureFunction teardown)
{
	for (size_t i = 0; i < kv_test_entries; i++) {
		struct CMUnitTest *test = &kv_test_table[i];

		test->setup_func = test->setup_func ? test->setup_func : setup;
		test->teardown_func = test->teardown_func ? test->teardown_func : teardown;
	}

	return kv_test_run(NULL, NULL);
}

/* Another entry of the table: the members of its CMUnitTest. `id` is a word that nothing else in the file has. */
#define KV_TEST_ADD(id, ...)                                                                                           \
	__attribute__((constructor)) static void id##_add(void)                                                        \
	{                                                                                                              \
		kv_test_add((struct CMUnitTest){__VA_ARGS__}, __FILE__, __LINE__);                                     \
	}

#define KV_JOIN_(a, b) a##b
#define KV_JOIN(a, b)  KV_JOIN_(a, b)
#define KV_TEST_ID     KV_JOIN(test_of_line_, __LINE__)

#define KV_TEST(...) KV_TEST_CASE(__VA_ARGS__, NULL, NULL, )
#define KV_TEST_CASE(name_, setup_, teardown_, ...)                                                                    \
	static void name_(void **);                                                                                    \
	KV_TEST_ADD(name_, .name = #name_, .test_func = name_, .setup_func = setup_, .teardown_func = teardown_)       \
	static void name_(void **state_ __attribute__((unused)))

/* A test that `begin;` precedes and `end;` follows when it has passed. */
#define KV_TEST_BETWEEN(name, begin, end)                                                                              \
	static void name##_between(void);                                                                              \
	KV_TEST(name)                                                                                                  \
	{                                                                                                              \
		begin;                                                                                                 \
		name##_between();                                                                                      \
		end;                                                                                                   \
	}                                                                                                              \
	static void name##_between(void)

#define KV_FIXTURE(name_)                                                                                              \
	static void name_##_body_(void);                                                                               \
	static int name_(void **state_ __attribute__((unused)))                                                        \
	{                                                                                                              \
		name_##_body_();                                                                                       \
		return 0;                                                                                              \
	}                                                                                                              \
	static void name_##_body_(void)

/* The program has nothing but tests. */
#define KV_TEST_MAIN(setup_, teardown_)                                                                                \
	int main(void)                                                                                                 \
	{                                                                                                              \
		return kv_test_run(setup_, teardown_);                                                                 \
	}

#define KV_TEST_MAIN_EACH(setup_, teardown_)                                                                           \
	int main(void)                                                                                                 \
	{                                                                                                              \
		return kv_test_run_each(setup_, teardown_);                                                            \
	}

/* The same for a program whose argument is the path of another, which `path_` is set to. */
#define KV_TEST_MAIN_OF(path_, setup_, teardown_)                                                                      \
	int main(int argc, char **argv)                                                                                \
	{                                                                                                              \
		if (argc != 2) {                                                                                       \
			return 64;                                                                                     \
		}                                                                                                      \
		(path_) = argv[1];                                                                                     \
                                                                                                                       \
		return kv_test_run_each(setup_, teardown_);                                                            \
	}

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

#endif
