/* Attention of kvk/nn.h in host memory: what the kernels compute, sums in the order of their index.
 *
 * The row's sum is of e^(s - maximum) before its rounding to BF16; only the values are weighed with what is rounded.
 */
#include "nn/twin.h"

#include <math.h>

#define KEYS    64u /* of a tile */
#define MAX_DIM 128u
#define LANES   64u /* a length that compilers know: such loops become vectors */

/* Of one KV head and tile of rows. Virtual row v is query head v % group of token v / group. */
typedef struct state {
	float keys[MAX_DIM][KEYS]; /* transposed: sums run over inputs, keys lie in a vector's lanes */
	float values[KEYS][MAX_DIM];
	float max[KVK_NN_TILE_ROWS], sum[KVK_NN_TILE_ROWS]; /* max: of scores, scaled */
	float out[KVK_NN_TILE_ROWS][MAX_DIM];
} state_t;

/* What a tile of rows and a KV head are of. */
typedef struct task {
	const kvk_nn_attention_t *a;
	const kvk_nn_tile_t *tile;
	uint32_t kv_head, group;
	float scale;
} task_t;

static void add_scaled(float *restrict to, const float *restrict from, float by)
{
	for (uint32_t i = 0; i < LANES; i++) {
		to[i] += from[i] * by;
	}
}

/* Keys and values at `base` and behind, up to the tile's last position. What lies beyond is anything, and stays out. */
static void load_keys(const task_t *task, uint32_t base, state_t *state)
{
	const kvk_nn_heads_t *shape = &task->a->shape;
	const uint32_t *blocks = task->a->blocks + (size_t)task->tile->sequence * task->a->max_blocks;
	const uint32_t end = task->tile->position + task->tile->rows, n = end - base < KEYS ? end - base : KEYS;
	const size_t row = (size_t)shape->kv_heads * shape->head_dim, half = shape->block_tokens * row;

	for (uint32_t t = 0; t < n; t++) {
		const uint32_t position = base + t;
		const size_t block = blocks[position / shape->block_tokens];
		const kvk_bf16_t *key = task->a->cache + 2 * block * half + position % shape->block_tokens * row +
					(size_t)task->kv_head * shape->head_dim;

		for (uint32_t d = 0; d < shape->head_dim; d++) {
			state->keys[d][t] = kvk_bf16_to_float(key[d]);
			state->values[t][d] = kvk_bf16_to_float(key[half + d]);
		}
	}
	for (uint32_t t = n; t < KEYS; t++) {
		for (uint32_t d = 0; d < shape->head_dim; d++) {
			state->keys[d][t] = 0;
		}
	}
}

static size_t row_at(const task_t *task, uint32_t v)
{
	const kvk_nn_heads_t *shape = &task->a->shape;
	const size_t row = task->tile->row + v / task->group, head = v % task->group;

	return (row * shape->heads + (size_t)task->kv_head * task->group + head) * shape->head_dim;
}

/* The first n keys of the tile are the row's. */
static void add_tile(const task_t *task, uint32_t v, uint32_t n, state_t *state)
{
	const uint32_t head_dim = task->a->shape.head_dim;
	const kvk_bf16_t *q = task->a->q + row_at(task, v);
	float scores[KEYS] = {0}, max = state->max[v], sum = 0, rescale;

	for (uint32_t d = 0; d < head_dim; d++) {
		add_scaled(scores, state->keys[d], kvk_bf16_to_float(q[d]));
	}
	for (uint32_t t = 0; t < n; t++) {
		scores[t] *= task->scale;
		max = scores[t] > max ? scores[t] : max;
	}
	rescale = expf(state->max[v] - max); /* the first tile's is e^-inf */
	for (uint32_t d = 0; d < head_dim; d++) {
		state->out[v][d] *= rescale;
	}
	for (uint32_t t = 0; t < n; t++) {
		const float p = expf(scores[t] - max), rounded = kvk_bf16_to_float(kvk_bf16_round(p));

		sum += p;
		for (uint32_t d = 0; d < head_dim; d += LANES) {
			add_scaled(state->out[v] + d, state->values[t] + d, rounded);
		}
	}
	state->sum[v] = state->sum[v] * rescale + sum;
	state->max[v] = max;
}

static void store_row(const task_t *task, uint32_t v, const state_t *state)
{
	kvk_bf16_t *out = task->a->out + row_at(task, v);
	const float share = 1.0f / state->sum[v];

	for (uint32_t d = 0; d < task->a->shape.head_dim; d++) {
		out[d] = kvk_bf16_round(state->out[v][d] * share);
	}
}

static void run_task(const task_t *task)
{
	const uint32_t rows = task->tile->rows * task->group, end = task->tile->position + task->tile->rows;
	state_t state;

	for (uint32_t v = 0; v < rows; v++) {
		state.max[v] = -INFINITY;
		state.sum[v] = 0;
		memset(state.out[v], 0, sizeof state.out[v]);
	}
	for (uint32_t base = 0; base < end; base += KEYS) {
		load_keys(task, base, &state);
		for (uint32_t v = 0; v < rows; v++) {
			const uint32_t own = task->tile->position + v / task->group + 1; /* keys of the row */

			if (base < own) {
				add_tile(task, v, own - base < KEYS ? own - base : KEYS, &state);
			}
		}
	}
	for (uint32_t v = 0; v < rows; v++) {
		store_row(task, v, &state);
	}
}

kv_status_t kvk_nn_twin_attention(kvk_nn_t *nn, const kvk_nn_attention_t *attention, kvk_cu_stream_t stream)
{
	const kvk_nn_heads_t *shape = &attention->shape;
	task_t task = {
		.a = attention,
		.group = shape->heads / shape->kv_heads,
		.scale = 1.0f / sqrtf((float)shape->head_dim),
	};

	(void)nn;
	(void)stream;
	for (uint32_t i = 0; i < attention->tiles; i++) {
		task.tile = &attention->tile[i];
		for (task.kv_head = 0; task.kv_head < shape->kv_heads; task.kv_head++) {
			run_task(&task);
		}
	}

	return KV_OK;
}
