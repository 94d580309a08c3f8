/* scheduler/scheduler.h -- for tests: a scheduler half in an environment of theirs. */
#ifndef KVX_SCHEDULER_OPEN_H
#define KVX_SCHEDULER_OPEN_H

#include "scheduler/base/state.h"

kvc_status_t kvx_scheduler_open_in(const kv_env_t *env, const kvx_scheduler_config_t *config,
				   kvx_scheduler_t **p_scheduler);

#endif
