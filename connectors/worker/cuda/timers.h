/* worker/cuda/timers.h -- how long steps and loads take on the device. A timer that the driver refuses leaves its step
 * or load untimed. */
#ifndef KVX_CUDA_TIMERS_H
#define KVX_CUDA_TIMERS_H

#include "worker/cuda/state.h"

void kvx_timers_open(kvx_wgpu_t *gpu);
void kvx_timers_close(kvx_wgpu_t *gpu);
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

#endif
