/* The four halves in host memory: the specification of the GPU's kernels. */
#include "ep/rank.h"

/* ---- dispatch -------------------------------------------------------------------------------- */

static uint32_t rank_of(const kvk_ep_plan_t *plan, uint32_t expert)
{
	return expert / plan->rank_experts;
}

/* Is `number` the next of that half, and is the half before it over? */
static kv_status_t begin_half(const kvk_ep_rank_t *ep, uint32_t half, uint64_t number)
{
	if (ep->failed) {
		return KV_ERR_TIMEOUT;
	}

	return number == ep->done[half] + 1 && number <= ep->done[half - 1] ? KV_OK : KV_ERR_ARG;
}

/* Experts that exist, each once a token: the receiver has no place for more rows. */
static kv_status_t check_tokens(const kvk_ep_plan_t *plan, const kvk_ep_tokens_t *tokens)
{
	const uint32_t top_k = plan->shape.top_k;

	if (tokens->n > plan->shape.max_tokens) {
		return KV_ERR_ARG;
	}
	for (size_t i = 0; i < (size_t)tokens->n * top_k; i++) {
		const uint32_t expert = tokens->experts[i];

		if (expert == KVK_EP_NO_EXPERT) {
			continue;
		}
		for (size_t before = i - i % top_k; before < i; before++) {
			if (tokens->experts[before] == expert) {
				return KV_ERR_ARG;
			}
		}
		if (expert >= plan->shape.experts) {
			return KV_ERR_ARG;
		}
	}

	return KV_OK;
}

/* The record of a token for a rank, behind its row. 0: it has no expert there. */
static int describe_token(const kvk_ep_plan_t *plan, const kvk_ep_tokens_t *tokens, uint32_t token, uint32_t rank,
			  uint8_t *out)
{
	const uint32_t top_k = plan->shape.top_k, *experts = tokens->experts + (size_t)token * top_k;
	uint32_t *ids = (uint32_t *)(void *)out + 1, found = 0;

	memset(out, 0, plan->record_bytes - plan->row_bytes);
	memcpy(out, &token, sizeof token);
	memcpy(ids + top_k, tokens->weights + (size_t)token * top_k, top_k * sizeof(float));
	for (uint32_t k = 0; k < top_k; k++) {
		const int is_there = experts[k] != KVK_EP_NO_EXPERT && rank_of(plan, experts[k]) == rank;

		ids[k] = is_there ? experts[k] : KVK_EP_NO_EXPERT;
		found += (uint32_t)is_there;
	}

	return found > 0;
}

static void send_to(kvk_ep_rank_t *ep, const kvk_ep_tokens_t *tokens, uint64_t number, uint32_t rank)
{
	_Alignas(16) uint8_t record[16u + 8u * KVK_EP_MAX_TOP_K];
	const kvk_ep_plan_t *plan = &ep->plan;
	uint32_t n = 0;

	for (uint32_t t = 0; t < tokens->n; t++) {
		if (describe_token(plan, tokens, t, rank, record)) {
			const size_t at = kvk_ep_record_at(plan, number, ep->rank * plan->shape.max_tokens + n++);

			ep->link.put(ep->link.ctx, rank, at, tokens->rows + (size_t)t * plan->shape.hidden,
				     plan->row_bytes);
			ep->link.put(ep->link.ctx, rank, at + plan->row_bytes, record,
				     plan->record_bytes - plan->row_bytes);
		}
	}
	ep->link.put(ep->link.ctx, rank, kvk_ep_count_at(plan, number, ep->rank), &n, sizeof n);
	ep->stats.dispatch_bytes += rank == ep->rank ? 0 : n * plan->record_bytes;
}

kv_status_t kvk_ep_dispatch_send(kvk_ep_rank_t *ep, const kvk_ep_tokens_t *tokens, uint64_t *p_number)
{
	const uint64_t number = ep->done[KVK_EP_DISPATCH_SENT] + 1;

	if (ep->failed) {
		return KV_ERR_TIMEOUT;
	}
	if (check_tokens(&ep->plan, tokens) != KV_OK) {
		return KV_ERR_ARG;
	}
	if (!kvk_ep_may_send(number, ep->done[KVK_EP_COMBINE_RECEIVED], ep->plan.shape.in_flight)) {
		return KV_ERR_BUSY;
	}
	for (uint32_t r = 0; r < ep->plan.shape.ranks; r++) {
		send_to(ep, tokens, number, r);
	}
	kvk_ep_release(ep, KVK_EP_DISPATCH, number);
	kvk_ep_result(ep, number)->tokens = *tokens;
	ep->done[KVK_EP_DISPATCH_SENT] = number;
	*p_number = number;

	return KV_OK;
}

