/* kve/model.h -- the transformer: tokens in, logits out, keys and values into the paged cache.
 *
 * Per layer:  x += Wo attention(rope(Wq n), rope(Wk n), Wv n),  n = rmsnorm(x)
 *             x += Wdown (silu(Wgate m) * Wup m),               m = rmsnorm(x)
 *             x += experts(m), where there are any; the line above is then a shared expert's
 * Then logits = Whead rmsnorm(x).
 *
 * experts(m): the router gives p = softmax(Wrouter m) over all experts. A token has its top_k largest, ties to the
 * lowest id, with p as weights; norm_top_k divides them by their sum. Expert e makes Wdown (silu(Wgate m) * Wup m) of
 * BF16(m), rounded to BF16. Rows travel, are weighted and are summed as kvk/ep.h states; with two groups of experts
 * two ranks give the bits that one gives.
 */
#ifndef KVE_MODEL_H
#define KVE_MODEL_H

#include "kve/weights.h"

/* What ranks share: nothing of it changes once it is made. */
typedef struct kve_model {
	kve_config_t config;
	kve_weights_t weights;
	float *rope; /* kve_rope_table() */
} kve_model_t;

/* KV_ERR_ARG: a bad shape. KV_ERR_NOMEM. */
kv_status_t kve_model_init(kve_model_t *model, const kve_config_t *config);
/* A zeroed one is fine. */
void kve_model_fini(kve_model_t *model);

#endif
