/* The twin of a layer's operations against plain references in double; and what all that run them refuse. */
#include "nn_values.h"

#include "nn/gpu.h"

/* ---- weights --------------------------------------------------------------------------------- */

/* `n` values behind each other, as engine/weights.c draws a tensor; the state moves on. */
static float *draw_tensor(uint64_t *p_state, size_t n, float middle, float width)
{
	float *to = painted(n * sizeof *to);

	for (size_t i = 0; i < n; i++) {
		uint64_t z = *p_state += UINT64_C(0x9e3779b97f4a7c15);
		volatile float product;

		z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
		z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
		z ^= z >> 31;
		product = width * ((float)(int32_t)(z >> 40) * (1.0f / 8388608.0f) - 1.0f);
		to[i] = middle + product;
	}

	return to;
}

/* Where the engine has the weight of an output and an input: panels of 16 outputs. */
static size_t engine_at(uint32_t k, uint32_t output, uint32_t input)
{
	return ((size_t)(output / 16u) * k + input) * 16u + output % 16u;
}

#define SEED  UINT64_C(77)
#define FIRST 1000u
#define WIDTH 0.3f

static kvk_nn_draw_t draw_of(kvk_nn_order_t order, uint32_t k, uint32_t n, void *to)
{
	return (kvk_nn_draw_t){.seed = SEED,
			       .first = FIRST,
			       .middle = 0.25f,
			       .width = WIDTH,
			       .k = k,
			       .n = n,
			       .order = order,
			       .to = to};
}

KV_TEST(p1_weights_lie_in_tiles_with_the_values_of_the_engine)
{
	const uint32_t k = 128, n = 144;
	const size_t count = kvk_nn_weight_count(k, n);
	uint64_t state = SEED + FIRST * UINT64_C(0x9e3779b97f4a7c15);
	float *values = draw_tensor(&state, (size_t)k * n, 0.25f, WIDTH);
	kvk_bf16_t *w = painted(count * sizeof *w);
	const kvk_nn_draw_t draw = draw_of(KVK_NN_TILES, k, n, w);

	assert_int_equal(count, 256 * k);
	assert_int_equal(kvk_nn_draw(nn, &draw, NULL), KV_OK);
	for (uint32_t o = 0; o < 256; o++) {
		for (uint32_t i = 0; i < k; i++) {
			const kvk_bf16_t want = o < n ? kvk_bf16_round(values[engine_at(k, o, i)]) : 0;

			assert_int_equal(w[kvk_nn_weight_at(k, o, i)], want);
		}
	}
	assert_painted(w + count, 64);
	free(values);
	free(w);
}

KV_TEST(p1_gates_and_ups_share_panels_and_leave_each_other_alone)
{
	const uint32_t k = 64, n = 128;
	const size_t count = kvk_nn_weight_count(k, 2 * n);
	uint64_t state = SEED + FIRST * UINT64_C(0x9e3779b97f4a7c15);
	float *values = draw_tensor(&state, (size_t)k * n, 0.25f, WIDTH);
	kvk_bf16_t *w = painted(count * sizeof *w);

	for (uint32_t half = 0; half < 2; half++) {
		const kvk_nn_draw_t draw = draw_of(half ? KVK_NN_UPS : KVK_NN_GATES, k, n, w);

		memset(w, PAINT, count * sizeof *w);
		assert_int_equal(kvk_nn_draw(nn, &draw, NULL), KV_OK);
		for (uint32_t o = 0; o < n; o++) {
			const uint32_t panel = o / 64 * 128;

			for (uint32_t i = 0; i < k; i++) {
				const kvk_bf16_t want = kvk_bf16_round(values[engine_at(k, o, i)]);

				assert_int_equal(w[kvk_nn_weight_at(k, panel + half * 64 + o % 64, i)], want);
				assert_painted(&w[kvk_nn_weight_at(k, panel + (1 - half) * 64 + o % 64, i)], 2);
			}
		}
		assert_painted(w + count, 64);
	}
	free(values);
	free(w);
}

