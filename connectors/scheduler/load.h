/* scheduler/load.h -- loads, from their step message to the reports of all ranks. */
#ifndef KVX_SCHEDULER_LOAD_H
#define KVX_SCHEDULER_LOAD_H

#include "scheduler/state.h"

void kvx_loads_emit(kvx_scheduler_t *scheduler, uint64_t now);
/* Renew leases; give up loads that a rank does not report. */
void kvx_loads_poll(kvx_scheduler_t *scheduler, uint64_t now);
void kvx_loads_close(kvx_scheduler_t *scheduler);
void kvx_loads_take_report(kvx_scheduler_t *scheduler, const kvx_report_loaded_t *report);
/* The request loses its blocks: those that depend on a synchronous load are marked until the ranks have reported it. */
void kvx_loads_mark_unverified(kvx_scheduler_t *scheduler, const kvx_request_t *request);
/* The request is gone: its asynchronous loads end early. */
void kvx_loads_cancel(kvx_scheduler_t *scheduler, const kvx_request_t *request);

#endif
