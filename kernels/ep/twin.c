/* The four halves in host memory: the specification of the GPU's kernels. */
#include "ep/rank.h"

/* ---- dispatch -------------------------------------------------------------------------------- */

/* Is `number` the next of that half, and is the half before it over? */
static kv_status_t begin_half(const kvk_ep_rank_t *ep, uint32_t half, uint64_t number)
{
	if (ep->failed) {
		return KV_ERR_TIMEOUT;
	}

	return number == ep->done[half] + 1 && number <= ep->done[half - 1] ? KV_OK : KV_ERR_ARG;
}

/* No more tokens than others expect, and experts that exist, each once a token: the receiver has no place for more
 * rows. */
static kv_status_t check_tokens(const kvk_ep_plan_t *plan, const kvk_ep_tokens_t *tokens)
{
	const uint32_t top_k = plan->shape.top_k;

	if (tokens->n > tokens->most || tokens->most > plan->shape.max_tokens) {
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

static int goes_to(const kvk_ep_plan_t *plan, const uint32_t *experts, uint32_t rank)
{
	uint32_t k = 0;

	while (k < plan->shape.top_k && kvk_ep_local_expert(plan, rank, experts[k]) == plan->rank_experts) {
		k++;
	}

	return k < plan->shape.top_k;
}

static void write_note(const kvk_ep_plan_t *plan, const kvk_ep_tokens_t *tokens, uint32_t token, uint8_t *out)
{
	const uint32_t top_k = plan->shape.top_k;
	uint32_t *words = (uint32_t *)(void *)out;

	memset(out, 0, plan->note_bytes);
	memcpy(words, tokens->experts + (size_t)token * top_k, top_k * sizeof(uint32_t));
	memcpy(words + top_k, tokens->weights + (size_t)token * top_k, top_k * sizeof(float));
	words[2u * (size_t)top_k] = token;
}

/* Row and note of the number's record i for that rank. A padded link gets them together: rows, then notes. */
static void put_record(kvk_ep_rank_t *ep, uint64_t number, uint32_t rank, uint32_t i, const kvk_bf16_t *row,
		       const uint8_t *note)
{
	const kvk_ep_plan_t *plan = &ep->plan;
	const uint32_t record = ep->rank * plan->shape.max_tokens + i;
	const kvk_ep_link_t *link = &ep->link;

	if (link->padded) {
		memcpy(ep->outbox + i * plan->row_bytes, row, plan->row_bytes);
		memcpy(ep->outbox + plan->shape.max_tokens * plan->row_bytes + i * plan->note_bytes, note,
		       plan->note_bytes);
		return;
	}
	link->put(link->ctx, rank, kvk_ep_row_at(plan, number, record), row, plan->row_bytes);
	link->put(link->ctx, rank, kvk_ep_note_at(plan, number, record), note, plan->note_bytes);
}

/* `most` records, n of them real. */
static void put_outbox(kvk_ep_rank_t *ep, uint64_t number, uint32_t rank, uint32_t most, uint32_t n)
{
	const kvk_ep_plan_t *plan = &ep->plan;
	const uint32_t room = plan->shape.max_tokens, first = ep->rank * room;
	const kvk_ep_link_t *link = &ep->link;

	link->put(link->ctx, rank, kvk_ep_row_at(plan, number, first), ep->outbox, most * plan->row_bytes);
	link->put(link->ctx, rank, kvk_ep_note_at(plan, number, first), ep->outbox + room * plan->row_bytes,
		  most * plan->note_bytes);
	ep->stats.dispatch_padding += (most - n) * plan->record_bytes;
}

/* A rank's own tokens stay where they are. */
static void send_to(kvk_ep_rank_t *ep, const kvk_ep_tokens_t *tokens, uint64_t number, uint32_t rank)
{
	_Alignas(16) uint8_t note[16u + 8u * KVK_EP_MAX_TOP_K];
	const kvk_ep_plan_t *plan = &ep->plan;
	uint32_t n = 0;

	for (uint32_t t = 0; t < tokens->n; t++) {
		if (goes_to(plan, tokens->experts + (size_t)t * plan->shape.top_k, rank)) {
			write_note(plan, tokens, t, note);
			put_record(ep, number, rank, n++, tokens->rows + (size_t)t * plan->shape.hidden, note);
		}
	}
	if (ep->link.padded) {
		put_outbox(ep, number, rank, tokens->most, n);
	}
	ep->link.put(ep->link.ctx, rank, kvk_ep_count_at(plan, number, ep->rank), &n, sizeof n);
	ep->stats.dispatch_bytes += n * plan->record_bytes;
}

kv_status_t kvk_ep_dispatch_send(kvk_ep_rank_t *ep, const kvk_ep_tokens_t *tokens, uint64_t *p_number)
{
	const uint64_t number = ep->done[KVK_EP_DISPATCH_SENT] + 1;
	kvk_ep_tokens_t bounded = *tokens;

	if (ep->failed) {
		return KV_ERR_TIMEOUT;
	}
	bounded.most = tokens->most ? tokens->most : ep->plan.shape.max_tokens;
	if (check_tokens(&ep->plan, &bounded) != KV_OK) {
		return KV_ERR_ARG;
	}
	if (!kvk_ep_may_send(number, ep->done[KVK_EP_COMBINE_RECEIVED], ep->plan.shape.in_flight)) {
		return KV_ERR_BUSY;
	}
	for (uint32_t r = 0; r < ep->plan.shape.ranks; r++) {
		if (r != ep->rank) {
			send_to(ep, &bounded, number, r);
		}
	}
	kvk_ep_release(ep, KVK_EP_DISPATCH, number);
	kvk_ep_result(ep, number)->tokens = bounded;
	ep->done[KVK_EP_DISPATCH_SENT] = number;
	*p_number = number;

	return KV_OK;
}

/* ---- the index ------------------------------------------------------------------------------- */

typedef struct told {
	uint32_t token;
	const uint32_t *experts; /* [top_k] */
	const float *weights;    /* [top_k] */
} told_t;

/* What a record says of its token. Peers write to the heap: it is bounded before it is used. */
static told_t read_record(kvk_ep_rank_t *ep, uint64_t number, uint32_t record)
{
	const kvk_ep_plan_t *plan = &ep->plan;
	const kvk_ep_tokens_t *tokens = &kvk_ep_result(ep, number)->tokens;
	const uint32_t token = kvk_ep_own_token(plan, ep->rank, record), top_k = plan->shape.top_k;
	const uint32_t *words = (const void *)(ep->near + kvk_ep_note_at(plan, number, record));

	if (token < plan->shape.max_tokens) {
		return (told_t){token, tokens->experts + (size_t)token * top_k,
				tokens->weights + (size_t)token * top_k};
	}

	return (told_t){words[2u * (size_t)top_k], words, (const void *)(words + top_k)};
}

static uint32_t count_of(kvk_ep_rank_t *ep, uint64_t number, uint32_t source)
{
	const uint32_t most = ep->plan.shape.max_tokens;
	uint32_t n;

	if (source == ep->rank) {
		return kvk_ep_result(ep, number)->tokens.n;
	}
	memcpy(&n, ep->near + kvk_ep_count_at(&ep->plan, number, source), sizeof n);

	return n < most ? n : most;
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
				const told_t told = read_record(ep, number, record);

				for (uint32_t k = 0; k < s->top_k; k++) {
					const uint32_t e = kvk_ep_local_expert(&ep->plan, ep->rank, told.experts[k]);

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

static void fetch(kvk_ep_rank_t *ep, size_t offset, size_t n)
{
	if (n > 0) {
		ep->link.fetch(ep->link.ctx, ep->rank, offset, ep->near + offset, n);
	}
}

/* What other ranks have sent: the count first, for a link that needs it. */
static void fetch_records(kvk_ep_rank_t *ep, uint64_t number)
{
	const kvk_ep_plan_t *plan = &ep->plan;

	for (uint32_t r = 0; r < plan->shape.ranks && ep->link.fetch; r++) {
		const uint32_t first = r * plan->shape.max_tokens;
		uint32_t n;

		if (r == ep->rank) {
			continue;
		}
		fetch(ep, kvk_ep_count_at(plan, number, r), sizeof n);
		n = ep->link.padded ? kvk_ep_result(ep, number)->tokens.most : count_of(ep, number, r);
		fetch(ep, kvk_ep_row_at(plan, number, first), n * plan->row_bytes);
		fetch(ep, kvk_ep_note_at(plan, number, first), n * plan->note_bytes);
	}
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
	fetch_records(ep, number);
	*p_rows = (kvk_ep_rows_t){.n = build_index(ep, number),
				  .first = result->first,
				  .record = result->record,
				  .rows = (const void *)(ep->near + kvk_ep_row_at(&ep->plan, number, 0)),
				  .own = result->tokens.rows,
				  .own_first = ep->rank * ep->plan.shape.max_tokens};
	ep->done[KVK_EP_DISPATCH_RECEIVED] = number;

	return KV_OK;
}

/* ---- combine --------------------------------------------------------------------------------- */

/* What a group's experts have made of a record, reduced. 0: none of its experts is in the group. */
static int reduce_part(kvk_ep_rank_t *ep, uint64_t number, uint32_t record, uint32_t group, const kvk_bf16_t *outputs)
{
	const kvk_ep_shape_t *s = &ep->plan.shape;
	const uint32_t *row = kvk_ep_result(ep, number)->row;
	const told_t told = read_record(ep, number, record);
	uint32_t found = 0;

	for (uint32_t k = 0; k < s->top_k; k++) {
		if (told.experts[k] / ep->plan.group_experts != group) { /* KVK_EP_NO_EXPERT is in none */
			continue;
		}
		for (uint32_t h = 0; h < s->hidden; h++) {
			const size_t at = (size_t)row[record * s->top_k + k] * s->hidden + h;
			const float term = told.weights[k] * kvk_bf16_to_float(outputs[at]);

			ep->sum[h] = (found ? ep->sum[h] : 0.0f) + term;
		}
		found++;
	}
	for (uint32_t h = 0; h < s->hidden && found; h++) {
		ep->part[h] = kvk_bf16_round(ep->sum[h]);
	}

	return found > 0;
}

/* The part of a group of this rank's, to the token's owner. A padded link gets an owner's parts together. */
static void put_part(kvk_ep_rank_t *ep, uint64_t number, uint32_t owner, uint32_t group, uint32_t token)
{
	const kvk_ep_plan_t *plan = &ep->plan;
	const size_t at = kvk_ep_part_at(plan, number, group, token),
		     first = kvk_ep_part_at(plan, number, kvk_ep_first_group(plan, ep->rank), 0);

	if (owner == ep->rank) {
		memcpy(ep->near + at, ep->part, plan->row_bytes);
		return;
	}
	if (ep->link.padded) {
		memcpy(ep->outbox + at - first, ep->part, plan->row_bytes);
	} else {
		ep->link.put(ep->link.ctx, owner, at, ep->part, plan->row_bytes);
	}
	ep->stats.combine_bytes += plan->row_bytes;
}

/* Of token i of the owner's. */
static void send_parts(kvk_ep_rank_t *ep, uint64_t number, uint32_t owner, uint32_t i, const kvk_bf16_t *outputs)
{
	const kvk_ep_plan_t *plan = &ep->plan;
	const uint32_t token = read_record(ep, number, owner * plan->shape.max_tokens + i).token;

	for (uint32_t g = kvk_ep_first_group(plan, ep->rank); g < kvk_ep_first_group(plan, ep->rank + 1); g++) {
		if (token < plan->shape.max_tokens &&
		    reduce_part(ep, number, owner * plan->shape.max_tokens + i, g, outputs)) {
			put_part(ep, number, owner, g, token);
		}
	}
}

/* `most` parts of each group: a group has room for max_tokens. */
static void put_parts(kvk_ep_rank_t *ep, uint64_t number, uint32_t owner)
{
	const kvk_ep_plan_t *plan = &ep->plan;
	const size_t bytes = kvk_ep_result(ep, number)->tokens.most * plan->row_bytes;
	const size_t first = kvk_ep_part_at(plan, number, kvk_ep_first_group(plan, ep->rank), 0);

	for (uint32_t g = kvk_ep_first_group(plan, ep->rank); g < kvk_ep_first_group(plan, ep->rank + 1); g++) {
		const size_t at = kvk_ep_part_at(plan, number, g, 0);

		ep->link.put(ep->link.ctx, owner, at, ep->outbox + at - first, bytes);
	}
}

/* To one owner. */
static void send_back(kvk_ep_rank_t *ep, uint64_t number, uint32_t owner, const kvk_bf16_t *outputs)
{
	const uint64_t before = ep->stats.combine_bytes;
	const size_t bytes = kvk_ep_padded_bytes(&ep->plan, KVK_EP_COMBINE, kvk_ep_result(ep, number)->tokens.most);

	for (uint32_t i = 0, n = count_of(ep, number, owner); i < n; i++) {
		send_parts(ep, number, owner, i, outputs);
	}
	if (ep->link.padded && owner != ep->rank) {
		put_parts(ep, number, owner);
		ep->stats.combine_padding += bytes - (ep->stats.combine_bytes - before);
	}
}

kv_status_t kvk_ep_combine_send(kvk_ep_rank_t *ep, uint64_t number, const kvk_bf16_t *outputs)
{
	const kvk_ep_shape_t *s = &ep->plan.shape;
	const kv_status_t status = begin_half(ep, KVK_EP_COMBINE_SENT, number);

	if (status != KV_OK) {
		return status;
	}
	for (uint32_t owner = 0; owner < s->ranks; owner++) {
		send_back(ep, number, owner, outputs);
	}
	kvk_ep_release(ep, KVK_EP_COMBINE, number);
	ep->done[KVK_EP_COMBINE_SENT] = number;

	return KV_OK;
}

static int has_part(kvk_ep_rank_t *ep, uint64_t number, uint32_t token, uint32_t group)
{
	const uint32_t top_k = ep->plan.shape.top_k;
	const uint32_t *experts = kvk_ep_result(ep, number)->tokens.experts + (size_t)token * top_k;
	uint32_t k = 0;

	while (k < top_k && experts[k] / ep->plan.group_experts != group) {
		k++;
	}

	return k < top_k;
}

/* What other ranks have sent back: all that they may have, or the parts that this rank's tokens have. */
static void fetch_parts(kvk_ep_rank_t *ep, uint64_t number)
{
	const kvk_ep_plan_t *plan = &ep->plan;
	const kvk_ep_tokens_t *sent = &kvk_ep_result(ep, number)->tokens;
	const uint32_t each = kvk_ep_first_group(plan, 1);

	for (uint32_t g = 0; g < plan->shape.groups && ep->link.fetch; g++) {
		if (g / each == ep->rank) {
			continue;
		}
		if (ep->link.padded) {
			fetch(ep, kvk_ep_part_at(plan, number, g, 0), sent->most * plan->row_bytes);
		}
		for (uint32_t t = 0; t < sent->n && !ep->link.padded; t++) {
			fetch(ep, kvk_ep_part_at(plan, number, g, t), has_part(ep, number, t, g) ? plan->row_bytes : 0);
		}
	}
}

/* The sum over the groups that have one of the token's experts, in order. */
static void add_parts(kvk_ep_rank_t *ep, uint64_t number, uint32_t token, kvk_bf16_t *out)
{
	const kvk_ep_shape_t *s = &ep->plan.shape;

	memset(ep->sum, 0, s->hidden * sizeof *ep->sum);
	for (uint32_t g = 0; g < s->groups; g++) {
		const kvk_bf16_t *part = (const void *)(ep->near + kvk_ep_part_at(&ep->plan, number, g, token));
		const int is_there = has_part(ep, number, token, g);

		for (uint32_t h = 0; h < s->hidden && is_there; h++) {
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
	fetch_parts(ep, number);
	for (uint32_t t = 0; t < kvk_ep_result(ep, number)->tokens.n; t++) {
		add_parts(ep, number, t, out + (size_t)t * ep->plan.shape.hidden);
	}
	ep->done[KVK_EP_COMBINE_RECEIVED] = number;

	return KV_OK;
}