KV_TEST(p1_gains_and_embeddings_are_drawn_in_their_order)
{
	const uint32_t k = 9, n = 7;
	uint64_t state = SEED + FIRST * UINT64_C(0x9e3779b97f4a7c15);
	float *values = draw_tensor(&state, (size_t)k * n, 0.25f, WIDTH), *row = painted(k * n * sizeof *row);
	kvk_bf16_t *rows = painted(k * n * sizeof *rows);
	const kvk_nn_draw_t gain = draw_of(KVK_NN_ROW_F32, 1, k * n, row), table = draw_of(KVK_NN_ROWS, k, n, rows);

	assert_int_equal(kvk_nn_draw(nn, &gain, NULL), KV_OK);
	assert_int_equal(kvk_nn_draw(nn, &table, NULL), KV_OK);
	assert_memory_equal(row, values, k * n * sizeof *row);
	for (uint32_t i = 0; i < k * n; i++) {
		assert_int_equal(rows[i], kvk_bf16_round(values[i]));
	}
	assert_painted(row + k * n, 64);
	assert_painted(rows + k * n, 64);
	free(values);
	free(row);
	free(rows);
}

/* ---- products -------------------------------------------------------------------------------- */

#define K       192u
#define ROWS    75u /* of all groups */
#define RECORDS 90u
#define OWN     20u /* records that are the rank's own, from OWN_AT on */
#define OWN_AT  30u

static const uint32_t first_rows[] = {0, 33, 33, 70, ROWS};
#define GROUPS (KV_COUNT_OF(first_rows) - 1)

typedef struct product_case {
	uint32_t n;
	kvk_bf16_t *x, *w, *own;
	double *plain; /* [groups][n][K], the same weights */
	uint32_t record[ROWS];
} product_case_t;

/* In tiles and plain. */
static void open_product(product_case_t *c, uint32_t n)
{
	const size_t count = kvk_nn_weight_count(K, n);

	*c = (product_case_t){.n = n, .x = any_bf16((size_t)RECORDS * K), .own = any_bf16((size_t)OWN * K)};
	c->w = calloc(GROUPS * count, sizeof *c->w);
	c->plain = calloc((size_t)GROUPS * n * K, sizeof *c->plain);
	assert_non_null(c->w);
	assert_non_null(c->plain);
	for (uint32_t g = 0; g < GROUPS; g++) {
		for (uint32_t o = 0; o < n; o++) {
			for (uint32_t i = 0; i < K; i++) {
				const kvk_bf16_t value = kvk_bf16_round(any_value() * 0.1f);

				c->w[g * count + kvk_nn_weight_at(K, o, i)] = value;
				c->plain[((size_t)g * n + o) * K + i] = real(value);
			}
		}
	}
	for (uint32_t r = 0; r < ROWS; r++) {
		c->record[r] = (uint32_t)kv_test_below(&rng, RECORDS);
	}
	c->record[0] = OWN_AT;
	c->record[1] = OWN_AT + OWN - 1;
	c->record[2] = OWN_AT - 1;
	c->record[3] = OWN_AT + OWN;
}

static void close_product(product_case_t *c)
{
	free(c->x);
	free(c->w);
	free(c->own);
	free(c->plain);
}

static kvk_nn_product_t product_of(const product_case_t *c, kvk_nn_out_t out, void *y)
{
	return (kvk_nn_product_t){.k = K,
				  .n = c->n,
				  .groups = GROUPS,
				  .max_rows = RECORDS, /* more than there are */
				  .first = first_rows,
				  .x = c->x,
				  .w = c->w,
				  .y = y,
				  .out = out};
}

static double dot(const product_case_t *c, uint32_t group, uint32_t output, const kvk_bf16_t *x)
{
	const double *w = c->plain + ((size_t)group * c->n + output) * K;
	double sum = 0.0;

	for (uint32_t i = 0; i < K; i++) {
		sum += real(x[i]) * w[i];
	}

	return sum;
}

static uint32_t group_of(uint32_t row)
{
	uint32_t g = 0;

	while (row >= first_rows[g + 1]) {
		g++;
	}

	return g;
}

