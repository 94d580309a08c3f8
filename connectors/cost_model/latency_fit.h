/* cost_model/latency_fit.h -- how long an operation takes, fitted to measurements: ns = a + b n + c q, no coefficient
 * below zero.
 *
 * n is the amount of work, q a second quantity the time may grow with (0: none). The last few measurements of each
 * size, in powers of two, are kept, so that many of one size do not displace the others. Each counts by its error
 * relative to its own time, so one that was disturbed, and took longer, counts little.
 *
 * Pure: the same measurements give the same fit. */
#ifndef KVX_LATENCY_FIT_H
#define KVX_LATENCY_FIT_H

#include <stdint.h>

#define KVX_FIT_SIZES   24u
#define KVX_FIT_SAMPLES 7u

typedef struct kvx_fit_sample {
	uint32_t n;
	double q, ns;   /* ns 0: none */
	uint64_t at_ns; /* when */
} kvx_fit_sample_t;

typedef struct kvx_fit {
	kvx_fit_sample_t samples[KVX_FIT_SIZES][KVX_FIT_SAMPLES]; /* the newest first */
	uint32_t count;                                           /* measurements ever */
	uint32_t most;                                            /* largest n of them */
	uint64_t age_ns; /* measurements so much older than a new one are dropped; 0: none is */
	double a, b, c;
} kvx_fit_t;

/* Times of 0 and of more than 100 s (a machine that slept), and an n of 0, are ignored. */
void kvx_fit_add(kvx_fit_t *fit, const kvx_fit_sample_t *sample);
/* Proportional to what was measured at this size, or up to four times more or less, whatever the fit says. 0: nothing
 * was. */
double kvx_fit_nearest(const kvx_fit_t *fit, uint32_t n);

#endif
