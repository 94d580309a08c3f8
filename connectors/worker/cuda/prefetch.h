/* worker/cuda/prefetch.h -- loads that begin when their step is planned; the engine's thread. */
#ifndef KVX_CUDA_PREFETCH_H
#define KVX_CUDA_PREFETCH_H

#include "worker/state.h"

/* begin_step(): 1: the message is the one that was prefetched, so the step has begun. 0: it is not; a prefetched step
 * is given up. */
int kvx_prefetch_matches(kvx_worker_t *worker, const void *message, size_t len);

#endif
