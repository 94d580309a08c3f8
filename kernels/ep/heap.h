/* heap.h -- where things lie in a rank's heap (kvk_ep_plan_t), for the twin and for device code. */
#ifndef KVK_EP_HEAP_H
#define KVK_EP_HEAP_H

#include "ep/protocol.h"
#include "kvk/ep.h"

enum { KVK_EP_DISPATCH = 0, KVK_EP_COMBINE = 1 }; /* kinds of flags */
enum { KVK_EP_DISPATCH_SENT, KVK_EP_DISPATCH_RECEIVED, KVK_EP_COMBINE_SENT, KVK_EP_COMBINE_RECEIVED }; /* halves */

KVK_EP_RULE size_t kvk_ep_flag_at(const kvk_ep_plan_t *plan, uint32_t kind, uint32_t source)
{
	return plan->flags + (size_t)(kind * plan->shape.ranks + source) * 64u;
}
KVK_EP_RULE size_t kvk_ep_report_at(const kvk_ep_plan_t *plan, uint32_t source)
{
	return plan->reports + (size_t)source * 64u;
}
KVK_EP_RULE size_t kvk_ep_count_at(const kvk_ep_plan_t *plan, uint64_t number, uint32_t source)
{
	const size_t slot = kvk_ep_slot(number, plan->shape.in_flight);

	return plan->counts + (slot * plan->shape.ranks + source) * sizeof(uint32_t);
}
/* Records of all sources of a number lie behind each other, max_tokens for each: this one among those of all slots. */
KVK_EP_RULE size_t kvk_ep_record(const kvk_ep_plan_t *plan, uint64_t number, uint32_t record)
{
	const size_t slot = kvk_ep_slot(number, plan->shape.in_flight);

	return slot * plan->shape.ranks * plan->shape.max_tokens + record;
}
KVK_EP_RULE size_t kvk_ep_row_at(const kvk_ep_plan_t *plan, uint64_t number, uint32_t record)
{
	return plan->rows + kvk_ep_record(plan, number, record) * plan->row_bytes;
}
KVK_EP_RULE size_t kvk_ep_note_at(const kvk_ep_plan_t *plan, uint64_t number, uint32_t record)
{
	return plan->notes + kvk_ep_record(plan, number, record) * plan->note_bytes;
}
KVK_EP_RULE size_t kvk_ep_part_at(const kvk_ep_plan_t *plan, uint64_t number, uint32_t group, uint32_t token)
{
	const size_t slot = kvk_ep_slot(number, plan->shape.in_flight);

	return plan->parts + ((slot * plan->shape.groups + group) * plan->shape.max_tokens + token) * plan->row_bytes;
}

/* The first of the groups that a rank has, which lie behind each other, and the bytes of their parts for one owner. */
KVK_EP_RULE uint32_t kvk_ep_first_group(const kvk_ep_plan_t *plan, uint32_t rank)
{
	return rank * (plan->shape.groups / plan->shape.ranks);
}
KVK_EP_RULE size_t kvk_ep_rank_parts(const kvk_ep_plan_t *plan)
{
	return (size_t)kvk_ep_first_group(plan, 1) * plan->shape.max_tokens * plan->row_bytes;
}

/* Bytes that a padded copy of `most` tokens moves from one rank to another: rows and notes, or parts. */
KVK_EP_RULE size_t kvk_ep_padded_bytes(const kvk_ep_plan_t *plan, uint32_t kind, uint32_t most)
{
	return most *
	       (kind == KVK_EP_DISPATCH ? plan->record_bytes : (size_t)kvk_ep_first_group(plan, 1) * plan->row_bytes);
}

/* Which of the rank's own tokens the record is, which do not travel; max_tokens: another rank's. */
KVK_EP_RULE uint32_t kvk_ep_own_token(const kvk_ep_plan_t *plan, uint32_t rank, uint32_t record)
{
	const uint32_t first = rank * plan->shape.max_tokens;

	return record >= first && record - first < plan->shape.max_tokens ? record - first : plan->shape.max_tokens;
}
/* The expert's number on that rank; rank_experts: another rank's, or none. */
KVK_EP_RULE uint32_t kvk_ep_local_expert(const kvk_ep_plan_t *plan, uint32_t rank, uint32_t expert)
{
	const uint32_t first = rank * plan->rank_experts;

	return expert >= first && expert - first < plan->rank_experts ? expert - first : plan->rank_experts;
}

#endif
