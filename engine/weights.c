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

/* ---- the order ------------------------------------------------------------------------------- */

typedef struct walk {
	kve_tensor_visit_t visit;
	void *ctx;
	kve_tensor_t next;
	kv_status_t status;
} walk_t;

/* in 0: a vector around `gain`; else a matrix whose outputs have the deviation `gain`, given unit input. */
static void step(walk_t *walk, kve_tensor_name_t name, uint32_t in, uint32_t out, float gain)
{
	kve_tensor_t *next = &walk->next;

	next->name = name;
	next->in = in;
	next->out = out;
	next->middle = in > 0 ? 0.0f : gain;
	next->width = (in > 0 ? gain / sqrtf((float)in) : 0.1f) * 1.7320508f; /* uniform: of that deviation */
	if (walk->status == KV_OK) {
		walk->status = walk->visit(walk->ctx, next);
	}
	next->first += (uint64_t)(in ? in : 1) * out;
}

static void walk_experts(walk_t *walk, const kve_config_t *c)
{
	step(walk, KVE_ROUTER, c->hidden, c->experts, GAIN_ROUTER);
	for (walk->next.expert = 0; walk->next.expert < c->experts; walk->next.expert++) {
		step(walk, KVE_EXPERT_GATE, c->hidden, c->expert_inner, GAIN_MLP);
		step(walk, KVE_EXPERT_UP, c->hidden, c->expert_inner, GAIN_MLP);
		step(walk, KVE_EXPERT_DOWN, c->expert_inner, c->hidden, GAIN_MLP);
	}
}

static void walk_layer(walk_t *walk, const kve_config_t *c)
{
	const uint32_t q = c->heads * c->head_dim;
	const uint32_t kv = c->kv_heads * c->head_dim;

	step(walk, KVE_ATTENTION_NORM, 0, c->hidden, 1.0f);
	step(walk, KVE_Q, c->hidden, q, GAIN_QK);
	step(walk, KVE_K, c->hidden, kv, GAIN_QK);
	step(walk, KVE_V, c->hidden, kv, GAIN_V);
	step(walk, KVE_O, q, c->hidden, GAIN_OUT);
	step(walk, KVE_MLP_NORM, 0, c->hidden, 1.0f);
	if (c->inner > 0) {
		step(walk, KVE_GATE, c->hidden, c->inner, GAIN_MLP);
		step(walk, KVE_UP, c->hidden, c->inner, GAIN_MLP);
		step(walk, KVE_DOWN, c->inner, c->hidden, GAIN_MLP);
	}
	if (c->qk_norm) {
		step(walk, KVE_Q_NORM, 0, c->head_dim, GAIN_QK);
		step(walk, KVE_K_NORM, 0, c->head_dim, GAIN_QK);
	}
	if (c->experts) {
		walk_experts(walk, c);
	}
}

kv_status_t kve_weights_walk(const kve_config_t *config, kve_tensor_visit_t visit, void *ctx)
{
	walk_t walk = {.visit = visit, .ctx = ctx};

	step(&walk, KVE_EMBEDDING, config->hidden, config->vocab, sqrtf((float)config->hidden));
	for (walk.next.layer = 0; walk.next.layer < config->layers; walk.next.layer++) {
		walk_layer(&walk, config);
	}
	step(&walk, KVE_FINAL_NORM, 0, config->hidden, 1.0f);
	step(&walk, KVE_HEAD, config->hidden, config->vocab, GAIN_HEAD);

	return walk.status;
}

static kv_status_t count_values(void *ctx, const kve_tensor_t *tensor)
{
	*(size_t *)ctx = tensor->first + (size_t)(tensor->in ? tensor->in : 1) * tensor->out;

	return KV_OK;
}

size_t kve_weights_count(const kve_config_t *config)
{
	size_t count = 0;

	(void)kve_weights_walk(config, count_values, &count);

	return count;
}

