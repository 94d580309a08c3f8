/* Rotary position embedding. Pair i of a head turns by position / theta^(2 i / head_dim). */
#include "kve/ops.h"
#include "kve/real.h"

void kve_rope_table(const kve_config_t *config, float *table)
{
	const uint32_t half = config->head_dim / 2;
	const double log_theta = kve_log64((double)config->rope_theta);

	for (uint32_t i = 0; i < half; i++) {
		const double frequency = kve_exp64(-log_theta * (double)(2 * i) / (double)config->head_dim);

		for (uint32_t p = 0; p < config->max_tokens; p++) {
			float *pair = table + ((size_t)p * half + i) * 2;
			double s, c;

			kve_sincos64((double)p * frequency, &s, &c);
			pair[0] = (float)c;
			pair[1] = (float)s;
		}
	}
}

static void rotate_head(const float *rotation, float *x, uint32_t half)
{
	for (uint32_t i = 0; i < half; i++) {
		const float c = rotation[(size_t)2 * i];
		const float s = rotation[(size_t)2 * i + 1];
		const float a = x[i];
		const float b = x[i + half];

		x[i] = a * c - b * s;
		x[i + half] = b * c + a * s;
	}
}

void kve_rope(const kve_config_t *config, const float *table, float *x, uint32_t rows, uint32_t heads, uint32_t start)
{
	const uint32_t dim = config->head_dim;

	for (uint32_t r = 0; r < rows; r++) {
		const float *rotation = table + (size_t)(start + r) * dim;

		for (uint32_t h = 0; h < heads; h++) {
			rotate_head(rotation, x + ((size_t)r * heads + h) * dim, dim / 2);
		}
	}
}
