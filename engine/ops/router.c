/* Which experts a token has, and how much of each. */
#include "kve/ops.h"
#include "kve/real.h"

/* The largest of p that is below `before` in (value, id) order: of equals the lowest id comes first. */
static uint32_t next_largest(const float *p, uint32_t n, uint32_t before)
{
	uint32_t best = n;

	for (uint32_t i = 0; i < n; i++) {
		const int is_left = before == n || p[i] < p[before] || (p[i] == p[before] && i > before);

		best = is_left && (best == n || p[i] > p[best]) ? i : best;
	}

	return best;
}

/* p = softmax(p). */
static void softmax(float *p, uint32_t n)
{
	const float max = p[kve_argmax(p, n)];
	float sum = 0.0f;

	for (uint32_t i = 0; i < n; i++) {
		p[i] = kve_exp32(p[i] - max);
		sum += p[i];
	}
	for (uint32_t i = 0; i < n; i++) {
		p[i] /= sum;
	}
}

void kve_route(const kve_config_t *c, float *logits, uint32_t rows, uint32_t *ids, float *weights)
{
	for (uint32_t r = 0; r < rows; r++) {
		float *p = logits + (size_t)r * c->experts, *w = weights + (size_t)r * c->top_k, sum = 0.0f;
		uint32_t *id = ids + (size_t)r * c->top_k;

		softmax(p, c->experts);
		for (uint32_t k = 0; k < c->top_k; k++) {
			id[k] = next_largest(p, c->experts, k ? id[k - 1] : c->experts);
			w[k] = p[id[k]];
			sum += w[k];
		}
		for (uint32_t k = 0; k < c->top_k && c->norm_top_k; k++) {
			w[k] /= sum;
		}
	}
}
