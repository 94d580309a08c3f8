#include "ep/rank.h"

#include <sched.h>
#include <stdatomic.h>

/* Memory of a rank: itself, the index of each slot, a row in fp32 and one in BF16. */
static size_t end_bytes(const kvk_ep_plan_t *plan)
{
	return sizeof(kvk_ep_rank_t) + plan->index_bytes + plan->shape.hidden * (sizeof(float) + sizeof(kvk_bf16_t));
}

/* Memory of a link that fetches, and of one that pads. */
static kv_status_t take_copies(kvk_ep_rank_t *ep)
{
	const kvk_ep_shape_t *s = &ep->plan.shape;
	const size_t records = s->max_tokens * ep->plan.record_bytes;
	const size_t parts = kvk_ep_rank_parts(&ep->plan);

	ep->near = ep->link.fetch ? kv_alloc(&ep->env, ep->plan.heap_bytes) : ep->heap;
	ep->outbox = ep->link.padded ? kv_alloc(&ep->env, records > parts ? records : parts) : NULL;

	return ep->near && (ep->outbox || !ep->link.padded) ? KV_OK : KV_ERR_NOMEM;
}

kv_status_t kvk_ep_open(const kv_env_t *env, const kvk_ep_plan_t *plan, uint32_t rank, void *heap,
			const kvk_ep_link_t *link, kvk_ep_rank_t **p_ep)
{
	const kvk_ep_shape_t *s = &plan->shape;
	kvk_ep_rank_t *ep;
	uint32_t *next;

	if (rank >= s->ranks) {
		return KV_ERR_ARG;
	}
	ep = kv_alloc(env, end_bytes(plan));
	if (!ep) {
		return KV_ERR_NOMEM;
	}
	ep->env = *env;
	ep->plan = *plan;
	ep->rank = rank;
	ep->heap = heap;
	ep->link = *link;
	next = ep->index;
	for (uint32_t i = 0; i < s->in_flight; i++) {
		ep->results[i].first = next;
		ep->results[i].record = next + plan->rank_experts + 1u;
		ep->results[i].row = ep->results[i].record + plan->max_rows;
		next = ep->results[i].row + (size_t)s->ranks * s->max_tokens * s->top_k;
	}
	ep->sum = (float *)next;
	ep->part = (kvk_bf16_t *)(ep->sum + s->hidden);
	if (take_copies(ep) != KV_OK) {
		kvk_ep_close(ep);
		return KV_ERR_NOMEM;
	}
	*p_ep = ep;

	return KV_OK;
}

void kvk_ep_close(kvk_ep_rank_t *ep)
{
	if (ep) {
		const kv_env_t env = ep->env;

		kv_free(&env, ep->near != ep->heap ? ep->near : NULL);
		kv_free(&env, ep->outbox);
		kv_free(&env, ep);
	}
}

static uint64_t load_word(const kvk_ep_rank_t *ep, size_t offset)
{
	return atomic_load_explicit((const _Atomic uint64_t *)(const void *)(ep->heap + offset), memory_order_acquire);
}

uint32_t kvk_ep_lost_ranks(const kvk_ep_rank_t *ep)
{
	uint64_t reports[KVK_EP_MAX_RANKS];

	for (uint32_t r = 0; r < ep->plan.shape.ranks; r++) {
		reports[r] = load_word(ep, kvk_ep_report_at(&ep->plan, r));
	}

	return kvk_ep_name_lost(reports, ep->plan.shape.ranks);
}

/* The ranks whose flag is behind that number, a bit each. */
static uint32_t find_missing(const kvk_ep_rank_t *ep, uint32_t kind, uint64_t number)
{
	uint32_t missing = 0;

	for (uint32_t r = 0; r < ep->plan.shape.ranks; r++) {
		if (!kvk_ep_has_arrived(load_word(ep, kvk_ep_flag_at(&ep->plan, kind, r)), number)) {
			missing |= 1u << r;
		}
	}

	return missing;
}

static void give_up(kvk_ep_rank_t *ep, uint32_t missing)
{
	const uint64_t calls = ep->done[0] + ep->done[1] + ep->done[2] + ep->done[3] + 1;

	ep->failed = 1;
	for (uint32_t r = 0; r < ep->plan.shape.ranks; r++) {
		ep->link.release(ep->link.ctx, r, kvk_ep_report_at(&ep->plan, ep->rank), kvk_ep_report(calls, missing));
	}
}

kv_status_t kvk_ep_await(kvk_ep_rank_t *ep, uint32_t kind, uint64_t number, uint64_t deadline_ns)
{
	for (;;) {
		/* Before the flags are read: a rank that stood still in between would name those that have come since. */
		const int is_over = kvk_ep_lost_ranks(ep) != 0 || kv_now_ns(&ep->env) >= deadline_ns;
		const uint32_t missing = find_missing(ep, kind, number);

		if (missing == 0) {
			return KV_OK;
		}
		if (is_over) {
			give_up(ep, missing);
			return KV_ERR_TIMEOUT;
		}
		ep->link.pause(ep->link.ctx);
	}
}

void kvk_ep_release(kvk_ep_rank_t *ep, uint32_t kind, uint64_t number)
{
	for (uint32_t r = 0; r < ep->plan.shape.ranks; r++) {
		ep->link.release(ep->link.ctx, r, kvk_ep_flag_at(&ep->plan, kind, ep->rank), number);
	}
}

kvk_ep_stats_t kvk_ep_get_stats(const kvk_ep_rank_t *ep)
{
	return ep->stats;
}

/* ---- links of host memory ---------------------------------------------------------------------- */

static uint8_t *heap_of(void *ctx, uint32_t rank)
{
	return ((void *const *)ctx)[rank];
}

static void put(void *ctx, uint32_t rank, size_t offset, const void *bytes, size_t n)
{
	memcpy(heap_of(ctx, rank) + offset, bytes, n);
}

static void release(void *ctx, uint32_t rank, size_t offset, uint64_t value)
{
	atomic_store_explicit((_Atomic uint64_t *)(void *)(heap_of(ctx, rank) + offset), value, memory_order_release);
}

static void fetch(void *ctx, uint32_t rank, size_t offset, void *to, size_t n)
{
	memcpy(to, heap_of(ctx, rank) + offset, n);
}

static void yield(void *ctx)
{
	(void)ctx;
	(void)sched_yield();
}

kvk_ep_link_t kvk_ep_memory_link(void *const *heaps)
{
	return kvk_ep_link_of(KVK_EP_PEER, heaps);
}

kvk_ep_link_t kvk_ep_link_of(kvk_ep_link_kind_t kind, void *const *heaps)
{
	return (kvk_ep_link_t){.ctx = (void *)(uintptr_t)heaps,
			       .put = put,
			       .release = release,
			       .pause = yield,
			       .fetch = kind == KVK_EP_PEER ? NULL : fetch,
			       .padded = kind == KVK_EP_HOST_COPIES};
}
