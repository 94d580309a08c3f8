/* gpu/source.h -- where the GPU program gets memory: a GPU (cuda.c), or memfds in the place of one (fake.c). */
#ifndef KVD_GPU_SOURCE_H
#define KVD_GPU_SOURCE_H

#include "gpu/wire.h"

typedef struct kvd_gpu_source {
	/* `bytes` of zeros as a descriptor that is the caller's. KV_ERR_FULL: there is not so much memory. KV_ERR_ARG:
	 * not a multiple of what memory comes in. KV_ERR_LIMIT, KV_ERR_IO. */
	kv_status_t (*alloc)(void *device, uint64_t bytes, int *p_fd);
	void *device;
	const char *(*why)(void); /* of the last failure, as a sentence */
} kvd_gpu_source_t;

/* fake-0 to fake-7. KV_ERR_NOT_FOUND: another name. */
kv_status_t kvd_gpu_open_fake(const char *uuid, kvd_gpu_source_t *source);

/* A GPU by its UUID; it stays open until the process ends. KV_ERR_NOT_FOUND, KV_ERR_UNSUPPORTED, KV_ERR_IO,
 * KV_ERR_NOMEM: `why` says more. */
kv_status_t kvd_gpu_open_cuda(const char *uuid, kvd_gpu_source_t *source, char *why, size_t cap);
/* A DEVICE message for each GPU; at most `cap` are set. Errors as above. */
kv_status_t kvd_gpu_list_cuda(kvd_gpu_message_t *out, uint32_t cap, uint32_t *p_count, char *why, size_t why_cap);

#endif