/* ---- the index ------------------------------------------------------------------------------- */

/* What a record says of its token; in the heap, which peers write: bounded before it is used. */
static const uint32_t *record_words(const kvk_ep_rank_t *ep, uint64_t number, uint32_t record)
{
	return (const void *)(ep->heap + kvk_ep_record_at(&ep->plan, number, record) + ep->plan.row_bytes);
}

static uint32_t count_of(const kvk_ep_rank_t *ep, uint64_t number, uint32_t source)
{
	const uint32_t most = ep->plan.shape.max_tokens;
	uint32_t n;

	memcpy(&n, ep->heap + kvk_ep_count_at(&ep->plan, number, source), sizeof n);

	return n < most ? n : most;
}

/* The expert's number on this rank; rank_experts: another rank's, or none. */
static uint32_t local_expert(const kvk_ep_rank_t *ep, uint32_t expert)
{
	const uint32_t first = ep->rank * ep->plan.rank_experts;

	return expert >= first && expert - first < ep->plan.rank_experts ? expert - first : ep->plan.rank_experts;
}

/* Two passes over the records: how many rows each expert has, and then which. `next`: the next row of each expert. */
static uint32_t build_index(kvk_ep_rank_t *ep, uint64_t number)
{
	const kvk_ep_shape_t *s = &ep->plan.shape;
	kvk_ep_result_t *result = kvk_ep_result(ep, number);
	uint32_t *first = result->first, experts = ep->plan.rank_experts;

	memset(first, 0, (experts + 1u) * sizeof *first);
	for (int pass = 0; pass < 2; pass++) {
		for (uint32_t source = 0; source < s->ranks; source++) {
			for (uint32_t i = 0, n = count_of(ep, number, source); i < n; i++) {
				const uint32_t record = source * s->max_tokens + i;
				const uint32_t *ids = record_words(ep, number, record) + 1;

				for (uint32_t k = 0; k < s->top_k; k++) {
					const uint32_t e = local_expert(ep, ids[k]);

					if (e < experts && pass == 0) {
						first[e + 1]++;
					} else if (e < experts) {
						result->row[record * s->top_k + k] = first[e];
						result->record[first[e]++] = record;
					}
				}
			}
		}
		for (uint32_t e = 0; e < experts && pass == 0; e++) {
			first[e + 1] += first[e];
		}
	}
	/* The second pass has moved each expert's first row to the next expert's. */
	memmove(first + 1, first, experts * sizeof *first);
	first[0] = 0;

	return first[experts];
}

kv_status_t kvk_ep_dispatch_recv(kvk_ep_rank_t *ep, uint64_t number, uint64_t deadline_ns, kvk_ep_rows_t *p_rows)
{
	kv_status_t status = begin_half(ep, KVK_EP_DISPATCH_RECEIVED, number);
	const kvk_ep_result_t *result = kvk_ep_result(ep, number);

	if (status == KV_OK) {
		status = kvk_ep_await(ep, KVK_EP_DISPATCH, number, deadline_ns);
	}
	if (status != KV_OK) {
		return status;
	}
	*p_rows = (kvk_ep_rows_t){.n = build_index(ep, number),
				  .first = result->first,
				  .record = result->record,
				  .records = ep->heap + kvk_ep_record_at(&ep->plan, number, 0)};
	ep->done[KVK_EP_DISPATCH_RECEIVED] = number;

	return KV_OK;
}

/* ---- combine --------------------------------------------------------------------------------- */

