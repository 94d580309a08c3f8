/* Memory of a device for other processes: allocated, zeroed, exported, and let go. */
#include "kvk/device.h"

#include "cuda/driver/context.h"
#include "cuda/driver/memory.h"

#include "kv/env.h"

#include <fcntl.h>
#include <unistd.h>

#define OF(member)             offsetof(kvk_cuda_ops_t, member)
#define ATTRIBUTE_VMM          102
#define ATTRIBUTE_EXPORTS_FILE 103

struct kvk_device {
	const kvk_cuda_ops_t *cuda;
	int device; /* the driver's handle */
	int ordinal;
	kvk_cu_context_t context;
	size_t grain;
};

/* ---- devices --------------------------------------------------------------------------------- */

static kv_status_t count_devices(const kvk_cuda_ops_t *cuda, int *p_count)
{
	if (!cuda) {
		return kvk_gpu_set_error(KV_ERR_UNSUPPORTED, "there is no CUDA driver on this machine");
	}
	if (KVK_CUDA_CALL(cuda, init, 0) != KV_OK) {
		return KV_ERR_UNSUPPORTED;
	}

	return KVK_CUDA_CALL(cuda, device_count, p_count) == KV_OK ? KV_OK : KV_ERR_IO;
}

/* Only a context knows what is free. */
static void ask_memory(const kvk_cuda_ops_t *cuda, int device, kvk_device_info_t *info)
{
	kvk_cu_context_t context, popped;
	size_t bytes = 0, free_bytes = 0;

	if (!cuda->mem_info || KVK_CUDA_CALL(cuda, context_retain, &context, device) != KV_OK) {
		return;
	}
	if (KVK_CUDA_CALL(cuda, context_push, context) == KV_OK) {
		if (KVK_CUDA_CALL(cuda, mem_info, &free_bytes, &bytes) == KV_OK) {
			info->bytes = bytes;
			info->free_bytes = free_bytes;
		}
		cuda->context_pop(&popped);
	}
	cuda->context_release(device);
}

kv_status_t kvk_device_list(const kvk_cuda_ops_t *cuda, kvk_device_info_t *out, uint32_t cap, uint32_t *p_count)
{
	int count = 0;
	const kv_status_t status = count_devices(cuda, &count);

	if (status != KV_OK) {
		return status;
	}
	for (int i = 0; i < count && (uint32_t)i < cap; i++) {
		kvk_device_info_t *info = &out[i];
		int device;

		*info = (kvk_device_info_t){0};
		if (KVK_CUDA_CALL(cuda, device_get, &device, i) != KV_OK ||
		    KVK_CUDA_CALL(cuda, device_name, info->name, (int)sizeof info->name, device) != KV_OK) {
			return KV_ERR_IO;
		}
		info->name[sizeof info->name - 1] = '\0';
		kvk_cuda_format_uuid(cuda, device, info->uuid);
		ask_memory(cuda, device, info);
	}
	*p_count = (uint32_t)count;

	return KV_OK;
}

static kv_status_t find_device(const kvk_cuda_ops_t *cuda, const char *uuid, kvk_device_t *device)
{
	int count = 0;
	const kv_status_t status = count_devices(cuda, &count);

	if (status != KV_OK) {
		return status;
	}
	for (int i = 0; i < count; i++) {
		char found[KVK_GPU_UUID_BYTES];

		if (KVK_CUDA_CALL(cuda, device_get, &device->device, i) != KV_OK) {
			return KV_ERR_IO;
		}
		kvk_cuda_format_uuid(cuda, device->device, found);
		if (found[0] && strcmp(found, uuid) == 0) {
			device->ordinal = i;
			return KV_OK;
		}
	}

	return kvk_gpu_set_error(KV_ERR_NOT_FOUND, "there is no device %s: the driver counts %d", uuid, count);
}

/* ---- open and close -------------------------------------------------------------------------- */

static kvk_cu_memory_prop_t memory_prop(const kvk_device_t *device)
{
	return (kvk_cu_memory_prop_t){.type = KVK_CU_MEMORY_PINNED,
				      .handle_types = KVK_CU_HANDLE_FD,
				      .location = {.type = KVK_CU_LOCATION_DEVICE, .id = device->ordinal}};
}

static kv_status_t check_export(const kvk_device_t *device)
{
	static const size_t members[] = {OF(mem_create), OF(mem_export), OF(mem_grain), OF(mem_set), OF(context_wait)};
	static const int attributes[] = {ATTRIBUTE_VMM, ATTRIBUTE_EXPORTS_FILE};
	kv_status_t status = kvk_cuda_check_vmm(device->cuda);

	if (status == KV_OK) {
		status = kvk_cuda_require(device->cuda, members, KV_COUNT_OF(members));
	}
	for (size_t i = 0; i < KV_COUNT_OF(attributes) && status == KV_OK; i++) {
		int can = 0;

		if (KVK_CUDA_CALL(device->cuda, device_attribute, &can, attributes[i], device->device) != KV_OK) {
			status = KV_ERR_IO;
		} else if (!can) {
			status = kvk_gpu_set_error(KV_ERR_UNSUPPORTED, "device %d cannot export its memory",
						   device->ordinal);
		}
	}

	return status;
}

