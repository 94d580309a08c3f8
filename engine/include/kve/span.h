/* kve/span.h -- tokens that a pass computes. */
#ifndef KVE_SPAN_H
#define KVE_SPAN_H

#include <stdint.h>

/* Tokens of one sequence to compute: positions start .. start + n. Everything before start is in the cache. */
typedef struct kve_span {
	const uint32_t *tokens; /* n, each below vocab                              */
	uint32_t n;
	uint32_t start;         /* start + n <= max_tokens                          */
	const uint32_t *blocks; /* cache blocks of the sequence, enough for all     */
	float *logits;          /* [vocab] of the last token; NULL: not wanted      */
	uint32_t *chosen;       /* the token of the largest one, the lowest of equals; NULL: not wanted */
} kve_span_t;

#endif
