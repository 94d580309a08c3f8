/* Memory of a device gets an address and loses it. */
#include "vmm.h"

#include "context.h"

#include <stdio.h>

#define OF(member) offsetof(kvk_cuda_ops_t, member)

kv_status_t kvk_vmm_check(const kvk_cuda_ops_t *cuda)
{
	static const size_t members[] = {OF(mem_reserve), OF(mem_unreserve), OF(mem_map),    OF(mem_unmap),
					 OF(mem_access),  OF(mem_import),    OF(mem_release)};

	return kvk_cuda_require(cuda, members, KV_COUNT_OF(members));
}

kv_status_t kvk_vmm_map(const kvk_cuda_ops_t *cuda, kvk_cu_memory_t memory, size_t bytes, int ordinal,
			kvk_cu_ptr_t *p_at)
{
	/* The device that uses the memory, which need not be the one that it lies in. */
	const kvk_cu_access_t access = {.location = {.type = KVK_CU_LOCATION_DEVICE, .id = ordinal},
					.flags = KVK_CU_ACCESS_READ_WRITE};
	kvk_cu_ptr_t at = 0;
	kv_status_t status = KVK_CUDA_CALL(cuda, mem_reserve, &at, bytes, 0, 0, 0);

	if (status != KV_OK) {
		return status;
	}
	status = KVK_CUDA_CALL(cuda, mem_map, at, bytes, 0, memory, 0);
	if (status != KV_OK) {
		goto err_address;
	}
	status = KVK_CUDA_CALL(cuda, mem_access, at, bytes, &access, 1);
	if (status != KV_OK) {
		goto err_mapping;
	}
	*p_at = at;

	return KV_OK;

err_mapping:
	cuda->mem_unmap(at, bytes);
err_address:
	cuda->mem_unreserve(at, bytes);

	return status;
}

kv_status_t kvk_vmm_unmap(const kvk_cuda_ops_t *cuda, kvk_cu_ptr_t at, size_t bytes)
{
	const kv_status_t status = KVK_CUDA_CALL(cuda, mem_unmap, at, bytes);

	/* An address whose memory is still mapped is refused here, too, and stays reserved. */
	return KVK_CUDA_CALL(cuda, mem_unreserve, at, bytes) == KV_OK ? status : KV_ERR_IO;
}

void kvk_uuid_format(const kvk_cuda_ops_t *cuda, int device, char text[KVK_UUID_TEXT])
{
	static const size_t dash[] = {4, 6, 8, 10};
	kvk_cu_uuid_t uuid;
	size_t at, group = 0;

	text[0] = '\0';
	if (!cuda->device_uuid || cuda->device_uuid(&uuid, device) != 0) {
		return;
	}
	at = (size_t)snprintf(text, KVK_UUID_TEXT, "GPU-");
	for (size_t i = 0; i < sizeof uuid.bytes; i++) {
		if (group < KV_COUNT_OF(dash) && i == dash[group]) {
			text[at++] = '-';
			group++;
		}
		at += (size_t)snprintf(text + at, KVK_UUID_TEXT - at, "%02x", uuid.bytes[i]);
	}
}
