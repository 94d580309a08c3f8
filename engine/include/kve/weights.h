/* kve/weights.h -- weights drawn from a seed. */
#ifndef KVE_WEIGHTS_H
#define KVE_WEIGHTS_H

#include "kve/ops.h"

typedef struct kve_expert {
	kve_matrix_t gate; /* hidden -> expert_inner          */
	kve_matrix_t up;
	kve_matrix_t down; /* expert_inner -> hidden          */
} kve_expert_t;

typedef struct kve_layer {
	float *attention_norm; /* [hidden]                        */
	kve_matrix_t q;        /* hidden -> heads x head_dim      */
	kve_matrix_t k;        /* hidden -> kv_heads x head_dim   */
	kve_matrix_t v;
	kve_matrix_t o;    /* heads x head_dim -> hidden      */
	float *mlp_norm;   /* [hidden]                        */
	kve_matrix_t gate; /* hidden -> inner                 */
	kve_matrix_t up;
	kve_matrix_t down; /* inner -> hidden                 */
	float *q_norm;     /* [head_dim]; NULL without        */
	float *k_norm;
	kve_matrix_t router;   /* hidden -> experts               */
	kve_expert_t *experts; /* NULL without                    */
} kve_layer_t;

typedef struct kve_weights {
	float *embedding; /* [vocab][hidden]                 */
	kve_layer_t *layers;
	float *final_norm;     /* [hidden]                        */
	kve_matrix_t head;     /* hidden -> vocab                 */
	float *memory;         /* all of the above lies in here   */
	kve_expert_t *experts; /* of all layers                   */
	size_t count;          /* floats                          */
} kve_weights_t;

/* ---- their order ------------------------------------------------------------------------------ */

typedef enum kve_tensor_name {
	KVE_EMBEDDING, /* [vocab][hidden], rows behind each other */
	KVE_ATTENTION_NORM,
	KVE_Q,
	KVE_K,
	KVE_V,
	KVE_O,
	KVE_MLP_NORM,
	KVE_GATE,
	KVE_UP,
	KVE_DOWN,
	KVE_Q_NORM,
	KVE_K_NORM,
	KVE_ROUTER,
	KVE_EXPERT_GATE,
	KVE_EXPERT_UP,
	KVE_EXPERT_DOWN,
	KVE_FINAL_NORM,
	KVE_HEAD,
} kve_tensor_name_t;

/* Its value number i is middle + width * u, u between -1 and 1 and drawn from the seed by the number first + i alone;
 * of a matrix in the order of kve_matrix_t. */
typedef struct kve_tensor {
	kve_tensor_name_t name;
	uint32_t layer, expert; /* that it belongs to, if any */
	uint32_t in, out;       /* in 0: a vector */
	float middle, width;
	uint64_t first;
} kve_tensor_t;

/* Called for each tensor in order; what is not KV_OK ends the walk and is its result. */
typedef kv_status_t (*kve_tensor_visit_t)(void *ctx, const kve_tensor_t *tensor);
kv_status_t kve_weights_walk(const kve_config_t *config, kve_tensor_visit_t visit, void *ctx);

/* Floats of all weights of a configuration that kve_config_check() lets pass. */
size_t kve_weights_count(const kve_config_t *config);
/* Draw all weights. Their scale puts the network where small differences grow from layer to layer, so that the output
 * depends on every token of the context. KV_ERR_ARG: bad config. KV_ERR_NOMEM. */
kv_status_t kve_weights_init(kve_weights_t *weights, const kve_config_t *config);
void kve_weights_fini(kve_weights_t *weights);

/* What names these weights in a space's identity: every field of the configuration that they follow from. */
#define KVE_FINGERPRINT_MAX 256u
void kve_weights_fingerprint(const kve_config_t *config, char out[KVE_FINGERPRINT_MAX]);

#endif