KV_TEST(p1_a_product_takes_the_matrix_of_each_rows_group)
{
	product_case_t c;
	float *y;

	open_product(&c, 144);
	y = painted(RECORDS * c.n * sizeof *y);

	const kvk_nn_product_t product = product_of(&c, KVK_NN_F32, y);

	assert_int_equal(kvk_nn_product(nn, &product, NULL), KV_OK);
	for (uint32_t r = 0; r < ROWS; r++) {
		for (uint32_t o = 0; o < c.n; o++) {
			assert_near((double)y[r * c.n + o], dot(&c, group_of(r), o, c.x + (size_t)r * K), 1e-5);
		}
	}
	assert_painted(y + ROWS * c.n, (RECORDS - ROWS) * c.n * sizeof *y);
	free(y);
	close_product(&c);
}

KV_TEST(p1_a_product_rounds_once_or_adds_in_fp32)
{
	product_case_t c;
	kvk_bf16_t *rounded;
	float *sums, *added;

	open_product(&c, 144);
	sums = painted(ROWS * c.n * sizeof *sums);
	added = painted(ROWS * c.n * sizeof *added);
	rounded = painted(ROWS * c.n * sizeof *rounded);
	for (uint32_t i = 0; i < ROWS * c.n; i++) {
		added[i] = 100.0f;
	}

	const kvk_nn_product_t plain = product_of(&c, KVK_NN_F32, sums), bf16 = product_of(&c, KVK_NN_BF16, rounded),
			       add = product_of(&c, KVK_NN_ADD, added);

	assert_int_equal(kvk_nn_product(nn, &plain, NULL), KV_OK);
	assert_int_equal(kvk_nn_product(nn, &bf16, NULL), KV_OK);
	assert_int_equal(kvk_nn_product(nn, &add, NULL), KV_OK);
	for (uint32_t i = 0; i < ROWS * c.n; i++) {
		assert_int_equal(rounded[i], kvk_bf16_round(sums[i]));
		assert_true(added[i] == 100.0f + sums[i]);
	}
	assert_painted(sums + ROWS * c.n, 64);
	assert_painted(added + ROWS * c.n, 64);
	assert_painted(rounded + ROWS * c.n, 64);
	free(sums);
	free(added);
	free(rounded);
	close_product(&c);
}

KV_TEST(p1_swiglu_joins_the_gates_and_ups_of_a_panel)
{
	product_case_t c;
	kvk_bf16_t *y;

	open_product(&c, 256);
	y = painted(ROWS * c.n / 2 * sizeof *y);

	const kvk_nn_product_t product = product_of(&c, KVK_NN_SWIGLU, y);

	assert_int_equal(kvk_nn_product(nn, &product, NULL), KV_OK);
	for (uint32_t r = 0; r < ROWS; r++) {
		for (uint32_t o = 0; o < c.n / 2; o++) {
			const uint32_t gate = o / 64 * 128 + o % 64;
			const double g = dot(&c, group_of(r), gate, c.x + (size_t)r * K);
			const double u = dot(&c, group_of(r), gate + 64, c.x + (size_t)r * K);

			assert_rounded(y[r * c.n / 2 + o], g / (1.0 + exp(-g)) * u);
		}
	}
	assert_painted(y + ROWS * c.n / 2, 64);
	free(y);
	close_product(&c);
}

KV_TEST(p1_a_product_gathers_own_rows_and_those_that_have_come)
{
	product_case_t c;
	float *y;

	open_product(&c, 16);
	y = painted(ROWS * c.n * sizeof *y);

	kvk_nn_product_t product = product_of(&c, KVK_NN_F32, y);

	product.x = NULL;
	product.record = c.record;
	product.rows = c.x;
	product.own = c.own;
	product.own_first = OWN_AT;
	product.own_count = OWN;
	assert_int_equal(kvk_nn_product(nn, &product, NULL), KV_OK);
	for (uint32_t r = 0; r < ROWS; r++) {
		const uint32_t record = c.record[r];
		const kvk_bf16_t *x = record >= OWN_AT && record < OWN_AT + OWN ? c.own + (size_t)(record - OWN_AT) * K
										: c.x + (size_t)record * K;

		for (uint32_t o = 0; o < c.n; o++) {
			assert_near((double)y[r * c.n + o], dot(&c, group_of(r), o, x), 1e-5);
		}
	}
	assert_painted(y + ROWS * c.n, 64);
	free(y);
	close_product(&c);
}

