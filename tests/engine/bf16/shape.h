/* shape.h -- a small model that BF16 serves, as the tests of this folder have it. */
#ifndef TESTS_ENGINE_BF16_SHAPE_H
#define TESTS_ENGINE_BF16_SHAPE_H

#include "kve/config.h"

static const kve_config_t shape = {
	.vocab = 512,
	.hidden = 128,
	.layers = 3,
	.heads = 4,
	.kv_heads = 2,
	.head_dim = 64,
	.inner = 128,
	.block_tokens = 16,
	.max_tokens = 256,
	.rope_theta = 10000,
	.norm_eps = 1e-5f,
	.seed = 5,
	.qk_norm = 1,
	.experts = 16,
	.top_k = 4,
	.expert_inner = 64,
	.norm_top_k = 1,
	.groups = 4,
};

#endif
