/* GPUs as devices: kernels, streams and events; ranks may share one. */
#include "bf16/pass.h"

#include "kvk/compute.h"
#include "kvk/device.h"
#include "kvk/ep_gpu.h"
#include "kvk/ep_group.h"

#include <stdlib.h>
#include <unistd.h>

#define TRANSPORT_SMS 8u
#define COPIES_SMS    2u /* copy engines move the bytes: these pack, index and wait */

/* The memory of one rank, as one GPU reaches it. */
typedef struct heap {
	void *mapped;           /* of a GPU; NULL: host memory */
	kvk_ep_memory_t memory; /* registered with the GPU */
	kvk_cu_ptr_t address;
} heap_t;

typedef struct gpus {
	kve_devices_t devices; /* first */
	kve_devices_config_t config;
	uint32_t count;
	kvk_gpu_t *of[KVK_EP_MAX_RANKS];
	heap_t heaps[KVK_EP_MAX_RANKS][KVK_EP_MAX_RANKS]; /* [rank][GPU] */
} gpus_t;

typedef struct gpu {
	kve_device_t device; /* first */
	gpus_t *gpus;
	uint32_t number; /* of the GPU */
	kvk_gpu_t *kvk;
	kvk_cu_event_t events[KVE_EVENT_APART + 1];
	struct {
		kvk_cu_event_t event;
	} * marks;
	uint32_t n_marks;
	kvk_ep_gpu_t *ep;
} gpu_t;

static kvk_gpu_t *kvk_of(kve_device_t *device)
{
	return ((gpu_t *)device)->kvk;
}

static kv_status_t alloc(kve_device_t *device, size_t bytes, void **p_at)
{
	return kvk_gpu_alloc(kvk_of(device), bytes, p_at);
}

static void free_memory(kve_device_t *device, void *at)
{
	kvk_gpu_free(kvk_of(device), at);
}

static kv_status_t alloc_host(kve_device_t *device, size_t bytes, void **p_at)
{
	return kvk_gpu_alloc_host(kvk_of(device), bytes, p_at);
}

static void free_host(kve_device_t *device, void *at)
{
	kvk_gpu_free_host(kvk_of(device), at);
}

static kv_status_t copy(kve_device_t *device, void *to, const void *from, size_t bytes)
{
	return kvk_gpu_copy_bytes(kvk_of(device), to, from, bytes, device->streams[KVE_STREAM_COMPUTE]);
}

static kv_status_t record(kve_device_t *device, uint32_t event, kve_stream_t stream)
{
	return kvk_gpu_event_record(kvk_of(device), ((gpu_t *)device)->events[event], device->streams[stream]);
}

static kv_status_t wait(kve_device_t *device, uint32_t event, kve_stream_t stream)
{
	return kvk_gpu_event_await(kvk_of(device), ((gpu_t *)device)->events[event], device->streams[stream]);
}

static kv_status_t await_end(kve_device_t *device)
{
	return kvk_gpu_sync_stream(kvk_of(device), device->streams[KVE_STREAM_COMPUTE]);
}

/* ---- marks ----------------------------------------------------------------------------------- */

static void drop_marks(gpu_t *gpu)
{
	for (uint32_t i = 0; i < gpu->n_marks; i++) {
		kvk_gpu_event_destroy(gpu->kvk, gpu->marks[i].event);
	}
	free(gpu->marks);
	gpu->marks = NULL;
	gpu->n_marks = 0;
}

static kv_status_t reserve_marks(kve_device_t *device, uint32_t n)
{
	gpu_t *gpu = (gpu_t *)device;
	kv_status_t status = KV_OK;

	drop_marks(gpu);
	gpu->marks = calloc(n, sizeof *gpu->marks);
	if (!gpu->marks) {
		return KV_ERR_NOMEM;
	}
	for (gpu->n_marks = 0; gpu->n_marks < n && status == KV_OK; gpu->n_marks++) {
		status = kvk_gpu_event_create(gpu->kvk, 1, &gpu->marks[gpu->n_marks].event);
	}

	return status;
}

static kv_status_t mark(kve_device_t *device, uint32_t number, kve_stream_t stream)
{
	return kvk_gpu_event_record(kvk_of(device), ((gpu_t *)device)->marks[number].event, device->streams[stream]);
}

