/* worker/cuda/pool_memory.h -- pool memory the device sees; the owner of the attachment. */
#ifndef KVX_CUDA_POOL_MEMORY_H
#define KVX_CUDA_POOL_MEMORY_H

#include "worker/cuda/state.h"

/* kvc_config_t.on_memory. */
void kvx_pool_memory_changed(void *worker, const kvc_memory_t *memory, int mapped);
/* OK: the device sees these bytes. KVX_ERR_FAULT: the daemon has not touched all around them, poll and ask again.
 * KVC_ERR_BUSY: the driver has refused them, or there is no memory, ask again later; KVC_ERR_NOMEM: they are
 * in no slab that could be listed; else the worker has declined. */
kvc_status_t kvx_pool_memory_register(kvx_worker_t *worker, const void *at, size_t bytes);
/* Import a slab in GPU memory, of this device or of one it reaches; undo it. */
kvc_status_t kvx_pool_memory_map(kvx_worker_t *worker, int fd, size_t bytes, void **p_base);
void kvx_pool_memory_unmap(kvx_worker_t *worker, void *base);
/* Register one more piece, in idle times. 0: nothing to do. */
int kvx_pool_memory_register_some(kvx_worker_t *worker);

#endif
