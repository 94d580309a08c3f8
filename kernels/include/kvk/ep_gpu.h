/* kvk/ep_gpu.h -- a rank of expert-parallel dispatch and combine (kvk/ep.h) on a GPU. Its link (kvk_ep_link_kind_t):
 *   KVK_EP_PEER          stores to the memory of other ranks, on the same device or a peer's over NVLink
 *   KVK_EP_HOST_COPIES   the copy engine, into and out of host memory that the ranks share: no SM, and padding
 *   KVK_EP_HOST_KERNELS  stores to it and loads of it, paced
 *
 * The four halves are enqueued on streams, in the order and with the numbers of kvk/ep.h, and make its bytes: rows,
 * index, sums. Between a send and its receive the transport holds no SM. A combine's send has two parts: the reduction,
 * which stays in the rank's memory and may take all SMs, and the return of the rows, which takes `sms` of them. Over
 * copies, the push packs in the rank's memory and may take all SMs, too. Copies of a receive run on a stream of the
 * slot's own, forked from the caller's and joined to it: the index is made while rows come, sums while later parts do.
 *
 * Order among streams is the caller's: a receive comes after its send, a reduction after what made the outputs, a send
 * after the receive that frees its slot (in_flight numbers before). Over copies, sends come one after the other, too: a
 * rank packs them in one place; and a graph cannot launch them again, since a copy's place is its number's.
 *
 * Threads: a rank belongs to one at a time.
 */
#ifndef KVK_EP_GPU_H
#define KVK_EP_GPU_H

#include "kvk/ep.h"
#include "kvk/gpu.h"

typedef struct kvk_ep_gpu kvk_ep_gpu_t;

typedef struct kvk_ep_gpu_config {
	kvk_gpu_t *gpu;            /* borrowed until close */
	const kvk_ep_plan_t *plan; /* copied */
	const kvk_cu_ptr_t *heaps; /* [ranks], copied: heap_bytes each, zeroed before any rank is opened, as this device
				      reaches them; they stay until all ranks are closed. Of a link through host
				      memory: what each rank has made known to its device (kvk_gpu_register()) */
	uint32_t rank;
	kvk_ep_link_kind_t link;
	uint64_t pace;       /* of KVK_EP_HOST_KERNELS: bytes a second to other ranks, at most; 0: all that the link
				takes. Where that is full, all memory of the device waits behind it: 0.85 of it is safe
				on the machines measured */
	uint32_t sms;        /* blocks that move rows to other ranks or get theirs, one an SM; 0: 16 */
	uint32_t wide;       /* blocks of the kernels that stay in the rank's memory; 0: 4 an SM of the device */
	uint64_t timeout_us; /* longest wait of a receive for the other ranks; 0: 10 s */
	/* Of copies, or NULL: the caller's stream of compute, which may fill the device. Rows are packed there by
	 * kvk_ep_gpu_dispatch_send(), behind what it has then, and `out` is summed there by kvk_ep_gpu_combine_recv():
	 * kernels of theirs that wait for SMs would hold up the transfer. What frees a slot comes before its next send
	 * on this stream, too. */
	kvk_cu_stream_t compute;
} kvk_ep_gpu_config_t;

/* Device memory that a rank takes beside its heap. */
size_t kvk_ep_gpu_bytes(const kvk_ep_plan_t *plan, kvk_ep_link_kind_t link);

/* KV_ERR_UNSUPPORTED: no kernels in this build or for this device, or rows, tokens or experts for which a block has
 * no room (kvk_gpu_last_error()); KV_ERR_ARG: no such rank or link; KV_ERR_NOMEM; KV_ERR_IO. */
kv_status_t kvk_ep_gpu_open(const kvk_ep_gpu_config_t *config, kvk_ep_gpu_t **p_ep);
/* All that was enqueued must have ended. NULL is nothing. */
void kvk_ep_gpu_close(kvk_ep_gpu_t *ep);

/* The index of what has come, in device memory: see kvk_ep_rows_t. Valid until the reduction of its number. */
typedef struct kvk_ep_gpu_rows {
	kvk_cu_ptr_t first, record, rows, own;
	uint32_t own_first;
} kvk_ep_gpu_rows_t;

/* `tokens`: pointers of the device, borrowed until the combine has been received. Rows are at multiples of 16. An
 * expert that there is not is left out, and counted (kvk_ep_gpu_check()). KV_ERR_ARG: more tokens than `most`, `most`
 * above max_tokens, or not the next number of its half; KV_ERR_BUSY as in kvk/ep.h; KV_ERR_IO: the driver refuses, and
 * the rank is of no further use. */
kv_status_t kvk_ep_gpu_dispatch_send(kvk_ep_gpu_t *ep, const kvk_ep_tokens_t *tokens, kvk_cu_stream_t stream,
				     uint64_t *p_number);
kv_status_t kvk_ep_gpu_dispatch_recv(kvk_ep_gpu_t *ep, uint64_t number, kvk_cu_stream_t stream,
				     kvk_ep_gpu_rows_t *p_rows);
/* outputs: BF16 [rows][hidden] of the device, at a multiple of 16: read until this has ended. The number
 * before need not have been sent. */
kv_status_t kvk_ep_gpu_reduce(kvk_ep_gpu_t *ep, uint64_t number, kvk_cu_ptr_t outputs, kvk_cu_stream_t stream);
kv_status_t kvk_ep_gpu_combine_send(kvk_ep_gpu_t *ep, uint64_t number, kvk_cu_stream_t stream);
/* out: BF16 [tokens][hidden] of the device, at a multiple of 16. */
kv_status_t kvk_ep_gpu_combine_recv(kvk_ep_gpu_t *ep, uint64_t number, kvk_cu_ptr_t out, kvk_cu_stream_t stream);

typedef struct kvk_ep_gpu_report {
	kvk_ep_stats_t stats; /* bytes sent to other ranks, of what has ended */
	uint32_t lost;        /* ranks that have not come, a bit each */
	uint32_t refused;     /* experts that there are not */
} kvk_ep_gpu_report_t;

/* How far it has come; waits for no stream. KV_ERR_TIMEOUT: a rank is lost, all later halves are void; KV_ERR_ARG: a
 * token named an expert that there is not; KV_ERR_IO. *p_report is filled but in the last case. */
kv_status_t kvk_ep_gpu_check(kvk_ep_gpu_t *ep, kvk_ep_gpu_report_t *p_report);

#endif
