/* Least squares with coefficients that are not negative, over few measurements. */
#include "cost_model/latency_fit.h"

#include <string.h>

#define TERMS   3u
#define LONGEST 100e9
#define SHORT   4.0 /* a time below this part of what its size takes was not measured right */
#define NEAR    2u  /* in doublings of n */
#define SWEEPS  100u

static uint32_t size_class(uint32_t n)
{
	const uint32_t size = 31u - (uint32_t)__builtin_clz(n);

	return size < KVX_FIT_SIZES ? size : KVX_FIT_SIZES - 1u;
}

/* The median of the times for one n; 0: there are no measurements. The lower of two middle values: disturbances make
 * times longer. */
static double median(const kvx_fit_sample_t *samples)
{
	double sorted[KVX_FIT_SAMPLES] = {0};
	uint32_t count = 0;

	for (uint32_t i = 0; i < KVX_FIT_SAMPLES; i++) {
		const double ns = samples[i].ns > 0 ? samples[i].ns / samples[i].n : 0;
		uint32_t at = count;

		for (; at > 0 && ns > 0 && sorted[at - 1] > ns; at--) {
			sorted[at] = sorted[at - 1];
		}
		sorted[at] = ns;
		count += ns > 0;
	}

	return count ? sorted[(count - 1u) / 2u] : 0;
}

/* Solve the normal equations by coordinate descent. It begins at zero with the proportional term: what was measured at
 * one size only is a proportion. */
static void solve(double m[TERMS][TERMS], const double *target, double *x)
{
	for (uint32_t k = 1; k <= SWEEPS * TERMS; k++) {
		const uint32_t i = k % TERMS; /* b, c, a */
		double rest = target[i];

		for (uint32_t j = 0; j < TERMS; j++) {
			rest -= j == i ? 0 : m[i][j] * x[j];
		}
		x[i] = m[i][i] > 0 && rest > 0 ? rest / m[i][i] : 0;
	}
}

static void refit(kvx_fit_t *fit)
{
	double m[TERMS][TERMS] = {{0}}, target[TERMS] = {0}, x[TERMS] = {0};

	for (uint32_t size = 0; size < KVX_FIT_SIZES; size++) {
		const double usual = median(fit->samples[size]);

		for (uint32_t s = 0; s < KVX_FIT_SAMPLES && usual > 0; s++) {
			const kvx_fit_sample_t *sample = &fit->samples[size][s];
			const double terms[TERMS] = {1.0, sample->n, sample->q};

			for (uint32_t i = 0; i < TERMS && sample->ns * SHORT > sample->n * usual; i++) {
				target[i] += terms[i] / sample->ns;
				for (uint32_t j = 0; j < TERMS; j++) {
					m[i][j] += terms[i] / sample->ns * (terms[j] / sample->ns);
				}
			}
		}
	}
	solve(m, target, x);
	fit->a = x[0];
	fit->b = x[1];
	fit->c = x[2];
}

void kvx_fit_add(kvx_fit_t *fit, const kvx_fit_sample_t *sample)
{
	kvx_fit_sample_t *samples;

	if (sample->n == 0 || !(sample->ns > 0 && sample->ns <= LONGEST)) {
		return;
	}
	for (uint32_t i = 0; i < KVX_FIT_SIZES * KVX_FIT_SAMPLES && fit->age_ns; i++) {
		kvx_fit_sample_t *old = &fit->samples[i / KVX_FIT_SAMPLES][i % KVX_FIT_SAMPLES];

		old->ns = old->at_ns + fit->age_ns < sample->at_ns ? 0 : old->ns;
	}
	samples = fit->samples[size_class(sample->n)];
	memmove(samples + 1, samples, (KVX_FIT_SAMPLES - 1u) * sizeof *samples);
	samples[0] = *sample;
	fit->count++;
	fit->most = sample->n > fit->most ? sample->n : fit->most;
	refit(fit);
}

double kvx_fit_nearest(const kvx_fit_t *fit, uint32_t n)
{
	for (uint32_t i = 0; n > 0 && i <= 2u * NEAR; i++) {
		const uint32_t d = (i + 1u) / 2u, size = size_class(n);
		const uint32_t at = i % 2u ? size + d : size - d; /* wraps below 0: beyond all sizes */
		const double usual = at < KVX_FIT_SIZES ? median(fit->samples[at]) : 0;

		if (usual > 0) {
			return n * usual;
		}
	}

	return 0;
}
