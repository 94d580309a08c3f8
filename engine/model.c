/* The forward pass. */
#include "kve/model.h"

#include <stdlib.h>
#include <string.h>

struct kve_model {
	kve_config_t config;
	kve_weights_t weights;
	kve_experts_t *experts; /* NULL: none */
	float *rope;
	float *memory; /* the activations below */
	float *x;      /* [rows][hidden]           the residual stream */
	float *normed; /* [rows][hidden]           */
	float *q;      /* [rows][heads][head_dim]  */
	float *k;      /* [rows][kv_heads][head_dim] */
	float *v;
	float *attended; /* [rows][heads][head_dim]  */
	float *added;    /* [rows][hidden]           what a branch adds */
	float *gate;     /* [rows][inner]            */
	float *up;
	float *scratch; /* of attention             */
	float *share;   /* [rows][outputs of a rank] before they are put together */
	/* of this pass */
	uint32_t ranks;
	kve_config_t rank; /* what one of them has */
};

/* Outputs of the widest matrix whose outputs are put together. */
static size_t largest(const kve_config_t *c)
{
	const size_t q = (size_t)c->heads * c->head_dim;
	const size_t wide = c->inner > c->hidden ? c->inner : c->hidden;
	const size_t head = c->vocab / KVE_MAX_ROWS + 1; /* of one row only */

	return q > wide ? (q > head ? q : head) : (wide > head ? wide : head);
}

static void place_activations(kve_model_t *m)
{
	const kve_config_t *c = &m->config;
	const size_t hidden = (size_t)KVE_MAX_ROWS * c->hidden;
	const size_t q = (size_t)KVE_MAX_ROWS * c->heads * c->head_dim;
	const size_t kv = (size_t)KVE_MAX_ROWS * c->kv_heads * c->head_dim;
	const size_t inner = (size_t)KVE_MAX_ROWS * c->inner;
	const size_t sizes[] = {hidden,
				hidden,
				q,
				kv,
				kv,
				q,
				hidden,
				inner,
				inner,
				kve_attention_scratch(c, KVE_MAX_ROWS),
				(size_t)KVE_MAX_ROWS * largest(c)};
	float **const buffers[] = {&m->x,     &m->normed, &m->q,  &m->k,       &m->v,    &m->attended,
				   &m->added, &m->gate,   &m->up, &m->scratch, &m->share};
	size_t total = 0;

	for (size_t i = 0; i < KV_COUNT_OF(sizes); i++) {
		total += sizes[i];
	}
	m->memory = calloc(total, sizeof(float));
	if (!m->memory) {
		return;
	}

	total = 0;
	for (size_t i = 0; i < KV_COUNT_OF(sizes); i++) {
		*buffers[i] = m->memory + total;
		total += sizes[i];
	}
}

kv_status_t kve_model_create(const kve_config_t *config, uint32_t expert_ranks, kve_model_t **p_model)
{
	kve_model_t *m;
	kv_status_t status = kve_config_check(config, NULL);

	if (status != KV_OK) {
		return status;
	}
	m = calloc(1, sizeof *m);
	if (!m) {
		return KV_ERR_NOMEM;
	}

	m->config = *config;
	status = kve_weights_init(&m->weights, config);
	if (status != KV_OK) {
		goto err_model;
	}
	if (config->experts) {
		status = kve_experts_create(config, expert_ranks ? expert_ranks : 1, KVE_MAX_ROWS, &m->experts);
		if (status != KV_OK) {
			goto err_model;
		}
	}
	m->rope = calloc((size_t)config->max_tokens * config->head_dim, sizeof(float));
	place_activations(m);
	if (!m->rope || !m->memory) {
		status = KV_ERR_NOMEM;
		goto err_model;
	}
	kve_rope_table(config, m->rope);
	*p_model = m;

	return KV_OK;

err_model:
	kve_model_destroy(m);
	return status;
}

void kve_model_destroy(kve_model_t *model)
{
	if (!model) {
		return;
	}
	free(model->memory);
	free(model->rope);
	kve_experts_destroy(model->experts);
	kve_weights_fini(&model->weights);
	free(model);
}

const kve_config_t *kve_model_config(const kve_model_t *model)
{
	return &model->config;
}

const kve_experts_t *kve_model_experts(const kve_model_t *model)
{
	return model->experts;
}

