/* kve/experts.h -- the mixture of experts of a layer, by expert parallel ranks.
 *
 * m: the normed rows. Router: p = softmax(Wrouter m) over all experts. A token has its top_k largest, ties to the
 * lowest id, with p as weights; norm_top_k divides them by their sum. Expert e makes Wdown (silu(Wgate m) * Wup m) of
 * BF16(m), rounded to BF16. Rows travel, are weighted and are summed as kvk/ep.h states; with two groups of experts
 * two ranks give the bits that one gives.
 */
#ifndef KVE_EXPERTS_H
#define KVE_EXPERTS_H

#include "kve/weights.h"

typedef struct kve_experts kve_experts_t;

/* For passes of at most max_rows. KV_ERR_ARG: ranks do not divide the groups. KV_ERR_NOMEM. */
kv_status_t kve_experts_create(const kve_config_t *config, uint32_t ranks, uint32_t max_rows,
			       kve_experts_t **p_experts);
/* NULL is fine. */
void kve_experts_destroy(kve_experts_t *experts);

/* out[rows][hidden] of m[rows][hidden]. The rows are divided among the ranks, which are computed one after the other;
 * how they are divided changes no bit. */
void kve_experts_run(kve_experts_t *experts, const kve_layer_t *layer, const float *m, uint32_t rows, float *out);

/* Bytes between ranks so far. */
uint64_t kve_experts_sent_bytes(const kve_experts_t *experts);

#endif
