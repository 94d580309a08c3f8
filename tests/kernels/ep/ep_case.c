#include "ep_case.h"

void *ep_alloc(size_t bytes)
{
	const size_t room = (bytes + 64) / 64 * 64;
	void *memory = aligned_alloc(64, room);

	assert_non_null(memory);

	return memset(memory, 0, room);
}

void ep_batch_open(ep_batch_t *batch, const kvk_ep_plan_t *plan)
{
	const size_t tokens = plan->shape.max_tokens, choices = tokens * plan->shape.top_k;

	batch->rows = ep_alloc(tokens * plan->row_bytes);
	batch->out = ep_alloc(tokens * plan->row_bytes);
	batch->experts = ep_alloc(choices * sizeof *batch->experts);
	batch->weights = ep_alloc(choices * sizeof *batch->weights);
}

void ep_batch_close(const ep_batch_t *batch)
{
	free(batch->rows);
	free(batch->out);
	free(batch->experts);
	free(batch->weights);
}

/* Of one token: each of them once. */
static void draw_experts(const kvk_ep_plan_t *plan, kv_test_rng_t *rng, uint32_t rank, ep_routing_t routing,
			 uint32_t *experts)
{
	const kvk_ep_shape_t *s = &plan->shape;
	const int local = routing == EP_LOCAL && s->top_k <= plan->rank_experts;
	const uint32_t first = local ? rank * plan->rank_experts : 0, n = local ? plan->rank_experts : s->experts;

	for (uint32_t k = 0; k < s->top_k; k++) {
		const uint32_t drawn = (uint32_t)kv_test_below(rng, n), other = (uint32_t)kv_test_below(rng, n);
		uint32_t e = routing == EP_ONE_HOT ? k : routing == EP_SKEWED && other < drawn ? other : drawn;

		for (uint32_t before = 0; before < k; before++) {
			if (experts[before] == first + e) {
				e = (e + 1) % n;
				before = UINT32_MAX; /* from the first one again */
			}
		}
		experts[k] = first + e;
	}
	for (uint32_t k = 0; k < s->top_k && routing >= EP_SPARSE; k++) {
		experts[k] = routing == EP_NOBODY || kv_test_below(rng, 2) ? KVK_EP_NO_EXPERT : experts[k];
	}
}

/* Large rows, which cancel each other, and small ones: in another order they make another sum. */
static void draw_opposite_weights(const uint32_t *experts, uint32_t top_k, float *weights)
{
	for (uint32_t k = 0; k < top_k; k++) {
		weights[k] = experts[k] / 2u % 2u ? 0x1p20f : 1.0f;
	}
}

void ep_batch_draw(ep_batch_t *batch, const kvk_ep_plan_t *plan, kv_test_rng_t *rng, uint32_t rank,
		   ep_routing_t routing)
{
	const kvk_ep_shape_t *s = &plan->shape;
	const uint64_t kind = kv_test_below(rng, 5);

	for (size_t i = 0; i < (size_t)s->max_tokens * s->hidden; i++) {
		batch->rows[i] = kvk_bf16_round((float)kv_test_below(rng, 4001) / 1000.0f - 2.0f);
	}
	for (size_t i = 0; i < (size_t)s->max_tokens * s->top_k; i++) {
		batch->weights[i] = (float)kv_test_below(rng, 1000) / (kv_test_below(rng, 3) ? 1000.0f : 0.001f);
	}
	for (uint32_t t = 0; t < s->max_tokens; t++) {
		const size_t at = (size_t)t * s->top_k;

		draw_experts(plan, rng, rank, routing, batch->experts + at);
		if (kv_test_below(rng, 3) == 0) {
			draw_opposite_weights(batch->experts + at, s->top_k, batch->weights + at);
		}
	}
	batch->tokens = (kvk_ep_tokens_t){.n = kind == 0   ? 0
					       : kind == 1 ? s->max_tokens
							   : 1 + (uint32_t)kv_test_below(rng, s->max_tokens),
					  .rows = batch->rows,
					  .experts = batch->experts,
					  .weights = batch->weights};
}

uint32_t ep_draw_most(const kvk_ep_plan_t *plan, kv_test_rng_t *rng)
{
	const uint64_t kind = kv_test_below(rng, 4);
	const uint32_t room = plan->shape.max_tokens;

	return kind == 0 ? 0 : kind == 1 ? room : 1 + (uint32_t)kv_test_below(rng, room);
}

void ep_batch_bound(ep_batch_t *batch, uint32_t most)
{
	batch->tokens.most = most;
	batch->tokens.n = most && batch->tokens.n > most ? most : batch->tokens.n;
}

/* An expert and its neighbour make opposite rows. */
kvk_bf16_t ep_apply(uint32_t expert, kvk_bf16_t x)
{
	const float factor = (float)(expert / 2u % 5u) + 1.25f;

	return kvk_bf16_round(kvk_bf16_to_float(x) * (expert % 2u ? -factor : factor));
}

void ep_run_experts(const kvk_ep_plan_t *plan, uint32_t rank, const kvk_ep_rows_t *rows, kvk_bf16_t *outputs)
{
	const uint32_t hidden = plan->shape.hidden;

	for (uint32_t e = 0; e < plan->rank_experts; e++) {
		for (uint32_t i = rows->first[e]; i < rows->first[e + 1]; i++) {
			const kvk_bf16_t *x = kvk_ep_row(plan, rows, i);

			for (uint32_t h = 0; h < hidden; h++) {
				outputs[(size_t)i * hidden + h] = ep_apply(rank * plan->rank_experts + e, x[h]);
			}
		}
	}
}
