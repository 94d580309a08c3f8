/* The operations of kvk/nn.h in host memory: the specification of the GPU's kernels. Each product and each sum is
 * rounded, in the order of its index, whatever the vectors of the machine: all machines get the same bits. No state:
 * any number of threads may call. */
#include "nn/twin.h"

#include "kv/env.h"

/* ---- elementary functions: no library's, so that their bits are everywhere the same ----------- */

/* 1 / sqrt(x), x positive: Newton's steps in double, from a guess good to 4 %. */
static float inverse_root(float x)
{
	const double half = 0.5 * (double)x;
	uint32_t bits;
	float guess;
	double y;

	memcpy(&bits, &x, sizeof bits);
	bits = 0x5f3759dfu - (bits >> 1);
	memcpy(&guess, &bits, sizeof guess);
	y = (double)guess;
	for (int i = 0; i < 5; i++) {
		y = y * (1.5 - half * y * y);
	}

	return (float)y;
}

/* e^x as kve_exp32() computes it: good to about 2e-7; 0 below -87, clamped above 87. */
static float exponential(float x)
{
	const float shift = 12582912.0f; /* 1.5 x 2^23: adding it rounds to an integer */
	const float top = x > 87.0f ? 87.0f : x, y = top < -87.0f ? -87.0f : top;
	const float n = (y * 1.44269504f + shift) - shift;
	const float r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
	const float low = 0.041666667f + r * (0.0083333333f + r * 0.0013888889f);
	const float p = 1.0f + r * (1.0f + r * (0.5f + r * (0.16666667f + r * low)));
	const int32_t bits = ((int32_t)n + 127) * 8388608;
	float scale;

	memcpy(&scale, &bits, sizeof scale);

	return x < -87.0f ? 0.0f : p * scale;
}

/* ---- weights --------------------------------------------------------------------------------- */

/* Value i of the generator: splitmix64, whose state is a counter. */
static float drawn(const kvk_nn_draw_t *d, uint64_t i)
{
	uint64_t z = d->seed + (i + 1u) * UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
	z ^= z >> 31;

	return d->middle + d->width * ((float)(int32_t)(z >> 40) * (1.0f / 8388608.0f) - 1.0f);
}

/* Row r of what the tiles hold is which output; n or more: none. */
static uint32_t output_of(const kvk_nn_draw_t *d, uint32_t panel, uint32_t r)
{
	return d->order == KVK_NN_TILES ? panel * KVK_NN_PANEL + r
					: panel * (KVK_NN_PANEL / 2u) + r % (KVK_NN_PANEL / 2u);
}

static void draw_panel(const kvk_nn_draw_t *d, uint32_t panel)
{
	const uint32_t half = KVK_NN_PANEL / 2u, from = d->order == KVK_NN_UPS ? half : 0u;
	const uint32_t to = d->order == KVK_NN_GATES ? half : KVK_NN_PANEL;
	kvk_bf16_t *w = d->to;

	for (uint32_t r = from; r < to; r++) {
		const uint32_t o = output_of(d, panel, r);
		const uint64_t first = d->first + (uint64_t)(o / 16u) * d->k * 16u + o % 16u;

		for (uint32_t i = 0; i < d->k; i++) {
			const size_t at = kvk_nn_weight_at(d->k, panel * KVK_NN_PANEL + r, i);

			w[at] = o < d->n ? kvk_bf16_round(drawn(d, first + (uint64_t)i * 16u)) : 0;
		}
	}
}

static kv_status_t twin_draw(kvk_nn_t *nn, const kvk_nn_draw_t *d, kvk_cu_stream_t stream)
{
	const uint32_t outputs = d->order == KVK_NN_TILES ? KVK_NN_PANEL : KVK_NN_PANEL / 2u;
	const size_t count = d->order == KVK_NN_ROWS ? (size_t)d->n * d->k : d->n;

	(void)nn;
	(void)stream;
	for (uint32_t p = 0; d->order >= KVK_NN_TILES && p < (d->n + outputs - 1u) / outputs; p++) {
		draw_panel(d, p);
	}
	for (size_t i = 0; d->order == KVK_NN_ROW_F32 && i < count; i++) {
		((float *)d->to)[i] = drawn(d, d->first + i);
	}
	for (size_t i = 0; d->order == KVK_NN_ROWS && i < count; i++) {
		((kvk_bf16_t *)d->to)[i] = kvk_bf16_round(drawn(d, d->first + i));
	}

	return KV_OK;
}

/* ---- products -------------------------------------------------------------------------------- */

#define TOGETHER 32u /* rows that one unpacked tile is applied to */
#define STRIP    16u /* outputs whose weights lie together once unpacked */
#define STRIPS   (KVK_NN_PANEL / STRIP)

