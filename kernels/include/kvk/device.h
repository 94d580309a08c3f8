/* kvk/device.h -- the GPUs of this machine and their memory, for a process that hands memory out and uses none of it:
 * no kernels, no streams, no copies (those are kvk/gpu.h's).
 *
 * Memory is exported as a descriptor of the driver. It lives as long as a descriptor or a mapping of it does, in any
 * process, and longer than the one that allocated it. kvk_gpu_map() makes it usable, on this device or on a peer.
 *
 * Threads: a device belongs to one thread at a time. Why a call fails is a sentence in kvk_gpu_last_error()
 * (kvk/gpu.h), also for these. Not fork-safe.
 */
#ifndef KVK_DEVICE_H
#define KVK_DEVICE_H

#include "kvk/cuda.h"

typedef struct kvk_device kvk_device_t;

typedef struct kvk_device_info {
	char uuid[48];              /* "GPU-8-4-4-4-12" as nvidia-smi prints it; "": the driver cannot say */
	char name[96];              /* "NVIDIA H200" */
	uint64_t bytes, free_bytes; /* of memory; 0: no context can be had, so nobody may allocate there now */
} kvk_device_info_t;

/* The devices that this process sees, in the driver's order; *p_count (all of them) may be above `cap`. Takes each
 * device's primary context and gives it back: 0.3 s a device that nobody else in the process uses. KV_ERR_UNSUPPORTED:
 * no driver (cuda NULL), or it does not start; KV_ERR_IO. */
kv_status_t kvk_device_list(const kvk_cuda_ops_t *cuda, kvk_device_info_t *out, uint32_t cap, uint32_t *p_count);
/* Takes the device's primary context, which costs some hundred MiB of its memory until close. KV_ERR_NOT_FOUND: no
 * device of this UUID; KV_ERR_UNSUPPORTED: no driver, or one that cannot export this device's memory; KV_ERR_NOMEM;
 * KV_ERR_IO. */
kv_status_t kvk_device_open(const kvk_cuda_ops_t *cuda, const char *uuid, kvk_device_t **p_device);
/* Sizes of memory are multiples of it (2 MiB on today's devices). */
size_t kvk_device_grain(const kvk_device_t *device);
/* Memory of this device, all zero, as a descriptor that is the caller's (close-on-exec). Nothing of it is mapped or
 * held by the process afterwards: closing the descriptor frees it, unless another process has imported it. KV_ERR_ARG:
 * not a multiple of the grain, or 0; KV_ERR_FULL: the device has not so much memory; KV_ERR_IO: the driver refuses.
 * Synchronous: it waits until the zeros have arrived. */
kv_status_t kvk_device_alloc(kvk_device_t *device, size_t bytes, int *p_fd);
/* What was allocated stays. NULL is fine. */
void kvk_device_close(kvk_device_t *device);

#endif
