/* tile.h -- the one inner loop of the engine: rows times 16 outputs, each output summed in index order. */
#ifndef KVE_TILE_H
#define KVE_TILE_H

#include "kve/ops.h"

/* y[r][0..16) (+)= sum over k < terms of x[r][k] * w[k][0..16). Strides in floats. */
typedef struct kve_tile {
	const float *x;
	size_t x_stride;
	const float *w;
	size_t w_stride;
	float *y;
	size_t y_stride;
	uint32_t rows;
	uint32_t terms;
	int accumulate; /* 1: go on from what y holds, as if it were one long sum */
} kve_tile_t;

void kve_tile(const kve_tile_t *t);

#endif
