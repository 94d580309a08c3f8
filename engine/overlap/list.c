/* The list of a step: one or two microbatches that go through the layers, a yield after each send. */
#include "kve/overlap.h"

typedef struct hook {
	kve_phase_t recv; /* KVE_PHASES: none */
	uint32_t layer, microbatch;
} hook_t;

typedef struct context {
	const kve_overlap_shape_t *shape;
	kve_overlap_item_t *items;
	uint32_t n;
	uint32_t microbatches;
	uint32_t current;                   /* the microbatch that enqueues  */
	hook_t hooks[KVE_MAX_MICROBATCHES]; /* what each one runs for another */
} context_t;

static const struct {
	kve_stream_t stream;
	uint32_t wait, record; /* kve_event_t of the item's microbatch, or KVE_NO_EVENT */
} phases[KVE_PHASES] = {
	[KVE_PHASE_QKV] = {KVE_STREAM_COMPUTE, KVE_EVENT_COMBINED, KVE_NO_EVENT},
	[KVE_PHASE_ATTENTION] = {KVE_STREAM_COMPUTE, KVE_NO_EVENT, KVE_EVENT_ATTENDED},
	[KVE_PHASE_DISPATCH_SEND] = {KVE_STREAM_TRANSPORT, KVE_EVENT_ATTENDED, KVE_NO_EVENT},
	[KVE_PHASE_DISPATCH_RECV] = {KVE_STREAM_TRANSPORT, KVE_NO_EVENT, KVE_EVENT_ARRIVED},
	[KVE_PHASE_EXPERTS] = {KVE_STREAM_COMPUTE, KVE_EVENT_ARRIVED, KVE_EVENT_COMPUTED},
	[KVE_PHASE_COMBINE_SEND] = {KVE_STREAM_TRANSPORT, KVE_EVENT_COMPUTED, KVE_NO_EVENT},
	[KVE_PHASE_SHARED] = {KVE_STREAM_COMPUTE, KVE_NO_EVENT, KVE_NO_EVENT},
	[KVE_PHASE_COMBINE_RECV] = {KVE_STREAM_TRANSPORT, KVE_NO_EVENT, KVE_EVENT_COMBINED},
};

static uint32_t event_or_none(uint32_t microbatch, uint32_t event)
{
	return event == KVE_NO_EVENT ? KVE_NO_EVENT : kve_event_of(microbatch, (kve_event_t)event);
}

/* The record is the item's own: it is enqueued before anything of the other microbatch. One that is enqueued after a
 * yield covers what the other one has enqueued meanwhile; all results are right then, and nothing overlaps
 * (vllm#38451). */
static void enqueue(context_t *c, kve_phase_t phase, uint32_t layer, uint32_t microbatch)
{
	const int starts = phase == KVE_PHASE_QKV && layer == 0;

	c->items[c->n++] = (kve_overlap_item_t){
		.phase = phase,
		.layer = layer,
		.microbatch = microbatch,
		.stream = phases[phase].stream,
		.wait = starts ? KVE_NO_EVENT : event_or_none(microbatch, phases[phase].wait),
		.record = event_or_none(microbatch, phases[phase].record),
	};
}

/* ---- what a microbatch calls ------------------------------------------------------------------ */

static void dbo_yield(context_t *c)
{
	c->current = (c->current + 1) % c->microbatches;
}

/* The *other* microbatch receives for this one, when it has enqueued compute that hides the transfer. Without another
 * one that is at once. */
static void dbo_register_recv_hook(context_t *c, kve_phase_t recv, uint32_t layer)
{
	if (c->microbatches == 1) {
		enqueue(c, recv, layer, c->current);
		return;
	}
	c->hooks[(c->current + 1) % c->microbatches] = (hook_t){recv, layer, c->current};
}

