/* kve/real.h -- exp, sin and cos from additions and multiplications alone, so that every machine and compiler gets the
 * same bits. */
#ifndef KVE_REAL_H
#define KVE_REAL_H

#include <stdint.h>
#include <string.h>

/* e to the x in double, good to about 1e-15; |x| <= 700. */
double kve_exp64(double x);
/* Natural logarithm of a positive normal number, good to about 1e-14. */
double kve_log64(double x);
/* Sine and cosine, good to about 1e-12 for |x| <= 1e6. */
void kve_sincos64(double x, double *p_sin, double *p_cos);

/* e to the x in single precision, good to about 2e-7; 0 below -87, clamped above 87. Inline and without branches, so
 * that loops over it become vector code. */
static inline float kve_exp32(float x)
{
	const float shift = 12582912.0f; /* 1.5 x 2^23: adding it rounds to an integer */
	float top = x > 87.0f ? 87.0f : x;
	float y = top < -87.0f ? -87.0f : top;
	float n = (y * 1.44269504f + shift) - shift;
	float r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
	float p = 1.0f + r * (1.0f + r * (0.5f + r * (0.16666667f +
						      r * (0.041666667f + r * (0.0083333333f + r * 0.0013888889f)))));
	int32_t bits = ((int32_t)n + 127) * 8388608;
	float scale;

	memcpy(&scale, &bits, sizeof scale);

	return x < -87.0f ? 0.0f : p * scale;
}

#endif
