/* GPUs by the CUDA driver (kvk/device.h). */
#include "gpu/source.h"

#include "kvk/device.h"
#include "kvk/gpu.h"

#include <stdio.h>

#define DEVICES 64u

static const kvk_cuda_ops_t *load_driver(char *why, size_t cap)
{
	const char *reason = NULL;
	const kvk_cuda_ops_t *cuda = kvk_cuda_load(&reason);

	if (!cuda) {
		snprintf(why, cap, "%s", reason ? reason : "no CUDA driver");
	}

	return cuda;
}

static kv_status_t alloc_cuda(void *device, uint64_t bytes, int *p_fd)
{
	return kvk_device_alloc(device, bytes, p_fd);
}

kv_status_t kvd_gpu_open_cuda(const char *uuid, kvd_gpu_source_t *source, char *why, size_t cap)
{
	const kvk_cuda_ops_t *cuda = load_driver(why, cap);
	kvk_device_t *device = NULL;
	kv_status_t status = cuda ? kvk_device_open(cuda, uuid, &device) : KV_ERR_UNSUPPORTED;

	if (cuda && status != KV_OK) {
		snprintf(why, cap, "%s", kvk_gpu_last_error());
	}
	if (status == KV_OK) {
		*source = (kvd_gpu_source_t){.alloc = alloc_cuda, .device = device, .why = kvk_gpu_last_error};
	}

	return status;
}

kv_status_t kvd_gpu_list_cuda(kvd_gpu_message_t *out, uint32_t cap, uint32_t *p_count, char *why, size_t why_cap)
{
	static kvk_device_info_t devices[DEVICES];
	const kvk_cuda_ops_t *cuda = load_driver(why, why_cap);
	uint32_t count = 0, set = 0;
	kv_status_t status = cuda ? kvk_device_list(cuda, devices, DEVICES, &count) : KV_ERR_UNSUPPORTED;

	if (status != KV_OK) {
		if (cuda) {
			snprintf(why, why_cap, "%s", kvk_gpu_last_error());
		}
		return status;
	}
	for (uint32_t i = 0; i < count && i < DEVICES && set < cap; i++) {
		if (devices[i].uuid[0] != '\0') { /* without one nothing can name it */
			kvd_gpu_message_t *m = &out[set++];

			*m = (kvd_gpu_message_t){
				.verb = KVD_GPU_DEVICE, .bytes = devices[i].bytes, .free_bytes = devices[i].free_bytes};
			snprintf(m->uuid, sizeof m->uuid, "%.47s", devices[i].uuid);
			snprintf(m->text, sizeof m->text, "%.95s", devices[i].name);
		}
	}
	*p_count = set;

	return KV_OK;
}
