/* worker/transfer/save.h -- what the transfer thread does for a save. */
#ifndef KVX_TRANSFER_SAVE_H
#define KVX_TRANSFER_SAVE_H

#include "worker/jobs/save.h"

/* Import its put, copy a batch, hand in copied blocks. Without p_moved it is imported only. 1: it has been completed.
 */
int kvx_save_transfer_step(kvx_worker_t *worker, kvx_wsave_t *save, uint64_t now, uint32_t *p_moved);

#endif
