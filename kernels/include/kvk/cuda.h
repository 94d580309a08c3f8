/* kvk/cuda.h -- the CUDA driver, reached through one table of functions that is filled at run time.
 *
 * Nothing of CUDA is needed to build or to start: where there is no driver, kvk_cuda_load() says so. Tests put a table
 * of their own in its place, over host memory and with errors where they want them. Only what is used is in it. Names,
 * arguments and results are the driver's (CUDA Driver API); its handles are pointers, its device addresses 64-bit
 * numbers.
 */
#ifndef KVK_CUDA_H
#define KVK_CUDA_H

#include "kv/status.h"
#include "kv/types.h"

typedef struct kvk_cu_context *kvk_cu_context_t;
typedef struct kvk_cu_module *kvk_cu_module_t;
typedef struct kvk_cu_function *kvk_cu_function_t;
typedef struct kvk_cu_stream *kvk_cu_stream_t; /* NULL: the legacy default stream */
typedef struct kvk_cu_event *kvk_cu_event_t;
typedef struct kvk_cu_graph *kvk_cu_graph_t;
typedef struct kvk_cu_node *kvk_cu_node_t; /* of a graph, as long as that is there */
typedef struct kvk_cu_exec *kvk_cu_exec_t; /* a graph as it can be launched */
typedef uint64_t kvk_cu_ptr_t;

/* Rows of a pitch, on one side of a copy. */
typedef struct kvk_cu_side {
	size_t x, y; /* 0 */
	int type;    /* KVK_CU_SIDE_ANY */
	const void *host;
	kvk_cu_ptr_t at;
	void *array;
	size_t pitch;
} kvk_cu_side_t;
#define KVK_CU_SIDE_ANY 4 /* whatever memory lies at `at` */
typedef struct kvk_cu_rows {
	kvk_cu_side_t from, to;
	size_t width, height; /* bytes, rows */
} kvk_cu_rows_t;

/* Every function returns a CUresult: 0, KVK_CU_NOT_READY or an error. */
#define KVK_CU_NOT_READY 600
#define KVK_CUDA_OPS(X)                                                                                                \
	X(init, cuInit, (unsigned flags))                                                                              \
	X(driver_version, cuDriverGetVersion, (int *p_version))                                                        \
	X(device_count, cuDeviceGetCount, (int *p_count))                                                              \
	X(device_get, cuDeviceGet, (int *p_device, int ordinal))                                                       \
	X(device_name, cuDeviceGetName, (char *name, int cap, int device))                                             \
	X(device_attribute, cuDeviceGetAttribute, (int *p_value, int attribute, int device))                           \
	X(context_retain, cuDevicePrimaryCtxRetain, (kvk_cu_context_t * p_context, int device))                        \
	X(context_release, cuDevicePrimaryCtxRelease_v2, (int device))                                                 \
	X(context_push, cuCtxPushCurrent_v2, (kvk_cu_context_t context))                                               \
	X(context_pop, cuCtxPopCurrent_v2, (kvk_cu_context_t * p_context))                                             \
	X(capture_mode, cuThreadExchangeStreamCaptureMode, (int *p_mode))                                              \
	X(module_load, cuModuleLoadData, (kvk_cu_module_t * p_module, const void *image))                              \
	X(module_unload, cuModuleUnload, (kvk_cu_module_t module))                                                     \
	X(module_function, cuModuleGetFunction,                                                                        \
	  (kvk_cu_function_t * p_function, kvk_cu_module_t module, const char *name))                                  \
	X(function_attribute, cuFuncSetAttribute, (kvk_cu_function_t function, int attribute, int value))              \
	X(launch, cuLaunchKernel,                                                                                      \
	  (kvk_cu_function_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,   \
	   unsigned shared_bytes, kvk_cu_stream_t stream, void **params, void **extra))                                \
	X(mem_alloc, cuMemAlloc_v2, (kvk_cu_ptr_t * p_ptr, size_t bytes))                                              \
	X(mem_free, cuMemFree_v2, (kvk_cu_ptr_t ptr))                                                                  \
	X(host_alloc, cuMemHostAlloc, (void **p_base, size_t bytes, unsigned flags))                                   \
	X(host_free, cuMemFreeHost, (void *base))                                                                      \
	X(host_register, cuMemHostRegister_v2, (void *base, size_t bytes, unsigned flags))                             \
	X(host_unregister, cuMemHostUnregister, (void *base))                                                          \
	X(host_pointer, cuMemHostGetDevicePointer_v2, (kvk_cu_ptr_t * p_ptr, void *base, unsigned flags))              \
	X(copy_async, cuMemcpyAsync, (kvk_cu_ptr_t dst, kvk_cu_ptr_t src, size_t bytes, kvk_cu_stream_t stream))       \
	X(copy_rows, cuMemcpy2DAsync_v2, (const kvk_cu_rows_t *rows, kvk_cu_stream_t stream))                          \
	X(stream_create, cuStreamCreateWithPriority, (kvk_cu_stream_t * p_stream, unsigned flags, int priority))       \
	X(stream_destroy, cuStreamDestroy_v2, (kvk_cu_stream_t stream))                                                \
	X(stream_capturing, cuStreamIsCapturing, (kvk_cu_stream_t stream, int *p_status))                              \
	X(stream_wait, cuStreamWaitEvent, (kvk_cu_stream_t stream, kvk_cu_event_t event, unsigned flags))              \
	X(event_create, cuEventCreate, (kvk_cu_event_t * p_event, unsigned flags))                                     \
	X(event_destroy, cuEventDestroy_v2, (kvk_cu_event_t event))                                                    \
	X(event_record, cuEventRecord, (kvk_cu_event_t event, kvk_cu_stream_t stream))                                 \
	X(event_query, cuEventQuery, (kvk_cu_event_t event))                                                           \
	X(event_wait, cuEventSynchronize, (kvk_cu_event_t event))                                                      \
	X(event_elapsed, cuEventElapsedTime, (float *p_ms, kvk_cu_event_t start, kvk_cu_event_t end))                  \
	X(pointer_attribute, cuPointerGetAttribute, (void *p_value, int attribute, kvk_cu_ptr_t ptr))                  \
	X(peer_can, cuDeviceCanAccessPeer, (int *p_can, int device, int peer))                                         \
	X(peer_enable, cuCtxEnablePeerAccess, (kvk_cu_context_t peer, unsigned flags))                                 \
	X(error_name, cuGetErrorName, (int error, const char **p_name))

