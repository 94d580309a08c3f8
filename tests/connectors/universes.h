/* universes.h -- tests that each live through seeded universes, one after the other: a test a profile.
 * KVD_TEST_SEED: another first seed; KVD_TEST_UNIVERSES: more of them.
 */
#ifndef TESTS_CONNECTORS_UNIVERSES_H
#define TESTS_CONNECTORS_UNIVERSES_H

#include "kv_cmocka.h"
#include "kv_test.h"

typedef struct universes {
	void (*run)(uint64_t seed, const void *profile);
	const void *profile;
	uint64_t seed; /* the first one, unless the environment has another; 0: that of all tests */
} universes_t;

static void universes_run(void **state)
{
	const universes_t *universes = *state;
	const char *count = getenv("KVD_TEST_UNIVERSES");
	const uint32_t n = count ? (uint32_t)strtoul(count, NULL, 0) : 1;
	const uint64_t first = universes->seed && !getenv("KVD_TEST_SEED") ? universes->seed : kv_test_seed();

	for (uint32_t i = 0; i < n; i++) {
		print_message("seed %lu\n", (unsigned long)(first + i));
		universes->run(first + i, universes->profile);
	}
}

/* The test of a profile, which is behind those that were added before. `universes` stays. */
static inline void universes_add(const char *name, const universes_t *universes)
{
	static int place;

	kv_test_add((struct CMUnitTest){.name = name,
					.test_func = universes_run,
					.initial_state = (void *)(uintptr_t)universes},
		    __FILE__, place++);
}

#endif
