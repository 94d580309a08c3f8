/* scheduler/load.h -- loads that the engine has admitted, to the reports of all ranks. */
#ifndef KVX_SCHEDULER_LOAD_H
#define KVX_SCHEDULER_LOAD_H

#include "scheduler/base/state.h"

/* The open load of the request that the engine has admitted; NULL: none. */
kvx_sload_t *kvx_open_load_find(const kvx_request_t *request);
/* Where blocks of a hand-over are, and their keys there. */
typedef struct kvx_stored {
	uint32_t mem;
	kvc_key_source_t source;
} kvx_stored_t;
/* The blocks of the first `units` units are stored: load them as a piece. 0: not now. */
int kvx_open_load_split(kvx_scheduler_t *scheduler, kvx_sload_t *load, const kvx_stored_t *from, uint32_t units);
/* Nothing follows: load what the first `units` units have, and let the rest fail. */
void kvx_open_load_close(kvx_scheduler_t *scheduler, kvx_sload_t *load, const kvx_stored_t *from, uint32_t units);
/* What the leases of these two lack, of those in memory of a GPU, is loaded from host memory, where the first `units`
 * units are stored; `more`: others may follow, and are waited for. 1: no load of the request waits for that. */
int kvx_loads_add_rest(kvx_scheduler_t *scheduler, const kvx_request_t *request, const kvx_stored_t *host,
		       uint32_t units, int more);
/* 1: it waits for that, or will. */
int kvx_load_is_short(const kvx_sload_t *load);
/* 1: a rank has not reported a load it was told of. */
int kvx_loads_are_sent(const kvx_scheduler_t *scheduler);

void kvx_loads_emit(kvx_scheduler_t *scheduler, uint64_t now);
/* 1: the ranks are still to be told of a load whose request is gone. */
int kvx_loads_have_drops(const kvx_scheduler_t *scheduler);
/* Renew leases; give back those of requests that were not looked up for a while; give up loads that a rank does not
 * report. */
void kvx_loads_poll(kvx_scheduler_t *scheduler, uint64_t now);
void kvx_loads_close(kvx_scheduler_t *scheduler);
void kvx_loads_take_report(kvx_scheduler_t *scheduler, const kvx_report_loaded_t *report);
/* The engine ends a request before it passes on the reports of its last step: add the tokens of its synchronous loads
 * that no rank has reported yet. */
void kvx_loads_count_unreported(const kvx_request_t *request, kvc_report_t *report);
uint64_t kvx_loads_count_leases(const kvx_scheduler_t *scheduler);

#endif