/* Of all copies of a batch from number first[k] on. */
typedef struct kvk_cu_copy_kind {
	int order; /* of reading the source; KVK_CU_COPY_IN_ORDER: the stream's */
	struct {
		int type, id;
	} source, destination; /* of memory that lies nowhere in particular: not used */
	unsigned flags;
} kvk_cu_copy_kind_t;
#define KVK_CU_COPY_IN_ORDER    1
#define KVK_CU_COPY_BESIDE_WORK 1u /* flag: rather not by the SMs */

/* Memory that has no address yet (CUmemGenericAllocationHandle), and what the driver is asked for of it. */
typedef uint64_t kvk_cu_memory_t;
typedef struct kvk_cu_location {
	int type; /* KVK_CU_LOCATION_DEVICE */
	int id;   /* ordinal of the device */
} kvk_cu_location_t;
#define KVK_CU_LOCATION_DEVICE 1
typedef struct kvk_cu_memory_prop {
	int type;         /* KVK_CU_MEMORY_PINNED */
	int handle_types; /* KVK_CU_HANDLE_FD: it can be exported as a descriptor */
	kvk_cu_location_t location;
	void *windows; /* NULL */
	struct {
		unsigned char compression, rdma;
		unsigned short usage;
		unsigned char reserved[4];
	} flags; /* 0 */
} kvk_cu_memory_prop_t;
#define KVK_CU_MEMORY_PINNED 1
#define KVK_CU_HANDLE_FD     1
/* Who may use a mapping. */
typedef struct kvk_cu_access {
	kvk_cu_location_t location;
	int flags; /* KVK_CU_ACCESS_READ_WRITE */
} kvk_cu_access_t;
#define KVK_CU_ACCESS_READ_WRITE 3
#define KVK_CU_GRAIN_BEST        1 /* of mem_grain: the one with which memory is fastest */

typedef struct kvk_cu_uuid {
	unsigned char bytes[16];
} kvk_cu_uuid_t;

/* A kernel as a node of a graph. The parameters are copied when it is given. */
typedef struct kvk_cu_kernel {
	kvk_cu_function_t function;
	unsigned grid[3], block[3], shared_bytes;
	void **params, **extra;
	void *kernel, *context; /* NULL: the function says */
} kvk_cu_kernel_t;

