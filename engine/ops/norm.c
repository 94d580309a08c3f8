/* Root-mean-square normalisation. */
#include "kve/ops.h"

#include <math.h>

void kve_rmsnorm(const float *x, uint32_t rows, uint32_t width, const float *gain, float eps, float *y)
{
	for (uint32_t r = 0; r < rows; r++) {
		const float *in = x + (size_t)r * width;
		float *out = y + (size_t)r * width;
		float sum = 0.0f;
		float scale;

		for (uint32_t i = 0; i < width; i++) {
			sum += in[i] * in[i];
		}

		scale = 1.0f / sqrtf(sum / (float)width + eps);
		for (uint32_t i = 0; i < width; i++) {
			out[i] = in[i] * scale * gain[i];
		}
	}
}
