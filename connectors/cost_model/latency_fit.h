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
#ifndef KVX_CURVE_H
#define KVX_CURVE_H

#include <stdint.h>

#define KVX_CURVE_SIZES   24u
#define KVX_CURVE_SAMPLES 7u

typedef struct kvx_curve_sample {
	uint32_t n;
	double q, ns;
	uint64_t at_ns; /* when */
} kvx_curve_sample_t;

typedef struct kvx_curve {
	kvx_curve_sample_t sample[KVX_CURVE_SIZES][KVX_CURVE_SAMPLES];
	uint32_t count[KVX_CURVE_SIZES], at[KVX_CURVE_SIZES];
	uint32_t known;             /* measurements kept */
	uint32_t most;              /* largest n of them ever */
	int stale;                  /* something was learnt since the fit */
	uint64_t newest_ns, age_ns; /* age: 0: for ever */
	double x[3];                /* a, b, c */
} kvx_curve_t;

/* Times of 0 and of more than 100 s (a machine that slept), and an n of 0, are ignored. */
void kvx_curve_learn(kvx_curve_t *curve, const kvx_curve_sample_t *sample);
/* Of the whole: a + b n + c q; and what the n and q alone add. 0: nothing is known. */
double kvx_curve_whole(kvx_curve_t *curve, double n, double q);
double kvx_curve_share(kvx_curve_t *curve, double n, double q);
/* In proportion to what was measured at this size, or up to four times more or less, whatever the curve says. 0:
 * nothing was. */
double kvx_curve_near(const kvx_curve_t *curve, uint32_t n);

#endif
