/* Experts: router, rows to their ranks, what those make of them, and back. */
#include "kve/experts.h"

#include "kvk/ep.h"

#include <stdlib.h>

/* A rank's share of the rows, and room for what its experts make. */
typedef struct rank {
	kvk_ep_rank_t *ep;
	uint64_t number; /* of the dispatch under way */
	kvk_ep_rows_t rows;
	kvk_bf16_t *outputs; /* [max_rows of the plan][hidden] */
} rank_t;

struct kve_experts {
	kve_config_t config;
	uint32_t ranks;
	uint32_t max_rows;
	kvk_ep_plan_t plan;
	void *heaps[KVK_EP_MAX_RANKS];
	rank_t rank[KVK_EP_MAX_RANKS];
	float *logits;                 /* [max_rows][experts] */
	uint32_t *ids;                 /* [max_rows][top_k]   */
	float *weights;                /* [max_rows][top_k]   */
	kvk_bf16_t *there, *back;      /* [max_rows][hidden]  */
	float *in, *gate, *up, *added; /* [max_rows][hidden or expert_inner]: of one expert */
};

static int allocate(kve_experts_t *x)
{
	const kve_config_t *c = &x->config;
	const size_t rows = x->max_rows;

	x->logits = calloc(rows * c->experts, sizeof(float));
	x->ids = calloc(rows * c->top_k, sizeof(uint32_t));
	x->weights = calloc(rows * c->top_k, sizeof(float));
	x->there = calloc(rows * c->hidden, sizeof(kvk_bf16_t));
	x->back = calloc(rows * c->hidden, sizeof(kvk_bf16_t));
	x->in = calloc(rows * c->hidden, sizeof(float));
	x->gate = calloc(rows * c->expert_inner, sizeof(float));
	x->up = calloc(rows * c->expert_inner, sizeof(float));
	x->added = calloc(rows * c->hidden, sizeof(float));
	for (uint32_t r = 0; r < x->ranks; r++) {
		x->heaps[r] = aligned_alloc(64, x->plan.heap_bytes);
		x->rank[r].outputs = calloc(x->plan.max_rows, x->plan.row_bytes);
		if (!x->heaps[r] || !x->rank[r].outputs) {
			return 0;
		}
		memset(x->heaps[r], 0, x->plan.heap_bytes);
	}

	return x->logits && x->ids && x->weights && x->there && x->back && x->in && x->gate && x->up && x->added;
}

kv_status_t kve_experts_create(const kve_config_t *config, uint32_t ranks, uint32_t max_rows, kve_experts_t **p_experts)
{
	const kvk_ep_shape_t shape = {.ranks = ranks,
				      .experts = config->experts,
				      .top_k = config->top_k,
				      .hidden = config->hidden,
				      .max_tokens = max_rows,
				      .groups = config->groups,
				      .in_flight = 1};
	kve_experts_t *x = calloc(1, sizeof *x);
	kvk_ep_link_t link;
	kv_status_t status;

	if (!x) {
		return KV_ERR_NOMEM;
	}
	x->config = *config;
	x->ranks = ranks;
	x->max_rows = max_rows;
	status = kvk_ep_plan(&shape, &x->plan, NULL);
	if (status == KV_OK && !allocate(x)) {
		status = KV_ERR_NOMEM;
	}
	link = kvk_ep_memory_link(x->heaps);
	for (uint32_t r = 0; r < ranks && status == KV_OK; r++) {
		status = kvk_ep_open(&kv_env_posix, &x->plan, r, x->heaps[r], &link, &x->rank[r].ep);
	}
	if (status != KV_OK) {
		kve_experts_destroy(x);
		return status;
	}
	*p_experts = x;

	return KV_OK;
}

void kve_experts_destroy(kve_experts_t *x)
{
	if (!x) {
		return;
	}
	for (uint32_t r = 0; r < KVK_EP_MAX_RANKS; r++) {
		kvk_ep_close(x->rank[r].ep);
		free(x->rank[r].outputs);
		free(x->heaps[r]);
	}
	free(x->logits);
	free(x->ids);
	free(x->weights);
	free(x->there);
	free(x->back);
	free(x->in);
	free(x->gate);
	free(x->up);
	free(x->added);
	free(x);
}

