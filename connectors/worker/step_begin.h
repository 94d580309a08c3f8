/* worker/step_begin.h -- a step message is executed up to its loads; the engine's thread. */
#ifndef KVX_STEP_BEGIN_H
#define KVX_STEP_BEGIN_H

#include "worker/state.h"

/* kvx_worker_begin_step() without prefetch. */
void kvx_step_begin(kvx_worker_t *worker, const void *message, size_t len);

#endif
