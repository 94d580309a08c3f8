/* worker/config.h -- what kvx_worker_open() is given: checked, and copied. */
#ifndef KVX_WORKER_CONFIG_H
#define KVX_WORKER_CONFIG_H

#include "worker/state.h"

/* KVC_ERR_ARG, and a sentence for kvx_worker_last_error(). */
kvc_status_t kvx_worker_reject_config(const char *why);
kvc_status_t kvx_worker_check_config(const kvx_worker_config_t *config);
kvc_status_t kvx_worker_apply_config(kvx_worker_t *worker, const kvx_worker_config_t *config);
/* NULL: this rank has no such group. */
const kvx_wgroup_t *kvx_worker_find_group(const kvx_worker_t *worker, uint32_t group);
void kvx_scratch_fini(kvx_scratch_t *scratch);

#endif
