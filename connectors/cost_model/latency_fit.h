/* cost_model/latency_fit.h -- how long something takes, learnt from measurements: ns = a + b n + c q, no coefficient
 * below zero.
 *
 * n is how much there was to do, q whatever else it may cost in proportion to (0: nothing). The last few measurements
 * of each size, in powers of two, are kept, so that many of one size do not make the others forgotten. Each counts by
 * its relative error; one far from the others of its size counts little. Of terms that explain about as much, the
 * fewest are taken: what was measured at one size only is a proportion. With an age, measurements so much older than
 * the newest are left out: what has changed since is not held against it.
 *
 * Pure: the same measurements give the same curve.
 */
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
	int stale;                  /* something was learnt since the fit */
	uint64_t newest_ns, age_ns; /* age: 0: for ever */
	double x[3];                /* a, b, c */
} kvx_fit_t;

/* Times of 0 and of more than 100 s (a machine that slept), and an n of 0, are ignored. */
void kvx_fit_add(kvx_fit_t *curve, const kvx_fit_sample_t *sample);
/* Of the whole: a + b n + c q; and what the n and q alone add. 0: nothing is known. */
double kvx_fit_total(kvx_fit_t *curve, double n, double q);
double kvx_fit_marginal(kvx_fit_t *curve, double n, double q);
/* In proportion to what was measured at this size, or up to four times more or less, whatever the curve says. 0:
 * nothing was. */
double kvx_fit_nearest(const kvx_fit_t *curve, uint32_t n);

#endif
