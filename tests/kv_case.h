/* kv_case.h -- the cases of a test program, listed where they are written. They run in that order.
 *
 *     KV_CASE(p1_what_was_put_is_read_back)
 *     {
 *     	...
 *     }
 *
 *     KV_CASES_MAIN(setup, teardown)
 *
 * Setup and teardown surround each case. A folder may add forms of its own with KV_CASE_ADD. Include it in the source of
 * the program that has main(). */
#ifndef KV_CASE_H
#define KV_CASE_H

#include "kv_cmocka.h"

#include <stdlib.h>

#define KV_CASES_MAX 64

static struct CMUnitTest kv_cases[KV_CASES_MAX];
static int kv_case_lines[KV_CASES_MAX], kv_case_count;

/* By its line: compilers call constructors in any order. */
static inline void kv_case_add(int line, struct CMUnitTest test)
{
	int at = kv_case_count++;

	if (at == KV_CASES_MAX) {
		abort();
	}
	for (; at > 0 && kv_case_lines[at - 1] > line; at--) {
		kv_cases[at] = kv_cases[at - 1];
		kv_case_lines[at] = kv_case_lines[at - 1];
	}
	kv_cases[at] = test;
	kv_case_lines[at] = line;
}

/* Another case, before main() runs: the members of its CMUnitTest. `id` is a word that no other case of the program has. */
#define KV_CASE_ADD(id, ...)                                                                                           \
	__attribute__((constructor)) static void id##_add(void)                                                        \
	{                                                                                                              \
		kv_case_add(__LINE__, (struct CMUnitTest){__VA_ARGS__});                                               \
	}

#define KV_JOIN_(a, b) a##b
#define KV_JOIN(a, b)  KV_JOIN_(a, b)
#define KV_CASE_ID     KV_JOIN(case_of_line_, __LINE__)

typedef struct kv_case {
	void (*run)(void);
} kv_case_t;

static inline void kv_case_run(void **state)
{
	((const kv_case_t *)*state)->run();
}

/* A setup of its own; NULL: that of KV_CASES_MAIN. */
#define KV_CASE_WITH(function, setup)                                                                                  \
	static void function(void);                                                                                    \
	static kv_case_t function##_case = {function};                                                                 \
	KV_CASE_ADD(function, .name = #function, .test_func = kv_case_run, .setup_func = setup,                        \
		    .initial_state = &function##_case)                                                                 \
	static void function(void)
#define KV_CASE(function) KV_CASE_WITH(function, NULL)

static inline int kv_cases_run(const char *program, CMFixtureFunction setup, CMFixtureFunction teardown)
{
	for (int i = 0; i < kv_case_count; i++) {
		kv_cases[i].setup_func = kv_cases[i].setup_func ? kv_cases[i].setup_func : setup;
		kv_cases[i].teardown_func = kv_cases[i].teardown_func ? kv_cases[i].teardown_func : teardown;
	}

	return _cmocka_run_group_tests(program, kv_cases, (size_t)kv_case_count, NULL, NULL);
}

#define KV_CASES_MAIN(setup, teardown)                                                                                 \
	int main(int argc, char **argv)                                                                                \
	{                                                                                                              \
		(void)argc;                                                                                            \
                                                                                                                       \
		return kv_cases_run(argv[0], setup, teardown);                                                         \
	}

/* Of a program whose argument is the path of another, which `path` is set to. */
#define KV_CASES_MAIN_OF(path, setup, teardown)                                                                        \
	int main(int argc, char **argv)                                                                                \
	{                                                                                                              \
		if (argc != 2) {                                                                                       \
			return 64;                                                                                     \
		}                                                                                                      \
		(path) = argv[1];                                                                                      \
                                                                                                                       \
		return kv_cases_run(argv[0], setup, teardown);                                                         \
	}

#endif
