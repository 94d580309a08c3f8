/* inproc/job.h -- one allocation a job, in a list of its connector. */
#ifndef KVX_INPROC_JOB_H
#define KVX_INPROC_JOB_H

#include "inproc/state.h"

uint64_t kvx_now_ns(void);

/* Copy the prefix and derive its keys. `size` bytes for the job; with p_tokens a copy of the tokens too. NULL: out of
 * memory, or the prefix is not sound. */
kvx_job_t *kvx_job_create(kvx_t *kvx, const kvk_paged_t *paged, const kvx_prefix_t *prefix, size_t size,
			  uint32_t **p_tokens);
void kvx_job_destroy(kvx_job_t *job);

#endif
