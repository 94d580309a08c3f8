/* Where the weights of a rank lie, and their values: drawn on the device, the same as in host memory. */
#include "bf16/weights.h"

#include <stdlib.h>

#define LINE 256u

const char *kve_devices_fault_of_shape(const kve_config_t *c)
{
	const uint32_t group = c->heads / c->kv_heads;

	if (c->head_dim != 64 && c->head_dim != 128) {
		return "head_dim is not 64 or 128";
	}
	if ((group & (group - 1)) != 0) {
		return "the query heads of a KV head are not 1, 2, 4, 8 or 16";
	}
	if (c->heads * c->head_dim % KVK_NN_PANEL != 0 || c->kv_heads * c->head_dim % KVK_NN_PANEL != 0) {
		return "heads or kv_heads times head_dim is not a multiple of 128";
	}
	if (c->hidden % KVK_NN_DEPTH != 0 || c->inner % KVK_NN_DEPTH != 0 || c->expert_inner % KVK_NN_DEPTH != 0) {
		return "hidden, inner or expert_inner is not a multiple of 64";
	}
	if (c->experts > 1024) {
		return "there are more than 1,024 experts";
	}

	return NULL;
}

/* ---- where they lie -------------------------------------------------------------------------- */

typedef struct arena {
	uint8_t *base; /* NULL: it is only measured */
	size_t used;
} arena_t;

static void *carve(arena_t *arena, size_t bytes)
{
	void *at = arena->base ? arena->base + arena->used : NULL;

	arena->used += (bytes + LINE - 1) / LINE * LINE;

	return at;
}

static const kvk_bf16_t *carve_matrix(arena_t *arena, uint32_t k, uint32_t n, uint32_t groups)
{
	return carve(arena, groups * kvk_nn_weight_count(k, n) * sizeof(kvk_bf16_t));
}

static void place_layer(arena_t *arena, const kve_config_t *c, uint32_t experts, kve_bf16_layer_t *layer)
{
	const uint32_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;

	*layer = (kve_bf16_layer_t){
		.attention_norm = carve(arena, c->hidden * sizeof(float)),
		.mlp_norm = carve(arena, c->hidden * sizeof(float)),
		.q_norm = c->qk_norm ? carve(arena, c->head_dim * sizeof(float)) : NULL,
		.k_norm = c->qk_norm ? carve(arena, c->head_dim * sizeof(float)) : NULL,
		.qkv = carve_matrix(arena, c->hidden, q + 2 * kv, 1),
		.o = carve_matrix(arena, q, c->hidden, 1),
	};
	if (c->inner) {
		layer->gate_up = carve_matrix(arena, c->hidden, 2 * c->inner, 1);
		layer->down = carve_matrix(arena, c->inner, c->hidden, 1);
	}
	if (c->experts) {
		layer->router = carve_matrix(arena, c->hidden, c->experts, 1);
		layer->expert_gate_up = carve_matrix(arena, c->hidden, 2 * c->expert_inner, experts);
		layer->expert_down = carve_matrix(arena, c->expert_inner, c->hidden, experts);
	}
}

/* Without `w` it is only measured. */
static size_t place(arena_t *arena, const kve_config_t *c, const kve_bf16_share_t *share, kve_bf16_weights_t *w)
{
	kve_bf16_weights_t none;
	kve_bf16_layer_t layer;

	w = w ? w : &none;
	w->embedding = carve(arena, (size_t)c->vocab * c->hidden * sizeof(kvk_bf16_t));
	w->final_norm = carve(arena, c->hidden * sizeof(float));
	w->head = carve_matrix(arena, c->hidden, c->vocab, 1);
	w->rotation = carve(arena, (size_t)c->max_tokens * c->head_dim * sizeof(float));
	for (uint32_t l = 0; l < c->layers; l++) {
		place_layer(arena, c, c->experts / share->ranks, w == &none ? &layer : &w->layers[l]);
	}

	return arena->used;
}

size_t kve_bf16_weights_bytes(const kve_config_t *config, const kve_bf16_share_t *share)
{
	arena_t arena = {.base = NULL};

	return place(&arena, config, share, NULL);
}

/* ---- their values ---------------------------------------------------------------------------- */

typedef struct drawing {
	const kve_config_t *config;
	const kve_bf16_weights_t *weights;
	kve_device_t *device;
	uint32_t first_expert, experts;
} drawing_t;

typedef struct target {
	const void *to; /* NULL: another rank has it */
	kvk_nn_order_t order;
} target_t;

static target_t place_behind(const kvk_bf16_t *matrix, uint32_t k, uint32_t outputs)
{
	return (target_t){matrix + kvk_nn_weight_count(k, outputs), KVK_NN_TILES};
}

