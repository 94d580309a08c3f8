/* daemon/io/base/gpu.h -- the GPU tier: a pool of slabs for each device, whose memory the program kvd-gpu gets.
 *
 *   OFF --the first slab has come--> FILLING --all have--> OK --a slab went back to the device--> FILLING
 *
 * One program runs at a time: a list of devices when they are not configured, then one a device for what it lacks. The
 * loop never waits for it. Want of memory, a death, silence and an answer that makes no sense are all the same: the
 * tier is smaller, `why` says so, and the next try comes after a pause that grows (decision 057).
 */
#ifndef KVD_IO_GPU_H
#define KVD_IO_GPU_H

#include "io/host.h"

#define KVD_GPU_REASON_MAX 320u

typedef enum kvd_gpu_state { KVD_GPU_OK, KVD_GPU_FILLING, KVD_GPU_OFF } kvd_gpu_state_t;

/* One device, for people. */
typedef struct kvd_gpu_info {
	const char *uuid; /* good until kvd_gpu_close() */
	kvs_tier_t *pool; /* NULL: OFF */
	uint32_t memory;  /* the core's number of it */
	kvd_gpu_state_t state;
	uint32_t slabs, wanted; /* whose memory is here, in the pool or in stock; that there should be */
	uint64_t adopted;       /* blocks that were taken over at the start */
	const char *why;        /* "": the last try went well, or none has ended */
} kvd_gpu_info_t;

/* Without gpu.size nothing is done. A program that is not there is a tier that is off. KV_ERR_NOMEM. */
kv_status_t kvd_gpu_open(kvd_host_t *host);
/* After the pools have been closed: they take memory from here. */
void kvd_gpu_close(kvd_host_t *host);
/* Start the program when memory is wanted and it is time to, end it when it is silent. Between two iterations. */
void kvd_gpu_step(kvd_host_t *host, uint64_t now_ns);

/* 1 and the core's number of its memory: the device has a pool. 0: there is no such device now. */
int kvd_gpu_find(const kvd_host_t *host, const char *uuid, uint32_t *p_memory);
/* The i-th device. 0: there are no more. */
int kvd_gpu_describe(const kvd_host_t *host, uint32_t i, kvd_gpu_info_t *p_info);
/* 1, and a sentence: some of the memory that was asked for is not here. */
int kvd_gpu_is_degraded(const kvd_host_t *host, char *out, size_t cap);
/* Descriptors open for it now, without those of the pools' slabs. */
uint32_t kvd_gpu_count_fds(const kvd_host_t *host);

#endif