KV_TEST(p1_without_groups_all_rows_have_one_matrix)
{
	product_case_t c;
	float *y;

	open_product(&c, 32);
	y = painted(RECORDS * c.n * sizeof *y);

	kvk_nn_product_t product = product_of(&c, KVK_NN_F32, y);

	product.first = NULL;
	product.groups = 1;
	assert_int_equal(kvk_nn_product(nn, &product, NULL), KV_OK);
	for (uint32_t r = 0; r < RECORDS; r++) {
		for (uint32_t o = 0; o < c.n; o++) {
			assert_near((double)y[r * c.n + o], dot(&c, 0, o, c.x + (size_t)r * K), 1e-5);
		}
	}
	assert_painted(y + RECORDS * c.n, 64);
	free(y);
	close_product(&c);
}

KV_TEST(p1_the_product_of_a_row_alone_has_the_bits_it_has_amid_others)
{
	product_case_t c;
	float *y;

	open_product(&c, 144);
	y = painted(ROWS * c.n * sizeof *y);

	const kvk_nn_product_t product = product_of(&c, KVK_NN_F32, y);

	assert_int_equal(kvk_nn_product(nn, &product, NULL), KV_OK);
	for (uint32_t r = 0; r < ROWS; r++) {
		float alone[144];
		kvk_nn_product_t one = product;

		one.first = NULL;
		one.max_rows = 1;
		one.x += (size_t)r * K;
		one.w += group_of(r) * kvk_nn_weight_count(K, c.n);
		one.y = alone;
		assert_int_equal(kvk_nn_product(nn, &one, NULL), KV_OK);
		assert_memory_equal(alone, y + r * c.n, sizeof alone);
	}
	free(y);
	close_product(&c);
}

KV_TEST(p1_drawn_weights_multiply_as_the_engines_matrix_does)
{
	const uint32_t k = 128, n = 80, rows = 5;
	uint64_t state = SEED + FIRST * UINT64_C(0x9e3779b97f4a7c15);
	float *values = draw_tensor(&state, (size_t)k * n, 0.25f, WIDTH), *y = painted(rows * n * sizeof *y);
	kvk_bf16_t *w = painted(kvk_nn_weight_count(k, n) * sizeof *w), *x = any_bf16((size_t)rows * k);
	const kvk_nn_draw_t draw = draw_of(KVK_NN_TILES, k, n, w);
	const kvk_nn_product_t product = {
		.k = k, .n = n, .groups = 1, .max_rows = rows, .x = x, .w = w, .y = y, .out = KVK_NN_F32};

	assert_int_equal(kvk_nn_draw(nn, &draw, NULL), KV_OK);
	assert_int_equal(kvk_nn_product(nn, &product, NULL), KV_OK);
	for (uint32_t r = 0; r < rows; r++) {
		for (uint32_t o = 0; o < n; o++) {
			double sum = 0.0;

			for (uint32_t i = 0; i < k; i++) {
				sum += real(x[r * k + i]) * real(kvk_bf16_round(values[engine_at(k, o, i)]));
			}
			assert_near((double)y[r * n + o], sum, 1e-5);
		}
	}
	free(values);
	free(y);
	free(w);
	free(x);
}

