/* scheduler/handover.h -- both sides of hand-overs between instances. */
#ifndef KVX_SCHEDULER_HANDOVER_H
#define KVX_SCHEDULER_HANDOVER_H

#include "scheduler/base/state.h"

/* What the store has of a prompt's whole blocks: not all; all, for an asynchronous load; all, for a synchronous one;
 * and that from memory of a GPU alone. */
typedef enum kvx_coverage {
	KVX_COVERED_IN_PART,
	KVX_COVERED,
	KVX_COVERED_FOR_STEP,
	KVX_COVERED_IN_GPU_MEM
} kvx_coverage_t;

/* Promise the request the tokens of its prompt that another instance computes, `most` of them, if that is better than
 * what is stored: it has an open load. Returns their number from the start, ask->local: there are none. */
uint32_t kvx_handover_promise(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request,
			      kvx_coverage_t stored, uint32_t most);
/* The request is about to compute: keys of its prompt become known, and its last tokens are saved. */
void kvx_handover_advance(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request);
/* Producers give up, consumers compute what has not come. */
void kvx_handovers_abort(kvx_scheduler_t *scheduler);
/* Hand over what has become visible, also of requests that have ended; load what has been handed over. */
void kvx_handovers_poll(kvx_scheduler_t *scheduler, uint64_t now);
/* 1: prompts of requests that have ended are still handed over, or to be taken. */
int kvx_handovers_are_due(const kvx_scheduler_t *scheduler);
void kvx_handovers_close(kvx_scheduler_t *scheduler);

#endif
