/* scheduler/config.h -- what kvx_scheduler_open() is given: checked, and copied. */
#ifndef KVX_SCHEDULER_CONFIG_H
#define KVX_SCHEDULER_CONFIG_H

#include "scheduler/base/state.h"

/* KVC_ERR_ARG, and a sentence for kvx_scheduler_last_error(). */
kvc_status_t kvx_scheduler_reject_config(const char *why);
kvc_status_t kvx_scheduler_apply_config(kvx_scheduler_t *scheduler, const kvx_scheduler_config_t *config);

#endif
