/* inproc/transfer.h -- the id of a hand-over that names none. */
#ifndef KVX_INPROC_TRANSFER_H
#define KVX_INPROC_TRANSFER_H

#include "inproc/job.h"

#define KVX_TRANSFER_OF_KEY "prefix-" /* and the key of the prompt's last whole block, in hexadecimal digits */

/* `transfer`, or the id made from the job's prefix, in name[KVC_MAX_TRANSFER + 1]. KVC_ERR_ARG: it is empty or too
 * long, or the prefix has no key. */
kvc_status_t kvx_transfer_name(const kvx_job_t *job, const char *transfer, char *name);

#endif
