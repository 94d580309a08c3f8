/* worker/transfer/load.h -- what the transfer thread does for a load. */
#ifndef KVX_TRANSFER_LOAD_H
#define KVX_TRANSFER_LOAD_H

#include "worker/jobs/load.h"

/* Import its leases, publish which blocks may be copied, watch its deadline. 1: it has been completed. */
int kvx_load_transfer_step(kvx_worker_t *worker, kvx_wload_t *load, uint64_t now);

#endif
