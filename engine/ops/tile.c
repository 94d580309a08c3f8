/* The inner loop. The wide version computes the same bits: a vector of 8 is 8 separate sums, and no multiply-add is
 * fused. */
#include "tile.h"

/* Eight separate sums; loads and stores need no alignment. */
typedef float lanes_t __attribute__((vector_size(32), aligned(4), may_alias));

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Accumulators are plain variables, not an array, so that they stay in registers; those of absent rows are never
 * touched. */
ALWAYS_INLINE void rows_of(const kve_tile_t *t, const uint32_t rows)
{
	const float *x0 = t->x;
	const float *x1 = rows > 1 ? x0 + t->x_stride : x0;
	const float *x2 = rows > 2 ? x1 + t->x_stride : x0;
	const float *x3 = rows > 3 ? x2 + t->x_stride : x0;
	const float *w = t->w;
	lanes_t *y0 = (lanes_t *)t->y;
	lanes_t *y1 = (lanes_t *)(t->y + t->y_stride);
	lanes_t *y2 = (lanes_t *)(t->y + 2 * t->y_stride);
	lanes_t *y3 = (lanes_t *)(t->y + 3 * t->y_stride);
	const lanes_t zero = {0};
	const int go_on = t->accumulate;
	lanes_t a0 = go_on ? y0[0] : zero, b0 = go_on ? y0[1] : zero;
	lanes_t a1 = go_on && rows > 1 ? y1[0] : zero, b1 = go_on && rows > 1 ? y1[1] : zero;
	lanes_t a2 = go_on && rows > 2 ? y2[0] : zero, b2 = go_on && rows > 2 ? y2[1] : zero;
	lanes_t a3 = go_on && rows > 3 ? y3[0] : zero, b3 = go_on && rows > 3 ? y3[1] : zero;

	for (uint32_t k = 0; k < t->terms; k++, w += t->w_stride) {
		const lanes_t wa = *(const lanes_t *)w;
		const lanes_t wb = *(const lanes_t *)(w + 8);

		a0 += wa * x0[k];
		b0 += wb * x0[k];
		if (rows > 1) {
			a1 += wa * x1[k];
			b1 += wb * x1[k];
		}
		if (rows > 2) {
			a2 += wa * x2[k];
			b2 += wb * x2[k];
		}
		if (rows > 3) {
			a3 += wa * x3[k];
			b3 += wb * x3[k];
		}
	}

	y0[0] = a0;
	y0[1] = b0;
	if (rows > 1) {
		y1[0] = a1;
		y1[1] = b1;
	}
	if (rows > 2) {
		y2[0] = a2;
		y2[1] = b2;
	}
	if (rows > 3) {
		y3[0] = a3;
		y3[1] = b3;
	}
}

ALWAYS_INLINE void any_rows(const kve_tile_t *t)
{
	kve_tile_t four = *t;

	for (; four.rows > 4; four.rows -= 4) {
		rows_of(&four, 4);
		four.x += 4 * four.x_stride;
		four.y += 4 * four.y_stride;
	}
	switch (four.rows) {
	case 4:
		rows_of(&four, 4);
		break;
	case 3:
		rows_of(&four, 3);
		break;
	case 2:
		rows_of(&four, 2);
		break;
	case 1:
		rows_of(&four, 1);
		break;
	default:
		break;
	}
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void tile_avx2(const kve_tile_t *t)
{
	any_rows(t);
}
#endif

void kve_tile(const kve_tile_t *t)
{
#if defined(__x86_64__)
	if (__builtin_cpu_supports("avx2")) {
		tile_avx2(t);
		return;
	}
#endif
	any_rows(t);
}
