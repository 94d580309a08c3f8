/* Rows times a weight matrix. */
#include "tile.h"

void kve_matmul(const float *x, uint32_t rows, const kve_matrix_t *w, float *y)
{
	for (uint32_t o = 0; o < w->out; o += KVE_PANEL) {
		const kve_tile_t tile = {
			.x = x,
			.x_stride = w->in,
			.w = w->data + (size_t)o * w->in,
			.w_stride = KVE_PANEL,
			.y = y + o,
			.y_stride = w->out,
			.rows = rows,
			.terms = w->in,
		};

		kve_tile(&tile);
	}
}
