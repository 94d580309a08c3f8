/* Elementary functions in a fixed order of IEEE operations. */
#include "kve/real.h"

#define LN2_HIGH     6.93147180369123816490e-01 /* the last bits are zero: n * LN2_HIGH is exact for small n */
#define LN2_LOW      1.90821492927058770002e-10
#define HALF_PI_HIGH 1.57079632673412561417e+00
#define HALF_PI_LOW  6.07710050650619224932e-11

/* Nearest integer by adding 1.5 x 2^52. */
static double nearest(double x)
{
	const double shift = 6755399441055744.0;
	volatile double moved = x + shift;

	return moved - shift;
}

double kve_exp64(double x)
{
	double n = nearest(x * 1.44269504088896338700);
	double r = (x - n * LN2_HIGH) - n * LN2_LOW;
	double sum = 1.0;
	int64_t bits = ((int64_t)n + 1023) * (INT64_C(1) << 52);
	double scale;

	for (int i = 18; i >= 1; i--) {
		sum = 1.0 + sum * r / (double)i;
	}

	memcpy(&scale, &bits, sizeof scale);

	return sum * scale;
}

double kve_log64(double x)
{
	uint64_t bits;
	double m, n, z, z2, sum = 0.0;

	memcpy(&bits, &x, sizeof bits);
	n = (double)((int64_t)(bits >> 52) - 1023);
	bits = (bits & ((UINT64_C(1) << 52) - 1)) | (UINT64_C(1023) << 52);
	memcpy(&m, &bits, sizeof m);

	/* log m = 2 artanh((m - 1) / (m + 1)), m in [1, 2): z is at most 1/3 */
	z = (m - 1.0) / (m + 1.0);
	z2 = z * z;
	for (int i = 33; i >= 1; i -= 2) {
		sum = sum * z2 + 1.0 / (double)i;
	}

	return n * LN2_HIGH + (n * LN2_LOW + 2.0 * z * sum);
}

void kve_sincos64(double x, double *p_sin, double *p_cos)
{
	double n = nearest(x * 0.63661977236758134308);
	double r = (x - n * HALF_PI_HIGH) - n * HALF_PI_LOW;
	double r2 = r * r;
	double s = 1.0, c = 1.0;
	int64_t quadrant = (int64_t)n & 3;

	for (int i = 20; i >= 2; i -= 2) {
		s = 1.0 - s * r2 / (double)(i * (i + 1));
		c = 1.0 - c * r2 / (double)((i - 1) * i);
	}
	s *= r;

	switch (quadrant) {
	case 0:
		*p_sin = s;
		*p_cos = c;
		break;
	case 1:
		*p_sin = c;
		*p_cos = -s;
		break;
	case 2:
		*p_sin = -s;
		*p_cos = -c;
		break;
	default:
		*p_sin = -c;
		*p_cos = s;
		break;
	}
}
