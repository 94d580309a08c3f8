/* kve/ops.h -- the operations of the transformer. This is the specification GPU kernels are compared with.
 *
 * One rule makes every result reproducible: each sum starts at 0 and takes its terms in index order, one rounded
 * multiplication and one rounded addition a term, no fused multiply-add. Vector code therefore runs over outputs, never
 * over the terms of one sum, and how many rows are computed together changes no bit.
 *
 * All tensors are fp32 and row-major. Functions that take `rows` treat rows independently. Nothing here allocates or
 * fails.
 */
#ifndef KVE_OPS_H
#define KVE_OPS_H

#include "kve/config.h"

#include <stddef.h>

#define KVE_PANEL 16u /* outputs computed together */

/* A weight matrix [in][out], stored in panels of 16 outputs: element (k, o) lies at data[(o / 16 * in + k) * 16 + o %
 * 16]. */
typedef struct kve_matrix {
	uint32_t in;
	uint32_t out;
	float *data;
} kve_matrix_t;

/* y[r][o] = sum over k of x[r][k] * w[k][o]. x: [rows][in], y: [rows][out]; they do not overlap. */
void kve_matmul(const float *x, uint32_t rows, const kve_matrix_t *w, float *y);

/* y[r][i] = x[r][i] * gain[i] / sqrt(mean of x[r]^2 + eps). y may be x. */
void kve_rmsnorm(const float *x, uint32_t rows, uint32_t width, const float *gain, float eps, float *y);

/* Cosines and sines of position p and pair i at table[(p * head_dim / 2 + i) * 2] and + 1: max_tokens * head_dim
 * floats. */
void kve_rope_table(const kve_config_t *config, float *table);
/* Rotate the pairs (i, i + head_dim / 2) of every head of x: [rows][heads][head_dim]; row r stands at position start +
 * r. */
void kve_rope(const kve_config_t *config, const float *table, float *x, uint32_t rows, uint32_t heads, uint32_t start);

/* Rows of one sequence against its cache in one layer. Keys and values of positions [0, start + rows) are in the cache
 * already. */
typedef struct kve_attention {
	const kve_config_t *config;
	const float *cache;     /* the layer: [block][K|V][token][kv_head][head_dim] */
	const uint32_t *blocks; /* block ids of the sequence                         */
	uint32_t start;         /* position of row 0                                 */
	uint32_t rows;
	const float *q; /* [rows][heads][head_dim]                           */
	float *out;     /* [rows][heads][head_dim]                           */
	float *scratch; /* kve_attention_scratch() floats                    */
} kve_attention_t;

/* out = softmax(q K^T / sqrt(head_dim)) V, causal; query head h reads KV head h / (heads / kv_heads). */
void kve_attention(const kve_attention_t *a);
size_t kve_attention_scratch(const kve_config_t *config, uint32_t rows);

/* gate[i] = silu(gate[i]) * up[i]. */
void kve_swiglu(float *gate, const float *up, size_t n);

/* Router: ids[rows][top_k] and weights[rows][top_k] of logits[rows][experts], which become softmax(logits). The largest
 * first, of equals the lowest id; with norm_top_k a token's weights are divided by their sum. */
void kve_route(const kve_config_t *config, float *logits, uint32_t rows, uint32_t *ids, float *weights);

/* Index of the largest value, the lowest of equals. */
uint32_t kve_argmax(const float *x, uint32_t n);
/* Natural logarithm of the probability that softmax(x) gives to index i. */
double kve_log_probability(const float *x, uint32_t n, uint32_t i);

#endif
