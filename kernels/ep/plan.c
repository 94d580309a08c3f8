#include "kvk/ep.h"

#define LINE   64u  /* bytes a flag has for itself, so that pollers and writers of two do not meet */
#define REGION 256u /* regions begin at multiples: a row that begins amid 128 bytes crosses a link in more packets */

static size_t round_up(size_t n, size_t to)
{
	return (n + to - 1) / to * to;
}

/* NULL: the shape is valid. */
static const char *find_fault(const kvk_ep_shape_t *s)
{
	if (s->ranks == 0 || s->ranks > KVK_EP_MAX_RANKS) {
		return "ranks: 1 to 8";
	}
	if (s->groups == 0 || s->groups % s->ranks != 0) {
		return "reduction groups: a multiple of the ranks";
	}
	if (s->experts == 0 || s->experts > KVK_EP_MAX_EXPERTS || s->experts % s->groups != 0) {
		return "experts: up to 4,096, a multiple of the reduction groups";
	}
	if (s->top_k == 0 || s->top_k > KVK_EP_MAX_TOP_K || s->top_k > s->experts) {
		return "experts a token: 1 to 16, and no more than there are";
	}
	if (s->hidden == 0 || s->hidden > KVK_EP_MAX_HIDDEN || s->hidden % 8 != 0) {
		return "elements of a row: up to 65,536, a multiple of 8";
	}
	if (s->max_tokens == 0 || s->max_tokens > KVK_EP_MAX_TOKENS) {
		return "tokens of a dispatch: 1 to 65,536";
	}
	if (s->in_flight == 0 || s->in_flight > KVK_EP_MAX_IN_FLIGHT) {
		return "dispatches in flight: 1 to 4";
	}

	return NULL;
}

/* Offset of `count` things of `bytes` behind *p_end, which is moved on. The largest shape has a heap of 400 GB. */
static size_t append(size_t *p_end, size_t count, size_t bytes)
{
	const size_t at = round_up(*p_end, REGION);

	*p_end = at + count * bytes;

	return at;
}

kv_status_t kvk_ep_plan(const kvk_ep_shape_t *shape, kvk_ep_plan_t *plan, const char **p_why)
{
	const char *why = find_fault(shape);
	kvk_ep_plan_t p = {.shape = *shape};
	size_t end = 0, slots, records;

	if (p_why) {
		*p_why = why;
	}
	if (why) {
		return KV_ERR_ARG;
	}
	p.rank_experts = shape->experts / shape->ranks;
	p.group_experts = shape->experts / shape->groups;
	p.row_bytes = shape->hidden * sizeof(kvk_bf16_t);
	p.note_bytes = round_up(4u + shape->top_k * 8u, 16);
	p.record_bytes = p.row_bytes + p.note_bytes;
	slots = shape->in_flight;
	records = (size_t)shape->ranks * shape->max_tokens; /* of a slot */
	p.flags = append(&end, 2u * (size_t)shape->ranks, LINE);
	p.reports = append(&end, shape->ranks, LINE);
	p.counts = append(&end, slots * shape->ranks, sizeof(uint32_t));
	p.rows = append(&end, slots * records, p.row_bytes);
	p.notes = append(&end, slots * records, p.note_bytes);
	p.parts = append(&end, slots * shape->groups * shape->max_tokens, p.row_bytes);
	p.heap_bytes = round_up(end, REGION);
	/* Each token has at most top_k experts on one rank, and no more than that has. */
	p.max_rows = (uint32_t)records * (shape->top_k < p.rank_experts ? shape->top_k : p.rank_experts);
	p.index_bytes = slots * (p.rank_experts + 1u + p.max_rows + records * shape->top_k) * sizeof(uint32_t);
	*plan = p;

	return KV_OK;
}