/* gpu_product.c: by the waves of tiles, 132 SMs being all of an H200 and 124 what transport leaves. */
KV_TEST(p11_a_dense_product_has_the_tiles_that_fill_the_waves)
{
	static const struct {
		uint32_t rows, n, sms, panels;
	} cases[] = {
		{1024, 2048, 132, 1}, /* 1 wave of 128 tiles, or 1 of 64 */
		{1024, 2048, 124, 2}, /* 2 or 1 */
		{1024, 5120, 124, 1}, /* 3 or 2 */
		{2048, 2048, 124, 1}, /* 3 or 2 */
		{2048, 2048, 132, 2}, /* 2 or 1 */
		{2048, 5120, 124, 2}, /* 6 or 3 */
		{8192, 8192, 132, 2}, /* 32 or 16 */
		{1024, 128, 124, 1},  /* half of a tile of two would lie beyond n */
		{1, 16, 1, 1},
		{301, 512, 1, 2}, /* twelve tiles or six */
		{UINT32_MAX, UINT32_MAX - 15, 1, 2},
	};

	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		const kvk_nn_product_t dense = {.n = cases[i].n, .max_rows = cases[i].rows, .groups = 1};

		assert_int_equal(kvk_nn_choose_tiles(&dense, cases[i].sms),
				 cases[i].panels == 1 ? KVK_NN_TILES_OF_ONE_PANEL : KVK_NN_TILES_OF_TWO_PANELS);
	}
}

/* ---- rows ------------------------------------------------------------------------------------ */

KV_TEST(p1_tokens_get_their_row_of_the_table)
{
	const uint32_t tokens[] = {4, 0, 9, 4}, hidden = 24;
	kvk_bf16_t *table = any_bf16(10u * hidden);
	float *x = painted(4 * hidden * sizeof *x);
	const kvk_nn_embed_t embed = {.rows = 4, .hidden = hidden, .tokens = tokens, .table = table, .x = x};

	assert_int_equal(kvk_nn_embed(nn, &embed, NULL), KV_OK);
	for (uint32_t i = 0; i < 4 * hidden; i++) {
		assert_true(x[i] == kvk_bf16_to_float(table[tokens[i / hidden] * hidden + i % hidden]));
	}
	assert_painted(x + 4 * hidden, 64);
	free(table);
	free(x);
}

#define HIDDEN    520u
#define NORM_ROWS 6u

typedef struct norm_case {
	float *from, *x, *gain;
	kvk_bf16_t *added, *y;
} norm_case_t;

static norm_case_t open_norm(void)
{
	const size_t count = (size_t)NORM_ROWS * HIDDEN;
	norm_case_t c = {.from = any_floats(count, 0.0f, 3.0f), .x = painted(count * sizeof(float))};

	c.gain = any_floats(HIDDEN, 1.0f, 0.5f);
	c.added = any_bf16(count);
	c.y = painted(count * sizeof *c.y);
	for (uint32_t i = 0; i < HIDDEN; i++) {
		c.from[i] *= 1e-3f; /* a row that eps matters to */
		c.added[i] = kvk_bf16_round(c.from[i]);
	}
	memcpy(c.x, c.from, count * sizeof(float));

	return c;
}

static void close_norm(norm_case_t *c)
{
	free(c->from);
	free(c->x);
	free(c->gain);
	free(c->added);
	free(c->y);
}

static void check_norm_row(const norm_case_t *c, const float *x, const kvk_bf16_t *y)
{
	double squares = 0.0;

	for (uint32_t i = 0; i < HIDDEN; i++) {
		squares += (double)x[i] * (double)x[i];
	}
	for (uint32_t i = 0; i < HIDDEN; i++) {
		assert_rounded(y[i], (double)x[i] / sqrt(squares / HIDDEN + 1e-5) * (double)c->gain[i]);
	}
}

