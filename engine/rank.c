/* A rank: its activations, and the pass through all layers. */
#include "rank.h"

#include <stdlib.h>
#include <string.h>

/* ---- activations ----------------------------------------------------------------------------- */

/* Memory that is handed out from its start. Without a base it is only measured. */
typedef struct arena {
	uint8_t *base;
	size_t used;
} arena_t;

static void *carve(arena_t *arena, size_t n, size_t bytes)
{
	void *p = arena->base ? arena->base + arena->used : NULL;

	arena->used += (n * bytes + 63u) / 64u * 64u;

	return p;
}

static float *carve_floats(arena_t *arena, size_t n)
{
	return carve(arena, n, sizeof(float));
}

static size_t larger(size_t a, size_t b)
{
	return a > b ? a : b;
}

static void place_microbatch(kve_microbatch_t *m, const kve_rank_t *rank, arena_t *arena)
{
	const kve_config_t *c = &rank->model->config;
	const size_t rows = KVE_MAX_ROWS;

	m->x = carve_floats(arena, rows * c->hidden);
	m->normed = carve_floats(arena, rows * c->hidden);
	m->q = carve_floats(arena, rows * c->heads * c->head_dim);
	if (c->experts) {
		m->ids = carve(arena, rows * c->top_k, sizeof(uint32_t));
		m->weights = carve_floats(arena, rows * c->top_k);
		m->sent = carve(arena, rows * c->hidden, sizeof(kvk_bf16_t));
		m->outputs = carve(arena, rank->group->plan.max_rows, rank->group->plan.row_bytes);
	}
}

static void place_activations(kve_rank_t *rank, arena_t *arena)
{
	const kve_config_t *c = &rank->model->config;
	const size_t rows = KVE_MAX_ROWS, q = (size_t)c->heads * c->head_dim;
	const size_t inner = larger(c->inner, c->expert_inner);
	const size_t head = c->vocab / rows + 1; /* of one row only */

	for (uint32_t i = 0; i < KVE_MAX_MICROBATCHES; i++) {
		place_microbatch(&rank->microbatches[i], rank, arena);
	}
	rank->k = carve_floats(arena, rows * c->kv_heads * c->head_dim);
	rank->v = carve_floats(arena, rows * c->kv_heads * c->head_dim);
	rank->attended = carve_floats(arena, rows * q);
	rank->added = carve_floats(arena, rows * c->hidden);
	rank->gate = carve_floats(arena, rows * inner);
	rank->up = carve_floats(arena, rows * inner);
	rank->scores = carve_floats(arena, kve_attention_scratch(c, KVE_MAX_ROWS));
	rank->share = carve_floats(arena, rows * larger(larger(q, head), larger(inner, c->hidden)));
	if (c->experts) {
		rank->in = carve_floats(arena, rows * c->hidden);
		rank->router = carve_floats(arena, rows * c->experts);
		rank->combined = carve(arena, rows * c->hidden, sizeof(kvk_bf16_t));
	}
}

/* What is enqueued in each mode. */
static kv_status_t create_lists(kve_rank_t *rank)
{
	const kve_config_t *c = &rank->model->config;

	for (kve_overlap_mode_t mode = KVE_OVERLAP_SEQ; mode <= KVE_OVERLAP_DBO; mode++) {
		const kve_overlap_shape_t shape = {.mode = mode, .layers = c->layers, .shared = c->inner > 0};

		rank->n_items[mode] = kve_overlap_count(&shape);
		rank->items[mode] = calloc(rank->n_items[mode], sizeof **rank->items);
		if (!rank->items[mode]) {
			return KV_ERR_NOMEM;
		}
		kve_overlap_list(&shape, rank->items[mode]);
	}

	return KV_OK;
}

kv_status_t kve_rank_create(kve_group_t *group, uint32_t number, kve_rank_t **p_rank)
{
	arena_t arena = {.used = 0};
	kve_rank_t *rank;
	kv_status_t status;

	if (number >= group->ranks) {
		return KV_ERR_ARG;
	}
	rank = calloc(1, sizeof *rank);
	if (!rank) {
		return KV_ERR_NOMEM;
	}
	rank->group = group;
	rank->model = &group->model;
	rank->number = number;
	place_activations(rank, &arena);
	rank->memory = arena.base = aligned_alloc(64, arena.used);
	status = rank->memory ? create_lists(rank) : KV_ERR_NOMEM;
	if (status == KV_OK && group->model.config.experts) {
		status = kvk_ep_open(&group->env, &group->plan, number, group->heaps[number], &group->link, &rank->ep);
	}
	if (status != KV_OK) {
		kve_rank_destroy(rank);
		return status;
	}
	memset(rank->memory, 0, arena.used);
	arena.used = 0;
	place_activations(rank, &arena);
	*p_rank = rank;

	return KV_OK;
}

