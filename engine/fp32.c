/* The reference: fp32 on the CPU. */
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
	rank->logits = carve_floats(arena, c->vocab);
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

static void close_rank(kve_rank_t *rank)
{
	kvk_ep_close(rank->ep);
	free(rank->memory);
}

static kv_status_t open_rank(kve_rank_t *rank)
{
	kve_group_t *group = rank->group;
	arena_t arena = {.used = 0};
	kv_status_t status = KV_OK;

	place_activations(rank, &arena);
	rank->memory = arena.base = aligned_alloc(64, arena.used);
	if (!rank->memory) {
		return KV_ERR_NOMEM;
	}
	if (group->model.config.experts) {
		status = kvk_ep_open(&group->env, &group->plan, rank->number, group->heaps[rank->number], &group->link,
				     &rank->ep);
	}
	memset(rank->memory, 0, arena.used);
	arena.used = 0;
	place_activations(rank, &arena);

	return status;
}

/* ---- the pass -------------------------------------------------------------------------------- */

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

/* Of the last token of each span that wants to know. */
static void write_logits(kve_rank_t *rank, kve_microbatch_t *m)
{
	const kve_weights_t *w = &rank->model->weights;
	const float eps = rank->model->config.norm_eps;
	const uint32_t hidden = rank->model->config.hidden;
	uint32_t row = 0;

	for (uint32_t s = 0; s < m->n_spans; s++) {
		const kve_span_t *span = &m->spans[s];
		float *logits = span->logits ? span->logits : rank->logits;

		row += span->n;
		if (!kve_span_is_picked(span)) {
			continue;
		}
		kve_rmsnorm(m->x + (size_t)(row - 1) * hidden, 1, hidden, w->final_norm, eps, m->normed);
		kve_rank_matmul(rank, m->normed, 1, &w->head, logits);
		if (span->chosen) {
			*span->chosen = kve_argmax(logits, rank->model->config.vocab);
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

static kv_status_t forward(kve_rank_t *rank, kve_overlap_mode_t mode, uint32_t last)
{
	static const kve_overlap_ops_t ops = {run_item, pass_event, pass_event};
	kv_status_t status;

	for (uint32_t i = 0; i <= last; i++) {
		embed(rank->model, &rank->microbatches[i]);
	}
	status = kve_overlap_run(rank->items[mode], rank->n_items[mode], &ops, rank);
	for (uint32_t i = 0; i <= last && status == KV_OK; i++) {
		write_logits(rank, &rank->microbatches[i]);
	}

	return status;
}

static uint32_t find_lost(const kve_rank_t *rank)
{
	return kvk_ep_lost_ranks(rank->ep);
}

static kvk_ep_stats_t get_stats(const kve_rank_t *rank)
{
	return kvk_ep_get_stats(rank->ep);
}

/* Its cache has memory of its own (kve_cache_init_ranks()). */
const kve_backend_t kve_backend_fp32 = {
	.open = open_rank,
	.close = close_rank,
	.forward = forward,
	.find_lost = find_lost,
	.get_stats = get_stats,
};
