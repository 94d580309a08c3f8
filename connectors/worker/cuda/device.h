/* worker/cuda/device.h -- the device behind a worker: open, close, the order of its streams, timers, and its batches in
 * flight.
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
/* Saves that are submitted from now on come after what the compute stream has now. 0: they would not. Engine's thread.
 */
int kvx_gpu_set_save_point(kvx_worker_t *worker);
/* The end of the step, if it computes prompts. Engine's thread. */
void kvx_gpu_mark_prefill(kvx_wgpu_t *gpu);
/* The device computes prompts now or soon: it is behind the engine. Any thread. */
int kvx_gpu_computes_prompts(const kvx_wgpu_t *gpu);
/* What is enqueued on `later` from now on runs after what is on `earlier` now. 0: the driver refuses. */
int kvx_gpu_order_streams(kvx_worker_t *worker, kvk_cu_stream_t earlier, kvk_cu_stream_t later);
/* The timed part of the step begins on the engine's stream. 0: there is no timer for it. */
int kvx_timers_start_step(kvx_wgpu_t *gpu);
void kvx_timers_stop_step(kvx_wgpu_t *gpu, uint32_t step);
/* The next step whose time is known: *p_step, *p_ns. 0: there is none. */
int kvx_timers_poll_step(kvx_wgpu_t *gpu, uint32_t *p_step, uint64_t *p_ns);
/* The load's copies may begin where the stream is now. Before any of it is submitted. */
void kvx_timers_start_load(kvx_worker_t *worker, kvx_wload_t *load, kvk_cu_stream_t stream);
/* Its copies begin where the stream is now, behind those of others, if it has waited for nothing else. Lock held. */
void kvx_timers_restart_load(kvx_wgpu_t *gpu, const kvx_wload_t *load, kvk_cu_stream_t stream);
/* The device has done what the load's copies come behind. 0: it has not, or the load is not timed. Lock held, some of
 * it in flight. */
int kvx_timers_load_has_begun(const kvx_wgpu_t *gpu, const kvx_wload_t *load);
/* Copies of it end where the stream is now. Lock held. */
void kvx_timers_mark_load_end(kvx_wgpu_t *gpu, const kvx_wload_t *load, kvk_cu_stream_t stream);
/* The device's time of a completed load; the wall time where it is not known, 0 of a load that is not timed. */
uint64_t kvx_timers_load_ns(kvx_worker_t *worker, kvx_wload_t *load);

/* A free batch for the lane; NULL: there is none now. Lock held. */
kvx_gpu_batch_t *kvx_gpu_batch_find(kvx_wgpu_t *gpu, kvx_lane_t lane);
/* Lock held. Not OK: nothing is in flight; KVC_ERR_BUSY: try again later. */
kvc_status_t kvx_gpu_batch_submit(kvx_worker_t *worker, kvx_gpu_batch_t *batch, const kvk_gpu_copy_t *copy);
/* Complete the batches whose job has ended: how many. Any thread. */
uint32_t kvx_gpu_complete_batches(kvx_worker_t *worker);

#endif
