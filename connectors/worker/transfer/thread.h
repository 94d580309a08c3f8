/* worker/transfer/thread.h -- the transfer thread and the copy threads are started and joined. */
#ifndef KVX_TRANSFER_THREAD_H
#define KVX_TRANSFER_THREAD_H

#include "worker/base/state.h"

kvc_status_t kvx_transfer_start(kvx_worker_t *worker);
void kvx_transfer_stop(kvx_worker_t *worker);

#endif
