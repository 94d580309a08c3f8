/* scheduler/step_time.h -- what steps take, measured by the ranks. */
#ifndef KVX_SCHEDULER_STEP_TIME_H
#define KVX_SCHEDULER_STEP_TIME_H

#include "scheduler/base/state.h"

/* How long the message of this step may wait for answers. */
uint64_t kvx_step_time_max_wait_ns(kvx_scheduler_t *scheduler);
/* Ask the ranks for the step's time, if it is worth it; the next step begins. */
void kvx_step_time_emit(kvx_scheduler_t *scheduler);
void kvx_step_time_take_report(kvx_scheduler_t *scheduler, const kvx_report_step_t *report);

#endif
