/* A rank: what it has whatever computes, and the pass through all layers. */
#include "rank.h"

#include <stdlib.h>
#include <string.h>

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
	status = create_lists(rank);
	if (status == KV_OK) {
		status = group->backend->open(rank);
	}
	if (status != KV_OK) {
		kve_rank_destroy(rank);
		return status;
	}
	*p_rank = rank;

	return KV_OK;
}

void kve_rank_destroy(kve_rank_t *rank)
{
	if (!rank) {
		return;
	}
	rank->group->backend->close(rank);
	free(rank->items[KVE_OVERLAP_SEQ]);
	free(rank->items[KVE_OVERLAP_DBO]);
	free(rank);
}

kve_rank_stats_t kve_rank_stats(const kve_rank_t *rank)
{
	kve_rank_stats_t stats = {.steps = {rank->steps[KVE_OVERLAP_SEQ], rank->steps[KVE_OVERLAP_DBO]}};

	if (rank->model->config.experts) {
		stats.sent = rank->group->backend->get_stats(rank);
	}

	return stats;
}

kv_status_t kve_rank_set_trace(kve_rank_t *rank, kve_trace_t trace)
{
	const kve_backend_t *backend = rank->group->backend;

	return backend->set_trace ? backend->set_trace(rank, trace) : KV_ERR_UNSUPPORTED;
}

const kve_overlap_item_t *kve_rank_items(const kve_rank_t *rank, kve_overlap_mode_t mode, uint32_t *p_n)
{
	*p_n = rank->n_items[mode];

	return rank->items[mode];
}

kv_status_t kve_rank_read_trace(kve_rank_t *rank, kve_clock_interval_t *intervals)
{
	const kve_backend_t *backend = rank->group->backend;

	return backend->read_trace ? backend->read_trace(rank, intervals) : KV_ERR_UNSUPPORTED;
}

/* ---- the cache ------------------------------------------------------------------------------- */

kv_status_t kve_rank_place(const kve_rank_t *rank, kve_place_t *place)
{
	const kve_backend_t *backend = rank->group->backend;

	return backend->get_place ? backend->get_place(rank, place) : KV_ERR_UNSUPPORTED;
}

kv_status_t kve_rank_open_cache(kve_rank_t *rank, uint32_t blocks, uint32_t tp, kve_cache_t *cache)
{
	const kve_cache_shape_t shape = {&rank->model->config, blocks, 1, KVK_DTYPE_BF16};
	void *memory;
	kv_status_t status;

	if (!rank->group->devices) {
		return kve_cache_init_ranks(cache, &rank->model->config, blocks, tp);
	}
	if (tp != 1 || blocks == 0) {
		return KV_ERR_ARG;
	}
	status = rank->group->backend->open_cache(rank, kve_cache_bytes(&shape), &memory);
	if (status != KV_OK) {
		return status;
	}
	status = kve_cache_init_at(cache, &shape, memory);
	if (status != KV_OK) {
		rank->group->backend->close_cache(rank, memory);
	}

	return status;
}

void kve_rank_close_cache(kve_rank_t *rank, kve_cache_t *cache)
{
	if (rank && rank->group->devices && cache->ranks) {
		rank->group->backend->close_cache(rank, cache->base[0]);
	}
	kve_cache_fini(cache);
}

/* ---- the pass -------------------------------------------------------------------------------- */

static kv_status_t check_spans(const kve_rank_t *rank, const kve_cache_t *cache, const kve_span_t *spans,
			       uint32_t n_spans)
{
	const kve_config_t *c = &rank->model->config;
	uint32_t rows = 0;

	if (n_spans > KVE_MAX_SPANS) {
		return KV_ERR_ARG;
	}

	for (uint32_t s = 0; s < n_spans; s++) {
		const kve_span_t *span = &spans[s];

		if (span->n == 0 || span->n > rank->group->max_rows - rows || span->n > c->max_tokens ||
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
		m->most = dbo->most;
		if (dbo->mode == KVE_OVERLAP_DBO && dbo->most > dbo->split) {
			m->most = i == KVE_LEADING ? dbo->split : dbo->most - dbo->split;
		}
		m->n_spans = kve_dbo_slice(spans, n_spans, first, m->rows, m->spans);
	}

	return KV_OK;
}

kv_status_t kve_rank_forward(kve_rank_t *rank, kve_cache_t *cache, const kve_span_t *spans, uint32_t n_spans,
			     const kve_dbo_step_t *dbo)
{
	static const kve_dbo_step_t whole = {.mode = KVE_OVERLAP_SEQ};
	const kve_dbo_step_t *step = dbo ? dbo : &whole;
	kv_status_t status = kve_config_rank(&rank->model->config, cache->ranks, &rank->tp_share);

	if (status == KV_OK) {
		status = check_spans(rank, cache, spans, n_spans);
	}
	if (status == KV_OK) {
		status = slice_spans(rank, spans, n_spans, step);
	}
	if (status != KV_OK) {
		return status;
	}
	rank->cache = cache;
	rank->steps[step->mode]++;
	status = rank->group->backend->forward(rank, step->mode, last_microbatch(step));
	if (status != KV_OK) {
		/* Nobody waits for a rank whose device has failed; which one a transport misses, it knows itself. */
		kve_report_lost(rank, 1, status == KV_ERR_IO ? 1u << rank->number : 0);
	}

	return status;
}