static void dbo_maybe_run_recv_hook(context_t *c)
{
	hook_t *hook = &c->hooks[c->current];

	if (hook->recv != KVE_PHASES) {
		enqueue(c, hook->recv, hook->layer, hook->microbatch);
		hook->recv = KVE_PHASES;
	}
}

static void enqueue_attention(context_t *c, uint32_t layer)
{
	enqueue(c, KVE_PHASE_QKV, layer, c->current);
	enqueue(c, KVE_PHASE_ATTENTION, layer, c->current);
	dbo_maybe_run_recv_hook(c);
	enqueue(c, KVE_PHASE_DISPATCH_SEND, layer, c->current);
	dbo_register_recv_hook(c, KVE_PHASE_DISPATCH_RECV, layer);
}

static void enqueue_experts(context_t *c, uint32_t layer)
{
	enqueue(c, KVE_PHASE_EXPERTS, layer, c->current);
	dbo_maybe_run_recv_hook(c);
	enqueue(c, KVE_PHASE_COMBINE_SEND, layer, c->current);
	if (c->shape->shared) {
		enqueue(c, KVE_PHASE_SHARED, layer, c->current);
	}
	dbo_register_recv_hook(c, KVE_PHASE_COMBINE_RECV, layer);
}

/* ---- the list --------------------------------------------------------------------------------- */

static uint32_t count_microbatches(const kve_overlap_shape_t *shape)
{
	return shape->mode == KVE_OVERLAP_DBO ? KVE_MAX_MICROBATCHES : 1;
}

uint32_t kve_overlap_count(const kve_overlap_shape_t *shape)
{
	return shape->layers * count_microbatches(shape) * (KVE_PHASES - (shape->shared ? 0u : 1u));
}

void kve_overlap_list(const kve_overlap_shape_t *shape, kve_overlap_item_t *items)
{
	context_t c = {
		.shape = shape,
		.items = items,
		.microbatches = count_microbatches(shape),
		.current = shape->mode == KVE_OVERLAP_DBO ? KVE_LEADING : 0,
		.hooks = {{.recv = KVE_PHASES}, {.recv = KVE_PHASES}},
	};

	for (uint32_t layer = 0; layer < shape->layers; layer++) {
		for (uint32_t i = 0; i < c.microbatches; i++) {
			enqueue_attention(&c, layer);
			dbo_yield(&c);
		}
		for (uint32_t i = 0; i < c.microbatches; i++) {
			enqueue_experts(&c, layer);
			dbo_yield(&c);
		}
	}
	dbo_maybe_run_recv_hook(&c);
}

/* ---- the walk --------------------------------------------------------------------------------- */

static kv_status_t run_item(const kve_overlap_item_t *item, const kve_overlap_ops_t *ops, void *ctx)
{
	kv_status_t status = KV_OK;

	if (item->wait != KVE_NO_EVENT) {
		status = ops->wait(ctx, item->wait, item->stream);
	}
	if (status == KV_OK) {
		status = ops->run(ctx, item->phase, item->layer, item->microbatch, item->stream);
	}
	if (status == KV_OK && item->record != KVE_NO_EVENT) {
		status = ops->record(ctx, item->record, item->stream);
	}

	return status;
}

kv_status_t kve_overlap_run(const kve_overlap_item_t *items, uint32_t n, const kve_overlap_ops_t *ops, void *ctx)
{
	kv_status_t status = KV_OK;
	uint32_t combined = 0; /* a bit a microbatch */

	for (uint32_t i = 0; i < n && status == KV_OK; i++) {
		status = run_item(&items[i], ops, ctx);
		combined |= items[i].phase == KVE_PHASE_COMBINE_RECV ? 1u << items[i].microbatch : 0;
	}
	for (uint32_t m = 0; m < KVE_MAX_MICROBATCHES && status == KV_OK; m++) {
		if (combined & 1u << m) {
			status = ops->wait(ctx, kve_event_of(m, KVE_EVENT_COMBINED), KVE_STREAM_COMPUTE);
		}
	}

	return status;
}
