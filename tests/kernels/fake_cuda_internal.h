/* fake_cuda_internal.h -- what the files of the fake driver share. */
#ifndef FAKE_CUDA_INTERNAL_H
#define FAKE_CUDA_INTERNAL_H

#include "fake_cuda.h"

#include "../../kernels/cuda/device/args.h"

#include <pthread.h>

#define CU_INVALID         1
#define CU_NO_MEMORY       2
#define CU_NO_IMAGE        209
#define CU_NOT_FOUND       500
#define CU_UNKNOWN         999
#define CU_UNSUPPORTED     900 /* while a stream is captured */
#define CU_ISOLATION       905
#define CU_CAPTURED_EVENT  907
#define FAKE_TAG           (UINT64_C(1) << 62) /* addresses of host memory, as the device sees them */
#define FAKE_RANGES        512u
#define FAKE_STREAMS       64u
#define FAKE_SMS           20
#define FAKE_OPS           96u
#define FAKE_HANDLES       64u
#define FAKE_SPACES        256u
#define FAKE_DEVICE_HANDLE 70

typedef enum fake_kind { FAKE_NONE, FAKE_DEVICE, FAKE_PINNED, FAKE_REGISTERED, FAKE_MAPPED } fake_kind_t;

typedef struct fake_range {
	fake_kind_t kind;
	uint64_t base;
	size_t bytes;
} fake_range_t;

/* A reserved range of addresses. Memory that is mapped there is a range only once the device has access. */
typedef struct fake_space {
	uint64_t base;
	size_t bytes; /* 0: none */
	int mapped, access;
} fake_space_t;

/* One recording of an event. Shared by the event, its record and its waits; counted. */
typedef struct fake_marker {
	int done;
	int users;
	uint64_t at; /* done: what the fake clock said */
} fake_marker_t;

typedef struct fake_event {
	fake_marker_t *latest; /* NULL: never recorded */
	uint32_t capture;      /* it was recorded in last; 0: none */
	int timed;
} fake_event_t;

typedef enum fake_what { FAKE_COPY, FAKE_BATCH, FAKE_LAUNCH, FAKE_CALL, FAKE_RECORD, FAKE_WAIT } fake_what_t;

typedef struct fake_piece {
	uint64_t dst, src;
	size_t bytes;
} fake_piece_t;

typedef struct fake_work {
	fake_what_t what;
	uint32_t stream;
	struct fake_work *next;
	fake_piece_t piece;
	fake_piece_t *pieces; /* FAKE_BATCH: [count] */
	size_t count;
	size_t kernel; /* index in fake_kernels */
	int shared;
	kvk_gpu_args_t args;
	kvk_gpu_digest_args_t digest;
	void (*call)(void *call_args);
	void *call_args;
	fake_marker_t *marker;
} fake_work_t;

typedef struct fake_stream {
	int used, dropped, stalled;
	unsigned sms;
	fake_work_t *first, *last;
	uint32_t capture; /* it takes part in; 0: none */
} fake_stream_t;

typedef struct fake_function {
	int shared; /* dynamic shared memory it may have */
} fake_function_t;

static const char *const fake_kernels[] = {KVK_GPU_GATHER_PLAIN, KVK_GPU_SCATTER_PLAIN, KVK_GPU_GATHER_BULK,
					   KVK_GPU_SCATTER_BULK, KVK_GPU_DIGEST_PIECES};
#define FAKE_KERNELS 5u
#define FAKE_DIGEST  4u /* gets arguments of its own */
#define FAKE_BULK    2u /* from this one on */
#define FAKE_SCATTER 3u /* the bulk one */

typedef struct fake {
	fake_cuda_config_t config;
	kv_test_rng_t rng;
	pthread_mutex_t lock;
	fake_cuda_live_t live;
	fake_range_t ranges[FAKE_RANGES];
	int handles[FAKE_HANDLES]; /* of created or imported memory: its descriptor; 0: none */
	fake_space_t spaces[FAKE_SPACES];
	fake_range_t zeroing; /* mem_set that nobody has waited for */
	unsigned char zeroing_byte;
	fake_stream_t streams[FAKE_STREAMS]; /* 0: the default stream */
	fake_function_t functions[FAKE_KERNELS];
	_Atomic uint64_t faults, call, fail_at, fail_count, calls[FAKE_OPS];
	_Atomic int failed;
	_Atomic size_t always_member;
	_Atomic int always_error;
	int foreign; /* device memory is another device's */
	int unlinked;
	int held;
	uint64_t bulk_launches;
	uint64_t on_their_way;
	struct {
		uint32_t number; /* 0: none is going on */
		int mode, invalid;
		fake_stream_t *origin;
	} capture;
	uint32_t captures; /* so far */
	size_t pinned_limit;
	uint64_t engine_cost, link_cost, narrow_cost;
	_Atomic uint64_t clock;
} fake_t;

