/* cost_model/latency_fit.h -- how long an operation takes, fitted to measurements: ns = a + b n + c q, no coefficient
 * below zero.
 *
 * n is the amount of work, q a second quantity the time may grow with (0: none). The last few measurements of each
 * size, in powers of two, are kept, so that many of one size do not displace the others. Each counts by its relative
 * error, and an outlier among its size counts little. Of the choices of terms that fit about equally well the smallest
 * is taken: what was measured at one size only is a proportion. With an age, measurements that much older than the
 * newest are left out.
 *
 * Pure: the same measurements give the same fit. */
#ifndef KVX_LATENCY_FIT_H
#define KVX_LATENCY_FIT_H

#include <stdint.h>

#define KVX_FIT_SIZES   24u
#define KVX_FIT_SAMPLES 7u

typedef struct kvx_fit_sample {
	uint32_t n;
	double q, ns;
	uint64_t at_ns; /* when */
} kvx_fit_sample_t;

typedef struct kvx_fit {
	kvx_fit_sample_t sample[KVX_FIT_SIZES][KVX_FIT_SAMPLES];
	uint32_t count[KVX_FIT_SIZES], at[KVX_FIT_SIZES];
	uint32_t known;             /* measurements kept */
	uint32_t most;              /* largest n of them ever */
	int stale;                  /* a measurement was added since the fit */
	uint64_t newest_ns, age_ns; /* age 0: unlimited */
	double x[3];                /* a, b, c */
} kvx_fit_t;

/* Times of 0 and of more than 100 s (a machine that slept), and an n of 0, are ignored. */
void kvx_fit_add(kvx_fit_t *fit, const kvx_fit_sample_t *sample);
/* The total a + b n + c q; and the marginal b n + c q. 0: nothing is known. */
double kvx_fit_total(kvx_fit_t *fit, double n, double q);
double kvx_fit_marginal(kvx_fit_t *fit, double n, double q);
/* Proportional to what was measured at this size, or up to four times more or less, whatever the fit says. 0: nothing
 * was. */
double kvx_fit_nearest(const kvx_fit_t *fit, uint32_t n);

#endif
