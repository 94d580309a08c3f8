/* kve/config.h -- the shape of the reference transformer. */
#ifndef KVE_CONFIG_H
#define KVE_CONFIG_H

#include "kv/status.h"
#include "kvk/layout.h"

#define KVE_MAX_LAYERS 64u
#define KVE_MAX_GROUP  16u /* query heads that share one KV head */
#define KVE_MAX_RANKS  8u  /* tensor parallel ranks */

/* Everything the weights and the cache follow from. Two equal configurations give bit-identical models. */
typedef struct kve_config {
	uint32_t vocab;  /* token ids are below this; a multiple of 16             */
	uint32_t hidden; /* width of the residual stream; a multiple of 16         */
	uint32_t layers; /* at most KVE_MAX_LAYERS                                 */
	uint32_t heads;  /* query heads: 1 to KVE_MAX_GROUP times kv_heads         */
	uint32_t kv_heads;
	uint32_t head_dim;     /* a multiple of 16, at most 256                          */
	uint32_t inner;        /* width of the SwiGLU that every token passes; a multiple of 16. With experts: of a
				  shared one, 0: there is none */
	uint32_t block_tokens; /* tokens a cache block; a multiple of 16                 */
	uint32_t max_tokens;   /* longest sequence; a multiple of block_tokens           */
	uint32_t rope_theta;
	float norm_eps; /* of the norms, up to 0.01                               */
	uint64_t seed;  /* of the weights                                         */
	/* What Qwen3 and Qwen3-MoE have beside that; in brackets its names in their config.json. */
	int qk_norm;           /* queries and keys are normed, each head               */
	uint32_t experts;      /* [num_experts] a multiple of 16; 0: no experts        */
	uint32_t top_k;        /* [num_experts_per_tok] experts a token, 1 to 16       */
	uint32_t expert_inner; /* [moe_intermediate_size] a multiple of 16             */
	int norm_top_k;        /* [norm_topk_prob] weights of a token's experts sum to 1 */
	uint32_t groups; /* of experts whose results are reduced before they are sent (kvk/ep.h): the most ranks */
} kve_config_t;

/* The model of the demo: about 6 M weights, some 4 KiB of cache a token. */
extern const kve_config_t kve_config_demo;
/* The same shape in small, for tests. */
extern const kve_config_t kve_config_tiny;
/* With 32 experts in each layer, four a token, and a shared one; about 14 M weights. */
extern const kve_config_t kve_config_moe;

/* KV_ERR_ARG: a field is out of range; *p_why (may be NULL) is a sentence. */
kv_status_t kve_config_check(const kve_config_t *config, const char **p_why);

/* Read the keys of a config.json of Qwen3 or Qwen3-MoE (config_file.c has their table), and two of our own: "seed", and
 * "reduction_groups" of experts (4). max_position_embeddings is rounded down to whole blocks of 16 tokens. KV_ERR_ARG:
 * the file cannot be read, or a key is missing, out of its range, or not served; `why` is a sentence that names it. */
#define KVE_CONFIG_WHY_MAX 256u
kv_status_t kve_config_read(const char *path, kve_config_t *config, char why[KVE_CONFIG_WHY_MAX]);

/* The shape of what one of `ranks` tensor parallel ranks has: its heads. Where there are more ranks than KV heads, a KV
 * head is copied to several; KV_ERR_ARG: heads, KV heads or matrices cannot be divided so. */
kv_status_t kve_config_rank(const kve_config_t *config, uint32_t ranks, kve_config_t *share);
/* The first KV head of a rank. */
uint32_t kve_config_kv_head(const kve_config_t *config, uint32_t ranks, uint32_t rank);

/* Layout of the pool block this model's cache is stored in. */
void kve_config_layout(const kve_config_t *config, kvk_layout_t *layout);

#endif
