/* The twin of heads and attention against plain references in double. */
#include "nn_values.h"

/* ---- heads ----------------------------------------------------------------------------------- */

#define SEQUENCES  3u
#define MAX_BLOCKS 4u
#define HEAD_ROWS  20u
#define EPS        0.1f

typedef struct heads_case {
	kvk_nn_heads_t shape;
	kvk_bf16_t *qkv, *q, *cache;
	float *q_gain, *k_gain, *rotation;
	kvk_nn_row_t places[HEAD_ROWS];
	uint32_t blocks[SEQUENCES * MAX_BLOCKS];
	size_t q_count, cache_count;
} heads_case_t;

/* Blocks in no order; rows of all sequences, none at the place of another. */
static void open_heads(heads_case_t *c, kvk_nn_heads_t shape)
{
	const uint32_t positions = MAX_BLOCKS * shape.block_tokens, blocks = SEQUENCES * MAX_BLOCKS;
	const uint32_t all = shape.heads + 2 * shape.kv_heads;

	*c = (heads_case_t){.shape = shape};
	c->q_count = (size_t)HEAD_ROWS * shape.heads * shape.head_dim;
	c->cache_count = (size_t)blocks * 2 * shape.block_tokens * shape.kv_heads * shape.head_dim;
	c->qkv = any_bf16((size_t)HEAD_ROWS * all * shape.head_dim);
	c->q = painted(c->q_count * sizeof *c->q);
	c->cache = painted(c->cache_count * sizeof *c->cache);
	c->q_gain = any_floats(shape.head_dim, 1.5f, 0.2f);
	c->k_gain = any_floats(shape.head_dim, 1.5f, 0.2f);
	c->rotation = any_floats((size_t)positions * shape.head_dim, 0.0f, 1.0f); /* any two factors */
	for (uint32_t b = 0; b < blocks; b++) {
		c->blocks[b] = (b * 5 + 3) % blocks;
	}
	for (uint32_t r = 0; r < HEAD_ROWS; r++) {
		c->places[r].sequence = r % SEQUENCES;
		c->places[r].position = (r * 7 + 5) % positions;
	}
}

static void close_heads(heads_case_t *c)
{
	free(c->qkv);
	free(c->q);
	free(c->cache);
	free(c->q_gain);
	free(c->k_gain);
	free(c->rotation);
}

static kvk_nn_qkv_t qkv_of(const heads_case_t *c, int norms)
{
	return (kvk_nn_qkv_t){.shape = c->shape,
			      .rows = HEAD_ROWS,
			      .qkv = c->qkv,
			      .q_gain = norms ? c->q_gain : NULL,
			      .k_gain = norms ? c->k_gain : NULL,
			      .rotation = c->rotation,
			      .places = c->places,
			      .blocks = c->blocks,
			      .max_blocks = MAX_BLOCKS,
			      .eps = EPS,
			      .q_out = c->q,
			      .cache = c->cache};
}

static const kvk_bf16_t *cached(const heads_case_t *c, kvk_nn_row_t place, uint32_t value, uint32_t kv_head)
{
	const uint32_t tokens = c->shape.block_tokens, dim = c->shape.head_dim;
	const uint32_t block = c->blocks[place.sequence * MAX_BLOCKS + place.position / tokens];
	const size_t token = ((size_t)block * 2 + value) * tokens + place.position % tokens;

	return c->cache + (token * c->shape.kv_heads + kv_head) * dim;
}

/* A head, normed and rotated, against what was made of it. */
static void check_head(const heads_case_t *c, const kvk_bf16_t *from, const float *gain, uint32_t position,
		       const kvk_bf16_t *got)
{
	const uint32_t dim = c->shape.head_dim;
	const float *rotation = c->rotation + (size_t)position * dim;
	double x[128], squares = 0.0;

	for (uint32_t i = 0; i < dim; i++) {
		squares += real(from[i]) * real(from[i]);
	}
	for (uint32_t i = 0; i < dim; i++) {
		x[i] = gain ? real(from[i]) / sqrt(squares / dim + (double)EPS) * (double)gain[i] : real(from[i]);
	}
	for (uint32_t i = 0; i < dim / 2; i++) {
		const double cosine = (double)rotation[2 * i], sine = (double)rotation[2 * i + 1];

		assert_rounded(got[i], x[i] * cosine - x[i + dim / 2] * sine);
		assert_rounded(got[i + dim / 2], x[i + dim / 2] * cosine + x[i] * sine);
	}
}

