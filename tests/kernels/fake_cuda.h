/* fake_cuda.h -- a CUDA driver for tests: device memory is host memory, streams are queues that run when somebody looks
 * (or at once), kernels are a slow reading of kvk_gpu_args_t, and any call may be made to fail. One in a process.
 *
 * What a real device would trap is a fault: an address nobody gave it, host memory not registered, a kernel started
 * wrongly, a call out of context. Faults are counted and said; a test asserts that there is none.
 */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include "kv_test.h"

#include "kvk/cuda.h"

typedef struct fake_cuda_config {
	uint64_t seed;
	int lazy;    /* streams run at queries, some steps at a time in any order; else at once */
	int major;   /* compute capability; 9: bulk kernels */
	int devices; /* 0: one */
} fake_cuda_config_t;

/* What is there now. All 0 after a good close. */
typedef struct fake_cuda_live {
	int64_t memory, pinned, registered, streams, events, modules, contexts, graphs;
	int64_t handles, reserved, mapped; /* of memory apart from its addresses */
} fake_cuda_live_t;

void fake_cuda_start(const fake_cuda_config_t *config);
/* Frees what is left. */
void fake_cuda_stop(void);
const kvk_cuda_ops_t *fake_cuda_ops(void);
/* Any image it loads. */
const void *fake_cuda_image(void);

fake_cuda_live_t fake_cuda_live(void);
int fake_cuda_clean(void); /* nothing left, no fault */
uint64_t fake_cuda_faults(void);

/* Let the n-th call from now on answer CUDA_ERROR_UNKNOWN; calls that give something back do it nevertheless. 0:
 * none. */
void fake_cuda_fail_nth(uint64_t n);
/* The same of `count` calls from the n-th on. */
void fake_cuda_fail_run(uint64_t n, uint64_t count);
int fake_cuda_failed(void);
/* Let each call of this member of the table answer `error` until 0 is given. */
void fake_cuda_fail_always(size_t member, int error);

/* What streams have done last (kernels, events, waits), and calls that were refused: a line each, oldest first. A test
 * may add its own. Any thread. */
void fake_cuda_trace(const char *format, ...) __attribute__((format(printf, 1, 2)));
void fake_cuda_print_trace(void);

/* Calls of a member, and bytes and SMs of interest. */
uint64_t fake_cuda_calls(size_t member);
uint64_t fake_cuda_launches(void); /* of kernels, by themselves or as graphs */
uint64_t fake_cuda_bulk_launches(void);
/* Most SMs that kernels could have at the same time since it was asked last: the largest of each stream, together. */
unsigned fake_cuda_sms(void);
/* Most bytes that a bulk scatter could have on their way since it was asked last; UINT64_MAX: as many as it has room
 * for. */
uint64_t fake_cuda_on_their_way(void);
/* Largest pinned allocation it gives; 0: any. */
void fake_cuda_limit_pinned(size_t bytes);
/* A bulk scatter of host memory with a bound on what is on its way takes this many times as long. */
void fake_cuda_narrow(uint64_t times);
/* Nanoseconds that its clock has gone on: this many a byte copied by the engine, this many a kernel's byte over the
 * link. */
void fake_cuda_costs(uint64_t engine, uint64_t link);
uint64_t fake_cuda_clock(void *ctx);
/* What runs now takes so long. */
void fake_cuda_advance(uint64_t ns);

/* What begins and ends a capture, as the driver has it. `mode` 0: calls of any thread that might wait for the device
 * invalidate it, unless that thread has exchanged its mode; 2: none does. A call that is illegal while something is
 * captured is an error, a fault, and invalidates the capture; so does work that a graph would take: kvd gives it none. */
void fake_cuda_capture(kvk_cu_stream_t stream, int mode);
/* 0: it was invalidated. */
int fake_cuda_captured(kvk_cu_stream_t stream);

/* Device memory is another device's from now on. */
void fake_cuda_foreign(int foreign);
/* No device can use another one's memory. */
void fake_cuda_unlink(void);
/* Memory that has been created and not zeroed holds this byte. */
#define FAKE_DIRT  0xd5
#define FAKE_GRAIN (UINT64_C(64) << 10) /* of created memory */
/* A kernel of the test's own; args are freed afterwards. */
void fake_cuda_call(kvk_cu_stream_t stream, void (*call)(void *args), void *args);
/* Nothing runs while held; 2: no kernel and no copy, but what comes before them, at once. */
void fake_cuda_hold(int held);
/* Nothing of this stream runs while stalled. */
void fake_cuda_stall(kvk_cu_stream_t stream, int stalled);
/* Run everything that can run. */
void fake_cuda_drain(void);

#endif
