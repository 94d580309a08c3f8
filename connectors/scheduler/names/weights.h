/* scheduler/names/weights.h -- the name of the weights, and what was stored since it was proved (decision 071). */
#ifndef KVX_SCHEDULER_WEIGHTS_H
#define KVX_SCHEDULER_WEIGHTS_H

#include "scheduler/base/state.h"

/* The name from the configuration; NULL: it comes later. KVC_ERR_NOMEM. */
kvc_status_t kvx_weights_init(kvx_scheduler_t *scheduler, const char *text);
void kvx_weights_fini(kvx_scheduler_t *scheduler);
/* Adopt a name that was given. */
void kvx_weights_poll(kvx_scheduler_t *scheduler);
/* What was stored under another name is taken back: read the daemon's answer, and ask for more. */
void kvx_withdrawals_poll(kvx_scheduler_t *scheduler, uint64_t now);
/* 1: something has still to be taken back, and the daemon may be asked now, or was asked. */
int kvx_withdrawals_are_due(const kvx_scheduler_t *scheduler, uint64_t now);
/* No name holds any longer. */
void kvx_weights_suspend(kvx_scheduler_t *scheduler);
/* Before the end: take back what is left, for a second at most. */
void kvx_withdrawals_finish(kvx_scheduler_t *scheduler);
/* Memory for `n` more of what is stored; 0: there is none, or the name must be proved first. */
int kvx_weights_reserve_stored(kvx_scheduler_t *scheduler, uint32_t n);
/* The ranks are told to save it. It was reserved. */
void kvx_weights_add_stored(kvx_scheduler_t *scheduler, const kvx_stored_at_t *at);

#endif
