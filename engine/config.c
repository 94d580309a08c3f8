/* Shapes of the reference transformer. */
#include "kve/config.h"

#include "kvk/ep.h"

const kve_config_t kve_config_demo = {
	.vocab = 4096,
	.hidden = 256,
	.layers = 8,
	.heads = 8,
	.kv_heads = 2,
	.head_dim = 32,
	.inner = 768,
	.block_tokens = 16,
	.max_tokens = 4096,
	.rope_theta = 10000,
	.norm_eps = 1e-5f,
	.seed = 1,
};

const kve_config_t kve_config_tiny = {
	.vocab = 512,
	.hidden = 64,
	.layers = 3,
	.heads = 4,
	.kv_heads = 2,
	.head_dim = 16,
	.inner = 128,
	.block_tokens = 16,
	.max_tokens = 1024,
	.rope_theta = 10000,
	.norm_eps = 1e-5f,
	.seed = 7,
};

const kve_config_t kve_config_moe = {
	.vocab = 1024,
	.hidden = 128,
	.layers = 4,
	.heads = 4,
	.kv_heads = 2,
	.head_dim = 64,
	.inner = 128,
	.block_tokens = 16,
	.max_tokens = 4096,
	.rope_theta = 10000,
	.norm_eps = 1e-5f,
	.seed = 1,
	.qk_norm = 1,
	.experts = 32,
	.top_k = 4,
	.expert_inner = 64,
	.norm_top_k = 1,
	.groups = 4,
};

static int lanes(uint32_t n, uint32_t most)
{
	return n > 0 && n % 16u == 0 && n <= most;
}

static const char *find_fault_of_experts(const kve_config_t *c)
{
	if (!lanes(c->experts, KVK_EP_MAX_EXPERTS)) {
		return "experts is not a multiple of 16 up to 4,096";
	}
	if (c->top_k == 0 || c->top_k > KVK_EP_MAX_TOP_K || c->top_k > c->experts) {
		return "top_k is not 1 to 16, or more than the experts";
	}
	if (!lanes(c->expert_inner, 32768)) {
		return "expert_inner is not a multiple of 16 up to 32,768";
	}
	if (c->groups == 0 || c->groups > KVK_EP_MAX_RANKS || c->experts % c->groups != 0) {
		return "groups is not 1 to 8, or does not divide the experts";
	}

	return NULL;
}

static const char *complaint(const kve_config_t *c)
{
	if (!lanes(c->vocab, 1u << 20)) {
		return "vocab is not a multiple of 16 up to 1,048,576";
	}
	if (!lanes(c->hidden, 8192) || (!lanes(c->inner, 32768) && !(c->experts && c->inner == 0))) {
		return "hidden or inner is not a multiple of 16 in its range";
	}
	if (c->layers == 0 || c->layers > KVE_MAX_LAYERS) {
		return "layers is not 1 to 64";
	}
	if (c->kv_heads == 0 || c->kv_heads > 128 || c->heads % c->kv_heads != 0) {
		return "heads is not a multiple of kv_heads";
	}
	if (c->heads == 0 || c->heads / c->kv_heads > KVE_MAX_GROUP) {
		return "more than 16 query heads share a KV head";
	}
	if (!lanes(c->head_dim, 256)) {
		return "head_dim is not a multiple of 16 up to 256";
	}
	if (!lanes(c->block_tokens, 256)) {
		return "block_tokens is not a multiple of 16 up to 256";
	}
	if (c->max_tokens == 0 || c->max_tokens > 65536 || c->max_tokens % c->block_tokens != 0) {
		return "max_tokens is not a multiple of block_tokens up to 65,536";
	}
	if (c->rope_theta < 2) {
		return "rope_theta is below 2";
	}
	if (!(c->norm_eps > 0.0f && c->norm_eps <= 0.01f)) {
		return "norm_eps is not above 0 and up to 0.01";
	}

	return c->experts ? find_fault_of_experts(c) : NULL;
}

kv_status_t kve_config_check(const kve_config_t *config, const char **p_why)
{
	const char *why = complaint(config);

	if (!why) {
		return KV_OK;
	}
	if (p_why) {
		*p_why = why;
	}

	return KV_ERR_ARG;
}

kv_status_t kve_config_rank(const kve_config_t *config, uint32_t ranks, kve_config_t *share)
{
	if (ranks == 0 || ranks > KVE_MAX_RANKS || config->heads % ranks != 0 ||
	    (config->kv_heads % ranks != 0 && ranks % config->kv_heads != 0) || config->hidden % (16u * ranks) != 0 ||
	    config->inner % (16u * ranks) != 0 || config->vocab % (16u * ranks) != 0) {
		return KV_ERR_ARG;
	}
	*share = *config;
	share->heads = config->heads / ranks;
	share->kv_heads = config->kv_heads < ranks ? 1 : config->kv_heads / ranks;

	return KV_OK;
}

uint32_t kve_config_kv_head(const kve_config_t *config, uint32_t ranks, uint32_t rank)
{
	return rank * config->kv_heads / ranks;
}

void kve_config_layout(const kve_config_t *config, kvk_layout_t *layout)
{
	*layout = (kvk_layout_t){
		.heads = config->kv_heads,
		.layers = config->layers,
		.block_tokens = config->block_tokens,
		.k_dim = config->head_dim,
		.v_dim = config->head_dim,
		.dtype = KVK_DTYPE_F32,
		.inner = KVK_INNER_SPLIT,
	};
}
