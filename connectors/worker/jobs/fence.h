/* worker/jobs/fence.h -- blocks that the engine is about to write are saved first; the engine's thread. */
#ifndef KVX_FENCE_H
#define KVX_FENCE_H

#include "worker/base/state.h"

/* Those of the blocks that a save has not read yet. n 0: of all blocks. */
void kvx_fence_add(kvx_worker_t *worker, const uint32_t *ids, uint32_t n);
/* All blocks of the fence are saved, or their saves given up, when it returns. */
void kvx_fence_save(kvx_worker_t *worker);
/* The same of every block. */
void kvx_fence_save_all(kvx_worker_t *worker);

#endif
