/* kernels/cuda/vmm.h -- memory of a device apart from its addresses: what kvk_gpu_map() and kvk/device.h share. */
#ifndef KVK_CUDA_VMM_H
#define KVK_CUDA_VMM_H

#include "kvk/cuda.h"

/* Has the driver all calls that map and unmap memory? KV_ERR_UNSUPPORTED. */
kv_status_t kvk_vmm_check(const kvk_cuda_ops_t *cuda);
/* Give all of a piece of memory an address, for reading and writing by kernels and copies of the device `ordinal`. In a
 * context. Any failure: nothing is mapped or reserved. KV_ERR_NOMEM, KV_ERR_IO. */
kv_status_t kvk_vmm_map(const kvk_cuda_ops_t *cuda, kvk_cu_memory_t memory, size_t bytes, int ordinal,
			kvk_cu_ptr_t *p_at);
/* Nothing on the device may use it. In a context. KV_ERR_IO: the driver refuses, and may keep the mapping. */
kv_status_t kvk_vmm_unmap(const kvk_cuda_ops_t *cuda, kvk_cu_ptr_t at, size_t bytes);

#define KVK_UUID_TEXT 48u
/* "GPU-8-4-4-4-12", lower case, as nvidia-smi prints it. "": the driver cannot say. `device`: the driver's handle. */
void kvk_uuid_format(const kvk_cuda_ops_t *cuda, int device, char text[KVK_UUID_TEXT]);

#endif