extern fake_t fake;

void fake_fault(const char *what);
/* The memory behind an address as the device sees it; NULL and a fault: none. Under the lock. */
void *fake_resolve(uint64_t at, size_t bytes);

/* WAITS: it may wait for the device, so that no capture of other threads bears it. */
enum { NEEDS_CONTEXT = 1, GIVES_BACK = 2, WAITS = 4 };
/* Begin a call: the error it shall answer, or 0. */
int fake_begin(size_t member, int flags);
#define BEGIN(member, flags)                                                                                           \
	const int failing = fake_begin(offsetof(kvk_cuda_ops_t, member), flags);                                       \
	if (failing && !((flags)&GIVES_BACK)) {                                                                        \
		return failing;                                                                                        \
	}

/* fake_launch.c */
int fake_launch(kvk_cu_function_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
		unsigned bz, unsigned shared_bytes, kvk_cu_stream_t stream, void **params, void **extra);
int fake_graph_create(kvk_cu_graph_t *p_graph, unsigned flags);
int fake_graph_destroy(kvk_cu_graph_t graph);
int fake_graph_add(kvk_cu_node_t *p_node, kvk_cu_graph_t graph, const kvk_cu_node_t *after, size_t after_count,
		   const kvk_cu_kernel_t *kernel);
int fake_graph_exec(kvk_cu_exec_t *p_exec, kvk_cu_graph_t graph, unsigned long long flags);
int fake_graph_change(kvk_cu_exec_t exec, kvk_cu_node_t node, const kvk_cu_kernel_t *kernel);
int fake_graph_launch(kvk_cu_exec_t exec, kvk_cu_stream_t stream);
int fake_graph_drop(kvk_cu_exec_t exec);

/* fake_stream.c */
fake_work_t *fake_work(fake_what_t what);
/* The event's latest recording, or a new one that is. */
void fake_mark(fake_work_t *work, fake_event_t *event, int fresh);
void fake_forget(fake_event_t *event); /* under the lock */
void fake_enqueue(kvk_cu_stream_t stream, fake_work_t *work);
kvk_cu_stream_t fake_stream_new(void);
void fake_stream_drop(kvk_cu_stream_t stream);
/* Work of a stream that may be captured; an error. */
int fake_record(kvk_cu_stream_t stream, fake_event_t *event);
int fake_wait(kvk_cu_stream_t stream, fake_event_t *event);
void fake_take_sms(kvk_cu_stream_t stream, unsigned sms);
int fake_is_capturing(kvk_cu_stream_t stream);
/* Does this call invalidate the capture that is going on? Then it does, and is a fault. */
int fake_check_capture(int thread_mode);
void fake_invalidate(const char *what);
void fake_run_all(void); /* under the lock */
/* Has the event come? Running some work first, or (`all`) all of it. */
int fake_look(fake_event_t *event, int all);

/* fake_kernel.c */
/* The range that an address is in, NULL: none; a new one, one that goes: an error of the driver. All under the lock. */
fake_range_t *fake_range_of(uint64_t at, fake_kind_t kind);
int fake_range_add(fake_kind_t kind, void *base, size_t bytes);
int fake_range_drop(fake_kind_t kind, uint64_t base);
void fake_kernel(const fake_work_t *work);
int fake_mem_create(kvk_cu_memory_t *p_memory, size_t bytes, const kvk_cu_memory_prop_t *prop,
		    unsigned long long flags);
int fake_mem_release(kvk_cu_memory_t memory);
int fake_mem_export(void *p_fd, kvk_cu_memory_t memory, int handle_type, unsigned long long flags);
int fake_mem_import(kvk_cu_memory_t *p_memory, void *fd, int handle_type);
int fake_mem_reserve(kvk_cu_ptr_t *p_at, size_t bytes, size_t alignment, kvk_cu_ptr_t wanted, unsigned long long flags);
int fake_mem_unreserve(kvk_cu_ptr_t at, size_t bytes);
int fake_mem_map(kvk_cu_ptr_t at, size_t bytes, size_t offset, kvk_cu_memory_t memory, unsigned long long flags);
int fake_mem_unmap(kvk_cu_ptr_t at, size_t bytes);
int fake_mem_access(kvk_cu_ptr_t at, size_t bytes, const kvk_cu_access_t *access, size_t count);
int fake_mem_grain(size_t *p_bytes, const kvk_cu_memory_prop_t *prop, int which);
int fake_mem_set(kvk_cu_ptr_t at, unsigned char byte, size_t bytes);
int fake_context_wait(void);

#endif
