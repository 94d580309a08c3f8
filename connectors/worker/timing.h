/* worker/timing.h -- how long steps and loads take; the engine's thread. */
#ifndef KVX_TIMING_H
#define KVX_TIMING_H

#include "worker/jobs/load.h"

/* The step message asks for the time of its step. */
void kvx_timing_request(kvx_worker_t *worker);
/* The part of the step that is timed begins: after begin_step(), or when all its synchronous loads are done. */
void kvx_timing_start(kvx_worker_t *worker);
/* The step computes while it loads: its time is not reported. */
void kvx_timing_cancel(kvx_worker_t *worker);
void kvx_timing_stop(kvx_worker_t *worker);
/* Report the steps whose time the device has measured since. */
void kvx_timing_poll(kvx_worker_t *worker);
/* How long a completed load took. */
uint64_t kvx_timing_load_ns(kvx_worker_t *worker, kvx_wload_t *load);

#endif