/* All rows of an expert that have come to its rank, in batches. */
static void run_expert(kve_experts_t *x, rank_t *rank, uint32_t first, uint32_t n, const kve_expert_t *expert)
{
	const uint32_t hidden = x->config.hidden;

	for (uint32_t i = 0; i < n; i++) {
		const kvk_bf16_t *row = kvk_ep_row(&x->plan, &rank->rows, first + i);

		for (uint32_t h = 0; h < hidden; h++) {
			x->in[(size_t)i * hidden + h] = kvk_bf16_to_float(row[h]);
		}
	}
	kve_matmul(x->in, n, &expert->gate, x->gate);
	kve_matmul(x->in, n, &expert->up, x->up);
	kve_swiglu(x->gate, x->up, (size_t)n * x->config.expert_inner);
	kve_matmul(x->gate, n, &expert->down, x->added);
	for (size_t i = 0; i < (size_t)n * hidden; i++) {
		rank->outputs[(size_t)first * hidden + i] = kvk_bf16_round(x->added[i]);
	}
}

static void run_rank(kve_experts_t *x, uint32_t r, const kve_layer_t *layer)
{
	const uint32_t experts = x->plan.rank_experts;
	rank_t *rank = &x->rank[r];

	for (uint32_t e = 0; e < experts; e++) {
		uint32_t at = rank->rows.first[e];

		while (at < rank->rows.first[e + 1]) {
			const uint32_t left = rank->rows.first[e + 1] - at, n = left < x->max_rows ? left : x->max_rows;

			run_expert(x, rank, at, n, &layer->experts[r * experts + e]);
			at += n;
		}
	}
}

/* The first row of a rank's share. */
static uint32_t first_row(const kve_experts_t *x, uint32_t rank, uint32_t rows)
{
	return rank * rows / x->ranks;
}

/* Ranks take turns within one thread: what one waits for, the others have sent before. */
static void exchange(kve_experts_t *x, const kve_layer_t *layer, uint32_t rows)
{
	const kve_config_t *c = &x->config;

	for (uint32_t r = 0; r < x->ranks; r++) {
		const size_t first = first_row(x, r, rows);
		const kvk_ep_tokens_t tokens = {.n = first_row(x, r + 1, rows) - (uint32_t)first,
						.rows = x->there + first * c->hidden,
						.experts = x->ids + first * c->top_k,
						.weights = x->weights + first * c->top_k};

		kv_assert(kvk_ep_dispatch_send(x->rank[r].ep, &tokens, &x->rank[r].number) == KV_OK);
	}
	for (uint32_t r = 0; r < x->ranks; r++) {
		rank_t *rank = &x->rank[r];

		kv_assert(kvk_ep_dispatch_recv(rank->ep, rank->number, 0, &rank->rows) == KV_OK);
		run_rank(x, r, layer);
		kv_assert(kvk_ep_combine_send(rank->ep, rank->number, rank->outputs) == KV_OK);
	}
	for (uint32_t r = 0; r < x->ranks; r++) {
		kvk_bf16_t *out = x->back + (size_t)first_row(x, r, rows) * c->hidden;

		kv_assert(kvk_ep_combine_recv(x->rank[r].ep, x->rank[r].number, 0, out) == KV_OK);
	}
}

void kve_experts_run(kve_experts_t *x, const kve_layer_t *layer, const float *m, uint32_t rows, float *out)
{
	const kve_config_t *c = &x->config;

	kve_matmul(m, rows, &layer->router, x->logits);
	kve_route(c, x->logits, rows, x->ids, x->weights);
	for (size_t i = 0; i < (size_t)rows * c->hidden; i++) {
		x->there[i] = kvk_bf16_round(m[i]);
	}
	exchange(x, layer, rows);
	for (size_t i = 0; i < (size_t)rows * c->hidden; i++) {
		out[i] = kvk_bf16_to_float(x->back[i]);
	}
}

uint64_t kve_experts_sent_bytes(const kve_experts_t *x)
{
	uint64_t bytes = 0;

	for (uint32_t r = 0; x && r < x->ranks; r++) {
		const kvk_ep_stats_t stats = kvk_ep_get_stats(x->rank[r].ep);

		bytes += stats.dispatch_bytes + stats.combine_bytes;
	}

	return bytes;
}
