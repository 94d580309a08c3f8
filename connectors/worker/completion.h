/* worker/completion.h -- completed jobs are counted, reported and freed; the engine's thread. */
#ifndef KVX_COMPLETION_H
#define KVX_COMPLETION_H

#include "worker/state.h"

void kvx_completions_reap(kvx_worker_t *worker);

#endif
