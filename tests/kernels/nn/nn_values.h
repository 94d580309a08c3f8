/* What the tests of kvk/nn.h share: a twin, values by chance, and how near a result is to one in double. */
#ifndef TESTS_KERNELS_NN_VALUES_H
#define TESTS_KERNELS_NN_VALUES_H

#include "kv_cmocka.h"
#include "kv_test.h"

#include "kvk/nn.h"

#include <math.h>

static kvk_nn_t *nn;
static kv_test_rng_t rng;

static inline int open_twin(void **state)
{
	(void)state;
	rng.state = kv_test_seed();

	return kvk_nn_twin_open(&nn) == KV_OK ? 0 : -1;
}

static inline int close_twin(void **state)
{
	(void)state;
	kvk_nn_close(nn);

	return 0;
}

/* ---- values ---------------------------------------------------------------------------------- */

#define PAINT 0x5a

/* Memory without values yet; freed by the caller. */
static inline void *painted(size_t bytes)
{
	void *to = malloc(bytes + 64);

	assert_non_null(to);
	memset(to, PAINT, bytes + 64);

	return to;
}

static inline void assert_painted(const void *from, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++) {
		assert_int_equal(((const uint8_t *)from)[i], PAINT);
	}
}

/* Uniform in [-1, 1). */
static inline float any_value(void)
{
	return (float)kv_test_below(&rng, 1u << 24) * (1.0f / 8388608.0f) - 1.0f;
}

static inline kvk_bf16_t *any_bf16(size_t n)
{
	kvk_bf16_t *to = painted(n * sizeof *to);

	for (size_t i = 0; i < n; i++) {
		to[i] = kvk_bf16_round(any_value());
	}

	return to;
}

static inline float *any_floats(size_t n, float middle, float width)
{
	float *to = painted(n * sizeof *to);

	for (size_t i = 0; i < n; i++) {
		to[i] = middle + width * any_value();
	}

	return to;
}

static inline double real(kvk_bf16_t value)
{
	return (double)kvk_bf16_to_float(value);
}

static inline void assert_near(double got, double want, double relative)
{
	if (!(fabs(got - want) <= 2e-5 + relative * fabs(want))) {
		fail_msg("%.9g, not %.9g", got, want);
	}
}

/* One rounding to BF16. */
static inline void assert_rounded(kvk_bf16_t got, double want)
{
	assert_near(real(got), want, 1.0 / 256.0);
}

#endif
