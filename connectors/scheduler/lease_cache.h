/* scheduler/lease_cache.h -- leases of requests that match() has found and the engine has not admitted yet. */
#ifndef KVX_SCHEDULER_LEASE_CACHE_H
#define KVX_SCHEDULER_LEASE_CACHE_H

#include "scheduler/state.h"

/* Lease tokens [ask->local, end) for the request, which may be admitted next. Returns how many tokens from the start
 * are leased, ask->local: none. *p_status: why not all (PENDING: no answer in time). */
uint32_t kvx_lease_cache_acquire(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request, uint32_t end,
				 kvc_status_t *p_status);
/* The request's cached load, cut to units [local, units), without leases if they are lost; NULL: match() has found
 * less. It becomes the caller's. */
kvx_sload_t *kvx_lease_cache_take(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request,
				  uint32_t units);
void kvx_lease_cache_drop(kvx_scheduler_t *scheduler, kvx_request_t *request);
/* Release the leases of a cached load. */
void kvx_lease_cache_give_back(kvx_scheduler_t *scheduler, kvx_sload_t *load);
/* Renew leases; give back those of requests that were not looked up for a while. */
void kvx_lease_cache_poll(kvx_scheduler_t *scheduler, uint64_t now);
void kvx_lease_cache_close(kvx_scheduler_t *scheduler);

void kvx_load_renew_leases(const kvx_scheduler_t *scheduler, kvx_sload_t *load, uint64_t now);
/* Leases of a list of loads. */
uint64_t kvx_load_count_leases(const kvx_sload_t *load);
/* Release its leases, free its memory. */
void kvx_load_free(kvx_scheduler_t *scheduler, kvx_sload_t *load);

#endif
