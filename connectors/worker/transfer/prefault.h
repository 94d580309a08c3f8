/* worker/transfer/prefault.h -- pages of the engine's cache and of the pool are touched while the engine is idle. */
#ifndef KVX_PREFAULT_H
#define KVX_PREFAULT_H

#include "worker/base/state.h"

#define KVX_PREFAULT_PAUSE_NS (20 * KVX_NS_A_MS)    /* after a step the next one may follow at once */
#define KVX_PREFAULT_STEP_NS  (10000 * KVX_NS_A_MS) /* of a step that never ends for the worker */

/* The engine computes for that long from now on. */
void kvx_prefault_defer(kvx_worker_t *worker, uint64_t ns);
/* Touch a little; 0: nothing is left, or the engine computes. Transfer thread. */
int kvx_prefault_step(kvx_worker_t *worker);

#endif