static uint32_t count_rows(const kve_span_t *spans, uint32_t n_spans)
{
	uint32_t rows = 0;

	for (uint32_t s = 0; s < n_spans; s++) {
		rows += spans[s].n;
	}

	return rows;
}

/* ---- ranks ----------------------------------------------------------------------------------- */

/* Outputs [first, first + n) of a matrix: whole panels. */
static kve_matrix_t slice(const kve_matrix_t *w, uint32_t first, uint32_t n)
{
	return (kve_matrix_t){w->in, n, w->data + (size_t)first * w->in};
}

/* What a rank has computed of each row, to where all ranks find it. */
static void gather(const kve_model_t *m, uint32_t rows, uint32_t n, uint32_t rank, float *y)
{
	for (uint32_t r = 0; r < rows; r++) {
		memcpy(y + ((size_t)r * m->ranks + rank) * n, m->share + (size_t)r * n, n * sizeof(float));
	}
}

/* y = x w, each rank its share of the outputs. */
static void matmul(kve_model_t *m, const float *x, uint32_t rows, const kve_matrix_t *w, float *y)
{
	const uint32_t n = w->out / m->ranks;

	for (uint32_t r = 0; r < m->ranks; r++) {
		const kve_matrix_t own = slice(w, r * n, n);

		kve_matmul(x, rows, &own, m->ranks == 1 ? y : m->share);
		if (m->ranks > 1) {
			gather(m, rows, n, r, y);
		}
	}
}

/* ---- attention ------------------------------------------------------------------------------- */

/* Keys and values of a span's rows to their places in one layer of a rank's cache. */
static void write_cache(const kve_model_t *m, float *cache, const kve_span_t *span, uint32_t row)
{
	const kve_config_t *c = &m->rank;
	const size_t token = (size_t)c->kv_heads * c->head_dim;
	const size_t page = token * c->block_tokens;

	for (uint32_t i = 0; i < span->n; i++) {
		const uint32_t position = span->start + i;
		float *block = cache + (size_t)span->blocks[position / c->block_tokens] * 2 * page;
		const size_t at = (position % c->block_tokens) * token;

		memcpy(block + at, m->k + (row + i) * token, token * sizeof(float));
		memcpy(block + page + at, m->v + (row + i) * token, token * sizeof(float));
	}
}

/* Of one rank; out: [rows][its heads][head_dim]. */
static void run_attention(kve_model_t *m, float *cache, const kve_span_t *spans, uint32_t n_spans, float *out)
{
	const kve_config_t *c = &m->rank;
	const size_t q_row = (size_t)c->heads * c->head_dim;
	const size_t kv_row = (size_t)c->kv_heads * c->head_dim;
	uint32_t row = 0;

	for (uint32_t s = 0; s < n_spans; s++) {
		const kve_span_t *span = &spans[s];
		const kve_attention_t attention = {
			.config = c,
			.cache = cache,
			.blocks = span->blocks,
			.start = span->start,
			.rows = span->n,
			.q = m->q + row * q_row,
			.out = out + row * q_row,
			.scratch = m->scratch,
		};

		kve_rope(c, m->rope, m->q + row * q_row, span->n, c->heads, span->start);
		kve_rope(c, m->rope, m->k + row * kv_row, span->n, c->kv_heads, span->start);
		write_cache(m, cache, span, row);
		kve_attention(&attention);
		row += span->n;
	}
}

/* Each rank: queries, keys and values of its heads from the normed rows, and their attention. */
static void attend(kve_model_t *m, uint32_t l, const kve_cache_t *cache, const kve_span_t *spans, uint32_t n_spans)
{
	const kve_config_t *c = &m->rank;
	const kve_layer_t *layer = &m->weights.layers[l];
	const uint32_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
	const uint32_t rows = count_rows(spans, n_spans);

	for (uint32_t r = 0; r < m->ranks; r++) {
		const uint32_t head = kve_config_kv_head(&m->config, m->ranks, r);
		const kve_matrix_t own_q = slice(&layer->q, r * q, q);
		const kve_matrix_t own_k = slice(&layer->k, head * c->head_dim, kv);
		const kve_matrix_t own_v = slice(&layer->v, head * c->head_dim, kv);

		kve_matmul(m->normed, rows, &own_q, m->q);
		kve_matmul(m->normed, rows, &own_k, m->k);
		kve_matmul(m->normed, rows, &own_v, m->v);
		if (m->config.qk_norm) {
			kve_rmsnorm(m->q, rows * c->heads, c->head_dim, layer->q_norm, m->q);
			kve_rmsnorm(m->k, rows * c->kv_heads, c->head_dim, layer->k_norm, m->k);
		}
		run_attention(m, cache->paged[r].base[l], spans, n_spans, m->ranks == 1 ? m->attended : m->share);
		if (m->ranks > 1) {
			gather(m, rows, q, r, m->attended);
		}
	}
}