KV_TEST(p1_what_is_added_stays_in_x_and_is_normed_with_it)
{
	const size_t count = (size_t)NORM_ROWS * HIDDEN;
	norm_case_t c = open_norm();
	kvk_nn_norm_t norm = {
		.rows = NORM_ROWS, .hidden = HIDDEN, .x = c.x, .added = c.added, .gain = c.gain, .eps = 1e-5f};

	assert_int_equal(kvk_nn_norm(nn, &norm, NULL), KV_OK); /* y is NULL */
	for (size_t i = 0; i < count; i++) {
		assert_true(c.x[i] == c.from[i] + kvk_bf16_to_float(c.added[i]));
	}
	memcpy(c.x, c.from, count * sizeof(float));
	norm.y = c.y;
	assert_int_equal(kvk_nn_norm(nn, &norm, NULL), KV_OK);
	for (uint32_t r = 0; r < NORM_ROWS; r++) {
		float x[HIDDEN];
		kvk_bf16_t y[HIDDEN];
		const kvk_nn_norm_t one = {.rows = 1,
					   .hidden = HIDDEN,
					   .x = x,
					   .added = c.added + (size_t)r * HIDDEN,
					   .gain = c.gain,
					   .eps = 1e-5f,
					   .y = y};

		for (uint32_t i = 0; i < HIDDEN; i++) {
			const size_t at = (size_t)r * HIDDEN + i;

			assert_true(c.x[at] == c.from[at] + kvk_bf16_to_float(c.added[at]));
		}
		check_norm_row(&c, c.x + (size_t)r * HIDDEN, c.y + (size_t)r * HIDDEN);
		memcpy(x, c.from + (size_t)r * HIDDEN, sizeof x);
		assert_int_equal(kvk_nn_norm(nn, &one, NULL), KV_OK); /* alone, too */
		assert_memory_equal(x, c.x + (size_t)r * HIDDEN, sizeof x);
		assert_memory_equal(y, c.y + (size_t)r * HIDDEN, sizeof y);
	}
	assert_painted(c.x + count, 64);
	assert_painted(c.y + count, 64);
	close_norm(&c);
}

KV_TEST(p1_picked_rows_are_normed_and_left_as_they_are)
{
	const uint32_t pick[] = {5, 0, 5, 2};
	norm_case_t c = open_norm();
	const kvk_nn_norm_t norm = {
		.rows = 4, .hidden = HIDDEN, .x = c.x, .gain = c.gain, .pick = pick, .eps = 1e-5f, .y = c.y};

	assert_int_equal(kvk_nn_norm(nn, &norm, NULL), KV_OK);
	for (uint32_t r = 0; r < 4; r++) {
		check_norm_row(&c, c.from + (size_t)pick[r] * HIDDEN, c.y + (size_t)r * HIDDEN);
	}
	assert_memory_equal(c.x, c.from, (size_t)NORM_ROWS * HIDDEN * sizeof(float));
	assert_painted(c.y + (size_t)4 * HIDDEN, (size_t)2 * HIDDEN * sizeof *c.y);
	close_norm(&c);
}

/* ---- choices --------------------------------------------------------------------------------- */

#define EXPERTS    48u
#define TOP_K      5u
#define ROUTE_ROWS 40u

typedef struct route_case {
	float logits[ROUTE_ROWS][EXPERTS];
	uint32_t ids[ROUTE_ROWS][TOP_K];
	float weights[ROUTE_ROWS][TOP_K];
} route_case_t;

static kvk_nn_route_t route_of(route_case_t *c, uint32_t row, uint32_t rows, uint32_t norms)
{
	return (kvk_nn_route_t){.rows = rows,
				.experts = EXPERTS,
				.top_k = TOP_K,
				.norm_top_k = norms,
				.logits = c->logits[row],
				.ids = c->ids[row],
				.weights = c->weights[row]};
}

/* The best by (logit, lowest id) that is not among the n before. */
static uint32_t best_expert(const float *logits, const uint32_t *before, uint32_t n)
{
	uint32_t best = EXPERTS;

	for (uint32_t e = 0; e < EXPERTS; e++) {
		int is_left = 1;

		for (uint32_t i = 0; i < n; i++) {
			is_left = is_left && before[i] != e;
		}
		best = is_left && (best == EXPERTS || logits[e] > logits[best]) ? e : best;
	}

	return best;
}