/* Those that a driver may lack: NULL then. */
#define KVK_CUDA_OPTIONAL_OPS(X)                                                                                       \
	X(copy_batch, cuMemcpyBatchAsync_v2,                                                                           \
	  (kvk_cu_ptr_t * dst, kvk_cu_ptr_t * src, size_t * bytes, size_t count, kvk_cu_copy_kind_t * kinds,           \
	   size_t * first, size_t kind_count, kvk_cu_stream_t stream)) /* 13.0; of no order among themselves */        \
	X(graph_create, cuGraphCreate, (kvk_cu_graph_t * p_graph, unsigned flags))                                     \
	X(graph_destroy, cuGraphDestroy, (kvk_cu_graph_t graph))                                                       \
	X(graph_add, cuGraphAddKernelNode_v2,                                                                          \
	  (kvk_cu_node_t * p_node, kvk_cu_graph_t graph, const kvk_cu_node_t *after, size_t after_count,               \
	   const kvk_cu_kernel_t *kernel)) /* 12.0 */                                                                  \
	X(graph_exec, cuGraphInstantiateWithFlags,                                                                     \
	  (kvk_cu_exec_t * p_exec, kvk_cu_graph_t graph, unsigned long long flags))                                    \
	X(graph_change, cuGraphExecKernelNodeSetParams_v2,                                                             \
	  (kvk_cu_exec_t exec, kvk_cu_node_t node, const kvk_cu_kernel_t *kernel)) /* of launches to come */           \
	X(graph_launch, cuGraphLaunch, (kvk_cu_exec_t exec, kvk_cu_stream_t stream))                                   \
	X(graph_drop, cuGraphExecDestroy, (kvk_cu_exec_t exec))                                                        \
	X(device_uuid, cuDeviceGetUuid_v2, (kvk_cu_uuid_t * p_uuid, int device)) /* 11.4 */                            \
	X(mem_info, cuMemGetInfo_v2, (size_t * p_free, size_t * p_bytes))                                              \
	X(mem_set, cuMemsetD8_v2, (kvk_cu_ptr_t at, unsigned char byte, size_t bytes)) /* does not wait for its end */ \
	X(context_wait, cuCtxSynchronize, (void))                                                                      \
	/* Memory apart from its addresses: 10.2. */                                                                   \
	X(mem_create, cuMemCreate,                                                                                     \
	  (kvk_cu_memory_t * p_memory, size_t bytes, const kvk_cu_memory_prop_t *prop, unsigned long long flags))      \
	X(mem_release, cuMemRelease, (kvk_cu_memory_t memory)) /* mappings and exports keep it */                      \
	X(mem_export, cuMemExportToShareableHandle,                                                                    \
	  (void *p_fd, kvk_cu_memory_t memory, int handle_type, unsigned long long flags))                             \
	X(mem_import, cuMemImportFromShareableHandle,                                                                  \
	  (kvk_cu_memory_t * p_memory, void *fd, int handle_type)) /* the descriptor stays the caller's */             \
	X(mem_reserve, cuMemAddressReserve,                                                                            \
	  (kvk_cu_ptr_t * p_at, size_t bytes, size_t alignment, kvk_cu_ptr_t wanted, unsigned long long flags))        \
	X(mem_unreserve, cuMemAddressFree, (kvk_cu_ptr_t at, size_t bytes))                                            \
	X(mem_map, cuMemMap,                                                                                           \
	  (kvk_cu_ptr_t at, size_t bytes, size_t offset, kvk_cu_memory_t memory, unsigned long long flags))            \
	X(mem_unmap, cuMemUnmap, (kvk_cu_ptr_t at, size_t bytes))                                                      \
	X(mem_access, cuMemSetAccess, (kvk_cu_ptr_t at, size_t bytes, const kvk_cu_access_t *access, size_t count))    \
	X(mem_grain, cuMemGetAllocationGranularity, (size_t * p_bytes, const kvk_cu_memory_prop_t *prop, int which))

typedef struct kvk_cuda_ops {
#define KVK_CUDA_MEMBER(member, symbol, arguments) int(*member) arguments;
	KVK_CUDA_OPS(KVK_CUDA_MEMBER)
	KVK_CUDA_OPTIONAL_OPS(KVK_CUDA_MEMBER)
#undef KVK_CUDA_MEMBER
} kvk_cuda_ops_t;

/* The machine's driver, loaded once in a process and kept. NULL: there is none, or it is too old; *p_why (may be NULL)
 * is a sentence that stays valid. Any thread. */
const kvk_cuda_ops_t *kvk_cuda_load(const char **p_why);

#endif
