/* scheduler/lease_cache.h -- loads until the engine admits them, and the making, leasing and freeing of all. */
#ifndef KVX_SCHEDULER_LEASE_CACHE_H
#define KVX_SCHEDULER_LEASE_CACHE_H

#include "scheduler/base/state.h"

/* The part of a prompt to load: tokens [local, gpu) from that mem, a GPU's, those from there to `end`
 * from host memory or disk, and `partial` after them, in a private block. */
typedef struct kvx_span {
	uint32_t mem, gpu, end, partial;
} kvx_span_t;

/* Lease the span for the request, which may be admitted next. Returns how many tokens from the start are leased,
 * ask->local: none. *p_status: why not all (PENDING: no answer in time). */
uint32_t kvx_lease_cache_acquire(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request,
				 const kvx_span_t *span, kvc_status_t *p_status);
/* Of the tokens [ask->local, end) that are leased, those in GPU memory. */
uint32_t kvx_lease_cache_gpu_tokens(const kvx_scheduler_t *scheduler, const kvx_ask_t *ask,
				    const kvx_request_t *request, uint32_t end);
void kvx_lease_cache_drop(kvx_scheduler_t *scheduler, kvx_request_t *request);
/* Release the leases of a cached load. */
void kvx_lease_cache_give_back(kvx_scheduler_t *scheduler, kvx_sload_t *load);

/* Reserve an open load of tokens [ask->local, end), and `partial` more in the block after them, which stays cached
 * until the engine admits the request. 0: there is no memory for it. */
int kvx_lease_cache_reserve(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request, uint32_t end,
			    uint32_t partial);
/* The request's cached load, cut to tokens [ask->local, tokens), without leases if they are lost; NULL: match() has
 * found less. It goes to the end of the list. */
kvx_sload_t *kvx_lease_cache_take(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request,
				  uint32_t tokens);

/* As that one, with a record of that number of tokens: its bytes are reserved, and there is room behind the load for as
 * many, which is more than its ids take. NULL: there is none. */
kvx_sload_t *kvx_load_copy(kvx_scheduler_t *scheduler, const kvx_sload_t *as, uint32_t tokens);
/* It is no longer cached, but one of its request's loads. */
void kvx_load_admit(kvx_scheduler_t *scheduler, kvx_sload_t *load);
void kvx_load_free(kvx_scheduler_t *scheduler, kvx_sload_t *load);
/* Lease the part's blocks in the first `units` units. */
kvc_status_t kvx_load_start_part(const kvx_scheduler_t *scheduler, const kvx_sload_t *load, kvx_sload_part_t *part,
				 const kvc_key_source_t *source, uint32_t units);
void kvx_load_renew(const kvx_scheduler_t *scheduler, kvx_sload_t *load, uint64_t now);
/* The worst of the leases it has: PENDING before OK, anything else before both. */
kvc_status_t kvx_load_lease_state(const kvx_sload_t *load);

#endif
