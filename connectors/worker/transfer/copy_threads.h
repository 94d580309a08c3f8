/* worker/transfer/copy_threads.h -- who copies the synchronous loads of a step, of a cache in host memory: the engine's
 * thread, the transfer thread, and copy threads. */
#ifndef KVX_COPY_THREADS_H
#define KVX_COPY_THREADS_H

#include "worker/base/state.h"

/* A copy thread (kvx_copy_thread_t), until the worker stops. */
void *kvx_copy_thread_run(void *copy_thread);
/* All synchronous loads of the step are complete or have failed when it returns. Engine's thread. */
void kvx_copy_threads_run_loads(kvx_worker_t *worker);

#endif
