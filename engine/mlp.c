/* The element-wise ends of the network: SwiGLU and the greedy choice. */
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