/* Eight separate sums. */
typedef float lanes_t __attribute__((vector_size(32), may_alias));

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* One panel applied to up to TOGETHER rows. 56 KiB, on the stack. */
typedef struct work {
	_Alignas(64) float w[STRIPS][KVK_NN_DEPTH][STRIP]; /* of one tile */
	_Alignas(64) float x[TOGETHER][KVK_NN_DEPTH];
	_Alignas(64) float sum[TOGETHER][KVK_NN_PANEL];
} work_t;

static const kvk_bf16_t *row_of(const kvk_nn_product_t *p, uint32_t row)
{
	if (p->x) {
		return p->x + (size_t)row * p->k;
	}

	const uint32_t record = p->record[row], own = record - p->own_first;

	return own < p->own_count ? p->own + (size_t)own * p->k : p->rows + (size_t)record * p->k;
}

static void unpack_weights(work_t *work, const kvk_bf16_t *tile)
{
	for (uint32_t r = 0; r < KVK_NN_PANEL; r++) {
		for (uint32_t c = 0; c < 8u; c++) {
			const kvk_bf16_t *piece = tile + (size_t)r * KVK_NN_DEPTH + (size_t)(c ^ (r % 8u)) * 8u;

			for (uint32_t i = 0; i < 8u; i++) {
				work->w[r / STRIP][c * 8u + i][r % STRIP] = kvk_bf16_to_float(piece[i]);
			}
		}
	}
}

/* Sums of four rows and a strip go on. Rows that are absent have room, too. */
ALWAYS_INLINE void add_strip(work_t *work, uint32_t row, uint32_t strip)
{
	const lanes_t *w = (const lanes_t *)work->w[strip];
	const float *x0 = work->x[row], *x1 = work->x[row + 1], *x2 = work->x[row + 2], *x3 = work->x[row + 3];
	lanes_t *y0 = (lanes_t *)&work->sum[row][(size_t)strip * STRIP], *y1 = y0 + KVK_NN_PANEL / 8u;
	lanes_t *y2 = y1 + KVK_NN_PANEL / 8u, *y3 = y2 + KVK_NN_PANEL / 8u;
	lanes_t a0 = y0[0], b0 = y0[1], a1 = y1[0], b1 = y1[1], a2 = y2[0], b2 = y2[1], a3 = y3[0], b3 = y3[1];

	for (uint32_t i = 0; i < KVK_NN_DEPTH; i++, w += STRIP / 8u) {
		a0 += w[0] * x0[i];
		b0 += w[1] * x0[i];
		a1 += w[0] * x1[i];
		b1 += w[1] * x1[i];
		a2 += w[0] * x2[i];
		b2 += w[1] * x2[i];
		a3 += w[0] * x3[i];
		b3 += w[1] * x3[i];
	}
	y0[0] = a0;
	y0[1] = b0;
	y1[0] = a1;
	y1[1] = b1;
	y2[0] = a2;
	y2[1] = b2;
	y3[0] = a3;
	y3[1] = b3;
}

