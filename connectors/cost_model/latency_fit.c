/* Least squares over few measurements, over every choice of terms. */
#include "cost_model/latency_fit.h"

#include <string.h>

#define TERMS   3u
#define CHOICES 7u
#define ROWS    (KVX_FIT_SIZES * KVX_FIT_SAMPLES)
#define LONGEST 100e9
#define FAR     3.0  /* a measurement further from the median of its size is clamped to here */
#define USUAL   0.2  /* relative error that halves the weight of a measurement */
#define PASSES  3u   /* of reweighting by the error */
#define AS_GOOD 1.3  /* fits whose errors differ by less than this factor, or */
#define NEAR    2u   /* in doublings of n */
#define SLIGHT  2e-4 /* by less than this, are equal */

/* One measurement, relative to the median of its size. */
typedef struct kvx_row {
	double f[TERMS], t, weight;
} kvx_row_t;

static double clamp(double x, double least, double most)
{
	return x < least ? least : x > most ? most : x;
}

static uint32_t size_class(uint32_t n)
{
	const uint32_t size = 31u - (uint32_t)__builtin_clz(n);

	return size < KVX_FIT_SIZES ? size : KVX_FIT_SIZES - 1u;
}

void kvx_fit_add(kvx_fit_t *fit, const kvx_fit_sample_t *sample)
{
	uint32_t size;

	if (sample->n == 0 || !(sample->ns > 0 && sample->ns <= LONGEST)) {
		return;
	}
	size = size_class(sample->n);
	fit->sample[size][fit->at[size]] = *sample;
	fit->at[size] = (fit->at[size] + 1u) % KVX_FIT_SAMPLES;
	if (fit->count[size] < KVX_FIT_SAMPLES) {
		fit->count[size]++;
		fit->known++;
	}
	fit->most = sample->n > fit->most ? sample->n : fit->most;
	fit->newest_ns = sample->at_ns > fit->newest_ns ? sample->at_ns : fit->newest_ns;
	fit->stale = 1;
}

/* Samples of a size that are not too old. */
static uint32_t fresh_samples(const kvx_fit_t *fit, uint32_t size, kvx_fit_sample_t *samples)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < fit->count[size]; i++) {
		const kvx_fit_sample_t *s = &fit->sample[size][i];

		if (fit->age_ns == 0 || fit->newest_ns - s->at_ns <= fit->age_ns) {
			samples[n++] = *s;
		}
	}

	return n;
}

/* The median of the times, or of the times for one n. The lower of two middle values: disturbances make times longer.
 */
static double median(const kvx_fit_sample_t *sample, uint32_t count, int of_one)
{
	double sorted[KVX_FIT_SAMPLES];

	for (uint32_t i = 0; i < count; i++) {
		const double ns = of_one ? sample[i].ns / sample[i].n : sample[i].ns;
		uint32_t at = i;

		for (; at > 0 && sorted[at - 1] > ns; at--) {
			sorted[at] = sorted[at - 1];
		}
		sorted[at] = ns;
	}

	return sorted[(count - 1u) / 2u];
}

static uint32_t make_rows(const kvx_fit_t *fit, kvx_row_t *rows)
{
	uint32_t n = 0;

	for (uint32_t size = 0; size < KVX_FIT_SIZES; size++) {
		kvx_fit_sample_t samples[KVX_FIT_SAMPLES];
		const uint32_t count = fresh_samples(fit, size, samples);
		const double usual = count ? median(samples, count, 0) : 0;

		for (uint32_t i = 0; i < count; i++) {
			const kvx_fit_sample_t *s = &samples[i];

			rows[n++] = (kvx_row_t){
				{1.0 / usual, s->n / usual, s->q / usual}, clamp(s->ns / usual, 1.0 / FAR, FAR), 1.0};
		}
	}

	return n;
}

