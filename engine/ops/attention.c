/* Grouped-query attention over a paged cache.
 *
 * The query heads of one KV head are the rows of a tile: they see the same keys, so nothing beyond a row's own position
 * is ever read, and what a block holds beyond the sequence (an earlier owner's bytes) cannot matter.
 */
#include "kve/real.h"
#include "tile.h"

#include <math.h>
#include <string.h>

/* Scores of one row and KV head: [group][stride]. */
static size_t score_stride(const kve_config_t *c)
{
	return c->max_tokens;
}

size_t kve_attention_scratch(const kve_config_t *config, uint32_t rows)
{
	const size_t group = config->heads / config->kv_heads;
	const size_t keys = (size_t)config->head_dim * config->block_tokens;

	return rows * group * score_stride(config) + keys;
}

static const float *page_of(const kve_attention_t *a, uint32_t block, uint32_t value, uint32_t kv_head)
{
	const kve_config_t *c = a->config;
	const size_t token = (size_t)c->kv_heads * c->head_dim;
	const size_t page = token * c->block_tokens;

	return a->cache + (size_t)a->blocks[block] * 2 * page + value * page + (size_t)kv_head * c->head_dim;
}

/* Keys of one block as [dim][token], so that tokens become the outputs of a tile. */
static void transpose_keys(const kve_attention_t *a, const float *keys, float *out)
{
	const kve_config_t *c = a->config;
	const size_t token = (size_t)c->kv_heads * c->head_dim;

	for (uint32_t t = 0; t < c->block_tokens; t++) {
		for (uint32_t d = 0; d < c->head_dim; d++) {
			out[(size_t)d * c->block_tokens + t] = keys[t * token + d];
		}
	}
}

/* Scores of every row against one block. Those beyond a row's position are computed too and ignored by the softmax. */
static void score_block(const kve_attention_t *a, uint32_t kv_head, uint32_t block, const float *keys)
{
	const kve_config_t *c = a->config;
	const uint32_t group = c->heads / c->kv_heads;
	const uint32_t first = block * c->block_tokens;
	const uint32_t from = first > a->start ? first - a->start : 0;

	for (uint32_t r = from; r < a->rows; r++) {
		for (uint32_t t = 0; t < c->block_tokens; t += KVE_PANEL) {
			const kve_tile_t tile = {
				.x = a->q + ((size_t)r * c->heads + (size_t)kv_head * group) * c->head_dim,
				.x_stride = c->head_dim,
				.w = keys + t,
				.w_stride = c->block_tokens,
				.y = a->scratch + (size_t)r * group * score_stride(c) + first + t,
				.y_stride = score_stride(c),
				.rows = group,
				.terms = c->head_dim,
			};

			kve_tile(&tile);
		}
	}
}

/* p[j] = e^(scale * (s[j] - max)) in place; returns their sum. Not divided yet: the output is, once. */
static float softmax(float *s, uint32_t n, float scale)
{
	float lane[16];
	float max = s[0];
	float sum = 0.0f;
	uint32_t j = 0;

	for (uint32_t i = 0; i < 16; i++) {
		lane[i] = max;
	}
	for (; j + 16 <= n; j += 16) {
		for (uint32_t i = 0; i < 16; i++) {
			lane[i] = s[j + i] > lane[i] ? s[j + i] : lane[i];
		}
	}
	for (uint32_t i = 0; i < 16; i++) {
		max = lane[i] > max ? lane[i] : max;
	}
	for (; j < n; j++) {
		max = s[j] > max ? s[j] : max;
	}

	for (j = 0; j < n; j++) {
		s[j] = kve_exp32((s[j] - max) * scale);
	}
	for (j = 0; j < n; j++) {
		sum += s[j];
	}

	return sum;
}

/* out[group][dim] = sum over positions of p * v, for one row. */
static void weigh_values(const kve_attention_t *a, uint32_t kv_head, uint32_t row)
{
	const kve_config_t *c = a->config;
	const uint32_t group = c->heads / c->kv_heads;
	const uint32_t n = a->start + row + 1;
	const float *p = a->scratch + (size_t)row * group * score_stride(c);
	float *out = a->out + ((size_t)row * c->heads + (size_t)kv_head * group) * c->head_dim;

	for (uint32_t first = 0; first < n; first += c->block_tokens) {
		const float *values = page_of(a, first / c->block_tokens, 1, kv_head);

		for (uint32_t d = 0; d < c->head_dim; d += KVE_PANEL) {
			const kve_tile_t tile = {
				.x = p + first,
				.x_stride = score_stride(c),
				.w = values + d,
				.w_stride = (size_t)c->kv_heads * c->head_dim,
				.y = out + d,
				.y_stride = c->head_dim,
				.rows = group,
				.terms = n - first < c->block_tokens ? n - first : c->block_tokens,
				.accumulate = first > 0,
			};

			kve_tile(&tile);
		}
	}
}

static void finish_row(const kve_attention_t *a, uint32_t kv_head, uint32_t row)
{
	const kve_config_t *c = a->config;
	const uint32_t group = c->heads / c->kv_heads;
	const float scale = 1.0f / sqrtf((float)c->head_dim);
	float *out = a->out + ((size_t)row * c->heads + (size_t)kv_head * group) * c->head_dim;
	float sums[KVE_MAX_GROUP];

	for (uint32_t g = 0; g < group; g++) {
		sums[g] = softmax(a->scratch + ((size_t)row * group + g) * score_stride(c), a->start + row + 1, scale);
	}

	weigh_values(a, kv_head, row);

	for (uint32_t g = 0; g < group; g++) {
		for (uint32_t d = 0; d < c->head_dim; d++) {
			out[g * c->head_dim + d] /= sums[g];
		}
	}
}

void kve_attention(const kve_attention_t *a)
{
	const kve_config_t *c = a->config;
	const uint32_t group = c->heads / c->kv_heads;
	const uint32_t blocks = (a->start + a->rows + c->block_tokens - 1) / c->block_tokens;
	float *keys = a->scratch + (size_t)a->rows * group * score_stride(c);

	for (uint32_t h = 0; h < c->kv_heads; h++) {
		for (uint32_t b = 0; b < blocks; b++) {
			transpose_keys(a, page_of(a, b, 0, h), keys);
			score_block(a, h, b, keys);
		}
		for (uint32_t r = 0; r < a->rows; r++) {
			finish_row(a, h, r);
		}
	}
}