void kve_rank_destroy(kve_rank_t *rank)
{
	if (!rank) {
		return;
	}
	kvk_ep_close(rank->ep);
	free(rank->items[KVE_OVERLAP_SEQ]);
	free(rank->items[KVE_OVERLAP_DBO]);
	free(rank->memory);
	free(rank);
}

kve_rank_stats_t kve_rank_stats(const kve_rank_t *rank)
{
	kve_rank_stats_t stats = {.steps = {rank->steps[KVE_OVERLAP_SEQ], rank->steps[KVE_OVERLAP_DBO]}};

	if (rank->ep) {
		stats.sent = kvk_ep_get_stats(rank->ep);
	}

	return stats;
}

/* ---- the pass -------------------------------------------------------------------------------- */

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

static uint32_t last_microbatch(const kve_dbo_step_t *step)
{
	return step->mode == KVE_OVERLAP_DBO ? KVE_MAX_MICROBATCHES - 1 : 0;
}

/* Its part of the batch to each microbatch. KV_ERR_ARG: one would have none. */
static kv_status_t slice_spans(kve_rank_t *rank, const kve_span_t *spans, uint32_t n_spans, const kve_dbo_step_t *dbo)
{
	uint32_t tokens = 0, first;

	for (uint32_t s = 0; s < n_spans; s++) {
		tokens += spans[s].n;
	}
	if (dbo->mode == KVE_OVERLAP_DBO && (dbo->split == 0 || dbo->split >= tokens)) {
		return KV_ERR_ARG;
	}
	for (uint32_t i = 0; i <= last_microbatch(dbo); i++) {
		kve_microbatch_t *m = &rank->microbatches[i];

		kve_dbo_part(dbo, tokens, i, &first, &m->rows);
		m->n_spans = kve_dbo_slice(spans, n_spans, first, m->rows, m->spans);
	}

	return KV_OK;
}

static void embed(const kve_model_t *model, kve_microbatch_t *m)
{
	const uint32_t hidden = model->config.hidden;
	uint32_t row = 0;

	for (uint32_t s = 0; s < m->n_spans; s++) {
		for (uint32_t i = 0; i < m->spans[s].n; i++) {
			memcpy(m->x + (size_t)row++ * hidden,
			       model->weights.embedding + (size_t)m->spans[s].tokens[i] * hidden,
			       hidden * sizeof(float));
		}
	}
}

static void write_logits(kve_rank_t *rank, kve_microbatch_t *m)
{
	const kve_weights_t *w = &rank->model->weights;
	const float eps = rank->model->config.norm_eps;
	const uint32_t hidden = rank->model->config.hidden;
	uint32_t row = 0;

	for (uint32_t s = 0; s < m->n_spans; s++) {
		row += m->spans[s].n;
		if (m->spans[s].logits) {
			kve_rmsnorm(m->x + (size_t)(row - 1) * hidden, 1, hidden, w->final_norm, eps, m->normed);
			kve_rank_matmul(rank, m->normed, 1, &w->head, m->spans[s].logits);
		}
	}
}

/* The CPU has one stream: what is enqueued has run. */
static kv_status_t run_item(void *ctx, kve_phase_t phase, uint32_t layer, uint32_t microbatch, kve_stream_t stream)
{
	(void)stream;

	return kve_run_phase(ctx, phase, layer, microbatch);
}

static kv_status_t pass_event(void *ctx, uint32_t event, kve_stream_t stream)
{
	(void)ctx;
	(void)event;
	(void)stream;

	return KV_OK;
}

kv_status_t kve_rank_forward(kve_rank_t *rank, kve_cache_t *cache, const kve_span_t *spans, uint32_t n_spans,
			     const kve_dbo_step_t *dbo)
{
	static const kve_overlap_ops_t ops = {run_item, pass_event, pass_event};
	static const kve_dbo_step_t whole = {.mode = KVE_OVERLAP_SEQ};
	const kve_config_t *c = &rank->model->config;
	const kve_dbo_step_t *step = dbo ? dbo : &whole;
	kv_status_t status = kve_config_rank(c, cache->ranks, &rank->tp_share);

	if (status == KV_OK) {
		status = check_spans(c, cache, spans, n_spans);
	}
	if (status == KV_OK) {
		status = slice_spans(rank, spans, n_spans, step);
	}
	if (status != KV_OK) {
		return status;
	}
	rank->cache = cache;
	rank->steps[step->mode]++;
	for (uint32_t i = 0; i <= last_microbatch(step); i++) {
		embed(rank->model, &rank->microbatches[i]);
	}
	status = kve_overlap_run(rank->items[step->mode], rank->n_items[step->mode], &ops, rank);
	if (status != KV_OK) {
		kve_report_lost(rank, 1, 0);
	}
	for (uint32_t i = 0; i <= last_microbatch(step) && status == KV_OK; i++) {
		write_logits(rank, &rank->microbatches[i]);
	}

	return status;
}
