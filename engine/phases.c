/* The phases of a layer. */
#include "rank.h"

#include <string.h>

static void add(float *x, const float *y, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		x[i] += y[i];
	}
}

/* ---- tensor parallel ranks ------------------------------------------------------------------- */

/* Outputs [first, first + n) of a matrix: whole panels. */
static kve_matrix_t slice(const kve_matrix_t *w, uint32_t first, uint32_t n)
{
	return (kve_matrix_t){w->in, n, w->data + (size_t)first * w->in};
}

/* What a tensor parallel rank has computed of each row, to where all of them find it. */
static void gather(const kve_rank_t *rank, uint32_t rows, uint32_t n, uint32_t tp, float *y)
{
	for (uint32_t r = 0; r < rows; r++) {
		memcpy(y + ((size_t)r * rank->cache->ranks + tp) * n, rank->share + (size_t)r * n, n * sizeof(float));
	}
}

void kve_rank_matmul(kve_rank_t *rank, const float *x, uint32_t rows, const kve_matrix_t *w, float *y)
{
	const uint32_t ranks = rank->cache->ranks;

	kv_assert(ranks > 0);
	const uint32_t n = w->out / ranks;

	for (uint32_t r = 0; r < ranks; r++) {
		const kve_matrix_t own = slice(w, r * n, n);

		kve_matmul(x, rows, &own, ranks == 1 ? y : rank->share);
		if (ranks > 1) {
			gather(rank, rows, n, r, y);
		}
	}
}

/* ---- attention ------------------------------------------------------------------------------- */

/* Keys and values of a span's rows to their places in one layer of a tensor parallel rank's cache. */
static void write_cache(const kve_rank_t *rank, float *cache, const kve_span_t *span, uint32_t row)
{
	const kve_config_t *c = &rank->tp_share;
	const size_t token = (size_t)c->kv_heads * c->head_dim;
	const size_t page = token * c->block_tokens;

	for (uint32_t i = 0; i < span->n; i++) {
		const uint32_t position = span->start + i;
		float *block = cache + (size_t)span->blocks[position / c->block_tokens] * 2 * page;
		const size_t at = (position % c->block_tokens) * token;

		memcpy(block + at, rank->k + (row + i) * token, token * sizeof(float));
		memcpy(block + page + at, rank->v + (row + i) * token, token * sizeof(float));
	}
}

/* Where a tensor parallel rank's queries begin. */
static float *queries_of(const kve_rank_t *rank, const kve_microbatch_t *m, uint32_t tp)
{
	return m->q + (size_t)tp * m->rows * rank->tp_share.heads * rank->tp_share.head_dim;
}

/* Queries, keys and values of a tensor parallel rank's heads from the normed rows; keys and values to the cache. */
static void project(kve_rank_t *rank, uint32_t l, kve_microbatch_t *m, uint32_t tp)
{
	const kve_config_t *c = &rank->tp_share;
	const kve_layer_t *layer = &rank->model->weights.layers[l];
	const uint32_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
	const uint32_t head = kve_config_kv_head(&rank->model->config, rank->cache->ranks, tp);
	const kve_matrix_t own_q = slice(&layer->q, tp * q, q);
	const kve_matrix_t own_k = slice(&layer->k, head * c->head_dim, kv);
	const kve_matrix_t own_v = slice(&layer->v, head * c->head_dim, kv);
	float *queries = queries_of(rank, m, tp);
	uint32_t row = 0;

	kve_matmul(m->normed, m->rows, &own_q, queries);
	kve_matmul(m->normed, m->rows, &own_k, rank->k);
	kve_matmul(m->normed, m->rows, &own_v, rank->v);
	if (c->qk_norm) {
		kve_rmsnorm(queries, m->rows * c->heads, c->head_dim, layer->q_norm, c->norm_eps, queries);
		kve_rmsnorm(rank->k, m->rows * c->kv_heads, c->head_dim, layer->k_norm, c->norm_eps, rank->k);
	}
	for (uint32_t s = 0; s < m->n_spans; s++) {
		const kve_span_t *span = &m->spans[s];

		kve_rope(c, rank->model->rope, queries + (size_t)row * q, span->n, c->heads, span->start);
		kve_rope(c, rank->model->rope, rank->k + (size_t)row * kv, span->n, c->kv_heads, span->start);
		write_cache(rank, rank->cache->paged[tp].base[l], span, row);
		row += span->n;
	}
}

