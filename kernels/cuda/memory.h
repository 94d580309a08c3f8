/* kernels/cuda/memory.h -- memory that the device sees, and the pinned memory that holds the arguments of jobs. */
#ifndef KVK_CUDA_MEMORY_H
#define KVK_CUDA_MEMORY_H

#include "gpu.h"

/* Tables, lock and argument buffer; undone by fini, which unregisters and unmaps what is left (in the context). */
kv_status_t kvk_gpu_memory_init(kvk_gpu_t *gpu);
void kvk_gpu_memory_fini(kvk_gpu_t *gpu);

/* Device address of memory that the device sees: registered or mapped, else known to the driver. KV_ERR_ARG. */
kv_status_t kvk_gpu_translate(kvk_gpu_t *gpu, const void *at, size_t bytes, uint64_t *p_address,
			      kvk_gpu_mem_kind_t *p_kind);

/* The kind of registered or mapped memory, by this address alone. Memory that the driver knows, or nobody: HOST. */
kvk_gpu_mem_kind_t kvk_gpu_guess_kind(const kvk_gpu_t *gpu, const void *at);

/* Do all of these bytes lie in one registration, in one mapping, or in one piece of memory that the driver gave? It
 * refuses a copy that goes from one into the next. */
int kvk_gpu_is_contiguous(kvk_gpu_t *gpu, const void *at, size_t bytes);

#endif