/* ---- in host memory -------------------------------------------------------------------------- */

/* splitmix64: value number i of the seed. */
static uint64_t random_bits(uint64_t seed, uint64_t i)
{
	uint64_t z = seed + (i + 1) * UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);

	return z ^ (z >> 31);
}

/* The matrix of a layer that has this name; NULL: it is a vector. */
static kve_matrix_t *matrix_of(kve_weights_t *w, const kve_tensor_t *tensor)
{
	kve_layer_t *layer = &w->layers[tensor->layer];

	switch (tensor->name) {
	case KVE_HEAD:
		return &w->head;
	case KVE_Q:
		return &layer->q;
	case KVE_K:
		return &layer->k;
	case KVE_V:
		return &layer->v;
	case KVE_O:
		return &layer->o;
	case KVE_GATE:
		return &layer->gate;
	case KVE_UP:
		return &layer->up;
	case KVE_DOWN:
		return &layer->down;
	case KVE_ROUTER:
		return &layer->router;
	case KVE_EXPERT_GATE:
		return &layer->experts[tensor->expert].gate;
	case KVE_EXPERT_UP:
		return &layer->experts[tensor->expert].up;
	case KVE_EXPERT_DOWN:
		return &layer->experts[tensor->expert].down;
	default:
		return NULL;
	}
}

static float **vector_of(kve_weights_t *w, const kve_tensor_t *tensor)
{
	kve_layer_t *layer = &w->layers[tensor->layer];

	switch (tensor->name) {
	case KVE_EMBEDDING:
		return &w->embedding;
	case KVE_ATTENTION_NORM:
		return &layer->attention_norm;
	case KVE_MLP_NORM:
		return &layer->mlp_norm;
	case KVE_Q_NORM:
		return &layer->q_norm;
	case KVE_K_NORM:
		return &layer->k_norm;
	default:
		return &w->final_norm;
	}
}

typedef struct drawing {
	kve_weights_t *weights;
	uint64_t seed;
} drawing_t;

static kv_status_t draw_tensor(void *ctx, const kve_tensor_t *tensor)
{
	const drawing_t *drawing = ctx;
	kve_matrix_t *matrix = matrix_of(drawing->weights, tensor);
	const size_t n = (size_t)(tensor->in ? tensor->in : 1) * tensor->out;
	float *out = drawing->weights->memory + tensor->first;

	for (size_t i = 0; i < n; i++) {
		const uint64_t bits = random_bits(drawing->seed, tensor->first + i);
		const float u = (float)(int32_t)(bits >> 40) * (1.0f / 8388608.0f) - 1.0f;

		out[i] = tensor->middle + tensor->width * u;
	}
	if (matrix) {
		*matrix = (kve_matrix_t){tensor->in, tensor->out, out};
	} else {
		*vector_of(drawing->weights, tensor) = out;
	}

	return KV_OK;
}

kv_status_t kve_weights_init(kve_weights_t *weights, const kve_config_t *config)
{
	kve_weights_t w = {.count = kve_weights_count(config)};
	drawing_t drawing = {&w, config->seed};

	if (kve_config_check(config, NULL) != KV_OK) {
		return KV_ERR_ARG;
	}

	w.layers = calloc(config->layers + 1, sizeof *w.layers); /* one more: what is no layer's names it */
	if (!w.layers) {
		return KV_ERR_NOMEM;
	}
	w.experts = calloc((size_t)config->layers * config->experts + 1, sizeof *w.experts);
	w.memory = aligned_alloc(64, (w.count * sizeof(float) + 63) / 64 * 64);
	if (!w.memory || !w.experts) {
		kve_weights_fini(&w);
		return KV_ERR_NOMEM;
	}
	for (uint32_t l = 0; l < config->layers; l++) {
		w.layers[l].experts = config->experts ? w.experts + (size_t)l * config->experts : NULL;
	}
	(void)kve_weights_walk(config, draw_tensor, &drawing);
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