static void run_qkv(kve_rank_t *rank, uint32_t l, kve_microbatch_t *m)
{
	const kve_config_t *c = &rank->model->config;

	kve_rmsnorm(m->x, m->rows, c->hidden, rank->model->weights.layers[l].attention_norm, c->norm_eps, m->normed);
	for (uint32_t tp = 0; tp < rank->cache->ranks; tp++) {
		project(rank, l, m, tp);
	}
}

/* The heads of one tensor parallel rank; out: [rows][its heads][head_dim]. */
static void attend(kve_rank_t *rank, uint32_t l, const kve_microbatch_t *m, uint32_t tp, float *out)
{
	const kve_config_t *c = &rank->tp_share;
	const size_t q_row = (size_t)c->heads * c->head_dim;
	uint32_t row = 0;

	for (uint32_t s = 0; s < m->n_spans; s++) {
		const kve_span_t *span = &m->spans[s];
		const kve_attention_t attention = {
			.config = c,
			.cache = rank->cache->paged[tp].base[l],
			.blocks = span->blocks,
			.start = span->start,
			.rows = span->n,
			.q = queries_of(rank, m, tp) + row * q_row,
			.out = out + row * q_row,
			.scratch = rank->scores,
		};

		kve_attention(&attention);
		row += span->n;
	}
}

static void run_attention(kve_rank_t *rank, uint32_t l, kve_microbatch_t *m)
{
	const kve_config_t *c = &rank->model->config;
	const kve_layer_t *layer = &rank->model->weights.layers[l];
	const uint32_t ranks = rank->cache->ranks, q = rank->tp_share.heads * rank->tp_share.head_dim;

	for (uint32_t tp = 0; tp < ranks; tp++) {
		attend(rank, l, m, tp, ranks == 1 ? rank->attended : rank->share);
		if (ranks > 1) {
			gather(rank, m->rows, q, tp, rank->attended);
		}
	}
	kve_rank_matmul(rank, rank->attended, m->rows, &layer->o, rank->added);
	add(m->x, rank->added, (size_t)m->rows * c->hidden);
	kve_rmsnorm(m->x, m->rows, c->hidden, layer->mlp_norm, c->norm_eps, m->normed);
	if (rank->ep) {
		kve_choose_experts(rank, layer, m);
	}
}

/* ---- the other phases ------------------------------------------------------------------------------ */

/* A dense model's only MLP, too. */
static void run_shared(kve_rank_t *rank, uint32_t l, kve_microbatch_t *m)
{
	const kve_config_t *c = &rank->model->config;
	const kve_layer_t *layer = &rank->model->weights.layers[l];

	kve_rank_matmul(rank, m->normed, m->rows, &layer->gate, rank->gate);
	kve_rank_matmul(rank, m->normed, m->rows, &layer->up, rank->up);
	kve_swiglu(rank->gate, rank->up, (size_t)m->rows * c->inner);
	kve_rank_matmul(rank, rank->gate, m->rows, &layer->down, rank->added);
	add(m->x, rank->added, (size_t)m->rows * c->hidden);
}

static kv_status_t run_phase_of_experts(kve_rank_t *rank, kve_phase_t phase, uint32_t layer, kve_microbatch_t *m)
{
	switch (phase) {
	case KVE_PHASE_DISPATCH_SEND:
		return kve_send_dispatch(rank, m);
	case KVE_PHASE_DISPATCH_RECV:
		return kve_recv_dispatch(rank, m);
	case KVE_PHASE_COMBINE_SEND:
		return kve_send_combine(rank, m);
	case KVE_PHASE_COMBINE_RECV:
		return kve_recv_combine(rank, m);
	default:
		kve_run_experts(rank, &rank->model->weights.layers[layer], m);
		return KV_OK;
	}
}

kv_status_t kve_run_phase(kve_rank_t *rank, kve_phase_t phase, uint32_t layer, uint32_t microbatch)
{
	kve_microbatch_t *m = &rank->microbatches[microbatch];

	switch (phase) {
	case KVE_PHASE_QKV:
		run_qkv(rank, layer, m);
		return KV_OK;
	case KVE_PHASE_ATTENTION:
		run_attention(rank, layer, m);
		return KV_OK;
	case KVE_PHASE_SHARED:
		run_shared(rank, layer, m);
		return KV_OK;
	default:
		return rank->ep ? run_phase_of_experts(rank, phase, layer, m) : KV_OK;
	}
}