static void check_route(route_case_t *c, uint32_t norms)
{
	static route_case_t alone;
	const kvk_nn_route_t route = route_of(c, 0, ROUTE_ROWS, norms);

	assert_int_equal(kvk_nn_route(nn, &route, NULL), KV_OK);
	alone = *c;
	for (uint32_t r = 0; r < ROUTE_ROWS; r++) {
		const kvk_nn_route_t one = route_of(&alone, r, 1, norms);
		double all = 0.0, chosen = 0.0;

		memset(alone.ids[r], PAINT, sizeof alone.ids[r]);
		memset(alone.weights[r], PAINT, sizeof alone.weights[r]);
		assert_int_equal(kvk_nn_route(nn, &one, NULL), KV_OK);
		for (uint32_t e = 0; e < EXPERTS; e++) {
			all += exp((double)c->logits[r][e]);
		}
		for (uint32_t k = 0; k < TOP_K; k++) {
			assert_int_equal(c->ids[r][k], best_expert(c->logits[r], c->ids[r], k));
			chosen += exp((double)c->logits[r][c->ids[r][k]]);
		}
		for (uint32_t k = 0; k < TOP_K; k++) {
			const double weight = exp((double)c->logits[r][c->ids[r][k]]) / (norms ? chosen : all);

			assert_true(fabs((double)c->weights[r][k] - weight) <= 1e-6 * weight);
		}
	}
	assert_memory_equal(&alone, c, sizeof alone);
}

KV_TEST(p1_a_token_goes_to_its_largest_experts_and_of_equals_to_the_lowest)
{
	static route_case_t c;

	for (uint32_t levels = 0; levels <= 3; levels++) { /* 0: any logits, 1: all equal */
		for (uint32_t i = 0; i < ROUTE_ROWS * EXPERTS; i++) {
			const float level = levels ? (float)kv_test_below(&rng, levels) : 0.0f;

			c.logits[i / EXPERTS][i % EXPERTS] = levels ? level : 8.0f * any_value();
		}
		check_route(&c, 0);
		check_route(&c, 1);
	}
}

KV_TEST(p1_of_equal_logits_the_lowest_token_is_chosen)
{
	float logits[4][9] = {{0, 1, 2, 3, 9, 3, 9, 9, 1},
			      {-5, -5, -5, -5, -5, -5, -5, -5, -5},
			      {-3, -2, -1, -1.5f, -1, -9, -9, -9, -9},
			      {7, 0, 0, 0, 0, 0, 0, 0, 7}};
	uint32_t ids[5];
	const kvk_nn_choose_t choose = {.rows = 4, .vocab = 9, .logits = logits[0], .ids = ids};

	memset(ids, PAINT, sizeof ids);
	assert_int_equal(kvk_nn_choose(nn, &choose, NULL), KV_OK);
	assert_int_equal(ids[0], 4);
	assert_int_equal(ids[1], 0);
	assert_int_equal(ids[2], 2);
	assert_int_equal(ids[3], 0);
	assert_painted(&ids[4], sizeof ids[4]);
}

/* ---- what is refused ------------------------------------------------------------------------- */

/* Of a sound structure that has nothing to do, so that the refusal alone counts. */
#define REFUSED(operation, sound, member, value)                                                                       \
	do {                                                                                                           \
		__typeof__(sound) changed_ = sound;                                                                    \
		changed_.member = value;                                                                               \
		assert_int_equal(operation(nn, &changed_, NULL), KV_ERR_ARG);                                          \
	} while (0)

KV_TEST(p10_draws_of_no_such_shape_are_refused)
{
	kvk_nn_draw_t row = draw_of(KVK_NN_ROW_F32, 1, 8, NULL), rows = draw_of(KVK_NN_ROWS, 8, 8, NULL);
	kvk_nn_draw_t tiles = draw_of(KVK_NN_TILES, 64, 16, NULL), gates = draw_of(KVK_NN_GATES, 64, 64, NULL);
	kvk_nn_draw_t ups = draw_of(KVK_NN_UPS, 64, 64, NULL);

	REFUSED(kvk_nn_draw, row, n, 0);
	REFUSED(kvk_nn_draw, rows, n, 0);
	REFUSED(kvk_nn_draw, rows, k, 0);
	REFUSED(kvk_nn_draw, tiles, k, 0);
	REFUSED(kvk_nn_draw, tiles, k, 96);
	REFUSED(kvk_nn_draw, tiles, n, 0);
	REFUSED(kvk_nn_draw, tiles, n, 24);
	REFUSED(kvk_nn_draw, gates, k, 96);
	REFUSED(kvk_nn_draw, gates, n, 96);
	REFUSED(kvk_nn_draw, ups, k, 32);
	REFUSED(kvk_nn_draw, ups, n, 16);
}