/* What a group's experts have made of a record, reduced. 0: none of its experts is in the group. */
static int reduce_part(kvk_ep_rank_t *ep, uint64_t number, uint32_t record, uint32_t group, const kvk_bf16_t *outputs)
{
	const kvk_ep_shape_t *s = &ep->plan.shape;
	const uint32_t *ids = record_words(ep, number, record) + 1, *row = kvk_ep_result(ep, number)->row;
	const float *weights = (const void *)(ids + s->top_k);
	uint32_t found = 0;

	for (uint32_t k = 0; k < s->top_k; k++) {
		if (ids[k] / ep->plan.group_experts != group || local_expert(ep, ids[k]) == ep->plan.rank_experts) {
			continue;
		}
		for (uint32_t h = 0; h < s->hidden; h++) {
			const size_t at = (size_t)row[record * s->top_k + k] * s->hidden + h;
			const float term = weights[k] * kvk_bf16_to_float(outputs[at]);

			ep->sum[h] = (found ? ep->sum[h] : 0.0f) + term;
		}
		found++;
	}
	for (uint32_t h = 0; h < s->hidden && found; h++) {
		ep->part[h] = kvk_bf16_round(ep->sum[h]);
	}

	return found > 0;
}

static void send_parts(kvk_ep_rank_t *ep, uint64_t number, uint32_t record, const kvk_bf16_t *outputs)
{
	const kvk_ep_plan_t *plan = &ep->plan;
	const uint32_t rank_groups = plan->shape.groups / plan->shape.ranks, owner = record / plan->shape.max_tokens;
	const uint32_t token = record_words(ep, number, record)[0];

	for (uint32_t g = ep->rank * rank_groups; g < (ep->rank + 1) * rank_groups; g++) {
		if (token < plan->shape.max_tokens && reduce_part(ep, number, record, g, outputs)) {
			ep->link.put(ep->link.ctx, owner, kvk_ep_part_at(plan, number, g, token), ep->part,
				     plan->row_bytes);
			ep->stats.combine_bytes += owner == ep->rank ? 0 : plan->row_bytes;
		}
	}
}

kv_status_t kvk_ep_combine_send(kvk_ep_rank_t *ep, uint64_t number, const kvk_bf16_t *outputs)
{
	const kvk_ep_shape_t *s = &ep->plan.shape;
	const kv_status_t status = begin_half(ep, KVK_EP_COMBINE_SENT, number);

	if (status != KV_OK) {
		return status;
	}
	for (uint32_t source = 0; source < s->ranks; source++) {
		for (uint32_t i = 0, n = count_of(ep, number, source); i < n; i++) {
			send_parts(ep, number, source * s->max_tokens + i, outputs);
		}
	}
	kvk_ep_release(ep, KVK_EP_COMBINE, number);
	ep->done[KVK_EP_COMBINE_SENT] = number;

	return KV_OK;
}

/* The sum over the groups that have one of the token's experts, in order. */
static void add_parts(kvk_ep_rank_t *ep, uint64_t number, uint32_t token, kvk_bf16_t *out)
{
	const kvk_ep_shape_t *s = &ep->plan.shape;
	const uint32_t *experts = kvk_ep_result(ep, number)->tokens.experts + (size_t)token * s->top_k;

	memset(ep->sum, 0, s->hidden * sizeof *ep->sum);
	for (uint32_t g = 0; g < s->groups; g++) {
		const kvk_bf16_t *part = (const void *)(ep->heap + kvk_ep_part_at(&ep->plan, number, g, token));
		uint32_t k = 0;

		while (k < s->top_k && experts[k] / ep->plan.group_experts != g) { /* KVK_EP_NO_EXPERT is in none */
			k++;
		}
		for (uint32_t h = 0; h < s->hidden && k < s->top_k; h++) {
			ep->sum[h] += kvk_bf16_to_float(part[h]);
		}
	}
	for (uint32_t h = 0; h < s->hidden; h++) {
		out[h] = kvk_bf16_round(ep->sum[h]);
	}
}

kv_status_t kvk_ep_combine_recv(kvk_ep_rank_t *ep, uint64_t number, uint64_t deadline_ns, kvk_bf16_t *out)
{
	kv_status_t status = begin_half(ep, KVK_EP_COMBINE_RECEIVED, number);

	if (status == KV_OK) {
		status = kvk_ep_await(ep, KVK_EP_COMBINE, number, deadline_ns);
	}
	if (status != KV_OK) {
		return status;
	}
	for (uint32_t t = 0; t < kvk_ep_result(ep, number)->tokens.n; t++) {
		add_parts(ep, number, t, out + (size_t)t * ep->plan.shape.hidden);
	}
	ep->done[KVK_EP_COMBINE_RECEIVED] = number;

	return KV_OK;
}
