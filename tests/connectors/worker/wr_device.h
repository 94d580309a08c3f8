/* wr_device.h -- where the caches of worker tests lie: wr_host.c: in host memory; wr_cuda.c: in that of the fake
 * driver's device. */
#ifndef TESTS_CONNECTORS_WR_DEVICE_H
#define TESTS_CONNECTORS_WR_DEVICE_H

#include "kvx.h"
#include "kvx_worker.h"

/* Before the first worker, after the last. A test may do the first itself, with a seed. */
void wr_device_start(uint64_t seed);
void wr_device_stop(void);
/* Before wr_device_stop(): something was left on the device, on purpose. */
void wr_device_leave(void);
uint8_t *wr_device_alloc(size_t bytes);
void wr_device_free(uint8_t *memory);
/* Say where the cache is. The engine has two streams. */
void wr_device_config(kvx_worker_config_t *config);
/* The same for kvx_attach(); NULL: host memory. Valid until the next call. */
const kvx_device_t *wr_device_front(void);
void wr_device_set_stream(kvx_worker_t *worker, int second); /* where its kernels go from now on */
/* What a kernel of the engine does: now, or when its stream comes to it. args is freed. */
void wr_device_call(void (*call)(void *args), void *args);
/* Of such a call: what it does takes so long, by the clock of who does it. */
void wr_device_take(uint64_t ns);
/* Nothing of it is done while held; a byte copied takes the device so long; 1: it does things later than it is told. */
void wr_device_hold(int held);
/* Nothing of one of the engine's two streams is done while stalled. */
void wr_device_stall(int second, int stalled);
/* What the engine's kernels do from now on comes after all of its second stream. */
void wr_device_await_second(void);
void wr_device_cost(uint64_t ns);
int wr_device_runs_behind(void);
/* Its driver refuses the n-th call from now on; 0: none. Whether the one asked for before was refused. */
int wr_device_fail(uint64_t nth);
/* It orders no stream behind another one. */
void wr_device_refuse_orders(int refuse);
/* A line of its trace, which says what it has done last. */
void wr_device_trace(const char *what, uint32_t a, uint32_t b);
void wr_device_print_trace(void);
/* All of these have been done. */
void wr_device_sync(void);

#endif
