/* kve/model.h -- the transformer: tokens in, logits out, keys and values into the paged cache.
 *
 * Per layer:  x += Wo attention(rope(Wq n), rope(Wk n), Wv n),  n = rmsnorm(x)
 *             x += Wdown (silu(Wgate m) * Wup m),               m = rmsnorm(x)
 *             x += experts(m) (kve/experts.h), where there are any; the line above is then a shared expert's
 * Then logits = Whead rmsnorm(x).
 */
#ifndef KVE_MODEL_H
#define KVE_MODEL_H

#include "kve/cache.h"
#include "kve/experts.h"
#include "kve/span.h"

#define KVE_MAX_ROWS 64u /* tokens one forward pass computes */

typedef struct kve_model kve_model_t;

/* expert_ranks: those that have the experts between them; 0: one. KV_ERR_ARG: a bad shape, or the ranks do not divide
 * the groups of experts. KV_ERR_NOMEM. */
kv_status_t kve_model_create(const kve_config_t *config, uint32_t expert_ranks, kve_model_t **p_model);
void kve_model_destroy(kve_model_t *model);
const kve_config_t *kve_model_config(const kve_model_t *model);
/* NULL: it has none. */
const kve_experts_t *kve_model_experts(const kve_model_t *model);

/* The model is computed by as many tensor parallel ranks as the cache has, one after the other. Each has its heads, and
 * its share of the outputs of every matrix: what it needs of the others' it is given before, so each sum has all its
 * terms in index order, and bits do not depend on the number of ranks.
 *
 * Compute spans of different sequences together; their n sum up to at most KVE_MAX_ROWS. Bits do not depend on what is
 * computed together. KV_ERR_ARG: too many rows, a token or a position out of range, or a cache of another shape;
 * nothing was computed. */
kv_status_t kve_model_forward(kve_model_t *model, kve_cache_t *cache, const kve_span_t *spans, uint32_t n_spans);

#endif
