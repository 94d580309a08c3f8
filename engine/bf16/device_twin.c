/* The CPU as a device: the twins, at once. */
#include "bf16/pass.h"

#include <stdlib.h>
#include <string.h>

typedef struct twin {
	kve_device_t device; /* first */
	const kve_devices_t *devices;
	uint64_t timeout_ns;
	kvk_ep_rank_t *ep;
	uint64_t *marks;
	const kvk_bf16_t *outputs[KVK_EP_MAX_IN_FLIGHT]; /* of numbers whose reduction comes with the send */
} twin_t;

typedef struct twins {
	kve_devices_t devices; /* first */
	void *heaps[KVK_EP_MAX_RANKS];
	kvk_ep_link_t link;
	kvk_ep_link_kind_t kind;
} twins_t;

#define ALIGNMENT 256u

static kv_status_t alloc(kve_device_t *device, size_t bytes, void **p_at)
{
	const size_t whole = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;

	(void)device;
	*p_at = aligned_alloc(ALIGNMENT, whole ? whole : ALIGNMENT);
	if (!*p_at) {
		return KV_ERR_NOMEM;
	}
	memset(*p_at, 0, whole);

	return KV_OK;
}

static void free_memory(kve_device_t *device, void *at)
{
	(void)device;
	free(at);
}

static kv_status_t copy(kve_device_t *device, void *to, const void *from, size_t bytes)
{
	(void)device;
	memcpy(to, from, bytes);

	return KV_OK;
}

static kv_status_t pass_event(kve_device_t *device, uint32_t event, kve_stream_t stream)
{
	(void)device, (void)event, (void)stream;

	return KV_OK;
}

static kv_status_t await_end(kve_device_t *device)
{
	(void)device;

	return KV_OK;
}

static kv_status_t reserve_marks(kve_device_t *device, uint32_t n)
{
	twin_t *twin = (twin_t *)device;

	free(twin->marks);
	twin->marks = calloc(n, sizeof *twin->marks);

	return twin->marks ? KV_OK : KV_ERR_NOMEM;
}

static kv_status_t mark(kve_device_t *device, uint32_t number, kve_stream_t stream)
{
	(void)stream;
	((twin_t *)device)->marks[number] = kv_now_ns(&kv_env_posix);

	return KV_OK;
}

static kv_status_t elapsed(kve_device_t *device, uint32_t from, uint32_t to, uint64_t *p_ns)
{
	const twin_t *twin = (const twin_t *)device;

	*p_ns = twin->marks[to] - twin->marks[from];

	return KV_OK;
}

/* ---- transport ------------------------------------------------------------------------------- */

static kv_status_t ep_open(kve_device_t *device, const kvk_ep_plan_t *plan, uint32_t rank)
{
	twin_t *twin = (twin_t *)device;
	const twins_t *twins = (const twins_t *)twin->devices;

	return kvk_ep_open(&kv_env_posix, plan, rank, twins->heaps[rank], &twins->link, &twin->ep);
}

static void ep_close(kve_device_t *device)
{
	twin_t *twin = (twin_t *)device;

	kvk_ep_close(twin->ep);
	twin->ep = NULL;
}

static uint64_t deadline_of(const twin_t *twin)
{
	return kv_now_ns(&kv_env_posix) + twin->timeout_ns;
}

static kv_status_t dispatch_send(kve_device_t *device, const kvk_ep_tokens_t *tokens, uint64_t *p_number)
{
	return kvk_ep_dispatch_send(((twin_t *)device)->ep, tokens, p_number);
}

static kv_status_t dispatch_recv(kve_device_t *device, uint64_t number, kvk_ep_rows_t *p_rows)
{
	twin_t *twin = (twin_t *)device;

	return kvk_ep_dispatch_recv(twin->ep, number, deadline_of(twin), p_rows);
}

static kv_status_t reduce(kve_device_t *device, uint64_t number, const kvk_bf16_t *outputs)
{
	((twin_t *)device)->outputs[number % KVK_EP_MAX_IN_FLIGHT] = outputs;

	return KV_OK;
}

static kv_status_t combine_send(kve_device_t *device, uint64_t number)
{
	twin_t *twin = (twin_t *)device;

	return kvk_ep_combine_send(twin->ep, number, twin->outputs[number % KVK_EP_MAX_IN_FLIGHT]);
}

