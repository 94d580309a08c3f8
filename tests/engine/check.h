/* check.h -- what every test of this folder includes: cmocka, and a generator seeded per test. */
#ifndef TESTS_ENGINE_CHECK_H
#define TESTS_ENGINE_CHECK_H

#include "kv_cmocka.h"

/* splitmix64 */
static inline uint64_t next_random(uint64_t *state)
{
	uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);

	return z ^ (z >> 31);
}

static inline uint32_t below(uint64_t *state, uint32_t n)
{
	return (uint32_t)(next_random(state) % n);
}

/* FNV-1a of raw bytes. */
static inline uint64_t hash_bytes(uint64_t hash, const void *data, size_t n)
{
	const uint8_t *p = data;

	for (size_t i = 0; i < n; i++) {
		hash = (hash ^ p[i]) * UINT64_C(0x100000001b3);
	}

	return hash;
}
#define HASH_START UINT64_C(0xcbf29ce484222325)

#endif
