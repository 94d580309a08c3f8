/* inproc/transfer.h -- the id of a hand-over, and the key of its partial block. */
#ifndef KVX_INPROC_TRANSFER_H
#define KVX_INPROC_TRANSFER_H

#include "inproc/job.h"

/* `transfer`, or the id made from the prompt of a new job, goes to name[KVC_MAX_TRANSFER + 1]. The job gets the private
 * key of its partial block, if it has one. KVC_ERR_ARG: the id is empty or too long, or can be made of no key.
 * KVC_ERR_NOMEM. */
kvc_status_t kvx_transfer_begin(const kvx_job_t *job, const kvx_prefix_t *prompt, const char *transfer, char *name);

#endif
