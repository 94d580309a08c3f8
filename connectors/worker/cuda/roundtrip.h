/* worker/cuda/roundtrip.h -- self-tests over a device. */
#ifndef KVX_CUDA_ROUNDTRIP_H
#define KVX_CUDA_ROUNDTRIP_H

#include "worker/cuda/state.h"

/* kvx_worker_roundtrip_test(). */
kvc_status_t kvx_gpu_roundtrip_test(kvx_worker_t *worker, const kvx_wgroup_t *group, uint32_t from, uint32_t to);
/* Memory of the self-test against the daemon that device and host both see; *p_device is the device's address of it. */
kvc_status_t kvx_gpu_test_alloc(kvx_worker_t *worker, size_t bytes, uint8_t **p_memory, uintptr_t *p_device);
void kvx_gpu_test_free(const kvx_worker_t *worker, uint8_t *memory);
/* Submit the copy, or poll it: PENDING until it has ended. */
kvc_status_t kvx_gpu_test_copy(kvx_worker_t *worker, const kvk_gpu_copy_t *copy);
/* No copy of the self-test is in flight afterwards. */
void kvx_gpu_test_stop(kvx_worker_t *worker);

#endif