static void check_qkv(kvk_nn_heads_t shape, int norms)
{
	const uint32_t all = shape.heads + 2 * shape.kv_heads, dim = shape.head_dim;
	heads_case_t c;
	size_t written = 0;

	open_heads(&c, shape);

	const kvk_nn_qkv_t qkv = qkv_of(&c, norms);

	assert_int_equal(kvk_nn_qkv(nn, &qkv, NULL), KV_OK);
	for (uint32_t r = 0; r < HEAD_ROWS; r++) {
		const kvk_bf16_t *from = c.qkv + (size_t)r * all * dim;
		const uint32_t position = c.places[r].position;

		for (uint32_t h = 0; h < shape.heads; h++, from += dim) {
			check_head(&c, from, qkv.q_gain, position, c.q + ((size_t)r * shape.heads + h) * dim);
		}
		for (uint32_t h = 0; h < shape.kv_heads; h++, from += dim) {
			check_head(&c, from, qkv.k_gain, position, cached(&c, c.places[r], 0, h));
		}
		for (uint32_t h = 0; h < shape.kv_heads; h++, from += dim) {
			assert_memory_equal(from, cached(&c, c.places[r], 1, h), dim * sizeof *from);
		}
	}
	for (size_t i = 0; i < c.cache_count; i++) {
		written += c.cache[i] != (PAINT << 8 | PAINT);
	}
	assert_int_equal(written, (size_t)HEAD_ROWS * 2 * shape.kv_heads * dim);
	assert_painted(c.cache + c.cache_count, 64);
	assert_painted(c.q + c.q_count, 64);
	close_heads(&c);
}

KV_TEST(p1_heads_are_normed_and_rotated_and_reach_their_block)
{
	check_qkv((kvk_nn_heads_t){8, 2, 128, 16}, 0);
	check_qkv((kvk_nn_heads_t){8, 2, 128, 16}, 1);
	check_qkv((kvk_nn_heads_t){16, 1, 64, 32}, 0);
	check_qkv((kvk_nn_heads_t){3, 3, 64, 16}, 1);
}