static kv_status_t elapsed(kve_device_t *device, uint32_t from, uint32_t to, uint64_t *p_ns)
{
	const gpu_t *gpu = (const gpu_t *)device;
	float ms = 0;
	const kv_status_t status = kvk_gpu_event_elapsed(gpu->kvk, gpu->marks[from].event, gpu->marks[to].event, &ms);

	*p_ns = ms > 0 ? (uint64_t)((double)ms * 1e6) : 0;

	return status;
}

/* ---- transport ------------------------------------------------------------------------------- */

static kv_status_t ep_open(kve_device_t *device, const kvk_ep_plan_t *plan, uint32_t rank)
{
	gpu_t *gpu = (gpu_t *)device;
	const gpus_t *gpus = gpu->gpus;
	kvk_cu_ptr_t heaps[KVK_EP_MAX_RANKS];
	const kvk_ep_gpu_config_t config = {.gpu = gpu->kvk,
					    .plan = plan,
					    .heaps = heaps,
					    .rank = rank,
					    .link = gpus->config.link,
					    .pace = gpus->config.pace,
					    .sms = gpus->config.transport_sms,
					    .compute = device->streams[KVE_STREAM_COMPUTE],
					    .timeout_us = (uint64_t)gpus->config.timeout_ms * 1000u};

	for (uint32_t r = 0; r < gpus->devices.ranks; r++) {
		heaps[r] = gpus->heaps[r][gpu->number].address;
	}

	return kvk_ep_gpu_open(&config, &gpu->ep);
}

static void ep_close(kve_device_t *device)
{
	gpu_t *gpu = (gpu_t *)device;

	kvk_ep_gpu_close(gpu->ep);
	gpu->ep = NULL;
}

static kv_status_t dispatch_send(kve_device_t *device, const kvk_ep_tokens_t *tokens, uint64_t *p_number)
{
	return kvk_ep_gpu_dispatch_send(((gpu_t *)device)->ep, tokens, device->streams[KVE_STREAM_TRANSPORT], p_number);
}

static kv_status_t dispatch_recv(kve_device_t *device, uint64_t number, kvk_ep_rows_t *p_rows)
{
	kvk_ep_gpu_rows_t rows;
	const kv_status_t status =
		kvk_ep_gpu_dispatch_recv(((gpu_t *)device)->ep, number, device->streams[KVE_STREAM_TRANSPORT], &rows);

	if (status == KV_OK) {
		*p_rows = (kvk_ep_rows_t){.first = (const uint32_t *)(uintptr_t)rows.first,
					  .record = (const uint32_t *)(uintptr_t)rows.record,
					  .rows = (const kvk_bf16_t *)(uintptr_t)rows.rows,
					  .own = (const kvk_bf16_t *)(uintptr_t)rows.own,
					  .own_first = rows.own_first};
	}

	return status;
}

static kv_status_t reduce(kve_device_t *device, uint64_t number, const kvk_bf16_t *outputs)
{
	return kvk_ep_gpu_reduce(((gpu_t *)device)->ep, number, (kvk_cu_ptr_t)(uintptr_t)outputs,
				 device->streams[KVE_STREAM_COMPUTE]);
}

static kv_status_t combine_send(kve_device_t *device, uint64_t number)
{
	return kvk_ep_gpu_combine_send(((gpu_t *)device)->ep, number, device->streams[KVE_STREAM_TRANSPORT]);
}

static kv_status_t combine_recv(kve_device_t *device, uint64_t number, kvk_bf16_t *out)
{
	return kvk_ep_gpu_combine_recv(((gpu_t *)device)->ep, number, (kvk_cu_ptr_t)(uintptr_t)out,
				       device->streams[KVE_STREAM_TRANSPORT]);
}

static kv_status_t ep_check(kve_device_t *device, uint32_t *p_lost, kvk_ep_stats_t *stats)
{
	gpu_t *gpu = (gpu_t *)device;
	kvk_ep_gpu_report_t report = {.lost = 0};
	const kv_status_t status = gpu->ep ? kvk_ep_gpu_check(gpu->ep, &report) : KV_OK;

	if (p_lost) {
		*p_lost = report.lost;
	}
	if (stats) {
		*stats = report.stats;
	}

	return status;
}

/* ---- memory that ranks share ----------------------------------------------------------------- */

