/* The phases of a layer in BF16. */
#include "bf16/pass.h"

/* What a phase works on. */
typedef struct place {
	const kve_config_t *c;
	kve_bf16_rank_t *rank;
	const kve_bf16_layer_t *layer;
	kve_bf16_microbatch_t *m;
	uint32_t rows, most; /* of this rank, of any */
	kvk_bf16_t *cache;   /* of the layer */
} place_t;

static kvk_cu_stream_t compute_of(const place_t *p)
{
	return p->rank->device->streams[KVE_STREAM_COMPUTE];
}

static kvk_nn_heads_t heads_of(const kve_config_t *c)
{
	return (kvk_nn_heads_t){c->heads, c->kv_heads, c->head_dim, c->block_tokens};
}

/* Of all rows, by one matrix. */
static kv_status_t multiply(const place_t *p, const kvk_bf16_t *x, kvk_nn_product_t product)
{
	product.groups = 1;
	product.max_rows = p->rows;
	product.x = x;

	return kvk_nn_product(p->rank->nn, &product, compute_of(p));
}

static kv_status_t norm(const place_t *p, const kvk_bf16_t *added, const float *gain, kvk_bf16_t *y)
{
	const kvk_nn_norm_t norm = {
		.rows = p->rows,
		.hidden = p->c->hidden,
		.x = p->m->x,
		.added = added,
		.gain = gain,
		.eps = p->c->norm_eps,
		.y = y,
	};

	return kvk_nn_norm(p->rank->nn, &norm, compute_of(p));
}

/* ---- attention ------------------------------------------------------------------------------- */

static kv_status_t run_qkv(const place_t *p, uint32_t l)
{
	const kve_config_t *c = p->c;
	kve_bf16_rank_t *rank = p->rank;
	kv_status_t status =
		norm(p, l > 0 && c->experts ? p->m->combined : NULL, p->layer->attention_norm, rank->normed);
	const kvk_nn_qkv_t qkv = {
		.shape = heads_of(c),
		.rows = p->rows,
		.qkv = rank->qkv,
		.q_gain = p->layer->q_norm,
		.k_gain = p->layer->k_norm,
		.rotation = rank->weights.rotation,
		.places = p->m->places,
		.blocks = p->m->blocks,
		.max_blocks = p->m->max_blocks,
		.eps = c->norm_eps,
		.q_out = rank->q,
		.cache = p->cache,
	};

	if (status == KV_OK) {
		status = multiply(p, rank->normed,
				  (kvk_nn_product_t){.k = c->hidden,
						     .n = (c->heads + 2 * c->kv_heads) * c->head_dim,
						     .w = p->layer->qkv,
						     .y = rank->qkv,
						     .out = KVK_NN_BF16});
	}

	return status == KV_OK ? kvk_nn_qkv(rank->nn, &qkv, compute_of(p)) : status;
}

static kv_status_t choose_experts(const place_t *p)
{
	const kve_config_t *c = p->c;
	const kvk_nn_route_t route = {
		.rows = p->rows,
		.experts = c->experts,
		.top_k = c->top_k,
		.norm_top_k = (uint32_t)(c->norm_top_k != 0),
		.logits = p->rank->router,
		.ids = p->m->ids,
		.weights = p->m->weights,
	};
	const kv_status_t status = multiply(p, p->m->sent,
					    (kvk_nn_product_t){.k = c->hidden,
							       .n = c->experts,
							       .w = p->layer->router,
							       .y = p->rank->router,
							       .out = KVK_NN_F32});

	return status == KV_OK ? kvk_nn_route(p->rank->nn, &route, compute_of(p)) : status;
}

static kv_status_t run_attention(const place_t *p)
{
	const kve_config_t *c = p->c;
	kve_bf16_rank_t *rank = p->rank;
	const kvk_nn_attention_t attention = {
		.shape = heads_of(c),
		.tiles = p->m->tiles,
		.tile = p->m->tile,
		.blocks = p->m->blocks,
		.max_blocks = p->m->max_blocks,
		.most_rows = p->m->most_rows,
		.q = rank->q,
		.cache = p->cache,
		.out = rank->attended,
	};
	kv_status_t status = kvk_nn_attention(rank->nn, &attention, compute_of(p));

	if (status == KV_OK) {
		status = multiply(p, rank->attended,
				  (kvk_nn_product_t){.k = c->heads * c->head_dim,
						     .n = c->hidden,
						     .w = p->layer->o,
						     .y = p->m->x,
						     .out = KVK_NN_ADD});
	}
	if (status == KV_OK) {
		status = norm(p, NULL, p->layer->mlp_norm, p->m->sent);
	}

	return status == KV_OK && c->experts ? choose_experts(p) : status;
}

