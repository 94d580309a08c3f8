/* Weights: a counter-based generator fills the tensors in the order in which the model reads them. */
#include "kve/weights.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Standard deviation of a matrix' output, given unit input. Queries and keys are large, so that attention picks few
 * positions; what a branch adds is larger than what it is added to, so that differences grow. */
#define GAIN_QK   1.8f
#define GAIN_V    1.5f
#define GAIN_OUT  1.5f
#define GAIN_MLP  2.0f
#define GAIN_HEAD 1.0f
/* Logits of the router differ by more than rounding does, and no expert has nearly all of a token. */
#define GAIN_ROUTER 1.5f

typedef struct draw {
	float *next;
	uint64_t state;
} draw_t;

/* splitmix64 */
static uint64_t random_bits(draw_t *draw)
{
	uint64_t z = draw->state += UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);

	return z ^ (z >> 31);
}

/* n values, uniform around `middle`, with standard deviation `deviation`. */
static float *tensor(draw_t *draw, size_t n, float middle, float deviation)
{
	float *out = draw->next;
	const float width = deviation * 1.7320508f;

	for (size_t i = 0; i < n; i++) {
		const float u = (float)(int32_t)(random_bits(draw) >> 40) * (1.0f / 8388608.0f) - 1.0f;

		out[i] = middle + width * u;
	}
	draw->next += n;

	return out;
}

static kve_matrix_t matrix(draw_t *draw, uint32_t in, uint32_t out, float gain)
{
	return (kve_matrix_t){in, out, tensor(draw, (size_t)in * out, 0.0f, gain / sqrtf((float)in))};
}

static size_t layer_floats(const kve_config_t *c)
{
	const size_t q = (size_t)c->heads * c->head_dim;
	const size_t kv = (size_t)c->kv_heads * c->head_dim;
	const size_t experts = (size_t)c->experts * (1 + (size_t)3 * c->expert_inner);

	return c->hidden * (2 + q + 2 * kv + q + (size_t)3 * c->inner + experts) + (c->qk_norm ? 2 * c->head_dim : 0);
}

static void draw_experts(draw_t *draw, const kve_config_t *c, kve_layer_t *layer)
{
	layer->router = matrix(draw, c->hidden, c->experts, GAIN_ROUTER);
	for (uint32_t e = 0; e < c->experts; e++) {
		layer->experts[e].gate = matrix(draw, c->hidden, c->expert_inner, GAIN_MLP);
		layer->experts[e].up = matrix(draw, c->hidden, c->expert_inner, GAIN_MLP);
		layer->experts[e].down = matrix(draw, c->expert_inner, c->hidden, GAIN_MLP);
	}
}

static void draw_layer(draw_t *draw, const kve_config_t *c, kve_layer_t *layer)
{
	const uint32_t q = c->heads * c->head_dim;
	const uint32_t kv = c->kv_heads * c->head_dim;

	layer->attention_norm = tensor(draw, c->hidden, 1.0f, 0.1f);
	layer->q = matrix(draw, c->hidden, q, GAIN_QK);
	layer->k = matrix(draw, c->hidden, kv, GAIN_QK);
	layer->v = matrix(draw, c->hidden, kv, GAIN_V);
	layer->o = matrix(draw, q, c->hidden, GAIN_OUT);
	layer->mlp_norm = tensor(draw, c->hidden, 1.0f, 0.1f);
	layer->gate = matrix(draw, c->hidden, c->inner, GAIN_MLP);
	layer->up = matrix(draw, c->hidden, c->inner, GAIN_MLP);
	layer->down = matrix(draw, c->inner, c->hidden, GAIN_MLP);
	if (c->qk_norm) {
		layer->q_norm = tensor(draw, c->head_dim, GAIN_QK, 0.1f);
		layer->k_norm = tensor(draw, c->head_dim, GAIN_QK, 0.1f);
	}
	if (c->experts) {
		draw_experts(draw, c, layer);
	}
}

size_t kve_weights_count(const kve_config_t *config)
{
	return 2 * (size_t)config->vocab * config->hidden + config->hidden + config->layers * layer_floats(config);
}

kv_status_t kve_weights_init(kve_weights_t *weights, const kve_config_t *config)
{
	const size_t table = (size_t)config->vocab * config->hidden;
	draw_t draw = {.state = config->seed};
	kve_weights_t w = {.count = kve_weights_count(config)};

	if (kve_config_check(config, NULL) != KV_OK) {
		return KV_ERR_ARG;
	}

	w.layers = calloc(config->layers, sizeof *w.layers);
	if (!w.layers) {
		return KV_ERR_NOMEM;
	}
	w.experts = calloc((size_t)config->layers * config->experts + 1, sizeof *w.experts);
	w.memory = aligned_alloc(64, (w.count * sizeof(float) + 63) / 64 * 64);
	if (!w.memory || !w.experts) {
		kve_weights_fini(&w);
		return KV_ERR_NOMEM;
	}

	draw.next = w.memory;
	w.embedding = tensor(&draw, table, 0.0f, 1.0f);
	for (uint32_t l = 0; l < config->layers; l++) {
		w.layers[l].experts = config->experts ? w.experts + (size_t)l * config->experts : NULL;
		draw_layer(&draw, config, &w.layers[l]);
	}
	w.final_norm = tensor(&draw, config->hidden, 1.0f, 0.1f);
	w.head = matrix(&draw, config->hidden, config->vocab, GAIN_HEAD);
	*weights = w;

	return KV_OK;
}

void kve_weights_fini(kve_weights_t *weights)
{
	free(weights->memory);
	free(weights->layers);
	free(weights->experts);
	*weights = (kve_weights_t){0};
}

void kve_weights_fingerprint(const kve_config_t *config, char out[KVE_FINGERPRINT_MAX])
{
	int n = snprintf(out, KVE_FINGERPRINT_MAX, "kve1-seed%llu-v%u-w%u-l%u-q%u-kv%u-d%u-i%u-t%u",
			 (unsigned long long)config->seed, config->vocab, config->hidden, config->layers, config->heads,
			 config->kv_heads, config->head_dim, config->inner, config->rope_theta);

	if (config->qk_norm || config->experts) {
		n += snprintf(out + n, KVE_FINGERPRINT_MAX - (size_t)n, "-n%d-e%u-k%u-i%u-p%d-g%u", config->qk_norm,
			      config->experts, config->top_k, config->expert_inner, config->norm_top_k, config->groups);
	}
	if (config->norm_eps != kve_config_demo.norm_eps) {
		(void)snprintf(out + n, KVE_FINGERPRINT_MAX - (size_t)n, "-r%a", (double)config->norm_eps);
	}
}