static void close_heap(gpus_t *gpus, uint32_t rank, uint32_t gpu)
{
	heap_t *heap = &gpus->heaps[rank][gpu];

	if (heap->mapped) {
		kvk_gpu_unmap(gpus->of[gpu], heap->mapped);
	} else if (heap->memory.base) {
		kvk_gpu_unregister(gpus->of[gpu], heap->memory.base);
		kvk_ep_memory_unmap(&heap->memory);
	}
	*heap = (heap_t){.mapped = NULL};
}

static kv_status_t open_heap(gpus_t *gpus, int fd, size_t bytes, uint32_t gpu, heap_t *heap)
{
	kvk_gpu_t *kvk = gpus->of[gpu];
	kv_status_t status;

	if (gpus->config.link == KVK_EP_PEER) {
		status = kvk_gpu_map(kvk, fd, bytes, &heap->mapped);
		heap->address = (kvk_cu_ptr_t)(uintptr_t)heap->mapped;
		return status;
	}
	status = kvk_ep_memory_map(fd, bytes, &heap->memory);
	if (status == KV_OK) {
		status = kvk_gpu_register(kvk, heap->memory.base, heap->memory.bytes);
		if (status != KV_OK) {
			kvk_ep_memory_unmap(&heap->memory);
		}
	}

	return status == KV_OK ? kvk_gpu_address(kvk, heap->memory.base, bytes, &heap->address) : status;
}

/* Of a GPU, exported. *p_bytes: rounded up to what it takes. */
static kv_status_t export_memory(kvk_gpu_t *gpu, size_t *p_bytes, int *p_fd)
{
	kvk_device_t *device;
	kv_status_t status = kvk_device_open(kvk_cuda_load(NULL), kvk_gpu_uuid(gpu), &device);

	if (status == KV_OK) {
		const size_t grain = kvk_device_grain(device);

		*p_bytes = (*p_bytes + grain - 1) / grain * grain;
		status = kvk_device_alloc(device, *p_bytes, p_fd);
		kvk_device_close(device);
	}

	return status;
}

static kv_status_t share_memory(gpus_t *gpus, uint32_t rank, size_t bytes)
{
	kvk_ep_memory_t own = {.base = NULL};
	int fd = -1;
	kv_status_t status = gpus->config.link == KVK_EP_PEER ? export_memory(gpus->of[rank % gpus->count], &bytes, &fd)
							      : kvk_ep_memory_create(bytes, &own, &fd);

	kvk_ep_memory_unmap(&own); /* each GPU has a mapping, as in processes */
	for (uint32_t g = 0; g < gpus->count && status == KV_OK; g++) {
		status = open_heap(gpus, fd, bytes, g, &gpus->heaps[rank][g]);
	}
	if (fd >= 0) {
		close(fd);
	}

	return status;
}

static void close_heaps(gpus_t *gpus)
{
	for (uint32_t r = 0; r < gpus->devices.ranks; r++) {
		for (uint32_t g = 0; g < gpus->count; g++) {
			close_heap(gpus, r, g);
		}
	}
}

static kv_status_t open_heaps(kve_devices_t *devices, const kvk_ep_plan_t *plan)
{
	gpus_t *gpus = (gpus_t *)devices;
	kv_status_t status = KV_OK;

	close_heaps(gpus);
	for (uint32_t r = 0; r < devices->ranks && status == KV_OK; r++) {
		status = share_memory(gpus, r, plan->heap_bytes);
	}

	return status;
}

/* ---- open, close ----------------------------------------------------------------------------- */

static int get_ordinal(const kve_device_t *device)
{
	return (int)((const gpu_t *)device)->number;
}

static void close_gpu(kve_device_t *device)
{
	gpu_t *gpu = (gpu_t *)device;

	ep_close(device);
	drop_marks(gpu);
	for (kve_overlap_mode_t mode = KVE_OVERLAP_SEQ; mode <= KVE_OVERLAP_DBO; mode++) {
		kvk_nn_close(device->nn[mode]);
	}
	for (uint32_t e = 0; e <= KVE_EVENT_APART; e++) {
		kvk_gpu_event_destroy(gpu->kvk, gpu->events[e]);
	}
	free(gpu); /* streams are closed with the GPU */
}

static const kve_device_ops_t ops = {
	.alloc = alloc,
	.free = free_memory,
	.alloc_host = alloc_host,
	.free_host = free_host,
	.copy = copy,
	.record = record,
	.wait = wait,
	.sync = await_end,
	.reserve_marks = reserve_marks,
	.mark = mark,
	.elapsed = elapsed,
	.ep_open = ep_open,
	.ep_close = ep_close,
	.dispatch_send = dispatch_send,
	.dispatch_recv = dispatch_recv,
	.reduce = reduce,
	.combine_send = combine_send,
	.combine_recv = combine_recv,
	.ep_check = ep_check,
	.get_ordinal = get_ordinal,
	.close = close_gpu,
};