KV_TEST(p1_the_heads_of_a_row_alone_have_the_bits_they_have_amid_others)
{
	const kvk_nn_heads_t shape = {8, 2, 128, 16};
	heads_case_t c;
	kvk_bf16_t *q, *cache;

	open_heads(&c, shape);
	q = painted(c.q_count * sizeof *q);
	cache = painted(c.cache_count * sizeof *cache);

	const kvk_nn_qkv_t qkv = qkv_of(&c, 1);

	assert_int_equal(kvk_nn_qkv(nn, &qkv, NULL), KV_OK);
	for (uint32_t r = HEAD_ROWS; r-- > 0;) {
		kvk_nn_qkv_t one = qkv;

		one.rows = 1;
		one.qkv += (size_t)r * (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
		one.places += r;
		one.q_out = q + (size_t)r * shape.heads * shape.head_dim;
		one.cache = cache;
		assert_int_equal(kvk_nn_qkv(nn, &one, NULL), KV_OK);
	}
	assert_memory_equal(q, c.q, c.q_count * sizeof *q);
	assert_memory_equal(cache, c.cache, c.cache_count * sizeof *cache);
	free(q);
	free(cache);
	close_heads(&c);
}

/* ---- attention ------------------------------------------------------------------------------- */

/* One row and head against all keys up to its position. */
static void check_attention_head(const heads_case_t *c, kvk_nn_row_t place, uint32_t head, const kvk_bf16_t *q,
				 const kvk_bf16_t *out)
{
	const uint32_t dim = c->shape.head_dim, kv_head = head / (c->shape.heads / c->shape.kv_heads);
	double scores[MAX_BLOCKS * 32], weighed[128] = {0}, sum = 0.0, max = -INFINITY;

	for (uint32_t p = 0; p <= place.position; p++) {
		const kvk_bf16_t *key = cached(c, (kvk_nn_row_t){place.sequence, p}, 0, kv_head);

		scores[p] = 0.0;
		for (uint32_t i = 0; i < dim; i++) {
			scores[p] += real(q[i]) * real(key[i]);
		}
		max = fmax(max, scores[p]);
	}
	for (uint32_t p = 0; p <= place.position; p++) {
		const kvk_bf16_t *value = cached(c, (kvk_nn_row_t){place.sequence, p}, 1, kv_head);
		const double weight = exp((scores[p] - max) / sqrt(dim));

		sum += weight;
		for (uint32_t i = 0; i < dim; i++) {
			weighed[i] += weight * real(value[i]);
		}
	}
	/* weights are rounded to BF16, values at most 1: 2^-9 of the sum of what is weighed */
	for (uint32_t i = 0; i < dim; i++) {
		if (!(fabs(real(out[i]) - weighed[i] / sum) <= 1.0 / 256.0 + fabs(weighed[i] / sum) / 256.0)) {
			fail_msg("position %u head %u: %g, not %g", place.position, head, real(out[i]),
				 weighed[i] / sum);
		}
	}
}

static void fill_cache(heads_case_t *c)
{
	for (size_t i = 0; i < c->cache_count; i++) {
		c->cache[i] = kvk_bf16_round(any_value());
	}
	for (size_t i = 0; i < c->q_count; i++) {
		c->q[i] = kvk_bf16_round(2.0f * any_value());
	}
}

/* Tiles of rows 0 to HEAD_ROWS, of several lengths. */
static const kvk_nn_tile_t attention_tiles[] = {{0, 4, 1, 124}, {4, 1, 2, 64}, {5, 3, 0, 62},
						{8, 1, 2, 63},  {9, 4, 1, 0},  {13, 4, 0, 30}};

static void check_attention(kvk_nn_heads_t shape)
{
	const size_t row_count = (size_t)shape.heads * shape.head_dim;
	heads_case_t c;
	kvk_bf16_t *out;

	open_heads(&c, shape);
	fill_cache(&c);
	out = painted(c.q_count * sizeof *out);

	kvk_nn_attention_t attention = {.shape = shape,
					.tiles = KV_COUNT_OF(attention_tiles),
					.tile = attention_tiles,
					.blocks = c.blocks,
					.max_blocks = MAX_BLOCKS,
					.q = c.q,
					.cache = c.cache,
					.out = out};

	assert_int_equal(kvk_nn_attention(nn, &attention, NULL), KV_OK);
	for (uint32_t t = 0; t < KV_COUNT_OF(attention_tiles); t++) {
		const kvk_nn_tile_t tile = attention_tiles[t];

		for (uint32_t r = 0; r < tile.rows; r++) {
			const kvk_nn_row_t place = {tile.sequence, tile.position + r};
			const kvk_nn_tile_t alone = {tile.row + r, 1, tile.sequence, tile.position + r};
			const size_t at = (tile.row + r) * row_count;
			kvk_bf16_t *again = painted(c.q_count * sizeof *again);

			for (uint32_t h = 0; h < shape.heads; h++) {
				const size_t head = at + (size_t)h * shape.head_dim;

				check_attention_head(&c, place, h, c.q + head, out + head);
			}
			attention.tiles = 1;
			attention.tile = &alone;
			attention.out = again;
			assert_int_equal(kvk_nn_attention(nn, &attention, NULL), KV_OK);
			assert_memory_equal(again + at, out + at, row_count * sizeof *out);
			free(again);
		}
	}
	assert_painted(out + 17 * row_count, (HEAD_ROWS - 17) * row_count * sizeof *out);
	free(out);
	close_heads(&c);
}

KV_TEST(p1_attention_weighs_all_positions_up_to_the_rows_own_alone_or_amid_others)
{
	check_attention((kvk_nn_heads_t){8, 2, 128, 32});
	check_attention((kvk_nn_heads_t){16, 1, 64, 32});
	check_attention((kvk_nn_heads_t){3, 3, 64, 32});
}

KV_TEST_MAIN(open_twin, close_twin)