static target_t find_expert(const drawing_t *d, const kve_tensor_t *tensor)
{
	const kve_config_t *c = d->config;
	const kve_bf16_layer_t *layer = &d->weights->layers[tensor->layer];
	const uint32_t own = tensor->expert - d->first_expert;
	const size_t wide = kvk_nn_weight_count(c->hidden, 2 * c->expert_inner),
		     back = kvk_nn_weight_count(c->expert_inner, c->hidden);

	if (own >= d->experts) {
		return (target_t){NULL, KVK_NN_TILES};
	}
	if (tensor->name == KVE_EXPERT_DOWN) {
		return (target_t){layer->expert_down + own * back, KVK_NN_TILES};
	}

	return (target_t){layer->expert_gate_up + own * wide,
			  tensor->name == KVE_EXPERT_GATE ? KVK_NN_GATES : KVK_NN_UPS};
}

static target_t find_target(const drawing_t *d, const kve_tensor_t *tensor)
{
	const kve_config_t *c = d->config;
	const kve_bf16_layer_t *layer = &d->weights->layers[tensor->layer];
	const uint32_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;

	switch (tensor->name) {
	case KVE_EMBEDDING:
		return (target_t){d->weights->embedding, KVK_NN_ROWS};
	case KVE_ATTENTION_NORM:
		return (target_t){layer->attention_norm, KVK_NN_ROW_F32};
	case KVE_Q:
		return (target_t){layer->qkv, KVK_NN_TILES};
	case KVE_K:
		return place_behind(layer->qkv, c->hidden, q);
	case KVE_V:
		return place_behind(layer->qkv, c->hidden, q + kv);
	case KVE_O:
		return (target_t){layer->o, KVK_NN_TILES};
	case KVE_MLP_NORM:
		return (target_t){layer->mlp_norm, KVK_NN_ROW_F32};
	case KVE_GATE:
		return (target_t){layer->gate_up, KVK_NN_GATES};
	case KVE_UP:
		return (target_t){layer->gate_up, KVK_NN_UPS};
	case KVE_DOWN:
		return (target_t){layer->down, KVK_NN_TILES};
	case KVE_Q_NORM:
		return (target_t){layer->q_norm, KVK_NN_ROW_F32};
	case KVE_K_NORM:
		return (target_t){layer->k_norm, KVK_NN_ROW_F32};
	case KVE_ROUTER:
		return (target_t){layer->router, KVK_NN_TILES};
	case KVE_FINAL_NORM:
		return (target_t){d->weights->final_norm, KVK_NN_ROW_F32};
	case KVE_HEAD:
		return (target_t){d->weights->head, KVK_NN_TILES};
	default:
		return find_expert(d, tensor);
	}
}

static kv_status_t draw_tensor(void *ctx, const kve_tensor_t *tensor)
{
	const drawing_t *d = ctx;
	const target_t target = find_target(d, tensor);
	const kvk_nn_draw_t draw = {
		.seed = d->config->seed,
		.first = tensor->first,
		.middle = tensor->middle,
		.width = tensor->width,
		.k = tensor->in ? tensor->in : 1,
		.n = tensor->out,
		.order = target.order,
		.to = (void *)(uintptr_t)target.to,
	};

	return target.to ? kvk_nn_draw(d->device->nn[KVE_OVERLAP_SEQ], &draw, d->device->streams[KVE_STREAM_COMPUTE])
			 : KV_OK;
}

static kv_status_t upload_rotation(const kve_bf16_weights_t *weights, kve_device_t *device, const kve_config_t *config)
{
	const size_t bytes = (size_t)config->max_tokens * config->head_dim * sizeof(float);
	void *table;
	kv_status_t status = device->ops->alloc_host(device, bytes, &table);

	if (status != KV_OK) {
		return status;
	}
	kve_rope_table(config, table);
	status = device->ops->copy(device, (void *)(uintptr_t)weights->rotation, table, bytes);
	if (status == KV_OK) {
		status = device->ops->sync(device);
	}
	device->ops->free_host(device, table);

	return status;
}

kv_status_t kve_bf16_weights_init(kve_bf16_weights_t *weights, kve_device_t *device, const kve_config_t *config,
				  const kve_bf16_share_t *share)
{
	const uint32_t experts = config->experts / share->ranks;
	drawing_t drawing = {config, weights, device, share->rank * experts, experts};
	arena_t arena = {.base = NULL};
	kv_status_t status;

	*weights = (kve_bf16_weights_t){.bytes = kve_bf16_weights_bytes(config, share)};
	weights->layers =
		calloc(config->layers + 1, sizeof *weights->layers); /* one more: what is no layer's names it */
	if (!weights->layers) {
		return KV_ERR_NOMEM;
	}
	status = device->ops->alloc(device, weights->bytes, &weights->memory);
	if (status != KV_OK) {
		return status;
	}
	arena.base = weights->memory;
	(void)place(&arena, config, share, weights);
	status = kve_weights_walk(config, draw_tensor, &drawing);

	return status == KV_OK ? upload_rotation(weights, device, config) : status;
}

void kve_bf16_weights_fini(kve_bf16_weights_t *weights, kve_device_t *device)
{
	device->ops->free(device, weights->memory);
	free(weights->layers);
	*weights = (kve_bf16_weights_t){.bytes = 0};
}