static void close_gpus(kve_devices_t *devices)
{
	gpus_t *gpus = (gpus_t *)devices;

	close_heaps(gpus);
	for (uint32_t g = 0; g < gpus->count; g++) {
		kvk_gpu_close(gpus->of[g]);
	}
	free(gpus);
}

/* SMs that kernels of compute may fill: those of a GPU are divided among its ranks, and transport that runs at the same
 * time has some of its own. */
static uint32_t compute_sms(const gpus_t *gpus, uint32_t number, kve_overlap_mode_t mode)
{
	const uint32_t ranks = gpus->devices.ranks, sharing = (ranks - number + gpus->count - 1) / gpus->count;
	const uint32_t all = kvk_gpu_sms(gpus->of[number]);
	const uint32_t left = mode == KVE_OVERLAP_DBO ? sharing * gpus->config.transport_sms : 0;

	return all > left + sharing ? (all - left) / sharing : 1;
}

static kv_status_t open_rank(gpus_t *gpus, uint32_t rank)
{
	gpu_t *gpu = calloc(1, sizeof *gpu);
	kv_status_t status = KV_OK;

	if (!gpu) {
		return KV_ERR_NOMEM;
	}
	gpu->device.ops = &ops;
	gpu->gpus = gpus;
	gpu->number = rank % gpus->count;
	gpu->kvk = gpus->of[gpu->number];
	gpus->devices.of[rank] = &gpu->device;
	/* Transport first: its few blocks get the SMs that become free. */
	for (kve_stream_t s = KVE_STREAM_COMPUTE; s < KVE_STREAMS && status == KV_OK; s++) {
		status = kvk_gpu_create_stream(gpu->kvk, s == KVE_STREAM_TRANSPORT, &gpu->device.streams[s]);
	}
	for (uint32_t e = 0; e <= KVE_EVENT_APART && status == KV_OK; e++) {
		status = kvk_gpu_event_create(gpu->kvk, 0, &gpu->events[e]);
	}

	for (kve_overlap_mode_t mode = KVE_OVERLAP_SEQ; mode <= KVE_OVERLAP_DBO && status == KV_OK; mode++) {
		status = kvk_nn_gpu_open(gpu->kvk, compute_sms(gpus, gpu->number, mode), &gpu->device.nn[mode]);
	}

	return status;
}

static kv_status_t open_gpus(gpus_t *gpus)
{
	kvk_gpu_config_t config = {.cuda = kvk_cuda_load(NULL)};
	kv_status_t status = KV_OK;

	for (uint32_t g = 0; g < gpus->count && status == KV_OK; g++) {
		config.device = (int)g;
		status = kvk_gpu_open(&config, &gpus->of[g]);
	}
	for (uint32_t r = 0; r < gpus->devices.ranks && status == KV_OK; r++) {
		status = open_rank(gpus, r);
	}

	return status;
}

kv_status_t kve_devices_open_gpus(const kve_devices_config_t *config, kve_devices_t **p_devices)
{
	gpus_t *gpus = calloc(1, sizeof *gpus);
	kv_status_t status;

	if (!gpus) {
		return KV_ERR_NOMEM;
	}
	/* Streams that share a queue of the device wait for each other: a rank that waits for another one there would
	 * wait for ever. The driver reads it when it makes a context. */
	(void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
	gpus->config = *config;
	if (!config->transport_sms) {
		gpus->config.transport_sms = config->link == KVK_EP_HOST_COPIES ? COPIES_SMS : TRANSPORT_SMS;
	}
	gpus->count = config->gpus ? config->gpus : 1;
	gpus->count = gpus->count < config->ranks ? gpus->count : config->ranks;
	gpus->devices.ranks = config->ranks;
	gpus->devices.backend = &kve_backend_bf16;
	gpus->devices.open_heaps = open_heaps;
	gpus->devices.close = close_gpus;
	status = open_gpus(gpus);
	if (status != KV_OK) {
		kve_devices_close(&gpus->devices);
		return status;
	}
	*p_devices = &gpus->devices;

	return KV_OK;
}
