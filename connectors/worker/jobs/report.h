/* worker/jobs/report.h -- what a rank reports: ended loads and saves, failed blocks, and time; the engine's thread. */
#ifndef KVX_REPORT_H
#define KVX_REPORT_H

#include "worker/jobs/load.h"

/* Memory for all that a report may hold; KVC_ERR_NOMEM. */
kvc_status_t kvx_report_reserve(kvx_worker_t *worker);
/* The save of this put was given up. */
void kvx_report_add_dropped(kvx_worker_t *worker, uint64_t put);
/* There was no memory for the load of this record: all its blocks have failed. */
void kvx_report_add_failed(kvx_worker_t *worker, const kvx_msg_load_t *record);
/* Count, report and free what has completed. */
void kvx_completions_reap(kvx_worker_t *worker);

/* All synchronous loads of the step are settled: failed blocks are named, and the step is remembered if a load has
 * failed. */
void kvx_sync_loads_close(kvx_worker_t *worker);
/* A synchronous load of this step, or of the step before, has failed: blocks the step computed may be garbage. */
int kvx_failures_taint_step(const kvx_worker_t *worker, uint32_t step);

/* The step message asks for the time of its step. */
void kvx_timing_request(kvx_worker_t *worker);
/* The part of the step that is timed begins: after begin_step(), or when all its synchronous loads are done. */
void kvx_timing_start(kvx_worker_t *worker);
/* The step computes while it loads: its time is not reported. */
void kvx_timing_cancel(kvx_worker_t *worker);
void kvx_timing_stop(kvx_worker_t *worker);

#endif
