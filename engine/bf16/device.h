/* device.h -- what the BF16 engine computes on: a GPU, or host memory with the twins of its kernels.
 *
 * A device has two streams and the events of kve/overlap.h. On a GPU all but alloc and sync are enqueued and return at
 * once; in host memory they have run when they return. One thread at a time, but for the heaps.
 */
#ifndef KVE_BF16_DEVICE_H
#define KVE_BF16_DEVICE_H

#include "kve/overlap.h"
#include "kvk/nn.h"
#include "rank.h"

#define KVE_EVENT_APART KVE_EVENTS /* the item before has ended: KVE_TRACE_APART */

typedef struct kve_device_ops {
	/* Zeroed memory, at a multiple of 256. KV_ERR_NOMEM, KV_ERR_IO. */
	kv_status_t (*alloc)(kve_device_t *device, size_t bytes, void **p_at);
	/* Nothing that was enqueued may use it. NULL is nothing. */
	void (*free)(kve_device_t *device, void *at);
	/* Host memory from and to which copies run; at least zeroed. */
	kv_status_t (*alloc_host)(kve_device_t *device, size_t bytes, void **p_at);
	void (*free_host)(kve_device_t *device, void *at);
	/* On the compute stream, either way. */
	kv_status_t (*copy)(kve_device_t *device, void *to, const void *from, size_t bytes);
	/* event: up to KVE_EVENT_APART */
	kv_status_t (*record)(kve_device_t *device, uint32_t event, kve_stream_t stream);
	kv_status_t (*wait)(kve_device_t *device, uint32_t event, kve_stream_t stream);
	/* Wait until the compute stream has ended. KV_ERR_IO. */
	kv_status_t (*sync)(kve_device_t *device);

	/* Moments of a stream. Room for marks 0 to n - 1: KV_ERR_NOMEM, KV_ERR_IO. */
	kv_status_t (*reserve_marks)(kve_device_t *device, uint32_t n);
	kv_status_t (*mark)(kve_device_t *device, uint32_t number, kve_stream_t stream);
	/* Nanoseconds between two that have passed, on the device's clock. */
	kv_status_t (*elapsed)(kve_device_t *device, uint32_t from, uint32_t to, uint64_t *p_ns);

	/* The experts' transport, as in kvk/ep_gpu.h; on the transport stream but for the reduction. */
	kv_status_t (*ep_open)(kve_device_t *device, const kvk_ep_plan_t *plan, uint32_t rank);
	void (*ep_close)(kve_device_t *device);
	kv_status_t (*dispatch_send)(kve_device_t *device, const kvk_ep_tokens_t *tokens, uint64_t *p_number);
	kv_status_t (*dispatch_recv)(kve_device_t *device, uint64_t number, kvk_ep_rows_t *p_rows);
	kv_status_t (*reduce)(kve_device_t *device, uint64_t number, const kvk_bf16_t *outputs);
	kv_status_t (*combine_send)(kve_device_t *device, uint64_t number);
	kv_status_t (*combine_recv)(kve_device_t *device, uint64_t number, kvk_bf16_t *out);
	/* After sync. KV_ERR_TIMEOUT: ranks are lost. Each pointer may be NULL. */
	kv_status_t (*ep_check)(kve_device_t *device, uint32_t *p_lost, kvk_ep_stats_t *stats);

	/* Its number, as the driver counts; -1: it is the CPU. */
	int (*get_ordinal)(const kve_device_t *device);
	void (*close)(kve_device_t *device);
} kve_device_ops_t;

/* First in what each kind has. */
struct kve_device {
	const kve_device_ops_t *ops;
	kvk_nn_t *nn[KVE_OVERLAP_DBO + 1]; /* of a mode: on the SMs that compute may fill in it */
	kvk_cu_stream_t streams[KVE_STREAMS];
};

#endif
