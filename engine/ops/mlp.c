/* The element-wise ends of the network: SwiGLU, the greedy choice and its probability. */
#include "kve/ops.h"
#include "kve/real.h"

void kve_swiglu(float *gate, const float *up, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		gate[i] = gate[i] / (1.0f + kve_exp32(-gate[i])) * up[i];
	}
}

uint32_t kve_argmax(const float *x, uint32_t n)
{
	uint32_t best = 0;

	for (uint32_t i = 1; i < n; i++) {
		if (x[i] > x[best]) {
			best = i;
		}
	}

	return best;
}

double kve_log_probability(const float *x, uint32_t n, uint32_t i)
{
	const double max = (double)x[kve_argmax(x, n)];
	double sum = 0.0;

	for (uint32_t k = 0; k < n; k++) {
		const double below = (double)x[k] - max;

		sum += below < -700.0 ? 0.0 : kve_exp64(below);
	}

	return (double)x[i] - max - kve_log64(sum);
}
