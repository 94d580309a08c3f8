/* worker/report.h -- the records of the next report to the scheduler half; the engine's thread. */
#ifndef KVX_REPORT_H
#define KVX_REPORT_H

#include "worker/state.h"

/* Memory for all that a report may hold; KVC_ERR_NOMEM. */
kvc_status_t kvx_report_reserve(kvx_worker_t *worker);
/* `what` without its header and id. */
void kvx_report_add_loaded(kvx_worker_t *worker, uint64_t id, const kvx_report_loaded_t *what);
/* An asynchronous load has finished: kvx_worker_take_finished() names it. 0: not now, too many are not named yet. */
int kvx_report_add_finished(kvx_worker_t *worker, const char *id, uint32_t len, int failed);
/* The save of this put was given up. */
void kvx_report_add_dropped(kvx_worker_t *worker, uint64_t put);
/* The step took so long. */
void kvx_report_add_step(kvx_worker_t *worker, uint32_t step, uint64_t ns);

#endif
