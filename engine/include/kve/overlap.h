/* kve/overlap.h -- the order in which a step's layers are enqueued: one batch, or two microbatches that hide each
 * other's transport (dual batch overlap, DBO).
 *
 * A layer is a list of phases. Compute and transport are two streams, each in order; events connect them. One thread a
 * rank enqueues everything. Nothing here knows kernels, requests or the transport.
 *
 * The order of DBO is vLLM's, where a microbatch yields after each send and the other one runs its receive hook. The
 * order of one layer, numbers are microbatches:
 *   dispatch send 1, QKV 0, attention 0, dispatch recv 1, dispatch send 0, experts 1, dispatch recv 0, combine send 1,
 *   shared 1, experts 0, combine recv 1, combine send 0, shared 0, (next layer: QKV 1, attention 1), combine recv 0
 * Microbatch 1 leads: it starts layer 0, and attention of layer l + 1 stands at the end of layer l. So it has the
 * *earlier* tokens of the batch: microbatch 0 reads keys and values that microbatch 1 has written in the same layer.
 */
#ifndef KVE_OVERLAP_H
#define KVE_OVERLAP_H

#include "kv/status.h"

#include <stdint.h>

typedef enum kve_phase {
	KVE_PHASE_QKV,       /* attention, first half: norm, QKV, rope, keys and values to the cache    */
	KVE_PHASE_ATTENTION, /* attention, second half: core, output projection, residual, norm, router */
	KVE_PHASE_DISPATCH_SEND,
	KVE_PHASE_DISPATCH_RECV,
	KVE_PHASE_EXPERTS, /* on what has come for this rank's experts */
	KVE_PHASE_COMBINE_SEND,
	KVE_PHASE_SHARED, /* shared experts, of the rank's own tokens; optional */
	KVE_PHASE_COMBINE_RECV,
	KVE_PHASES
} kve_phase_t;

typedef enum kve_stream { KVE_STREAM_COMPUTE, KVE_STREAM_TRANSPORT, KVE_STREAMS } kve_stream_t;

typedef enum kve_overlap_mode { KVE_OVERLAP_SEQ, KVE_OVERLAP_DBO } kve_overlap_mode_t;

#define KVE_MAX_MICROBATCHES 2u
#define KVE_LEADING          1u /* microbatch of DBO that has the earlier tokens */

/* An event is used again in each layer. As in CUDA, a wait is for the last record that was enqueued before it. */
typedef enum kve_event {
	KVE_EVENT_ATTENDED, /* KVE_PHASE_ATTENTION has ended: dispatch send may read rows and experts */
	KVE_EVENT_ARRIVED,  /* KVE_PHASE_DISPATCH_RECV has ended: experts may start                  */
	KVE_EVENT_COMPUTED, /* KVE_PHASE_EXPERTS has ended: combine send may read what they made     */
	KVE_EVENT_COMBINED, /* KVE_PHASE_COMBINE_RECV has ended: the next layer may start            */
	KVE_EVENTS_OF_MICROBATCH
} kve_event_t;

#define KVE_EVENTS   (KVE_MAX_MICROBATCHES * KVE_EVENTS_OF_MICROBATCH)
#define KVE_NO_EVENT UINT32_MAX

static inline uint32_t kve_event_of(uint32_t microbatch, kve_event_t event)
{
	return microbatch * KVE_EVENTS_OF_MICROBATCH + (uint32_t)event;
}

typedef struct kve_overlap_item {
	kve_phase_t phase;
	uint32_t layer;
	uint32_t microbatch; /* 0 in KVE_OVERLAP_SEQ                                                     */
	kve_stream_t stream; /* QKV, attention, experts, shared: compute; the sends and recvs: transport */
	uint32_t wait;       /* for this event, before the phase, on its stream; or KVE_NO_EVENT         */
	uint32_t record;     /* this event, after the phase, on its stream; or KVE_NO_EVENT              */
} kve_overlap_item_t;

typedef struct kve_overlap_shape {
	kve_overlap_mode_t mode;
	uint32_t layers;
	int shared; /* layers have shared experts; 0: no item has KVE_PHASE_SHARED */
} kve_overlap_shape_t;

/* Number of items of that shape. */
uint32_t kve_overlap_count(const kve_overlap_shape_t *shape);
/* The items in the order of enqueuing; items: kve_overlap_count(). */
void kve_overlap_list(const kve_overlap_shape_t *shape, kve_overlap_item_t *items);

/* What enqueues. Each returns the status that ends the run. `ctx` is the caller's. */
typedef struct kve_overlap_ops {
	kv_status_t (*run)(void *ctx, kve_phase_t phase, uint32_t layer, uint32_t microbatch, kve_stream_t stream);
	/* event: below KVE_EVENTS */
	kv_status_t (*record)(void *ctx, uint32_t event, kve_stream_t stream);
	kv_status_t (*wait)(void *ctx, uint32_t event, kve_stream_t stream);
} kve_overlap_ops_t;

/* Enqueue each item: wait, run, record. At the end the compute stream waits for the last combine of each microbatch,
 * so that what the caller enqueues next there finds all results. Returns the first status that is not KV_OK. */
kv_status_t kve_overlap_run(const kve_overlap_item_t *items, uint32_t n, const kve_overlap_ops_t *ops, void *ctx);

#endif