/* A dense model's only MLP, too. */
static kv_status_t run_shared(const place_t *p)
{
	const kve_config_t *c = p->c;
	kvk_bf16_t *inner = p->rank->inner;
	const kv_status_t status = multiply(
		p, p->m->sent,
		(kvk_nn_product_t){
			.k = c->hidden, .n = 2 * c->inner, .w = p->layer->gate_up, .y = inner, .out = KVK_NN_SWIGLU});

	return status == KV_OK ? multiply(p, inner,
					  (kvk_nn_product_t){.k = c->inner,
							     .n = c->hidden,
							     .w = p->layer->down,
							     .y = p->m->x,
							     .out = KVK_NN_ADD})
			       : status;
}

/* ---- experts --------------------------------------------------------------------------------- */

static kv_status_t run_experts(const place_t *p, const kvk_ep_plan_t *plan)
{
	const kve_config_t *c = p->c;
	const kvk_ep_rows_t *arrived = &p->m->arrived;
	kvk_nn_t *nn = p->rank->nn;
	const kvk_nn_product_t there = {
		.k = c->hidden,
		.n = 2 * c->expert_inner,
		.groups = plan->rank_experts,
		.max_rows = plan->max_rows,
		.first = arrived->first,
		.w = p->layer->expert_gate_up,
		.y = p->rank->expert_inner,
		.record = arrived->record,
		.rows = arrived->rows,
		.own = arrived->own,
		.own_first = arrived->own_first,
		.own_count = plan->shape.max_tokens,
		.out = KVK_NN_SWIGLU,
	};
	const kvk_nn_product_t back = {
		.k = c->expert_inner,
		.n = c->hidden,
		.groups = plan->rank_experts,
		.max_rows = plan->max_rows,
		.first = arrived->first,
		.x = p->rank->expert_inner,
		.w = p->layer->expert_down,
		.y = p->rank->outputs,
		.out = KVK_NN_BF16,
	};
	kv_status_t status = kvk_nn_product(nn, &there, compute_of(p));

	if (status == KV_OK) {
		status = kvk_nn_product(nn, &back, compute_of(p));
	}

	return status == KV_OK ? p->rank->device->ops->reduce(p->rank->device, p->m->number, p->rank->outputs) : status;
}

static kv_status_t run_transport(const place_t *p, kve_phase_t phase)
{
	kve_device_t *device = p->rank->device;
	kve_bf16_microbatch_t *m = p->m;
	const kvk_ep_tokens_t tokens = {
		.n = p->rows, .most = p->most, .rows = m->sent, .experts = m->ids, .weights = m->weights};

	switch (phase) {
	case KVE_PHASE_DISPATCH_SEND:
		return device->ops->dispatch_send(device, &tokens, &m->number);
	case KVE_PHASE_DISPATCH_RECV:
		return device->ops->dispatch_recv(device, m->number, &m->arrived);
	case KVE_PHASE_COMBINE_SEND:
		return device->ops->combine_send(device, m->number);
	default:
		return device->ops->combine_recv(device, m->number, m->combined);
	}
}

kv_status_t kve_bf16_run_phase(kve_rank_t *rank, kve_phase_t phase, uint32_t layer, uint32_t microbatch)
{
	const place_t p = {
		.c = &rank->model->config,
		.rank = rank->bf16,
		.layer = &rank->bf16->weights.layers[layer],
		.m = &rank->bf16->microbatches[microbatch],
		.rows = rank->microbatches[microbatch].rows,
		.most = rank->microbatches[microbatch].most,
		.cache = rank->cache->paged[0].base[layer],
	};

	switch (phase) {
	case KVE_PHASE_QKV:
		return run_qkv(&p, layer);
	case KVE_PHASE_ATTENTION:
		return run_attention(&p);
	case KVE_PHASE_SHARED:
		return run_shared(&p);
	case KVE_PHASE_EXPERTS:
		return p.c->experts ? run_experts(&p, &rank->group->plan) : KV_OK;
	default:
		return p.c->experts ? run_transport(&p, phase) : KV_OK;
	}
}
