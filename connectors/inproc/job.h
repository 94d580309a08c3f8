/* inproc/job.h -- loads and saves, as requests of the scheduler half. */
#ifndef KVX_INPROC_JOB_H
#define KVX_INPROC_JOB_H

#include "inproc/state.h"

uint64_t kvx_now_ns(void);

/* Copy the prefix and begin its request. `size` bytes for the job, `first`: the list it goes to. KVC_ERR_ARG: the
 * prefix is not sound; KVC_ERR_LIMIT: too many jobs; KVC_ERR_NOMEM; KVC_ERR_UNREACHABLE: no daemon was ever there. */
kvc_status_t kvx_job_create(kvx_t *kvx, const kvx_prefix_t *prefix, size_t size, kvx_job_t **first, kvx_job_t **p_job);
void kvx_job_destroy(kvx_job_t *job);
kvx_ask_t kvx_job_ask(const kvx_job_t *job);
/* Release its leases; cancel its load with the next message. */
void kvx_job_finish_request(const kvx_job_t *job);
/* Build the step message, and execute it. */
void kvx_run_message(kvx_t *kvx);

/* kvx_load_prefix(), once this process may load; result is never NULL. */
kvc_status_t kvx_load_start(kvx_t *kvx, const kvx_prefix_t *prefix, kvx_load_t **p_load, kvx_load_result_t *result);
/* Match again where the lease was not granted yet. */
void kvx_loads_advance(kvx_t *kvx, uint64_t now);
/* End the loads that the worker half has completed. */
void kvx_loads_collect(kvx_t *kvx);

/* kvx_save_prefix(), once this process may save. */
kvc_status_t kvx_save_start(kvx_t *kvx, const kvx_prefix_t *prefix, kvx_save_t **p_save);
/* See how far they are; reserve again what was refused. */
void kvx_saves_advance(kvx_t *kvx, uint64_t now);

#endif