/* ---- the pass -------------------------------------------------------------------------------- */

static void add(float *x, const float *y, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		x[i] += y[i];
	}
}

static void forward_layer(kve_model_t *m, uint32_t l, const kve_cache_t *cache, const kve_span_t *spans,
			  uint32_t n_spans)
{
	const kve_config_t *c = &m->config;
	const kve_layer_t *layer = &m->weights.layers[l];
	const uint32_t rows = count_rows(spans, n_spans);

	kve_rmsnorm(m->x, rows, c->hidden, layer->attention_norm, m->normed);
	attend(m, l, cache, spans, n_spans);
	matmul(m, m->attended, rows, &layer->o, m->added);
	add(m->x, m->added, (size_t)rows * c->hidden);

	kve_rmsnorm(m->x, rows, c->hidden, layer->mlp_norm, m->normed);
	if (c->inner) {
		matmul(m, m->normed, rows, &layer->gate, m->gate);
		matmul(m, m->normed, rows, &layer->up, m->up);
		kve_swiglu(m->gate, m->up, (size_t)rows * c->inner);
		matmul(m, m->gate, rows, &layer->down, m->added);
		add(m->x, m->added, (size_t)rows * c->hidden);
	}
	if (c->experts) {
		kve_experts_run(m->experts, layer, m->normed, rows, m->added);
		add(m->x, m->added, (size_t)rows * c->hidden);
	}
}

static kv_status_t check_spans(const kve_config_t *c, const kve_cache_t *cache, const kve_span_t *spans,
			       uint32_t n_spans)
{
	uint32_t rows = 0;

	for (uint32_t s = 0; s < n_spans; s++) {
		const kve_span_t *span = &spans[s];

		if (span->n == 0 || span->n > KVE_MAX_ROWS - rows || span->n > c->max_tokens ||
		    span->start > c->max_tokens - span->n) {
			return KV_ERR_ARG;
		}
		for (uint32_t i = 0; i < span->n; i++) {
			if (span->tokens[i] >= c->vocab) {
				return KV_ERR_ARG;
			}
		}
		for (uint32_t b = 0; b <= (span->start + span->n - 1) / c->block_tokens; b++) {
			if (span->blocks[b] >= cache->paged[0].blocks) {
				return KV_ERR_ARG;
			}
		}
		rows += span->n;
	}

	return KV_OK;
}

kv_status_t kve_model_forward(kve_model_t *m, kve_cache_t *cache, const kve_span_t *spans, uint32_t n_spans)
{
	const kve_config_t *c = &m->config;
	const kv_status_t shaped = kve_config_rank(c, cache->ranks, &m->rank);
	const kv_status_t status = shaped == KV_OK ? check_spans(c, cache, spans, n_spans) : shaped;
	uint32_t row = 0;

	if (status != KV_OK) {
		return status;
	}

	m->ranks = cache->ranks;
	for (uint32_t s = 0; s < n_spans; s++) {
		for (uint32_t i = 0; i < spans[s].n; i++) {
			memcpy(m->x + (size_t)row++ * c->hidden,
			       m->weights.embedding + (size_t)spans[s].tokens[i] * c->hidden,
			       c->hidden * sizeof(float));
		}
	}

	for (uint32_t l = 0; l < c->layers; l++) {
		forward_layer(m, l, cache, spans, n_spans);
	}

	row = 0;
	for (uint32_t s = 0; s < n_spans; s++) {
		row += spans[s].n;
		if (spans[s].logits) {
			kve_rmsnorm(m->x + (size_t)(row - 1) * c->hidden, 1, c->hidden, m->weights.final_norm,
				    m->normed);
			matmul(m, m->normed, 1, &m->weights.head, spans[s].logits);
		}
	}

	return KV_OK;
}
