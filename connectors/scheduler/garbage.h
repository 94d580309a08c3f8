/* scheduler/garbage.h -- engine blocks that a failed synchronous load has left without their bytes. */
#ifndef KVX_SCHEDULER_GARBAGE_H
#define KVX_SCHEDULER_GARBAGE_H

#include "scheduler/base/state.h"

/* The request loses its blocks: those that depend on a synchronous load are marked until the ranks have reported it. */
void kvx_loads_mark_unverified(kvx_scheduler_t *scheduler, const kvx_request_t *request);
/* The load has failed. What depends on it is not saved. */
void kvx_loads_invalidate(kvx_scheduler_t *scheduler, const kvx_sload_t *load);

#endif