KV_TEST(p10_products_of_no_such_shape_are_refused)
{
	kvk_nn_product_t product = {.k = 64, .n = 16, .groups = 1, .out = KVK_NN_F32};
	kvk_nn_product_t swiglu = {.k = 64, .n = 128, .groups = 1, .out = KVK_NN_SWIGLU};

	assert_int_equal(kvk_nn_product(nn, &product, NULL), KV_OK);
	assert_int_equal(kvk_nn_product(nn, &swiglu, NULL), KV_OK);
	REFUSED(kvk_nn_product, product, k, 0);
	REFUSED(kvk_nn_product, product, k, 32);
	REFUSED(kvk_nn_product, product, n, 0);
	REFUSED(kvk_nn_product, product, n, 8);
	REFUSED(kvk_nn_product, product, groups, 0);
	REFUSED(kvk_nn_product, swiglu, n, 64);
	REFUSED(kvk_nn_product, swiglu, n, 192);
}

KV_TEST(p10_heads_of_no_such_shape_are_refused)
{
	static const kvk_nn_heads_t bad[] = {
		{0, 1, 64, 16}, {8, 0, 64, 16}, {6, 2, 64, 16},  {32, 1, 64, 16}, {9, 2, 64, 16}, {1, 2, 64, 16},
		{8, 2, 0, 16},  {8, 2, 96, 16}, {8, 2, 256, 16}, {8, 2, 64, 0},   {8, 2, 64, 8},  {8, 2, 64, 24},
	};
	kvk_nn_qkv_t qkv = {.shape = {8, 2, 64, 16}};
	kvk_nn_attention_t attention = {.shape = {8, 2, 64, 16}};

	assert_int_equal(kvk_nn_qkv(nn, &qkv, NULL), KV_OK);
	assert_int_equal(kvk_nn_attention(nn, &attention, NULL), KV_OK);
	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		REFUSED(kvk_nn_qkv, qkv, shape, bad[i]);
		REFUSED(kvk_nn_attention, attention, shape, bad[i]);
	}
}

KV_TEST(p10_rows_of_no_such_shape_are_refused)
{
	const uint32_t pick[] = {0};
	const kvk_bf16_t added[8] = {0};
	kvk_nn_embed_t embed = {.hidden = 8};
	kvk_nn_norm_t norm = {.hidden = 8, .pick = pick};
	kvk_nn_route_t route = {.experts = 32, .top_k = 8}, few = {.experts = 16, .top_k = 16};
	kvk_nn_choose_t choose = {.vocab = 1};

	assert_int_equal(kvk_nn_embed(nn, &embed, NULL), KV_OK);
	assert_int_equal(kvk_nn_norm(nn, &norm, NULL), KV_OK);
	assert_int_equal(kvk_nn_route(nn, &route, NULL), KV_OK);
	assert_int_equal(kvk_nn_route(nn, &few, NULL), KV_OK);
	assert_int_equal(kvk_nn_choose(nn, &choose, NULL), KV_OK);
	REFUSED(kvk_nn_embed, embed, hidden, 0);
	REFUSED(kvk_nn_embed, embed, hidden, 12);
	REFUSED(kvk_nn_norm, norm, hidden, 0);
	REFUSED(kvk_nn_norm, norm, hidden, 4);
	REFUSED(kvk_nn_norm, norm, added, added);
	REFUSED(kvk_nn_route, route, experts, 0);
	REFUSED(kvk_nn_route, route, experts, 24);
	REFUSED(kvk_nn_route, route, experts, 1040);
	REFUSED(kvk_nn_route, route, top_k, 0);
	REFUSED(kvk_nn_route, route, top_k, 17);
	REFUSED(kvk_nn_choose, choose, vocab, 0);
}

KV_TEST_MAIN(open_twin, close_twin)