static kv_status_t ask_grain(kvk_device_t *device)
{
	const kvk_cu_memory_prop_t prop = memory_prop(device);
	const kv_status_t status = KVK_CUDA_CALL(device->cuda, mem_grain, &device->grain, &prop, KVK_CU_GRAIN_BEST);

	if (status == KV_OK && device->grain == 0) {
		return kvk_gpu_set_error(KV_ERR_IO, "the driver allocates memory in pieces of 0 bytes");
	}

	return status;
}

kv_status_t kvk_device_open(const kvk_cuda_ops_t *cuda, const char *uuid, kvk_device_t **p_device)
{
	kvk_device_t *device = kv_alloc(&kv_env_posix, sizeof *device);
	kv_status_t status;

	if (!device) {
		return kvk_gpu_set_error(KV_ERR_NOMEM, "out of memory");
	}
	device->cuda = cuda;
	status = find_device(cuda, uuid, device);
	if (status == KV_OK) {
		status = check_export(device);
	}
	if (status == KV_OK) {
		status = ask_grain(device);
	}
	if (status == KV_OK) {
		status = KVK_CUDA_CALL(cuda, context_retain, &device->context, device->device);
	}
	if (status != KV_OK) {
		kv_free(&kv_env_posix, device);
		return status;
	}
	*p_device = device;

	return KV_OK;
}

size_t kvk_device_grain(const kvk_device_t *device)
{
	return device->grain;
}

void kvk_device_close(kvk_device_t *device)
{
	if (device) {
		device->cuda->context_release(device->device);
		kv_free(&kv_env_posix, device);
	}
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* What others have left in this memory does not show through. The driver sets bytes behind the caller's back: the
 * memory is zero only after the wait. */
static kv_status_t zero_memory(const kvk_device_t *device, kvk_cu_memory_t memory, size_t bytes)
{
	const kvk_cuda_ops_t *cuda = device->cuda;
	kvk_cu_ptr_t at = 0;
	kv_status_t status = kvk_cuda_map(cuda, memory, bytes, device->ordinal, &at);
	kv_status_t unmapped;

	if (status != KV_OK) {
		return status;
	}
	status = KVK_CUDA_CALL(cuda, mem_set, at, 0, bytes);
	if (status == KV_OK) {
		status = kvk_cuda_check_result(cuda, OF(context_wait), cuda->context_wait());
	}
	unmapped = kvk_cuda_unmap(cuda, at, bytes);

	return status == KV_OK ? unmapped : status;
}

static kv_status_t export_memory(const kvk_device_t *device, kvk_cu_memory_t memory, int *p_fd)
{
	int fd = -1;
	const kv_status_t status = KVK_CUDA_CALL(device->cuda, mem_export, &fd, memory, KVK_CU_HANDLE_FD, 0);

	if (status != KV_OK) {
		return status;
	}
	if (fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
		close(fd);
		return kvk_gpu_set_error(KV_ERR_IO, "the descriptor of a device's memory cannot be marked");
	}
	*p_fd = fd;

	return KV_OK;
}

/* In the context. */
static kv_status_t alloc_memory(const kvk_device_t *device, size_t bytes, int *p_fd)
{
	const kvk_cu_memory_prop_t prop = memory_prop(device);
	kvk_cu_memory_t memory = 0;
	int fd = -1;
	kv_status_t status = KVK_CUDA_CALL(device->cuda, mem_create, &memory, bytes, &prop, 0);

	if (status != KV_OK) {
		return status;
	}
	status = zero_memory(device, memory, bytes);
	if (status == KV_OK) {
		status = export_memory(device, memory, &fd);
	}
	/* A handle that stays would keep the memory for as long as this process lives. */
	if (KVK_CUDA_CALL(device->cuda, mem_release, memory) != KV_OK) {
		status = status == KV_OK ? KV_ERR_IO : status;
	}
	if (status == KV_OK) {
		*p_fd = fd;
	} else if (fd >= 0) {
		close(fd);
	}

	return status;
}

kv_status_t kvk_device_alloc(kvk_device_t *device, size_t bytes, int *p_fd)
{
	kvk_cu_context_t popped;
	kv_status_t status;

	if (bytes == 0 || bytes % device->grain != 0) {
		return kvk_gpu_set_error(KV_ERR_ARG, "%zu bytes are no multiple of the device's %zu", bytes,
					 device->grain);
	}
	status = KVK_CUDA_CALL(device->cuda, context_push, device->context);
	if (status == KV_OK) {
		status = alloc_memory(device, bytes, p_fd);
		device->cuda->context_pop(&popped);
	}

	return status == KV_ERR_NOMEM ? KV_ERR_FULL : status;
}