static kv_status_t combine_recv(kve_device_t *device, uint64_t number, kvk_bf16_t *out)
{
	twin_t *twin = (twin_t *)device;

	return kvk_ep_combine_recv(twin->ep, number, deadline_of(twin), out);
}

static kv_status_t ep_check(kve_device_t *device, uint32_t *p_lost, kvk_ep_stats_t *stats)
{
	const kvk_ep_rank_t *ep = ((twin_t *)device)->ep;
	const uint32_t lost = ep ? kvk_ep_lost_ranks(ep) : 0;

	if (p_lost) {
		*p_lost = lost;
	}
	if (stats && ep) {
		*stats = kvk_ep_get_stats(ep);
	}

	return lost ? KV_ERR_TIMEOUT : KV_OK;
}

/* ---- open, close ----------------------------------------------------------------------------- */

static int get_ordinal(const kve_device_t *device)
{
	(void)device;

	return -1;
}

static void close_twin(kve_device_t *device)
{
	ep_close(device);
	kvk_nn_close(device->nn[KVE_OVERLAP_SEQ]); /* of both modes */
	free(((twin_t *)device)->marks);
	free(device);
}

static const kve_device_ops_t ops = {
	.alloc = alloc,
	.free = free_memory,
	.alloc_host = alloc,
	.free_host = free_memory,
	.copy = copy,
	.record = pass_event,
	.wait = pass_event,
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
	.close = close_twin,
};

static void free_heaps(twins_t *twins)
{
	for (uint32_t r = 0; r < twins->devices.ranks; r++) {
		free(twins->heaps[r]);
		twins->heaps[r] = NULL;
	}
}

static kv_status_t open_heaps(kve_devices_t *devices, const kvk_ep_plan_t *plan)
{
	twins_t *twins = (twins_t *)devices;
	kv_status_t status = KV_OK;

	free_heaps(twins);
	for (uint32_t r = 0; r < devices->ranks && status == KV_OK; r++) {
		status = alloc(devices->of[r], plan->heap_bytes, &twins->heaps[r]);
	}
	if (status == KV_OK) {
		twins->link = kvk_ep_link_of(twins->kind, twins->heaps);
	}

	return status;
}

static void close_twins(kve_devices_t *devices)
{
	free_heaps((twins_t *)devices);
	free(devices);
}

static kv_status_t open_twin(kve_devices_t *devices, uint32_t timeout_ms, kve_device_t **p_device)
{
	twin_t *twin = calloc(1, sizeof *twin);
	kv_status_t status;

	if (!twin) {
		return KV_ERR_NOMEM;
	}
	twin->device.ops = &ops;
	twin->devices = devices;
	twin->timeout_ns = (uint64_t)(timeout_ms ? timeout_ms : 10000) * 1000000u;
	*p_device = &twin->device;
	status = kvk_nn_twin_open(&twin->device.nn[KVE_OVERLAP_SEQ]);
	twin->device.nn[KVE_OVERLAP_DBO] = twin->device.nn[KVE_OVERLAP_SEQ];

	return status;
}

kv_status_t kve_devices_open_twins(const kve_devices_config_t *config, kve_devices_t **p_devices)
{
	twins_t *twins = calloc(1, sizeof *twins);
	kv_status_t status = KV_OK;

	if (!twins) {
		return KV_ERR_NOMEM;
	}
	twins->devices.ranks = config->ranks;
	twins->devices.backend = &kve_backend_bf16;
	twins->devices.open_heaps = open_heaps;
	twins->devices.close = close_twins;
	twins->kind = config->link;
	for (uint32_t r = 0; r < config->ranks && status == KV_OK; r++) {
		status = open_twin(&twins->devices, config->timeout_ms, &twins->devices.of[r]);
	}
	if (status != KV_OK) {
		kve_devices_close(&twins->devices);
		return status;
	}
	*p_devices = &twins->devices;

	return KV_OK;
}

void kve_devices_close(kve_devices_t *devices)
{
	if (!devices) {
		return;
	}
	for (uint32_t r = 0; r < devices->ranks; r++) {
		if (devices->of[r]) {
			devices->of[r]->ops->close(devices->of[r]);
		}
	}
	devices->close(devices);
}