ALWAYS_INLINE void add_any(work_t *work, uint32_t rows)
{
	for (uint32_t strip = 0; strip < STRIPS; strip++) {
		for (uint32_t row = 0; row < rows; row += 4) {
			add_strip(work, row, strip);
		}
	}
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void add_avx2(work_t *work, uint32_t rows)
{
	add_any(work, rows);
}
#endif

static void add_tile(work_t *work, uint32_t rows)
{
#if defined(__x86_64__)
	if (__builtin_cpu_supports("avx2")) {
		add_avx2(work, rows);
		return;
	}
#endif
	add_any(work, rows);
}

/* Sums of a row and a panel to y. */
static void store_sums(const kvk_nn_product_t *p, const float *sum, uint32_t row, uint32_t panel)
{
	const uint32_t first = panel * KVK_NN_PANEL, left = p->n - first, half = KVK_NN_PANEL / 2u;
	const uint32_t outputs = left < KVK_NN_PANEL ? left : KVK_NN_PANEL;
	const size_t at = (size_t)row * p->n + first;
	kvk_bf16_t *y = (kvk_bf16_t *)p->y + (p->out == KVK_NN_SWIGLU ? at / 2u : at);

	if (p->out == KVK_NN_SWIGLU) {
		for (uint32_t o = 0; o < half; o++) {
			y[o] = kvk_bf16_round(sum[o] / (1.0f + exponential(-sum[o])) * sum[half + o]);
		}
		return;
	}
	for (uint32_t o = 0; o < outputs; o++) {
		if (p->out == KVK_NN_BF16) {
			y[o] = kvk_bf16_round(sum[o]);
		} else if (p->out == KVK_NN_ADD) {
			((float *)p->y)[at + o] += sum[o];
		} else {
			((float *)p->y)[at + o] = sum[o];
		}
	}
}

/* Rows `row` to row + rows by one panel. */
static void multiply_panel(const kvk_nn_product_t *p, const kvk_bf16_t *w, uint32_t panel, uint32_t row, uint32_t rows)
{
	const kvk_bf16_t *tile = w + (size_t)panel * KVK_NN_PANEL * p->k;
	work_t work;

	memset(work.x, 0, sizeof work.x);
	memset(work.sum, 0, sizeof work.sum);
	for (uint32_t k = 0; k < p->k; k += KVK_NN_DEPTH, tile += (size_t)KVK_NN_PANEL * KVK_NN_DEPTH) {
		unpack_weights(&work, tile);
		for (uint32_t r = 0; r < rows; r++) {
			const kvk_bf16_t *x = row_of(p, row + r) + k;

			for (uint32_t i = 0; i < KVK_NN_DEPTH; i++) {
				work.x[r][i] = kvk_bf16_to_float(x[i]);
			}
		}
		add_tile(&work, rows);
	}
	for (uint32_t r = 0; r < rows; r++) {
		store_sums(p, work.sum[r], row + r, panel);
	}
}

static kv_status_t twin_product(kvk_nn_t *nn, const kvk_nn_product_t *p, kvk_cu_stream_t stream)
{
	const size_t count = kvk_nn_weight_count(p->k, p->n);

	(void)nn;
	(void)stream;
	for (uint32_t g = 0; g < (p->first ? p->groups : 1u); g++) {
		const uint32_t from = p->first ? p->first[g] : 0, end = p->first ? p->first[g + 1] : p->max_rows;

		for (uint32_t row = from; row < end; row += TOGETHER) {
			const uint32_t rows = end - row < TOGETHER ? end - row : TOGETHER;

			for (uint32_t panel = 0; panel * KVK_NN_PANEL < p->n; panel++) {
				multiply_panel(p, p->w + g * count, panel, row, rows);
			}
		}
	}

	return KV_OK;
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* 1 / sqrt(mean of x^2 + eps) */
static float norm_scale(const float *x, uint32_t n, float eps)
{
	float sum = 0.0f;

	for (uint32_t i = 0; i < n; i++) {
		sum += x[i] * x[i];
	}

	return inverse_root(sum / (float)n + eps);
}

static kv_status_t twin_embed(kvk_nn_t *nn, const kvk_nn_embed_t *e, kvk_cu_stream_t stream)
{
	(void)nn;
	(void)stream;
	for (uint32_t r = 0; r < e->rows; r++) {
		const kvk_bf16_t *from = e->table + (size_t)e->tokens[r] * e->hidden;

		for (uint32_t i = 0; i < e->hidden; i++) {
			e->x[(size_t)r * e->hidden + i] = kvk_bf16_to_float(from[i]);
		}
	}

	return KV_OK;
}

static kv_status_t twin_norm(kvk_nn_t *nn, const kvk_nn_norm_t *n, kvk_cu_stream_t stream)
{
	(void)nn;
	(void)stream;
	for (uint32_t r = 0; r < n->rows; r++) {
		float *x = n->x + (size_t)(n->pick ? n->pick[r] : r) * n->hidden;
		const size_t at = (size_t)r * n->hidden;

		for (uint32_t i = 0; n->added && i < n->hidden; i++) {
			x[i] += kvk_bf16_to_float(n->added[at + i]);
		}
		if (n->y) {
			const float scale = norm_scale(x, n->hidden, n->eps);

			for (uint32_t i = 0; i < n->hidden; i++) {
				n->y[at + i] = kvk_bf16_round(x[i] * scale * n->gain[i]);
			}
		}
	}

	return KV_OK;
}

/* A head of queries or keys, normed and rotated. rotation: [head_dim / 2][cos, sin]. */
static void turn_head(const kvk_nn_qkv_t *q, const kvk_bf16_t *from, const float *gain, const float *rotation,
		      kvk_bf16_t *to)
{
	const uint32_t dim = q->shape.head_dim, half = dim / 2u;
	float x[128];

	for (uint32_t i = 0; i < dim; i++) {
		x[i] = kvk_bf16_to_float(from[i]);
	}
	if (gain) {
		const float scale = norm_scale(x, dim, q->eps);

		for (uint32_t i = 0; i < dim; i++) {
			x[i] = x[i] * scale * gain[i];
		}
	}
	for (uint32_t i = 0; i < half; i++) {
		const float c = rotation[(size_t)2 * i], s = rotation[(size_t)2 * i + 1], a = x[i], b = x[half + i];

		to[i] = kvk_bf16_round(a * c - b * s);
		to[half + i] = kvk_bf16_round(b * c + a * s);
	}
}

static void place_row(const kvk_nn_qkv_t *q, uint32_t row)
{
	const uint32_t heads = q->shape.heads, kv_heads = q->shape.kv_heads, dim = q->shape.head_dim;
	const kvk_nn_row_t place = q->places[row];
	const uint32_t tokens = q->shape.block_tokens, token = place.position % tokens;
	const uint32_t block = q->blocks[(size_t)place.sequence * q->max_blocks + place.position / tokens];
	const size_t page = (size_t)tokens * kv_heads * dim;
	const kvk_bf16_t *from = q->qkv + (size_t)row * (heads + 2u * kv_heads) * dim;
	const float *rotation = q->rotation + (size_t)place.position * dim;
	kvk_bf16_t *keys = q->cache + (size_t)block * 2u * page + (size_t)token * kv_heads * dim;

	for (uint32_t h = 0; h < heads; h++) {
		turn_head(q, from + (size_t)h * dim, q->q_gain, rotation, q->q_out + ((size_t)row * heads + h) * dim);
	}
	for (uint32_t h = 0; h < kv_heads; h++) {
		turn_head(q, from + (size_t)(heads + h) * dim, q->k_gain, rotation, keys + (size_t)h * dim);
	}
	memcpy(keys + page, from + (size_t)(heads + kv_heads) * dim, (size_t)kv_heads * dim * sizeof *keys);
}

static kv_status_t twin_qkv(kvk_nn_t *nn, const kvk_nn_qkv_t *q, kvk_cu_stream_t stream)
{
	(void)nn;
	(void)stream;
	for (uint32_t r = 0; r < q->rows; r++) {
		place_row(q, r);
	}

	return KV_OK;
}

/* ---- choices --------------------------------------------------------------------------------- */

/* The largest, the lowest index of equals. */
static uint32_t largest(const float *x, uint32_t n)
{
	uint32_t best = 0;

	for (uint32_t i = 1; i < n; i++) {
		best = x[i] > x[best] ? i : best;
	}

	return best;
}

static void route_row(const kvk_nn_route_t *route, uint32_t row)
{
	const float *logits = route->logits + (size_t)row * route->experts;
	uint32_t *ids = route->ids + (size_t)row * route->top_k;
	float *weights = route->weights + (size_t)row * route->top_k;
	const float max = logits[largest(logits, route->experts)];
	float p[1024], sum = 0.0f, chosen = 0.0f;

	for (uint32_t e = 0; e < route->experts; e++) {
		p[e] = exponential(logits[e] - max);
		sum += p[e];
	}
	for (uint32_t e = 0; e < route->experts; e++) {
		p[e] /= sum;
	}
	for (uint32_t k = 0; k < route->top_k; k++) {
		ids[k] = largest(p, route->experts);
		weights[k] = p[ids[k]];
		chosen += weights[k];
		p[ids[k]] = -1.0f; /* below all that is left */
	}
	for (uint32_t k = 0; k < route->top_k && route->norm_top_k; k++) {
		weights[k] /= chosen;
	}
}

static kv_status_t twin_route(kvk_nn_t *nn, const kvk_nn_route_t *route, kvk_cu_stream_t stream)
{
	(void)nn;
	(void)stream;
	for (uint32_t r = 0; r < route->rows; r++) {
		route_row(route, r);
	}

	return KV_OK;
}

static kv_status_t twin_choose(kvk_nn_t *nn, const kvk_nn_choose_t *choose, kvk_cu_stream_t stream)
{
	(void)nn;
	(void)stream;
	for (uint32_t r = 0; r < choose->rows; r++) {
		choose->ids[r] = largest(choose->logits + (size_t)r * choose->vocab, choose->vocab);
	}

	return KV_OK;
}

/* ---- running --------------------------------------------------------------------------------- */

static void close_twin(kvk_nn_t *nn)
{
	kv_free(&kv_env_posix, nn);
}

static const kvk_nn_ops_t ops = {
	.draw = twin_draw,
	.product = twin_product,
	.qkv = twin_qkv,
	.attention = kvk_nn_twin_attention,
	.embed = twin_embed,
	.norm = twin_norm,
	.route = twin_route,
	.choose = twin_choose,
	.close = close_twin,
};

kv_status_t kvk_nn_twin_open(kvk_nn_t **p_nn)
{
	kvk_nn_t *nn = kv_alloc(&kv_env_posix, sizeof *nn);

	if (!nn) {
		return KV_ERR_NOMEM;
	}
	nn->ops = &ops;
	*p_nn = nn;

	return KV_OK;
}
