/* worker/cuda/device.h -- the device behind a worker: open, close, the order of its streams, and its batches in flight.
 */
#ifndef KVX_CUDA_DEVICE_H
#define KVX_CUDA_DEVICE_H

#include "worker/cuda/state.h"

/* KVC_ERR_ARG: *p_why is a sentence. */
kvc_status_t kvx_gpu_open(kvx_worker_t *worker, const kvx_worker_config_t *config, const char **p_why);
void kvx_gpu_close(kvx_worker_t *worker);
/* From now on the device is waited for 3 s at most. */
void kvx_gpu_begin_shutdown(kvx_worker_t *worker);
/* The wait has ended and the device still copies. Transfer thread. */
int kvx_gpu_shutdown_timed_out(kvx_worker_t *worker);
/* 1: the device hangs, so the worker and the memory it may use stay until the process ends. */
int kvx_gpu_leak_until_exit(kvx_worker_t *worker);
/* The device's part of the counters. */
void kvx_gpu_fill_stats(const kvx_worker_t *worker, kvx_worker_stats_t *stats);
/* The device cannot be used, as its last error says: loads and saves are off for good. Transfer thread. Returns the
 * status. */
kvc_status_t kvx_gpu_decline(kvx_worker_t *worker, kvc_status_t status);
/* What is enqueued on `later` from now on runs after what is on `earlier` now. 0: the driver refuses. */
int kvx_gpu_order_streams(kvx_worker_t *worker, kvk_cu_stream_t earlier, kvk_cu_stream_t later);
/* A free batch for a load, or for saves; NULL: none is free now. Lock held. */
kvx_gpu_batch_t *kvx_gpu_batch_for_load(kvx_wgpu_t *gpu, uint32_t flags);
kvx_gpu_batch_t *kvx_gpu_batch_for_save(kvx_wgpu_t *gpu, int fence);
/* Lock held. Not OK: nothing is in flight; KVC_ERR_BUSY: try again later. */
kvc_status_t kvx_gpu_batch_submit(kvx_worker_t *worker, kvx_gpu_batch_t *batch, const kvk_gpu_copy_t *copy);
/* Complete the batches whose job has ended: how many. Any thread. */
uint32_t kvx_gpu_complete_batches(kvx_worker_t *worker);

#endif
