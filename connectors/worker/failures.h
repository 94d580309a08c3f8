/* worker/failures.h -- blocks and steps whose load has failed; the engine's thread. */
#ifndef KVX_FAILURES_H
#define KVX_FAILURES_H

#include "worker/jobs/load.h"

/* kvx_worker_take_failed_blocks() names the blocks of the load that were not verified. Once; not of a dropped load. */
void kvx_failures_add_load(kvx_worker_t *worker, kvx_wload_t *load);
/* There was no memory for the load of this record: all its blocks have failed. */
void kvx_failures_add_record(kvx_worker_t *worker, const kvx_msg_load_t *record);
/* All synchronous loads of the step are settled: failed blocks are named, and the step is remembered if a load has
 * failed. */
void kvx_sync_loads_close(kvx_worker_t *worker);
/* A synchronous load of this step, or of the step before, has failed: blocks the step computed may be garbage. */
int kvx_failures_taint_step(const kvx_worker_t *worker, uint32_t step);

#endif