/* Gaussian elimination; 0: the terms cannot be told apart. A term that is not chosen has the row x = 0. */
static int solve(double m[TERMS][TERMS + 1], double *x)
{
	for (uint32_t col = 0; col < TERMS; col++) {
		const double before = m[col][col];

		for (uint32_t k = 0; k < col; k++) {
			const double factor = m[col][k] / m[k][k];

			for (uint32_t j = k; j <= TERMS; j++) {
				m[col][j] -= factor * m[k][j];
			}
		}
		if (!(m[col][col] > 1e-9 * before)) {
			return 0;
		}
	}
	for (uint32_t i = TERMS; i-- > 0;) {
		x[i] = m[i][TERMS];
		for (uint32_t j = i + 1; j < TERMS; j++) {
			x[i] -= m[i][j] * x[j];
		}
		x[i] /= m[i][i];
	}

	return 1;
}

static double row_error(const kvx_row_t *row, const double *x)
{
	double sum = -row->t;

	for (uint32_t i = 0; i < TERMS; i++) {
		sum += row->f[i] * x[i];
	}

	return sum;
}

/* Fit these terms: the mean error, below 0 if there is no fit. */
static double fit_terms(kvx_row_t *rows, uint32_t n, uint32_t terms, double *x)
{
	double error = 0;

	for (uint32_t pass = 0; pass < PASSES; pass++) {
		double m[TERMS][TERMS + 1] = {{0}};

		for (uint32_t r = 0; r < n; r++) {
			const double off = pass ? row_error(&rows[r], x) / USUAL : 0;

			rows[r].weight = 1.0 / (1.0 + off * off);
			for (uint32_t i = 0; i < TERMS; i++) {
				for (uint32_t j = 0; j < TERMS && terms & 1u << i; j++) {
					m[i][j] += terms & 1u << j ? rows[r].weight * rows[r].f[i] * rows[r].f[j] : 0;
				}
				m[i][TERMS] += terms & 1u << i ? rows[r].weight * rows[r].f[i] * rows[r].t : 0;
			}
		}
		for (uint32_t i = 0; i < TERMS; i++) {
			m[i][i] += terms & 1u << i ? 0 : 1;
		}
		if (!solve(m, x)) {
			return -1;
		}
	}

	for (uint32_t i = 0; i < TERMS; i++) {
		if (x[i] < 0) {
			return -1;
		}
	}
	for (uint32_t r = 0; r < n; r++) {
		const double off = clamp(row_error(&rows[r], x), -1.0, 1.0);

		error += off * off;
	}

	return error / n;
}

/* Terms as bits, the preferred choice first. */
static void refit(kvx_fit_t *fit)
{
	static const uint32_t choice[] = {2, 3, 6, 7, 1, 5, 4};
	double x[CHOICES][TERMS], error[CHOICES], best = -1;
	kvx_row_t rows[ROWS];
	const uint32_t n = make_rows(fit, rows);

	for (uint32_t i = 0; i < CHOICES; i++) {
		error[i] = fit_terms(rows, n, choice[i], x[i]);
		best = error[i] >= 0 && (best < 0 || error[i] < best) ? error[i] : best;
	}
	for (uint32_t i = 0; i < CHOICES; i++) {
		if (error[i] >= 0 && error[i] <= best * AS_GOOD + SLIGHT) {
			memcpy(fit->x, x[i], sizeof fit->x);
			break;
		}
	}
	fit->stale = 0;
}

double kvx_fit_marginal(kvx_fit_t *fit, double n, double q)
{
	if (fit->stale) {
		refit(fit);
	}

	return fit->x[1] * n + fit->x[2] * q;
}

double kvx_fit_total(kvx_fit_t *fit, double n, double q)
{
	const double marginal = kvx_fit_marginal(fit, n, q);

	return fit->x[0] + marginal;
}

double kvx_fit_nearest(const kvx_fit_t *fit, uint32_t n)
{
	kvx_fit_sample_t samples[KVX_FIT_SAMPLES];

	for (uint32_t i = 0; n > 0 && i <= 2u * NEAR; i++) {
		const uint32_t d = (i + 1u) / 2u, size = size_class(n);
		const uint32_t at = i % 2u ? size + d : size - d; /* wraps below 0: beyond all sizes */
		const uint32_t count = at < KVX_FIT_SIZES ? fresh_samples(fit, at, samples) : 0;

		if (count) {
			return n * median(samples, count, 1);
		}
	}

	return 0;
}
