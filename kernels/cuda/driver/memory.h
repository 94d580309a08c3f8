/* kernels/cuda/driver/memory.h -- memory that the device sees, and the pinned memory that holds the arguments of jobs.
 */
#ifndef KVK_CUDA_MEMORY_H
#define KVK_CUDA_MEMORY_H

#include "cuda/gpu.h"

/* Tables, lock and argument buffer; undone by fini, which unregisters and unmaps what is left (in the context). */
kv_status_t kvk_gpu_memory_init(kvk_gpu_t *gpu);
void kvk_gpu_memory_fini(kvk_gpu_t *gpu);

/* Device address of memory that the device sees: registered or mapped, else known to the driver. KV_ERR_ARG. */
kv_status_t kvk_gpu_translate(kvk_gpu_t *gpu, const void *at, size_t bytes, uint64_t *p_address,
			      kvk_gpu_mem_kind_t *p_kind);

/* The kind of registered or mapped memory, by this address alone. Memory that the driver knows, or nobody: HOST. */
kvk_gpu_mem_kind_t kvk_gpu_guess_kind(const kvk_gpu_t *gpu, const void *at);

/* The driver says that the first and the last of these bytes belong to this device. In the context. */
int kvk_gpu_is_own(kvk_gpu_t *gpu, const void *at, size_t bytes);

/* Do all of these bytes lie in one registration, in one mapping, or in one piece of memory that the driver gave? It
 * refuses a copy that goes from one into the next. */
int kvk_gpu_is_contiguous(kvk_gpu_t *gpu, const void *at, size_t bytes);

/* ---- memory of a device apart from its addresses: what kvk_gpu_map() and kvk/device.h share --- */

/* Has the driver all calls that map and unmap memory? KV_ERR_UNSUPPORTED. */
kv_status_t kvk_cuda_check_vmm(const kvk_cuda_ops_t *cuda);
/* Give all of a piece of memory an address, for reading and writing by kernels and copies of the device `ordinal`. In a
 * context. Any failure: nothing is mapped or reserved. KV_ERR_NOMEM, KV_ERR_IO. */
kv_status_t kvk_cuda_map(const kvk_cuda_ops_t *cuda, kvk_cu_memory_t memory, size_t bytes, int ordinal,
			 kvk_cu_ptr_t *p_at);
/* Nothing on the device may use it. In a context. KV_ERR_IO: the driver refuses, and may keep the mapping. */
kv_status_t kvk_cuda_unmap(const kvk_cuda_ops_t *cuda, kvk_cu_ptr_t at, size_t bytes);

#endif
