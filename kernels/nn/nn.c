/* What is asked of any: shapes that the operations have. */
#include "nn/nn.h"

static int is_multiple(uint32_t n, uint32_t of)
{
	return n > 0 && n % of == 0;
}

static int heads_are_sound(const kvk_nn_heads_t *shape)
{
	const uint32_t group = shape->kv_heads ? shape->heads / shape->kv_heads : 0;

	return group >= 1 && group <= 16 && (group & (group - 1)) == 0 && group * shape->kv_heads == shape->heads &&
	       (shape->head_dim == 64 || shape->head_dim == 128) && is_multiple(shape->block_tokens, 16);
}

kv_status_t kvk_nn_draw(kvk_nn_t *nn, const kvk_nn_draw_t *draw, kvk_cu_stream_t stream)
{
	const uint32_t k = draw->order >= KVK_NN_TILES ? KVK_NN_DEPTH : 1, n = draw->order == KVK_NN_TILES  ? 16
									       : draw->order > KVK_NN_TILES ? 64
													    : 1;

	return is_multiple(draw->k, k) && is_multiple(draw->n, n) ? nn->ops->draw(nn, draw, stream) : KV_ERR_ARG;
}

kv_status_t kvk_nn_product(kvk_nn_t *nn, const kvk_nn_product_t *product, kvk_cu_stream_t stream)
{
	if (!is_multiple(product->k, KVK_NN_DEPTH) || product->groups == 0 ||
	    !is_multiple(product->n, product->out == KVK_NN_SWIGLU ? KVK_NN_PANEL : 16)) {
		return KV_ERR_ARG;
	}

	return product->max_rows ? nn->ops->product(nn, product, stream) : KV_OK;
}

kv_status_t kvk_nn_qkv(kvk_nn_t *nn, const kvk_nn_qkv_t *qkv, kvk_cu_stream_t stream)
{
	if (!heads_are_sound(&qkv->shape)) {
		return KV_ERR_ARG;
	}

	return qkv->rows ? nn->ops->qkv(nn, qkv, stream) : KV_OK;
}

kv_status_t kvk_nn_attention(kvk_nn_t *nn, const kvk_nn_attention_t *attention, kvk_cu_stream_t stream)
{
	if (!heads_are_sound(&attention->shape)) {
		return KV_ERR_ARG;
	}

	return attention->tiles ? nn->ops->attention(nn, attention, stream) : KV_OK;
}

kv_status_t kvk_nn_embed(kvk_nn_t *nn, const kvk_nn_embed_t *embed, kvk_cu_stream_t stream)
{
	if (!is_multiple(embed->hidden, 8)) {
		return KV_ERR_ARG;
	}

	return embed->rows ? nn->ops->embed(nn, embed, stream) : KV_OK;
}

kv_status_t kvk_nn_norm(kvk_nn_t *nn, const kvk_nn_norm_t *norm, kvk_cu_stream_t stream)
{
	if (!is_multiple(norm->hidden, 8) || (norm->pick && norm->added)) {
		return KV_ERR_ARG;
	}

	return norm->rows ? nn->ops->norm(nn, norm, stream) : KV_OK;
}

kv_status_t kvk_nn_route(kvk_nn_t *nn, const kvk_nn_route_t *route, kvk_cu_stream_t stream)
{
	if (!is_multiple(route->experts, 16) || route->experts > 1024 || route->top_k == 0 || route->top_k > 16 ||
	    route->top_k > route->experts) {
		return KV_ERR_ARG;
	}

	return route->rows ? nn->ops->route(nn, route, stream) : KV_OK;
}

kv_status_t kvk_nn_choose(kvk_nn_t *nn, const kvk_nn_choose_t *choose, kvk_cu_stream_t stream)
{
	if (choose->vocab == 0) {
		return KV_ERR_ARG;
	}

	return choose->rows ? nn->ops->choose(nn, choose, stream) : KV_OK;
}

void kvk_nn_close(kvk_nn_t *nn)
{
	if (nn) {
		nn->ops->close(nn);
	}
}
