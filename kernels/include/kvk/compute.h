/* kvk/compute.h -- memory, copies and events of a device (kvk/gpu.h) for a program that computes on it.
 *
 * Threads: any thread; an event belongs to one at a time.
 */
#ifndef KVK_COMPUTE_H
#define KVK_COMPUTE_H

#include "kvk/gpu.h"

/* SMs of the device. */
uint32_t kvk_gpu_sms(const kvk_gpu_t *gpu);

/* Memory of the device, all zero, at a multiple of 256. Waits until the zeros are there. KV_ERR_NOMEM: the device has
 * not so much; KV_ERR_IO. */
kv_status_t kvk_gpu_alloc(kvk_gpu_t *gpu, size_t bytes, void **p_at);
/* Nothing that was enqueued may use it. NULL is nothing. */
void kvk_gpu_free(kvk_gpu_t *gpu, void *at);
/* Pinned host memory, all zero. */
kv_status_t kvk_gpu_alloc_host(kvk_gpu_t *gpu, size_t bytes, void **p_at);
void kvk_gpu_free_host(kvk_gpu_t *gpu, void *at);

/* From and to memory of a device or pinned host memory. KV_ERR_IO. */
kv_status_t kvk_gpu_copy_bytes(kvk_gpu_t *gpu, void *to, const void *from, size_t bytes, kvk_cu_stream_t stream);
/* Wait until all that the stream has now has ended. KV_ERR_IO: it has failed. */
kv_status_t kvk_gpu_sync_stream(kvk_gpu_t *gpu, kvk_cu_stream_t stream);

/* timed: kvk_gpu_event_elapsed() can read it. KV_ERR_NOMEM, KV_ERR_IO. */
kv_status_t kvk_gpu_event_create(kvk_gpu_t *gpu, int timed, kvk_cu_event_t *p_event);
void kvk_gpu_event_destroy(kvk_gpu_t *gpu, kvk_cu_event_t event);
kv_status_t kvk_gpu_event_record(kvk_gpu_t *gpu, kvk_cu_event_t event, kvk_cu_stream_t stream);
/* What is enqueued on the stream from now on comes after the event's last record. */
kv_status_t kvk_gpu_event_await(kvk_gpu_t *gpu, kvk_cu_event_t event, kvk_cu_stream_t stream);
/* Milliseconds between two that have happened. KV_ERR_IO: one has not. */
kv_status_t kvk_gpu_event_elapsed(kvk_gpu_t *gpu, kvk_cu_event_t begin, kvk_cu_event_t end, float *p_ms);

#endif
